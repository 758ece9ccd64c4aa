"""The numbers of one rollout that are logged: what was sampled, what it cost, and what rejection left.

Names are TRL's where TRL measures the same. A rollout's numbers cover all its B sequences; only the two rejection
rates reflect what rejection drops. The table, key by key:

=========================================== ============ =====================================================
key                                         unit         meaning
=========================================== ============ =====================================================
completions/mean_length                     tokens       mean length of the completions, end token included
completions/min_length                      tokens       shortest
completions/max_length                      tokens       longest
completions/clipped_ratio                   share        completions cut off by max_completion_length
completions/mean_terminated_length          tokens       mean length of those with an end token (0: none)
completions/min_terminated_length           tokens       shortest of those
completions/max_terminated_length           tokens       longest of those
completions/repetition_rate                 share        repeated 4-grams
rewards/{function}/mean                     reward       mean of one reward function where it applies
rewards/{function}/std                      reward       its standard deviation over all completions
rewards/{function}/{counter}                count        counts of a checker: no_box, fallbacks, timeouts, ...
rewards/{function}/failed                   samples      samples left out: it raised, timed out, gave no number
reward                                      reward       mean of the weighted sum of the reward functions
reward_std                                  reward       mean standard deviation within a prompt's samples
frac_reward_zero_std                        share        prompts whose samples all have the same reward
downsampling/drawn/reward                   reward       as `reward`, of all samples drawn (`rollout.downsampling`)
downsampling/drawn/reward_std               reward       as `reward_std`, of all samples drawn
downsampling/drawn/frac_reward_zero_std     share        prompts whose drawn samples all have the same reward
downsampling/dropped/reward                 reward       mean of the samples that are not trained on
downsampling/dropped/mean_length            tokens       mean length of their completions
rejection_rate                              share        sequences of which rejection leaves no token
token_mask_rate                             share        tokens left out, including rejected sequences
mismatch/kl_k1                              nats/token   KL(sparse || dense), unbiased, may be negative
mismatch/kl_k3                              nats/token   the same, never negative
mismatch/ratio_p05                          ratio        5th percentile of xi = dense / sparse probability
mismatch/ess                                share        effective sample size of the weights xi
mismatch/low_ratio_tokens                   share        tokens with xi below 1e-4
mismatch/low_ratio_sequences                share        sequences with such a token
sampling/importance_sampling_ratio/min      ratio        smallest xi
sampling/importance_sampling_ratio/mean     ratio        mean of xi
sampling/importance_sampling_ratio/max      ratio        largest xi
sampling/sampling_logp_difference/mean      nats         mean of abs(log xi)
sampling/sampling_logp_difference/max       nats         largest abs(log xi)
kv/saving_final                             share        KV tokens not stored at the end of the sequences
kv/saving_integral                          share        KV tokens not stored, over all decode steps
kv/stored_tokens                            tokens       stored at the end of a sequence, per layer and KV head
kv/full_tokens                              tokens       stored in a full cache at that point
kv/read_share                               share        KV tokens of a full cache that attention read
kv/peak_bytes                               bytes        key and value pools that were allocated
kv/full_peak_bytes                          bytes        the same slots with a full cache
kv/prefill_peak_bytes                       bytes        staging besides the pools while prompts were read
kv/record_bytes                             bytes        the record of evictions
kv/record_dense_bytes                       bytes        the same with a number for every token
time/rollout                                seconds      sampling under the compressed cache
time/rescoring                              seconds      dense log-probs before the first loss (and the reference's)
time/rewards                                seconds      reward functions and advantages
time/tokens_per_second                      tokens/s     completion tokens over time/rollout
=========================================== ============ =====================================================

The ``mismatch/`` and ``sampling/`` keys need dense log-probs and are absent without them; they cover the completions
before any rejection. Where the learner replays what was sampled (``replay_objective: sparse``) their "dense" is the
replayed policy: they show rounding alone. Standard deviations are Bessel-corrected. Shares lie between 0 and 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.advantages import informative_groups, nan_deviation
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.metrics.conversations import conversation_metrics
from sparse_rl_lightning.records import Rollout, ScoredRollout

NGRAM = 4
"""Number of tokens in a phrase: short enough to catch loops of any length, long enough to spare plain grammar."""


def rollout_metrics(scored: ScoredRollout) -> dict[str, Tensor | float]:
    """All numbers to log about a rollout that callbacks have edited; the module's docstring has the table of keys.

    Returns:
        Scalars by name. The names depend on which fields the rollout has, never on its values.
    """
    rollout = scored.rollout
    metrics: dict[str, Tensor | float] = {**_completions(rollout), **_rewards(scored), **scored.downsampling}
    metrics |= sampling_metrics(rollout)
    if scored.conversations is not None:
        metrics |= {**conversation_metrics(rollout, scored.conversations), **scored.failures}
    metrics.update({f"time/{stage}": seconds for stage, seconds in scored.seconds.items()})
    if scored.seconds.get("rollout"):
        metrics["time/tokens_per_second"] = rollout.completion_mask.sum() / scored.seconds["rollout"]
    return metrics


def sampling_metrics(rollout: Rollout) -> dict[str, Tensor | float]:
    """What the compressed cache saved, how far its policy is from the dense one, and what rejection left."""
    mask = rollout.completion_mask
    keep = mask if rollout.keep is None else rollout.keep
    metrics: dict[str, Tensor | float] = {
        "rejection_rate": rejection_rate(keep, mask),
        "token_mask_rate": token_mask_rate(keep, mask),
    }
    if rollout.old_logprobs is not None:
        log_ratio = consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, mask)
        metrics.update(mismatch_statistics(log_ratio, mask))
    if rollout.kv is not None:
        metrics |= {
            "kv/saving_final": rollout.kv.saving_final,
            "kv/saving_integral": rollout.kv.saving_integral,
            "kv/stored_tokens": rollout.kv.stored.float().mean(),
            "kv/full_tokens": rollout.kv.full.float().mean(),
            "kv/read_share": rollout.kv.read_share,
            "kv/peak_bytes": float(rollout.kv.peak_bytes),
            "kv/full_peak_bytes": float(rollout.kv.full_peak_bytes),
            "kv/prefill_peak_bytes": float(rollout.kv.prefill_peak_bytes),
        }
    if rollout.evictions is not None:
        metrics["kv/record_bytes"] = float(rollout.evictions.nbytes)
        metrics["kv/record_dense_bytes"] = float(rollout.evictions.dense_nbytes)
    return metrics


def rejection_rate(keep: Tensor, mask: Tensor) -> Tensor:
    """The share of sequences (B,) with completion tokens in ``mask`` (B, T) of which ``keep`` (B, T) leaves none."""
    present = mask.any(dim=1)
    return (present & ~(keep & mask).any(dim=1)).sum() / present.sum().clamp(min=1)


def token_mask_rate(keep: Tensor, mask: Tensor) -> Tensor:
    """The share of the completion tokens in ``mask`` (B, T) that ``keep`` (B, T) leaves out."""
    return (mask & ~keep).sum() / mask.sum().clamp(min=1)


def repetition_rates(sequences: Tensor, mask: Tensor, n: int = NGRAM) -> Tensor:
    """The share of a completion's n-grams that are repeats of earlier ones.

    A text without any repeated phrase has 0; one that ends in a loop approaches 1. Completions of fewer than n
    tokens have 0. Phrases are compared exactly, not by hash.

    Args:
        sequences: Token ids (B, T).
        mask: Completion tokens (B, T), bool; no phrase reaches over a gap.
        n: Number of tokens in a phrase.

    Returns:
        The shares (B,), between 0 and 1.

    Raises:
        ValueError: If ``n`` is not positive.
    """
    if n < 1:
        raise UserError(f"n must be at least 1 token, got n={n}.")
    if sequences.shape[1] < n or not sequences.numel():
        return torch.zeros(sequences.shape[0], device=sequences.device)
    phrases = _phrase_ids(sequences, n)  # (B, T - n + 1)
    inside = mask.unfold(1, n, 1).all(dim=-1)
    rows = torch.arange(len(sequences), device=sequences.device)[:, None].expand_as(phrases)
    pairs = torch.stack([rows[inside], phrases[inside]])
    distinct = torch.unique(pairs[0] * (phrases.max() + 1) + pairs[1]) // (phrases.max() + 1)
    different = torch.bincount(distinct, minlength=len(sequences))
    count = inside.sum(dim=1)
    return (count - different).to(torch.float32) / count.clamp(min=1)  # not in the default type, which may be bfloat16


def _completions(rollout: Rollout) -> dict[str, Tensor]:
    lengths = rollout.completion_lengths.float()
    ended = lengths[rollout.finished] if bool(rollout.finished.any()) else lengths.new_zeros(1)
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - rollout.finished.float().mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
        "completions/repetition_rate": repetition_rates(rollout.sequences, rollout.completion_mask).mean(),
    }


def _rewards(scored: ScoredRollout) -> dict[str, Tensor]:
    device = scored.rollout.sequences.device  # reward functions give CPU tensors
    metrics = {f"rewards/{name}": torch.tensor(count) for name, count in scored.reward_counters.items()}
    for name, values in {name: values.to(device) for name, values in scored.reward_table.items()}.items():
        metrics[f"rewards/{name}/mean"] = values.nanmean()
        metrics[f"rewards/{name}/std"] = nan_deviation(values[None]).squeeze()
    metrics |= {f"rewards/{name}/failed": torch.tensor(float(n)) for name, n in scored.reward_failures.items()}
    rewards, generations = scored.rollout.rewards, scored.num_generations
    if rewards is not None:
        metrics["reward"] = rewards.nanmean()
    if rewards is not None and generations > 1:
        metrics["reward_std"] = nan_deviation(rewards.view(-1, generations)).mean()
        metrics["frac_reward_zero_std"] = 1 - informative_groups(rewards, generations).float().mean()
    return metrics


def _phrase_ids(sequences: Tensor, n: int) -> Tensor:
    """A number for each phrase (B, T - n + 1), the same for the same n tokens; tokens are added one at a time."""
    ids, tokens = sequences, int(sequences.max()) + 1
    for offset in range(1, n):
        longer = ids[:, :-1] * tokens + sequences[:, offset:]
        ids = torch.unique(longer, return_inverse=True)[1]
    return ids
