"""Printing beside a progress bar."""

from __future__ import annotations

import sys

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


def say(text: str) -> None:
    """Print above whatever bar is on the screen; characters the terminal cannot spell become escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    Tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stdout)
