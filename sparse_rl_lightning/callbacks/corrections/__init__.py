"""Callbacks that correct for sampling with a policy other than the learner's."""
