"""Retrieval: reading pages of the cache instead of evicting entries, in sampler, record and learner."""
