"""What TRL offers and rollouts under a compressed cache do not: each refused by a message that says what to change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import ProcessorMixin

from sparse_rl_lightning.callbacks.base import CorrectionCallback, RolloutCallback
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.compressors.base import checked_method
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.modes import disable_dropout, has_dropout
from sparse_rl_lightning.policies.patched import check_no_soft_prompt
from sparse_rl_lightning.rollout import RolloutOptions, SamplingParams
from sparse_rl_lightning.rollout.generation_kwargs import with_generation_kwargs

OF_SAMPLER = (
    "num_slots", "end_tokens", "memory_limit", "kv_dtype", "keep_pool", "cuda_graphs", "head_in_float32", "decoder",
)  # fmt: skip
"""Options of rollouts that count; TRL decides the others, or has no loss for them."""
SEVERAL_TURNS = "it draws completions of one turn; SparseGRPO has conversations with tools, as its `environment`"
REFUSED = {
    "tools": SEVERAL_TURNS,
    "environment_factory": SEVERAL_TURNS,
    "rollout_func": "the sampler of this library draws",
    "use_vllm": "rollouts are drawn in this process, from the live weights",
    "use_transformers_continuous_batching": "the compressor decides what is cached (RolloutOptions has num_slots)",
    "cache_implementation": "the compressor decides what is cached",
}
"""Arguments of TRL's trainer and of its configuration, and why not."""


def check_arguments(arguments: Mapping[str, Any], rollout: RolloutOptions) -> None:
    """Refuse arguments of TRL's trainer, by name, and options of rollouts without an effect in it.

    Raises:
        ValueError: If one is given.
    """
    for name, why in REFUSED.items():
        value = arguments.get(name) or getattr(arguments.get("args"), name, None)
        if value:
            raise UserError(f"SparseGRPOTrainer does not work with {name}={value!r:.40}: {why}. Remove {name}.")
    if isinstance(arguments.get("processing_class"), ProcessorMixin):
        raise UserError("SparseGRPOTrainer reads text alone: give a tokenizer as processing_class, not a processor.")
    for option in fields(rollout):
        if option.name not in OF_SAMPLER and getattr(rollout, option.name) != option.default:
            raise UserError(
                f"rollout.{option.name} has no effect under TRL: remove it. Its own settings are in GRPOConfig."
            )


def check_method(
    compressor: Compressor, corrections: Sequence[CorrectionCallback], replay: bool, loss_type: str
) -> None:
    """Refuse a compressor or corrections that are none, and what would correct twice.

    Raises:
        ValueError: If they do not fit.
    """
    checked_method(compressor)
    for correction in corrections:
        if not isinstance(correction, CorrectionCallback):
            raise UserError(f"corrections must be of CorrectionCallback, such as TIS(), got {correction!r}.")
        if type(correction).correct is RolloutCallback.correct:
            raise UserError(
                f"{type(correction).__name__} corrects in the loss, which is TRL's here. Train with SparseGRPO, or "
                "give a correction of keep and weights, such as TIS()."
            )
        if getattr(correction, "baseline", "all") != "all":
            raise UserError("SparsityAwareRejection: TRL makes the baseline of all samples, set baseline to 'all'.")
    if replay and corrections:
        raise UserError("replay=True trains the policy that drew: nothing is left for corrections. Give one of them.")
    if corrections and loss_type == "vespo":
        raise UserError("loss_type='vespo' weighs whole sequences itself: choose another, or give no corrections.")


def sampling_of(args: Any) -> SamplingParams:
    """The sampling parameters of a GRPOConfig, for one sample; the seed is another one in every rollout.

    Raises:
        ValueError: If one is out of range, or ``generation_kwargs`` set what the learner must know.
    """
    if args.max_completion_length is None:
        raise UserError("max_completion_length=None has no end that memory is planned for: give a number of tokens.")
    configured = SamplingParams(
        max_completion_length=args.max_completion_length, temperature=args.temperature, top_k=args.top_k or 0,
        top_p=args.top_p, min_p=args.min_p, repetition_penalty=args.repetition_penalty,
    )  # fmt: skip
    params = with_generation_kwargs(configured, args.generation_kwargs)
    if (params.temperature, params.seed) != (configured.temperature, configured.seed) or configured.temperature == 0:
        conflicting = [name for name in ("do_sample", "temperature", "seed") if name in (args.generation_kwargs or {})]
        remedy = f", and remove {', '.join(conflicting)} from generation_kwargs" if conflicting else ""
        raise UserError(
            f"The learner divides logits by temperature={configured.temperature} too, greedy samples are all the same, "
            f"and every rollout has another seed: set temperature (above 0) and seed in GRPOConfig{remedy}."
        )
    if params.stop_strings and args.mask_truncated_completions:
        raise UserError(
            "For TRL a completion that a stop string ends is truncated, which mask_truncated_completions leaves out. "
            "Switch that off, or name an end token in rollout=RolloutOptions(end_tokens=[...])."
        )
    return params


