"""Compressor: a score per cached entry. Pinning, ties, compaction and the record are written once, elsewhere.

The op ``evict`` carries out what :meth:`Compressor.plan_eviction` plans. The learner corrects for what
the sampler has forgotten in ``corrections.py`` and ``learner/loss.py``.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import Budgeted, BudgetRule, LengthSchedule
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.ops.entries import CachedEntries
from sparse_rl_lightning.ops.evict import pinned_entries, select_entries
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.records import LayerState, StateUpdate

Rotation: TypeAlias = Literal[False, "partial", "whole"]
"""What a method requires of rotary positions, as in :attr:`Compressor.needs_rotation`."""


@dataclass(frozen=True)
class EvictionPlan:
    """Scores and budgets of one eviction."""

    scores: Tensor  # (S, H, N) float32
    budgets: Tensor  # (S, H) int32
    must_stay: Tensor  # (S, H) number of entries that no budget may evict
    is_refused: Tensor  # () bool: scores are NaN, or more must stay than is kept


class ModelSizes(NamedTuple):
    """What weights of a compressor depend on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


class Compressor(Budgeted):
    """Decides which ``budget`` entries of a full slot survive; subclasses only write :meth:`score`.

    A slot has room for ``budget + buffer`` tokens per layer and KV head. When it is full, the first ``num_sinks``
    positions, the last ``window`` entries and the best scores among the rest stay. A compressor has no state but
    what it has learned: one instance serves all layers, slots and ranks. Numbers that a method
    accumulates over the steps are named in :attr:`state_fields` and belong to the cache.

    With a :class:`~sparse_rl_lightning.budgets.LengthSchedule` the budget depends on each sequence's length when it is
    compressed. Memory is sized for the largest, and nothing is evicted while a sequence has fewer tokens than the
    budget of its length plus ``buffer``.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        buffer: Tokens appended between two compressions.
        num_sinks: First positions of the sequence that are never evicted. 0 reproduces published R-KV and SnapKV.
        window: Most recent tokens that are never evicted.
        compress_prompt: Whether a prompt that does not fit the slot is compressed after its prefill. With False the
            slot grows to ``max(budget, longest prompt) + buffer`` and the prompt competes from the first trigger on.
        budget_rule: Rule by which layers and heads share the budget, null for equally.
        protect_prompt: Whether the prompt is never evicted. ``budget`` must exceed the longest prompt: protected tokens
            take places of the budget, and more of them than it holds are an error when it happens.
        protect_token_ids: Token ids that are never evicted wherever they stand, such as digits or line breaks.
        protect_observations: Number of observations of a conversation, the newest ones, that are never evicted. An
            older one may be evicted once the policy has begun to read so many newer ones.

    Raises:
        ValueError: If ``buffer`` or ``window`` is below 1, ``num_sinks`` or ``protect_observations`` is negative, or a
            budget is smaller than ``num_sinks + window``.
    """

    evicts = True
    """Whether slots are ever compressed. False sizes them for the whole sequence."""

    def __init__(
        self,
        budget: int | LengthSchedule,
        buffer: int = 128,
        num_sinks: int = 4,
        window: int = 8,
        compress_prompt: bool = True,
        budget_rule: BudgetRule | None = None,
        protect_prompt: bool = False,
        protect_token_ids: list[int] | None = None,
        protect_observations: int = 0,
    ) -> None:
        name = type(self).__name__
        for option, value, least in (
            ("buffer", buffer, 1), ("num_sinks", num_sinks, 0), ("window", window, 1),
            ("protect_observations", protect_observations, 0),
        ):  # fmt: skip
            check_number(option, value, least=least, owner=name, whole=True)
        self.buffer = buffer
        self.num_sinks = num_sinks
        self.window = window
        self.compress_prompt = compress_prompt
        self.protect_prompt = protect_prompt
        self.protect_token_ids = list(protect_token_ids or [])
        for token in self.protect_token_ids:
            check_number("protect_token_ids", token, least=0, owner=name, whole=True)
        self.protect_observations = protect_observations
        super().__init__(budget, budget_rule)

    @property
    def is_limited(self) -> bool:
        """Whether anything is ever evicted."""
        return self.evicts

    def _check_schedule(self, schedule: LengthSchedule) -> None:
        name, pinned = type(self).__name__, self.num_sinks + self.window
        if schedule.minimum < pinned:
            raise UserError(
                f"{name}: budget={schedule.minimum} is smaller than num_sinks + window = {self.num_sinks} + "
                f"{self.window} = {pinned} tokens that are never evicted. Raise budget or lower num_sinks or window."
            )
        if schedule.shrinks and self.evicts:
            warnings.warn(
                f"{name}: budget={schedule} shrinks with length. Slots are sized for the maximum all the same, "
                "and what is evicted does not come back where the budget grows again.",
                stacklevel=5,  # the caller of the constructor
            )

    # ---------------------------------------------------------------- declarations of a method

    @property
    def num_queries(self) -> int:
        """Number of most recent queries that the cache keeps for :meth:`score`; 0 for none."""
        return self.window

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Names of float32 numbers per entry that the cache stores with the keys, moves with them and starts at 0.

        If there are any, here or in :meth:`head_state_fields`, the cache calls :meth:`update_state`.
        """
        return ()

    def head_state_fields(self, head_dim: int) -> dict[str, int]:
        """Names of float32 numbers per KV head, with the width C of each: (S, H, C) that start at 0 with a prompt."""
        return {}

    score_field: str | None = None
    """Name in :attr:`state_fields` of the number that every compression sets to the score of the entry."""
    needs_attention = False
    """Whether :meth:`update_state` reads ``update.mass``: the probabilities of every step are then computed."""
    needs_hidden_states = False
    """Whether :meth:`update_state` reads ``update.hidden_states``."""
    needs_output_norms = False
    """Whether :meth:`update_state` reads ``update.output_norms``: as costly per step as the output projection."""
    needs_turns = False
    """Whether :meth:`score` reads ``layer.turns``, which else conversations with protected observations have alone."""
    needs_layer_index = False
    """Whether :meth:`score` reads ``layer.layer_index``: layers are then scored one at a time, not several at once."""
    needs_rotation: Rotation = False
    """Whether :meth:`score` reads ``layer.inv_freq``; ``whole`` if it wants all channels of a head rotated by them.

    Models that rotate keys otherwise, or not in all layers, are then refused.
    """

    @abstractmethod
    def score(self, layer: LayerState) -> Tensor:
        """Worth of each entry: (S, H, N), higher is kept; anything where there is no valid entry.

        Entries with a score of +inf must stay: more of them than the budget holds are an error, not an eviction.
        """

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same scores of all layers from the cache itself: (L, B, H, N), 0 in free memory and rows to skip.

        Optional, for methods with native ops: a few launches for all layers of a model. It counts only where
        it is defined in the same class as :meth:`score` or in one derived from that.
        """
        raise NotImplementedError

    _has_op = True  # not with options that only score knows

    @property
    def scores_natively(self) -> bool:
        """Whether :meth:`score_cached` is defined and up to date: the cache then calls it in place of :meth:`score`."""
        owners = [next(c for c in type(self).__mro__ if name in vars(c)) for name in ("score_cached", "score")]
        return self._has_op and owners[0] is not Compressor and issubclass(owners[0], owners[1])

    def check_model(self, sizes: ModelSizes) -> None:  # most methods take any model
        """Refuse a model that this method's learned weights do not fit; samplers call it.

        Raises:
            ValueError: If it does not.
        """

    def update_state(self, update: StateUpdate) -> None:
        """Update the running numbers in ``update.state`` and ``update.head_state`` for new tokens, in place.

        It is called once for every token, before the slot may be compressed: with one of each sequence after a decode
        step, and with the tokens of a prompt in blocks. A block of Q tokens must have the effect of Q blocks of one.
        """
        raise NotImplementedError(f"{type(self).__name__} has state_fields, so it needs update_state.")

    # ---------------------------------------------------------------- calls of the cache

    def layer_budgets(self, num_layers: int, budget: int | None = None) -> list[int]:
        """The tokens kept per KV head of each layer, a mean over its heads; a layer's memory is this plus ``buffer``.

        ``budget`` is one of the schedule's, default the largest; a head must get sinks and window at least.
        """
        budget = self.budget if budget is None else budget
        return self.budget_rule.layer_budgets(budget, num_layers, self.num_sinks + self.window)

    def propose_eviction(
        self, layer: LayerState, layer_budget: int | Tensor | None = None, cached_scores: Tensor | None = None
    ) -> EvictionPlan:
        """Scores and budgets as the op ``evict`` takes them, and whether they cannot be; reads nothing from the device.

        Args:
            layer: One layer's cache, or several layers', each with its own rows in place of slots.
            layer_budget: Budget of the layer from :meth:`layer_budgets`, or (S,) int64, one for each slot; default
                ``budget``.
            cached_scores: Scores (S, H, N) from :meth:`score_cached`, in place of those of :meth:`score`.
        """
        limit = self.budget if layer_budget is None else layer_budget
        raw_scores = self._shaped_score(layer) if cached_scores is None else cached_scores
        scores = self._protected(raw_scores, layer).to(torch.float32)
        pinned = pinned_entries(layer.valid, layer.positions, self.num_sinks, self.window)
        minimum = self.num_sinks + self.window
        budgets = self.budget_rule.head_budgets(scores, layer.valid & ~pinned, limit, minimum)
        must_stay = (pinned | (layer.valid & (scores == torch.inf))).sum(dim=-1)
        refused = (raw_scores.isnan() & layer.valid).any() | (must_stay > budgets).any()
        if self.budget_rule.splits_heads:
            refused = refused | (budgets.sum(dim=-1) > limit * budgets.shape[1]).any()
        return EvictionPlan(scores, budgets, must_stay, refused)

    def plan_eviction(self, layer: LayerState, layer_budget: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores (S, H, N) float32 and entries to keep (S, H) int32, as the op ``evict`` takes them.

        Args:
            layer: One layer's cache.
            layer_budget: Budget of the layer, as in :meth:`propose_eviction`.

        Raises:
            ValueError: If :meth:`score` cannot be ranked, more entries must stay than a head keeps, or the heads'
                budgets exceed the layer's.
        """
        plan = self.propose_eviction(layer, layer_budget)
        if bool(plan.is_refused):
            self._refuse(plan, layer)
        return plan.scores, plan.budgets

    def select(self, layer: LayerState, layer_budget: int | Tensor | None = None) -> Tensor:
        """The entries that stay: (S, H, N) bool. The cache does the same in place, with ``evict``."""
        scores, budgets = self.plan_eviction(layer, layer_budget)
        return select_entries(scores, layer.valid, layer.positions, budgets, self.num_sinks, self.window)

    def _protected(self, scores: Tensor, layer: LayerState) -> Tensor:
        """The scores (S, H, N), with +inf for the tokens that the arguments ``protect_...`` name."""
        if self.protect_token_ids:
            (ids,) = upload([self.protect_token_ids], layer.token_ids.device)
            scores = scores.masked_fill(torch.isin(layer.token_ids, ids) & layer.valid, torch.inf)
        if self.protect_prompt:
            in_prompt = layer.positions < layer.prompt_lengths[:, None, None]
            scores = scores.masked_fill(in_prompt & layer.valid, torch.inf)
        if self.protect_observations and layer.turns is not None:
            scores = scores.masked_fill(_observed(layer.turns, layer.valid, self.protect_observations), torch.inf)
        return scores

    def _shaped_score(self, layer: LayerState) -> Tensor:
        if not self.needs_layer_index:
            name = type(self).__name__
            why = f"{name}.score reads layer.layer_index undeclared: write needs_layer_index = True in class {name}."
            layer = replace(layer, layer=why)
        scores = self.score(layer)
        if scores.shape != layer.valid.shape:
            raise UserError(
                f"{type(self).__name__}.score returned shape {tuple(scores.shape)}, expected (slots, KV heads, "
                f"entries) = {tuple(layer.valid.shape)}."
            )
        return scores

    def _refuse(self, plan: EvictionPlan, layer: LayerState) -> None:
        """Raise the reason why the plan of a layer cannot be carried out."""
        self._refuse_nan(self._shaped_score(layer), layer)
        excess = plan.must_stay - plan.budgets
        if bool((excess > 0).any()):
            worst = int(excess.argmax())
            raise UserError(
                f"{type(self).__name__}: {int(plan.must_stay.flatten()[worst])} entries of a head in layer "
                f"{layer.layer_index} must stay, num_sinks={self.num_sinks} and window={self.window} among them, but "
                f"it keeps only {int(plan.budgets.flatten()[worst])}. Raise budget={self.schedule.plain} or protect "
                "fewer tokens."
            )
        raise UserError(
            f"{type(self).__name__}: budget_rule={self.budget_rule!r} gives the heads of layer {layer.layer_index} "
            f"{int(plan.budgets.sum(dim=-1).max())} entries, more than the layer's budget times its "
            f"{plan.budgets.shape[1]} heads. Lower what head_budgets returns."
        )

    def _refuse_nan(self, scores: Tensor, layer: LayerState) -> None:
        if bool((scores.isnan() & layer.valid).any()):
            broken = layer.keys.isnan().any(dim=-1) & layer.valid
            cause = " Their keys are NaN themselves: look for NaN in the model's weights." if bool(broken.any()) else ""
            raise UserError(
                f"{type(self).__name__}.score returned NaN for live entries of layer {layer.layer_index}.{cause}"
            )


def checked_method(value: object) -> Compressor:
    """The compressor given, if it is one.

    Raises:
        ValueError: If it is a class or something else.
    """
    if not isinstance(value, Compressor):
        raise UserError(f"compressor must be a compressor such as SnapKV(budget=512), got {value!r}.")
    return value


def _observed(turns: Tensor, valid: Tensor, count: int) -> Tensor:
    """The live entries (S, H, N) of each sequence's newest ``count`` observations: turns of even numbers."""
    # every head has the newest token, whose turn has the largest number
    newest = turns.masked_fill(~valid, 0).amax(dim=(1, 2), keepdim=True)
    return valid & (turns > 0) & (turns % 2 == 0) & (turns // 2 > newest // 2 - count)
