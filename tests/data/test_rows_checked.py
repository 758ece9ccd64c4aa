"""Bad rows are found before the first rollout, and named by file and line, whatever loader or strategy there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_grpo import ALPHABET, Recorder, Rows, fit, module, quiet
from torch.utils.data import DataLoader

from sparse_rl_lightning.data import ArithmeticTasks, JsonlPrompts, MathBenchmarks, RepeatedBlockSampler
from sparse_rl_lightning.data import jsonl as jsonl_module
from sparse_rl_lightning.modules import SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

LONG = "abcdef0123" * 60  # of a context of 512, of which a completion takes 12
GOOD = [{"prompt": ALPHABET[n:], "answer": "1"} for n in range(16)]


def jsonl(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def drawn(trainer_steps: int = 4, data: Any = None, **options: Any) -> tuple[list[str], list[int]]:
    """The prompts and their numbers of tokens of a run's rollouts."""
    recorder = Recorder()
    fit(module(**options), trainer_steps, [recorder], data=data)
    rows = [row["prompt"] for scored in recorder.scored for row in scored.rows]
    lengths = [int(n) for scored in recorder.scored for n in scored.rollout.prompt_lengths[:: scored.num_generations]]
    return rows, lengths


@pytest.mark.parametrize(("row", "told"), [
    ({"prompt": LONG}, r"rows.jsonl, line 17: the prompt has 600 tokens; .*=12 that .* 512 tokens, .* 2 of 18 rows"),
    ({"prompt": "a", "completions": "x"}, r"named 'completions': reward functions get it already \(.*line 17\)"),
])  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line_before_anything_is_drawn(
    row: dict[str, str], told: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path, *GOOD, *[row | {"answer": "1"}] * 2)
    recorder = Recorder()
    with pytest.raises(ValueError, match=told):
        fit(module(), 40, [recorder], data=JsonlPrompts(path, prompts_per_rollout=4))
    assert not recorder.scored


class Absent(LoadedPolicy):
    """A policy whose loading is a mistake of its own."""

    def __init__(self) -> None:
        super().__init__(tiny_model(), character_tokenizer(ALPHABET))

    def load(self) -> Any:
        raise RuntimeError("the policy was loaded")


@pytest.mark.parametrize(("given", "told"), [
    ({"path": "none.jsonl"}, "There is no data file 'none.jsonl'"),
    ({"path": "rows.jsonl", "prompt_column": "questions"}, "rows.jsonl, line 1 has no column 'questions'"),
    ({"path": "rows.jsonl", "val_path": "none.jsonl"}, "There is no data file 'none.jsonl'"),
    ({"path": "rows.jsonl"}, "the policy was loaded"),
])  # fmt: skip
def test_mistakes_in_data_are_told_before_a_policy_is_loaded(given: dict[str, Any], told: str, folder: Path) -> None:
    """A policy may take minutes to fetch and to load."""
    jsonl(folder, *GOOD)
    grpo = module()
    grpo.policy_source = Absent()
    with pytest.raises((ValueError, RuntimeError), match=told):
        fit(grpo, 1, data=JsonlPrompts(**given, prompts_per_rollout=4))


@pytest.mark.parametrize(("stage", "inner"), [("fit", False), ("fit", True), ("predict", False)])
def test_no_file_is_read_twice(stage: str, inner: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped rows would be told of twice, too."""
    read, read_table = [], jsonl_module.read_table
    monkeypatch.setattr(jsonl_module, "read_table", lambda path, *more: read.append(path) or read_table(path, *more))
    path = jsonl(folder, *GOOD)
    Path("held_out.jsonl").write_bytes(Path(path).read_bytes())
    data: Any = JsonlPrompts(path, val_path="held_out.jsonl", prompts_per_rollout=4)
    if inner:
        data = MathBenchmarks(folder, benchmarks=[], val_benchmarks=[], train=data, prompts_per_rollout=4)
    if stage == "fit":
        fit(module(), 1, data=data)
    else:
        quiet(1).predict(module(), data)
    assert len(read) == len(set(read)) > 0


def test_a_validation_needs_no_training_rows(folder: Path) -> None:
    data = JsonlPrompts("none.jsonl", val_path=jsonl(folder, *GOOD))
    quiet(1).validate(module(), data)


def test_long_prompts_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = jsonl(tmp_path, {"prompt": LONG, "answer": "1"}, *GOOD)
    caplog.set_level("INFO")
    prompts, _ = drawn(data=JsonlPrompts(path, prompts_per_rollout=4), on_long_prompt="skip")
    assert sorted(prompts) == sorted(row["prompt"] for row in GOOD)
    assert "line 1: the prompt has 600 tokens" in caplog.text
    assert "1 of 17 rows. They are skipped." in caplog.text
    data = JsonlPrompts(jsonl(tmp_path, *[{"prompt": LONG, "answer": "1"}] * 4), prompts_per_rollout=4)
    with pytest.raises(ValueError, match="No row is left"):
        fit(module(on_long_prompt="skip"), 1, data=data)


def test_long_prompts_are_cut_to_their_last_tokens(tmp_path: Path) -> None:
    """512 - 12 tokens are left, of a character each; the data's order draws all four rows."""
    path = jsonl(tmp_path, {"prompt": LONG, "answer": "1"}, *GOOD[:3])
    grpo = module(on_long_prompt="truncate")
    prompts, lengths = drawn(1, JsonlPrompts(path, prompts_per_rollout=4), on_long_prompt="truncate")
    assert sorted(lengths) == [14, 15, 16, 500]
    assert LONG in prompts  # rewards see the row as it is
    grpo.configure_model()
    assert grpo.tokenizer.decode(grpo.generator.encode([{"prompt": LONG}])[0]) == LONG[-500:]
    params = grpo.val_sampling
    assert len(grpo.generator.encode([{"prompt": LONG}], params)[0]) == 512 - params.max_completion_length


def test_validation_rows_are_checked_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    val = jsonl(tmp_path / "val", *GOOD, {"prompt": LONG, "answer": "1"})
    data = JsonlPrompts(jsonl(tmp_path, *GOOD), val_path=val, prompts_per_rollout=4, val_batch_size=4)
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"val/rows.jsonl, line 17: the prompt has 600"):
        fit(module(), 40, [recorder], data=data, limit_val_batches=1.0)
    assert not recorder.scored


