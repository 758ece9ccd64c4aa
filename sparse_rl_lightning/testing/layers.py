"""Random layer caches and prompts for compressors: ragged, and NaN wherever a compressor must not look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.records import LayerState, StateUpdate

NUM_LAYERS, NUM_HEADS, GROUP_SIZE, HEAD_DIM = 2, 2, 2, 16
"""The sizes of ``tiny_model()``, so that statistics fit both."""

TURN_START, TURN_LENGTH = 6, 3
"""Place of the first turn, behind every prompt, and the length of each, drawn or given."""

PER_SLOT = [
    f.name
    for f in fields(LayerState)
    if f.name not in ("layer", "scale", "inv_freq", "attention_scaling", "state", "head_state")
]
"""The fields of a LayerState whose first dimension is the slot, except running state."""


def random_layer(
    seed: int = 0,
    *,
    capacity: int = 14,
    lengths: list[list[int]] | None = None,
    num_sinks: int = 2,
    window: int = 3,
    num_queries: int = 3,
    state_fields: tuple[str, ...] = (),
    head_state_fields: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerState:
    """Three sequences, already thinned out by compressions, in two heads with different tokens.

    The first sequence is as long as its longer head, the others are longer than their slots. Sinks and most recent
    tokens are present, any others may be missing. Some keys are alike. Free memory is NaN, its positions are -1.

    Args:
        seed: Seed of all numbers.
        capacity: Number of entries in a slot, N.
        lengths: Live entries of the three sequences in both heads. Default is a prompt of 3 tokens, and full and
            part-filled heads.
        num_sinks: Number of first positions that are present.
        window: Number of most recent tokens that are present.
        num_queries: Number of queries in the ring, A.
        state_fields: Names of running numbers, drawn from (0, 1).
        head_state_fields: Names of running numbers per head, with the width of each.
        dtype: Type of keys, values and queries.
    """
    g = torch.Generator().manual_seed(seed)
    short = min(3, capacity)
    live = torch.tensor(
        lengths or [[short, short], [capacity, -(-2 * capacity // 3)], [max(capacity - 2, 1), capacity]]
    )
    seen = torch.tensor([int(live[0].max()), capacity + 11, capacity + 26])
    heads = (3, NUM_HEADS, capacity)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    keys, values = normal(2, *heads, HEAD_DIM)
    keys[:, :, 1::3] = keys[:, :, :1] + 0.2 * keys[:, :, 1::3]
    queries = normal(3, NUM_HEADS * GROUP_SIZE, num_queries, HEAD_DIM)
    valid = torch.arange(capacity) < live.unsqueeze(-1)
    free = ~valid
    positions = torch.full(heads, -1)
    for s, h in torch.cartesian_prod(torch.arange(3), torch.arange(NUM_HEADS)).tolist():
        tokens = _positions(int(live[s, h]), int(seen[s]), num_sinks, window, g)
        positions[s, h, : len(tokens)] = tokens
    last = seen[:, None] - 1
    ring = (last - (last - torch.arange(num_queries)) % max(num_queries, 1)).clamp(min=-1)
    state = {
        name: torch.rand(heads, generator=g, dtype=torch.float32).masked_fill(free, torch.nan) for name in state_fields
    }
    head_state = {
        name: torch.rand(3, NUM_HEADS, width, generator=g, dtype=torch.float32)
        for name, width in (head_state_fields or {}).items()
    }
    return LayerState(
        keys=keys.masked_fill(free.unsqueeze(-1), torch.nan).to(dtype),
        values=values.masked_fill(free.unsqueeze(-1), torch.nan).to(dtype),
        valid=valid,
        positions=positions,
        lengths=live,
        token_ids=positions % 11,
        prompt_lengths=torch.tensor([short, 5, 6]),
        queries=queries.masked_fill((ring < 0)[:, None, :, None], torch.nan).to(dtype),
        query_positions=ring,
        sequence_keys=torch.tensor([2**62 + 1, -5, 77]),
        prompt_keys=torch.tensor([3, 2**61, -8]),
        layer=1,
        scale=HEAD_DIM**-0.5,
        inv_freq=10000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM),
        attention_scaling=1.0,
        state=state,
        head_state=head_state,
        turns=torch.where(positions < TURN_START, 0, 1 + (positions - TURN_START) // TURN_LENGTH),
    )


def fill_free_memory(layer: LayerState, garbage: float) -> LayerState:
    """The same layer with other content in free memory."""
    free, index = ~layer.valid, 0 if garbage == 0 else 10**6
    layer = _change(layer, lambda t: t.masked_fill(free.unsqueeze(-1), garbage), ("keys", "values"))
    layer = _change(layer, lambda t: t.masked_fill(free, index), ("positions", "token_ids", "turns"))
    return _change_state(layer, lambda t: t.masked_fill(free, garbage))


def take_slots(layer: LayerState, order: list[int]) -> LayerState:
    """Some slots of a layer, in the given order."""
    head_state = {name: numbers[order] for name, numbers in layer.head_state.items()}
    taken = _change_state(_change(layer, lambda t: t[order], PER_SLOT), lambda t: t[order])
    return replace(taken, head_state=head_state)


def resize(layer: LayerState, more: int) -> LayerState:
    """The same layer with more free entries at the end of each slot, or with fewer."""
    layer = _change(layer, lambda t: F.pad(t, (0, 0, 0, more)), ("keys", "values"))
    layer = _change(layer, lambda t: F.pad(t, (0, more)), ("valid", "positions", "token_ids", "turns"))
    return _change_state(layer, lambda t: F.pad(t, (0, more)))


def cast(layer: LayerState, dtype: torch.dtype) -> LayerState:
    """The same layer in another floating-point type."""
    return _change(layer, lambda t: t.to(dtype), ("keys", "values", "queries"))


def move(layer: LayerState, device: str) -> LayerState:
    """The same layer on another device."""
    layer = _change(layer, lambda t: t.to(device), (*PER_SLOT, "inv_freq"))
    head_state = {name: numbers.to(device) for name, numbers in layer.head_state.items()}
    return replace(_change_state(layer, lambda t: t.to(device)), head_state=head_state)


def _change(layer: LayerState, function: Callable[[Tensor], Tensor], names: Iterable[str]) -> LayerState:
    changed: dict[str, Any] = {name: function(getattr(layer, name)) for name in names}
    return replace(layer, **changed)


def _change_state(layer: LayerState, function: Callable[[Tensor], Tensor]) -> LayerState:
    return replace(layer, state={name: function(tensor) for name, tensor in layer.state.items()})


def _positions(length: int, seen: int, num_sinks: int, window: int, g: torch.Generator) -> Tensor:
    """The tokens in a head: sinks and window first, then any others, in order."""
    recent = torch.arange(seen - min(window, length), seen)
    sinks = torch.arange(min(num_sinks, length - len(recent)))
    num_middle = length - len(recent) - len(sinks)
    middle = torch.randperm(seen - len(recent) - len(sinks), generator=g)[:num_middle]
    return torch.cat([sinks, len(sinks) + middle.sort().values, recent])


HIDDEN_SIZE = 64
"""The hidden size of ``tiny_model()``."""


class RandomPrompts:
    """Three prompts of equal length in one layer of ``tiny_model()``'s sizes, which update running numbers."""

    LENGTH: ClassVar[int] = 9
    FREE: ClassVar[int] = 2  # free entries after the prompt

    def __init__(self, compressor: Compressor, seed: int = 0, device: str = "cpu") -> None:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        heads, width = (3, NUM_HEADS), self.LENGTH + self.FREE
        unseen = torch.ones(self.LENGTH, width, dtype=torch.bool).triu(1)
        attention = normal(*heads, GROUP_SIZE, self.LENGTH, width).masked_fill(unseen, -torch.inf).softmax(dim=-1)
        self.compressor, self.device = compressor, device
        tensors = {
            "keys": normal(*heads, self.LENGTH, HEAD_DIM),
            "values": normal(*heads, self.LENGTH, HEAD_DIM),
            "positions": torch.arange(self.LENGTH).expand(3, -1).contiguous(),
            "prompt_lengths": torch.full((3,), self.LENGTH),
            "mass": attention.sum(dim=2),
            "hidden_states": normal(3, self.LENGTH, HIDDEN_SIZE),
            "output_norms": normal(3, NUM_HEADS * GROUP_SIZE, self.LENGTH).abs(),
        }
        self.inputs: dict[str, Tensor] = {name: tensor.to(device) for name, tensor in tensors.items()}

    def read(self, cuts: Sequence[int], slots: Sequence[int] = (0, 1, 2)) -> dict[str, Tensor]:
        """All running numbers after the prompts in ``slots`` were read in blocks of ``cuts`` tokens.

        Returns:
            ``update.state['name']`` (S, H, T) and ``update.head_state['name']`` (S, H, C).
        """
        c, chosen, shape = self.compressor, list(slots), (len(slots), NUM_HEADS)
        width = self.LENGTH + self.FREE
        like: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        state = {name: torch.full((*shape, width), torch.nan, **like) for name in c.state_fields}
        by_head = {name: torch.zeros(*shape, count, **like) for name, count in c.head_state_fields(HEAD_DIM).items()}
        stop = 0
        for count in cuts:
            start, stop = stop, stop + count
            for numbers in state.values():
                numbers[:, :, start:stop] = 0.0
            c.update_state(self._update(chosen, slice(start, stop), state, by_head))
        numbers_by_token = {f"update.state[{name!r}]": numbers[:, :, :stop] for name, numbers in state.items()}
        return numbers_by_token | {f"update.head_state[{name!r}]": numbers for name, numbers in by_head.items()}

    def _update(
        self, slots: list[int], block: slice, state: dict[str, Tensor], by_head: dict[str, Tensor]
    ) -> StateUpdate:
        c = self.compressor
        lengths = torch.full((len(slots), NUM_HEADS), block.stop, dtype=torch.int32, device=self.device)
        tensors = {name: tensor if len(slots) == 3 else tensor[slots] for name, tensor in self.inputs.items()}
        offered: dict[str, tuple[bool, Any]] = {
            "mass": (c.needs_attention, tensors["mass"][:, :, block]),
            "hidden_states": (c.needs_hidden_states, tensors["hidden_states"][:, block]),
            "output_norms": (c.needs_output_norms, tensors["output_norms"][:, :, block]),
        }
        return StateUpdate(
            state=state, head_state=by_head, lengths=lengths, positions=tensors["positions"][:, block],
            keys=tensors["keys"][:, :, block], values=tensors["values"][:, :, block],
            prompt_lengths=tensors["prompt_lengths"], layer_index=1,
            asked={name: tensor for name, (wanted, tensor) in offered.items() if wanted},
        )  # fmt: skip
