"""Retrieval at work on a cache: what is kept of its pages, which of them a step reads, and the record of that.

Letters as in records.py; P pages of a head, C vectors kept of each, K most pages that a query reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.select_pages import keep_pages, list_pages, page_counts
from sparse_rl_lightning.ops.summarize_pages import write_summaries
from sparse_rl_lightning.page_record import PageRecord
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrievers import Retriever


class PageCache:
    """Vectors kept of every page of a SlotCache, allocated once, and the reading of pages.

    Args:
        retriever: Says what is kept and what is read.
        geometry: The model's.
        num_slots: S.
        capacities: (L) entries per slot and KV head.
        max_length: Longest sequence in tokens.
        records: Keep the pages that every query reads.
    """

    def __init__(
        self,
        retriever: Retriever,
        geometry: CacheGeometry,
        num_slots: int,
        capacities: tuple[int, ...],
        max_length: int,
        records: bool,
    ) -> None:
        g, self.retriever = geometry, retriever
        self.layout = PageLayout(retriever, g, capacities)
        self._schedule = retriever.schedule
        heads = (num_slots, g.num_kv_heads, retriever.num_vectors)
        self.summaries = [  # (S, H, C, P, D) of each layer that retrieves
            torch.zeros(*heads, count, g.head_dim, dtype=g.kv_dtype, device=g.device) for count in self.layout.counts
        ]
        self.limits_at = retriever.page_limits(len(self.layout.counts), g.device)
        self.limits = torch.zeros(0, dtype=torch.int32, device=g.device)  # (L, R) pages that rows of a step read
        self.record: Tensor | None = None  # (S + 1, L, T, H, K), the last row for rows that pad a batch
        if records:
            shape = self.layout.record_shape(num_slots + 1, max_length)
            self.record = torch.full(shape, -1, dtype=self.layout.record_dtype, device=g.device)
        self._places, self._positions = self.limits, self.limits

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of the pages."""
        return sum(summary.nbytes for summary in self.summaries)

    @property
    def is_current(self) -> bool:
        """Whether the retriever reads as much as when this was made: its schedule may have been raised since."""
        return self._schedule == self.retriever.schedule

    def reads(self, layer: int) -> bool:
        """Whether queries of this layer read some pages only."""
        return layer >= self.retriever.num_dense_layers

    # ---------------------------------------------------------------- a decode step

    def begin_step(self, places: Tensor, positions: Tensor) -> None:
        """Settle how much each row reads.

        Args:
            places: (R,) slots, S for rows that pad the batch.
            positions: (R,) of the tokens that are fed.
        """
        self.limits = self.limits_at(positions + 1)
        self._places, self._positions = places, positions

    def attend(self, layer: int, pools: KVPools, slots: Tensor, query: Tensor, scale: float) -> Tensor:
        """Attention of (R, Hq, D) queries whose tokens have just been appended."""
        self.refresh(layer, pools, slots, newest_only=True)
        pages = self._choose(layer, pools, slots, query)
        if self.record is not None:
            index = layer - self.retriever.num_dense_layers
            self.record[self._places, index, self._positions, :, : pages.shape[2]] = pages.to(self.record.dtype)
        return ops.page_attention(pools, slots, query, pages, self.retriever.page_size, scale)

    def entries_read(self, lengths: Tensor) -> Tensor:
        """What a step reads in entries, one key and one value each, a mean over layers and heads.

        Vectors that are kept of pages count half an entry each, where they are scored.

        Args:
            lengths: (L, R, H) live entries during the step.

        Returns:
            (R,) float32.
        """
        r = self.retriever
        held, dense = lengths[r.num_dense_layers :], lengths[: r.num_dense_layers].sum(dim=(0, 2))
        limits = self.limits.unsqueeze(-1)
        left_out = (page_counts(held, r.page_size) - limits).clamp(min=0)  # whole pages: the last is read
        competed = left_out + limits - r.num_first_pages - r.num_last_pages
        scored = torch.where(left_out > 0, competed * (r.num_vectors / 2), 0.0)
        read = (held - left_out * r.page_size + scored).sum(dim=(0, 2))
        return (dense + read) / (lengths.shape[0] * lengths.shape[2])

    def _choose(self, layer: int, pools: KVPools, slots: Tensor, query: Tensor) -> Tensor:
        """(R, H, K) int32 pages to read."""
        r, index = self.retriever, layer - self.retriever.num_dense_layers
        summaries, limits = self.summaries[index], self.limits[index]
        width = min(self.layout.width, summaries.shape[3])
        if r.kernel is not None:
            return ops.select_pages(
                pools, slots, query, summaries, limits, r.page_size, r.num_first_pages, r.num_last_pages,
                r.kernel, width,
            )[0]  # fmt: skip
        at = slots.clamp(min=0)
        counts = page_counts(pools.lengths[at] * (slots >= 0)[:, None], r.page_size)
        grouped = query.view(len(query), counts.shape[1], -1, 1, query.shape[-1])  # (R, H, G, 1, D)
        scores = r.score(grouped, summaries[at]).squeeze(2).float()
        return list_pages(keep_pages(scores, counts, limits[:, None], r.num_first_pages, r.num_last_pages), width)

    # ---------------------------------------------------------------- what is kept of pages

    def refresh(self, layer: int, pools: KVPools, slots: Tensor, newest_only: bool = False) -> None:
        """Summarise the complete pages of slots (B,), or only the one that the newest entry has completed."""
        if not self.reads(layer):
            return
        r, summaries = self.retriever, self.summaries[layer - self.retriever.num_dense_layers]
        if r.kernel is not None:
            ops.summarize_pages(pools, slots, r.page_size, summaries, newest_only=newest_only)
            return
        write_summaries(
            pools.keys, slots, pools.offsets, pools.lengths, r.page_size, newest_only, summaries, r.summarize
        )

    def fork(self, source: int, destinations: Tensor) -> None:
        """Copy what is kept of a slot's pages to other slots."""
        for summary in self.summaries:
            summary[destinations] = summary[source].clone()

    def record_of(self, slot: int, prompt_length: int, end: int) -> PageRecord | None:
        """What the queries of one sequence have read, whose last token has index ``end``."""
        if self.record is None:
            return None
        pages = self.record[slot : slot + 1, :, : end + 1].clone()
        pages[:, :, :prompt_length] = pages[:, :, end:] = -1  # the prompt reads everything, the last token is never fed
        return PageRecord(pages, self.retriever.page_size, self.retriever.num_dense_layers)


