"""What eviction costs: the same texts under the full and the compressed cache, and problems solved greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.arithmetic import solved
from benchmarks.compressors.forced import forced_logits
from benchmarks.compressors.methods import DENSE, SlotSizes, compressors
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Compressor, FullKV, QueryStatistics

SHARES = (0.25, 0.5, 0.75)  # budget over length


@dataclass(frozen=True)
class Problems:
    """Questions with answers that can be checked."""

    rows: list[dict[str, str]]
    tokenizer: PreTrainedTokenizerBase
    max_completion_length: int

    def accuracy(self, model: PreTrainedModel, compressor: Compressor) -> float:
        """Share of greedy answers that are right."""
        prompts = [self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in self.rows]
        params = SamplingParams(max_completion_length=self.max_completion_length, temperature=0.0)
        end = sorted({self.tokenizer.eos_token_id, *RolloutSampler(model, compressor).end_token_ids})
        sampler = RolloutSampler(model, compressor, end_token_ids=end)
        return solved(sampler, self.tokenizer, self.rows, prompts, params)


@dataclass(frozen=True)
class Task:
    """Texts that the policy wrote with the full cache, and what belongs to them."""

    name: str
    model: PreTrainedModel
    texts: Tensor  # (B, T), right-padded
    lengths: Tensor  # (B,)
    prompt_lengths: list[int]
    sizes: SlotSizes
    statistics: QueryStatistics  # of other texts
    problems: Problems | None = None
    source: str = "random weights"  # where the model is from

    @property
    def length(self) -> int:
        """Tokens of a text, on average: what budgets are shares of."""
        return round(float(self.lengths.double().mean()))


@dataclass(frozen=True)
class Quality:
    """One compressor at one budget; the full cache on the same tokens for comparison."""

    method: str
    budget: int
    acceptance: float  # mean over tokens of sum_v min(p_dense, p_sparse)
    acceptance_p05: float  # its 5th percentile
    agreement: float  # share of tokens for which both caches have the same favorite
    perplexity: float
    events_per_second: float  # nan for the full cache
    accuracy: float  # nan where there are no problems
    protected: bool = False  # whether the prompt is never evicted


def measure(task: Task, progress: Callable[[str], None]) -> Iterator[Quality]:
    """Every compressor at every budget, with the prompt open to eviction and protected; budgets outermost.

    What counts are the tokens from the first eviction of a slot of ``budget + buffer`` on: before it there is nothing
    to compare.

    Args:
        task: What to measure on.
        progress: Told about every result.
    """
    dense = forced_logits(task.model, FullKV(), task.texts, task.prompt_lengths).logits.log_softmax(dim=-1)
    dense_accuracy = task.problems.accuracy(task.model, FullKV()) if task.problems else float("nan")
    index = torch.arange(task.texts.shape[1])
    for share in SHARES:
        budget = round(share * task.length)
        counts = (index > budget + task.sizes.buffer) & (index < task.lengths[:, None])
        assert counts.any(), "texts must be longer than the largest slot"
        for protected in (False, True):
            length = max(task.prompt_lengths) if protected else 0
            for name, compressor in compressors(budget, task.sizes, task.statistics, length).items():
                accuracy = dense_accuracy
                if task.problems and name != DENSE:
                    accuracy = task.problems.accuracy(task.model, compressor)
                quality = _compare(task, name, compressor, budget, dense, counts, accuracy)
                progress(f"{task.name}, {share:.0%}, {name}, {protected=}: acceptance {quality.acceptance:.3f}")
                yield replace(quality, protected=protected)


def _compare(
    task: Task, name: str, compressor: Compressor, budget: int, dense: Tensor, counts: Tensor, accuracy: float
) -> Quality:
    if name == DENSE:
        theirs, speed = dense[counts], float("nan")
    else:
        forced = forced_logits(task.model, compressor, task.texts, task.prompt_lengths)
        theirs, speed = forced.logits[counts].log_softmax(dim=-1), forced.timed.events_per_second
    full = dense[counts]
    accepted = torch.minimum(full, theirs).exp().sum(dim=-1).double()
    sampled = theirs.gather(-1, task.texts[counts][:, None]).double()
    return Quality(
        name,
        budget,
        acceptance=float(accepted.mean()),
        acceptance_p05=float(accepted.quantile(0.05)),
        agreement=float((full.argmax(dim=-1) == theirs.argmax(dim=-1)).double().mean()),
        perplexity=float((-sampled.mean()).exp()),
        events_per_second=speed,
        accuracy=accuracy,
    )
