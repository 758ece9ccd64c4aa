"""Results of a benchmark under one cache: numbers, the table of completions, both on disk, and a table to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.evaluation.evaluate import Scores
from sparse_rl_lightning.evaluation.problems import Problems, problem_numbers, row_number
from sparse_rl_lightning.files import file_name, from_json, own_folder, write_parquet
from sparse_rl_lightning.fingerprints import read_results, write_results
from sparse_rl_lightning.metrics import Accuracy, accuracy, mean_accuracy
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards.math import CONVENTIONS, Convention, MathChecker, extract_answer, tolerance_of
from sparse_rl_lightning.text import interval, number, percent, prompt_text, size, table

Table: TypeAlias = dict[str, list[Any]]
CORRECT_COLUMNS: dict[Convention, str] = {"strict": "correct", "lenient": "correct_lenient"}


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark under one cache."""

    benchmark: str
    cache: str  # dense, or a compressor with its budget
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
            problems.name, cache, strict, lenient,
            mean_length=float(scores.lengths.double().mean()),
            clipped=1 - float(scores.finished.double().mean()),
            kv_saving_final=1 - stored / max(1, full),
            kv_saving_integral=1 - stored_steps / max(1, full_steps),
            kv_peak_bytes=scores.kv.peak_bytes, seconds=seconds, counters=counters,
            too_long=len(problems.too_long),
        )  # fmt: skip

    @classmethod
    def of_stored(cls, content: dict[str, Any]) -> BenchmarkResult:
        """The result that :meth:`ResultFolder.save` wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If a field is missing, or of another type.
        """
        for name in ("accuracy", "lenient"):
            pass_at = {int(k): value for k, value in content[name]["pass_at"].items()}
            content[name] = from_json(Accuracy, content[name] | {"pass_at": pass_at})
        result: BenchmarkResult = from_json(cls, content)
        return result

    def by(self, answers: Convention) -> Accuracy:
        """The accuracy by a convention of what counts as the answer."""
        return self.accuracy if answers == "strict" else self.lenient

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
        same = [taken for taken in named if taken == name or taken.startswith(f"{name}#")]
        named[f"{name}#{len(same) + 1}" if same else name] = cache
    return named


def judge_answers(scored: ScoredRollout, checker: MathChecker) -> Tensor:
    """(B,) 1 where the answer is strictly right; the reward table gets both conventions."""
    repeated = _repeated(scored.rows, scored.num_generations)
    golds = [str(row["answer"]) for row in repeated]
    tolerances = [tolerance_of(row.get("tolerance")) for row in repeated]
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

    def load(self, benchmark: str, cache: str, settings: Mapping[str, str]) -> BenchmarkResult | None:
        """A finished result of these settings, None if there is none.

        Raises:
            ValueError: If what is there is of other settings, or damaged.
        """
        path = self._file(benchmark, cache)
        return read_results(path, settings, BenchmarkResult.of_stored, "It is measured anew.")

    def save(self, result: BenchmarkResult, completions: Table, settings: Mapping[str, str]) -> None:
        """Write both files, and of which settings they are."""
        path = self._file(result.benchmark, result.cache)
        own_folder(self.path)
        own_folder(path.parent)
        write_parquet(path.with_suffix(".parquet"), completions)
        write_results(path, settings, dataclasses.asdict(result))

    def _file(self, benchmark: str, cache: str) -> Path:
        return self.path / file_name(cache) / f"{file_name(benchmark)}.json"


def _repeated(rows: Rows, samples: int) -> Rows:
    return [row for row in rows for _ in range(samples)]


def results_table(results: Sequence[BenchmarkResult], answers: Convention = "strict") -> str:
    """A row for every benchmark and cache, and one for each cache's means.

    Accuracies are in percent with their 95 % intervals, by both conventions of what counts as the answer, ``answers``
    first. Beside them stands what the cache costs.
    """
    conventions = sorted(CONVENTIONS, key=lambda convention: convention != answers)
    head = ["benchmark", "problems", "measure", "cache", *conventions, "length", "cut off", "KV saved", "peak KV"]
    rows = [head]
    for result in results:
        count = str(result.accuracy.num_problems)
        rows.append([result.benchmark, count, result.measure, result.cache, *_numbers([result], conventions)])
    for cache in dict.fromkeys(result.cache for result in results):
        of_cache = [result for result in results if result.cache == cache]
        rows.append(["mean", "", "", cache, *_numbers(of_cache, conventions)])
    note = "Accuracies in %, with 95 % confidence over the problems. Length in tokens. Peaks are the largest."
    too_long = {result.benchmark: result.too_long for result in results if result.too_long}
    if too_long:
        counts = ", ".join(f"{name} {count}" for name, count in too_long.items())
        note += f"\nNot sampled, counted as wrong, since prompt and completion exceed the context: {counts}."
    return f"{table(rows, 'lrll' + 'r' * 6)}\n\n{note}"


def _numbers(results: Sequence[BenchmarkResult], conventions: Sequence[Convention]) -> list[str]:
    """Accuracies and costs of a cache, means over benchmarks if there are several."""
    accuracies = [interval(*mean_accuracy([result.by(answers) for result in results])) for answers in conventions]
    names = ("mean_length", "clipped", "kv_saving_final")
    length, clipped, saved = (fmean(getattr(result, name) for result in results) for name in names)
    peak = max(result.kv_peak_bytes for result in results)
    return [*accuracies, number(length, 1), percent(clipped), percent(saved), size(peak)]
