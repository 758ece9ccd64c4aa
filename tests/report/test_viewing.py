"""Shares are counted head by head; text on colors is escaped, and the colors say what the numbers do."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
import torch

from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.report.rollout_view import TextHeat, draw_visibility, held_share, token_texts, visibility
from sparse_rl_lightning.testing import character_tokenizer
from tests.gpus import RealGPU

LAYERS, HEADS, LENGTH = 3, 2, 9


def record() -> tuple[EvictionRecord, torch.Tensor]:
    """Two sequences whose tokens die at random, if they do."""
    death = torch.randint(1, 14, (LAYERS, 2, HEADS, LENGTH), dtype=torch.int32)
    death = death.maximum(torch.arange(1, LENGTH + 1, dtype=torch.int32))  # nothing dies before it was there
    death = torch.where(death < LENGTH, death, NEVER)
    return EvictionRecord.from_dense(death), death


def test_visibility_is_counted_head_by_head() -> None:
    evictions, death = record()
    for sequence in range(2):
        share = visibility(evictions, sequence)
        for query in range(LENGTH):
            for key in range(LENGTH):
                deaths = death[:, sequence, :, key].flatten().tolist()
                seen = sum(key <= query < one for one in deaths)
                assert share[query, key] == pytest.approx(seen / (LAYERS * HEADS))


def test_held_share_is_what_a_query_sees() -> None:
    evictions, _ = record()
    for query in (0, 4, LENGTH - 1):
        both = held_share(evictions, query)
        for sequence in range(2):
            torch.testing.assert_close(both[sequence], visibility(evictions, sequence)[query])
    assert torch.equal(held_share(evictions), held_share(evictions, LENGTH - 1))


def test_tokens_without_letters_have_a_sign() -> None:
    tokenizer = character_tokenizer("ab \n")
    ids = tokenizer("a b\n")["input_ids"]
    assert token_texts(tokenizer, torch.tensor(ids)) == ["a", "·", "b", "⏎"]

    class Silent:
        def decode(self, ids: list[int]) -> str:
            return ""

    assert token_texts(Silent(), [7]) == ["<7>"]


class Spans(HTMLParser):
    """Every element's name, and the colors, numbers and text of the spans."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.found: list[tuple[str, float, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        values = dict(attrs)
        assert set(values) <= {"style", "title"}
        if tag == "span":
            back = re.search(r"background:(#[0-9a-f]{6})", values["style"] or "")
            assert back
            self.found.append((back[1], float(values["title"] or "nan"), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            back, number, text = self.found[-1]
            self.found[-1] = (back, number, text + data)


HOSTILE = ["<script>alert(1)</script>", '" onmouseover="x', "</span></td>", "&amp;", "\0<", "'"]


def test_hostile_text_stays_text() -> None:
    view = TextHeat(HOSTILE, {"<img src=x>": [0.0] * len(HOSTILE)}, caption="</table><b>")
    spans = Spans(view._repr_html_())
    assert spans.names == {"table", "tr", "th", "td", "span"}
    assert [text for _, _, text in spans.found][: len(HOSTILE) - 1] == [*HOSTILE[:4], "\0<"]


def test_colors_follow_the_numbers() -> None:
    values = [0.0, 1.0, 2.0, 9.0, -2.0, math.nan]
    spans = Spans(TextHeat(list("abcdef"), {"row": values}, limit=2)._repr_html_()).found[:6]
    backs = [back for back, _, _ in spans]
    assert backs[0] == "#ffffff"
    assert backs[2] == backs[3] == "#2563eb", "what is above the limit has its color"
    assert backs[1] == "#92b1f5", "half way"
    assert backs[4] == "#c2410c"
    assert backs[5] == "#e5e7eb"
    assert [number for _, number, _ in spans[:5]] == values[:5], "the number itself is the tooltip"


def test_default_limit_is_the_largest_number() -> None:
    assert TextHeat(["a", "b"], {"one": [1.0, -4.0], "two": [math.nan, 3.0]}).scale == 4
    assert TextHeat(["a"], {"one": [0.0]}).scale == 1
    assert TextHeat([], {}).scale == 1


def test_plain_text_without_a_notebook() -> None:
    view = TextHeat(list("abcd"), {"held": [1, 0.4, 0.6, 0], "ratio": torch.tensor([0.0, -1.0, 0.2, 1.0])})
    assert str(view) == "held   a·c·\nratio  ·[b]·d"


def test_plain_text_cannot_take_over_the_terminal() -> None:
    view = TextHeat(["\x1b[2J", "a\n"], {"\x1b]0;x\x07": [1, 1], "down": [-1, 0]})
    assert str(view) == "\\x1b]0;x\\x07  \\x1b[2Ja\\n\ndown          [\\x1b[2J]···"


def test_picture_of_a_rollout_on_a_gpu(gpu: RealGPU) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    with gpu:
        image = draw_visibility(axes, torch.ones(3, 3, device="cuda"), ["a"] * 3)
    assert image.get_array() is not None


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match=r"rows\['x'\] has 1 numbers for 2 tokens"):
        TextHeat(["a", "b"], {"x": [1.0]})


def test_picture_hides_the_future_and_labels_short_texts() -> None:
    from matplotlib.figure import Figure

    evictions, _ = record()
    share = visibility(evictions)
    ax = Figure().subplots()
    drawn = draw_visibility(ax, share, ["$x$", *"bcdefghi"], prompt_length=4).get_array()
    assert drawn is not None
    shown = torch.as_tensor(drawn.filled(math.nan))
    assert shown.isnan().equal(torch.ones_like(share, dtype=torch.bool).triu(1))
    torch.testing.assert_close(shown.nan_to_num(), share)
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == [r"\$x\$", "b"]
    assert [line.get_xdata()[0] for line in ax.lines] == [3.5, 0]

    many = Figure().subplots()
    draw_visibility(many, torch.ones(65, 65), ["x"] * 65)
    assert "x" not in [label.get_text() for label in many.get_xticklabels()]
