"""Tensor operations on the cache, as plain PyTorch functions without any knowledge of models or training."""
