"""What a compressor costs in quality and time on a policy and its problems: what ``sparse-rl benchmark`` measures."""
