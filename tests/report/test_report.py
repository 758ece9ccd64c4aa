"""The report of a run: right numbers, a real picture, and a page that no completion can break or make load anything."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import math
import os
import re
import select
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import HOSTILE, Parser, record, row, text_of

from sparse_rl_lightning.report import RunRecord, comparison, page, picture, summary_text
from sparse_rl_lightning.report.charts import WIDTH, draw, drawings, smoothed
from sparse_rl_lightning.report.measures import MEASURES
from sparse_rl_lightning.report.page import differing_settings, environment, numbers
from sparse_rl_lightning.report.plots import Plot, plots_of_run, plots_of_runs
from sparse_rl_lightning.report.record import ROUNDING
from sparse_rl_lightning.text import duration, number, percent, printable, prompt_text, shortened, size, table


def test_summary_means_and_peaks() -> None:
    got = record().summary()
    assert got["rejection_rate"] == pytest.approx(0.05)
    assert got["kv_peak_bytes"] == 2 * 1024 * 1024
    assert got["rollouts"] == 10
    assert (got["before"], got["after"]) == ({"dense": 0.25, "sparse": 0.2}, {"dense": 0.5, "sparse": 0.45})
    assert got["mismatch_kl_k3"] == pytest.approx(0.02)
    assert record(history=[]).summary()["mismatch_kl_k3"] is None


def test_one_rollout_does_not_decide_what_is_typical() -> None:
    """A KL of 41 among 180 rollouts made 0.26 of a typical 0.02, where below 0.05 is healthy; a pause is as far off."""
    stages = ("rollout", "rescoring", "update", "tokens_per_second")
    keys = ("mismatch/kl_k3", ROUNDING, *(f"time/{stage}" for stage in stages))
    run = record(history=[row(i, **dict.fromkeys(keys, 41.0 if i == 3 else 0.02)) for i in range(9)])
    labels = {m.label: m for m in MEASURES if "median" in m.label}
    assert len(labels) == 7
    found = {label: measure.find(run) for label, measure in labels.items() if not label.endswith("rewards")}
    assert set(found.values()) == {0.02}
    assert (run.summary()["mismatch_kl_k3"], run.summary()["tokens_per_second"]) == (0.02, 0.02)
    assert record(history=[]).median("mismatch/kl_k3") is None


def test_where_the_learner_replays_the_mismatch_is_the_part_that_compression_has() -> None:
    """A KL of 1e-13 was shown as the distance from the full cache, whose real one was 0.05."""
    split = {"mismatch/kl_k3": 1e-13, "mismatch_split/compression/kl_k3": 0.05, ROUNDING: 2e-13}
    own = [row(0, replayed=1.0, **split), row(1, replayed=1.0, **{"mismatch/kl_k3": 3e-13})]
    run = record(history=own)
    assert run.points("mismatch/kl_k3") == [(0.0, 0.05)]
    assert run.points("sampling/importance_sampling_ratio/min") == run.points("mismatch/ratio_p05") == []
    assert run.summary()["rounding_kl_k3"] == 2e-13
    assert re.search(r"rounding KL \(k3\), median, nats per token +2\.0e-13", summary_text(run))
    changed = record(history=[row(0, **{**split, "mismatch/kl_k3": 0.06}), *own[1:]])  # resumed under replay
    assert changed.points("mismatch/kl_k3") == [(0.0, 0.06)]
    assert changed.points(ROUNDING) == [(0.0, 2e-13), (1.0, 3e-13)]
    assert len(changed.points("sampling/importance_sampling_ratio/min")) == 1


def test_what_is_said_reaches_a_log_at_once() -> None:
    """A run whose output goes to a file was silent for its first ten minutes."""
    code = "import sys; from sparse_rl_lightning.text import say; say('step 1'); sys.stdin.read()"
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=usual) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "nothing came while the process lives"
        assert process.stdout.readline() == b"step 1\n"
        process.communicate(b"")


def test_numbers_that_are_not_finite_count_nowhere_and_become_null() -> None:
    run = record(history=[row(0, reward=math.nan), row(1, reward=3.0), row(2, reward=math.inf)])
    assert run.mean("reward") == 3.0
    text = json.dumps(run.as_json(), allow_nan=False)
    assert [r["reward"] for r in json.loads(text)["history"]] == [None, 3.0, None]


def test_text_has_the_results_and_leaves_out_what_was_not_measured() -> None:
    text = summary_text(record())
    assert re.search(r"held-out problems, known to ±\d\.\d\d +before +after", text)
    assert re.search(r"full cache +0\.250  0\.500", text)
    assert re.search(r"compressed cache +0\.200  0\.450", text)
    assert re.search(r"KV tokens saved at the end of a sequence +40\.0 %", text)
    assert re.search(r"2\.0 MiB of a full cache's 8\.0 MiB +25\.0 %", text)
    assert re.search(r"20 optimizer steps, 10 rollouts +1 min 15 s", text)
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
    assert shortened("abcdefgh", 8) == "abcdefgh"
    assert shortened("abcdefghij", 4) == "ab … [6 characters left out] … ij"
    assert prompt_text([{"role": "user", "content": "hi"}, {"role": "x", "content": "y"}]) == "user: hi\nx: y"


def test_smoothing_is_a_mean_of_known_neighbors() -> None:
    assert smoothed([1.0, math.nan, 3.0, 8.0], 1) == [1.0, 2.0, 5.5, 5.5]
    assert math.isnan(smoothed([math.nan], 2)[0])


def test_page_is_one_valid_document_with_the_numbers() -> None:
    parser = Parser(page(record()))
    text = " ".join(parser.text)
    for expected in (
        "0.250 → 0.500", "0.200 → 0.450", "40.0 %", "SnapKV(budget=24)", "1+1=", "1 min 15 s", "A run", "torch", "2.13",
        "model.sampling.num_generations", "10 rollouts, 20 optimizer steps, 1 min 15 s.",
    ):  # fmt: skip
        assert expected in text
    assert parser.tags.count("figure") == parser.tags.count("svg") == len(plots_of_run(record())) == 17
    assert len(parser.labels) == 17
    assert all(len(label) > 40 for label in parser.labels), "every chart is described in words"
    assert parser.tags.count("caption") == parser.tags.count("table") == 3
    assert len(page(record())) < 120_000


def test_panels_without_data_are_left_out() -> None:
    bare = RunRecord(history=[{"rollout": float(i), "reward": 0.5, "mismatch/kl_k3": 0.1} for i in range(5)])
    assert [plot.panel.title for plot in plots_of_run(bare)] == ["Reward", "Mismatch KL"]
    html = page(bare)
    assert "KV memory" not in html
    assert "Worst completions" not in html
    assert "Settings" not in html


def chart(run: RunRecord, title: str) -> Plot:
    return next(plot for plot in plots_of_run(run) if plot.panel.title == title)


def test_charts_hold_the_numbers_they_show() -> None:
    (kl,) = chart(record(), "Mismatch KL").series
    assert kl.points == [(float(i), 0.02) for i in range(10)]
    memory = chart(record(), "KV memory")
    assert memory.panel.unit == "MiB"
    assert [y for _, y in memory.series[0].points] == [1, 2] * 5
    assert [y for _, y in memory.series[1].points] == [8] * 10
    label = next(label for label in Parser(page(record())).labels if label.startswith("Reward in"))
    assert label == "Reward in mean reward up to rollout 9. reward: from 0.25 to 0.34, between 0.25 and 0.34."


def test_greedy_accuracy_goes_through_the_validations() -> None:
    plot, *_ = plots_of_run(record(validation=[{"rollout": 4.0, "dense": 0.3}]))
    assert [s.points for s in plot.series] == [[(0.0, 0.25), (4.0, 0.3), (10.0, 0.5)], [(0.0, 0.2), (10.0, 0.45)]]


def test_validations_are_shown_without_an_evaluation() -> None:
    bare = record(before={}, after={}, measure="reward", num_problems=0, validation=[{"rollout": 4.0, "dense": 0.3}])
    plot, *_ = plots_of_run(bare)
    assert (plot.panel.title, plot.panel.unit) == ("Validation accuracy", "mean accuracy")
    assert [s.points for s in plot.series] == [[(4.0, 0.3)]]
    plot, *_ = plots_of_run(record(measure="reward", validation=[{"rollout": 4.0, "dense": 0.3}]))
    assert plot.series[0].points == [(0.0, 0.25), (10.0, 0.5)], "shares and other rewards share no line"


def test_time_is_stacked_without_the_first_rollout_and_incomplete_ones() -> None:
    history = [row(i, **{"time/rollout": 1.0 + i, "time/rescoring": 2.0}) for i in range(5)]
    del history[4]["time/update"]
    plot = chart(record(history=history), "Time per rollout")
    assert [(s.label, s.points) for s in plot.series] == [
        ("rollout", [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]),
        ("rescoring", [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]),
        ("reward", [(1.0, 0.5), (2.0, 0.5), (3.0, 0.5)]),
        ("update", [(1.0, 1.5), (2.0, 1.5), (3.0, 1.5)]),
    ]


def test_bands_stand_on_each_other() -> None:
    """2 + 1 + 0.5 + 1.5 = 5 seconds."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.add_subplot()
    draw(ax, chart(record(), "Time per rollout"))
    edges = [sorted(set(band.get_paths()[0].vertices[:, 1])) for band in ax.collections]
    assert edges == [[0, 2], [2, 3], [3, 3.5], [3.5, 5]]
    assert ax.get_ylim() == (0, 5)


