"""LearnedScore: its network is a function of an entry alone, is learned with the policy, and travels in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Combined, Drawn, KeyDiff, LearnedScore
from sparse_rl_lightning.compressors.base import ModelSizes
from sparse_rl_lightning.compressors.learned_score import FILE, ScoreNetwork, save_network
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import LearnedEvictionGRPO
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.replay.draws import draw_statistics
from sparse_rl_lightning.testing import check_compressor, tiny_model
from tests.learned import learned_score, sizes_of
from tests.tiny_grpo import fit, loaded, module, weights

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


def test_without_weights_it_says_where_they_come_from() -> None:
    with pytest.raises(UserError, match=r"no network yet.*LearnedEvictionGRPO"):
        RolloutSampler(tiny_model(), LearnedScore(**SIZES)).generate(
            [[1, 2, 3]], SamplingParams(max_completion_length=4)
        )


def test_weights_travel_in_a_file(tmp_path: Path) -> None:
    own = learned_score(**SIZES)
    save_network(own.build(sizes_of(tiny_model())), tmp_path / FILE)
    again = LearnedScore(**SIZES, weights=str(tmp_path / FILE))
    policy, params = tiny_model(eos_token_id=None), SamplingParams(max_completion_length=30)
    first, second = (RolloutSampler(policy, c).generate([[1, 2, 3]], params) for c in (own, again))
    assert first.evictions is not None
    assert second.evictions is not None
    assert torch.equal(first.evictions.death, second.evictions.death)
    with pytest.raises(UserError, match="is for a model of"):
        again.build(ModelSizes(9, 1, 8, 32))
    (tmp_path / "other").write_bytes(b"no tensors")
    integers = {name: value.to(torch.int32) for name, value in load_file(tmp_path / FILE).items()}
    save_file(integers, tmp_path / "integers")
    for path in ("missing", str(tmp_path / "other"), str(tmp_path / "integers")):
        with pytest.raises(UserError, match=r"weights=.*FOLDER/learned_score\.safetensors"):
            LearnedScore(**SIZES, weights=path)


# ---------------------------------------------------------------- training

KIND: dict[str, Any] = {"kind": LearnedEvictionGRPO, "lr": 0.05}


def drawn(**options: Any) -> Drawn:
    return Drawn(LearnedScore(**SIZES, **options), temperature=0.5)


def network_of(grpo: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in grpo.network.parameters()])


def test_the_network_learns_with_the_policy_at_its_own_rate() -> None:
    before = network_of(loaded(**KIND, compressor=drawn()))
    moved = []
    for rate in (None, 1e-6):
        grpo = module(**KIND, compressor=drawn(), network_lr=rate)
        fit(grpo, 4)
        moved.append(float((network_of(grpo) - before).abs().max()))
        assert grpo.state_dict().keys() >= {"network.key", "network.recency"}
    assert moved[0] > 1e-3
    assert 0 < moved[1] < 1e-4


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_the_network_stays_float32_whatever_the_precision(precision: str) -> None:
    grpo = module(**KIND, compressor=drawn())
    fit(grpo, 2, precision=precision)
    assert {parameter.dtype for parameter in grpo.network.parameters()} == {torch.float32}
    assert not torch.equal(network_of(grpo), network_of(loaded(**KIND, compressor=drawn())))


def test_the_network_is_made_wherever_lightning_builds_models() -> None:
    """On a GPU its default device is the GPU when policies are loaded."""
    with torch.device("meta"):
        network = LearnedScore(**SIZES).build(ModelSizes(2, 2, 16, 64), anew=True)
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_draws_follow_finite_differences_of_the_network() -> None:
    """The log-probability of fixed draws along a direction of all weights, in its gradient and in two evaluations."""
    policy, score = tiny_model(initializer_range=0.3, eos_token_id=None), learned_score(**SIZES)
    compressor, network = Drawn(score, temperature=0.7), score.build(sizes_of(policy))
    params = SamplingParams(num_generations=3, max_completion_length=24, seed=2)
    rollout = RolloutSampler(policy, compressor).generate([list(range(5, 20)), [3, 4, 5]], params)
    _, _, fixed = draw_statistics(policy, rollout, compressor)
    parameters = list(network.parameters())
    slopes = torch.autograd.grad(fixed.logprobs.sum(), parameters)
    generator = torch.Generator().manual_seed(9)
    for name, slope, parameter in zip(dict(network.named_parameters()), slopes, parameters, strict=True):
        step = 1e-2 * torch.randn(parameter.shape, generator=generator) / parameter.numel() ** 0.5
        totals = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
                totals.append(float(draw_statistics(policy, rollout, compressor, fixed)[2].logprobs.double().sum()))
                parameter.sub_(sign * step)
        along = float((slope.double() * step.double()).sum())
        assert (totals[0] - totals[1]) / 2 == pytest.approx(along, rel=0.05, abs=2e-4), name
        assert slope.abs().max() > 0, name


def test_a_resumed_run_goes_on_with_the_same_network(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> Any:
        grpo = module(**KIND, compressor=drawn())
        fit(grpo, steps, callbacks=options.pop("callbacks", None), **options)
        return grpo

    straight = run(5)
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=3, save_top_k=0)
    run(3, callbacks=[keep], enable_checkpointing=True)
    resumed = run(5, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(network_of(resumed), network_of(straight))
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("normalization", ["rank", "standard"])
def test_a_combination_is_learned_where_it_has_a_gradient(normalization: Any) -> None:
    both = Combined([LearnedScore(**SIZES), KeyDiff(**SIZES)], normalization=normalization)
    assert Drawn(both).has_gradient == (normalization == "standard")


def test_a_method_whose_network_was_built_can_be_given_to_another_module() -> None:
    """Whether it can be learned is asked of one head, whatever the number of heads that the network has."""
    method = LearnedScore(**SIZES)
    method.build(ModelSizes(num_layers=2, num_kv_heads=2, head_dim=4, hidden_size=8), anew=True)
    assert Drawn(method).has_gradient
    assert Drawn(LearnedScore(60, buffer=4, num_sinks=1, window=40)).has_gradient


def test_what_has_no_network_has_no_rate_and_only_one_is_learned() -> None:
    with pytest.raises(UserError, match=r"network_lr=0.1 .*KeyDiff"):
        loaded(**KIND, compressor=Drawn(KeyDiff(**SIZES)), network_lr=0.1)
    two = Combined([LearnedScore(**SIZES), LearnedScore(**SIZES)], normalization="standard")
    with pytest.raises(UserError, match="one compressor that is learned, got 2"):
        loaded(**KIND, compressor=Drawn(two))


def test_a_checkpoint_of_another_network_says_so() -> None:
    grpo, narrow = loaded(**KIND, compressor=drawn()), loaded(**KIND, compressor=drawn(width=3))
    plain = loaded(compressor=KeyDiff(**SIZES))
    for other in (narrow, plain):
        with pytest.raises(UserError, match=r"another compressor's network, for example 'network\.bias'.*width"):
            other.on_load_checkpoint({"state_dict": grpo.state_dict()})
    grpo.on_load_checkpoint({"state_dict": grpo.state_dict()})


def test_with_no_weight_of_draws_the_network_stays() -> None:
    grpo = module(**KIND, compressor=drawn(), eviction_weight=0.0)
    fit(grpo, 2)
    start = loaded(**KIND, compressor=drawn())
    assert torch.equal(network_of(grpo), network_of(start))
    assert not torch.equal(weights(grpo), weights(start))


def test_export_writes_it_beside_the_policy(tmp_path: Path) -> None:
    grpo = module(**KIND, compressor=drawn())
    fit(grpo, 2)
    grpo.export(tmp_path / "policy")
    again = LearnedScore(**SIZES, weights=str(tmp_path / "policy" / FILE))
    network = again.build(sizes_of(grpo.policy))
    own = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert torch.equal(own, network_of(grpo))
