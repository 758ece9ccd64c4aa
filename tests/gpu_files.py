"""Where the tests are that need a GPU, in the groups that ``python -m benchmarks.gpu test`` runs."""

from __future__ import annotations

from collections.abc import Iterable

GPU_TESTS = {
    "ops": ("tests/ops",),
    "rollouts": ("tests/rollout/test_on_gpu.py", "tests/rollout/test_rollout_memory.py"),
    "replay": ("tests/replay/test_death_attention.py",),  # the only one that compiles FlexAttention
    "other": (
        "tests/benchmarks/test_bench_rollout.py",
        "tests/callbacks/test_dry_run.py",
        "tests/callbacks/test_callbacks_fit.py",
        "tests/report/test_viewing.py",
    ),
}


def in_no_group(files: Iterable[str]) -> list[str]:
    """Files of tests, relative to the root of the repository, that no group runs."""
    known = [path for paths in GPU_TESTS.values() for path in paths]
    return sorted({file for file in files if not any(file == path or file.startswith(f"{path}/") for path in known)})
