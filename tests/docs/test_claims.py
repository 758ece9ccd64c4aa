"""Numbers that the front pages claim are those of kept lines, by arithmetic of this file, and none is left over.

What a page says of results stands here as a sentence whose numbers are computed; what it says of conditions stands here
as it is. Without both, a page has no number.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_language import LINK, by_hand
from test_readme import find_blocks

from benchmarks import REAL
from benchmarks.common.pages import END, mark
from docs.quoted import measured
from experiments.real.__main__ import PROGRAM as REAL_STUDY
from experiments.runner.studies import Where
from experiments.runner.tables import Results
from experiments.stability.__main__ import PROGRAM as SMALL_STUDY

ROOT = Path(__file__).resolve().parents[2]
DOCS, KEPT = ROOT / "docs", ROOT / "benchmarks" / "results"
README, INDEX = ROOT / "README.md", DOCS / "index.md"
QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 12: 2.201, 13: 2.179}  # Student's t, 97.5 %, n - 1 degrees
T90 = {13: 1.782}  # 95 %
HALF, QUARTER, TIGHT, MILD = "72", "32", "30", "34"  # budgets
FULL = "dense"  # the full cache
BySeed = Mapping[int, float]

# ---------------------------------------------------------------- kept lines


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (KEPT / f"{name}.jsonl").read_text("utf-8").splitlines()]


@cache
def ends(study: str, arm: str, budget: str, cached: str, last: int, kept: str = "stability") -> dict[int, float]:
    """Mean of the last evaluations by seed, of the runs in a study's folder."""
    pattern = re.compile(rf"{re.escape(study)}/{re.escape(arm)}-budget-{budget}-steps-\d+-seed-(\d+)")
    runs: dict[int, float] = {}
    for line in lines(kept):
        if match := pattern.fullmatch(line["key"]):
            runs[int(match[1])] = statistics.fmean(row[cached] for row in line["evaluations"][-last:])
    return runs


def real_end(arm: str, budget: str, cached: str, method: str = "snapkv") -> dict[int, float]:
    budgets = "72-32" if arm == "dense" else budget
    runs = ends(f"{method}-4-x-8-1-steps-5e-4", arm, budgets, cached, 1, "real")
    return {seed: end for seed, end in runs.items() if 20 <= seed <= 24}


def equivalence(arm: str, budget: str) -> dict[int, float]:
    runs = ends("snapkv-4-x-8-1-steps-5e-4", arm, budget, FULL, 3, "real")
    return {seed: end for seed, end in runs.items() if seed > 24}


def small_end(arm: str, budget: str, cached: str) -> dict[int, float]:
    runs = ends("sum-snapkv-16-x-8-4-steps-2e-4", arm, MILD if arm == "dense" else budget, cached, 3)
    return {seed: end for seed, end in runs.items() if 30 <= seed <= 35}


def before(seed: int) -> float:
    """Accuracy of the policy that a run of the small study began with."""
    key = f"sum-snapkv-16-x-8-4-steps-2e-4/naive-budget-30-steps-960-seed-{seed}"
    (line,) = (line for line in lines("stability") if line["key"] == key)
    return float(line["evaluations"][0][FULL])


def older(row: str) -> dict[int, float]:
    """Ends with today's reward in the older seeds, which are kept in a table alone."""
    (cells,) = (cells for cells in measured("measured/stability.md", "Which reward") if cells["seed"] == row)
    return {seed: float(cells[str(seed)]) for seed in range(10, 16)}


