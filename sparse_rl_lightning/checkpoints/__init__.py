"""Checkpoints that are complete or absent, and read without trusting their source.

A file is written under ``.incomplete/``, flushed to the disk and renamed; a folder of shards likewise, and the one it
replaces stays under ``.replaced/`` until the new one has its name. A save that fails leaves the last good checkpoint,
and the run continues. Files are read with ``weights_only``. DeepSpeed and FSDP2 unpickle their shards, so those are
read only from a folder whose manifest of hashes has the signature of this user's key.
"""

from __future__ import annotations

from sparse_rl_lightning.checkpoints.durable import DurableCheckpointIO

__all__ = ["DurableCheckpointIO"]
