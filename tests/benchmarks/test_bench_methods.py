"""The runs behind the pages of methods: every compressor is in them, and their lines and tables are kept."""

from __future__ import annotations

import json
import statistics
import string
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT, accuracy, methods
from benchmarks.common import kept as lines_kept
from docs.listing import METHODS, WRAPPERS
from sparse_rl_lightning.cli.benchmark import FLOOR, FULL, Method
from sparse_rl_lightning.planning.propose import JUDGED
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

EVERY = {method.__name__ for method in [*METHODS, *WRAPPERS]} - {"OldestTurns"}  # which is for conversations
CALIBRATED = {"QFilters", "TriAttention", "LearnedScore"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_every_method_is_measured(tmp_path: Path) -> None:
    named = {method.name: method for method in map(Method.of, methods.methods("all", tmp_path))}
    kinds = {name.partition(", ")[0] for name in named}
    assert kinds | {"FullKV"} == EVERY
    assert set(methods.BEST) <= named.keys()
    for name in named.keys() - CALIBRATED:
        compressor = named[name].compressor({**methods.SIZES, "budget": 127})
        assert type(compressor).__name__ == name.partition(", ")[0]
        assert (compressor.budget, compressor.buffer) == (127, 32)


def test_changes_reach_methods_with_arguments_of_their_own(tmp_path: Path) -> None:
    for part, sinks, protects in (("others", 4, False), ("sinks", 0, False), ("kept", 4, True)):
        (path,) = [name for name in methods.methods(part, tmp_path) if name.endswith(".yaml")]
        compressor = Method.of(path).compressor({"budget": 128})
        assert (compressor.num_sinks, compressor.protect_prompt, compressor.budget) == (sinks, protects, 128)


@pytest.mark.slow
def test_the_tables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = character_tokenizer(ARITHMETIC_ALPHABET)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, None  # so that completions are long enough to evict
    model = tiny_model(vocab_size=len(tokenizer), num_layers=2, initializer_range=0.3, eos_token_id=None)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "policy")
    rows = [{"question": "07+12+25+03=", "answer": "47"}, {"question": "1+2=" * 30, "answer": "3"}] * 2
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--policy", str(tmp_path / "policy"), "--runs", str(tmp_path / "runs"), "--save", str(tmp_path)]
    more = ["--data", str(tmp_path / "gsm.jsonl"), "--max_completion_length", "240"]
    methods.main([*given, *more, "--parts", "all", "kept"])
    kept = json.loads((tmp_path / "methods.json").read_text())
    assert list(kept["parts"]) == ["all", "kept"]
    cells = {cell["method"]: cell for cell in kept["parts"]["all"]["cells"]}
    assert {name.partition(", ")[0] for name in cells} - {FULL.name} == EVERY - {"FullKV"}
    left_out = {name for name, cell in cells.items() if cell["reason"]}
    assert left_out <= {FLOOR.name, "RandomAttention"}, "they protect the long prompt"
    assert len(kept["parts"]["kept"]["completions"]) == 2, "the long prompt is left out"
    assert kept["policy"] == "policy"
    methods.save_tables(tmp_path / "runs", ["all"], tmp_path, "policy", "another machine")
    again = json.loads((tmp_path / "methods.json").read_text())["parts"]
    assert again["all"]["machine"] == "another machine"
    assert again["kept"] == kept["parts"]["kept"], "parts of other runs stay"


# ---------------------------------------------------------------- right answers


def line(cell: str, right: str) -> accuracy.Line:
    return accuracy.Line(
        cell=cell, right=right, lenient=right, finished="1110", lengths=[10, 20, 30, 40], kv_saved=0.25, minutes=1.0,
        policy="", machine="today, a processor, 1 thread",
    )  # fmt: skip


