"""TRL's ``generation_kwargs``: sampling settings under names of transformers and vLLM, which override the others.

And the settings of a model's ``generation_config`` that rollouts do not follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

HONORED = {
    option.name: option.name
    for option in fields(SamplingParams)
    if option.name not in ("num_generations", "max_completion_length", "min_completion_length", "top_logprobs")
} | {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "min_new_tokens": "min_completion_length",
    "min_tokens": "min_completion_length",
    "stop": "stop_strings",
}
"""Keys of transformers' GenerationConfig and vLLM's SamplingParams, with their names in ``SamplingParams``."""

ELSEWHERE = {
    "eos_token_id": "end_tokens of rollout (RolloutOptions)",
    "stop_token_ids": "end_tokens of rollout (RolloutOptions)",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "max_length": "max_completion_length",
    "min_length": "min_completion_length",
}
NOT_FOLLOWED = (
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_new_tokens",
    "min_length", "bad_words_ids", "sequence_bias", "no_repeat_ngram_size", "exponential_decay_length_penalty",
    "stop_strings", "watermarking_config",
)  # fmt: skip
"""Settings of a model's ``generation_config`` that bind transformers' ``generate``.

Temperature and the like are settings of a rollout, whatever the model recommends.
"""


def warn_of_generation_config(model: PreTrainedModel) -> None:
    """Warn of settings of a model's ``generation_config`` that rollouts do not follow."""
    ignored = [name for name in NOT_FOLLOWED if getattr(model.generation_config, name, None)]
    if ignored:
        here = [
            f"{name} is sampling.{setting} here" for name, setting in (ELSEWHERE | HONORED).items() if name in ignored
        ]
        warnings.warn(
            f"{', '.join(ignored)} of the model's generation_config: rollouts draw without "
            f"{'them' if len(ignored) > 1 else 'it'}. {'; '.join([*here, ''])}remove what is not meant from "
            "generation_config.json.",
            stacklevel=3,
        )


def with_generation_kwargs(
    params: SamplingParams, kwargs: Mapping[str, Any] | None, elsewhere: Mapping[str, str] = ELSEWHERE
) -> SamplingParams:
    """Override sampling parameters with TRL's ``generation_kwargs``.

    ``do_sample`` false is greedy. A key that is null switches its setting off, as does ``top_k`` of -1.

    Args:
        params: Sampling parameters under their own names.
        kwargs: Settings under the names of transformers or vLLM; None for none.
        elsewhere: What stands for keys that are not honored where these come from.

    Raises:
        ValueError: If a key is not honored, a setting is given by two names, or a value is out of range.
    """
    changes: dict[str, Any] = {}
    try:
        for key, value in (kwargs or {}).items():
            name, value = _setting(key, value, elsewhere)
            if name in changes:
                raise UserError(f"generation_kwargs gives {name} twice, the second time as {key}: remove one of them.")
            if name is not None:
                changes[name] = value
        return replace(params, **changes)
    except TypeError as error:
        raise UserError(f"generation_kwargs: a value of {dict(kwargs or {})} has the wrong type ({error}).") from error


def _setting(key: str, value: Any, elsewhere: Mapping[str, str]) -> tuple[str | None, Any]:
    """The name of a key's setting here and its value; the name is None if nothing changes."""
    if key == "do_sample":
        if not isinstance(value, bool):
            raise UserError(f"generation_kwargs: do_sample must be true or false, got {value!r}.")
        return (None if value else "temperature"), 0.0
    if key not in HONORED:
        advice = f"set {elsewhere[key]} instead" if key in elsewhere else "remove it"
        raise UserError(
            f"generation_kwargs: {key} is not honored, {advice}. Honored are do_sample and settings of SamplingParams "
            "(docs/settings.md) that transformers or vLLM have, under their names."
        )
    name = HONORED[key]
    if value is None or (name == "top_k" and value == -1):
        has_no_off = name in ("max_completion_length", "min_completion_length", "seed")
        return (None if has_no_off else name), getattr(SamplingParams, name)
    return name, (value,) if name == "stop_strings" and isinstance(value, str) else value
