"""Folders that a policy is written into: whole, of the type asked for, and the same for transformers 4 and 5.

What transformers 4 makes of them was compared once by running 4.57.6 on exports of every family in ``tests/families``
that it knows: logits to 6e-6, tokens and end tokens equal. Here is what makes it so, the words that it reads.
"""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors import safe_open
from tiny_grpo import ALPHABET, fit, module
from tiny_run import config, write
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from sparse_rl_lightning.callbacks import ExportPolicy
from sparse_rl_lightning.checkpoints.exports import check_replaceable
from sparse_rl_lightning.checkpoints.folders import save_folder
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import DistillSparse, SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, PolicySource, PretrainedPolicy
from sparse_rl_lightning.policies.lora import add_adapter
from sparse_rl_lightning.policies.pretrained import is_tied
from sparse_rl_lightning.policies.source import check_trainable
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.families import SIZES, TWO_ROPES, family

IDS = torch.randint(3, 17, (2, 30), generator=torch.Generator().manual_seed(0))
SCALED = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def settings(folder: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    return found


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS, use_cache=False).logits
    return found


def exported(source: PolicySource, folder: Path, **options: Any) -> PreTrainedModel:
    """The model of a policy's export."""
    policy = SupervisedWarmup(source)
    policy.configure_model()
    policy.export(folder, **options)
    check_replaceable(folder, "folder")  # the next one may take its place
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model


def tiny(**options: Any) -> PolicySource:
    tokenizer = character_tokenizer(ALPHABET)
    return LoadedPolicy(tiny_model(vocab_size=len(tokenizer), hidden_size=32, **options), tokenizer)


# ---------------------------------------------------------------- both generations of transformers


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         {"rope_theta": 5e5, "rope_scaling": None}),
        ("llama", {"rope_parameters": SCALED},
         {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in SCALED.items() if k != "rope_theta"}}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25}},
         {"rope_theta": 3e4, "rope_scaling": None, "partial_rotary_factor": 0.25}),
        ("gemma3_text", {},
         {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("phi3", {}, {"rope_theta": 1e4, "original_max_position_embeddings": 100, "partial_rotary_factor": 0.75,
                      "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i for i in range(6)],
                                       "long_factor": [9.0] * 6}}),
        ("qwen3_moe", {}, {"rope_theta": 1e4, "num_experts": 8}),
    ],
)  # fmt: skip
def test_positions_are_spelled_for_both(
    name: str, options: Any, words: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = family(name, **options)
    save_folder(tmp_path, model, character_tokenizer(ALPHABET))
    found = settings(tmp_path)
    assert {word: found[word] for word in words} == words
    assert found["rope_parameters"]
    assert found["torch_dtype"] == found["dtype"] == "float32"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert not [one for one in recwarn if "transformers 4" in str(one.message)]


def test_positions_that_transformers_4_has_no_words_for_are_told(tmp_path: Path) -> None:
    model = family("olmo3", rope_parameters=TWO_ROPES)  # of two bases, which only gemma3 has there
    with pytest.warns(UserWarning, match=r"exported folder of a 'olmo3' has rotary positions that transformers 4"):
        save_folder(tmp_path, model, character_tokenizer(ALPHABET))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_the_tokenizer_is_one_that_both_know(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})  # type: ignore[arg-type]
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32)
    exported(LoadedPolicy(model, tokenizer), tmp_path)
    found = settings(tmp_path, "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["additional_special_tokens"] == ["<think>", "</think>"]
    assert "extra_special_tokens" not in found
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("01<think>a")["input_ids"] == tokenizer("01<think>a")["input_ids"]


HEADS = ["of the folder", "in memory", "below adapters", "below quantized weights", "trained beside adapters", "tied"]


@pytest.mark.filterwarnings("ignore:.*says that output head and embedding are one matrix")
@pytest.mark.parametrize("head", HEADS)
def test_an_export_says_whether_its_head_is_its_embedding(head: str, tmp_path: Path) -> None:
    """Of transformers, 4 obeys the flag and 5 the weights."""
    model = tiny().load()[0]
    if head == "tied":
        model.config.tie_word_embeddings = False
    else:  # but the flag says that they are one
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.flip(0).clone())
    tokenizer = character_tokenizer(ALPHABET)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    source: PolicySource = PretrainedPolicy(str(tmp_path / "base"))
    if head.startswith("below"):
        pytest.importorskip("peft", reason="peft is an extra")
        source = LoraPolicy(source, r=2, quantization="int8" if "quantized" in head else None)
    if head == "trained beside adapters":
        peft = pytest.importorskip("peft", reason="peft is an extra")
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        source = LoadedPolicy(peft.get_peft_model(tiny().load()[0], adapter), tokenizer)
    if head in ("in memory", "tied"):
        source = LoadedPolicy(model, tokenizer)
    again = exported(source, tmp_path / "export")
    assert settings(tmp_path / "export")["tie_word_embeddings"] is is_tied(again) is (head == "tied")
    if not head.startswith("trained"):
        atol = 0.05 if "quantized" in head else 0
        torch.testing.assert_close(logits(again), logits(model), atol=atol, rtol=0)


