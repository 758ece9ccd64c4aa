from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from chat_templates import PUBLISHED
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_rl_lightning.rollout.prompts import _encode_text, encode_prompt, encode_prompts, most_tokens, valid_unicode
from sparse_rl_lightning.testing import character_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def test_text_is_taken_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tokenizer, "1+1=")
    assert tokenizer.decode(ids) == "1+1="
    assert len(ids) == 4


def test_special_tokens_spelt_out_are_read_as_such(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tokenizer, "a<eos>b")
    assert len(ids) == 3
    assert ids[1] == tokenizer.eos_token_id


def test_messages_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tokenizer, MESSAGES)
    assert tokenizer.decode(ids) == "system: Be brief.\nuser: 1+1\nassistant: "
    assert all(isinstance(token, int) for token in ids)


def test_beginning_of_sequence_is_set_once(models_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models_dir / "stories260K")
    bos = tokenizer.bos_token_id
    plain = encode_prompt(tokenizer, "Once upon a time")
    assert plain == tokenizer("Once upon a time")["input_ids"]
    assert encode_prompt(tokenizer, "<s>Once upon a time") == plain
    assert plain.count(bos) == 1
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert encode_prompt(tokenizer, [{"role": "user", "content": "Once"}]).count(bos) == 1


def test_lone_surrogates_do_not_stop_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(encode_prompt(tokenizer, "a\ud800b")) == 3
    assert len(encode_prompt(tokenizer, [{"role": "user", "content": "\ud800"}])) == len("user: ?\nassistant: ")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("plain \u2028 é 😀", "plain \u2028 é 😀"),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ufeffa", "\ufeffa"),
    ],
)
def test_valid_unicode(text: str, valid: str) -> None:
    assert valid_unicode(text) == valid


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty prompt"),
        ([], "empty prompt"),
        ([{"role": "user"}], "role and content"),
        ([{"content": "x"}], "role and content"),
        (["x"], "role and content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "role and content"),
    ],
)
def test_a_bad_prompt_names_its_row(tokenizer: PreTrainedTokenizerFast, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"Prompt 1 of 3: .*{message}"):
        encode_prompts(tokenizer, ["good", prompt, "good"])  # type: ignore[list-item]


def test_messages_without_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, MESSAGES)


def test_a_template_that_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"template refuses .*no system role"):
        encode_prompt(tokenizer, MESSAGES)


def test_several_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_prompts(tokenizer, ["ab", MESSAGES]) == [
        encode_prompt(tokenizer, "ab"),
        encode_prompt(tokenizer, MESSAGES),
    ]


def test_tools_that_the_template_would_leave_out(tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(ValueError, match="does not describe tools"):
        encode_prompt(tokenizer, MESSAGES, {"tools": tools})
    assert encode_prompt(tokenizer, MESSAGES, {"tools": []}) == encode_prompt(tokenizer, MESSAGES)
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"
    assert tokenizer.decode(encode_prompt(tokenizer, MESSAGES, {"tools": tools})) == "look 1+1"


PREFILL = [*MESSAGES, {"role": "assistant", "content": "Let me see.\n<think>"}]


def test_a_last_message_of_the_assistant_is_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tokenizer, PREFILL)
    assert tokenizer.decode(ids) == "system: Be brief.\nuser: 1+1\nassistant: Let me see.\n<think>"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("content", ["Let me see.\n<think>", "The answer is ", "  4 2", "1+1"])
def test_a_prefill_has_the_ids_of_trl(name: str, content: str) -> None:
    trl = pytest.importorskip("trl.data_utils")
    tokenizer = PUBLISHED[name].tokenizer()
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": content}]
    rendered = trl.apply_chat_template({"prompt": messages}, tokenizer)["prompt"]
    ids = encode_prompt(tokenizer, messages)
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).strip().endswith(content.strip())


def test_nothing_to_continue_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="the last message is the assistant's, to be continued, and it is empty"):
        encode_prompt(tokenizer, [*MESSAGES, {"role": "assistant", "content": " \n"}])
    with pytest.raises(ValueError, match="continue_final_message cannot be set: a last message of the assistant is"):
        encode_prompt(tokenizer, MESSAGES, {"continue_final_message": True})


def test_text_parts_are_joined_and_images_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1", "image": None}]
    message = {"role": "user", "content": parts}
    assert encode_prompt(tokenizer, [MESSAGES[0], message]) == encode_prompt(tokenizer, MESSAGES)
    for other in ({"type": "image", "image": "x.png"}, {"type": "text"}, "1", {"text": "1"}):
        with pytest.raises(ValueError, match=r"role and content \(text, or a list of text parts\), got"):
            encode_prompt(tokenizer, [{"role": "user", "content": [*parts, other]}])


# ---------------------------------------------------------------- lengths without encoding

TEXTS = [
    "",
    "a",
    " a",
    "1+1=",
    "  \n\t  ",
    "é漢字🙂\u0301",
    "\ufdfa\ufdfa㎏ﬁ",
    "<s><s> <|im_end|>x",
    "a\ud800",
    "\x00\x7f\u200b",
    "数",
]


def wordpiece() -> PreTrainedTokenizerFast:
    """Compatibility forms make one character of three bytes eighteen."""
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "1": 3}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def unigram() -> PreTrainedTokenizerFast:
    """A space is put in front, and what is unknown falls back to bytes."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    core = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=["<s>"])


MADE = {"characters": character_tokenizer, "wordpiece": wordpiece, "unigram": unigram}


@pytest.mark.parametrize("name", [*PUBLISHED, *MADE, "stories260K"])
def test_no_text_has_more_tokens_than_its_bytes_allow(name: str, models_dir: Path) -> None:
    if name in PUBLISHED:
        tokenizer = PUBLISHED[name].tokenizer()
    else:
        tokenizer = MADE[name]() if name in MADE else AutoTokenizer.from_pretrained(models_dir / name)
    draw = random.Random(0)
    mixed = ["".join(draw.choices("".join(TEXTS), k=draw.randint(1, 40))) for _ in range(300)]
    for text in [*TEXTS, *mixed, "a" * 1000, "🙂" * 200]:
        assert len(_encode_text(tokenizer, valid_unicode(text))) <= most_tokens(tokenizer, text), text
        assert most_tokens(tokenizer, "1+1=" * 100) <= 3 * 402  # not so wide that all would be encoded


def test_what_shows_no_normalizer_is_encoded() -> None:
    class Foreign:
        pass

    assert most_tokens(Foreign(), "a") == math.inf  # type: ignore[arg-type]
