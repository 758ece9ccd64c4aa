"""TRL's AsyncGRPOTrainer, in processes of its own: the server draws while it trains, and is paused for new weights.

    python -m tests.serve.async_trainer URL POLICY FOLDER [lora]

Two parts of the trainer are replaced, which need a CUDA device: the kernel of its packed attention, by the same
attention of PyTorch's, and the name of the device, for a metric.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.serve.stub_vllm import install

install()


def flash_attn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> Tensor:
    """Attention of segments, each causal from the end of its keys: queries (N, H, D), keys and values (M, G, D)."""
    rows, pairs = (
        [],
        zip(offsets_q.tolist(), offsets_q.tolist()[1:], offsets_k.tolist(), offsets_k.tolist()[1:], strict=False),
    )
    for first_q, last_q, first_k, last_k in pairs:
        q, k, v = query[first_q:last_q], key[first_k:last_k], value[first_k:last_k]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        rows.append(
            F.scaled_dot_product_attention(*heads, mask, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(rows)


def likes_digits(completions: list[Any], **_: Any) -> list[float | None]:
    return [sum(map(str.isdigit, completion[0]["content"])) / 12 for completion in completions]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def main(url: str, policy: str, folder: str, adapter: str = "") -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    prompts = [[{"role": "user", "content": digit}] for digit in "123456789"]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    content = {"close_pattern": "$", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "a",
        "fields": {"content": content},
    }
    trainer = AsyncGRPOTrainer(
        model=policy, peft_config=lora() if adapter else None, processing_class=tokenizer, reward_funcs=likes_digits,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=AsyncGRPOConfig(
            folder, vllm_server_base_url=url, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, logging_steps=1, num_generations=4, max_completion_length=40, max_steps=3,
            save_strategy="no", learning_rate=3e-2, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
            max_staleness=1, max_inflight_tasks=4, chat_template_kwargs={},
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(folder)
    print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:5])
