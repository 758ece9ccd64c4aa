"""The story task of examples/: what it pays, and that lists, length and repetition earn nothing."""

from __future__ import annotations

import pytest

from examples.stories import Stories, story_reward

WORDS = ["apple", "castle", "river", "rope", "ship", "queen"]


@pytest.mark.parametrize(
    ("story", "found"),
    [
        ("A red apple lay on the old table. The queen of the castle ate it on a big ship in the end.", 4),
        ("A red apple lay on the old table.", 1),
        ("A red apple lay on the old table. A red apple lay on the old table.", 1),  # repeated
        ("apple, castle, river, rope, ship, queen.", 0),  # a list
        ("Apple. Castle. River. Rope. Ship. Queen.", 0),
        ("A red apple lay on the old table", 0),  # cut off
        ("The apple castle river rope in one long sentence that has many more words than it needs to have.", 0),
        (f"{'So the story goes on and on. ' * 9}A red apple lay on the old table.", 0),  # too late
        ("A pineapple lay there and the castles fell.", 0),  # other words
        ("Apple apple apple apple castle castle castle castle river river river river.", 0),  # the same words
        (f"{'on and on ' * 19}\nA red apple lay on the old table.", 0),
        ("", 0),
    ],
)
def test_words_count_in_whole_sentences_of_the_first_sixty(story: str, found: int) -> None:
    assert story_reward([story], [WORDS]) == [found / 6]


def test_prompts_are_drawn_anew_for_training_and_held_out() -> None:
    data = Stories(num_train=30, num_val=10, seed=4)
    rows, held_out = data.train_rows(), data.val_rows()
    assert rows == Stories(num_train=30, seed=4).train_rows() != Stories(num_train=30, seed=5).train_rows()
    assert not {tuple(row["words"]) for row in rows} & {tuple(row["words"]) for row in held_out}
    assert all(", ".join(row["words"]) in row["prompt"][0]["content"] for row in rows)
