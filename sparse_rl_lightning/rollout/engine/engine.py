"""Engine: the memory, the weights made for decoding and the decode step of one kind of rollout.

Nothing in a step waits for the device or depends on a number that the host does not know, so it can be captured in a
CUDA graph: what changes from step to step lies in tensors. The exception are compressors with running state (H2O),
whose steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import CacheSize, SlotCache
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.decoder import Decoder
from sparse_rl_lightning.rollout.engine.graphs import Rows, StepGraphs
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan
from sparse_rl_lightning.rollout.engine.prefill import Prefill, prefill
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, draw, occurring
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs


@dataclass(frozen=True)
class EngineKey:
    """Everything that an engine is made for; a rollout with an equal key can use the same engine."""

    geometry: CacheGeometry
    size: CacheSize
    params: SamplingParams  # as far as drawing goes
    compressor: Compressor
    end_token_ids: tuple[int, ...] = ()
    cuda_graphs: bool = False
    logs: type[SequenceLogs] = SequenceLogs
    memory_plan: MemoryPlan | None = field(default=None, compare=False)  # by which the slots were limited

    def after(self, last: EngineKey) -> EngineKey:
        """This key with the memory of the last one where that will do, and with room for both where they alternate.

        A slot may be larger than needed where its size depends on the prompts; where the compressor alone decides, one
        that was raised or lowered gets slots of its own size.
        """
        own, before, c = self.size, last.size, self.compressor
        if self.geometry != last.geometry:
            return self
        if before.covers(own) and (own.capacities == before.capacities or not (c.evicts and c.compress_prompt)):
            return replace(self, size=before)
        slots, length = max(own.num_slots, before.num_slots), max(own.max_length, before.max_length)
        both = replace(own, num_slots=slots, max_length=length)
        alike = both == replace(before, num_slots=slots, max_length=length)
        return replace(self, size=both) if alike and self.memory_plan is None else self


class Engine:
    """Runs the model on a compressed cache for the scheduler: prompts, then one token for every running sequence.

    Args:
        model: The policy, whose weights are taken over as they are now.
        key: What the engine is made for.
        cache: Memory of an earlier engine with the same geometry and size; by default it is allocated.
        decoder: The decoder of an earlier engine that still serves the model.
    """

    def __init__(
        self, model: PreTrainedModel, key: EngineKey, cache: SlotCache | None = None, decoder: Decoder | None = None
    ) -> None:
        g, size = key.geometry, key.size
        self.key = key
        self.compression = Compression(key.compressor, g.num_layers)
        self.decoder = decoder or Decoder(model, g)
        self.cache = cache or size.allocate(g)
        self.cache.geometry = g
        self.logs = key.logs(size.num_slots, size.max_length, key.params, g.device)
        self.end_ids = torch.tensor(key.end_token_ids, dtype=torch.int64, device=g.device)
        self._graphs = self._new_graphs()

    def take_weights(self, model: PreTrainedModel, geometry: CacheGeometry) -> None:
        """Go on with the model's weights as they are now; the graphs stay where no weight has moved."""
        if self.decoder.serves(model, geometry):
            self.decoder.refresh()
            return
        del self.decoder, self._graphs  # copies of weights are freed before new ones are made
        self.decoder = Decoder(model, geometry)
        self._graphs = self._new_graphs()

    def prefill(self, prompts: list[Prefill], max_tokens: int) -> Iterator[tuple[Prefill, Tensor, int]]:
        """Fill slots with prompts; see :func:`~sparse_rl_lightning.rollout.engine.prefill.prefill`."""
        return prefill(self.cache, self.decoder, self.compression, prompts, max_tokens)

    def decode(self, rows: Rows) -> None:
        """Feed each slot its last token and draw the next, from a CUDA graph where that is possible."""
        if self._graphs is None:
            self.step(rows)
        else:
            self._graphs.run(self.step, rows)

    def step(self, rows: Rows) -> None:
        """One decode step: feed, draw, write down.

        Slots that are full are compressed afterwards by the host, which knows all lengths.
        """
        cache, decoder, compressor = self.cache, self.decoder, self.compression.compressor
        tokens, positions = cache.begin_step(rows.places)

        def attend(
            layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
        ) -> Tensor:
            probs = cache.probabilities(layer, len(rows.used))
            out = cache.append_and_attend(layer, rows.slots, query, key, value, cos, sin, probs)
            if cache.size.has_state:
                weights = decoder.output_weights[layer] if compressor.needs_output_norms else None
                self.compression.note_step(cache, layer, rows.used, positions, probs, hidden, weights)
            return out

        hidden = decoder(tokens, positions, attend)
        cache.end_step(rows.slots, rows.places, positions)
        self.draw(decoder.logits(hidden), rows.places)

    def draw(self, logits: Tensor, places: Tensor) -> None:
        """Draw the next token of these slots from (n, V) logits and write it down."""
        cache, params = self.cache, self.key.params
        at = cache.seen[places]
        steps = at - cache.prompt_lengths[places]
        occurred = occurring(cache.tokens[places], at, logits.shape[-1]) if params.penalizes else None
        drawn = draw(logits, params, cache.sequence_keys[places], steps, self.end_ids, occurred)
        cache.tokens[places, at] = drawn.tokens
        self.logs.note(places, at, drawn, self.end_ids)

    def _new_graphs(self) -> StepGraphs | None:
        device = self.key.geometry.device
        enabled = self.key.cuda_graphs and device.type == "cuda" and self.cache.can_capture
        return StepGraphs(self.key.size.num_slots, device) if enabled else None
