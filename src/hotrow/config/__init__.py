"""The one YAML schema of a run, how it is read, and the recipe for data of a given size."""
