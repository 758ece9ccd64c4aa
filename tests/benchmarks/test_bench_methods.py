"""The run behind the methods' pages: every compressor is in it, its table is kept, and pages say what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import methods
from docs import listing, method_pages
from sparse_rl_lightning.cli.benchmark import FLOOR, FULL
from sparse_rl_lightning.cli.benchmark.methods import Method
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

WITHOUT_ROW = {"LearnedScore"}


def test_every_method_is_measured_and_has_a_page(tmp_path: Path) -> None:
    named = {method.name: method for method in map(Method.of, methods.names(tmp_path))}
    assert named.keys() | {"FullKV"} | WITHOUT_ROW == method_pages.KIND.keys() == method_pages.SAID.keys()
    calibrated = {"QFilters", "TriAttention"}
    for name in named.keys() - calibrated:
        compressor = named[name].compressor({**methods.SIZES, "budget": 27})
        assert type(compressor).__name__ == name
        assert (compressor.budget, compressor.buffer, compressor.window) == (27, 4, 4)


@pytest.mark.slow
def test_the_table_is_kept(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ARITHMETIC_ALPHABET)
    for part in (tiny_model(vocab_size=len(tokenizer), num_layers=1, initializer_range=0.3), tokenizer):
        part.save_pretrained(tmp_path / "policy")
    given = ["--policy", str(tmp_path / "policy"), "--runs", str(tmp_path / "runs"), "--save", str(tmp_path)]
    methods.main([*given, "--problems", "4", "--budgets", "20"])
    kept = json.loads((tmp_path / "methods.json").read_text())
    cells = {cell["method"]: cell for cell in kept["cells"]}
    names = set(method_pages.KIND) - {"FullKV", *WITHOUT_ROW}
    assert set(cells) == names | {FLOOR.name, FULL.name}
    assert {name: cell["reason"] for name, cell in cells.items() if cell["reason"]} == {}
    assert kept["policy"].endswith("/policy")


def test_pages_hold_formula_source_row_and_use() -> None:
    pages = {path.stem: text for path, text in method_pages.pages(Path("methods")).items()}
    kept = [Cell(**cell) for cell in json.loads(method_pages.RESULTS.read_text("utf-8"))["cells"]]
    assert [cell.method for cell in kept if cell.reason] == []
    for name in method_pages.KIND:
        page = pages[name]
        headings = ["# ", "## Formula", "## Source", "## Its row", "## When to use it"]
        assert all(f"\n{heading}" in page for heading in headings), name
        own = [cell for cell in kept if cell.method == (FULL.name if name == "FullKV" else name)]
        assert len(own) == (0 if name in WITHOUT_ROW else 1 if name == "FullKV" else len(methods.BUDGETS))
        for cell in own:
            assert f"{cell.tail:.3f} | {cell.agreement:.3f} |" in page
    assert "https://arxiv.org/abs/2404.14469" in pages["SnapKV"]
    assert [kind.__name__ for kind in listing.WRAPPERS] == ["Combined", "Drawn"]
