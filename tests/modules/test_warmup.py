"""Warm-up on transcripts: what the policy is given has no loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from lightning.pytorch import Callback
from tiny_grpo import quiet
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparse_rl_lightning.calibration.query_statistics import encode_texts
from sparse_rl_lightning.callbacks import RolloutCheckpoint
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy, TinyPolicy

GIVEN = r"(?<=\?)[^;]*;"
ROWS = ArithmeticTasks("calculator", num_terms=4, num_train=6, num_val=2).train_rows()


def warmup(given: str | None) -> SupervisedWarmup:
    module = SupervisedWarmup(TinyPolicy(alphabet="0123456789+-*?;#!", hidden_size=32), given=given)
    module.configure_model()
    return module


@pytest.mark.parametrize("given", [None, GIVEN, "zzz"])
def test_the_loss_is_that_of_the_tokens_the_policy_writes(given: str | None) -> None:
    module, total, count = warmup(given), 0.0, 0
    tokenizer = module.tokenizer
    for row in ROWS:
        turn, written = True, []  # by hand: a turn lasts until ?, an answer until ;
        for character in row["solution"]:
            written.append(turn or given != GIVEN)
            turn = {"?": False, ";": True}.get(character, turn)
        ids = torch.tensor([tokenizer(row["prompt"] + row["solution"])["input_ids"] + [tokenizer.eos_token_id]])
        logprobs = module.policy(ids).logits.double().log_softmax(-1)[0]
        start = len(row["prompt"])
        for place, scored in enumerate([*written, True], start):
            total -= float(logprobs[place - 1, ids[0, place]].detach()) * scored
            count += scored
    assert float(module._loss(ROWS)[0].detach()) == pytest.approx(total / count, rel=1e-5)


def test_what_is_given_is_tokenized_as_in_a_rollout() -> None:
    ids, targets = warmup(GIVEN)._encode(ROWS[:1])
    tokenizer = warmup(GIVEN).tokenizer
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == ROWS[0]["prompt"] + ROWS[0]["solution"]
    written = tokenizer.decode(targets[0][targets[0] >= 0], skip_special_tokens=True)
    assert written.split("?") == [turn.rpartition(";")[2] for turn in ROWS[0]["solution"].split("?")]


@pytest.mark.parametrize("marks", ["a space before every text", "the same by a normalizer", "bytes"])
@pytest.mark.parametrize("given", [None, r"\? two"])
def test_a_solution_stands_behind_its_prompt(given: str | None, marks: str, tmp_path: Path) -> None:
    """What a tokenizer puts before a text that begins is not learned, nor counted in the statistics of queries."""
    if marks == "bytes":
        core = Core(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    else:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "d": 257, "t": 258, "▁d": 259}
        core = Core(models.BPE(vocab=vocabulary, merges=[("▁", "d")], byte_fallback=True))
        if marks == "the same by a normalizer":
            core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        sequence = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence(sequence)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)
    model = TinyPolicy(hidden_size=32).load()[0]
    model.resize_token_embeddings(len(tokenizer))
    module = SupervisedWarmup(LoadedPolicy(model, tokenizer), given=given)
    module.configure_model()
    for prompt, solution in [("There was a", " dog."), ("Answer:", "two"), ("x\n", "\ndone? two d"), ("a", "\ud800")]:
        ids, targets = module._encode([{"prompt": prompt, "solution": solution}])
        text = solution.replace("\ud800", "\ufffd")
        assert tokenizer.decode(ids[0, :-1]).lstrip(" ") == prompt + text
        row = {"prompt": prompt, "completion": solution}
        assert encode_texts([("row 1", row)], tokenizer, 99) == ids[:, :-1].tolist() or given
        learned = tokenizer.decode([tokenizer.convert_tokens_to_ids("t"), *targets[0][targets[0] >= 0][:-1]])
        assert learned.lstrip(" ") == "t" + (text.replace("? two", "") if given else text)


def test_a_row_beyond_the_embeddings_is_a_text() -> None:
    """Its ids are the tokenizer's: nothing is said of lists of ids."""
    module = warmup(None)
    module.policy.config.vocab_size = 4
    with pytest.raises(UserError) as caught:
        module._encode([{"prompt": "12", "solution": "1"}])
    assert re.fullmatch(
        r"the row with '12' holds token id \d+, but the model has embeddings of 0 to 3. If tokens were added to the "
        r"tokenizer, model.resize_token_embeddings\(len\(tokenizer\)\) adds theirs.",
        str(caught.value),
    )


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(UserError, match=r"given='\(' is not a regular expression"):
        warmup("(")


# ---------------------------------------------------------------- one token mean per optimizer step


class Uneven(PromptDataModule):
    """Solutions of very different lengths; the data's order is seeded."""

    lengths = (1, 30, 2, 12, 5, 3, 25, 7)

    def train_rows(self) -> list[dict[str, Any]]:
        texts = ["12;3"[n % 4] * size for n, size in enumerate(self.lengths)]
        return [{"prompt": f"{n}+", "answer": "", "solution": text} for n, text in enumerate(texts)]

    def val_rows(self) -> list[dict[str, Any]]:
        return self.train_rows()


