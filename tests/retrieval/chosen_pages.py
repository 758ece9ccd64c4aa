"""ChosenPages: which pages the queries of a sampler and of a learner have chosen, for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.cache import PagedCache
from sparse_rl_lightning.retrieval.logprobs import LearnerPages
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import retrieval_logprobs
from sparse_rl_lightning.rollout.engine.sampling import sequence_keys


class ChosenPages:
    """Writes down every choice while a test runs; of what was chosen twice for a query, the last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sampled: dict[tuple[int, int, int], Tensor] = {}  # (H, K) by key of the sequence, layer and position
        self.learned: dict[tuple[int, int], Tensor] = {}  # (B, H, t, P) bool by layer and first position
        self.replayed: Rollout | None = None  # a rollout whose pages the learner is made to read
        by_sampler, by_learner = PagedCache.choose, LearnerPages.choose

        def sampler(cache: PagedCache, layer: int, slots: Tensor, query: Tensor) -> Tensor:
            pages = by_sampler(cache, layer, slots, query)
            for slot, own in zip(slots.tolist(), pages, strict=True):
                if slot >= 0:
                    key, at = int(cache.sequence_keys[slot]), int(cache.seen[slot])
                    self.sampled[key, layer, at] = own.clone()
            return pages

        def learner(pages: LearnerPages, layer: int, queries: Tensor, summaries: Tensor, start: int, total: int) -> Any:
            own = by_learner(pages, layer, queries, summaries, start, total)
            if self.replayed is not None:
                kept = self.kept(self.replayed, self.seed, pages.retriever, layer, start, own)
                return kept | ~kept.any(dim=-1, keepdim=True)  # queries of prompts read everything
            self.learned[layer, start] = own
            return own

        patch.setattr(PagedCache, "choose", sampler)
        patch.setattr(LearnerPages, "choose", learner)

    def of(self, rollout: Rollout, seed: int) -> Tensor:
        """(B, L, T, H, K) pages that the sampler chose in layers that retrieve, -1 where there is none."""
        layers = sorted({layer for _, layer, _ in self.sampled})
        heads, width = next(iter(self.sampled.values())).shape[0], max(p.shape[1] for p in self.sampled.values())
        pages = torch.full((len(rollout), len(layers), rollout.sequences.shape[1], heads, width), -1)
        for row, key in enumerate(sequence_keys(seed, torch.arange(len(rollout))).tolist()):
            last = int(rollout.completion_mask[row].nonzero().max())
            for at in range(int(rollout.prompt_lengths[row]), last):
                for index, layer in enumerate(layers):
                    own = self.sampled[key, layer, at]
                    pages[row, index, at, :, : own.shape[1]] = own
        return pages

    def replay_logprobs(
        self, model: Any, rollout: Rollout, seed: int, retriever: Retriever, temperature: float
    ) -> Tensor:
        """(B, T) log-probabilities of a learner that is made to read the sampler's pages."""
        self.replayed, self.seed = rollout, seed
        try:
            return retrieval_logprobs(model, rollout, retriever, temperature).logprobs
        finally:
            self.replayed = None

    def kept(self, rollout: Rollout, seed: int, retriever: Retriever, layer: int, start: int, like: Tensor) -> Tensor:
        """(B, H, t, P) bool: the sampler's pages in the form of the learner's."""
        pages = self.of(rollout, seed)[:, layer - retriever.num_dense_layers, start : start + like.shape[2]]
        pages = pages.transpose(1, 2)
        kept = torch.zeros(*pages.shape[:3], like.shape[3] + 1, dtype=torch.bool)
        return kept.scatter_(-1, pages.where(pages >= 0, like.shape[3]), True)[..., :-1]

    def share_differing(self, rollout: Rollout, seed: int, retriever: Retriever) -> float:
        """The share of the sampler's pages, of those that competed, that the learner did not choose."""
        differing = competed = 0
        always = retriever.num_first_pages + retriever.num_last_pages
        for (layer, start), chosen in self.learned.items():
            kept = self.kept(rollout, seed, retriever, layer, start, chosen)
            counts = kept.sum(dim=-1)
            existing = -(-torch.arange(start + 1, start + 1 + kept.shape[2]) // retriever.page_size)
            counted = (counts < existing) & (counts > 0)
            differing += int(((kept & ~chosen).sum(dim=-1) * counted).sum())
            competed += int(((counts - always) * counted).sum())
        return differing / max(competed, 1)
