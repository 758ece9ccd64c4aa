"""Counts long sentences in pages: of prose alone, without code, tables and what is generated.

    python -m docs.language README.md docs/*.md [--most 5]

A page with more than ``--most`` percent of sentences above 30 words is named, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONG = 30  # words
BLOCKS = re.compile(
    r"^```.*?^```$|<!-- written by.*?<!-- until here -->|<!--.*?-->|^[|#][^\n]*$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[*_)`\"]*\s+(?=[A-Z`*\[(\"0-9])")


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
    def share(self) -> float:
        """Their share, in percent."""
        return 100 * len(self.long) / max(1, len(self.sentences))


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
    parser.add_argument("--most", type=float, default=5.0, help="percent of long sentences that a page may have")
    parser.add_argument("--show", action="store_true", help="print the long sentences too")
    args = parser.parse_args(arguments)
    good = True
    for page in args.pages:
        prose = Prose.of(page.read_text("utf-8"))
        mean = prose.num_words / max(1, len(prose.sentences))
        numbers = sum(len(re.findall(r"\d[\d.,]*", sentence)) for sentence in prose.sentences)
        rate = 100 * numbers / max(1, prose.num_words)
        is_good = prose.share <= args.most
        good &= is_good
        print(
            f"{page}: {prose.num_words:,} words, {mean:.1f} a sentence, {prose.share:.0f} % above {LONG}, "
            f"{rate:.1f} numbers in 100 words{'' if is_good else ': too many long sentences'}"
        )
        if args.show:
            print(*(f"    {sentence}" for sentence in prose.long), sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
