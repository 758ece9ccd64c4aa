"""Settings of the checker's own tests: repeatable random texts, and the optional real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
settings.load_profile("repeatable")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data files: SPARSE_RL_DATA, or ../shared/data beside the repository."""
    folder = Path(os.environ.get("SPARSE_RL_DATA", DATA))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set SPARSE_RL_DATA to the folder of the real files")
    return folder
