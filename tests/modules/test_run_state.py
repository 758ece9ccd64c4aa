"""What a resumed run depends on: every setting is applied with a notice, refused by name, or irrelevant."""

from __future__ import annotations

import copy
import functools
import gzip
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chatter import ENDS, Chatter
from lightning.pytorch import Trainer
from pretend_gpu import DeviceTensor, PretendGPU
from safetensors.torch import save_file
from tiny_grpo import ALPHABET, Recorder, Rows, every_step, fit, likes_a, module, quiet, weights
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from sparse_rl_lightning import data as data_modules
from sparse_rl_lightning import modules, policies
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.callbacks import MIS, AcceptanceMonitor, ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.checkpoints.manifest import digest, write_manifest
from sparse_rl_lightning.cli.training.export import load_policy
from sparse_rl_lightning.compressors import RKV, KeyDiff, SnapKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.environments import TurnOptions
from sparse_rl_lightning.fingerprints import describe, without_code
from sparse_rl_lightning.learner.random_state import random_state, restore_random_state
from sparse_rl_lightning.modules import DistillSparse, GRPOLoss, LearnerOptions, ReplayGRPO, RolloutOptions, SparseGRPO
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.distill import SparseAdapter
from sparse_rl_lightning.modules.resume import optimizer as resumed
from sparse_rl_lightning.modules.resume.run_rules import RULES, Rule, rule_of
from sparse_rl_lightning.modules.resume.run_settings import TRAINER, arguments_of, settings_of
from sparse_rl_lightning.modules.resume.run_state import KEY, RolloutState
from sparse_rl_lightning.policies import LoraPolicy, PolicySource, TinyPolicy
from sparse_rl_lightning.rollout import SamplingParams

