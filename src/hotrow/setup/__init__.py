"""What is decided before the first step of a run, once: devices, shards, and where rows lie."""
