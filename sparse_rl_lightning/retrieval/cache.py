"""PagedCache: a cache with summaries of its pages, the choice of pages in a step, and a count of what is read.

Letters as in records.py; P pages of a head, C vectors of each page, K is the limit of pages that a query reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.cache.slots import CacheSize, Cuts, PackedPrompts, SlotCache, SlotSelection
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.select_pages import keep_pages, list_pages, page_counts
from sparse_rl_lightning.ops.summarize_pages import write_summaries
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import EvictionRecord
from sparse_rl_lightning.retrievers import Retriever


@dataclass(frozen=True, kw_only=True)
class PagedCacheSize(CacheSize):
    """The size of a cache whose pages are read by a retriever."""

    retriever: Retriever
    schedule: LengthSchedule  # the retriever's at the time; it may be raised later

    def allocate(self, geometry: CacheGeometry) -> PagedCache:
        """Allocate a cache of this size for a model."""
        return PagedCache(geometry, self)


def with_pages(size: CacheSize, retriever: Retriever) -> PagedCacheSize:
    """The same size for a cache whose pages are read by a retriever."""
    return PagedCacheSize(**vars(size), retriever=retriever, schedule=retriever.schedule)


class PagedCache(SlotCache):
    """A SlotCache in which every query reads only some pages.

    Each page has vectors, its summary, stored besides the entries and updated with them: a page is summarized when its
    last entry is appended, and all pages of a slot again after its entries have moved.
    """

    per_slot = (*SlotCache.per_slot, "read")
    attends_at_once = False  # pages are chosen in between

    def __init__(self, geometry: CacheGeometry, size: PagedCacheSize) -> None:
        super().__init__(geometry, size)
        g, self.retriever = geometry, size.retriever
        r = self.retriever
        counts = [-(-entries // r.page_size) for entries in size.entries[r.num_dense_layers :]]
        heads = (size.num_slots, g.num_kv_heads, r.num_vectors)
        self.summaries = [  # (S, H, C, P, D) for each layer that retrieves
            torch.zeros(*heads, count, g.head_dim, dtype=g.kv_dtype, device=g.device) for count in counts
        ]
        self.width = min(max(counts), max(r.layer_pages(len(counts), budget=r.budget)))  # K
        self.limits_at = r.page_limits(len(counts), g.device)
        self.limits = torch.zeros(0, dtype=torch.int32, device=g.device)  # (L, R) pages that rows of a step read
        self.read = torch.zeros_like(self.held, dtype=torch.float32)  # entries read by the step that fed a token

    def parts(self) -> dict[str, list[Tensor]]:
        """Every tensor of this cache by its purpose, pages included."""
        pages = [*self.summaries, self.limits_at.starts, self.limits_at.limits]
        return super().parts() | {"vectors of the pages": pages, "entries read": [self.read]}

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values, and of the summaries of pages."""
        return super().pool_bytes + sum(summary.nbytes for summary in self.summaries)

    @property
    def most_read(self) -> int:
        """The most entries of a head that attention may read in a step: all of dense layers, else whole pages."""
        dense = self.most_entries[: self.retriever.num_dense_layers]
        return max(self.width * self.retriever.page_size, *dense, 0)

    @property
    def can_capture(self) -> bool:
        """Whether a decode step can be part of a CUDA graph: a retriever without a kernel runs in Python."""
        return super().can_capture and self.retriever.kernel is not None

    # ---------------------------------------------------------------- a decode step

    def begin_step(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a step as the base class does, and set how many pages each row reads."""
        tokens, positions = super().begin_step(places)
        self.limits = self.limits_at(positions + 1)
        return tokens, positions

    def end_step(self, slots: Tensor, places: Tensor, positions: Tensor) -> Tensor:
        """End a step as the base class does, and record how much was read."""
        after = super().end_step(slots, places, positions)
        self.read[places, positions] = self.count_read(self.lengths[:, slots.clamp(min=0)])
        return after

    def count_read(self, lengths: Tensor) -> Tensor:
        """The number of entries (R,) that a step reads, one key and one value each, a mean over layers and heads.

        ``lengths`` (L, R, H) are the numbers of live entries during the step. Vectors of pages count half an entry
        each, if they are scored.
        """
        r = self.retriever
        entries, dense = lengths[r.num_dense_layers :], lengths[: r.num_dense_layers].sum(dim=(0, 2))
        limits = self.limits.unsqueeze(-1)
        left_out = (page_counts(entries, r.page_size) - limits).clamp(min=0)  # whole pages: the last is always read
        competed = left_out + limits - r.num_first_pages - r.num_last_pages
        scored = torch.where(left_out > 0, competed * (r.num_vectors / 2), 0.0)
        read = (entries - left_out * r.page_size + scored).sum(dim=(0, 2))
        return (dense + read) / (lengths.shape[0] * lengths.shape[2])

    def _attend(self, layer: int, slots: Tensor, query: Tensor, probs: Tensor | None, sinks: Tensor | None) -> Tensor:
        assert sinks is None, "check_retriever refuses them"
        if layer < self.retriever.num_dense_layers:
            return super()._attend(layer, slots, query, probs, sinks)
        self._refresh(layer, slots, newest_only=True)
        pages = self.choose(layer, slots, query)
        size, scale = self.retriever.page_size, self.geometry.scale
        return ops.page_attention(self.layers[layer], slots, query, pages, size, scale)

    def choose(self, layer: int, slots: Tensor, query: Tensor) -> Tensor:
        """The pages (R, H, K), int32, that queries (R, Hq, D) read."""
        r, pools, index = self.retriever, self.layers[layer], layer - self.retriever.num_dense_layers
        summaries, limits = self.summaries[index], self.limits[index]
        width = min(self.width, summaries.shape[3])
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

    # ---------------------------------------------------------------- entries that are added and moved

    def store(
        self, layer: int, prompts: PackedPrompts, scores: Tensor, budgets: Tensor, compressor: Compressor
    ) -> None:
        """Store prompts as the base class does, and summarize their pages."""
        super().store(layer, prompts, scores, budgets, compressor)
        self._refresh(layer, prompts.places)

    def compact(
        self, chosen: SlotSelection, scores: Tensor, budgets: Tensor, compressor: Compressor, room: Tensor
    ) -> None:
        """Compact slots as the base class does, and summarize the pages of the survivors."""
        super().compact(chosen, scores, budgets, compressor, room)
        self._refresh_all(chosen.places)

    def restore(self, slot: int, content: dict[str, Tensor], num_entries: Sequence[int] | None = None) -> None:
        """Restore a slot as the base class does, and summarize its pages again."""
        super().restore(slot, content, num_entries)
        self._refresh_all(torch.tensor([slot], device=self.key_pool.device))

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots as the base class does, pages included."""
        super().fork(sources, destinations)
        for summary in self.summaries:
            summary[destinations] = summary[sources]

    def _refresh_all(self, slots: Tensor) -> None:
        for layer in range(self.geometry.num_layers):
            self._refresh(layer, slots)

    def _refresh(self, layer: int, slots: Tensor, newest_only: bool = False) -> None:
        """Summarize the complete pages of slots (B,), or only the one that the newest entry has completed."""
        r, pools = self.retriever, self.layers[layer]
        if layer < r.num_dense_layers:
            return
        summaries = self.summaries[layer - r.num_dense_layers]
        if r.kernel is not None:
            ops.summarize_pages(pools, slots, r.page_size, summaries, newest_only=newest_only)
            return
        write_summaries(
            pools.keys, slots, pools.offsets, pools.lengths, r.page_size, newest_only, summaries, r.summarize
        )

    # ---------------------------------------------------------------- data of a finished sequence

    def evictions_of(self, slot: int, end: int, cuts: Cuts) -> EvictionRecord | None:
        """No record: deaths alone do not determine what was visible."""
        return None

    def entries_read(self, slot: int, prompt_length: int, end: int) -> Tensor | None:
        """The number of entries () that the decode steps of a sequence read."""
        return self.read[slot, prompt_length:end].sum()


def check_retriever(retriever: Retriever, compressor: Compressor, geometry: CacheGeometry) -> None:
    """Refuse combinations that a retriever cannot work with, by name."""
    name, method = type(retriever).__name__, type(compressor).__name__
    num_layers, kv_dtype = geometry.num_layers, geometry.kv_dtype
    if geometry.windows:
        raise UserError(
            f"{name} does not know layers with a sliding window, which this model has (sliding_window="
            f"{geometry.window}). Use a compressor, such as SnapKV, without a retriever."
        )
    if geometry.has_sinks:
        raise UserError(
            f"{name} does not know the learned sinks that this model's attention has. Use a compressor, such as "
            "SnapKV, without a retriever."
        )
    if retriever.num_dense_layers >= num_layers:
        raise UserError(
            f"{name}: num_dense_layers={retriever.num_dense_layers} leaves none of the model's {num_layers} layers to "
            "retrieve in. Lower num_dense_layers."
        )
    if compressor.needs_attention:
        raise UserError(
            f"{method} counts the attention that every entry receives, and {name} does not compute it for the pages "
            "that are not read. Combine it with a compressor that does not, such as SnapKV or RKV."
        )
    if compressor.evicts and compressor.budget_rule.splits_heads:
        raise UserError(
            f"{name} keeps as many pages of every head, and {type(compressor.budget_rule).__name__} gives heads "
            f"different memory. Set {method}'s budget_rule to Uniform or Pyramid."
        )
    if kv_dtype.itemsize < 2:
        raise UserError(
            f"{name} keeps vectors of the pages in the type of the keys, for which kv_dtype={kv_dtype} is too narrow. "
            "Use bfloat16, float16 or float32."
        )
