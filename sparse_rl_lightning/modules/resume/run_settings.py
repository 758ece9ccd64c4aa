"""The settings of a module as text, by the names of their keys, for a checkpoint to hold and a resume to compare."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning import __version__
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.fingerprints import describe, weights_digest
from sparse_rl_lightning.learner.loss import GRPOLoss
from sparse_rl_lightning.modules.resume.resumable import ResumableModule
from sparse_rl_lightning.modules.resume.run_rules import Rule, rule_of
from sparse_rl_lightning.ops.keyed_random import seed_of
from sparse_rl_lightning.policies.lora import LoraPolicy

PLACES = {
    "policy": "policy_source", "compressor": "generator.compressor", "retriever": "generator.retriever",
    "environment": "generator.environment", "sampling": "generator.sampling", "rollout": "generator.options",
    "reward_funcs": "rewards.functions", "reward_weights": "rewards.weights", "learner": "learner.options",
}  # fmt: skip
"""Where a module keeps arguments of which it has no attribute of the same name."""

NAMED: dict[str, Any] = {"loss": GRPOLoss, "advantage_estimator": None, "trainer.candidates": []}
"""Settings that name classes, with what they were before they could."""

TRAINER = ("accumulate_grad_batches", "precision", "gradient_clip_val", "gradient_clip_algorithm")

SEEN = ("seed", "_warned", "_before")
"""Attributes that are no settings: those that :func:`seeds_of` compares, and what a run makes."""

VERSIONS = {
    "python": sys.version.partition(" ")[0],
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "sparse-rl-lightning": __version__,
}
"""What code marks of :func:`describe` depend on; where one differs, that is reported, and marks are not compared."""

NOT_OF_WEIGHTS = re.compile(
    "_.*|transformers_version|(torch_)?dtype|use_cache|architectures|name_or_path|.*_token_id|max_position_embeddings|"
    "attn_implementation|quantization_config|output_.*|return_dict|is_encoder_decoder|initializer_.*|.*(dropout|pdrop|"
    "_coef|label|task|problem_type).*"
)
"""Entries of config.json that change nothing of what the weights compute."""


def arguments_of(owner: type) -> Iterator[str]:
    """Names of the arguments that a class and its bases take."""
    for base in owner.__mro__:
        create = vars(base).get("__init__")
        if inspect.isfunction(create):  # no builtin's
            for name, parameter in list(inspect.signature(create).parameters.items())[1:]:
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    yield name


def parts_of(module: ResumableModule) -> dict[str, Any]:
    """A module's arguments as they are now, by their names; a user's own are left out where they are not kept."""
    parts = {}
    for name in arguments_of(type(module)):
        with suppress(AttributeError):
            parts[name] = attrgetter(PLACES.get(name, name))(module)
    return parts


def settings_of(module: ResumableModule) -> dict[str, str]:
    """All settings that a resumed run depends on, and that are not seen by what they make."""
    settings: dict[str, Any] = {"module": type(module), "versions": VERSIONS}
    for name, argument in parts_of(module).items():
        if name == "policy":
            settings |= {f"policy.{key}": value for key, value in _of_source(argument).items()}
        elif is_dataclass(argument) and not isinstance(argument, type):
            settings |= {f"{name}.{field.name}": getattr(argument, field.name) for field in fields(argument)}
            settings |= {name: type(argument)} if name in NAMED else {}
        else:
            settings[name] = argument
    trainer: Any = module._trainer
    if trainer is not None:
        settings |= {f"trainer.{name}": getattr(trainer, name) for name in TRAINER}
        reading = [c for c in trainer.callbacks if isinstance(c, RolloutCallback) and c.keeps_candidates]
        settings["trainer.candidates"] = sorted(type(callback).__name__ for callback in reading)
        settings["trainer.callbacks"] = sorted(describe(each, without=SEEN) for each in _corrections(trainer.callbacks))
    left_out = {Rule.DERIVED, Rule.IGNORED}
    if settings.get("rollout.partial_rollout_steps") is None:
        left_out.add(Rule.IF_PARTIAL)
    return {name: describe(value, without=SEEN) for name, value in settings.items() if rule_of(name) not in left_out}


def defaults_of(module: ResumableModule) -> dict[str, str]:
    """The defaults of settings that stand in groups: what a setting was before there was one.

    Those of slots are left out: only partial rollouts describe them.
    """
    defaults = {
        f"{name}.{option.name}": option.default
        for name, group in parts_of(module).items()
        if is_dataclass(group)
        for option in fields(group)
        if option.default is not MISSING
    }
    defaults = NAMED | defaults
    return {n: describe(default, SEEN) for n, default in defaults.items() if rule_of(n) is not Rule.IF_PARTIAL}


def _corrections(callbacks: Iterable[Any]) -> Iterator[RolloutCallback]:
    """The callbacks that change what the loss makes of a rollout, those inside others by themselves."""
    for callback in callbacks:
        if isinstance(callback, RolloutCallback) and callback.corrects:
            yield from getattr(callback, "parts", (callback,))


def seeds_of(module: ResumableModule) -> dict[str, int]:
    """The seeds of all that a module and its data draw, with the keys of the configuration that set them."""
    parts = [*parts_of(module).items(), ("data", getattr(module.trainer, "datamodule", None))]
    return dict(seed for name, argument in parts for seed in _seeds_in(name, argument))


def policy_facts(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, with_weights: bool) -> dict[str, Any]:
    """What the weights of a policy that was just loaded mean, and a digest of the weights it starts with."""
    config = json.loads(policy.config.to_json_string(use_diff=False))
    of_weights = {name: value for name, value in config.items() if not NOT_OF_WEIGHTS.fullmatch(name)}
    ends = {"generation_config": policy.generation_config, "tokenizer": tokenizer}
    return {
        "ends": {
            f"eos_token_id of the {name}": str(getattr(owner, "eos_token_id", None)) for name, owner in ends.items()
        },
        "config": {name: json.dumps(value, sort_keys=True) for name, value in of_weights.items()},
        "vocabulary": hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest(),
        "weights": weights_digest(policy) if with_weights else None,
    }


def _of_source(source: Any) -> dict[str, Any]:
    """The arguments of a policy's source, and of the one inside a LoraPolicy."""
    inside = _of_source(source.base) if isinstance(source, LoraPolicy) else {}
    kept = getattr(source, "options", {}) | getattr(source, "sizes", {}) | vars(source)
    return inside | {name: kept[name] for name in arguments_of(type(source)) if name in kept}


def _seeds_in(name: str, argument: Any) -> Iterator[tuple[str, int]]:
    """The seeds that an argument, or an object inside it, draws by."""
    seed = getattr(argument, "seed", "none")
    if seed is None or isinstance(seed, int):
        yield f"{name}.seed", seed_of(seed)
    if isinstance(argument, LoraPolicy):
        yield from _seeds_in(f"{name}.policy", argument.base)
    inside = getattr(argument, "_parts", ())
    for index, compressor in enumerate(inside):
        yield from _seeds_in(f"{name}.compressor" if len(inside) == 1 else f"{name}.compressors.{index}", compressor)
