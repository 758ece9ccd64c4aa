"""How fast answers are checked, and what conventions of answers are worth."""
