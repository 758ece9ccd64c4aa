"""The seven benchmarks: formats and defects by small files of their own, counts and hashes by the published ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_files import GOLDS, ROWS, write_benchmarks

from sparse_rl_lightning.data import ArithmeticTasks, MathBenchmarks
from sparse_rl_lightning.data.benchmarks import render
from sparse_rl_lightning.data.published import GSM8K_TRAIN, PUBLISHED
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards.math import verify

DROPPED = {"gaokao2023en": [167, 192]}
COUNTS = {
    "gsm8k": 1319, "math500": 500, "gaokao2023en": 385, "minerva_math": 272, "olympiadbench": 675, "aime24": 30,
    "amc23": 40, "gsm8k_train": 7473,
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_benchmarks(tmp_path / "data")


# ---------------------------------------------------------------- formats


@pytest.mark.filterwarnings("ignore:.*is not the published file", "ignore:.* rows, the published one")
def test_golds_come_out_of_every_format(small: Path) -> None:
    data = MathBenchmarks(str(small))
    assert {name: [row["answer"] for row in rows] for name, rows in data.test_rows().items()} == GOLDS
    assert [row["index"] for row in data.rows("gaokao2023en")] == [0, 2]
    assert data.reports["gaokao2023en"].dropped == [1]
    assert data.reports["gaokao2023en"].kinds == {"parts": 1, "uncheckable": 1, "number": 1}
    assert "rows [1]" in str(data.reports["gaokao2023en"])
    assert {row["tolerance"] for row in data.rows("minerva_math")} == {1e-4}
    assert {row["tolerance"] for name in GOLDS if name != "minerva_math" for row in data.rows(name)} == {0.0}


@pytest.mark.filterwarnings("ignore:.*is not the published file", "ignore:.* rows, the published one")
def test_loaders(small: Path) -> None:
    data = MathBenchmarks(str(small), max_rows=1, val_benchmarks=["gsm8k", "amc23"], prompts_per_rollout=2)
    batches = list(data.test_dataloader())
    assert [[row["benchmark"] for row in batch] for batch in batches] == [[name] for name in GOLDS]
    (batch,) = data.val_dataloader()
    assert [row["answer"] for row in batch] == ["12", "2125", "27"]
    assert {row["benchmark"] for row in next(iter(data.train_dataloader()))} == {"gsm8k_train"}
    assert [row["answer"] for row in data.train_rows()] == ["0", "2", "4", "6"]
    data = MathBenchmarks(str(small), val_benchmarks=[])
    assert data.val_dataloader() == []
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"))
    with pytest.raises(ValueError, match=r"MathBenchmarks has no validation rows, .*data\.val_benchmarks of MathB"):
        data.val_dataloader()


@pytest.mark.filterwarnings("ignore:.*is not the published file", "ignore:.* rows, the published one")
def test_training_prompts_may_come_from_elsewhere(small: Path) -> None:
    data = MathBenchmarks(str(small), train=ArithmeticTasks(num_train=16, num_val=1), val_benchmarks=["aime24"])
    assert [row["task"] for row in data.train_rows()] == ["sum"] * 16
    assert [row["benchmark"] for row in data.val_rows()] == ["aime24"]


def test_another_file_is_said(small: Path) -> None:
    data = MathBenchmarks(str(small))
    with pytest.warns(UserWarning, match="published") as caught:
        data.rows("aime24")
    file, rows = sorted(str(warning.message) for warning in caught)
    assert re.search(r"aime24.jsonl is not the published file: its SHA-256 is not af2b8b", file)
    assert rows == "aime24 has 1 rows, the published one 30."
    assert data.reports["aime24"].is_published is False


@pytest.mark.filterwarnings("ignore:.*is not the published file", "ignore:.* rows, the published one")
def test_a_missing_file_names_what_to_do_and_the_setting_that_asks_for_it(small: Path) -> None:
    for file in ("amc23.jsonl", "gsm8k_train.jsonl"):
        (small / file).unlink()
    data = MathBenchmarks(str(small), benchmarks=["gsm8k"], val_benchmarks=["amc23"])
    assert list(data.test_rows()) == ["gsm8k"]
    told = r"amc23.jsonl \(40 rows\) from data.folder.*math-ai/amc23.*, or leave amc23 out of data\.val_benchmarks\.$"
    with pytest.raises(ValueError, match=told):
        data.val_rows()
    with pytest.raises(ValueError, match=r", or give data\.train another source of training prompts\.$"):
        data.train_rows()
    with pytest.raises(ValueError, match=r", or leave amc23 out of data\.benchmarks\.$"):
        MathBenchmarks(str(small), benchmarks=["amc23"]).test_rows()


# ---------------------------------------------------------------- own benchmarks


def own(folder: Path, *rows: dict[str, object], name: str = "mine.jsonl") -> MathBenchmarks:
    """A benchmark of these rows, to test and to validate on."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return MathBenchmarks(own={"mine": name}, benchmarks=["mine"], val_benchmarks=["mine"])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], r"^mine: none of its 0 rows can be used \(0 .* question, 0 .*; the columns found are: none\.$"),
        (
            [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4", "\x1b[2J": 1}],
            r"^mine: none of its 2 rows can be used \(2 without a question, 0 without an answer that can be checked\)"
            r"\. A row needs 'problem' or 'question', and 'answer'; .* are: 'prompt', 'answer', '\\x1b\[2J'\.$",
        ),
        (
            [{"problem": "1+1?", "gold": "2"}, {"problem": "", "gold": "2"}],
            r"none of its 2 rows can be used \(1 without a question, 2 .* found are: 'problem', 'gold'\.$",
        ),
    ],
)
@pytest.mark.parametrize("loader", ["test_dataloader", "val_dataloader", "predict_dataloader"])
def test_a_benchmark_without_rows_is_refused(
    loader: str, rows: list[dict[str, object]], said: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        getattr(own(folder, *rows), loader)()


def test_a_published_name_without_rows_is_refused(small: Path) -> None:
    (small / "aime24.jsonl").write_text("", encoding="utf-8")
    data = MathBenchmarks(str(small))
    with (
        pytest.warns(UserWarning, match="published"),
        pytest.raises(ValueError, match=r"aime24: none of its 0 rows .* columns of the published aime24.jsonl"),
    ):
        data.rows("aime24")


def test_rows_are_dropped_for_what_they_lack(folder: Path) -> None:
    data = own(
        folder, {"problem": "1+1?", "answer": "2"}, {"problem": " ", "answer": "2"},
        {"problem": "1+1?", "answer": "}{"}, {"question": ""},
    )  # fmt: skip
    assert [row["index"] for row in data.rows("mine")] == [0]
    report = data.reports["mine"]
    assert (report.dropped, report.unasked) == ([1, 2, 3], [1, 3])
    said = "; dropped without a question: rows [1, 3]; dropped without an answer that can be checked: rows [2]"
    assert str(report).endswith(said)


def test_cells_are_text_or_numbers(folder: Path) -> None:
    numbers = [{"question": 5, "answer": 7.0}, {"problem": "x", "answer": 1e22}, {"problem": "y", "answer": math.nan},
               {"problem": "z", "answer": math.nan, "solution": r"\boxed{3}"}]  # fmt: skip
    rows = [(row["question"], row["answer"]) for row in own(folder, *numbers).rows("mine")]
    assert rows == [("5", "7"), ("x", "10000000000000000000000"), ("z", "3")]
    for cell in (["5"], {"x": 5}, True):
        for name, other in (("answer", "problem"), ("problem", "answer")):
            with pytest.raises(UserError, match=rf"^{name} must be text or a number, got .* in {{'"):
                own(folder, {name: cell, other: "5"}).rows("mine")


def test_blocks_set_for_the_training_prompts_are_told_to_be_without_effect(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"data.train.prompts_per_rollout=2 does not act, .*_rollout=16 does"):
        MathBenchmarks(train=ArithmeticTasks(prompts_per_rollout=2))
    for setting in ({"val_batch_size": 2}, {"max_val_prompts": 9}):
        with pytest.warns(UserWarning, match=rf"data.train.{'|'.join(setting)}=. does not act, .*=64 does"):
            MathBenchmarks(train=ArithmeticTasks(**setting))
    MathBenchmarks(train=ArithmeticTasks(prompts_per_rollout=2), prompts_per_rollout=2)
    MathBenchmarks(train=ArithmeticTasks(), prompts_per_rollout=2)


@pytest.mark.parametrize("path", ["nofile.jsonl", "nofile.txt", "~/nofile.txt", "some/dataset", "."])
def test_a_missing_file_of_ones_own_is_named(path: str, folder: Path) -> None:
    for taken in ("gsm8k", "gsm8k_train", "mean"):  # the second is what is trained on
        with pytest.raises(ValueError, match=f"own: {taken} is the name of a published benchmark or of their mean"):
            MathBenchmarks(own={taken: path}, benchmarks=[taken])
    data = MathBenchmarks(own={"mine": path}, benchmarks=["mine"])
    told = rf"There is no data file '.*{path.strip('~')}' \(looked in .*\)\. Check the path"
    with pytest.raises(ValueError, match=told):
        data.test_rows()


def test_a_file_of_ones_own_may_have_any_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(folder, {"problem": "1+1?", "answer": "2"}, name="mine.txt")
    monkeypatch.setenv("HOME", str(folder))
    data = MathBenchmarks(own={"mine": "~/mine.txt"}, benchmarks=["mine"])
    assert [row["answer"] for row in data.test_rows()["mine"]] == ["2"]


@pytest.mark.parametrize("value", ["[broken", "['1', '2']", "3", ["4", "5"], None])
def test_olympiad_answers_of_any_shape(value: object) -> None:
    gold = PUBLISHED["olympiadbench"].gold({"final_answer": value, "answer": "6"})
    assert gold == {"[broken": "", "['1', '2']": "1,2", "3": "3"}.get(str(value), "6" if value is None else "4,5")


def test_the_hubs_datasets_by_their_own_names(folder: Path) -> None:
    """Dataset repositories laid out as on the hub in the working directory, where ``load_dataset`` looks first."""
    for benchmark in (*PUBLISHED.values(), GSM8K_TRAIN):
        name, config, split = benchmark.hub
        data = folder / name / f"{split}.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(ROWS[benchmark.file][0]) + "\n", encoding="utf-8")
        files = [f"  - split: {path.stem}\n    path: {path.name}" for path in sorted(data.parent.glob("*.jsonl"))]
        lines = ["---", "configs:", f"- config_name: {config or 'default'}", "  data_files:", *files, "---", ""]
        (folder / name / "README.md").write_text("\n".join(lines), encoding="utf-8")
    data = MathBenchmarks(None)
    with pytest.warns(UserWarning, match="has 1 rows, the published one"):
        rows = data.test_rows() | {"gsm8k_train": data.train_rows()}
    expected = {name: golds[:1] for name, golds in GOLDS.items()} | {"gsm8k_train": ["0"]}
    assert {name: [row["answer"] for row in own] for name, own in rows.items()} == expected
    assert all(report.is_published is None for report in data.reports.values())


# ---------------------------------------------------------------- prompts


def test_templates() -> None:
    plain = "Q? Please reason step by step, and put your final answer within \\boxed{}.\n\n"
    assert render("Q?", "plain") == plain
    asked = "Q?\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    system = "You are a helpful assistant."
    assert render("Q?", "llama") == [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    assert render("Q?", "qwen") == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_are_those_of_the_papers_own_data(data_dir: Path) -> None:
    for file, prompt_format in (
        ("simplelr_qwen_level3to5.sample.jsonl", "qwen"), ("simplelr_level3to5.sample.jsonl", "llama")
    ):  # fmt: skip
        for line in (data_dir / file).read_bytes().split(b"\n")[:400]:
            prompt = json.loads(line)["prompt"]
            user = prompt if isinstance(prompt, str) else prompt[1]["content"]
            problem = re.search(r"(?:<\|im_start\|>user\n|\A)((?:(?!<\|im_start).)*?)\nPlease reason step", user, re.S)
            assert render(problem[1], prompt_format) == prompt


# ---------------------------------------------------------------- the published files


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts_hashes_and_golds(data_dir: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    data = MathBenchmarks(str(data_dir))
    rows, report = data.rows(name), data.reports[name]
    assert report.num_rows == COUNTS[name] == (GSM8K_TRAIN if name == "gsm8k_train" else PUBLISHED[name]).num_rows
    assert report.is_published is True
    assert report.dropped == DROPPED.get(name, [])
    assert len(rows) == COUNTS[name] - len(report.dropped)
    assert not [warning for warning in recwarn if "published" in str(warning.message)]
    failed = [row["answer"] for row in rows if not verify(rf"Thus $\boxed{{{row['answer']}}}$.", row["answer"])]
    assert failed == []
    if name in ("gsm8k", "gsm8k_train", "aime24", "amc23"):
        assert report.kinds == {"number": COUNTS[name]}
    if name == "gaokao2023en":
        assert rows[107]["answer"] == "145"
