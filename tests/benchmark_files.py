"""Small files in the formats, and with the defects, of the seven published benchmarks and GSM8K's training part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k_train.jsonl": [{"question": f"What is {n}+{n}?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(4)],
    "gsm8k_test.jsonl": [
        {"question": "A dozen?", "answer": "It is 12.\n#### 12"},
        {"question": "Two thousand?", "answer": "#### not yet\n#### 2,125"},
    ],
    "math500.jsonl": [
        {"problem": "Half?", "solution": r"\boxed{\frac{1}{2}}", "answer": r"\frac{1}{2}", "level": 1},
        {"problem": "In base 8?", "solution": "", "answer": "52_8", "level": 2},
    ],
    "gaokao2023en.jsonl": [
        {"question": "Which set?", "lang": "en", "answer": r"$\{2,3,5\}$"},
        {"question": "No gold?", "lang": "en", "answer": ""},
        {"question": "With a tail?", "lang": "en", "answer": "$145$solution:"},
    ],
    "minerva_math.jsonl": [
        {"problem": "How large?", "solution": r"\boxed{1} no: \[ s=\boxed{4.5e33} \mathrm{~cm} \]", "idx": 0},
        {"problem": "Which angle?", "solution": r"\boxed{np.arcsin(10/13)}", "idx": 1},
    ],
    "olympiadbench.jsonl": [
        {"id": 1606, "context": None, "question": "How many?", "solution": ["2"], "final_answer": ["2"]},
        {"id": 1607, "context": None, "question": "Which?", "solution": ["x"], "final_answer": "['$69$,$84$']"},
    ],
    "aime24.jsonl": [{"id": 60, "problem": "Minutes?", "solution": "", "answer": "025", "question": "Minutes?"}],
    "amc23.jsonl": [{"id": 0, "problem": "Miles?", "answer": 27.0, "question": "Miles?"}],
}  # fmt: skip
GOLDS = {
    "gsm8k": ["12", "2125"],
    "math500": [r"\frac{1}{2}", "52_8"],
    "gaokao2023en": [r"\{2,3,5\}", "145"],
    "minerva_math": ["4.5e33", "np.arcsin(10/13)"],
    "olympiadbench": ["2", "69,84"],
    "aime24": ["025"],
    "amc23": ["27"],
}


def write_benchmarks(folder: Path) -> Path:
    """All files, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
