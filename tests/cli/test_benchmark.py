"""``sparse-rl benchmark``: numbers against independent ones, users' classes and mistakes, and a run that goes on."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_run import run_console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.compressors.forced import forced_logits
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.cli.benchmark import _bench, main
from sparse_rl_lightning.cli.options import _budget
from sparse_rl_lightning.cli.options import benchmark as parser
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.quality import page
from sparse_rl_lightning.quality.cells import Bench, Cell, now
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

LENGTH, PROBLEMS, BUDGET, BUFFER = 24, 10, 16, 4
TIMES = ("event_ms", "time_ratio")
MINE = '''
from sparse_rl_lightning.compressors import Compressor

class LargeValues(Compressor):
    """Keep the entries with the largest values."""
    def score(self, layer):
        return layer.values.float().norm(dim=-1)

class Raises(LargeValues):
    def score(self, layer):
        raise KeyError("no such number")

class Grows(LargeValues):
    calls = 0
    def score(self, layer):
        type(self).calls += 1
        return super().score(layer) * (-1) ** type(self).calls

class Other:
    pass

def pays_even(completions, **_):
    return [float(sum(c.isdigit() for c in text) % 2 == 0) for text in completions]
'''


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = character_tokenizer(ARITHMETIC_ALPHABET)
    return tiny_model(vocab_size=len(tokenizer), num_layers=2, initializer_range=0.3).eval(), tokenizer


@pytest.fixture(scope="module")
def policy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    for part in tiny:
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    """A working directory with classes of the user's."""
    (folder / "mine.py").write_text(MINE)
    sys.path.append(str(folder))
    yield folder
    sys.modules.pop("mine", None)


TIMED = ("--timed", "4")


def options(policy: str, *more: str) -> list[str]:
    """Without times, which take half of a run."""
    given = ["--policy", policy, "--problems", str(PROBLEMS), "--max_completion_length", str(LENGTH), "--output", "out"]
    usual = [] if "--budgets" in more else ["--budgets", str(BUDGET)]
    usual += [] if "--timed" in more else ["--timed", "0"]
    return [*given, "--buffer", str(BUFFER), "--num_sinks", "1", "--window", "3", *usual, *more]


def stored(folder: str = "out") -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(Path(folder, "table.json").read_text())["cells"]
    return cells


def timeless(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in cell.items() if name not in TIMES} for cell in cells]


def test_a_cell_against_independent_numbers(tiny: Any, policy: str, own: Path) -> None:
    """Tail and agreement from whole distributions in numpy, accuracy from a loop, its interval from the formula."""
    *_, cell = main(["SnapKV", *options(policy, "--reward", "mine.pays_even", "--samples", "2", "--seed", "3", *TIMED)])
    assert (cell.method, cell.budget, cell.reason) == ("SnapKV", BUDGET, "")

    model, tokenizer = tiny
    rows = ArithmeticTasks("sum", num_train=1, num_val=PROBLEMS, seed=3).val_rows()
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    compressor = SnapKV(BUDGET, buffer=BUFFER, num_sinks=1, window=3)
    sampler = RolloutSampler(model, compressor, end_token_ids=[tokenizer.eos_token_id])
    rollout = sampler.generate(prompts, SamplingParams(num_generations=2, max_completion_length=LENGTH, seed=3))
    mask = rollout.completion_mask
    sparse = forced_logits(model, compressor, rollout.sequences, rollout.prompt_lengths.tolist(), seed=3).logits
    with torch.no_grad():
        dense = model(rollout.sequences).logits.roll(1, dims=1)  # index t speaks of token t
    p, q = (logits[mask].double().softmax(dim=-1).numpy() for logits in (dense, sparse))
    overlap = np.minimum(p, q).sum(axis=-1)
    assert overlap.min() < 0.9, "nothing to measure"
    assert cell.tail == pytest.approx(np.percentile(overlap, 5), abs=1e-5)
    agreement = (p.argmax(axis=-1) == q.argmax(axis=-1)).mean()
    assert agreement < 1
    assert cell.agreement == pytest.approx(agreement, abs=1e-9)
    assert cell.kl == pytest.approx((q * (np.log(q) - np.log(p))).sum(axis=-1).mean(), abs=1e-5)
    low = torch.zeros(mask.shape, dtype=torch.float64)
    low[mask] = torch.from_numpy(np.where(p < 1e-4 * q, q, 0).sum(axis=-1))
    rejected = 1 - (1 - low).prod(dim=1)
    assert 0 < rejected.mean() < 1, "nothing to measure"
    assert cell.rejected == pytest.approx(float(rejected.mean()), abs=1e-5)
    full = RolloutSampler(model, FullKV(), end_token_ids=[tokenizer.eos_token_id])
    beside = full.generate(prompts, SamplingParams(num_generations=2, max_completion_length=LENGTH, seed=3))
    assert cell.length == pytest.approx(float(mask.sum() / beside.completion_mask.sum()))
    assert cell.length != 1
    for name, (bottom, top) in cell.intervals.items():
        assert bottom <= getattr(cell, name) <= top, name
    assert sorted(cell.intervals) == ["agreement", "kl", "length", "rejected", "tail"]

    greedy = sampler.generate(prompts, SamplingParams(max_completion_length=LENGTH, temperature=0))
    texts = tokenizer.batch_decode(greedy.completion_ids, skip_special_tokens=True)
    right = sum(len([c for c in text if c in "0123456789"]) % 2 == 0 for text in texts)
    assert 0 < right < PROBLEMS
    share, z = right / PROBLEMS, 1.959964
    center = share + z**2 / (2 * PROBLEMS)
    spread = z * math.sqrt(share * (1 - share) / PROBLEMS + (z / PROBLEMS / 2) ** 2)
    bounds = [(center + sign * spread) / (1 + z**2 / PROBLEMS) for sign in (-1, 1)]
    assert [cell.accuracy, cell.low, cell.high] == pytest.approx([share, *bounds], abs=1e-6)

    assert cell.replay_difference is not None
    assert 0 < cell.replay_difference < 2e-5
    assert cell.kv_saving == pytest.approx(1 - float(rollout.kv.stored.sum() / rollout.kv.full.sum()))  # type: ignore[union-attr]
    assert cell.event_ms is not None
    assert cell.event_ms > 0
    assert cell.time_ratio is not None
    assert cell.time_ratio > 0


