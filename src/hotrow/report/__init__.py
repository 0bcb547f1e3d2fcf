"""The report of runs: one HTML page that says how a run went, made of what its folder holds."""
