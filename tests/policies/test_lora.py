"""Adapters: what trains, what the reference is, and that sampler and learner see the same adapted model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_grpo import ALPHABET, fit, is_checkpointing, likes_a
from tiny_run import config, write
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import peft

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import GRPOLoss, LearnerOptions, ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, TinyPolicy
from sparse_rl_lightning.policies.lora import add_adapter
from sparse_rl_lightning.policies.modes import disable_dropout, has_dropout
from sparse_rl_lightning.policies.quantized import quantize
from sparse_rl_lightning.testing import character_tokenizer
from tests.families import family

TINY = TinyPolicy(alphabet="abcdefgh", hidden_size=32, num_layers=2)


class Untied(TinyPolicy):
    """With an output head of its own."""

    def load(self) -> Any:
        model, tokenizer = super().load()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model, tokenizer


UNTIED = Untied(alphabet="abcdefgh", hidden_size=32, num_layers=2)
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 3, 4], [5]]


def source(**options: Any) -> LoraPolicy:
    pytest.importorskip("peft", reason="peft is an extra")
    below = UNTIED if "lm_head" in options.get("target_modules", "") else TINY
    return LoraPolicy(below, **{"r": 2, **options})


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Adapters as if trained: fresh ones add nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_a_peft_that_is_too_old_for_transformers_is_told_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the extra keeps them together: transformers asks for it only when an adapter is added."""
    made = source()
    monkeypatch.setattr(peft, "MIN_PEFT_VERSION", "99.1")
    with pytest.raises(UserError, match=r"transformers 5\.\S+ asks for peft 99\.1 or newer\. pip install 'sparse-"):
        made.load()


def tokens() -> tuple[Tensor, Tensor]:
    sequences = torch.randint(2, 10, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, :2] = False
    return sequences, mask


