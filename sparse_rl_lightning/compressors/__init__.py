"""Compressors: which entries of the KV cache a sparse rollout keeps."""

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.full import FullKV

__all__ = ["Compressor", "FullKV"]
