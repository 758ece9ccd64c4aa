"""The contract of a compressor, and a complete check whose messages explain what to change."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.rewards.base import users_line
from sparse_rl_lightning.testing.rules import RULES
from sparse_rl_lightning.text import say

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
"""Default arguments of a checked class: small, so that tiny sequences are evicted from."""

MAX_CAPACITY = 64


class ContractError(AssertionError):
    """A compressor breaks a rule, or raises where one is checked; the message says which, and what to change."""


def check_compressor(compressor: Compressor | type[Compressor], **arguments: Any) -> None:
    """Check that a compressor keeps the whole contract, in less than a second; failures explain what to change.

    Random layers of two heads and 16 channels are scored in every way that a rollout does, and a rollout of
    ``tiny_model()`` is sampled and replayed. Statistics and networks of a compressor must therefore fit it. If all is
    well, a line says so.

    Args:
        compressor: Class, which is built with small sizes, or small instance (``budget + buffer`` up to 64).
        **arguments: Arguments of the class, besides or instead of ``budget=10, buffer=4, num_sinks=2, window=3``.

    Raises:
        ContractError: At the first rule that is broken, or at an error of the compressor's own.

    Example::

        check_compressor(KNorm)
        check_compressor(SnapKV(budget=12, buffer=4, num_sinks=1, window=4))
    """
    with torch.no_grad():  # as in rollouts
        _check(_build(compressor, arguments))


def _check(subject: Compressor) -> None:
    for rule in RULES:
        try:
            violation = rule.find(subject)
        except Exception as error:
            change = f"The traceback above shows where. What the rule asks for: {rule.change}"
            _fail(subject, rule.name, _raised(error), change, error)
        if violation is not None:
            _fail(subject, rule.name, violation, rule.change)
    say(f"{type(subject).__name__} keeps the contract of compressors: {len(RULES)} rules.")


def _build(compressor: Compressor | type[Compressor], arguments: dict[str, Any]) -> Compressor:
    if isinstance(compressor, Compressor):
        subject = compressor
    else:
        try:
            subject = compressor(**(SIZES | arguments))
        except Exception as error:
            change = (
                "An own __init__ takes budget and **sizes and passes them to super().__init__. Give arguments of your "
                "own to check_compressor, or check an instance: check_compressor(MyCompressor(...))."
            )
            if isinstance(error, AttributeError) and "no setter" in str(error):  # num_queries, state_fields
                change = (
                    "It is a property of Compressor. Give the class an attribute of that name first, such as "
                    "num_queries = 8; then __init__ may assign another value."
                )
            _fail(compressor, "constructor", _raised(error), change, error)
    capacity = getattr(subject, "budget", 0) + getattr(subject, "buffer", 0)
    if capacity > MAX_CAPACITY:
        size = f"budget + buffer = {capacity} tokens"
        _fail(subject, "size", size, f"Check a small one, up to {MAX_CAPACITY}, such as budget=10, buffer=4.")
    return subject


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}{users_line(error)}"


def _fail(subject: Any, rule: str, violation: str, change: str, cause: Exception | None = None) -> NoReturn:
    name = subject.__name__ if isinstance(subject, type) else type(subject).__name__
    how = f"breaks the rule {rule!r}" if cause is None else f"raised an error while the rule {rule!r} was checked"
    raise ContractError(f"{name} {how}.\n  Found: {violation}\n  Change: {change}") from cause
