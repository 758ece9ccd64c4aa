r"""Boxes within ``<think>``: none counts unless asked for, wherever it stands and whoever wrote the marks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exact_answers import MathChecker, extract_answer, extract_boxed, verify
from exact_answers.thoughts import MARKS, without_thoughts

BOXES = [  # completion, its answer, its answer if thoughts count
    (r"\boxed{6}", "6", "6"),
    (r"I think: \boxed{6}", "6", "6"),
    (r"<think>\boxed{5}</think>\boxed{6}", "6", "6"),
    (r"\boxed{6}<think>\boxed{5}", "6", "5"),
    (r"\boxed{6}<think>\boxed{5}</think>", "6", "5"),
    (r"\boxed{6}<think>\boxed{6} ", "6", "6"),
    (r"\boxed{6}<think>maybe</think> ", "6", "6"),
    (r"<think>\boxed{5}</think>", None, "5"),
    (r"<think>\boxed{5}", None, "5"),
    (r"<think>\boxed{5}</think>The answer is 6", None, "5"),
    (r"Is it \boxed{5}?</think>So \boxed{6}.", "6", "6"),  # the template wrote <think>
    (r"Is it \boxed{5}?</think>So it is not.", None, "5"),
    (r"\boxed{5}</think>", None, "5"),
    (r"<think>\boxed{4}</think>\boxed{5}</think>\boxed{6}", "6", "6"),  # its thought held a thought
    (r"<think>a</think>\boxed{6}<think>\boxed{5}</think>.", "6", "5"),
    (r"<think>a<think>\boxed{5}</think>\boxed{6}", "6", "6"),
    (r"\bo<think></think>xed{5}", None, None),
    (r"<think>\boxed{5</think>\boxed{6}", "6", "6"),
    (r"<think>\boxed{5}</think>\boxed{", None, None),
    *((rf"{begin}\boxed{{5}}{end}\boxed{{6}}{begin}\boxed{{7}}", "6", "7") for begin, end in MARKS.items()),
]


@pytest.mark.parametrize(("completion", "said", "anywhere"), BOXES)
def test_boxes_in_thoughts(completion: str, said: str | None, anywhere: str | None) -> None:
    assert extract_boxed(completion) == said
    assert extract_boxed(completion, boxes_in_thoughts=True) == anywhere
    for gold in ("4", "5", "6", "7"):
        assert verify(completion, gold) is (said == gold)
        asked = MathChecker(boxes_in_thoughts=True)
        assert asked.check([completion], [gold]) == [anywhere == gold]
        assert asked.take_counters()["no_box"] == (anywhere is None)


def test_what_a_thought_says_is_no_answer_either() -> None:
    completion = "<think>The answer is 5.</think>Hence the answer is 6."
    assert (extract_answer(completion), extract_answer(completion.partition("Hence")[0])) == ("6", None)
    assert extract_answer("<think>The answer is 5.", boxes_in_thoughts=True) == "5"
    texts = [r"\boxed{2}<think>\boxed{1+1}", "<think>The answer is 2."]
    assert MathChecker().check_both(texts, ["2", "2"]) == {"strict": [True, False], "lenient": [True, False]}
    asked = MathChecker(boxes_in_thoughts=True)
    assert asked.check_both(texts, ["2", "2"]) == {"strict": [False, False], "lenient": [True, True]}


def test_a_long_thought_does_not_hide_the_answer() -> None:
    assert extract_boxed(r"\boxed{6}<think>" + "x" * 20_000) == "6"
    assert extract_boxed("x" * 20_000 + r"</think>\boxed{6}") == "6"


@given(st.lists(st.sampled_from(["a", "<think>", "</think>", r"\boxed{1}", " "]), max_size=12).map("".join))
def test_without_thoughts_against_a_walk(text: str) -> None:
    said, is_thought = "", False
    rest = text
    while rest:
        if rest.startswith("<think>"):
            rest, is_thought, said = rest[7:], True, said + " "
        elif rest.startswith("</think>"):
            rest, is_thought, said = rest[8:], False, said if is_thought else ""
        else:
            rest, said = rest[1:], said if is_thought else said + rest[0]
    assert without_thoughts(text).split() == said.split()


@pytest.mark.parametrize("text", ["<think>", "</think>", "<think></think>", "<thin", r"<think>\boxed{5}</think>"])
def test_many_thoughts_take_no_time(text: str) -> None:
    start = time.process_time()
    extract_boxed(text * 100_000)
    assert time.process_time() - start < 2.0
