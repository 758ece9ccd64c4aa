"""Reading some pages of a long cache, what choosing them costs included, against reading all of it."""

from __future__ import annotations

import torch

from benchmarks.common.tables import label
from benchmarks.ops.timing import Bench, Row
from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.retrievers import Centroid, Quest, Retriever

SHAPE = (4, 28, 4, 128)  # slots, heads, KV heads, head size
GPU_SLOTS = 64
LENGTHS = {8192: ">= 3", 16384: ">= 5"}  # entries held, goal
BUDGET = 1024
QUICK = {96: ">= 0", 128: ">= 0"}
RETRIEVERS: tuple[type[Retriever], ...] = (Centroid, Quest)


def retrieval_rows(bench: Bench, dtype: torch.dtype, quick: bool = False) -> list[Row]:
    """One decode step of one layer at several lengths; ``quick`` takes toy sizes, without meaning."""
    lengths, budget = (QUICK, 64) if quick else (LENGTHS, BUDGET)
    rows = []
    for length, goal in lengths.items():
        rows += [bench_retrieval(bench, dtype, retriever(budget), length, goal) for retriever in RETRIEVERS]
    return rows


def bench_retrieval(bench: Bench, dtype: torch.dtype, retriever: Retriever, length: int, goal: str) -> Row:
    """Summarize what the newest token completed, score all pages, read the best: against attention over everything."""
    slots, num_heads, heads, dim = SHAPE
    slots, r = GPU_SLOTS if bench.device == "cuda" else slots, retriever
    pools = KVPools.ragged(torch.full((slots, heads), length, dtype=torch.int32), dim, dtype, bench.device)
    pools.keys.normal_()
    pools.values.normal_()
    pools.lengths.fill_(length)
    chosen = torch.arange(slots, device=bench.device)
    query = torch.randn(slots, num_heads, dim, device=bench.device).to(dtype)
    shape = (slots, heads, r.num_vectors, -(-length // r.page_size), dim)
    summaries = torch.zeros(shape, dtype=dtype, device=bench.device)
    ops.summarize_pages(pools, chosen, r.page_size, summaries)
    limits = r.page_limits(1, bench.device)(torch.full((slots,), length, device=bench.device))[0]
    assert r.kernel is not None
    reduction, width = r.kernel, r.budget // r.page_size

    def step() -> None:
        ops.summarize_pages(pools, chosen, r.page_size, summaries, newest_only=True)
        pages, _ = ops.select_pages(
            pools, chosen, query, summaries, limits, r.page_size, r.num_first_pages, r.num_last_pages, reduction, width
        )
        ops.page_attention(pools, chosen, query, pages, r.page_size, dim**-0.5)

    return bench.compare(
        f"{type(r).__name__}, {r.budget} of {length} tokens, {label(dtype)}", goal, step,
        {"decode attention over all": lambda: ops.decode_attention(pools, chosen, query, dim**-0.5, length)},
        moved=pools.nbytes * r.budget // length + summaries.nbytes,
    )  # fmt: skip
