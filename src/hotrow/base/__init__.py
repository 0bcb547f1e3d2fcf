"""What everything stands on: files that are whole or absent, sealed records, this machine, progress."""
