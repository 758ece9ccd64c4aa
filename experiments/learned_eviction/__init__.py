"""Evictions as actions: drawn by the sampler, credited with the advantage (Neural Garbage Collection).

After arXiv 2604.18002. A module, a compressor and a loss of their own outside of the package; ``learned_eviction.yaml``
names them. On a real model they did not help (``docs/results.md``).
"""

from experiments.learned_eviction.drawn import Drawn, NewScore
from experiments.learned_eviction.module import LearnedEvictionGRPO

__all__ = ["Drawn", "LearnedEvictionGRPO", "NewScore"]
