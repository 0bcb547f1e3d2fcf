"""Raw logs, packed datasets and the loaders over them."""
