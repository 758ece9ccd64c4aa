"""Settings of SparseGRPO that reach its samplers: what they do to training, validation and prediction."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import ReduceLROnPlateau
from tiny_grpo import Recorder, Rows, fit, loaded, module, weights
from tiny_run import config, write
from transformers import get_cosine_schedule_with_warmup

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.callbacks import RolloutCheckpoint
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.memory import slot_bytes


def cut(decode: Any, tokens: list[int], stops: tuple[str, ...]) -> str:
    """A completion up to the token that completes its first stop string; a token may be several characters."""
    texts = [decode(tokens[: n + 1]) for n in range(len(tokens))]
    ended = (n + 1 for n, text in enumerate(texts) if any(stop in text for stop in stops))
    return str(decode(tokens[: next(ended, len(tokens))], skip_special_tokens=True))


@pytest.mark.parametrize("dense", [True, False])
def test_stop_strings_end_completions_in_training_and_evaluation(dense: bool) -> None:
    rows = Rows().train_rows()
    free, stopping = loaded().generator, loaded(stop_strings=["3", "fff"])
    own = {"sampling": stopping.generator.sampling, "val_sampling": stopping.val_sampling}
    for params in own:
        whole = free.generate(rows, replace(own[params], stop_strings=()), dense=dense)
        drawn = zip(whole.rollout.sequences, whole.rollout.completion_mask, strict=True)
        want = [cut(free.tokenizer.decode, tokens[mask].tolist(), ("3", "fff")) for tokens, mask in drawn]
        scored = stopping.generator.generate(rows, own[params], dense=dense)
        assert scored.completions == want
        assert scored.completions != whole.completions
        ended = [text.endswith(("3", "fff")) for text in scored.completions]
        assert all(finished for finished, by_text in zip(scored.rollout.finished, ended, strict=True) if by_text)
    predicted = [row["completion"] for row in stopping.predict_step(rows, 0)]
    assert predicted == stopping.generator.generate(rows, stopping.val_sampling).completions


def test_top_logprobs_are_there_for_callbacks_and_not_kept_for_the_loss() -> None:
    seen = []

    class Look(RolloutCallback):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            seen.append((scored.rollout.topk_ids.shape, scored.rollout.sequences.shape))

    grpo = module(top_logprobs=3)
    fit(grpo, 1, [Look()])
    assert seen == [((*seen[0][1], 3), seen[0][1])]
    assert grpo.block.rollout.topk_ids is None
    assert grpo.block.rollout.topk_logprobs is None


def memory_of(num_slots: int) -> int:
    """Bytes that so many slots of the tiny module take with its longest prompt."""
    grpo = loaded()
    compressor, length = grpo.generator.compressor, 17 + grpo.generator.sampling.max_completion_length
    geometry = CacheGeometry.of(grpo.policy)
    size = Compression(compressor, geometry.num_layers).cache_size(geometry, num_slots, 17, length)
    return slot_bytes(geometry, size, grpo.generator.sampling).of(num_slots)


def test_a_memory_limit_is_kept_told_once_and_changes_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    limited, free = module(memory_limit=memory_of(8)), module()
    with caplog.at_level(logging.INFO):
        fit(limited, 3)
    assert limited.generator.sampler().cache.size.num_slots == 8
    told = [record.getMessage() for record in caplog.records if "Memory plan" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Memory plan of the compressed cache: 8 slots of ")
    assert "as many as fit for 16 sequences" in told[0]
    fit(free, 3)
    assert free.generator.sampler().cache.size.num_slots == 16
    assert torch.equal(weights(limited), weights(free))


@pytest.mark.parametrize("dense", [True, False])
def test_the_pool_has_the_type_that_was_asked_for_and_goes_when_it_should(dense: bool) -> None:
    grpo = loaded(kv_dtype="bfloat16", cuda_graphs=False)
    grpo.generator.generate(Rows().train_rows()[:2], dense=dense)
    assert grpo.generator.sampler(dense).cache.key_pool.dtype == torch.bfloat16
    assert not grpo.generator.sampler(dense).cuda_graphs
    small, large = loaded(keep_pool=False).generator, loaded().generator
    for each in (small, large):
        each.generate(Rows().train_rows()[:2], dense=dense)
    assert small.sampler(dense).cache is None
    assert large.sampler(dense).cache is not None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be one of float32"),
        ({"num_slots": 0}, "num_slots must be at least 1"),
        ({"memory_limit": True}, "rollout.memory_limit is a number of bytes or a share, got True"),
        ({"stop_strings": "stop"}, r"write \['stop'\]"),  # a text is no list of letters
        ({"end_tokens": "stop"}, r"write \['stop'\]"),
        ({"end_tokens": ["nope"]}, r"end_tokens: \['nope'\] are not in the tokenizer's vocabulary"),
    ],
)
def test_what_the_sampler_refuses_is_refused_before_the_first_rollout(options: dict[str, Any], match: str) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match=match):
        fit(module(compressor=FullKV(), **options), 1, [recorder])
    assert recorder.scored == []


@pytest.mark.parametrize(("given", "taken"), [("0.5", 0.5), ("5e8", 500_000_000), ("null", None)])
def test_the_command_line_tells_shares_from_bytes(given: str, taken: Any, folder: Any) -> None:
    options = [f"--model.rollout.memory_limit={given}", "--model.sampling.stop_strings=[x, yz]"]
    cli = main(["fit", "--config", write(config(max_steps=1)), *options])
    assert cli.model.generator.sampler().memory_limit == taken
    assert cli.model.generator.sampling.stop_strings == cli.model.val_sampling.stop_strings == ("x", "yz")


def level(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [0.5] * len(completions)


def rate(trainer: Any) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def plateau(monitor: str = "reward", **options: Any) -> Any:
    return lambda optimizer: ReduceLROnPlateau(optimizer, monitor=monitor, **{"patience": 1, "mode": "max", **options})


def test_it_is_stepped_by_its_metric_every_optimizer_step() -> None:
    """A reward that never changes: after the first step, every second one lowers the rate."""
    rates: list[float] = []
    notes = LambdaCallback(on_train_batch_end=lambda trainer, *_: rates.append(rate(trainer)))
    fit(module(level, lr=1.0, lr_scheduler=plateau()), 5, [notes])
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])


def test_a_metric_of_validation_counts_once_for_each() -> None:
    grpo = module(level, lr=1.0, lr_scheduler=plateau("val/reward_dense", patience=0))
    trainer = fit(grpo, 8, limit_val_batches=1, val_check_interval=2)  # four validations, the first sets the level
    assert "val/reward_dense" in trainer.callback_metrics
    assert rate(trainer) == pytest.approx(1e-3)


def test_ranks_follow_the_mean_of_what_each_has_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of their own would pull the parts of one policy apart."""
    monkeypatch.setattr(ranks, "of_all_ranks", lambda own: [own, {"entropy": 3.0}])
    monkeypatch.setattr(Trainer, "world_size", 2)
    grpo, seen = module(), []
    grpo._trainer = Trainer(accelerator="cpu", logger=False)
    schedule = plateau("entropy")(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    monkeypatch.setattr(type(grpo.trainer), "callback_metrics", {"entropy": torch.tensor(1.0)})
    monkeypatch.setattr(schedule, "step", seen.append)
    grpo.lr_scheduler_step(schedule, None)
    assert seen == [2.0]


def test_a_metric_that_is_not_logged_is_named() -> None:
    for name in ("rewerd", "val/rewerd"):
        with pytest.raises(UserError, match=rf"there is no metric '{name}' to follow. Known are .*reward"):
            fit(module(level, lr_scheduler=plateau(name)), 2, limit_val_batches=1, val_check_interval=2)


def test_torchs_own_without_a_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"ReduceLROnPlateau does not know what it looks at. Give lightning\.pytorch"):
        fit(module(level, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau), 1)


