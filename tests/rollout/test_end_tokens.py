"""What ends a completion: end tokens of the model and the tokenizer, and stop strings wherever a decoder shows them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import CHECK_EVERY
from tiny_grpo import ALPHABET
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import SparseGRPO, SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy, PretrainedPolicy
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.finished import StopStrings
from sparse_rl_lightning.rollout.prompts import default_end_token_ids
from sparse_rl_lightning.testing import character_tokenizer, tiny_model


def both(model: int | list[int] | None, tokenizer: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and a tokenizer that end with these tokens; ``a`` is token 13."""
    tok = character_tokenizer(ALPHABET)
    tok.eos_token = tokenizer
    return tiny_model(vocab_size=len(tok), hidden_size=32, eos_token_id=model), tok


def said(call: Callable[[], Any], *words: str) -> list[str]:
    """Warnings of a call that hold all of these words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    texts = [str(one.message) for one in found]
    return [text for text in texts if all(word in text for word in words)]


@pytest.mark.parametrize(
    ("model", "tokenizer", "ends", "told"),
    [
        (1, "a", [1, 13], "<eos> (1), its tokenizer with a (13)"),
        ([1, 2], "a", [1, 2, 13], "<eos> (1), <unk> (2), its tokenizer with a (13)"),
        ([1, 13], "a", [1, 13], None),
        (1, "<eos>", [1], None),
        (1, None, [1], None),
        (None, "a", [13], None),
        (None, None, [], None),
    ],
)
def test_both_ends_count_and_a_difference_is_told(model: Any, tokenizer: Any, ends: list[int], told: Any) -> None:
    policy, tok = both(model, tokenizer)
    texts = said(lambda: RolloutSampler(policy, tokenizer=tok), "its tokenizer with")
    assert len(texts) == bool(told)
    assert not told or told in texts[0]
    assert RolloutSampler(policy, tokenizer=tok).end_token_ids == ends
    assert RolloutSampler(policy, tokenizer=tok, end_token_ids=[5]).end_token_ids == [5]
    assert RolloutOptions(end_tokens=("b",)).sampler(policy, tok, FullKV()).end_token_ids == sorted([*ends, 14])


@pytest.mark.parametrize(
    ("model", "tokenizer", "end"), [(1, "a", 13), (1, None, 1), (None, "a", 13), ([2, 13], "a", 13)]
)
def test_a_warm_up_teaches_an_end_that_ends_a_rollout(model: Any, tokenizer: Any, end: int) -> None:
    policy, tok = both(model, tokenizer)
    warmup = SupervisedWarmup(LoadedPolicy(policy, tok))
    assert len(said(warmup.configure_model, "its tokenizer with")) == (model == 1 and tokenizer == "a")
    ids, targets = warmup._encode([{"prompt": "01", "solution": "23"}])
    assert ids[0].tolist() == [*tok("0123")["input_ids"], end]
    assert targets[0, -1] == end
    assert end in default_end_token_ids(policy, tok)


def test_a_warm_up_without_any_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"SupervisedWarmup: neither the tokenizer nor the model's generation_config"):
        SupervisedWarmup(LoadedPolicy(*both(None, None))).configure_model()


def test_a_rollout_ends_at_the_tokenizers_end() -> None:
    """A policy that can draw nothing else: its completions end at once, and are finished."""
    model, tok = both(1, "a")
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(32, len(tok), bias=True)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(50.0 * torch.nn.functional.one_hot(torch.tensor(13), len(tok)))
    grpo = SparseGRPO(
        LoadedPolicy(model, tok), FullKV(), lambda completions, **_: [0.0] * len(completions),
        sampling=SamplingParams(num_generations=2, max_completion_length=9),
    )  # fmt: skip
    grpo.configure_model()
    rollout = grpo.generator.generate([{"prompt": "01"}]).rollout
    assert rollout.completion_ids == [[13], [13]]
    assert rollout.finished.tolist() == [True, True]


@pytest.mark.parametrize("ends", [999, "x", [1, 999], [1.5], -1, True])
def test_a_model_end_that_cannot_be_drawn_is_named(ends: Any) -> None:
    policy, tok = both(1, "a")
    policy.generation_config.eos_token_id = ends
    if ends is True:  # transformers' own numbers are whole ones
        assert default_end_token_ids(policy, tok) == [1, 13]
        return
    with pytest.raises(UserError, match=r"eos_token_id of the model's generation_config holds .* can never draw"):
        RolloutSampler(policy, tokenizer=tok)


# ---------------------------------------------------------------- the rest of generation_config.json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = both(1, "<eos>")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"cache_implementation": 7}', "\x00"])
def test_a_generation_config_that_cannot_be_read_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"has a generation_config\.json that cannot be read \(.*\)\. Repair or remove"):
        PretrainedPolicy(str(folder)).load()


def test_a_folder_without_one_is_loaded(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert default_end_token_ids(*PretrainedPolicy(str(folder)).load()) == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [5, 6]), ("begin_suppress_tokens", [5]), ("forced_eos_token_id", 1),
        ("forced_bos_token_id", 3), ("min_new_tokens", 4), ("min_length", 4), ("bad_words_ids", [[5]]),
        ("no_repeat_ngram_size", 3), ("stop_strings", ["0"]), ("sequence_bias", [[[5], -10.0]]),
        ("exponential_decay_length_penalty", [5, 1.2]),
    ],
)  # fmt: skip
def test_what_rollouts_do_not_follow_is_named(folder: Path, name: str, value: Any) -> None:
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(stored | {name: value}))
    policy, tok = PretrainedPolicy(str(folder)).load()
    (text,) = said(lambda: RolloutSampler(policy, tokenizer=tok), "generation_config: rollouts draw without")
    assert text.startswith(f"{name} of the model's generation_config: ")
    setting = "min_completion_length" if name.startswith("min_") else name
    assert (f"{name} is sampling.{setting} here" in text) == hasattr(SamplingParams, setting)


def test_recommended_settings_of_drawing_need_no_word(folder: Path) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=1
    )
    config.save_pretrained(folder)
    policy, tok = PretrainedPolicy(str(folder)).load()
    assert not said(lambda: RolloutSampler(policy, tokenizer=tok))


# ---------------------------------------------------------------- stop strings


CHARACTERS = character_tokenizer()


def sentencepiece(decoder: Any) -> PreTrainedTokenizerFast:
    """Words that begin with a space, pieces that do not, and bytes of other characters."""
    pieces = ["<s>", "<unk>", "▁yes", "▁no", "s", ".", "▁", "x", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
DECODERS = {"llama": LLAMA, "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])}


def find(tokenizer: Any, strings: list[str], prompt: list[str], completion: list[str], fresh: int = 0) -> int | None:
    """The completion token that ends it, the host looking once at the end, and the same token by token."""
    ids = tokenizer.convert_tokens_to_ids([*prompt, *completion])
    assert tokenizer.unk_token_id not in ids
    start, stop = len(prompt), StopStrings(strings, tokenizer)

    def look(fresh: int, last: int) -> int | None:
        first = stop.first(start, fresh)
        return stop.find(ids[first : last + 1], first, start, fresh)

    found = look(start + fresh, len(ids) - 1)
    looked, one_by_one = start + fresh, None
    for last in range(start, len(ids)):
        one_by_one = look(max(looked, start + fresh), last)
        looked = max(last + 1, start + fresh)
        if one_by_one is not None:
            break
    assert found == one_by_one
    return None if found is None else found - start


def test_a_string_of_the_prompt_is_not_looked_for_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the text that is decoded around the newest tokens, as many as there are."""
    tokenizer, decoded = sentencepiece(LLAMA), list[int]()
    decode = StopStrings._decode
    monkeypatch.setattr(StopStrings, "_decode", lambda self, ids: (decoded.append(len(ids)), decode(self, ids))[1])
    stop, ids = StopStrings(["yes"], tokenizer), tokenizer.convert_tokens_to_ids(["▁yes", *["x"] * 40])
    decoded.clear()
    assert stop.find(ids, 0, 1, 1) is None
    assert len(decoded) <= 4


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", "▁no"], ["▁no", "s"], ["x"] * 20])
def test_a_leading_space_is_seen_at_the_start_of_a_completion(kind: str, prompt: list[str]) -> None:
    tokenizer = sentencepiece(DECODERS[kind])
    assert tokenizer.decode([2]) == "yes"  # the space is swallowed
    assert find(tokenizer, [" yes"], prompt, ["▁yes", "."]) == 0
    assert find(tokenizer, [" yes"], prompt, ["x", "▁yes", "."]) == 1
    assert find(tokenizer, ["yes"], prompt, ["▁yes"]) == 0
    assert find(tokenizer, ["  yes"], prompt, ["▁yes", "▁", "▁yes"]) == 2
    assert find(tokenizer, [" yess"], prompt, ["▁yes", "s"]) == 1


