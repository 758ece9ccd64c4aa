"""What a GPU machine is asked for, in pieces: ``python -m benchmarks.gpu``."""
