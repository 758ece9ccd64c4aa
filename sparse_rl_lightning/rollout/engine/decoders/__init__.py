"""Ways through a model's layers with the attention of a rollout."""