OLD = Path(__file__).parent / "old_checkpoints"
SIZES = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}
TINY = {"alphabet": ALPHABET, "hidden_size": 16, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
SHORT: dict[str, Any] = {"num_generations": 2, "max_completion_length": 8}
SLOTS: dict[str, Any] = {"num_slots": 3, "partial_rollout_steps": 2}


# ---------------------------------------------------------------- the rules of settings


def public(package: Any, base: type) -> Iterator[type]:
    for name in package.__all__:
        kind = getattr(package, name)
        if isinstance(kind, type) and issubclass(kind, base):
            yield kind


def all_settings() -> Iterator[str]:
    """Every argument that can be reached from modules, sources of policies, data and the trainer."""
    groups = {"sampling": SamplingParams, "val_sampling": SamplingParams, "rollout": RolloutOptions, "loss": GRPOLoss,
              "learner": LearnerOptions, "adapter": SparseAdapter}  # fmt: skip
    for kind in public(modules, PolicyModule):
        if kind is not modules.Evaluation:  # which trains nothing
            for name in arguments_of(kind):
                inside = groups.get(name)
                yield from [name] if inside is None else [f"{name}.{field.name}" for field in fields(inside)]
    assert all(map(is_dataclass, groups.values()))
    for group, package, base in (("policy", policies, PolicySource), ("data", data_modules, PromptDataModule)):
        for kind in public(package, base):
            yield from (f"{group}.{name}" for name in arguments_of(kind))
    yield from (f"trainer.{name}" for name in TRAINER)


def test_rules_are_of_settings_and_none_of_sampling_is_simply_applied() -> None:
    found = set(all_settings())
    of_sampling = {name: rule_of(name) for name in found if name.startswith("sampling.")}
    others = {name for name, rule in of_sampling.items() if rule is not Rule.BETWEEN_ROLLOUTS}
    assert others == {"sampling.seed", "sampling.top_logprobs"}
    named = {name for name in RULES if not name.startswith("trainer.")}
    assert sorted(named - found - {"module"}) == []
    of_trainer = {name.removeprefix("trainer.") for name in RULES.keys() - named}
    of_trainer -= {"candidates"}  # of its callbacks
    assert sorted(of_trainer - inspect.signature(Trainer.__init__).parameters.keys()) == []


def test_every_setting_that_matters_is_described() -> None:
    adapted = DistillSparse(TinyPolicy(**TINY), RKV(**SIZES), likes_a)
    replayed = ReplayGRPO(LoraPolicy(TinyPolicy(**TINY)), RKV(**SIZES), likes_a)
    warmup = modules.SupervisedWarmup("a folder")
    described = {name for one in (adapted, replayed, warmup, made(**PARTIAL)) for name in settings_of(one)}
    assert {"rollout.num_slots", "rollout.memory_limit"} & settings_of(adapted).keys() == set()
    matter = {name for name in all_settings() if rule_of(name) not in (Rule.DERIVED, Rule.IGNORED)} - {"policy"}
    assert sorted(name for name in matter - described if not name.startswith("trainer.")) == []


def test_ranks_send_their_states_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank zero would read tensors of a GPU onto the GPU of the rank that they come from."""
    grpo = module(steps_per_generation=2)
    fit(grpo, 1)
    sent: list[Any] = []
    monkeypatch.setattr(ranks, "gather_to_zero", lambda value, count: [sent.append(value), value])
    grpo._world_size = 2
    with PretendGPU():
        there = {"rollout": {"sequences": DeviceTensor(torch.arange(3))}}
        monkeypatch.setattr(grpo.block, "state", lambda: there)
        checkpoint: dict[str, Any] = {}
        RolloutState(grpo).save(checkpoint)
    (own,) = sent
    assert own["block"]["rollout"]["sequences"].equal(torch.arange(3))
    assert own["num_rollouts"] == checkpoint["sparse_rl"]["num_rollouts"] == 1


def test_a_setting_of_a_user_s_class_is_applied() -> None:
    class Own(SparseGRPO):
        def __init__(self, *args: Any, width: int = 3, hidden: int = 4, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.width = width

    own = settings_of(Own(TinyPolicy(**TINY), RKV(**SIZES), likes_a))
    assert (own["width"], "hidden" in own, rule_of("width")) == ("3", False, Rule.APPLIED)


def test_corrections_are_described_and_what_only_looks_is_not() -> None:
    def told(*callbacks: Any) -> str:
        own = module()
        own._trainer = SimpleNamespace(callbacks=callbacks, **dict.fromkeys(TRAINER))  # type: ignore[assignment]
        return settings_of(own)["trainer.callbacks"]

    bounded = told(SparsityAwareRejection(), ImportanceReweighting(clip_max=1.5))
    assert bounded == told(AcceptanceMonitor(), ImportanceReweighting(clip_max=1.5), SparsityAwareRejection())
    others = [ImportanceReweighting(clip_max=2.0)], [SparsityAwareRejection()], [], [MIS()], [MIS(high=3.0)]
    assert len({bounded, *(told(*own) for own in others)}) == 6
    assert rule_of("trainer.callbacks") is Rule.APPLIED


# ---------------------------------------------------------------- changes on a resume


class Other(Rows):
    """As many rows, of other content."""

    def train_rows(self) -> list[dict[str, Any]]:
        return [{**row, "answer": "f"} for row in super().train_rows()]


def made(kind: type[SparseGRPO] = SparseGRPO, **options: Any) -> SparseGRPO:
    """A module whose rollouts are served in two optimizer steps."""
    given: dict[str, Any] = {
        "policy": TinyPolicy(**TINY), "compressor": RKV(**SIZES), "reward_funcs": likes_a,
        "sampling": SamplingParams(**SHORT), "steps_per_generation": 2,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    }  # fmt: skip
    return kind(**{**given, **options})


def train(
    folder: Path, steps: int, before: dict[str, Any], ckpt_path: Path | None = None, data: Any = None, **trainer: Any
) -> SparseGRPO:
    grpo = made(**before)
    fit(grpo, steps, [every_step(folder)], data, ckpt_path, enable_checkpointing=True, **trainer)
    return grpo


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one step, within a rollout."""
    folder = tmp_path_factory.mktemp("one")
    train(folder, 1, {})
    return folder / "last.ckpt"


def sampling(**changes: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**SHORT, **changes)}


