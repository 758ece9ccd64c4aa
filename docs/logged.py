"""What is logged, for ``metrics.md``: keys and units from docstrings, the rest and the healthy ranges here."""

from __future__ import annotations

from typing import Any

from docs import docstrings
from sparse_rl_lightning.callbacks import AcceptanceMonitor, StepTimes, ZeroSharding
from sparse_rl_lightning.metrics import conversations, rollout
from sparse_rl_lightning.rollout.partial import PartialRollouts

Row = tuple[str, str, str]  # key, unit, meaning
CLIP = "whose gradient the clip of the staleness ratio stops"

UPDATE: list[Row] = [
    ("clip_ratio/low_mean", "share", f"tokens (or sequences) with a negative advantage {CLIP}"),
    ("clip_ratio/high_mean", "share", f"tokens (or sequences) with a positive advantage {CLIP}"),
    ("clip_ratio/region_mean", "share", "both"),
    ("staleness_ratio/max", "ratio", "largest ratio w = pi / pi_old of the micro-batch's tokens (or sequences) kept"),
    (
        "top10_token_share",
        "share",
        "ten tokens' share of the policy term's derivative by log-probs, in the micro-batch",
    ),
    ("kept_fraction", "share", "completion tokens of the micro-batch that neither rejection nor truncation takes away"),
    ("entropy", "nats/token", "entropy of the learner's distributions, mean over completion tokens"),
    ("kl", "nats/token", "estimate of KL(learner || reference policy); with `beta` above 0"),
    ("sparse/...", "", "the same keys of the sparse term of `ReplayGRPO` with `replay_objective: mixed` or `rejected`"),
    ("empty_rollouts", "count", "rollouts so far of which the loss saw nothing: all rejected, unrewarded, or cut off"),
    ("grad_norm", "norm", "length of the gradient before it is clipped, of the last step that was not skipped"),
    ("skipped_steps", "count", "optimizer steps so far that were skipped for a gradient that is not finite"),
]
REPLAY: list[Row] = [
    ("time/replay", "seconds", "replayed log-probs (`ReplayGRPO`, `DistillSparse`)"),
]
DISTILL: list[Row] = [
    ("distill/loss", "", "loss of the adapter's steps"),
    ("distill/kl", "nats/token", "KL(sparse || dense) of the adapter's steps, k3"),
    ("distill/grad_norm", "norm", "length of the adapter's gradient before it is clipped"),
    ("distill/clip_ratio", "share", f"tokens {CLIP}, in the adapter's steps"),
]
SPLIT: list[Row] = [
    (f"mismatch_split/{part}/{name}", unit, meaning.format(pair))
    for part, pair in (
        ("rounding", "sampler and replay"),
        ("compression", "replay and dense policy"),
        ("routing", "replay with recorded and with free choices of experts; with `rollout.record_routing`"),
    )
    for name, unit, meaning in (
        ("kl_k1", "nats/token", "KL between {}, unbiased, may be negative"),
        ("kl_k3", "nats/token", "the same, never negative"),
        ("ratio_p05", "ratio", "5th percentile of the ratio between {}"),
    )
]
GUARD: list[Row] = [
    ("guard/tail_margin", "share", "5th percentile of the worst length bin minus the target"),
    ("guard/rejection_rate", "share", "rejected sequences, mean over the window"),
    ("guard/length_ratio", "ratio", "mean response of the window to that of the longest window so far"),
    ("guard/budget", "tokens", "the compressor's budget, without eviction the retriever's"),
    ("guard/raises", "count", "times that the budget was raised"),
]
EVALUATED: list[Row] = [
    ("val/reward_dense", "reward", "mean reward of validation completions with the full cache"),
    ("val/reward_sparse", "reward", "with the compressed cache; absent where nothing is compressed"),
    ("val/length_dense", "tokens", "mean length of these completions"),
    ("val/length_sparse", "tokens", "with the compressed cache"),
    ("val/pass@{k}_dense", "share", "problems that one of k samples solves, unbiased; by the first reward function"),
    ("val/pass@{k}_sparse", "share", "with the compressed cache"),
    ("val/{benchmark}/pass@{k}_dense", "share", "the same of one benchmark; in one process"),
    ("val/{benchmark}/pass@{k}_sparse", "share", "with the compressed cache"),
    ("test/...", "", "the same keys in `sparse-rl test` of a module that trains"),
    (
        "test/{benchmark}/{arm}",
        "share",
        "right samples by the convention `answers`, `Evaluation`; arms: `dense`, compressors by name and budget",
    ),
    ("test/{benchmark}/{arm}/strict", "share", "the same by the strict convention, whatever `answers` says"),
    ("test/{benchmark}/{arm}/lenient", "share", "and by that of the papers' graders"),
    (
        "test/{benchmark}/too_long",
        "problems",
        "not sampled, counted as wrong: prompt and completion exceed the model's context; `Evaluation`",
    ),
    (
        "test/mean/{arm}",
        "share",
        "unweighted mean over the benchmarks; `.../strict` and `.../lenient` by either convention",
    ),
]
WARMUP: list[Row] = [
    ("loss", "nats/token", "cross-entropy of the solutions"),
    ("val_loss", "nats/token", "on held-out rows"),
    ("val_token_accuracy", "share", "solution tokens predicted right"),
]

