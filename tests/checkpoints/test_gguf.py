"""A GGUF file becomes a folder with the model that transformers reads from it; everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

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
IDS = torch.tensor([[5, 77, 30, 200, 3, 5]])
TEMPLATE = "{% for m in messages %}<|s|>{{ m['content'] }}<|e|>{% endfor %}"


def written(path: Path, quantized: bool = True, without: str = "none") -> Path:
    """A tiny Llama as llama.cpp has it, quantized to eight bits or not, with a tokenizer of bytes."""
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
    half = {"attn_k": HIDDEN // HEADS, "attn_v": HIDDEN // HEADS}
    sizes = {f"attn_{name}": (half.get(f"attn_{name}", HIDDEN), HIDDEN) for name in ("q", "k", "v", "output")}
    sizes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        if without in name:
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
