"""Drawing tokens: repetition penalty, temperature, top-k, top-p, min-p, greedy; randomness keyed by sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import SupportsIndex

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.errors import UserError, check_seed, is_float32, sizes_known
from sparse_rl_lightning.ops.draw import Drawn
from sparse_rl_lightning.ops.keyed_random import hash_bits, seed_of

OF_TRUNCATION = {"of": "truncation"}
"""What options are marked with that draw from another distribution unless they are their default, 0 or null."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of completions; names and meaning as in TRL's GRPOConfig.

    Args:
        num_generations: Number of samples per prompt.
        max_completion_length: Limit on the tokens of a completion, the end token included.
        min_completion_length: Number of tokens before which end tokens are forbidden, and stop strings do not end a
            completion.
        temperature: Divisor of the logits; 0 is greedy.
        top_k: Number of most likely tokens to draw from, 0 for all.
        top_p: Probability of the smallest set of tokens to draw from, 1 for all.
        min_p: Least probability of tokens to draw from, relative to the most likely one, None or 0 for all.
        repetition_penalty: Factor that divides positive logits and multiplies negative ones of tokens that are in the
            prompt or the completion so far, before the temperature; 1 for no penalty, above 1 makes them less likely.
        top_logprobs: Number of most likely tokens to report at every position with their log-probabilities.
        stop_strings: Texts that end a completion; it is cut after the token that completes one. Needs a tokenizer.
        seed: Seed; the same seed, sequence id and step give the same random numbers in any batch. A module takes that
            of ``seed_everything`` if it is null, a sampler by itself 0.

    Raises:
        ValueError: If a value is outside its range.
    """

    num_generations: int = 1
    max_completion_length: int = 512
    min_completion_length: int = field(default=0, metadata=OF_TRUNCATION)
    temperature: float = 1.0
    top_k: int = field(default=0, metadata=OF_TRUNCATION)
    top_p: float = field(default=1.0, metadata=OF_TRUNCATION)
    min_p: float | None = field(default=None, metadata=OF_TRUNCATION)
    repetition_penalty: float = field(default=1.0, metadata=OF_TRUNCATION)
    top_logprobs: int = 0
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            "num_generations": _whole(self.num_generations, 1, "at least 1"),
            "max_completion_length": _whole(self.max_completion_length, 1, "at least 1"),
            "min_completion_length": _whole(
                self.min_completion_length,
                0,
                f"between 0 and max_completion_length={self.max_completion_length}",
                most=self.max_completion_length,
            ),
            "temperature": (
                is_float32(self.temperature) and self.temperature >= 0,
                "a finite number, 0 (greedy) or more",
            ),
            "top_k": _whole(self.top_k, 0, "0 (off) or more"),
            "top_p": (is_float32(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p is None or (is_float32(self.min_p) and 0 <= self.min_p <= 1), "None or in [0, 1]"),
            "repetition_penalty": (
                is_float32(self.repetition_penalty) and self.repetition_penalty > 0,
                "a positive number, 1 for no penalty",
            ),
            "top_logprobs": _whole(self.top_logprobs, 0, "0 (off) or more"),
            "stop_strings": (
                self.stop_strings is not None and not isinstance(self.stop_strings, str) and all(self.stop_strings),
                "a list of texts that are not empty"
                + (f": write [{self.stop_strings!r}]" if isinstance(self.stop_strings, str) else ""),
            ),
        }
        for name, (fine, meaning) in allowed.items():
            if not fine:
                value = getattr(self, name)
                raise UserError(f"{name} must be {meaning}{sizes_known(value)}, got {name}={value}.")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        check_seed(self.seed)

    @property
    def seeded(self) -> SamplingParams:
        """The parameters with a seed: theirs, or that of the process."""
        return replace(self, seed=seed_of(self.seed))

    @property
    def greedy(self) -> SamplingParams:
        """Those of one greedy completion, with what shapes it: its length and stop strings."""
        return SamplingParams(
            max_completion_length=self.max_completion_length, temperature=0.0, stop_strings=self.stop_strings
        )

    @cached_property
    def for_drawing(self) -> SamplingParams:
        """The parameters that ``draw`` reads, and nothing else."""
        return replace(
            self, num_generations=1, max_completion_length=max(1, self.min_completion_length), stop_strings=(), seed=0
        )

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from another distribution than softmax(logits / temperature)."""
        return self.temperature > 0 and any((getattr(self, n) or off) != off for n, off in _NOT_TRUNCATING.items())

    @staticmethod
    def whole_distribution() -> str:
        """The settings, as text, with which tokens are drawn from softmax(logits / temperature)."""
        return ", ".join(f"{name}={json.dumps(off)}" for name, off in _NOT_TRUNCATING.items())


