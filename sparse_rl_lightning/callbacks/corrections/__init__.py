"""Callbacks that correct for sampling with another policy than the learner's."""