HEALTHY = {
    "reward": "rises over tens of rollouts, or [is flat](troubleshooting.md#reward-is-flat)",
    "frac_reward_zero_std": "below 0.7: the other prompts are all that is learned from",
    "completions/clipped_ratio": "below 0.2; more means that answers do not end",
    "completions/mean_length": "no sudden fall; under sparse rollouts a shrinking answer precedes collapse (Sparrow)",
    "completions/repetition_rate": "as before training; a rise means loops",
    "rewards/{function}/failed": "0",
    "rejection_rate": "below 0.15; 0.07 in Sparse-RL's paper; `TailGuard` warns above 0.25",
    "token_mask_rate": "near `rejection_rate` where sequences are rejected and not tokens",
    "kept_fraction": "above 0.9",
    "mismatch/kl_k1": "below 0.05",
    "mismatch/kl_k3": "below 0.05; 1e-6 or less with `FullKV` in float32",
    "mismatch/ratio_p05": "above 0.5",
    "mismatch/ess": "above 0.9; low means that few tokens carry the gradient",
    "mismatch/low_ratio_tokens": "below 1e-3",
    "mismatch/low_ratio_sequences": "below 0.2; the rejection rate at the threshold of 1e-4",
    "sampling/importance_sampling_ratio/max": "large values are what `clip_max` is for",
    "clip_ratio/region_mean": "below 0.01 with few steps per rollout; 0.0005 in Sparse-RL's paper",
    "staleness_ratio/max": "below 10; `StepGuard` warns of more in a long step, and of 100 without weights or replay",
    "top10_token_share": "a small multiple of 10 / (tokens of a micro-batch); near 1 ten tokens are the whole step",
    "entropy": "falls slowly; near 0 nothing is explored any more",
    "kl": "grows slowly from 0",
    "kv/saving_final": "above 0, or the slot is too large to matter",
    "kv/peak_bytes": "constant over the run",
    "acceptance/p05": "above `acceptance/target`",
    "acceptance/p05/{bin}": "above `acceptance/target`",
    "acceptance/ceiling_p05": "near 1 in float32; 0.945 in Sparrow, whose sampler is another program",
    "guard/tail_margin": "positive",
    "guard/length_ratio": "above 0.6",
    "guard/raises": "0",
    "empty_rollouts": "0",
    "grad_norm": "stable",
    "skipped_steps": "0; under float16 a few at the start",
    "mismatch_split/routing/kl_k3": "what `rollout.record_routing` saves",
    "mismatch_split/rounding/kl_k3": "below a tenth of the compression's",
    "turns/cut_by_length": "below 0.1; more means that `max_completion_length` is too short",
    "turns/failed": "0",
    "turns/timeouts": "0",
    "time/rollout": "most of `time/block`; if not, see [slow](troubleshooting.md#it-is-slow)",
    "sharding/wait_seconds": "small against `time/rollout`",
    "val_token_accuracy": "as high as the task's format needs; 0.96 in the quickstart's warm-up",
}


def docstring_rows(thing: Any) -> list[Row]:
    """The table of keys of a docstring, of several in the order they stand there."""
    return [(key, unit, docstrings.markdown(meaning)) for key, unit, meaning in docstrings.rows(thing.__doc__)]


def tables() -> dict[str, list[Row]]:
    """Every table of the page by its heading."""
    return {
        "Rollouts": docstring_rows(rollout) + REPLAY,
        "Conversations": docstring_rows(conversations),
        "Updates": UPDATE,
        "Time and memory": docstring_rows(StepTimes),
        "Acceptance (AcceptanceMonitor)": docstring_rows(AcceptanceMonitor),
        "Guard (TailGuard)": GUARD,
        "Rounding or compression (MismatchSplit)": SPLIT,
        "Several ranks (ZeroSharding)": docstring_rows(ZeroSharding),
        "Partial rollouts": docstring_rows(PartialRollouts),
        "DistillSparse": DISTILL,
        "Validation and tests": EVALUATED,
        "SupervisedWarmup": WARMUP,
    }
