"""One decode step for a fixed number of rows: feed each slot its last token, draw the next, write it down.

Nothing here waits for the device or depends on a number the host does not know, so the step can be captured in a CUDA
graph: what changes from step to step lies in tensors. The exception are compressors with running state (H2O), whose
steps run eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.rollout.cache.compression import Compression
from sparse_rl_lightning.rollout.cache.slots import SlotCache
from sparse_rl_lightning.rollout.engine.decoder import Decoder
from sparse_rl_lightning.rollout.engine.logs import Tracks
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, draw, occurring


@dataclass
class Rows:
    """Which slot each row of a batch works on."""

    slots: Tensor  # (R,) int64, -1 for rows that pad the batch: what the ops take
    places: Tensor  # (R,) int64, the last row of the per-slot state for those: what indexing takes
    used: list[int]  # the slots without padding, as the host knows them

    @classmethod
    def of(cls, slots: list[int], count: int, num_slots: int, device: torch.device) -> Rows:
        """Rows for these slots, padded to ``count``."""
        padding = count - len(slots)
        return cls(
            torch.tensor(slots + [-1] * padding, device=device),
            torch.tensor(slots + [num_slots] * padding, device=device),
            slots,
        )


@dataclass(frozen=True)
class Step:
    """A decode step over the given memory."""

    decoder: Decoder
    cache: SlotCache
    tracks: Tracks
    params: SamplingParams
    end_ids: Tensor  # (E,)
    compression: Compression

    def __call__(self, rows: Rows) -> None:
        """Feed, draw, write down; the cache is compressed afterwards, by the host, which knows all lengths."""
        cache, places = self.cache, rows.places
        positions = cache.seen[places]

        def attend(
            layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
        ) -> Tensor:
            probs = cache.probabilities(layer, len(rows.used))
            out = cache.append_and_attend(layer, rows.slots, query, key, value, cos, sin, probs)
            if cache.size.has_state:
                self.compression.note_step(cache, self.decoder, layer, rows.used, positions, probs, hidden)
            return out

        if cache.pages is not None:
            cache.pages.begin_step(places, positions)
        hidden = self.decoder(cache.tokens[places, positions], positions, attend)
        cache.seen[places] = positions + 1
        cache.seen[-1:].zero_()  # padding stays at its first token
        self.tracks.held[places, positions] = cache.held(rows.slots.clamp(min=0))
        if cache.pages is not None and self.tracks.read is not None:
            self.tracks.read[places, positions] = cache.pages.entries_read(cache.lengths[:, rows.slots.clamp(min=0)])
        self.draw(self.decoder.logits(hidden), places)

    def draw(self, logits: Tensor, places: Tensor) -> None:
        """Draw the next token of these slots from (n, V) logits and write it down."""
        cache, tracks = self.cache, self.tracks
        at = cache.seen[places]
        steps = at - cache.prompt_lengths[places]
        occurred = occurring(cache.tokens[places], at, logits.shape[-1]) if self.params.penalizes else None
        drawn = draw(logits, self.params, cache.sequence_keys[places], steps, self.end_ids, occurred)
        cache.tokens[places, at] = drawn.tokens
        tracks.logprobs[places, at] = drawn.logprobs
        tracks.note_broken(places, at, drawn.logprobs.isnan())
        if tracks.behavior is not None and drawn.behavior is not None:
            tracks.behavior[places, at] = drawn.behavior
        if tracks.versions is not None:
            tracks.versions[places, at] = tracks.version
        if drawn.topk_ids is not None and drawn.topk_logprobs is not None:
            tracks.topk_ids[places, at] = drawn.topk_ids
            tracks.topk_logprobs[places, at] = drawn.topk_logprobs
        tracks.note_end(places, at, (drawn.tokens[:, None] == self.end_ids).any(dim=-1))
