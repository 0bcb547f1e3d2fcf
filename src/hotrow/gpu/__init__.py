"""The embedding ops on device memory: Triton kernels (kernels.py), their host side (ops.py), row moves (moves.py)."""
