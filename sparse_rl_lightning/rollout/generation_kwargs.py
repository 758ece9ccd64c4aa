"""TRL's ``generation_kwargs``: sampling settings under names of transformers and vLLM, which override the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

HONORED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "min_new_tokens": "min_completion_length",
    "min_tokens": "min_completion_length",
    "stop_strings": "stop_strings",
    "stop": "stop_strings",
    "seed": "seed",
}
"""Keys of transformers' GenerationConfig and vLLM's SamplingParams, with their names in ``SamplingParams``."""

ELSEWHERE = {
    "eos_token_id": "end_tokens",
    "stop_token_ids": "end_tokens",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "max_length": "max_completion_length",
}
OFF: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "stop_strings": (),
}  # fmt: skip
"""Values that null stands for."""


def with_generation_kwargs(params: SamplingParams, kwargs: Mapping[str, Any] | None) -> SamplingParams:
    """Override sampling parameters with TRL's ``generation_kwargs``.

    ``do_sample`` false is greedy. A key that is null switches its setting off, as does ``top_k`` of -1.

    Args:
        params: Sampling parameters under their own names.
        kwargs: Settings under the names of transformers or vLLM; None for none.

    Raises:
        ValueError: If a key is not honored (the message lists those that are), a setting is given by two names, or a
            value is out of range.
    """
    changes: dict[str, Any] = {}
    try:
        for key, value in (kwargs or {}).items():
            name, value = _setting(key, value)
            if name in changes:
                raise UserError(f"generation_kwargs gives {name} twice, the second time as {key}: remove one of them.")
            if name is not None:
                changes[name] = value
        return replace(params, **changes)
    except TypeError as error:
        raise UserError(f"generation_kwargs: a value of {dict(kwargs or {})} has the wrong type ({error}).") from error


def _setting(key: str, value: Any) -> tuple[str | None, Any]:
    """The name of a key's setting here and its value; the name is None if nothing changes."""
    if key == "do_sample":
        if not isinstance(value, bool):
            raise UserError(f"generation_kwargs: do_sample must be true or false, got {value!r}.")
        return (None if value else "temperature"), 0.0
    if key not in HONORED:
        advice = f"set {ELSEWHERE[key]} instead" if key in ELSEWHERE else "remove it"
        raise UserError(
            f"generation_kwargs: {key} is not honored, {advice}. Honored are {', '.join(['do_sample', *HONORED])}."
        )
    name = HONORED[key]
    if value is None or (name == "top_k" and value == -1):
        return (name if name in OFF else None), OFF.get(name)
    if name == "stop_strings":
        return name, (value,) if isinstance(value, str) else tuple(value)
    return name, value
