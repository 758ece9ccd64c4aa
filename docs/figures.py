"""Draw the pictures of ``concepts.md`` and ``design.md`` into ``docs/figures``: ``python -m docs.figures``.

What shows a rollout is a rollout, of a random model with two layers; what shows a rule is computed by the rule. All are
narrow: on a screen of 500 pixels letters have about nine or more.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration import Work, entries_read
from sparse_rl_lightning.compressors import Compressor, SnapKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.testing import tiny_model

FOLDER = Path(__file__).parent / "figures"
SINK, KEPT, WINDOW, FREE, GONE, LINE = "#99b8dd", "#66ccee", "#ddcc66", "#f4f4f4", "#ee6677", "#4477aa"
INK = "#333333"
WIDTH = 6.4  # inches
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 150,
}


def main() -> None:
    """Draw all."""
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for draw in (loop, slot, compression, record, policies, corrections, schedule, pages, engine):
            figure = draw()
            figure.savefig(FOLDER / f"{draw.__name__}.png", bbox_inches="tight", metadata={"Software": None})
            print(f"Written: docs/figures/{draw.__name__}.png")


# ---------------------------------------------------------------- pieces


def canvas(width: float, height: float, right: float, top: float) -> tuple[Figure, Axes]:
    """An empty drawing whose units are cells."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.axis("off")
    return figure, axes


def cells(axes: Axes, y: float, colors: list[str], texts: list[str] | None = None, x: float = 0) -> None:
    """A row of cells of the cache."""
    for number, color in enumerate(colors):
        axes.add_patch(Rectangle((x + number, y), 0.92, 0.92, facecolor=color, edgecolor=INK, linewidth=0.8))
        if texts:
            axes.text(x + number + 0.46, y + 0.44, texts[number], ha="center", va="center", fontsize=9)


def brace(axes: Axes, first: float, last: float, y: float, text: str) -> None:
    """A line under some cells that says what they are."""
    axes.plot([first, first, last, last], [y + 0.18, y, y, y + 0.18], color=INK, linewidth=1)
    axes.text((first + last) / 2, y - 0.15, text, ha="center", va="top")


def box(axes: Axes, x: float, y: float, text: str, color: str, width: float = 2.6, height: float = 1.2) -> None:
    """A box with text, around its middle."""
    place = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(place, width, height, "round,pad=0.06", facecolor=color, edgecolor=INK))
    axes.text(x, y, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    """An arrow between two places."""
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=INK, connectionstyle=style))


def tiny_rollout() -> tuple[torch.nn.Module, Compressor, Rollout]:
    """A rollout with evictions: 8 tokens of prompt, 40 of completion, slots of 12 + 4."""
    torch.manual_seed(0)
    model = tiny_model("qwen2", num_layers=2, initializer_range=0.25)
    compressor = SnapKV(budget=12, buffer=4, num_sinks=2, window=3)
    params = SamplingParams(num_generations=1, max_completion_length=40, min_completion_length=40, seed=3)
    return model, compressor, RolloutSampler(model, compressor).generate([list(range(5, 13))], params)


# ---------------------------------------------------------------- pictures


def loop() -> Figure:
    """The way of a block of prompts, from the data to the next one."""
    figure, axes = canvas(WIDTH, 4.4, 14, 9.6)
    (left, middle, right), (above, below) = (2, 7, 12), (7.2, 2.4)
    for x, y, text, field, color in (
        (left, above, "prompts", "data", FREE), (middle, above, "rollout:\ncompressed\ncache", "generator", KEPT),
        (right, above, "rescoring:\nfull cache", "learner", SINK),
        (right, below, "rewards,\nadvantages", "rewards", WINDOW),
        (middle, below, "callbacks:\nreject,\nreweight", "RolloutCallback", GONE),
        (left, below, "loss,\noptimizer", "learner, loss", FREE),
    ):  # fmt: skip
        box(axes, x, y, text, color, 2.9, 2)
        axes.text(x, y - 1.15, field, ha="center", va="top", fontsize=9, family="monospace")
    for y, text, x in (
        (above, "sampler_logprobs\nevictions", middle), (above, "old_logprobs", right), (below, "keep, weights", middle)
    ):  # fmt: skip
        axes.text(x, y + 1.25, text, ha="center", va="bottom", fontsize=9, family="monospace")
    for start, end, y in ((left, middle, above), (middle, right, above), (right, middle, below), (middle, left, below)):
        ahead = 1.6 if end > start else -1.6
        arrow(axes, (start + ahead, y), (end - ahead, y))
    arrow(axes, (right, above - 1.75), (right, below + 1.2))
    arrow(axes, (left, below + 1.2), (middle - 1.3, above - 1.2), -0.15)
    axes.text(left - 1.5, 4.75, "new weights,\nnext rollout", ha="left", va="center")
    return figure


