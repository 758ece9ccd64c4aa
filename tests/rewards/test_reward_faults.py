"""What reward functions may do wrong: none of it hangs, ends or poisons a run, and every answer names the function."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_rewards import BACKTRACKING, hurry
from tiny_grpo import Recorder, fit, likes_a, module

from sparse_rl_lightning.rewards import MathReward, compute_rewards, process, reward_names
from sparse_rl_lightning.rewards.base import reward_batch, undisturbed
from sparse_rl_lightning.rewards.scoring import LOST, GuardedReward, Rewards

ENOUGH = 120.0  # seconds, for what answers at once
BOTH = pytest.mark.parametrize("timeout", [None, ENOUGH], ids=["in this process", "in its own"])


def batch(completions: str, **columns: Any) -> dict[str, Any]:
    """One completion per letter."""
    return reward_batch(["p"] * len(completions), list(completions), [[1, 2]] * len(completions), columns)


def judge(function: Any, completions: str = "abcd", timeout: float | None = None, **columns: Any) -> tuple[Any, ...]:
    """Rewards, samples that failed, and what happened to the first, which is raised if all did."""
    guard = GuardedReward(function, timeout)
    try:
        rewards = guard.judge(batch(completions, **columns))
        if guard.error is not None and len(guard.failures) == len(completions):
            raise guard.error
        return rewards, len(guard.failures), guard.first
    finally:
        guard.close()


def of(value: Callable[[list[str]], Any]) -> Callable[..., Any]:
    """A reward function that returns this of its completions."""

    def reward(completions: list[str], **_: Any) -> Any:
        return value(completions)

    return reward


def raising(error: BaseException) -> Callable[[list[str]], Any]:
    """Raises where there is a b."""

    def work(texts: list[str]) -> list[float]:
        if "b" in texts:
            raise error
        return [float(ord(text)) for text in texts]

    return work


def hanging(texts: list[str]) -> list[float]:
    """Hangs where there is a b."""
    if "b" in texts:
        re.match(BACKTRACKING, "a" * 40 + "b")
    return [float(ord(text)) for text in texts]


class Later:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)


async def one_by_one(completions: list[str], **_: Any) -> Any:
    for _text in completions:
        yield 1.0


class Rude(Exception):
    def __repr__(self) -> str:
        raise RuntimeError


# ---------------------------------------------------------------- what is returned

WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (of(lambda texts: None), r"reward returned None, of type NoneType; it must return a list"),
    "a number": (of(lambda texts: 1.5), r"reward returned 1\.5, of type float"),
    "a tensor without axes": (of(lambda texts: torch.tensor(2.0)), r"reward returned tensor\(2\.\)"),
    "a dictionary": (of(lambda texts: dict.fromkeys(range(len(texts)), 1.0)), r"reward returned .*of type dict"),
    "a text": (of(lambda texts: "1" * len(texts)), r"reward returned '1111', of type str; it must .* here 4, in"),
    "bytes": (of(lambda texts: b"1" * len(texts)), r"reward returned b'1111', of type bytes"),
    "a set": (of(lambda texts: set(range(len(texts)))), r"reward returned .*of type set"),
    "one too few": (of(lambda texts: [1.0] * 3), r"reward returned 3 rewards for 4 samples"),
    "without an end": (of(lambda texts: iter(lambda: 1.0, 2.0)), r"reward returned more than 4 rewards for 4"),
    "a coroutine": (Later(), r"Later is async\. Write a plain one"),
    "an async generator": (one_by_one, r"one_by_one is async\. Write a plain one"),
}


@BOTH
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_list_of_numbers_is_refused_by_name(kind: str, timeout: float | None) -> None:
    function, message = WRONG[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of coroutines that nobody waited for, too
        with pytest.raises(ValueError, match=message):
            judge(function, timeout=timeout)


def test_rows_of_nothing_but_prompts_are_checked_too() -> None:
    with pytest.raises(ValueError, match="answer"):
        Rewards(lambda completions, answer: [0.0]).check([{"prompt": "1 + 1"}])


LAZY: dict[str, Callable[[list[str]], Any]] = {
    "list": lambda texts: [1 / (ord(text) - ord("b")) for text in texts],
    "generator": lambda texts: (1 / (ord(text) - ord("b")) for text in texts),
    "map": lambda texts: map(lambda text: 1 / (ord(text) - ord("b")), texts),
    "tensor": lambda texts: torch.tensor([1 / (ord(text) - ord("b")) for text in texts]),
}


@BOTH
@pytest.mark.parametrize("kind", LAZY)
def test_one_bad_sample_is_one_sample(kind: str, timeout: float | None) -> None:
    first = "it raised ZeroDivisionError('division by zero') on sample 1, completion 'b'"
    assert judge(of(LAZY[kind]), timeout=timeout) == ([-1.0, None, 1.0, 0.5], 1, first)


# ---------------------------------------------------------------- what is raised


@BOTH
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SystemExit(), "SystemExit()"),
        (SystemExit("bye"), "SystemExit('bye')"),
        (GeneratorExit(), "GeneratorExit()"),
        (ValueError("\x1b[2J"), r"ValueError('\x1b[2J')"),
        (MemoryError(), "MemoryError()"),
        (Rude(), "Rude"),
    ],
)
def test_whatever_is_raised_is_a_failure(error: BaseException, shown: str, timeout: float | None) -> None:
    first = f"it raised {shown} on sample 1, completion 'b'"
    assert judge(of(raising(error)), timeout=timeout) == ([97.0, None, 99.0, 100.0], 1, first)
    with pytest.raises(RuntimeError, match="reward raised " + re.escape(shown)) as caught:
        judge(of(raising(error)), "bb", timeout=timeout)
    assert caught.value.__cause__ is error or "in work" in str(caught.value.__cause__)  # where in the user's code


def test_an_interrupt_in_this_process_may_be_the_users_and_is_named() -> None:
    with (
        pytest.warns(UserWarning, match="KeyboardInterrupt in the reward function reward"),
        pytest.raises(KeyboardInterrupt),
    ):
        judge(of(raising(KeyboardInterrupt())))


def test_an_interrupt_in_its_own_process_is_a_failure() -> None:
    first = "it raised KeyboardInterrupt on sample 1, completion 'b'"
    assert judge(of(raising(KeyboardInterrupt())), timeout=ENOUGH) == ([97.0, None, 99.0, 100.0], 1, first)


@BOTH
def test_a_failure_of_the_batch_that_no_sample_repeats_is_told(timeout: float | None) -> None:
    def pairs(texts: list[str]) -> list[float]:
        return [1.0] if len(texts) == 1 else [][0]

    first = "it raised IndexError('list index out of range') on all of them together, on none alone"
    assert judge(of(pairs), timeout=timeout) == ([1.0] * 4, 0, first)


# ---------------------------------------------------------------- hanging, dying


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_sample_that_hangs_is_one_sample(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a regular expression, which lets no other thread run; also where a generator gets there late."""
    hurry(monkeypatch, lambda text: text == "b")
    lazily = of(lambda texts: (hanging([text])[0] for text in texts))
    judged = judge(of(hanging) if kind == "list" else lazily, "abcde", timeout=ENOUGH)
    first = "it gave no answer within 0.1 seconds on sample 1, completion 'b'"
    assert judged == ([97.0, None, 99.0, 100.0, 101.0], 1, first)


