"""Write what the documentation takes from the code: ``python -m docs.generate``, with ``--check`` only compare.

Names of pages behind it, as in ``python -m docs.generate settings.md methods.md``, write or compare only those.

``settings.md`` and ``callbacks.md`` come from signatures and docstrings. Tables of ``papers.md`` and ``one_card.md``
come from configurations and their plans, those of ``models.md`` from published sizes, those of ``when.md`` from the
cost model, all others from what was measured. The files are committed, so that a code host shows them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common.pages import END, mark, replaced
from docs import docstrings, listing, method_tables
from docs.crossing import crossing_table
from docs.docstrings import Argument
from docs.families import models_table
from docs.predictions import cards_table, one_card_file, recipe_tables
from docs.quoted import (
    accuracy_table,
    compressors_table,
    gpu_cells_table,
    gpu_larger_table,
    gpu_modeled_table,
    memory_table,
    some_columns,
    trainer_table,
)  # fmt: skip

FOLDER = Path(__file__).parent


def page(name: str) -> str:
    """The text of a page."""
    return WHOLE[name]() if name in WHOLE else written(name, PARTS[name])


def written(page: str, parts: dict[str, Callable[[], str]]) -> str:
    """A page with what stands between its marks replaced, by what the mark adds to its name."""
    text = (FOLDER / page).read_text("utf-8")
    for name, table in parts.items():
        begin = mark("docs.generate", name)
        if END not in text.partition(begin)[2]:
            raise ValueError(f"there is no {begin} ... {END} in docs/{page} to write between.")
        text = replaced(text, begin, table())
    return text


# ---------------------------------------------------------------- settings


def settings_page() -> str:
    """All keys of all classes that a configuration names."""
    parts = ["# Settings", listing.SETTINGS_INTRO]
    for title, intro, classes in listing.GROUPS:
        parts += [f"## {title}", intro]
        for thing in classes:
            parts += [f"### {thing.__name__}", described(thing), argument_table(docstrings.arguments(thing))]
    return finished(parts)


def described(thing: type) -> str:
    """What the docstring says before its sections."""
    return "\n\n".join(filter(None, [docstrings.summary(thing), docstrings.body(thing)]))


def argument_table(arguments: list[Argument]) -> str:
    """One row per argument; nothing where there is none."""
    if not arguments:
        return ""
    rows = [f"| `{a.name}` | {cell(a.meaning)} | {default(a)} | {cell(a.values)} |" for a in arguments]
    return "\n".join(["| key | meaning | default | type |", "|---|---|---|---|", *rows])


def default(argument: Argument) -> str:
    """The default as it is written in YAML, or in words."""
    text = cell(argument.default)
    return text if argument.default == "required" or " " in text.strip("[]").replace(", ", "") else f"`{text}`"


def cell(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|")


# ---------------------------------------------------------------- callbacks


def callbacks_page() -> str:
    """What every callback does, how it is switched on, its keys and what it logs."""
    parts = ["# Callbacks", listing.CALLBACKS_INTRO]
    for title, intro, classes in listing.CALLBACK_GROUPS:
        parts += [f"## {title}", intro]
        for thing in classes:
            name = thing.__name__
            snippet = listing.SNIPPETS.get(name, f"{{class_path: {name}}}")
            parts += [f"### {name}", described(thing), yaml_block(snippet)]
            parts += [argument_table(docstrings.arguments(thing)), f"Logs {listing.LOGS.get(name, 'nothing')}."]
    return finished(parts)


def yaml_block(snippet: str) -> str:
    """The line of a configuration that switches a callback on."""
    return f"```yaml\ntrainer:\n  callbacks:\n    - {snippet}\n```"


def finished(parts: list[str]) -> str:
    """The page, with its origin."""
    note = "<!-- This page is written by `make docs-pages`: change the docstrings, not the page. -->"
    return "\n\n".join([note, *filter(None, parts)]) + "\n"


WHOLE: dict[str, Callable[[], str]] = {"settings.md": settings_page, "callbacks.md": callbacks_page}
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "methods.md": {
        **{part: partial(method_tables.part_table, part) for part in method_tables.TITLES},
        "runs": method_tables.runs_table, "accuracy": accuracy_table,
    },
    "models.md": {"families": models_table, "decoders": partial(some_columns, "decoders-cpu", "Decoders")},
    "papers.md": {"": recipe_tables},
    "one_card.md": {"file": one_card_file, "cards": cards_table},
    "choosing.md": {"real": method_tables.chosen_table, "accuracy": accuracy_table, "compressors": compressors_table},
    "when.md": {"512": partial(crossing_table, 512), "2048": partial(crossing_table, 2048)},
    "measured/gpu.md": {
        "": partial(
            some_columns, "gpu-whole-1.5b", "Whole rollouts, Qwen2.5-1.5B",
            "cache", "tokens/s", "times as fast as FullKV", "share of steps alone", "KV GB",
        ),
        "larger": gpu_larger_table,
        "memory": partial(
            some_columns, "gpu-memory", "Equal memory: 40 GB, Qwen2.5-1.5B, length 16,384",
            "cache", "slots", "ms per step", "tokens/s", "times as many as FullKV",
        ),
        "cells": gpu_cells_table,
        "modeled": gpu_modeled_table,
    },
    "design.md": {
        "": partial(
            some_columns, "learner-cpu", "Log-probs and entropies, forward and backward",
            "way", "logits at a time", "peak GiB",
        )
    },
    "from_trl.md": {"": trainer_table},
    "results.md": {"memory": memory_table},
}  # fmt: skip
PAGES = (*WHOLE, *PARTS)


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` name those that differ from what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help=f"default all: {', '.join(PAGES)}")
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if a page differs")
    args = parser.parse_args(arguments)
    if unknown := sorted({*args.pages} - {*PAGES}):
        parser.error(f"{', '.join(unknown)} is not generated; generated are {', '.join(PAGES)}")
    texts = {FOLDER / name: page(name) for name in args.pages or PAGES}
    different = [(path, text) for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in different:
        if not args.check:
            path.write_text(text, "utf-8")
        print(f"{'Differs' if args.check else 'Written'}: docs/{path.relative_to(FOLDER)}")
    return int(bool(different) and args.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
