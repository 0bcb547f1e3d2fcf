"""The embedding and dense kernels: ops.py calls the native module, reference.py says what each computes, types.py has
the values that they share."""
