"""Raw logs, packed datasets and their loaders."""