def test_answers_are_compared_problem_by_problem() -> None:
    lines = {cell: line(cell, right) for cell, right in ((accuracy.FULL, "1100"), ("RKV 192", "1010"))}
    (full, compressed) = (row.split(" | ") for row in accuracy.table(lines).splitlines()[4:])
    assert full[2:4] == ["", ""]
    # one lost and one won of four: differences of 1, -1, 0 and 0 have a standard error of sqrt(2 / 3) / 2
    assert compressed[2:4] == ["1, 1", f"0.0 ± {1.96 * (2 / 3) ** 0.5 / 2 * 100:.1f}"]
    assert compressed[1].startswith("50.0 [15.0, 85.0")
    assert compressed[4:] == ["25", "25.0 %", "25.0 % |"]


def test_pages_and_a_proposal_say_what_the_kept_lines_hold() -> None:
    lines: Any = {row["cell"]: row for row in lines_kept.read(ROOT / "benchmarks" / "results" / "accuracy.jsonl")}
    table = accuracy.table(lines)
    assert table in (ROOT / "docs" / "measured" / accuracy.PAGE).read_text()
    full, half, third = (lines[cell]["right"].count("1") for cell in (accuracy.FULL, "RKV 192", "RKV 128"))
    counted = f"{half} of 256 questions with 192 + 32 of 381 tokens, {third} with 128 + 32, the full cache {full} ("
    assert counted in JUDGED  # 97 tokens are a prompt
    assert round(statistics.fmean(lines[accuracy.FULL]["lengths"])) == 381 - 97
    rows = [row.split(" | ") for row in table.splitlines()[5:]]
    behind = {row[0][2:]: [*map(float, row[3].split(" ± "))] for row in rows}
    losing = {"SnapKV 192", "TOVA 192", "H2O, by age 192", *(cell for cell in behind if cell.endswith(" 128"))}
    assert {cell for cell, (points, half_width) in behind.items() if points > half_width} == losing  # docs/choosing.md
    assert lines["RandomEviction 128"]["right"].count("1") == third


@pytest.mark.parametrize("cell", list(accuracy.cells()))
def test_every_cell_has_a_cache_of_its_budget(cell: str, tmp_path: Path) -> None:
    given = accuracy.configuration(cell, tmp_path, tmp_path, tmp_path, 4)["model"]["init_args"]["compressors"]
    assert len(given) == (not cell.startswith(accuracy.FULL))
    for config in given:
        path = tmp_path / "method.yaml"
        path.write_text(json.dumps(config))
        compressor = Method.of(str(path)).compressor({"budget": config["init_args"]["budget"]})
        assert str(compressor.budget) in cell
        assert compressor.protect_prompt == ("protected" in cell)


@pytest.mark.slow
def test_a_cell_is_evaluated_once_and_its_verdicts_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for item in TinyPolicy(alphabet=string.printable, max_position_embeddings=1024).load():
        item.save_pretrained(tmp_path / "policy")
    rows = [{"question": f"1 + {n} = ?", "answer": f"#### {1 + n}"} for n in range(3)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = ["--policy", str(tmp_path / "policy"), "--runs", str(tmp_path / "runs"), "--save", str(tmp_path)]
    kept_in, cells = ["--kept", str(tmp_path / "kept.jsonl")], ["--cells", accuracy.FULL, "RKV 192"]
    given = [*folders, *kept_in, *cells, "--problems", "2"]
    accuracy.main([*given, "--data", str(tmp_path)])
    lines = lines_kept.read(tmp_path / "kept.jsonl")
    assert [kept["cell"] for kept in lines] == [accuracy.FULL, "RKV 192"]
    assert all(len(kept["right"]) == len(kept["lengths"]) == 2 for kept in lines)
    assert lines[0]["kv_saved"] == 0 < lines[1]["kv_saved"]
    capsys.readouterr()
    accuracy.main(given)  # without data: nothing is left to run
    assert capsys.readouterr().out.strip() in (tmp_path / accuracy.PAGE).read_text()
    with pytest.raises(SystemExit):
        accuracy.main([*given[:-1], "3"])
    assert "has lines of another number of problems" in capsys.readouterr().err
    assert lines_kept.read(tmp_path / "kept.jsonl") == lines
