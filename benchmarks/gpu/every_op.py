"""Calls every op once in every type, on small ragged slots, attention on long ones too: for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.every_op

Fails if an op has no kernel for the device, or if a kernel reports a fault.
"""

from __future__ import annotations

import argparse
import sys

import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.decode_attention import MAX_SPLIT
from sparse_rl_lightning.ops.library import NATIVE_DTYPES
from sparse_rl_lightning.ops.schemas import SCHEMAS
from sparse_rl_lightning.ops.select_pages import list_pages
from tests.native_cases import CASES, Case, uniform_pools


def attend_to_long_heads(dtype: torch.dtype, device: str, dim: int) -> bool:
    """Attend with many tiles per warp, splits and passes over query heads; whether all is finite and no fault told."""
    pools = uniform_pools((2, 2), 2 * MAX_SPLIT, dim, dtype, device)
    pools.lengths.copy_(torch.tensor([[MAX_SPLIT + 1, 2 * MAX_SPLIT], [MAX_SPLIT, 5]]))
    pools.keys.normal_()
    pools.values.normal_()
    slots, query = torch.tensor([1, 0], device=device), torch.randn(2, 2 * 9, dim, device=device).to(dtype)
    counts = -(-pools.lengths[slots] // 10)
    pages = list_pages(torch.arange(int(counts.max()), device=device) < counts.unsqueeze(-1), int(counts.max()))
    whole = ops.decode_attention(pools, slots, query, dim**-0.5, 2 * MAX_SPLIT)
    paged = ops.page_attention(pools, slots, query, pages, 10, dim**-0.5)
    return pools.errors is not None and not pools.errors.any() and bool((whole - paged).isfinite().all())


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
        for dim in (64, 80, 128, 256, 512):  # each has a kernel of its own
            if not attend_to_long_heads(dtype, device, dim):
                sys.exit(f"attention of head size {dim}, {dtype}: a fault, or results that are not finite")
            calls += 2
    print(f"{calls} calls of {len(SCHEMAS)} ops on {device}: no fault")


if __name__ == "__main__":
    main()
