"""The run behind the page of methods: every compressor is in it, and its tables are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import methods
from docs.listing import METHODS, WRAPPERS
from sparse_rl_lightning.cli.benchmark import FLOOR, FULL, Method
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
