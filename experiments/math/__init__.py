"""Mathematics by a model of the papers' family."""
