"""The contest of engines: own ones run, a rival that cannot is told, and numbers are held against the right rival."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines import __main__ as command
from benchmarks.engines import rivals
from benchmarks.engines.contest import OWN, WORKERS, Contender, Engine
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

TIMES = {
    rivals.FULL: [2.0, 4.0], rivals.SPARSE: [1.0, 2.0], "transformers generate": [20.0, 10.0],
    rivals.OPENVINO_FULL: [6.0, 4.0], rivals.OPENVINO_SPARSE: [3.0, 3.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers reads."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = character_tokenizer("0123456789abcdef")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens."""
    for name, value in {"SEQUENCES": 2, "PROMPT": 4, "BUDGET": 16, "BUFFER": 8}.items():
        monkeypatch.setattr(command, name, value)


def run(policy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of own engines and transformers."""
    own = f"--policy {policy} --work {folder}/work --save {folder} --rivals transformers --threads 1"
    monkeypatch.setattr(sys, "argv", f"engines {own} --types float32 --tokens 4 40 --rounds 2".split())
    command.main()
    return (folder / "engines-cpu.md").read_text()


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_own_engines_take_part_beside_transformers(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = run(policy, tmp_path, monkeypatch)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "float32 |" in line]
    names = [rivals.FULL, rivals.SPARSE, *rivals.IN_PROCESS, "transformers generate"]
    assert [row[1:3] for row in rows] == [[n, name] for n in ("4", "40") for name in names]
    assert all(float(row[3]) > 0 for row in rows)
    others = ["transformers generate", "transformers generate", rivals.FULL, rivals.SPARSE, ""]
    assert [row[5] for row in rows] == others * 2


def interpreter(folder: Path) -> Path:
    """One that is not this library's, and has what this one has."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.usefixtures("quick")
def test_a_rival_that_does_not_run_is_left_out_with_the_reason(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = Engine("vllm_cpu.py", interpreter(tmp_path), policy)
    found = {rivals.FULL: Engine("ours.py", OWN, policy), "vLLM": rival}
    monkeypatch.setattr(command, "engines", lambda *_: found)
    page = run(policy, tmp_path, monkeypatch)
    assert "vLLM is left out in float32: ended; " in page
    assert "No module named 'vllm'" in page
    assert "| vLLM |" not in page


def test_what_cannot_be_made_is_left_out(policy: Path, tmp_path: Path) -> None:
    """llama.cpp has one policy, and this is another."""
    found = command.engines(policy, tmp_path, ["transformers", "llamacpp"], remarks := [])
    assert list(found) == [rivals.FULL, rivals.SPARSE, *rivals.IN_PROCESS, "transformers generate"]
    assert remarks == [
        f"llamacpp is left out: its file is made of the policy of make real-model alone, not of {policy}."
    ]


def test_an_own_engine_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended; .* has why"):
        Contender(Engine("ours.py", OWN, tmp_path / "none"), {"threads": 1, "dtype": "float32"}, tmp_path / "log")


def test_a_call_that_gives_too_few_tokens_is_an_error(tmp_path: Path) -> None:
    """A time of less work than was asked for is none."""
    worker = tmp_path / "short.py"
    worker.write_text(
        "import sys; sys.path.append(sys.argv.pop())\n"
        "from serve import serve\n"
        "serve(lambda _: lambda prompts, n: [n - 1])\n"
    )
    asked = json.dumps({"prompts": [[1]], "new_tokens": 3})
    done = subprocess.run([sys.executable, worker, "{}", WORKERS], input=asked, capture_output=True, text=True)
    assert "3 tokens wanted, not [2]" in done.stderr
    assert "seconds" not in done.stdout


def test_each_is_held_against_the_strongest_of_its_kind() -> None:
    openvino, evicting = rivals.OPENVINO_FULL, rivals.OPENVINO_SPARSE
    held = command.comparisons
    assert held("bfloat16", 256, rivals.FULL, TIMES) == [(openvino, "2.00", ">= 1.4", "yes")]
    assert held("bfloat16", 256, rivals.SPARSE, TIMES) == [
        (evicting, "2.25", ">= 1.8", "yes"), (openvino, "4.00", "", ""),
    ]  # fmt: skip
    assert held("bfloat16", 1500, rivals.SPARSE, TIMES)[1] == (openvino, "4.00", ">= 2.5", "yes")
    assert held("float32", 1500, rivals.SPARSE, TIMES)[0] == (evicting, "2.25", "", "")
    assert held("bfloat16", 256, openvino, TIMES) == []
