"""The KV cache of a rollout: slots, what fits, and its compression."""
