"""What the tests of evaluations share: a configuration of a tiny policy and a benchmark of one's own."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparse_rl_lightning.testing import character_tokenizer, tiny_model


@pytest.fixture
def write_evaluation(folder: Path) -> Callable[..., str]:
    """Writes eval.yaml, of mine.jsonl and a policy with a token per letter, with these options of Evaluation."""

    def write(context: int = 512, **own: Any) -> str:
        tokenizer = character_tokenizer(string.printable)
        policy = tiny_model(vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=context)
        for part in (tokenizer, policy):
            part.save_pretrained("policy")
        source = {"class_path": "PretrainedPolicy", "init_args": {"path": "policy", "dtype": "float32"}}
        data = {"own": {"mine": "mine.jsonl"}, "benchmarks": ["mine"]}
        settings = {
            "model": {"class_path": "Evaluation", "init_args": {"policy": source, **own}},
            "data": {"class_path": "MathBenchmarks", "init_args": data},
            "trainer": {
                "accelerator": "cpu", "default_root_dir": "run", "logger": False, "enable_progress_bar": False,
                "enable_checkpointing": False, "enable_model_summary": False,
            },
        }  # fmt: skip
        Path("eval.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        return "eval.yaml"

    return write
