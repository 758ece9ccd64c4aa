"""What the host asks of a GPU: launches, bytes and waits of a step, a draw, a compression, an admission and a look.

    python -m benchmarks.launches [--slots 256] [--save benchmarks/results]

Counted at the shapes of Qwen2.5-1.5B and 7B on a pretend GPU (``tests/pretend_gpu.py``) whose tensors have no values: a
minute on any machine. A launch is one op of torch or one of this library's; some of torch's (sort, top-k, cumulative
sum) launch several kernels. A wait stops the host until the device is done: a read, or a copy from host memory. Bytes
are those that ops of torch read and write, caches left out of account; the library's own ops are not among them. How
often whole rollouts wait is counted with a tiny policy, whose tensors have values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV, Compressor, SnapKV, StreamingLLM
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.rollout.engine.engine import StepRows
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.pretend_gpu import PretendGPU

PROMPT = 128  # tokens
SAMPLES = 8  # of a prompt
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18_944, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
}  # fmt: skip
METHODS: dict[str, type[Compressor]] = {"R-KV": RKV, "SnapKV": SnapKV, "StreamingLLM": StreamingLLM}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "20 top log-probs": {"top_logprobs": 20},
}


@dataclass(frozen=True)
class Counts:
    """What one phase asks of the device."""

    log: list[tuple[tuple[str, str], int]]  # every launch: file and line, op; bytes
    waits: Counter[tuple[str, str]]  # file and line, and what is waited for

    @property
    def nbytes(self) -> int:
        """Bytes moved by ops of torch."""
        return sum(nbytes for _, nbytes in self.log)

    @property
    def num_own(self) -> int:
        """Launches of the library's own ops."""
        return sum(op.startswith("sparse_rl::") for (_, op), _ in self.log)

    def passes(self, nbytes: int) -> int:
        """Launches that move at least this much."""
        return sum(size >= nbytes for _, size in self.log)

    def by_file(self) -> Counter[str]:
        """Launches by file."""
        return Counter(line.split(":")[0] for (line, _), _ in self.log)


