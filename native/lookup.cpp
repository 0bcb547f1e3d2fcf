// lookup
