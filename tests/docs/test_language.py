"""Sentences are counted as one reads them: of prose alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import language

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
    assert "55 words, 9.2 a sentence, 17 % above 30" in capsys.readouterr().out
    page.write_text(PAGE.replace("LONG", " ".join(["word"] * 30)))
    assert language.main([str(page)]) == 0
