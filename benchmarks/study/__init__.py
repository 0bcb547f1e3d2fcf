"""Studies: sweeps of short real trainings over fields of a recipe, and comparisons with other stores and kernels."""
