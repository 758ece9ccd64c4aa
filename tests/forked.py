"""Two ranks in a process group: this process and a fork of it, for what exchanges numbers and trains nothing."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

Work = Callable[[int], Any]


def two_ranks(work: Work, folder: Path) -> list[Any]:
    """What each rank returns, as a launcher starts them; an error of the fork's is raised here."""
    child = os.fork()
    if not child:
        try:
            found: Any = _joined(work, 1, folder)
        except BaseException:
            found = RuntimeError(traceback.format_exc())
        (folder / "found").write_bytes(pickle.dumps(found))
        os._exit(0)
    try:
        own = _joined(work, 0, folder)
    except Exception:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    other = pickle.loads((folder / "found").read_bytes())
    if isinstance(other, Exception):
        raise other
    return [own, other]


def _joined(work: Work, rank: int, folder: Path) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        return work(rank)
    finally:
        torch.distributed.destroy_process_group()
        os.environ.pop("TORCHELASTIC_RUN_ID")  # the others are taken back after every test
