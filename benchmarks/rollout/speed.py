"""Whole rollouts of equal length: the own engine with an evicting and with a full cache beside transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, label, median_ratio, met
from benchmarks.ops.timing import wait
from benchmarks.rollout.bound import Bound, BoundMeter
from benchmarks.rollout.policies import Shape, random_policy, random_prompts
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Compressor, FullKV, SnapKV

SPARSE, FULL, GENERATE, CONTINUOUS = "sparse", "FullKV", "generate", "generate_batch"
RATIO_GOALS = {
    (SPARSE, torch.float32): 4.0,
    (SPARSE, torch.bfloat16): 10.0,
    (FULL, torch.float32): 1.5,
    (FULL, torch.bfloat16): 1.5,
}
BOUND_GOALS = {torch.float32: 0.65, torch.bfloat16: 0.6}
Rule: TypeAlias = Mapping[str, Any]  # temperature, top_k and top_p
WHOLE: Rule = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # the policy as it is
PAGE = 256  # tokens, of transformers' paged cache
HEADER = (
    "type", "new tokens", "what", "ms per step", "tokens/s", "ratio to generate", "goal", "met", "ratio to FullKV",
    "peak KV MB", "share of dense", "bound ms", "share of the bound", "goal", "met",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One rollout."""

    seconds: float
    kv_bytes: int  # at its peak
    read_bytes: float | None = None  # of keys and values, mean per step


Runner = Callable[[int], Outcome]  # new tokens -> what came out


@dataclass(frozen=True)
class Setting:
    """What is rolled out."""

    shape: Shape
    num_sequences: int
    prompt_length: int
    budget: int
    buffer: int
    stream_bytes: int

    def compressor(self) -> Compressor:
        """The evicting one."""
        return SnapKV(budget=self.budget, buffer=self.buffer, num_sinks=0)


@dataclass
class Contest:
    """Who rolls out, in turns, and what came of it."""

    setting: Setting
    dtype: torch.dtype
    runners: dict[str, Runner]
    meter: BoundMeter
    remarks: list[str]

    @classmethod
    def of(cls, setting: Setting, dtype: torch.dtype) -> Contest:
        """Own engine and transformers on one policy."""
        policy = random_policy(setting.shape, dtype, "cpu")
        prompts = random_prompts(setting.num_sequences, setting.prompt_length, setting.shape.vocab)
        per_token = setting.shape.kv_bytes_per_token(dtype)
        sparse, full = (RolloutSampler(policy, c, end_token_ids=[]) for c in (setting.compressor(), FullKV()))
        runners = {
            SPARSE: own_runner(sparse, prompts, per_token),
            FULL: own_runner(full, prompts, per_token),
            GENERATE: generate_runner(policy, prompts),
            CONTINUOUS: continuous_runner(policy, prompts, per_token),
        }
        meter = BoundMeter(policy, setting.num_sequences, setting.stream_bytes)
        return cls(setting, dtype, runners, meter, [])

    def run(self, new_tokens: int, rounds: int, table: Table) -> None:
        """Let all take turns ``rounds`` times after a short rollout of each, and add their rows."""
        for name in list(self.runners):
            self._attempt(name, min(self.setting.budget + self.setting.buffer, new_tokens))  # one eviction or more
        outcomes: dict[str, list[Outcome]] = {name: [] for name in self.runners}
        bounds = []
        for turn in range(rounds):
            bounds.append(self.meter())
            for name in list(self.runners):
                outcome = self._attempt(name, new_tokens)
                if outcome is None:
                    del outcomes[name]
                    continue
                outcomes[name].append(outcome)
                say(f"{label(self.dtype)}, {new_tokens} tokens, round {turn + 1}: {name} {outcome.seconds:.1f} s")
        for name in self.runners:
            table.add(*self._row(name, new_tokens, outcomes, bounds))
        forms, stream = sorted({b.product_form for b in bounds}), statistics.median(b.bandwidth for b in bounds)
        what = f"products {' or '.join(forms)}, stream {stream / 1e9:.1f} GB/s"
        self.remarks.append(f"{label(self.dtype)}, {new_tokens:,} tokens: {what}.")
        table.note = " ".join([table.note, *self.remarks]).strip()
        self.remarks.clear()

    def _attempt(self, name: str, new_tokens: int) -> Outcome | None:
        """Run a contender; a rival that cannot is left out from now on, and the page says why."""
        try:
            return self.runners[name](new_tokens)
        except Exception as failure:
            if name in (SPARSE, FULL):
                raise
            reason = str(failure).strip().split("\n")[0]
            self.remarks.append(f"{name} left out, {label(self.dtype)}: {type(failure).__name__}: {reason}.")
            del self.runners[name]
            return None

    def _row(self, name: str, new: int, outcomes: dict[str, list[Outcome]], bounds: list[Bound]) -> list[str]:
        ours = outcomes[name]
        times = [outcome.seconds for outcome in ours]
        ratios = {
            rival: median_ratio([outcome.seconds for outcome in outcomes[rival]], times) if rival in outcomes else None
            for rival in (GENERATE, FULL)
        }
        ms = 1e3 * statistics.median(times) / new
        goal = RATIO_GOALS.get((name, self.dtype))
        ratio = ratios[GENERATE]
        dense = self._slot_tokens(FULL, new) * self.setting.num_sequences
        dense_bytes = dense * self.setting.shape.kv_bytes_per_token(self.dtype)
        return [
            label(self.dtype), str(new), name, f"{ms:.2f}", f"{self.setting.num_sequences * 1e3 / ms:,.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if goal is None or ratio is None else f">= {goal:g}",
            "" if goal is None or ratio is None else met(ratio, goal),
            "" if ratios[FULL] is None else f"{ratios[FULL]:.2f}",
            f"{ours[-1].kv_bytes / 1e6:.2f}", self._share_of_dense(name, new, ours[-1].kv_bytes, dense_bytes),
            *self._bound_cells(ours, bounds, new),
        ]  # fmt: skip

    def _share_of_dense(self, name: str, new: int, kv_bytes: int, dense_bytes: int) -> str:
        """In percent, and for the own engine whether it is exactly capacity over length."""
        share = f"{100 * kv_bytes / dense_bytes:.1f} %"
        if name not in (SPARSE, FULL):
            return share
        capacity, length = self._slot_tokens(name, new), self._slot_tokens(FULL, new)
        exact = kv_bytes * length == dense_bytes * capacity
        return f"{share} ({'=' if exact else 'NOT'} {capacity}/{length})"

    def _slot_tokens(self, name: str, new: int) -> int:
        s = self.setting
        return s.budget + s.buffer if name == SPARSE else s.prompt_length + new

    def _bound_cells(self, ours: list[Outcome], bounds: list[Bound], new: int) -> list[str]:
        if ours[-1].read_bytes is None:
            return ["", "", "", ""]
        steps = [bound.seconds(outcome.read_bytes or 0) for bound, outcome in zip(bounds, ours, strict=True)]
        share = median_ratio([new * step for step in steps], [outcome.seconds for outcome in ours])
        shown, goal = f"{1e3 * statistics.median(steps):.2f}", BOUND_GOALS[self.dtype]
        return [shown, f"{100 * share:.0f} %", f">= {100 * goal:.0f} %", met(share, goal)]


