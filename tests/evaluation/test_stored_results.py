"""What ``sparse-rl test`` takes from an earlier run, and what it measures anew because something is another now."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pyarrow import parquet
from tiny_grpo import quiet
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning import RolloutSampler
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import FullKV, KNorm
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.environments import Calculator
from sparse_rl_lightning.evaluation.evaluate import Scores, draw_from, evaluate
from sparse_rl_lightning.evaluation.problems import problem_numbers
from sparse_rl_lightning.modules import Evaluation, RolloutOptions
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy
from sparse_rl_lightning.records import Rollout, Rows, ScoredRollout
from sparse_rl_lightning.rewards import MathReward, boxed_math_reward
from sparse_rl_lightning.rollout import Generator, SamplingParams
from sparse_rl_lightning.testing import CHAT_TEMPLATE, character_tokenizer, tiny_model

SIZES: dict[str, Any] = {"budget": 12, "buffer": 4, "num_sinks": 1, "window": 3}


def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A policy that writes a chat's answers."""
    tokenizer = character_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer) + 1, initializer_range=0.1)
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer


def evaluation(change: Callable[[Any, Any], Any] = lambda *_: None, **options: Any) -> Evaluation:
    model, tokenizer = loaded()
    source = change(model, tokenizer) or LoadedPolicy(model, tokenizer)
    own: dict[str, Any] = {
        "dense": False, "compressors": [KNorm(**SIZES)], "sampling": SamplingParams(max_completion_length=12),
        "rollout": RolloutOptions(),
    }  # fmt: skip
    return Evaluation(source, **{**own, **options})


def is_taken(folder: Path, module: Evaluation, precision: Any = "32-true") -> bool:
    """Whether a test of the module finds its result in the folder, where it is afterwards in any case."""
    own = folder / "own.jsonl"
    own.write_text(json.dumps({"problem": "1 + 1", "answer": "7"}), encoding="utf-8")
    data = MathBenchmarks(benchmarks=["own"], own={"own": str(own)}, prompt_format="llama")
    results = folder / "evaluation" / "KNorm-12" / "own.json"
    before = results.stat().st_mtime_ns if results.exists() else None
    quiet(precision=precision, default_root_dir=folder).test(module, datamodule=data, verbose=False)
    return results.stat().st_mtime_ns == before


def ends_elsewhere(model: Any, tokenizer: Any) -> None:
    model.generation_config.eos_token_id = [1, 9, 30]


