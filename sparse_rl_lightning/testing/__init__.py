"""For tests, notebooks and the quickstart: tiny policies and tokenizers, and the contract of compressors."""

from sparse_rl_lightning.testing.contract import ContractError, check_compressor
from sparse_rl_lightning.testing.layers import random_layer
from sparse_rl_lightning.testing.policies import ARCHITECTURES, CHAT_TEMPLATE, character_tokenizer, tiny_model

__all__ = [
    "ARCHITECTURES",
    "CHAT_TEMPLATE",
    "ContractError",
    "character_tokenizer",
    "check_compressor",
    "random_layer",
    "tiny_model",
]
