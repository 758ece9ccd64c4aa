r"""MathBenchmarks: the paper's seven benchmarks from their published files, or from the hub, and the paper's prompts.

The training suffix has doubled braces, ``\boxed{{}}``, a slip in the original data that models have been trained on;
it is kept so that results can be compared. Evaluation uses no chat template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from sparse_rl_lightning.data.base import PromptDataModule, Row, in_order
from sparse_rl_lightning.data.files import data_file, is_local, read_json_lines, read_table
from sparse_rl_lightning.data.published import GSM8K_TRAIN, PUBLISHED, Published, own_benchmark, question
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.files import whole_file
from sparse_rl_lightning.rewards.math import AnswerKind, audit_golds
from sparse_rl_lightning.rollout.prompts import Prompt, valid_unicode

PromptFormat: TypeAlias = Literal["plain", "qwen", "llama"]

SYSTEM = "You are a helpful assistant."
SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PLAIN_SUFFIX = " Please reason step by step, and put your final answer within \\boxed{}.\n\n"


def render(problem: str, prompt_format: PromptFormat) -> Prompt:
    """The prompt for a question.

    Args:
        problem: Text of a problem as it is in its file.
        prompt_format: ``plain`` as in the paper's evaluation; ``qwen``, text in the ChatML format that the Qwen base
            models are trained with; ``llama``, the same as chat messages for the tokenizer's own template.
    """
    if prompt_format == "plain":
        return problem + PLAIN_SUFFIX
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem + SUFFIX}]
    if prompt_format == "llama":
        return messages
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{text}<|im_start|>assistant\n"


@dataclass
class BenchmarkReport:
    """Findings of reading a benchmark."""

    name: str
    num_rows: int
    is_published: bool | None  # whether file and hash are the published ones, None for the hub and own files
    kinds: dict[AnswerKind, int] = field(default_factory=dict)  # golds by how they are compared
    dropped: list[int] = field(default_factory=list)  # rows without a question, or an answer that can be checked
    unasked: list[int] = field(default_factory=list)  # those of them without a question

    def __str__(self) -> str:
        """The report in one line for the terminal."""
        kinds = ", ".join(f"{count} {category}" for category, count in self.kinds.items() if category != "uncheckable")
        sources = {True: "published file", False: "ANOTHER file than the published one", None: "hub or own file"}
        source = sources[self.is_published]
        unanswered = sorted({*self.dropped} - {*self.unasked})
        reasons = {"a question": self.unasked, "an answer that can be checked": unanswered}
        dropped = [f"; dropped without {what}: rows {rows}" for what, rows in reasons.items() if rows]
        return f"{self.name}: {self.num_rows} rows ({source}); gold answers: {kinds}{''.join(dropped)}"


class MathBenchmarks(PromptDataModule):
    """GSM8K, MATH500, Gaokao2023-En, Minerva, OlympiadBench, AIME24 and AMC23, each one batch of the test loader.

    Rows have the columns prompt, answer, question, benchmark, index (the row of the published file) and tolerance.
    Golds that nothing can be compared with are dropped and reported. Training reads GSM8K's training part or another
    data module, validation the first rows of ``val_benchmarks``.

    Args:
        folder: Folder of the published files, named as in ``data/published.py``; null reads from the hub.
        benchmarks: Names, among the seven and ``own``, of the benchmarks to test on, null for all.
        own: Further benchmarks by name: JSONL files with the columns ``problem`` or ``question``, and ``answer``.
        prompt_format: ``plain`` as in the paper's evaluation, ``qwen`` or ``llama`` as in its training.
        train: Source of the training prompts, null for GSM8K's training part; of it only its training rows are used.
        max_rows: Number of rows of each benchmark to test on, from the first. None takes all.
        val_benchmarks: Names of the benchmarks to validate on.
        max_val_prompts: Number of rows of each benchmark to validate on, from the first. None takes all.
        **blocks: Further arguments of PromptDataModule.

    Raises:
        ValueError: If a benchmark or format is unknown, or a number out of range. Reading raises it for a missing or
            malformed file.
    """

    def __init__(
        self,
        folder: str | None = None,
        benchmarks: Sequence[str] | None = None,
        own: dict[str, str] | None = None,
        prompt_format: PromptFormat = "plain",
        train: PromptDataModule | None = None,
        max_rows: int | None = None,
        val_benchmarks: Sequence[str] = ("math500",),
        max_val_prompts: int | None = 64,
        **blocks: Any,
    ) -> None:
        super().__init__(max_val_prompts=max_val_prompts, **blocks)
        available = PUBLISHED | {name: own_benchmark(name, path) for name, path in (own or {}).items()}
        self.known = {GSM8K_TRAIN.name: GSM8K_TRAIN} | available
        self.benchmarks = list(available if benchmarks is None else benchmarks)
        self.val_benchmarks = list(val_benchmarks)
        for argument, names in (("benchmarks", self.benchmarks), ("val_benchmarks", self.val_benchmarks)):
            unknown = [name for name in names if name not in available]
            if unknown:
                raise UserError(f"{argument} must be among {', '.join(available)}, got {unknown}.")
        check_number("max_rows", max_rows, least=1, owner="MathBenchmarks", or_none=True)
        check_choice("prompt_format", prompt_format, PromptFormat)
        for name in ("prompts_per_rollout", "val_batch_size", "max_val_prompts") if train is not None else ():
            idle, acting = getattr(train, name), getattr(self, name)
            if idle not in (getattr(PromptDataModule(), name), acting):
                rank_zero_warn(f"data.train.{name}={idle} does not act, but data.{name}={acting} does: set that one.")
        self.folder = folder
        self.train = train
        self.prompt_format = prompt_format
        self.max_rows = max_rows
        self.reports: dict[str, BenchmarkReport] = {}
        self._rows: dict[str, list[Row]] = {}

    def prepare_data(self) -> None:
        """Let the source of training prompts fetch what it has to, once on a machine."""
        if self.train is not None:
            self.train.trainer = self.trainer
            self.train.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the source of training prompts too, whose seed may be the trainer's."""
        super().setup(stage)
        if self.train is not None:
            self.train.trainer = self.trainer
            self.train.setup(stage)

    def rows(self, name: str) -> list[Row]:
        """All rows of a benchmark whose gold answer can be checked; read, audited and reported once.

        Its name is one of the seven, one of ``own``, or ``gsm8k_train``.
        """
        return self._rows_of(name, f"leave {name} out of data.benchmarks")

    def train_rows(self) -> list[Row]:
        """The rows of ``train``, or the training part of GSM8K."""
        if self.train is None:
            return self._rows_of(GSM8K_TRAIN.name, "give data.train another source of training prompts")
        return self.train.train_rows() if self.train._train is None else self.train._train  # its prepare_data may read

    def val_rows(self) -> list[Row]:
        """The first ``max_val_prompts`` rows of every benchmark of ``val_benchmarks``."""
        return [
            row
            for name in self.val_benchmarks
            for row in self._rows_of(name, f"leave {name} out of data.val_benchmarks")[: self.max_val_prompts]
        ]

    def test_rows(self) -> dict[str, list[Row]]:
        """The rows to test on, by benchmark."""
        return {name: self.rows(name)[: self.max_rows] for name in self.benchmarks}

    def val_dataloader(self) -> DataLoader[list[Row]] | list[Any]:
        """The validation rows in their own order."""
        if self._val is None:
            self._val = self.val_rows()
        if not self._val:
            return super().val_dataloader()
        return in_order(self._admitted(self._val, "validation"), self.val_batch_size)

    def test_dataloader(self) -> DataLoader[list[Row]]:
        """One batch per benchmark."""
        batches = list(self.test_rows().values())
        return DataLoader(cast("Dataset[list[Row]]", batches), batch_size=None, num_workers=0)

    def predict_dataloader(self) -> DataLoader[list[Row]]:
        """One batch per benchmark, the same as for tests."""
        return self.test_dataloader()

    def _rows_of(self, name: str, otherwise: str) -> list[Row]:
        """The rows of a benchmark; ``otherwise`` is what its caller could change if there is no file of it."""
        if name not in self._rows:
            self._rows[name], self.reports[name] = self._read(self.known[name], otherwise)
            rank_zero_info(str(self.reports[name]))
        return self._rows[name]

    def _read(self, published: Published, otherwise: str) -> tuple[list[Row], BenchmarkReport]:
        records, is_published = self._records(published, otherwise)
        golds = [valid_unicode(published.gold(record)) for record in records]
        audit = audit_golds(golds)
        if published.is_published and len(records) != published.num_rows:
            rank_zero_warn(f"{published.name} has {len(records)} rows, the published one {published.num_rows}.")
        unasked = [n for n, record in enumerate(records) if not question(record).strip()]
        unusable = {*audit.uncheckable, *unasked}
        rows = [
            self._row(published, index, record, gold)
            for index, (record, gold) in enumerate(zip(records, golds, strict=True))
            if index not in unusable
        ]
        if not rows:
            raise _without_rows(published, records, len(unasked), len(audit.uncheckable))
        return rows, BenchmarkReport(published.name, len(records), is_published, audit.kinds, sorted(unusable), unasked)

    def _row(self, published: Published, index: int, record: dict[str, Any], gold: str) -> Row:
        text = valid_unicode(question(record))
        return {
            "prompt": render(text, self.prompt_format), "answer": gold, "question": text,
            "benchmark": published.name, "index": index, "tolerance": published.tolerance,
        }  # fmt: skip

    def _records(self, published: Published, otherwise: str) -> tuple[list[dict[str, Any]], bool | None]:
        if not published.is_published:
            file = data_file(published.file)
            read = read_table if is_local(file) else read_json_lines
            return [record for _, record in read(file)], None
        if self.folder is None:
            name, config, split = published.hub
            return [record for _, record in read_table(name, config, split)], None
        path = Path(self.folder).expanduser() / published.file
        if not path.is_file():
            raise UserError(
                f"There is no {path}. MathBenchmarks reads the published file {published.file} "
                f"({published.num_rows} rows) from data.folder; give its folder, or null for the hub's "
                f"{published.hub[0]}, or {otherwise}."
            )
        is_published = hashlib.sha256(whole_file(path)).hexdigest() == published.sha256
        if not is_published:
            rank_zero_warn(f"{path} is not the published file: its SHA-256 is not {published.sha256}.")
        return [record for _, record in read_json_lines(str(path))], is_published


def _without_rows(published: Published, records: list[dict[str, Any]], unasked: int, uncheckable: int) -> UserError:
    """What a benchmark is refused with of which no row is left."""
    needed = "'problem' or 'question', and 'answer'"
    if published.is_published:
        needed = f"the columns of the published {published.file}"
    columns = dict.fromkeys(name for record in records for name in record)
    return UserError(
        f"{published.name}: none of its {len(records)} rows can be used ({unasked} without a question, {uncheckable} "
        f"without an answer that can be checked). A row needs {needed}; the columns found are: "
        f"{', '.join(map(repr, columns)) or 'none'}."
    )
