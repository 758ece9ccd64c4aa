"""RankWatch: ends all ranks, with the reason, when one dies or they wait for each other forever."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
import traceback
from multiprocessing import connection
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from sparse_rl_lightning.distributed.collectives import Wait, conflict, current_wait, place_of
from sparse_rl_lightning.distributed.rank_links import Link, Message, connect
from sparse_rl_lightning.distributed.ranks import be_patient
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.text import printable, visible

STATUS = 75  # EX_TEMPFAIL: nothing is wrong with the run, it can be resumed
INTERVAL = 10.0  # seconds between two checks of a rank's collective, at most
GRACE = 3  # seconds in which a rank may end by itself, for the same reason as another
RESUME = "go on from the last checkpoint with --ckpt_path=last."


class AgreedExit(SystemExit):
    """The exit of all ranks together."""


class RankWatch(Callback):
    """End all ranks within seconds if one ends or ranks wait for each other forever; report which and where.

    Otherwise ranks wait for a dead one in their next collective until its timeout: four hours, set by this callback.
    Every rank has a connection to rank zero. One that raises an error notifies the others before it ends; one that is
    killed breaks its connection; a machine that disappears is noticed after ``timeout``.

    Ranks wait for each other forever if code that runs on only some of them begins a collective. They are ended
    when *every* rank has been in one for ``stuck_after`` seconds, and not all in the same. A rank that draws, loads
    data, computes a reward or saves, for however long, is in none. Each rank's place is reported, from torch's recorder
    of collectives.

    The remaining ranks end with status 75 and without saving, since their state is incomplete. Modules that roll out
    add this callback themselves; a single process is not watched.

    Args:
        timeout: Seconds after which a silent machine counts as dead.
        stuck_after: Seconds in a collective after which a rank reports it; null never ends waiting ranks.

    Raises:
        ValueError: If a time is too short.
    """

    def __init__(self, timeout: int = 30, stuck_after: float | None = 300) -> None:
        check_number("timeout", timeout, least=3, owner="RankWatch")
        check_number("stuck_after", stuck_after, least=1, owner="RankWatch", or_none=True)
        self.timeout = timeout
        self.stuck_after = stuck_after
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect the ranks before they load anything large, and watch in a separate thread."""
        if trainer.world_size > 1 and stage == "fit":
            links, device = connect(trainer, self.timeout), trainer.strategy.root_device
            self._watch = _Watch(trainer.global_rank, links, self.stuck_after, device)
            threading.Thread(target=self._watch.run, name="RankWatch", daemon=True).start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have collectives wait, now that all groups are there: who will never come is found by this callback."""
        if self._watch is not None:
            be_patient(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sign off: from now on ranks may end in any order, when no callback's ``on_fit_end`` waits for others."""
        if self._watch is not None and stage == "fit":
            self._watch.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Notify the others why this rank ends, unless all stop together or it ends because of another."""
        if self._watch is not None:
            self._watch.leave() if isinstance(exception, AgreedExit) else self._watch.fail(exception)


class _Watch:
    """The exchange of a rank with the others during one fit; ``links`` are those of :func:`connect`."""

    def __init__(self, rank: int, links: dict[int, Link], stuck_after: float | None, device: torch.device) -> None:
        self.rank, self.links, self.stuck_after, self.device = rank, links, stuck_after, device
        self.interval = INTERVAL if stuck_after is None else min(INTERVAL, stuck_after / 4)
        self.ending = threading.Event()  # this rank ends by itself, with or without an error
        self.suffers = threading.Event()  # a collective has failed here, because of another rank
        self.left: set[int] = set()
        self.answers: dict[int, Wait | None] = {}  # answers to the last question
        self.unanswered: set[int] = set()
        self._wait: Wait | None = None  # collective at the last check
        self._looks = 0  # checks of the same collective; counted, because time goes on while a process is stopped
        self._looked = time.monotonic()

    # ---------------------------------------------------------------- this rank's own end

    def leave(self) -> None:
        """Sign off."""
        self.ending.set()
        for link in self.links.values():
            link.send(kind="goodbye")

    def fail(self, exception: BaseException) -> None:
        """Send the reason; if a collective failed, the rank that ended is reported first, which ends this one too."""
        if isinstance(exception, RuntimeError) and re.search("gloo|nccl", str(exception), re.IGNORECASE):
            self.suffers.set()
            time.sleep(GRACE)
        self.ending.set()
        for link in self.links.values():
            link.send(kind="end", rank=self.rank, why=_reason(exception))

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Receive messages from the others, and check what this rank waits for, until all have left."""
        if self.device.type == "cuda":  # a thread begins on the first GPU, where looking takes memory of another rank
            torch.cuda.set_device(self.device)
        ranks: dict[Any, int] = {link.connection: rank for rank, link in self.links.items()}
        while not self.ending.is_set() or self.links.keys() - self.left:
            for ready in connection.wait(ranks, self.interval):
                rank = ranks[ready]
                message = self.links[rank].receive()
                if message is not None:
                    self._hear(rank, message)
                    continue
                del ranks[ready]
                if rank not in self.left and not self.ending.is_set():
                    self._end_with(rank, None)
                self.left.add(rank)
            if self.stuck_after is not None and time.monotonic() - self._looked >= self.interval:
                self._look()

    def _hear(self, rank: int, message: Message) -> None:
        if message["kind"] == "goodbye":
            self.left.add(rank)
            self.unanswered.discard(rank)
        elif message["kind"] == "end":
            self._end_with(message["rank"], message["why"])
            self.left.add(message["rank"])
        elif message["kind"] == "stop":
            self._stop(message["why"])
        elif message["kind"] == "question":
            wait = self._own()
            self.links[0].send(kind="answer", wait=None if wait is None else wait.state())
        elif message["kind"] == "answer":
            self.answers[rank] = None if message["wait"] is None else Wait(**message["wait"])
            self.unanswered.discard(rank)
            if not self.unanswered:
                self._judge()

    def _end_with(self, rank: int, why: str | None) -> None:
        """End this process at any point, unless it ends by itself; rank zero notifies the others first."""
        if self.rank == 0:
            for other, link in self.links.items():
                if other != rank:
                    link.send(kind="end", rank=rank, why=why)
        if why is not None and not self.suffers.is_set() and self.ending.wait(GRACE):
            return
        how = "has died." if why is None else f"has ended: {why.rstrip('.')}."
        cause = f"The cause is in rank {rank}'s own output; " * (why is None)
        self._exit(
            f"Rank {rank} {how} Rank {self.rank} stops as well, because no step can be finished without it. "
            f"{cause}{RESUME if cause else RESUME.capitalize()}"
        )

    # ---------------------------------------------------------------- ranks that wait for each other

    def _look(self) -> None:
        """Check what this rank waits for. If that takes too long, rank zero asks the others."""
        wait, self._looked = current_wait(), time.monotonic()
        self._looks = self._looks + 1 if wait is not None and wait == self._wait else 0
        self._wait = wait
        if self._own() is None or self.unanswered:
            return
        if self.rank == 0:
            self.unanswered, self.answers = self.links.keys() - self.left, {}
            for rank in self.unanswered:
                self.links[rank].send(kind="question")
        if not self.links.keys() - self.left:  # nobody is left to answer, or to ask
            self._judge()

    def _own(self) -> Wait | None:
        """The collective that this rank has been in for too long, None if it is doing something else."""
        if self._wait is None or self._looks * self.interval < (self.stuck_after or math.inf):
            return None
        return self._wait if self._wait == current_wait() else None

    def _judge(self) -> None:
        """Decide when all have answered. Each then was in its collective at the moment when it was asked."""
        present = self.answers | {self.rank: self._own()}
        if any(wait is None for wait in present.values()):
            return  # this rank is doing something else
        why = conflict(present | dict.fromkeys(self.left))
        if why is not None:
            for link in self.links.values():
                link.send(kind="stop", why=why)
            self._stop(why)

    def _stop(self, why: str) -> NoReturn:
        self._exit(f"{why} Rank {self.rank} stops as all do; {RESUME}")

    def _exit(self, text: str) -> NoReturn:
        print(visible(text), file=sys.stderr, flush=True)  # not say(): a stuck thread may hold its lock
        os._exit(STATUS)


def _reason(exception: BaseException) -> str:
    """Describe an exception in one line: its type, its message, and where it was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    where = f" at {place_of(frames[-1])}" if frames else ""
    said = printable(str(exception).strip().partition("\n")[0])  # it may quote what a model wrote
    return f"{type(exception).__name__}{where}{': ' * bool(said)}{said}"
