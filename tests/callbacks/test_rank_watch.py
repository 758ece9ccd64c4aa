"""RankWatch: all ranks end when one does, and say which and why; slow ones are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_runs import start

from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, _reason, _Watch

STEERING, SHOWN = "bad completion \x1b]0;owned\x07\x1b[2J", r"bad completion \x1b]0;owned\x07\x1b[2J"


def test_a_reason_is_one_line_that_steers_no_terminal() -> None:
    assert _reason(ValueError(f"{STEERING}\nand more")) == f"ValueError: {SHOWN}"
    assert _reason(ValueError("a\rb")) == r"ValueError: a\rb"


def test_what_another_rank_says_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    watch = _Watch(0, {})
    watch.suffers.set()  # so that it does not wait for its own end
    watch._end_with(1, STEERING)
    line = capsys.readouterr().err.removesuffix("\n")
    assert SHOWN in line
    assert line.isprintable()


SCRIPT = """
import sys, time, torch
from lightning.pytorch import Callback
from tiny_grpo import Rows, fit, likes_a, module

calls = 0

def slow_on_one(completions, **columns):
    # on one rank in the first rollout, on the other in the second
    global calls
    calls += 1
    if calls <= 2 and torch.distributed.get_rank() == calls - 1:
        time.sleep(1)
    return likes_a([], completions)

class Fault(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            {fault}

fit(module(slow_on_one), 5, [Fault()], data=Rows(prompts_per_rollout=2), devices=2, strategy="ddp")
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
@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("sys.exit(3)", 3, "Rank 1 has ended: SystemExit at {folder}/script.py:19 (on_train_batch_start): 3. Rank 0 "),
        ("raise KeyboardInterrupt", 1, "Rank 1 has ended: KeyboardInterrupt at {folder}/script.py:19"),
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
