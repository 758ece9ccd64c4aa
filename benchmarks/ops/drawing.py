"""Drawing the next tokens of 32 sequences over a vocabulary of 151,936, by the rules that samplers offer."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common.tables import label
from benchmarks.ops.timing import Bench, Row
from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.draw import truncate

ROWS, GPU_ROWS, VOCABULARY = 32, 256, 151_936
QUICK = (2, 1000)
RULES: dict[str, dict[str, float]] = {
    "no rule": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


def drawing_rows(bench: Bench, dtype: torch.dtype, quick: bool = False) -> list[Row]:
    """One draw under every rule; ``quick`` takes toy sizes, without meaning."""
    count, size = QUICK if quick else (GPU_ROWS if bench.device == "cuda" else ROWS, VOCABULARY)
    logits = 2 * torch.randn(count, size, device=bench.device)
    logits[:, : size // 50] += 4 * torch.randn(count, size // 50, device=bench.device).abs()  # some tokens are likely
    return [bench_draw(bench, logits.to(dtype), name) for name in RULES]


def bench_draw(bench: Bench, logits: Tensor, name: str) -> Row:
    """Token and log-probability, against multinomial and an exponential race, after a sort where a rule needs it."""
    rule = RULES[name]
    keys = torch.arange(len(logits), device=logits.device)
    truncation = {key: rule[key] for key in rule if key != "temperature"}

    def probabilities() -> tuple[Tensor, Tensor]:
        logprobs = logits.float().log_softmax(dim=-1)
        return logprobs, truncate(logprobs, **truncation).softmax(dim=-1) if truncation else logprobs.exp()  # type: ignore[arg-type]

    def multinomial() -> Tensor:
        logprobs, allowed = probabilities()
        return logprobs.gather(-1, torch.multinomial(allowed, 1))

    def race() -> Tensor:
        logprobs, allowed = probabilities()
        return logprobs.gather(-1, (allowed / torch.empty_like(allowed).exponential_()).argmax(dim=-1, keepdim=True))

    def argmax() -> Tensor:
        logprobs = logits.float().log_softmax(dim=-1)
        return logprobs.gather(-1, logprobs.argmax(dim=-1, keepdim=True))

    rivals = {"argmax": argmax} if name == "greedy" else {"multinomial": multinomial, "race": race}
    return bench.compare(
        f"draw, {name}, {label(logits.dtype)}", "never slower",
        lambda: ops.draw(logits, keys, keys, **rule), rivals,  # type: ignore[arg-type]  # of one rule
        moved=logits.nbytes, stream=lambda: logits.sum(),
    )  # fmt: skip
