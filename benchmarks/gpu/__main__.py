"""Builds, tests, measures, trains and sanitizes on one GPU, in pieces that go on where they were stopped.

    make gpu                                     # all of it: an hour on one H100 or H200
    python -m benchmarks.gpu build test --minutes 8.5 --pack gpu.tgz          # some pieces: README.md has the calls

It needs no network, and of Python no more than torch, transformers and lightning; nothing is installed but what lacks,
from build/gpu/wheels, and kernels come from build/gpu/kernels: `make gpu-carry` fills both on a machine with a network
and nvcc. Every step is a process of its own. What has succeeded on this card, with these sources, is not run again; a
step that would begin after --minutes is left to the next call. Pages go to --save; gpu-run.md says how each step ended.

build: packages and kernels, and that every op has one. cells: steps of Qwen2.5-1.5B at given lengths, beside their
floor. profile: kernel by kernel. train: the quickstart on the card, which must learn. real: SmolLM2 writes stories.
test: ops, rollouts and replay against the CPU, every step from a graph, no wait in it. fsdp: one rank under FSDP2.
study: one seed of the frozen study of the real model. whole: refilled rollouts beside `generate`. equal: long ones,
every cache in the same memory. ops: each beside plain PyTorch. invariance: what a sequence's neighbors change.
sanitize: every op under compute-sanitizer. models: larger ones, and caches of equal memory. math: accuracy of
Qwen2.5-Coder-0.5B against minutes and gigabytes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.ledger import Ledger, Step
from benchmarks.gpu.steps import AFTER, PIECES, steps


def run_all(
    chosen: list[Step], ledger: Ledger, minutes: float, after_each: Callable[[], object], together: bool = False
) -> bool:
    """Run what is not done yet, up to one that fails and that the others need; whether all of it has succeeded.

    Args:
        chosen: Steps in order.
        ledger: What is done.
        minutes: No step begins that could end later.
        after_each: Called after every step.
        together: What no other step needs runs at the same time, and is stopped when the minutes are over.
    """
    start, good = time.monotonic(), True
    if together:
        first, rest = ([step for step in chosen if step.is_needed is needed] for needed in (True, False))
        if not run_all(first, ledger, minutes, after_each):
            return False
        return run_together(rest, ledger, minutes - (time.monotonic() - start) / 60, after_each)
    for step in chosen:
        if ledger.is_done(step):
            print(f"{step.name}: done before", flush=True)
            continue
        left = minutes - (time.monotonic() - start) / 60
        if left < step.minutes and not step.is_needed:
            print(f"{step.name}: needs up to {step.minutes:g} minutes, {left:.1f} are left: run this again")
            good = False
            continue
        ended_well = ledger.run(replace(step, minutes=min(step.minutes, left)))
        after_each()
        good &= ended_well
        if step.is_needed and not ended_well:
            print(f"{step.name}: all other steps need it, so none of them is run.", flush=True)
            return False
    return good


def run_together(chosen: list[Step], ledger: Ledger, minutes: float, after_each: Callable[[], object]) -> bool:
    """Run at the same time what is not done yet, and stop it when the minutes are over or the call ends."""
    good, waiting = True, list[Step]()
    for step in chosen:
        if ledger.is_done(step):
            print(f"{step.name}: done before", flush=True)
        else:
            waiting.append(replace(step, minutes=minutes))
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        try:
            for future in as_completed([pool.submit(ledger.run, step) for step in waiting]):
                good &= future.result()
                after_each()
        finally:
            ledger.stop()
    return good


def main() -> None:
    """Run the pieces, keep the page of what has been done, and fail if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)}; all without")
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the pages")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu", help="folder of logs and what is done")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="pages and logs so far as one .tgz, after every step")
    parser.add_argument("--minutes", type=float, default=60, help="no step begins that could end later")
    parser.add_argument("--together", action="store_true", help="at the same time: for steps that time nothing")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in toy sizes, to see that the steps run")
    args = parser.parse_args()
    for piece in args.pieces:
        if piece not in PIECES:
            parser.error(f"there is no piece {piece!r}: choose among {', '.join(PIECES)}")
    for piece, before in AFTER.items():
        if args.together and {piece, before} <= set(args.pieces or PIECES):
            parser.error(f"--together: {piece} needs what {before} makes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step of the moment is ended too
    device = "cpu" if args.rehearse else "cuda"
    args.save.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(args.state.absolute(), device)
    page = args.save / "gpu-run.md"

    def keep() -> None:
        wanted = steps(PIECES, device, args.save.absolute(), ledger.folder)
        page.write_text(ledger.page(wanted), encoding="utf-8")
        if args.pack:
            ledger.pack(args.pack, args.save)

    chosen = steps(args.pieces or PIECES, device, args.save.absolute(), ledger.folder)
    good = run_all(chosen, ledger, args.minutes, keep, args.together)
    keep()
    print(f"\n{page.read_text(encoding='utf-8')}\nWritten: {page}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
