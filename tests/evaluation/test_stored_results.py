"""What ``sparse-rl test`` takes from an earlier run, and what it measures anew because something is another now."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.compressors import KNorm
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.environments import Calculator
from sparse_rl_lightning.modules import Evaluation, RolloutOptions
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy
from sparse_rl_lightning.rollout import SamplingParams
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
    trainer = Trainer(
        accelerator="cpu", precision=precision, logger=False, default_root_dir=folder, enable_progress_bar=False
    )
    trainer.test(module, datamodule=data, verbose=False)
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


def test_precision_counts(tmp_path: Path) -> None:
    assert not is_taken(tmp_path, evaluation())
    assert not is_taken(tmp_path, evaluation(), "bf16-mixed")
    assert is_taken(tmp_path, evaluation(), "bf16-mixed")


@pytest.mark.slow
def test_the_alpha_of_adapters_counts(tmp_path: Path) -> None:
    assert not is_taken(tmp_path, evaluation(adapters(8)))
    assert is_taken(tmp_path, evaluation(adapters(8)))
    assert not is_taken(tmp_path, evaluation(adapters(64)))


def test_what_changed_is_said_and_old_results_are_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_taken(tmp_path, evaluation())
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
