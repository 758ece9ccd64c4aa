"""examples.word_problems: what a text says has the answer beside it, and held-out problems are of other templates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import yaml

from benchmarks import ROOT
from examples.word_problems import HELD_OUT, TRAINING, Draws, Template, problems, texts, write
from sparse_rl_lightning.data import JsonlPrompts
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards import boxed_math_reward

SOLVED: dict[str, Callable[..., float]] = {  # of the numbers in the order of the text
    "change": lambda first, price, second, other, paid: paid - first * price - second * other,
    "boxes": lambda count, size, gift, friends: count * size - gift * friends,
    "savings": lambda weekly, weeks, gift, price: weekly * weeks + gift - price,
    "pages": lambda total, slow, days, fast, late: total - slow * days - fast * late,
    "wages": lambda hours, rate, extra, more, cost: hours * rate + extra * more - cost,
    "shared": lambda first, second, lost, people: (first + second - lost) / people,
    "twice": lambda count, factor, more: count + count * factor + more,
    "rows": lambda lines, tulips, share, sold: lines * (1 - 1 / share) * tulips - sold,
    "trip": lambda total, hours, slow, late, fast: total - hours * slow - late * fast,
    "trays": lambda count, each, eaten, size: (count * each - eaten) / size,
    "farm": lambda daily, eaten, price: 7 * (daily - eaten) / 12 * price,
    "bus": lambda start, off, on, again: start - off + on + 2 * on - again,
    "parking": lambda cars, four, bikes, two, trucks, six: cars * four + bikes * two + trucks * six,
    "tank": lambda start, fill, drain, minutes: start + fill * minutes - drain * minutes,
    "tickets": lambda adults, price, children, less, cost: adults * price + children * (price - less) - cost,
}


@pytest.mark.parametrize("template", [*TRAINING, *HELD_OUT], ids=lambda template: template.__name__)
def test_the_text_has_the_answer(template: Template) -> None:
    random, solve = Random(5), SOLVED[template.__name__]  # type: ignore[attr-defined]
    for _ in range(300):
        text, answer = template(Draws(random))
        assert solve(*map(int, re.findall(r"\d+", text))) == pytest.approx(answer), text
        assert answer > 0
        assert min(map(int, re.findall(r"\d+", text))) > 0


def test_the_files_are_read_and_judged_as_gsm8k_is_and_held_out_problems_are_of_other_templates(tmp_path: Path) -> None:
    """By the data module of configs/math.yaml, with nothing but its paths changed."""
    files = texts(train=40, held_out=20, seed=3)
    for _ in range(2):
        write(tmp_path, files)
    with pytest.raises(UserError, match=r"train\.jsonl has other problems: give another folder"):
        write(tmp_path, texts(train=41, held_out=20, seed=3))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
    with pytest.raises(UserError, match="ask for fewer than 9"):
        problems([lambda draws: (f"Is it {draws.number(1, 3)}?", 1)], 9, "3")
    arguments = yaml.safe_load((ROOT / "configs" / "math.yaml").read_text(encoding="utf-8"))["data"]["init_args"]
    paths = {name: str(tmp_path / Path(arguments[name]).name) for name in ("path", "val_path")}
    data = JsonlPrompts(**arguments | paths)
    rows = [*data.train_rows(), *data.val_rows()]
    assert [row["question"] for row in rows[:40]] == [row["question"] for row in problems(TRAINING, 40, "3/train")]
    assert len(rows) == len({row["question"] for row in rows}) == 60
    assert {row["question"] for row in problems(TRAINING, 40, "4/train")}.isdisjoint(row["question"] for row in rows)
    prompts, golds = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    for change, reward in ((0, 1.0), (1, 0.0)):
        answers = [rf"So it is \boxed{{{int(gold) + change}}}." for gold in golds]
        told = {"prompts": prompts, "completions": answers, "completion_ids": answers, "answer": golds}
        assert boxed_math_reward(**told) == [reward] * 60
    assert not {*TRAINING} & {*HELD_OUT}
