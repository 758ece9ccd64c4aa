"""The collective that a rank is blocked in, and whether all ranks can still complete theirs."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
OTHERS = tuple(str(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib", "stdlib"))
"""Folders that do not count when the code position of a rank is looked up, except this package."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Recorders of collectives on CPUs (gloo) and GPUs (NCCL), which torch builds without CUDA lack."""


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has begun and not completed."""

    operation: str  # its name in torch
    group: str
    number: int  # among the group's collectives, counted on this rank
    sizes: str  # of this rank's inputs
    place: str  # line that the main thread is in

    @property
    def meeting(self) -> tuple[str, str, int, str]:
        """The fields that must be the same on all ranks for the collective to complete."""
        sizes = "" if self.operation.endswith(":scatter") else self.sizes  # one rank gives what all get
        return self.operation, self.group, self.number, sizes

    def state(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.operation} number {self.number} at {self.place}"


def current_wait() -> Wait | None:
    """The oldest collective that this process has begun and not completed, from torch's recorders of collectives.

    None without such a collective, if the recorders are off (``TORCH_FR_BUFFER_SIZE=0``), or if torch has none.
    """
    private = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(private, name)(True, True) for name in RECORDERS if hasattr(private, name)]
    found = oldest(dumps)
    if found is None:
        return None
    return Wait(
        str(found["profiling_name"]), str(found["process_group"][0]), int(found["collective_seq_id"]),
        str(found["input_sizes"]), place_of(sys._current_frames().get(threading.main_thread().ident or 0)),
    )  # fmt: skip


def oldest(dumps: Iterable[str]) -> dict[str, Any] | None:
    """The oldest entry that has not completed in the recorders' output as JSON, None if all have.

    Each recorder numbers its entries by itself, but they share one clock.
    """
    entries = [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]
    begun = [entry for entry in entries if not entry["retired"] and not entry["is_p2p"]]
    return min(begun, key=lambda entry: int(entry["time_created_ns"]), default=None)


def conflict(waits: Mapping[int, Wait | None]) -> str | None:
    """The reason why ranks that are all blocked, or have left (None), can never continue; None if they can.

    Ranks in one and the same collective are no conflict: they wait for the network.
    """
    meetings = {None if wait is None else wait.meeting for wait in waits.values()}
    if len(meetings) < 2:
        return None
    told = (
        f"rank {rank} {'has ended its training' if wait is None else f'in {wait}'}"
        for rank, wait in sorted(waits.items())
    )
    return (
        f"Ranks wait for each other for ever, each in another collective: {'; '.join(told)}. Something ran on some of "
        "the ranks only, or a different number of times: a callback, a reward, a module's own step."
    )


def place_of(frame: FrameType | None) -> str:
    """The innermost line of a stack outside Python's own and installed packages, and the line it has called."""
    found = next((one for one, _ in walk_stack(frame) if _is_ours(one.f_code.co_filename)), None) if frame else None
    places = [_named(one) for one in (found, frame) if one is not None]
    return ", in ".join(dict.fromkeys(places)) or "an unknown place"


def _named(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    roots = (PACKAGE.parent, *map(Path, OTHERS))
    name = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(PACKAGE) or not filename.startswith((*OTHERS, "<"))