def test_svg_of_a_chart_is_only_drawn_elements() -> None:
    """The same numbers make the same text: no identifiers, no date, no references, no styles."""
    pytest.importorskip("matplotlib")
    plots = plots_of_run(record())
    drawn = drawings(plots)
    assert drawn == drawings(plots)
    for svg in drawn:
        assert set(Parser(f"<div>{svg}</div>").tags) <= {"div", "g", "path", "text", "circle"}
        assert not re.search(r' (id|style|clip-path|[\w:]*href)="|url\(|#', svg), "colors are the style sheet's"
        assert max(float(x) for x in re.findall(r"[ML] ?([\d.]+)", svg)) <= WIDTH
    assert drawn[0].count("<circle") == 4, "accuracy before and after, with two caches"


def test_long_runs_stay_small_and_keep_their_worst_ratio() -> None:
    history = [row(i) for i in range(20_000)]
    history[12_345]["sampling/importance_sampling_ratio/min"] = 1e-9
    run = record(history=history)
    ratio = chart(run, "Ratio dense / sparse")
    assert min(y for _, y in ratio.series[1].points) == 1e-9
    reward = chart(run, "Reward")
    assert len(reward.series[0].points) == 400
    assert reward.series[0].points[0] == (25.0, pytest.approx(0.25 + 0.01 * 24.5))  # the mean of 50 rollouts
    html = page(run)
    assert len(html) < 1_000_000
    assert "each point of a chart stands for 50 rollouts" in html


