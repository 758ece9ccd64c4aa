"""A seed that is not set is the process's: seed_everything decides all that is drawn, and a resumed run keeps it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import seed_everything
from tiny_grpo import ALPHABET, Recorder, Rows, every_step, fit, likes_a, module, quiet, weights
from tiny_run import config, write
from torch.utils.data import DataLoader

from experiments.learned_eviction.drawn import Drawn, NewScore
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import RKV, Combined, SnapKV
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.modules import DistillSparse, Evaluation, SparseGRPO
from sparse_rl_lightning.modules.distill import SparseAdapter
from sparse_rl_lightning.modules.resume.run_settings import _seeds_in
from sparse_rl_lightning.policies import LoraPolicy, PretrainedPolicy, TinyPolicy
from sparse_rl_lightning.rollout import RolloutOptions, SamplingParams
from sparse_rl_lightning.rollout.generator import VALIDATION

SHORT = SamplingParams(num_generations=2, max_completion_length=8)
TINY = TinyPolicy(alphabet=ALPHABET, hidden_size=32, num_layers=2, seed=5)
PER = {"prompts_per_rollout": 4}
SIZES = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}


class Keys(Recorder):
    """The keys of all that training and validation draw."""

    def __init__(self, grpo: SparseGRPO) -> None:
        super().__init__()
        self.training, self.validation = list[int](), list[int]()
        numbers = grpo.generator._sequence_ids

        def watched(*args: Any) -> list[int]:
            ids = numbers(*args)
            (self.validation if ids[0] >= VALIDATION else self.training).extend(ids)
            return ids

        grpo.generator._sequence_ids = watched  # type: ignore[method-assign]


def tokens_of(policy: Any = TINY, sampling: SamplingParams = SHORT) -> torch.Tensor:
    """The tokens of a first rollout, of a module whose other seeds are not set."""
    seen = Recorder()
    fit(SparseGRPO(policy, RKV(**SIZES), likes_a, sampling=sampling), 1, [seen], Rows(**PER, seed=0))
    return seen.scored[0].rollout.sequences


def adapter_of(kind: type[SparseGRPO], policy: Any, **options: Any) -> torch.Tensor:
    pytest.importorskip("peft", reason="peft is an extra")
    grpo = kind(policy, RKV(**SIZES), likes_a, sampling=SHORT, **options)
    fit(grpo, 0)
    return next(p.detach().clone() for name, p in grpo.policy.named_parameters() if "lora_A" in name)


def evaluated(**seed: int) -> torch.Tensor:
    own = Evaluation(TINY, sampling=replace(SHORT, **seed), sampling_of={"aime24": {"num_generations": 2}})
    rows = DataLoader([{"prompt": "01", "answer": ""}], collate_fn=list)
    quiet().predict(own, rows)
    return torch.tensor([own.sampling.seed, own.params("aime24").seed, own.generator.sampling.seed])


DRAWN: dict[str, Callable[..., torch.Tensor]] = {  # by a seed that is set or is not
    "sampling": lambda **seed: tokens_of(sampling=replace(SHORT, **seed)),
    "TinyPolicy": lambda **seed: tokens_of(TinyPolicy(alphabet=ALPHABET, **seed), sampling=replace(SHORT, seed=1)),
    "LoraPolicy": lambda **seed: adapter_of(SparseGRPO, LoraPolicy(TINY, r=2, **seed)),
    "distilled adapter": lambda **seed: adapter_of(DistillSparse, TINY, adapter=SparseAdapter(r=2, **seed)),
    "Evaluation": evaluated,
    "data": lambda **seed: torch.tensor([int(r["answer"]) for r in ArithmeticTasks(num_train=9, **seed).train_rows()]),
    "order of the data": lambda **seed: torch.tensor(list(Rows(**PER, **seed).train_dataloader().sampler)),
}


def test_no_two_sequences_of_ranks_and_rollouts_share_their_numbers() -> None:
    generator, ids = module().generator, []
    for generator.rank, index in product(range(3), range(2)):
        generator.world_size = 3
        ids += generator._sequence_ids(index, 2, 4, None, None)
    assert sorted(ids) == list(range(3 * 2 * 2 * 4))


@pytest.mark.parametrize("name", DRAWN)
def test_the_seed_of_the_process_decides(name: str) -> None:
    """And without one it is 0; a seed that is set stays."""
    drawn, of_its_own = [], []
    for seed in (None, 0, 1, 1):
        if seed is not None:
            seed_everything(seed)
            of_its_own.append(DRAWN[name](seed=3))
        drawn.append(DRAWN[name]())
    assert [torch.equal(one, drawn[0]) for one in drawn] == [True, True, False, False]
    assert torch.equal(drawn[2], drawn[3])
    assert torch.equal(*of_its_own[:2])


@pytest.mark.parametrize("name", ["TinyPolicy", "LoraPolicy", "PretrainedPolicy"])
def test_weights_are_those_of_a_cpu_whatever_device_they_are_made_for(name: str, tmp_path: Path) -> None:
    """Lightning loads them inside the context of its device, where a seed would mean other numbers."""
    if name == "LoraPolicy":
        pytest.importorskip("peft", reason="peft is an extra")
    source: Any = TINY if name == "TinyPolicy" else LoraPolicy(TINY, r=2, seed=3)
    if name == "PretrainedPolicy":
        model, tokenizer = TINY.load()
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        source = PretrainedPolicy(str(tmp_path))
    loaded = []
    for device in ("cpu", "meta"):
        grpo = SparseGRPO(source, RKV(**SIZES), likes_a, sampling=SHORT)
        with torch.device(device):
            grpo.configure_model()
        loaded.append(dict(grpo.policy.named_parameters()))
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(value, loaded[1][key]) for key, value in loaded[0].items())


def test_a_source_and_data_used_by_several_runs_follow_each(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, data, seen = TinyPolicy(alphabet=ALPHABET, hidden_size=32), ArithmeticTasks(num_train=16), []
    for seed in (0, 1, 0):
        seed_everything(seed)
        grpo = SparseGRPO(policy, RKV(**SIZES), likes_a, sampling=SHORT)
        fit(grpo, 0, data=data)
        seen.append((float(weights(grpo).sum()), [row["prompt"] for row in data.train_dataloader().dataset]))
    assert seen[0] == seen[2] != seen[1]
    monkeypatch.setenv("PL_GLOBAL_SEED", "many")
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED must be a whole number.*got PL_GLOBAL_SEED=many"):
        TinyPolicy().load()


def test_the_command_line_writes_which_seeds_it_took(folder: Path) -> None:
    rewards = []
    for seed in (0, 1, 1):
        cli = main(["fit", "--config", write(config(max_steps=1)), f"--seed_everything={seed}"])
        rewards.append(float(cli.trainer.callback_metrics["entropy"]))
    assert rewards[0] != rewards[1] == rewards[2]
    ran = yaml.safe_load((Path(cli.trainer.log_dir) / "run_config.yaml").read_text())
    own = ran["model"]["init_args"]
    assert own["sampling"]["seed"] == own["policy"]["init_args"]["seed"] == ran["data"]["init_args"]["seed"] == 1
    assert cli.model.seeds == {"policy.seed": 1, "sampling.seed": 1, "val_sampling.seed": 1, "data.seed": 1}


def test_another_seed_is_refused_on_resume(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Path | None = None, **options: Any) -> None:
        own = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), "sampling": SHORT, **options}
        grpo = SparseGRPO(TinyPolicy(alphabet=ALPHABET, hidden_size=32), RKV(**SIZES), likes_a, **own)
        fit(grpo, steps, [every_step(tmp_path)], enable_checkpointing=True, ckpt_path=ckpt_path)

    seed_everything(1)
    run(1)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["sparse_rl_run"]["seeds"]
    assert saved == {"policy.seed": 1, "sampling.seed": 1, "val_sampling.seed": 1, "data.seed": 1}
    run(2, tmp_path / "last.ckpt")
    seed_everything(2)
    said = r"other seeds: policy.seed was 1 and is 2, sampling.seed was 1 and is 2, .*seed_everything included"
    with pytest.raises(ValueError, match=said):
        run(3, tmp_path / "last.ckpt")
    seed_everything(1)
    with pytest.raises(ValueError, match=r"other seeds: sampling.seed was 1 and is 4\. Resume"):
        run(3, tmp_path / "last.ckpt", sampling=replace(SHORT, seed=4))
    run(3, tmp_path / "last.ckpt")


# ---------------------------------------------------------------- keys of validation


class Nineteen(Rows):
    """A number of rows that is no multiple of a batch."""

    def val_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": ALPHABET[i % 16], "answer": "a"} for i in range(19)]


@pytest.mark.parametrize("val_batch_size", [64, 5])
def test_no_key_of_a_validation_is_training_s_or_another_s(val_batch_size: int) -> None:
    grpo = module(val_sampling=SamplingParams(num_generations=2, max_completion_length=3, seed=3))
    keys = Keys(grpo)
    fit(grpo, 2, data=Nineteen(prompts_per_rollout=4, val_batch_size=val_batch_size), limit_val_batches=1.0)
    quiet().validate(grpo, datamodule=Nineteen(), verbose=False)
    whole = list(range(VALIDATION, VALIDATION + 38))
    assert sorted(keys.validation) == sorted(2 * whole)  # with the full and the compressed cache
    assert len(set(keys.training)) == len(keys.training) == 2 * 16
    assert max(keys.training) < VALIDATION


def test_a_sampled_validation_and_predictions_are_the_same_in_any_batches() -> None:
    texts = []
    for size in (5, 8, 19):
        grpo = module(val_sampling=SamplingParams(num_generations=2, max_completion_length=6, seed=3))
        found = quiet().predict(grpo, datamodule=Nineteen(val_batch_size=size))
        texts.append([row["completion"] for batch in found for row in batch])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0][i] for i in (0, 16))) == 2  # one prompt twice
    rows = Nineteen().val_rows()
    assert texts[0] == grpo.generator.generate(rows, grpo.val_sampling, first=VALIDATION).texts[::2]  # first of each


# ---------------------------------------------------------------- keys after a resume


@pytest.mark.parametrize("change", ["generations", "prompts"])
def test_no_key_repeats_after_a_resume_with_other_numbers(change: str, tmp_path: Path) -> None:
    """Of prompts with a loader of one's own, which keeps no place in the data."""
    loader = functools.partial(DataLoader, Rows().train_rows(), collate_fn=list)
    drawn = list[int]()

    def run(steps: int, generations: int, prompts: int, ckpt_path: Path | None = None) -> None:
        grpo = module(num_generations=generations)
        keys = Keys(grpo)
        options: Any = {"callbacks": [every_step(tmp_path)], "enable_checkpointing": True, "limit_val_batches": 0}
        quiet(steps, **options).fit(grpo, loader(batch_size=prompts), ckpt_path=ckpt_path)
        drawn.extend(keys.training)

    run(6, 4, 4)
    assert drawn == list(range(6 * 4 * 4))  # what an unbroken run of constant sizes always had
    run(12, 2 if change == "generations" else 4, 4 if change == "generations" else 2, tmp_path / "last.ckpt")
    assert len(set(drawn)) == len(drawn)


def test_keys_of_partial_rollouts_go_on_too() -> None:
    grpo = module(rollout=RolloutOptions(num_slots=8, partial_rollout_steps=4))
    keys = Keys(grpo)
    fit(grpo, 3)
    assert keys.training == list(range(3 * 4 * 4))


def test_seeds_inside_others_are_named_by_their_place() -> None:
    first, second = SnapKV(**SIZES), NewScore(**SIZES, seed=7)
    found = dict(_seeds_in("compressor", Combined([second, first])))
    assert found == {"compressor.compressors.0.seed": 7}
    assert dict(_seeds_in("compressor", Drawn(second))) == {"compressor.compressor.seed": 7}
