"""Small mistakes put into the library one by one: which of them do the fast tests notice?

``make mutants`` draws a sample of places of the whole package by a seed, each as likely as another, changes one after
the other in a copy of the tree, and runs the tests that cover its line, the cheapest first. What survives is listed in
tests/mutants.md, with the sentence that judges it in ``mutants_judged.json``. Places that check what somebody gave, or
refuse it, are counted apart. mutmut and cosmic-ray do this for suites that run in seconds: neither draws a
sample, or orders thousands of slow tests by what they cover.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"
JUDGED = ROOT / "tests" / "mutants_judged.json"
LEFT_OUT = ("docs", "benchmarks", "experiments", "project")
"""Folders of tests that no mutant is shown to: they test what lies beside the package."""
CHECKS = ("check", "refuse", "_check", "_refuse")
"""Beginnings of the names of functions that check what somebody gave."""
FLIPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"all": "any", "any": "all", "min": "max", "max": "min", "amin": "amax", "amax": "amin"}
SILENT = ("warn", "rank_zero", "log", "say", "tell", "_tell", "debug", "info")
"""Beginnings of the names of functions that only say something."""


@dataclass(frozen=True)
class Mutant:
    """One change of one place."""

    file: str  # below the package
    line: int
    place: str  # qualified name of the function or class
    before: str
    after: str
    span: tuple[int, int, int, int]  # first line and column, last line and column
    is_check: bool = False

    @property
    def area(self) -> str:
        """The folder of the package."""
        return Path(self.file).parts[0] if "/" in self.file else "files beside the folders"

    @property
    def name(self) -> str:
        """A name that lasts as long as the place does."""
        return f"{self.file}:{self.place}: {self.before} -> {self.after}"


def path_of(file: str, tree: Path) -> Path:
    """Where a mutant's file lies in a copy of the tree."""
    return tree / "sparse_rl_lightning" / file


# ---------------------------------------------------------------- places


