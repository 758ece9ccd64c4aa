"""Timing of an own op and its rivals in turns, and the table of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common.tables import Table, median_ratio
from sparse_rl_lightning.calibration import H200

Call = Callable[[], object]
SHAPES = {"large": (16, 28, 4, 128, 640), "small": (16, 8, 2, 64, 640)}  # slots, heads, KV heads, head size, entries
STREAM = "stream"
GPU_SLOTS = 256
GPU_SHARE = 0.7  # of the copy's speed, the goal where the memory is the limit
HIDDEN_CYCLES = 2_000_000  # the GPU is kept busy while the host enqueues
HEADER = (
    "what", "own ms", "fastest rival ms", "ratio", "goal", "met", "share of the stream", "H200 floor ms", "all rivals",
)  # fmt: skip


def elapsed(call: Call, device: str) -> float:
    """Seconds of one call: on a GPU its own, between two events."""
    wait(device)
    if device == "cuda":
        return elapsed_on_gpu(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def elapsed_on_gpu(call: Call) -> float:
    """Seconds between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HIDDEN_CYCLES)
    start.record()
    call()
    end.record()
    wait("cuda")
    return 1e-3 * start.elapsed_time(end)


def wait(device: str) -> None:
    """Until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Row:
    """One line of the table."""

    what: str
    goal: str
    own_ms: float
    rivals: dict[str, tuple[float, float]]  # median milliseconds and ratio
    share: float | None = None
    floor_ms: float | None = None
    least_share: float = 0.0

    @property
    def ratio(self) -> float:
        """Against the fastest rival."""
        return min(ratio for _, ratio in self.rivals.values())


class Bench:
    """Runs own op and rivals in turns on one device."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def shape(self, name: str) -> tuple[int, ...]:
        """Slots, heads, KV heads, head size, entries."""
        slots, *rest = SHAPES[name]
        return (GPU_SLOTS if self.device == "cuda" else slots, *rest)

    def compare(
        self, what: str, goal: str, own: Call, rivals: dict[str, Call], prepare: Call = lambda: None,
        moved: int = 0, stream: Call | None = None,
    ) -> Row:  # fmt: skip
        """Medians over the rounds; ``prepare`` runs untimed before each call; ``stream`` moves as many bytes."""
        calls = {"own": own, **rivals}
        if stream is not None and self.device == "cuda":
            stream, goal = self.copy(moved // 2), f"{goal}, {GPU_SHARE:.0%} of the copy"
        if stream is not None:
            calls[STREAM] = stream
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.rounds + 2):
            for name, call in calls.items():
                prepare()
                taken = elapsed(call, self.device)
                if turn >= 2:
                    times[name].append(taken)
        middle = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        ratios = {name: median_ratio(theirs, times["own"]) for name, theirs in times.items()}
        floor = 1e3 * moved / H200.bandwidth if moved else None
        least = GPU_SHARE if self.device == "cuda" and stream is not None else 0.0
        beside = {name: (middle[name], ratios[name]) for name in rivals}
        return Row(what, goal, middle["own"], beside, ratios.get(STREAM), floor, least)

    def copy(self, count: int) -> Call:
        """Read ``count`` bytes and write as many."""
        source = torch.ones(count // 4, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def comparison(rows: list[Row]) -> Table:
    """A line for every row, the fastest rival named."""
    table = Table("Ops", HEADER)
    for row in rows:
        name, (rival_ms, _) = min(row.rivals.items(), key=lambda item: item[1][1])
        needed = float(row.goal.split(",")[0].removeprefix(">= ")) if row.goal[0] == ">" else 1.0
        reached = row.ratio >= needed and (row.share is None or row.share >= row.least_share)
        table.add(
            row.what, f"{row.own_ms:.3f}", f"{rival_ms:.3f} ({name})", f"{row.ratio:.2f}", row.goal,
            "yes" if reached else "NO",
            "" if row.share is None else f"{100 * row.share:.0f} %",
            "" if row.floor_ms is None else f"{row.floor_ms:.3f}",
            ", ".join(f"{rival} {ms:.2f} ms ({ratio:.2f})" for rival, (ms, ratio) in row.rivals.items()),
        )  # fmt: skip
    return table
