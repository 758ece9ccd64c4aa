"""Environments that change the process, share their objects or answer nonsense: what is said."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from chatter import Chatter, talking
from lightning.pytorch.loggers import CSVLogger
from tiny_grpo import fit

from sparse_rl_lightning.environments import ToolEnvironment, TurnOptions
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Conversation

ROWS = [{"prompt": "0123456789abcdef"[i:] + "a", "answer": "x"} for i in range(4)]
INLINE = TurnOptions(max_turns=4, max_turn_length=9, timeout=None)
THREADS = TurnOptions(max_turns=4, max_turn_length=9)


def said(environment: Any, turns: TurnOptions = THREADS) -> list[Conversation]:
    """The conversations of a rollout."""
    grpo = talking(environment, turns=turns)
    grpo.configure_model()
    found = grpo.generator.generate(ROWS).conversations
    return found


# ---------------------------------------------------------------- the process


class Moves(Chatter):
    """Takes the process somewhere else, and sets what torch and signals do."""

    place = ""

    def step(self, text: str) -> tuple[str | None, float | None]:
        os.chdir(self.place)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return super().step(text)


class Signals(Moves):
    """As above, and in the main thread, where it can, has an alarm end the program soon, and Ctrl-C do nothing."""

    def step(self, text: str) -> tuple[str | None, float | None]:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(7))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return super().step(text)


@pytest.mark.parametrize(("kind", "turns"), [(Moves, THREADS), (Moves, INLINE), (Signals, INLINE)])
def test_what_a_step_does_to_the_process_neither_moves_the_log_nor_ends_the_run(
    kind: type[Moves], turns: TurnOptions, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(Moves, "place", str(elsewhere))
    before = os.getcwd(), torch.get_default_dtype(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    logger = CSVLogger("run", name="log", flush_logs_every_n_steps=1)
    fit(talking(kind, turns=turns), 2, logger=logger, default_root_dir="run", log_every_n_steps=1)
    after = os.getcwd(), torch.get_default_dtype(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    assert before == after
    assert torch.is_grad_enabled()
    if kind is Signals:
        time.sleep(0.3)  # the alarm would have ended the program
    assert len((folder / "run/log/version_0/metrics.csv").read_text().splitlines()) == 3
    assert not list(elsewhere.iterdir())


def test_a_thread_that_moves_when_nobody_waits_for_it_does_not_take_the_log_along(folder: Path) -> None:
    class Late(Chatter):
        def step(self, text: str) -> Any:
            if not begun:
                begun.append(1)
                is_over.wait(60)
                os.chdir(elsewhere)
                has_moved.set()
            return super().step(text)

    begun: list[int] = []
    is_over, has_moved = Event(), Event()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    logger = CSVLogger("run", name="log", flush_logs_every_n_steps=1)
    turns = TurnOptions(max_turns=4, max_turn_length=9, timeout=0.3)
    with pytest.warns(UserWarning, match="took more than"):
        trainer = fit(talking(Late, turns=turns), 2, logger=logger, default_root_dir="run", log_every_n_steps=1)
    is_over.set()
    assert has_moved.wait(60)
    logger.log_metrics({"late": 1.0}, step=99)
    logger.save()
    assert "late" in (folder / "run/log/version_0/metrics.csv").read_text()
    assert Path(trainer.default_root_dir) == folder / "run"
    assert not list(elsewhere.iterdir())


# ---------------------------------------------------------------- shared objects


class Tools:
    """As for TRL."""

    def reset(self, **row: Any) -> None:
        return None

    def look(self) -> str:
        """Look."""
        return "a"


def test_conversations_that_share_an_environment_are_refused() -> None:
    one, tools = Chatter(), Tools()
    pool = cycle([Chatter(), Chatter(), Chatter()])
    with pytest.raises(UserError, match="environment gives several conversations the same Chatter: their turns would"):
        said(lambda: one)
    with pytest.raises(UserError, match="the same Chatter"):
        said(lambda: next(pool))  # each in turn
    for factory in (lambda: tools, lambda: ToolEnvironment(lambda: tools)):
        with pytest.raises(UserError, match="the same Tools"):
            said(factory)
    own = (Chatter() for _ in count())
    assert len(said(lambda: next(own))) == 16


# ---------------------------------------------------------------- what is said


class Broken(Chatter):
    def step(self, text: str) -> Any:
        return {}["typo"]


TYPO = '        return {}["typo"]'


class Answers(Chatter):
    answer: Any = None

    def step(self, text: str) -> Any:
        return self.answer


def test_an_error_has_the_users_own_line() -> None:
    lines = Path(__file__).read_text().splitlines()
    place = f"test_hostile_environments.py:{1 + lines.index(TYPO)}"
    words = rf"all 16 conversations, first: Broken raised KeyError\('typo'\) \({place}\)\.$"
    with pytest.raises(RuntimeError, match=words):
        fit(talking(Broken), 1)


@pytest.mark.parametrize(("answer", "words"), [
    (3, "Answers returned 3, not an observation"),
    ((b"1", None), "Answers returned the observation b'1', not text"),
    ((None, "1.5"), "Answers returned the reward '1.5', not a number or None"),
    ((None, b"1.5"), "Answers returned the reward b'1.5', not a number or None"),
    ((None, [1.0]), r"Answers returned the reward \[1.0\], not a number or None"),
    ((None, float("inf")), "Answers returned the reward inf, which added to 0.0 is not finite"),
])  # fmt: skip
@pytest.mark.parametrize("turns", [THREADS, INLINE], ids=["threads", "inline"])
def test_nonsense_is_told_once_and_with_its_place(
    answer: Any, words: str, turns: TurnOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(RuntimeError, match=rf"first: {words}.* \(test_hostile_environments.py:\d+\)\.$"):
        fit(talking(Answers, turns=turns), 1)


@pytest.mark.parametrize("prompt", [5, {"role": "user", "content": "a"}, [3, 4, 5], b"a", ("a",)])
def test_what_reset_returns_is_said_to_be_of_reset(prompt: Any) -> None:
    class Odd(Chatter):
        def reset(self, row: dict[str, Any]) -> Any:
            return prompt

    with pytest.raises(
        UserError, match=r"reset\(\) of Odd \(test_hostile_environments.py:\d+\) returned .*: return the"
    ):
        said(Odd)


def test_numbers_of_others_are_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[Callable[[], Any]] = [lambda: torch.tensor(1.5), lambda: True, lambda: 2]
    for make in numbers:
        monkeypatch.setattr(Answers, "answer", (None, make()))
        assert {one.reward for one in said(Answers)} == {float(make())}
