"""Whole rollouts and single decode steps against transformers and against what the machine allows."""
