"""How fast answers are checked: checks per second and the slow ones, set by set.

    python -m benchmarks.checker [--data FOLDER] [--workers 1] [--quick] [--save DIR]
    python -m benchmarks.checker --data FOLDER --outputs FOLDER [--page docs/evaluation.md]

Every gold answer is checked twice, against a completion that boxes it and against one that boxes the next row's
answer. ``rationals`` are made up (whole numbers, decimals, fractions, powers of ten, in several spellings);
``symbolic`` are sums and integrals, which go to math-verify; the benchmarks are read from FOLDER where it is given.
Checks per second are of one call for the whole set, by the clock and by the processor time of this process (what a
core that does nothing else would reach; math-verify's processes are not in it), times per check of single calls. What
was parsed before is forgotten before both.

With ``--outputs`` nothing is timed: it compares what strict and lenient answers pay of models' outputs and of golds
that are written otherwise, and puts the tables into a page, between its markers.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

from benchmarks.checker.conventions import conventions
from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table
from exact_answers import MathChecker, compare, structure, text, values
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.data.published import PUBLISHED

Cases = list[tuple[str, str]]  # completion, gold
FILLER = "We set up the equation and solve it step by step, {so} the rest follows. " * 40


def rationals(count: int) -> list[str]:
    """Golds that are numbers, in several spellings."""
    random = Random(0)
    spellings = (
        lambda: f"{random.randint(-9999, 9999)}",
        lambda: f"{random.randint(1000, 9_999_999):,}",
        lambda: f"{random.uniform(-100, 100):.3f}",
        lambda: rf"\frac{{{random.randint(1, 99)}}}{{{random.randint(2, 99)}}}",
        lambda: f"{random.randint(1, 99)}/{random.randint(2, 99)}",
        lambda: rf"{random.uniform(1, 10):.2f}\times10^{{{random.randint(-30, 30)}}}",
        lambda: rf"{random.randint(1, 999)}\text{{ cm}}^2",
    )
    return [random.choice(spellings)() for _ in range(count)]


def symbolic(count: int) -> list[str]:
    """Golds that only math-verify reads."""
    return [rf"\sum_{{k=1}}^{{n}} k^{{{power}}}+{power}" for power in range(1, count + 1)]


def cases(golds: list[str]) -> Cases:
    """Each gold with a right and with a wrong completion."""
    wrong = golds[1:] + golds[:1]
    answers = [*zip(golds, golds, strict=True), *zip(wrong, golds, strict=True)]
    return [(rf"{FILLER}The answer is $\boxed{{{answer}}}$.", gold) for answer, gold in answers]


def forget() -> None:
    """Empty the caches, so that every gold is parsed as for the first time."""
    for cached in (text.tidy, compare.read_atom, structure.parse_answer, values.readable):
        cached.cache_clear()


def measure(cases: Cases, checker: MathChecker) -> tuple[float, float, list[float]]:
    """Checks per second and per processor second of one call, and milliseconds of single checks, sorted."""
    completions, golds = [c for c, _ in cases], [g for _, g in cases]
    checker.check([r"\boxed{6}"], [r"\sum_{k=1}^{3}k"])  # the processes are there
    forget()
    start, used = time.perf_counter(), time.process_time()
    checker.check(completions, golds)
    rates = len(cases) / (time.perf_counter() - start), len(cases) / (time.process_time() - used)
    forget()
    times = []
    for completion, gold in cases:
        start = time.perf_counter()
        checker.check([completion], [gold])
        times.append(1e3 * (time.perf_counter() - start))
    return *rates, sorted(times)


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, "checker-cpu.md", quick=True)
    parser.add_argument("--data", help="folder of the published files")
    parser.add_argument("--workers", type=int, default=1, help="processes for math-verify")
    parser.add_argument("--outputs", type=Path, help="folder of outputs, as the evaluation of Qwen2.5-Math writes them")
    parser.add_argument("--page", type=Path, help="page that gets the tables of the conventions")
    arguments = options.parsed(parser)
    if arguments.outputs is not None:
        if arguments.data is None:
            parser.error("--outputs needs --data, the folder of the published benchmarks")
        print(conventions(arguments.data, arguments.outputs, arguments.page))
        return

    sets = {
        "rationals": rationals(100 if arguments.quick else 2000),
        "symbolic": symbolic(2 if arguments.quick else 10),
    }
    if arguments.data is not None:
        data = MathBenchmarks(arguments.data)
        sets |= {name: [row["answer"] for row in data.rows(name)] for name in PUBLISHED}
    checker = MathChecker(arguments.workers, timeout=10.0)
    table = Table(
        "Checking answers", ["set", "golds", "checks/s", "checks/core-s", "p50 ms", "p99 ms", "worst ms"],
        f"{machine('cpu')}. Completions of {len(FILLER):,} characters, {arguments.workers} process(es) of math-verify.",
    )  # fmt: skip
    for name, golds in sets.items():
        rate, core_rate, times = measure(cases(golds), checker)
        shown = (times[len(times) // 2], times[int(0.99 * (len(times) - 1))], times[-1])
        table.add(name, str(len(golds)), f"{rate:,.0f}", f"{core_rate:,.0f}", *(f"{value:.2f}" for value in shown))
    print(table)
    save(arguments.save, "checker-cpu", "Checking answers", str(table))


if __name__ == "__main__":
    main()