def test_a_resumed_run_goes_on_with_what_it_saw(tmp_path: Path) -> None:
    def run(steps: int, schedule: Any, **options: Any) -> Any:
        saving = RolloutCheckpoint(dirpath=str(tmp_path), every_n_train_steps=2)
        own = module(level, lr=1.0, lr_scheduler=schedule)
        return fit(own, steps, [saving], enable_checkpointing=True, default_root_dir=str(tmp_path), **options)

    assert rate(run(5, plateau())) == pytest.approx(0.01)
    for file in tmp_path.glob("*.ckpt"):
        file.unlink()
    run(2, plateau())
    last = str(tmp_path / "last.ckpt")
    assert rate(run(5, plateau(), ckpt_path=last)) == pytest.approx(0.01)
    other = run(6, plateau(factor=0.5, patience=9), ckpt_path=last)  # begins anew, with its own settings
    assert other.global_step == 6
    assert rate(other) == 1.0
    assert other.lr_scheduler_configs[0].scheduler.factor == 0.5


def test_another_schedule_begins_after_the_steps_that_were_done_and_not_after_validations(tmp_path: Path) -> None:
    def run(steps: int, schedule: Any, **options: Any) -> Any:
        saving, validated = [RolloutCheckpoint(tmp_path)], {"limit_val_batches": 1, "val_check_interval": 2}
        own = module(level, lr=1.0, lr_scheduler=schedule)
        return fit(own, steps, saving, enable_checkpointing=True, **validated, **options)

    run(4, plateau("val/reward_dense"))
    linear = partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=10)
    assert rate(run(5, linear, ckpt_path=tmp_path / "last.ckpt")) == pytest.approx(0.5)


