"""RankWatch: when one rank dies, the others say which, and stop."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer

ALIVE, GOODBYE = b"a", b"g"
PATIENCE = 60  # seconds until all ranks must have connected, once all are there
SILENCE = 5  # seconds that one which has connected may take to say who it is
STATUS = 75  # EX_TEMPFAIL: nothing is wrong with the run, it can be resumed


class RankWatch(Callback):
    """Every rank holds a connection to rank zero; one that breaks without a goodbye ends all ranks within seconds.

    Otherwise ranks wait for a dead one in their next collective: on GPUs until its timeout, 30 minutes by default. A
    process that dies closes its connections at once; a machine that vanishes is noticed after ``timeout``. The ranks
    that are left end with status 75 and without saving: what they have is not whole. Modules that roll out add this
    callback themselves; a single process is not watched.

    Args:
        timeout: Seconds after which a silent machine counts as dead.

    Raises:
        ValueError: If the time is shorter than 3 seconds.
    """

    def __init__(self, timeout: int = 30) -> None:
        if timeout < 3:
            raise ValueError(f"RankWatch: timeout must be at least 3 seconds, got timeout={timeout}.")
        self.timeout = timeout
        self._connections: dict[int, socket.socket] = {}
        self._ending = threading.Event()
        self._rank = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect the ranks before they load anything large, and watch in a thread of its own."""
        if trainer.world_size == 1 or stage != "fit":
            return
        self._rank = trainer.global_rank
        self._ending.clear()
        trainer.strategy.barrier()  # the data may be ready on one rank long before another, which is no fault
        if trainer.is_global_zero:
            with socket.create_server(("", 0)) as server:
                host = os.environ.get("MASTER_ADDR") or socket.gethostname()
                place = trainer.strategy.broadcast((host, server.getsockname()[1], secrets.token_hex(16)))
                self._connections = self._accept(server, place[2], trainer.world_size)
        else:
            host, port, token = trainer.strategy.broadcast(("", 0, ""))  # rank zero's
            connection = socket.create_connection((host, port), timeout=PATIENCE)
            connection.sendall(f"{token} {self._rank:08d} {os.getpid():010d}".encode())
            self._connections = {0: connection}
        for connection in self._connections.values():
            self._keep_alive(connection)
        threading.Thread(target=self._watch, name="RankWatch", daemon=True).start()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say goodbye: from now on ranks may end in any order."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A rank that fails goes without a goodbye, unless all stop together."""
        if isinstance(exception, (SystemExit, KeyboardInterrupt)):
            self._leave()

    def _accept(self, server: socket.socket, token: str, world_size: int) -> dict[int, socket.socket]:
        """One connection per other rank; strangers are sent away, those that say nothing after a while."""
        deadline = time.monotonic() + PATIENCE
        found: dict[int, socket.socket] = {}
        while len(found) < world_size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would mean not to wait at all
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in found)
                raise TimeoutError(
                    f"RankWatch: rank {missing} did not connect to rank 0 within {PATIENCE} s. Its own output says why "
                    f"if it has ended; if not, let port {server.getsockname()[1]} and others of rank 0's machine be "
                    "reached from the machines of the others."
                ) from None
            connection.settimeout(SILENCE)
            try:
                words = connection.recv(len(token) + 20, socket.MSG_WAITALL).split()
            except OSError:
                words = []
            if len(words) == 3 and secrets.compare_digest(words[0], token.encode()):
                found[int(words[1])] = connection
            else:
                connection.close()
        return found

    def _keep_alive(self, connection: socket.socket) -> None:
        """Have the system ask a silent machine three times within the timeout."""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, self.timeout // 4))
        if hasattr(socket, "TCP_KEEPCNT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def _watch(self) -> None:
        """Wait for connections to break. Rank zero hears of a rank and tells the others its number."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    word = _read(key.fileobj)
                    if word == GOODBYE or self._ending.is_set():
                        selector.unregister(key.fileobj)
                    else:
                        self._stop(int(word) if word else key.data)

    def _stop(self, dead: int) -> NoReturn:
        """Tell who died, to the other ranks and to the user, and end this process whatever it is doing."""
        if self._rank == 0:
            for rank, connection in self._connections.items():
                if rank != dead:
                    _send(connection, f"{dead:08d}".encode())
        print(
            f"Rank {dead} has died. Rank {self._rank} stops as well, because no step can be finished without it. The "
            f"cause is in rank {dead}'s own output; go on from the last checkpoint with --ckpt_path=last.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(STATUS)

    def _leave(self) -> None:
        self._ending.set()
        for connection in self._connections.values():
            _send(connection, GOODBYE)
        self._connections = {}


def _read(connection: socket.socket) -> bytes:
    """A goodbye, the number of a dead rank, or nothing from a connection that broke."""
    try:
        first = connection.recv(1)
        return first if first in (b"", GOODBYE) else first + connection.recv(7, socket.MSG_WAITALL)
    except OSError:
        return b""


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        pass  # it is gone
