"""Compressed caches for ``model.generate`` of transformers, and for every tool that calls it."""

from sparse_rl_lightning.integrations.transformers.cache import CompressedCache, compressed_generation

__all__ = ["CompressedCache", "compressed_generation"]
