"""Log-probabilities of drawn evictions, recomputed by the learner with gradient while it replays them.

A rollout under :class:`~experiments.learned_eviction.drawn.Drawn` has made two kinds of choices: tokens, and at every
compression of a sequence, in every layer and head, which entries to evict. The record says which went when; the
entries and queries that the scores were made of are those of the replay itself. What is left is the order in which
the evicted were drawn: it follows from the keyed numbers and the scores of the policy before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from experiments.learned_eviction.drawn import Drawn, log_exponential
from sparse_rl_lightning.evictions import EvictionRecord
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.windows import deaths_by_layer, recorded_layers
from sparse_rl_lightning.records import LayerState, Rollout, StateUpdate
from sparse_rl_lightning.replay.death_attention import death_attention
from sparse_rl_lightning.replay.hooks import attention_implementation, attention_inputs, register
from sparse_rl_lightning.replay.logprobs import replayable

DRAWS = "sparse_rl_replay_draws"
NOWHERE = -1e30
"""Logit of an entry that cannot be drawn."""


def ordered_logprob(logits: Tensor, order: Tensor) -> Tensor:
    """Log-probability (...) of drawing entries one after the other without replacement (Plackett-Luce).

    Args:
        logits: Logits (..., N), -inf for entries that cannot be drawn.
        order: Indices (..., M) of the entries in the order they were drawn, -1 behind the last.
    """
    drawn, finite = order >= 0, logits.clamp(NOWHERE, -NOWHERE)  # finite, so that gradients are
    of_drawn = finite.gather(-1, order.clamp(min=0)).masked_fill(~drawn, NOWHERE)
    at = torch.zeros_like(logits, dtype=torch.int32).scatter_add(-1, order.clamp(min=0), drawn.to(torch.int32))
    rest = finite.masked_fill(at > 0, NOWHERE).logsumexp(dim=-1, keepdim=True)
    # what is left at each draw: those never drawn, those drawn later, and the one drawn
    left = torch.cat([rest, of_drawn.flip(-1)], dim=-1).logcumsumexp(dim=-1)[..., 1:].flip(-1)
    return torch.where(drawn, of_drawn - left, 0.0).sum(dim=-1)


@dataclass(frozen=True)
class EvictionDraws:
    """Drawn evictions of B sequences, event by event; E events at most, M entries evicted at most by one of them."""

    steps: Tensor  # (B, E) int64, tokens fed before the event, -1 for none
    order: Tensor  # (B, E, L, H, M) int32 positions of the evicted as they were drawn, -1 behind the last
    logprobs: Tensor  # (B, E, L, H) log-probability of the ordered draw, 0 for none

    def __getitem__(self, index: Tensor | slice) -> EvictionDraws:
        return EvictionDraws(self.steps[index], self.order[index], self.logprobs[index])

    @classmethod
    def cat(cls, parts: Sequence[EvictionDraws]) -> Self:
        """All sequences in the order given, with room for the most events and evicted entries of any."""
        events, most = max(p.steps.shape[1] for p in parts), max(p.order.shape[-1] for p in parts)
        steps, orders, logprobs = [], [], []
        for draws in parts:
            more = events - draws.steps.shape[1]
            steps.append(F.pad(draws.steps, (0, more), value=-1))
            orders.append(F.pad(draws.order, (0, most - draws.order.shape[-1], 0, 0, 0, 0, 0, more), value=-1))
            logprobs.append(F.pad(draws.logprobs, (0, 0, 0, 0, 0, more)))
        return cls(torch.cat(steps), torch.cat(orders), torch.cat(logprobs))


@dataclass(frozen=True)
class Events:
    """The compressions of some sequences."""

    rows: Tensor  # (S,) sequence of each
    steps: Tensor  # (S,) tokens fed before it: the first query that no longer sees what went
    places: Tensor  # (S,) number of each among those of its sequence, a prompt's end included

    @classmethod
    def of(cls, record: EvictionRecord, prompt_lengths: Tensor) -> Self:
        """Every step at which something of a sequence died, in order, behind its prompt.

        What goes at a prompt's end is the same for all samples, so it gets no credit, and it is by far the most.
        """
        sequences = torch.arange(len(record.num_steps), device=record.num_steps.device)
        rows = sequences.repeat_interleave(record.num_steps)
        starts = record.num_steps.cumsum(0) - record.num_steps
        places = torch.arange(len(rows), device=rows.device) - starts[rows]
        behind_prompt = record.steps > prompt_lengths[rows]
        return cls(rows[behind_prompt], record.steps[behind_prompt].long(), places[behind_prompt])


@dataclass
class _Watch:
    """What the attention of a replay hands on: the log-probabilities of every layer's draws."""

    compressor: Drawn
    rollout: Rollout
    death: Tensor | list[Tensor]  # (B, H, T) of each of the model's layers
    places: dict[int, int]  # of the layers that are evicted from, in the record
    events: Events
    drawn: Tensor | None  # (S, L, H, M) positions in the order drawn
    orders: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per layer: (S, H), and the order (S, H, M)
    hidden: Tensor | None = None  # (B, T, E) of the layer that runs, if the scores are made of it

    def watching(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Catch the input of every layer's attention, for compressors that ask for it."""
        return attention_inputs(model, self._catch) if self.compressor.needs_hidden_states else nullcontext()

    def _catch(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def see(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Score the events of a layer from its queries, keys and values (B, ., T, D), rotated."""
        if layer not in self.places:  # it has a window
            return
        if not len(self.events.rows):
            self.orders.append((query.new_zeros(0, key.shape[1]), self.death[layer].new_zeros(0, key.shape[1], 0)))
            return
        state, died = self._state(layer, query, key, value, scale)
        logits = self.compressor.logits(state)
        if self.drawn is None:
            order = _drawn_order(logits.detach(), died, state)
        else:
            order = _entries_of(self.drawn[:, self.places[layer]], state)
        positions = state.positions.gather(-1, order.clamp(min=0)).masked_fill(order < 0, -1)
        self.orders.append((ordered_logprob(logits, order), positions.to(torch.int32)))

    def _state(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[LayerState, Tensor]:
        """What the compressor saw at every event, in the form of slots, and which entries (S, H, N) it evicted."""
        rows, steps, compressor = self.events.rows, self.events.steps, self.compressor
        death = self.death[layer][rows]  # (S, H, T)
        index = torch.arange(death.shape[-1], device=death.device)
        alive = (index < steps[:, None, None]) & (death >= steps[:, None, None])
        width = int(alive.sum(dim=-1).max())
        positions = (~alive).to(torch.int8).argsort(dim=-1, stable=True)[..., :width]  # the living first, in order
        valid = alive.gather(-1, positions)
        heads = torch.arange(death.shape[1], device=death.device)
        entries = rows[:, None, None], heads[:, None], positions
        places = steps[:, None] - 1 - torch.arange(compressor.num_queries, device=death.device)  # newest first
        groups = torch.arange(query.shape[1], device=death.device)
        queries = query[rows[:, None, None], groups[:, None], places.clamp(min=0)[:, None]]
        prompts, numbers, turns = self.rollout.prompt_lengths[rows], self.rollout.keys, self.rollout.turns
        assert numbers is not None
        state = LayerState(
            keys=key[entries], values=value[entries], valid=valid, positions=positions, lengths=valid.sum(dim=-1),
            token_ids=self.rollout.sequences[rows[:, None, None], positions], prompt_lengths=prompts, queries=queries,
            query_positions=places.clamp(min=-1), sequence_keys=numbers[rows, 1], prompt_keys=numbers[rows, 0],
            layer=layer, scale=scale, inv_freq=key.new_zeros(0), attention_scaling=1.0,
            state={name: worth[entries] for name, worth in self._constant_state(layer, key, value).items()},
            turns=None if turns is None else turns[rows[:, None, None], positions],
        )  # fmt: skip
        return state, valid & (death.gather(-1, positions) == steps[:, None, None])

    def _constant_state(self, layer: int, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Running numbers (B, H, T) of all tokens, which keep those they entered with."""
        shape, device = key.shape[:3], key.device
        state = {name: key.new_zeros(shape, dtype=torch.float32) for name in self.compressor.state_fields}
        if state:
            lengths = torch.full(shape[:2], shape[2], dtype=torch.int32, device=device)
            positions = torch.arange(shape[2], device=device).expand(shape[0], -1)
            inputs = {} if self.hidden is None else {"hidden_states": self.hidden.to(torch.float32)}
            prompts = self.rollout.prompt_lengths
            with torch.autocast(device.type, enabled=False):
                self.compressor.update_state(
                    StateUpdate(state, {}, lengths, positions, key, value, prompts, layer, inputs)
                )
        return state


def _drawn_order(logits: Tensor, died: Tensor, state: LayerState) -> Tensor:
    """Indices (S, H, M) of what died, first drawn first, -1 behind the last."""
    perturbed = (logits - log_exponential(state)).masked_fill(~died, -torch.inf)
    count = died.sum(dim=-1, keepdim=True)
    order = perturbed.argsort(dim=-1, descending=True, stable=True)[..., : int(count.max())]
    return order.masked_fill(torch.arange(order.shape[-1], device=order.device) >= count, -1)


def _entries_of(positions: Tensor, state: LayerState) -> Tensor:
    """Indices (S, H, M) among the entries of the tokens at these positions, -1 stays."""
    ordered = state.positions.masked_fill(~state.valid, torch.iinfo(torch.int64).max)
    entries = torch.searchsorted(ordered.contiguous(), positions.clamp(min=0).long().contiguous())
    return entries.masked_fill(positions < 0, -1)


def _attend(
    watch: _Watch, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    watch.see(layer, query, key, value, scale)
    return death_attention(query, key, value, watch.death[layer], scale, sinks)


register(DRAWS, "draws", _attend)


def draw_statistics(
    model: PreTrainedModel, rollout: Rollout, compressor: Drawn, draws: EvictionDraws | None = None,
    **head: Any,
) -> tuple[Tensor, Tensor, EvictionDraws]:  # fmt: skip
    """Replayed log-probs and entropies (B, T) of the tokens, and the log-probs of the drawn evictions, with gradient.

    Left out are draws at the end of a prompt, which its samples share.

    Args:
        model: Policy; with the sampler's weights the token log-probs equal ``rollout.sampler_logprobs``.
        rollout: Sequences with their evictions and keys.
        compressor: What drew them.
        draws: The same draws under the policy before the update, whose order counts; None finds the order, which asks
            for that very policy.
        **head: Arguments of :func:`~sparse_rl_lightning.logprobs.sequence_logprobs`.

    Raises:
        ValueError: If there is nothing to replay.
    """
    evictions = replayable(model, rollout)
    death, events = deaths_by_layer(model.config, evictions), Events.of(evictions, rollout.prompt_lengths)
    places = {layer: number for number, layer in enumerate(recorded_layers(model.config, evictions))}
    drawn = None if draws is None else draws.order[events.rows, events.places]
    watch = _Watch(compressor, rollout, death, places, events, drawn)
    with attention_implementation(model, DRAWS), watch.watching(model):
        logprobs, entropy = sequence_logprobs(
            model, rollout.sequences, rollout.completion_mask, draws=watch, routing=rollout.routing, **head
        )
    most = int(evictions.num_steps.max()) if draws is None else draws.steps.shape[1]
    return logprobs, entropy, _collected(watch, len(rollout), most)


def _collected(watch: _Watch, count: int, events: int) -> EvictionDraws:
    """By sequence and event, with room for so many events."""
    cells, layers = (watch.events.rows, watch.events.places), len(watch.orders)
    logprobs = torch.stack([of_layer for of_layer, _ in watch.orders], dim=1)  # (S, L, H)
    most = max(order.shape[-1] for _, order in watch.orders)
    orders = [F.pad(order, (0, most - order.shape[-1]), value=-1) for _, order in watch.orders]
    heads = logprobs.shape[-1]
    steps = cells[0].new_full((count, events), -1)
    steps[cells] = watch.events.steps
    order = torch.full((count, events, layers, heads, most), -1, dtype=torch.int32, device=steps.device)
    order[cells] = torch.stack(orders, dim=1)
    return EvictionDraws(steps, order, logprobs.new_zeros(count, events, layers, heads).index_put(cells, logprobs))
