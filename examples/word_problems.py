"""Word problems of two to four steps with whole numbers, written as files in the form of GSM8K.

    python -m examples.word_problems FOLDER [--train 8000] [--held-out 256] [--seed 0]

A template is a function that draws its numbers and returns a text and its answer. Those of ``held_out.jsonl`` are of
templates that ``train.jsonl`` has none of. ``configs/math.yaml`` trains on them, and on GSM8K or a file of your own by
``--data.path`` and ``--data.val_path``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole

NAMES = (
    "Ada Amir Ben Bella Carlos Chen Dana Elif Emma Farid Grace Hana Igor Inga Jonas Kofi Lena Liam Maya Mei Nadia Noah "
    "Olga Omar Pia Priya Quinn Rosa Ruth Sam Sofia Tariq Tomas Uma Vera Wei Yara Yuki Zane Zoe"
).split()
THINGS = (
    "apples beads books candles cards coins eggs flowers marbles muffins pears pencils shells stamps stickers".split()
)
TRIES = 1000  # of a template in a row that may bring nothing new


class Draws:
    """The numbers and words of one problem."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.name, self.friend = random.sample(NAMES, 2)
        self.thing, self.others = random.sample(THINGS, 2)

    def number(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(least, most)

    def numbers(self, count: int, least: int, most: int) -> list[int]:
        """Several, each by itself."""
        return [self.number(least, most) for _ in range(count)]


Template = Callable[[Draws], tuple[str, int]]

# ---------------------------------------------------------------- of training


def change(d: Draws) -> tuple[str, int]:
    """Two purchases and what is left of a note."""
    first, second, price, other = d.numbers(4, 3, 12)
    spent = first * price + second * other
    paid = (spent // 50 + d.number(1, 2)) * 50
    return (
        f"{d.name} buys {first} {d.thing} for ${price} each and {second} {d.others} for ${other} each, and pays with "
        f"${paid}. How many dollars of change does {d.name} get?"
    ), paid - spent


def boxes(d: Draws) -> tuple[str, int]:
    """Packed, given away, left."""
    count, size, friends, gift = d.number(4, 12), d.number(12, 30), d.number(2, 5), d.number(3, 9)
    return (
        f"{d.name} has {count} boxes with {size} {d.thing} in each. {d.name} gives {gift} {d.thing} to each of "
        f"{friends} friends. How many {d.thing} are left?"
    ), count * size - friends * gift


def savings(d: Draws) -> tuple[str, int]:
    """Weekly savings, a gift, a purchase."""
    weekly, weeks, gift = d.number(8, 30), d.number(4, 12), d.number(10, 60)
    price = d.number(20, weekly * weeks)
    return (
        f"{d.name} saves ${weekly} a week for {weeks} weeks. Then an uncle adds ${gift}, and {d.name} buys a bag for "
        f"${price}. How many dollars does {d.name} have now?"
    ), weekly * weeks + gift - price


def pages(d: Draws) -> tuple[str, int]:
    """Reading at two speeds until a book ends."""
    slow, fast, days, late, rest = d.number(8, 25), d.number(26, 45), d.number(3, 8), d.number(2, 6), d.number(10, 90)
    total = slow * days + fast * late + rest
    return (
        f"A book has {total} pages. {d.name} reads {slow} pages a day for {days} days and then {fast} pages a day for "
        f"{late} days. How many pages are left to read?"
    ), rest


def wages(d: Draws) -> tuple[str, int]:
    """Hours, overtime at another rate, and a cost."""
    hours, rate, extra = d.number(20, 40), d.number(9, 18), d.number(2, 9)
    cost = d.number(15, 90)
    return (
        f"{d.name} works {hours} hours for ${rate} an hour and {extra} more hours for ${rate + 5} an hour. After "
        f"paying ${cost} for the bus, how many dollars are left?"
    ), hours * rate + extra * (rate + 5) - cost


def shared(d: Draws) -> tuple[str, int]:
    """Two collections, some lost, the rest in equal shares."""
    people, each, lost = d.number(3, 8), d.number(6, 25), d.number(3, 15)
    first = d.number(10, people * each)
    return (
        f"{d.name} finds {first} {d.thing} and {d.friend} finds {people * each + lost - first}. They lose {lost} of "
        f"them and share the rest equally among {people} children. How many {d.thing} does each child get?"
    ), each


def twice(d: Draws) -> tuple[str, int]:
    """A multiple of another's, and both together."""
    count, factor, more = d.number(12, 45), d.number(2, 5), d.number(5, 30)
    return (
        f"{d.name} has {count} {d.thing}. {d.friend} has {factor} times as many, and {more} more. How many {d.thing} "
        "do they have together?"
    ), count + factor * count + more


def rows(d: Draws) -> tuple[str, int]:
    """Planted in rows, a part of which does not grow."""
    share, lines, per_line, sold = d.number(2, 5), d.number(4, 12), d.number(5, 15), d.number(5, 15)
    grown = (share - 1) * lines * per_line
    return (
        f"{d.name} plants {share * lines} rows of {per_line} tulips. One in {share} rows does not grow. Of the tulips "
        f"that grow, {d.name} sells {sold}. How many tulips are left?"
    ), grown - sold


def trip(d: Draws) -> tuple[str, int]:
    """Two speeds, and what is left of a way."""
    slow, fast, hours, late, left = (
        d.number(20, 50),
        d.number(55, 90),
        d.number(2, 5),
        d.number(2, 4),
        d.number(15, 120),
    )
    return (
        f"A town is {slow * hours + fast * late + left} km away. {d.name} drives {hours} hours at {slow} km an hour "
        f"and {late} hours at {fast} km an hour. How many km remain?"
    ), left


def trays(d: Draws) -> tuple[str, int]:
    """Baked, eaten, and packed into bags."""
    size, bags, eaten = d.number(4, 12), d.number(5, 18), d.number(3, 11)
    count = d.number(2, 6)
    total = size * bags + eaten
    spare = -(-total // count) * count - total
    return (
        f"{d.name} bakes {count} trays of {(total + spare) // count} rolls each. {eaten + spare} rolls are eaten, and "
        f"the rest is packed into bags of {size}. How many bags are filled?"
    ), bags


# ---------------------------------------------------------------- held out


def farm(d: Draws) -> tuple[str, int]:
    """Eggs of a week without those of breakfasts, by the price of a dozen."""
    dozens, breakfast, price = d.number(4, 12), d.number(2, 6), d.number(3, 7)
    daily = 12 * dozens + breakfast
    return (
        f"The hens of {d.name} lay {daily} eggs a day. Each morning {breakfast} are eaten, and the others are sold for "
        f"${price} a dozen. How many dollars does {d.name} earn in a week?"
    ), 7 * dozens * price


def bus(d: Draws) -> tuple[str, int]:
    """Passengers who get on and off at three stops."""
    start, off, on, again = d.number(15, 40), d.number(3, 12), d.number(5, 20), d.number(2, 9)
    return (
        f"A bus leaves with {start} passengers. At the first stop {off} get off and {on} get on. At the second stop "
        f"twice as many get on as at the first, and {again} get off. How many passengers are on the bus now?"
    ), start - off + on + 2 * on - again


def parking(d: Draws) -> tuple[str, int]:
    """Wheels of three kinds of vehicles."""
    cars, bikes, trucks = d.number(6, 30), d.number(4, 20), d.number(2, 9)
    return (
        f"On a parking lot stand {cars} cars with 4 wheels, {bikes} bicycles with 2 wheels and {trucks} trucks with 6 "
        "wheels. How many wheels are there altogether?"
    ), 4 * cars + 2 * bikes + 6 * trucks


def tank(d: Draws) -> tuple[str, int]:
    """Filled and emptied at the same time."""
    fill, drain, minutes, start = d.number(12, 30), d.number(3, 10), d.number(5, 20), d.number(20, 100)
    return (
        f"There are {start} liters in a tank. Every minute {fill} liters flow in and {drain} liters flow out. How many "
        f"liters are in it after {minutes} minutes?"
    ), start + (fill - drain) * minutes


def tickets(d: Draws) -> tuple[str, int]:
    """Adults, children at a lower price, and the cost of the hall."""
    adults, children, price, less = d.number(20, 60), d.number(10, 50), d.number(8, 15), d.number(2, 5)
    cost = d.number(50, 150)
    return (
        f"For a play {adults} adults pay ${price} each, and {children} children pay ${less} less each. The hall "
        f"costs ${cost}. How many dollars remain?"
    ), adults * price + children * (price - less) - cost


TRAINING: Sequence[Template] = (change, boxes, savings, pages, wages, shared, twice, rows, trip, trays)
HELD_OUT: Sequence[Template] = (farm, bus, parking, tank, tickets)


def problems(templates: Sequence[Template], count: int, seed: str) -> list[dict[str, str]]:
    """So many different problems, as many of each template; columns ``question`` and ``answer``, as in GSM8K."""
    random, answers = Random(seed), dict[str, int]()
    for number in range(count):
        draws = (templates[number % len(templates)](Draws(random)) for _ in range(TRIES))
        new = next((pair for pair in draws if pair[0] not in answers), None)
        if new is None:
            raise UserError(f"There are few problems beside these {len(answers)}: ask for fewer than {count}.")
        answers.update([new])
    return [{"question": question, "answer": f"#### {answer}"} for question, answer in answers.items()]


def texts(train: int, held_out: int, seed: int) -> dict[str, str]:
    """Both files by their names."""
    rows = {
        "train": problems(TRAINING, train, f"{seed}/train"),
        "held_out": problems(HELD_OUT, held_out, f"{seed}/held_out"),
    }
    return {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in some) for name, some in rows.items()}


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write them, over nothing that says something else."""
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} has other problems: give another folder, or move it away.")
    for name, text in files.items():
        write_whole(folder / name, text)


def main() -> None:
    """Write them where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("--train", 8000), ("--held-out", 256), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    try:
        write(args.folder, texts(args.train, args.held_out, args.seed))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
