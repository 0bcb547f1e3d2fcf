"""The embedding and dense kernels: ops.py calls the native module, reference.py says what each computes."""
