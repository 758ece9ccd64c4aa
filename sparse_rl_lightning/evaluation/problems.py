"""A benchmark's problems: their names and numbers, and which of them the model's context has room for."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.text import printable

ROWS_NAMED = 10


@dataclass(frozen=True)
class Problems:
    """The rows of a benchmark, encoded; those that cannot be sampled are kept apart."""

    name: str
    rows: Rows
    sampled: Rows
    prompts: list[Sequence[int]]  # token ids of those that are sampled
    too_long: Rows  # prompt and longest completion exceed the context: not sampled, wrong


def with_room(
    name: str, rows: Rows, prompts: Sequence[Sequence[int]], params: SamplingParams, context: int | None
) -> Problems:
    """Tell the rows apart by the length of their prompts, and warn of those that exceed the context.

    Args:
        name: Name of the benchmark.
        rows: All rows of the benchmark.
        prompts: Token ids of each row.
        params: How the benchmark is sampled.
        context: Tokens of the model's context, None for no limit.

    Raises:
        ValueError: If there is room for none.
    """
    limits = f"max_completion_length={params.max_completion_length} in the model's context of {context} tokens"
    advice = f"lower max_completion_length of model.sampling, or of {name} in model.sampling_of"
    fits = [context is None or len(prompt) + params.max_completion_length <= context for prompt in prompts]
    if not any(fits):
        raise UserError(
            f"{name}: no problem leaves room for {limits}, the shortest prompt has {min(map(len, prompts))} tokens. "
            f"Either {advice}, or leave {name} out of data.benchmarks."
        )
    left_out = [str(row_number(row, n)) for n, row in enumerate(rows) if not fits[n]]
    if left_out:
        more = ", ..." * (len(left_out) > ROWS_NAMED)
        warnings.warn(
            f"{name}: {len(left_out)} of {len(rows)} problems (rows {', '.join(left_out[:ROWS_NAMED])}{more}) leave "
            f"no room for {limits}. They are not sampled and count as wrong. To sample more of them: {advice}.",
            stacklevel=2,
        )
    return Problems(
        name, rows, list(compress(rows, fits)), list(compress(prompts, fits)),
        [row for row, has_room in zip(rows, fits, strict=True) if not has_room],
    )  # fmt: skip


def check_benchmarks(batches: Iterable[Rows]) -> None:
    """Refuse batches that are not a benchmark each.

    Raises:
        ValueError: If :func:`check_benchmark` refuses one of them.
    """
    earlier = set[str]()
    for rows in batches:
        check_benchmark(rows, earlier)
        earlier.add(benchmark_name(rows))


def check_benchmark(rows: Rows, earlier: Collection[str]) -> None:
    """Refuse a batch that is not a benchmark of its own: its results are kept under one name, and reused by it.

    Args:
        rows: The batch.
        earlier: Names of the benchmarks before it.

    Raises:
        ValueError: If the rows name no benchmark, more than one, or one of ``earlier``.
    """
    if "benchmark" not in rows[0]:
        raise UserError("Evaluation tests on MathBenchmarks, whose rows name their benchmark: set data to it.")
    first, *more = benchmark_names(rows)
    if more or first in earlier:
        batch = f"a batch with rows of {first} and {more[0]}" if more else f"a second batch of {first}"
        raise UserError(
            f"Evaluation tests on MathBenchmarks, where every benchmark is one batch, got {batch}. Set data to it, "
            "with a file for each benchmark in data.own."
        )


def benchmark_name(rows: Rows) -> str:
    """The benchmark that rows belong to, fit to be printed; ``data`` where they name none."""
    return benchmark_names(rows[:1])[0]


def benchmark_names(rows: Rows) -> list[str]:
    """The benchmarks of rows that may belong to several, each once."""
    return list(dict.fromkeys(printable(str(row.get("benchmark", "data"))) for row in rows))


def benchmark_number(name: str) -> int:
    """A number of a benchmark that does not depend on which others are evaluated."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big")


def row_number(row: dict[str, Any], position: int) -> int:
    """A benchmark's number of a row, text or not; in other files ``index`` is the user's, and the position counts."""
    index = str(row.get("index")) if "benchmark" in row else ""
    return int(index) if index.isascii() and index.isdigit() else position


def problem_numbers(rows: Rows, *, whole: bool = False) -> Tensor:
    """A number (P,) int64 for each row's problem, the same for copies: rows with the same prompt and answer.

    Rows of environments, which read any column, are copies if they are the same as a ``whole``.
    """
    texts = [json.dumps(row if whole else [row.get("prompt"), row.get("answer")], default=str) for row in rows]
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8] for text in texts]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)
