"""The rollout benchmark: every part runs in toy sizes, and its numbers mean what they say."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.tables import Table, median_ratio, met
from benchmarks.rollout import __main__ as command
from benchmarks.rollout import cells, policies, speed, split
from benchmarks.rollout.clock import Clock
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.calibration import Hardware, ModelShape
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.rollout import Progress

FAST = Hardware(1e9, 1e12)
Rows = list[dict[str, str]]


def run(folder: Path, *arguments: str) -> str:
    """The page that a quick run with these arguments saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rollout.py", "--quick", "--threads", "1", "--save", str(folder), *arguments])
        command.main()
    (page,) = folder.glob("*.md")
    return page.read_text()


def tables(page: str) -> dict[str, Rows]:
    """Rows by column name, by title."""
    found = {}
    for section in page.split("\n## ")[1:]:
        lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
        header, _, *rows = [re.split(r" ?\| ", line + " ") for line in lines]
        names = [name.strip() for name in header]
        unique = [
            name if name not in names[:i] else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)
        ]
        found[section.splitlines()[0]] = [
            dict(zip(unique, [cell.strip() for cell in row] + [""] * (len(names) - len(row)), strict=True))
            for row in rows
        ]
    return found


CPU_PARTS = ("speed", "split", "tail", "state", "vocabulary", "cells", "memory", "whole", "equal")


