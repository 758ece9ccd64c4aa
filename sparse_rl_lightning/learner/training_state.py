"""TrainingState: the state besides weights and optimizer that a run needs to continue bitwise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (CPU, and CUDA if available), without objects."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # others use the global one
    return {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore all generators to a :func:`random_state`."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        # where the run goes on, fewer GPUs may be in sight
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"][: torch.cuda.device_count()]])


class TrainingState:
    """The random state of training, set aside during validation, and a checkpoint's state until training continues."""

    def __init__(self) -> None:
        self._aside: dict[str, Any] | None = None  # random state, while a validation draws its own numbers
        self._random: dict[str, Any] | None = None  # from a checkpoint, like the block
        self._block: dict[str, Any] | None = None

    @property
    def has_block(self) -> bool:
        """Whether training continues in the middle of a checkpoint's rollout."""
        return self._block is not None

    def stash(self) -> None:
        """Begin a validation: random numbers drawn during it must not affect training."""
        self._aside = random_state()

    def forget(self) -> None:
        """Begin a fit: drop the state that an unfinished validation had set aside."""
        self._aside = None

    def bring_back(self) -> None:
        """End a validation: training continues as if there had been none, since a resumed run does not repeat it."""
        restore_random_state(self.random())
        self._aside = None

    def random(self) -> dict[str, Any]:
        """The random state of training; ModelCheckpoint with a ``monitor`` saves before a validation ends."""
        return random_state() if self._aside is None else self._aside

    def load(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint's block and random state until the first batch."""
        self._block, self._random = state["block"], state["random_state"]

    def resume(self) -> dict[str, Any] | None:
        """Restore the checkpoint's random state and return its block, once."""
        if self._random is not None:
            restore_random_state(self._random)
        block, self._block, self._random = self._block, None, None
        return block