def test_a_flag_within_a_section_is_that_of_the_weights_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", text_config=SIZES, vision_config=SIZES | {"image_size": 28})
    model = AutoModelForCausalLM.from_config(config)
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.flip(0).clone())
    assert config.text_config.tie_word_embeddings
    save_folder(tmp_path, model, character_tokenizer(ALPHABET))
    for section in (settings(tmp_path), settings(tmp_path)["text_config"]):
        assert section["tie_word_embeddings"] is False


def test_a_head_that_the_settings_deny_is_told_and_trained(tmp_path: Path) -> None:
    model, tokenizer = tiny().load()
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.flip(0).clone())
    save_folder(tmp_path, model, tokenizer)
    config = settings(tmp_path)
    for says in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": says}))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loaded = PretrainedPolicy(str(tmp_path)).load()[0]
        assert ["Set tie_word_embeddings to false there" in str(one.message) for one in told] == [True] * says
        assert not is_tied(loaded)
        loaded.resize_token_embeddings(len(tokenizer) + 1)  # which ties what the flag says
        assert not is_tied(loaded)


# ---------------------------------------------------------------- the type


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_has_the_type_asked_for(dtype: str, tmp_path: Path) -> None:
    source, kind = tiny(), getattr(torch, dtype)
    model = exported(source, tmp_path / "a", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {kind}
    found = settings(tmp_path / "a")
    assert found["dtype"] == found["torch_dtype"] == dtype
    expected = dict(source.load()[0].named_parameters())
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name].to(kind)), name
    exported(source, tmp_path / "b")
    sizes = [(tmp_path / one / "model.safetensors").stat().st_size for one in "ab"]
    assert sizes[0] == pytest.approx(sizes[1] * kind.itemsize / 4, rel=0.1)
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # tied
    assert {p.dtype for p in expected.values()} == {torch.float32}  # the policy itself is left alone


