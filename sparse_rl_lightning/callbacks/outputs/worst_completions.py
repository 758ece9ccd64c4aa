"""WorstCompletions: samples with the lowest reward, the largest mismatch, or rejected."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.corrections import consistency_log_ratio
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.text import prompt_text, shortened

LONGEST_TEXT = 2000
"""Largest number of characters of a prompt and of a completion to keep."""


class WorstCompletions:
    """Keeps a few completions of each kind, at most one per rollout and kind; ties go to the newest rollout.

    Kinds: ``lowest reward``; ``most mismatched``, the smallest ratio of dense to sparse probability of any token;
    ``rejected``, of the newest rollouts that with the smallest such ratio, or the lowest reward if there are none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: dict[str, list[dict[str, Any]]] = {}

    def see(self, scored: ScoredRollout, tokenizer: PreTrainedTokenizerBase | None, replayed: bool = False) -> None:
        """Consider a rollout after all callbacks that edit it.

        Args:
            scored: The rollout.
            tokenizer: Tokenizer that writes the most mismatched token.
            replayed: Whether the old log-probs are replayed ones. Then no completion is called mismatched.
        """
        if not self.count:
            return
        rollout, ratios = scored.rollout, None if replayed else token_ratios(scored.rollout)
        smallest = None if ratios is None else ratios.amin(dim=1)  # (B,)
        worst: dict[str, int] = {}
        if rollout.rewards is not None and not bool(rollout.rewards.isnan().all()):
            worst["lowest reward"] = int(rollout.rewards.nan_to_num(nan=math.inf).argmin())
        if smallest is not None:
            worst["most mismatched"] = int(smallest.argmin())
        order = rollout.rewards if smallest is None else smallest
        if rollout.keep is not None and order is not None:
            rejected = ~rollout.keep.any(dim=1) & rollout.completion_mask.any(dim=1)
            if bool(rejected.any()):
                places = rejected.nonzero().squeeze(1)
                worst["rejected"] = int(places[order[places].nan_to_num(nan=math.inf).argmin()])
        for reason, index in worst.items():
            self._keep(reason, described(scored, index, ratios, tokenizer))

    def _keep(self, reason: str, entry: dict[str, Any]) -> None:
        ranked = [entry, *self.kept.get(reason, [])]  # the newest first, and sorting is stable
        if reason != "rejected":
            measure = "reward" if reason == "lowest reward" else "ratio"
            ranked.sort(key=lambda candidate: math.inf if candidate[measure] is None else candidate[measure])
        self.kept[reason] = ranked[: self.count]

    def listed(self) -> list[dict[str, Any]]:
        """All kept completions, each once with its ``kinds``."""
        entries: dict[tuple[int, int], dict[str, Any]] = {}
        for reason, kept in self.kept.items():
            for entry in kept:
                same = entries.setdefault((entry["rollout"], entry["index"]), {**entry, "kinds": []})
                same["kinds"] = [*same["kinds"], reason]
        return list(entries.values())


def token_ratios(rollout: Rollout) -> Tensor | None:
    """The log-ratio (B, T) of dense to sparse probability, infinite outside completions and in place of NaN.

    None without dense log-probs.
    """
    if rollout.old_logprobs is None:
        return None
    mask = rollout.completion_mask
    ratios = consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, mask)
    return ratios.masked_fill(~mask | ratios.isnan(), math.inf)


def described(
    scored: ScoredRollout, index: int, ratios: Tensor | None, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """One completion with its numbers, in plain values for JSON."""
    rollout, row = scored.rollout, scored.rows[index // scored.num_generations]
    mask = rollout.completion_mask[index]
    entry: dict[str, Any] = {
        "rollout": scored.index,
        "index": index,
        **kept_texts(row, scored.texts[index]),
        "reward": None if rollout.rewards is None else _finite(float(rollout.rewards[index])),
        "length": int(mask.sum()),
        "finished": bool(rollout.finished[index]),
        "rejected": rollout.keep is not None and not bool(rollout.keep[index].any()),
        "ratio": None,
    }
    if ratios is not None and entry["length"]:
        position = int(ratios[index].argmin())
        entry["ratio"] = _finite(float(ratios[index, position].double().exp()))
        entry["token_place"] = int(mask[: position + 1].sum())
        token = [] if tokenizer is None else tokenizer.decode([int(rollout.sequences[index, position])])
        entry["token"] = shortened(str(token), 100) if token else ""
    return entry


def kept_texts(row: dict[str, Any], completion: str) -> dict[str, str | None]:
    """The prompt, completion and answer that a report shows, without the middle of long ones."""
    answer = row.get("answer")
    return {
        "prompt": shortened(prompt_text(row["prompt"]), LONGEST_TEXT),
        "completion": shortened(completion, LONGEST_TEXT),
        "answer": None if answer is None else shortened(str(answer), LONGEST_TEXT),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
