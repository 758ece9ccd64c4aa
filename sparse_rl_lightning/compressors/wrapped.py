"""Wrapped: what compressors made of other compressors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor, ModelSizes, checked_method
from sparse_rl_lightning.compressors.entries import newest_queries
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import LayerState, StateUpdate

SIZES = (
    "buffer", "num_sinks", "window", "compress_prompt", "budget_rule", "protect_prompt", "protect_token_ids",
    "protect_observations",
)  # fmt: skip

NEEDS = "needs_attention", "needs_hidden_states", "needs_output_norms", "needs_turns", "needs_layer_index"
"""Declarations that a compressor around others passes on."""


class Wrapped(Compressor):
    """A compressor around others: their budget and sizes, the queries that each reads, and their running numbers.

    Subclasses write :meth:`score`, from :meth:`part_scores`.

    Args:
        compressors: Methods inside, one or more, of the same budget and sizes.

    Raises:
        ValueError: If a method never evicts, or keeps its scores (:attr:`Compressor.score_field`).
    """

    def __init__(self, compressors: Sequence[Compressor]) -> None:
        name = type(self).__name__
        for method in map(checked_method, compressors):
            if not method.evicts:
                raise UserError(f"{name}: {method} never evicts, so there are no scores to work on. Leave it out.")
            if method.score_field:
                raise UserError(
                    f"{name}: {type(method).__name__} keeps its scores, which must be the final ones. Put "
                    f"{type(method).__name__} around {name}, or leave it out."
                )
        super().__init__(compressors[0].schedule, **{size: getattr(compressors[0], size) for size in SIZES})
        self._parts = list(compressors)
        for need in NEEDS:
            setattr(self, need, any(getattr(method, need) for method in (self, *compressors)))
        rotations = [method.needs_rotation for method in (self, *compressors)]
        self.needs_rotation = max(rotations, key=(False, "partial", "whole").index)

    def _set_budget(self, budget: int | LengthSchedule) -> None:
        super()._set_budget(budget)
        for method in getattr(self, "_parts", ()):  # none yet in __init__, where they give the budget
            method._set_budget(budget)

    def layer_budgets(self, num_layers: int, budget: int | None = None) -> list[int]:
        """Those of the rule, which every method may refuse."""
        for method in self._parts:
            method.layer_budgets(num_layers, budget)
        return super().layer_budgets(num_layers, budget)

    @property
    def num_queries(self) -> int:
        """The largest number that a method reads."""
        return max(method.num_queries for method in self._parts)

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Names of all methods, numbered."""
        return tuple(f"{index}.{name}" for index, method in enumerate(self._parts) for name in method.state_fields)

    def head_state_fields(self, head_dim: int) -> dict[str, int]:
        """Names of all methods, numbered."""
        return {
            f"{index}.{name}": width
            for index, method in enumerate(self._parts)
            for name, width in method.head_state_fields(head_dim).items()
        }

    def check_model(self, sizes: ModelSizes) -> None:
        """Let every method refuse the model."""
        for method in self._parts:
            method.check_model(sizes)

    def update_state(self, update: StateUpdate) -> None:
        """Let every method with running numbers update them."""
        for method, state, head_state in self._with_numbers(update):
            if state or head_state:
                method.update_state(replace(update, state=state, head_state=head_state))

    def part_scores(self, layer: LayerState) -> list[Tensor]:
        """Scores (S, H, N) of each method, +inf for protected tokens."""
        return [method._protected(method._shaped_score(view), view) for method, view in self._views(layer)]

    def _views(self, layer: LayerState) -> list[tuple[Compressor, LayerState]]:
        """Each method with what it sees: its running numbers and as many queries as it reads."""
        return [
            (method, newest_queries(replace(layer, state=state, head_state=head_state), method.num_queries))
            for method, state, head_state in self._with_numbers(layer)
        ]

    def _with_numbers(
        self, shown: LayerState | StateUpdate
    ) -> list[tuple[Compressor, dict[str, Tensor], dict[str, Tensor]]]:
        """Each method with its running numbers."""
        return [
            (method, _numbers_of(shown.state, i), _numbers_of(shown.head_state, i))
            for i, method in enumerate(self._parts)
        ]

    def _refuse_nan(self, scores: Tensor, layer: LayerState) -> None:
        for method, view in self._views(layer):
            method._refuse_nan(method._shaped_score(view), view)
        super()._refuse_nan(scores, layer)


def _numbers_of(numbers: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The numbers of one method, under the names that it gave them."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in numbers.items() if name.startswith(prefix)}