def test_weights_that_stay_float32_are_not_rounded(tmp_path: Path) -> None:
    """A mixture's correction of its router, which transformers reads as float32 in a model of any type."""
    model = family("glm4_moe")
    bias = next(m for name, m in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.copy_(torch.linspace(0.1, 0.3, len(bias)))
    save_folder(tmp_path, model, character_tokenizer(ALPHABET), dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    found = next(m for name, m in again.named_buffers() if name.endswith("e_score_correction_bias"))
    assert again.dtype == torch.bfloat16
    assert torch.equal(found, bias)


def test_a_tokenizer_that_transformers_5_wrote_is_named_as_4_knows_it(tmp_path: Path) -> None:
    save_folder(tmp_path / "a", tiny().load()[0], character_tokenizer(ALPHABET))
    place = tmp_path / "a" / "tokenizer_config.json"
    for written, named in [("TokenizersBackend", "PreTrainedTokenizerFast"), (7, "PreTrainedTokenizerFast")]:
        tokenizer = character_tokenizer(ALPHABET)
        tokenizer.name_or_path = str(tmp_path / "a")
        place.write_text(json.dumps(json.loads(place.read_text()) | {"tokenizer_class": written}))
        save_folder(tmp_path / "b", tiny().load()[0], tokenizer)
        found = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
        assert found["tokenizer_class"] == named


def test_the_callback_and_the_command_take_a_type(used_folder: Path) -> None:
    (run_config,) = used_folder.rglob("run_config.yaml")
    main(["export", "--config", str(run_config), "--ckpt_path", "last", "--folder", "out", "--dtype", "bfloat16"])
    assert settings(Path("out"))["torch_dtype"] == "bfloat16"
    values = config(max_steps=1)
    other = {"folder": "other", "dtype": "bfloat16"}
    values["trainer"]["callbacks"] = [{"class_path": "ExportPolicy", "init_args": other}]
    main(["fit", "--config", write(values)])
    assert settings(Path("other"))["torch_dtype"] == "bfloat16"
    with pytest.raises(UserError, match=r"dtype must be one of float32, bfloat16, float16 or null.*got dtype='int4'"):
        main(["export", "--config", str(run_config), "--ckpt_path", "last", "--folder", "out", "--dtype", "int4"])
    assert settings(Path("out"))["torch_dtype"] == "bfloat16"


def test_a_type_that_cannot_be_had_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ExportPolicy: dtype must be one of float32, .*got dtype='fp8'"):
        ExportPolicy(tmp_path, dtype="fp8")

    class Own(LightningModule):
        def export(self, folder: Path) -> None:
            raise AssertionError

    with pytest.raises(UserError, match=r"export of Own takes no dtype. Set dtype to null"):
        ExportPolicy(tmp_path, dtype="bfloat16").setup(Trainer(logger=False), Own(), "fit")
    ExportPolicy(tmp_path).setup(Trainer(logger=False), Own(), "fit")


# ---------------------------------------------------------------- adapters


def adapted(kind: str) -> tuple[Any, PreTrainedModel]:
    """What a user may give as policy, and its inner model, with adapters that act."""
    peft = pytest.importorskip("peft", reason="peft is an extra")
    model: Any = tiny_model(vocab_size=len(character_tokenizer(ALPHABET)), hidden_size=32)
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    if kind == "added":
        model.add_adapter(peft.LoraConfig(**options))
        given = inner = model
    else:
        saved = ["norm"] if kind == "with whole layers" else None
        wrapper = peft.get_peft_model(model, peft.LoraConfig(**options, modules_to_save=saved))
        given, inner = (wrapper if kind == "wrapper" else wrapper.get_base_model()), wrapper.get_base_model()
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return given, inner


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_bias": True}, r"self_attn.o_proj cannot be merged .* its bias \(lora_bias\)"),
        (
            {"inference_mode": True},
            r"nothing to train. .* PeftModel.from_pretrained\(model, folder, is_trainable=True\)",
        ),
        ({"target_modules": ["lm_head"]}, "share one weight"),
        ({"target_modules": ["embed_tokens"]}, "share one weight"),
        ({}, ""),
    ],
)
def test_adapters_that_no_export_could_merge_or_no_step_change_are_refused_before_training(
    options: dict[str, Any], says: str, recwarn: pytest.WarningsRecorder
) -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    inner: Any = tiny_model(vocab_size=len(character_tokenizer(ALPHABET)), hidden_size=32)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["o_proj"], **options})
    grpo = module()
    grpo.policy_source = LoadedPolicy(peft.get_peft_model(inner, config), character_tokenizer(ALPHABET))
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        fit(grpo, 1)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_bias_of_an_adapter_needs_one_below_it(has_bias: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    model = family("llama", attention_bias=has_bias)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True))
    with nullcontext() if has_bias else pytest.raises(ValueError, match="cannot be merged"):
        check_trainable(model)
        LoadedPolicy(model, character_tokenizer(ALPHABET)).exported(model)


@pytest.mark.parametrize("kind", ["inner", "with whole layers", "wrapper", "added"])
def test_adapters_of_a_model_in_memory_are_merged(kind: str, tmp_path: Path) -> None:
    given, inner = adapted(kind)
    want, before = logits(inner), {name: value.clone() for name, value in inner.state_dict().items()}
    source = LoadedPolicy(given, character_tokenizer(ALPHABET))
    save_folder(tmp_path, source.exported(given), source.tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain), want, atol=1e-5, rtol=0)
    assert not (tmp_path / "adapter_config.json").exists()
    assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())  # a copy was merged
    assert (want - logits(tiny_model(vocab_size=len(source.tokenizer), hidden_size=32))).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_adapters_of_packed_experts_are_all_merged(name: str, tmp_path: Path) -> None:
    """Two adapters lie around one another there, and the inner one was left out of the export."""
    pytest.importorskip("peft", reason="peft is an extra")
    model = family(name)
    add_adapter(model, "all-linear", 0, r=4)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for own in (own for key, own in model.named_parameters() if "lora_B" in key):
            own.copy_(0.1 * torch.randn(own.shape, generator=draw))
    tokenizer = character_tokenizer(ALPHABET)
    save_folder(tmp_path, LoadedPolicy(model, tokenizer).exported(model), tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)
    assert (logits(plain) - logits(family(name))).abs().max() > 0.01