@contextmanager
def rollout(
    shape: dict[str, Any], method: Compressor, num_slots: int, **params: Any
) -> Iterator[tuple[PretendGPU, Scheduler]]:
    """A rollout on a pretend GPU with this model, and no sequence in its slots yet."""
    ring = method.num_queries

    def answer(op: str, tensor: Tensor) -> int:
        """As many as there would be: tokens of equal prompts, those with a place in the ring, no error."""
        counts = {"repeat_interleave": len(tensor) * PROMPT if tensor.dim() else 0, "_local_scalar_dense": 0}
        return counts.get(op, len(tensor) // PROMPT * ring if tensor.dim() else 0)

    config = Qwen2Config(**shape, max_position_embeddings=32_768, eos_token_id=1, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    with PretendGPU("meta", answer) as gpu:
        sampler = RolloutSampler(
            gpu.copy_of(model), method, num_slots, [1], tokenizer=character_tokenizer(), cuda_graphs=False
        )
        settings = SamplingParams(num_generations=SAMPLES, max_completion_length=4096, **params)
        with sampling_mode(sampler.model):
            key = sampler.engine_key(settings, num_slots, PROMPT)
            yield gpu, sampler.scheduler(sampler.engine_for(key), settings, num_slots)


def counted(gpu: PretendGPU, run: Callable[[], object]) -> Counts:
    """What a function asks of the device."""
    gpu.reset()
    run()
    return Counts(gpu.log.copy(), gpu.waits.copy())


def admission(shape: dict[str, Any], num_prompts: int, num_slots: int) -> Counts:
    """Prompts that are read, copied to their samples, and the first tokens drawn."""
    method = RKV(budget=512, buffer=128, num_sinks=0)
    with rollout(shape, method, num_slots) as (gpu, scheduler):
        scheduler.add([[5] * PROMPT] * num_prompts, range(num_prompts * SAMPLES))
        return counted(gpu, scheduler.admit)


def look(shape: dict[str, Any], num_slots: int, **params: Any) -> Counts:
    """A look at all slots, which is queued behind a window of steps."""
    with rollout(shape, RKV(budget=512, buffer=128, num_sinks=0), num_slots, **params) as (gpu, scheduler):
        scheduler.add([[5] * PROMPT] * (num_slots // SAMPLES), range(num_slots))
        scheduler.admit()
        return counted(gpu, scheduler._queue_check)


def step(shape: dict[str, Any], num_slots: int) -> Counts:
    """A decode step of all slots, the draw included."""
    with rollout(shape, RKV(budget=512, buffer=128, num_sinks=0), num_slots) as (gpu, scheduler):
        rows = StepRows.of(list(range(num_slots)), num_slots, num_slots, torch.device("cuda", 0))
        return counted(gpu, lambda: scheduler.engine.step(rows))


def draw(shape: dict[str, Any], num_slots: int, **params: Any) -> Counts:
    """The draw of a step alone."""
    with rollout(shape, RKV(budget=512, buffer=128, num_sinks=0), num_slots, **params) as (gpu, scheduler):
        logits = torch.zeros(num_slots, shape["vocab_size"], device="cuda")
        places = torch.arange(num_slots, device="cuda")
        at = scheduler.cache.seen[places]
        return counted(gpu, lambda: scheduler.engine.draw(logits, places, at))


def compression(shape: dict[str, Any], method: type[Compressor], slots: list[int], num_slots: int) -> Counts:
    """Cutting these slots from 640 entries to 512."""
    sizes = {"num_sinks": 0} if method is not StreamingLLM else {}
    with rollout(shape, method(budget=512, buffer=128, **sizes), num_slots) as (gpu, scheduler):
        engine, count = scheduler.engine, len(slots)
        return counted(gpu, lambda: engine.compression.compress(engine.cache, slots, [640] * count, [128] * count))


def phases(shape: dict[str, Any], num_slots: int) -> Iterator[tuple[str, Callable[[], Counts]]]:
    """What is counted, with its name."""
    yield "decode step", lambda: step(shape, num_slots)
    for name, params in DRAWS.items():
        yield f"draw, {name}", lambda params=params: draw(shape, num_slots, **params)
    scattered = list(range(0, num_slots, max(2, num_slots // 8)))[:8]
    for name, method in METHODS.items():
        for which, slots in (("all slots", list(range(num_slots))), (f"{len(scattered)} scattered", scattered)):
            yield (
                f"compression, {name}, {which}",
                lambda method=method, slots=slots: compression(shape, method, slots, num_slots),
            )
    for prompts in (1, num_slots // SAMPLES):
        yield (
            f"admission, {prompts} prompt{'s' * (prompts > 1)} x {SAMPLES}",
            lambda prompts=prompts: admission(shape, prompts, num_slots),
        )
    yield "look", lambda: look(shape, num_slots)
    yield "look, stop strings", lambda: look(shape, num_slots, stop_strings=("##",))


@dataclass(frozen=True)
class Waits:
    """How a whole rollout waits for the device."""

    steps: int
    idle: int  # waits during which the device has nothing to do
    behind: int  # waits for an event with work queued behind it


def whole(num_sequences: int, num_slots: int, **params: Any) -> Waits:
    """A rollout of a tiny policy with values, the second of its sampler: graphs are captured by then."""
    tokenizer, steps = character_tokenizer(), [0]
    model = tiny_model(
        vocab_size=len(tokenizer), hidden_size=32, num_heads=2, num_kv_heads=1, initializer_range=0.4, eos_token_id=None
    )
    method = RKV(budget=16, buffer=8, num_sinks=2, window=4)
    settings = SamplingParams(max_completion_length=128, num_generations=SAMPLES, seed=1, **params)
    prompts = [[5 + i, 9, 11, 40, 22] for i in range(num_sequences // SAMPLES)]
    with PretendGPU() as gpu:
        sampler = RolloutSampler(
            gpu.copy_of(model), method, num_slots, [3, 4], tokenizer=tokenizer, cuda_graphs="require"
        )
        for _ in range(2):
            gpu.reset()
            sampler.generate(prompts, settings, progress=lambda now: steps.__setitem__(0, now.step))
    return Waits(steps[0], gpu.waits.total(), gpu.late.total())


def table_of_waits() -> Table:
    """A table of whole rollouts."""
    table = Table(
        "Waits of whole rollouts",
        ["rollout", "steps", "waits", "waits per 128 steps", "looks read while the device works"],
        "A tiny policy with R-KV; 5 tokens of prompts, up to 128 of completions, two end tokens. A look is read when "
        "the next window of steps is queued, so that the device does not idle; the waits are at a rollout's begin and "
        "end, and where all sequences have ended by length.",
    )
    for name, sequences, slots, params in (
        ("8 sequences, 8 slots", 8, 8, {}),
        ("48 sequences, 8 slots", 48, 8, {}),
        ("the same, stop strings", 48, 8, {"stop_strings": ("a", "Z")}),
    ):
        counts = whole(sequences, slots, **params)
        table.add(
            name, f"{counts.steps}", f"{counts.idle}", f"{128 * counts.idle / counts.steps:.1f}", f"{counts.behind}"
        )
    return table


def tables(num_slots: int) -> list[Table]:
    """One table of all phases, one of where the launches of a step come from."""
    phases_table = Table(
        f"Launches, bytes and waits at {num_slots} slots",
        ["phase", "launches", "of them own ops", "waits", *(f"GB, {name}" for name in SHAPES)],
        f"Prompts of {PROMPT} tokens; compressions from 640 entries to 512; a step decodes all slots. Launches and "
        "waits are the same for both models, which have 28 layers.",
    )
    passes = Table(
        "Passes over the vocabulary",
        ["draw", "launches", "passes of torch's ops", "GB"],
        "A pass moves at least a logit of 16 bits per token and slot. The op `draw`, one launch here, is two kernels: "
        "one reads the logits once; the other reads a chunk of 512 again, with top-k, top-p or min-p the row, "
        "which fits into the second-level cache. All other launches are of numbers per slot: which token stands where. "
        "`key_redundancy`, one launch above, is three kernels for up to 512 heads.",
    )
    files = Table("Launches of a decode step by file", ["file", "launches"])
    (_, shape), (_, larger) = SHAPES.items()
    for (name, run), (_, run_other) in zip(phases(shape, num_slots), phases(larger, num_slots), strict=True):
        counts, more = run(), run_other()
        assert len(counts.log) == len(more.log), name
        sizes = [f"{counted.nbytes / 1e9:.2f}" for counted in (counts, more)]
        phases_table.add(name, f"{len(counts.log):,}", f"{counts.num_own:,}", f"{counts.waits.total():,}", *sizes)
        if name.startswith("draw, "):
            logits = 2 * num_slots * shape["vocab_size"]  # in 16 bits
            passes.add(name.removeprefix("draw, "), f"{len(counts.log)}", f"{counts.passes(logits)}", sizes[0])
        elif name == "decode step":
            for file, count in counts.by_file().most_common():
                files.add(f"`{file}`", f"{count}")
    return [phases_table, passes, files]


def main() -> None:
    """Count, and print or save the tables."""
    parser = options.parser(__doc__, "launches.md")
    parser.add_argument("--slots", type=int, default=256, help="slots that decode at the same time")
    args = options.parsed(parser)
    text = "\n\n".join([f"Counted, not timed: {machine('cpu')}.", *map(str, [*tables(args.slots), table_of_waits()])])
    print(text)
    save(args.save, "launches", "What the host asks of a GPU", text)


if __name__ == "__main__":
    main()
