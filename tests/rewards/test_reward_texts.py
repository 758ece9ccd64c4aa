"""What reward functions see of a text: special tokens if asked for, and the prompt as the policy read it."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import PUBLISHED
from lightning.pytorch import Trainer
from tiny_grpo import grouped

from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.rewards import check_rewards
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.testing import tiny_model

TAG = "<|endoftext|>"
THINKS = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}<|im_start|><think>"


class Chats(PromptDataModule):
    more: dict[str, Any] = {}  # noqa: RUF012

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": str(n)}], "answer": "1"} | self.more for n in range(4)]


def seen(reward_of: Any = None, more: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a reward function gets in one step; the tokenizer has few tokens, so that tags are drawn."""
    found: dict[str, Any] = {}

    def reward(
        completions: list[str], completion_ids: list[list[int]], prompt_texts: list[str], **_: Any
    ) -> list[float]:
        found.update(texts=completions, ids=completion_ids, prompts=prompt_texts)
        return [float(len(text)) for text in completions]

    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    tokenizer.chat_template = THINKS
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, eos_token_id=tokenizer.eos_token_id)
    sizes = {"num_generations": 4, "max_completion_length": 64}
    module = SparseGRPO(LoadedPolicy(model, tokenizer), FullKV(), reward_of or reward, **grouped(**sizes, **options))
    data = Chats(prompts_per_rollout=4)
    data.more = more or {}
    Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    ).fit(module, datamodule=data)  # fmt: skip
    found |= {"tokenizer": tokenizer}
    return found


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_reach_rewards_if_asked_for(skip: bool) -> None:
    found = seen(skip_special_tokens=skip)
    tag, end = found["tokenizer"].convert_tokens_to_ids([TAG, "<|im_end|>"])
    drawn = sum(tag in ids for ids in found["ids"])
    assert drawn > 0
    assert sum(TAG in text for text in found["texts"]) == (0 if skip else drawn)
    ended = [ids[-1] == end for ids in found["ids"]]
    assert not any(text.endswith("<|im_end|>") for text in found["texts"])
    if not skip:
        for text, ids, is_ended in zip(found["texts"], found["ids"], ended, strict=True):
            assert text == found["tokenizer"].decode(ids[: len(ids) - is_ended])


def test_a_function_that_names_them_gets_the_prompts_as_rendered() -> None:
    prompts = seen()["prompts"]
    assert len(prompts) == 16
    assert set(prompts) == {f"<|im_start|>{n}<|im_end|><|im_start|><think>" for n in range(4)}


def test_others_get_nothing_new() -> None:
    def plain(completions: list[str], **more: Any) -> list[float]:
        assert "prompt_texts" not in more
        return [float(len(text)) for text in completions]

    seen(plain)
    check_rewards([lambda prompts, completions, completion_ids, answer: []], ["answer"])
    Rewards(lambda prompt_texts, **_: []).check([{"prompt": "1"}])


def test_a_column_of_that_name_is_the_data_s() -> None:
    def own(prompt_texts: list[str], **_: Any) -> list[float]:
        assert set(prompt_texts) == {"mine"}
        return [0.0] * len(prompt_texts)

    seen(own, {"prompt_texts": "mine"})