class Gradients(Callback):
    """The gradient at every optimizer step, as callbacks see it: before clipping, summed over ranks."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(torch.cat([p.grad.flatten().clone() for p in module.parameters() if p.grad is not None]))


def gradients(rows_per_batch: int, accumulate: int, steps: int = 2, **options: Any) -> list[Tensor]:
    """Gradients of a run that does not move."""
    policy = TinyPolicy(alphabet="0123456789+-*?;#!", hidden_size=32)
    module = SupervisedWarmup(policy, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    tap = Gradients()
    trainer = quiet(steps, limit_val_batches=0, callbacks=[tap], accumulate_grad_batches=accumulate, **options)
    trainer.fit(module, datamodule=Uneven(prompts_per_rollout=rows_per_batch))
    return tap.seen


@pytest.mark.parametrize(("rows_per_batch", "accumulate"), [(1, 4), (2, 2)])
def test_accumulated_micro_batches_are_one_large_batch(rows_per_batch: int, accumulate: int) -> None:
    whole, parts = gradients(4, 1), gradients(rows_per_batch, accumulate)
    assert len(whole) == len(parts) == 2  # the mean begins anew at the second step
    for one, other in zip(whole, parts, strict=True):
        assert_same_sums(other, one)
    assert not torch.allclose(whole[0], whole[1], rtol=0.1)


def test_an_epoch_that_ends_within_a_step_is_a_token_mean_too() -> None:
    """Eight rows by ones, three to a step: the last step of the epoch has two, which Lightning divides by three."""
    steps = gradients(1, 3, steps=4)
    singles = gradients(1, 1, steps=11)
    rows = [Uneven().train_rows()[n]["solution"] for n in order(11)]
    counts = [len(text) + 1 for text in rows]
    for step, own in enumerate([(0, 3), (3, 6), (6, 8), (8, 11)]):
        places = range(*own)
        total = sum(counts[n] for n in places)
        expected = sum((singles[n] * (counts[n] / total) for n in places), torch.zeros_like(singles[0]))
        assert_same_sums(steps[step], expected)


def order(count: int) -> list[int]:
    """The rows in the order in which they are served one by one."""
    loader = Uneven(prompts_per_rollout=1).train_dataloader()
    served = [row["prompt"] for _ in range(2) for (row,) in loader]
    return [int(prompt[:-1]) for prompt in served[:count]]


def test_the_plain_step_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "mul_", pytest.fail)
    gradients(4, 1, steps=1)


def test_validation_is_a_token_mean_whatever_its_batches() -> None:
    def validated(size: int) -> dict[str, float]:
        policy = TinyPolicy(alphabet="0123456789+-*?;#!", hidden_size=32)
        (found,) = quiet().validate(SupervisedWarmup(policy), datamodule=Uneven(val_batch_size=size), verbose=False)
        return dict(found)

    whole = validated(8)
    assert validated(1) == pytest.approx(whole, rel=1e-5)
    assert validated(3) == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
def test_ranks_count_by_their_tokens(tmp_path: Path) -> None:
    """Two ranks of two rows, accumulated twice, against one batch of eight."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(out=tmp_path / "found.pt"))
    subprocess.run([sys.executable, str(script)], check=True, timeout=300, env=os.environ | {"PYTHONPATH": paths()})
    (found,) = torch.load(tmp_path / "found.pt")
    assert_same_sums(found, gradients(8, 1, steps=1)[0])


def paths() -> str:
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])


RANKS = """
import torch
from test_warmup import gradients
if __name__ == "__main__":
    found = gradients(2, 2, steps=1, strategy="ddp", devices=2)
    if torch.distributed.get_rank() == 0:
        torch.save(found, "{out}")
"""


class Killed(Callback):
    """Ends training within an optimizer step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 10:
            raise KeyboardInterrupt


def test_a_resumed_checkpoint_is_not_saved_again_within_the_next_step(tmp_path: Path) -> None:
    """There, a part of its gradient would be lost to the next run that is resumed from it."""

    def run(steps: int, path: Path | None, *callbacks: Callback) -> None:
        module = SupervisedWarmup(TinyPolicy(alphabet="0123456789+-*?;#!= ", hidden_size=32, seed=0))
        data = ArithmeticTasks("calculator", num_terms=4, num_train=64, num_val=2, prompts_per_rollout=2, seed=0)
        saved = RolloutCheckpoint(tmp_path, every_n_train_steps=2)
        trainer = quiet(
            steps, callbacks=[*callbacks, saved], enable_checkpointing=True, accumulate_grad_batches=4,
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, datamodule=data, ckpt_path=path)

    run(2, None)
    before = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(SystemExit):
        run(4, tmp_path / "last.ckpt", Killed())
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_a_policy_that_is_not_loaded_yet_is_exported(tmp_path: Path) -> None:
    SupervisedWarmup(TinyPolicy(alphabet="0123456789+-*?;#!= ", hidden_size=32)).export(tmp_path / "policy")
    assert (tmp_path / "policy/model.safetensors").is_file()
