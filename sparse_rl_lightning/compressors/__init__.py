"""Compressors: which entries of the KV cache a sparse rollout keeps."""

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.combined import Combined
from sparse_rl_lightning.compressors.cur import CUR
from sparse_rl_lightning.compressors.expected_attention import ExpectedAttention
from sparse_rl_lightning.compressors.full import FullKV
from sparse_rl_lightning.compressors.h2o import H2O
from sparse_rl_lightning.compressors.keydiff import KeyDiff
from sparse_rl_lightning.compressors.knorm import KNorm
from sparse_rl_lightning.compressors.lagkv import LagKV
from sparse_rl_lightning.compressors.learned_score import LearnedScore
from sparse_rl_lightning.compressors.oldest_turns import OldestTurns
from sparse_rl_lightning.compressors.qfilters import QFilters
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics
from sparse_rl_lightning.compressors.random_eviction import RandomAttention, RandomEviction
from sparse_rl_lightning.compressors.rkv import RKV
from sparse_rl_lightning.compressors.smoothed import Smoothed
from sparse_rl_lightning.compressors.snapkv import SnapKV
from sparse_rl_lightning.compressors.streaming import StreamingLLM
from sparse_rl_lightning.compressors.tova import TOVA
from sparse_rl_lightning.compressors.triattention import TriAttention
from sparse_rl_lightning.compressors.vase import VaSE

__all__ = [
    "CUR",
    "H2O",
    "RKV",
    "TOVA",
    "Combined",
    "Compressor",
    "ExpectedAttention",
    "FullKV",
    "KNorm",
    "KeyDiff",
    "LagKV",
    "LearnedScore",
    "OldestTurns",
    "QFilters",
    "QueryStatistics",
    "RandomAttention",
    "RandomEviction",
    "Smoothed",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "VaSE",
]
