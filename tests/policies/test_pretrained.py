"""Model folders: whole, finite and with a tokenizer, or one line that says what is wrong; never code of theirs."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.case import Case
from cases.models import LAYER, REFUSED, settings, weights, with_code
from lightning.pytorch import Trainer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_rl_lightning.checkpoints.folders import save_folder
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, PretrainedPolicy, TinyPolicy
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.rewards import arithmetic_reward
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model
from tests.families import family

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "policy"
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_link_that_leads_nowhere_and_nobody_reads_is_left_alone(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "pol")
    (tmp_path / "pol" / "README.md").symlink_to("gone")
    PretrainedPolicy(str(tmp_path / "pol")).load()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(
    case: Case, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.policy is not None
    shutil.copytree(whole, tmp_path / "pol")
    case.policy(tmp_path / "pol")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(case.says)) as caught:
        PretrainedPolicy("./pol").load()
    message = str(caught.value)
    assert message.startswith("policy: '")
    assert "\n" not in message
    assert "trust_remote_code" not in message


def test_a_whole_folder_loads_without_a_word(whole: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, tokenizer = load_pretrained(str(whole))
    own, _ = TinyPolicy(hidden_size=32, num_layers=2).load()
    assert tokenizer("1+1=")["input_ids"]
    for (name, value), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
    assert len(recwarn) == 0


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # and with the fourth bit the same below zero


def test_mxfp4_is_loaded_as_the_numbers_that_it_stands_for(whole: Path, tmp_path: Path) -> None:
    """gpt-oss as it is published: experts in blocks of 32 with 4 bits each and a scale, two numbers in a byte."""
    folder, expected = tmp_path / "policy", dict[str, torch.Tensor]()
    shutil.copytree(whole, folder)
    family("gpt_oss").to(torch.bfloat16).save_pretrained(folder)
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    settings(quantization_config=quantized)(folder)

    def pack(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
            count, width, rows = state.pop(name).shape  # the file has rows first
            blocks = torch.randint(0, 256, (count, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (count, rows, width // 32), dtype=torch.uint8)
            state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()  # the low half first
            numbers = FP4[codes & 7] * (1 - 2 * (codes >> 3)) * torch.exp2(scales.float() - 127)[..., None]
            expected[name] = numbers.flatten(2).mT

    weights(pack)(folder)
    model, _ = PretrainedPolicy(str(folder)).load()
    found = dict(model.named_parameters())
    assert len(expected) == 8
    for name, numbers in expected.items():
        assert found[name].requires_grad
        assert torch.equal(found[name].float(), numbers), name
    assert model.config._attn_implementation == "eager"
    model = model.float()
    sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=2, window=4))
    rollout = sampler.generate([[*range(3, 33)]], SamplingParams(max_completion_length=20, num_generations=2))
    torch.testing.assert_close(replay_logprobs(model, rollout), rollout.sampler_logprobs, atol=2e-5, rtol=0)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text("utf-8")


def test_weights_that_are_not_used_are_told(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "policy")
    weights(lambda state: state.update(x=torch.zeros(2)))(tmp_path / "policy")
    with pytest.warns(UserWarning, match=r"holds 1 weights that its model does not have, for example 'x'"):
        load_pretrained(str(tmp_path / "policy"))


def test_code_of_a_folder_is_never_run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "policy"
    shutil.copytree(whole, folder)
    with_code(folder)
    settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})(folder)
    load_pretrained(str(folder))
    settings(model_type="foo")(folder)
    with pytest.raises(ValueError, match="never run"):
        load_pretrained(str(folder))
    assert not Path("PWNED").exists()


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


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("flash_attention_2", "flash_attn", r"pip install 'sparse-rl-lightning\[flash-attn\]'"),
        ("flash_attention_3", "flash_attn_interface", "hopper"),
    ],
)
def test_a_missing_attention_package_is_named(name: str, package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ValueError, match=f"attn_implementation='{name}' needs the package {package}.*{remedy}.*'sdpa'"):
        PretrainedPolicy("some/model", attn_implementation=name).load()


def test_the_learner_runs_the_attention_that_is_asked_for(whole: Path) -> None:
    sequences = torch.randint(2, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(sequences, dtype=torch.bool)
    mask[:, 0] = False
    results = []
    for name in ("sdpa", "eager", None):
        source = PretrainedPolicy(str(whole), attn_implementation=name)
        policy = source.load()[0]
        assert policy.config._attn_implementation == (name or "sdpa")
        assert LoraPolicy(source).attn_implementation == name
        results.append(sequence_logprobs(policy, sequences, mask)[0].detach())
    torch.testing.assert_close(*results[:2], atol=1e-5, rtol=0)
    assert torch.equal(results[2], results[0])
    assert TinyPolicy().attn_implementation is None  # which leaves the model's own


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


def test_a_policy_without_an_end_is_told_of() -> None:
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()

    def begin(**options: Any) -> None:
        module = SparseGRPO(LoadedPolicy(model, tokenizer), RKV(12), arithmetic_reward, **options)
        module.configure_model()
        module.trainer = Trainer(accelerator="cpu", logger=False)
        module.on_fit_start()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin()
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
        begin(sampling=SamplingParams(num_generations=8, stop_strings=("#",)))
    told = r"names a token that ends a completion.*model\.rollout\.end_tokens or model\.sampling\.stop_s"
    with pytest.warns(UserWarning, match=told):
        begin()


TEXTS = ["4242", "I'll  say\n\n it's 42 ", "ﬁne ①", "Zoë", "ab"]
CHANGED = ["pre-tokenizer", "normalizer", "decoder", "post-processor", "model"]


def core(changed: str) -> Tokenizer:
    """Bytes, with a few merges; one step is not what GPT-2 has there."""
    vocabulary = {"<end>": 0} | {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(["42", "fi", "Ġs", "ab"])}
    merges = [("4", "2"), ("f", "i"), ("Ġ", "s")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=changed == "model"))
    steps = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), steps])
    made.pre_tokenizer = digits if changed == "pre-tokenizer" else steps
    made.decoder = decoders.ByteLevel()
    if changed == "decoder":
        made.decoder = decoders.Sequence([decoders.Replace("Ġ", "_"), decoders.Fuse()])
    if changed == "normalizer":
        made.normalizer = normalizers.NFKC()
    if changed == "post-processor":
        made.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    return made


def folder_of(path: Path, changed: str, architecture: str, name: str) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core(changed), eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tiny_model(architecture, vocab_size=len(tokenizer), hidden_size=32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("backend", None)  # as transformers 4 wrote it
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    return path


@pytest.mark.thinned(3)
@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "GPT2Tokenizer"), ("qwen3", "GPT2Tokenizer"), ("llama", "LlamaTokenizerFast"), ("qwen2", "Any")],
)
def test_what_is_read_is_the_file(changed: str, architecture: str, name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "policy", changed, architecture, name)
    model, tokenizer = PretrainedPolicy(str(folder)).load()
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = stored.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == stored.decode(ids, skip_special_tokens=False)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == (
        "<end>", "<end>", "{{ messages[0].content }}",
    )  # fmt: skip
    save_folder(tmp_path / "export", model, tokenizer)
    again = PretrainedPolicy(str(tmp_path / "export")).load()[1]
    # what others load from an export; for this family transformers 5 looks at no name
    served = again if architecture == "qwen2" else AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in TEXTS:
        ids = stored.encode(text).ids
        assert again(text)["input_ids"] == served(text)["input_ids"] == ids
        assert again.decode(ids) == served.decode(ids)


@pytest.mark.parametrize("name", ["GemmaTokenizer", "CohereTokenizer", "GPT2Tokenizer"])
def test_a_side_of_the_class_alone_is_kept(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "policy", "normalizer", "llama", name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("padding_side", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    side = AutoTokenizer.from_pretrained(folder).padding_side
    assert side == ("right" if name == "GPT2Tokenizer" else "left")
    model, tokenizer = PretrainedPolicy(str(folder)).load()
    save_folder(tmp_path / "export", model, tokenizer)
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    assert side == tokenizer.padding_side == exported.padding_side


def test_special_tokens_of_the_class_alone_are_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "normalizer", "qwen3", "GPT2Tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "a"}')
    text = (folder / "tokenizer.json").read_text().replace("<end>", "<|endoftext|>")
    (folder / "tokenizer.json").write_text(text)
    tokenizer = PretrainedPolicy(str(folder)).load()[1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|endoftext|>", 0, 261)
