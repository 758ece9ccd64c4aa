"""The report's pictures: charts of matplotlib, runs of unusual numbers, and colors that every eye tells apart."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Any

import pytest
from report_runs import Parser, record, row

from sparse_rl_lightning.report import RunRecord, page, picture
from sparse_rl_lightning.report.charts import DARK, LIGHT, draw
from sparse_rl_lightning.report.page import STYLE
from sparse_rl_lightning.report.plots import plots_of_run


def test_picture_is_a_png_of_every_chart_with_data() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    data = picture(record())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels wide
    assert dict(matplotlib.rcParams) == before
    assert pictured(record()) == [
        "Greedy accuracy", "Reward", "Completion length", "Repeated and cut off", "Rejected", "Mismatch KL",
        "Ratio dense / sparse", "KV memory", "KV tokens saved",
    ]  # fmt: skip
    assert pictured(RunRecord(history=[{"rollout": 0.0, "reward": 1.0}])) == ["Reward"]


def pictured(run: RunRecord) -> list[str]:
    return [plot.panel.title for plot in plots_of_run(run) if plot.panel.pictured]


def drawn(run: RunRecord, title: str) -> Any:
    """The axes of one chart."""
    ax = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    draw(ax, next(plot for plot in plots_of_run(run) if plot.panel.title == title))
    return ax


UNUSUAL = {
    "empty": RunRecord(),
    "nan": RunRecord(history=[{"rollout": 0.0, "reward": math.nan}], before={"dense": 0.1}),
    "one": record(history=[{"rollout": 0.0, "reward": 1.0, "time/rollout": 1.0}], after={}, title="$\\frac{ $ <b>"),
    "few": record(history=[{"rollout": float(i), "kv/saving_final": 0.0, "kv/peak_bytes": 0.0} for i in range(3)]),
    "extreme": record(history=[{"rollout": float(i), "reward": -1.0, "mismatch/ratio_p05": 0.0} for i in range(30)]),
    "huge": record(history=[{"rollout": float(i), "reward": 1e30 * (-1) ** i, "time/rollout": 1e30} for i in range(9)]),
    "tiny": record(history=[{"rollout": float(i), "reward": 1e-300 * i} for i in range(9)]),
}


@pytest.mark.parametrize("run", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_runs_are_shown_too(run: RunRecord) -> None:
    parser = Parser(page(run))
    assert parser.tags.count("svg") == parser.tags.count("figure") == len(plots_of_run(run))
    numbers = [value for name, value in parser.attributes if name in ("d", "cx", "cy", "x", "y") and value]
    assert not [value for value in numbers if "nan" in value or "inf" in value]
    pytest.importorskip("matplotlib")
    assert picture(run).startswith(b"\x89PNG")


def test_chart_shows_the_numbers() -> None:
    ax = drawn(record(history=[row(i) for i in range(3)]), "Rejected")
    sequences, tokens = ax.get_lines()
    assert list(sequences.get_ydata()) == [0.0, 10.0, 0.0]  # percent
    assert list(tokens.get_ydata()) == [10.0] * 3
    assert ax.get_ylim()[0] == 0


def test_chart_of_a_long_run_has_few_points() -> None:
    ax = drawn(record(history=[row(i) for i in range(20_000)]), "Reward")
    assert {len(line.get_xdata()) for line in ax.get_lines()} == {400}


def test_tail_keeps_its_values_on_whole_decades() -> None:
    values = {"mismatch/ratio_p05": 0.7, "sampling/importance_sampling_ratio/min": 3e-4}
    ax = drawn(record(history=[row(i, **values) for i in range(9)] + [row(9, **{"mismatch/ratio_p05": 0.0})]),
               "Ratio dense / sparse")  # fmt: skip
    assert (ax.get_yscale(), ax.get_ylim()) == ("log", (1e-4, 1.0))
    percentile, smallest = ax.get_lines()
    assert list(percentile.get_ydata()) == [0.7] * 9 + [1e-4], "what has no logarithm lies on the axis"
    assert list(smallest.get_ydata())[:9] == [3e-4] * 9
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "0.1", "0.01", "0.001", "0.0001"]


# Colors as eyes without one of the three kinds of cones see them (Machado and others 2009), of linear RGB.
EYES = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(color: str) -> list[float]:
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(color: list[float]) -> tuple[float, float, float]:
    """CIELAB of linear RGB."""
    r, g, b = (min(1.0, max(0.0, c)) for c in color)
    xyz = (
        0.4339 * r + 0.3762 * g + 0.1899 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0177 * r + 0.1095 * g + 0.8729 * b,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("colors", "place"), [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_lines_stand_out_and_are_told_apart_by_every_eye(colors: tuple[str, ...], place: int) -> None:
    card = re.findall(r"--card: (#\w+);", STYLE)[place]
    card = card if len(card) == 7 else "#" + "".join(2 * digit for digit in card[1:])
    luminances = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (card, *colors))]
    for luminance in luminances[1:]:
        low, high = sorted((luminances[0], luminance))
        assert (high + 0.05) / (low + 0.05) >= 3, "WCAG 2.1, 1.4.11"
    for matrix in EYES.values():
        seen = [
            lab([sum(m * c for m, c in zip(line, linear(color), strict=True)) for line in matrix]) for color in colors
        ]
        assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 20