_NOT_TRUNCATING = {option.name: option.default for option in fields(SamplingParams) if option.metadata == OF_TRUNCATION}


def draw(
    logits: Tensor,
    params: SamplingParams,
    sequence_keys: Tensor,
    steps: Tensor,
    end_ids: Tensor,
    occurred: Tensor | None = None,
) -> Drawn:
    """Draw one token per sequence by a random number keyed by (sequence, step) alone; as ``ops.draw`` does.

    Args:
        logits: Logits (n, V).
        params: Sampling parameters: temperature and truncation.
        sequence_keys: Keys (n,), int64.
        steps: Number of completion tokens (n,) so far.
        end_ids: Ids (E,) that are forbidden before ``min_completion_length``.
        occurred: Tokens (n, V), bool, that are in each sequence already; needed with a repetition penalty.

    Raises:
        ValueError: If ``top_logprobs`` exceeds the vocabulary.
    """
    assert (params.repetition_penalty != 1) == (occurred is not None), "the penalty is on tokens that have occurred"
    # the logs are float32, and a penalized logit in 16 bits would be rounded once more
    logits = logits.float() if occurred is not None or logits.dtype == torch.float64 else logits
    return ops.draw(
        logits,
        sequence_keys,
        steps,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or 0.0,
        end_ids=end_ids,
        min_length=params.min_completion_length,
        drawn_from=None if occurred is None else penalize(logits, occurred, params.repetition_penalty),
        top_logprobs=params.top_logprobs,
        with_support=params.top_logprobs > 0 and params.truncates,
    )


def penalize(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Make tokens that have occurred less likely, as transformers and vLLM do (arXiv 1909.05858).

    Args:
        logits: Logits (n, V).
        occurred: Tokens (n, V), bool, that have occurred.
        penalty: Factor that divides positive logits and multiplies negative ones.
    """
    return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def occurring(tokens: Tensor, lengths: Tensor, vocabulary: int) -> Tensor:
    """The tokens (n, V), bool, that occur in the first ``lengths`` (n,) tokens of these sequences (n, T)."""
    is_before = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    occurs = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return occurs.scatter_(1, tokens.where(is_before, vocabulary), True)[:, :vocabulary]


def _whole(value: object, least: int, meaning: str, most: object = None) -> tuple[bool, str]:
    """Whether this is a whole number in range, and what it must be."""
    if not isinstance(value, SupportsIndex):
        return False, f"a whole number, {meaning}"
    return least <= int(value) <= (int(most) if isinstance(most, SupportsIndex) else int(value)), meaning


def sequence_keys(seed: int | None, sequence_ids: Sequence[int] | Tensor) -> Tensor:
    """The keys (B,), int64, of the sequences with these ids under this seed; None is 0."""
    return hash_bits(seed or 0, torch.as_tensor(sequence_ids))


def prompt_key(seed: int | None, prompt: Sequence[int]) -> int:
    """The key of a prompt's compression, from its content, so that it is the same for all samples in any batch."""
    content = b"".join(token.to_bytes(8, "little") for token in [(seed or 0) & (2**63 - 1), *prompt])
    return int.from_bytes(sha256(content).digest()[:8], "little", signed=True)
