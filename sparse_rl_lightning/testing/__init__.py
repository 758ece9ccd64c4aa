"""Tools for tests, notebooks and the quickstart: tiny policies and tokenizers, and the contract of compressors."""

from sparse_rl_lightning.policies.tiny import ARCHITECTURES, CHAT_TEMPLATE, character_tokenizer, tiny_model
from sparse_rl_lightning.testing.contract import ContractError, check_compressor
from sparse_rl_lightning.testing.layers import random_layer

__all__ = [
    "ARCHITECTURES",
    "CHAT_TEMPLATE",
    "ContractError",
    "character_tokenizer",
    "check_compressor",
    "random_layer",
    "tiny_model",
]
