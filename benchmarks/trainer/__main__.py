"""Whole training steps beside TRL's ``GRPOTrainer``: the same policy, prompts, rewards, optimizer, samples and steps.

    python -m benchmarks.trainer [--threads 2] [--rounds 3] [--cases 48 512 1024 "long prompts"] [--save DIR]

On an idle machine leave OMP_WAIT_POLICY alone. Every run is a process of its own, so that neither peaks of memory nor
threads mix; contenders take turns within every round, in the other order in every second one. Seconds are medians over
the rounds, ratios medians of the rounds' ratios. What is finished is kept in ``--work``: started again, it goes on;
delete the folder to measure anew.

A step is one optimizer step, everything in it: rollout (encoding and decoding of text included), rescoring (log-probs
of the finished rollout), update (forward, backward, optimizer, data, logging) and the rest of what precedes the loss
(rewards, advantages, callbacks). TRL is watched from outside, method by method, and runs as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import options
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table, median_ratio, met
from benchmarks.trainer.contenders import CONTENDERS, DENSE, PLAIN, SPARSE, TRL, measure
from benchmarks.trainer.setting import WARM_POLICY, Setting
from benchmarks.trainer.stages import Measured
from sparse_rl_lightning.files import write_whole

CASES = (
    Setting(
        "48", "quickstart", tokens=48, budget=30, buffer=4, prompts=16, generations=8, micro_batches=2, accumulate=1,
        warm_up=2, rollouts=20,
    ),
    Setting(
        "512", "8 x 512", tokens=512, budget=128, buffer=32, prompts=2, generations=8, micro_batches=2, accumulate=2,
        warm_up=1, rollouts=2, shares=True,
    ),
    Setting(
        "1024", "8 x 512", tokens=1024, budget=128, buffer=32, prompts=2, generations=8, micro_batches=2, accumulate=2,
        warm_up=1, rollouts=1, shares=True,
    ),
    Setting(
        "long prompts", "8 x 512", tokens=256, budget=128, buffer=32, prompts=2, generations=8, micro_batches=2,
        accumulate=2, warm_up=1, rollouts=2, prompt_length=1024, shares=True,
    ),
)  # fmt: skip
QUICK = (
    Setting(
        "quick", "tiny", tokens=16, budget=12, buffer=4, prompts=2, generations=2, micro_batches=2, accumulate=2,
        warm_up=1, rollouts=1, prompt_length=8,
    ),
)  # fmt: skip
GOALS = {"48": 1.0, "512": 1.7, "1024": 1.7, "long prompts": 3.0}  # times as fast as TRL
LEAST_LENGTH = 64  # of prompts that a title does not tell
SHARE_GOAL = 0.6  # of the plain loop's speed
HEADER = (
    "trainer", "s per step", "rollout", "rescoring", "update", "rest", "tokens/s", "peak GiB", "reward",
    "times as fast as TRL", "goal", "met", "update: share of the plain loop", "goal", "met",
)  # fmt: skip


def main() -> None:
    """Measure what is not yet measured, and print the tables."""
    parser = options.parser(__doc__, "trainer-cpu.md", threads=2, rounds=3, quick=True)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--work", type=Path, default=Path("runs/trainer"), help="folder of what is finished")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = options.parsed(parser)
    if args.measure:
        name, setting, out = args.measure
        write_whole(Path(out), json.dumps(asdict(measure(name, Setting(**json.loads(setting))))))
        return
    if importlib.util.find_spec("trl") is None:
        sys.exit('benchmarks.trainer compares with TRL: pip install "sparse-rl-lightning[trl]"')
    if args.quick:
        args.rounds, args.work, cases = 1, args.work / "quick", QUICK
        shutil.rmtree(args.work, ignore_errors=True)
    else:
        cases = tuple(case for case in CASES if not args.cases or case.name in args.cases)
    if any(case.is_quickstart for case in cases) and not (WARM_POLICY / "config.json").exists():
        sys.exit(f"There is no {WARM_POLICY}: run configs/warmup.yaml first.")
    pages = [f"{machine('cpu')}, trl {importlib.metadata.version('trl')}"]
    print(pages[0])
    for case in cases:
        pages.append(str(table(case, runs(case, args.rounds, args.threads, args.work))))
        print(f"\n{pages[-1]}", flush=True)
        save(args.save, "trainer-cpu", "benchmarks.trainer", "\n\n".join(pages))


def runs(setting: Setting, rounds: int, threads: int, work: Path) -> dict[str, list[Measured]]:
    """All rounds of all contenders."""
    outcomes: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name in list(CONTENDERS)[:: 1 if turn % 2 == 0 else -1]:
            run = once(name, setting, threads, work / f"{setting.name}-{threads}-{turn + 1}-{name.replace(', ', '-')}")
            say(f"{setting.name}, round {turn + 1}: {name} {run.seconds:.2f} s per step")
            outcomes[name].append(run)
    return outcomes


def once(name: str, setting: Setting, threads: int, folder: Path) -> Measured:
    """One run in a process of its own, unless it was finished earlier."""
    out, stored = folder / "measured.json", folder / "setting.json"
    wanted = json.dumps(asdict(setting))
    if not out.exists() or stored.read_text() != wanted:
        out.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        stored.write_text(wanted)
        command = [sys.executable, "-m", "benchmarks.trainer", f"--threads={threads}", "--measure", name, wanted]
        log = folder / "log.txt"
        with log.open("w") as lines:
            done = subprocess.run([*command, str(out.resolve())], cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"{name} failed, see {log}:\n{log.read_text()[-2000:]}")
    return Measured(**json.loads(out.read_text()))


def table(setting: Setting, outcomes: dict[str, list[Measured]]) -> Table:
    """Everything about one setting."""
    what = "The quickstart's policy and task" if setting.is_quickstart else f"Random Qwen2 ({setting.policy})"
    note = (
        f"{what}, {setting.prompts} prompts x {setting.generations} samples, {setting.steps_per_rollout} optimizer "
        f"step(s) per rollout of {setting.accumulate} micro-batch(es), AdamW, float32, no gradient checkpointing"
        f"{', prompts read once' if setting.shares else ''}; RKV "
        f"with budget {setting.budget} + buffer {setting.buffer}, rejection and reweighting. Medians of "
        f"{len(outcomes[TRL])} round(s) of {setting.rollouts} rollout(s) each. Peak: resident memory above what the "
        "process held when the first rollout began, its policy included."
    )
    behind = f" behind prompts of {setting.prompt_length:,}" if setting.prompt_length > LEAST_LENGTH else ""
    result = Table(f"{setting.tokens:,} new tokens{behind}", HEADER, note)
    for name in outcomes:
        result.add(*row(name, outcomes, GOALS.get(setting.name)))
    return result


def row(name: str, outcomes: dict[str, list[Measured]], goal: float | None) -> Iterator[str]:
    """The cells of a contender."""
    runs, plain = outcomes[name], outcomes[PLAIN]

    def median(field: str) -> float:
        return statistics.median(getattr(run, field) for run in runs)

    yield name
    if name == PLAIN:
        yield from ["", "", "", f"{median('update'):.3g}", "", "", "", ""]
    else:
        yield from (f"{median(field):.3g}" for field in ("seconds", "rollout", "rescoring", "update", "rest"))
        speed = statistics.median(run.tokens / run.seconds for run in runs)
        yield from (f"{speed:,.0f}", f"{median('peak') / 2**30:.2f}", f"{median('reward'):.3f}")
    if name == PLAIN:
        yield from ["", "", ""]
    else:
        ratio = median_ratio([run.seconds for run in outcomes[TRL]], [run.seconds for run in runs])
        judged = goal is not None and name == SPARSE
        yield from (f"{ratio:.2f}", f">= {goal:g}" if judged else "", met(ratio, goal or 0) if judged else "")
    share = median_ratio([run.update for run in plain], [run.update for run in runs])
    judged = goal is not None and name in (DENSE, SPARSE)
    yield from (f"{100 * share:.0f} %", f">= {100 * SHARE_GOAL:.0f} %" if judged else "")
    yield met(share, SHARE_GOAL) if judged else ""


if __name__ == "__main__":
    main()
