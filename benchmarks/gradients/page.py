"""Tables and picture of docs/gradients.md from the kept lines of ``benchmarks.gradients``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import Table
from benchmarks.gradients.agreement import Estimate

Line = dict[str, Any]
ORDER = ("warm", "middle", "late", "before naive training fails", "in the spiral of rejection")
ALONG = ("SnapKV", 30)
MISSING = "–"
COLORS = {
    "naive": "#c2410c", "rejection only": "#a16207", "reweighting only, ξ ≤ 1.5": "#a21caf",
    "Sparse-RL, ξ ≤ 1.5": "#2563eb", "Sparse-RL, unbounded ξ": "#60a5fa", "Sparse-RL (official)": "#0891b2",
    "replay": "#047857",
}  # fmt: skip


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
    """Variants at one policy by compressor and budget: cosine · length of their gradients."""
    own = only(lines, weights=weights)
    table = Table("", ["", *(f"{method} {budget}" for method, budget in cases(own))])
    for variant in COLORS:
        found = [only(own, method=method, budget=budget, variant=variant) for method, budget in cases(own)]
        table.add(variant, *(" · ".join(_estimate(one, what) for what in ("cosine", "length")) for one in found))
    return table


def along_table(lines: Sequence[Line], what: str) -> Table:
    """Variants along training, where the mismatch is in the middle: cosine or length of their gradients."""
    method, budget = ALONG
    own = only(lines, method=method, budget=budget)
    table = Table("", ["", *weights_of(own)])
    for variant in COLORS:
        found = [only(own, weights=weights, variant=variant) for weights in weights_of(own)]
        table.add(variant, *(_estimate(one, what) for one in found))
    return table


def _estimate(found: Sequence[Line], what: str) -> str:
    return str(Estimate(**found[0][what])) if found else MISSING


def rollouts_table(lines: Sequence[Line]) -> Table:
    """What the rollouts were like that the gradients are of, and how noisy those are."""
    header = ["policy", "compressor", "sequences rejected", "k3", "effective samples", "halves of naive"]
    table = Table("", [*header, "halves of the full cache"])
    for weights in weights_of(lines):
        for method, budget in cases(only(lines, weights=weights)):
            own = only(lines, weights=weights, method=method, budget=budget)
            naive, full = only(own, variant="naive")[0], only(own, variant="full cache")[0]
            halves = [f"{line['noise']['value']:.2f}" for line in (naive, full)]
            numbers = [f"{naive['rejected']:.1%}", f"{naive['k3']:.2g}", f"{naive['ess']:.2f}"]
            table.add(weights, f"{method} {budget}", *numbers, *halves)
    return table


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Every block of the page by its name."""
    along = {f"{what} along training": along_table(lines, what).untitled for what in ("cosine", "length")}
    blocks = {name: agreement_table(lines, name).untitled for name in weights_of(lines)}
    return {"rollouts": rollouts_table(lines).untitled, **along, **blocks}


def overview(lines: Sequence[Line]) -> Table:
    """The four ways to train at the warm policy, SnapKV alone: what the README shows."""
    own = only(lines, weights=ORDER[0], method="SnapKV")
    named = sorted({line["budget"] for line in own}, reverse=True)
    table = Table("", ["", *(f"budget {budget}: {what}" for budget in named for what in ("cosine", "length"))])
    for variant in ("naive", "rejection only", "Sparse-RL, ξ ≤ 1.5", "replay"):
        found = [only(own, budget=budget, variant=variant)[0] for budget in named]
        table.add(variant, *(str(Estimate(**line[what])) for line in found for what in ("cosine", "length")))
    return table


def picture(lines: Sequence[Line], path: Path) -> None:
    """Cosine above length over the budgets of SnapKV, a column per policy."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sparse_rl_lightning.report.charts import STYLE

    names = weights_of(lines)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(7.5, 3.2 * len(names) + 0.6), 5.6), layout="constrained", facecolor="white")
        axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
        for column, name in enumerate(names):
            for row, what in enumerate(("cosine", "length")):
                _panel(axes[row][column], only(lines, weights=name, method="SnapKV"), what)
            axes[0][column].set_title(name, fontsize=10)
            axes[1][column].set_xlabel("budget (of about 46 tokens)")
        axes[0][0].set_ylabel("cosine with the full cache's")
        axes[1][0].set_ylabel("length over the full cache's")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=110)


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