def test_a_function_that_always_hangs_is_given_up(tmp_path: Path) -> None:
    def hangs(texts: list[str]) -> list[float]:
        with (tmp_path / "calls").open("a") as file:
            file.write("".join(texts) + "\n")
        return hanging(["b"])

    with pytest.raises(RuntimeError, match=r"reward gave no answer within 0\.5 seconds on sample 0, .*reward_timeout"):
        judge(of(hangs), "abcdefghi", timeout=0.5)
    calls = (tmp_path / "calls").read_text().split()
    assert set(calls) <= {"abcdefghi", "a", "d", "g"}  # fewer on a machine so busy that a call does not begin in time
    assert LOST == 3


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(0), "with status 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "by signal 9 (Killed)"),
        (lambda: os.closerange(3, 256), "with status 1"),
    ],
)
def test_a_sample_that_ends_the_process_is_one_sample(end: Any, how: str) -> None:
    def ends(texts: list[str]) -> list[float]:
        if "b" in texts:
            end()
        return [float(ord(text)) for text in texts]

    first = f"it ended its process {how} on sample 1, completion 'b'"
    assert judge(of(ends), timeout=ENOUGH) == ([97.0, None, 99.0, 100.0], 1, first)


def test_what_a_function_starts_is_ended_with_it(tmp_path: Path) -> None:
    read, write = os.pipe()

    def starts(texts: list[str]) -> list[float]:
        subprocess.run(["sleep", "1000"], pass_fds=[write])
        return [1.0]

    with pytest.raises(RuntimeError, match="no answer within"):
        judge(of(starts), "a", timeout=0.5)
    os.close(write)
    assert os.read(read, 1) == b""  # comes back when nobody has the other end
    os.close(read)


