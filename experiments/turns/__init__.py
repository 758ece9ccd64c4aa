"""Training on conversations: what a cache that forgets costs, and what protecting parts of it brings."""
