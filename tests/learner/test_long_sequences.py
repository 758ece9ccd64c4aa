"""The learner on long sequences: peak memory grows with the length, not its square, forward and backward."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from largest import Largest

from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES
from sparse_rl_lightning.testing import tiny_model

CHECKPOINTING = LearnerOptions(gradient_checkpointing=True)


def rollout(length: int) -> Rollout:
    """One sequence, of which two tokens in three die 256 tokens later."""
    token, inside = torch.arange(length), torch.arange(length)[None] > 0
    death = torch.where((token % 3 > 0) & (token + 256 < length), token + 256, NEVER).to(torch.int32)
    return Rollout(
        sequences=token[None] % 60 + 3, prompt_lengths=torch.tensor([1]), completion_mask=inside,
        finished=torch.tensor([True]), sampler_logprobs=torch.zeros(1, length),
        evictions=EvictionRecord.from_dense(death.expand(1, 1, 1, length)),
    )  # fmt: skip


@cache
def measured(length: int, replays: bool) -> tuple[int, int]:
    """Peak bytes of a forward and backward pass, and those of its largest tensor."""
    sizes: dict[str, int] = {"hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "num_layers": 1, "vocab_size": 64}
    model = tiny_model(max_position_embeddings=length, **sizes).train()  # type: ignore[arg-type]
    learner, part = Learner(CHECKPOINTING, replays=replays), rollout(length)
    learner.prepare(model)
    with LiveBytes() as live, Largest() as largest:
        learner.logprobs(model, part)[0].sum().backward()
    return live.most, largest.bytes


@pytest.mark.parametrize("replays", [False, True], ids=["dense", "replay"])
def test_memory_grows_with_the_length_and_not_with_its_square(replays: bool) -> None:
    length = 16384
    (half, _), (whole, largest) = measured(length // 2, False), measured(length, replays)
    masks = MASK_BYTES if replays else 0
    assert largest <= max(masks, 64 * 4 * length)  # a mask of its limit, or a row of numbers for each token
    assert masks + 2.1 * half < 5 * length**2, "a whole mask would not be seen"
    assert whole < masks + 2.1 * half