DYING = """
import os, re, signal
from sparse_rl_lightning.rewards.scoring import GuardedReward
from sparse_rl_lightning.rewards.base import reward_batch, undisturbed

def reward(completions, **_):
    os.kill(os.getppid(), signal.SIGKILL)
    re.match("(a+)+$", "a" * 40 + "b")

GuardedReward(reward, 1000.0).judge(reward_batch(["p"], ["a"], [[1]], {}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it notices when it next answers")
def test_a_function_that_hangs_goes_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """It has copies of the trainer's locks and of its connections to other ranks."""
    (tmp_path / "dying.py").write_text(DYING)
    process = subprocess.Popen([sys.executable, tmp_path / "dying.py"], stdout=subprocess.PIPE)
    assert process.communicate() == (b"", None)  # comes back when nobody has the other end
    assert process.returncode == -signal.SIGKILL


def test_sigterm_gets_through_while_a_reward_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, sent = os.getpid(), tmp_path / "sent"

    def hangs(texts: list[str]) -> list[float]:
        if any(text.startswith("a") for text in texts):
            sent.touch()
            os.kill(trainer, signal.SIGTERM)
            re.match(BACKTRACKING, "a" * 40 + "b")
        return [1.0] * len(texts)

    hurry(monkeypatch, lambda text: text.startswith("a"), until=sent.exists)
    with pytest.raises(SystemExit) as end:
        fit(module(of(hangs), reward_timeout=ENOUGH), 50)
    assert end.value.code == 0


