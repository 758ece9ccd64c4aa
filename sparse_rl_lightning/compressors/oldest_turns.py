"""OldestTurns: conversations lose whole turns, the oldest first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import BudgetRule, LengthSchedule
from sparse_rl_lightning.budgets.rules import checked_rule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.evict import rank_entries
from sparse_rl_lightning.ops.pools import live_entries
from sparse_rl_lightning.records import LayerState


class WholeTurns(BudgetRule):
    """The budgets of another rule, less what they would keep of entries that share a score with an evicted one."""

    def __init__(self, rule: BudgetRule) -> None:
        self.rule = rule

    def layer_budgets(self, budget: int, num_layers: int, minimum: int) -> list[int]:
        """Those of the other rule."""
        return self.rule.layer_budgets(budget, num_layers, minimum)

    def head_budgets(self, scores: Tensor, candidates: Tensor, layer_budget: int | Tensor, minimum: int) -> Tensor:
        """The minimum, plus the number of a head's candidates that score above all that it loses."""
        room = self.rule.head_budgets(scores, candidates, layer_budget, minimum) - minimum
        lost = candidates & (rank_entries(scores, candidates.to(torch.int8)) >= room.unsqueeze(-1))
        highest = scores.masked_fill(~lost, -torch.inf).amax(dim=-1, keepdim=True)
        return minimum + (candidates & (scores > highest)).sum(dim=-1, dtype=torch.int32)


class OldestTurns(Compressor):
    """Evict whole turns of a conversation, the oldest first, and never the prompt.

    A turn is what the policy wrote between two observations, or an observation. A turn that does not fit leaves as a
    whole, so a head may keep less than ``budget``. Turns that reach into the ``window`` lose their oldest tokens only,
    and these only where the budget does not hold them; a completion without turns is one of these, which makes this
    :class:`StreamingLLM` with a protected prompt. All heads keep the same tokens. Memory is laid out as for
    ``Adaptive``: how much a turn has freed is known on the device alone.

    Args:
        budget: Most tokens kept per layer and KV head after a compression, the prompt among them; a number, or a
            schedule by length.
        protect_prompt: Whether the prompt is never evicted, as in :class:`Compressor`; else it is the oldest turn.
        budget_rule: Rule by which layers and heads share the budget, null for equally.
        **sizes: Other arguments of :class:`Compressor`.
    """

    num_queries = 0
    needs_turns = True

    def __init__(
        self, budget: int | LengthSchedule, *, protect_prompt: bool = True, budget_rule: BudgetRule | None = None,
        **sizes: Any,
    ) -> None:  # fmt: skip
        rule = WholeTurns(checked_rule("budget_rule", budget_rule))
        super().__init__(budget, protect_prompt=protect_prompt, budget_rule=rule, **sizes)

    def score(self, layer: LayerState) -> Tensor:
        """The number of the turn, plus the position where it reaches into the window: (S, H, N)."""
        turns = torch.zeros_like(layer.positions) if layer.turns is None else layer.turns
        older = live_entries(layer.lengths - self.window, turns.shape[-1])
        first = turns.masked_fill(older | ~layer.valid, torch.iinfo(turns.dtype).max).amin(dim=-1, keepdim=True)
        return torch.where(turns < first, turns, turns + layer.positions).to(torch.float32)