def lora(**options: Any) -> dict[str, Any]:
    return {"policy": LoraPolicy(TinyPolicy(**TINY), r=2, **options)}


def distilled(**options: Any) -> dict[str, Any]:
    return {"kind": DistillSparse, "adapter": SparseAdapter(r=2, **options)}


def tiny(**options: Any) -> dict[str, Any]:
    return {"policy": TinyPolicy(**{**TINY, **options})}


PARTIAL = {"rollout": RolloutOptions(**SLOTS)}
WITHIN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "temperature": ({}, sampling(temperature=0.3), r"sampling.temperature was 1.0 and is 0.3"),
    "top_k": ({}, sampling(top_k=5), r"sampling.top_k was 0 and is 5"),
    "steps": ({}, {"steps_per_generation": 4}, "steps_per_generation was 2 and is 4"),
    "passes": ({"num_iterations": 2, "steps_per_generation": 1}, {}, "steps_per_generation was 1 and is 2.*, num_iter"),
    "objective": (
        {"kind": ReplayGRPO}, {"kind": ReplayGRPO, "replay_objective": "dense"},
        "replay_objective was 'sparse' and is 'dense'",
    ),
    "module": ({"kind": ReplayGRPO}, {}, "module was ReplayGRPO and is SparseGRPO"),
    "partial: temperature": (PARTIAL, PARTIAL | sampling(temperature=0.3), "sampling.temperature was 1.0 and is 0.3"),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", WITHIN)
def test_what_a_rollout_was_drawn_by_cannot_change_within_it(name: str, tmp_path: Path) -> None:
    before, after, said = WITHIN[name]
    train(tmp_path, 1, before)
    grpo = made(**after)
    with pytest.raises(ValueError, match=f"within a rollout.*{said}"):
        fit(grpo, 3, ckpt_path=tmp_path / "last.ckpt")
    same = made(**after)
    same.configure_model()
    assert torch.equal(weights(grpo), weights(same))  # nothing was overwritten before
    train(tmp_path, 2, before, tmp_path / "last.ckpt")


@pytest.mark.parametrize("name", ["temperature", "passes", "objective", "partial: temperature"])
def test_between_two_rollouts_it_counts_and_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, said = WITHIN[name]
    train(tmp_path, 2, before)
    caplog.clear()
    grpo = train(tmp_path, 3, after, tmp_path / "last.ckpt")
    assert grpo.trainer.global_step == 3
    told = [record.getMessage() for record in caplog.records if "Resumed as configured now" in record.getMessage()]
    assert len(told) == 1
    assert said.split(r"\(")[0].split(".*")[0] in told[0]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "alpha": (lora(lora_alpha=4.0), lora(lora_alpha=32.0), "another policy: policy.lora_alpha was 4.0 and is 32.0"),
    "adapter's alpha": (
        distilled(lora_alpha=4.0), distilled(), "another policy: adapter.lora_alpha was 4.0 and is 32.0"
    ),
    "heads": ({}, tiny(num_heads=2, num_kv_heads=1), "another policy: head_dim was 4 and is 8, num_attention_heads"),
    "alphabet": ({}, tiny(alphabet=ALPHABET[::-1]), "another policy: its tokenizer has another vocabulary"),
    "rank": (lora(), {"policy": LoraPolicy(TinyPolicy(**TINY), r=3)}, "of another model"),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("command", ["fit", "export", "sharded export", "validate"])
