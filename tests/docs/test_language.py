"""Pages are plainly written: sentences are counted as one reads them, of prose alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = ("settings.md", "callbacks.md", "metrics.md", "methods.md", "reference.md")  # to look things up in
BY_HAND = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in LISTS)
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "MIGRATION", "SECURITY")]
PAGES += [ROOT / folder / "README.md" for folder in ("benchmarks", "cuda_ext", "experiments")]
PAGES += [*BY_HAND, *sorted((ROOT / "notebooks").glob("*.ipynb"))]
LONG, CROWDED, MOST = 30, 2, 0.05  # words and numbers of a sentence; share of the sentences that may have more

WRITTEN = r"<!-- written by.*?<!-- until here -->"
BLOCKS = re.compile(rf"^```.*?^```$|{WRITTEN}|<!--.*?-->|^[|#][^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
NUMBER = re.compile(r"`[^`]*`|(?<![\w.-])(\d[\d.,]*)(?![\w-])")  # code holds none
END = re.compile(r"(?<=[.!?])[*_)`\"]*\s+(?=[A-Z`*\[(\"0-9])")


def by_hand(text: str) -> str:
    """A page without the blocks that programs write."""
    return re.sub(WRITTEN, "", text, flags=re.DOTALL)


def words(sentence: str) -> int:
    """What has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def sentences(text: str) -> list[str]:
    """The prose of a page, without code, tables and what is generated; an item of a list ends a sentence."""
    plain = LINK.sub(r"\1", BLOCKS.sub("", text))
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", ITEM.sub("\n\n", plain)))
    return [sentence for paragraph in paragraphs for sentence in END.split(paragraph) if words(sentence)]


def faults(text: str) -> list[str]:
    """Sentences that are long, and those with many numbers, where a page has too many of a sort."""
    prose = sentences(text)
    long = [sentence for sentence in prose if words(sentence) > LONG]
    crowded = [sentence for sentence in prose if sum(map(bool, NUMBER.findall(sentence))) > CROWDED]
    return [sentence for sort in (long, crowded) if len(sort) > MOST * len(prose) for sentence in sort]


PAGE = """# A heading that is no sentence

One sentence here. Another one, with a [link of four words](page.md#a-b)! `Code` begins a third.

- an item without a full stop
- **a second** item

```python
print("no sentence.")
```

| a table | is none. |
|---|---|

<!-- written by docs.generate -->
Generated words. And more of them.
<!-- until here -->

"""


def test_prose_is_counted_and_faults_are_named() -> None:
    assert [words(sentence) for sentence in sentences(PAGE)] == [3, 8, 4, 6, 3]
    for good in (" ".join(["word"] * 30), "From 1 to 2, and `3`, to x-4."):
        assert faults(f"{PAGE}{good}.") == []
    for wrong in (" ".join(["word"] * 31), "From 1 to 2, and `3`; to x-4 or 5.5."):
        assert faults(f"{PAGE}{wrong}") == [wrong]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plainly_written(page: Path) -> None:
    """At most 5 % of the sentences have more than 30 words, or more than two numbers; of notebooks their Markdown."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert faults(text) == []


def test_pages_by_hand_are_few_and_short() -> None:
    assert len(BY_HAND) <= 25
    counts = {page.name: len(by_hand(page.read_text("utf-8")).split()) for page in BY_HAND}
    assert sum(counts.values()) <= 45_150, counts
    assert len(by_hand((ROOT / "README.md").read_text("utf-8")).split()) <= 800
