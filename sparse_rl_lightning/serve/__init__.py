"""``sparse-rl serve``: completions under a compressed KV cache for clients of OpenAI's and vLLM's routes."""
