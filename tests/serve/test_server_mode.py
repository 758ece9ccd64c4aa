"""TRL as a client: its trainer in server mode, whose rollouts and weights go through the server; and its teacher's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serve.stub_vllm import free_port
from tests.serve.test_records import scores
from tests.serve.test_server import RKV, Running, built, folder

pytest.importorskip("trl", reason="trl is an extra")
__all__ = ["folder"]  # of the other file
ROOT = Path(__file__).parents[2]


def served(folder: Path, compressor: str) -> Running:
    options = ["--compressor", compressor, "--allow_updates", "--trainer", "127.0.0.1", "--num_slots", "8"]
    options += ["--served_model_name", str(folder)]  # as AsyncGRPO calls it
    return Running(built(folder, *options, key="client", update_key="trainer"))


@pytest.fixture
def running(folder: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    running = served(folder, request.param)
    yield running
    running.close()


def trained(running: Running, folder: Path, where: Path, **changes: Any) -> list[dict[str, float]]:
    """What TRL has logged of each step."""
    url = running.url.replace("http://", "http://trl:trainer@")
    settings = json.dumps({"max_steps": 3, "max_completion_length": 40, **changes})
    command = [
        sys.executable,
        "-m",
        "tests.serve.trl_trainer",
        url,
        str(folder),
        str(where),
        str(free_port()),
        settings,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    logged = [step for step in json.loads(run.stdout.splitlines()[-1]) if "loss" in step]
    assert len(logged) == 3
    return logged


@pytest.mark.parametrize("running", ["FullKV"], indirect=True)
def test_the_server_draws_with_the_weights_of_the_trainer(running: Running, folder: Path, tmp_path: Path) -> None:
    logged = trained(running, folder, tmp_path)
    assert [step["sampling/sampling_logp_difference/mean"] <= 2e-6 for step in logged] == [True] * 3
    assert running.server.control.num_updates == 3


@pytest.mark.parametrize("running", ["FullKV"], indirect=True)
def test_updates_that_are_thrown_away_are_noticed(
    running: Running, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before."""
    monkeypatch.setattr(running.server.control.updates, "write", lambda new: None)
    first, *others = trained(running, folder, tmp_path)
    assert first["sampling/sampling_logp_difference/mean"] <= 2e-6
    assert all(step["sampling/sampling_logp_difference/mean"] > 1e-3 for step in others)


@pytest.mark.parametrize("running", ["FullKV"], indirect=True)
def test_async_grpo_draws_while_it_trains(running: Running, folder: Path, tmp_path: Path) -> None:
    url = running.url.replace("http://", "http://trl:trainer@")
    command = [sys.executable, "-m", "tests.serve.async_trainer", url, str(folder), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    first, *_ = [step for step in json.loads(run.stdout.splitlines()[-1]) if "loss" in step]
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert running.server.control.num_updates == 4  # before the first step, and after each

    held, trained, before = (
        dict(model.named_parameters())
        for model in (
            running.server.thread.sampler.model,
            *map(AutoModelForCausalLM.from_pretrained, (tmp_path, folder)),
        )
    )
    assert all(torch.equal(held[name], weight) for name, weight in trained.items())
    assert not any(torch.equal(before[name], weight) for name, weight in trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("running", [RKV], indirect=True)
@pytest.mark.parametrize(("mode", "keeps"), [("sequence_mask", False), ("token_truncate", True)])
def test_a_compressed_cache_needs_weights_by_the_token(
    running: Running, folder: Path, tmp_path: Path, mode: str, keeps: bool
) -> None:
    logged = trained(running, folder, tmp_path, vllm_importance_sampling_mode=mode, max_completion_length=70)
    ratios = [step["sampling/importance_sampling_ratio/mean"] for step in logged]
    assert all(ratio > 0.9 for ratio in ratios) == keeps


@pytest.mark.parametrize("running", [RKV], indirect=True)
def test_a_teacher_scores_what_it_is_sent(running: Running, folder: Path) -> None:
    """By TRL's own client: the most likely tokens of each position, and the one that is there."""
    program = (
        "import json, sys\nfrom tests.serve.stub_vllm import install\ninstall()\n"
        "from trl.generation.vllm_client import VLLMClient\n"
        "client = VLLMClient(base_url=sys.argv[1])\n"
        "said = client.get_sequence_logprobs(json.loads(sys.argv[2]), [2, 3], top_logprobs=4, temperature=0.5)\n"
        "print(json.dumps(said))"
    )
    sequences = [[7, 8, 9, 10], [*range(5, 16)] * 4]
    url = running.url.replace("http://", "http://trl:client@")
    command = [sys.executable, "-c", program, url, json.dumps(sequences)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    for row, (sequence, first) in enumerate(zip(sequences, (2, 3), strict=True)):
        top = scores(folder, sequence, 0.5)[first - 1 :].topk(4)
        assert said["logprob_token_ids"][row] == top.indices.tolist()
        torch.testing.assert_close(torch.tensor(said["logprobs"][row]), top.values.float(), rtol=0, atol=2e-5)
        assert said["actual_token_ids"][row] == [[token] for token in sequence[first:]]