@pytest.mark.parametrize(
    "arguments", [("cpu", "--parts", *CPU_PARTS), pytest.param(("cuda",), marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_all_parts_run_in_toy_sizes(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """And their numbers belong to each other."""
    page = run(tmp_path, "--device", *arguments)
    assert page.startswith("# benchmarks.rollout\n\n20")
    assert all(words in page for words in (f"torch {torch.__version__}", "transformers ", "All of it took"))
    found = tables(page)
    grid = [(row["batch"], row["length"], row["cache"]) for row in found["Steps at given lengths"]]
    caches = ("FullKV", "FullKV, sequences of all lengths up to there", "SnapKV 16 + 32", "R-KV 16 + 32")
    assert grid == [*itertools.product(("8", "16"), ("40", "80"), caches)]
    assert all(float(row["ms per step"]) > 0 for row in found["Steps at given lengths"])
    whole = [row["cache"] for row in found["Whole rollouts, tiny"]]
    assert whole == ["FullKV", "SnapKV 16 + 32", "R-KV 16 + 32", "SnapKV 16 + 32, top-p 0.95", "generate"]
    equal = next(rows for title, rows in found.items() if title.startswith("Whole rollouts in "))
    assert [row["cache"] for row in equal] == ["FullKV", "SnapKV 16 + 32", "R-KV 16 + 32"]
    assert all(int(row["slots"]) > 0 for row in equal)
    memory = next(rows for title, rows in found.items() if title.startswith("Equal memory"))
    assert int(memory[0]["slots"]) < int(memory[1]["slots"])
    if arguments[0] == "cpu":
        check_speed(found["Equal work"])
        check_split(found["A step"])
        drawn = found["A vocabulary of real size"]
        assert [row["draw"] for row in drawn] == ["greedy", "temperature 1", "top-k 50", "top-p 0.95"]
        assert all(0 < float(row["draw alone, ms"]) < float(row["ms per step"]) for row in drawn)
        assert [row["how"] for row in found["Long-tailed lengths"]] == ["refill", "lock-step"]
        assert "The same lengths in both: yes." in page
        (running,) = (rows for rows in found.values() if "slots in use" in rows[0])
        assert [row["slots in use"] for row in running] == ["4", "3"]


def check_speed(rows: Rows) -> None:
    contenders = ("sparse", "FullKV", "generate", "generate_batch")
    assert [(row["type"], row["what"]) for row in rows] == [*itertools.product(("float32", "bfloat16"), contenders)]
    for row in rows:
        ms, rate = float(row["ms per step"]), float(row["tokens/s"].replace(",", ""))  # rounded to 0.01 and to 1
        assert 4 * 1e3 / (ms + 0.006) - 1 < rate < 4 * 1e3 / (ms - 0.006) + 1  # four sequences, one token each
    # 8 + 24 tokens at most, of which the sparse slots hold 12 + 4
    assert [row["share of dense"] for row in rows if row["what"] == "sparse"] == ["50.0 % (= 16/32)"] * 2
    assert [row["share of dense"] for row in rows if row["what"] == "FullKV"] == ["100.0 % (= 32/32)"] * 2
    assert [row["goal"] for row in rows if row["what"] == "sparse"] == [">= 4", ">= 10"]


def check_split(rows: Rows) -> None:
    last = ["python and other", "whole step, profiled", "whole step, not profiled"]
    assert [row["part"] for row in rows][-3:] == last
    for column in ("sparse float32", "FullKV float32", "sparse bfloat16", "FullKV bfloat16"):
        *parts, whole, _ = (float(row[column].split()[0]) for row in rows)
        assert sum(parts) == pytest.approx(whole, abs=0.05)
        assert min(parts) >= 0
        by_part = {row["part"]: float(row[column].split()[0]) for row in rows}
        assert (by_part["eviction"] > 0) == column.startswith("sparse")
        assert min(by_part[name] for name in ("matrix products", "attention and append", "sampling")) > 0


def test_cells_without_room_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policies.random_policy(policies.TINY, torch.float32, "cpu")
    monkeypatch.setattr(cells, "SHARE", 1e-12)
    assert re.fullmatch(r"needs \d+\.\d GB, not one slot allowed", cells.try_step(policy, FullKV(), 40, 8, FAST))
    slot = cells.needed(policy, FullKV(), 40, SamplingParams(max_completion_length=cells.NEW_TOKENS))
    monkeypatch.setattr(cells, "SHARE", slot.of(5))
    assert "GB, 5 slots of " in cells.try_step(policy, FullKV(), 40, 8, FAST)
    assert not isinstance(cells.try_step(policy, FullKV(), 40, 5, FAST), str)


@pytest.mark.parametrize(("batch", "per_byte"), [(1, True), (4096, False)])
def test_the_floor_is_what_takes_longer_of_weights_and_their_products(batch: int, per_byte: bool) -> None:
    policy = policies.random_policy(policies.TINY, torch.float32, "cpu")
    shape, bytes_read = ModelShape.of(policy), policies.weight_bytes(policy)
    products = 2 * batch * shape.weights_read / FAST.flops
    assert (bytes_read / FAST.bandwidth > products) == per_byte
    want = (bytes_read / FAST.bandwidth if per_byte else products) + 500 / FAST.bandwidth
    assert cells.floor_seconds(policy, batch, 500, FAST) == pytest.approx(want)


def test_rivals_that_fail_are_named_and_own_failures_are_not_hidden() -> None:
    setting = command.QUICK.setting

    def fail(new_tokens: int) -> Any:
        raise RuntimeError(f"no {new_tokens}\nand more")

    contest = speed.Contest.of(setting, torch.float32)
    contest.runners["generate_batch"] = fail
    table = Table("t", speed.HEADER)
    contest.run(12, 1, table)
    assert [row[2] for row in table.rows] == ["sparse", "FullKV", "generate"]
    assert "generate_batch left out, float32: RuntimeError: no 12." in table.note
    calls = iter([contest.runners["generate"]] * 2 + [fail])  # the warm-up and the first round pass
    contest.runners["generate"] = lambda new_tokens: next(calls)(new_tokens)
    contest.run(12, 2, table)
    assert [row[2] for row in table.rows[3:]] == ["sparse", "FullKV"]
    contest.runners["sparse"] = fail
    with pytest.raises(RuntimeError, match="no 12"):
        contest.run(12, 1, table)


def test_weights_that_a_step_reads() -> None:
    for tied in (True, False):  # once as the head in either case
        policy = policies.random_policy(policies.TINY, torch.bfloat16, "cpu", tied=tied)
        head, body = 256 * 64, sum(p.numel() for p in policy.get_decoder().parameters()) - 256 * 64
        assert policies.weight_bytes(policy) == 2 * (head + body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_countdown_draws_log_normal_lengths_and_keeps_to_them(dtype: torch.dtype) -> None:
    countdown = policies.Countdown.log_normal(policies.TINY, dtype, "cpu", mean=12, sigma=0.9, longest=48)
    sampler = RolloutSampler(countdown.policy, SnapKV(budget=12, buffer=4, num_sinks=0), 8, [countdown.END])
    params = SamplingParams(num_generations=64, max_completion_length=60)
    rollout = sampler.generate(countdown.prompts(4, 8), params)
    assert rollout.finished.all()
    for row, mask in zip(rollout.sequences, rollout.completion_mask, strict=True):
        _, *rest = row[mask].tolist()
        assert rest == list(range(len(rest) - 1, -1, -1))
    lengths = rollout.completion_lengths.double()
    assert lengths.mean() == pytest.approx(12, rel=0.2)
    assert lengths.log().std() == pytest.approx(0.9, rel=0.2)


@pytest.mark.parametrize(
    ("op", "shape", "kind"),
    [("sparse_rl::append", [], "attention and append"), ("sparse_rl::evict", [], "eviction"),
     ("sparse_rl::draw", [], "sampling"), ("sparse_rl::rms_norm", [], "norms, rotation, activation"),
     ("aten::add", [[4, 1], []], None)],
)  # fmt: skip
def test_ops_are_attributed(op: str, shape: list[list[int]], kind: str | None) -> None:
    assert split.kind_of(op, shape, policies.TINY) == kind


def test_clocks_count_the_steps_between_their_marks() -> None:
    for clock in (Clock(16, 48), Clock(16, 48, profiler=profile(activities=[ProfilerActivity.CPU]))):
        for step in range(8, 80, 8):
            clock(Progress(step, 1, 0, 1, step))
        assert [mark[0] for mark in clock.marks] == [16, 48]
        (first, start), (last, end) = clock.marks
        assert clock.steps == last - first
        assert clock.seconds == (end - start) / (last - first)
        assert clock.milliseconds == 1e3 * clock.seconds


def test_ratios_are_medians_of_the_rounds() -> None:
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
    assert [met(value, 1.5) for value in (1.5, 1.49)] == ["yes", "NO"]
    table = Table("Title", ("a", "b"), "Note.")
    table.add("1", "2")
    assert str(table) == "## Title\n\nNote.\n\n| a | b |\n|---|---|\n| 1 | 2 |"
