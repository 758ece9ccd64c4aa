"""Calibration of a schedule: sweep budgets, measure the tail in every length bin, choose, check, write."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl_lightning.acceptance import percentile, tail_target
from sparse_rl_lightning.budgets import Budgeted, LengthSchedule
from sparse_rl_lightning.calibration.sweep import Sweep
from sparse_rl_lightning.calibration.table import Acceptances, Binning, Cell, Choice, cells, choose
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.report.charts import GRAY, INK, LIGHT, figures, png
from sparse_rl_lightning.retrievers import Retriever

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSE, CHECK = "dense", "schedule"
OnProgress = Callable[[str, float], None]
"""Called with the name of the current method, and the number of methods done, parts of them included."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration."""

    table: dict[int, list[Cell | None]]  # by budget, one cell per bin
    choice: Choice
    ceiling: float  # the 5th percentile between dense sampler and dense learner, all lengths together
    target: float
    bin_size: int
    check: list[Cell | None] | None = None  # the schedule itself, measured; None if it was not

    @property
    def schedule(self) -> LengthSchedule:
        """The schedule that was picked."""
        return self.choice.schedule

    @property
    def notes(self) -> list[str]:
        """Notes for the user: bins without data, targets that are missed."""
        missed = [  # the schedule itself may do worse than its budgets did alone
            f"lengths {number * self.bin_size} to {(number + 1) * self.bin_size - 1}: the schedule itself reaches "
            f"{cell.tail:.4f} ({cell.low:.4f} to {cell.high:.4f}), below the target."
            for number, cell in enumerate(self.check or [])
            if cell is not None and cell.tail < self.target
        ]
        return [*self.choice.notes, *missed]

    def csv(self) -> str:
        """The table as text: a row per budget and bin, with empty numbers where there is no data."""
        names = list(Cell.__dataclass_fields__)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["budget", "first_length", "last_length", "chosen", *names])
        measured: list[tuple[int | str, list[Cell | None]]] = [*self.table.items(), (CHECK, self.check or [])]
        for budget, row_of_cells in measured:
            for number, cell in enumerate(row_of_cells):
                first = number * self.bin_size
                numbers = [f"{getattr(cell, name):.6g}" if cell else "" for name in names]
                chosen = int(self.choice.budgets[number] == budget)
                rows.writerow([budget, first, first + self.bin_size - 1, chosen, *numbers])
        return text.getvalue()

    def summary(self) -> dict[str, object]:
        """Everything but the table, for a JSON file."""
        return {
            "ceiling": self.ceiling,
            "target": self.target,
            "bin_size": self.bin_size,
            "budgets": self.choice.budgets,
            "starts": list(self.schedule.starts),
            "schedule": list(self.schedule.budgets),
            "notes": self.notes,
        }

    def write(self, folder: Path) -> None:
        """Write ``schedule.yaml``, ``table.csv`` and ``calibration.json``."""
        title = f"5th percentile of the acceptance at least {self.target:.4f} (ceiling {self.ceiling:.4f})"
        write_whole(folder / "schedule.yaml", self.schedule.yaml("\n".join([title, *self.notes])))
        write_whole(folder / "table.csv", self.csv())
        write_whole(folder / "calibration.json", json.dumps(self.summary(), indent=2) + "\n")

    def picture(self, title: str = "") -> bytes:
        """The tail against the length, a line per budget, and the schedule that was picked, as PNG.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the message includes what to install.
        """
        with figures() as figure_class:
            figure = figure_class(figsize=(6.6, 6.4), layout="constrained")
            tails, budgets = figure.subplots(2, 1, sharex=True)
            self._draw_tails(tails)
            edges = [self.bin_size * number for number in range(len(self.choice.budgets) + 1)]
            budgets.stairs(self.choice.budgets, edges, color=LIGHT[0], lw=2)
            budgets.set(xlabel="tokens of the sequence", ylabel="budget, tokens per layer and KV head", ylim=(0, None))
            figure.suptitle(title)
            return png(figure)

    def _draw_tails(self, ax: Axes) -> None:
        """A line per budget with its intervals, and that of the schedule itself if it was measured."""
        measured = [(str(budget), row) for budget, row in sorted(self.table.items())]
        measured += [(CHECK, self.check)] if self.check else []
        for number, (label, row) in enumerate(measured):
            drawn = [(self.bin_size * (bin_number + 0.5), cell) for bin_number, cell in enumerate(row) if cell]
            at = [length for length, _ in drawn]
            color = LIGHT[1] if label == CHECK else (0.1, 0.8 * number / len(measured), 0.6)
            ax.plot(at, [cell.tail for _, cell in drawn], color=color, label=label, marker=".")
            lows, highs = [cell.low for _, cell in drawn], [cell.high for _, cell in drawn]
            ax.fill_between(at, lows, highs, color=color, alpha=0.12, lw=0)
        ax.axhline(self.target, color=INK, lw=1, ls="--", label="target")
        ax.axhline(self.ceiling, color=GRAY, lw=1, ls=":", label="ceiling")
        ax.set_ylabel("5th percentile of the acceptance")
        ax.legend(title="budget", ncols=2)


