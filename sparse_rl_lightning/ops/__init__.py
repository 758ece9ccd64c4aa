"""Operations of a decode step and on the cache, each in PyTorch and, where they are built, in compiled kernels.

All refuse tensors of the wrong shape, type, device or layout, and numbers out of range, with a ``ValueError``.
"""

from sparse_rl_lightning.ops.append import append
from sparse_rl_lightning.ops.body import rms_norm, silu_mul
from sparse_rl_lightning.ops.decode_attention import append_attend, decode_attention
from sparse_rl_lightning.ops.draw import Drawn, draw
from sparse_rl_lightning.ops.entries import CachedEntries
from sparse_rl_lightning.ops.evict import evict
from sparse_rl_lightning.ops.fork import fork
from sparse_rl_lightning.ops.key_redundancy import key_redundancy
from sparse_rl_lightning.ops.library import has_kernel, load
from sparse_rl_lightning.ops.page_attention import page_attention
from sparse_rl_lightning.ops.pools import KVPools
from sparse_rl_lightning.ops.score_entries import score_entries
from sparse_rl_lightning.ops.select_pages import select_pages
from sparse_rl_lightning.ops.summarize_pages import summarize_pages
from sparse_rl_lightning.ops.window_importance import window_importance

MISSING = load()
"""The reasons why the compiled kernels for "cpu" and "cuda" are not in use; an empty text if they are."""

HAS_NATIVE = not MISSING["cpu"]
"""Whether the compiled CPU kernels are in use."""

__all__ = [
    "HAS_NATIVE",
    "MISSING",
    "CachedEntries",
    "Drawn",
    "KVPools",
    "append",
    "append_attend",
    "decode_attention",
    "draw",
    "evict",
    "fork",
    "has_kernel",
    "key_redundancy",
    "page_attention",
    "rms_norm",
    "score_entries",
    "select_pages",
    "silu_mul",
    "summarize_pages",
    "window_importance",
]
