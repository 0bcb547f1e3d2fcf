"""Other people's stores under the same memory limit as hotrow: mapped files and RocksDB, one process a side."""
