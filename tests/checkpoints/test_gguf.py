"""A GGUF file becomes a folder with the model that transformers reads from it; everything else is refused."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import file_size_limit
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparse_rl_lightning.checkpoints.gguf import load_gguf
from sparse_rl_lightning.cli.training.import_gguf import main
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.policies.source import PretrainedPolicy

gguf = pytest.importorskip("gguf")
HIDDEN, INNER, HEADS, LAYERS = 32, 64, 2, 2
VOCABULARY = 259
IDS = torch.tensor([[5, 77, 30, 200, 3, 5]])
LONG = torch.randint(2, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(0))
TEMPLATE = "{% for m in messages %}<|s|>{{ m['content'] }}<|e|>{% endfor %}"


def written(
    path: Path,
    quantized: bool = True,
    without: str = "none",
    more: Callable[[Any], object] = str,
    tensors: dict[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """A tiny Llama as llama.cpp has it, quantized to eight bits or not, with a tokenizer of bytes.

    ``more`` writes more settings; ``tensors`` are more of them, or others, each with its format.
    """
    path.parent.mkdir(exist_ok=True)
    file, random = gguf.GGUFWriter(str(path), "llama"), torch.Generator().manual_seed(1)
    file.add_context_length(128)
    file.add_embedding_length(HIDDEN)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    tokens = ["<|e|>", "<|s|>", *bytes_to_unicode().values(), "th"]
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
    file.add_token_merges(["t h"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(0)
    file.add_unk_token_id(0)
    file.add_chat_template(TEMPLATE)
    more(file)
    half = {"attn_k": HIDDEN // HEADS, "attn_v": HIDDEN // HEADS}
    sizes = {f"attn_{name}": (half.get(f"attn_{name}", HIDDEN), HIDDEN) for name in ("q", "k", "v", "output")}
    sizes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    for name, (values, kind) in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType[kind]
        file.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, shape in shapes.items():
        if without in name or name in (tensors or {}):
            continue
        values = torch.randn(shape, generator=random).numpy() * 0.3
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and len(shape) == 2 else gguf.GGMLQuantizationType.F32
        file.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.parametrize("quantized", [False, True])
def test_the_folder_has_the_logits_of_the_file(quantized: bool, tmp_path: Path) -> None:
    file = written(tmp_path / "tiny.gguf", quantized)
    main([str(file), str(tmp_path / "folder"), "--dtype=float32"])
    model, tokenizer = load_pretrained(str(tmp_path / "folder"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, atol=1e-5, rtol=0)
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("a cat", "<|s|>Zoë the 7th\n"):
        assert tokenizer(text).input_ids == other(text).input_ids
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (0, 0)


def test_settings_are_plain_and_say_nothing_of_the_packing(tmp_path: Path) -> None:
    main([str(written(tmp_path / "tiny.gguf")), str(tmp_path / "folder")])
    found = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (found["rms_norm_eps"], found["rope_theta"], found["torch_dtype"]) == (1e-5, 10000.0, "bfloat16")
    assert "quant" not in json.dumps(found)
    assert next(load_pretrained(str(tmp_path / "folder"))[0].parameters()).dtype == torch.bfloat16


def test_a_model_is_not_written_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path / "tiny.gguf"))
    main([file, str(tmp_path / "folder")])
    assert "folder: llama, 0 M weights in bfloat16, tokenizer and its chat template." in capsys.readouterr().out
    with pytest.raises(UserError, match="is not empty, so it is not replaced"):
        main([file, str(tmp_path / "folder")])


def test_a_full_disk_leaves_no_folder_that_looks_like_a_model(tmp_path: Path) -> None:
    file, folder = str(written(tmp_path / "tiny.gguf")), tmp_path / "folder"
    with file_size_limit(20_000), pytest.raises(Exception, match="File too large"):  # between config.json and weights
        main([file, str(folder)])
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    main([file, str(folder)])
    assert load_pretrained(str(folder))[0].config.model_type == "llama"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "tiny.gguf"]


def test_the_folder_is_checked_before_the_file_is_read(tmp_path: Path) -> None:
    """Here there is not even a file."""
    (tmp_path / "words").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "words").write_text("mine")
    for name, said in {"words/inside": "cannot be written", "full": "is not empty"}.items():
        with pytest.raises(UserError, match=f"^FOLDER.*{said}"):
            main([str(tmp_path / "missing.gguf"), str(tmp_path / name)])
    assert (tmp_path / "full" / "words").read_text() == "mine"


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_gguf(tmp_path / "missing.gguf")
    (tmp_path / "words.gguf").write_text("GGML, or so")
    with pytest.raises(UserError, match="is not a GGUF file"):
        load_gguf(tmp_path / "words.gguf")
    (tmp_path / "big-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"is one of 2 parts.*llama-gguf-split --merge"):
        load_gguf(tmp_path / "big-00001-of-00002.gguf")
    whole = written(tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut.gguf' cannot be read"):
        load_gguf(tmp_path / "cut.gguf")


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    """As those of a file in parts; transformers would draw them."""
    with pytest.raises(UserError, match=r"does not hold this model: 2 weights are missing.*ffn|mlp"):
        load_gguf(written(tmp_path / "part.gguf", without="ffn_up"))


def patched(path: Path, key: str, kind: str, value: float) -> Path:
    """The same file with another number, as a hostile or damaged one has it."""
    content = bytearray(path.read_bytes())
    start = content.find(key.encode()) + len(key) + 4  # behind its type
    content[start : start + struct.calcsize(kind)] = struct.pack(kind, value)
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- positions

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "none": ({"rope_type": "default"}, lambda file: file.add_rope_scaling_type(gguf.RopeScalingType.NONE)),
    "no factor": ({"rope_type": "default"}, lambda file: file.add_rope_scaling_factor(1.0)),
    "linear": ({"rope_type": "linear", "factor": 4.0}, lambda file: file.add_rope_scaling_factor(4.0)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        lambda file: [
            file.add_rope_scaling_type(gguf.RopeScalingType.YARN), file.add_rope_scaling_factor(4.0),
            file.add_rope_scaling_orig_ctx_len(32), file.add_rope_scaling_yarn_beta_fast(16.0),
        ],
    ),
    "yarn of the context": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        lambda file: [
            file.add_rope_scaling_type(gguf.RopeScalingType.YARN), file.add_rope_scaling_factor(2.0),
            file.add_rope_scaling_finetuned(True),
        ],
    ),
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 64}, str),
    "llama3 of another length": (LLAMA3 | {"original_max_position_embeddings": 32, "factor": 32.0}, str),
}  # fmt: skip


def frequency_factors(rope: dict[str, Any]) -> np.ndarray:
    """What convert_hf_to_gguf.py of llama.cpp writes for Llama 3.1."""
    factors, length, dim = [], rope["original_max_position_embeddings"], HIDDEN // HEADS
    for frequency in 10000.0 ** -(np.arange(0, dim, 2) / dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < length / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > length / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            share = length / wavelength - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions_are_those_of_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    rope, more = SCALED[name]
    factors = {"rope_freqs": (frequency_factors(rope), "F32")} if rope["rope_type"] == "llama3" else {}
    main([str(written(tmp_path / "tiny.gguf", more=more, tensors=factors)), str(tmp_path / "out"), "--dtype=float32"])
    model = load_pretrained(str(tmp_path / "out"))[0]
    config = load_gguf(written(tmp_path / "plain.gguf"), torch.float32)[0].config
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    plain = AutoModelForCausalLM.from_config(config).eval()
    config.rope_parameters = rope | {"rope_theta": 10000.0}
    original = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = []
        for other in (original, plain):
            other.load_state_dict(model.state_dict())
            logits.append(other(LONG).logits)
        torch.testing.assert_close(model(LONG).logits, logits[0], atol=1e-5, rtol=0)
        assert (logits[0] - logits[1]).abs().max() > 0.1 or rope["rope_type"] == "default"


ODD = np.linspace(1.0, 3.0, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("more", "tensors", "names"),
    [
        (lambda file: file.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), {}, r"rope\.scaling\.type=longrope"),
        (lambda file: file.add_rope_scaling_attn_factors(1.2), {}, r"llama\.rope\.scaling\.attn_factor=1\.2"),
        (lambda file: file.add_float32("llama.rope.scale_linear", 4.5), {}, r"llama\.rope\.scale_linear"),
        (lambda file: file.add_rope_dimension_count(8), {}, r"weights.*of another shape|llama\.rope\.dimension_count"),
        (str, {"rope_freqs": (ODD, "F32")}, r"rope_freqs\.weight"),
        (str, {"rope_freqs": (ODD[:4], "F32")}, r"rope_freqs\.weight"),
        (str, {"rope_factors_long": (ODD, "F32")}, r"rope_factors_long\.weight"),
        (str, {"blk.1.ffn_gate_inp": (np.ones((4, HIDDEN), np.float32), "F32")}, r"blk\.1\.ffn_gate_inp\.weight"),
        (str, {"blk.2.attn_norm": (np.ones(HIDDEN, np.float32), "F32")}, r"blk\.2\.attn_norm\.weight"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused_by_name(
    more: Callable[[Any], object], tensors: dict[str, tuple[np.ndarray, str]], names: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"^'{tmp_path}/tiny.gguf' .*({names})"):
        load_gguf(written(tmp_path / "tiny.gguf", more=more, tensors=tensors))


def test_a_number_that_the_model_has_no_place_for_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tiny.gguf' says what its model does not have: .*sliding_window': 77"):
        load_gguf(written(tmp_path / "tiny.gguf", more=lambda file: file.add_sliding_window(77)))


@pytest.mark.parametrize(
    ("key", "kind", "value", "names"),
    [
        ("block_count", "<I", 0, "num_hidden_layers must be at least 1"),
        ("block_count", "<I", 1, "9 have no place in a 'llama' of 1 layers, for example 'blk.1.attn_k.weight'"),
        ("block_count", "<I", 4 * 10**9, "num_hidden_layers must be at least 1 and at most 1000"),
        ("feed_forward_length", "<I", 65, r"4 weights are missing|6 of another shape"),
        ("feed_forward_length", "<I", 4 * 10**9, "intermediate_size must be at least 1 and at most"),
        ("context_length", "<I", 0, "max_position_embeddings must be at least 1"),
        *[("layer_norm_rms_epsilon", "<f", value, "rms_norm_eps must be") for value in (math.nan, -1.0)],
        *[("freq_base", "<f", value, "rope_theta must be") for value in (math.inf, 0.0)],
    ],
)
def test_numbers_that_no_model_has_are_refused_before_one_is_made(
    key: str, kind: str, value: float, names: str, tmp_path: Path
) -> None:
    file = patched(written(tmp_path / "tiny.gguf"), key, kind, value)
    with pytest.raises(UserError, match=names) as caught:
        load_gguf(file)
    assert str(caught.value).startswith(f"'{file}' ")
    assert not {"/GGUF", "report"} & {*str(caught.value).split()}


# ---------------------------------------------------------------- embedding and output head


def matrix(seed: int) -> np.ndarray:
    """Rows of very different sizes, as of tokens that were never seen."""
    rows = np.random.default_rng(seed).standard_normal((VOCABULARY, HIDDEN)).astype(np.float32) * 0.05
    rows[:8] *= 10.0 ** -np.arange(1, 9)[:, None]
    return rows


def one_row_trained(rows: np.ndarray, share: float) -> np.ndarray:
    rows = rows.copy()
    rows[100] += share * matrix(7)[100]
    return rows


HEADS_OF = [
    ("Q5_0", "Q8_0", matrix(0), "output.weight"),
    ("Q8_0", "Q5_0", matrix(0), "token_embd.weight"),
    ("Q4_1", "F16", matrix(0), "output.weight"),
    ("F32", "BF16", matrix(0), "token_embd.weight"),
    ("Q8_0", "BF16", matrix(0), "output.weight"),
    ("F32", "F32", matrix(0), "token_embd.weight"),
    ("Q5_0", "Q8_0", matrix(1), None),
    ("F32", "F32", one_row_trained(matrix(0), 1e-3), None),
    ("F16", "F32", one_row_trained(matrix(0), 1e-2), None),
    ("Q5_0", "Q8_0", one_row_trained(matrix(0), 0.5), None),
]


@pytest.mark.parametrize(("low", "high", "head", "kept"), HEADS_OF)
def test_two_roundings_of_one_matrix_are_tied_and_others_not(
    low: str, high: str, head: np.ndarray, kept: str | None, tmp_path: Path
) -> None:
    pair = {"token_embd": (matrix(0), low), "output": (head, high)}
    file = written(tmp_path / "tiny.gguf", tensors=pair)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        main([str(file), str(tmp_path / "out"), "--dtype=float32"])
    said = [str(one.message) for one in told if "roundings of one matrix" in str(one.message)]
    assert len(said) == (kept is not None)
    assert all(f"token_embd.weight ({low}) and output.weight ({high})" in text for text in said)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is model.config.tie_word_embeddings is (kept is not None)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    outer = {"token_embd.weight": model.get_input_embeddings(), "output.weight": model.get_output_embeddings()}
    for name, layer in outer.items():
        values = gguf.quants.dequantize(stored[kept or name].data, stored[kept or name].tensor_type)
        assert torch.equal(layer.weight, torch.from_numpy(np.array(values)))


# ---------------------------------------------------------------- the file


def test_nothing_beside_the_file_or_in_the_working_directory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "own" / "tiny.gguf")
    for name, text in {
        "adapter_config.json": "{}",
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": "x.Y"}}',
    }.items():
        (file.parent / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF, but another")
    one, other = load_gguf(file)[0], load_gguf(Path("own/tiny.gguf"))[0]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_policy_that_is_a_gguf_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "own" / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    for path in ("own", "own/tiny.gguf", "./own", str(tmp_path / "own")):
        with pytest.raises(UserError, match=r"sparse-rl import-gguf \S*own/tiny.gguf FOLDER"):
            PretrainedPolicy(path).load()
    (tmp_path / "own").rename(tmp_path / "my own")
    with pytest.raises(UserError, match=r"sparse-rl import-gguf 'my own/tiny.gguf' FOLDER"):
        PretrainedPolicy("./my own").load()
    with pytest.raises(UserError, match=r"no model at './missing.gguf'.*Give a Hugging Face folder"):
        PretrainedPolicy("./missing.gguf").load()
