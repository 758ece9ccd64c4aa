"""Connections between rank zero and every other rank, separate from the collectives'."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from lightning.pytorch import Trainer

PATIENCE = 60  # seconds within which all ranks must connect, once all have reached the barrier
SILENCE = 5  # seconds within which a new connection must identify itself
Message = dict[str, Any]


class Link:
    """A connection whose messages are lines of JSON, by a socket to another rank that has identified itself.

    A machine that does not respond for ``timeout`` seconds counts as gone.
    """

    def __init__(self, connection: socket.socket, timeout: int) -> None:
        self.connection = connection
        self._rest = b""
        self._sending = threading.Lock()
        self._keep_alive(timeout)

    def send(self, **message: Any) -> None:
        """Send a message; errors are ignored, because the reader learns that the other has gone."""
        try:
            with self._sending:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> list[Message] | None:
        """All messages that have arrived, None once the other has gone."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def _keep_alive(self, timeout: int) -> None:
        """Have the system probe an unresponsive machine three times within the timeout."""
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, timeout // 4))
        if hasattr(socket, "TCP_KEEPCNT"):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def connect(trainer: Trainer, timeout: int) -> dict[int, Link]:
    """Links by rank: rank zero's to all others, every other rank's to rank zero. Collective."""
    trainer.strategy.barrier()  # data may be ready on one rank long before another, which is not an error
    if not trainer.is_global_zero:
        host, port, token = trainer.strategy.broadcast(("", 0, ""))  # rank zero's
        connection = socket.create_connection((host, port), timeout=PATIENCE)
        connection.sendall(f"{token} {trainer.global_rank:08d} {os.getpid():010d}".encode())
        return {0: Link(connection, timeout)}
    with socket.create_server(("", 0)) as server:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        place = trainer.strategy.broadcast((host, server.getsockname()[1], secrets.token_hex(16)))
        found = accept(server, place[2], trainer.world_size)
    return {rank: Link(connection, timeout) for rank, connection in found.items()}


def accept(server: socket.socket, token: str, world_size: int) -> dict[int, socket.socket]:
    """One connection per other rank; strangers are disconnected, silent ones after a while."""
    deadline = time.monotonic() + PATIENCE
    found: dict[int, socket.socket] = {}
    while len(found) < world_size - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would mean no waiting at all
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