def changed(node: ast.AST, dice: random.Random) -> ast.AST | None:
    """A copy of the node with one small mistake, None if there is none to make."""
    if isinstance(node, ast.stmt):
        stores = isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and _is_stored(node.targets[0]))
        calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        return ast.Pass() if stores or calls else None
    if isinstance(node, ast.IfExp):
        return dice.choice([node.body, node.orelse])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return node.operand
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        new.ops[0] = FLIPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in FLIPPED:
        new.op = FLIPPED[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        new.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in NAMES:
        name = "id" if isinstance(node.func, ast.Name) else "attr"
        setattr(new.func, name, NAMES[getattr(new.func, name)])
    else:
        return None
    return new  # type: ignore[no-any-return]


def _is_stored(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute | ast.Subscript)


def _says(node: ast.AST) -> bool:
    """Whether a call only says something, or makes an error."""
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name.startswith(SILENT) or name.endswith("Error")


def places(tree: ast.AST, inside: tuple[str, ...] = (), is_check: bool = False) -> Iterator[tuple[ast.AST, str, bool]]:
    """Nodes of code whose change may matter, the qualified name of where they stand, and whether they check."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import):
                continue
            is_silent = _says(node.value) if isinstance(node, ast.Expr) else _says(node)
            if is_silent or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            names, checks = inside, is_check or (field == "test" and _refuses(tree))
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if node.name in ("__repr__", "__str__") or "overload" in ast.unparse(node.decorator_list or []):  # type: ignore[arg-type]
                    continue
                names, checks = (*inside, node.name), checks or node.name.startswith(CHECKS)
            if names and hasattr(node, "lineno"):
                yield node, ".".join(names), checks
            yield from places(node, names, checks)


def _refuses(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(isinstance(statement, ast.Raise) for statement in node.body)


def mutants_of(path: Path, dice: random.Random) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_text(encoding="utf-8")
    file = path.relative_to(ROOT / "sparse_rl_lightning").as_posix()
    for place, name, is_check in places(ast.parse(source)):
        node: Any = place
        new = changed(node, dice)
        if new is None:
            continue
        text = ast.unparse(new)
        text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else text
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        yield Mutant(file, node.lineno, name, ast.unparse(node), text, span, is_check)


def sample(number: int, seed: int) -> list[Mutant]:
    """Mutants of the whole package, each place as likely as another, at most one of a line."""
    dice = random.Random(seed)
    files = sorted((ROOT / "sparse_rl_lightning").rglob("*.py"))
    pool = [mutant for path in files for mutant in mutants_of(path, dice)]
    dice.shuffle(pool)
    lines = {(mutant.file, mutant.line): mutant for mutant in reversed(pool)}  # the first that was drawn of a line
    return [mutant for mutant in pool if lines[mutant.file, mutant.line] is mutant][:number]


def applied(source: str, mutant: Mutant) -> str:
    """The source with the change."""
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    first, column, last, end = mutant.span
    before, after = lines[first - 1][:column], lines[last - 1][end:]
    return b"".join([*lines[: first - 1], before, mutant.after.encode(), after, *lines[last:]]).decode()


# ---------------------------------------------------------------- tests


def copied(tree: Path) -> Path:
    """A copy of the checkout, with the compiled library."""
    shutil.rmtree(tree, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    libraries = [path.relative_to(ROOT).as_posix() for path in (ROOT / "sparse_rl_lightning").glob("*.so")]
    for name in [*filter(None, names.split("\0")), *libraries]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def ran(tree: Path, command: list[str], seconds: float | None = None, **more: str) -> int | None:
    """The exit status of a command in a copy of the tree, None if it took too long."""
    paths = os.pathsep.join([str(tree), str(tree / "tests")])
    kinds = {"SPARSE_RL_DATA": "data", "SPARSE_RL_MODELS": "models"}
    data = {name: str(ROOT.parent / "shared" / kind) for name, kind in kinds.items()}
    env = data | dict(os.environ) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *command], cwd=tree, env=env, start_new_session=True, **quiet)  # type: ignore[call-overload]
    try:
        status: int = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status


RANKS = """[run]
source_pkgs = sparse_rl_lightning
parallel = true
data_file = {file}
context = ${{MUTANTS_FILE}}
patch = _exit
"""
"""What processes that tests start measure: their lines are covered by the file of the test."""
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not real"]


SHARES = 24


def baseline(jobs: int) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """For each file the tests of every line, and the seconds of each test; measured once for a state of the tree.

    It is measured share by share, so that one that was stopped goes on behind the last share.
    """
    kept = BUILD / "baseline.json"
    if not kept.exists():
        tests = sorted((ROOT / "tests").rglob("test_*.py"))
        tests = [path for path in tests if path.relative_to(ROOT / "tests").parts[0] not in LEFT_OUT]
        tree = copied(BUILD / "tree-0")
        shares = [[path.relative_to(ROOT).as_posix() for path in tests[share::SHARES]] for share in range(SHARES)]

        def measure(share: int) -> None:
            if (BUILD / f"durations-{share}.json").exists():  # written last
                return
            for old in BUILD.glob(f"ranks-{share}.*"):
                old.unlink()
            ranks = BUILD / f"ranks-{share}.ini"
            ranks.write_text(RANKS.format(file=BUILD / f"ranks-{share}"))
            files = BUILD / f"durations-{share}.json", BUILD / f"coverage-{share}"
            counted = ["-m", "coverage", "run", "--source=sparse_rl_lightning", f"--data-file={files[1]}"]
            command = [*counted, *PYTEST, "-p", "mutants", *shares[share]]
            ran(tree, command, MUTANTS_DURATIONS=str(files[0]), MUTANTS_RANKS=str(ranks))

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(measure, range(SHARES)))
        kept.write_text(json.dumps(_covered(tree)))
    found = json.loads(kept.read_text())
    lines = {file: {int(line): tests for line, tests in own.items()} for file, own in found["lines"].items()}
    return lines, found["seconds"]


def _covered(tree: Path) -> dict[str, Any]:
    from coverage import CoverageData
    from coverage.exceptions import DataError

    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    seconds = dict[str, float]()
    for share in range(SHARES):
        seconds |= json.loads((BUILD / f"durations-{share}.json").read_text())
        for found in [BUILD / f"coverage-{share}", *BUILD.glob(f"ranks-{share}.*.*")]:
            data = CoverageData(str(found))
            try:
                data.read()
            except DataError:  # a process that was killed while it wrote
                continue
            for file in data.measured_files():
                own = lines[Path(file).relative_to(tree / "sparse_rl_lightning").as_posix()]
                for line, contexts in data.contexts_by_lineno(file).items():
                    own[line] += set(contexts) - set(own[line])
    for test, spent in list(seconds.items()):
        file = test.partition("::")[0]
        seconds[file] = seconds.get(file, 0.0) + spent
    return {"lines": lines, "seconds": seconds}


def pytest_runtest_setup(item: Any) -> None:
    """In the baseline: what runs from now on is covered by this test."""
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.partition("[")[0])
        os.environ["MUTANTS_FILE"] = item.nodeid.partition("::")[0]
        os.environ["COVERAGE_PROCESS_START"] = os.environ["MUTANTS_RANKS"]  # for processes, and not for this one


_durations: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: Any) -> None:
    """In the baseline: the seconds of a test, all its parameters together."""
    _durations[report.nodeid.partition("[")[0]] += report.duration


def pytest_sessionfinish() -> None:
    """In the baseline: store the seconds."""
    if "MUTANTS_DURATIONS" in os.environ:
        Path(os.environ["MUTANTS_DURATIONS"]).write_text(json.dumps(_durations))


def chosen(mutant: Mutant, lines: dict[int, list[str]], seconds: dict[str, float], limit: float) -> list[str]:
    """Tests that cover a mutant, those of its folder and then the cheapest first, as many as take so long."""
    covering = {test for line in range(mutant.span[0], mutant.span[2] + 1) for test in lines.get(line, [])}
    if "" in covering:  # it runs when the file is imported: whoever runs any of the file may notice
        covering = {test for tests in lines.values() for test in tests if test}
    folder, stem = f"tests/{Path(mutant.file).parts[0]}", Path(mutant.file).stem

    def cost(test: str) -> float:
        return seconds.get(test, 1.0) - 0.3 * (test.startswith(folder) + (stem in test))

    order = sorted(covering, key=lambda test: (cost(test), test))
    shown, total = list[str](), 0.0
    for test in order:
        total += seconds.get(test, 1.0)
        if total > limit and shown:
            break
        shown.append(test)
    return shown


def judged(mutant: Mutant, tree: Path, tests: list[str], limit: float) -> str:
    """What becomes of a mutant: caught, too slow, survived, or not covered."""
    if not tests:
        return "not covered"
    path = path_of(mutant.file, tree)
    source = path.read_text(encoding="utf-8")
    path.write_text(applied(source, mutant), encoding="utf-8")
    try:
        status = ran(tree, [*PYTEST, "-x", *tests], 3 * limit + 60)
    finally:
        path.write_text(source, encoding="utf-8")
    return "too slow" if status is None else "survived" if status == 0 else "caught"


# ---------------------------------------------------------------- the page


def page(results: list[tuple[Mutant, str]], seed: int) -> str:
    """The table of shares that are caught, and the survivors with their sentences."""
    known: dict[str, str] = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    drawn = [(mutant, known.get(mutant.name, "not judged yet"), outcome) for mutant, outcome in results]
    areas: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for mutant, sentence, outcome in drawn:
        areas[mutant.area].append((sentence, outcome))
    sums = {
        "all": [(sentence, outcome) for _, sentence, outcome in drawn],
        "of these checks and refusals": [(sentence, outcome) for mutant, sentence, outcome in drawn if mutant.is_check],
        "all others": [(sentence, outcome) for mutant, sentence, outcome in drawn if not mutant.is_check],
    }
    rows = [_row(name, verdicts) for name, verdicts in [*sorted(areas.items()), *sums.items()]]
    lines = [
        f"- `{mutant.name}` ({outcome}): {sentence}" for mutant, sentence, outcome in drawn if outcome not in CAUGHT
    ]
    return "\n".join([
        "# Mutants", "",
        "<!-- written by tests/mutants.py -->", "",
        f"{len(results)} small mistakes, drawn with seed {seed} over the whole package, put into it one by one",
        "(`make mutants`). Caught are those that make a fast test fail that covers their line. Equivalent ones change",
        "nothing that can be seen; they do not count. Caught since are those by a test that the sample led to: what",
        "such tests are worth the next sample says, of another seed. Shares with their 95 % intervals (Wilson).", "",
        "| area | mutants | equivalent | caught | share | caught since | share |",
        "|---|---|---|---|---|---|---|", *rows, "",
        "## What survived", "", *lines, "",
    ])  # fmt: skip


CAUGHT = ("caught", "too slow")


def _row(name: str, verdicts: list[tuple[str, str]]) -> str:
    same = sum(sentence.startswith("equivalent") for sentence, _ in verdicts)
    caught = sum(outcome in CAUGHT for _, outcome in verdicts)
    since = sum(sentence.startswith("caught since") for sentence, _ in verdicts)
    count = len(verdicts) - same
    shares = _share(caught, count), _share(caught + since, count)
    return f"| {name} | {len(verdicts)} | {same} | {caught} | {shares[0]} | {since} | {shares[1]} |"


def _share(caught: int, count: int) -> str:
    """A share of mutants with Wilson's interval."""
    if not count:
        return ""
    share, z = caught / count, 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return f"{100 * share:.0f} % ({100 * (middle - half):.0f} to {100 * (middle + half):.0f})"


def main() -> None:
    """Draw, judge, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=160)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40, help="of tests that a mutant is shown to")
    parser.add_argument("--only", default="", help="mutants whose name has this text, judged again")
    parser.add_argument("--save", type=Path, default=ROOT / "tests" / "mutants.md")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    covered, seconds = baseline(args.jobs)
    done_file = BUILD / "results.json"
    done: dict[str, str] = json.loads(done_file.read_text()) if done_file.exists() else {}
    drawn = sample(args.number, args.seed)
    todo = [one for one in drawn if one.name not in done or (args.only and args.only in one.name)]
    trees = [copied(BUILD / f"tree-{job}") for job in range(args.jobs)]

    def work(job: int) -> None:
        for mutant in todo[job :: args.jobs]:
            tests = chosen(mutant, covered.get(mutant.file, {}), seconds, args.seconds)
            spent = sum(seconds.get(test, 1.0) for test in tests)  # of a single one that may be more
            done[mutant.name] = judged(mutant, trees[job], tests, max(args.seconds, spent))
            print(f"{done[mutant.name]:>12}  {mutant.name[:150]!r}", flush=True)
            done_file.write_text(json.dumps(done, indent=1))

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, range(args.jobs)))
    results = [(one, done[one.name]) for one in drawn]
    args.save.write_text(page(results, args.seed), encoding="utf-8")
    (BUILD / "drawn.json").write_text(json.dumps([asdict(one) for one in drawn], indent=1))


if __name__ == "__main__":
    main()
