"""Draw the pictures of ``concepts.md`` and ``design.md`` into ``docs/figures``: ``python -m docs.figures``.

What shows a rollout is a rollout, of a random model with two layers; what shows a rule is computed by the rule.
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
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 110}


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
    axes = figure.subplots()
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
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5)


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
    figure, axes = canvas(12, 3.8, 20, 7)
    steps = [
        ("prompts", FREE), ("rollout:\nsparse policy,\nsmall cache", KEPT),
        ("rescoring:\ndense policy,\nfull cache", SINK),
        ("rewards,\nadvantages", WINDOW), ("callbacks:\nreject,\nreweight", GONE), ("loss,\noptimizer", FREE),
    ]  # fmt: skip
    for number, (text, color) in enumerate(steps):
        box(axes, 1.6 + 3.35 * number, 4, text, color, 2.6, 2.2)
        if number:
            arrow(axes, (3.35 * number - 0.42, 4), (3.35 * number + 0.28, 4))
    arrow(axes, (18.3, 2.1), (5, 2.1), -0.2)
    axes.text(11.6, -0.1, "new weights, next rollout", ha="center")
    for number, field in enumerate(("data", "generator", "learner", "rewards", "RolloutCallback", "learner, loss")):
        axes.text(1.6 + 3.35 * number, 2.68, field, ha="center", va="top", fontsize=9, family="monospace")
    for x, text in ((4.95, "sampler_logprobs\nevictions"), (8.3, "old_logprobs"), (15, "keep, weights")):
        axes.text(x, 5.5, text, ha="center", va="bottom", fontsize=9, family="monospace")
    return figure


def slot() -> Figure:
    """What one sequence owns in one layer and KV head."""
    figure, axes = canvas(9, 2.6, 18, 5.4)
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
    figure, axes = canvas(9, 4.4, 18, 9.4)
    positions = [0, 1, 5, 6, 9, 14, 17, 18, 22, 24, 25, 26, 27, 28, 29, 30]
    scores = [0.55, 0.2, 0.8, 0.35, 0.95, 0.25, 0.7, 0.6, 0.15, 0.75, 0.5]  # of the entries that compete
    kept = set(sorted(range(2, 13), key=lambda n: -scores[n - 2])[:7])
    pinned = {0: SINK, 1: SINK, 13: WINDOW, 14: WINDOW, 15: WINDOW}
    colors = [pinned.get(n) or (KEPT if n in kept else GONE) for n in range(16)]
    cells(axes, 4.6, colors, [str(p) for p in positions], x=1)
    for n, score in enumerate(scores, start=2):
        axes.add_patch(Rectangle((1.2 + n, 5.75), 0.52, 2.4 * score, facecolor=colors[n], edgecolor=INK, linewidth=0.6))
    axes.text(8.4, 8.5, "score of every entry that is not pinned", ha="center")
    axes.text(9, 4.3, "full after position 30: the worst four go, their deaths are 31", ha="center", va="top")
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
    figure = Figure(figsize=(9.2, 4.4))
    left, right = figure.subplots(1, 2)
    map_ = matplotlib.colors.ListedColormap(["white", GONE, KEPT])
    for axes, visible, title in ((left, causal, "dense policy"), (right, seen, "sparse policy, and its replay")):
        axes.imshow(causal.int() + visible.int(), cmap=map_, vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=title, xlabel="key (position)", ylabel="query (position)")
    right.annotate(
        "evicted: seen until\nits death, never after", (9, 34), (22, 12), arrowprops={"arrowstyle": "->"}, fontsize=9
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
    figure = Figure(figsize=(9.2, 3.6))
    axes = figure.subplots()
    axes.plot(position, dense[mask], color=LINE, label="old_logprobs: the dense policy")
    axes.plot(
        position, rollout.sampler_logprobs[mask], color=GONE, label="sampler_logprobs: the sparse policy, which drew"
    )
    axes.plot(position, replay[mask], "o", color=INK, markersize=4, fillstyle="none", label="replay of its evictions")
    assert rollout.evictions is not None
    events = rollout.evictions.death.unique()
    for number, event in enumerate(events[events < mask.shape[1]].tolist()):
        axes.axvline(event - 0.5, color="#bbbbbb", linewidth=0.8, zorder=0, label="compression" if not number else None)
    axes.set(xlabel="position", ylabel="log-probability of the token drawn")
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
    figure = Figure(figsize=(9.2, 3.6))
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(ratios.items(), (LINE, WINDOW, GONE), strict=True):
        left.plot(values, "o-", color=color, label=name, markersize=4)
        kept = min(values) >= 1e-4
        weights = [min(value, 1.5) if kept else 0.0 for value in values]
        right.plot(weights, "o-", color=color, markersize=4)
    left.axhline(1e-4, color=INK, linestyle="--", linewidth=1)
    left.text(0, 1.3e-4, "threshold of rejection, 1e-4", fontsize=9, va="bottom")
    left.set(yscale="log", xlabel="token", title="ξ = dense / sparse probability", ylim=(5e-6, 800))
    left.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    right.axhline(1.5, color=INK, linestyle="--", linewidth=1)
    right.text(0, 1.53, "clip_max of reweighting, 1.5", fontsize=9, va="bottom")
    right.set(xlabel="token", title="what multiplies the loss of the token", ylim=(-0.1, 1.8))
    right.text(3.2, 0.07, "C is rejected, all of it", fontsize=9)
    figure.tight_layout()
    return figure


def schedule() -> Figure:
    """Entries that a sequence reads, step by step, as the library computes them."""
    rising = LengthSchedule([0, 2000, 4000, 6000], [512, 1024, 1536, 2048])
    figure = Figure(figsize=(9.2, 3.6))
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
    figure, axes = canvas(9.2, 3.4, 28, 9)
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
    axes.text(14, 0.6, "everything stays in memory: another query may read other pages", ha="center")
    return figure


def engine() -> Figure:
    """A prompt's way through the engine: what happens to it, and in which file."""
    figure, axes = canvas(13, 5.2, 36, 13.2)
    axes.add_patch(Rectangle((6.3, 0.4), 23.4, 12.5, facecolor="none", edgecolor=LINE, linestyle="--"))
    told = "Scheduler.step, until all sequences have finished: rollout/engine/scheduler.py"
    axes.text(6.7, 12.6, told, va="top", family="monospace", fontsize=9, color=LINE)
    for x, y, title, text, file, color in (
        (2.9, 8, "prompt", "token ids, and how\nmany samples of it", "rollout/sampler", FREE),
        (9.8, 8, "admit", "a waiting sequence\ngets a free slot,\nits prompt is read", "rollout/engine/prefill", SINK),
        (18, 8, "decode", "a running sequence\nattends to its slot\nand draws a token", "rollout/engine/engine", KEPT),
        (
            26.2, 8, "finish", "tokens, log-probs and\nevictions are copied\nout, the slot is free",
            "rollout/engine/finished", WINDOW,
        ),
        (33.1, 8, "Rollout", "what the learner\ntrains on", "records", FREE),
        (9.8, 3, "slot", "budget + buffer\ntokens of every layer\nand KV head", "cache/slots", FREE),
        (18, 3, "compress", "budget tokens stay,\nwhen the others died\nis recorded", "cache/compression", GONE),
        (26.2, 3, "compressor", "what a token is worth:\none method per\ncompressor", "compressors/base", FREE),
    ):  # fmt: skip
        box(axes, x, y, "", color, 5.2, 2.9)
        axes.text(x, y + 1.35, title, ha="center", va="top", fontsize=10.5, weight="bold")
        axes.text(x, y + 0.5, text, ha="center", va="top", fontsize=9)
        axes.text(x, y - 1.6, f"{file}.py", ha="center", va="top", fontsize=8, family="monospace")
    for start, end, bend in (
        ((5.6, 8), (7.1, 8), 0), ((12.5, 8), (15.3, 8), 0), ((20.7, 8), (23.5, 8), 0), ((28.9, 8), (30.4, 8), 0),
        ((25.6, 9.6), (10.4, 9.6), 0.16),  # the free slot
        ((18, 5.7), (18, 4.6), 0), ((23.5, 3), (20.7, 3), 0), ((15.3, 3), (12.5, 3), 0),
        ((9.8, 5.7), (9.8, 4.6), 0), ((15.3, 6.8), (12.5, 4.4), 0), ((12.5, 4.4), (15.3, 6.8), 0),
    ):  # fmt: skip
        arrow(axes, start, end, bend)
    for x, y, text in (
        (22.1, 8.2, "ended"), (18, 11, "a free slot takes the next waiting sequence"), (18.8, 4.9, "full"),
        (22.1, 3.2, "score"), (13.9, 3.2, "cut"), (8.9, 4.9, "store"), (15.1, 4.9, "attend,\nappend"),
    ):  # fmt: skip
        axes.text(x, y, text, ha="center", va="bottom", fontsize=9, style="italic")
    return figure


if __name__ == "__main__":
    main()
