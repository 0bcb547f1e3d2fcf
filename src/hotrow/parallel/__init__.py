"""Many processes that train one model: who they are, what they send each other, tables whose rows they share."""
