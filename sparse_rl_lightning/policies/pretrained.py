"""Loading of Hugging Face folders: complete, with finite weights and a tokenizer, or refused in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import Mxfp4Config

from sparse_rl_lightning.errors import FileError, UserError, check_number
from sparse_rl_lightning.files import check_regular, whole_file
from sparse_rl_lightning.policies.support import WORKS

LARGEST_JSON = 2**30
"""Bytes of a model's configuration, tokenizer or index of weights."""
DUE = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
}  # fmt: skip
"""Sizes that cannot be 0."""
RANGES: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"least": 1, "most": 1000},
    "|".join(DUE): {"least": 1, "most": 2**24},
    ".*_layers?": {"most": 1000},
    "num_.*|.*_(size|dim)": {"most": 2**24},
    ".*eps(ilon)?": {"least": 0},
    "rope_theta|rope_local_base_freq": {"above": 0},
}
"""What numbers of a configuration must be, by the first pattern that their names have."""
FOREIGN = ("does not recognize this architecture", "Unrecognized configuration class", "Unrecognized model")
"""Phrases of transformers' errors about a ``model_type`` that is not one of its causal language models."""
MAKERS = {
    r"runs/(warmup\w*)/": r"sparse-rl fit --config configs/\1.yaml",
    r"runs/models/smollm2": "make real-model",
    r"runs/models/qwen2.5-coder-(\d+\.?\d*b)": r"make math-model SIZE=\1",
}
"""What writes the folders of models that the configurations in the repository name."""


def load_pretrained(
    path: str, dtype: str | torch.dtype = "auto", attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, from safetensors only and without running code from the folder.

    A model is refused as by :func:`load_model`, or if it has no tokenizer.
    """
    where = f"policy: {path!r}"
    model: Any = load_model(path, dtype, attn_implementation)
    with without_reports():
        try:
            tokenizer = _load_tokenizer(os.path.expanduser(path))
        except Exception as error:
            raise UserError(f"{where}: its tokenizer cannot be loaded. {reason(path, error)}") from error
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() - set(tokenizer.all_special_tokens):
        raise UserError(
            f"{where} has no tokenizer. Put the model's tokenizer.json and tokenizer_config.json beside its weights."
        )
    size = len(model.get_input_embeddings().weight)
    if beyond := [token for token, number in vocabulary.items() if number >= size]:
        warnings.warn(
            f"{where} has a tokenizer with {len(beyond)} tokens beyond the model's {size} embeddings, such as "
            f"{beyond[0]!r}: a prompt with one is refused. model.resize_token_embeddings(len(tokenizer)) makes room.",
            stacklevel=2,
        )
    return model, tokenizer


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder: its tokenizer.json as it is, if there is one.

    Many classes of transformers 5 read the vocabulary alone from it, and replace its normalizer, pre-tokenizer and
    decoder.
    """
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if type(loaded) is PreTrainedTokenizerFast or _cached(path, "tokenizer.json") is None:
        return loaded
    sides: dict[str, Any] = {
        "padding_side": loaded.padding_side,
        "truncation_side": loaded.truncation_side,
    }  # some are of the class
    stored: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False, **sides)
    vocabulary = stored.get_vocab()
    for name, token in loaded.special_tokens_map.items():  # some are of the class, and in no file
        if stored.special_tokens_map.get(name) is None and isinstance(token, str) and token in vocabulary:
            setattr(stored, name, token)
    return stored


