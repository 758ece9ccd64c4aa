"""Processes of one run: threads of torch, ranks that end with their launcher, errors of the network in one line."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

VARIABLE = "SPARSE_RL_LAUNCHER"
"""Environment variable with the id of the process from which Lightning starts the other ranks."""


def set_threads(num_threads: int | None) -> None:
    """Set the number of CPU threads of torch in this process, None for the default."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def follow_launcher() -> None:
    """End a rank with the one that started it, until they have met and notice each other's end.

    Lightning leaves them behind if rank zero fails early. A process that a rank starts itself, such as a command in a
    reward function, inherits its environment but is not a rank.
    """
    launcher = os.environ.pop(VARIABLE, None)
    if launcher is None or os.environ.get("LOCAL_RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ[VARIABLE] = str(os.getpid())  # for the ranks that this one may start
    else:
        threading.Thread(target=_follow, args=(int(launcher),), name="follow_launcher", daemon=True).start()


def network_error(error: torch.distributed.DistNetworkError) -> str:
    """The reason why ranks cannot meet, in one line."""
    address = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
    reason = str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in reason or "in use" in reason:
        return f"The ranks cannot meet at {address}: another program listens there. Set MASTER_PORT to a free port."
    return f"The ranks cannot meet at {address}: {reason}. All must be able to reach MASTER_ADDR and MASTER_PORT."


def _follow(launcher: int) -> None:
    while not torch.distributed.is_initialized():
        if os.getppid() != launcher:
            rank = os.environ.get("LOCAL_RANK", "?")
            print(f"Rank {rank} stops, because rank 0 has ended before they had met.", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.5)
