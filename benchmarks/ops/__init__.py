"""The native ops against the fastest plain PyTorch that computes the same."""
