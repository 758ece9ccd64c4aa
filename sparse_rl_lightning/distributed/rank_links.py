"""Connections between rank zero and every other rank, separate from the collectives'."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from lightning.pytorch import Trainer

PATIENCE = 60  # seconds within which all ranks must connect, once all have reached the barrier
SILENCE = 5  # seconds within which a new connection must identify itself


class Link:
    """A connection to a rank that has identified itself, whose messages are JSON.

    A machine silent for ``timeout`` seconds counts as gone.
    """

    def __init__(self, connection: socket.socket, timeout: int) -> None:
        _keep_alive(connection, timeout)
        self.connection = Connection(connection.detach())
        self._sending = threading.Lock()

    def send(self, rank: int, why: str | None) -> None:
        """Say that a rank has ended and why; errors are ignored, because the reader learns that the other has gone."""
        with suppress(OSError), self._sending:
            self.connection.send_bytes(json.dumps([rank, why]).encode())

    def receive(self) -> tuple[int, str | None] | None:
        """The rank and the reason of the next message, None once the other has gone."""
        try:
            rank, why = json.loads(self.connection.recv_bytes())
        except (OSError, EOFError):
            return None
        return rank, why


def _keep_alive(connection: socket.socket, timeout: int) -> None:
    """Have the system probe an unresponsive machine three times within the timeout."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wait = max(1, timeout // 4)
    for option, value in {"TCP_KEEPIDLE": wait, "TCP_KEEPINTVL": wait, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def connect(trainer: Trainer, timeout: int) -> dict[int, Link]:
    """Links by rank: rank zero's to all others, every other rank's to rank zero. Collective."""
    trainer.strategy.barrier()  # data may be ready on one rank long before another, which is not an error
    if not trainer.is_global_zero:
        host, port, token = trainer.strategy.broadcast(("", 0, ""))  # rank zero's
        connection = socket.create_connection((host, port), timeout=PATIENCE)
        connection.sendall(f"{token} {trainer.global_rank:08d}".encode())
        return {0: Link(connection, timeout)}
    with socket.create_server(("", 0)) as server:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        token = trainer.strategy.broadcast((host, server.getsockname()[1], secrets.token_hex(16)))[2]
        connections = accept(server, token, trainer.world_size)
    return {rank: Link(connection, timeout) for rank, connection in connections.items()}


def accept(server: socket.socket, token: str, world_size: int) -> dict[int, socket.socket]:
    """One connection per other rank; strangers are disconnected, silent ones after a while."""
    deadline = time.monotonic() + PATIENCE
    connections: dict[int, socket.socket] = {}
    while len(connections) < world_size - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would mean no waiting at all
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in connections)
            raise TimeoutError(
                f"RankWatch: rank {missing} did not connect to rank 0 within {PATIENCE} s. Its own output says why "
                f"if it has ended; if not, let port {server.getsockname()[1]} and others of rank 0's machine be "
                "reached from the machines of the others."
            ) from None
        connection.settimeout(SILENCE)
        try:
            words = connection.recv(len(token) + 9, socket.MSG_WAITALL).split()
        except OSError:
            words = []
        if len(words) == 2 and secrets.compare_digest(words[0], token.encode()):
            connections[int(words[1])] = connection
        else:
            connection.close()
    return connections