def mean(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    sample = list(values)
    return statistics.fmean(sample), QUANTILES[len(sample)] * statistics.stdev(sample) / math.sqrt(len(sample))


def lead(runs: BySeed, rivals: BySeed) -> tuple[float, float]:
    """Points by which runs end ahead of those of the same seeds."""
    assert runs.keys() == rivals.keys()
    assert runs
    return mean(100 * (runs[seed] - rivals[seed]) for seed in runs)


def points(interval: tuple[float, float], signed: bool = False) -> str:
    middle, half = interval
    return f"{middle:+.1f} ± {half:.1f}" if signed else f"{abs(middle):.1f} ± {half:.1f}"


def collapses(runs: BySeed) -> int:
    """Runs that are left with less than a quarter of the accuracy before."""
    return sum(end < before(seed) / 4 for seed, end in runs.items())


# ---------------------------------------------------------------- what the pages say


def facts() -> dict[str, str]:
    """Every measured number of the front pages, as it is written there."""
    full, slots = measured("../benchmarks/results/equal-memory-cpu.md", "Equal memory")
    steps = measured("../benchmarks/results/equal-memory-cpu.md", "Training steps per hour")
    whole = measured("../benchmarks/results/gpu-whole-1.5b.md", "Whole rollouts, Qwen2.5-1.5B")
    modeled = measured("measured/gpu.md", "Longer rollouts")[-2:]
    (lengths,) = re.findall(r"lengths: mean (\d+)", (KEPT / "gpu-whole-1.5b.md").read_text("utf-8"))
    naive = {**small_end("naive", TIGHT, FULL), **older("naive, reward of now")}
    rejecting = {**small_end("sparse-rl", TIGHT, FULL), **older("Sparse-RL, reward of now")}
    equal = equivalence("reweighting-only", HALF), equivalence("dense", "full")
    middle, wide = lead(*equal)
    inside = T90[len(equal[0])] / QUANTILES[len(equal[0])] * wide
    assert abs(middle) + inside < 10, "the margin of its protocol"
    trained = [line["rejected"] for line in lines("rejected") if line["policy"] != "before training"]
    too_many = mean(100 * line["a step too many"] for line in trained)
    assert collapses(rejecting) == 0
    assert max(line["right answers"] for line in trained) < 0.01
    assert lead(small_end("replay", TIGHT, FULL), small_end("dense", TIGHT, FULL))[0] > 0
    assert (steps[1]["learned"], steps[1]["cache"]) == ("32 of 32", slots["cache"])
    return {
        "more": f"{int(slots['sequences in flight']) / int(full['sequences in flight']):.0f}",
        "tokens": f"{round(int(full['tokens of a completion'].replace(',', '')), -2):,}",
        "faster": slots["times as fast"],
        "cache": {"RKV": "R-KV"}[slots["cache"].split()[0]],
        "gpu_cache": whole[1]["cache"].split()[0],
        "step": steps[1]["times as many"],
        "whole": whole[1]["times as fast as FullKV"],
        "mean": lengths,
        "least": modeled[0]["mean completion"],
        "most": modeled[1]["mean completion"],
        "least_gain": modeled[0]["as paged"],
        "most_gain": modeled[1]["as paged"],
        "collapsed": f"{collapses(naive)} of {len(naive)}",
        "ahead": points(lead(rejecting, naive)),
        "milder": {0: "none"}[collapses(small_end("naive", MILD, FULL))],
        "replay": points(lead(small_end("replay", TIGHT, TIGHT), small_end("sparse-rl", TIGHT, TIGHT))),
        "too_many": f"{too_many[0]:.0f} ± {too_many[1]:.0f} %",
        "seeds": {13: "thirteen"}[len(equal[0])],
        "equal": points((middle, wide)),
    }


HEAD = (
    "Under {cache} the same KV memory holds {more} times as many sequences of {tokens} tokens as with our full cache.",
    "They generate {faster} times as many tokens per second on a CPU; a training step is predicted {step} times",
    "On an H200 a rollout of {mean}-token completions under {gpu_cache} was {whole} times as fast.",
    "At {least} to {most} tokens {least_gain} to {most_gain} times a paged cache's speed is modeled.",
    "Under a tight cache a small policy collapsed in {collapsed} uncorrected runs.",
    "bounded weights under half of the memory equal it within ten points, over {seeds} seeds;",
)
CLAIMS: dict[Path, tuple[str, ...]] = {
    README: (
        *HEAD,
        "Under the tight cache it ends {replay} points ahead of Sparse-RL.",
        "Of the rejected sequences, {too_many} take a step too many, and hardly any is right.",
        "with four steps per rollout, in {collapsed} runs. Sparse-RL ends {ahead} points ahead.",
        "Under the milder cache {milder} of six collapses.",
        "Over {seeds} other seeds bounded weights end {equal} points ahead.",
    ),
    INDEX: (*HEAD, "Under the tighter cache replay ends {replay} points ahead of Sparse-RL."),
}
CONDITIONS = (
    "with models of 0.6 M and 135 M parameters", "passed its tests on two GPUs", "Two short trainings ran on a GPU",
    "change the class and add two arguments", "have one 24 GB card",
    "Qwen3-1.7B on one 24 GB card", "by method, under two caches", "A policy of 0.6 M parameters",
    "of about 46), six seeds",
)  # fmt: skip
ONLY: dict[Path, tuple[str, ...]] = {
    README: (
        "Python 3.11+", "Apache-2.0", "On SmolLM2-135M-Instruct", "Stories by SmolLM2",
        "after twelve rollouts, five seeds", "half of the 95 % interval", "these five seeds cannot tell",
        "bounds its weights at 1.5", "A dozen compressors", "Two comparisons were primary",
        "Several ranks (DDP, ZeRO, FSDP2) are tested only as two CPU processes",
    ),
    INDEX: ("are new | install, then the quickstart (five minutes, CPU)", "in five minutes on a CPU"),
}  # fmt: skip
NUMBER = re.compile(
    r"\d[\d.,]*|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|twenty|dozen|hundred)\b",
    re.I,
)


def prose(text: str) -> str:
    """A page without blocks of code, tables that programs write, and targets of links, in one line."""
    text = by_hand(text)
    for block in find_blocks(text):
        text = text.replace(block.code, "")
    text = LINK.sub(r"\1", text)
    return " ".join(re.sub(r"```[\w{}]*|[*`]", "", text).split())


def faults(page: Path, text: str, numbers: Mapping[str, str]) -> list[str]:
    """Claims that a page does not make in these words and numbers, and numbers that are no claim's."""
    rest, wrong = prose(text), []
    claims = [claim.format(**numbers) for claim in CLAIMS[page]]
    for phrase in sorted([*claims, *CONDITIONS, *ONLY[page]], key=len, reverse=True):
        if phrase not in rest:
            wrong.append(f"not said: {phrase}")
        rest = rest.replace(phrase, "|", 1)
    return wrong + [f"of no kept line: {rest[max(0, m.start() - 40) : m.end() + 20]}" for m in NUMBER.finditer(rest)]


@pytest.mark.parametrize("page", CLAIMS, ids=lambda page: page.name)
def test_front_pages_claim_what_kept_lines_carry(page: Path) -> None:
    assert faults(page, page.read_text("utf-8"), facts()) == []


@pytest.mark.parametrize("page", CLAIMS, ids=lambda page: page.name)
def test_a_changed_digit_is_found(page: Path) -> None:
    numbers, text = facts(), prose(page.read_text("utf-8"))
    assert faults(page, text, numbers) == []
    digits = [match.start() for match in re.finditer(r"\d", text)]
    assert len(digits) > 30
    for place in digits:
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert faults(page, changed, numbers), text[place - 20 : place + 10]
    assert faults(page, f"{text} And 7 more.", numbers)
    assert faults(page, text.replace("collapsed in", "fell in"), numbers)


def test_the_front_table_is_of_kept_lines() -> None:
    """The README's table of the real model, by this file's own arithmetic."""
    rows = {row["–"]: row for row in measured("../README.md", "What was found")}
    assert list(rows) == ["naive", "reweighting only", "Sparse-RL", "replay"]
    columns = {"half, full cache": (HALF, FULL), "quarter, full cache": (QUARTER, FULL)}
    for name, row in rows.items():
        for title, (budget, cached) in {**columns, "quarter, compressed": (QUARTER, QUARTER)}.items():
            runs, dense = (real_end(arm, budget, cached) for arm in (name.lower().replace(" ", "-"), "dense"))
            assert row[title] == points(lead(runs, dense), signed=True), (name, title)
    under = {name: statistics.fmean(real_end(name, QUARTER, QUARTER).values()) for name in ("dense", "sparse-rl")}
    assert under["dense"] > under["sparse-rl"]


# ---------------------------------------------------------------- tables and intervals of the pages behind them


@cache
def written() -> dict[tuple[str, str], str]:
    """Every table that the studies write, by page and mark, from all kept lines, whatever the code of their runs."""
    tables: dict[tuple[str, str], str] = {}
    for program in (REAL_STUDY, SMALL_STUDY):
        archive = program.archive(KEPT / f"{program.name}.jsonl")
        archive._admitted.update(archive.records)
        results = Results(Where(ROOT / "runs" / program.name, REAL), archive)
        for name, text in program.texts(results, [group for group, _ in program.blocks.values()]).items():
            page = (DOCS / "measured" / program.pages[name]).resolve().relative_to(ROOT)
            tables[str(page), mark(f"experiments.{program.name}", name)] = text
    return tables


@pytest.mark.timeout(300)
def test_tables_of_both_studies_are_those_of_their_lines() -> None:
    assert {page for page, _ in written()} >= {"README.md", "docs/results.md", "docs/measured/real.md"}
    for (page, begin), text in written().items():
        shown = (ROOT / page).read_text("utf-8").partition(begin)[2].partition(END)[0].strip()
        assert shown == text, f"{page}, {begin}"


LEAD = re.compile(r"ahead of (.+?)(?:, (full cache|compressed.*))?")
PAIR = re.compile(r"(\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")
BEHIND = ("results.md", "choosing.md", "corrections.md", "limitations.md", "measured/real.md", "measured/stability.md")


def compared(page: str, heading: str) -> dict[tuple[str, ...], bool]:
    """Whether the interval excludes zero, by place, cache and pair of arms, each pair once."""
    leads: dict[tuple[str, ...], bool] = {}
    for row in measured(page, heading):
        name = row["–"].removesuffix(", replay")
        for title, cell in row.items():
            match = LEAD.fullmatch(title)
            if match and "±" in cell and match[1] != name:
                ahead, half = map(float, cell.split(" ± "))
                slot = row.get("slot", row.get("cache", ""))
                leads[(slot, match[2] or "", *sorted((match[1], name)))] = abs(ahead) > half
    return leads


def test_comparisons_are_counted() -> None:
    """All but the primary one of each study are secondary."""
    counts = {row["study"]: row for row in measured("results.md", "Which tests")}
    primary = ("full cache", "Sparse-RL", "naive"), ("", "H2O, by age", "LearnedScore, replay + learned eviction")
    studies = (
        ("measured/real.md", "The comparison", ("a quarter", *primary[0])),
        ("measured/stability.md", "With today's reward", ("30 + 4", *primary[0])),
        ("measured/real.md", "Evictions that learn", ("", *primary[1])),
        ("measured/stability.md", "Score centering", ("30 + 4", "full cache", "centering", "naive")),
        ("measured/real.md", "Score centering", ("", "full cache", "centering and weights", "reweighting only")),
    )
    for (study, row), (page, heading, tested) in zip(counts.items(), studies, strict=True):
        leads = compared(page, heading)
        leads.pop(tested)
        cells = [row[name] for name in ("comparisons", "exclude zero", "by chance alone")]
        assert cells == [str(len(leads)), str(sum(leads.values())), f"{len(leads) / 20:.0f}"], study


def pairs(text: str) -> set[tuple[str, str]]:
    return set(PAIR.findall(text.replace("+", "")))


@pytest.mark.parametrize("page", BEHIND)
def test_intervals_in_prose_stand_in_a_table_or_are_recomputed(page: str) -> None:
    tables = "".join(path.read_text("utf-8") for path in DOCS.glob("measured/*.md"))
    naive, rejecting = (older(f"{arm}, reward of now") for arm in ("naive", "Sparse-RL"))
    learned = lead(real_end("replay", QUARTER, FULL, "learnedscore"), real_end("dense", QUARTER, FULL))
    both = (real_end(arm, QUARTER, FULL) for arm in ("sparse-rl", "naive"))
    without = lead(*({seed: end for seed, end in runs.items() if seed != 20} for runs in both))
    carried = pairs(" ".join(line for line in tables.splitlines() if line.startswith("|")))
    carried |= pairs(" ".join([facts()["ahead"], *map(points, (learned, lead(rejecting, naive), without))]))
    assert sorted(pairs(prose((DOCS / page).read_text("utf-8"))) - carried) == []


# ---------------------------------------------------------------- the script that is shown


def test_the_script_shown_is_one_and_its_names_are_there() -> None:
    """Both front pages show the same change of a TRL script, whose two sides import what they use."""
    blocks = [block for page in (README, INDEX) for block in find_blocks(page.read_text("utf-8"))]
    (shown,) = {block.code for block in blocks if block.language == "diff"}
    for dropped in "+-":
        side = "\n".join(line[1:] for line in shown.splitlines() if not line.startswith(dropped))
        tree = ast.parse(side)
        imported = {
            name.name: getattr(importlib.import_module(node.module or ""), name.name)
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
        }  # fmt: skip
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"trainer"}
        assert used - imported.keys() == {"reward", "dataset"}, dropped
    tokens = int(*re.findall(r"at most (\d+) tokens", shown))
    assert tokens == sum(map(int, re.findall(r"RKV\(budget=(\d+), buffer=(\d+)\)", shown)[0]))
