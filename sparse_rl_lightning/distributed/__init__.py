"""Several ranks: strategies, sharded weights, and messages between ranks."""
