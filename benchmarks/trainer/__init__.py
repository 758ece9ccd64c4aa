"""Whole training steps of ``SparseGRPO`` beside TRL's ``GRPOTrainer``."""
