"""Drawn: what to evict is drawn by chance, likelier the lower its score, so that eviction can be learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor, ModelSizes
from sparse_rl_lightning.compressors.entries import newest_position, standardized
from sparse_rl_lightning.compressors.learned_score import LearnedScore, ScoreNetwork
from sparse_rl_lightning.compressors.wrapped import Wrapped
from sparse_rl_lightning.errors import UserError, check_number, check_seed
from sparse_rl_lightning.ops import CachedEntries
from sparse_rl_lightning.ops.evict import pinned_entries
from sparse_rl_lightning.ops.keyed_random import hash_uniform, seed_of
from sparse_rl_lightning.records import LayerState


class Drawn(Wrapped):
    """Draw the entries to evict one after the other, each with a probability that falls with its score.

    With logits a = -score / temperature over the entries that may go, the ordered draw without replacement has
    Plackett-Luce probabilities; it is made all at once by Gumbel top-k (Kool et al., arXiv 1903.06059) with keyed
    numbers, so it is the same in any batch and slot. Every set of entries can be evicted, which is what makes eviction
    an action that a policy gradient can credit (Neural Garbage Collection, arXiv 2604.18002). There the kept entries
    are drawn in order; here the evicted ones, which are fewer: the order among those that stay is no action.

    Every head draws for itself, even where the method gives a token the same score in all heads of a layer (TOVA,
    ``Combined`` with ``across_heads``).

    Args:
        compressor: Method whose scores are drawn from; budget, buffer and all other sizes are its.
        temperature: Divisor of the scores, in standard deviations of a head's scores, or as they are for
            ``LearnedScore``; 0 evicts the lowest scores, as the method alone does.

    Raises:
        ValueError: If the temperature is negative, or the method never evicts.
    """

    needs_layer_index = True  # draws are keyed by it

    def __init__(self, compressor: Compressor, temperature: float = 0.3) -> None:
        check_number("temperature", temperature, least=0, owner="Drawn")
        if not compressor.evicts:
            raise UserError(f"Drawn: {compressor} never evicts, so there is nothing to draw. Give a method that does.")
        super().__init__([compressor])
        self.temperature = temperature

    def score(self, layer: LayerState) -> Tensor:
        """Minus the perturbed logits (S, H, N): the lowest go first. Without temperature the method's own scores."""
        (given,) = self.part_scores(layer)
        if self.temperature == 0:
            return given
        perturbed = log_exponential(layer) - self._logits(given, layer)
        return perturbed.masked_fill(given.isnan() & layer.valid, torch.nan)

    @property
    def scores_natively(self) -> bool:
        """Without temperature, where the method's own op does: its rounding decides ties, which no other repeats."""
        return self.temperature == 0 and super().scores_natively and self._parts[0].scores_natively

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The method's own."""
        return self._parts[0].score_cached(entries)

    def logits(self, layer: LayerState) -> Tensor:
        """Logits (S, H, N), float32, of going next, -inf for what may not go; with gradient if the method's scores are.

        The probability that the next entry drawn is i is softmax(logits)_i over the entries not drawn yet.
        """
        (given,) = self.part_scores(layer)
        return self._logits(given, layer)

    @property
    def has_gradient(self) -> bool:
        """Whether scores are made of keys, values, recent queries and constant numbers alone, and pass gradient on."""
        varies = any(part.state_fields and not isinstance(part, LearnedScore) for part in methods_in(self))
        if (
            varies
            or self.head_state_fields(2)
            or self.needs_attention
            or self.needs_output_norms
            or self.needs_rotation
        ):
            return False
        with torch.enable_grad():
            return self.logits(_probe(self)).requires_grad

    def _logits(self, given: Tensor, layer: LayerState) -> Tensor:
        scores = given.to(torch.float32)
        pinned = pinned_entries(layer.valid, layer.positions, self.num_sinks, self.window)
        free = layer.valid & ~pinned & (scores < torch.inf)
        worth = scores if isinstance(self._parts[0], LearnedScore) else standardized(scores, free)
        return (-worth / self.temperature).masked_fill(~free, -torch.inf)

    def __repr__(self) -> str:
        return f"Drawn(compressor={self._parts[0]!r}, temperature={self.temperature})"


