"""Validation during training: the measures of the evaluation, greedy or sampled, beside the training's randomness."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pretend_gpu import PretendGPU, host
from tiny_grpo import ALPHABET, Rows, fit, loaded, module, quiet, weights

from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.metrics import confidence_interval, pass_at_k
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.generator import VALIDATION

SAMPLED = SamplingParams(num_generations=4, max_completion_length=6, temperature=1.0, seed=77)
CACHES = ("dense", "sparse")


class Named(PromptDataModule):
    """Six rows of two benchmarks, three to a batch."""

    def train_rows(self) -> list[dict[str, Any]]:
        return Rows().train_rows()

    def val_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": ALPHABET[i:], "answer": "a", "benchmark": "one" if i < 4 else "two"} for i in range(6)]


def has_a(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [float("a" in text) for text in completions]


def validated(grpo: SparseGRPO, data: PromptDataModule) -> dict[str, float]:
    return dict(quiet().validate(grpo, datamodule=data, verbose=False)[0])


def test_greedy_validation_reports_pass_at_1_by_cache_and_benchmark() -> None:
    metrics = validated(module(has_a), Named(val_batch_size=3))
    for cache in CACHES:
        assert metrics[f"val/pass@1_{cache}"] == pytest.approx(metrics[f"val/reward_{cache}"])
        whole = (4 * metrics[f"val/one/pass@1_{cache}"] + 2 * metrics[f"val/two/pass@1_{cache}"]) / 6
        assert metrics[f"val/pass@1_{cache}"] == pytest.approx(whole)
    assert not any("pass@2" in name for name in metrics)


class Column(Named):
    """Rows of a user, whose column of that name holds anything."""

    def val_rows(self) -> list[dict[str, Any]]:
        return [
            row | {"benchmark": cell} for row, cell in zip(super().val_rows(), ["{x}b", ["l"], {"a": 1}], strict=False)
        ]


def test_a_benchmark_may_have_any_name() -> None:
    metrics = validated(module(has_a), Column())
    for name in ("{x}b", "['l']", "{'a': 1}"):
        assert {f"val/{name}/pass@1_dense", f"val/{name}/pass@1_low_dense"} <= metrics.keys()


def test_a_full_cache_is_evaluated_once() -> None:
    metrics = validated(module(has_a, FullKV()), Named())
    assert {name.rpartition("_")[2] for name in metrics if "reward" in name} == {"dense"}


def fails_on_some(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [math.inf if text.startswith("a") else float("b" in text) for text in completions]


@pytest.mark.parametrize("reward", [has_a, fails_on_some])
def test_validation_on_a_gpu_is_that_of_the_cpu(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are on the device of the rollout, the table of reward functions is not."""
    said: list[dict[str, float]] = []
    for on_gpu in (False, True):
        grpo, logged = module(reward, val_sampling=SAMPLED), dict[str, float]()
        monkeypatch.setattr(grpo._validation, "_log", lambda key, value, of=logged, **_: of.update({key: host(value)}))
        with PretendGPU() if on_gpu else nullcontext() as gpu:
            if gpu is not None:
                policy, tokenizer = grpo.policy_source.load()
                grpo.policy_source = LoadedPolicy(gpu.copy_of(policy), tokenizer)
            grpo.configure_model()
            grpo.on_validation_epoch_start()
            grpo.validation_step(Named().val_rows(), 0)
            grpo._validation.end(grpo.rewards)
        said.append({name: float(value) for name, value in logged.items()})
    assert said[1] == pytest.approx(said[0], abs=1e-6)
    assert 0 < said[0]["val/pass@1_dense"] < 1


