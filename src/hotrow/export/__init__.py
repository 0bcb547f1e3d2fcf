"""Weights, vocabularies and the model's own file, for plain PyTorch; and the scorer that reads them."""
