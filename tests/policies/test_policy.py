"""Where a policy comes from: the attention that is asked for is the one that runs, or its package is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies import LoraPolicy, PretrainedPolicy, TinyPolicy


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("flash_attention_2", "flash_attn", r"pip install 'sparse-rl-lightning\[flash-attn\]'"),
        ("flash_attention_3", "flash_attn_interface", "hopper"),
    ],
)
def test_a_missing_attention_package_is_named(name: str, module: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=f"attn_implementation='{name}' needs the package {module}.*{remedy}.*'sdpa'"):
        PretrainedPolicy("some/model", attn_implementation=name).load()


def test_the_learner_runs_the_attention_that_is_asked_for(tmp_path: Path) -> None:
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sequences = torch.randint(2, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(sequences, dtype=torch.bool)
    mask[:, 0] = False
    results = []
    for name in ("sdpa", "eager", None):
        source = PretrainedPolicy(str(tmp_path), attn_implementation=name)
        policy = source.load()[0]
        assert policy.config._attn_implementation == (name or "sdpa")
        assert LoraPolicy(source).attn_implementation == name
        results.append(sequence_logprobs(policy, sequences, mask)[0].detach())
    torch.testing.assert_close(*results[:2], atol=1e-5, rtol=0)
    assert torch.equal(results[2], results[0])


def test_sources_that_do_not_choose_leave_the_models_own() -> None:
    assert TinyPolicy().attn_implementation is None
    assert PretrainedPolicy("some/model").attn_implementation is None
