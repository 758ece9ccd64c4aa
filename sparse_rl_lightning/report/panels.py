"""The charts of a report and their order: titles, units, explanations and the keys of the history."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_rl_lightning.report.record import ROUNDING, RunRecord


@dataclass(frozen=True)
class Line:
    """One key of the history."""

    key: str
    label: str
    reference: bool = False  # a value to compare with, drawn gray and dashed


@dataclass(frozen=True)
class Panel:
    """Lines over the rollouts of one run; for several runs, the first line once per run."""

    section: str
    title: str
    unit: str  # "bytes" becomes KiB, MiB or GiB
    caption: str  # for a reader who sees such a chart for the first time
    lines: tuple[Line, ...] = ()
    factor: float = 1.0
    log: bool = False  # raw values on a logarithmic axis, so that no tail is smoothed away
    smallest: bool = False  # neighbors that share a point become their minimum, not their mean
    stacked: bool = False
    exact: bool = False  # step functions, which must not be smoothed
    marked: bool = False  # few points that matter each, drawn as dots
    pictured: bool = False  # part of report.png


LEARNING, MISMATCH, MEMORY, TIME = "Learning", "Compression and its mismatch", "KV memory", "Time"
SECTIONS = (LEARNING, MISMATCH, MEMORY, TIME)

PANELS: tuple[Panel, ...] = (
    Panel(LEARNING, "Reward", "mean reward", "Mean reward of the sampled completions.",
          (Line("reward", "reward"),), pictured=True),
    Panel(LEARNING, "Completion length", "tokens", "Mean and longest length of the sampled completions. Before a "
          "collapse they often shrink.",
          (Line("completions/mean_length", "mean"), Line("completions/max_length", "longest", True)), pictured=True),
    Panel(LEARNING, "Entropy", "nats per token", "How undecided the learner is about its next token. Near 0 it has "
          "stopped exploring.",
          (Line("entropy", "entropy"),)),
    Panel(LEARNING, "Gradient and staleness", "norm, ratio", "Length of the gradient before clipping, and the largest "
          "ratio of a token's probability now to that before the update, in the last step of each rollout. Spikes of "
          "both together are a few tokens that take over.",
          (Line("grad_norm", "gradient norm"), Line("staleness_ratio/max", "largest ratio")), log=True),
    Panel(LEARNING, "Repeated and cut off", "%", "Phrases of four tokens that occurred in the same completion before "
          "(a sampler that forgets too much falls into loops), and completions that ended at the length limit.",
          (Line("completions/repetition_rate", "repeated 4-grams"), Line("completions/clipped_ratio", "cut off")),
          100.0, pictured=True),
    Panel(MISMATCH, "Rejected", "%", "Sequences that rejection drops because the dense policy finds a token "
          "near-impossible, and all tokens left out.",
          (Line("rejection_rate", "sequences"), Line("token_mask_rate", "tokens")), 100.0, pictured=True),
    Panel(MISMATCH, "Mismatch KL", "nats per token", "Distance of the sampling (sparse) policy from the dense one, by "
          "the k3 estimator; 0 is a perfect match. If the learner replays, MismatchSplit measures it. Gray: the part "
          "that evictions do not explain.",
          (Line("mismatch/kl_k3", "k3"), Line(ROUNDING, "rounding", True)), pictured=True),
    Panel(MISMATCH, "Ratio dense / sparse", "ratio", "The tail of the mismatch: the 5th percentile of the tokens' "
          "probability ratios, and the smallest ratio of a rollout. 1 is a perfect match.",
          (Line("mismatch/ratio_p05", "5th percentile"), Line("sampling/importance_sampling_ratio/min", "smallest")),
          log=True, smallest=True, pictured=True),
    Panel(MISMATCH, "Acceptance, 5th percentile", "share", "How much of the dense and the sparse distribution overlaps "
          "at the worst 5 % of the tokens, what is possible at best, and Sparrow's target.",
          (Line("acceptance/p05", "5th percentile"), Line("acceptance/ceiling_p05", "ceiling", True),
           Line("acceptance/target", "target", True))),
    Panel(MISMATCH, "Budget", "tokens", "Tokens kept per layer and KV head; TailGuard may raise it.",
          (Line("guard/budget", "budget"),), exact=True),
    Panel(MEMORY, "KV memory", "bytes", "Peak bytes allocated for keys and values, and what the same number of "
          "sequences would need with a full cache.",
          (Line("kv/peak_bytes", "this run"), Line("kv/full_peak_bytes", "full cache", True)), pictured=True),
    Panel(MEMORY, "KV tokens per sequence", "tokens", "Cache entries held when a sequence ended, mean per layer and "
          "head, and what a full cache holds there.",
          (Line("kv/stored_tokens", "this run"), Line("kv/full_tokens", "full cache", True))),
    Panel(MEMORY, "KV tokens saved", "% of a full cache", "Cache entries that were not held when a sequence ended, and "
          "on average over all decode steps.",
          (Line("kv/saving_final", "at the end"), Line("kv/saving_integral", "over all steps")), 100.0, pictured=True),
    Panel(TIME, "Time per rollout", "seconds", "Sampling, dense log-probabilities, reward functions, and all forward, "
          "backward and optimizer steps on the rollout; bands add up. The first rollout, which warms up, is left out.",
          (Line("time/rollout", "rollout"), Line("time/rescoring", "rescoring"), Line("time/rewards", "reward"),
           Line("time/update", "update")), stacked=True),
    Panel(TIME, "Speed", "tokens per second", "Completion tokens over the time of sampling, and over the time of the "
          "whole step.",
          (Line("time/tokens_per_second", "sampling"), Line("time/trained_per_second", "whole step"))),
    Panel(TIME, "GPU memory", "bytes", "Most memory in use while rolling out and while training.",
          (Line("memory/rollout_peak_bytes", "rollout"), Line("memory/update_peak_bytes", "update"))),
)  # fmt: skip


def reward_panel(record: RunRecord) -> Panel | None:
    """The panel with the mean of every reward function, if there are several."""
    names = {key for row in record.history for key in row if key.startswith("rewards/") and key.endswith("/mean")}
    labels = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in sorted(names)[:6]}
    if len(labels) < 2:
        return None
    lines = tuple(Line(key, label[:40]) for key, label in labels.items())
    return Panel(LEARNING, "Reward by function", "mean reward", "Before weights, where a function applies.", lines)
