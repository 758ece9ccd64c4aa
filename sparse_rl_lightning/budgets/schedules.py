"""LengthSchedule: a budget that follows the length of each sequence (Sparrow, arXiv 2606.08446).

The longer a sequence, the more tokens it takes to keep the sparse policy as close to the dense one: a schedule spends
little while a sequence is short. The budget for each length is calibrated once per model; see ``docs/sparrow.md``.
"""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from importlib import resources
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import output_file, whole_file, write_whole

DATA = "published_schedules.json"
GROWTH_OF_ONE = Fraction(5, 4)  # factor that raises a schedule with a single budget


class LengthSchedule:
    """Budget as a step function of a sequence's length, prompt included: ``budgets[i]`` from ``starts[i]`` tokens on.

    The last budget has no end.

    Args:
        starts: Lengths in tokens at which a budget begins, ascending, the first 0.
        budgets: Tokens per layer and KV head, one for each start.

    Example::

        RKV(budget=LengthSchedule(starts=[0, 2000, 4000], budgets=[512, 1024, 1536]), buffer=256)
    """

    def __init__(self, starts: Sequence[int] = (), budgets: Sequence[int] = ()) -> None:
        self.starts = tuple(starts)
        self.budgets = tuple(budgets)
        arguments = f"got starts={list(self.starts)}, budgets={list(self.budgets)}"
        if not self.starts or len(self.starts) != len(self.budgets):
            raise UserError(f"LengthSchedule: give one budget for every start, at least one; {arguments}.")
        if not all(hasattr(number, "__index__") for number in (*self.starts, *self.budgets)):
            raise UserError(f"LengthSchedule: starts and budgets are whole numbers of tokens; {arguments}.")
        if self.starts[0] != 0 or any(b <= a for a, b in pairwise(self.starts)):
            raise UserError(f"LengthSchedule: starts must begin with 0 and ascend; {arguments}.")
        if min(self.budgets) < 1:
            raise UserError(f"LengthSchedule: budget must be a positive number of tokens everywhere; {arguments}.")

    @classmethod
    def constant(cls, budget: int) -> LengthSchedule:
        """The same budget for every length."""
        return LengthSchedule([0], [budget])

    @classmethod
    def of_bins(cls, budgets: Sequence[int], bin_size: int) -> LengthSchedule:
        """One budget for each bin of ``bin_size`` tokens, equal neighbors as one step."""
        changes = [i for i, budget in enumerate(budgets) if i == 0 or budget != budgets[i - 1]]
        return LengthSchedule([i * bin_size for i in changes], [budgets[i] for i in changes])

    @classmethod
    def from_file(cls, path: str | Path) -> LengthSchedule:
        """Read a YAML or JSON file: a mapping of ``starts`` and ``budgets``, as :meth:`save` writes it.

        Raises:
            ValueError: If there is no such file, or no schedule in it.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"there is no schedule at {str(path)!r}. `sparse-rl calibrate` writes one.")
        text = whole_file(file, 2**24)
        try:
            content = yaml.safe_load(text)
        except Exception as error:  # KeyError and RecursionError too
            raise UserError(f"{path} is neither YAML nor JSON: {error}") from error
        if isinstance(content, dict):
            content = content.get("init_args", content)
        lists = [content.get(name) for name in ("starts", "budgets")] if isinstance(content, dict) else [None]
        if not all(isinstance(numbers, list) for numbers in lists):
            raise UserError(f"{path} holds no schedule: give a mapping of starts and budgets, both lists.")
        return LengthSchedule(*lists)

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write :meth:`yaml` to a file, where a link leads."""
        write_whole(output_file(path, "path"), self.yaml(comment))

    def yaml(self, comment: str = "") -> str:
        """The text of a file that :meth:`from_file` reads, also to be pasted after ``budget:`` in a configuration.

        The lines of ``comment`` stand in front.
        """
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        lines += ["class_path: LengthSchedule", "init_args:", f"  starts: {list(self.starts)}"]
        return "\n".join([*lines, f"  budgets: {list(self.budgets)}", ""])

    # ---------------------------------------------------------------- reading it

    def at(self, length: int) -> int:
        """The budget of a sequence of ``length`` tokens."""
        return self.budgets[self.level(length)]

    def level(self, length: int) -> int:
        """The index of the step that ``length`` falls into, from 0."""
        return max(bisect_right(self.starts, length) - 1, 0)

    def lookup(self, lengths: Tensor) -> Tensor:
        """The budgets of a tensor of lengths, as in :meth:`at`, on its device: the same shape, int64."""
        starts = torch.tensor(self.starts, device=lengths.device)
        level = torch.bucketize(lengths.to(torch.int64), starts, right=True) - 1
        return torch.tensor(self.budgets, device=lengths.device)[level.clamp(min=0)]

    @property
    def maximum(self) -> int:
        """The largest budget, which determines the size of the memory."""
        return max(self.budgets)

    @property
    def minimum(self) -> int:
        """The smallest budget."""
        return min(self.budgets)

    @property
    def is_constant(self) -> bool:
        """Whether all lengths have the same budget."""
        return self.maximum == self.minimum

    @property
    def plain(self) -> int | LengthSchedule:
        """The number itself if all lengths have the same budget, else the schedule."""
        return self.maximum if self.is_constant else self

    @property
    def shrinks(self) -> bool:
        """Whether some longer sequence has a smaller budget."""
        return any(b < a for a, b in pairwise(self.budgets))

    def raised(self, steps: int = 1) -> LengthSchedule:
        """The schedule with every budget replaced by its next larger one, ``steps`` times.

        The largest grows by its difference from the second largest; a single budget grows by a quarter.
        """
        if steps == 0:
            return LengthSchedule(self.starts, self.budgets)
        levels = sorted(set(self.budgets))
        top = 2 * levels[-1] - levels[-2] if len(levels) > 1 else ceil(levels[-1] * GROWTH_OF_ONE)
        following = dict(pairwise([*levels, top]))
        return LengthSchedule(self.starts, [following[budget] for budget in self.budgets]).raised(steps - 1)

    def __str__(self) -> str:
        if self.is_constant:
            return str(self.maximum)
        return f"{self.minimum} to {self.maximum} by length"

    def __repr__(self) -> str:
        return f"LengthSchedule(starts={list(self.starts)}, budgets={list(self.budgets)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LengthSchedule) and (self.starts, self.budgets) == (other.starts, other.budgets)

    def __hash__(self) -> int:
        return hash((self.starts, self.budgets))


