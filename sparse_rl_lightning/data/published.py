r"""The published files of the paper's seven benchmarks: their names, sizes, hashes, gold answers and defects.

| benchmark | rows | where the gold answer is |
|---|---|---|
| gsm8k | 1319 | behind ``####`` in ``answer``, commas dropped |
| math500 | 500 | ``answer`` |
| gaokao2023en | 385 | ``answer`` without ``$``; rows 167 and 192 are empty, row 107 ends in ``solution:`` |
| minerva_math | 272 | no column: the last ``\boxed{}`` of ``solution``; 58 in e-notation |
| olympiadbench | 675 | ``final_answer``: a list, or a Python list in a string |
| aime24 | 30 | ``answer``, with leading zeros |
| amc23 | 40 | ``answer``, a float |

Rows are counted from 0. The data themselves are not shipped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparse_rl_lightning.data.files import text_or_number
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards.base import cell_text
from sparse_rl_lightning.rewards.math import find_last_box

Record = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """One published file and the hub dataset that holds the same problems."""

    name: str
    file: str
    num_rows: int
    sha256: str
    gold: Callable[[Record], str]
    hub: tuple[str, str | None, str]  # name, configuration, split
    tolerance: float = 0.0  # relative, for numbers that are not integers

    @property
    def is_published(self) -> bool:
        """False for a user's own file."""
        return bool(self.sha256)


def question(record: Record) -> str:
    """The problem of a row, from the column ``question`` or ``problem``."""
    return next((text for name in ("question", "problem") if (text := _text(record, name))), "")


def _text(record: Record, name: str) -> str:
    """A cell as text, empty if there is none."""
    return cell_text(text_or_number(record.get(name), name, f" in {ascii(record)[:200]}"))


def _after_hashes(record: Record) -> str:
    return str(record.get("answer") or "").rpartition("####")[2].replace(",", "").strip()


def _answer(record: Record) -> str:
    value = record.get("answer")
    return _last_box(record) if value is None or value != value else _text(record, "answer").strip()


def _without_dollars(record: Record) -> str:
    return re.sub(r"solution:?\s*$", "", _answer(record).replace("$", "")).strip()


def _last_box(record: Record) -> str:
    solution = _text(record, "solution")
    span = find_last_box(solution)
    return _text(record, "answer").strip() if span is None else solution[span[1] : span[2]].strip()


def _final_answer(record: Record) -> str:
    value = record.get("final_answer")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            return ""
    if value is None:
        return _answer(record)
    answers = value if isinstance(value, (list, tuple)) else [value]
    return ",".join(str(answer) for answer in answers).replace("$", "").strip()


PUBLISHED: dict[str, Published] = {
    benchmark.name: benchmark
    for benchmark in (
        Published(
            "gsm8k", "gsm8k_test.jsonl", 1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            _after_hashes, ("openai/gsm8k", "main", "test"),
        ),
        Published(
            "math500", "math500.jsonl", 500, "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            _answer, ("HuggingFaceH4/MATH-500", None, "test"),
        ),
        Published(
            "gaokao2023en", "gaokao2023en.jsonl", 385,
            "654d8f49bdb86f578c171dbc0dd8f4d9f1bf3d7a7438f60359fda7d643df4951",
            _without_dollars, ("MARIO-Math-Reasoning/Gaokao2023-Math-En", None, "train"),
        ),
        Published(
            "minerva_math", "minerva_math.jsonl", 272,
            "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
            _last_box, ("math-ai/minervamath", None, "test"), tolerance=1e-4,
        ),
        Published(
            "olympiadbench", "olympiadbench.jsonl", 675,
            "bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416",
            _final_answer, ("math-ai/olympiadbench", None, "test"),
        ),
        Published(
            "aime24", "aime24.jsonl", 30, "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
            _answer, ("math-ai/aime24", None, "test"),
        ),
        Published(
            "amc23", "amc23.jsonl", 40, "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
            _answer, ("math-ai/amc23", None, "test"),
        ),
    )
}  # fmt: skip
"""The seven evaluation sets by name, in the paper's order."""

GSM8K_TRAIN = replace(
    PUBLISHED["gsm8k"], name="gsm8k_train", file="gsm8k_train.jsonl", num_rows=7473,
    sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465", hub=("openai/gsm8k", "main", "train"),
)  # fmt: skip
"""The training part of GSM8K, disjoint from its test part."""


def own_benchmark(name: str, path: str) -> Published:
    """A user's own JSONL file, with the columns ``problem`` or ``question``, and ``answer``.

    Raises:
        ValueError: If the name is that of a published one, of the training part of GSM8K, or of the mean over all.
    """
    if name in PUBLISHED or name in (GSM8K_TRAIN.name, "mean"):
        raise UserError(f"own: {name} is the name of a published benchmark or of their mean, choose another name.")
    return Published(name, path, 0, "", _answer, (path, None, "train"))