def test_warnings_are_shown_with_their_counts() -> None:
    history = [row(i, **{"skipped_steps": min(i, 2.0), "empty_rollouts": 0.0}) for i in range(5)]
    history[3]["rewards/right/failed"] = 4.0
    history[4]["rewards/right/failed"] = 1.0
    told = [{"rollout": 2, "text": "TailGuard: Responses have shrunk."}, {"rollout": -1, "text": "a file"}, {"text": 3}]
    text = " ".join(Parser(page(record(history=history, warnings=told))).text)
    assert "Optimizer steps skipped because their gradient was not finite: 2." in text
    assert "reward function right could not judge: 5." in text
    assert "Rollout 2: TailGuard: Responses have shrunk." in text
    assert "rejection kept no token" not in text
    assert "Warnings" not in page(record())


def test_worst_completions_say_why() -> None:
    worst = [
        {"rollout": 3, "kinds": ["lowest reward"], "prompt": "p1", "completion": "c1", "reward": -1.0, "ratio": 0.5},
        {"rollout": 7, "kinds": ["most mismatched", "rejected"], "prompt": "p2", "completion": "c2", "reward": 1.0,
         "ratio": 1.2e-6, "token": "44", "token_place": 17, "length": 23, "rejected": True, "answer": "12"},
        {"rollout": 9, "kinds": ["rejected"], "prompt": "p3", "completion": "c3", "reward": 0.0, "ratio": 1e-5},
    ]  # fmt: skip
    text = " ".join("".join(Parser(page(record(worst=worst))).text).split())
    assert "Rollout 7: most mismatched, rejected. Token 17 of 23, “44”, is 1.2e-6 times as likely under" in text
    assert "Rollout 3: lowest reward. Reward -1.00" in text
    assert text.index("Rollout 9") < text.index("Rollout 7") < text.index("Rollout 3"), "rejected, then newest, first"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("running", "goes on, or was killed"),
        ("stopped by KeyError: <b>", "stopped by KeyError: <b>"),
        ("preempted, to be resumed", "Not finished: preempted, to be resumed."),
    ],
)
def test_page_says_how_the_run_ended(state: str, shown: str) -> None:
    assert shown in " ".join(Parser(page(record(state=state))).text)
    assert "Not finished" not in page(record(state="finished"))