@pytest.mark.parametrize("kind", DECODERS)
def test_a_string_must_begin_in_the_completion(kind: str) -> None:
    tokenizer = sentencepiece(DECODERS[kind])
    assert find(tokenizer, ["no."], ["<s>", "▁no"], [".", "x"]) is None
    assert find(tokenizer, ["no", "o."], ["▁no"], [".", "x", "▁no", "."]) == 2
    assert find(tokenizer, ["x"], ["x", "x"], [".", "x"]) == 1


@pytest.mark.parametrize("kind", DECODERS)
def test_characters_of_several_tokens(kind: str) -> None:
    tokenizer, umlaut = sentencepiece(DECODERS[kind]), ["<0xC3>", "<0xBC>"]
    assert find(tokenizer, ["ü"], ["x"], [".", *umlaut, "."]) == 2
    assert find(tokenizer, ["ü"], ["x"], [".", *umlaut, "."], fresh=2) == 2  # half of it was there before
    assert find(tokenizer, ["ü"], ["x"], [*umlaut, ".", *umlaut], fresh=2) == 4


def test_what_was_complete_before_the_minimum_does_not_count() -> None:
    def at(string: str, text: str, minimum: int) -> int | None:
        return find(CHARACTERS, [string], list("?"), list(text), minimum)

    assert [at("ab", "ab.ab.ab.", minimum) for minimum in range(9)] == [1, 1, 4, 4, 4, 7, 7, 7, None]
    assert [at("aa", "aaaa", minimum) for minimum in range(4)] == [1, 1, 2, 3]  # occurrences may overlap
    assert at("ab", "xxab", 4) is None
    assert at("ab", "x" * 30 + "ab" + "x" * 30 + "ab", 33) == 63


