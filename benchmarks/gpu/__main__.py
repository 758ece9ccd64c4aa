"""Builds, tests, sanitizes, measures and trains on one GPU, in pieces that go on where they were stopped.

    make gpu                                                       # all of it: 25 minutes on one H100 or H200
    make gpu-build gpu-test gpu-sanitize gpu-bench gpu-train       # a piece each: 8 minutes

It needs no network, and of Python no more than torch, transformers and lightning: `build` names what else is missing
and installs it from build/gpu/wheels, which `make gpu-wheels` fills on a machine with a network. Every step is a
process of its own. What has succeeded on this card, with these sources, is not run again; a step that would begin after
--minutes is left to the next call. Pages go to --save: gpu-run.md says how every step ended.

build: kernels for this card, and that every op has one. test: ops and rollouts against the CPU, every decode step from
a graph, no wait in it. sanitize: every op under compute-sanitizer. train: the quickstart on the card, which must learn.
bench: ops, steps and whole rollouts in the shapes of real models, and a profile; what does not fit is left to the next
call.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.steps import PIECES, Ledger, Step, steps


def run_all(chosen: list[Step], ledger: Ledger, minutes: float) -> bool:
    """Run what is not done yet; whether all of it has succeeded."""
    start, good = time.monotonic(), True
    for step in chosen:
        if ledger.is_done(step):
            print(f"{step.name}: done before", flush=True)
            continue
        left = 60 * minutes - (time.monotonic() - start)
        if left < 60 * step.minutes:
            print(f"{step.name}: needs up to {step.minutes:g} minutes, {left / 60:.1f} are left: run this again")
            good = False
            continue
        good &= ledger.run(step)
    return good


def main() -> None:
    """Run the pieces, write the page of what has been done, and fail if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)}; all without")
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the pages")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu", help="folder of logs and what is done")
    parser.add_argument("--minutes", type=float, default=25, help="no step begins that could end later")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in toy sizes, to see that the steps run")
    args = parser.parse_args()
    for piece in args.pieces:
        if piece not in PIECES:
            parser.error(f"there is no piece {piece!r}: choose among {', '.join(PIECES)}")
    device = "cpu" if args.rehearse else "cuda"
    args.save.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(args.state.absolute(), device)
    chosen = steps(args.pieces or PIECES, device, args.save.absolute(), ledger.folder)
    good = run_all(chosen, ledger, args.minutes)
    page = args.save / "gpu-run.md"
    page.write_text(ledger.page(steps(PIECES, device, args.save.absolute(), ledger.folder)), encoding="utf-8")
    print(f"\n{page.read_text(encoding='utf-8')}\nWritten: {page}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
