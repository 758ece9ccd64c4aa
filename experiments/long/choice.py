"""Which cache the study of long completions uses: greedy answers of the policy before training, under each.

    python -m experiments.long.choice [--runs runs/long]

The policy is warmed up where it is not there yet; experiments/long/PROTOCOL.md says what these numbers choose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.arithmetic import solved
from experiments.long.studies import LONGEST, METHODS, QUARTER, STAGES, TERMS
from experiments.long.task import LongSums
from experiments.runner.studies import Where
from experiments.stability.task import right_answer
from sparse_rl_lightning import RolloutSampler, SamplingParams, compressors
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.text import percent


def main() -> None:
    """Print the share of right answers under each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/long"))
    where = Where(parser.parse_args().runs.absolute())
    torch.set_num_threads(1)
    QUARTER.prepare(where)
    folder = STAGES[-1].policy(where)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    rows = LongSums(num_terms=TERMS).val_rows()
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    greedy = SamplingParams(max_completion_length=LONGEST, temperature=0.0)
    caches: dict[str, compressors.Compressor] = {"full": compressors.FullKV()}
    for name, method in METHODS.items():
        caches[name] = getattr(compressors, method["class_path"])(budget=QUARTER.budget, **method["init_args"])
    for name, cache in caches.items():
        sampler = RolloutSampler(model, cache, num_slots=64, tokenizer=tokenizer)
        right = solved(sampler, tokenizer, rows, prompts, greedy, Rewards(right_answer))
        print(f"{name}: {percent(right)} of {len(rows)} answers are right", flush=True)


if __name__ == "__main__":
    main()
