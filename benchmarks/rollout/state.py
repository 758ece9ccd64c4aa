"""Decode steps under a compressor with running state, with slots that are free between those in use."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.common.tables import Table, median_ratio
from benchmarks.ops.timing import wait
from benchmarks.rollout.policies import random_policy, random_prompts
from benchmarks.rollout.speed import Setting
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import H2O, Compressor, SnapKV
from sparse_rl_lightning.rollout import RolloutSession

LARGER = 8  # times the setting's budget: what is copied or summed per entry shows
STEPS = 8  # of a measurement, behind a few that warm up


def milliseconds(session: RolloutSession, ended: list[int]) -> float:
    """Milliseconds of a step, after the sequences in these slots have ended."""
    session.engine.logs.end[ended] = 0
    session.advance(max_steps=4)
    start, before = time.perf_counter(), session.scheduler.num_steps
    session.advance(max_steps=STEPS)
    wait(session.sampler.model.device.type)
    return 1e3 * (time.perf_counter() - start) / (session.scheduler.num_steps - before)


def state_table(setting: Setting, rounds: int) -> Table:
    """H2O beside SnapKV, with all slots in use and with every fourth of them free."""
    s, budget = setting, LARGER * setting.budget
    policy = random_policy(s.shape, torch.float32, "cpu")
    prompts = random_prompts(s.num_sequences, s.prompt_length, s.shape.vocab)
    free = {0: [], len(range(1, s.num_sequences, 4)): list(range(1, s.num_sequences, 4))}
    methods: dict[str, Compressor] = {"SnapKV": SnapKV(budget), "H2O": H2O(budget)}
    times: dict[tuple[str, int], list[float]] = {(name, ended): [] for name in methods for ended in free}
    for _ in range(rounds):
        for name, compressor in methods.items():
            sampler = RolloutSampler(policy, compressor, s.num_sequences, end_token_ids=[])
            params = SamplingParams(max_completion_length=budget)
            session = RolloutSession(sampler, params, s.prompt_length)
            session.add(prompts, range(s.num_sequences))
            session.advance(max_steps=1)
            for ended, slots in free.items():
                times[name, ended].append(milliseconds(session, slots))
    note = (
        f"Slots of {budget} entries and more, {s.num_sequences} sequences, float32. A step of H2O computes attention "
        "probabilities and adds them up; it copies no keys, whichever slots are free. Medians over the rounds."
    )
    table = Table("Running state", ("slots in use", "SnapKV ms", "H2O ms", "H2O to SnapKV"), note)
    for ended in free:
        both = [times[name, ended] for name in methods]
        cells = (f"{statistics.median(one):.2f}" for one in both)
        table.add(str(s.num_sequences - ended), *cells, f"{median_ratio(both[1], both[0]):.2f}")
    return table
