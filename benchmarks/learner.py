"""Peak memory and time of the learner's log-probs: all logits at once against chunks of them.

    python -m benchmarks.learner [--device cpu] [--dtype float32] [--threads 2] [--quick] [--save DIR]

Every way runs in a process of its own over the same final hidden states: log-probs and entropies of all tokens, then
the backward pass of the log-probs to hidden states and head. The peak is what the process (CPU: resident memory) or
the device (allocated memory) held above what stood there before: head, hidden states, and a small pass to warm up.
All logits at once do not fit a small machine: above a quarter of the free memory the line through two smaller batches
is continued, and marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import ROOT
from benchmarks.common import options
from benchmarks.common.memory import forget_peak, resident_bytes
from benchmarks.common.pages import machine, page_name, save
from benchmarks.common.tables import Table
from sparse_rl_lightning.logprobs import token_logprobs

Way = Callable[[nn.Linear, Tensor, Tensor, int], tuple[Tensor, Tensor]]
GIB = 2**30
COPIES = 6  # of all logits that the plain way holds at its peak, roughly: only decides whether to measure it


@dataclass(frozen=True)
class Sizes:
    """A head, a batch and where both are."""

    vocabulary: int
    tokens: int
    width: int
    chunk: int
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2


@dataclass(frozen=True)
class Measured:
    """What one way took."""

    peak: float  # bytes
    seconds: float
    extrapolated: bool = False

    def cells(self) -> tuple[str, str]:
        """Peak in GiB and seconds."""
        mark = "≈ " if self.extrapolated else ""
        return f"{mark}{self.peak / GIB:.2f}", f"{mark}{self.seconds:.1f}"


def plain(head: nn.Linear, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """All logits in one tensor; the entropy without gradient."""
    logs = head(hidden).float().log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), entropy


def checkpointed(head: nn.Linear, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Checkpointed chunks through the module, as for heads that are no plain Linear."""
    handle = head.register_forward_hook(lambda *_: None)
    try:
        return token_logprobs(head, hidden, targets, chunk_size=chunk)
    finally:
        handle.remove()


def chunked(head: nn.Linear, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Chunks differentiated by hand."""
    return token_logprobs(head, hidden, targets, chunk_size=chunk)


WAYS: dict[str, Way] = {"plain": plain, "checkpointed": checkpointed, "chunked": chunked}


def work(method: str, sizes: Sizes) -> None:
    """One forward and backward pass."""
    dtype = getattr(torch, sizes.dtype)
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, dtype=dtype, device=sizes.device)
    hidden = torch.randn(sizes.tokens, sizes.width, generator=generator).to(sizes.device, dtype).requires_grad_()
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator).to(sizes.device)
    WAYS[method](head, hidden[:8], targets[:8], sizes.chunk)[0].sum().backward()
    head.weight.grad = hidden.grad = None

    before = _held(sizes.device, reset=True)
    start = time.perf_counter()
    WAYS[method](head, hidden, targets, sizes.chunk)[0].sum().backward()
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps(asdict(Measured(_held(sizes.device) - before, seconds))))


def _held(device: str, reset: bool = False) -> int:
    """Bytes held: now, with ``reset``, which also starts the peak anew; the peak since, without."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if reset else torch.cuda.max_memory_allocated()
    if reset:
        forget_peak()
    return resident_bytes(peak=not reset)


def measure(method: str, sizes: Sizes) -> Measured:
    """Run a way in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learner", f"--threads={sizes.threads}", "--work", method]
    command.append(json.dumps(asdict(sizes)))
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Measured(**json.loads(out.splitlines()[-1]))


def measure_or_extrapolate(method: str, sizes: Sizes) -> Measured:
    """As :func:`measure`, but on the line through two smaller batches where memory would run out."""
    if method != "plain" or COPIES * 4 * sizes.tokens * sizes.vocabulary < _free(sizes.device) / 4:
        return measure(method, sizes)
    few, more = (measure(method, replace(sizes, tokens=sizes.tokens // n)) for n in (16, 8))
    slope = [more.peak - few.peak, more.seconds - few.seconds]  # of a sixteenth of the tokens
    return Measured(few.peak + 15 * slope[0], few.seconds + 15 * slope[1], extrapolated=True)


def _free(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def memory_table(sizes: Sizes) -> Table:
    """All ways beside each other."""
    logits = 4 * sizes.tokens * sizes.vocabulary / GIB
    table = Table(
        "Log-probs and entropies, forward and backward",
        ("way", "logits at a time", "peak GiB", "seconds"),
        f"{sizes.tokens} tokens, vocabulary {sizes.vocabulary}, width {sizes.width}, {sizes.dtype}, {sizes.device}. "
        f"All logits in float32: {logits:.2f} GiB; the gradients that are the result: "
        f"{4 * sizes.width * (sizes.vocabulary + sizes.tokens) / GIB:.2f} GiB in float32. ≈: continued from 1/16 and "
        "1/8 of the tokens.",
    )
    for method in WAYS:
        at_a_time = sizes.tokens if method == "plain" else min(sizes.chunk, sizes.tokens)
        table.add(method, str(at_a_time), *measure_or_extrapolate(method, sizes).cells())
    return table


def main() -> None:
    """Measure and print the table."""
    parser = options.parser(__doc__, "learner-<device>.md", device=options.here(), threads=2, quick=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=256, help="of the hidden states; a model's own on a GPU")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = options.parsed(parser)
    if args.work:
        work(args.work[0], Sizes(**json.loads(args.work[1])))
        return
    vocabulary, tokens, chunk = (5000, 1024, 64) if args.quick else (152_000, 8192, args.chunk)
    sizes = Sizes(vocabulary, tokens, args.width, chunk, args.device, args.dtype, args.threads)
    page = f"{machine(args.device)}\n\n{memory_table(sizes)}"
    print(page)
    save(args.save, page_name("learner", args.device), "benchmarks.learner", page)


if __name__ == "__main__":
    main()
