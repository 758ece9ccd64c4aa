"""Stop strings: held back by the minimum, and found where a decoder swallows the first space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.finished import StopStrings
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

CHARACTERS = character_tokenizer()
LOOK = "sparse_rl_lightning.rollout.engine.scheduler.CHECK_EVERY"


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
    monkeypatch.setattr(LOOK, {"cpu": check_every})
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