@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_would_mean_another_policy_are_refused(name: str, command: str, tmp_path: Path) -> None:
    before, after, said = REFUSED[name]
    if name in ("alpha", "adapter's alpha", "rank"):
        pytest.importorskip("peft", reason="peft is an extra")
    before = {"steps_per_generation": 1, **before}
    train(tmp_path, 1, before)
    path, grpo = tmp_path / "last.ckpt", made(**after)
    if command == "sharded export":
        checkpoint, own = torch.load(path, weights_only=True), made(**before)
        own.configure_model()
        state = checkpoint.pop("state_dict")
        (tmp_path / "folder").mkdir()
        path = tmp_path / "folder"
        torch.save(checkpoint, path / "trainer.pt")
        names = {name for name, _ in own.policy.named_parameters()}
        policy = {name.removeprefix("policy."): value.clone() for name, value in state.items()}
        save_file({name: value for name, value in policy.items() if name in names}, path / "weights.safetensors")
        write_manifest(path, {file.name: digest(file) for file in path.iterdir()})
        load_policy(own, path)
    grpo.configure_model()
    use = {
        "fit": lambda: fit(grpo, 2, ckpt_path=path),
        "validate": lambda: quiet().validate(grpo, datamodule=Rows(), ckpt_path=path, verbose=False),
    }
    own_weights = weights(grpo)
    with pytest.raises(ValueError, match=said):
        use.get(command, lambda: load_policy(grpo, path))()
    assert torch.equal(weights(grpo), own_weights)


