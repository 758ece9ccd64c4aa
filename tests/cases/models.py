"""Cases of model folders: ``pol`` is a copy of a good one that was changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.case import TRAINS, Case

Change = Callable[[Path], object]
LAYER = "model.layers.1.mlp.up_proj.weight"
CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """A change of the tensors by name."""

    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return apply


def raw(change: Callable[[bytes], bytes]) -> Change:
    """A change of the bytes of the weights."""

    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def settings(name: str = "config.json", **changes: Any) -> Change:
    """A change of keys of a JSON file."""

    def apply(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def written(name: str, text: str) -> Change:
    """A file with other content."""
    return lambda folder: (folder / name).write_text(text)


def without(*names: str) -> Change:
    """Files that are not there."""

    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def filled(value: float) -> Change:
    """Two numbers of a weight."""
    return weights(lambda state: state[LAYER].view(-1)[7:9].fill_(value))


def only_pickles(folder: Path) -> None:
    """As old folders are."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    """A module that would leave a file."""
    (folder / "evil.py").write_text(
        "open('PWNED', 'w')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    )
    settings(auto_map=CODE)(folder)


def unknown_with_code(folder: Path) -> None:
    """The same, and needed."""
    with_code(folder)
    settings(model_type="foo")(folder)


def adapters(folder: Path) -> None:
    """Adapters with pickled weights beside the model."""
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "."}))
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


def index(weight_map: dict[str, str]) -> Change:
    """Weights in several files."""

    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


def fifos_below(folder: Path) -> None:
    """Pipes below the folder, where its index says that weights are."""
    index({"model.norm.weight": "sub/below/x.safetensors"})(folder)
    (folder / "sub" / "below").mkdir(parents=True)
    os.mkfifo(folder / "sub" / "below" / "x.safetensors")


def template_fifo(folder: Path) -> None:
    """A pipe where transformers looks for more chat templates."""
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "x.jinja")


def fifo(folder: Path) -> None:
    """A pipe where the weights are."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def added_token(folder: Path) -> None:
    """A tokenizer with a token more than the model has embeddings."""
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    size = len(found["model"]["vocab"])
    found["added_tokens"].append({"id": size, "content": "<step>", "special": True, **options})
    file.write_text(json.dumps(found))


REFUSED = [  # when it is loaded, as tests/policies/test_pretrained.py shows
    Case("without one weight", f"1 weights are missing, 0 of another shape and 0 unknown, there is no '{LAYER}'", 1,
         policy=weights(lambda state: state.pop(LAYER))),
    Case("an untied head that is not there", "there is no 'lm_head.weight'", 1,
         policy=settings(tie_word_embeddings=False)),
    Case("weights of another width", "'model.layers.0.mlp.down_proj.weight' is [32, 96] and must be [32, 80]", 1,
         policy=settings(intermediate_size=80)),
    Case("NaN in a weight", f"1 weights hold NaN or infinity, for example '{LAYER}'", 1, policy=filled(float("nan"))),
    Case("a file cut off", "pol/model.safetensors is cut off or no safetensors file", 1,
         policy=raw(lambda b: b[:5000])),
    Case("a header that claims 16 EB", "pol/model.safetensors is cut off or no safetensors file", 1,
         policy=raw(lambda b: b"\xff" * 8 + b[8:])),
    Case("pickled weights only", "Its weights are pickles (pytorch_model.bin)", 1, policy=only_pickles),
    Case("GGUF only", "Its weights are GGUF, which cannot be trained: sparse-rl import-gguf pol/model.gguf", 1,
         policy=lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf")),
    Case("an adapter only", "holds an adapter (adapter_config.json) and no model", 1,
         policy=lambda folder: (folder / "config.json").rename(folder / "adapter_config.json")),
    Case("a pipe in place of weights that an index names", "'pol/sub/below/x.safetensors': it is a pipe", 1,
         policy=fifos_below),
    Case("a pipe in place of a chat template", "'pol/additional_chat_templates/x.jinja': it is a pipe", 1,
         policy=template_fifo),
    Case("a pipe in place of the weights", "it is a pipe, a socket or a device, not a file", 1, policy=fifo),
    Case("an index of files outside of the folder", "No such file or directory: ./pol/../../x.safetensors", 1,
         policy=index({"a": "../../x.safetensors"})),
    Case("an unknown `model_type`", "does not recognize this architecture. Tested are llama, mistral, qwen2, qwen3", 1,
         policy=settings(model_type="foo")),
    Case("an unknown `model_type` with code of its own",
         "It needs code of its own (auto_map), which is never run. Tested are llama", 1, policy=unknown_with_code),
    Case("a list as config.json", "has a config.json that is no JSON object: give the folder", 1,
         policy=written("config.json", "[]")),
    Case("a config.json that is no JSON", "is not a valid JSON file", 1, policy=written("config.json", "{")),
    Case("a text where a number belongs", "config.json.max_position_embeddings must be a finite number", 1,
         policy=settings(max_position_embeddings="128")),
    Case("quantized weights", "holds quantized weights (quant_method='bitsandbytes')", 1,
         policy=settings(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})),
    Case("a generation_config.json that is no JSON", "has a generation_config.json that cannot be read (Expecting", 1,
         policy=written("generation_config.json", "{")),
    Case("no tokenizer", "policy: './pol' has no tokenizer. Put the model's tokenizer.json and", 1,
         policy=without("tokenizer.json", "tokenizer_config.json")),
    Case("a tokenizer.json without anything", "its tokenizer cannot be loaded", 1,
         policy=written("tokenizer.json", "{}")),
]  # fmt: skip

TYPED = ("without one weight", "a pipe in place of the weights", "an unknown `model_type` with code of its own")
CASES = [
    *[case for case in REFUSED if case.name in TYPED],
    Case("weights that the model does not have", TRAINS, 0, policy=weights(lambda s: s.update(x=torch.zeros(2)))),
    Case("a token that the embeddings do not hold, in a prompt", "model.resize_token_embeddings(len(tokenizer))", 1,
         policy=added_token, rows='{"prompt": "<step>", "answer": "1"}\n' * 8, data={}),
    Case("code of its own that is not needed", TRAINS, 0, policy=with_code, slow=True),
    Case("pickled adapters beside the weights", "./pol' cannot be loaded.", 1, policy=adapters, slow=True),
    Case("model.policy=./nowhere", "policy: no model at './nowhere' (no config.json there)", 1),
    Case("a chat template that reaches for `__init__`", TRAINS, 0, slow=True,
         policy=written("chat_template.jinja", "{{ ''.__class__.__init__ }}")),
    Case("`plan`: 200,000 layers", "config.json.num_hidden_layers must be at least 1 and at most 1000", 1,
         command="plan", policy=settings(num_hidden_layers=200000, layer_types=None)),
    Case("`plan --prompt=0`", "--prompt must be at least 1, got --prompt=0", 1,
         command="plan", args="--prompt=0", policy=settings()),
]  # fmt: skip
