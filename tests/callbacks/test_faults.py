"""What goes wrong in long runs: bad gradients, rollouts that are rejected whole, rewards that fail, ranks that die."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from rank_runs import start
from slow_rewards import BACKTRACKING, hurry
from tiny_grpo import Recorder, fit, likes_a, loaded, module, weights

from sparse_rl_lightning.callbacks import EmptyRollouts, RolloutCallback, StepGuard
from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, _reason, _Watch
from sparse_rl_lightning.distributed import rank_links
from sparse_rl_lightning.records import Rollout, ScoredRollout


class Poison(RolloutCallback):
    """Makes the weights of some rollouts' first sequence no numbers."""

    def __init__(self, *rollouts: int, value: float = float("nan")) -> None:
        self.rollouts, self.value = rollouts, value

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        assert module.policy.config  # there is none in the trial, which would refuse it
        if module.num_rollouts in self.rollouts:
            part.weights = part.completion_mask.float()
            part.weights[0] *= self.value


class RejectAll(RolloutCallback):
    """Leaves nothing."""

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.keep = torch.zeros_like(part.completion_mask)


class Weights(RolloutCallback):
    """The weights after every batch."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(weights(pl_module))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_step_is_skipped_and_counted(value: float) -> None:
    """Neither momentum nor weight decay moves anything, and training goes on."""
    seen = Weights()
    with pytest.warns(UserWarning, match=r"optimizer step 2 is not finite: the step is skipped \(1 in a row, 1 in all"):
        trainer = fit(module(optimizer=adam), 3, [Poison(1, value=value), seen])
    first, second, third = seen.seen
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert all(bool(w.isfinite().all()) for w in seen.seen)
    assert float(trainer.callback_metrics["skipped_steps"]) == 1


def test_a_finite_gradient_whose_squares_overflow_is_no_bad_step() -> None:
    trainer = fit(module(lr=0.0), 2, [Poison(0, 1, value=1e25)])
    assert float(trainer.callback_metrics["skipped_steps"]) == 0
    assert float(trainer.callback_metrics["grad_norm"]) == float("inf")


def test_bad_steps_in_a_row_end_the_run_with_their_sequences(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="step 4 is not finite: the step is skipped, as the 1 before") as stop:
        fit(module(), 4, [Poison(0, 2, 3), StepGuard(max_in_a_row=2), recorder], default_root_dir=tmp_path)
    path = tmp_path / "bad_steps" / "step_000004_rank_0.pt"
    assert str(path) in str(stop.value)
    saved = torch.load(path, weights_only=True)
    want = recorder.scored[-1].rollout
    assert saved["step"] == 4
    assert saved["rollout"]["weights"].isnan().any()
    assert sorted(map(tuple, saved["rollout"]["sequences"].tolist())) == sorted(map(tuple, want.sequences.tolist()))


class Lengths(Callback):
    """The gradient's length in float64, and what was logged of it."""

    def __init__(self) -> None:
        self.want: list[float] = []
        self.got: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        squares = [p.grad.double().square().sum() for p in pl_module.policy.parameters() if p.grad is not None]
        self.want += [float(torch.stack(squares).sum().sqrt())] if squares else self.want[-1:]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.got.append(float(trainer.callback_metrics["grad_norm"]))


def test_length_of_the_gradient_is_that_before_clipping() -> None:
    """Of a step that is skipped there is none, so the one before stays."""
    seen = Lengths()
    fit(module(), 3, [Poison(1), StepGuard(), seen], gradient_clip_val=1e-3)
    assert min(seen.want) > 1e-2
    assert seen.want[1] == seen.want[0] != seen.want[2]
    assert seen.got == pytest.approx(seen.want, rel=1e-5)