def test_only_adapters_train_and_fresh_ones_change_nothing() -> None:
    model, _ = source().load()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * 7  # A and B of seven projections in two layers
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        found, expected = (sequence_logprobs(m, *tokens())[0] for m in (model, TINY.load()[0]))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["v_proj", "lm_head"]])
def test_the_sampler_and_the_learner_see_the_adapted_model(targets: Any) -> None:
    model = perturbed(source(target_modules=targets).load()[0]).eval()
    params = SamplingParams(num_generations=2, max_completion_length=12, seed=3)
    rollout = RolloutSampler(model, FullKV(), num_slots=4).generate(PROMPTS, params)
    with torch.no_grad():
        learner, _ = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)
        logits = model(rollout.sequences).logits[:, :-1].log_softmax(-1)
    plain = logits.gather(-1, rollout.sequences[:, 1:, None]).squeeze(-1)
    plain = torch.where(rollout.completion_mask[:, 1:], plain, 0.0)
    torch.testing.assert_close(rollout.sampler_logprobs[:, 1:], plain, atol=2e-5, rtol=0)
    torch.testing.assert_close(learner[:, 1:], plain, atol=2e-5, rtol=0)
    with torch.no_grad():
        unadapted, _ = sequence_logprobs(TINY.load()[0], rollout.sequences, rollout.completion_mask)
    assert (unadapted - learner).abs().max() > 0.01


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "lm_head"]])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_reference_is_the_model_without_adapters(targets: Any, quantization: Any) -> None:
    policy = source(target_modules=targets, quantization=quantization)
    model = perturbed(policy.load()[0]).train()
    reference = policy.load_reference()
    with torch.no_grad():
        before = sequence_logprobs(model, *tokens())[0]
        found = sequence_logprobs(reference, *tokens())[0]
        after = sequence_logprobs(model, *tokens())[0]
        base = TINY.load()[0]
        if quantization is not None:
            quantize(base, quantization)
        expected = sequence_logprobs(base, *tokens())[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert torch.equal(before, after)
    assert (before - found).abs().max() > 0.01
    assert model.training


class Rows(PromptDataModule):
    """Four prompts."""

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": text} for text in ("ab", "cde", "f", "ghab")]

    val_rows = train_rows


def test_training_moves_adapters_only_and_exports_a_plain_model(tmp_path: Path) -> None:
    grpo = SparseGRPO(
        source(), RKV(budget=8, buffer=3, num_sinks=1, window=2), likes_a,
        sampling=SamplingParams(num_generations=4, max_completion_length=12, seed=3), loss=GRPOLoss(beta=0.1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )  # fmt: skip
    grpo.configure_model()
    before = {name: parameter.detach().clone() for name, parameter in grpo.policy.named_parameters()}
    trainer = fit(grpo, 3, data=Rows(prompts_per_rollout=4))
    moved = {name for name, p in grpo.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert trainer.callback_metrics["kl"] > 0  # to the model with adapters off

    grpo.export(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    with torch.no_grad():
        found, expected = (sequence_logprobs(m, *tokens())[0] for m in (plain, grpo.policy.eval()))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_adapters_that_would_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora_alpha must be above 0.*lora_alpha=0"):
        LoraPolicy(TINY, lora_alpha=0)
    with pytest.raises(ValueError, match=r"r must be at least 1.*r=0"):
        LoraPolicy(TINY, r=0)
    with pytest.raises(ValueError, match=r"\['q_porj'\] would train nothing.*'q_proj'"):
        source(target_modules=["q_porj", "v_proj"]).load()
    with pytest.raises(UserError, match=r"peft refuses target_modules='q_proj'.*linear layers are .*'q_proj'"):
        source(target_modules="q_proj").load()  # a string is a pattern of whole names
    with pytest.raises(ValueError, match="an empty list would train nothing"):
        source(target_modules=[]).load()
    with pytest.raises(ValueError, match="share one weight"):
        LoraPolicy(TINY, target_modules=["lm_head"]).load()


def test_dropout_on_packed_experts_is_refused_in_words() -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    with pytest.raises(UserError, match=r"peft refuses.*lora_dropout.*without lora_dropout if experts are packed"):
        add_adapter(family("qwen3_moe"), "all-linear", 0, r=4, lora_dropout=0.1)


def test_adapters_from_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    monkeypatch.chdir(tmp_path)
    values = config(max_steps=2)
    below = values["model"]["init_args"]["policy"]
    values["model"]["init_args"] |= {
        "policy": {"class_path": "LoraPolicy", "init_args": {"policy": below, "r": 4}}, "loss": {"beta": 0.1},
        "learner": {"micro_batch_tokens": 64, "head_in_float32": True, "gradient_checkpointing": True},
    }  # fmt: skip
    cli = main(["fit", "--config", write(values)])
    assert cli.trainer.global_step == 2
    assert cli.model.policy_source.options["r"] == 4
    assert (cli.model.learner.options.packs, cli.model.learner.options.head_in_float32) == (True, True)
    assert is_checkpointing(cli.model.policy)
    resumed = main(["fit", "--config", write(values), "--trainer.max_steps=3", "--ckpt_path=last"])
    assert resumed.trainer.global_step == 3


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'sparse-rl-lightning\[lora\]'"):
        LoraPolicy(TINY).load()


NOISY: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"attention_dropout": 0.3}),
    "residual": ("phi3", {"resid_pdrop": 0.3}),
    "numbers of layers": ("starcoder2", {"residual_dropout": 0.3}),
    "a number of the model": ("starcoder2", {"embedding_dropout": 0.3}),
    "router": ("mixtral", {"router_jitter_noise": 0.3}),
}


@pytest.mark.parametrize("name", NOISY)
def test_no_noise_is_left(name: str) -> None:
    kind, options = NOISY[name]
    model = family(kind, **options).train()
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    passes = [model(ids, use_cache=False).logits for _ in range(2)]
    assert has_dropout(model)
    assert not torch.equal(*passes)
    disable_dropout(model)
    assert not has_dropout(model)
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert torch.equal(model(ids, use_cache=False).logits, model.eval()(ids, use_cache=False).logits)


def test_a_number_that_evaluation_reads_is_no_noise() -> None:
    """PhiMoE's routers compare with theirs: without it another policy would be trained, and exported."""
    model = family("phimoe", router_jitter_noise=0.3).eval()
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    before = model(ids, use_cache=False).logits
    disable_dropout(model)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert not has_dropout(model)
    all_of_it = torch.nn.Dropout(1)
    assert has_dropout(all_of_it)
    disable_dropout(all_of_it)
    assert all_of_it.p == 0


def grpo(kind: type[SparseGRPO], disabled: bool) -> SparseGRPO:
    tokenizer = character_tokenizer(ALPHABET)
    policy = family("llama", attention_dropout=0.3, vocab_size=len(tokenizer))
    return kind(
        LoadedPolicy(policy, tokenizer), RKV(budget=8, buffer=3, num_sinks=1, window=2), likes_a,
        sampling=SamplingParams(num_generations=4, max_completion_length=8, seed=3),
        learner=LearnerOptions(disable_dropout=disabled),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [SparseGRPO, ReplayGRPO])
def test_a_dropout_of_attention_is_off_by_default(kind: type[SparseGRPO]) -> None:
    found = fit(grpo(kind, disabled=True), 1).callback_metrics
    assert found["clip_ratio/region_mean"] == 0
    assert abs(found["staleness_ratio/max"] - 1) < 1e-4


def test_what_replay_would_leave_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"attention_dropout=0.3, .* again without. Set model.learner.disable_dropout"):
        fit(grpo(ReplayGRPO, disabled=False), 1)
    fit(grpo(SparseGRPO, disabled=False), 1)
