"""RankWatch: ends all ranks, with the reason, when one of them ends."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from multiprocessing import connection
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from sparse_rl_lightning.distributed.rank_links import Link, connect
from sparse_rl_lightning.distributed.ranks import be_patient
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.text import printable, visible

STATUS = 75  # EX_TEMPFAIL: nothing is wrong with the run, it can be resumed
INTERVAL = 10.0  # seconds after which the thread notices that this rank has signed off, at most
GRACE = 3  # seconds in which a rank may end by itself, for the same reason as another
RESUME = "go on from the last checkpoint with --ckpt_path=last."


class AgreedExit(SystemExit):
    """The exit of all ranks together."""


class RankWatch(Callback):
    """End all ranks within seconds if one ends, and report which and why.

    Otherwise ranks wait for a dead one in their next collective until its timeout: four hours, set by this callback.
    Every rank has a connection to rank zero. One that raises an error notifies the others before it ends; one that is
    killed breaks its connection; a machine that disappears is noticed after ``timeout``.

    The remaining ranks end with status 75 and without saving, since their state is incomplete. Modules that roll out
    add this callback themselves; a single process is not watched.

    Args:
        timeout: Seconds after which a silent machine counts as dead.

    Raises:
        ValueError: If the time is too short.
    """

    def __init__(self, timeout: int = 30) -> None:
        check_number("timeout", timeout, least=3, owner="RankWatch")
        self.timeout = timeout
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect the ranks before they load anything large, and watch in a separate thread."""
        if trainer.world_size > 1 and stage == "fit":
            self._watch = _Watch(trainer.global_rank, connect(trainer, self.timeout))
            threading.Thread(target=self._watch.run, name="RankWatch", daemon=True).start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have collectives wait, now that all groups are there: a rank that has ended is found by this callback."""
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

    def __init__(self, rank: int, links: dict[int, Link]) -> None:
        self.rank, self.links = rank, links
        self.ending = threading.Event()  # this rank ends by itself, with or without an error
        self.suffers = threading.Event()  # a collective has failed here, because of another rank
        self.left: set[int] = set()

    def leave(self) -> None:
        """Sign off."""
        self.ending.set()
        self._send(self.rank, "")

    def fail(self, exception: BaseException) -> None:
        """Send the reason; if a collective failed, the rank that ended is reported first, which ends this one too."""
        if isinstance(exception, RuntimeError) and re.search("gloo|nccl", str(exception), re.IGNORECASE):
            self.suffers.set()
            time.sleep(GRACE)
        self.ending.set()
        self._send(self.rank, _reason(exception))

    def _send(self, rank: int, why: str | None) -> None:
        for receiver, link in self.links.items():
            if receiver != rank:
                link.send(rank, why)

    def run(self) -> None:
        """Receive messages from the others until all have left."""
        ranks: dict[Any, int] = {link.connection: rank for rank, link in self.links.items()}
        while not self.ending.is_set() or self.links.keys() - self.left:
            for ready in connection.wait(ranks, INTERVAL):
                message = self.links[ranks[ready]].receive()
                if message is None:
                    rank, why = ranks.pop(ready), None
                    has_ended = rank not in self.left and not self.ending.is_set()
                else:
                    rank, why = message
                    has_ended = why != ""
                if has_ended:
                    self._end_with(rank, why)
                self.left.add(rank)

    def _end_with(self, rank: int, why: str | None) -> None:
        """End this process at any point, unless it ends by itself; rank zero notifies the others first."""
        if self.rank == 0:
            self._send(rank, why)
        if why is not None and not self.suffers.is_set() and self.ending.wait(GRACE):
            return
        how = "has died." if why is None else f"has ended: {why.rstrip('.')}."
        cause = f"The cause is in rank {rank}'s own output; " * (why is None)
        text = (
            f"Rank {rank} {how} Rank {self.rank} stops as well, because no step can be finished without it. "
            f"{cause}{RESUME if cause else RESUME.capitalize()}"
        )
        print(visible(text), file=sys.stderr, flush=True)  # not say(): a stuck thread may hold its lock
        os._exit(STATUS)


def _reason(exception: BaseException) -> str:
    """Describe an exception in one line: its type, its message, and where it was raised."""
    lines = traceback.extract_tb(exception.__traceback__)
    where = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].name})" if lines else ""
    message = printable(str(exception).strip().partition("\n")[0])  # it may quote what a model wrote
    return f"{type(exception).__name__}{where}{': ' * bool(message)}{message}"
