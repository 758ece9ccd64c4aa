"""Tiny policies and tokenizers: real models without any download."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sparse_rl_lightning.errors import UserError, check_seed
from sparse_rl_lightning.ops.keyed_random import seed_of
from sparse_rl_lightning.policies.source import PolicySource

ARCHITECTURES: dict[str, tuple[Any, Any]] = {  # configuration and model classes, whose arguments differ
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

ARITHMETIC_ALPHABET = "0123456789+-*/%()=;#,>"
"""Every character of every prompt and solution, and ``/``, which a countdown answer may use."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TinyPolicy(PolicySource):
    """A randomly initialized model of 0.6 million parameters with a character tokenizer.

    Args:
        architecture: ``llama``, ``qwen2`` or ``qwen3``.
        alphabet: Characters of the vocabulary.
        hidden_size: Width of the model.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        max_position_embeddings: Context length in tokens.
        seed: Seed of the initial weights, null for that of ``seed_everything``.
    """

    def __init__(
        self,
        architecture: str = "qwen2",
        alphabet: str = ARITHMETIC_ALPHABET,
        hidden_size: int = 128,
        num_layers: int = 3,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        max_position_embeddings: int = 128,
        seed: int | None = None,
    ) -> None:
        check_seed(seed, "TinyPolicy.seed")
        self.architecture = architecture
        self.alphabet = alphabet
        self.sizes = {
            "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
            "max_position_embeddings": max_position_embeddings, "intermediate_size": 3 * hidden_size,
        }  # fmt: skip
        self.seed = seed

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Build the model; the same seed gives the same weights."""
        tokenizer = character_tokenizer(self.alphabet)
        # weights of this size learn sums much faster than transformers' default of 0.02
        seed = seed_of(self.seed)
        model = tiny_model(
            self.architecture, vocab_size=len(tokenizer), seed=seed, initializer_range=0.06, **self.sizes
        )
        return model, tokenizer


def character_tokenizer(alphabet: Iterable[str] = string.printable) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character: ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2, then the alphabet."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(alphabet)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    architecture: str = "qwen2",
    vocab_size: int = 128,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int | None = None,
    max_position_embeddings: int = 512,
    seed: int = 0,
    initializer_range: float = 0.02,
    eos_token_id: int | list[int] | None = 1,
) -> PreTrainedModel:
    """A randomly initialized causal language model small enough for a test: float32, CPU, reproducible.

    Arguments are as in :class:`~sparse_rl_lightning.policies.tiny.TinyPolicy`, with four more in place of ``alphabet``:
    ``vocab_size`` is the number of tokens; ``intermediate_size`` is the width of the feed-forward layer, by default
    four times ``hidden_size`` (TinyPolicy has three times); ``initializer_range`` is the standard deviation of the
    initial weights, where a large one gives peaked distributions; and ``eos_token_id`` is the token, or list of tokens,
    that ends a completion. The global random state is left alone.
    """
    if architecture not in ARCHITECTURES:
        raise UserError(f"architecture must be one of {sorted(ARCHITECTURES)}, got {architecture!r}.")
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size or 4 * hidden_size,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config).eval()
    return model
