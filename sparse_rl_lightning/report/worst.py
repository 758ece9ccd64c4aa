"""Completions shown on the page: the worst of the run and why, and samples of the held-out problems."""

from __future__ import annotations

from typing import Any

from sparse_rl_lightning.report.html import text
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.scale import short
from sparse_rl_lightning.report.terminal import CACHES
from sparse_rl_lightning.text import number, printable, shortened

KINDS = ("rejected", "most mismatched", "lowest reward")
MOST = 24
LONGEST = 2200
"""Characters of a text; files may hold more than RunSummary writes."""


def worst_completions(record: RunRecord) -> str:
    """Rejected, most mismatched and lowest-rewarded completions as cards; nothing where none were kept."""
    entries = sorted(record.worst, key=_order)[:MOST]
    if not entries:
        return ""
    cards = "\n".join(_card(entry, _why(entry)) for entry in entries)
    return (
        '<h2>Worst completions</h2>\n<p class="soft">Sampled in training: rejected, most mismatched, or with the '
        f'lowest reward; of equals the newest.</p>\n<div class="cards">\n{cards}\n</div>'
    )


def held_out_samples(record: RunRecord) -> str:
    """Greedy completions of the first held-out problems, after training."""
    if not record.samples:
        return ""
    cards = "\n".join(
        _card(sample, CACHES.get(_string(sample, "cache"), _string(sample, "cache")))
        for sample in record.samples[:MOST]
    )
    return f'<h2>Held-out problems after training, greedy</h2>\n<div class="cards">\n{cards}\n</div>'


def _order(entry: dict[str, Any]) -> tuple[int, float]:
    places = [KINDS.index(kind) for kind in _kinds(entry) if kind in KINDS]
    return min(places, default=len(KINDS)), -(_number(entry, "rollout") or 0.0)


def _why(entry: dict[str, Any]) -> str:
    """Why a completion is shown, in a sentence or two."""
    kinds = _kinds(entry)
    parts = [f"Rollout {short(_number(entry, 'rollout') or 0.0)}: {', '.join(kinds) or 'kept'}."]
    ratio, place = _number(entry, "ratio"), _number(entry, "token_place")
    if ratio is not None and place is not None and kinds != ["lowest reward"]:
        token = printable(_string(entry, "token"), 24)
        of = f" of {length:.0f}" if (length := _number(entry, "length")) else ""
        times = f"{short(ratio)} times" if ratio > 0 else "0 times"
        parts.append(
            f"Token {place:.0f}{of}, “{token}”, is {times} as likely under the full cache as under the sampler."
        )
    if entry.get("rejected") is True and "rejected" not in kinds:
        parts.append("It was rejected.")
    if entry.get("finished") is False:
        parts.append("It was cut off at the length limit.")
    return " ".join(parts)


def _card(entry: dict[str, Any], label: str) -> str:
    reward, answer = _number(entry, "reward"), entry.get("answer")
    kind = "" if reward is None else ' class="right"' if reward > 0 else ' class="wrong"'
    told = f"{text(shortened(label, 600))} <b{kind}>Reward {number(reward, 2)}</b>"
    told += "" if answer is None else f" · answer {text(shortened(str(answer), 200))}"
    prompt, completion = (text(shortened(_string(entry, name), LONGEST)) for name in ("prompt", "completion"))
    return f'<article><p class="soft">{told}</p><pre class="soft">{prompt}</pre><pre>{completion}</pre></article>'


def _kinds(entry: dict[str, Any]) -> list[str]:
    kinds = entry.get("kinds")
    return [str(kind)[:40] for kind in kinds[:5]] if isinstance(kinds, list) else []


def _string(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""


def _number(entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
