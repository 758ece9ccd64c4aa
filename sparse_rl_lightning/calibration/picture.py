"""Plot of a calibration: the tail against the length, a line per budget, and the schedule that was picked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl_lightning.calibration.table import Cell
from sparse_rl_lightning.files import output_file, write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sparse_rl_lightning.calibration.calibrate import Calibration


def draw(found: Calibration, path: Path, title: str = "") -> None:
    """Draw two panels, as a PNG or in the format of the path's suffix.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _tails(above, found)
    _budgets(below, found)
    if title:
        figure.suptitle(title)
    kind = Path(path).suffix.removeprefix(".") or "png"
    write_files({output_file(path, "path"): lambda new: figure.savefig(new, dpi=130, format=kind)})


def _tails(ax: Axes, found: Calibration) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"].resampled(max(len(found.table), 2))
    for number, (budget, own) in enumerate(sorted(found.table.items())):
        _line(ax, own, found.bin_size, color=colors(number), label=str(budget))
    if found.check:
        _line(ax, found.check, found.bin_size, color="#c2410c", label="schedule", lw=2.4)
    ax.axhline(found.target, color="#1f2937", lw=1, ls="--")
    ax.axhline(found.ceiling, color="#9ca3af", lw=1, ls=":")
    ax.annotate("target", (0.0, found.target), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    ax.set(xlabel="tokens of the sequence", ylabel="5th percentile of the acceptance")
    ax.legend(title="budget", fontsize=9, ncols=2, frameon=False)


def _line(ax: Axes, cells: Sequence[Cell | None], bin_size: int, *, color: object, label: str, lw: float = 1.4) -> None:
    known = [(bin_size * (number + 0.5), cell) for number, cell in enumerate(cells) if cell is not None]
    at = [length for length, _ in known]
    ax.plot(at, [cell.tail for _, cell in known], color=color, label=label, lw=lw, marker=".")
    ax.fill_between(at, [c.low for _, c in known], [c.high for _, c in known], color=color, alpha=0.12, lw=0)


def _budgets(ax: Axes, found: Calibration) -> None:
    edges = [found.bin_size * number for number in range(len(found.choice.budgets) + 1)]
    ax.stairs(found.choice.budgets, edges, color="#2563eb", lw=2)
    ax.set(xlabel="tokens of the sequence", ylabel="budget, tokens per layer and KV head", ylim=(0, None))