FORGED = ["1", "null", "[]", "{}", "junk", "\xff", "[" * 100_000, "9" * 5000, '{"mistake": 1}', '{"failure": ""}'] + [
    f'{{"rewards": {rewards}, "counts": {counts}}}'
    for rewards, counts in (("[1.0]", "{}"), ('"abcd"', "{}"), ("[1.0, 1, [], Infinity]", "{}"), ("[null] * 4", "[]"))
]


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
def test_what_foreign_code_writes_to_the_trainer_is_no_answer(forged: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(forged.encode("latin-1") + b"\n")
        with pytest.raises(process.LostProcess, match="wrote into its process's connection to us"):
            process._Child(multiprocessing.Process(), ours).ask(b"", 4, ENOUGH)


def test_an_answer_that_comes_byte_by_byte_is_waited_for_no_longer_than_any() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            theirs.sendall(b"1")

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(process.LostProcess, match=r"gave no answer within 0\.3 seconds"):
                process._Child(multiprocessing.Process(), ours).ask(b"", 4, 0.3)
        finally:
            ended.set()
            thread.join()


def test_a_fork_that_hangs_before_it_is_ready_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does on a lock that another thread of the trainer held: it has no process group yet."""
    hangs = [True]  # what is registered stays for the other tests of this process
    os.register_at_fork(after_in_child=lambda: signal.pause() if hangs else None)
    monkeypatch.setattr(process, "START_SECONDS", 0.5)
    try:
        with pytest.raises(RuntimeError, match="could not be given a process of its own"):
            judge(of(lambda texts: [1.0]), "a", timeout=ENOUGH)
    finally:
        hangs.clear()


# ---------------------------------------------------------------- a process of its own


def test_what_a_function_keeps_stays_until_its_process_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, lambda text: text == "b")
    seen: set[str] = set()

    def novel(texts: list[str]) -> list[float]:
        hanging(texts)
        new = [float(text not in seen) for text in texts]
        seen.update(texts)
        return new

    guard = GuardedReward(of(novel), ENOUGH)
    assert guard.judge(batch("ac")) == [1.0, 1.0]
    assert guard.judge(batch("ad")) == [0.0, 1.0]
    assert guard.judge(batch("bd")) == [None, 1.0]  # a new one
    assert not seen
    guard.close()


def test_a_process_that_ended_between_two_calls_is_replaced() -> None:
    guard = GuardedReward(of(lambda texts: [float(os.getpid())]), ENOUGH)
    pids = []
    for _ in range(2):
        (pid,) = map(int, guard.judge(batch("a")))
        assert (len(guard.failures), guard.first) == (0, "")
        assert guard.judge(batch("a")) == [pid]  # the same one while it lives
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        pids.append(pid)
    assert len({*pids, os.getpid()}) == 3
    guard.close()


def test_large_batches_get_through_whole() -> None:
    ids = [list(range(i, i + 4000)) for i in range(200)]
    texts = [chr(0x4E00 + i) * 5000 for i in range(200)]

    def sums(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(own) + ord(text[0]) for own, text in zip(completion_ids, completions, strict=True)]

    guard = GuardedReward(sums, ENOUGH)
    given = reward_batch(["p"] * 200, texts, ids, {})
    assert guard.judge(given) == [sum(own) + 0x4E00 + i for i, own in enumerate(ids)]
    guard.close()


def test_a_column_that_cannot_be_handed_over_is_named() -> None:
    with pytest.raises(ValueError, match=r"process that reward_timeout gives the reward function reward: .*lambda"):
        judge(of(lambda texts: [1.0]), "a", timeout=ENOUGH, key=[lambda: 1])


def test_the_answer_checker_works_and_counts_in_a_process_of_its_own() -> None:
    reward = MathReward(timeout=ENOUGH)
    guard = GuardedReward(reward, ENOUGH)
    given = reward_batch(["p"] * 2, [r"\boxed{6}", "6"], [[1]] * 2, {"answer": [r"\sum_{k=1}^{3}k"] * 2})
    for _ in range(2):
        assert guard.judge(given) == [1.0, 0.0]
        assert guard.take_counters().items() >= {"checks": 2, "no_box": 1, "fallbacks": 1}.items()
    assert guard.take_counters() == {}
    assert reward.take_counters()["checks"] == 0
    guard.close()


def test_no_process_is_left_after_a_fit() -> None:
    pids: list[int] = []

    class Remember(Recorder):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            pids.extend(int(pid) for pid in scored.reward_table["reward"])

    fit(module(of(lambda texts: [float(os.getpid())] * len(texts)), reward_timeout=ENOUGH), 2, [Remember()])
    assert len(set(pids)) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


# ---------------------------------------------------------------- what it does to others


@BOTH
def test_edited_inputs_are_nobody_elses_business(timeout: float | None) -> None:
    def edits(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        prompts[0][0]["content"] = "edited"
        completions.sort()
        completion_ids[0].clear()
        answer[:] = ["edited"] * len(answer)
        return [1.0] * len(completions)

    chats = [[{"role": "user", "content": "hello"}] for _ in range(3)]
    given = reward_batch(chats, ["c", "b", "a"], [[1, 2]] * 3, {"answer": ["x", "y", "z"]})
    guards = [GuardedReward(edits, timeout), GuardedReward(of(lambda texts: map(ord, texts)), timeout)]
    assert [guard.judge(given) for guard in guards] == [[1.0] * 3, [99.0, 98.0, 97.0]]
    assert chats[0][0]["content"] == "hello"
    assert (given["completion_ids"], given["answer"]) == ([[1, 2]] * 3, ["x", "y", "z"])
    for guard in guards:
        guard.close()


def test_edited_inputs_without_a_guard() -> None:
    def sorts(completions: list[str], **_: Any) -> list[float]:
        completions.sort()
        return [0.0] * len(completions)

    table = compute_rewards([sorts, of(lambda texts: map(ord, texts))], None, *[["c", "a"]] * 2, [[1]] * 2, {})[1]
    assert table[:, 1].tolist() == [99.0, 97.0]


def test_settings_of_the_process_are_put_back(tmp_path: Path) -> None:
    def changes(texts: list[str]) -> list[float]:
        os.chdir(tmp_path)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [1.0] * len(texts)

    before = os.getcwd()
    judge(of(changes))
    assert (os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype()) == (before, True, torch.float32)


def test_functions_of_one_name_are_told_apart() -> None:
    def f_2(completions: list[str], **_: Any) -> list[float]:
        return [3.0] * len(completions)

    def f(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    assert reward_names([f, f, f_2, f, f_2]) == ["f", "f_2", "f_2_", "f_3", "f_2_2"]
    one, two = of(lambda texts: [1.0] * len(texts)), of(lambda texts: [5.0] * len(texts))
    metrics = fit(module([one, two]), 1).callback_metrics
    assert (metrics["rewards/reward/mean"], metrics["rewards/reward_2/mean"], metrics["reward"]) == (1, 5, 6)


def test_none_for_all_samples_is_told_and_counted() -> None:
    nothing = of(lambda texts: [None] * len(texts))
    with pytest.warns(UserWarning, match=r"reward function reward returned None for all 16 samples of rollout 0"):
        trainer = fit(module(nothing), 2)
    assert trainer.callback_metrics["empty_rollouts"] == 2
    with pytest.warns(UserWarning, match=r"no token of each of the last 3 .* got no reward: the reward functions"):
        fit(module(nothing), 3)


def test_a_function_that_applies_to_some_is_not_complained_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned None for all")
        fit(module([likes_a, of(lambda texts: [None if text.startswith("b") else 1.0 for text in texts])]), 2)


def test_what_a_call_changes_of_the_process_is_put_back() -> None:
    def seen() -> tuple[Any, ...]:
        return signal.getsignal(signal.SIGUSR1), torch.get_num_threads(), torch.get_default_dtype(), os.getcwd()

    before = seen()
    with undisturbed():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        torch.set_num_threads(before[1] + 1)
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        assert seen() != before
    assert seen() == before
