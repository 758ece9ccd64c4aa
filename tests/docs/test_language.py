"""Sentences are counted as one reads them: of prose alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import language

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = ("settings.md", "callbacks.md", "metrics.md", "methods.md", "reference.md")  # the last is a list of pages
BY_HAND = sorted(page for page in DOCS.glob("*.md") if page.name not in GENERATED)
ROOT = DOCS.parent
ELSEWHERE = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "MIGRATION", "SECURITY")]
ELSEWHERE += [ROOT / folder / "README.md" for folder in ("benchmarks", "cuda_ext", "experiments")]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

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

LONG.
"""


def test_prose_is_counted_and_long_sentences_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("LONG", " ".join(["word"] * 31)))
    prose = language.Prose.of(page.read_text())
    assert [language.words(sentence) for sentence in prose.sentences] == [3, 8, 4, 6, 3, 31]
    assert language.main([str(page)]) == 1
    assert "55 words, 9.2 a sentence, 17 % above 30, 0 % with" in capsys.readouterr().out
    page.write_text(PAGE.replace("LONG", " ".join(["word"] * 30)))
    assert language.main([str(page)]) == 0
    page.write_text(PAGE.replace("LONG", "From 1 to 2, and `3`; to x-4 or 5.5."))
    assert language.main([str(page), "--show"]) == 1
    assert "From 1 to 2, and" in capsys.readouterr().out
    page.write_text(PAGE.replace("LONG", "From 1 to 2, and `3`, to x-4."))
    assert language.main([str(page)]) == 0


@pytest.mark.parametrize("page", [*ELSEWHERE, *BY_HAND], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plainly_written(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At most 5 % of the sentences have more than 30 words, or more than two numbers."""
    assert language.main([str(page), "--show"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_plainly_written(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their Markdown cells keep the same rule."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    page = tmp_path / f"{path.stem}.md"
    page.write_text("\n\n".join(texts), "utf-8")
    assert language.main([str(page), "--show"]) == 0, capsys.readouterr().out


def test_pages_by_hand_are_few_and_short() -> None:
    assert len(BY_HAND) <= 24
    words = {page.name: len(language.by_hand(page.read_text("utf-8")).split()) for page in BY_HAND}
    assert sum(words.values()) <= 43_000, words
    assert len(language.by_hand((ROOT / "README.md").read_text("utf-8")).split()) <= 800
