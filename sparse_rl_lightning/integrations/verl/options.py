"""verl's configuration of a rollout as settings of the sampler; what cannot work is refused before a model loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.generation_kwargs import with_generation_kwargs

NAME = "sparse_rl"
"""What ``actor_rollout_ref.rollout.name`` calls this rollout."""
OF_VERL = {"model", "num_slots", "end_token_ids", "tokenizer", "keep_pool", "record_routing"}
"""Arguments of the sampler that follow from verl's configuration."""
ELSEWHERE = {
    "eos_token_id": "eos_token_id in the model's generation_config.json",
    "stop_token_ids": "eos_token_id in the model's generation_config.json",
    "num_return_sequences": "actor_rollout_ref.rollout.n",
    "n": "actor_rollout_ref.rollout.n",
    "max_length": "max_tokens",
}
"""What stands for settings of a request that are not honored."""


def sampler_options(config: Any) -> dict[str, Any]:
    """The arguments of a :class:`~sparse_rl_lightning.rollout.RolloutSampler` but model and tokenizer, and ``record``.

    Args:
        config: verl's ``RolloutConfig``; ``engine_kwargs.sparse_rl`` holds the compressor, as ``class_path`` and
            ``init_args``, and may hold more arguments of the sampler, and ``record``, whether answers have one, which
            they have not by default: a long one is of many megabytes.

    Raises:
        ValueError: If there is no compressor, an option is wrong, or verl's settings need what this rollout cannot do.
    """
    _check(config)
    arguments = config.engine_kwargs.get(NAME)
    if not isinstance(arguments, Mapping) or not arguments.get("compressor"):
        raise UserError(
            f"actor_rollout_ref.rollout.engine_kwargs.{NAME}.compressor is missing. Give one as class_path and "
            "init_args, for instance class_path: SnapKV, init_args: {budget: 512, buffer: 128}; FullKV evicts nothing."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutSampler, skip=OF_VERL)
    parser.add_argument("--record", type=bool, default=False)
    try:
        options: dict[str, Any] = parser.instantiate(parser.parse_object(dict(arguments))).as_dict()
    except Exception as error:  # jsonargparse wraps what a class raises
        raise UserError(f"actor_rollout_ref.rollout.engine_kwargs.{NAME}: {error}") from error
    if options["memory_limit"] is None:
        options["memory_limit"] = float(config.gpu_memory_utilization)
    options["end_token_ids"] = [] if config.ignore_eos else None
    return {**options, "num_slots": config.max_num_seqs}


def sampling_params(config: Any, settings: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        config: verl's ``RolloutConfig``.
        settings: Settings of the request under vLLM's names; a limit above ``response_length`` means that.

    Raises:
        ValueError: If a setting is unknown here, or out of range.
    """
    params = SamplingParams(max_completion_length=config.response_length, seed=config.seed)
    honored = {name: value for name, value in settings.items() if name != "logprobs"}
    requested = with_generation_kwargs(params, honored, ELSEWHERE)
    return replace(requested, max_completion_length=min(requested.max_completion_length, config.response_length))


def _check(config: Any) -> None:
    where = "actor_rollout_ref.rollout."
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    for name in sizes:
        if getattr(config, name) != 1:
            raise UserError(
                f"{where}{name} must be 1, got {getattr(config, name)}: a server is one process on one GPU."
            )
    if not config.calculate_log_probs:
        raise UserError(
            f"{where}calculate_log_probs must be true: without the sampler's log-probabilities nothing corrects what a "
            "compressed cache changes."
        )
    if config.enable_rollout_routing_replay:
        raise UserError(f"{where}enable_rollout_routing_replay is not for this rollout: it does not send the experts.")
