"""The HTML page of a run, or of several: one file, no network and no script, readable on a phone, light and dark."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.report.charts import DARK, HEIGHT, LIGHT, WIDTH, drawings
from sparse_rl_lightning.report.measures import CACHES, MEASURES, facts, greedy, results
from sparse_rl_lightning.report.panels import SECTIONS
from sparse_rl_lightning.report.plots import MOST_POINTS, Named, Plot, color, plots_of_run, plots_of_runs, short
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.text import DASH, duration, number, printable, shortened, visible

FOLDER = Path(__file__).parent
MARK = b"default-src 'none'; style-src 'sha"
"""In the head of every page: no script, and one style."""
COUNTS = (
    ("skipped_steps", "Optimizer steps skipped because their gradient was not finite"),
    ("empty_rollouts", "Rollouts in which rejection kept no token"),
    ("guard/raises", "Times TailGuard raised the budget"),
)
"""Counters in the history, whose last value covers the whole run."""
KINDS = ("rejected", "most mismatched", "lowest reward")
PLACES = re.compile(r"^trainer\.(.*\.)?(default_root_dir|dirpath|save_dir|folder)$|^trainer\.logger\..*(name|version)$")
"""Keys that only name a place where a run writes."""
MOST_CARDS = 24
LONGEST = 2200
"""Largest number of characters in a text; files may contain more than RunSummary writes."""
HINT = (
    "Numbers beside the names of lines are the last ones. Bold lines are means over neighboring rollouts, pale ones "
    "the values."
)


def _colors(colors: Sequence[str]) -> str:
    return ":root { " + " ".join(f"--c{index}: {color};" for index, color in enumerate(colors)) + " }"


STYLE = (
    f"{_colors(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_colors(DARK)} }}\n"
    f"{(FOLDER / 'page.css').read_text(encoding='utf-8')}"
)


def page(record: RunRecord) -> str:
    """The page as text, without panels for which the run has no numbers; all its text is escaped, long text is cut."""
    size = -(-len(record.history) // MOST_POINTS)
    note = f" The run is long: each point of a chart stands for {size} rollouts." if size > 1 else ""
    return render(
        title=record.title,
        course=course(record),
        warnings=warnings_of(record),
        tiles=_tiles(record),
        figures=figures(plots_of_run(record), note),
        worst=[(_why(entry), entry) for entry in sorted(record.worst, key=_order)[:MOST_CARDS]],
        samples=[(CACHES.get(name := sample.get("cache", ""), name), sample) for sample in record.samples[:MOST_CARDS]],
        results=results(record),
        settings={**record.settings, **record.versions},
        config=record.config,
    )


def render(**content: Any) -> str:
    """Fill ``page.html`` with plain values; its policy allows the one style sheet by its hash, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    template = environment().get_template("page.html")
    return template.render(style=Markup(STYLE), digest=Markup(f"sha256-{digest}"), **content)


