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
import subprocess
from pathlib import Path

from transformers import AutoConfig

from benchmarks import REAL, ROOT
from benchmarks.common import options
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table, median_ratio, met
from benchmarks.engines.contest import Contest, Engine
from benchmarks.engines.rivals import (
    ENVIRONMENTS,
    EVICTING,
    FEW,
    FULL,
    IN_PROCESS,
    RIVALS,
    SPARSE,
    VLLM_SERVED,
    own_engines,
)
from benchmarks.rollout.policies import random_prompts

SEQUENCES, PROMPT, BUDGET, BUFFER = 16, 64, 128, 32
GOALS = {("bfloat16", 256): 1.4, ("bfloat16", 1500): 1.8, ("float32", 256): 1.4}
SPARSE_GOAL, LONG_GOAL = 1.8, 2.5
SERVED_GOAL = 0.9  # of the speed without a server
TOKENS = {"bfloat16": [256, 1500], "float32": [256]}
LONG = 1500  # tokens from which an evicting cache is held against the strongest full one
HEADER = ("type", "new tokens", "engine", "ms per step", "tokens/s", "strongest rival", "times as fast", "goal", "met")
Times = dict[str, list[float]]


def engines(policy: Path, work: Path, names: list[str], remarks: list[str]) -> dict[str, Engine]:
    """All that take part; a rival that cannot be made is left out, and the page says why."""
    contenders = own_engines(policy)
    for name in names:
        try:
            contenders |= RIVALS[name](policy, work)
        except (subprocess.CalledProcessError, ValueError) as failure:
            remarks.append(f"{name} is left out: {failure}.")
    return contenders


def measured(
    args: argparse.Namespace, dtype: str, contenders: dict[str, Engine], remarks: list[str]
) -> dict[int, Times]:
    """Seconds of every engine by count of tokens."""
    vocabulary = AutoConfig.from_pretrained(args.policy, trust_remote_code=False).vocab_size
    counts = args.tokens or TOKENS[dtype]
    settings = {
        "dtype": dtype, "threads": args.threads, "sequences": SEQUENCES, "prompt_length": PROMPT, "budget": BUDGET,
        "buffer": BUFFER, "longest": PROMPT + max(*counts, 2 * BUDGET) + 1, "vocabulary": vocabulary, "cache_gib": 3,
    }  # fmt: skip
    able = {name: engine for name, engine in contenders.items() if engine.takes(dtype, min(counts))}
    prompts = random_prompts(SEQUENCES, PROMPT, vocabulary)
    contest = Contest(able, settings, prompts, args.work, remarks)
    times: dict[int, Times] = {count: {} for count in counts}
    try:
        for name in list(able):
            first = contest.seconds(name, 2 * BUDGET)
            say(f"{dtype}, {name}: first call of {2 * BUDGET} tokens {first or 0:.1f} s")
        for turn in range(args.rounds):
            for count in counts:
                for name in list(able)[:: 1 if turn % 2 == 0 else -1]:
                    if able[name].takes(dtype, count) and (seconds := contest.seconds(name, count)) is not None:
                        times[count].setdefault(name, []).append(seconds)
                        say(f"{dtype}, {count} tokens, round {turn + 1}, {name}: {seconds:.1f} s")
    finally:
        contest.end()
    return {count: {name: own[name] for name in able if name in own} for count, own in times.items()}


def add_rows(table: Table, dtype: str, tokens: int, times: Times) -> None:
    """An engine each; own engines are held against the strongest rivals."""
    for name, seconds in times.items():
        ms = 1e3 * statistics.median(seconds) / tokens
        start = [dtype, f"{tokens:,}", name, f"{ms:.2f}", f"{SEQUENCES * 1e3 / ms:,.0f}"]
        beside = comparisons(dtype, tokens, name, times)
        table.add(*start, *(beside[0] if beside else ("",) * 4))
        for more in beside[1:]:
            table.add("", "", "", "", "", *more)


def comparisons(dtype: str, tokens: int, name: str, times: Times) -> list[tuple[str, str, str, str]]:
    """Rivals, ratios and goals of an own engine."""
    others = (FULL, SPARSE, VLLM_SERVED, *IN_PROCESS)  # without a server
    rivals = {rival: seconds for rival, seconds in times.items() if rival not in others}
    full = {rival: seconds for rival, seconds in rivals.items() if rival not in EVICTING}
    wanted: list[tuple[Times, float | None]] = []
    if name == FULL:
        wanted = [(full, GOALS.get((dtype, tokens)))]
    if name == SPARSE:
        evicting = {rival: seconds for rival, seconds in rivals.items() if rival in EVICTING}
        wanted = [
            (evicting, SPARSE_GOAL if dtype == "bfloat16" else None),
            (full, LONG_GOAL if tokens == LONG else None),
        ]
    if name in IN_PROCESS:
        served = {rival: times[rival] for rival in (VLLM_SERVED,) if rival in times}
        wanted = [({IN_PROCESS[name]: times[IN_PROCESS[name]]}, SERVED_GOAL), (served, None)]
    rows = []
    for among, goal in wanted:
        if among:
            strongest = min(among, key=lambda rival: statistics.median(among[rival]))
            ratio = median_ratio(among[strongest], times[name])
            judged = ("", "") if goal is None else (f">= {goal:g}", met(ratio, goal))
            rows.append((strongest, f"{ratio:.2f}", *judged))
    return rows


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, "engines-cpu.md", threads=2, rounds=3)
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", nargs="+", type=int, help="instead of the usual counts")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "engines", help="environments and exported models"
    )
    args = options.parsed(parser)
    args.work, args.policy = args.work.absolute(), args.policy.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    contenders = engines(args.policy, args.work, args.rivals, remarks := list[str]())
    note = (
        f"{args.policy.name}, {SEQUENCES} sequences, prompts of {PROMPT} random tokens, temperature 1, all tokens; "
        f"each ratio is to the strongest rival of its kind. llama.cpp and `generate` run up to {FEW} tokens."
    )
    environments = [ENVIRONMENTS[name] for name in args.rivals if name in ENVIRONMENTS]
    versions = [environment.versions(args.work) for environment in environments if environment.is_made(args.work)]
    table, text = Table("Engines on a CPU", HEADER, note), ""
    for dtype in args.types:
        for tokens, times in measured(args, dtype, contenders, remarks).items():
            add_rows(table, dtype, tokens, times)
        heading = ", ".join([machine("cpu"), *versions, f"{args.rounds} round(s)."])
        text = "\n\n".join([heading, str(table), *remarks])
        save(args.save, "engines-cpu", "benchmarks.engines", text)
    print(text)


if __name__ == "__main__":
    main()
