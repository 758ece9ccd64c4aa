"""The command line of every study: run what is not finished, print the tables, and write those that have a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import kept
from benchmarks.common.pages import insert, insert_if_marked, mark, say
from benchmarks.common.tables import Table
from experiments.runner.execution import execute
from experiments.runner.records import Archive, Record
from experiments.runner.studies import Study, Where, planned
from experiments.runner.tables import Results, plain_table

Write = Callable[[Results], Table | Sequence[Table]]


@dataclass(frozen=True)
class Program:
    """Studies that share a file of lines."""

    name: str  # of the file of lines and, behind ``experiments.``, of the module
    groups: Mapping[str, Sequence[Study]]
    blocks: Mapping[str, tuple[str, Write]] = field(default_factory=dict)  # by name: of which group, and its tables
    pages: Mapping[str, str] = field(default_factory=dict)  # of the blocks, from the folder of measured pages
    optional: Sequence[str] = ()  # groups that run when they are named alone
    together: Sequence[Sequence[str]] = ()  # groups that share tables, which must not mix code of now and of before
    policy: Path | None = None  # that all runs start from; None if the studies warm theirs up
    target: str = "real-model"  # of make, that fetches it
    line: Any = Record
    plain: Callable[[Results, Sequence[Study]], Table] = plain_table  # of groups without blocks of their own
    is_tidy: bool = False  # remove the checkpoints of what has ended

    def studies(self, names: Sequence[str]) -> list[Study]:
        """All studies of some groups."""
        return list(chain.from_iterable(self.groups[name] for name in names))

    def archive(self, path: Path) -> Archive:
        """The file of lines, and those beside it."""
        return Archive(path, self.line, {study.apart for study in self.studies(list(self.groups))})

    def admit(self, results: Results) -> None:
        """Let lines of other code count, in groups that share tables as a whole."""
        for names in self.together or [[name] for name in self.groups]:
            results.archive.admit(planned(self.studies(names), results.where))

    def texts(self, results: Results, names: Sequence[str]) -> dict[str, str]:
        """The blocks of some groups by name, of what is finished; a group without any has a plain table."""
        writers = {name: write for name, (group, write) in self.blocks.items() if group in names}
        tables = {name: write(results) for name, write in writers.items()}
        for name in set(names) - {group for group, _ in self.blocks.values()}:
            tables[name] = self.plain(results, self.groups[name])
        several = {name: [shown] if isinstance(shown, Table) else shown for name, shown in tables.items()}
        texts = {name: "\n\n".join(table.untitled for table in some if table.rows) for name, some in several.items()}
        return {name: text for name, text in texts.items() if text}

    def save(self, texts: Mapping[str, str], folder: Path) -> None:
        """Write blocks into the pages of measured numbers, and into others where these have a place for them."""
        for name in filter(texts.get, self.pages):
            write = insert_if_marked if "/" in self.pages[name] else insert
            write(folder / self.pages[name], texts[name], mark(f"experiments.{self.name}", name))


def main(program: Program, about: str | None) -> None:
    """Run the studies that are asked for, and print or save their tables."""
    args = parsed(program, about)
    torch.set_num_threads(1)
    where = Where(args.runs.absolute(), args.policy, args.device)
    studies, results = program.studies(args.studies), Results(where, program.archive(args.kept))
    runs = planned(studies, where, args.seeds)
    if args.finished:
        program.admit(results)
    else:
        where.folder.mkdir(parents=True, exist_ok=True)
        for study in studies:
            if any(results.archive.of(run) is None for run in planned([study], where, args.seeds)):
                study.prepare(where)
        execute(runs, results.archive, args.jobs, program.is_tidy)
    finished = sum(results.archive.of(run) is not None for run in runs)
    say(f"{finished} of {len(runs)} runs are finished")
    texts = program.texts(results, args.studies)
    if not texts:
        sys.exit(f"error: no run of {len(runs)} is finished in {where.folder}: run without --finished")
    print(*(f"## {name}\n\n{text}" for name, text in texts.items()), sep="\n\n")
    if program.pages and args.save:
        program.save(texts, args.save)
    if not args.finished and finished < len(runs):
        sys.exit(f"error: {len(runs) - finished} of {len(runs)} runs have stopped")


def parsed(program: Program, about: str | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = kept.parser_of(about, program.name, ", ".join(dict.fromkeys(program.pages.values())))
    usual = [name for name in program.groups if name not in program.optional]
    parser.add_argument("--studies", nargs="+", choices=list(program.groups), default=usual)
    parser.add_argument("--seeds", type=int, nargs="+", help="of the protocol's, default all")
    parser.set_defaults(policy=Path(), device="cpu")
    if program.policy is not None:
        parser.add_argument(
            "--policy", type=Path, default=program.policy, help=f"default: that of make {program.target}"
        )
        parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"], help="keep lines of each apart")
    args = parser.parse_args()
    unknown = set(args.seeds or ()) - {seed for study in program.studies(args.studies) for seed in study.seeds}
    if unknown:
        parser.error(f"--seeds: no study chosen has the seeds {sorted(unknown)}")
    if program.policy is not None and not (args.policy / "config.json").is_file():
        sys.exit(f"error: there is no model in {args.policy}: make {program.target}, or give --policy")
    return args