@pytest.mark.parametrize("check_every", [1, 8])
def test_rollouts_hold_stop_strings_back(check_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As end tokens are: the first token that may end a completion comes after ``min_completion_length`` others."""
    monkeypatch.setattr(CHECK_EVERY, {"cpu": check_every})
    policy = tiny_model(initializer_range=0.05, vocab_size=len(CHARACTERS), eos_token_id=None)
    sampler = RolloutSampler(policy, SnapKV(budget=14, buffer=5, num_sinks=2, window=4), tokenizer=CHARACTERS)
    prompts, stops = [[20, 21], [30]], tuple("abcdefgh")
    given: dict[str, Any] = {"num_generations": 3, "max_completion_length": 60, "seed": 3}
    whole = sampler.generate(prompts, SamplingParams(**given, min_completion_length=25))
    cut = sampler.generate(prompts, SamplingParams(**given, min_completion_length=25, stop_strings=stops))
    soon = sampler.generate(prompts, SamplingParams(**given, stop_strings=stops))
    assert int(soon.completion_lengths.min()) < 25, "nothing was held back"
    for row in range(6):
        texts = [CHARACTERS.decode([token]) for token in whole.sequences[row][whole.completion_mask[row]].tolist()]
        stopping = [any(stop in text for stop in stops) for text in texts]  # special tokens are several letters
        want = next((i + 1 for i, stops_here in enumerate(stopping) if i >= 25 and stops_here), 60)
        length, prompt = int(cut.completion_lengths[row]), int(cut.prompt_lengths[row])
        assert length == want
        assert bool(cut.finished[row]) == stopping[want - 1]
        assert torch.equal(cut.sequences[row, : prompt + length], whole.sequences[row, : prompt + length])
