"""How much of Sparrow's tail is the cache's doing, and how much that only K tokens are known: on real models.

    python -m benchmarks.ceiling [--save benchmarks/results]                                # stories by SmolLM2
    python -m benchmarks.ceiling --policy FOLDER --data gsm8k_test.jsonl --budgets 192 96   # a column question, as chat

Completions are drawn in float32 at temperature 1 with the full cache and under SnapKV, and the 5th percentile of the
bounds of their acceptance is taken with fewer and with more most likely tokens. With the full cache sampler and learner
are one policy: the lower bound is what K leaves out, which is the ceiling that `AcceptanceMonitor` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import REAL
from benchmarks.common import options
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table
from examples.stories import Stories
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.acceptance import acceptance_bounds, percentile, tail_target
from sparse_rl_lightning.compressors import Compressor, FullKV, SnapKV
from sparse_rl_lightning.data.files import read_table
from sparse_rl_lightning.logprobs import logprobs_at

TOPS, TOY = (20, 128), (4, 8)  # most likely tokens; the first is the monitor's default
SIZES = {"buffer": 8, "num_sinks": 4, "window": 8}


def bounds(
    model: PreTrainedModel,
    compressor: Compressor,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tops: Sequence[int],
) -> list[float]:
    """The 5th percentiles of the lower and the upper bound, for each number of most likely tokens."""
    rollout = RolloutSampler(model, compressor, num_slots=16).generate(prompts, params)
    assert rollout.topk_ids is not None
    assert rollout.topk_logprobs is not None
    mask, sampled = rollout.completion_mask, rollout.topk_logprobs
    dense = logprobs_at(model, rollout.sequences, rollout.topk_ids, mask)  # once: the most likely come first
    return [
        percentile(bound[mask]) for top in tops for bound in acceptance_bounds(dense[..., :top], sampled[..., :top])
    ]


def main() -> None:
    """Draw under every cache, and save the table after each."""
    parser = options.parser(__doc__, "ceiling-MODEL.md", threads=1, quick=True)
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--data", type=Path, help="JSONL of questions; stories without")
    parser.add_argument("--budgets", type=int, nargs="+", default=[72, 32])
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--num_generations", type=int, default=4)
    parser.add_argument("--max_completion_length", type=int, default=96)
    args = options.parsed(parser)
    if args.quick:
        args.problems, args.num_generations, args.max_completion_length = 2, 1, 12
    tops = TOY if args.quick else TOPS
    tokenizer = AutoTokenizer.from_pretrained(args.policy, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32, trust_remote_code=False).eval()
    if args.data:
        texts = [[{"role": "user", "content": row["question"]}] for _, row in read_table(str(args.data))]
    else:
        texts = [row["prompt"] for row in Stories(num_train=args.problems).train_rows()]
    prompts = [
        tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        for text in texts[: args.problems]
    ]
    params = SamplingParams(
        num_generations=args.num_generations, max_completion_length=args.max_completion_length, top_logprobs=tops[-1]
    )
    note = (
        f"{args.policy.name}, {'questions' if args.data else 'stories'}: {len(prompts)} prompts of "
        f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens x {args.num_generations}, at most "
        f"{args.max_completion_length} tokens; four sinks, a window of 8."
    )
    each = [f"{bound}, K = {top}" for top in tops for bound in ("p05 at least", "at most")]
    table, target = Table("The tail of the acceptance by K", ("cache", *each, f"target, K = {tops[0]}"), note), 0.0
    caches = {f"SnapKV {budget} + {SIZES['buffer']}": SnapKV(budget=budget, **SIZES) for budget in args.budgets}
    for name, compressor in {"full cache": FullKV(), **caches}.items():
        tails = bounds(model, compressor, prompts, params, tops)
        target = target or tail_target(tails[0])
        table.add(name, *(f"{tail:.3f}" for tail in tails), f"{target:.3f}")
        say(f"{name}: {tails}")
        page = f"{machine('cpu')}\n\n{table}"
        save(args.save, f"ceiling-{args.policy.name}", "benchmarks.ceiling", page)
    print(page)


if __name__ == "__main__":
    main()
