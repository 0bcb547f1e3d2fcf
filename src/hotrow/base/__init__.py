"""The ground floor: atomic files, sealed records, facts about this machine, and progress."""
