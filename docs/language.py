"""Counts long and crowded sentences in pages: of prose alone, without code, tables and what is generated.

    python -m docs.language README.md docs/*.md [--most 5]

A page with more than ``--most`` percent of sentences above 30 words, or of sentences with more than two numbers, is
named, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONG = 30  # words
CROWDED = 2  # numbers
WRITTEN = r"<!-- written by.*?<!-- until here -->"
BLOCKS = re.compile(rf"^```.*?^```$|{WRITTEN}|<!--.*?-->|^[|#][^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
NUMBER = re.compile(r"`[^`]*`|(?<![\w.-])(\d[\d.,]*)(?![\w-])")  # code holds none
END = re.compile(r"(?<=[.!?])[*_)`\"]*\s+(?=[A-Z`*\[(\"0-9])")


def by_hand(text: str) -> str:
    """A page without the blocks that programs write."""
    return re.sub(WRITTEN, "", text, flags=re.DOTALL)


@dataclass(frozen=True)
class Prose:
    """The sentences of a page."""

    sentences: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Prose:
        """The prose of a page in Markdown; an item of a list ends a sentence, and so does a paragraph."""
        plain = LINK.sub(r"\1", BLOCKS.sub("", text))
        parts = re.split(r"\n\s*\n", ITEM.sub("\n\n", plain))
        return cls(tuple(found for part in parts for found in _sentences(" ".join(part.split()))))

    @property
    def num_words(self) -> int:
        """Words of all sentences."""
        return sum(map(words, self.sentences))

    @property
    def long(self) -> list[str]:
        """Sentences of more than 30 words."""
        return [sentence for sentence in self.sentences if words(sentence) > LONG]

    @property
    def crowded(self) -> list[str]:
        """Sentences with more than two numbers."""
        return [sentence for sentence in self.sentences if sum(map(bool, NUMBER.findall(sentence))) > CROWDED]

    def share(self, some: list[str]) -> float:
        """Some of the sentences, in percent of all."""
        return 100 * len(some) / max(1, len(self.sentences))


def words(sentence: str) -> int:
    """Words of a sentence: what has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def _sentences(text: str) -> Iterator[str]:
    for found in END.split(text):
        if words(found):
            yield found


def main(arguments: list[str]) -> int:
    """Print a line per page; 1 if one has too many long sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--most", type=float, default=5.0, help="percent of such sentences that a page may have")
    parser.add_argument("--show", action="store_true", help="print these sentences too")
    args = parser.parse_args(arguments)
    good = True
    for page in args.pages:
        prose = Prose.of(page.read_text("utf-8"))
        mean = prose.num_words / max(1, len(prose.sentences))
        long, crowded = prose.share(prose.long), prose.share(prose.crowded)
        is_good = max(long, crowded) <= args.most
        good &= is_good
        print(
            f"{page}: {prose.num_words:,} words, {mean:.1f} a sentence, {long:.0f} % above {LONG}, "
            f"{crowded:.0f} % with more than {CROWDED} numbers{'' if is_good else ': too many'}"
        )
        if args.show:
            print(*(f"    {sentence}" for sentence in dict.fromkeys([*prose.long, *prose.crowded])), sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
