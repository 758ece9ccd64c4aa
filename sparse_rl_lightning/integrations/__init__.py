"""Ways in and out for other engines, trainers and tools; the core imports none of them."""
