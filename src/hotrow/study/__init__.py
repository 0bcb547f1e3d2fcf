"""`hotrow bench` and `hotrow study`: our kernels against torch's, on one shape each and swept over many."""
