"""Lines of studies whose notebooks note numbers before and after training alone, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.pages import machine
from benchmarks.common.tables import Table
from experiments.runner.outcomes import MISSING
from experiments.runner.records import read_json
from experiments.runner.runs import NOTES, Run
from experiments.runner.studies import Study
from experiments.runner.tables import Results

Numbers = dict[str, dict[str, float]]  # by what was judged: a cache, or a policy


@dataclass(frozen=True)
class Ends:
    """A finished run: its numbers before and after training, and what it logged by the end."""

    key: str
    settings: str
    machine: str
    minutes: float
    before: Numbers
    after: Numbers
    logged: dict[str, float | None]
    code: str = ""
    start: str = ""

    @classmethod
    def of(cls, run: Run) -> Ends:
        """Read off the run's own files."""
        seconds = read_json(run.folder / "summary.json")["summary"]["wall_time_seconds"]
        notes, where = read_json(run.folder / NOTES), machine("cpu")
        return cls(run.key, run.settings_hash, where, seconds / 60, **notes, code=run.code, start=run.start)

    def cells(self) -> dict[str, str]:
        """All its numbers by their names."""
        judged = {"before": self.before, "after": self.after, "at the end": {"": self.logged}}
        return {
            ", ".join(filter(None, (name, what, when))): MISSING if number is None else f"{number:.3g}"
            for when, numbers in judged.items()
            for what, values in numbers.items()
            for name, number in values.items()
        }


def ends_table(results: Results, studies: Sequence[Study]) -> Table:
    """A row per line that is kept, those of earlier versions too."""
    rows = {line.key: line.cells() for line in results.archive.records.values()}
    heads = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    table = Table("", ["", *heads])
    for key, cells in rows.items():
        table.add(key, *(cells.get(name, MISSING) for name in heads))
    return table
