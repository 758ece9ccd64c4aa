"""What tests of rollouts share: prompts, sizes, a small policy, and what holds of every rollout."""

from __future__ import annotations

from typing import Any

import rollout_cases
import torch
from closeness import LOGPROBS, assert_same_logprobs
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=2, max_completion_length=30, seed=5)
CHECK_EVERY = "sparse_rl_lightning.rollout.engine.scheduler.CHECK_EVERY"


def small_model(architecture: str = "qwen2", **sizes: Any) -> PreTrainedModel:
    """Of peaked distributions, so that what is evicted matters."""
    return tiny_model(architecture, initializer_range=0.2, **sizes)


def roll_out(
    model: Any, compressor: Compressor | None = None, num_slots: int | None = None, *,
    prompts: Any = PROMPTS, params: SamplingParams = PARAMS, **options: Any,
) -> Rollout:  # fmt: skip
    """A rollout of a new sampler."""
    return RolloutSampler(model, compressor or FullKV(), num_slots, **options).generate(prompts, params)


def assert_same(got: Rollout, want: Rollout, share: float = LOGPROBS) -> None:
    """Equal tokens, ends, deaths and counts, log-probs but for rounding; the seeds used meet no near-tie."""
    rollout_cases.assert_same(got, want, share)
    for name in ("stored", "full", "stored_integral", "full_integral"):
        torch.testing.assert_close(getattr(got.kv, name), getattr(want.kv, name))


def assert_replayed(model: Any, rollout: Rollout, temperature: float = 1.0, share: float = LOGPROBS) -> Tensor:
    """The learner has the sampler's log-probs under the record; returns them, with gradient."""
    replayed = replay_logprobs(model, rollout, temperature)
    assert_same_logprobs(replayed, rollout.sampler_logprobs, share)
    return replayed


def assert_generated(model: Any, rollout: Rollout, length: int, prompts: Any = PROMPTS) -> None:
    """The greedy tokens and ends are those of transformers' ``generate``."""
    ends = RolloutSampler(model).end_token_ids
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)[0]
        whole = len(prompt) + int(rollout.completion_lengths[row])
        assert rollout.sequences[row, :whole].tolist() == want.tolist()
        assert bool(rollout.finished[row]) == (want[-1].item() in ends)


def put_back_midway(model: Any, compressor: Compressor, params: SamplingParams = PARAMS, **options: Any) -> Rollout:
    """The same in four slots, all of which are taken out and put back on the way."""
    return rollout_cases.put_back_midway(RolloutSampler(model, compressor, 4, **options), PROMPTS, params)
