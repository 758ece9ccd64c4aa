"""TRL's own loop of tool calls, told what the policy says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trl
from chat_templates import PUBLISHED
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from sparse_rl_lightning.testing import tiny_model

Row = dict[str, Any]
Script = Sequence[str]


class Talk(NamedTuple):
    """A conversation."""

    messages: list[Row]  # of tools
    reward: float
    read: list[list[int]]  # tokens before each turn


class Told(GRPOTrainer):
    """Plain TRL, told the turns of each conversation by the number in its prompt."""

    scripts: Sequence[Script]
    read: dict[int, dict[int, list[int]]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [self.next_turn(ids) for ids in prompt_ids], None

    def next_turn(self, ids: list[int]) -> list[int]:
        said = self._tokenizer.decode(ids)
        found = re.search(r"Case (\d+)\.", said)
        case, turn = int(found[1]), said.count("<|im_start|>assistant") - 1
        self.read.setdefault(case, {})[turn] = ids
        return list(self._tokenizer(self.scripts[case][turn] + "<|im_end|>", add_special_tokens=False)["input_ids"])


def trl_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PUBLISHED["qwen3"].tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def told_to_trl(
    folder: Path, rows: list[Row], environment: type, tools: Sequence[Callable[..., Any]], scripts: Sequence[Script]
) -> list[Talk]:
    """What tools answer, what is paid and what the policy reads where TRL drives the conversations."""
    tokenizer, heard = trl_tokenizer(), list[list[Row]]()

    def listen(completions: list[list[Row]], **_: Any) -> list[float]:
        heard.extend(completions)
        return [0.0] * len(completions)

    trainer = Told(
        model=tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=8192),
        processing_class=tokenizer, reward_funcs=listen, train_dataset=Dataset.from_list(rows), tools=[*tools],
        environment_factory=environment,
        args=GRPOConfig(
            str(folder), num_generations=2, per_device_train_batch_size=2 * len(rows), max_completion_length=4096,
            bf16=False, use_cpu=True, report_to="none",
        ),
    )  # fmt: skip
    trainer.scripts, trainer.read = scripts, {}
    trainer._generate_and_score_completions([row for row in rows for _ in range(2)])
    rewards = [*trainer._logs["rewards"][environment.__name__]]
    return [
        Talk(
            [message for message in heard[2 * case] if message["role"] == "tool"],
            rewards[2 * case],
            [trainer.read[case][turn] for turn in sorted(trainer.read[case])],
        )
        for case in range(len(rows))
    ]
