"""The build that was asked for is the build that runs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache

import pytest
import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import library
from sparse_rl_lightning.ops.architectures import parse_architectures
from sparse_rl_lightning.ops.schemas import SCHEMAS, SHAPES, schema_hash

WITHOUT = os.environ.get("SPARSE_RL_BUILD") == "python" or os.environ.get("SPARSE_RL_NATIVE") == "0"


def test_the_native_library_is_loaded() -> None:
    """A forgotten compiler must not turn into silently skipped tests; SPARSE_RL_BUILD=python says it is on purpose."""
    if WITHOUT:
        pytest.skip("the kernels were left out on purpose")
    assert ops.MISSING["cpu"] == ""
    assert ops.HAS_NATIVE
    assert [name for name in SCHEMAS if not ops.has_kernel(name, "cpu")] == []


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return done.stdout.strip()


def test_the_kernels_can_be_switched_off() -> None:
    code = (
        "from sparse_rl_lightning import ops; "
        "print(ops.HAS_NATIVE, ops.has_kernel('append', 'cpu'), ops.MISSING['cpu'])"
    )
    assert run(code, SPARSE_RL_NATIVE="0") == "False False switched off by SPARSE_RL_NATIVE=0"


def test_a_stale_or_broken_library_is_left_out(tmp_path: os.PathLike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    assert "is not built" in library.load()["cpu"] or WITHOUT
    monkeypatch.setenv("SPARSE_RL_NATIVE", "1")
    (tmp_path / "_C.abi3.so").write_bytes(b"sparse_rl_schema=000000000000")
    with pytest.warns(UserWarning, match="other signatures; build again"):
        assert "other signatures" in library.load()["cpu"]
    (tmp_path / "_C.abi3.so").write_bytes(b"sparse_rl_schema=" + schema_hash().encode())
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert "cannot be loaded" in library.load()["cpu"]


def test_the_hash_follows_signatures_and_types(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {schema_hash()}
    with monkeypatch.context() as patched:
        patched.setitem(SCHEMAS, "append", SCHEMAS["append"] + " ")
        found.add(schema_hash())
    monkeypatch.setitem(SHAPES, "top_ids", "B K int64")
    found.add(schema_hash())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("built", "capability", "told"),
    [("80;90+PTX", (7, 5), "the kernels need 8.0"), ("", (7, 0), "the kernels need 8.0"),
     ("100a", (9, 0), "SPARSE_RL_ARCHS=90 builds it"), ("80;90+PTX", (8, 6), ""), ("", (9, 0), "")],
)  # fmt: skip
def test_a_gpu_that_no_kernel_has_code_for_runs_the_reference_and_says_so_once(
    built: str, capability: tuple[int, int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cached in (library.has_kernel, library._runs_on_gpu):
        monkeypatch.setattr(library, cached.__name__, cache(cached.__wrapped__))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(library, "built_architectures", lambda folder: parse_architectures(built))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {library.has_kernel(name, "cuda") for name in SCHEMAS}
    assert found == {not told}
    assert [told in str(one.message) for one in caught] == [True] * bool(told)
    assert library.has_kernel("append", "cpu")