def environment() -> Environment:
    """The template environment, which escapes all inserted text and makes its control characters visible."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, finalize=_visible,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["number"] = number
    environment.filters["shortened"] = lambda value, width=LONGEST: shortened(str(value), width)
    return environment


def _visible(value: Any) -> Any:
    return value if isinstance(value, Markup) else visible(str(value))


def course(record: RunRecord) -> str:
    """The progress of the run, and how it ended."""
    steps = f", {record.steps:,} optimizer steps" if record.steps else ""
    time = f", {duration(record.seconds)}" if record.seconds else ""
    when = f" Written {record.written.replace('T', ' ').replace('+00:00', ' UTC')}." if record.written else ""
    endings = {"finished": "", "running": " Not finished: it goes on, or was killed."}
    state = endings.get(record.state, f" Not finished: {record.state}.")
    return f"{len(record.history):,} rollouts{steps}{time}.{state}{when}"


def warnings_of(record: RunRecord) -> list[str]:
    """Problems of the run: counters first, then the warnings of callbacks with their rollouts."""
    warnings = []
    for key, words in COUNTS:
        count = next((row[key] for row in reversed(record.history) if key in row), 0.0)
        warnings += [f"{words}: {count:,.0f}."] if count > 0 else []
    for key in sorted({key for row in record.history for key in row if key.endswith("/failed")}):
        failed = sum(row.get(key, 0.0) for row in record.history)
        name = key.removeprefix("rewards/").removesuffix("/failed")
        warnings += [f"Samples that the reward function {name} could not judge: {failed:,.0f}."] if failed > 0 else []
    for warning in record.warnings:
        rollout, words = warning.get("rollout"), str(warning.get("text") or "")
        where = f"Rollout {rollout:.0f}: " if isinstance(rollout, (int, float)) and rollout >= 0 else ""
        warnings += [where + shortened(words, 800)] if words else []
    return warnings


def figures(plots: Sequence[Plot], note: str = "") -> dict[str, Any]:
    """Charts by section, or a line with the reason why there are none; ``note`` continues the hint above them."""
    ordered = sorted(plots, key=lambda plot: SECTIONS.index(plot.panel.section))  # stable
    try:
        drawn = list(zip(ordered, map(Markup, drawings(ordered)), strict=True))
    except ModuleNotFoundError as error:
        return {"hint": str(error), "sections": []}
    sections = [(name, list(group)) for name, group in groupby(drawn, key=lambda pair: pair[0].panel.section)]
    return {"hint": HINT + note if drawn else "", "sections": sections, "width": WIDTH, "height": HEIGHT}


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    tiles = []
    for cache, name in CACHES.items():
        before, after = record.before.get(cache), record.after.get(cache)
        if before is not None or after is not None:
            change = number(before) if after is None else f"{number(before)} → {number(after)}"
            tiles.append((f"greedy {record.measure}, {name}", change))
    return tiles + facts(record)


# ---------------------------------------------------------------- completions


def _order(entry: dict[str, Any]) -> tuple[int, float]:
    """The sort key: rejected completions first, then by kind; the newest first among equals."""
    places = [KINDS.index(reason) for reason in entry.get("kinds", ()) if reason in KINDS]
    return min(places, default=len(KINDS)), -entry.get("rollout", 0.0)


def _why(entry: dict[str, Any]) -> str:
    """The reason why a completion is shown, in a sentence or two."""
    kinds = entry.get("kinds", [])
    parts = [f"Rollout {short(entry.get('rollout', 0.0))}: {', '.join(kinds) or 'kept'}."]
    ratio, position = entry.get("ratio"), entry.get("token_place")
    if ratio is not None and position is not None and kinds != ["lowest reward"]:
        of = f" of {length:.0f}" if (length := entry.get("length")) else ""
        parts.append(
            f"Token {position:.0f}{of}, “{printable(entry.get('token', ''), 24)}”, is {short(ratio)} times as likely "
            "under the full cache as under the sampler."
        )
    if entry.get("rejected") and "rejected" not in kinds:
        parts.append("It was rejected.")
    if entry.get("finished") is False:
        parts.append("It was cut off at the length limit.")
    return " ".join(parts)


# ---------------------------------------------------------------- several runs


def comparison(records: Named) -> str:
    """The page of runs, each under its name, as text.

    Raises:
        ValueError: If there are fewer than two runs, or two have the same name.
    """
    names = [name for name, _ in records]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"A comparison needs at least two runs, each under a name of its own, got {names}.")
    differing, same = differing_settings(records)
    runs = [
        {"name": name, "title": record.title, "color": color(index), "course": course(record),
         "warnings": warnings_of(record)}
        for index, (name, record) in enumerate(records)
    ]  # fmt: skip
    return render(
        title=f"{len(records)} runs compared",
        runs=runs,
        numbers=numbers(records),
        unknown=", ".join(shortened(name, 60) for name, record in records if not record.config),
        differing=differing,
        same=same,
        figures=figures(plots_of_runs(records)),
    )


def numbers(records: Named) -> list[list[str]]:
    """Rows of the table of summaries, header first, without numbers that no run has."""
    rows = [["", *(shortened(name, 60) for name, _ in records)]]
    for measure in [*greedy([record for _, record in records]), *MEASURES]:
        values = [measure.find(record) for _, record in records]
        if any(value is not None for value in values):
            rows.append([measure.label, *(DASH if value is None else measure.write(value) for value in values)])
    return rows


def differing_settings(records: Named) -> tuple[list[list[str]], int]:
    """Rows of settings that differ, header first, and the number of equal ones; output paths count for neither."""
    settings = [{**record.settings, **record.versions, **record.config} for _, record in records]
    keys = [key for key in dict.fromkeys(chain.from_iterable(settings)) if not PLACES.search(key)]
    rows = [[key, *(of_run.get(key, DASH) for of_run in settings)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *(name for name, _ in records)], *differing], len(rows) - len(differing)
