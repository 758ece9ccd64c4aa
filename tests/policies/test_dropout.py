"""Noise of training mode: the sampler has none, so by default the policy has none either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_grpo import ALPHABET, fit, likes_a

from sparse_rl_lightning import SamplingParams
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import LearnerOptions, ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.modes import disable_dropout, has_dropout
from sparse_rl_lightning.testing import character_tokenizer
from tests.families import family

NOISY: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"attention_dropout": 0.3}),
    "residual": ("phi3", {"resid_pdrop": 0.3}),
    "router": ("mixtral", {"router_jitter_noise": 0.3}),
}


@pytest.mark.parametrize("name", NOISY)
def test_no_noise_is_left(name: str) -> None:
    kind, options = NOISY[name]
    model = family(kind, **options).train()
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    passes = [model(ids, use_cache=False).logits for _ in range(2)]
    assert has_dropout(model)
    assert not torch.equal(*passes)
    disable_dropout(model)
    assert not has_dropout(model)
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert torch.equal(model(ids, use_cache=False).logits, model.eval()(ids, use_cache=False).logits)


def grpo(kind: type[SparseGRPO], disabled: bool) -> SparseGRPO:
    tokenizer = character_tokenizer(ALPHABET)
    policy = family("llama", attention_dropout=0.3, vocab_size=len(tokenizer))
    return kind(
        LoadedPolicy(policy, tokenizer), RKV(budget=8, buffer=3, num_sinks=1, window=2), likes_a,
        sampling=SamplingParams(num_generations=4, max_completion_length=8, seed=3),
        learner=LearnerOptions(disable_dropout=disabled),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [SparseGRPO, ReplayGRPO])
def test_a_dropout_of_attention_is_off_by_default(kind: type[SparseGRPO]) -> None:
    found = fit(grpo(kind, disabled=True), 1).callback_metrics
    assert found["clip_ratio/region_mean"] == 0
    assert abs(found["staleness_ratio/max"] - 1) < 1e-4


def test_what_replay_would_leave_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"attention_dropout=0.3, .* again without. Set model.learner.disable_dropout"):
        fit(grpo(ReplayGRPO, disabled=False), 1)
    fit(grpo(SparseGRPO, disabled=False), 1)
