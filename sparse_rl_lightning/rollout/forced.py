"""Given texts under a compressed cache: what another compressor would have kept of the same words, and said to them.

The rollout's own cache, decode step and compressions do the work; only the token drawn is replaced by the text's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.rollout.cache import CacheSize, SlotCache
from sparse_rl_lightning.rollout.compression import Compression
from sparse_rl_lightning.rollout.decoder import Decoder
from sparse_rl_lightning.rollout.geometry import CacheGeometry
from sparse_rl_lightning.rollout.graphs import GraphedStep
from sparse_rl_lightning.rollout.preparation import eval_mode
from sparse_rl_lightning.rollout.run import Plan, Run
from sparse_rl_lightning.rollout.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.step import Step
from sparse_rl_lightning.rollout.tracks import Tracks
from sparse_rl_lightning.types import Rollout

PREFILL_TOKENS = 16384  # read at once


@dataclass(frozen=True)
class ForcedStep(Step):
    """A decode step that writes down the next token of a text instead of drawing one."""

    texts: Tensor  # (S, T) sequence i in slot i
    lengths: Tensor  # (S,)

    def draw(self, logits: Tensor, places: Tensor) -> None:
        """Note what the text's token has for a log-probability, and go on with it."""
        own = places < len(self.texts)  # the others pad the batch
        slots, at = places[own], self.cache.seen[places[own]]
        logprobs = torch.log_softmax(logits[own] / (self.params.temperature or 1.0), dim=-1)
        tokens = self.texts[slots, at]
        self.cache.tokens[slots, at] = tokens
        self.tracks.logprobs[slots, at] = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        self.tracks.note_end(slots, at, at == self.lengths[slots] - 1)


@torch.no_grad()
def forced_rollout(
    model: PreTrainedModel, rollout: Rollout, compressor: Compressor, temperature: float = 1.0, seed: int = 0
) -> Rollout:
    """The rollout as it would be, had the same tokens been drawn under another compressor.

    Tokens stay; evictions, ``sampler_logprobs`` and memory are those of the compressor. With the compressor, the
    weights and the seed that drew the rollout these are its own. For comparing methods on the same text.

    Args:
        model: The policy.
        rollout: The texts.
        compressor: What a full slot keeps.
        temperature: Of the log-probabilities, 1 for greedy rollouts.
        seed: With the number of a sequence it fixes the lots of random eviction.

    Raises:
        ValueError: If the model has layers that cannot be evicted from, or a budget leaves less than sinks and window.
    """
    mask, prompt_lengths = rollout.completion_mask, rollout.prompt_lengths
    lengths = prompt_lengths + mask.sum(dim=1)
    longest_prompt, length = int(prompt_lengths.max()), int(lengths.max())
    prompts = [row[:n].tolist() for row, n in zip(rollout.sequences, prompt_lengths.tolist(), strict=True)]
    params = SamplingParams(max_completion_length=int(mask.sum(dim=1).max()), temperature=temperature, seed=seed)
    geometry, compression = CacheGeometry.of(model), Compression(compressor, model.config.num_hidden_layers)
    capacities = compression.trigger.capacities(longest_prompt, length)
    splits = compressor.evicts and compressor.budget_rule.splits_heads
    longest = longest_prompt + params.max_completion_length
    size = CacheSize(len(rollout), capacities, compressor.num_queries, longest, compressor.state_fields, splits)
    cache, device = SlotCache(geometry, size), geometry.device
    nothing_ends = torch.zeros(0, dtype=torch.int64, device=device)
    with eval_mode(model):
        step = ForcedStep(
            Decoder(model, geometry), cache, Tracks(len(rollout), longest, params, device), params, nothing_ends,
            compression, rollout.sequences.to(device), lengths.to(device),
        )  # fmt: skip
        plan = Plan(params, compression, nothing_ends, None, len(rollout), PREFILL_TOKENS, check_every=1)
        run = Run(plan, GraphedStep(step, enabled=False))
        run.add(prompts, sequence_keys(seed, torch.arange(len(rollout))).tolist())
        for _ in run:
            pass
        forced = run.take(run.complete)
    return _as_wide(forced, rollout)


def _as_wide(forced: Rollout, rollout: Rollout) -> Rollout:
    """Padded like the rollout that the texts are from, so that its masks fit."""
    width = rollout.sequences.shape[1]
    more = (0, width - forced.sequences.shape[1])
    assert forced.evictions is not None  # there is no retriever
    return replace(
        forced,
        sequences=rollout.sequences.to(forced.sequences.device),
        completion_mask=F.pad(forced.completion_mask, more),
        sampler_logprobs=F.pad(forced.sampler_logprobs, more),
        evictions=replace(forced.evictions, length=width),
        finished=rollout.finished.clone(),
    )
