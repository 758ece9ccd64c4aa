"""Evaluation: benchmarks under the full and under compressed caches, side by side."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from sparse_rl_lightning.callbacks.expendable import Expendable
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.evaluation.page import results_picture, results_table
from sparse_rl_lightning.evaluation.problems import Problems, with_room
from sparse_rl_lightning.evaluation.store import BenchmarkResult, ResultFolder
from sparse_rl_lightning.evaluation.tables import (
    CORRECT_COLUMNS,
    KV_COLUMNS,
    Table,
    benchmark_name,
    benchmark_number,
    completion_table,
    joined,
    name_arms,
    row_number,
    unsampled_table,
)
from sparse_rl_lightning.evaluation.time_left import TimeLeft
from sparse_rl_lightning.files import writable_folder
from sparse_rl_lightning.fingerprints import fingerprint, weights_digest
from sparse_rl_lightning.metrics import accuracy, mean_accuracy
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards import MathReward
from sparse_rl_lightning.rewards.math import CONVENTIONS, Convention, MathChecker
from sparse_rl_lightning.rewards.math.checker import known_convention
from sparse_rl_lightning.rollout import Generator, Progress, RolloutOptions, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.options import as_texts
from sparse_rl_lightning.text import prompt_text, say

SEQUENCES_PER_BENCHMARK = 10**7  # numbers of sequences of one benchmark begin at another multiple
MAX_SAMPLES = 1000  # of a problem, whose sequences begin at another multiple of it


class Evaluation(PolicyModule):
    """Accuracy of a policy with the full cache and with any compressors, on ``MathBenchmarks`` (``sparse-rl test``).

    Finished benchmarks are written to ``evaluation/`` in ``trainer.default_root_dir`` and taken up by a later run of
    the same settings, weights and questions. Sequences draw the same random numbers under every cache and in any
    batch. The defaults are the paper's (arXiv 2601.10079): temperature 0.8, top-p 0.95. In ``sparse-rl test`` a problem
    for which the model's context has no room is not sampled and counts as wrong, which is said and logged.

    Args:
        policy: A Hugging Face folder or hub name, or a source of models. ``--ckpt_path`` loads a checkpoint into it.
        compressors: The compressed caches to compare, several budgets of one class too.
        retrievers: The same with the full cache of which every query reads some pages.
        dense: Evaluate the full cache too.
        num_samples: Samples per problem, at most 1000; ``num_samples_of`` has the exceptions.
        max_completion_length: Most tokens of a completion; ``max_completion_length_of`` has the exceptions.
        num_samples_of: Samples per problem by benchmark.
        max_completion_length_of: Most tokens of a completion by benchmark.
        temperature: 0 is greedy.
        top_p: Draw from the smallest set of at least this probability.
        top_k: Draw from the k most likely tokens, 0 for all.
        min_p: Draw from tokens at least this likely relative to the best.
        repetition_penalty: Makes tokens of the prompt and of the completion so far less likely where above 1.
        chat_template_kwargs: Arguments of the tokenizer's chat template, such as ``{enable_thinking: false}``.
        batch_size: Problems per rollout.
        num_slots: Sequences decoded at the same time, null for all of a rollout.
        end_tokens: Tokens that end a completion besides the model's own.
        stop_strings: Texts that end a completion.
        memory_limit: Memory that slots may take, bytes or (a float up to 1.0) a share of what is free.
        kv_dtype: What cached keys and values are kept in; null for what the policy computes in.
        cuda_graphs: Decode from CUDA graphs on a GPU.
        check_workers: Processes for answers that only math-verify can compare.
        seed: Of the samples.
        answers: By which convention the accuracies are shown and logged first, ``strict`` or ``lenient``, which pays
            what graders of papers do. Both are measured, written and logged.

    Raises:
        ValueError: If there is nothing to evaluate, or a number is out of range; at the end of a test, if results
            cannot be written.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        compressors: list[Compressor] | None = None,
        retrievers: list[Retriever] | None = None,
        dense: bool = True,
        num_samples: int = 1,
        max_completion_length: int = 8192,
        num_samples_of: dict[str, int] | None = None,
        max_completion_length_of: dict[str, int] | None = None,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        chat_template_kwargs: dict[str, Any] | None = None,
        batch_size: int = 64,
        num_slots: int | None = None,
        end_tokens: list[str] | None = None,
        stop_strings: list[str] | None = None,
        memory_limit: int | float | None = None,
        kv_dtype: str | None = None,
        cuda_graphs: bool = True,
        check_workers: int = 1,
        seed: int = 0,
        answers: Convention = "strict",
    ) -> None:
        self.arms = name_arms([*([FullKV()] if dense else []), *(compressors or []), *(retrievers or [])])
        if not self.arms or batch_size < 1:
            raise ValueError(
                "Evaluation needs dense: true, compressors or retrievers, and batch_size of at least 1; got "
                f"{len(self.arms)} caches and batch_size={batch_size}."
            )
        samples = {"num_samples": num_samples, **{f"num_samples_of[{k}]": n for k, n in (num_samples_of or {}).items()}}
        if too_many := {name: number for name, number in samples.items() if number > MAX_SAMPLES}:
            raise ValueError(f"Evaluation draws at most {MAX_SAMPLES} samples per problem, got {too_many}: lower them.")
        super().__init__(policy)
        self.sampling = SamplingParams(
            num_generations=num_samples, max_completion_length=max_completion_length, temperature=temperature,
            top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
            stop_strings=as_texts(stop_strings, "stop_strings"), seed=seed,
        )  # fmt: skip
        options = RolloutOptions(
            num_slots, as_texts(end_tokens, "end_tokens"), memory_limit, kv_dtype, cuda_graphs=cuda_graphs,
            chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        self.generator = Generator(FullKV(), self.sampling, options)
        self.reward = MathReward(check_workers)
        self.answers = known_convention(answers)
        self.num_samples_of = dict(num_samples_of or {})
        self.max_completion_length_of = dict(max_completion_length_of or {})
        self.batch_size = batch_size
        self.results: list[BenchmarkResult] = []
        self._clock: TimeLeft | None = None
        self._part_way = Expendable("A finished benchmark")

    def on_policy_loaded(self) -> None:
        """Hand the policy to the generator."""
        self.generator.bind(self.policy, self.tokenizer)

    def params(self, benchmark: str) -> SamplingParams:
        """How a benchmark's completions are drawn."""
        samples = self.num_samples_of.get(benchmark, self.sampling.num_generations)
        length = self.max_completion_length_of.get(benchmark, self.sampling.max_completion_length)
        return dataclasses.replace(self.sampling, num_generations=samples, max_completion_length=length)

    # ---------------------------------------------------------------- Lightning

    def on_test_start(self) -> None:
        """Find out now that results can be written; count what is to be done."""
        super().on_test_start()
        if self._world_size > 1:
            raise ValueError(f"Evaluation runs in one process, got {self._world_size}: set trainer.devices to 1.")
        writable_folder(self.folder.path, "trainer.default_root_dir")
        self.trainer.test_loop.verbose = False  # Lightning's own table would say the same again, less readably
        self.results, self._clock = [], None
        self._digest = weights_digest(self.policy)

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """One benchmark under every cache."""
        if "benchmark" not in batch[0]:
            raise ValueError("Evaluation tests on MathBenchmarks, whose rows name their benchmark: set data to it.")
        if self._clock is None:
            self._clock = TimeLeft(self._work_to_do(batch))
        problems = self._problems(batch)
        name = problems.name
        problems.tell()
        self.log(f"test/{name}/too_long", len(problems.too_long), batch_size=1)
        for arm in self.arms:
            result = self.folder.load(name, arm, self._fingerprint(problems, arm))
            if result is None:
                result = self._evaluate_benchmark(problems, arm)
            else:
                rank_zero_info(f"{name}, {arm}: taken from {self.folder.path}")
                self._clock.total -= self._work(problems)
            self.results.append(result)
            self.log(f"test/{name}/{arm}", result.by(self.answers).mean, batch_size=1)
            for answers in CONVENTIONS:
                self.log(f"test/{name}/{arm}/{answers}", result.by(answers).mean, batch_size=1)

    def on_test_epoch_end(self) -> None:
        """Table, JSON and picture of everything."""
        if not self.results:
            return
        for arm in self.arms:
            own = [result for result in self.results if result.arm == arm]
            means = {answers: mean_accuracy([r.by(answers) for r in own])[0] for answers in CONVENTIONS}
            self.log(f"test/mean/{arm}", means[self.answers])
            for answers in CONVENTIONS:
                self.log(f"test/mean/{arm}/{answers}", means[answers])
        text = results_table(self.results, self.answers)
        say(f"\n{text}\n")
        try:
            say(f"Written: {', '.join(map(str, self._write(text)))}")
        except OSError as error:
            raise ValueError(
                f"trainer.default_root_dir: the results cannot be written to {self.folder.path}: {error}. The table "
                "above is what there is of them."
            ) from error

    def predict_step(self, batch: Rows, batch_idx: int) -> Rows:
        """The rows, each with its ``completions`` by cache: a list of ``num_samples`` texts."""
        params = self.params(benchmark_name(batch))
        rows = [dict(row) for row in batch]
        count = params.num_generations
        for arm in self.arms:
            with self.caching(arm) as sampler:
                for part, ids in self._parts(rows, params, batch_idx):
                    texts = self.generator.texts(
                        sampler.generate(self.generator.encode(part), params, sequence_ids=ids)
                    )
                    for n, row in enumerate(part):
                        row.setdefault("completions", {})[arm] = texts[n * count : (n + 1) * count]
        return rows

    # ---------------------------------------------------------------- inside

    @property
    def folder(self) -> ResultFolder:
        """Where results are."""
        return ResultFolder(Path(self.trainer.default_root_dir) / "evaluation")

    @contextmanager
    def caching(self, arm: str) -> Iterator[RolloutSampler]:
        """A sampler with one of the caches, whose memory is given back afterwards."""
        cache = self.arms[arm]
        pair = (cache, None) if isinstance(cache, Compressor) else (FullKV(), cache)
        sampler = self.generator.options.sampler(self.policy, self.tokenizer, *pair)
        try:
            yield sampler
        finally:
            sampler.release()

    def _write(self, text: str) -> list[Path]:
        """The table, JSON and picture of everything; where the latter two are."""
        self.folder.write("results.txt", text + "\n")
        stored = [dataclasses.asdict(result) for result in self.results]
        written = [self.folder.write("results.json", json.dumps(stored, indent=2) + "\n")]
        picture = results_picture(self.results, self.answers)
        return written if picture is None else [*written, self.folder.write("results.png", picture)]

    def _problems(self, rows: Rows) -> Problems:
        """A benchmark's rows, apart from those that its limits and the model's context leave no room for."""
        name, context = benchmark_name(rows), context_length(self.policy.config)
        return with_room(name, rows, self.generator.encode(rows), self.params(name), context)

    def _evaluate_benchmark(self, problems: Problems, arm: str) -> BenchmarkResult:
        name = problems.name
        start, params = time.perf_counter(), self.params(name)
        checker = self._checker()
        checker.take_counters()
        tables: list[Table] = []
        with self.caching(arm) as sampler:
            for part, ids in self._parts(problems.sampled, params, benchmark_number(name)):
                report = self._report(f"{name}, {arm}", params)
                rollout = sampler.generate(self.generator.encode(part), params, sequence_ids=ids, progress=report)
                assert self._clock is not None
                self._clock.finished(len(rollout), params.max_completion_length)
                tables.append(completion_table(part, rollout, self.generator.texts(rollout), checker))
        columns = joined(tables)
        peak = max(columns.pop("kv_peak_bytes"))
        everything = joined([columns, unsampled_table(problems.too_long, params.num_generations)])
        shape = len(problems), params.num_generations
        correct = {a: torch.tensor(everything[column]).view(shape) for a, column in CORRECT_COLUMNS.items()}
        total = {key: sum(columns[key]) for key in KV_COLUMNS}
        result = BenchmarkResult(
            name, arm, self._fingerprint(problems, arm), accuracy(correct["strict"]), accuracy(correct["lenient"]),
            mean_length=sum(columns["length"]) / len(columns["length"]),
            clipped=1 - sum(columns["finished"]) / len(columns["finished"]),
            kv_saving_final=1 - total["kv_stored"] / max(1, total["kv_full"]),
            kv_saving_integral=1 - total["kv_stored_steps"] / max(1, total["kv_full_steps"]),
            kv_peak_bytes=peak,
            seconds=time.perf_counter() - start,
            counters=checker.take_counters(),
            too_long=len(problems.too_long),
        )  # fmt: skip
        table = {"benchmark": [name] * len(everything["index"]), **everything}
        self._part_way(lambda: self.folder.save(result, table))
        return result

    def _report(self, where: str, params: SamplingParams) -> Callable[[Progress], None]:
        def report(progress: Progress) -> None:
            assert self._clock is not None
            self._clock.report(where, progress, params.max_completion_length)

        return report

    def _parts(self, rows: Rows, params: SamplingParams, group: int) -> Iterator[tuple[Rows, list[int]]]:
        """The rows of each rollout, and its sequences' numbers: benchmark or batch, place in it and sample."""
        starts = [group * SEQUENCES_PER_BENCHMARK + row_number(row, n) * MAX_SAMPLES for n, row in enumerate(rows)]
        for first in range(0, len(rows), self.batch_size):
            own = slice(first, first + self.batch_size)
            yield rows[own], [start + sample for start in starts[own] for sample in range(params.num_generations)]

    def _fingerprint(self, problems: Problems, arm: str) -> str:
        """Of everything that decides a result: which problems there is room for and where they stand, too."""
        questions = [[prompt_text(r["prompt"]), str(r["answer"]), r.get("tolerance")] for r in problems.all]
        if problems.too_long:  # without any, their order alone says where they stand
            questions.append([[row_number(row, n) for n, row in enumerate(problems.all)], len(problems.sampled)])
        return fingerprint(
            weights=self._digest, cache=self.arms[arm], params=self.params(problems.name), questions=questions,
            end_tokens=self.generator.options.end_tokens, kv_dtype=self.generator.options.kv_dtype,
            chat_template_kwargs=self.generator.options.chat_template_kwargs or {},
            version=version("sparse-rl-lightning"),
        )  # fmt: skip

    def _work_to_do(self, batch: Rows) -> int:
        """Length limits of all sequences of the test loader; of this batch where the loader cannot be looked into."""
        data = getattr(self.trainer.test_dataloaders, "dataset", None)
        batches = data if isinstance(data, list) and data and isinstance(data[0], list) else [batch]
        return len(self.arms) * sum(self._work(self._problems(rows)) for rows in batches)

    def _work(self, problems: Problems) -> int:
        """Length limits of all sequences of a benchmark under one cache."""
        params = self.params(problems.name)
        return len(problems.sampled) * params.num_generations * params.max_completion_length

    def _checker(self) -> MathChecker:
        return self.reward.checker
