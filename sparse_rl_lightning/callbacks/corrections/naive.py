"""The warning of naive training: samples of a compressed cache that the loss takes for the full one's."""

from __future__ import annotations

from typing import Any

from sparse_rl_lightning.callbacks.base import corrections_of
from sparse_rl_lightning.rollout.generator import Generator

REPLAY = "ReplayGRPO with replay_objective: sparse"


def naive_training(sampling: str, *cures: str) -> str:
    """The warning, with what to do about it."""
    return (
        f"{sampling}, and neither corrections nor replay account for it: this is naive training, which may collapse "
        f"(arXiv 2601.10079, and docs/results.md). Give {', or '.join(cures)}; docs/choosing.md says which."
    )


def learns_from_less(module: Any) -> bool:
    """Whether a module trains on samples of less than the whole cache, and its loss does not account for that."""
    generator = getattr(module, "generator", None)  # any module may come
    is_sparse = isinstance(generator, Generator) and generator.is_sparse
    return is_sparse and not (module.corrects or module.loss.corrects)


def naive_warning(module: Any) -> str:
    """The warning, empty if a module does not roll out, sees the whole cache, or something accounts for the rest."""
    if not learns_from_less(module) or corrections_of(module):
        return ""
    generator = module.generator
    correct = "ImportanceReweighting with clip_max=1.5 in trainer.callbacks"
    if generator.retriever is not None:  # no replay follows it
        return naive_training(f"{type(generator.retriever).__name__} reads a part of the cache", correct)
    return naive_training(f"{type(generator.compressor).__name__} evicts", correct, REPLAY)
