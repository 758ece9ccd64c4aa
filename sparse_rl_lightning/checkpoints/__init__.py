"""Checkpoints that are whole or not there, and that are read without trusting anyone.

A file is written under ``.incomplete/``, flushed to the disk and renamed; a folder of shards likewise, and what it
replaces waits under ``.replaced/`` until the new one has its name. A save that fails leaves the last good checkpoint,
and the run goes on. Files are read with ``weights_only``. DeepSpeed unpickles its shards, so those are read only from
a folder whose manifest of hashes carries the signature of this user's key.
"""

from __future__ import annotations

from sparse_rl_lightning.checkpoints.durable import DurableCheckpointIO
from sparse_rl_lightning.checkpoints.files import recover

__all__ = ["DurableCheckpointIO", "recover"]