def load_model(path: str, dtype: str | torch.dtype = "auto", attn_implementation: str | None = None) -> PreTrainedModel:
    """A causal language model, from safetensors only and without running code from the folder.

    A model is refused if it cannot be loaded, or has weights that are missing, of another shape, or not finite.
    ``dtype="auto"`` is the folder's type; without ``attn_implementation`` transformers chooses.
    """
    check_there(path)
    where, path = f"policy: {path!r}", os.path.expanduser(path)
    with without_reports():
        try:
            check_files(path)
            options = check_plain(path)
            _check_generation_config(path)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=True,
                trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
        except FileError as error:
            raise UserError(f"{where} cannot be loaded. {error}") from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except Exception as error:  # foreign data: nearly every class of errors has been seen
            raise UserError(f"{where} cannot be loaded. {reason(path, error)}") from error
    model: PreTrainedModel = loaded[0]
    check_whole(loaded[1], where)
    check_finite(model.named_parameters(), where)
    if is_tied(model) is False and getattr(model.config, "tie_word_embeddings", False):
        warnings.warn(
            f"{where} has a config.json that says that output head and embedding are one matrix, and weights with two: "
            "both are used and trained. transformers 4, and servers built on it, take the embedding for both. Set "
            "tie_word_embeddings to false there; an export says so.",
            stacklevel=3,
        )
        model.config.tie_word_embeddings = False
    return model


def check_there(path: str) -> None:
    """Refuse a path that can be no hub name and leads to no model.

    Raises:
        ValueError: If there is no ``config.json``; what writes it is named where that is known.
    """
    folder = os.path.expanduser(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(folder).exists()
    if not looks_local or (Path(folder) / "config.json").is_file():
        return
    makers = [
        f"; {match.expand(say)} writes this one" for form, say in MAKERS.items() if (match := re.match(form, path))
    ]
    remedy = f"Give a Hugging Face folder or a hub name such as 'Qwen/Qwen2.5-1.5B'{''.join(makers)}."
    raise UserError(f"policy: no model at {path!r} (no config.json there). {other_weights(folder) or remedy}")


def is_tied(model: PreTrainedModel) -> bool | None:
    """Whether a model's output head is the matrix of its embedding; None without a head."""
    head: Any = model.get_output_embeddings()
    return None if head is None else head.weight is model.get_input_embeddings().weight


def check_files(path: str) -> None:
    """Refuse a folder with a pipe or a device in it, or with a JSON file of endless length.

    Raises:
        ValueError: If there is one.
    """
    folder = Path(path)
    files = [*folder.glob("*"), *folder.glob("*/*.jinja")]
    for index in folder.glob("*.index.json"):
        with suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
        ):  # told by its reader
            files += [folder / name for name in set(json.loads(whole_file(index, LARGEST_JSON))["weight_map"].values())]
    for file in filter(Path.exists, files):  # a link that leads nowhere may be needed by nobody
        check_regular(file, LARGEST_JSON if file.suffix == ".json" else None)


def check_plain(path: str) -> dict[str, Any]:
    """Refuse numbers that no model has, and quantized weights, unless transformers unpacks them with these options.

    It would leave MXFP4 (gpt-oss) quantized where it finds kernels for it.
    """
    try:
        config: Any = PreTrainedConfig.get_config_dict(path)[0]
    except TypeError:  # of older transformers, where newer ones hand on what they read
        config = None
    if not isinstance(config, dict):
        raise UserError("has a config.json that is no JSON object: give the folder that save_pretrained wrote.")
    check_numbers(config, "config.json")
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if quantization:
        raise UserError(
            f"holds quantized weights (quant_method={method!r}), which cannot be trained. Give the folder of the full "
            "weights; LoraPolicy(quantization='nf4') holds them in 4 bits, for sampler and learner alike."
        )
    return {}


def check_numbers(settings: dict[str, Any], where: str) -> None:
    """Refuse numbers that no model has: making a list of so many layers has no end, or some product fails later.

    What is no number counts only where it is one of :data:`DUE`: lists and texts have meanings elsewhere.
    """
    for name, value in settings.items():
        if isinstance(value, dict):
            check_numbers(value, f"{where}.{name}")
        bounds = next((bounds for pattern, bounds in RANGES.items() if re.fullmatch(pattern, name)), None)
        for number in value if isinstance(value, list) else [value]:  # for each layer its own
            if bounds and number is not None and (name in DUE or isinstance(number, (int, float))):
                check_number(f"{where}.{name}", number, **bounds)