def own_runner(sampler: RolloutSampler, prompts: list[list[int]], bytes_per_token: int, rule: Rule = WHOLE) -> Runner:
    """This library's sampler, in which nothing ends a sequence but its length; ``rule`` as of ``SamplingParams``."""

    def run(new_tokens: int) -> Outcome:
        start = time.perf_counter()
        rollout = sampler.generate(prompts, SamplingParams(max_completion_length=new_tokens, **rule))
        wait(sampler.model.device.type)
        taken = time.perf_counter() - start
        assert rollout.kv is not None
        assert rollout.completion_mask.sum() == len(prompts) * new_tokens
        read = float(rollout.kv.stored_integral.sum()) * bytes_per_token / max(new_tokens - 1, 1)
        return Outcome(taken, rollout.kv.peak_bytes, read)

    return run


def generate_runner(policy: PreTrainedModel, prompts: list[list[int]], rule: Rule = WHOLE) -> Runner:
    """``model.generate`` with a dynamic cache."""
    ids, sampling = torch.tensor(prompts, device=policy.device), {"do_sample": True, **rule}
    if rule["temperature"] == 0:
        sampling = {"do_sample": False}

    def run(new_tokens: int) -> Outcome:
        cache = DynamicCache()
        start = time.perf_counter()
        out = policy.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, min_new_tokens=new_tokens,
            max_new_tokens=new_tokens, pad_token_id=0, **sampling,
        )  # fmt: skip
        wait(policy.device.type)
        taken = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + new_tokens
        return Outcome(taken, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))

    return run


def continuous_runner(policy: PreTrainedModel, prompts: list[list[int]], bytes_per_token: int) -> Runner:
    """Transformers' continuous batching, its pool just large enough for all sequences."""

    def run(new_tokens: int) -> Outcome:
        length = len(prompts[0]) + new_tokens
        blocks = len(prompts) * -(-length // PAGE) + 1
        settings = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=blocks, max_batch_tokens=sum(len(prompt) for prompt in prompts)
        )
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        start = time.perf_counter()
        out = policy.generate_batch(
            prompts, generation_config=sampling, continuous_batching_config=settings, warmup=False
        )
        taken = time.perf_counter() - start
        lengths = {len(result.generated_tokens) for result in out.values()}
        if len(out) != len(prompts) or lengths != {new_tokens}:
            errors = {str(result.error) for result in out.values() if result.error}
            raise RuntimeError(f"{len(out)} of {len(prompts)} sequences, lengths {sorted(lengths)}, errors {errors}")
        return Outcome(taken, blocks * PAGE * bytes_per_token)

    return run


def speed_tables(
    setting: Setting, new_tokens: int, other_tokens: Sequence[int], rounds: int, long_rival: bool
) -> tuple[Table, Table]:
    """Rollouts of ``new_tokens`` beside transformers, and shorter and longer ones: sparsity pays with length."""
    note = (
        f"Random Qwen2 ({setting.shape.name}), {setting.num_sequences} sequences, prompt {setting.prompt_length}, "
        f"budget {setting.budget} + buffer {setting.buffer}. A step is the time of the whole rollout over its new "
        "tokens; ratios are medians over the rounds. Dense is prompt + new tokens for every sequence. The bound is "
        "the step's matrix products in the fastest plain form, and the keys and values read at the speed of a sum."
    )
    usual, longer = Table("Equal work", HEADER, note), Table("Other lengths", HEADER)
    for dtype in (torch.float32, torch.bfloat16):
        contest = Contest.of(setting, dtype)
        contest.run(new_tokens, rounds, usual)
        for count in other_tokens:
            contest = Contest.of(setting, dtype)  # whose caches are as large as these lengths need
            contest.runners.pop(CONTINUOUS)
            if not long_rival:
                contest.runners.pop(GENERATE)
            contest.run(count, rounds if count < new_tokens else max(1, rounds // 3), longer)
    return usual, longer
