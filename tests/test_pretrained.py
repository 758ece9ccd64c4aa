"""Model folders: whole, finite and with a tokenizer, or one line that says what is wrong; never code of theirs."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.modules import LoadedPolicy, PretrainedPolicy, SparseGRPO, TinyPolicy
from sparse_rl_lightning.pretrained import load_pretrained
from sparse_rl_lightning.rewards import arithmetic_reward

ROOT = Path(__file__).parents[1]
LAYER = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "policy"
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return apply


def raw(change: Callable[[bytes], bytes]) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def settings(name: str = "config.json", **changes: Any) -> Change:
    def apply(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def filled(value: float) -> Change:
    return weights(lambda state: state[LAYER].view(-1)[7:9].fill_(value))


def nothing_known(state: dict[str, Tensor]) -> None:
    state.clear()
    state["x"] = torch.zeros(2)


FOREIGN = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
BROKEN: dict[str, tuple[Change, str]] = {
    "a weight is missing": (
        weights(lambda state: state.pop(LAYER)), rf"1 weights are missing, .* there is no '{LAYER}'",
    ),
    "no weight is known": (
        weights(nothing_known), "27 weights are missing, 0 of another shape and 1 unknown, there is no 'lm_h",
    ),
    "the head is untied and not there": (settings(tie_word_embeddings=False), "there is no 'lm_head.weight'"),
    "another width": (
        settings(intermediate_size=80),
        r"6 of another shape .*, 'model.layers.0.mlp.down_proj.weight' is \[32, 96\] and must be \[32, 80\]",
    ),
    "NaN": (filled(float("nan")), rf"1 weights hold NaN or infinity, for example '{LAYER}'"),
    "infinity": (filled(float("-inf")), rf"1 weights hold NaN or infinity, for example '{LAYER}'"),
    "cut off": (raw(lambda content: content[:5000]), r"model\.safetensors is cut off or no safetensors file .*again"),
    "empty": (raw(lambda content: b""), r"model\.safetensors is cut off or no safetensors file .*again"),
    "a header that is too long": (
        raw(lambda content: b"\xff" * 8 + content[8:]), r"model\.safetensors is cut off or no safetensors file"
    ),
    "pickles only": (only_pickles, "no file named model.safetensors"),
    "an unknown type": (settings(model_type="foo"), r"model type `foo` .*Supported: llama, mistral, qwen2, qwen3"),
    "no causal model": (settings(model_type="t5"), r"T5Config.*Supported: llama"),
    "no type": (lambda folder: (folder / "config.json").write_text("{}") and None, r"model_type.*Supported: llama"),
    "its own code": (settings(model_type="foo", auto_map=FOREIGN), r"code of its own \(auto_map\), which is never run"),
    "a text for a number": (settings(max_position_embeddings="128"), "'max_position_embeddings' expected int, got str"),
    "a negative vocabulary": (settings(vocab_size=-5), "negative dimension -5"),
    "layers that are not listed": (settings(num_hidden_layers=1000000), r"`num_hidden_layers` \(1000000\)"),
    "quantized": (
        settings(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "bitsandbytes",
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), r"has no tokenizer\. Put .* tokenizer\.json"),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}") and None, "its tokenizer cannot be loaded"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(case: str, whole: Path, tmp_path: Path) -> None:
    change, said = BROKEN[case]
    folder = tmp_path / "policy"
    shutil.copytree(whole, folder)
    change(folder)
    with pytest.raises(ValueError, match=said) as caught:
        PretrainedPolicy(str(folder)).load()
    message = str(caught.value)
    assert message.startswith(f"policy: '{folder}'")
    assert "\n" not in message
    assert "trust_remote_code" not in message


def test_a_whole_folder_loads_without_a_word(whole: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, tokenizer = load_pretrained(str(whole))
    own, _ = TinyPolicy(hidden_size=32, num_layers=2).load()
    assert tokenizer("1+1=")["input_ids"]
    for (name, value), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
    assert len(recwarn) == 0


def test_weights_that_are_not_used_are_told(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "policy")
    weights(lambda state: state.update(x=torch.zeros(2)))(tmp_path / "policy")
    with pytest.warns(UserWarning, match=r"holds 1 weights that its model does not have, for example 'x'"):
        load_pretrained(str(tmp_path / "policy"))


def test_code_of_a_folder_is_never_run(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(whole, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    settings(auto_map=FOREIGN)(folder)
    settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})(folder)
    load_pretrained(str(folder))
    settings(model_type="foo")(folder)
    with pytest.raises(ValueError, match="never run"):
        load_pretrained(str(folder))
    assert not (tmp_path / "ran").exists()


def test_nothing_that_is_loaded_may_bring_code() -> None:
    files = [*ROOT.glob("sparse_rl_lightning/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    calls = [
        (file.name, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) >= 2
    for name, node in calls:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        value = given.get("trust_remote_code")
        assert isinstance(value, ast.Constant), f"{name}:{node.lineno} does not say trust_remote_code=False"
        assert value.value is False, f"{name}:{node.lineno}"


def test_a_model_in_memory_is_looked_at_too() -> None:
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.get_parameter(LAYER).data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=rf"the model given: 1 weights hold NaN or infinity, for example '{LAYER}'"):
        LoadedPolicy(model, tokenizer).load()


def test_a_checkpoint_with_nan_is_refused_before_a_weight_is_overwritten() -> None:

    module = SparseGRPO(TinyPolicy(hidden_size=32, num_layers=2), RKV(12), arithmetic_reward)
    module.configure_model()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.on_load_checkpoint({"state_dict": state})
    state[f"policy.{LAYER}"][0, 0] = float("inf")
    with pytest.raises(ValueError, match=rf"ckpt_path: this checkpoint: 1 weights hold NaN .* 'policy.{LAYER}'"):
        module.on_load_checkpoint({"state_dict": state})
