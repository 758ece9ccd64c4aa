"""What every test starts from: fixed seeds, one thread, no network, and the optional real files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so before any test module
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks of a used tokenizer would warn
torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test draws the same numbers, alone or in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables that the datasets library prepares stay out of the home folder."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


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
