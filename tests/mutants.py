"""Small mistakes put into the library one by one: which of them do the fast tests notice?

``make mutants`` draws a sample of places by a seed, over areas alike, changes each in a copy of the tree, and runs the
tests that cover its line, the cheapest first. What survives is listed in tests/mutants.md, with the sentence that
judges it in ``mutants_judged.json``. mutmut and cosmic-ray do this for suites that run in seconds: neither draws a
sample, or orders thousands of slow tests by what they cover.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
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
AREAS: dict[str, tuple[str, ...]] = {  # globs below the package, or of exact_answers beside it
    "mathematics": ("acceptance.py", "advantages.py", "corrections.py", "logprobs.py", "losses.py", "output_head.py"),
    "evictions and replay": ("evictions.py", "replay/*.py"),
    "cache": ("cache/*.py",),
    "engine": ("rollout/engine/*.py", "rollout/engine/decoders/*.py"),
    "rollout": ("rollout/*.py",),
    "compressors and budgets": ("compressors/*.py", "budgets/*.py"),
    "learner": ("learner/*.py",),
    "modules": ("modules/*.py",),
    "corrections' callbacks": ("callbacks/corrections/*.py", "callbacks/base.py"),
    "checkpoints": ("checkpoints/*.py",),
    "data": ("data/*.py",),
    "rewards": ("rewards/*.py", "exact_answers/*.py"),
    "environments": ("environments/*.py",),
    "distributed and down-sampling": ("distributed/*.py", "downsampling/*.py"),
}
LEFT_OUT = ("docs", "benchmarks", "experiments", "report", "project", "cases", "cli", "planning", "integrations")
"""Folders of tests that no mutant is shown to."""
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

    area: str
    file: str  # below the package, or of exact_answers beside it
    line: int
    place: str  # qualified name of the function or class
    before: str
    after: str
    span: tuple[int, int, int, int]  # first line and column, last line and column

    @property
    def name(self) -> str:
        """A name that lasts as long as the place does."""
        return f"{self.file}:{self.place}: {self.before} -> {self.after}"


def path_of(file: str, tree: Path) -> Path:
    """Where a mutant's file lies in a copy of the tree."""
    return tree / (file if file.startswith("exact_answers/") else f"sparse_rl_lightning/{file}")


def file_of(path: Path, tree: Path) -> str:
    """The name of a file in the name of its mutants."""
    return path.relative_to(tree).as_posix().removeprefix("sparse_rl_lightning/")


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