def slot() -> Figure:
    """What one sequence owns in one layer and KV head."""
    figure, axes = canvas(WIDTH, 2.2, 18, 5.4)
    colors = [SINK] * 2 + [KEPT] * 7 + [WINDOW] * 3 + [FREE] * 4
    cells(axes, 3, colors, [str(n) for n in (0, 1, 5, 6, 9, 14, 17, 18, 22, 24, 25, 26)] + [""] * 4, x=1)
    axes.text(1.9, 4.15, "sinks", ha="center")
    axes.text(6.4, 4.15, "best scores", ha="center")
    axes.text(11.4, 4.15, "window", ha="center")
    axes.text(14.9, 4.15, "free", ha="center")
    brace(axes, 1, 12.92, 2.6, "budget: 12 tokens stay at a compression")
    brace(axes, 13, 16.92, 2.6, "buffer: 4 new ones")
    brace(axes, 1, 16.92, 1.1, "slot: 16 tokens, whatever the length of the sequence")
    return figure


def compression() -> Figure:
    """A full slot, its scores, and what is left of it."""
    figure, axes = canvas(WIDTH, 3.7, 18, 9.4)
    positions = [0, 1, 5, 6, 9, 14, 17, 18, 22, 24, 25, 26, 27, 28, 29, 30]
    scores = [0.55, 0.2, 0.8, 0.35, 0.95, 0.25, 0.7, 0.6, 0.15, 0.75, 0.5]  # of the entries that compete
    kept = set(sorted(range(2, 13), key=lambda n: -scores[n - 2])[:7])
    pinned = {0: SINK, 1: SINK, 13: WINDOW, 14: WINDOW, 15: WINDOW}
    colors = [pinned.get(n) or (KEPT if n in kept else GONE) for n in range(16)]
    cells(axes, 4.6, colors, [str(p) for p in positions], x=1)
    for n, score in enumerate(scores, start=2):
        axes.add_patch(Rectangle((1.2 + n, 5.75), 0.52, 2.4 * score, facecolor=colors[n], edgecolor=INK, linewidth=0.6))
    axes.text(8.4, 8.5, "score of every entry that is not pinned", ha="center")
    axes.text(9, 4.3, "full after position 30: the lowest four are evicted, at step 31", ha="center", va="top")
    arrow(axes, (9, 3.55), (9, 2.6))
    left = [n for n in range(16) if colors[n] != GONE]
    after = [colors[n] for n in left] + [FREE] * 4
    cells(axes, 1.4, after, [str(positions[n]) for n in left] + [""] * 4, x=1)
    axes.text(9, 1.1, "same memory, order kept, true positions kept, room for the next four", ha="center", va="top")
    return figure


def record() -> Figure:
    """Which keys every query saw: everything, or what the record says."""
    _, _, rollout = tiny_rollout()
    assert rollout.evictions is not None
    death = rollout.evictions.death[0, 0, 0]  # (T) of the first layer and KV head
    length = int(rollout.prompt_lengths[0] + rollout.completion_lengths[0])
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = key <= query
    seen = causal & (query < death[:length])
    figure = Figure(figsize=(WIDTH, 3.4))
    left, right = figure.subplots(1, 2)
    map_ = matplotlib.colors.ListedColormap(["white", GONE, KEPT])
    for axes, visible, title in (
        (left, causal, "full-cache policy"),
        (right, seen, "compressed-cache policy\nand its replay"),
    ):
        axes.imshow(causal.int() + visible.int(), cmap=map_, vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=title, xlabel="key (position)", ylabel="query (position)")
    right.annotate(
        "evicted: seen until its\neviction step, not after",
        (12, 20),
        (17, 6),
        arrowprops={"arrowstyle": "->"},
        fontsize=9,
    )
    figure.tight_layout()
    return figure


