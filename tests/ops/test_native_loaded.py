"""The build that was asked for is the build that runs, and which of its code a card runs; no GPU is needed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import library
from sparse_rl_lightning.ops.architectures import (
    built_architectures,
    code_for,
    describe_architectures,
    has_code,
    parse_architectures,
)
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
    shown = "ops.HAS_NATIVE, ops.has_kernel('append', 'cpu'), ops.MISSING['cpu']"
    printed = run(f"from sparse_rl_lightning import ops; print({shown})", SPARSE_RL_NATIVE="0")
    assert printed == "False False switched off by SPARSE_RL_NATIVE=0"


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


ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "operations run on the PyTorch reference"
NONE = f"HAS NO CODE here: {{%d}} builds it, until then {REFERENCE}"
TOO_OLD = f"HAS NO CODE here: the kernels need 8.0, so {REFERENCE}"
SETUP = runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.parametrize(("archs", "capability", "told"), [
    ("80;90+PTX", (9, 0), "runs machine code for 9.0, its own"),
    ("80;90+PTX", (8, 0), "runs machine code for 8.0, its own"),
    ("80;90+PTX", (8, 9), "runs machine code for 8.0, there is none for 8.9: {89} builds it"),
    ("80;86;90+PTX", (8, 9), "runs machine code for 8.6, there is none for 8.9: {89} builds it"),
    ("80;89+PTX", (8, 6), "runs machine code for 8.0, there is none for 8.6: {86} builds it"),
    ("100;120+PTX", (10, 3), "runs machine code for 10.0, there is none for 10.3: {103} builds it"),
    ("80;90+PTX", (12, 0), "runs the PTX of 9.0, which its driver compiles at the first start; "
                           "no machine code fits: {120} builds it"),
    ("80+PTX;90+PTX", (10, 0), "runs the PTX of 9.0, which its driver compiles at the first start; "
                               "no machine code fits: {100} builds it"),
    ("80+PTX;90", (9, 0), "runs machine code for 9.0, its own"),
    ("89+PTX", (8, 6), NONE % 86),
    ("80;90+PTX", (7, 5), TOO_OLD),
    ("80;90+PTX", (7, 0), TOO_OLD),
    ("80;120+PTX", (11, 0), NONE % 110),
    ("80;90a", (9, 0), "runs machine code for 9.0a, its own"),
    ("100a+PTX", (10, 3), NONE % 103),
    ("100a+PTX", (12, 0), NONE % 120),
    ("", (8, 0), NONE % 80),
])  # fmt: skip
def test_a_card_runs_the_code_that_its_driver_chooses(archs: str, capability: tuple[int, int], told: str) -> None:
    want = told.replace("{", "SPARSE_RL_BUILD=cuda SPARSE_RL_ARCHS=").replace("}", "")
    built = parse_architectures(archs)
    assert code_for(built, capability) == want
    assert has_code(built, capability) == (told.startswith("runs") or not built)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_default_builds_have_machine_code_of_their_own_for_every_current_card(capability: tuple[int, int]) -> None:
    assert code_for(parse_architectures(SETUP["ARCHS"]), capability).endswith("its own")


@pytest.mark.parametrize("capability", [(8, 6), (8, 7), (10, 3), (11, 0), (12, 1), (13, 0)])
def test_default_builds_run_on_the_others_too(capability: tuple[int, int]) -> None:
    assert code_for(parse_architectures(SETUP["ARCHS"]), capability).startswith("runs ")


def test_an_empty_list_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Dockerfile hands on what it was given, which may be nothing."""
    monkeypatch.setenv("SPARSE_RL_ARCHS", "")
    assert SETUP["architectures"]() == SETUP["ARCHS"]


def test_the_flags_of_nvcc_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_RL_ARCHS", "80;90+PTX;120")
    assert SETUP["gencode"]() == [
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90", "-gencode=arch=compute_120,code=sm_120",
    ]  # fmt: skip
    monkeypatch.setenv("SPARSE_RL_ARCHS", "80;90")  # the last one, where nothing is said
    assert SETUP["architectures"]() == "80;90+PTX"
    assert SETUP["gencode"]()[-1] == "-gencode=arch=compute_90,code=compute_90"
    assert ("SPARSE_RL_ARCHS", '"80;90+PTX"') in SETUP["macros"]("_cuda")
    assert "SPARSE_RL_ARCHS" not in dict(SETUP["macros"]("_C"))


def test_the_list_is_read_from_the_library(tmp_path: Path) -> None:
    assert built_architectures(tmp_path) == []
    (tmp_path / "_cuda.abi3.so").write_bytes(b"\x7fELF no list\0")
    assert built_architectures(tmp_path) == []
    (tmp_path / "_cuda.abi3.so").write_bytes(b"\x7fELF\0sparse_rl_archs=80;89;100+PTX\0more")
    found = built_architectures(tmp_path)
    assert found == parse_architectures("80;89;100+PTX")
    assert describe_architectures(found) == "machine code for 8.0, 8.9, 10.0, PTX of 10.0"
