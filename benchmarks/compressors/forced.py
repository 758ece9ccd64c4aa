"""Teacher forcing through a compressed cache, token by token, with all logits: what eviction does to given texts.

The rollout's own cache, decode step and compressions do the work; only the drawn token is replaced by the text's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.quality.cells import TimedCompression
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs
from sparse_rl_lightning.rollout.teacher_forcing import force


@dataclass(frozen=True)
class Forced:
    """What a compressed cache makes of given texts."""

    logits: Tensor  # (B, T, V), zeros in the prompts
    timed: TimedCompression


def forced_logits(
    model: PreTrainedModel,
    compressor: Compressor,
    texts: Tensor,
    prompt_lengths: Sequence[int],
    ids: Sequence[int] | None = None,
    seed: int = 0,
) -> Forced:
    """Logits of every token behind the prompt, each given the text before it as far as the cache remembers it.

    Equal to what ``RolloutSampler`` would compute had it drawn these texts, with the same seed and sequence ids.

    Args:
        model: The policy.
        compressor: What a full slot keeps.
        texts: (B, T) token ids; what pads a text on the right is decoded like the rest and changes nothing before it.
        prompt_lengths: Tokens of each that are read at once; where they do not fit a slot, their compression is not
            timed.
        ids: Numbers of the sequences, default 0 to B - 1.
        seed: With the ids it fixes the lots of random eviction.
    """
    count, length = texts.shape
    num_layers = model.config.num_hidden_layers
    compression = TimedCompression(compressor, num_layers)
    most = length - min(prompt_lengths)
    longest = max(prompt_lengths) + most  # texts with longer prompts go on with padding
    kept = torch.zeros(count, longest, model.config.vocab_size)

    def note(logs: SequenceLogs, slots: Tensor, at: Tensor, logits: Tensor) -> None:
        kept[slots, at] = logits

    params = SamplingParams(max_completion_length=most, seed=seed)
    padded = torch.nn.functional.pad(texts, (0, longest - length))
    force(model, padded, prompt_lengths, compression, params, note, ids)
    return Forced(kept[:, :length], compression)