def policies() -> Figure:
    """Log-probabilities of the same tokens by the three ways of computing them."""
    model, _, rollout = tiny_rollout()
    mask = rollout.completion_mask
    with torch.no_grad():
        dense, _ = sequence_logprobs(model, rollout.sequences, mask)
        replay = replay_logprobs(model, rollout)
    position = mask[0].nonzero()[:, 0]
    figure = Figure(figsize=(WIDTH, 3.3))
    axes = figure.subplots()
    axes.plot(position, dense[mask], color=LINE, label="old_logprobs: full cache")
    axes.plot(position, rollout.sampler_logprobs[mask], color=GONE, label="sampler_logprobs: compressed cache")
    axes.plot(position, replay[mask], "o", color=INK, markersize=4, fillstyle="none", label="replay of the evictions")
    assert rollout.evictions is not None
    events = rollout.evictions.death.unique()
    for number, event in enumerate(events[events < mask.shape[1]].tolist()):
        axes.axvline(event - 0.5, color="#bbbbbb", linewidth=0.8, zorder=0, label="compression" if not number else None)
    axes.set(xlabel="position", ylabel="log-probability of the sampled token")
    axes.set_ylim(top=axes.get_ylim()[1] + 2.6)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    return figure


def corrections() -> Figure:
    """Constructed ratios of three sequences: what rejection and reweighting make of them."""
    ratios = {
        "A, all near 1": [1.02, 0.97, 1.0, 1.1, 0.94, 1.0, 1.04, 0.99],
        "B, some far off": [1.0, 0.62, 1.05, 2.6, 0.9, 0.3, 1.9, 1.0],
        "C, one impossible token": [1.0, 0.96, 1.1, 0.9, 2e-5, 0.8, 1.2, 1.0],
    }
    figure = Figure(figsize=(WIDTH, 3.3))
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(ratios.items(), (LINE, WINDOW, GONE), strict=True):
        left.plot(values, "o-", color=color, label=name, markersize=4)
        kept = min(values) >= 1e-4
        weights = [min(value, 1.5) if kept else 0.0 for value in values]
        right.plot(weights, "o-", color=color, markersize=4)
    left.axhline(1e-4, color=INK, linestyle="--", linewidth=1)
    left.text(0, 1.3e-4, "rejected below 1e-4", fontsize=9, va="bottom")
    left.set(yscale="log", xlabel="token", title="ξ = full / compressed probability", ylim=(5e-6, 3e4))
    left.legend(frameon=False, fontsize=9, loc="upper left")
    right.axhline(1.5, color=INK, linestyle="--", linewidth=1)
    right.text(0, 1.53, "clip_max of reweighting, 1.5", fontsize=9, va="bottom")
    right.set(xlabel="token", title="factor of the token's loss", ylim=(-0.1, 1.8))
    right.text(0, 0.07, "C is rejected as a whole", fontsize=9)
    figure.tight_layout()
    return figure


def schedule() -> Figure:
    """Entries that a sequence reads, step by step, as the library computes them."""
    rising = LengthSchedule([0, 2000, 4000, 6000], [512, 1024, 1536, 2048])
    figure = Figure(figsize=(WIDTH, 3.3))
    axes = figure.subplots()
    work = Work(batch=1, prompt=256, length=8000)
    lengths = torch.arange(work.prompt + 1, work.prompt + work.length + 1)
    axes.plot(lengths, lengths, color="#bbbbbb", label="full cache")
    for name, budget, color in (("budget 1024", 1024, LINE), ("schedule 512, 1024, 1536, 2048", rising, GONE)):
        compressor = SnapKV(budget, buffer=256, num_sinks=0)
        axes.plot(lengths, entries_read(compressor, work, num_layers=1), color=color, label=name, linewidth=1)
    axes.set(xlabel="length of the sequence (tokens)", ylabel="entries held and read", ylim=(0, 3400))
    axes.legend(frameon=False, loc="upper right")
    return figure


