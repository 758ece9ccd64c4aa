"""The run behind the methods' pages: every compressor is in it, its tables are kept, and pages say what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import methods
from docs import listing, method_pages
from sparse_rl_lightning.cli.benchmark import FLOOR, FULL, Method
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

CALIBRATED = {"QFilters", "TriAttention", "LearnedScore"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_every_method_is_measured_and_has_a_page(tmp_path: Path) -> None:
    named = {method.name: method for method in map(Method.of, methods.methods("all", tmp_path))}
    kinds = {name.partition(", ")[0] for name in named}
    assert kinds | {"FullKV"} == method_pages.KIND.keys() == method_pages.SAID.keys()
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
    assert {name.partition(", ")[0] for name in cells} - {FULL.name} == set(method_pages.KIND) - {"FullKV"}
    assert {name: cell["reason"] for name, cell in cells.items() if cell["reason"]}.keys() <= {FLOOR.name}
    assert len(kept["parts"]["kept"]["completions"]) == 2, "the long prompt is left out"
    assert kept["policy"] == "policy"
    methods.save_tables(tmp_path / "runs", ["all"], tmp_path, "policy", "another machine")
    again = json.loads((tmp_path / "methods.json").read_text())["parts"]
    assert again["all"]["machine"] == "another machine"
    assert again["kept"] == kept["parts"]["kept"], "parts of other runs stay"


def test_the_page_holds_formula_source_rows_and_use() -> None:
    page = method_pages.page()
    parts = json.loads(method_pages.RESULTS.read_text("utf-8"))["parts"]
    names = re.findall(r"^## (\w+)$", page, re.MULTILINE)  # `import re` at the top
    assert names == sorted(method_pages.KIND, key=str.lower)
    for name, following in zip(names, [*names[1:], None], strict=True):
        section = page.partition(f"\n## {name}\n")[2].partition(f"\n## {following}\n")[0]
        assert all(part in section for part in ("```math\n", "**When to use it.** ", "**Source.** ")), name
    for cell in (Cell(**cell) for part in parts.values() for cell in part["cells"]):
        assert bool(cell.reason) or f"| {cell.tail:.3f} " in page
    assert "https://arxiv.org/abs/2404.14469" in page
    assert [kind.__name__ for kind in listing.WRAPPERS] == ["Combined"]
