"""Arguments of sources of prompts that cannot be: what is given, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparse_rl_lightning.data import ArithmeticTasks, JsonlPrompts, MathBenchmarks, RepeatedBlockSampler

READ_WHOLE = r"^val_split='test' is of hub datasets, and 'a.jsonl' is a file, read whole\. Leave val_split out, and"


def file(**arguments: Any) -> JsonlPrompts:
    return JsonlPrompts("x.jsonl", **arguments)


def sampler(count: int = 7, **arguments: Any) -> RepeatedBlockSampler:
    return RepeatedBlockSampler(range(count), **({"block_size": 2} | arguments))


REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (file, {"answer_pattern": "("}, r"answer_pattern='\(' is not a regular expression"),
    (file, {"prompt_template": "{question}"}, "prompt_template='{question}' is malformed"),
    *[(file, {"prompt_template": f"{{prompt}} {end}"}, "malformed") for end in ("{}", "{")],
    (file, {"prompt_template": "{prompt.x}"}, "malformed"),
    (file, {"prompt_template": "{prompt!r}"}, r"does not contain \{prompt\}"),
    (file, {"prompt_template": "answer:"}, r"does not contain \{prompt\}"),
    (file, {"final_assistant": "cut"}, "final_assistant must be"),
    # with a file, val_split would validate on the rows of training
    (JsonlPrompts, {"path": "a.jsonl", "val_split": "test"}, READ_WHOLE),
    (JsonlPrompts, {"path": "a/b", "val_path": "b.csv", "val_split": "test"},
     r"val_split='test' .*'b.csv' is a file, .* Leave val_split out\.$"),
    (JsonlPrompts, {"path": "a.jsonl", "split": "all"}, r"split='all' .*'a.jsonl' is a file, .* Leave split out\.$"),
    (JsonlPrompts, {"path": "a.parquet", "val_path": "a/b", "split": "all", "val_split": "test"},
     "split='all' .*'a.parquet' is"),
    (JsonlPrompts, {"path": "a.JSON", "val_path": "b.json", "config": "main"},
     "config='main' .*'a.JSON' and 'b.json' are files, read whole"),
    (ArithmeticTasks, {"tasks": "suM"}, "countdown, calculator, calculator_restated, got tasks='suM'"),
    (ArithmeticTasks, {"tasks": ["sum", "gcd"]}, "gcd"),
    (ArithmeticTasks, {"tasks": []}, "tasks must be among"),
    (ArithmeticTasks, {"num_terms": 1}, "num_terms must be at least 2, got num_terms=1"),
    (ArithmeticTasks, {"digits": 0}, "digits must be at least 1"),
    (ArithmeticTasks, {"num_train": 0}, "num_train must be at least 1"),
    (ArithmeticTasks, {"num_val": -1}, "num_val must be at least 0"),
    (lambda **given: ArithmeticTasks(**given).train_rows(), {"num_terms": 2, "digits": 1, "num_train": 100},
     r"num_train=100 questions were asked for, but sum .* raise num_terms or digits"),
    *[(ArithmeticTasks, {name: 0}, f"ArithmeticTasks: {name} must be at least 1.*, got {name}=0")
      for name in ("prompts_per_rollout", "val_batch_size", "max_val_prompts")],
    (MathBenchmarks, {"benchmarks": ["gsm9k"]}, "benchmarks must be among gsm8k, math500"),
    (MathBenchmarks, {"val_benchmarks": ["gsm8k_train"]}, "val_benchmarks must be among"),
    (MathBenchmarks, {"max_rows": 0}, "max_rows must be at least 1"),
    (MathBenchmarks, {"prompt_format": "chatml"}, "prompt_format must be one of plain, qwen, llama"),
    (sampler, {"count": 1}, "1 prompts do not fill one block: 2 prompts per rollout on each of 1 rank"),
    (sampler, {"count": 3, "num_replicas": 2}, "3 prompts do not fill one block"),
    (sampler, {"block_size": 0}, "block_size=0"),
    (sampler, {"repeats": 0}, "repeats=0"),
    (sampler, {"num_replicas": 2, "rank": 2}, "rank"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_arguments_that_cannot_be_are_refused_by_name(
    make: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)
