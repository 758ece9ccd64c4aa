"""Evaluation: benchmarks under the full and under compressed caches, side by side."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from sparse_rl_lightning import __version__
from sparse_rl_lightning.callbacks.best_effort import BestEffortWrite
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.environments import Environment
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.evaluation.evaluate import draw_from, evaluate
from sparse_rl_lightning.evaluation.problems import (
    Problems,
    benchmark_name,
    benchmark_names,
    benchmark_number,
    check_benchmark,
    check_benchmarks,
    row_number,
    with_room,
)
from sparse_rl_lightning.evaluation.results import (
    BenchmarkResult,
    ResultFolder,
    completion_table,
    judge_answers,
    name_caches,
    results_table,
)
from sparse_rl_lightning.evaluation.time_left import TimeLeft
from sparse_rl_lightning.files import own_folder, writable_folder, write_whole
from sparse_rl_lightning.fingerprints import fingerprint, sources
from sparse_rl_lightning.metrics import mean_accuracy
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.policies.source import PolicySource, resolve_policy
from sparse_rl_lightning.records import Conversation, Rows, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards.math import CONVENTIONS, Convention, MathChecker
from sparse_rl_lightning.rollout import Generator, Progress, RolloutOptions, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.conversations import Conversations
from sparse_rl_lightning.rollout.options import OF_MEMORY
from sparse_rl_lightning.text import nearby, say

SEQUENCES_PER_BENCHMARK = 10**7  # the sequence ids of each benchmark start at a multiple of this
MAX_SAMPLES = 1000  # per problem; the sequence ids of each problem start at a multiple of this


class Evaluation(PolicyModule):
    """Accuracy of a policy with the full cache and with any compressors, on ``MathBenchmarks`` (``sparse-rl test``).

    Finished benchmarks are written to ``evaluation/`` in ``trainer.default_root_dir`` and reused by a later run that
    would find the same. A benchmark whose inputs have changed is measured again, with a log line that names the change:
    the policy with its configuration and adapters, tokenizer, token ids of the prompts, end tokens, precision,
    settings, or the code of a compressor, a retriever, an environment or the answer checker, your own and the
    library's. Sequences draw the same random numbers under every cache and in any batch. The defaults are the paper's
    (arXiv 2601.10079): temperature 0.8, top-p 0.95. In ``sparse-rl test`` a problem that does not fit into the model's
    context is not sampled and counts as wrong, with a message and in the log.

    Args:
        policy: Hugging Face folder or hub name, or a source of models. ``--ckpt_path`` loads a checkpoint into it.
        compressors: Compressed caches to compare, several budgets of one class too.
        retrievers: Retrievers to compare, with the full cache of which every query reads some pages.
        dense: Whether to evaluate the full cache too.
        environment: Creates what answers the turns of one sample, null for completions of a single turn. Answers are
            looked for in what the policy wrote.
        sampling: Sampling parameters, at most 1000 completions per problem.
        sampling_of: Other settings of ``sampling`` by benchmark, such as ``{aime24: {num_generations: 32}}``.
        rollout: Memory and speed of rollouts, end of completions, and rendering of prompts.
        batch_size: Problems per rollout.
        check_workers: Number of processes for answers that only math-verify can compare.
        answers: Convention of the accuracies shown and logged first, ``strict`` or ``lenient``, which also pays what
            papers' graders do. Both are measured, written and logged.

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
        *,
        environment: Callable[[], Environment] | type | None = None,
        sampling: SamplingParams = SamplingParams(  # noqa: B008  # frozen, like the next one
            max_completion_length=8192, temperature=0.8, top_p=0.95
        ),
        sampling_of: dict[str, dict[str, Any]] | None = None,
        rollout: RolloutOptions = RolloutOptions(),  # noqa: B008
        batch_size: int = 64,
        check_workers: int = 1,
        answers: Convention = "strict",
    ) -> None:
        super().__init__(resolve_policy(policy).as_stored())
        self.caches = name_caches([*([FullKV()] if dense else []), *(compressors or []), *(retrievers or [])])
        if not self.caches:
            raise UserError("Evaluation needs dense: true, compressors or retrievers; got none of them.")
        check_number("batch_size", batch_size, least=1)
        self.sampling = rollout.for_evaluation(sampling)
        self.sampling_of = {
            name: _changed(self.sampling, name, changes) for name, changes in (sampling_of or {}).items()
        }
        named = {f"sampling_of[{name}]": params for name, params in self.sampling_of.items()}
        for name, params in {"sampling": self.sampling, **named}.items():
            check_number(f"{name}.num_generations", params.num_generations, most=MAX_SAMPLES)
        if environment is not None and retrievers:
            raise UserError("environment does not work with retrievers, whose pages are for single tokens: remove one.")
        self.generator = Generator(FullKV(), self.sampling, rollout, environment=environment)
        self.checker = MathChecker(check_workers)
        check_choice("answers", answers, Convention)
        self.answers: Convention = answers
        self.batch_size = batch_size
        self.results: list[BenchmarkResult] = []
        self._problems: list[Problems] = []  # of a test loader in memory, encoded once
        self._clock = TimeLeft(0)
        self._parts: dict[str, str] = {}  # fingerprints of what all benchmarks have in common
        self._part_way = BestEffortWrite("A finished benchmark")

    def on_policy_loaded(self) -> None:
        """Pass the policy to the generator."""
        self.generator.bind(self.policy, self.tokenizer)

    def params(self, benchmark: str) -> SamplingParams:
        """The sampling parameters of a benchmark."""
        return self.sampling_of.get(benchmark, self.sampling)

    # ---------------------------------------------------------------- Lightning

    def setup(self, stage: str) -> None:
        """Refuse settings of unknown benchmarks; take the seed of the process where none was given."""
        self._check_benchmarks()
        self.sampling = self.generator.sampling = self.sampling.seeded
        self.sampling_of = {name: params.seeded for name, params in self.sampling_of.items()}
        super().setup(stage)

    def on_test_start(self) -> None:
        """Check early that the batches are benchmarks, and that results can be written."""
        super().on_test_start()
        if self.trainer.world_size > 1:
            raise UserError(f"Evaluation runs in one process, got {self.trainer.world_size}: set trainer.devices to 1.")
        batches = list(_in_memory(self.trainer.test_dataloaders, self.trainer.num_test_batches[0]))
        check_benchmarks(batches)
        writable_folder(self.folder.path, "trainer.default_root_dir")
        self.trainer.test_loop.verbose = False  # Lightning's own table would repeat ours, less readably
        self.results = []
        self._problems = [self._with_room(rows) for rows in batches]
        self._parts = self._fingerprints(str(self.trainer.precision))
        self._clock = TimeLeft(len(self.caches) * sum(map(self._work, self._problems)))

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """Evaluate one benchmark under every cache."""
        check_benchmark(batch, {result.benchmark for result in self.results})
        problems = self._encoded(batch)
        name = problems.name
        self.log(f"test/{name}/too_long", len(problems.too_long), batch_size=1)
        for cache in self.caches:
            result = self._stored(problems, cache)
            if result is None:
                result = self._evaluate(problems, cache)
            else:
                rank_zero_info(f"{name}, {cache}: taken from {nearby(self.folder.path)}")
                self._clock.total -= self._work(problems)
            self.results.append(result)
            self.log(f"test/{name}/{cache}", result.by(self.answers).mean, batch_size=1)
            for answers in CONVENTIONS:
                self.log(f"test/{name}/{cache}/{answers}", result.by(answers).mean, batch_size=1)

    def on_test_epoch_end(self) -> None:
        """Show and write table and JSON of all results."""
        if not self.results:
            return
        for cache in self.caches:
            results = [result for result in self.results if result.cache == cache]
            means = {answers: mean_accuracy([r.by(answers) for r in results])[0] for answers in CONVENTIONS}
            self.log(f"test/mean/{cache}", means[self.answers])
            for answers in CONVENTIONS:
                self.log(f"test/mean/{cache}/{answers}", means[answers])
        text = results_table(self.results, self.answers)
        say(f"\n{text}\n")
        try:
            say(f"Written: {', '.join(map(nearby, self._write(text)))}")
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir: the results cannot be written to {self.folder.path}: {error}. The table "
                "above is what there is of them."
            ) from error

    def predict_step(self, batch: Rows, batch_idx: int) -> Rows:
        """The rows, each with its ``completions`` by cache: a list of ``num_generations`` texts."""
        params = self._params_of(batch)
        rows: Rows = [{**row, "completions": {}} for row in batch]
        count, prompts = params.num_generations, self.generator.encode(batch)
        for cache in self.caches:
            with self.caching(cache) as sampler:
                starts, talk = self._starts(batch, batch_idx), self._talk
                draw = draw_from(sampler, self.generator.texts, params, prompts, starts, talk=talk)
                texts = evaluate(draw, batch, batch_size=self.batch_size).texts
            for n, row in enumerate(rows):
                row["completions"][cache] = texts[n * count : (n + 1) * count]
        return rows

    # ---------------------------------------------------------------- details

    def _check_benchmarks(self) -> None:
        """Refuse ``sampling_of`` for a name that the data module does not know; one that is not tested now may stay."""
        data = getattr(self.trainer, "datamodule", None)
        names = data.known if isinstance(data, MathBenchmarks) else self.sampling_of
        for name in self.sampling_of:
            if name not in names:
                close = get_close_matches(name, names, 1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(names)}."
                raise UserError(f"sampling_of: there is no benchmark {name!r}. {hint}")

    def _params_of(self, batch: Rows) -> SamplingParams:
        """The sampling parameters of a batch, whose rows may be of several benchmarks if these have the same."""
        first, *rest = benchmark_names(batch)
        params = self.params(first)
        for name in rest:
            if self.params(name) != params:
                raise UserError(
                    f"sampling_of: a batch has rows of {first} and {name}, whose settings differ. Leave sampling_of "
                    "out, or set data to MathBenchmarks, where every benchmark is one batch."
                )
        return params

    @property
    def folder(self) -> ResultFolder:
        """The folder of results."""
        return ResultFolder(Path(self.trainer.default_root_dir) / "evaluation")

    @contextmanager
    def caching(self, cache: str) -> Iterator[RolloutSampler]:
        """A sampler with one of the caches, whose memory is freed afterwards."""
        method = self.caches[cache]
        pair = (method, None) if isinstance(method, Compressor) else (FullKV(), method)
        options = self.generator.options
        if not pair[0].evicts:
            options = options.for_full_cache(self.policy.device)
        sampler = options.sampler(self.policy, self.tokenizer, *pair)
        try:
            yield sampler
        finally:
            sampler.release()

    def _encoded(self, batch: Rows) -> Problems:
        """The problems of a batch, encoded before the test if the loader is in memory."""
        encoded = [problems for problems in self._problems if problems.rows == batch]
        return encoded[0] if encoded else self._with_room(batch)

    def _with_room(self, rows: Rows) -> Problems:
        name, context = benchmark_name(rows), context_length(self.policy.config)
        return with_room(name, rows, self.generator.encode(rows), self.params(name), context)

    def _work(self, problems: Problems) -> int:
        """The sum of the length limits of all sequences of a benchmark under one cache."""
        params = self.params(problems.name)
        return len(problems.sampled) * params.num_generations * params.max_completion_length

    def _stored(self, problems: Problems, cache: str) -> BenchmarkResult | None:
        """The result of an earlier run, None if there is none or it depends on what is another now, with a line."""
        try:
            return self.folder.load(problems.name, cache, self._fingerprint(problems, cache))
        except UserError as error:
            rank_zero_info(f"{problems.name}, {cache}: {error}")
            return None

    def _evaluate(self, problems: Problems, cache: str) -> BenchmarkResult:
        start, params = time.perf_counter(), self.params(problems.name)
        limit = params.max_completion_length
        starts = self._starts(problems.sampled, benchmark_number(problems.name))
        failed = list[Conversation]()

        def report(progress: Progress) -> None:
            self._clock.report(f"{problems.name}, {cache}", progress, limit)

        def judge(scored: ScoredRollout) -> Tensor:
            failed.extend(conversation for conversation in scored.conversations or () if conversation.has_failed)
            return judge_answers(scored, self.checker)

        self.checker.take_counters()
        with self.caching(cache) as sampler:
            draw = draw_from(sampler, self.generator.texts, params, problems.prompts, starts, report, self._talk)
            scores = evaluate(self._clock.counted(draw, limit), problems.sampled, judge, self.batch_size)
        seconds, counters = time.perf_counter() - start, self.checker.take_counters()
        result = BenchmarkResult.of(problems, cache, scores, seconds, counters)
        if failed:
            rank_zero_warn(
                f"{problems.name}, {cache}: the environment failed in {len(failed)} of {len(scores.completions)} "
                f"conversations, which count as wrong, first: {failed[0].error}. This result is not kept."
            )
        else:
            table, settings = completion_table(problems, scores), self._fingerprint(problems, cache)
            self._part_way(lambda: self.folder.save(result, table, settings))
        return result

    @property
    def _talk(self) -> Callable[[], Conversations] | None:
        return None if self.generator.environment is None else self.generator.conversations

    def _starts(self, rows: Rows, group: int) -> list[int]:
        """The id of each row's first sequence: the same under every cache and in any batch."""
        return [group * SEQUENCES_PER_BENCHMARK + row_number(row, n) * MAX_SAMPLES for n, row in enumerate(rows)]

    def _write(self, text: str) -> list[Path]:
        """Write table and JSON of all results; returns their paths."""
        folder = own_folder(self.folder.path)
        stored = [dataclasses.asdict(result) for result in self.results]
        contents = {"results.txt": text + "\n", "results.json": json.dumps(stored, indent=2) + "\n"}
        for name, content in contents.items():
            write_whole(folder / name, content)
        return [folder / name for name in contents]

    def _fingerprints(self, precision: str) -> dict[str, str]:
        """Fingerprints of the run: of the policy and all that draws with it, and of each cache."""
        options = {name: option for name, option in vars(self.generator.options).items() if name not in OF_MEMORY}
        shared = {
            "policy": fingerprint(policy=self.policy), "tokenizer": fingerprint(tokenizer=self.tokenizer),
            "end tokens": fingerprint(ids=self.generator.sampler().end_token_ids),
            "rollout": fingerprint(rollout=options), "precision": precision,
            "environment": fingerprint(environment=self.generator.environment),
            "answer checker": sources(MathChecker), "version": __version__,
        }  # fmt: skip
        return shared | {f"cache {name}": fingerprint(cache=cache) for name, cache in self.caches.items()}

    def _fingerprint(self, problems: Problems, cache: str) -> dict[str, str]:
        """Fingerprints of everything that decides a result, including which problems fit and their order."""
        shared = {name: digest for name, digest in self._parts.items() if not name.startswith("cache ")}
        talks = self.generator.environment is not None  # which may read any column
        rows = [*problems.sampled, *problems.too_long]
        golds = [row if talks else [str(row["answer"]), row.get("tolerance")] for row in rows]
        places = [row_number(row, n) for n, row in enumerate(rows)]
        return {
            **shared, "cache": self._parts[f"cache {cache}"],
            "sampling": fingerprint(params=self.params(problems.name)),
            "problems": fingerprint(prompts=problems.prompts, golds=golds, places=places, count=len(problems.sampled)),
        }  # fmt: skip


def _in_memory(loader: Any, most: float) -> Iterable[Rows]:
    """The first batches of a loader that can be read twice, to check them before one takes hours; none of another.

    A loader of a list can, unless workers serve it: they may be the ones that serve the test.
    """
    can = isinstance(getattr(loader, "dataset", None), list) and not loader.num_workers
    return islice(loader, int(most)) if can else ()


def _changed(sampling: SamplingParams, benchmark: str, changes: dict[str, Any]) -> SamplingParams:
    """Settings of drawing with those of a benchmark over them."""
    try:
        return dataclasses.replace(sampling, **changes)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(sampling))
        raise UserError(f"sampling_of[{benchmark}]: {error} Its settings are those of sampling: {names}.") from error
