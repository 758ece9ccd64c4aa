"""LearnedScore: its network is a function of an entry alone, and travels in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Combined, KeyDiff, LearnedScore
from sparse_rl_lightning.compressors.base import ModelSizes
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork, save_network
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.testing import check_compressor, tiny_model
from tests.learned import learned_score

SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}


def test_it_keeps_the_contract() -> None:
    check_compressor(learned_score(**SIZES))
    check_compressor(Combined([learned_score(**SIZES), KeyDiff(**SIZES)]))


def test_a_worth_is_that_of_the_formula() -> None:
    """Written out for one entry in float64."""
    keys, values, hidden = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 64)
    network = ScoreNetwork(ModelSizes(2, 2, 16, 64), width=7)
    with torch.no_grad():
        network.outer.normal_()
        network.bias.normal_()
    found = network(1, keys, values, hidden)
    parts = [t.double() / (t.double().square().mean().sqrt()) for t in (keys[1, 0, 3], values[1, 0, 3], hidden[1, 3])]
    inner = torch.cat([network.key[1, 0], network.value[1, 0], network.hidden[1, 0]]).double()
    units = torch.tanh(torch.cat(parts) @ inner + network.bias[1, 0].double())
    assert float(found[1, 0, 3].detach()) == pytest.approx(
        float((units @ network.outer[1, 0].double()).detach()), abs=1e-5
    )


def test_replay_is_exact_and_other_weights_evict_something_else() -> None:
    policy = tiny_model(initializer_range=0.3, eos_token_id=None)
    params, deaths = SamplingParams(num_generations=2, max_completion_length=30, seed=1), []
    for seed in (0, 20):
        rollout = RolloutSampler(policy, learned_score(seed, **SIZES)).generate([list(range(5, 20)), [3, 4, 5]], params)
        assert rollout.evictions is not None
        with torch.no_grad():
            torch.testing.assert_close(replay_logprobs(policy, rollout), rollout.sampler_logprobs, atol=2e-5, rtol=0)
        deaths.append(rollout.evictions.death[..., :20])
    assert not torch.equal(*deaths)


def test_weights_travel_in_a_file(tmp_path: Path) -> None:
    own = learned_score(**SIZES)
    file = tmp_path / "network.safetensors"
    save_network(own.network, file)
    again = LearnedScore(**SIZES, weights=str(file))
    policy, params = tiny_model(eos_token_id=None), SamplingParams(max_completion_length=30)
    first, second = (RolloutSampler(policy, c).generate([[1, 2, 3]], params) for c in (own, again))
    assert first.evictions is not None
    assert second.evictions is not None
    assert torch.equal(first.evictions.death, second.evictions.death)
    with pytest.raises(UserError, match="is for a model of"):
        again.check_model(ModelSizes(9, 1, 8, 32))
    (tmp_path / "other").write_bytes(b"no tensors")
    integers = {name: value.to(torch.int32) for name, value in load_file(file).items()}
    save_file(integers, tmp_path / "integers")
    for path in ("missing", str(tmp_path / "other"), str(tmp_path / "integers")):
        with pytest.raises(UserError, match=r"weights=.*sparse-rl statistics --method LearnedScore"):
            LearnedScore(**SIZES, weights=path)
