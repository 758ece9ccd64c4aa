"""What is computed at the end of ``fit`` is computed on the device of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer


@contextmanager
def on_training_device(trainer: Trainer) -> Iterator[None]:
    """The module on its device again, in ``on_fit_end``: Lightning has moved it into the memory of the host.

    ``on_train_end``, where it has not, comes before the last checkpoint, and in no fit whose steps are all done.
    """
    module = trainer.lightning_module
    before = module.device
    module.to(trainer.strategy.root_device)
    try:
        yield
    finally:
        module.to(before)
