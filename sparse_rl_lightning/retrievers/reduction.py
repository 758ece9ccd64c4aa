"""The choice of what a group of query heads that read the same pages wants."""

from __future__ import annotations

from typing import get_args

from sparse_rl_lightning.ops.select_pages import PageReduction


def check_reduction(owner: object, group_reduction: PageReduction) -> PageReduction:
    """The reduction, refused if there is none of this name.

    Raises:
        ValueError: With the choices.
    """
    if group_reduction not in get_args(PageReduction):
        raise ValueError(
            f"{type(owner).__name__}: group_reduction must be one of {', '.join(get_args(PageReduction))}, got "
            f"group_reduction={group_reduction!r}."
        )
    return group_reduction
