"""The program that puts mistakes into the library: it makes them, and tells what is noticed from what is not."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import mutants
import pytest
from mutants import Mutant, applied, chosen, judged, mutants_of, page, places


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("return a < b", "return (a <= b)"), ("return a + b", "return (a - b)"), ("return x[1:]", "return x[2:]"),
        ("return a and b", "return (a or b)"), ("return all(a)", "return (any(a))"), ("return not a", "return (a)"),
        ("return a.amax(1)", "return (a.amin(1))"), ("self.a = b", "pass"), ("a.b(c)", "pass"),
        ("return a is None", "return (a is not None)"), ("return True", "return False"),
    ],
)  # fmt: skip
def test_the_mistakes_that_are_made(line: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "sparse_rl_lightning" / "x.py"
    path.parent.mkdir()
    path.write_text(f"def f(a, b, c, x):\n    {line}\n")
    made = [applied(path.read_text(), one) for one in mutants_of(path, random.Random(0))]
    assert f"def f(a, b, c, x):\n    {wrong}\n" in made


@pytest.mark.parametrize(
    "line",
    ["raise ValueError(1)", "assert a < 1", "warn(1)", "rank_zero_info(1)", '"""Of 1."""', "x: list[1]", "f'{1}'"],
)
def test_what_only_says_something_is_left_alone(line: str) -> None:
    tree = ast.parse(f"def f():\n    {line}\n")
    assert [node for node, _, _ in places(tree) if mutants.changed(node, random.Random(0)) is not None] == []


def test_every_mutant_of_the_library_can_be_parsed() -> None:
    found = mutants.sample(200, seed=1)
    for one in found:
        source = mutants.path_of(one.file, mutants.ROOT).read_text(encoding="utf-8")
        wrong = applied(source, one)
        ast.parse(wrong)
        assert wrong != source
    assert len({one.area for one in found}) > 15
    assert len({(one.file, one.line) for one in found}) == 200
    assert [one.name for one in mutants.sample(200, seed=1)] == [one.name for one in found]


def test_checks_and_refusals_are_counted_apart() -> None:
    functions = [
        "def check_a(a):\n    a(1)",
        "def f(a):\n    if a < 0:\n        raise ValueError\n    if a < 3:\n        a(2)",
    ]
    marked = {ast.unparse(node) for node, _, is_check in places(ast.parse("\n".join(functions))) if is_check}
    assert {"a(1)", "a < 0"} <= marked
    assert not {"a < 3", "a(2)"} & marked


def test_a_mistake_is_noticed_or_not(tmp_path: Path) -> None:
    (tmp_path / "sparse_rl_lightning").mkdir()
    (tmp_path / "tests").mkdir()
    source = "def least(a, b):\n    return a if a < b else b\n"
    (tmp_path / "sparse_rl_lightning" / "x.py").write_text(source)
    test = "from sparse_rl_lightning.x import least\n\n\ndef test_least():\n    assert least(1, 2) == 1\n"
    (tmp_path / "tests" / "test_x.py").write_text(test)
    noticed = Mutant("x.py", 2, "least", "a if a < b else b", "b", (2, 11, 2, 29), True)
    not_noticed = Mutant("x.py", 2, "least", "a < b", "(a <= b)", (2, 16, 2, 21))
    assert judged(noticed, tmp_path, ["tests/test_x.py"], 10) == "caught"
    assert judged(not_noticed, tmp_path, ["tests/test_x.py"], 10) == "survived"
    assert judged(noticed, tmp_path, [], 10) == "not covered"
    assert (tmp_path / "sparse_rl_lightning" / "x.py").read_text() == source
    text = page([(noticed, "caught"), (not_noticed, "survived")], seed=3)
    assert "| files beside the folders | 2 | 0 | 1 | 50 % (9 to 91) |" in text
    assert "| of these checks and refusals | 1 | 0 | 1 | 100 % (21 to 100) |" in text
    assert "`x.py:least: a < b -> (a <= b)` (survived)" in text


def test_cheap_tests_of_the_same_folder_come_first() -> None:
    mutant = Mutant("cache/slots.py", 2, "f", "a", "b", (2, 0, 2, 1))
    seconds = {"tests/rollout/test_a.py::f": 0.1, "tests/cache/test_slots.py::f": 0.5, "tests/cache/test_b.py::f": 50.0}
    order = chosen(mutant, {2: list(seconds)}, seconds, limit=40)
    assert order == ["tests/cache/test_slots.py::f", "tests/rollout/test_a.py::f"]


def test_what_runs_at_import_is_shown_to_all_tests_of_the_file_and_ranks_come_last() -> None:
    mutant = Mutant("distributed/ranks.py", 2, "f", "0", "1", (2, 0, 2, 1))
    lines = {2: [""], 3: ["", "tests/a/test_a.py::f"], 4: ["tests/b/test_b.py", "tests/a/test_a.py::f"]}
    seconds = {"tests/a/test_a.py::f": 1.0, "tests/b/test_b.py": 300.0}
    assert chosen(mutant, lines, seconds, limit=40) == ["tests/a/test_a.py::f"]
    assert chosen(mutant, {2: ["tests/b/test_b.py"]}, seconds, limit=40) == ["tests/b/test_b.py"]