def other_template(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant", "answer")


def other_words(model: Any, tokenizer: Any) -> None:
    tokenizer.add_tokens(["+ 1"])


def larger_epsilon(model: Any, tokenizer: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1


def other_config(model: Any, tokenizer: Any) -> None:
    model.config.rope_parameters["rope_theta"] *= 2


def adapters(alpha: float) -> Callable[[Any, Any], Any]:
    return lambda *own: LoraPolicy(LoadedPolicy(*own), r=2, lora_alpha=alpha)


CHANGES: dict[str, Callable[[], Evaluation]] = {
    "end tokens": lambda: evaluation(ends_elsewhere),
    "a token of the prompt": lambda: evaluation(other_words),
    "chat template": lambda: evaluation(other_template),
    "the norms' epsilon": lambda: evaluation(larger_epsilon),
    "config.json": lambda: evaluation(other_config),
    "decoder": lambda: evaluation(rollout=RolloutOptions(decoder="transformers")),
    "head_in_float32": lambda: evaluation(rollout=RolloutOptions(head_in_float32=True)),
    "environment": lambda: evaluation(environment=Calculator),
    "sampling": lambda: evaluation(sampling=SamplingParams(max_completion_length=12, seed=1)),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a result, which what only costs memory does not change."""
    folder, copy = tmp_path_factory.mktemp("stored"), tmp_path_factory.mktemp("copy")
    assert not is_taken(folder, evaluation())
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    assert is_taken(copy, evaluation(rollout=RolloutOptions(num_slots=1, keep_pool=False)))
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_a_result_has_it_measured_anew(change: str, stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    assert not is_taken(tmp_path, CHANGES[change]())


@pytest.mark.parametrize("change", [{"mean_length": "7"}, {"accuracy": {"mean": 1.0}}, {"counters": {"a": "b"}}, None])
def test_a_damaged_result_is_measured_anew(change: Any, stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "evaluation" / "KNorm-12" / "own.json"
    content = json.loads(path.read_text())
    path.write_text("[" * 9999 if change is None else json.dumps(content | change))
    assert not is_taken(tmp_path, evaluation())
    assert is_taken(tmp_path, evaluation())


@pytest.mark.slow
def test_the_alpha_of_adapters_counts(tmp_path: Path) -> None:
    assert not is_taken(tmp_path, evaluation(adapters(8)))
    assert is_taken(tmp_path, evaluation(adapters(8)))
    assert not is_taken(tmp_path, evaluation(adapters(64)))


def test_what_changed_is_said_and_old_results_are_measured_anew(
    stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    caplog.set_level("INFO")
    assert not is_taken(tmp_path, evaluation(ends_elsewhere), "bf16-mixed")
    assert "KNorm-12/own.json is of another end tokens, precision. It is measured anew." in caplog.text
    results = tmp_path / "evaluation" / "KNorm-12" / "own.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"settings": "0123"}))
    assert not is_taken(tmp_path, evaluation(ends_elsewhere), "bf16-mixed")
    assert "own.json is damaged, or of something else. It is measured anew." in caplog.text


METHOD = """
from sparse_rl_lightning.compressors import KNorm
from helpers import factor

class KNormOfMine(KNorm):
    def score(self, layer):
        return factor(layer)
"""
HELPER = "def factor(layer):\n    return -layer.keys.float().norm(dim=-1)\n"


@pytest.mark.slow
def test_an_edited_compressor_is_another_though_its_name_and_settings_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is one whose helper was edited, in a file that it imports."""
    monkeypatch.syspath_prepend(str(folder))

    def own() -> Evaluation:
        for name in ("mine_own", "helpers"):
            sys.modules.pop(name, None)
        kind = __import__("mine_own").KNormOfMine
        kind.__name__ = "KNorm"
        return evaluation(compressors=[kind(**SIZES)])

    def write(method: str, helper: str) -> None:
        Path("mine_own.py").write_text(method)
        Path("helpers.py").write_text(helper)

    write(METHOD, HELPER)
    assert not is_taken(folder, own())
    assert is_taken(folder, own())
    Path("unrelated.py").write_text("x = 1")
    assert is_taken(folder, own())
    write(METHOD.replace("return factor", "return -factor"), HELPER)
    assert not is_taken(folder, own())
    write(METHOD.replace("return factor", "return -factor"), HELPER.replace("return -", "return  -"))
    assert not is_taken(folder, own())


ENVIRONMENT = """
from sparse_rl_lightning.environments import Environment

class Echo(Environment):
    def __init__(self, text: str = "?"):
        self.text = text
    def reset(self, row):
        return None
    def step(self, text):
        return None, 0.0
"""


@pytest.mark.slow
def test_an_environment_of_a_yaml_file_is_told_apart_and_ends(folder: Path) -> None:
    """By class it comes as a closure around the whole parser; in a process that may not take the machine's memory."""
    model, tokenizer = loaded()
    for part in (model, tokenizer):
        part.save_pretrained("policy")
    Path("mine_env.py").write_text(ENVIRONMENT)
    Path("own.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "7"}))

    def run() -> str:
        environment = {"class_path": "mine_env.Echo", "init_args": {"text": "!"}}
        options = {
            "policy": "policy", "environment": environment, "sampling": {"max_completion_length": 8},
            "rollout": {"turns": {"timeout": None}},
        }  # fmt: skip
        config = {
            "model": {"class_path": "Evaluation", "init_args": options},
            "data": {"class_path": "MathBenchmarks", "init_args": {"benchmarks": ["own"], "own": {"own": "own.jsonl"}}},
            "trainer": {"default_root_dir": "run", "accelerator": "cpu", "logger": False, "enable_progress_bar": False},
        }
        Path("test.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "sparse_rl_lightning", "test", "--config=test.yaml"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=limited)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    assert "taken from" not in run()
    assert "own, dense: taken from" in run()
    Path("mine_env.py").write_text(ENVIRONMENT.replace("None, 0.0", "None, 1.0"))
    assert "own.json is of another environment. It is measured anew." in run()


def limited() -> None:
    """8 GiB of addresses and two minutes of the processor."""
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    resource.setrlimit(resource.RLIMIT_CPU, (120, 120))


ROWS: Rows = [{"prompt": text, "answer": text} for text in "abcde"]


def drawn(rows: Rows) -> ScoredRollout:
    """Two completions per row, of as many tokens as the row's letter says; the second one is cut off."""
    lengths = torch.tensor([ord(row["prompt"]) - ord("a") + 1 for row in rows for _ in range(2)])
    mask = torch.arange(6) < lengths[:, None]
    rollout = Rollout(
        sequences=mask.long(), prompt_lengths=torch.zeros_like(lengths), completion_mask=mask,
        finished=torch.arange(len(lengths)) % 2 == 0, sampler_logprobs=torch.zeros(mask.shape),
    )  # fmt: skip
    return ScoredRollout(rollout, rows, [row["prompt"] * n for row in rows for n in (1, 2)], {}, 0)


def judge(scored: ScoredRollout) -> Tensor:
    """Pays 1 for a single letter; ``d`` has no reward, ``style`` pays the length."""
    first = [math.nan if "d" in text else float(len(text) == 1) for text in scored.completions]
    scored.reward_table = {"single": torch.tensor(first), "style": torch.tensor([len(t) for t in scored.completions])}
    return scored.reward_table["single"] * 2


@pytest.mark.parametrize("batch_size", [None, 1, 2, 7])
def test_batches_add_up_whatever_their_size(batch_size: int | None) -> None:
    scores = evaluate(drawn, ROWS, judge, batch_size)
    assert scores.rows == ROWS
    assert scores.completions == ["a", "aa", "b", "bb", "c", "cc", "d", "dd", "e", "ee"]
    assert scores.num_samples == 2
    assert scores.lengths.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert scores.finished.tolist() == [True, False] * 5
    assert scores.table["style"].tolist() == [1, 2] * 5
    assert scores.rewards.nansum() == 2 * 4
    assert scores.first.shape == (5, 2)
    assert (scores.mean, scores.is_binary, scores.kv) == (0.5, True, None)


def test_rewards_that_are_no_accuracy_and_none_at_all() -> None:
    def pays(reward: float) -> Scores:
        def table(scored: ScoredRollout) -> Tensor:
            scored.reward_table = {"only": torch.full((len(scored.completions),), reward)}
            return scored.reward_table["only"]

        return evaluate(drawn, ROWS, table)

    assert (pays(0.5).mean, pays(0.5).is_binary) == (0.5, False)
    assert pays(math.nan).mean is None
    assert evaluate(drawn, ROWS).rewards.isnan().all()


def test_a_samplers_draws_depend_on_the_rows_numbers_and_not_on_batches() -> None:
    sampler = RolloutSampler(tiny_model("qwen3", initializer_range=0.3), FullKV())
    params = SamplingParams(num_generations=2, max_completion_length=5, seed=3)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7]]

    def texts(size: int, starts: list[int] | None = None) -> list[str]:
        draw = draw_from(sampler, lambda rollout: list(map(str, rollout.completion_ids)), params, prompts, starts)
        return evaluate(draw, ROWS[:3], batch_size=size).completions

    whole = texts(3)
    assert texts(1) == texts(2) == texts(2, [0, 2, 4]) == whole
    assert whole[:2] != whole[4:]  # the same prompt under another number
    assert texts(3, [4, 2, 0]) == [*whole[4:], *whole[2:4], *whole[:2]]


def test_rows_are_copies_by_prompt_and_answer() -> None:
    chat = [{"role": "user", "content": "a"}]
    rows = [{"prompt": "a", "answer": "1", "index": 0}, {"prompt": "a", "answer": "1", "index": 1},
            {"prompt": "a", "answer": "2"}, {"prompt": chat, "answer": "1"}, {"prompt": list(chat), "answer": "1"},
            {"prompt": "\ud800"}]  # fmt: skip
    first, again, other, talk, same, lone = problem_numbers(rows).tolist()
    assert (first, talk) == (again, same)
    assert len({first, other, talk, lone}) == 4
    assert len(set(problem_numbers(rows[:2], whole=True).tolist())) == 2  # an environment may read any column
    assert problem_numbers([]).dtype == torch.int64


ROOT = Path("run") / "evaluation"
WRITTEN = [r"\boxed{2}", r"\boxed{1+1=2}", "The answer is 2.", r"\boxed{3}"]


@pytest.fixture
def file(write_evaluation: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration whose policy writes an answer strictly right, two leniently right, and a wrong one."""
    Path("mine.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n", encoding="utf-8")
    monkeypatch.setattr(Generator, "texts", lambda self, rollout: WRITTEN)
    return write_evaluation(sampling={"num_generations": 4, "max_completion_length": 4})


def judged() -> dict[str, Any]:
    return json.loads((ROOT / "dense" / "mine.json").read_text(encoding="utf-8"))


def test_both_conventions_are_measured_and_answers_chooses_the_headline(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = main(["test", "--config", file]).trainer.callback_metrics
    for where in ("mine", "mean"):
        assert float(metrics[f"test/{where}/dense"]) == 0.25
        assert float(metrics[f"test/{where}/dense/strict"]) == 0.25
        assert float(metrics[f"test/{where}/dense/lenient"]) == 0.75
    assert (judged()["accuracy"]["mean"], judged()["lenient"]["mean"]) == (0.25, 0.75)
    table = parquet.read_table(ROOT / "dense" / "mine.parquet").to_pydict()
    assert table["correct"] == [True, False, False, False]
    assert table["correct_lenient"] == [True, True, True, False]
    assert table["extracted"] == ["2", "1+1=2", "2", "3"]
    assert re.search(r"dense +25\.0 \[.*\] +75\.0 \[", capsys.readouterr().out)
    before = (ROOT / "dense" / "mine.json").stat().st_mtime_ns
    metrics = main(["test", "--config", file, "--model.answers=lenient"]).trainer.callback_metrics
    assert float(metrics["test/mine/dense"]) == float(metrics["test/mean/dense"]) == 0.75
    assert float(metrics["test/mine/dense/strict"]) == 0.25
    assert (ROOT / "dense" / "mine.json").stat().st_mtime_ns == before  # both were measured already
    text = (ROOT / "results.txt").read_text(encoding="utf-8")
    assert re.search(r"dense +75\.0 \[.*\] +25\.0 \[", text)


def test_an_unknown_convention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="answers must be one of strict, lenient, got answers='loose'"):
        Evaluation("policy", answers="loose")  # type: ignore[arg-type]


def test_rewards_are_strict_unless_they_are_asked_otherwise() -> None:
    answer = ["2"] * 4
    for reward in (MathReward(), boxed_math_reward):
        assert reward([], WRITTEN, [], answer=answer) == [1.0, 0.0, 0.0, 0.0]
    assert MathReward(answers="lenient")([], WRITTEN, [], answer=answer) == [1.0, 1.0, 1.0, 0.0]
