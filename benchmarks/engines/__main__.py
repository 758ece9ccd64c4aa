"""Times the rollout engine on a real model beside the engines that people would use on a CPU.

    python -m benchmarks.engines [--threads 2] [--rounds 3] [--types bfloat16] [--tokens 256 1500] [--save DIR]

Each rival is installed into a virtual environment of its own in ``--work`` (gigabytes, from the package index) and runs
as a process of its own; engines take turns within every round, and who waits is stopped. A step is the time of the
whole call over its new tokens; times are medians over the rounds, ratios medians of the rounds' ratios. Before the
rounds every engine generates once, as many tokens as an eviction needs. Whatever a rival prints is in ``--work``.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import REAL, ROOT
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table, median_ratio, met
from benchmarks.engines.contest import Contender, Engine
from benchmarks.engines.venvs import LLAMACPP, OPENVINO, OWN, VLLM, llamacpp_model, openvino_model
from benchmarks.rollout.policies import random_prompts

RIVALS = {"openvino": OPENVINO, "vllm": VLLM, "llamacpp": LLAMACPP}
NAMES = ["transformers", *RIVALS]
SEQUENCES, PROMPT, BUDGET, BUFFER = 16, 64, 128, 32
FULL, SPARSE = "own engine, full cache", "own engine, R-KV 128 + 32"
OPENVINO_FULL, OPENVINO_SPARSE = "OpenVINO GenAI", "OpenVINO GenAI, evicting to 160"
EVICTING = (SPARSE, OPENVINO_SPARSE)
GOALS = {("bfloat16", 256): 1.4, ("bfloat16", 1500): 1.8, ("float32", 256): 1.4}
SPARSE_GOAL, LONG_GOAL = 1.8, 2.5
TOKENS = {"bfloat16": [256, 1500], "float32": [256]}
LONG = 1500  # tokens from which an evicting cache is held against the strongest full one
HEADER = ("type", "new tokens", "engine", "ms per step", "tokens/s", "strongest rival", "times as fast", "goal", "met")
Times = dict[str, list[float]]


def engines(policy: Path, work: Path, names: list[str]) -> dict[str, Engine]:
    """All that take part, by their names; what they need is made."""
    found = {
        FULL: Engine("ours.py", OWN, policy), SPARSE: Engine("ours.py", OWN, policy, evicts=True),
    }  # fmt: skip
    if "transformers" in names:
        found["transformers generate"] = Engine("transformers_generate.py", OWN, policy, most=256)
    if "openvino" in names:
        python, exported = OPENVINO.python(work).absolute(), openvino_model(policy, work)
        found[OPENVINO_FULL] = Engine("openvino_genai_paged.py", python, exported)
        found[OPENVINO_SPARSE] = Engine("openvino_genai_paged.py", python, exported, evicts=True)
    if "vllm" in names:
        found["vLLM"] = Engine("vllm_cpu.py", VLLM.python(work).absolute(), policy)
    if "llamacpp" in names:
        found["llama.cpp"] = Engine(
            "llamacpp_server.py", LLAMACPP.python(work).absolute(), llamacpp_model(work), only="bfloat16", most=256
        )
    return found


def measured(given: argparse.Namespace, dtype: str, found: dict[str, Engine], remarks: list[str]) -> dict[int, Times]:
    """Seconds of every engine by count of tokens; an engine that fails is left out, and the page says why."""
    vocabulary = AutoConfig.from_pretrained(given.policy, trust_remote_code=False).vocab_size
    prompts, counts = random_prompts(SEQUENCES, PROMPT, vocabulary), given.tokens or TOKENS[dtype]
    settings = {
        "dtype": dtype, "threads": given.threads, "sequences": SEQUENCES, "prompt_length": PROMPT, "budget": BUDGET,
        "buffer": BUFFER, "longest": PROMPT + max(*counts, 2 * BUDGET) + 1, "vocabulary": vocabulary, "cache_gib": 3,
    }  # fmt: skip
    running: dict[str, Contender] = {}
    times: dict[int, Times] = {count: {} for count in counts}
    try:
        for name, engine in found.items():
            if engine.takes(dtype, min(counts)):
                try:
                    running[name] = started(name, engine, settings, given.work, prompts)
                except RuntimeError as failure:
                    if engine.python == OWN:
                        raise
                    remarks.append(f"{name} is left out in {dtype}: {failure}.")
        for turn in range(given.rounds):
            for count in counts:
                for name in list(running)[:: 1 if turn % 2 == 0 else -1]:
                    if found[name].takes(dtype, count):
                        seconds = running[name].seconds(prompts, count)
                        times[count].setdefault(name, []).append(seconds)
                        say(f"{dtype}, {count} tokens, round {turn + 1}, {name}: {seconds:.1f} s")
    finally:
        for contender in running.values():
            contender.end()
    return {count: {name: own[name] for name in found if name in own} for count, own in times.items()}


def started(name: str, engine: Engine, settings: dict[str, Any], work: Path, prompts: list[list[int]]) -> Contender:
    """The engine behind its first call."""
    kind = f"{'evicting' if engine.evicts else 'full'}-{settings['dtype']}"
    contender = Contender(engine, settings, work / f"{Path(engine.worker).stem}-{kind}.log")
    first = contender.seconds(prompts, 2 * settings["budget"])
    say(f"{settings['dtype']}, {name}: first call of {2 * settings['budget']} tokens {first:.1f} s")
    return contender


def add_rows(table: Table, dtype: str, tokens: int, times: Times) -> None:
    """An engine each; own engines are held against the strongest rivals."""
    for name, own in times.items():
        ms = 1e3 * statistics.median(own) / tokens
        start = [dtype, f"{tokens:,}", name, f"{ms:.2f}", f"{SEQUENCES * 1e3 / ms:,.0f}"]
        held = comparisons(dtype, tokens, name, times)
        table.add(*start, *(held[0] if held else ("",) * 4))
        for more in held[1:]:
            table.add("", "", "", "", "", *more)


def comparisons(dtype: str, tokens: int, name: str, times: Times) -> list[tuple[str, str, str, str]]:
    """Rivals, ratios and goals of an own engine."""
    rivals = {other: own for other, own in times.items() if other not in (FULL, SPARSE)}
    full = {other: own for other, own in rivals.items() if other not in EVICTING}
    wanted: list[tuple[Times, float | None]] = []
    if name == FULL:
        wanted = [(full, GOALS.get((dtype, tokens)))]
    if name == SPARSE:
        evicting = {other: own for other, own in rivals.items() if other in EVICTING}
        wanted = [
            (evicting, SPARSE_GOAL if dtype == "bfloat16" else None),
            (full, LONG_GOAL if tokens == LONG else None),
        ]
    rows = []
    for among, goal in wanted:
        if among:
            strongest = min(among, key=lambda other: statistics.median(among[other]))
            ratio = median_ratio(among[strongest], times[name])
            judged = ("", "") if goal is None else (f">= {goal:g}", met(ratio, goal))
            rows.append((strongest, f"{ratio:.2f}", *judged))
    return rows


def main() -> None:
    """Measure, and print or save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", nargs="+", type=int, help="instead of the usual counts")
    parser.add_argument("--rivals", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "engines", help="environments and exported models"
    )
    parser.add_argument("--save", type=Path, help="folder for the table as engines-cpu.md")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    found, remarks = engines(given.policy.absolute(), given.work, given.rivals), list[str]()
    note = (
        f"{given.policy.name}, {SEQUENCES} sequences, prompts of {PROMPT} random tokens, drawn at temperature 1 from "
        "the whole vocabulary; each ratio is to the strongest rival of its kind."
    )
    table = Table("Engines on a CPU", HEADER, note)
    for dtype in given.types:
        for tokens, times in measured(given, dtype, found, remarks).items():
            add_rows(table, dtype, tokens, times)
    versions = [RIVALS[name].versions(given.work) for name in given.rivals if name in RIVALS]
    heading = ", ".join([machine("cpu"), *versions, f"{given.rounds} round(s)."])
    text = "\n\n".join([heading, str(table), *remarks])
    print(text)
    if given.save:
        save(given.save, "engines-cpu", "benchmarks.engines", text)


if __name__ == "__main__":
    main()
