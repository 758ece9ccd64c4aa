"""RankWatch: ranks that wait for each other for ever are ended and say where; slow ones are left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import start

from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, _reason, _Watch
from sparse_rl_lightning.distributed.collectives import Wait, conflict, oldest

FIRST = Wait("gloo:all_reduce", "0", 7, "[[3]]", "mine.py:1 (reward)")
PLACES: dict[str, tuple[dict[int, Wait | None], str]] = {
    "another collective": (
        {0: FIRST, 1: Wait("gloo:barrier", "0", 7, "[]", "x.py:9 (f)")},
        "rank 0 in gloo:all_reduce number 7 at mine.py:1 (reward); rank 1 in gloo:barrier number 7 at x.py:9 (f)",
    ),
    "one step further": ({0: FIRST, 1: Wait("gloo:all_reduce", "0", 8, "[[3]]", "y.py:2 (g)")}, "number 8 at y.py:2"),
    "more numbers": ({0: FIRST, 1: Wait("gloo:all_reduce", "0", 7, "[[4]]", "y.py:2 (g)")}, "rank 1 in gloo:all_red"),
    "another group": ({0: FIRST, 1: Wait("gloo:all_reduce", "1", 7, "[[3]]", "y.py:2 (g)")}, "rank 1 in gloo:all_red"),
    "already gone": ({0: FIRST, 1: None, 2: FIRST}, "rank 1 has ended its training; rank 2 in gloo:all_reduce"),
    "the same, elsewhere": ({0: FIRST, 1: Wait("gloo:all_reduce", "0", 7, "[[3]]", "y.py:2 (g)")}, ""),
    "scattered by one": (
        {0: Wait("gloo:scatter", "0", 7, "[[3]]", "a:1"), 1: Wait("gloo:scatter", "0", 7, "[]", "a:1")}, ""
    ),
    "all gone": ({0: None, 1: None}, ""),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_the_thread_looks_from_its_rank_s_own_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first one every other rank would take some of the memory."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    watch = _Watch(1, {}, None, torch.device(device))
    watch.leave()
    watch.run()
    assert chosen == [torch.device(device)] * (device != "cpu")


STEERING, SHOWN = "bad completion \x1b]0;owned\x07\x1b[2J", r"bad completion \x1b]0;owned\x07\x1b[2J"


def test_a_reason_is_one_line_that_steers_no_terminal() -> None:
    assert _reason(ValueError(f"{STEERING}\nand more")) == f"ValueError: {SHOWN}"
    assert _reason(ValueError("a\rb")) == r"ValueError: a\rb"


@pytest.mark.parametrize("message", [{"kind": "end", "rank": 1, "why": STEERING}, {"kind": "stop", "why": STEERING}])
def test_what_another_rank_says_steers_no_terminal(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    watch = _Watch(0, {}, None, torch.device("cpu"))
    watch.suffers.set()  # so that it does not wait for its own end
    watch._hear(1, message)
    said = capsys.readouterr().err.removesuffix("\n")
    assert SHOWN in said
    assert said.isprintable()


@pytest.mark.parametrize("name", PLACES)
def test_who_can_never_meet(name: str) -> None:
    waits, said = PLACES[name]
    found = conflict(waits)
    assert (found is None) == (not said)
    assert said in (found or "")


def test_the_oldest_of_two_recorders() -> None:
    """CPUs' and GPUs' collectives are recorded apart, and each recorder counts from zero."""
    entries = [
        {"profiling_name": name, "time_created_ns": time, "retired": retired, "is_p2p": is_p2p}
        for name, time, retired, is_p2p in (
            ("ended", 1, True, False), ("sent", 2, False, True), ("nccl:all_reduce", 3, False, False),
            ("gloo:barrier", 4, False, False),
        )
    ]  # fmt: skip
    dumps = [json.dumps({"entries": entries[3:]}), json.dumps({"entries": entries[:3]}), json.dumps({})]
    found = oldest(dumps)
    assert found is not None
    assert found["profiling_name"] == "nccl:all_reduce"
    assert oldest(dumps[2:]) is None


SCRIPT = """
import sys, time, torch
from lightning.pytorch import Callback
from sparse_rl_lightning.callbacks import RankWatch
from tiny_grpo import Rows, fit, likes_a, module

calls = 0

def slow_on_one(completions, **columns):
    # four times as long as a rank may wait, on one rank in the first rollout, on the other in the second
    global calls
    calls += 1
    if calls <= 2 and torch.distributed.get_rank() == calls - 1:
        time.sleep(4)
    return likes_a([], completions)

class Fault(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            {fault}

fit(module(slow_on_one), 5, [Fault(), RankWatch(stuck_after=1)], data=Rows(prompts_per_rollout=2), devices=2,
    strategy="ddp")
"""


LATE = """
import os, signal, torch
from tiny_grpo import Rows, fit, likes_a, module

def last():
    # comes after the same hook of all callbacks
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()

grpo = module(likes_a)
grpo.on_fit_end = last
fit(grpo, 1, [], data=Rows(prompts_per_rollout=2), devices=2, strategy="ddp")
"""


def end(script: str, folder: Path) -> tuple[list[int], list[str]]:
    """Statuses and outputs of two ranks."""
    (folder / "script.py").write_text(script)
    processes = start([sys.executable, str(folder / "script.py")], folder, 2)
    try:
        statuses = [process.wait(180) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("the ranks wait for each other")
    finally:
        for process in processes:
            process.kill()
    return statuses, [(folder / f"rank{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.slow
def test_waiting_for_ever_is_told_and_waiting_long_is_not(tmp_path: Path) -> None:
    """Both rollouts with a slow reward come through, four waits long; then one rank runs a collective of its own."""
    statuses, texts = end(SCRIPT.format(fault="torch.distributed.barrier()"), tmp_path)
    assert statuses == [STATUS, STATUS], texts
    for rank, text in enumerate(texts):
        assert "Ranks wait for each other for ever" in text
        assert "rank 0 in gloo:all_reduce number" in text or "rank 0 in gloo:" in text
        assert "rank 1 in gloo:barrier number" in text
        assert "script.py:20 (on_train_batch_start)" in text
        assert f"Rank {rank} stops as all do; go on from the last checkpoint" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("sys.exit(3)", 3, "Rank 1 has ended: SystemExit at {folder}/script.py:20 (on_train_batch_start): 3. Rank 0 "),
        ("raise KeyboardInterrupt", 1, "Rank 1 has ended: KeyboardInterrupt at {folder}/script.py:20"),
        ("raise ValueError('mine')", 1, "(on_train_batch_start): mine. Rank 0 stops as well"),
    ],
)
def test_the_others_name_rank_and_cause(fault: str, status: int, said: str, tmp_path: Path) -> None:
    statuses, texts = end(SCRIPT.format(fault=fault), tmp_path)
    assert statuses == [STATUS, status], texts
    assert said.format(folder=tmp_path) in texts[0]
    assert "Traceback" not in texts[0], "a collective that fails for want of another rank is no news"


@pytest.mark.slow
def test_a_rank_that_dies_after_its_last_step_is_named(tmp_path: Path) -> None:
    """Export, report and the check of the last checkpoint are collectives, too."""
    statuses, texts = end(LATE, tmp_path)
    assert statuses == [STATUS, -signal.SIGKILL], texts
    assert "Rank 1 has died. Rank 0 stops as well" in texts[0]
