"""The decode loop of a rollout."""
