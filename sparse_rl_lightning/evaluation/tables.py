"""Names of caches and benchmarks, and the table of completions that an evaluation writes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards.math import Convention, MathChecker, extract_answer
from sparse_rl_lightning.text import printable, prompt_text

Table: TypeAlias = dict[str, list[Any]]
CORRECT_COLUMNS: dict[Convention, str] = {"strict": "correct", "lenient": "correct_lenient"}
KV_COLUMNS = ("kv_stored", "kv_full", "kv_stored_steps", "kv_full_steps")


def name_arms(caches: Sequence[Compressor | Retriever]) -> dict[str, Compressor | Retriever]:
    """A short name for every cache, fit for a folder: ``dense``, ``RKV-512``, and a number where names repeat."""
    arms: dict[str, Compressor | Retriever] = {}
    for cache in caches:
        is_dense = isinstance(cache, Compressor) and not cache.evicts
        name = "dense" if is_dense else f"{type(cache).__name__}-{cache.budget}"
        same = [arm for arm in arms if arm == name or arm.startswith(f"{name}#")]
        arms[f"{name}#{len(same) + 1}" if same else name] = cache
    return arms


def benchmark_name(rows: Rows) -> str:
    """The benchmark that rows belong to, fit to be printed; ``data`` where they say none."""
    return printable(str(rows[0].get("benchmark", "data")))


def benchmark_number(name: str) -> int:
    """A number of a benchmark that does not depend on which others are evaluated."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big")


def row_number(row: dict[str, Any], place: int) -> int:
    """A benchmark's number of a row, text or not; in any other file ``index`` is the user's, and the place is taken."""
    index = str(row.get("index")) if "benchmark" in row else ""
    return int(index) if index.isascii() and index.isdigit() else place


def joined(tables: Sequence[Table]) -> Table:
    """Tables of the same columns as one."""
    return {key: [value for table in tables for value in table[key]] for key in tables[0]}


def unsampled_table(rows: Rows, samples: int) -> Table:
    """What stands for problems that were not sampled: wrong answers without a text."""
    repeated = [row for row in rows for _ in range(samples)]
    count = len(repeated)
    return {
        "index": [row_number(row, n) for n, row in enumerate(rows) for _ in range(samples)],
        "sample": list(range(samples)) * len(rows),
        "prompt": [prompt_text(row["prompt"]) for row in repeated],
        "completion": [None] * count,
        "answer": [str(row["answer"]) for row in repeated],
        "extracted": [None] * count,
        **{column: [False] * count for column in CORRECT_COLUMNS.values()},
        "finished": [False] * count,
        **{key: [0] * count for key in ("length", *KV_COLUMNS)},
    }


def completion_table(rows: Rows, rollout: Rollout, texts: Sequence[str], checker: MathChecker) -> Table:
    """A rollout with its answers checked: column names with a value per completion."""
    samples = len(texts) // len(rows)
    repeated = [row for row in rows for _ in range(samples)]
    assert rollout.kv is not None
    golds, tolerances = [str(row["answer"]) for row in repeated], [float(row.get("tolerance") or 0) for row in repeated]
    verdicts = checker.check_both(texts, golds, tolerances)
    return {
        "index": [row_number(row, n) for n, row in enumerate(rows) for _ in range(samples)],
        "sample": list(range(samples)) * len(rows),
        "prompt": [prompt_text(row["prompt"]) for row in repeated],
        "completion": list(texts),
        "answer": golds,
        "extracted": [extract_answer(text) for text in texts],
        **{column: verdicts[answers] for answers, column in CORRECT_COLUMNS.items()},
        "length": rollout.completion_lengths.tolist(),
        "finished": rollout.finished.tolist(),
        "kv_stored": rollout.kv.stored.tolist(),
        "kv_full": rollout.kv.full.tolist(),
        "kv_stored_steps": rollout.kv.stored_integral.tolist(),
        "kv_full_steps": rollout.kv.full_integral.tolist(),
        "kv_peak_bytes": [rollout.kv.peak_bytes] * len(texts),
    }
