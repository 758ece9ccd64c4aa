"""Foreign code: what a call of a user's function may change of this process is put back, and its errors say where."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from sparse_rl_lightning.fingerprints import PACKAGE, is_installed
from sparse_rl_lightning.text import printable

SIGNALS = sorted(signal.valid_signals())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back what a call has changed of the process, so that it can neither move the log nor end the run.

    That is the working directory, torch's gradient mode, default type, default device and number of threads, standard
    output and error, and in the main thread the handlers of signals and an alarm that was not set before. Of a call in
    a thread of its own the process has all but the gradient mode: wrap what waits for it.
    """
    dtype, device, num_threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    streams, handlers, had_alarm = (sys.stdout, sys.stderr), _handlers(), any(signal.getitimer(signal.ITIMER_REAL))
    folder = None
    with suppress(OSError):  # the folder was removed meanwhile
        folder = os.getcwd()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        if not had_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        sys.stdout, sys.stderr = streams
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with suppress(OSError):
            if folder is not None:
                os.chdir(folder)


def _handlers() -> dict[int, signal._HANDLER]:
    """The handlers of signals that this thread can set: none but in the main one, and none that C code has set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in found.items() if handler is not None}


def users_line(error: BaseException) -> str:
    """Where a user's code raised an error, as `` (mine.py:12)``: its last line outside of libraries; empty if none."""
    lines = [(Path(one.filename), one.lineno) for one in extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in lines if not (is_installed(file) or file.is_relative_to(PACKAGE))]
    return _place(*own[-1]) if own else ""


def users_function(function: Any) -> str:
    """Where a user's function begins, as `` (mine.py:12)``; empty if it has no lines."""
    code = getattr(function, "__code__", None)
    return "" if code is None else _place(Path(code.co_filename), code.co_firstlineno)


def _place(file: Path, line: int | None) -> str:
    return f" ({printable(file.name)}:{line})"
