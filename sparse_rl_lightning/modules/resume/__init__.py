"""Resume: what a run depends on, what its checkpoints say of that, and what becomes of a change."""
