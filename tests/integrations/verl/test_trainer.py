"""The whole trainer of verl on a CPU, as a user starts it: its actor learns from rollouts drawn here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from sparse_rl_lightning.testing import character_tokenizer, tiny_model

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")),
        reason="needs verl and Ray: pip install 'sparse-rl-lightning[verl]' and pip install --no-deps verl",
    ),
]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / 10
"""
STEPS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = character_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.06).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{i}+12="}],
         "reward_model": {"style": "rule", "ground_truth": str(i + 12)}, "extra_info": {"index": i}}
        for i in range(12)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    return tmp_path


def trained(folder: Path, compressor: str, *more: str) -> list[dict[str, Any]]:
    """What verl logs of each step."""
    rollout, actor = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
    correction = "algorithm.rollout_correction."
    given = [
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet", "data.train_batch_size=4",
        "data.max_prompt_length=32", "data.max_response_length=40", "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.ref.strategy=fsdp2",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}strategy=fsdp2", f"{actor}ppo_mini_batch_size=4", f"{actor}ppo_micro_batch_size_per_gpu=4",
        f"{actor}use_torch_compile=false", f"{actor}optim.lr=0.01", f"{actor}fsdp_config.dtype=float32",
        f"+{actor}fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{rollout}name=sparse_rl", f"{rollout}tensor_model_parallel_size=1", f"{rollout}calculate_log_probs=true",
        f"{rollout}dtype=float32", f"{rollout}max_num_seqs=8", f"{rollout}n=4", f"{rollout}agent.num_workers=1",
        f"{rollout}log_prob_micro_batch_size_per_gpu=4", f"+{rollout}engine_kwargs.sparse_rl.compressor={compressor}",
        f"{correction}rollout_is=token", f"{correction}rollout_is_threshold=1e9", f"{correction}rollout_rs=seq_max_k2",
        f"{correction}rollout_rs_threshold=42.41",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[file]",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=24", "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false", *more,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": f"{HERE.parents[2]}:{HERE}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled", "VERL_FILE_LOGGER_PATH": f"{folder}/log.jsonl",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",  # FSDP is registered for devices of this name
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,sparse_rl_lightning.integrations.verl.register",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"] for line in lines]


def test_with_a_full_cache_the_server_draws_from_the_actors_weights(folder: Path) -> None:
    steps = trained(folder, "{class_path: FullKV}")
    assert len(steps) == STEPS
    assert all(step["actor/grad_norm"] > 0.1 and step["actor/lr"] == 0.01 for step in steps)  # the weights move
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-3)


def test_with_a_compressed_cache_its_correction_has_something_to_correct(folder: Path) -> None:
    compressor = "{class_path: SnapKV, init_args: {budget: 16, buffer: 8, num_sinks: 2, window: 4}}"
    steps = trained(folder, compressor, "trainer.use_v1=false")
    assert len(steps) == STEPS
    for step in steps:
        assert step["training/rollout_probs_diff_max"] > 1e-3
        assert step["rollout_corr/rollout_is_max"] > 1.1
        assert step["actor/grad_norm"] > 0
        assert step["rollout_corr/rollout_rs_seq_masked_fraction"] == 0
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"] + 0.05  # it learns to write digits
