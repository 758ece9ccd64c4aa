"""The report of a run: right numbers, a real picture, and a page that no completion can break or make load anything."""

from __future__ import annotations

import builtins
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl_lightning.report import RunRecord, page, picture, summary_text, vector_charts
from sparse_rl_lightning.report.charts import CHARTS, smoothed
from sparse_rl_lightning.report.text import duration, number, percent, printable, prompt_text, size, table

HOSTILE = (
    "<script>alert(1)</script>&amp;\x1b[31m\x00\ud800 \u202e\" onload='x' <img src=https://evil.example/x.png>\nend"
)
VOID = {"meta", "path", "use", "rect", "br", "img", "link", "input", "hr"}


def row(index: int, **others: float) -> dict[str, float]:
    return {
        "rollout": float(index),
        "step": float(2 * index),
        "reward": 0.25 + 0.01 * index,
        "completions/mean_length": 20.0,
        "completions/max_length": 30.0,
        "completions/repetition_rate": 0.05,
        "rejection_rate": 0.1 if index % 2 else 0.0,
        "token_mask_rate": 0.1,
        "kv/saving_final": 0.4,
        "kv/saving_integral": 0.2,
        "kv/peak_bytes": 1024.0 * 1024 * (1 + index % 2),
        "kv/full_peak_bytes": 8.0 * 1024 * 1024,
        "mismatch/kl_k3": 0.02,
        "mismatch/ratio_p05": 0.7,
        "sampling/importance_sampling_ratio/min": 1e-4,
        "time/tokens_per_second": 1500.0,
        **others,
    }


def record(**fields: Any) -> RunRecord:
    options: dict[str, Any] = {
        "history": [row(i) for i in range(10)],
        "before": {"dense": 0.25, "sparse": 0.2},
        "after": {"dense": 0.5, "sparse": 0.45},
        "num_problems": 64,
        "measure": "accuracy",
        "seconds": 75.0,
        "steps": 20,
        "settings": {"compressor": "SnapKV(budget=24)"},
        "samples": [{"cache": "sparse", "prompt": "1+1=", "completion": "2", "reward": 1.0, "answer": "2"}],
        "title": "A run",
    }
    return RunRecord(**{**options, **fields})


