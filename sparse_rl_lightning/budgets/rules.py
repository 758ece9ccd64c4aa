"""Budget rules: how layers and heads share the tokens that are kept.

Rules know no scoring method, and methods know no rule. ``budget`` is a mean: every rule keeps about
``budget`` tokens per layer and KV head, so a rule moves memory around and does not add any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.ops.evict import rank_entries


class BudgetRule:
    """Distributes ``budget`` tokens per layer and KV head; the base class gives all of them the same."""

    splits_heads = False
    """Whether the heads of a layer may keep different numbers of tokens: where a subclass has its own head_budgets."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "splits_heads" not in vars(cls) and "head_budgets" in vars(cls):
            cls.splits_heads = True

    def layer_budgets(self, budget: int, num_layers: int, minimum: int) -> list[int]:
        """Tokens per KV head of each layer, a mean over its heads, by which memory is sized.

        Args:
            budget: Budget of the compressor, or one of its schedule.
            num_layers: Layers of the model.
            minimum: Number of tokens per head that are never evicted, sinks and window.

        Returns:
            One number per layer, fixed for the whole run.

        Raises:
            ValueError: If a head would get less than the minimum.
        """
        return [budget] * num_layers

    def head_budgets(self, scores: Tensor, candidates: Tensor, layer_budget: int | Tensor, minimum: int) -> Tensor:
        """The tokens that each head keeps at this compression; their sum is at most ``layer_budget`` times the heads.

        Args:
            scores: (S, H, N) float, higher is kept; a slot's heads may be compared, slots may not.
            candidates: (S, H, N) bool, the live entries that compete: neither sinks nor window.
            layer_budget: Budget of the layer from :meth:`layer_budgets`; where a schedule gives slots different ones,
                (S,) int64.
            minimum: Number of tokens per head that are kept besides the candidates.

        Returns:
            The budgets (S, H) int32.
        """
        if isinstance(layer_budget, Tensor):
            return layer_budget.to(scores.device, torch.int32)[:, None].expand(scores.shape[:2]).contiguous()
        return torch.full(scores.shape[:2], layer_budget, dtype=torch.int32, device=scores.device)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class Uniform(BudgetRule):
    """The same budget for every layer and head."""


def checked_rule(name: str, value: object) -> BudgetRule:
    """The rule given, ``Uniform`` for None.

    Raises:
        ValueError: If it is a class or something else.
    """
    if value is not None and not isinstance(value, BudgetRule):
        raise UserError(f"{name} must be a rule such as Pyramid(), got {value!r}.")
    return value or Uniform()


class Pyramid(BudgetRule):
    """Many tokens for the first layer, few for the last, on a straight line (PyramidKV, arXiv 2406.02069).

    The last layer gets ``budget / beta``, the first as much more than ``budget`` as the last gets less. These are the
    numbers of kvpress's PyramidKVPress for long sequences; where that falls back to equal budgets because the last
    layer would get too little, this rule raises an error.

    Args:
        beta: Ratio of the mean budget to the last layer's, at least 1; 1 is uniform.
    """

    def __init__(self, beta: float = 20) -> None:
        check_number("beta", beta, least=1, owner="Pyramid")  # 1 gives every layer the same budget
        self.beta = beta

    def layer_budgets(self, budget: int, num_layers: int, minimum: int) -> list[int]:
        """A straight line through ``budget`` in the middle, rounded to integers."""
        last = budget / self.beta
        first = 2 * budget - last
        step = (first - last) / max(num_layers - 1, 1)
        if num_layers == 1:
            return [budget]
        budgets = [round(first - layer * step) for layer in range(num_layers)]
        if budgets[-1] < minimum:
            raise UserError(
                f"Pyramid: the last of {num_layers} layers would keep {budgets[-1]} tokens per head, fewer than the "
                f"{minimum} of num_sinks + window that are never evicted. Raise budget={budget} to {minimum} x beta = "
                f"{round(minimum * self.beta)}, or lower beta={self.beta:g} to {budget / minimum:.3g}."
            )
        return budgets


class Adaptive(BudgetRule):
    """Heads of a layer share its tokens: the best scores of all heads together are kept (Ada-KV, arXiv 2407.11550).

    Every head keeps at least ``floor`` tokens. The scores must be comparable between heads, as shares of attention are
    (SnapKV, TOVA, H2O, ExpectedAttention); norms and cosines may differ from head to head by nature. Ada-KV applies
    its floor to the scores of the whole prompt; here sinks and window count toward it.

    Args:
        floor: Tokens that every head keeps, null for a fifth of the layer's budget, as in the paper.
        layers: Rule by which the layers share, null for equally; ``Pyramid`` gives the paper's Ada-Pyramid.
    """

    def __init__(self, floor: int | None = None, layers: BudgetRule | None = None) -> None:
        check_number("floor", floor, least=0, owner="Adaptive", or_none=True)
        self.floor = floor
        self.layers = checked_rule("layers", layers)

    def layer_budgets(self, budget: int, num_layers: int, minimum: int) -> list[int]:
        """Budgets by the rule ``layers``, of which none may be below ``floor``."""
        budgets = self.layers.layer_budgets(budget, num_layers, minimum)
        if self.floor is not None and self.floor > min(budgets):
            raise UserError(
                f"Adaptive: floor={self.floor} exceeds the {min(budgets)} tokens per head of layer "
                f"{budgets.index(min(budgets))}. Lower floor, or raise budget={budget}."
            )
        return budgets

    def head_budgets(self, scores: Tensor, candidates: Tensor, layer_budget: int | Tensor, minimum: int) -> Tensor:
        """The minimum, plus the number of a head's candidates among the best of its layer."""
        if isinstance(layer_budget, Tensor):
            layer_budget = layer_budget.to(scores.device).view(-1, 1, 1)
        floor = layer_budget // 5 if self.floor is None else self.floor
        num_free = (layer_budget - minimum) * scores.shape[1]
        ranked = scores.masked_fill(~candidates, -torch.inf)
        # within a head, then over all heads: candidates secured by the floor or +inf, other candidates, the rest
        secured = candidates & (
            (rank_entries(ranked, candidates.to(torch.int8)) < floor - minimum) | (ranked == torch.inf)
        )
        classes = candidates.to(torch.int8) + secured.to(torch.int8)
        best = rank_entries(ranked.flatten(1), classes.flatten(1)).view_as(scores) < num_free
        return minimum + (candidates & best).sum(dim=-1, dtype=torch.int32)
