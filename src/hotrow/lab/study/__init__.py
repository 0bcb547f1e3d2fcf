"""Studies: sweeps of short trainings over any field of a config, described in YAML."""
