"""SlotCache: fixed memory for a fixed number of sequences, eviction in place, and the record of deaths.

Letters as in types.py. Slots in use are always the first ones, 0 to n - 1, so a decode step works on views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.rollout.geometry import CacheGeometry
from sparse_rl_lightning.types import NEVER, LayerState

_PER_SLOT = ("tokens", "seen", "limits", "prompt_lengths", "sequence_keys")


class SlotCache:
    """KV memory for ``num_slots`` sequences of ``capacity`` entries per layer and head, allocated once.

    Keys keep the rotation they were written with; ``positions`` remembers where they come from. An evicted
    entry's memory is reused by the next token, so nothing grows with the length of a sequence.

    Args:
        geometry: Sizes of the model's cache.
        num_slots: Sequences held at the same time.
        capacity: Entries per layer, slot and KV head.
        num_queries: Most recent queries kept for scoring, 0 for none.
        max_length: Longest sequence in tokens, for the token ids and the record of deaths.
    """

    def __init__(
        self, geometry: CacheGeometry, num_slots: int, capacity: int, num_queries: int, max_length: int
    ) -> None:
        g = geometry
        layer_slots, device = (g.num_layers, num_slots), g.device
        self.geometry, self.num_slots, self.capacity, self.max_length = g, num_slots, capacity, max_length
        self.num_queries = num_queries
        self.pools = KVPools.uniform((*layer_slots, g.num_kv_heads), capacity, g.head_dim, g.dtype, device)
        self.layers = [self.pools.layer(layer) for layer in range(g.num_layers)]
        self.key_pool, self.value_pool, self.lengths = self.pools.keys, self.pools.values, self.pools.lengths
        self.keys = self.key_pool.view(*layer_slots, g.num_kv_heads, capacity, g.head_dim)
        self.values = self.value_pool.view_as(self.keys)
        self.positions = self.pools.positions.view(self.keys.shape[:-1])
        self.queries = torch.zeros(*layer_slots, g.num_heads, num_queries, g.head_dim, dtype=g.dtype, device=device)
        self.death = torch.full((*layer_slots, g.num_kv_heads, max_length), NEVER, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)
        self.seen = torch.zeros(num_slots, dtype=torch.int64, device=device)  # tokens fed so far
        self.limits = torch.zeros_like(self.seen)  # entries at which a slot is compressed
        self.prompt_lengths = torch.zeros_like(self.seen)
        self.sequence_keys = torch.zeros_like(self.seen)
        self._slots = torch.arange(num_slots, device=device)
        self._entries = torch.arange(capacity, device=device)

    def serves(self, geometry: CacheGeometry, num_slots: int, capacity: int, num_queries: int, max_length: int) -> bool:
        """Whether a rollout of these sizes can use this memory."""
        same = (geometry.dtype, geometry.device, num_queries) == (
            self.geometry.dtype, self.geometry.device, self.num_queries
        )  # fmt: skip
        enough = num_slots <= self.num_slots and capacity <= self.capacity and max_length <= self.max_length
        # memory made under inference_mode cannot be written outside of it
        return same and enough and (torch.is_inference_mode_enabled() or not self.key_pool.is_inference())

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values: the sum of all capacities times the bytes per entry."""
        return self.pools.nbytes

    # ---------------------------------------------------------------- one layer, called from attention

    def append_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write one token per slot in use, remember its query, and attend over all live entries, itself included.

        Args:
            layer: Layer index.
            query: (n, Hq, D) post-RoPE, for slots 0 to n - 1.
            key: (n, H, D) post-RoPE.
            value: (n, H, D).

        Returns:
            (n, Hq, D).
        """
        pools, slots = self.layers[layer], self._slots[: query.shape[0]]
        own_query, key, value = (t.to(self.key_pool.dtype).contiguous() for t in (query, key, value))
        ops.append(pools, slots, self.seen, own_query, key, value, self.queries[layer])
        return ops.attend(pools, slots, own_query, self.geometry.scale, self.capacity).to(query.dtype)

    def store_prompts(
        self, layer: int, slots: Tensor, query: Tensor, key: Tensor, value: Tensor, compressor: Compressor
    ) -> None:
        """Take one layer of freshly read prompts into their slots, compressed to the budget where they do not fit.

        Args:
            layer: Layer index.
            slots: (P,) where the prompts go; ``begin`` was called for them.
            query: (P, Hq, T, D), right-padded.
            key: (P, H, T, D).
            value: (P, H, T, D).
            compressor: Chooses what stays of a prompt that reaches the slot's limit.
        """
        state = self._prompt_state(layer, slots, query, key, value)
        lengths = self.prompt_lengths[slots]
        scores = torch.zeros(state.valid.shape, dtype=torch.float32, device=key.device)
        budgets = lengths.clone()
        too_long = (lengths >= self.limits[slots]).nonzero().squeeze(1)
        if compressor.evicts and len(too_long):
            scores[too_long] = compressor.checked_score(_take_slots(state, too_long)).float()
            budgets[too_long] = compressor.budget
        heads, key, value = state.lengths.shape, *(t.to(self.key_pool.dtype).contiguous() for t in (key, value))
        source = KVPools.from_dense(key, value, lengths[None, :, None].expand(1, *heads))
        ops.select_and_store(
            self.pools.single(layer), slots, scores[None], budgets[None, :, None].expand(1, *heads).int().contiguous(),
            compressor.num_sinks, compressor.window, self.seen, source, self.death[layer : layer + 1],
        )  # fmt: skip
        self.queries[layer, slots] = state.queries.to(self.queries.dtype)

    # ---------------------------------------------------------------- whole slots

    def begin(self, slots: Tensor, prompts: list[list[int]], sequence_keys: Tensor, compressor: Compressor) -> None:
        """Empty these slots and give them to new prompts; their keys and values follow layer by layer."""
        lengths = torch.tensor([len(p) for p in prompts], device=slots.device)
        # a prompt that is stored whole has the buffer to itself before it is compressed for the first time
        held = torch.zeros_like(lengths) if compressor.compress_prompt else lengths
        self.limits[slots] = held.clamp(min=compressor.budget) + compressor.buffer
        self.lengths[:, slots] = 0
        self.death[:, slots] = NEVER
        self.seen[slots] = lengths
        self.prompt_lengths[slots] = lengths
        self.sequence_keys[slots] = sequence_keys
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            self.tokens[slot, : len(prompt)] = torch.tensor(prompt, device=slots.device)

    def advance(self, num_active: int) -> None:
        """Count one more token fed to the slots in use, after all layers have appended it."""
        self.seen[:num_active] += 1

    def compress_full(self, num_active: int, compressor: Compressor) -> None:
        """Compress every slot in use that has reached its limit, so that the next token finds room."""
        longest = self.lengths[:, :num_active].amax(dim=(0, 2))
        full = (longest >= self.limits[:num_active]).nonzero().squeeze(1)
        if not compressor.evicts or not len(full):
            return
        scores = torch.stack(
            [compressor.checked_score(self.layer_state(layer, full)).float() for layer in range(len(self.layers))]
        )
        budgets = torch.full(scores.shape[:3], compressor.budget, dtype=torch.int32, device=full.device)
        ops.select_and_compact(
            self.pools, full, scores, budgets, compressor.num_sinks, compressor.window, self.seen, self.death
        )
        self.limits[full] = compressor.budget + compressor.buffer

    def layer_state(self, layer: int, slots: Tensor) -> LayerState:
        """What a compressor sees of one layer of these slots."""
        own = _as_range(slots)  # a view where the slots are neighbours
        positions, lengths = self.positions[layer, own].long(), self.lengths[layer, own]
        return self._state(
            layer, slots, self.keys[layer, own], self.values[layer, own], self.queries[layer, own], positions,
            self._entries < lengths.unsqueeze(-1),
        )  # fmt: skip

    def read(self, slot: int) -> dict[str, Tensor]:
        """A copy of everything one slot holds, for :meth:`write`."""
        return {name: tensor.select(dim, slot).clone() for name, tensor, dim in self._per_slot()}

    def write(self, slots: Tensor, content: dict[str, Tensor]) -> None:
        """Fill these slots with what :meth:`read` returned: a prompt forked to several samples."""
        for name, tensor, dim in self._per_slot():
            tensor.select(dim, int(slots[0])).copy_(content[name])
        self._fork(slots[:1].expand(len(slots) - 1), slots[1:])

    def copy(self, source: int, destination: int) -> None:
        """Move a sequence to another slot."""
        self._fork(self._slots[source : source + 1], self._slots[destination : destination + 1])

    # ---------------------------------------------------------------- inside

    def _fork(self, sources: Tensor, destinations: Tensor) -> None:
        ops.fork(self.pools, sources.contiguous(), destinations.contiguous(), self.queries, self.death)
        for name in _PER_SLOT:
            tensor: Tensor = getattr(self, name)
            tensor[destinations] = tensor[sources]

    def _per_slot(self) -> list[tuple[str, Tensor, int]]:
        per_layer = ("keys", "values", "positions", "lengths", "queries", "death")
        return [(n, getattr(self, n), 1) for n in per_layer] + [(n, getattr(self, n), 0) for n in _PER_SLOT]

    def _prompt_state(self, layer: int, slots: Tensor, query: Tensor, key: Tensor, value: Tensor) -> LayerState:
        num_prompts, num_kv_heads, width, _ = key.shape
        index = torch.arange(width, device=key.device).expand(num_prompts, num_kv_heads, width)
        valid = index < self.prompt_lengths[slots][:, None, None]
        ring = self._ring_positions(slots).clamp(min=0)
        rows = torch.arange(num_prompts, device=key.device)[:, None]
        recent = query.transpose(1, 2)[rows, ring].transpose(1, 2)  # (P, Hq, A, D)
        return self._state(layer, slots, key, value, recent, index, valid)

    def _state(
        self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, queries: Tensor, positions: Tensor,
        valid: Tensor,
    ) -> LayerState:  # fmt: skip
        g = self.geometry
        tokens = self.tokens[slots].unsqueeze(1).expand(-1, g.num_kv_heads, -1)
        return LayerState(
            keys=keys, values=values, valid=valid, positions=positions, lengths=valid.sum(dim=-1),
            token_ids=tokens.gather(2, positions.clamp(0, self.max_length - 1)),
            prompt_lengths=self.prompt_lengths[slots], queries=queries,
            query_positions=self._ring_positions(slots), sequence_keys=self.sequence_keys[slots],
            layer_index=layer, scale=g.scale, inv_freq=g.inv_freq, attention_scaling=g.attention_scaling,
        )  # fmt: skip

    def _ring_positions(self, slots: Tensor) -> Tensor:
        """(S, A): which token each place of the query ring speaks of, -1 for none yet."""
        last = self.seen[slots][:, None] - 1
        ring = torch.arange(self.num_queries, device=slots.device)
        return (last - (last - ring) % max(self.num_queries, 1)).clamp(min=-1)


def _as_range(slots: Tensor) -> Tensor | slice:
    """The same slots as a slice where they are neighbours in order, so that indexing makes no copy."""
    first, last = int(slots[0]), int(slots[-1])
    neighbours = last - first + 1 == len(slots) and bool((slots.diff() == 1).all())
    return slice(first, last + 1) if neighbours else slots


def _take_slots(state: LayerState, rows: Tensor) -> LayerState:
    """The same state for a subset of its slots."""
    per_slot = {
        name: value[rows] for name, value in vars(state).items() if isinstance(value, Tensor) and name != "inv_freq"
    }
    return LayerState(
        **per_slot, layer_index=state.layer_index, scale=state.scale, inv_freq=state.inv_freq,
        attention_scaling=state.attention_scaling,
    )  # fmt: skip