def test_the_reference_of_a_penalty_is_the_policy_that_the_run_began_with(tmp_path: Path) -> None:
    penalty = {"loss": GRPOLoss(beta=0.1), "steps_per_generation": 1}
    train(tmp_path, 1, {"steps_per_generation": 1})
    began = torch.load(tmp_path / "last.ckpt", weights_only=True)["sparse_rl_run"]["policy"]["weights"]
    other = policies.LoadedPolicy(*TinyPolicy(**TINY, seed=1).load())
    train(tmp_path, 2, {"steps_per_generation": 1, "policy": other}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["sparse_rl_run"]["policy"]["weights"] == began
    with pytest.raises(ValueError, match="other weights, or another dtype, than the policy that this run began with"):
        train(tmp_path, 3, {**penalty, "policy": other}, tmp_path / "last.ckpt")
    train(tmp_path, 3, penalty, tmp_path / "last.ckpt")  # seeds: the policy's is 0 again


def test_lora_has_its_reference_in_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    penalty = {"loss": GRPOLoss(beta=0.1), "steps_per_generation": 1}
    started, other = (policies.LoadedPolicy(*TinyPolicy(**TINY, seed=seed).load()) for seed in (0, 1))
    train(tmp_path, 1, {**penalty, "policy": LoraPolicy(started, r=2)})
    grpo = train(tmp_path, 2, {**penalty, "policy": LoraPolicy(other, r=2)}, tmp_path / "last.ckpt")
    assert grpo.trainer.global_step == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Other(prompts_per_rollout=4), "content of the prompts was .* and is"),
        (Rows(prompts_per_rollout=2), "prompts per rollout was 4 and is 2"),
        (Rows(prompts_per_rollout=4, seed=1), "other seeds: data.seed was 0 and is 1"),
    ],
)
def test_other_data_is_refused_in_python_too(data: Any, said: str, one_step: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        train(tmp_path, 2, {}, one_step, data)


def test_a_part_of_a_gradient_is_refused(one_step: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = r"trainer.accumulate_grad_batches was 1 and is 2, and 1 micro-batches of this epoch are done"
    with pytest.raises(ValueError, match=said):
        train(tmp_path, 2, {}, one_step, accumulate_grad_batches=2)
    train(tmp_path, 2, {}, one_step)
    caplog.clear()
    grpo = train(tmp_path, 3, {}, tmp_path / "last.ckpt", accumulate_grad_batches=2)
    assert "trainer.accumulate_grad_batches was 1 and is 2" in caplog.text
    assert grpo.num_rollouts == 2


@pytest.mark.parametrize("part", ["generation_config", "tokenizer"])
def test_other_end_tokens_of_the_policy_are_told(
    part: str, one_step: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = TinyPolicy(**TINY).load()
    before = tokenizer.eos_token_id
    if part == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    else:
        model.generation_config.eos_token_id = [before, 5]
    caplog.clear()
    train(tmp_path, 2, {"policy": policies.LoadedPolicy(model, tokenizer)}, one_step)
    now = "5" if part == "tokenizer" else f"[{before}, 5]"
    assert f"eos_token_id of the {part} was {before} and is {now}" in caplog.text


def test_what_is_applied_is_told_and_what_changes_nothing_is_not(
    one_step: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = {"rollout": RolloutOptions(num_slots=4), "learner": LearnerOptions(head_chunk_size=64)}
    caplog.clear()
    train(tmp_path, 2, free, one_step)
    assert "Resumed as configured now" not in caplog.text
    after = {**free, "loss": GRPOLoss(epsilon=0.3), "compressor": KeyDiff(**SIZES), "scale_rewards": "none"}
    caplog.clear()
    grpo = train(tmp_path, 3, after, tmp_path / "last.ckpt", gradient_clip_val=1.0)
    (told,) = [one.getMessage() for one in caplog.records if "Resumed as configured now" in one.getMessage()]
    for said in (
        "loss.epsilon was 0.2 and is 0.3", "compressor was RKV(", "scale_rewards was 'group' and is 'none'",
        "trainer.gradient_clip_val was None and is 1.0",
    ):  # fmt: skip
        assert said in told
    assert grpo.loss.epsilon == 0.3


# ---------------------------------------------------------------- checkpoints of before

TALKING = {
    "compressor": SnapKV(budget=14, buffer=4, num_sinks=1, window=3), "reward_funcs": None, "environment": Chatter,
    "sampling": SamplingParams(num_generations=2, max_completion_length=60),
    "rollout": RolloutOptions(
        num_slots=3, partial_rollout_steps=6, end_tokens=ENDS,
        turns=TurnOptions(max_turns=4, max_turn_length=9, timeout=None),
    ),
}  # fmt: skip
OLD_POLICY = TinyPolicy(alphabet=ALPHABET, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1)


def test_stored_slots_of_version_0_2_are_drawn_anew_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It wrote them in the middle of conversations."""
    path, seen = tmp_path / "last.ckpt", list[Any]()
    path.write_bytes(gzip.decompress((OLD / "conversation.ckpt.gz").read_bytes()))
    saved = torch.load(path, weights_only=True)["sparse_rl"]["partial"]
    rows = [row["prompt"] for row in saved["rows"].values()]
    assert saved["session"]["slots"]
    assert rows
    ends = list[torch.Tensor]()
    for _ in range(2):
        grpo, recorder = made(policy=OLD_POLICY, **TALKING), Recorder()
        fit(grpo, 8, [recorder], ckpt_path=path)
        seen.append([row["prompt"] for scored in recorder.scored for row in scored.rows])
        ends.append(weights(grpo))
    assert torch.equal(*ends)
    assert set(rows) <= set(seen[0])
    assert caplog.text.count(f"{len(rows)} prompts of partial rollouts had unfinished samples at the checkpoint") == 2


def test_a_run_of_version_0_1_does_not_go_on(one_step: Path, tmp_path: Path) -> None:
    """It did not describe itself; its weights are read as before."""
    checkpoint = torch.load(one_step, weights_only=True)
    del checkpoint[KEY]
    torch.save(checkpoint, tmp_path / "older.ckpt")
    with pytest.raises(ValueError, match=f"has no '{KEY}', .* of version 0.1"):
        train(tmp_path, 2, {}, tmp_path / "older.ckpt")
    exported = made()
    exported.configure_model()
    load_policy(exported, tmp_path / "older.ckpt")


def test_an_option_that_a_checkpoint_does_not_know_was_its_default(
    one_step: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = torch.load(one_step, weights_only=True)
    for name in ("sampling.top_k", "sampling.stop_strings", "loss.epsilon", "rollout.turns"):
        del checkpoint[KEY]["described"][name]
    torch.save(checkpoint, tmp_path / "older.ckpt")
    with pytest.raises(ValueError, match=r"within a rollout.*: sampling.top_k was 0 and is 5\. Resume"):
        train(tmp_path, 2, sampling(top_k=5), tmp_path / "older.ckpt")
    caplog.clear()
    train(tmp_path, 2, {}, tmp_path / "older.ckpt")
    assert "Resumed as configured now" not in caplog.text
    train(tmp_path, 2, {"loss": GRPOLoss(epsilon=0.3)}, tmp_path / "older.ckpt")
    assert "Resumed as configured now, not as the checkpoint was: loss.epsilon was 0.2 and is 0.3." in caplog.text


def test_plain_settings_of_version_0_2_are_compared(one_step: Path, tmp_path: Path) -> None:
    """Its objects were written otherwise."""
    checkpoint = torch.load(one_step, weights_only=True)
    described = checkpoint[KEY].pop("described")
    checkpoint[KEY]["settings"] = described | {"module": "'SparseGRPO'", "compressor": "RKV(budget=9)"}
    torch.save(checkpoint, tmp_path / "older.ckpt")
    with pytest.raises(ValueError, match=r"within a rollout.*: sampling.temperature was 1.0 and is 0.3\. Resume"):
        train(tmp_path, 2, sampling(temperature=0.3), tmp_path / "older.ckpt")
    train(tmp_path, 2, {}, tmp_path / "older.ckpt")


def test_a_description_is_the_same_in_every_process() -> None:
    own = settings_of(module(reward=[likes_a, functools.partial(likes_a)]))
    assert without_code(own["reward_funcs"]) == "[tiny_grpo.likes_a, partial(tiny_grpo.likes_a)]"
    assert not [text for text in own.values() if " at 0x" in text]


class Color(Enum):
    """As a user's argument may be."""

    RED = 1
    BLUE = 2


TEXTS: dict[str, tuple[Any, Any]] = {
    "arguments of a function": (functools.partial(int, base=3), functools.partial(int, base=4)),
    "arrays": (np.arange(3.0), np.arange(3.0) + 1),
    "long arrays": (np.arange(5000), np.arange(5000)[::-1]),
    "tensors": (torch.arange(3), torch.arange(3) + 1),
    "numbers of numpy": (np.float32(0.5), np.float32(0.25)),
    "arrays in lists": ([np.float32(1), np.array([1])], [np.float32(1), np.array([2])]),
    "sets": ({"a", "b"}, {"a", "c"}),
    "enumerations": (Color.RED, Color.BLUE),
    "types": (torch.float32, torch.bfloat16),
    "devices": (torch.device("cpu"), torch.device("meta")),
    "paths": (Path("a"), Path("b")),
    "patterns": (re.compile("a" * 300), re.compile("a" * 299 + "b")),
    "dates": (date(2026, 1, 1), date(2026, 1, 2)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_setting_s_text_tells_it_from_others(name: str) -> None:
    own, other = TEXTS[name]
    assert describe(own) == describe(copy.deepcopy(own)) != describe(other)
    assert " at 0x" not in describe(own)


def rewarding(factor: float) -> Callable[..., list[float]]:
    return lambda completions, **row: [factor * len(text) for text in completions]


class Kept(KeyDiff):
    """Its argument has another name inside."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__(**SIZES)
        self._factor = sign


def elsewhere(kind: Any) -> Any:
    """A class or function of the same name in another module."""
    copied = type(kind.__name__, (kind,), {"__module__": "other"}) if isinstance(kind, type) else copy.copy(kind)
    copied.__module__ = "other"
    return copied


def scheduled(*budgets: int) -> RKV:
    return RKV(budget=LengthSchedule([0, 14], budgets), buffer=4, num_sinks=1, window=3)


SAME_NAME: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a class of another module": (
        {"compressor": Kept()}, {"compressor": elsewhere(Kept)()}, r"compressor was \w+\.Kept.* and is other\.Kept"
    ),
    "an argument kept under another name": (
        {"compressor": Kept()}, {"compressor": Kept(-1.0)}, r"compressor was .*_factor=1\.0.* and is .*_factor=-1\.0"
    ),
    "a schedule of the same maximum": (
        {"compressor": scheduled(8, 14)}, {"compressor": scheduled(10, 14)}, r"budgets=\[8, 14\].* and is .*\[10, 14\]"
    ),
    "a closure of the same function": (
        {"reward_funcs": rewarding(1.0)}, {"reward_funcs": rewarding(-1.0)}, r"lambda>\(1\.0.* is .*lambda>\(-1\.0"
    ),
    "another lambda": (
        {"reward_funcs": lambda completions, **row: [1.0] * len(completions)},
        {"reward_funcs": lambda completions, **row: [2.0] * len(completions)}, "the code of reward_funcs, .* changed",
    ),
    "a function of another module": (
        {"reward_funcs": likes_a}, {"reward_funcs": elsewhere(rewarding(1.0))}, r"reward_funcs was .*likes_a.*other\."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_NAME)
def test_what_has_the_same_name_and_is_another_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, said = SAME_NAME[name]
    train(tmp_path, 2, before)
    caplog.clear()
    train(tmp_path, 3, after, tmp_path / "last.ckpt")
    (told,) = (record.getMessage() for record in caplog.records if "Resumed as configured" in record.getMessage())
    assert re.search(said, told), told


class Own(SparseGRPO):
    """A user's module, whose file is edited in the middle of a rollout."""


@pytest.mark.parametrize("is_same_version", [True, False])
def test_edited_code_is_told_and_never_refused(
    is_same_version: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other versions of Python or of a library change code that nobody has touched: they are told instead."""
    train(tmp_path, 1, {"kind": Own})
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    described = checkpoint[KEY]["described"]
    for name in ("module", "reward_funcs"):
        assert "@" in described[name]
        described[name] = re.sub("@.{12}", "@000000000000", described[name])
    if not is_same_version:
        described["versions"] = "{python: '3.10.0'}"
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    caplog.clear()
    train(tmp_path, 2, {"kind": Own}, tmp_path / "changed.ckpt")
    (told,) = (record.getMessage() for record in caplog.records if "Resumed as configured" in record.getMessage())
    assert ("the code of module" in told, "the code of reward_funcs" in told) == (is_same_version, is_same_version)
    assert ("versions was {python: '3.10.0'} and is" in told) != is_same_version


@pytest.mark.slow
def test_a_set_s_text_is_the_same_in_every_process() -> None:
    """Hashes of texts, which order it, are others in every process."""
    program = f"from {describe.__module__} import describe\nprint(describe({{'a', 'b', 'c', 'd', 'e', 'f'}}))"
    environments = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    ran = [subprocess.run([sys.executable, "-c", program], env=env, capture_output=True) for env in environments]
    assert [one.stdout for one in ran] == [b"{'a', 'b', 'c', 'd', 'e', 'f'}\n"] * 2


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def saved(optimizer: torch.optim.Optimizer, schedule: LRScheduler | None = None) -> dict[str, object]:
    return {resumed.KEY: resumed.describe_optimizer(optimizer, schedule), "optimizer_states": [optimizer.state_dict()]}


def test_the_state_of_another_optimizer_is_refused() -> None:
    checkpoint = saved(AdamW(parameters()))
    resumed.check_optimizer(checkpoint, AdamW(parameters(), lr=0.5))
    with pytest.raises(ValueError, match=r"is of torch.optim.adamw.AdamW, model.optimizer is torch.optim.sgd.SGD"):
        resumed.check_optimizer(checkpoint, SGD(parameters()))
    with pytest.raises(ValueError, match="other groups of parameters"):
        resumed.check_optimizer(checkpoint, AdamW(parameters(3)))
    resumed.check_optimizer({}, SGD(parameters()))  # sharded strategies keep the state elsewhere


def test_a_schedule_has_changed_if_its_class_or_a_number_has() -> None:
    def described(length: int | None) -> dict[str, str]:
        optimizer = SGD(parameters(), lr=0.1)
        return resumed.describe_optimizer(optimizer, None if length is None else CosineAnnealingLR(optimizer, length))

    was = described(10)
    assert resumed.schedule_change(was, described(10)) == []
    assert resumed.schedule_change({}, described(10)) == []  # not known
    (said,) = resumed.schedule_change(was, described(6))
    assert "T_max=10" in said
    assert "T_max=6" in said
    name = "the schedule was torch.optim.lr_scheduler.CosineAnnealingLR("
    assert resumed.schedule_change(was, described(None))[0].startswith(name)
    assert resumed.schedule_change(described(None), described(10))[0].startswith("the schedule was None and is torch.")
    optimizer = SGD(parameters(), lr=0.1)
    lambdas = [LambdaLR(optimizer, lambda step: 0.9**step), LambdaLR(optimizer, lambda step: 0.8**step)]
    first, second = (resumed.describe_optimizer(optimizer, schedule) for schedule in lambdas)
    assert resumed.schedule_change(first, second)[0].startswith(
        "the code of the schedule, torch.optim.lr_scheduler.LambdaLR("
    )


def test_a_schedule_goes_to_its_step_and_one_of_a_metric_begins_anew() -> None:
    optimizer = SGD(parameters(), lr=1.0)
    resumed.advance(StepLR(optimizer, 2, 0.1), 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    plateau = ReduceLROnPlateau(SGD(parameters(), lr=1.0))
    resumed.advance(plateau, 5)
    assert plateau.last_epoch == 0


def test_settings_are_taken_over_and_what_an_optimizer_counts_is_not() -> None:
    own, wanted = (AdamW(parameters(), lr=lr, weight_decay=0.0) for lr in (torch.tensor(0.1), 0.2))
    address, weights = own.param_groups[0]["lr"], own.param_groups[0]["params"]
    for one, first in ((own, 0.1), (wanted, 0.3)):
        one.param_groups[0]["initial_lr"] = first
    assert resumed.apply_settings(own, wanted) == ["lr was 0.10000000149011612 and is 0.2"]
    assert own.param_groups[0]["lr"] is address  # graphs use it
    assert float(address) == pytest.approx(0.2)
    assert own.param_groups[0]["params"] is weights
    assert own.param_groups[0]["initial_lr"] == 0.3
    assert resumed.apply_settings(own, AdamW(parameters(), lr=0.2, weight_decay=0.5)) == [
        "lr was 0.20000000298023224 and is 0.2", "weight_decay was 0.0 and is 0.5"
    ]  # fmt: skip


def test_a_checkpoint_must_have_what_training_needs_and_be_of_this_model() -> None:
    resumed.check_parts({"loops": 1}, ["loops"])
    with pytest.raises(ValueError, match="this checkpoint has no 'a', 'b', so training"):
        resumed.check_parts({"loops": 1}, ["a", "loops", "b"])
    one, two = torch.ones(1), torch.ones(2)
    more = {"policy.a": one, "policy.b": one}
    resumed.check_weights({"policy.a": one}, {"policy.a": two[:1]})
    for other, said in (
        ({"policy.a": two}, "0 unknown, 0 missing and 1 weights of another shape, for example 'policy.a'"),
        ({"policy.b": one}, "1 unknown, 1 missing and 0 weights of another shape, for example 'policy.b'"),
        ({}, "0 unknown, 1 missing and 0 weights of another shape, for example 'policy.a'"),
        (more, "1 unknown, 0 missing and 0 weights of another shape, for example 'policy.b'"),
        ({"policy.a": one / 0}, "this checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            resumed.check_weights(other, {"policy.a": one})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_goes_on_where_other_gpus_are_in_sight(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    state = random_state() | {"cuda": [torch.tensor([gpu], dtype=torch.uint8) for gpu in range(2)]}
    restore_random_state(state)
    assert [int(own) for own in restored] == [0, 1][:count]