class NewScore(LearnedScore):
    """A LearnedScore that begins with equal worths, under which draws are by chance, and is to be trained.

    Args:
        budget: Tokens kept per layer and KV head, like all sizes not listed here as in :class:`Compressor`.
        width: Hidden units of the network.
        seed: Seed of the network, null for that of ``seed_everything``.
        **sizes: Further arguments of :class:`Compressor`.
    """

    def __init__(self, budget: int | LengthSchedule, *, width: int = 16, seed: int | None = None, **sizes: Any) -> None:
        super(LearnedScore, self).__init__(budget, **sizes)  # there is no file
        check_number("width", width, least=1, owner="NewScore")
        check_seed(seed, "NewScore.seed")
        self.width, self.seed = width, seed
        self.network: ScoreNetwork = None  # type: ignore[assignment]  # until the model is known

    def check_model(self, sizes: ModelSizes) -> None:
        """Make the network for a model of these sizes, on first use."""
        if self.network is None:
            self.network = ScoreNetwork(sizes, self.width, seed_of(self.seed))
        super().check_model(sizes)

    def score(self, layer: LayerState) -> Tensor:
        """As that of a trained network; until there is one, what the entries carry."""
        return layer.state["worth"] if self.network is None else super().score(layer)


def methods_in(compressor: Compressor) -> Iterator[Compressor]:
    """The methods inside a compressor that wraps others, or itself."""
    for part in compressor._parts if isinstance(compressor, Wrapped) else ():
        yield from methods_in(part)
    if not isinstance(compressor, Wrapped):
        yield compressor


def log_exponential(layer: LayerState) -> Tensor:
    """The logarithm (S, H, N) of an exponential number of each entry at this event: minus a Gumbel number."""
    heads = torch.arange(layer.positions.shape[1], device=layer.positions.device)
    newest = newest_position(layer)[:, None, None]
    # the key is the prompt's until its samples begin; the 0 keeps these numbers apart from random eviction's
    keys = layer.sequence_keys[:, None, None]
    uniform = hash_uniform(keys, newest, layer.layer_index, heads[:, None], 0, layer.positions)
    return torch.log1p(-uniform).neg().log()


def _probe(compressor: Drawn) -> LayerState:
    """A slot (1, H, N) whose keys, values and queries have gradient, and which has no rotary frequencies."""
    count, queries = compressor.num_sinks + compressor.window + 8, compressor.num_queries
    networks = [part.network for part in methods_in(compressor) if isinstance(part, LearnedScore) and part.network]
    heads = networks[0].sizes.num_kv_heads if networks else 1
    shape, every = (1, heads, count), torch.arange(count)
    keys, values = (
        torch.linspace(-1.0, 1.0, 2 * count).expand(1, heads, -1).reshape(*shape, 2).requires_grad_() for _ in range(2)
    )
    return LayerState(
        keys=keys, values=values, valid=torch.ones(shape, dtype=torch.bool), positions=every.expand(shape),
        lengths=torch.full((1, heads), count), token_ids=torch.zeros(shape, dtype=torch.int64),
        prompt_lengths=torch.zeros(1, dtype=torch.int64), queries=torch.ones(1, heads, queries, 2, requires_grad=True),
        query_positions=(count - 1 - torch.arange(queries))[None], sequence_keys=torch.zeros(1, dtype=torch.int64),
        prompt_keys=torch.zeros(1, dtype=torch.int64), layer=0, scale=1.0, inv_freq=torch.zeros(0),
        attention_scaling=1.0, state={name: torch.zeros(shape, requires_grad=True) for name in compressor.state_fields},
    )  # fmt: skip