def test_length_of_the_gradient_of_a_fused_optimizer_is_without_the_loss_scale() -> None:
    """It divides by the scale inside its step, behind the measurement."""
    logged = []
    for fused in (False, True):
        grpo = module(optimizer=lambda parameters, fused=fused: torch.optim.AdamW(parameters, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer = fit(grpo, 1, [StepGuard()], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        logged.append(float(trainer.callback_metrics["grad_norm"]))
    assert logged[1] == pytest.approx(logged[0], rel=1e-2)


def test_float16_looking_for_its_scale_is_not_a_row_of_bad_steps(tmp_path: Path) -> None:
    """The loss scale is halved with every bad step: the third makes it 1 and is the first of three that count."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "default_root_dir": tmp_path}
    with pytest.raises(ValueError, match="step 5 is not finite: the step is skipped, as the 2 before"):
        fit(module(), 5, [Poison(*range(9)), StepGuard(max_in_a_row=3)], **options)
    assert scaler.get_scale() == 8.0 / 2**5


def test_rejecting_everything_is_counted_and_told_once() -> None:
    """The loss is a zero: without momentum nothing moves."""
    seen = Weights()
    said = r"loss saw no token of each of the last 2 rollouts.*Rejection takes.*raise"
    with pytest.warns(UserWarning, match=said) as told:
        trainer = fit(module(), 4, [RejectAll(), EmptyRollouts(warn_after=2), seen])
    assert float(trainer.callback_metrics["empty_rollouts"]) == 4
    assert sum("saw no token" in str(warning.message) for warning in told) == 1
    assert all(torch.equal(seen.seen[0], later) for later in seen.seen)


ALL = 16
EQUAL = [0.25] * ALL
TOLD: list[tuple[dict[str, Any], int, str]] = [  # of three rollouts: how many are empty, and what is told once
    ({}, 0, ""),
    ({"kept": 0}, 3, "The loss saw no token of each of the last 2 rollouts.*Rejection takes.*raise"),
    ({"kept": 7}, 0, "The loss saw less than 50% of the tokens of each of the last 2 .*raise"),
    ({"kept": 8}, 0, ""),
    ({"kept": 1, "few": 0.01}, 0, ""),
    ({"finished": 1}, 0, "cut off at 12 tokens, 94% in the last one"),
    ({"finished": 2}, 0, ""),
    ({"finished": 0, "masked": True}, 3, "The loss saw no token of .* cut off, .*max_completion_length"),
    ({"finished": 1, "masked": True}, 0, "The loss saw less than .* cut off, .*max_completion_length"),
    ({"rewards": EQUAL}, 0, "in each of the last 2 rollouts, 0.25 on average in the last one, .* no policy gradient"),
    ({"rewards": [0.25] * 8 + [0.5] * 8}, 0, "no policy gradient"),
]


@pytest.mark.parametrize(("given", "empty", "message"), TOLD)
def test_rollouts_that_teach_little_are_told_of_once(given: dict[str, Any], empty: int, message: str) -> None:
    """Two prompts with eight samples, of which the first ones end, and are kept."""
    options = {"finished": ALL, "kept": ALL, "rewards": [0.0, 1.0] * 8, "masked": False, "few": 0.5} | given
    each, mask = torch.arange(ALL), torch.tensor([[False, True, True]] * ALL)
    rollout = Rollout(
        sequences=mask.long(), prompt_lengths=torch.ones(ALL, dtype=torch.int64), completion_mask=mask,
        finished=each < options["finished"], sampler_logprobs=torch.zeros(mask.shape),
        rewards=torch.tensor(options["rewards"]), keep=mask & (each < options["kept"])[:, None],
    )  # fmt: skip
    scored = ScoredRollout(rollout, [{}, {}], [""] * ALL, {}, 0)
    grpo, guard = loaded(mask_truncated_completions=options["masked"]), EmptyRollouts(2, options["few"])
    trainer: Any = SimpleNamespace(world_size=1, callbacks=[])
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            guard.on_rollout_scored(trainer, grpo, scored)
    assert guard.count == empty
    assert len(record) == bool(message)
    assert all(re.search(message, str(one.message)) for one in record)


def test_a_reward_that_does_not_fit_is_found_before_the_first_rollout() -> None:
    class Drawn(Recorder):
        def on_rollout_drawn(self, trainer: Any, module: Any, scored: ScoredRollout) -> None:
            self.scored.append(scored)

    def needs(completions: list[str], unheard_of: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    drawn = Drawn()
    with pytest.raises(ValueError, match=r"needs.*missing a required argument: 'unheard_of'"):
        fit(module(needs), 1, [drawn])
    assert drawn.scored == []


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    if any(text.startswith("a") for text in completions):
        re.match(BACKTRACKING, "a" * 40 + "b")
    return likes_a(prompts, completions, **columns)


def test_samples_that_a_reward_function_hangs_on_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, lambda text: text.startswith("a"))
    recorder = Recorder()
    trainer = fit(module(slow, reward_timeout=60.0), 3, [recorder])
    scored = next(s for s in recorder.scored if any(text.startswith("a") for text in s.completions))
    failed = torch.tensor([text.startswith("a") for text in scored.completions])
    assert torch.equal(scored.rollout.rewards.isnan(), failed)
    assert float(scored.rollout.advantages[failed].abs().sum()) == 0
    assert scored.reward_failures == {"slow": int(failed.sum())}
    assert "rewards/slow/failed" in trainer.callback_metrics


VICTIM = """
import os, signal, sys, time
from tiny_grpo import Rows, fit, module
from lightning.pytorch import Callback
from sparse_rl_lightning.modules import SparseGRPO

def die(trainer):
    if trainer.global_rank == {dead}:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)  # busy with something that no collective interrupts

class Die(Callback):
    def on_train_batch_start(self, trainer, *_):
        if "{moment}" == "training" and trainer.global_step == 2:
            die(trainer)

class Dying(SparseGRPO):
    def configure_model(self):
        if "{moment}" == "loading":
            die(self.trainer)
        super().configure_model()

fit(module(kind=Dying), 4, [Die()], data=Rows(prompts_per_rollout=2), devices=2, strategy="ddp")
"""


def test_strangers_neither_block_nor_kill_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one resets, one talks nonsense; the real rank comes last."""
    monkeypatch.setattr(rank_links, "SILENCE", 0.2)
    token = "0" * 32
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent, rude, odd, rank = (socket.create_connection(server.getsockname()) for _ in range(4))
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()
        odd.sendall(b"\xff" * 32 + b" " + b"\xff" * 8)
        rank.sendall(f"{token} {1:08d}".encode())
        found = rank_links.accept(server, token, 2)
        assert {number: place.getpeername() for number, place in found.items()} == {1: rank.getsockname()}
        monkeypatch.setattr(rank_links, "PATIENCE", 0.2)
        with pytest.raises(TimeoutError, match="rank 1 did not connect to rank 0 within 0"):
            rank_links.accept(server, token, 2)
    for connection in (silent, odd, rank, *found.values()):
        connection.close()


@pytest.mark.parametrize(
    ("dead", "moment"),
    [
        (1, "training"),
        pytest.param(0, "training", marks=pytest.mark.slow),
        pytest.param(1, "loading", marks=pytest.mark.slow),
    ],
)
def test_one_rank_dies_and_the_other_says_which_and_stops(dead: int, moment: str, tmp_path: Path) -> None:
    statuses, texts = end(VICTIM.format(dead=dead, moment=moment), tmp_path)
    assert statuses[dead] == -signal.SIGKILL
    assert statuses[1 - dead] == STATUS, texts
    assert f"Rank {dead} has died. Rank {1 - dead} stops as well" in texts[1 - dead]


SLOW = """
import atexit
import time
import torch
from tiny_grpo import Rows, fit, module
from sparse_rl_lightning.distributed import rank_links

rank_links.PATIENCE = 2
atexit.register(lambda: print("GROUP", torch.distributed.is_initialized()))  # runs after what was registered later

class SlowRows(Rows):
    def setup(self, stage):
        time.sleep(4 * (self.trainer.global_rank == {late}))
        super().setup(stage)

fit(module(), 1, data=SlowRows(prompts_per_rollout=2), devices=2, strategy="ddp")
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_take_long_over_its_data(late: int, tmp_path: Path) -> None:
    """Six times the patience that ranks have with each other's connections."""
    statuses, texts = end(SLOW.format(late=late), tmp_path)
    assert statuses == [0, 0], texts
    assert "has died" not in "".join(texts)
    # a group that outlives the interpreter's modules may abort a process that has finished well
    assert all("GROUP False" in text for text in texts)


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
        statuses = [process.wait(280) for process in processes]
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
