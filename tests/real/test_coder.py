"""What is shown on a real model that calculates, Qwen2.5-Coder-0.5B-Instruct of ``make math-model``."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "models" / "qwen2.5-coder-0.5b-instruct"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="needs the model of make math-model"),
]


def test_it_has_one_matrix_for_embedding_and_head_and_can_calculate() -> None:
    model, tokenizer = load_pretrained(str(FOLDER))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 494_032_768  # its publisher's number
    assert len(tokenizer("2026", add_special_tokens=False).input_ids) == 4
    question = [{"role": "user", "content": "What is 17 + 25? Answer with the number alone."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    greedy = SamplingParams(max_completion_length=16, temperature=0.0)
    rollout = RolloutSampler(model, FullKV(), tokenizer=tokenizer).generate([prompt], greedy)
    assert tokenizer.decode(rollout.completion_ids[0], skip_special_tokens=True).strip() == "42"
