"""Results of a benchmark under one cache: numbers, the table of completions, and both on disk for a later run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.evaluation.evaluate import Scores
from sparse_rl_lightning.evaluation.problems import Problems, problem_numbers, row_number
from sparse_rl_lightning.files import file_name, from_json, own_folder, whole_file, write_parquet, write_whole
from sparse_rl_lightning.metrics import Accuracy, accuracy
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards.math import CONVENTIONS, Convention, MathChecker, extract_answer
from sparse_rl_lightning.text import prompt_text

Table: TypeAlias = dict[str, list[Any]]
CORRECT_COLUMNS: dict[Convention, str] = {"strict": "correct", "lenient": "correct_lenient"}


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark under one cache."""

    benchmark: str
    cache: str  # dense, or a compressor with its budget
    fingerprint: dict[str, str]  # of everything that decides the result, by name
    accuracy: Accuracy  # of answers that count strictly
    lenient: Accuracy  # of answers that graders of papers pay
    mean_length: float  # tokens
    clipped: float  # share of completions cut off by the length limit
    kv_saving_final: float  # share of KV tokens not stored at the end of the sequences
    kv_saving_integral: float  # the same over all decode steps
    kv_peak_bytes: int
    seconds: float
    counters: dict[str, int] = field(default_factory=dict)  # of the answer checker
    too_long: int = 0  # problems for which the context has no room: not sampled, wrong in accuracy, in nothing else

    @classmethod
    def of(
        cls,
        problems: Problems,
        cache: str,
        fingerprint: dict[str, str],
        scores: Scores,
        seconds: float,
        counters: dict[str, int],
    ) -> BenchmarkResult:
        """Add up the scores of the problems that were sampled; the others are wrong."""
        missing = torch.zeros(len(problems.too_long), scores.num_samples)
        tables = (torch.cat([scores.table[answers].view(-1, scores.num_samples), missing]) for answers in CONVENTIONS)
        numbers = torch.cat([scores.problems, problem_numbers(problems.too_long)])
        strict, lenient = (accuracy(table == 1, numbers) for table in tables)
        assert scores.kv is not None
        stored, full, stored_steps, full_steps = (
            float(counts.double().sum())
            for counts in (scores.kv.stored, scores.kv.full, scores.kv.stored_integral, scores.kv.full_integral)
        )
        return cls(
            problems.name, cache, fingerprint, strict, lenient,
            mean_length=float(scores.lengths.double().mean()),
            clipped=1 - float(scores.finished.double().mean()),
            kv_saving_final=1 - stored / max(1, full),
            kv_saving_integral=1 - stored_steps / max(1, full_steps),
            kv_peak_bytes=scores.kv.peak_bytes, seconds=seconds, counters=counters,
            too_long=len(problems.too_long),
        )  # fmt: skip

    def by(self, answers: Convention) -> Accuracy:
        """The accuracy by a convention of what counts as the answer."""
        return self.accuracy if answers == "strict" else self.lenient

    def differs_in(self, fingerprint: Mapping[str, str]) -> str:
        """What it was measured of that is another now, as the end of a line; empty if nothing is."""
        names = [name for name, own in fingerprint.items() if self.fingerprint.get(name) != own]
        if not self.fingerprint:
            return "does not say what it is of"
        return f"is of other settings ({', '.join(names)})" if names else ""

    @property
    def measure(self) -> str:
        """``Pass@1``, or ``Avg@32``."""
        samples = self.accuracy.num_samples
        return "Pass@1" if samples == 1 else f"Avg@{samples}"


def name_caches(caches: Sequence[Compressor | Retriever]) -> dict[str, Compressor | Retriever]:
    """A short name for every cache, fit for a folder: ``dense``, ``RKV-512``, and a number where names repeat."""
    named: dict[str, Compressor | Retriever] = {}
    for cache in caches:
        is_dense = isinstance(cache, Compressor) and not cache.evicts
        name = "dense" if is_dense else f"{type(cache).__name__}-{cache.budget}"
        same = [other for other in named if other == name or other.startswith(f"{name}#")]
        named[f"{name}#{len(same) + 1}" if same else name] = cache
    return named


