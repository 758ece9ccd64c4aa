"""The papers' claims in miniature: every run is planned once, and the page says what the runs came to."""

from __future__ import annotations

import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from benchmarks.arms import curves
from benchmarks.stability import __main__ as command
from benchmarks.stability import outcomes, studies
from benchmarks.stability.results import Results, tables


def test_every_run_is_planned_once(tmp_path: Path) -> None:
    runs = studies.planned([0, 1, 2], studies.Scale(), tmp_path)
    assert len({run.folder for run in runs}) == len(runs) == 3 * (7 * 2 + 3 * 2 + 3)  # two more budgets, and R-KV
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    tasks = {run.settings.options["data.init_args.tasks"] for run in runs}
    assert tasks == {"sum", "reduction"}
    assert {run.settings.folder.name for run in runs} == {"sum-snapkv", "reduction-snapkv", "sum-r-kv"}
    seeds = {(run.seed, run.settings.options["data.init_args.seed"]) for run in runs}
    assert seeds == {(0, "1"), (1, "2"), (2, "3")}  # other prompts, other problems


def found(run: Any) -> Any:
    """A finished run in round numbers: naive falls, all others rise, the more the larger the seed."""
    falls = run.arm.label == "naive"
    ends = [0.2, 0.3, 0.04] if falls else [0.2, 0.3, 0.4 + 0.1 * (run.seed > 0)]
    course = {
        "evaluations": [
            {"rollouts": 10 * i, "dense": value, **{str(budget): value / 2 for budget in run.budgets}}
            for i, value in enumerate(ends)
        ],
        "splits": [{"rollouts": i, curves.COMPRESSION: k3} for i, k3 in enumerate([9.0] * 9 + [0.5] * 3)],
        "unused": [0.0], "clipped": [0.0, 0.02], "seconds": 30.0,
    }  # fmt: skip
    history = [{"rollout": i, "reward": 1.0, "rejection_rate": 0.1} for i in range(40)]
    for version in (2, 10):  # the run was interrupted: its logger has two files, and the second repeats some steps
        place = run.folder / "runs" / "any" / f"version_{version}"
        place.mkdir(parents=True)
        steps = range(12) if version == 2 else range(8, 16)
        lines = "".join(f"{step},{version * 0.09 if step % 2 else ''}\n" for step in steps)
        (place / "metrics.csv").write_text(f"step,acceptance/p05\n{lines}", encoding="utf-8")
    summary = {"wall_time_seconds": 150.0, "kv_saving_final": 0.25}
    return curves.Found(run, course, {"history": history, "summary": summary})


def cells(text: str) -> dict[str, list[str]]:
    """Rows of a table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


def test_page_says_what_was_found(tmp_path: Path) -> None:
    runs = studies.planned([0, 1, 2], studies.Scale(), tmp_path)
    results = Results([found(run) for run in runs if run.arm.label != "rejection only"])
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "results.md").write_text("before\n", encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- written by benchmarks.stability: overview -->\nold\n<!-- until here -->\nrest", "utf-8")
    command.save(results, docs, "note")
    assert cells(readme.read_text(encoding="utf-8"))["naive"][:2] == ["0.04 ± 0.00", "0.02 ± 0.00"]
    assert "old" not in readme.read_text(encoding="utf-8")
    page = (docs / "results.md").read_text(encoding="utf-8")
    assert page.startswith("before\n")
    blocks = tables(results)
    assert all(text in page for text in blocks.values())

    main = cells(blocks["main, sum"])
    # 0.4, 0.5 and 0.5 at the end; half of it compressed; t of three seeds is 4.303
    width = 4.303 * statistics.stdev([0.4, 0.5, 0.5]) / 3**0.5
    assert main["replay"] == [
        f"0.47 ± {width:.2f}", f"0.23 ± {width / 2:.2f}", "25 ± 0 %", "10.0 ± 0.0 %", "0.01", "0.5", "0.90 ± 0.00",
        "0 of 3", "2.0", "100%",
    ]  # fmt: skip
    assert main["naive"][0] == "0.04 ± 0.00"
    assert main["naive"][7] == "3 of 3"
    assert main["naive"][-1] == "9%"
    assert main["dense"][5:7] == ["0", "1.00 ± 0.00"]  # it evicts nothing
    assert main["before training"][:2] == ["0.20 ± 0.00", "0.10 ± 0.00"]
    assert "rejection only" not in main  # was not run

    assert cells(blocks["corrections"])["Sparse-RL (paper)"][0].startswith("+42.7")  # 40, 50 and 50, less 4
    assert cells(blocks["corrections"])["rejection only"] == ["–"] * 4
    assert set(cells(blocks["replay"])["replay"]) == {"+0.0 ± 0.0"}
    assert cells(blocks["budgets"])["naive"][-2:] == ["9% / 9% / 9%", "3 of 3 / 3 of 3 / 3 of 3"]
    for name in ("results", "results-courses", "results-budgets"):
        assert (docs / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_and_two_seeds_have_no_interval() -> None:
    mean = outcomes.mean
    assert mean([0.5]) == "0.50"
    assert mean([0.25, 0.35], 0, percent=True) == "25 / 35 %"
    assert mean([2.0, -1.0], 1, signed=True) == "+2.0 / -1.0"
    assert mean([1.0, 2.0, 3.0]) == "2.00 ± 2.48"  # 4.303 / sqrt(3)


def test_nothing_is_begun_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run has begun before the first one's end is heard of; it goes on until the others are called off."""
    begun: list[int] = []
    called_off = Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            called_off.set()
            super().shutdown(wait)

    class Interrupted:
        is_finished = False

        def execute(self) -> None:
            begun.append(len(begun))
            if len(begun) > 1:
                called_off.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        command.execute([Interrupted() for _ in range(50)], jobs=1)
    assert len(begun) <= 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_naive_training_ends_below_dense_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `python -m benchmarks.stability --short` prints; which other arm collapses depends on the rounding too."""
    args = ["stability.py", "--short", "--seeds=0", "--jobs=1", f"--runs={tmp_path}"]
    monkeypatch.setattr(sys, "argv", args)
    command.main()
    lines = capsys.readouterr().out.splitlines()
    found = {line.partition(",")[0]: [float(number) for number in re.findall(r"0\.\d+", line)] for line in lines}
    assert list(found) == ["dense", "naive", "replay", "Sparse-RL (paper)"]
    assert all(line.endswith(("collapsed", "not collapsed")) for line in lines)
    (before, dense), (same, naive) = found["dense"], found["naive"]
    assert before == same
    assert dense > before / 2 > naive
