"""What a sequence's neighbors change on a GPU: the same sequences alone, in fours, and among many.

    python -m benchmarks.gpu.invariance [--model 1.5B] [--save benchmarks/results]

In exact arithmetic nothing: random numbers are keyed by sequence and step, and slots know nothing of each other. Matrix
products, though, are chosen by their number of rows and round differently; this page says how much of a sequence is the
same, and how far log-probabilities of the same tokens are apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table, label
from benchmarks.rollout.policies import SHAPES, random_policy, random_prompts
from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import SnapKV

NUM_COMPARED = 8  # sequences: the first of the batch
HEADER = ("sequences at a time", "the same to the end", "same tokens, share", "largest difference of log-probs")


def table(model: str, dtype: torch.dtype, batch: int, new_tokens: int, device: str) -> Iterator[Table]:
    """The first sequences in small batches beside the same in the large one; the table after every row."""
    policy = random_policy(SHAPES[model], dtype, device)
    compressor = SnapKV(budget=new_tokens // 2, buffer=new_tokens // 8, num_sinks=2, window=4)
    prompts = random_prompts(batch, new_tokens // 4, SHAPES[model].vocab)
    params = SamplingParams(num_generations=1, max_completion_length=new_tokens)

    def sampled(num_slots: int, num_prompts: int) -> Rollout:
        sampler = RolloutSampler(policy, compressor, num_slots, end_token_ids=[])
        return sampler.generate(prompts[:num_prompts], params).to("cpu")

    among_all = sampled(batch, batch)
    result = Table(
        f"{SHAPES[model].name}, {label(dtype)}, beside {batch} at a time", HEADER,
        f"{NUM_COMPARED} sequences of {new_tokens} tokens, SnapKV {compressor.budget} + {compressor.buffer}. Tokens "
        "are the same up to the first that differs; log-probabilities are compared up to there.",
    )  # fmt: skip
    for num_slots in (1, 4):
        again = sampled(num_slots, NUM_COMPARED)
        width = again.sequences.shape[1]
        same = (again.sequences == among_all.sequences[:NUM_COMPARED, :width]).cummin(dim=1).values
        mask = same & again.completion_mask
        apart = (again.sampler_logprobs - among_all.sampler_logprobs[:NUM_COMPARED, :width]).abs()[mask]
        whole, share = int(same.all(dim=1).sum()), int(mask.sum()) / int(again.completion_mask.sum())
        largest = max(apart.tolist(), default=0)
        result.add(str(num_slots), f"{whole} of {NUM_COMPARED}", f"{100 * share:.1f} %", f"{largest:.2e}")
        yield result


def main() -> None:
    """Measure, print and save."""
    parser = options.parser(__doc__, "gpu-invariance.md", device="cuda")
    parser.add_argument("--model", default="1.5B", choices=list(SHAPES))
    args = options.parsed(parser)
    batch, new_tokens = (8, 16) if args.model == "tiny" else (256, 128)
    text = machine(args.device)
    for dtype in (torch.float32, torch.bfloat16):
        before = text
        for shown in table(args.model, dtype, batch, new_tokens, args.device):
            text = f"{before}\n\n{shown}"
            save(args.save, "gpu-invariance", "benchmarks.gpu.invariance", text)
    print(text)


if __name__ == "__main__":
    main()
