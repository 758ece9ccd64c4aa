"""From a rollout to a loss, without Lightning."""
