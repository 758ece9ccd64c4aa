"""Cases of reward functions: ``mine.lr`` is the one of the run."""

from __future__ import annotations

from typing import Any

from cases.case import TRAINS, Case


def lr(body: str, arguments: str = "completions, **columns") -> str:
    """A module with a reward function."""
    return f"import asyncio, math, os, sys\nimport numpy, torch\n\n\ndef lr({arguments}):\n    {body}\n"


def case(body: str, says: str, status: int = 1) -> Case:
    """A function with this body."""
    return Case(f"`{body}`", says, status, reward=lr(body))


ANSWERS = [
    case("return [math.nan for c in completions]", "returned nan, not a finite number"),
    case("return [1.0] * (len(completions) - 1)", "The reward function lr returned 7 rewards for 8 samples."),
    case("return {i: 1.0 for i in range(len(completions))}", "of type dict; it must return a list"),
    case("raise ValueError('x')", "RuntimeError: The reward function lr raised ValueError('x') on sample 0"),
    case("sys.exit()", "The reward function lr raised SystemExit() on sample 0"),
]

FUNCTIONS = [
    Case("without `**columns`", "The reward function lr(completions) does not fit the data: got an unexpected", 1,
         reward=lr("return [1.0] * len(completions)", "completions")),
    Case("`async def lr(completions, **columns)`", "The reward function lr is async. Write a plain one", 1,
         reward="async def lr(completions, **columns):\n    return []\n"),
    Case("a number in place of a function", "Unexpected import object 3", 2, reward="lr = 3\n"),
]  # fmt: skip


def limited(body: str, says: str = TRAINS, status: int = 0) -> Case:
    """A function with this body and ``reward_timeout: 1``."""

    def limit(values: dict[str, Any]) -> None:
        values["model"]["init_args"].setdefault("rollout", {})["reward_timeout"] = 1.0

    return Case(f"`{body}`, `reward_timeout: 1`", says, status, edit=limit, reward=lr(body), slow=True)


BACKTRACKS = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"
LIMITS = [
    limited(BACKTRACKS, "The reward function lr gave no answer within 1 seconds on sample 0", 1),
    limited("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); return [1.0] * len(completions)"),
    limited("os._exit(0)", "The reward function lr ended its process with status 0 on sample 0", 1),
]

CASES = [*ANSWERS, *FUNCTIONS, *LIMITS]