def test_a_run_that_is_resumed_within_a_rollout_knows_its_metrics(tmp_path: Path) -> None:
    """What a rollout has logged is followed by the rest of its steps, by monitors and by schedules."""

    def run(steps: int, **options: Any) -> Any:
        own = module(lr=1.0, lr_scheduler=plateau(), steps_per_generation=4)
        return fit(own, steps, [RolloutCheckpoint(tmp_path)], enable_checkpointing=True, **options)

    whole, _ = run(7), run(2)
    resumed = run(7, ckpt_path=tmp_path / "last.ckpt")
    assert rate(resumed) == rate(whole) < 1.0
    assert resumed.callback_metrics["reward"] == whole.callback_metrics["reward"]


def test_a_function_of_transformers_in_python() -> None:
    grpo = module(level, lr=1.0, lr_scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 1, 5))
    assert rate(fit(grpo, 3)) == pytest.approx(0.5 * (1 + math.cos(math.pi * 2 / 4)))


def test_it_works_from_a_file(folder: Path) -> None:
    values = config(max_steps=2)
    values["model"]["init_args"]["lr_scheduler"] = {
        "class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": {"monitor": "reward", "patience": 0}
    }  # fmt: skip
    cli = main(["fit", "--config", write(values)])
    (found,) = cli.trainer.lr_scheduler_configs
    assert (found.scheduler.monitor, found.interval) == ("reward", "step")
    assert rate(cli.trainer) == pytest.approx(1e-7)  # of 1e-6: the reward does not fall


REFUSED = {
    "torch.optim.lr_scheduler.ReduceLROnPlateau": {"patience": 1},
    "transformers.get_cosine_schedule_with_warmup": {"num_warmup_steps": 1, "num_training_steps": 4},
    "transformers.optimization.get_linear_schedule_with_warmup": {"num_warmup_steps": 1, "num_training_steps": 4},
    "transformers.get_constant_schedule": {},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_made_from_a_file_is_refused_when_it_is_parsed(
    path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config(max_steps=2)
    values["model"]["init_args"]["lr_scheduler"] = {"class_path": path, "init_args": REFUSED[path]}
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", write(values)])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "A schedule in a file is a class: one of torch.optim.lr_scheduler, lightning.pytorch.cli.Reduce" in said
    assert not Path("runs").exists()


def test_partial_rollouts_on_several_ranks_are_refused() -> None:
    grpo = loaded(partial_rollout_steps=4, num_slots=4)
    grpo.check_strategy()
    grpo._world_size = 2
    with pytest.raises(ValueError, match="partial_rollout_steps works in one process so far"):
        grpo.check_strategy()
