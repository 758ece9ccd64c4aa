"""Operations on the cache: plain PyTorch mathematics, and ops on slots with compiled kernels where they are built."""

from sparse_rl_lightning.ops.library import has_kernel, load
from sparse_rl_lightning.ops.pools import KVPools
from sparse_rl_lightning.ops.slot_append import append
from sparse_rl_lightning.ops.slot_attention import attend
from sparse_rl_lightning.ops.slot_fork import fork
from sparse_rl_lightning.ops.slot_importance import score_importance
from sparse_rl_lightning.ops.slot_page_attention import attend_pages
from sparse_rl_lightning.ops.slot_pages import select_pages, summarize_pages
from sparse_rl_lightning.ops.slot_redundancy import score_redundancy
from sparse_rl_lightning.ops.slot_select import select_and_compact, select_and_store

MISSING = load()
"""Why the compiled kernels for "cpu" and "cuda" are not in use; an empty text where they are."""

HAS_NATIVE = not MISSING["cpu"]
"""Whether the compiled CPU kernels are in use."""

__all__ = [
    "HAS_NATIVE",
    "MISSING",
    "KVPools",
    "append",
    "attend",
    "attend_pages",
    "fork",
    "has_kernel",
    "score_importance",
    "score_redundancy",
    "select_and_compact",
    "select_and_store",
    "select_pages",
    "summarize_pages",
]
