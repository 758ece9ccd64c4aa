"""Records of runs with known numbers, and a parser that takes a page apart."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import yaml

from sparse_rl_lightning.report import RunRecord

HOSTILE = (
    "<script>alert(1)</script>&amp;\x1b[31m\x00\ud800 \u202e\" onload='x' <img src=https://evil.example/x.png>\nend"
)
VOID = {"meta", "path", "use", "rect", "br", "img", "link", "input", "hr"}


SAME: dict[str, float] = yaml.safe_load("""{
  completions/mean_length: 20.0, completions/max_length: 30.0, completions/repetition_rate: 0.05,
  completions/clipped_ratio: 0.02, token_mask_rate: 0.1, entropy: 0.4, kv/saving_final: 0.4, kv/saving_integral: 0.2,
  kv/full_peak_bytes: 8388608.0, kv/stored_tokens: 30.0, kv/full_tokens: 50.0, mismatch/kl_k3: 0.02,
  mismatch/ratio_p05: 0.7, sampling/importance_sampling_ratio/min: 1.0e-4, acceptance/p05: 0.8, acceptance/target: 0.86,
  guard/budget: 30.0, rewards/right/mean: 0.25, rewards/style/mean: 0.5, time/tokens_per_second: 1500.0,
  time/rollout: 2.0, time/rescoring: 1.0, time/rewards: 0.5, time/update: 1.5, memory/update_peak_bytes: 2147483648.0,
}""")
"""What every row has."""


def row(index: int, **others: float) -> dict[str, float]:
    rejected, peak = (0.1, 2.0**21) if index % 2 else (0.0, 2.0**20)
    counted = {"rollout": float(index), "step": float(2 * index), "reward": 0.25 + 0.01 * index}
    return {**counted, "rejection_rate": rejected, "kv/peak_bytes": peak, **SAME, **others}


def record(**fields: Any) -> RunRecord:
    options: dict[str, Any] = {
        "history": [row(i) for i in range(10)],
        "before": {"dense": 0.25, "sparse": 0.2},
        "after": {"dense": 0.5, "sparse": 0.45},
        "num_problems": 64,
        "measure": "accuracy",
        "seconds": 75.0,
        "steps": 20,
        "settings": {"compressor": "SnapKV(budget=24)"},
        "samples": [{"cache": "sparse", "prompt": "1+1=", "completion": "2", "reward": 1.0, "answer": "2"}],
        "title": "A run",
        "versions": {"torch": "2.13"},
        "config": {"model.sampling.num_generations": "8"},
    }
    return RunRecord(**{**options, **fields})


class Parser(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.labels: list[str] = []  # of charts
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "svg":
            self.labels.append(dict(attrs)["aria-label"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def text_of(html: str) -> str:
    return " ".join(" ".join(Parser(html).text).split())