def places(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, str]]:
    """Nodes of code whose change may matter, with the qualified name of where they stand."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import):
                continue
            is_silent = _says(node.value) if isinstance(node, ast.Expr) else _says(node)
            if is_silent or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            own: tuple[str, ...] = inside
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if node.name in ("__repr__", "__str__") or "overload" in ast.unparse(node.decorator_list or []):  # type: ignore[arg-type]
                    continue
                own = (*inside, node.name)
            if own and hasattr(node, "lineno"):
                yield node, ".".join(own)
            yield from places(node, own)


def mutants_of(area: str, path: Path, dice: random.Random) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_text(encoding="utf-8")
    file = file_of(path, ROOT)
    for found, place in places(ast.parse(source)):
        node: Any = found
        new = changed(node, dice)
        if new is None:
            continue
        text = ast.unparse(new)
        text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else text
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        yield Mutant(area, file, node.lineno, place, ast.unparse(node), text, span)


def sample(number: int, seed: int) -> list[Mutant]:
    """Mutants of all areas alike, at most one of a line."""
    dice, drawn = random.Random(seed), []
    pools = {}
    for area, globs in AREAS.items():
        files = sorted({path for one in globs for path in ROOT.glob(path_of(one, Path()).as_posix())})
        pools[area] = [one for path in files for one in mutants_of(area, path, dice)]
        dice.shuffle(pools[area])
    seen = set[tuple[str, int]]()
    while len(drawn) < number and any(pools.values()):
        for pool in pools.values():
            while pool and len(drawn) < number:
                one = pool.pop()
                if (one.file, one.line) not in seen:
                    seen.add((one.file, one.line))
                    drawn.append(one)
                    break
    return drawn


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


def baseline(jobs: int) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """For each file the tests of every line, and the seconds of each test; measured once for a state of the tree."""
    kept = BUILD / "baseline.json"
    if not kept.exists():
        tests = sorted((ROOT / "tests").rglob("test_*.py"))
        tests = [path for path in tests if path.relative_to(ROOT / "tests").parts[0] not in LEFT_OUT]
        tree = copied(BUILD / "tree-0")
        shares = [[path.relative_to(ROOT).as_posix() for path in tests[share::jobs]] for share in range(jobs)]

        for old in BUILD.glob("ranks-*"):
            old.unlink()

        def measure(share: int) -> None:
            ranks = BUILD / f"ranks-{share}.ini"
            ranks.write_text(RANKS.format(file=BUILD / f"ranks-{share}"))
            files = BUILD / f"durations-{share}.json", BUILD / f"coverage-{share}"
            counted = ["-m", "coverage", "run", "--source=sparse_rl_lightning,exact_answers", f"--data-file={files[1]}"]
            command = [*counted, *PYTEST, "-p", "mutants", *shares[share]]
            ran(tree, command, MUTANTS_DURATIONS=str(files[0]), MUTANTS_RANKS=str(ranks))

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(measure, range(jobs)))
        kept.write_text(json.dumps(_covered(tree, jobs)))
    found = json.loads(kept.read_text())
    lines = {file: {int(line): tests for line, tests in own.items()} for file, own in found["lines"].items()}
    return lines, found["seconds"]


def _covered(tree: Path, jobs: int) -> dict[str, Any]:
    from coverage import CoverageData

    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    seconds = dict[str, float]()
    for share in range(jobs):
        seconds |= json.loads((BUILD / f"durations-{share}.json").read_text())
        for found in [BUILD / f"coverage-{share}", *BUILD.glob(f"ranks-{share}.*.*")]:
            data = CoverageData(str(found))
            data.read()
            for file in data.measured_files():
                own = lines[file_of(Path(file), tree)]
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
    found, total = [], 0.0
    for test in order:
        total += seconds.get(test, 1.0)
        if total > limit and found:
            break
        found.append(test)
    return found


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
    """The table of kill rates, and the survivors with their sentences."""
    known: dict[str, str] = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    rows, left = [], []
    totals = [0, 0, 0, 0]
    for area in AREAS:
        own = [(mutant, said) for mutant, said in results if mutant.area == area]
        same = sum(known.get(mutant.name, "").startswith("equivalent") for mutant, _ in own)
        caught = sum(said in ("caught", "too slow") for _, said in own)
        since = sum(known.get(mutant.name, "").startswith("caught since") for mutant, _ in own)
        totals = [total + one for total, one in zip(totals, (len(own), same, caught, since), strict=True)]
        left += [(mutant, said) for mutant, said in own if said not in ("caught", "too slow")]
        rows.append(_row(area, len(own), same, caught, since))
    rows.append(_row("all", *totals))
    lines = [f"- `{mutant.name}` ({said}): {known.get(mutant.name, 'not judged yet')}" for mutant, said in left]
    return "\n".join([
        "# Mutants", "",
        "<!-- written by tests/mutants.py -->", "",
        f"{totals[0]} small mistakes, drawn with seed {seed} over all areas alike, put into the library one by one",
        "(`make mutants`). Caught are those that make a fast test fail that covers their line. Equivalent ones change",
        "nothing that can be seen; they do not count. Caught since are those by a test that the sample led to: what",
        "such tests are worth the next sample says, of another seed.", "",
        "| area | mutants | equivalent | caught | rate | caught since | rate |", "|---|---|---|---|---|---|---|", *rows,
        "",
        "## What survived", "", *lines, "",
    ])  # fmt: skip


def _row(area: str, count: int, same: int, caught: int, since: int) -> str:
    rates = (_share(part, count - same) for part in (caught, caught + since))
    return f"| {area} | {count} | {same} | {caught} | {next(rates)} | {since} | {next(rates)} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def main() -> None:
    """Draw, judge, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=160)
    parser.add_argument("--seed", type=int, default=20261126)
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
