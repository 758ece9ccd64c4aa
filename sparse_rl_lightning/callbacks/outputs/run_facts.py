"""Facts of a run for its report: module, configuration, versions, and how it ended."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import Trainer

from sparse_rl_lightning import __version__
from sparse_rl_lightning.callbacks.base import RolloutModule, corrections_of
from sparse_rl_lightning.policies.quantized import count_weights
from sparse_rl_lightning.rewards import reward_names
from sparse_rl_lightning.text import shortened


def default_title(module: RolloutModule) -> str:
    """The default title: module, compressor and budget, retriever and its budget."""
    compressor, r = module.generator.compressor, module.generator.retriever
    budget = f", budget {compressor.schedule} + {compressor.buffer} tokens" if compressor.evicts else ""
    reading = "" if r is None else f", {type(r).__name__} reading {r.schedule} tokens"
    return f"{type(module).__name__} with {type(compressor).__name__}{budget}{reading}"


def describe(module: RolloutModule) -> dict[str, str]:
    """The most important settings, in words."""
    policy, generator = module.policy, module.generator
    rule = generator.options.downsampling
    samples = str(generator.sampling.num_generations) + (f", of which {type(rule).__name__} drops some" if rule else "")
    return {
        "policy": f"{type(policy).__name__}, {count_weights(policy) / 1e6:,.2f} million parameters",
        "compressor": str(generator.compressor),
        **({} if generator.retriever is None else {"retriever": str(generator.retriever)}),
        "corrections": ", ".join(corrections_of(module)) or "none",
        "samples per prompt": samples,
        "temperature": str(generator.sampling.temperature),
        "seeds": ", ".join(f"{name.removesuffix('.seed')} {seed}" for name, seed in module.seeds.items()),
        "longest completion": f"{generator.sampling.max_completion_length} tokens",
        "reward functions": ", ".join(reward_names(module.rewards.functions)),
    }


def configuration(trainer: Trainer) -> dict[str, str]:
    """Every key of the command line's configuration, in dotted form; empty for a run from Python."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it where no type says so
        parser, config = getattr(callback, "parser", None), getattr(callback, "config", None)
        if parser is not None and config is not None:  # Lightning's SaveConfigCallback
            return dict(
                flattened(json.loads(parser.dump(config, format="json", skip_none=False, skip_validation=True)))
            )
    return {}


def how_it_ended(exception: BaseException) -> str:
    """The state of a run that an exception ended; Preemption exits with status 0 after saving a checkpoint."""
    if isinstance(exception, SystemExit) and not exception.code:
        return "preempted, to be resumed"
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    message = shortened(str(exception), 500)
    return f"stopped by {type(exception).__name__}" + (f": {message}" if message else "")


def flattened(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as text; classes in a list are identified by their names, not by their indices.

    >>> dict(flattened({"a": {"b": 1}, "c": [{"class_path": "x.Y", "init_args": {"d": None}}]}))
    {'a.b': '1', 'c.Y': 'used', 'c.Y.d': 'null'}
    """
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        yield key, value["class_path"].rpartition(".")[2]
        for name, item in (value.get("init_args") or {}).items():
            yield from flattened(item, f"{key}.{name}")
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flattened(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield from _listed(value, key)
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def _listed(values: list[Any], key: str) -> Iterator[tuple[str, str]]:
    seen: dict[str, int] = {}
    for index, item in enumerate(values):
        is_class = isinstance(item, dict) and isinstance(item.get("class_path"), str)
        name = item["class_path"].rpartition(".")[2] if is_class else str(index)
        seen[name] = seen.get(name, 0) + 1
        dotted = f"{key}.{name}" if seen[name] == 1 else f"{key}.{name}#{seen[name]}"
        if is_class:
            yield dotted, "used"
            item = item.get("init_args") or {}
        if item or not is_class:
            yield from flattened(item, dotted)


def package_versions() -> dict[str, str]:
    """The versions of Python and of packages."""
    return {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "sparse-rl-lightning": __version__,  # a checkout on the path of Python has no metadata
        "torch": torch.__version__,  # with +cpu, +cu130
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
    }


def versions(module: RolloutModule) -> dict[str, str]:
    """The versions of packages and Python, and the hardware."""
    is_gpu = module.device.type == "cuda"
    device = torch.cuda.get_device_name(module.device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    packages = package_versions()
    python = packages.pop("python")  # after the packages
    return packages | {"python": f"{python}, {os.cpu_count()} cores", "device": device}
