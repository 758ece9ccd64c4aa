"""Tables and picture of docs/measured/gradients.md from the kept lines of ``experiments.gradients``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import Table
from experiments.gradients.agreement import Estimate
from experiments.gradients.measure import FULL

Line = dict[str, Any]
ORDER = ("warm", "middle", "late", "before naive training fails", "in the spiral of rejection")
TOO_NOISY = ("before naive training fails",)  # for a table of every case
ALONG = ("SnapKV", 30)
WIDEST = 1.0  # half an interval; a wider one says nothing
BOUNDS = {"cosine": (-0.3, 1.7), "length": (0.0, 5.0)}  # of the picture
MISSING = "–"
COLORS = {
    "naive": "#c2410c", "rejection only": "#a16207", "reweighting only": "#a21caf",
    "Sparse-RL": "#2563eb", "Sparse-RL (paper)": "#60a5fa", "Sparse-RL (official)": "#0891b2",
    "replay": "#047857",
}  # fmt: skip
COMPARED = ("naive", "rejection only", "reweighting only", "Sparse-RL", "replay")  # on the page


def cases(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Compressors and budgets, the largest budget of a compressor first."""
    found = {(line["method"], line["budget"]) for line in lines}
    return sorted(found, key=lambda case: (case[0] != "SnapKV", -case[1]))


def weights_of(lines: Sequence[Line]) -> list[str]:
    """Policies in the order of training."""
    return [name for name in ORDER if any(line["weights"] == name for line in lines)]


def only(lines: Sequence[Line], **wanted: Any) -> list[Line]:
    """The lines with these values."""
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


def agreement_table(lines: Sequence[Line], weights: str) -> Table:
    """Some variants at one policy by compressor and budget: cosine · length of their gradients."""
    own = only(lines, weights=weights)
    table = Table("", ["", *(f"{method} {budget}" for method, budget in cases(own))])
    for variant in COMPARED:
        found = [only(own, method=method, budget=budget, variant=variant) for method, budget in cases(own)]
        table.add(variant, *(" · ".join(estimated(one, what) for what in ("cosine", "length")) for one in found))
    return table


def along_table(lines: Sequence[Line], what: str) -> Table:
    """Variants along training, where the mismatch is in the middle: cosine or length of their gradients."""
    method, budget = ALONG
    own = only(lines, method=method, budget=budget)
    table = Table("", ["", *weights_of(own)])
    for variant in COLORS:
        found = [only(own, weights=weights, variant=variant) for weights in weights_of(own)]
        table.add(variant, *(estimated(one, what) for one in found))
    return table


def projection_table(lines: Sequence[Line]) -> Table:
    """Policies by how much of the full cache's gradient is in the naive one."""
    table = Table("", ["", *(f"{method} {budget}" for method, budget in cases(lines))])
    for weights in weights_of(lines):
        found = _naive(lines, weights)
        table.add(weights, *(estimated([line] if line else [], "projection") for line in found))
    return table


def estimated(found: Sequence[Line], what: str) -> str:
    """A measure of a line with its interval; a dash where there is no line or the interval says nothing."""
    return str(Estimate(**found[0][what])) if found and _says_something(found[0], what) else MISSING


def _says_something(line: Line, what: str) -> bool:
    return bool(line[what]["width"] < WIDEST)  # not so where noise left no length to divide by, and it is NaN


def rollouts_table(lines: Sequence[Line]) -> Table:
    """Policies by what their rollouts were like under each compressor: sequences rejected · k3."""
    table = Table("", ["", *(f"{method} {budget}" for method, budget in cases(lines))])
    for weights in weights_of(lines):
        found = _naive(lines, weights)
        table.add(weights, *(f"{line['rejected']:.1%} · {line['k3']:.2g}" if line else MISSING for line in found))
    return table


def halves_table(lines: Sequence[Line]) -> Table:
    """Policies by the raw cosine of two halves of a gradient: how noisy the full cache's is, and each naive one."""
    table = Table("", ["", FULL, *(f"{method} {budget}" for method, budget in cases(lines))])
    for weights in weights_of(lines):
        full = only(lines, weights=weights, variant=FULL)[0]  # the same in every case
        found = (full, *_naive(lines, weights))
        table.add(weights, *(f"{line['noise']['value']:.2f}" if line else MISSING for line in found))
    return table


def _naive(lines: Sequence[Line], weights: str) -> list[Line | None]:
    own = only(lines, weights=weights, variant="naive")
    found = {(line["method"], line["budget"]): line for line in own}
    return [found.get(case) for case in cases(lines)]


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Every block of the page by its name."""
    along = {f"{what} along training": along_table(lines, what).untitled for what in ("cosine", "length")}
    told = [name for name in weights_of(lines) if name not in TOO_NOISY]
    blocks = {name: agreement_table(lines, name).untitled for name in told}
    first = {"rollouts": rollouts_table(lines).untitled, "halves": halves_table(lines).untitled}
    return {**first, **along, "projection": projection_table(lines).untitled, **blocks}


def picture(lines: Sequence[Line], path: Path) -> None:
    """Cosine beside length over the budgets of SnapKV, a row per policy."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sparse_rl_lightning.report.charts import STYLE

    names, measures = weights_of(lines), ("cosine", "length")
    with rc_context(STYLE):
        figure = Figure(figsize=(6.6, 2.2 * len(names) + 1), layout="constrained", facecolor="white")
        axes = figure.subplots(len(names), len(measures), squeeze=False, sharex=True, sharey="col")
        for name, row in zip(names, axes, strict=True):
            for ax, what in zip(row, measures, strict=True):
                own = only(lines, weights=name, method="SnapKV")
                _panel(ax, [line for line in own if _says_something(line, what)], what)
                ax.set_ylim(*BOUNDS[what])
            row[0].set_title(name, fontsize=10)
        for ax, title in zip(axes[-1], ("cosine with the full cache's", "length over the full cache's"), strict=True):
            ax.set_xlabel(f"budget (of about 46 tokens)\n{title}")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=150)


def _panel(ax: Any, lines: Sequence[Line], what: str) -> None:
    ax.axhline(1.0, color="#9ca3af", lw=1, zorder=0)
    for place, (variant, color) in enumerate(COLORS.items()):
        own = sorted(only(lines, variant=variant), key=lambda line: line["budget"])
        if own:
            at = [line["budget"] + 0.12 * (place - len(COLORS) / 2) for line in own]
            values, widths = ([line[what][key] for line in own] for key in ("value", "width"))
            ax.errorbar(at, values, widths, color=color, lw=1.5, marker="o", ms=4, capsize=2, label=variant)
    ax.set_xticks(sorted({line["budget"] for line in lines}))
    ax.xaxis.set_inverted(True)
