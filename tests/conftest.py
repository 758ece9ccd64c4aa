"""What every test starts from: fixed seeds, one thread, no network, and the optional real files."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gpu_files import in_no_group

if TYPE_CHECKING:
    from tests.gpus import RealGPU

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
ABSENT = [name for name in LAUNCHERS if name not in os.environ]

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so before any test module
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks of a used tokenizer would warn
torch.set_num_threads(1)
gc.disable()  # until everything is collected
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; it must be in a group that is run where there is one.

    Of a test with ``thinned(n)`` the first case and, by their names, one of every n others are fast.
    """
    begun = set[str]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        marker = item.get_closest_marker("thinned")
        if marker and test in begun and zlib.crc32(case.encode()) % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        begun.add(test)
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if lost := in_no_group(item.path.relative_to(config.rootpath).as_posix() for item in for_gpus):
        raise pytest.UsageError(f"tests for GPUs that tests/gpu_files.py names in no group: {', '.join(lost)}")
    if not torch.cuda.is_available():
        for item in for_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no garbage collection needs to look at it, then or later."""
    gc.freeze()
    gc.enable()


def draw_anew() -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)  # of a run before it
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test draws the same numbers, alone or in any order."""
    draw_anew()


@pytest.fixture(scope="module", autouse=True)
def seeds_of_module() -> None:
    """So does what the tests of a module share."""
    draw_anew()


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """No test is taken for a rank: strategies leave variables of launchers, which transformers would follow."""
    yield
    for name in ABSENT:
        os.environ.pop(name, None)
    left = torch.distributed.is_initialized()
    if left:  # the tests after this one are not to blame
        torch.distributed.destroy_process_group()
    assert not left, "a process group is left"


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables that the datasets library prepares stay out of the home folder."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> RealGPU:
    """A GPU, to be entered (``with gpu``) by what runs on it."""
    from tests.gpus import Pretended, RealGPU  # imports of the package that many tests do not need

    return RealGPU() if request.param == "real" else Pretended()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; main's changes to the path of Python are taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("SPARSE_RL_TRACEBACK", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which a run has ended."""
    from tiny_run import config, write  # seconds of imports that only the command line's tests need

    from sparse_rl_lightning.cli import main

    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        main(["fit", "--config", write(config())])
    return folder


@pytest.fixture
def used_folder(folder: Path, first_run: Path) -> Path:
    """A working directory of one's own with a copy of the first run."""
    shutil.copytree(first_run / "runs", folder / "runs")
    return folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data files: SPARSE_RL_DATA, or ../shared/data beside the repository."""
    return _optional_folder("SPARSE_RL_DATA", "data")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Folder of the real tiny models: SPARSE_RL_MODELS, or ../shared/models beside the repository."""
    return _optional_folder("SPARSE_RL_MODELS", "models")


def _optional_folder(variable: str, name: str) -> Path:
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set {variable} to the folder of the real {name}")
    return folder