class ScheduleFile(LengthSchedule):
    """A schedule from a file, such as one written by ``sparse-rl calibrate``.

    Args:
        path: Path of a YAML or JSON file for :meth:`LengthSchedule.from_file`.
    """

    def __init__(self, path: str) -> None:
        schedule = self.from_file(path)
        super().__init__(schedule.starts, schedule.budgets)


class PublishedSchedule(LengthSchedule):
    """A schedule that Sparrow ships for retrieval with pages of 16 tokens on Qwen3 (arXiv 2606.08446 and its code).

    Budgets count the pages chosen by score; Sparrow reads one first and two last pages besides, 48 tokens, which the
    budget of a retriever here includes: ``reserved=48``. The number in the name is the 5th percentile of the acceptance
    that is held. Some schedules are published only in part: their last known budget continues, with a warning.

    Args:
        name: Name of model and target, such as ``qwen3-1.7b-0.86``.
        reserved: Tokens to add to every budget.
    """

    def __init__(self, name: str, reserved: int = 0) -> None:
        schedules = published_schedules()
        if name not in schedules:
            raise UserError(
                f"PublishedSchedule: name must be one of {', '.join(sorted(schedules))}, got name={name!r}."
            )
        published = schedules[name]
        budgets: list[int] = published["budgets"]
        if not published["complete"]:
            warnings.warn(
                f"{name} is known up to {published['bin_size'] * len(budgets)} tokens only; its last known budget, "
                f"{budgets[-1]}, is used behind them.",
                stacklevel=2,
            )
        steps = self.of_bins([budget + reserved for budget in budgets], published["bin_size"])
        super().__init__(steps.starts, steps.budgets)
        self.name = name


def published_schedules() -> dict[str, dict[str, Any]]:
    """Sparrow's schedules by name: ``budgets`` by bins of ``bin_size`` tokens, and whether they are ``complete``."""
    text = resources.files(__package__).joinpath(DATA).read_text(encoding="utf-8")
    schedules: dict[str, dict[str, Any]] = json.loads(text)["schedules"]
    return schedules
