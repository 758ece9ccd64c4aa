"""UserError, the one error that the command line shows as a line instead of a traceback, and checks that raise it."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, cast, get_args

LEAST, MOST = 2.0**-126, (2 - 2**-23) * 2.0**127
"""The sizes of float32's normal numbers."""


class UserError(ValueError):
    """Input that cannot be used; the message states what was given, what is allowed and what to change.

    ``sparse-rl`` exits with ``error: ...`` and the message. Any other exception is a bug, here or in a user's code, and
    keeps its traceback.
    """


class FileError(OSError, UserError):
    """A path that holds no file that can be read; an OSError too, for those who go on without it."""

    def __str__(self) -> str:
        return f"{self.filename!r}: {self.strerror}"


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    owner: str = "",
    or_none: bool = False,
    whole: bool = False,
) -> None:
    """Refuse what is no number, NaN, infinite, out of range, or not a normal number of float32.

    Options end up in float32, where 1e39 is infinite, and 1e-40 is rounded until nothing of it is left.

    Args:
        name: Of the argument; what follows its last dot is repeated before the value.
        value: What was given for it.
        least: Smallest number allowed.
        above: Largest number that is too small.
        most: Largest number allowed.
        below: Smallest number that is too large.
        owner: The class whose argument it is, where the name alone is not enough.
        or_none: Whether None is allowed too.
        whole: Whether it must be a whole number.

    Raises:
        ValueError: If it is one of these.

    >>> check_number("beta", float("nan"), least=0)
    Traceback (most recent call last):
    ValueError: beta must be a finite number, at least 0, got beta=nan.
    """
    is_number = is_float32(value) and (not whole or hasattr(value, "__index__"))
    if (or_none and value is None) or (is_number and _within(cast(float, value), least, above, most, below)):
        return
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    limits = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    wanted = limits if is_number else f"a {'whole' if whole else 'finite'} number, {limits}".rstrip(", ")
    wanted += sizes_known(value) + ", or null" * or_none
    assignment = f"{name.rpartition('.')[2]}={repr(value) if isinstance(value, str) else value}"
    raise UserError(f"{owner}{': ' * bool(owner)}{name} must be {wanted}, got {assignment}.")


def is_float32(value: object) -> bool:
    """Whether this is a number, numpy's too, that float32 holds in full precision: 0, or of a size that it knows."""
    size = cast(Any, abs(value)) if isinstance(value, Real) else math.nan
    return bool(size == 0 or LEAST <= size <= MOST)  # compared as they are: an int may be too large for a float


def sizes_known(value: object) -> str:
    """The addition to a message's range, if the number given is none that float32 holds."""
    is_finite = isinstance(value, Real) and bool(abs(cast(Any, value)) < math.inf)
    return f" (0, or of a size from {LEAST:.2g} to {MOST:.2g}: float32)" if is_finite and not is_float32(value) else ""


def check_choice(name: str, value: object, choices: Any, owner: str = "", or_none: bool = False) -> None:
    """Refuse a value that is none of a ``Literal``'s.

    Args:
        name: Name of the argument; what follows its last dot is repeated before the value.
        value: Value that was given for it.
        choices: The ``Literal``.
        owner: Class whose argument it is, where the name alone is not enough.
        or_none: Whether None is allowed too.

    Raises:
        ValueError: If it is none of them.
    """
    allowed = get_args(choices)
    if value not in allowed and not (or_none and value is None):
        owner = f"{owner}: " if owner else ""
        assignment = f"{name.rpartition('.')[2]}={value!r}"
        raise UserError(f"{owner}{name} must be one of {', '.join(allowed)}, got {assignment}.")


def check_seed(value: object, name: str = "seed") -> None:
    """Refuse a seed that no generator takes; None is the process's.

    Raises:
        ValueError: If it is no whole number of 64 bits.
    """
    if value is not None and not (isinstance(value, Integral) and -(2**63) <= int(value) < 2**63):
        assignment = f"{name.rpartition('.')[2]}={value}"
        raise UserError(f"{name} must be a whole number of 64 bits, from -2**63 to 2**63 - 1, got {assignment}.")


def _within(value: float, least: float | None, above: float | None, most: float | None, below: float | None) -> bool:
    return (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
