"""The pictures of the real model: rewards along training, and what the arms came to under both caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.real.results import Results, before_training, slot
from experiments.real.studies import DENSE, FIVE, NAIVE, SPARSE_RL, Study
from experiments.stability.pictures import COLORS, WIDTH, draw_band, draw_ends, new_figure, tell_caches


def pictures(results: Results, studies: Sequence[Study], folder: Path) -> None:
    """Write both, a panel per budget of the studies under SnapKV."""
    from matplotlib import rc_context

    from sparse_rl_lightning.report.charts import STYLE

    own = [study for study in studies if study.method == "SnapKV"]
    with rc_context(STYLE):
        for name, draw in {"real": courses, "real-ends": ends}.items():
            draw(results, own).savefig(folder / f"{name}.png", dpi=110)


def title(study: Study) -> str:
    """What the panel of a study is about."""
    return f"{slot(study.budget)[0].upper()}{slot(study.budget)[1:]} of the KV memory"


def courses(results: Results, studies: Sequence[Study]) -> Any:
    """Mean reward of each rollout, as sampled: means over the seeds, bands from least to largest."""
    figure, axes = new_figure(1, len(studies), 3.8 * len(studies), 3.4, sharex=True, sharey=True)
    dense = results.dense(studies)
    for ax, study in zip(axes, studies, strict=True):
        for arm in (DENSE, NAIVE, SPARSE_RL):
            runs = (results.of(study, arm) if arm.evicts else dense).values()
            draw_band(ax, [(run.curves["rollout"], run.curves["reward"]) for run in runs], arm)
        ax.set_title(title(study), fontsize=10)
        ax.set_xlabel("rollout")
        ax.set_ylim(bottom=0.0)
    axes[0].set_ylabel("reward of the rollout")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def ends(results: Results, studies: Sequence[Study]) -> Any:
    """A row per arm: held-out reward with the full cache and the compressed one after training, a bar for each mean."""
    figure, axes = new_figure(len(studies), 1, WIDTH, 2.9 * len(studies), sharex=True, sharey=True)
    dense = results.dense(studies)
    before = before_training(dense)
    names = ["before", *(arm.label for arm in FIVE)]
    for ax, study in zip(axes, studies, strict=True):
        cache = str(study.budget)
        started = {key: [before[key]] for key in ("dense", cache) if key in before}
        draw_ends(ax, len(FIVE), started.get("dense", []), started.get(cache, []), "#1f2937")
        for place, arm in enumerate(FIVE):
            runs = (results.of(study, arm) if arm.evicts else dense).values()
            full, compressed = ([run.end(key, 1) for run in runs] for key in ("dense", cache))
            draw_ends(ax, len(FIVE) - 1 - place, full, compressed, COLORS[arm.label])
        ax.set_title(title(study), fontsize=10)
        ax.set_xlim(left=0.0)
    axes[-1].set_xlabel("held-out reward after training")
    axes[0].set_yticks(range(len(names)), names[::-1])
    tell_caches(figure, axes[0])
    return figure
