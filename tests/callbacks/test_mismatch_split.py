"""MismatchSplit in real runs: rounding and compression come out apart, and rounding is warned about when it matters."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from test_replay_grpo import module as replay_module
from test_sparse_grpo import Recorder, fit
from test_sparse_grpo import module as sparse_module

from sparse_rl_lightning.callbacks import MismatchSplit, RolloutCallback
from sparse_rl_lightning.callbacks.monitors.mismatch_split import mismatch_split
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.records import ScoredRollout

PARTS = ("rounding", "compression")
KEYS = {f"mismatch_split/{part}/{name}" for part in PARTS for name in ("kl_k1", "kl_k3", "ratio_p05")}


def metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Noise(RolloutCallback):
    """A sampler that rounds: its log-probs are off by a known number of nats, up and down in turn."""

    def __init__(self, size: float) -> None:
        self.size = size

    def on_rollout_drawn(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        rollout = scored.rollout
        sign = 1 - 2 * (torch.arange(rollout.sequences.shape[1]) % 2)
        rollout.sampler_logprobs = rollout.sampler_logprobs + self.size * sign * rollout.completion_mask


@pytest.mark.parametrize("kind", [sparse_module, replay_module])
@pytest.mark.filterwarnings("error:MismatchSplit")
def test_in_float32_all_of_it_is_compression(kind: Any) -> None:
    recorder = Recorder()
    trainer = fit(kind(steps_per_generation=2), 1, [MismatchSplit(), recorder])
    values = metrics(trainer)
    assert values.keys() >= KEYS
    assert abs(values["mismatch_split/rounding/kl_k1"]) < 1e-5
    assert 0 <= values["mismatch_split/rounding/kl_k3"] < 1e-8
    assert abs(values["mismatch_split/rounding/ratio_p05"] - 1) < 1e-4
    assert values["mismatch_split/compression/kl_k3"] > 1e-4
    assert values["mismatch_split/compression/ratio_p05"] < 0.99
    if kind is sparse_module:  # no noise: compression is what the whole mismatch is
        for name in ("kl_k1", "kl_k3", "ratio_p05"):
            assert values[f"mismatch_split/compression/{name}"] == pytest.approx(values[f"mismatch/{name}"], abs=1e-5)


def test_noise_is_measured_and_warned_about_once() -> None:
    callbacks = [MismatchSplit(1), Noise(0.5)]
    told = r"rounding moves the sampler by k3 = 0.1\d nats.*replay_objective='dense'"
    with pytest.warns(UserWarning, match=told) as w:
        trainer = fit(sparse_module(), 2, callbacks)
    assert sum("MismatchSplit" in str(warning.message) for warning in w) == 1
    values = metrics(trainer)
    # half of the ratios are e^-0.5, half e^0.5, but for sequences of odd length
    assert values["mismatch_split/rounding/kl_k3"] == pytest.approx(math.cosh(0.5) - 1, rel=0.15)
    assert values["mismatch_split/rounding/ratio_p05"] == pytest.approx(math.exp(-0.5), rel=1e-4)
    assert values["mismatch_split/compression/kl_k3"] < 0.1


@pytest.mark.filterwarnings("error:MismatchSplit")
def test_rounding_beside_no_compression_is_not_warned_about() -> None:
    values = metrics(fit(sparse_module(compressor=FullKV()), 1, [MismatchSplit()]))
    assert values["mismatch_split/compression/kl_k3"] < 1e-8


def test_every_n_rollouts_and_never_in_what_others_see() -> None:
    seen: list[int] = []

    class Spy(MismatchSplit):
        def _warn(self, split: Any) -> None:
            seen.append(len(seen))

    recorder = Recorder()
    fit(sparse_module(), 3, [Spy(every_n_rollouts=2), recorder])
    assert len(seen) == 2  # rollouts 0, 2
    assert all(len(s.rollout) == 16 for s in recorder.scored)


def test_what_an_older_policy_drew_is_left_out() -> None:
    """What it would differ by is staleness: sequences of several policies, and of one before this."""
    grpo = sparse_module()
    grpo.configure_model()
    rollout = grpo.generator.generate([{"prompt": "0123456789abcdef"}, {"prompt": "ab"}]).rollout
    want = mismatch_split(grpo, rollout[2:])
    grpo.generator.partial = SimpleNamespace(session=SimpleNamespace(version=1))
    rollout.policy_versions = torch.ones_like(rollout.sequences, dtype=torch.int32)
    rollout.policy_versions[0, int(rollout.prompt_lengths[0])] = rollout.policy_versions[1] = 0
    got: dict[str, Any] = {}
    grpo.log_dict = lambda values, **_: got.update(values)
    callback, scored = MismatchSplit(), ScoredRollout(rollout, [{}, {}], [""] * len(rollout), {}, 0)
    callback.on_rollout_scored(None, grpo, scored)
    assert got.keys() == KEYS
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0)
    grpo.generator.partial.session.version = 2
    got.clear()
    callback.on_rollout_scored(None, grpo, scored)
    assert not got