def test_the_full_cache_takes_its_memory_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of what is free, and the compressed one would have to do with the rest."""
    grpo = loaded(reward=has_a, val_sampling=SAMPLED)
    evicts: list[bool] = []
    own = RolloutSampler.engine_for

    def watched(self: RolloutSampler, key: Any) -> Any:
        evicts.append(self.compressor.evicts)
        return own(self, key)

    monkeypatch.setattr(RolloutSampler, "engine_for", watched)
    grpo.validation_step(Named().val_rows(), 0)
    assert evicts == [True, False]


class OneOfTwo(SparseGRPO):
    """In one process, what one of two ranks would do."""

    def configure_callbacks(self) -> list[Any]:
        found = super().configure_callbacks()
        self._world_size = 2
        return found


def test_ranks_log_the_same_names_whatever_their_batches_hold() -> None:
    names = set(validated(module(has_a, kind=OneOfTwo), Named(val_batch_size=3)))
    measures = ("reward", "length", "pass@1", "pass@1_low", "pass@1_high")
    assert names == {f"val/{measure}_{cache}" for measure in measures for cache in CACHES}


@pytest.mark.parametrize("val_batch_size", [4, 6])
def test_validation_says_how_sure_it_is_whatever_its_batches(val_batch_size: int) -> None:
    grpo, data = module(has_a, val_sampling=SAMPLED), Named(val_batch_size=val_batch_size)
    seen: dict[str, list[list[float | None]]] = {cache: [] for cache in CACHES}

    def remembers(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        rewards = has_a(prompts, completions)
        seen["sparse" if len(seen["dense"]) == len(seen["sparse"]) else "dense"].append(rewards)
        return rewards

    grpo.rewards = Rewards(remembers)
    metrics = validated(grpo, data)
    for cache in CACHES:
        scores = torch.tensor([reward for batch in seen[cache] for reward in batch]).view(6, 4).mean(dim=1)
        for name, own in (("", scores), ("one/", scores[:4]), ("two/", scores[4:])):
            found = [metrics[f"val/{name}pass@1_{bound}_{cache}"] for bound in ("low", "high")]
            assert found == pytest.approx(confidence_interval(own), abs=1e-6)


def test_a_batch_without_any_reward_does_not_spoil_the_mean() -> None:
    def last_row(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0 if prompt == ALPHABET[5:] else None for prompt in prompts]

    metrics = validated(module(last_row), Named(val_batch_size=1))
    for cache in CACHES:
        assert metrics[f"val/reward_{cache}"] == metrics[f"val/pass@1_{cache}"] == 1


def test_an_interrupted_validation_is_forgotten() -> None:
    def interrupts(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [] if prompts == [ALPHABET[5:]] else [1.0]

    grpo, data = module(interrupts), Named(val_batch_size=1)
    with pytest.raises(ValueError, match="interrupts returned 0 rewards"):
        validated(grpo, data)
    grpo.rewards = Rewards(lambda prompts, completions, **_: [0.0] * len(completions))
    metrics = validated(grpo, data)
    expected = confidence_interval(torch.zeros(6))
    for cache in CACHES:
        assert [metrics[f"val/pass@1_{bound}_{cache}"] for bound in ("low", "high")] == pytest.approx(expected)


@pytest.mark.parametrize("val_sampling", [None, SAMPLED])
def test_rows_without_a_reward_do_not_count_as_wrong(val_sampling: SamplingParams | None) -> None:
    def only_of_one(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0 if name == "one" else None for name in columns["benchmark"]]

    modules = [module(only_of_one, kind=kind, val_sampling=val_sampling) for kind in (SparseGRPO, OneOfTwo)]
    alone, of_two = (validated(grpo, Named(val_batch_size=1)) for grpo in modules)
    for cache in CACHES:
        assert alone[f"val/pass@1_{cache}"] == of_two[f"val/pass@1_{cache}"] == alone[f"val/one/pass@1_{cache}"] == 1
        assert math.isnan(alone[f"val/two/pass@1_{cache}"])


def test_a_sample_without_a_reward_is_wrong_where_others_of_its_row_have_one() -> None:
    def first_of_each(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [1.0 if n % 4 == 0 else None for n in range(len(completions))]

    assert validated(module(first_of_each, val_sampling=SAMPLED), Named())["val/pass@1_dense"] == 0.25


def test_validation_within_training_numbers_its_own_rows() -> None:
    """Also where a validation batch is as large as a block, whose prompts are dealt out to the ranks by length."""
    seen: list[tuple[bool, list[int]]] = []

    class Watched(OneOfTwo):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            numbers = self.generator._sequence_ids

            def watched(*args: Any) -> list[int]:
                ids = numbers(*args)
                generations = args[2]
                seen.append((self.trainer.training, [number // generations % 8 for number in ids[::generations]]))
                return ids

            self.generator._sequence_ids = watched

    class Dealt(Rows):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            loader.sampler.num_replicas, loader.sampler.num_blocks = 2, 2
            return loader

    fit(module(kind=Watched), 1, data=Dealt(prompts_per_rollout=4, val_batch_size=4),
        limit_val_batches=1.0, val_check_interval=1)  # fmt: skip
    training, validation = ([p for is_training, p in seen if is_training is kind] for kind in (True, False))
    assert validation == [[0, 2, 4, 6]] * 2
    assert training
    assert training[0] != [0, 1, 2, 3]


def test_sampled_validation_has_pass_at_k_without_bias() -> None:
    grpo, data = module(has_a, val_sampling=SAMPLED), Named(val_batch_size=6)
    metrics = validated(grpo, data)
    scored = grpo.generator.generate(data.val_rows(), SAMPLED, dense=True, first=VALIDATION)
    correct = torch.tensor(has_a([], scored.completions)).view(6, 4) == 1
    assert 0 < correct.float().mean() < 1
    for k in (1, 2, 4):
        assert metrics[f"val/pass@{k}_dense"] == pytest.approx(float(pass_at_k(correct, k).mean()))


def test_batches_of_a_sampled_validation_draw_different_numbers() -> None:
    class Twins(Named):
        def val_rows(self) -> list[dict[str, Any]]:
            return [{"prompt": ALPHABET, "answer": "a"}] * 2

    drawn: list[str] = []

    def remembers(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        drawn.extend(completions)
        return [0.0] * len(completions)

    validated(module(remembers, val_sampling=SAMPLED), Twins(val_batch_size=1))
    dense = drawn[:4], drawn[8:12]
    assert dense[0] != dense[1]


@pytest.mark.parametrize("val_sampling", [None, SAMPLED])
def test_validation_leaves_training_as_it_is(val_sampling: SamplingParams | None) -> None:
    with_validation, without = module(val_sampling=val_sampling), module(val_sampling=val_sampling)
    fit(with_validation, 2, limit_val_batches=1.0, val_check_interval=1)
    fit(without, 2)
    assert torch.equal(weights(with_validation), weights(without))


class Copied(Named):
    """Each of four problems eight times, in columns that tell the copies apart."""

    def val_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": ALPHABET[n:], "answer": "1", "index": copy} for copy in range(8) for n in range(4)]


def test_copies_of_a_problem_do_not_narrow_its_interval() -> None:
    def one_of_four(prompts: list[str], **_: Any) -> list[float | None]:
        return [float(prompt == ALPHABET[1:]) for prompt in prompts]

    metrics = validated(module(one_of_four), Copied(val_batch_size=5))
    for cache in CACHES:
        bounds = [metrics[f"val/pass@1_{bound}_{cache}"] for bound in ("low", "high")]
        assert bounds == pytest.approx([0.0456, 0.6994], abs=1e-4)