def test_adapters_on_16_bits_are_rounded_once(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    exported(tiny(), tmp_path / "base", dtype="bfloat16")
    source = LoraPolicy(str(tmp_path / "base"), r=4)
    policy = SupervisedWarmup(source)
    policy.configure_model()
    delta = {}
    with torch.no_grad():
        for name, layer in policy.policy.named_modules():
            if hasattr(layer, "lora_B"):
                layer.lora_B["default"].weight.add_(1e-3)
                delta[f"{name}.weight"] = layer.get_delta_weight("default")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).state_dict()
    close = {"float32": 1e-7, "float16": 1e-4}  # a rounding to bfloat16 before that to float16 is eight times as far
    for dtype in (None, "float32", "bfloat16", "float16"):
        folder = tmp_path / str(dtype)
        policy.export(folder, dtype)
        found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        assert len(delta) == 14
        for name, added in delta.items():
            want = base[name].float() + added
            assert found[name].dtype == getattr(torch, dtype or "bfloat16")
            if dtype in close:
                torch.testing.assert_close(found[name].float(), want, atol=close[dtype], rtol=1e-3)
            else:
                assert torch.equal(found[name], want.to(torch.bfloat16))


# ---------------------------------------------------------------- the generation config


def touched(model: PreTrainedModel) -> PreTrainedModel:
    """As after a look at the model's samples in a notebook; transformers refuses to save it so."""
    model.generation_config = GenerationConfig.from_dict({"eos_token_id": [1, 2], "pad_token_id": 0})
    model.generation_config.update(do_sample=False, temperature=0.6, top_p=0.9)
    return model


def test_a_generation_config_that_was_touched_is_exported_as_it_is(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    model = touched(tiny_model(vocab_size=len(tokenizer), hidden_size=32))
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "theirs")
    exported(LoadedPolicy(model, tokenizer), tmp_path / "ours")
    found = settings(tmp_path / "ours", "generation_config.json")
    assert {name: found[name] for name in ("do_sample", "temperature", "top_p", "eos_token_id")} == {
        "do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]
    }  # fmt: skip
    assert model.generation_config.temperature == 0.6


def test_a_sparse_adapter_is_written_whatever_the_generation_config(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    grpo = module(kind=DistillSparse)
    grpo.configure_model()
    touched(grpo.policy)
    grpo.export(tmp_path, "bfloat16")
    assert (tmp_path / "sparse_adapter/adapter_model.safetensors").is_file()
    check_replaceable(tmp_path, "folder")
    assert settings(tmp_path)["torch_dtype"] == "bfloat16"
    assert not [name for name in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict() if "lora" in name]


def test_the_ends_of_training_are_those_of_the_export(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.eos_token = "a"
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, eos_token_id=1)
    exported(LoadedPolicy(model, tokenizer), tmp_path / "a")
    assert settings(tmp_path / "a", "generation_config.json")["eos_token_id"] == [1, 13]
    assert model.generation_config.eos_token_id == 1
    shutil.rmtree(tmp_path / "a")
    tokenizer.eos_token = "<eos>"
    exported(LoadedPolicy(model, tokenizer), tmp_path / "a")
    assert settings(tmp_path / "a", "generation_config.json")["eos_token_id"] == 1
    grpo = module(end_tokens=("b", "a"))
    grpo.export(tmp_path / "b")
    ends = settings(tmp_path / "b", "generation_config.json")["eos_token_id"]
    assert ends == [1, *tokenizer.convert_tokens_to_ids(["b", "a"])]
    assert sorted(ends) == grpo.generator.sampler().end_token_ids