def _check_generation_config(path: str) -> None:
    """Refuse a generation_config.json that cannot be read, which transformers ignores, its end tokens with it."""
    name = GENERATION_CONFIG_NAME
    file = _cached(path, name)
    if file is None:
        return
    try:
        GenerationConfig.from_dict(json.loads(Path(file).read_text("utf-8")))
    except Exception as error:  # foreign data
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"has a {name} that cannot be read ({reason}). Repair or remove it.") from error


def _cached(path: str, name: str) -> str | None:
    """A file of a folder, or of the hub's cache; None if it is not there."""
    return cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def check_finite(
    weights: Iterable[tuple[str, Tensor]],
    where: str,
    remedy: str = "They are of a run that diverged, or damaged: give others.",
) -> None:
    """Refuse weights with NaN or infinity, which would spoil every number computed from them.

    ``where`` is their origin, which begins the error message, and ``remedy`` its end.
    """
    broken = [name for name, value in weights if not _is_finite(value)]
    if broken:
        raise UserError(f"{where}: {len(broken)} weights hold NaN or infinity, for example {broken[0]!r}. {remedy}")


def _is_finite(value: Tensor) -> bool:
    """Whether all numbers are; NaN is the smallest and the largest, so that no copy is made."""
    has_none = not (isinstance(value, Tensor) and value.is_floating_point() and value.numel())  # or a user's own state
    return has_none or all(bool(end.isfinite()) for end in torch.aminmax(value.detach()))


def check_whole(report: dict[str, Any], where: str) -> None:
    """Refuse missing weights, which would be random, and warn about unused ones."""
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    mismatched = sorted(report["mismatched_keys"], key=lambda entry: str(entry[0]))
    if missing or mismatched:
        shapes = "".join(f", {name!r} is {[*stored]} and must be {[*ours]}" for name, stored, ours in mismatched[:1])
        names = f", there is no {missing[0]!r}" if missing else ""
        raise UserError(
            f"{where} does not hold this model: {len(missing)} weights are missing, {len(mismatched)} of another shape "
            f"and {len(unexpected)} unknown{names}{shapes}. Its config.json and its weights must be of one model."
        )
    if unexpected:
        warnings.warn(
            f"{where} holds {len(unexpected)} weights that its model does not have, for example {unexpected[0]!r}: "
            "they are not used.",
            stacklevel=3,
        )


def reason(path: str, error: Exception) -> str:
    """An error of transformers in one line, without its advice to run foreign code."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"It needs code of its own (auto_map), which is never run. {WORKS}"
    if any(words in text for words in FOREIGN):
        return f"{re.split(' Model type should be| This could be because', text)[0]} {WORKS}"
    if isinstance(error, OSError) and (advice := other_weights(path)):
        return advice
    if isinstance(error, SafetensorError):
        return _broken_file(path) or text
    missing = "" if Path(path).exists() else "There is no such folder here. As a name on the hub: "
    return (
        missing + text
        if isinstance(error, (OSError, ImportError, UserError))
        else f"{type(error).__name__}: {text[:400]}"
    )


def other_weights(path: str) -> str:
    """What to do about a folder whose weights are of a kind that is not read."""
    names = sorted(file.name for file in Path(path).glob("*"))
    if any(name.endswith(".safetensors") for name in names):
        return ""
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"Its weights are pickles ({pickles[0]}), which could run any code and are never read. Where you trust "
            "them, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) of transformers writes "
            "safetensors beside them."
        )
    is_file = path.endswith(".gguf") and Path(path).is_file()
    ggufs = [path] if is_file else [str(Path(path, name)) for name in names if name.endswith(".gguf")]
    if ggufs:
        return (
            "Its weights are GGUF, which cannot be trained: "
            f"sparse-rl import-gguf {shlex.quote(ggufs[0])} FOLDER writes them as a folder that can."
        )
    return ""


def _broken_file(path: str) -> str | None:
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            return f"{file} is cut off or no safetensors file ({error}). Copy or download it again."
    return None


@contextmanager
def without_reports() -> Iterator[None]:
    """Silence the table that transformers prints about missing weights; it becomes an error or a warning here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
