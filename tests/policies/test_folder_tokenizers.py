"""A tokenizer is the folder's: its tokenizer.json decides about ids and texts, whatever class is named beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_rl_lightning.checkpoints.folders import save_folder
from sparse_rl_lightning.policies import PretrainedPolicy
from sparse_rl_lightning.testing import tiny_model

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