class PageLayout:
    """How many pages there are, and what they take in memory; nothing is allocated.

    Args:
        retriever: Says what is kept and what is read.
        geometry: The model's.
        capacities: (L) entries per slot and KV head.
    """

    def __init__(self, retriever: Retriever, geometry: CacheGeometry, capacities: tuple[int, ...]) -> None:
        self.retriever, self.geometry = retriever, geometry
        self.counts = [-(-capacity // retriever.page_size) for capacity in capacities[retriever.num_dense_layers :]]
        most = max(retriever.layer_pages(len(self.counts), budget=retriever.budget))
        self.width = min(max(self.counts), most)  # K
        self.record_dtype = torch.int16 if max(self.counts) <= torch.iinfo(torch.int16).max else torch.int32

    @property
    def summary_bytes(self) -> int:
        """Bytes per slot of what is kept of the pages."""
        g = self.geometry
        return sum(self.counts) * self.retriever.num_vectors * g.num_kv_heads * g.head_dim * g.kv_dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """Bytes beside the slots: the schedule as tensors."""
        return len(self.retriever.schedule.starts) * (torch.int64.itemsize + len(self.counts) * torch.int32.itemsize)

    def record_shape(self, num_sequences: int, length: int) -> tuple[int, ...]:
        """Of a record of the pages read."""
        return num_sequences, len(self.counts), length, self.geometry.num_kv_heads, self.width

    def record_bytes(self, num_sequences: int, length: int) -> int:
        """Bytes of such a record."""
        return int(torch.Size(self.record_shape(num_sequences, length)).numel()) * self.record_dtype.itemsize

    def check_record(self, num_sequences: int, length: int, limit: int) -> None:
        """Refuse to record what takes too much.

        Raises:
            ValueError: With the arithmetic, if the record exceeds the limit.
        """
        needed = self.record_bytes(num_sequences, length)
        if needed > limit:
            _, layers, _, heads, width = self.record_shape(num_sequences, length)
            raise ValueError(
                f"record_pages={limit:,} bytes do not hold the pages of this rollout: {num_sequences} sequences x "
                f"{layers} layers x {length:,} tokens x {heads} KV heads x {width} pages x "
                f"{self.record_dtype.itemsize} bytes = {needed:,}. Raise record_pages, roll out fewer or shorter "
                "sequences, or set it to 0: retrieval_logprobs chooses pages anew and needs no record."
            )


def check_retriever(
    retriever: Retriever, compressor: Compressor, num_layers: int, kv_dtype: torch.dtype, record_pages: int
) -> None:
    """Refuse, by name, what a retriever cannot work with.

    Raises:
        ValueError: What does not fit, and what to change.
    """
    name, other = type(retriever).__name__, type(compressor).__name__
    if retriever.num_dense_layers >= num_layers:
        raise ValueError(
            f"{name}: num_dense_layers={retriever.num_dense_layers} leaves none of the model's {num_layers} layers to "
            "retrieve in. Lower num_dense_layers."
        )
    if compressor.needs_attention:
        raise ValueError(
            f"{other} counts the attention that every entry receives, and {name} does not compute it for the pages "
            "that are not read. Combine it with a compressor that does not, such as SnapKV or RKV."
        )
    if compressor.evicts and compressor.budget_rule.splits_heads:
        raise ValueError(
            f"{name} keeps as many pages of every head, and {type(compressor.budget_rule).__name__} gives heads "
            f"different memory. Set {other}'s budget_rule to Uniform or Pyramid."
        )
    if kv_dtype.itemsize < 2:
        raise ValueError(
            f"{name} keeps vectors of the pages in the type of the keys, for which kv_dtype={kv_dtype} is too narrow. "
            "Use bfloat16, float16 or float32."
        )
    if record_pages and compressor.evicts:
        raise ValueError(
            f"record_pages names pages of entries, and {other} moves entries to other pages. Record with FullKV, or "
            "set record_pages to 0."
        )
