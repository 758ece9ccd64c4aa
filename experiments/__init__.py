"""Studies of training: what arms, corrections, schedules and conversations come to. Timing is in ``benchmarks``."""
