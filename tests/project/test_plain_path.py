"""The plain path first: a file of it names no optional feature, and a feature that is off is not entered.

The plain path is full attention, an evicting compressor, one turn, one rank, no resume. Each optional feature stands
behind one seam, in a file of its own (docs/design.md). Ceilings are today's numbers: they may be lowered, not raised.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = {  # lines that name an optional feature
    "rollout/engine/scheduler.py": 0,
    "rollout/engine/engine.py": 0,
    "rollout/engine/prefill.py": 0,
    "rollout/engine/sequences.py": 6,  # optional fields of a Rollout, and a mean over layers of both kinds
    "rollout/sampler.py": 4,  # an argument, and the engine that it chooses
    "cache/slots.py": 9,  # the storages that it chooses, and where protected texts are
    "cache/compression.py": 6,  # the same texts
    "modules/sparse_grpo.py": 14,
    "modules/base.py": 19,  # the state of a run, and what ranks compare
    "rollout/generator.py": 27,  # conversations, partial rollouts and ranks
}
FEATURES = set(
    "windows windowed sliding linear arena arenas turn turns given observation observations conversation conversations "
    "talk talks pauses paused routing routed experts page pages paged version versions versioned world rank ranks "
    "partial resume resumed resuming checkpoint request requests streamed canceled".split()
)
WHOLE = {"window_layers"}  # matched whole: `window` is eviction's own word
WALK = {"files": 54, "functions": 332, "moves": 189, "rooms": 41, "moves between rooms": 159}


def named(source: str) -> dict[int, str]:
    """Lines of code that name an optional feature, without docstrings, comments and imports."""
    silent = set[int]()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            silent |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        word = token.string
        parts = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower().split("_"))
        is_ours = word != "partial" and not word.startswith("rank_zero")  # functools', Lightning's
        names_one = word in WHOLE or (is_ours and parts & FEATURES)
        if token.type == tokenize.NAME and token.start[0] not in silent and names_one:
            found[token.start[0]] = token.line.strip()
    return found


@pytest.mark.parametrize("file", CORE)
def test_a_file_of_the_plain_path_names_no_optional_feature(file: str) -> None:
    found = named((ROOT / "sparse_rl_lightning" / file).read_text(encoding="utf-8"))
    assert len(found) <= CORE[file], "\n".join(f"{line}: {text}" for line, text in found.items())


@pytest.mark.parametrize(
    ("line", "count"),
    [("windows = 1", 1), ("x = WindowsOf(y)", 1), ("num_turns = 2", 1), ("import ranks", 0), ("partial(f)", 0),
     ('"""Of turns."""', 0), ("x = window", 0), ("g.window_layers", 1), ("x = y  # pages", 0),
     ("def f(resume=1): ...", 1)],
)  # fmt: skip
def test_what_counts_as_naming(line: str, count: int) -> None:
    assert len(named(line)) == count


def test_a_prompt_does_not_walk_further() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "tests/walk.py"], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: count for name, count in found.items() if count > WALK[name]} == {}
