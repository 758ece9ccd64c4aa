"""Visualization of a rollout: attention visibility and per-token heat maps, for notebooks (letters: ``records``)."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evictions import EvictionRecord
from sparse_rl_lightning.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

WHITE, BLUE, RED, INK = (255, 255, 255), (37, 99, 235), (194, 65, 12), (31, 41, 55)
NOTHING, FADED = (229, 231, 235), (156, 163, 175)  # grays: background of a token without a number, letters of a 0
DARK = 140  # brightness below which letters are white
FAINT = 0.02  # share of the scale below which a color is indistinguishable from white
SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}
"""Signs for tokens that consist of one of these only."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Tensor) -> list[str]:
    """The text of each token alone; blanks and line ends become a sign, a token without text its number."""
    texts = [(int(number), str(tokenizer.decode([int(number)]))) for number in ids]
    return [SIGNS.get(text, text) or f"<{number}>" for number, text in texts]


def held_share(evictions: EvictionRecord, query: int | None = None) -> Tensor:
    """The share (B, T) of all layers' KV heads that still had each token, from 0, evicted, to 1, kept everywhere.

    The layers are those of the record, without those that have a sliding window. The share is taken at the token
    ``query`` that attends, the last one by default; later tokens count as evicted.
    """
    at = evictions.length - 1 if query is None else query
    shares = (evictions.death > at).float().mean(dim=(0, 2)) if evictions.num_layers else torch.ones(len(evictions), 1)
    return shares * (torch.arange(evictions.length, device=shares.device) <= at)


def visibility(evictions: EvictionRecord, sequence: int = 0) -> Tensor:
    """The share of the KV heads of all layers in the record in which each query sees each key.

    Args:
        evictions: Record of B sequences.
        sequence: Index of one of them.

    Returns:
        Shares (T, T) by query and key; 0 above the diagonal, 1 below it where nothing was evicted.
    """
    death = evictions[sequence : sequence + 1].death[:, 0].flatten(0, 1)  # (L x H, T)
    query = torch.arange(evictions.length, device=death.device)[:, None]
    seen = torch.zeros(evictions.length, evictions.length, device=death.device)
    for head in death:  # one at a time: long sequences have large squares
        seen += query < head
    return seen.div_(len(death)).tril_()


def draw_visibility(ax: Axes, share: Tensor, tokens: Sequence[str], prompt_length: int = 0) -> AxesImage:
    """Draw :func:`visibility` into a matplotlib axes: keys from left to right, queries from top to bottom.

    Args:
        ax: Axes to draw into.
        share: Shares (T, T) from :func:`visibility`.
        tokens: Labels, T of them; more than 64 are left out.
        prompt_length: Index of the first token of the completion, marked by a line.

    Returns:
        The image, for a color bar.
    """
    above = torch.ones_like(share, dtype=torch.bool).triu(1)
    image = ax.imshow(share.masked_fill(above, math.nan).cpu().numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.set(xlabel="key", ylabel="query", facecolor="#f3f4f6")
    if len(tokens) <= 64:
        plain = [token.replace("$", r"\$") for token in tokens]  # no formulas
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks(range(len(tokens)), plain, fontsize=6, family="monospace")
            axis.set_tick_params(length=0, pad=2)
        for label in ax.get_xticklabels():
            label.set_rotation(90 if len(label.get_text()) > 1 else 0)
    if prompt_length:
        ax.axvline(prompt_length - 0.5, color="#c2410c", lw=0.8)
        ax.axhline(prompt_length - 0.5, color="#c2410c", lw=0.8)
    return image


@dataclass(frozen=True)
class TextHeat:
    """A text several times, with a number per token as the color behind it: blue above 0, red below.

    A notebook shows it as HTML, in which all text is escaped; printed, it is plain text.

    Args:
        tokens: Texts, T of them.
        rows: Numbers (T) for each row, by the row's label; NaN is gray.
        limit: Number with full color; default the largest.
        caption: Meaning of the colors.

    Raises:
        ValueError: If a row and the tokens differ in length.

    Example::

        TextHeat(token_texts(tokenizer, rollout.sequences[0]), {"held": held_share(rollout.evictions)[0]}, limit=1)
    """

    tokens: Sequence[str]
    rows: Mapping[str, Sequence[float] | Tensor]
    limit: float | None = None
    caption: str = ""

    def __post_init__(self) -> None:
        for label, values in self.rows.items():
            if len(values) != len(self.tokens):
                raise UserError(
                    f"rows[{label!r}] has {len(values)} numbers for {len(self.tokens)} tokens: give one for each, or "
                    "cut both to the same tokens."
                )

    @property
    def scale(self) -> float:
        """The number with full color."""
        sizes = [abs(value) for row in self.rows.values() for value in _numbers(row) if math.isfinite(value)]
        return self.limit or max(sizes, default=0.0) or 1.0

    def _repr_html_(self) -> str:
        scale = self.scale
        rows = "".join(
            f'<tr><th style="{_LABEL}">{html.escape(label)}</th><td style="{_TEXT}">'
            + "".join(_span(token, value, scale) for token, value in zip(self.tokens, _numbers(values), strict=True))
            + "</td></tr>"
            for label, values in self.rows.items()
        )
        has_negative = any(value < 0 for row in self.rows.values() for value in _numbers(row))
        points = (-scale, -scale / 2, 0.0, scale / 2, scale) if has_negative else (0.0, scale / 2, scale)
        legend = "".join(_span(f" {point:.2g} ", point, scale) for point in points)
        return (
            f'<table style="{_TABLE}">{rows}<tr><th></th><td style="{_LEGEND}">{legend} '
            f"{html.escape(self.caption)}</td></tr></table>"
        )

    def __str__(self) -> str:
        """The text with tokens from half of the scale up plain, from minus half of it down in brackets, others dots."""
        scale, tokens, labels = self.scale, [printable(token) for token in self.tokens], [*map(printable, self.rows)]
        width = max(map(len, labels), default=0)
        return "\n".join(
            f"{label:{width}}  " + "".join(_plain(t, v / scale) for t, v in zip(tokens, _numbers(row), strict=True))
            for label, row in zip(labels, self.rows.values(), strict=True)
        )


def _css(color: Sequence[int]) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in color)


_TABLE = "border-collapse:collapse;margin:0.5em 0"
_LABEL = "text-align:right;vertical-align:top;padding:2px 10px 2px 0;white-space:nowrap;font-weight:600"
_TEXT = (
    "text-align:left;padding:2px 0;font-family:monospace;line-height:1.7;white-space:pre-wrap;overflow-wrap:anywhere;"
    f"color:{_css(INK)}"
)
_LEGEND = "text-align:left;padding-top:6px;font-size:85%"


def _span(token: str, value: float, scale: float) -> str:
    full, share = BLUE if value > 0 else RED, min(abs(value) / scale, 1.0)
    back = NOTHING if math.isnan(value) else [round(255 + share * (channel - 255)) for channel in full]
    brightness = 0.299 * back[0] + 0.587 * back[1] + 0.114 * back[2]
    front = WHITE if brightness < DARK else INK if abs(value) >= FAINT * scale else FADED
    color = "" if front is INK else f";color:{_css(front)}"
    return f'<span style="background:{_css(back)}{color}" title="{value:.3g}">{html.escape(token)}</span>'


def _plain(token: str, share: float) -> str:
    if share <= -0.5:
        return f"[{token}]"
    return token if share >= 0.5 else "·" * len(token)


def _numbers(values: Sequence[float] | Tensor) -> list[float]:
    return [float(value) for value in values]
