"""Wrapper: a compressor made of other compressors, whose sizes, queries and running numbers it passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import newest_queries
from sparse_rl_lightning.records import LayerState, StateUpdate

_SIZES = ("schedule", "buffer", "num_sinks", "window", "compress_prompt", "budget_rule")


class Wrapper(Compressor):
    """Base of the compressors that change or combine the scores of others; subclasses write ``score``.

    Budget, buffer, sinks, window and budget rule are those of the parts, which must agree. Each part sees as many
    queries as it asks for, and running numbers of its own.

    Args:
        parts: The compressors inside.

    Raises:
        ValueError: If there is none, one never evicts, or they differ in a size.
    """

    def __init__(self, parts: Sequence[Compressor]) -> None:
        name = type(self).__name__
        if not parts:
            raise ValueError(f"{name}: give at least one compressor.")
        first = parts[0]
        for part in parts:
            if not part.evicts:
                raise ValueError(f"{name}: {part} never evicts, so there are no scores to work on. Leave it out.")
            for size in _SIZES:
                own, other = _size(first, size), _size(part, size)
                if own != other:
                    raise ValueError(
                        f"{name}: all compressors inside must have the same {own[0]}, but {type(first).__name__} has "
                        f"{own[0]}={own[1]} and {type(part).__name__} has {own[0]}={other[1]}."
                    )
        sizes = {size: getattr(first, size) for size in _SIZES if size != "schedule"}
        super().__init__(first.schedule, **sizes)
        self._parts = list(parts)

    def _set_budget(self, budget: int | LengthSchedule) -> None:
        super()._set_budget(budget)
        for part in getattr(self, "_parts", ()):  # none yet in __init__, where the budget is theirs
            part._set_budget(budget)

    @property
    def num_queries(self) -> int:
        """The most that any part asks for."""
        return max(part.num_queries for part in self._parts)

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Those of all parts, numbered."""
        return tuple(f"{index}.{name}" for index, part in enumerate(self._parts) for name in part.state_fields)

    def head_state_fields(self, head_dim: int) -> dict[str, int]:
        """Those of all parts, numbered."""
        parts = enumerate(part.head_state_fields(head_dim) for part in self._parts)
        return {f"{index}.{name}": width for index, fields in parts for name, width in fields.items()}

    @property
    def needs_attention(self) -> bool:
        """Whether any part does."""
        return any(part.needs_attention for part in self._parts)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether any part does."""
        return any(part.needs_hidden_states for part in self._parts)

    @property
    def needs_output_norms(self) -> bool:
        """Whether any part does."""
        return any(part.needs_output_norms for part in self._parts)

    def update_state(self, update: StateUpdate) -> None:
        """Every part that has running numbers updates its own."""
        for index, part in enumerate(self._parts):
            state, head_state = _own(update.state, index), _own(update.head_state, index)
            if state or head_state:
                part.update_state(replace(update, state=state, head_state=head_state))

    def part_scores(self, layer: LayerState) -> list[Tensor]:
        """(S, H, N) of each part, checked as any compressor's."""
        return [part.checked_score(own) for part, own in zip(self._parts, self._own_layers(layer), strict=True)]

    def _own_layers(self, layer: LayerState) -> list[LayerState]:
        """What each part sees of the layer."""
        return [
            replace(
                newest_queries(layer, part.num_queries),
                state=_own(layer.state, index),
                head_state=_own(layer.head_state, index),
            )
            for index, part in enumerate(self._parts)
        ]

    def __repr__(self) -> str:
        own = {name: value for name, value in vars(self).items() if name not in _SIZES and not name.startswith("_")}
        arguments = [*map(repr, self._parts), *(f"{name}={value!r}" for name, value in own.items())]
        return f"{type(self).__name__}({', '.join(arguments)})"


def _own(numbers: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Those of one part, under its own names."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): own for name, own in numbers.items() if name.startswith(prefix)}


def _size(part: Compressor, name: str) -> tuple[str, str]:
    """A size as a user gave it: the argument and its value."""
    return ("budget", repr(part.schedule.plain)) if name == "schedule" else (name, repr(getattr(part, name)))
