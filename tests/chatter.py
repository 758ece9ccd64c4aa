"""Environments for tests, and SparseGRPO that talks to one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tiny_grpo import module

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.environments import Environment, TurnOptions
from sparse_rl_lightning.modules import SparseGRPO

ENDS = ["5", "9", "c"]
"""Tokens that end turns, besides the end of the sequence: turns are short and ragged."""


class Chatter(Environment):
    """Answers with what it was told backwards, a few times; pays for every a."""

    def __init__(self, turns: int = 3, length: int = 6) -> None:
        self.turns, self.length, self.told = turns, length, ""

    def reset(self, row: dict[str, Any]) -> str | None:
        self.told = ""
        return None

    def step(self, text: str) -> tuple[str | None, float | None]:
        self.told += text + "|"
        reward = text.count("a") / 10
        over = self.told.count("|") >= self.turns
        return None if over else f"{self.told.count('|')}{text[::-1][: self.length]}b", reward


class Slow(Chatter):
    """Takes its time, another at every turn."""

    def step(self, text: str) -> tuple[str | None, float | None]:
        time.sleep(0.02 * (len(text) % 3))
        return super().step(text)


class Async(Chatter):
    """The same as coroutines."""

    async def reset(self, row: dict[str, Any]) -> str | None:  # type: ignore[override]
        return super().reset(row)

    async def step(self, text: str) -> tuple[str | None, float | None]:  # type: ignore[override]
        await asyncio.sleep(0.02 * (len(text) % 3))
        return super().step(text)


def talking(environment: Any = Chatter, **options: Any) -> SparseGRPO:
    return module(**{**talk(environment), **options})


def talk(environment: Any = Chatter) -> dict[str, Any]:
    """Options of conversations of up to three turns, in which the cache is short several times."""
    return {
        "environment": environment, "end_tokens": ENDS, "max_completion_length": 60, "reward": None,
        "compressor": SnapKV(budget=14, buffer=4, num_sinks=1, window=3),
        "turns": TurnOptions(max_turns=4, max_turn_length=9),
    }  # fmt: skip
