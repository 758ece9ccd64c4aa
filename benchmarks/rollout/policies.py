"""Policies with random weights in real shapes, and one that counts down, so that lengths are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

LOGIT = 60.0  # of the one token that may follow: the others have no chance
CONTEXT = 65536


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2, or of a Qwen3 if its head size is given."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = True
    qwen3_head_dim: int = 0

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.qwen3_head_dim or self.hidden // self.heads

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


TINY = Shape("tiny", 2, 64, 4, 2, 96, 256)
SMALL = Shape("8 layers, 512 wide", 8, 512, 8, 2, 1536, 2048)
SHAPES = {
    "tiny": TINY,
    "0.5B": Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936),
    "1.5B": Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936),
    "7B": Shape("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, tied=False),
    "Qwen3-1.7B": Shape("Qwen3-1.7B", 28, 2048, 16, 8, 6144, 151936, qwen3_head_dim=128),
    "Qwen3-4B": Shape("Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, qwen3_head_dim=128),
    "Qwen3-8B": Shape("Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, tied=False, qwen3_head_dim=128),
}


def random_policy(shape: Shape, dtype: torch.dtype, device: str, tied: bool | None = None) -> PreTrainedModel:
    """A Qwen2 or Qwen3 of this shape with random weights and no end token."""
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": shape.tied if tied is None else tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": dtype,
    }
    config = Qwen3Config(**sizes, head_dim=shape.head_dim) if shape.qwen3_head_dim else Qwen2Config(**sizes)
    with torch.device(device):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return policy.eval()


def weight_bytes(policy: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads: all but the rows of an untied embedding that are not looked up."""
    embedding, head = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
    total = sum(parameter.nbytes for parameter in policy.parameters())
    return total if embedding is head else total - embedding.nbytes


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Token ids."""
    generator = torch.Generator().manual_seed(count * length)
    rows: list[list[int]] = torch.randint(2, vocab - 1, (count, length), generator=generator).tolist()
    return rows


@dataclass(frozen=True)
class Countdown:
    """A policy whose every token says how many follow, and the prompts that make it draw a length.

    After a prompt it draws one of many tokens at random, each of which stands for a length; from there one token
    follows another with certainty until the end token. The weights of the layers that write into the residual stream
    are zero and do all of their work. Same seed and sequence number, same length.
    """

    policy: PreTrainedModel
    start: int  # last token of every prompt

    END = 0

    @classmethod
    def log_normal(
        cls, shape: Shape, dtype: torch.dtype, device: str, mean: float, sigma: float, longest: int
    ) -> Countdown:
        """Lengths are log-normal with this mean (before the cut) and ``sigma``, and end at ``longest`` tokens."""
        policy = random_policy(shape, dtype, device, tied=False)
        start, first = shape.vocab - 1, longest  # ids: 0 end, up to first - 1 counting, up to start - 1 entries
        entries = min(start - first, 4096)
        assert entries > longest // 4, "the vocabulary is too small for such lengths"
        share = (torch.arange(entries, dtype=torch.float64) + 0.5) / entries
        lengths = torch.exp(math.log(mean) - sigma**2 / 2 + sigma * torch.special.ndtri(share))
        lengths = lengths.round().clamp(2, longest).long()
        embedding = torch.randn(shape.vocab, shape.hidden, generator=torch.Generator().manual_seed(1))
        embedding[first : first + entries] = embedding[lengths - 1]
        unit = embedding * (embedding.square().mean(dim=1, keepdim=True)).rsqrt()  # as the final norm leaves it
        head = torch.zeros_like(embedding)
        head[: first - 1] = unit[1:first]  # a token calls for the one below
        head[first : first + entries] = unit[start]
        with torch.no_grad():
            policy.get_input_embeddings().weight.copy_(embedding)
            policy.get_output_embeddings().weight.copy_(head * (LOGIT / shape.hidden))
            for layer in policy.get_decoder().layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        return cls(policy, start)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random prompts of this length that end in the start token."""
        return [[*prompt, self.start] for prompt in random_prompts(count, length - 1, self.start)]


def spread(lengths: Tensor) -> str:
    """Mean, quantiles and maximum of lengths in words."""
    values = lengths.double()
    middle, high = (values.quantile(q).item() for q in (0.5, 0.95))
    return (
        f"{len(values)} lengths: mean {values.mean():.0f}, median {middle:.0f}, 95 % below {high:.0f}, "
        f"longest {values.max():.0f}, standard deviation {values.std():.0f}"
    )
