"""How often routers choose other experts in 16 bits, and what of the mismatch goes when choices are made again.

    python -m benchmarks.routing [--length N] [--save docs]

Rollouts of small mixtures with random weights in bfloat16, whole and compressed, against the learner's exact replay:
what is left between the two is rounding, and the choices that rounding flips. ``--save`` writes the table between its
markers in models.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import options
from benchmarks.common.pages import insert, machine, mark
from benchmarks.common.tables import Table
from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.compressors import Compressor, FullKV, SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.policies.routing import Routers, recording

PAGE, BEGIN = "models.md", mark("benchmarks.routing")
COLUMNS = [
    "model", "cache", "tokens", "choices flipped", "tokens with a flip", "k3 free", "k3 replayed", "largest free",
    "largest replayed",
]  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 192, "max_position_embeddings": 1024, "initializer_range": 0.1, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None, "num_experts_per_tok": 4,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 96, "num_experts": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 32},
    "olmoe": {"num_experts": 32},
    "glm4_moe": {"head_dim": 32, "moe_intermediate_size": 96, "n_routed_experts": 32, "n_shared_experts": 1,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}  # fmt: skip
METHODS: dict[str, Compressor] = {"full": FullKV(), "SnapKV 32 + 16": SnapKV(budget=32, buffer=16, window=8)}


def policy(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A small mixture of this type with random weights."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **MODELS[name]))
    return model.to(dtype).eval()


@torch.no_grad()
def measured(name: str, length: int, table: Table, dtype: torch.dtype = torch.bfloat16) -> None:
    """A row for each cache."""
    model = policy(name, dtype)
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
    params = SamplingParams(num_generations=8, max_completion_length=length, seed=5)
    for cache, method in METHODS.items():
        rollout = RolloutSampler(model, method, record_routing=True).generate(prompts, params)
        assert rollout.routing is not None
        with recording(Routers(model)) as chosen:
            free = replay_logprobs(model, replace(rollout, routing=None))
        bound = replay_logprobs(model, rollout)
        recorded = rollout.routing.flatten(0, 1).sort(-1).values
        fed = (recorded > 0).all(-1).all(-1)
        flipped = (chosen().sort(-1).values != recorded).any(-1)[fed]  # (tokens, L)
        numbers = [f"{float(flipped.float().mean()):.2%}", f"{float(flipped.any(-1).float().mean()):.2%}"]
        (k3, most), (k3_bound, most_bound) = distance(free, rollout), distance(bound, rollout)
        table.add(name, cache, f"{len(flipped):,}", *numbers, k3, k3_bound, most, most_bound)


def distance(logprobs: torch.Tensor, rollout: Rollout) -> tuple[str, str]:
    """k3 of these log-probs to the sampler's, and the largest difference."""
    mask = rollout.completion_mask
    log_ratio = consistency_log_ratio(logprobs, rollout.sampler_logprobs, mask)
    return f"{float(mismatch_statistics(log_ratio, mask)['mismatch/kl_k3']):.1e}", f"{float(log_ratio.abs().max()):.2f}"


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, PAGE)
    parser.add_argument("--length", type=int, default=100, help="completion tokens")
    args = options.parsed(parser)
    torch.set_num_threads(1)
    table = Table("Routing in 16 bits", COLUMNS, f"{machine('cpu')}.")
    for name in MODELS:
        measured(name, args.length, table)
    print(table)
    if args.save:
        insert(args.save / PAGE, table.untitled, BEGIN)


if __name__ == "__main__":
    main()
