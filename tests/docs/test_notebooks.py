"""Every notebook runs from top to bottom in a new kernel of this interpreter, and prints what it promises."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import nbformat
import pytest

import sparse_rl_lightning
from benchmarks import REAL as MODEL
from docs.stored import FOLDER, LARGEST, LOGGED, NOTEBOOKS, REAL, execute, tidied

TINY = [path for path in NOTEBOOKS if path not in REAL]
FAST = "quickstart"  # `make test` runs this one, `make test-slow` all there are

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


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """What all cells have put out."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def run(notebook: nbformat.NotebookNode, folder: Path, seconds: int = 550) -> str:
    """Execute the notebook in place and return all it printed; the first error of a cell is raised."""
    execute(notebook, folder, seconds)
    size = sum(len(str(output)) for output in outputs_of(notebook))
    assert size < 1_000_000, f"{size:,} characters of output: too much for a notebook that people save"
    return printed_by(notebook)


def printed_by(notebook: nbformat.NotebookNode) -> str:
    """All that the cells printed."""
    streams = [output for output in outputs_of(notebook) if output.output_type == "stream"]
    return "".join(output.text for output in streams if output.name == "stdout")


def shown(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """What cells have displayed of a MIME type."""
    return [output.data[kind] for output in outputs_of(notebook) if kind in output.get("data", {})]


def numbers_after(label: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(re.escape(label) + r"\s*" + NUMBER, text)]


def assert_as_stored(path: Path, notebook: nbformat.NotebookNode) -> None:
    """A run prints the words that are stored, and nearly its numbers: another processor rounds, and draws, otherwise.

    Of each cell's numbers above a thousandth, three quarters agree within 0.01 or a factor of 2.5: so far apart are the
    divergences of a few sequences on two processors. Lines without a number are not compared where a real model in
    bfloat16 wrote them.
    """
    stored = nbformat.read(path, as_version=4)
    for index, cells in enumerate(zip(stored.cells, notebook.cells, strict=True)):
        before, now = (LOGGED.sub("", printed_by(nbformat.v4.new_notebook(cells=[cell]))) for cell in cells)
        if path in REAL:
            before, now = ("\n".join(filter(re.compile(NUMBER).search, text.split("\n"))) for text in (before, now))
        words = [re.sub(r"\s+", " ", re.sub(NUMBER, "#", text)) for text in (before, now)]
        assert words[0] == words[1], (
            f"cell {index} prints other words than are stored: python -m docs.stored {path.stem}"
        )
        numbers = zip(*(numbers_after("", text) for text in (before, now)), strict=True)
        near = [math.isclose(*pair, rel_tol=0.6, abs_tol=0.01) for pair in numbers if max(map(abs, pair)) > 1e-3]
        assert sum(near) >= 0.75 * len(near), f"cell {index} prints other numbers than are stored:\n{before}\n{now}"


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
    assert len(shown(notebook, "image/png")) == 2
    assert len(shown(notebook, "text/html")) == 1


def check_new_compressor(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert printed.count("keeps the contract") == 7
    assert "Unusual breaks the rule 'free memory'.\n  Found: with nan in free memory" in printed
    forgotten, replayed = numbers_after("forgotten", printed), numbers_after("replay off by at most", printed)
    assert len(forgotten) == len(replayed) == 9, "one for each compressor"
    assert max(replayed) < 1e-4
    assert abs(forgotten[0]) < 1e-5, "the full cache"
    assert min(forgotten[1:]) > 1e-3
    assert forgotten[3] < forgotten[1], "attention to large values beats lots"
    assert len(shown(notebook, "image/png")) == 1
    assert len(numbers_after("reward", printed)) == 4


def check_what_was_evicted(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert numbers_after("right with the full cache:", printed)[0] > 10
    (mean, largest), (dense, _) = (
        re.findall(rf"{name} +off by {NUMBER} on average, {NUMBER}", printed)[0] for name in ("replay", "dense")
    )
    assert float(mean) < 1e-5
    assert float(largest) < 2e-4
    assert float(dense) > 1e-2
    assert numbers_after("mismatch_split/rounding/kl_k3", printed)[0] < 1e-8
    assert numbers_after("mismatch_split/compression/kl_k3", printed)[0] > 1e-3
    views = shown(notebook, "text/html")
    assert len(views) == 10
    assert all(method in views[0] for method in ("StreamingLLM", "SnapKV", "RKV"))
    assert len(shown(notebook, "image/png")) == 2


def check_what_it_learned_to_keep(notebook: nbformat.NotebookNode, printed: str) -> None:
    full, own = numbers_after("FullKV", printed)[0], numbers_after("learned eviction", printed)
    assert full > 0.6
    assert max(numbers_after("SnapKV", printed) + numbers_after("RandomEviction", printed)) < 0.3, "rules lose most"
    assert len(own) == 4
    assert numbers_after("gained:", printed)[0] > 0.3
    assert min(numbers_after("full cache", printed)) > 0.6, "and the full cache has not unlearned"
    assert len(re.findall(r"held at the end by \d+%", printed)) == 8
    assert len(shown(notebook, "text/html")) == 2
    assert len(shown(notebook, "image/png")) == 1


def check_calibrate_a_schedule(notebook: nbformat.NotebookNode, printed: str) -> None:
    (mean,), (tail,) = numbers_after("mean", printed), numbers_after("5th percentile", printed)[:1]
    assert 0 < mean < 1
    assert 0 <= tail <= 1
    ceiling = numbers_after("ceiling", printed)[0]
    assert ceiling == pytest.approx(1, abs=1e-3), "sampler and learner are one process"
    assert "class_path: LengthSchedule" in printed
    judged = [float(found) for found in re.findall(r"the schedule .*worst bin " + NUMBER, printed)]
    assert len(judged) == 2, "before and after training"
    assert judged[0] > 0.8, "0.86 is what was asked for; the check draws what this draws"
    fixed = [float(found) for found in re.findall(r"always \d+ .*worst bin " + NUMBER, printed)]
    assert len(fixed) == 4
    assert fixed[0] < fixed[-1]
    assert len(re.findall(r"rollout \d   reward", printed)) == 6
    assert len(numbers_after("   tail", printed)) == 6
    assert len(shown(notebook, "image/png")) == 1


def check_bring_your_own_model(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert "model.safetensors" in printed
    rewards = numbers_after("   reward", printed)
    assert len(rewards) == 6
    assert max(rewards[-2:]) > rewards[0] + 0.2, "it learns"
    assert min(numbers_after("KV tokens saved", printed)) > 0, "under a cache that evicts"
    assert numbers_after("right:", printed)[0] >= 4, "transformers alone sees what was learned; a third is chance"
    assert len(shown(notebook, "image/png")) == 1


def check_from_trl(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert "DIFFERENT" not in printed
    assert len(re.findall(r"equal$", printed, re.MULTILINE)) == 23
    assert "here  0.8658754" in printed, "advantages with TRL's epsilon, as TRL gave them"
    for number in ("-0.1232385", "0.0399277", "0.2278702", "0.0129852"):
        assert f"here  {number}" in printed
    assert len(set(numbers_after("denominator='kept'", printed) + numbers_after("denominator='all'", printed))) == 2


def check_trl_sparse(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert numbers_after("learner to sampler:", printed)[0] < 2e-4
    lines = {name: line for line in printed.splitlines() for name in ("TRL", "naive", "Sparse-RL", "replay")
             if line.startswith(name)}  # fmt: skip
    assert len(lines) == 4
    for name, line in lines.items():
        assert 0.02 < numbers_after("full cache", line)[-1] < 1
        assert (name == "TRL") != bool(numbers_after("saved", line))
    assert numbers_after("k3", lines["naive"])[0] > 0.02, "measured without any correction too"
    assert numbers_after("rejected", lines["naive"]) == numbers_after("rejected", lines["replay"]) == [0]
    assert 0 < numbers_after("rejected", lines["Sparse-RL"])[0] < 0.5
    assert all(0.05 < share < 0.5 for share in numbers_after("saved", printed))
    assert len(shown(notebook, "image/png")) == 1


def check_real_answer(notebook: nbformat.NotebookNode, printed: str) -> None:
    rows = {line[:26].strip(): line.split()[-4:] for line in printed.splitlines() if re.search(r"e-0\d +\d+%$", line)}
    assert len(rows) == 9
    forgotten = {name: float(row[0]) for name, row in rows.items()}
    assert forgotten["RandomEviction, no sinks"] > 2 * forgotten["RandomEviction"]
    assert forgotten["SnapKV"] < forgotten["RandomEviction"]
    assert max(float(row[2]) for row in rows.values()) < 2e-4, "replay"
    assert len(re.findall(r"of KV saved:\n", printed)) == 6
    assert len(shown(notebook, "text/html")) == 2


def check_real_training(notebook: nbformat.NotebookNode, printed: str) -> None:
    assert "a list: 0.00   one word in a sentence: 0.17" in printed
    learned = numbers_after("   reward", printed)
    assert len(learned) == 5
    assert learned[-1] > learned[0] + 0.15
    assert max(numbers_after("   rejected", printed)) < 20
    for cache in ("full cache:", "SnapKV 64 + 16:"):
        before, after = numbers_after(f"{cache} reward", printed)
        assert after > before + 0.05
    assert len(shown(notebook, "image/png")) == 1


CHECKS = {
    "bring_your_own_model": check_bring_your_own_model,
    "calibrate_a_schedule": check_calibrate_a_schedule,
    "from_trl": check_from_trl,
    "new_compressor": check_new_compressor,
    "quickstart": check_quickstart,
    "real_answer": check_real_answer,
    "real_training": check_real_training,
    "trl_sparse": check_trl_sparse,
    "what_it_learned_to_keep": check_what_it_learned_to_keep,
    "what_was_evicted": check_what_was_evicted,
}


@pytest.mark.parametrize(
    ("text", "found"),
    [("a 1.5e-06, b", [1.5e-6]), ("a  10,485,760\na 0.0%", [10485760, 0]), ("a nan", []), ("ba: 1", [])],
)
def test_printed_numbers_are_found(text: str, found: list[float]) -> None:
    assert numbers_after("a", text) == found


def test_every_notebook_is_checked() -> None:
    """All in the folder run by themselves; what each promises must be written down here."""
    assert {path.stem for path in NOTEBOOKS} == set(CHECKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_stored(path: Path) -> None:
    """As ``python -m docs.stored`` writes it; what the notebook promises is in it."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size <= LARGEST
    assert notebook == tidied(nbformat.read(path, as_version=4))
    assert not re.search(r"/(?:home|root|work|tmp)/", path.read_text("utf-8")), "a path of some machine"
    first, *_ = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert max(len(cell.source.splitlines()) for cell in code) <= (45 if path in REAL else 30), "one idea a cell"
    CHECKS[path.stem](notebook, printed_by(notebook))


@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="needs the model of make real-model")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_notebook_of_the_real_model_runs(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    printed = run(notebook, folder, seconds=3500)
    assert list(folder.iterdir()) == [], "a notebook leaves no files behind"
    CHECKS[path.stem](notebook, printed)
    assert_as_stored(path, notebook)


@pytest.mark.timeout(600)  # each under two or three minutes on an idle core
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(FOLDER / f"{FAST}.ipynb", id=f"fast-{FAST}"),
        *(pytest.param(path, id=path.stem, marks=pytest.mark.slow) for path in TINY),
    ],
)
def test_notebook_runs(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    printed = run(notebook, folder)
    assert list(folder.iterdir()) == [], "a notebook leaves no files behind"
    CHECKS[path.stem](notebook, printed)
    assert_as_stored(path, notebook)
