"""Silences messages about other packages' internals; messages for the user are shown."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers

HIDDEN = (
    # torchdata and Lightning use names that torch 2.13 deprecates
    "'set_vital' is deprecated",
    ".*LeafSpec.*is deprecated",
    # main(args) is meant to be called from Python, where sys.argv belongs to Jupyter or pytest
    "LightningCLI's args parameter is intended to run from within Python",
    # expected when a run is resumed; for a new run we warn ourselves, see warn_of_earlier_run
    "Checkpoint directory .* exists and is not empty",
    # rows are dictionaries in memory: workers would only add overhead
    ".*does not have many workers",
    # no validation rows
    "Total length of `list` across ranks is zero",
)
"""Beginnings of warnings, as regular expressions."""


@contextmanager
def prepared() -> Iterator[None]:
    """Set up any command: classes of the working directory, and no messages about other packages' internals."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own class_path: mine.Compressor
    with warnings.catch_warnings():
        quiet()
        yield


def quiet() -> None:
    """Install the filters; those of ``warnings`` end with the caller's ``catch_warnings``."""
    for message in HIDDEN:
        warnings.filterwarnings("ignore", message)
    # LightningCLI 2.6 calls jsonargparse by names that 4.49 deprecated (instantiate_classes, skip_none, ...)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"lightning\.pytorch\.cli")
    for name in ("lightning.pytorch.utilities.rank_zero", "DeepSpeed"):
        logger = logging.getLogger(name)
        if _is_for_the_user not in logger.filters:
            logger.addFilter(_is_for_the_user)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # "Loading weights" in a log file


def _is_for_the_user(record: logging.LogRecord) -> bool:
    # an advertisement for an online service; DeepSpeed when another package imports it on a machine without a GPU
    return not any(words in record.getMessage() for words in ("litlogger", "Setting accelerator to CPU"))
