"""Wrong input is answered in a line, and costs nothing that was there before; tests/bad_inputs.md says how.

The cases stand in tests/cases, one a line. ``PYTHONPATH=tests python tests/cli/test_bad_inputs.py`` runs them all and
writes the page; with words behind it, those that have one of them in their names.
"""

# ruff: noqa: F401  # the inputs below use these names

from __future__ import annotations

import html
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import configuration, data, faults, models, rewards, security
from cases.case import Answer, Case, answer, row, shortened
from tiny_grpo import grouped
from tiny_run import contents

from sparse_rl_lightning import ReplayGRPO, RolloutSampler, SamplingParams, SparseGRPO, callbacks
from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.compressors import RKV, SnapKV, StreamingLLM
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.losses import kl_penalty, policy_loss
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.rewards import MathReward
from sparse_rl_lightning.rollout.generation_kwargs import with_generation_kwargs
from sparse_rl_lightning.testing import tiny_model

PAGE = Path(__file__).parents[1] / "bad_inputs.md"
HEAD = """# Error messages for wrong input

Every message says what was given, what is allowed and what to change. A user's mistake is one line behind `error:`, or
the few of the parser of configurations, and the exit status is 1 or 2; an error in a user's own code keeps its
traceback, of which the last line stands here. What an earlier run has left is as before. The rows are made and checked
by `tests/cli/test_bad_inputs.py`; `PYTHONPATH=tests python tests/cli/test_bad_inputs.py` writes them.
"""
PYTHON = """
## In Python

`grpo(...)` is `SparseGRPO` with a tiny policy and each argument in its group, `model` a tiny model, `sampler` its own,
`mask` and `logprobs` have the shape (2, 3). Where a number belongs, NaN and infinity are refused for every class that a
configuration names (`tests/test_errors.py`).

| input | message |
|---|---|
"""
SECTIONS: dict[ModuleType, str] = {
    configuration: "Configurations and command lines\n\nWhat stands behind `sparse-rl fit --config config.yaml`, or "
    "how the file was changed.",
    data: "Data\n\nThe file of `JsonlPrompts`, or its arguments.",
    models: "Model folders\n\nA good folder in Hugging Face's format with one change; more in `tests/cases/models.py`.",
    rewards: "Reward functions\n\nThe body of `def lr(completions, **columns)`, or what else the function is.",
    faults: "Faults",
    security: "Hostile input",
}

INPUTS = """
grpo(num_generations=1)
grpo(temperature=0.0)
grpo(beta=-0.1)
grpo(kl_on="tokens")
grpo(kl_estimator="k1", beta=0.1)
grpo(delta=1.0)
grpo(epsilon=1.5)
grpo(steps_per_generation=0)
grpo(num_iterations=0)
grpo(oversampling=0.5)
grpo(reward_weights=[1.0, 2.0])
grpo(reward_timeout=0)
grpo(reward_funcs=[])
grpo(partial_rollout_steps=0, num_slots=4)
grpo(partial_rollout_steps=8)
grpo(partial_rollout_steps=8, num_slots=4, oversampling=2)
grpo(partial_rollout_steps=8, num_slots=4, keep_pool=False)
grpo(stop_strings="</answer>")
grpo(top_p=0.0)
grpo(top_k=-1)
grpo(min_p=1.5)
grpo(max_completion_length=0)
grpo(kind=ReplayGRPO, replay_objective="both")
grpo(kind=ReplayGRPO, alpha=2.0)
BlockPlan(prompts=3, num_generations=2, steps_per_generation=4, num_iterations=1, accumulate=1)
BlockPlan(prompts=4, num_generations=2, steps_per_generation=4, num_iterations=1, accumulate=3)
LearnerOptions(micro_batch_tokens=0)
LearnerOptions(head_chunk_size=0)
RKV(budget=0, buffer=4)
RKV(budget=8, buffer=0)
SnapKV(budget=8, buffer=4, window=16)
StreamingLLM(budget=8, buffer=4, num_sinks=-1)
RolloutSampler(model, RKV(budget=8, buffer=4, num_sinks=0, window=2), num_slots=0)
RolloutSampler(model, RKV(budget=8, buffer=4, num_sinks=0, window=2), kv_dtype="int3")
SamplingParams(temperature=-1.0)
SamplingParams(num_generations=0)
SamplingParams(repetition_penalty=0.0)
SamplingParams(seed=2**63)
with_generation_kwargs(SamplingParams(), {"num_beams": 4})
with_generation_kwargs(SamplingParams(), {"eos_token_id": 3})
sampler.generate([], SamplingParams())
sampler.generate([[]], SamplingParams())
sampler.generate([1, 2, 3], SamplingParams())
sampler.generate("text", SamplingParams())
sampler.generate(torch.ones(2, 3, dtype=torch.long), SamplingParams())
sampler.generate([[1, 2]], SamplingParams(top_logprobs=10**6))
sampler.generate([[1, 2]], SamplingParams(max_completion_length=10**6))
RolloutSampler(model, RKV(budget=24, buffer=8), end_token_ids=[10**6]).generate([[1, 2]], SamplingParams())
MathReward(answers="loose")
SparsityAwareRejection(threshold=2.0)
ImportanceReweighting(mode="word_truncate")
ImportanceReweighting(clip_min=2.0, clip_max=1.0)
ImportanceReweighting(normalize="rollout")
ImportanceReweighting(normalize_clip_max=1.5)
CompletionsTable(every_n_rollouts=0)
CompletionsTable(num_samples=-1)
RunSummary(num_problems=-1)
RunSummary(batch_size=0)
RolloutProgress(refresh_seconds=-1)
ZeroSharding(shadow_dtype="int4")
StepGuard(max_in_a_row=0)
EmptyRollouts(warn_after=0)
EmptyRollouts(few=1.5)
RankWatch(timeout=1)
SparseRLDeepSpeed(stage=4)
SparseRLDeepSpeed(stage=2, offload_parameters=True)
group_advantages(torch.ones(5), num_generations=2)
group_advantages(torch.ones(4), num_generations=2, scale_rewards="rank")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="ppo")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="cispo")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="dr_grpo")
policy_loss(logprobs, logprobs, torch.ones(3), mask)
kl_penalty(logprobs, logprobs, mask, estimator="k4")
""".strip().splitlines()


