"""Calls every op once in every type, on small ragged slots: short enough for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.every_op

Fails if an op has no kernel for the device, or if a kernel reports a fault.
"""

from __future__ import annotations

import argparse
import sys

import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.library import NATIVE_DTYPES
from sparse_rl_lightning.ops.schemas import SCHEMAS
from tests.native_cases import CASES, Case


def main() -> None:
    """Call them, and wait for the device after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    device: str = parser.parse_args().device
    lacking = [name for name in SCHEMAS if not ops.has_kernel(name, device)]
    if lacking:
        sys.exit(f"no {device} kernel for {', '.join(lacking)}: {ops.MISSING[device] or 'build the library'}")
    calls = 0
    for dtype in sorted(NATIVE_DTYPES[device] - {torch.float8_e4m3fn}, key=str):
        for full in (True, False):
            for name in CASES:
                case = Case(dtype, device, full)  # a new one: what an op has written does not fit the next
                case.calls()[name]()
                if device == "cuda":
                    torch.cuda.synchronize()
                calls += 1
                if case.pools.errors is not None and bool(case.pools.errors.any()):
                    sys.exit(f"{name}, {dtype}: the kernel reports {case.pools.errors.tolist()}")
    print(f"{calls} calls of {len(SCHEMAS)} ops on {device}: no fault")


if __name__ == "__main__":
    main()