def judge_answers(scored: ScoredRollout, checker: MathChecker) -> Tensor:
    """(B,) 1 where the answer is strictly right; the reward table gets both conventions."""
    repeated = _repeated(scored.rows, scored.num_generations)
    golds = [str(row["answer"]) for row in repeated]
    tolerances = [float(row.get("tolerance") or 0) for row in repeated]
    verdicts = checker.check_both(scored.completions, golds, tolerances)
    scored.reward_table = {answers: torch.tensor(verdicts[answers]).float() for answers in CONVENTIONS}
    return scored.reward_table["strict"]


def completion_table(problems: Problems, scores: Scores) -> Table:
    """Columns with a value per completion; problems that were not sampled stand last, wrong and without a text."""
    samples, kv = scores.num_samples, scores.kv
    assert kv is not None
    rows = [*problems.sampled, *problems.too_long]
    repeated = _repeated(rows, samples)

    def padded(values: list[Any], missing: Any) -> list[Any]:
        return [*values, *[missing] * (samples * len(problems.too_long))]

    return {
        "benchmark": [problems.name] * len(repeated),
        "index": [row_number(row, n) for n, row in enumerate(rows) for _ in range(samples)],
        "sample": list(range(samples)) * len(rows),
        "prompt": [prompt_text(row["prompt"]) for row in repeated],
        "completion": padded(scores.texts, None),
        "answer": [str(row["answer"]) for row in repeated],
        "extracted": padded([extract_answer(text) for text in scores.completions], None),
        **{column: padded((scores.table[name] == 1).tolist(), False) for name, column in CORRECT_COLUMNS.items()},
        "length": padded(scores.lengths.tolist(), 0),
        "finished": padded(scores.finished.tolist(), False),
        "kv_stored": padded(kv.stored.tolist(), 0),
        "kv_full": padded(kv.full.tolist(), 0),
        "kv_stored_steps": padded(kv.stored_integral.tolist(), 0),
        "kv_full_steps": padded(kv.full_integral.tolist(), 0),
    }


class ResultFolder:
    """A JSON and a parquet file for every benchmark and cache; the JSON is written last, when both are whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, benchmark: str, cache: str) -> BenchmarkResult | None:
        """A finished result, whatever it is of; None if there is none, or it cannot be read."""
        try:
            stored = json.loads(whole_file(self._file(benchmark, cache, "json"), 2**30))
            for name in ("accuracy", "lenient"):
                counts = stored[name]
                counts["pass_at"] = {int(k): value for k, value in counts["pass_at"].items()}
                stored[name] = from_json(Accuracy, counts)
            own = stored["fingerprint"]
            found = from_json(BenchmarkResult, stored | {"fingerprint": own if isinstance(own, dict) else {}})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return found if (found.benchmark, found.cache) == (benchmark, cache) else None

    def save(self, result: BenchmarkResult, completions: Table) -> None:
        """Write both files."""
        path = self._file(result.benchmark, result.cache, "json")
        own_folder(self.path)
        own_folder(path.parent)
        write_parquet(path.with_suffix(".parquet"), completions)
        write_whole(path, json.dumps(dataclasses.asdict(result), indent=2) + "\n")

    def write(self, name: str, content: str | bytes) -> Path:
        """Write another file and return its path."""
        own_folder(self.path)
        write_whole(self.path / name, content)
        return self.path / name

    def _file(self, benchmark: str, cache: str, suffix: str) -> Path:
        return self.path / file_name(cache) / f"{file_name(benchmark)}.{suffix}"


def _repeated(rows: Rows, samples: int) -> Rows:
    return [row for row in rows for _ in range(samples)]
