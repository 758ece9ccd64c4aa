"""Write the conformance cases again: ``python -m tests.integrations.record.write_cases``.

Each is a JSON file with what an engine knows, and the record that says it. A case with ``refused`` is a record that a
reader must not accept, with a part of the reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sparse_rl_lightning.integrations.record import Kept, Request, SampledRecord, record_of_kept, write_record
from sparse_rl_lightning.integrations.record.files import FORMAT, VERSION

FOLDER = Path(__file__).parent / "cases"
LOGPROBS = [-0.25 * (i % 5) for i in range(24)]


def request(*events: Kept, prompt: int = 8) -> Request:
    return Request(list(range(1, prompt + 1)), [50 + i for i in range(24)], LOGPROBS, list(events))


CASES: dict[str, tuple[str, list[Request]]] = {
    "nothing": ("A cache that keeps everything.", [request(), request(prompt=3)]),
    "blocks": (
        "Blocks of 4 tokens leave all layers and heads at once: one line an event, one run for adjacent blocks.",
        [request(Kept(16, [*range(4), *range(12, 16)]), Kept(24, [*range(4), *range(20, 24)]))],
    ),
    "layers": (
        "Every layer keeps its own tokens, all its heads the same.",
        [request(Kept(14, [0, 1, 5, 9, 11, 12, 13], layer=0), Kept(14, [0, 2, 3, 4, 11, 12, 13], layer=1))],
    ),
    "heads": (
        "One head keeps its own tokens; the events of two requests are not in the order of their queries.",
        [
            request(Kept(20, [0, 13, 14, 15, 16, 17, 18, 19], layer=1, head=1), Kept(12, [0, 8, 9, 10, 11])),
            request(Kept(9, [0, 4, 8], layer=0, head=0), Kept(9, [0, 5, 8], layer=0, head=1)),
        ],
    ),
}  # fmt: skip


def write(name: str, case: dict[str, Any]) -> None:
    text = json.dumps(case, indent=None, separators=(", ", ": "))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (about, requests) in CASES.items():
        record = record_of_kept(requests, 2, 2, 0.7)
        runs = record.runs.split(record.num_runs.tolist())
        evictions = [
            {"eviction": row, "runs": own.tolist()} for row, own in zip(record.evictions.tolist(), runs, strict=True)
        ]
        known = {"about": about, "num_layers": 2, "num_heads": 2, "temperature": 0.7}
        write(name, known | {"requests": [asdict(one) for one in requests], "evictions": evictions})
        write_record(record, FOLDER / f"{name}.safetensors")
    blocks = record_of_kept(CASES["blocks"][1], 2, 2, 0.7)
    again = torch.tensor([[4, 9]], dtype=torch.int32)
    broken(blocks, "future", "A token is gone before it was there.", "a token has always seen itself",
           runs=torch.cat([blocks.runs[:-1], torch.tensor([[12, 30]], dtype=torch.int32)]))  # fmt: skip
    broken(blocks, "twice", "A token is evicted a second time.", "evicts a token that was evicted before",
           runs=torch.cat([blocks.runs[:-1], again]))  # fmt: skip


def broken(record: SampledRecord, name: str, about: str, reason: str, **arrays: torch.Tensor) -> None:
    """A record that no :class:`SampledRecord` can be, written around it."""
    numbers = {"num_layers": record.num_layers, "num_heads": record.num_heads, "temperature": record.temperature}
    header = {"format": FORMAT, "version": str(VERSION), "numbers": json.dumps(numbers)}
    save_file({**record.arrays, **arrays}, FOLDER / f"{name}.safetensors", header)
    write(name, {"about": about, "refused": reason})


if __name__ == "__main__":
    main()
