"""Every notebook runs from top to bottom in a new kernel of this interpreter, and prints what it promises."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import sparse_rl_lightning

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST = {"new_compressor", "quickstart"}  # the rest is left to `make test-slow`

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notebook runs. What Jupyter and IPython write goes beside it, not into the home folder."""
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel chooses: pictures inside the notebook
    paths = [str(Path(sparse_rl_lightning.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # the package that the tests test
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def run(notebook: nbformat.NotebookNode, folder: Path) -> str:
    """Execute the notebook in place and return all it printed; the first error of a cell is raised."""
    # without folders of kernel specs, python3 is the interpreter that runs this test, whatever else is installed
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    NotebookClient(notebook, km=manager, timeout=250, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def numbers_after(label: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(re.escape(label) + r"\s*" + NUMBER, text)]


def check_quickstart(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert max(numbers_after("exact replay to sampler:", printed)) < 1e-4
    assert min(numbers_after("dense policy to sampler:", printed)) > 1e-2  # what the replay explains was there
    replayed = numbers_after("replay difference", printed)
    assert len(replayed) == 5, "one for each compressor"
    assert max(replayed) < 1e-4
    full, sparse = numbers_after("peak KV bytes", printed)
    assert 0 < sparse < 0.7 * full
    saved = numbers_after("KV tokens saved", printed)
    assert saved[0] == 0
    assert all(10 < percent < 60 for percent in saved[1:])
    rewards = numbers_after("reward", printed)
    assert len(rewards) == 6
    assert 0 < max(rewards) < 1
    assert all(0 <= percent < 50 for percent in numbers_after("rejected", printed))
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 1


def check_new_compressor(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert printed.count("keeps the contract") == 2
    assert "all keep the contract" in printed
    assert "Unusual breaks the rule 'free memory'.\n  Found: with nan in free memory" in printed
    off, replayed = numbers_after("dense policy off by", printed), numbers_after("replay off by at most", printed)
    assert len(off) == len(replayed) == 8, "one for each compressor"
    assert max(replayed) < 1e-4
    assert off[0] < 1e-5, "the full cache"
    assert min(off[1:]) > 1e-3
    assert off[3] < off[1], "attention to large values beats lots"
    assert len(numbers_after("reward", printed)) == 4


CHECKS = {"new_compressor": check_new_compressor, "quickstart": check_quickstart}


@pytest.mark.parametrize(
    ("text", "found"),
    [("a 1.5e-06, b", [1.5e-6]), ("a  10,485,760\na 0.0%", [10485760, 0]), ("a nan", []), ("ba: 1", [])],
)
def test_printed_numbers_are_found(text: str, found: list[float]) -> None:
    assert numbers_after("a", text) == found


def test_there_are_notebooks() -> None:
    assert FAST <= {path.stem for path in NOTEBOOKS}


@pytest.mark.timeout(600)  # under one minute on an idle core
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in FAST else pytest.mark.slow) for path in NOTEBOOKS],
)
def test_notebook_runs(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    printed = run(notebook, folder)
    assert list(folder.iterdir()) == [], "a notebook leaves no files behind"
    if path.stem in CHECKS:
        CHECKS[path.stem](notebook, printed)
