"""Several ranks: strategies, sharded weights, and what ranks tell each other."""
