"""Runs ``sparse-rl benchmark`` over every compressor on the real model.

    python -m benchmarks.methods --data gsm8k_test.jsonl [--parts all budgets] [--save benchmarks/results]

The policy is SmolLM2-135M-Instruct (``make real-model``), the prompts are questions of GSM8K (a JSONL with a column
``question``) in its chat template, the completions the model's own, drawn under each cache at temperature 1 up to 512
tokens, and compared in float32. Parts:

    all         every method at 96 tokens and a buffer of 32
    budgets     chance and the first three of the best six at 64, 128 and 192
    others      the other three at these budgets
    sinks       chance and the best six at 128, without sinks
    cool        the same at 128, at temperature 0.7
    open, kept  the same at 192 with prompts of at most 96 tokens, open to eviction and protected
    newer       what the other parts' kept tables lack, between SnapKV and chance, at 96 and 192 with these prompts

``--save`` keeps the tables of these parts in methods.json, each with its machine, beside other parts that are there.
Cells that are finished in the folder of a part are not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer

from benchmarks import REAL, ROOT
from benchmarks.common.pages import machine
from sparse_rl_lightning.cli.benchmark import main as benchmark
from sparse_rl_lightning.data.files import read_table
from sparse_rl_lightning.files import write_whole

SIZES = {"buffer": 32, "num_sinks": 4, "window": 8}
PLAIN = (
    "RandomEviction", "SnapKV", "RKV", "TOVA", "H2O", "StreamingLLM", "KNorm", "KeyDiff", "CUR", "ExpectedAttention",
    "QFilters", "TriAttention", "LearnedScore", "RandomAttention", "VaSE",
)  # fmt: skip
NEWER = (
    "SnapKV", "SnapKV, defensive", "Smoothed, SnapKV", "VaSE", "VaSE, window 64", "RandomAttention",
    "RandomAttention, window 64", "RandomEviction",
)  # fmt: skip
BEST = ("RandomEviction", "SnapKV", "RKV", "TOVA", "H2O, by age", "ExpectedAttention", "StreamingLLM")
"""Chance, and the six that the other parts measure."""
LENGTH_OF_KEPT = 96  # tokens of a prompt, so that the budget is twice as large
PARTS: dict[str, list[str]] = {
    "all": ["--budgets", "96"],
    "budgets": ["--budgets", "64", "128", "192"],
    "others": ["--budgets", "64", "128", "192"],
    "sinks": ["--budgets", "128", "--num_sinks", "0"],
    "cool": ["--budgets", "128", "--temperature", "0.7"],
    "open": ["--budgets", "192"],
    "kept": ["--budgets", "192", "--protect_prompt"],
    "newer": ["--budgets", "96", "192"],
}
SHORT = ("open", "kept", "newer")
"""Parts whose prompts have at most 96 tokens."""


def with_arguments(sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Methods that are no class with the common sizes alone, as in a configuration."""
    common = {"budget": 96, **sizes}

    def own(name: str, **more: Any) -> dict[str, Any]:
        return {"class_path": name, "init_args": {**common, **more}}

    def around(name: str, **arguments: Any) -> dict[str, Any]:
        return {"class_path": name, "init_args": arguments}

    return {
        "RandomEviction, drawn anew": own("RandomEviction", redraw=True),
        "RandomEviction, window 32": own("RandomEviction", window=32),
        "SnapKV, defensive": own("SnapKV", aggregation="max_clamped", variant="original", pooling="avg"),
        "H2O, by age": own("H2O", age_normalized=True),
        "LagKV": own("LagKV", lag_size=31),  # a quarter of the slot: the default is larger than it
        "SnapKV, Pyramid": own("SnapKV", budget_rule=around("Pyramid", beta=2)),
        "SnapKV, Adaptive": own("SnapKV", budget_rule=around("Adaptive")),
        "Smoothed, SnapKV": around("Smoothed", compressor=own("SnapKV")),
        "Combined": around("Combined", compressors=[own("SnapKV"), own("KeyDiff")]),
        "VaSE, window 64": own("VaSE", window=64),  # as published
        "RandomAttention, window 64": own("RandomAttention", window=64),
        "Combined, one set per layer": around("Combined", compressors=[own("SnapKV")], across_heads="max"),
    }


def methods(part: str, folder: Path) -> list[str]:
    """The methods of a part as the command takes them; files for those with arguments are written into the folder."""
    sizes = SIZES | ({"num_sinks": 0} if part == "sinks" else {}) | ({"protect_prompt": True} if part == "kept" else {})
    variants = with_arguments(sizes)
    named = []
    names = {
        "all": [*PLAIN, *(name for name in variants if "window 64" not in name)],
        "budgets": BEST[:4],
        "others": BEST[4:],
        "newer": NEWER,
    }
    for name in names.get(part, BEST):
        path = folder / f"{name}.yaml"
        if name in variants:
            write_whole(path, yaml.safe_dump(variants[name]))
        named.append(str(path) if name in variants else name)
    return named


def questions(data: Path, policy: Path, longest: int | None) -> list[dict[str, str]]:
    """Questions of the file as prompts, those alone whose chat prompt has at most ``longest`` tokens."""
    prompts = [row["question"] for _, row in read_table(str(data))]
    if longest is not None:
        tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)

        def length(text: str) -> int:
            messages = [{"role": "user", "content": text}]
            return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

        prompts = [text for text in prompts if length(text) <= longest]
    return [{"prompt": text} for text in prompts]


def main(args: list[str] | None = None) -> None:
    """Run the command for every part, and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with a column question, such as GSM8K's test")
    parser.add_argument("--policy", type=Path, default=REAL)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "methods", help="folder of the runs")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--problems", default="64")
    parser.add_argument("--max_completion_length", default="512")
    parser.add_argument("--remark", default="", help="a sentence about the machine for the pages")
    parser.add_argument("--save", type=Path, help="folder of methods.json")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    for part in options.parts:
        folder = options.runs / part
        rows = questions(options.data, options.policy, LENGTH_OF_KEPT if part in SHORT else None)
        lines = [json.dumps(row) + "\n" for row in rows[: int(options.problems)]]
        write_whole(folder / "questions.jsonl", "".join(lines))
        usual = {**SIZES, "timed": 0, "dtype": "float32"}
        arguments = [
            *(text for name, value in usual.items() for text in (f"--{name}", str(value))), *PARTS[part], "--as_chat",
            "--policy", str(options.policy), "--data", str(folder / "questions.jsonl"), "--problems", options.problems,
            "--max_completion_length", options.max_completion_length, "--output", str(folder),
        ]  # fmt: skip
        benchmark([*methods(part, folder), *arguments])
        if options.save:
            where = machine("cuda" if torch.cuda.is_available() else "cpu")
            save_tables(options.runs, [part], options.save, options.policy.name, f"{where}. {options.remark}".strip())


def save_tables(runs: Path, parts: list[str], folder: Path, policy: str, measured_on: str) -> None:
    """Keep the tables of these parts, as far as they were begun, beside those of other parts that the file has."""
    file = folder / "methods.json"
    kept = json.loads(file.read_text("utf-8"))["parts"] if file.exists() else {}
    for part in parts:
        if (runs / part / "table.json").exists():
            kept[part] = {"machine": measured_on, **json.loads((runs / part / "table.json").read_text("utf-8"))}
    ordered = {part: kept[part] for part in PARTS if part in kept}
    write_whole(file, json.dumps({"policy": policy, "parts": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