def test_a_column_that_one_row_lacks_is_none_there_and_told(tmp_path: Path) -> None:
    """Blocks of one row: the one that lacks it ended the run when its turn came."""
    path = jsonl(tmp_path, *[row | {"level": 1} for row in GOOD[:3]], GOOD[3])
    seen: list[Any] = []

    def reward(completions: list[str], level: list[Any], **_: Any) -> list[float]:
        seen.extend(level)
        return [float(len(text)) for text in completions]

    with pytest.warns(UserWarning, match=r"1 of 4 rows have no column 'level', which .* reward names: .*line 4"):
        fit(module(reward), 4, data=JsonlPrompts(path, prompts_per_rollout=1))
    assert sorted(seen, key=str) == [1] * 12 + [None] * 4


class Other(Rows):
    """A data module of a user's own."""

    extra: dict[str, Any] = {}  # noqa: RUF012

    def train_rows(self) -> list[dict[str, Any]]:
        return [*super().train_rows(), self.extra]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": LONG, "answer": ""}, "row 16 of the training data: the prompt has 600 tokens"),
        ({"answer": "1"}, "row 16 of the training data has no column 'prompt'. Its columns are: 'answer'"),
        ({"prompt": "", "answer": "1"}, "row 16 of the training data: empty prompt"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "row 16 of the training data: a chat message must be"),
    ],
)
def test_rows_of_any_data_module_and_loader_are_checked(row: dict[str, Any], message: str) -> None:
    data = Other(prompts_per_rollout=4)
    data.extra = row
    with pytest.raises(ValueError, match=message):
        fit(module(), 20, data=data)
    loader = DataLoader(data.train_rows(), batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        quiet(9).fit(module(), loader)


def test_a_loader_of_ones_own_skips_nothing() -> None:
    rows = [*Rows().train_rows()[:3], {"prompt": LONG, "answer": ""}]
    with pytest.raises(ValueError, match="'skip' needs a data module of prompts"):
        quiet(1).fit(module(on_long_prompt="skip"), DataLoader(rows, batch_size=4, collate_fn=list))  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from [*Rows().train_rows()[:7], {"prompt": LONG, "answer": ""}]


def test_a_stream_is_checked_as_it_is_read() -> None:
    def run(**options: Any) -> Trainer:
        trainer = quiet(2)
        trainer.fit(module(**options), DataLoader(Stream(), batch_size=4, collate_fn=list))
        return trainer

    with pytest.raises(ValueError, match="prompt 3 has 600 tokens"):
        run()
    assert run(on_long_prompt="truncate").global_step == 2


def test_the_warm_up_checks_its_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *[row | {"solution": "1"} for row in GOOD], GOOD[0])
    tokenizer = character_tokenizer(ALPHABET)
    warmup = SupervisedWarmup(LoadedPolicy(tiny_model(vocab_size=len(tokenizer)), tokenizer))
    with pytest.raises(ValueError, match=r"line 17: solution_column='solution' must hold text, got None"):
        quiet(20).fit(warmup, datamodule=JsonlPrompts(path, prompts_per_rollout=1))


def test_an_environment_may_give_the_prompt() -> None:
    with pytest.raises(ValueError, match="on_long_prompt='skip' does not work with environment"):
        module(on_long_prompt="skip", environment=lambda: None)
    with pytest.raises(ValueError, match=r"rollout\.on_long_prompt must be"):
        module(on_long_prompt="drop")


def test_only_texts_that_may_be_too_long_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_rl_lightning.rollout import prompts

    calls: list[Any] = []
    encode = prompts.encode_prompt
    monkeypatch.setattr(prompts, "encode_prompt", lambda *given: calls.append(given[1]) or encode(*given))
    found = prompts.long_prompts(character_tokenizer(), ["a" * 10, "b" * 11, "c" * 12, "é" * 6], 10, None, str)
    assert found == {1: 11, 2: 12}
    assert calls == ["a" * 10, "b" * 11, "c" * 12, "é" * 6]  # ten letters may have two tokens more


RANKS = """
import sys
from test_rows_checked import *
if __name__ == "__main__":
    import pathlib
    path = jsonl(pathlib.Path(sys.argv[1]), *GOOD, {"prompt": LONG, "answer": "1"})
    fit(module(), 40, data=JsonlPrompts(path, prompts_per_rollout=2), strategy="ddp", devices=2)
"""


@pytest.mark.slow
def test_ranks_find_it_too(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, str(tmp_path / "ranks.py"), str(tmp_path)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "line 17: the prompt has 600 tokens" in run.stderr


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