def hostile_page() -> str:
    fields = {"prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "reward": 0.0}
    return page(
        record(
            samples=[{"cache": HOSTILE, **fields}], title=HOSTILE, settings={HOSTILE: HOSTILE}, measure=HOSTILE,
            worst=[{**fields, "kinds": [HOSTILE], "token": HOSTILE, "ratio": 0.1, "token_place": 1, "rollout": 1}],
            warnings=[{"rollout": 1, "text": HOSTILE}], config={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE},
            state=HOSTILE, written=HOSTILE,
            history=[row(i, **{f"rewards/{HOSTILE}/mean": 1.0, "rewards/b/mean": 0.0}) for i in range(9)],
        )
    )  # fmt: skip


def test_page_loads_nothing_and_runs_nothing_whatever_the_completions_are() -> None:
    html = hostile_page()
    html.encode("utf-8")
    assert not [c for c in html if not c.isprintable() and c != "\n"]
    parser = Parser(html)
    assert not {"img", "link", "iframe", "object", "embed", "base", "form"} & set(parser.tags)
    assert (parser.tags.count("script"), parser.tags.count("style")) == (0, 1)
    assert not [name for name, _ in parser.attributes if name.startswith("on") or name == "style"]
    links = {"href", "src", "action", "srcset", "data", "xlink:href"}
    assert not [name for name, _ in parser.attributes if name in links]
    assert "".join(parser.text).count("<script>alert(1)</script>&amp;\\x1b[31m\\x00\\ud800") >= 10  # shown as it is
    assert "https://" not in re.sub(r"https://evil\.example", "", html)
    assert "http://" not in html


def test_policy_allows_our_style_only() -> None:
    html = hostile_page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "script" not in policy
    content = html.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy


def test_megabytes_are_cut() -> None:
    long = {"prompt": "p" * 3_000_000, "completion": "<" * 3_000_000, "answer": "a" * 10**6, "reward": 0.0}
    worst = [{**long, "kinds": ["rejected"], "rollout": 0}] * 200
    html = page(record(samples=[{"cache": "dense", **long}], worst=worst))
    assert len(html) < 800_000
    assert "2,997,800 characters left out" in html


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(codec=None), max_size=30))
def test_any_text_survives_a_page_line_by_line(text: str) -> None:
    shown = Parser(environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text)).text
    assert "".join(shown) == "\n".join(printable(line) for line in text.split("\n"))


def test_without_matplotlib_the_page_has_its_tables_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    html = page(record())
    assert "<svg" not in html
    assert "The charts need matplotlib: pip install 'sparse-rl-lightning[report]'." in " ".join(Parser(html).text)
    assert html.count("<table") == 3
    with pytest.raises(ModuleNotFoundError, match=r"sparse-rl-lightning\[report\]"):
        picture(record())


