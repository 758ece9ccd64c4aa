"""Draw the charts of ``concepts.md`` into ``docs/figures``: ``python -m docs.figures``.

What shows a rollout is a rollout, of a random model with two layers; what shows a rule is computed by the rule. All are
narrow: on a screen of 500 pixels letters have about nine or more. Diagrams without numbers of a program are ``.svg``
files, changed by hand.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration import Work, entries_read
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.testing import tiny_model

FOLDER = Path(__file__).parent / "figures"
KEPT, GONE, LINE, INK = "#66ccee", "#ee6677", "#4477aa", "#333333"
WIDTH = 6.4  # inches
STYLE = {
    "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150,
}  # fmt: skip


def main() -> None:
    """Draw all."""
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for draw in (record, policies, schedule):
            figure = draw()
            figure.savefig(FOLDER / f"{draw.__name__}.png", bbox_inches="tight", metadata={"Software": None})
            print(f"Written: docs/figures/{draw.__name__}.png")


def tiny_rollout() -> tuple[torch.nn.Module, Rollout, torch.Tensor]:
    """A model, its rollout of 8 tokens of prompt and 40 of completion in slots of 12 + 4, and the eviction steps."""
    torch.manual_seed(0)
    model = tiny_model("qwen2", num_layers=2, initializer_range=0.25)
    compressor = SnapKV(budget=12, buffer=4, num_sinks=2, window=3)
    params = SamplingParams(num_generations=1, max_completion_length=40, min_completion_length=40, seed=3)
    rollout = RolloutSampler(model, compressor).generate([list(range(5, 13))], params)
    assert rollout.evictions is not None
    return model, rollout, rollout.evictions.death


def record() -> Figure:
    """Which keys every query saw: everything, or what the record says."""
    _, rollout, deaths = tiny_rollout()
    length = int(rollout.prompt_lengths[0] + rollout.completion_lengths[0])
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = key <= query
    seen = causal & (query < deaths[0, 0, 0, :length])  # of the first layer and KV head
    figure = Figure(figsize=(WIDTH, 3.4))
    left, right = figure.subplots(1, 2)
    colors = matplotlib.colors.ListedColormap(["white", GONE, KEPT])
    titles = {"full-cache policy": causal, "compressed-cache policy\nand its replay": seen}
    for axes, (title, visible) in zip((left, right), titles.items(), strict=True):
        axes.imshow(causal.int() + visible.int(), cmap=colors, vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=title, xlabel="key (position)", ylabel="query (position)")
    text = "evicted: seen until its\neviction step, not after"
    right.annotate(text, (12, 20), (17, 6), arrowprops={"arrowstyle": "->"}, fontsize=9)
    figure.tight_layout()
    return figure


def policies() -> Figure:
    """Log-probabilities of the same tokens by the three ways of computing them."""
    model, rollout, deaths = tiny_rollout()
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
    events = deaths.unique()
    for number, event in enumerate(events[events < mask.shape[1]].tolist()):
        axes.axvline(event - 0.5, color="#bbbbbb", linewidth=0.8, zorder=0, label="compression" if not number else None)
    axes.set(xlabel="position", ylabel="log-probability of the sampled token")
    axes.set_ylim(top=axes.get_ylim()[1] + 2.6)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
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


if __name__ == "__main__":
    main()