class Parser(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# ---------------------------------------------------------------- numbers


def test_summary_means_and_peaks() -> None:
    got = record().summary()
    assert got["rejection_rate"] == pytest.approx(0.05)
    assert got["kv_peak_bytes"] == 2 * 1024 * 1024
    assert got["rollouts"] == 10
    assert (got["before"], got["after"]) == ({"dense": 0.25, "sparse": 0.2}, {"dense": 0.5, "sparse": 0.45})
    assert got["mismatch_kl_k3"] == pytest.approx(0.02)
    assert record(history=[]).summary()["mismatch_kl_k3"] is None


def test_numbers_that_are_not_finite_count_nowhere_and_become_null() -> None:
    run = record(history=[row(0, reward=math.nan), row(1, reward=3.0), row(2, reward=math.inf)])
    assert run.mean("reward") == 3.0
    text = json.dumps(run.as_json(), allow_nan=False)
    assert [r["reward"] for r in json.loads(text)["history"]] == [None, 3.0, None]


def test_text_has_the_results_and_leaves_out_what_was_not_measured() -> None:
    text = summary_text(record())
    assert "full cache                              0.250  0.500" in text
    assert "compressed cache                        0.200  0.450" in text
    assert re.search(r"KV tokens saved at the end of a sequence +40\.0 %", text)
    assert re.search(r"2\.0 MiB of a full cache's 8\.0 MiB +25\.0 %", text)
    assert re.search(r"20 optimiser steps, 10 rollouts +1 min 15 s", text)
    bare = summary_text(record(history=[{"rollout": 0.0}], before={}, after={}, samples=[]))
    assert "mismatch" not in bare
    assert "held-out" not in bare


def test_hostile_text_cannot_take_over_the_terminal() -> None:
    sample = {"cache": "dense", "prompt": HOSTILE, "completion": HOSTILE * 9, "reward": math.nan}
    text = summary_text(record(samples=[sample]))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(map(len, text.splitlines())) < 130
    text.encode("utf-8")


def test_small_formats() -> None:
    assert printable("a\tb\x1b[0m\n\ud83d") == "a\\tb\\x1b[0m\\n\\ud83d"
    assert printable("0123456789", 5) == "01…89"
    assert printable("01234", 5) == "01234"
    assert [size(n) for n in (None, 12, 2048, 3.5 * 1024**2, 5000 * 1024**3)] == [
        "–", "12 B", "2.0 KiB", "3.5 MiB", "5000.0 GiB"
    ]  # fmt: skip
    assert [duration(s) for s in (9.94, 60, 3601)] == ["9.9 s", "1 min 00 s", "1 h 00 min"]
    assert (number(math.nan), percent(None), percent(0.123)) == ("–", "–", "12.3 %")
    assert table([["a", "bb"], ["ccc", "d"]], "lr") == "a    bb\n---  --\nccc   d"
    assert prompt_text([{"role": "user", "content": "hi"}, {"role": "x", "content": "y"}]) == "user: hi\nx: y"


def test_smoothing_is_a_mean_of_known_neighbours() -> None:
    assert smoothed([1.0, math.nan, 3.0, 8.0], 1) == [1.0, 2.0, 5.5, 5.5]
    assert math.isnan(smoothed([math.nan], 2)[0])


# ---------------------------------------------------------------- picture and page


def test_picture_is_a_png_of_every_chart_with_data() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    data = picture(record())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels wide
    assert dict(matplotlib.rcParams) == before
    assert [chart.title for chart, _ in vector_charts(record())] == [chart.title for chart in CHARTS]


@pytest.mark.parametrize(
    "run",
    [
        RunRecord(),
        RunRecord(history=[{"rollout": 0.0, "reward": math.nan}], before={"dense": 0.1}),
        record(history=[{"rollout": 0.0, "reward": 1.0}], after={}, title="$\\frac{ $ <b>"),
        record(history=[{"rollout": float(i), "kv/saving_final": 0.0, "kv/peak_bytes": 0.0} for i in range(3)]),
        record(history=[{"rollout": float(i), "reward": -1.0, "mismatch/ratio_p05": 0.0} for i in range(30)]),
    ],
    ids=["empty", "nan", "one", "few", "extreme"],
)
def test_unusual_runs_are_drawn_too(run: RunRecord) -> None:
    pytest.importorskip("matplotlib")
    assert picture(run).startswith(b"\x89PNG")
    if len(run.history) < 2:
        Parser(page(run))


def test_reward_chart_shows_the_rewards() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    chart = next(chart for chart in CHARTS if chart.title == "Rejected")
    ax = Figure().add_subplot()
    chart.draw(ax, record(history=[row(i) for i in range(3)]))
    sequences, tokens = ax.get_lines()
    assert list(sequences.get_ydata()) == [0.0, 10.0, 0.0]  # percent
    assert list(tokens.get_ydata()) == [10.0] * 3
    assert ax.get_ylim()[0] == 0


def test_page_is_one_valid_document_with_the_numbers() -> None:
    parser = Parser(page(record()))
    text = " ".join(parser.text)
    for expected in ("0.250 → 0.500", "0.200 → 0.450", "40.0 %", "SnapKV(budget=24)", "1+1=", "1 min 15 s", "A run"):
        assert expected in text
    assert parser.tags.count("figure") == parser.tags.count("svg") == len(CHARTS)
    ids = [value for name, value in parser.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    references = [v for n, v in parser.attributes if n.endswith("href") and v]
    references += re.findall(r"url\(([^)]*)\)", page(record()))
    assert references
    assert {reference.removeprefix("#") for reference in references} <= set(ids)


def test_page_loads_nothing_and_runs_nothing_whatever_the_completions_are() -> None:
    samples = [{"cache": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0, "answer": HOSTILE}]
    html = page(record(samples=samples, title=HOSTILE, settings={HOSTILE: HOSTILE}))
    html.encode("utf-8")
    assert not [c for c in html if not c.isprintable() and c != "\n"]
    parser = Parser(html)
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form"} & set(parser.tags)
    assert not [name for name, _ in parser.attributes if name.startswith("on")]
    assert not [value for name, value in parser.attributes if value and re.search(r"^\s*(https?:|//|data:)", value)]
    assert "".join(parser.text).count("<script>alert(1)</script>&amp;\\x1b[31m\\x00\\ud800") >= 5  # shown as it is
    assert "default-src 'none'" in html
    assert "https://" not in re.sub(r"https://evil\.example", "", html)
    assert "http://" not in html


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(codec=None), max_size=30))
def test_any_text_survives_a_page_line_by_line(text: str) -> None:
    from sparse_rl_lightning.report.page import _text

    shown = Parser(f"<p>{_text(text)}</p>").text
    assert "".join(shown) == "\n".join(printable(line) for line in text.split("\n"))


def test_without_matplotlib_the_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    html = page(record())
    assert "pip install &#x27;sparse-rl-lightning[report]&#x27;" in html
    assert "0.250 → 0.500" in html
    with pytest.raises(ModuleNotFoundError, match=r"sparse-rl-lightning\[report\]"):
        picture(record())
