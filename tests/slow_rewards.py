"""Reward functions that hang, and limits that a busy machine keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparse_rl_lightning.rewards.process import LostProcess, RewardProcess

BACKTRACKING = "(a+)+$"  # against "a" * 40 + "b": hours, and the interpreter's lock is never given away


def hurry(
    monkeypatch: pytest.MonkeyPatch, hangs: Callable[[str], bool], until: Callable[[], bool] = lambda: True
) -> None:
    """Wait as long as is set for calls that answer, and shortly, but until this is so, for those that do not."""
    judge = RewardProcess.judge

    def shortly(self: RewardProcess, batch: dict[str, Any], timeout: float) -> list[float | None]:
        seconds = 0.1 if any(map(hangs, batch["completions"])) else timeout
        while True:
            try:
                return judge(self, batch, seconds)
            except LostProcess:
                if until():
                    raise
            seconds *= 2

    monkeypatch.setattr(RewardProcess, "judge", shortly)
