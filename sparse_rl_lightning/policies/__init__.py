"""Where weights come from, and what a model must be to be served."""