def pages() -> Figure:
    """What one query reads under retrieval."""
    figure, axes = canvas(WIDTH, 3, 28, 9)
    scores = [0.0, 0.35, 0.9, 0.2, 0.75, 0.3, 0.0, 0.0]
    for page, score in enumerate(scores):
        always, chosen = page in (0, 6, 7), score >= 0.75
        color = SINK if always else KEPT if chosen else FREE
        cells(axes, 2.6, [color] * 3, x=1 + 3.3 * page)
        if not always:
            axes.add_patch(
                Rectangle((1.9 + 3.3 * page, 4), 1, 3 * score, facecolor=color, edgecolor=INK, linewidth=0.6)
            )
        axes.text(
            2.4 + 3.3 * page,
            2.25,
            "always" if always else "read" if chosen else "not now",
            ha="center",
            va="top",
            fontsize=9,
        )
    axes.text(10.8, 7.3, "score of a page: query · mean key of the page", ha="center")
    axes.text(14, 0.6, "all stay in memory: another query may read other pages", ha="center")
    return figure


def engine() -> Figure:
    """A prompt's way through the engine: what happens to it, and in which file."""
    figure, axes = canvas(6.6, 5.6, 22, 18.6)
    (left, middle, right), (top, center, bottom) = (3.1, 11, 18.9), (16.4, 10.2, 4)
    between = (top + center) / 2
    for x, y, title, text, file, color in (
        (left, top, "prompt", "token ids, number\nof samples", "rollout/sampler", FREE),
        (middle, top, "admit", "the sequence gets\na free slot, its\nprompt is read", "rollout/engine/prefill", SINK),
        (middle, center, "decode", "attend to the slot,\nsample a token,\nappend it", "rollout/engine/engine", KEPT),
        (left, center, "finish", "copy the results out,\nfree the slot", "rollout/engine/finished", WINDOW),
        (left, bottom, "Rollout", "what the learner\ntrains on", "records", FREE),
        (right, between, "slot", "budget + buffer\ntokens per layer\nand KV head", "cache/slots", FREE),
        (right, bottom, "compress", "keep budget tokens,\nrecord the\nevicted ones", "cache/compression", GONE),
        (middle, bottom, "compressor", "score the tokens:\none method per\ncompressor", "compressors/base", FREE),
    ):  # fmt: skip
        box(axes, x, y, "", color, 5.2, 3.2)
        axes.text(x, y + 1.5, title, ha="center", va="top", weight="bold")
        axes.text(x, y + 0.6, text, ha="center", va="top", fontsize=9)
        axes.text(x, y - 1.75, f"{file}.py", ha="center", va="top", fontsize=8.5, family="monospace")
    beside, under, over = 2.9, 2.5, 1.8  # of a box: its side, below its file's name, above it
    for start, end in (
        ((left + beside, top), (middle - beside, top)), ((middle, top - under), (middle, center + over)),
        ((middle - beside, center), (left + beside, center)), ((left, center - under), (left, bottom + over)),
        ((left + 1.4, center + over), (middle - beside, top - 1.2)),  # the free slot
        ((middle + beside, top), (right - 1.5, between + over)),
        ((middle + beside, center + 0.6), (right - beside, between - 1)),
        ((right - beside, between - 1), (middle + beside, center + 0.6)),
        ((right - 0.6, between - under), (right - 0.6, bottom + over)),
        ((right + 0.6, bottom + over), (right + 0.6, between - under)),
        ((middle + beside, bottom), (right - beside, bottom)),
    ):  # fmt: skip
        arrow(axes, start, end)
    for x, y, text, side in (
        (7.05, center + 0.2, "ended", "center"), (left + 1.2, between - 0.5, "next waiting\nsequence", "right"),
        (15.9, top + 0.1, "store", "left"), (right - 0.9, 7, "full", "right"), (right + 0.9, 7, "cut", "left"),
        (14.95, bottom + 0.2, "scores", "center"),
    ):  # fmt: skip
        axes.text(x, y, text, ha=side, va="bottom", fontsize=9, style="italic")
    told = "Scheduler.step repeats this until all sequences have finished (rollout/engine/scheduler.py)"
    axes.text(11, 0.9, told, ha="center", va="top", fontsize=9, color=LINE)
    return figure


if __name__ == "__main__":
    main()