def test_first_rows_are_random_eviction_and_the_full_cache(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At three budgets; a share counts tokens of the texts; everything fits 120 columns and is written."""
    arguments = options(policy, "--budgets", "0.5", "20", "24", *TIMED)
    assert run_console(monkeypatch, "benchmark", "SnapKV", "FullKV", *arguments) is None
    cells = stored()
    mean = json.loads(Path("out/table.json").read_text())["lengths"][0]
    budgets = sorted({round(0.5 * mean), 20, 24})
    floor, full = "RandomEviction, prompt kept", "full cache"
    assert [(c["method"], c["budget"]) for c in cells] == [
        *((floor, budget) for budget in budgets), (full, None), *(("SnapKV", budget) for budget in budgets)
    ]  # fmt: skip
    assert cells[3]["tail"] > 0.9999
    assert (cells[3]["agreement"], cells[3]["length"]) == (1, 1)
    assert (cells[3]["kl"], cells[3]["rejected"]) == pytest.approx((0, 0), abs=1e-6)
    assert cells[3]["kv_saving"] == 0
    assert cells[3]["event_ms"] is None
    printed = capsys.readouterr().out
    head = next(line for line in printed.splitlines() if line.startswith("method"))
    names = "method budget tail agreement KL rejected length accuracy [95 %] ms/event time"
    assert head.split() == names.split()
    assert all(len(line) <= 120 for line in printed.partition("Written")[0].splitlines())
    assert Path("out/table.md").read_text().startswith("| method | budget |")


def test_a_killed_run_goes_on(policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["KNorm", *options(policy, "--budgets", "16", "20")]
    main(arguments)
    whole = stored()
    Path("out").rename("whole")
    measure, calls = Bench.measure, []

    def counted(bench: Bench, compressor: Any) -> dict[str, Any]:
        calls.append(repr(compressor))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(bench, compressor)

    monkeypatch.setattr(Bench, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    (first,) = stored()
    main(arguments)
    assert len(calls) == 2 + len(whole) - 1, "the first cell was measured again"
    assert stored()[0] == first
    assert timeless(stored()) == timeless(whole)
    before = Path("out/table.json").read_bytes()
    main(arguments)
    assert Path("out/table.json").read_bytes() == before
    main([*arguments, "--num_slots", "3"])
    assert Path("out/table.json").read_bytes() == before
    with pytest.raises(UserError, match=r"out/table.json is of another sampling. Choose another"):
        main([*arguments, "--samples", "2"])
    content = json.loads(before)
    first, *_ = content["cells"]
    for change in (
        {"lengths": None}, {"lengths": ["9", 9]}, {"lengths": [9]}, {"lengths": []}, {"completions": ["a"]},
        {"completions": []}, {"cells": [None]},
        {"cells": [first | {"tail": "0.9"}]},
        {"cells": [first | {"intervals": {"tail": [None, 1.0]}}]}, {"cells": [first | {"budget": [1]}]},
    ):  # fmt: skip
        Path("out/table.json").write_text(json.dumps(content | change))
        with pytest.raises(UserError, match=r"out/table.json is damaged, or of something else"):
            main(arguments)
    for broken in ("[1]", "", "[" * 9999, '{"settings": []}'):
        Path("out/table.json").write_text(broken)
        with pytest.raises(UserError, match=r"out/table.json is damaged, or of something else"):
            main(arguments)
    Path("out/table.json").unlink()
    with pytest.raises(UserError, match=r"--output='out' holds table.md.* and no table.json: of something else"):
        main(arguments)


def test_own_classes_from_the_working_directory(
    policy: str, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises and one that breaks the contract keep a row with the reason; the others are measured."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(own)])  # the console script adds it
    names = [f"mine.{name}" for name in ("Raises", "Grows", "LargeValues")]
    assert run_console(monkeypatch, "benchmark", *names, "LagKV", *options(policy, *TIMED)) is None
    raises, grows, large, lag = page.rows([Cell(**c) for c in stored()])[3:]
    assert raises == ["Raises", "16", *["–"] * 10]
    assert grows == ["Grows", "16", *["–"] * 10]
    assert large[0] == "LargeValues"
    assert "–" not in large[2:]
    assert lag == ["LagKV", "16", *["–"] * 10]
    said = " ".join(capsys.readouterr().out.split())
    wrong = "Raises, budget 16: Raises raised an error while the rule 'shape' was checked. Found: KeyError: 'no such"
    assert wrong in said
    assert "Grows, budget 16: Grows breaks the rule" in said
    assert "LagKV, budget 16: LagKV: lag_size must be from 2 to 9" in said
    before = stored()
    (own / "mine.py").write_text(MINE.replace("return layer.values", "return -layer.values"))
    sys.modules.pop("mine")
    assert run_console(monkeypatch, "benchmark", *names, *options(policy, *TIMED)) is None
    assert stored()[:2] == before[:2], "what has not changed is not measured again"
    assert stored()[4]["tail"] != before[4]["tail"], "the class has changed"
    assert "LargeValues, budget 16: its row is of other settings or code; it is" in capsys.readouterr().out


@pytest.mark.slow
def test_an_own_class_may_have_a_name_of_the_librarys(policy: str, folder: Path) -> None:
    """In a process of its own: jsonargparse would find both by that name, here and in later tests."""
    Path("namesake.py").write_text(MINE.replace("class LargeValues", "class FullKV").partition("class Raises")[0])
    methods = ["namesake.FullKV", "FullKV", *options(policy, *TIMED)]
    command = [sys.executable, "-m", "sparse_rl_lightning", "benchmark", *methods]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    own = page.rows([Cell(**c) for c in stored()])[-1]
    assert own[:2] == ["FullKV", "16"], "the one that evicts"
    assert "–" not in own[2:]


def test_methods_with_arguments(policy: str, folder: Path) -> None:
    """A YAML file keeps its own but the budget, statistics are gathered, the prompt can be protected."""
    sizes = {"budget": 99, "buffer": 3, "num_sinks": 1, "window": 3}
    parts = [{"class_path": name, "init_args": sizes} for name in ("SnapKV", "KNorm")]
    both = {"class_path": "Combined", "init_args": {"compressors": parts, "weights": [2, 1]}}
    Path("both.yaml").write_text(yaml.safe_dump(both))
    cells = main(["both.yaml", "QFilters", "SnapKV", "RandomEviction", *options(policy, "--protect_prompt")])
    floor, _, union, filters, snapkv, random = cells
    assert [cell.reason for cell in cells] == [""] * len(cells)
    assert (union.method, filters.method) == ("both", "QFilters")
    assert len({union.tail, filters.tail, snapkv.tail}) == 3
    assert union.kv_saving is not None
    assert union.kv_saving > 0, "the budget is not that of the run"
    assert random.tail == floor.tail, "the prompt is not protected"


def test_a_file_changes_what_it_names(policy: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All else, buffer and sinks among it, is what the other methods have; a mistake in it is told at once."""
    Path("same.yaml").write_text(yaml.safe_dump({"class_path": "SnapKV"}))
    Path("wide.yaml").write_text(yaml.safe_dump({"class_path": "SnapKV", "init_args": {"kernel_size": 1}}))
    *_, same, wide, plain = main(["same.yaml", "wide.yaml", "SnapKV", *options(policy)])
    assert (same.tail, same.kl) == (plain.tail, plain.kl)
    assert (wide.tail, wide.kl) != (plain.tail, plain.kl)
    assert "ms/event" not in capsys.readouterr().out, "no times were taken"
    Path("wrong.yaml").write_text(yaml.safe_dump({"class_path": "SnapKV", "init_args": {"kernel": 1}}))
    with pytest.raises(UserError, match="kernel"):
        main(["wrong.yaml", *options(policy, "--output", "none")])
    assert stored("none") == []


def test_methods_of_one_name_have_a_row_each(policy: str, folder: Path) -> None:
    """A file called as a class, and a class of the same name: the second is no second reading of the first."""
    Path("SnapKV.yaml").write_text(yaml.safe_dump({"class_path": "SnapKV", "init_args": {"kernel_size": 1}}))
    *_, changed, plain = main(["SnapKV.yaml", "SnapKV", *options(policy)])
    assert (changed.method, plain.method) == ("SnapKV", "SnapKV (2)")
    assert changed.kl != plain.kl


def test_copies_of_a_problem_narrow_no_interval(policy: str, folder: Path) -> None:
    """They are one problem, and one alone has no interval of a mean, neither here nor in the stored table."""
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1+2="}) + "\n" + json.dumps({"prompt": "1+2="}) + "\n")
    cells = main(["SnapKV", *options(policy, "--data", "rows.jsonl")])
    assert [sorted(cell.intervals) for cell in cells] == [["rejected", "tail"]] * len(cells)  # Wilson's
    assert "Infinity" not in Path("out/table.json").read_text()


def remove_tables() -> None:
    for name in ("table.json", "table.md"):
        Path("out", name).unlink()


@pytest.mark.slow
def test_a_network_is_taught_where_none_is_given(policy: str, folder: Path) -> None:
    """That of LearnedScore, on other completions; a second run takes the file."""
    (*_, learned) = main(["LearnedScore", *options(policy)])
    assert learned.reason == ""
    assert learned.replay_difference is not None
    assert learned.replay_difference < 1e-4
    (file,) = Path("out").glob("weights-*.safetensors")
    written = file.stat().st_mtime_ns
    remove_tables()
    (*_, again) = main(["LearnedScore", *options(policy)])
    assert file.stat().st_mtime_ns == written
    assert (again.tail, again.kl) == (learned.tail, learned.kl)


@pytest.mark.slow
def test_a_changed_reward_and_another_policy_are_measured_again(policy: str, tiny: Any, own: Path) -> None:
    """A function by its code, statistics by the weights that they were gathered from."""
    arguments = ["QFilters", "--reward", "mine.pays_even"]
    even = main([*arguments, *options(policy)])
    (own / "mine.py").write_text(MINE.replace("% 2 == 0", "% 2 == 1"))
    sys.modules.pop("mine")
    odd = main([*arguments, *options(policy)])
    assert [cell.accuracy for cell in odd] == pytest.approx([1 - (cell.accuracy or 0) for cell in even])
    tokenizer = tiny[1]
    model = tiny_model(vocab_size=len(tokenizer), num_layers=2, initializer_range=0.2, seed=1)
    for part in (model, tokenizer):
        part.save_pretrained("other")
    remove_tables()
    *_, mixed = main([*arguments, *options("other")])
    *_, alone = main([*arguments, *options("other", "--output", "alone")])
    assert (mixed.tail, mixed.accuracy) == (alone.tail, alone.accuracy)
    assert len({file.read_bytes() for file in Path("out").glob("statistics*")}) == 2


def test_greedy_completions_are_compared_by_their_distributions(policy: str, folder: Path) -> None:
    """Divided by a temperature of 0 all were NaN, which agreed everywhere."""
    *_, cell = main(["KNorm", *options(policy, "--temperature", "0")])
    assert cell.reason == ""
    assert 0 < (cell.tail or 0) < (cell.agreement or 0) < 1
    assert 0 < (cell.kl or 0)


def test_numbers_that_are_none_are_a_reason(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparse_rl_lightning.quality.mismatch.exact_acceptance", lambda p, q: p[:, 0] * torch.nan)
    assert run_console(monkeypatch, "benchmark", "KNorm", *options(policy)) == 1
    assert "tail cannot be computed: the policy's log-probabilities are not finite" in capsys.readouterr().err


def test_times_are_measured_where_there_were_none(policy: str, folder: Path) -> None:
    assert all(cell.time_ratio is None for cell in main(["KNorm", *options(policy, "--timed", "0")]))
    assert all(cell.time_ratio is not None for cell in main(["KNorm", *options(policy, *TIMED)]))


def test_rows_that_are_not_judged_do_not_count(policy: str, own: Path) -> None:
    """As in validation: a row whose reward is None is neither right nor wrong."""
    judged = MINE.replace("pays_even(completions, **_)", "pays_even(completions, answer, **_)").replace(
        "for text in completions]", "if gold == 'judged' else None for text, gold in zip(completions, answer)]"
    )
    (own / "mine.py").write_text(judged)
    found = []
    for name, golds in (("all", ["judged"] * 3), ("half", ["judged", "no answer"] * 3)):
        rows = [{"prompt": f"1{i}+2{i}=", "answer": gold} for i, gold in enumerate(golds)]
        rows = rows if name == "all" else [{**row, "prompt": f"1{i // 2}+2{i // 2}="} for i, row in enumerate(rows)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["--data", f"{name}.jsonl", "--reward", "mine.pays_even", "--problems", "6", "--output", name]
        *_, cell = main(["KNorm", *options(policy), *given])
        found.append(cell.accuracy)
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0] > 0


def test_reading_the_clock_is_not_in_the_ratio(policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second whenever it is read, as a GPU waits for it, nothing else takes time."""
    ticks = itertools.count(0.0)
    monkeypatch.setattr("sparse_rl_lightning.quality.cells.now", lambda device: next(ticks))
    *_, cell = main(["H2O", *options(policy, *TIMED)])
    assert cell.time_ratio == 1
    assert cell.event_ms is not None
    assert cell.event_ms > 0


def test_a_run_in_which_nothing_works_is_an_error(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(bench: Bench, compressor: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Bench, "measure", raises)
    assert run_console(monkeypatch, "benchmark", "KNorm", *options(policy)) == 1
    said = "Nothing could be measured, not even the full cache: RuntimeError: out of memory"
    assert said in capsys.readouterr().err


def test_rows_of_a_file(folder: Path) -> None:
    """Answers are judged as boxed ones; rows without answers are compared all the same, without accuracy."""
    tokenizer = character_tokenizer([*ARITHMETIC_ALPHABET, *(rf"\boxed{{{digit}}}" for digit in range(10))])
    model = tiny_model(vocab_size=len(tokenizer), num_layers=2, initializer_range=0.3).eval()
    for part in (model, tokenizer):
        part.save_pretrained("policy")
    prompts = [row["prompt"] for row in ArithmeticTasks("sum", num_train=1, num_val=6).val_rows()]
    sampler = RolloutSampler(model, SnapKV(BUDGET, buffer=BUFFER, num_sinks=1, window=3), end_token_ids=[1])
    greedy = SamplingParams(max_completion_length=LENGTH, temperature=0)
    (text,) = tokenizer.batch_decode(sampler.generate(tokenizer(prompts[:1])["input_ids"], greedy).completion_ids)
    golds = [re.findall(r"\\boxed{(\d)}", text)[-1], *["77"] * 5]  # one that is right, and some that cannot be
    boxed = [{"prompt": prompt, "answer": gold} for prompt, gold in zip(prompts, golds, strict=True)]
    Path("boxed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in boxed))
    Path("bare.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    *_, judged = main(["SnapKV", *options("policy", "--data", "boxed.jsonl")])
    assert judged.accuracy == pytest.approx(1 / 6)
    *_, bare = main(["SnapKV", *options("policy", "--data", "bare.jsonl", "--output", "bare")])
    assert bare.accuracy is None
    assert (bare.tail, bare.agreement) == (judged.tail, judged.agreement)


def test_questions_are_made_prompts_of_a_chat(folder: Path) -> None:
    """Columns, pattern, template and temperature are those of the data and the sampler."""
    tokenizer = character_tokenizer(string.printable)
    for part in (tiny_model(vocab_size=len(tokenizer), num_layers=2, initializer_range=0.3), tokenizer):
        part.save_pretrained("policy")
    rows = [{"question": f"What is {n} + {n}?", "solution": f"It is\n#### {2 * n}"} for n in range(6)]
    Path("gsm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--prompt_column=question", "--answer_column=solution", "--answer_pattern=gsm8k", "--as_chat"]
    more = [*given, "--prompt_template={prompt} Think.", "--temperature=0.7", "--dtype=float32"]
    found = parser().parse_args(["SnapKV", *options("policy", "--data", "gsm.jsonl", *more)])
    bench = _bench(found)
    assert bench.rows[3]["prompt"] == [{"role": "user", "content": "What is 3 + 3? Think."}]
    assert [row["answer"] for row in bench.rows] == [str(2 * n) for n in range(6)]
    assert (bench.params.temperature, bench.model.dtype) == (0.7, torch.float32)
    full, cell = main(["SnapKV", *options("policy", "--data", "gsm.jsonl", *more)])[1:]
    assert (full.agreement, cell.reason) == (1.0, "")
    assert cell.agreement < 1
    with pytest.raises(UserError, match="--as_chat is about the rows of a file: add --data FILE"):
        main(["SnapKV", *options("policy", "--as_chat")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["SnapKv"], "There is no class 'SnapKv'. Did you mean 'SnapKV'?"),
        (["mine.Missing"], "'mine.Missing' cannot be imported: AttributeError"),
        (["mine.Other"], "'mine.Other' is no compressor: derive it from"),
        (["nobody.Method"], "'nobody.Method' cannot be imported: ModuleNotFoundError"),
        (["none.yaml"], "'none.yaml' does not hold a class_path"),
        (["empty.jsonl.yaml"], "'empty.jsonl.yaml' does not hold a class_path"),
        (["{class_path: SnapKV, init_args: [1]}"], "does not hold a class_path with init_args"),
        (["{class_path: SnapKV, budget: 9}"], "budget beside them would be ignored"),
        (["SnapKV", "--data", "plain.jsonl", "--num_terms", "3"], "--num_terms is about the questions of --tasks"),
        (["SnapKV", "--data", "plain.jsonl", "--reward", "mine.pays_even"], "--reward judges answers, and these"),
        (["SnapKV", "--num_terms", "0"], "num_terms must be at least 2"),
        (["{class_path: SnapKV, init_args: {budget: !!int x}}"], "it holds a value that cannot be read"),
        (["SnapKV", "--policy", "nowhere"], "policy: 'nowhere'"),
        (["SnapKV", "--policy", "~/nowhere"], "policy: no model at '~/nowhere'"),
        (["SnapKV", "--problems", "0"], "--problems must be at least 1"),
        (["SnapKV", "--tasks", "poetry"], "tasks must be among sum"),
        (["SnapKV", "--reward", "mine.nothing"], "--reward='mine.nothing' cannot be imported"),
        (["SnapKV", "--budgets", "16", "64"], "with budget=64 and buffer=4 nothing is evicted: the longest text"),
        (["SnapKV", "--budgets", "0.01"], "--budgets: 0.01 of the mean length with the full cache"),
        (["SnapKV", "--num_sinks", "-1"], "--num_sinks must be at least 0"),
        (["SnapKV", "--budgets", "20", "16", "--window", "16"], "budget=16 is smaller than num_sinks + window"),
        (["SnapKV", "--data", "empty.jsonl"], "--data='empty.jsonl' has no rows"),
    ],
)
def test_mistakes(
    arguments: list[str], said: str, policy: str, own: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One line, and nothing is measured."""
    Path("empty.jsonl").touch()
    Path("plain.jsonl").write_text('{"prompt": "1+2="}\n')
    Path("empty.jsonl.yaml").write_bytes(b"\xff\xfe")
    assert run_console(monkeypatch, "benchmark", arguments[0], *options(policy, *arguments[1:])) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not Path("out/table.json").exists() or stored() == []


@pytest.mark.parametrize("given", [["SnapKV"], ["--policy", "x"], ["SnapKV", "--policy", "x", "--budgets", "1.5"]])
def test_what_the_parser_refuses(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(given)


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = "import sys, sparse_rl_lightning.cli.benchmark; print([m for m in sys.modules if '_lightning.quality' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_clocks_wait_for_the_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one."""
    waits = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    assert now(torch.device("cpu")) < now(torch.device("cuda", 1))
    assert waits == [torch.device("cuda", 1)]


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.99", 0.99), ("1.5", None), ("0", None), ("-1", None)])
def test_a_budget_is_a_share_or_a_number_of_tokens(text: str, value: float | None) -> None:
    if value is not None:
        assert _budget(text) == value
        return
    with pytest.raises(argparse.ArgumentTypeError, match="neither a number of tokens nor a share"):
        _budget(text)