def two_runs() -> list[tuple[str, RunRecord]]:
    first = record(config={"a": "1", "b": "2", "trainer.default_root_dir": "x"})
    slower = {"kv/peak_bytes": 2.0**22, "time/tokens_per_second": 750.0, "rejection_rate": 0.2}
    history = [row(i, **slower) for i in range(4)]
    second = record(
        history=history, after={"dense": 0.375}, seconds=150.0, title="Other",
        config={"a": "1", "b": "3", "c": "new", "trainer.default_root_dir": "y"},
    )  # fmt: skip
    return [("first", first), ("second", second)]


def test_numbers_side_by_side() -> None:
    rows = {cells[0]: cells[1:] for cells in numbers(two_runs())}
    assert rows[""] == ["first", "second"]
    assert rows["greedy accuracy, full cache, after"] == ["0.500", "0.375"]
    assert rows["greedy accuracy, full cache, before"] == ["0.250", "0.250"]
    assert rows["greedy accuracy, compressed cache, after"] == ["0.450", "–"]
    assert rows["rejected sequences"] == ["5.0 %", "20.0 %"]
    assert rows["peak KV memory"] == ["2.0 MiB", "4.0 MiB"]
    assert rows["rollout speed, median, tokens per second"] == ["1,500", "750"]
    assert rows["time of training"] == ["1 min 15 s", "2 min 30 s"]
    assert rows["reward, last tenth of the rollouts"] == ["0.340", "0.280"]
    assert rows["rollouts"] == ["10", "4"]


def test_settings_that_differ() -> None:
    rows, same = differing_settings(two_runs())
    assert rows == [["setting", "first", "second"], ["b", "2", "3"], ["c", "–", "new"]]
    assert same == 3  # a, compressor and torch; where a run writes is neither


def test_only_places_that_a_run_writes_to_are_no_settings() -> None:
    places = ["default_root_dir", "callbacks.RunSummary.folder", "callbacks.A.dirpath", "logger.CSVLogger.version"]
    sources = ["data.folder", "data.version", "model.policy.name"]
    keys = [*(f"trainer.{key}" for key in places), *sources]
    runs = [(name, record(config=dict.fromkeys(keys, name))) for name in ("first", "second")]
    rows, _ = differing_settings(runs)
    assert [key for key, *_ in rows[1:]] == sources


def test_curves_of_unequal_length_share_their_charts() -> None:
    html = comparison(two_runs())
    parser = Parser(html)
    plots = {plot.panel.title: plot for plot in plots_of_runs(two_runs())}
    assert parser.tags.count("svg") == len(plots)
    assert [len(s.points) for s in plots["Reward"].series] == [10, 4]
    assert [y for _, y in plots["Time per rollout"].series[0].points] == [5] * 9  # the sum of the stages
    assert "2 settings differ, 3 are the same" in text_of(html)


def test_five_runs_keep_their_colors() -> None:
    runs = [(f"run {n}", record(history=[row(i, reward=n + 0.1 * i) for i in range(5 + 700 * n)])) for n in range(5)]
    runs[1] = ("run 1", record(history=[{"rollout": 0.0, "reward": 1.0}]))
    plots = {plot.panel.title: plot for plot in plots_of_runs(runs)}
    assert [s.color for s in plots["Reward"].series] == ["c0", "c1", "c2", "c3", "c4"]
    assert [s.color for s in plots["Mismatch KL"].series] == ["c0", "c2", "c3", "c4"]
    html = comparison(runs)
    Parser(html)
    assert len(html) < 1_000_000


def test_a_run_that_replays_beside_one_that_does_not() -> None:
    replayed = record(history=[row(i, replayed=1.0, **{"mismatch_split/compression/kl_k3": 0.05}) for i in range(3)])
    assert "mismatch is that of the rollouts that MismatchSplit measured" in text_of(comparison(two_runs()))
    rows = {label: cells for label, *cells in numbers([("a", replayed), ("b", record())])}
    assert rows["mismatch KL (k3), median, nats per token"] == ["0.0500", "0.0200"]


def test_a_comparison_needs_two_names() -> None:
    for runs in ([("a", record())], [("a", record()), ("a", record())]):
        with pytest.raises(ValueError, match="at least two runs, each under a name of its own"):
            comparison(runs)
