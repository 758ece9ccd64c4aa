"""A benchmark's problems: which the model's context has room for, and what is said of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.evaluation.tables import row_number
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.rollout import SamplingParams

ROWS_NAMED = 10


@dataclass(frozen=True)
class Problems:
    """The rows of a benchmark, those that cannot be sampled apart."""

    name: str
    sampled: Rows
    too_long: Rows  # prompt and longest completion exceed the context
    limits: str  # what they exceed, for messages

    def __len__(self) -> int:
        """All of them, as accuracy counts them."""
        return len(self.sampled) + len(self.too_long)

    @property
    def all(self) -> Rows:
        """Those that are sampled, and behind them the others."""
        return [*self.sampled, *self.too_long]

    def tell(self) -> None:
        """Name the problems that are not sampled, if there are any."""
        if self.too_long:
            rows = [str(row_number(row, n)) for n, row in enumerate(self.too_long)]
            more = ", ..." * (len(rows) > ROWS_NAMED)
            rank_zero_warn(
                f"{self.name}: {len(rows)} of {len(self)} problems (rows {', '.join(rows[:ROWS_NAMED])}{more}) leave "
                f"no room for {self.limits}. They are not sampled and count as wrong. To sample more of them: "
                f"{_advice(self.name)}."
            )


def with_room(
    name: str, rows: Rows, prompts: Sequence[Sequence[int]], params: SamplingParams, context: int | None
) -> Problems:
    """Tell the rows apart by the length of their prompts.

    Args:
        name: Of the benchmark.
        rows: All its rows.
        prompts: Their token ids.
        params: How it is sampled.
        context: Tokens of the model's context, None for no limit.

    Raises:
        ValueError: If there is room for none.
    """
    limits = f"max_completion_length={params.max_completion_length} in the model's context of {context} tokens"
    fits = [context is None or len(prompt) + params.max_completion_length <= context for prompt in prompts]
    if not any(fits):
        raise ValueError(
            f"{name}: no problem leaves room for {limits}, the shortest prompt has {min(map(len, prompts))} tokens. "
            f"Either {_advice(name)}, or leave {name} out of data.benchmarks."
        )
    sampled, too_long = ([row for row, own in zip(rows, fits, strict=True) if own is kind] for kind in (True, False))
    return Problems(name, sampled, too_long, limits)


def _advice(name: str) -> str:
    return f"lower model.max_completion_length, or model.max_completion_length_of if it names {name}"
