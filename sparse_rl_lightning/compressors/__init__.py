"""Compressors: which entries of the KV cache a sparse rollout keeps."""

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.full import FullKV
from sparse_rl_lightning.compressors.random import RandomEviction
from sparse_rl_lightning.compressors.rkv import RKV
from sparse_rl_lightning.compressors.snapkv import SnapKV
from sparse_rl_lightning.compressors.streaming import StreamingLLM

__all__ = ["RKV", "Compressor", "FullKV", "RandomEviction", "SnapKV", "StreamingLLM"]
