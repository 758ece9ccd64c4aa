"""The evaluation harness of EleutherAI on a compressed cache: its answers are the sampler's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.integrations.transformers import compressed_generation
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to",
    "One day, a boy named Tim went to the park with his mom. They saw a big",
    "The cat",
]
TASK = """
task: story
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{prompt}}}}"
generation_kwargs: {{until: ["THE END"], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TOKENS = 120


def test_answers_under_a_budget_are_the_samplers(models_dir: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs the EleutherAI harness: pip install lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = models_dir / "stories260K"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    (tmp_path / "story.yaml").write_text(TASK.format(rows=rows, tokens=TOKENS))
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=len(TEXTS), device="cpu")

    def answers() -> list[str]:
        tasks = TaskManager(include_path=str(tmp_path))
        found = lm_eval.simple_evaluate(harness, tasks=["story"], task_manager=tasks, bootstrap_iters=0)
        samples = sorted(found["samples"]["story"], key=lambda one: one["doc_id"])
        return [one["resps"][0][0] for one in samples]

    full = answers()
    compressor = SnapKV(budget=32, buffer=8, window=8)
    with compressed_generation(model, compressor):
        some = answers()
    sampler = RolloutSampler(model, compressor)
    rollout = sampler.generate(
        [tokenizer(text)["input_ids"] for text in TEXTS], SamplingParams(max_completion_length=TOKENS, temperature=0)
    )
    own = [row[mask] for row, mask in zip(rollout.sequences, rollout.completion_mask, strict=True)]
    assert some == [tokenizer.decode(ids, skip_special_tokens=True) for ids in own]
    assert some != full == answers()
