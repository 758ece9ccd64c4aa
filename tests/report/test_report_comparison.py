"""Several runs on one page: numbers side by side, settings that differ, curves together."""

from __future__ import annotations

import pytest
from report_runs import Parser, record, row, text_of

from sparse_rl_lightning.report import RunRecord, comparison
from sparse_rl_lightning.report.page import differing_settings, numbers
from sparse_rl_lightning.report.plots import plots_of_runs


def two_runs() -> list[tuple[str, RunRecord]]:
    first = record(config={"a": "1", "b": "2", "trainer.default_root_dir": "x"})
    history = [
        row(i, rejection_rate=0.2, **{"kv/peak_bytes": 2.0**22, "time/tokens_per_second": 750.0}) for i in range(4)
    ]
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