def no_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def grpo(kind: type[SparseGRPO] = SparseGRPO, reward_funcs: Any = no_reward, **arguments: Any) -> SparseGRPO:
    return kind(TinyPolicy(), RKV(budget=12, buffer=4), reward_funcs, **grouped(**arguments))


CASES = [(f"{module.__name__.rpartition('.')[2]}: {case.name}", case) for module in SECTIONS for case in module.CASES]
PARAMETERS = [
    pytest.param(number, case, id=ascii(name), marks=[pytest.mark.slow] * case.slow)
    for number, (name, case) in enumerate(CASES, start=len(INPUTS))
]


def message(source: str) -> str:
    """What the evaluation of an input is answered with."""
    model = tiny_model()
    sampler = RolloutSampler(model, RKV(budget=24, buffer=8))
    mask, logprobs = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    try:
        eval(source, vars(callbacks) | globals() | locals())
    except ValueError as error:
        return " ".join(str(error).split())
    raise AssertionError(f"{source} was accepted")


def python_row(source: str) -> str:
    return f"| `{source.replace('|', chr(92) + '|')}` | {shortened(message(source))} |"


def whole_policy(folder: Path) -> Path:
    """A model folder without faults."""
    policy, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_policy(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("number", "source"), list(enumerate(INPUTS)))
def test_message_is_the_page_s(number: int, source: str) -> None:
    assert page_rows()[number] == python_row(source)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("number", "case"), PARAMETERS)
def test_an_answer_is_clear_and_loses_nothing(number: int, case: Case, used_folder: Path, whole: Path) -> None:
    if "accelerator=gpu" in case.name and torch.cuda.is_available():
        pytest.skip("there is one")
    if "/proc" in case.name and not Path("/proc").is_dir():
        pytest.skip("needs a file system that root cannot write")
    before = contents(used_folder / "runs")
    given = answer(case, used_folder, whole)
    assert given.status == case.status, given.shown
    assert html.unescape(case.says) in given.last, given.shown
    assert "usage:" not in given.shown
    assert not (used_folder / "PWNED").exists()
    if "error: " in given.shown:
        assert "Traceback" not in given.shown
        assert case.status != 1 or given.error_lines == 1, given.shown
    if case.status:
        after = contents(used_folder / "runs")
        changed = [name for name, content in before.items() if after.get(name) != content]
        assert [name for name in changed if not name.endswith(".lock")] == []  # who holds it: the latest run
    assert page_rows()[number] == row(case, given)


def test_the_page_has_the_rows_of_all_cases() -> None:
    shown = [line.split(" | ")[0] for line in page_rows()]
    assert [line.removeprefix("| `").removesuffix("`") for line in shown[: len(INPUTS)]] == INPUTS
    assert shown[len(INPUTS) :] == [row(case, Answer(0, "")).split(" | ")[0] for _, case in CASES]
    assert len({name for name, _ in CASES}) == len(CASES) >= 80


def page_rows() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and line not in ("| input | message |", TITLE)]


TITLE = "| what | answer | status |"


def written_page(words: list[str]) -> Iterator[str]:
    """The page, in parts, each made by running its case in a folder that was used, or as it was without these words."""
    before: dict[str, list[str]] = {}  # several of a name, in their order
    for line in page_rows():
        before.setdefault(line.split(" | ")[0], []).append(line)
    yield HEAD
    yield PYTHON
    yield from (f"{python_row(source)}\n" for source in INPUTS)
    with tempfile.TemporaryDirectory() as place:
        whole, used = whole_policy(Path(place) / "whole"), Path(place) / "used"
        used.mkdir()
        answer(Case("a run", edit=lambda values: None), used, whole)
        for module, title in SECTIONS.items():
            yield f"\n## {title}\n\n{TITLE}\n|---|---|---|\n"
            for number, case in enumerate(module.CASES):
                known = before.get(row(case, Answer(0, "")).split(" | ")[0], [])
                old = known.pop(0) if known else ""
                if words and old and not any(word in case.name for word in words):
                    yield f"{old}\n"
                    continue
                folder = Path(place) / f"{module.__name__}-{number}"
                shutil.copytree(used / "runs", folder / "runs")
                given = answer(case, folder, whole)
                if given.status != case.status or html.unescape(case.says) not in given.last:
                    print(f"{case.name}: {given.status}, {given.last}", file=sys.stderr)
                yield f"{row(case, given)}\n"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # as in the tests; the cases' processes inherit it
    PAGE.write_text("".join(written_page(sys.argv[1:])), encoding="utf-8")