def check_trainer(trainer: Any, replay: bool) -> None:
    """Refuse what is known once TRL's trainer is built: images, soft prompts, sharded weights, some attention.

    Raises:
        ValueError: If it is one of these.
    """
    check_no_soft_prompt(trainer.accelerator.unwrap_model(trainer.model))
    for message in _obstacles(trainer, replay):
        raise UserError(message)


def check_loss(trainer_class: type, ours: type, theirs: type) -> None:
    """Refuse corrections of a trainer whose loss, between our class and TRL's, is not TRL's own.

    Raises:
        ValueError: If there is such a loss.
    """
    classes = trainer_class.__mro__
    between = classes[classes.index(ours) + 1 : classes.index(theirs)]
    overriding = next((cls for cls in between if "_compute_loss" in vars(cls)), None)
    if overriding is not None:
        raise UserError(
            f"Corrections hand TRL's loss an advantage for each token, and {overriding.__name__} has another loss, for "
            "one advantage of each sequence. Give no corrections, or replay=True, which changes no advantage."
        )


def check_noise(trainer: Any) -> None:
    """Switch dropout off where the policy's log-probs are compared with the sampler's, which has none, and say so.

    Raises:
        ValueError: If embeddings get noise in training.
    """
    if alpha := trainer.args.neftune_noise_alpha:
        raise UserError(
            f"neftune_noise_alpha={alpha} adds noise to the learner's embeddings, not to the sampler's: it would be "
            "corrected as if it were eviction. Remove neftune_noise_alpha."
        )
    if has_dropout(trainer.model):
        disable_dropout(trainer.model)
        warnings.warn(
            "The policy has dropout (such as peft's lora_dropout, or attention_dropout of the model's config), and the "
            "sampler has none: it is switched off, or noise of dropout would be corrected as if it were eviction.",
            stacklevel=3,
        )


def _obstacles(trainer: Any, replay: bool) -> Iterator[str]:
    policy, accelerator = trainer.model, trainer.accelerator
    of_one_type = {p.dtype for p in policy.parameters() if p.is_floating_point()} <= {torch.float32}
    if trainer.args.cast_lm_head_to_fp32 and not (of_one_type and accelerator.mixed_precision == "no"):
        yield (
            "SparseGRPOTrainer does not work with cast_lm_head_to_fp32=True: the sampler would not see that head. "
            "Remove cast_lm_head_to_fp32, or load the model in float32 and set bf16=False."
        )
    packed = any(type(module).__name__ == "Linear4bit" for module in policy.modules())
    if packed and accelerator.device.type == "cpu":
        yield (
            "Weights in 4 bits of bitsandbytes are packed anew on a CPU when it leaves training mode to draw, and "
            "cannot be trained on afterwards. Use a GPU, 8 bits, or LoraPolicy(quantization='nf4') with SparseGRPO."
        )
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    attention = trainer.model.config._attn_implementation or ""
    if trainer._is_vlm:
        yield (
            "SparseGRPOTrainer reads text alone, and this model's processor more. Load the text model and give a "
            "tokenizer as processing_class, or use TRL's own trainer."
        )
    if any("_hf_hook" in vars(module) for module in policy.modules()):
        yield (
            "The sampler needs the whole model on one device, and hooks of accelerate move parts of this one between "
            "devices, as TRL's device_map='auto' does where it sees several GPUs. Show each process one: set "
            "CUDA_VISIBLE_DEVICES=0, or start a process for each GPU with `accelerate launch`."
        )
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        yield "The sampler reads whole weights, which FSDP and ZeRO-3 cut. Use DDP or ZeRO-2, or SparseGRPO."
    if replay and "flash" in attention:
        yield f"replay=True needs attention with a mask, not {attention!r}: load the model with 'sdpa'."
    if replay and trainer.aux_loss_enabled:
        yield "replay=True has no auxiliary loss of experts: set router_aux_loss_coef=0.0 in GRPOConfig."
