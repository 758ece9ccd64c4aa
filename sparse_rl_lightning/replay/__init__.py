"""The learner's attention under the evictions of the sampler."""
