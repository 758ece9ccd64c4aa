"""Dense, naive, Sparse-RL, replay and every correction on one task, from the same warm-up."""