def calibrate(
    sweep: Sweep,
    method: Budgeted,
    budgets: Sequence[int],
    binning: Binning,
    target: float | None = None,
    check: bool = True,
    monotone: bool | None = None,
    progress: OnProgress | None = None,
) -> Calibration:
    """Measure the tail of the acceptance at every budget and choose the cheapest for each length bin.

    The method's own budget is ignored; other arguments as in ``sparse-rl calibrate``. Unless ``monotone`` is given,
    budgets of compressors may not decrease with the length: evicted tokens do not come back, so a bin that needs little
    would ruin the next.

    Raises:
        ValueError: If there are no budgets, the method never evicts, the target is above the ceiling, or no bin has
            enough tokens.
    """
    check_number("target", target, above=0, or_none=True)
    methods = {budget: method.with_budget(budget) for budget in _checked(method, budgets)}
    sweep.claim(method)
    acceptances_of = {DENSE: _acceptances(sweep, DENSE, FullKV(), 0, progress)}
    ceiling = percentile(acceptances_of[DENSE].lower)
    target = tail_target(ceiling) if target is None else target
    if target > ceiling:
        raise UserError(
            f"target={target:.4f} is above the ceiling: even a dense sampler reaches {ceiling:.4f}. Lower it, or leave "
            f"it out for {tail_target(ceiling):.4f}."
        )
    for done, (budget, swept) in enumerate(methods.items(), 1):
        acceptances_of[_name(budget)] = _acceptances(sweep, _name(budget), swept, done, progress)
    num_bins = (sweep.longest - 1) // binning.bin_size + 1
    judged = {name: cells(acceptances, binning, num_bins) for name, acceptances in acceptances_of.items()}
    table = {budget: judged[_name(budget)] for budget in methods}
    rises = not isinstance(method, Retriever) if monotone is None else monotone
    choice = choose(table, target, binning.bin_size, rises)
    checked = None
    if check:
        name = f"{CHECK}_{hashlib.sha256(repr(choice.schedule).encode()).hexdigest()[:16]}"
        drawn = _acceptances(sweep, name, method.with_budget(choice.schedule), len(methods) + 1, progress)
        checked = cells(drawn, binning, num_bins)
    return Calibration(table, choice, ceiling, target, binning.bin_size, checked)


def _acceptances(sweep: Sweep, name: str, method: Budgeted, done: int, progress: OnProgress | None) -> Acceptances:
    drawn = sweep.acceptances(name, method, None if progress is None else lambda share: progress(name, done + share))
    if progress is not None:
        progress(name, done + 1)
    return drawn


def _name(budget: int) -> str:
    return f"budget_{budget}"


def _checked(method: Budgeted, budgets: Sequence[int]) -> list[int]:
    if not method.is_limited:
        raise UserError(f"{type(method).__name__} never evicts: there is no budget to calibrate. Choose another.")
    if not budgets or min(budgets) < 1:
        raise UserError(f"budgets must be positive numbers of tokens, at least one, got budgets={list(budgets)}.")
    return sorted(set(budgets))
