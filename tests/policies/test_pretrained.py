"""Model folders: whole, finite and with a tokenizer, or one line that says what is wrong; never code of theirs."""

from __future__ import annotations

import ast
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.case import Case
from cases.models import LAYER, SETTINGS, TOKENIZERS, WEIGHTS, settings, weights, with_code
from lightning.pytorch import Trainer

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy, PretrainedPolicy, TinyPolicy
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.rewards import arithmetic_reward
from sparse_rl_lightning.rollout import SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "policy"
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


REFUSED = [case for cases in (WEIGHTS, SETTINGS, TOKENIZERS) for case in cases if case.status]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(
    case: Case, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.policy is not None
    shutil.copytree(whole, tmp_path / "pol")
    case.policy(tmp_path / "pol")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(case.says)) as caught:
        PretrainedPolicy("./pol").load()
    message = str(caught.value)
    assert message.startswith("policy: '")
    assert "\n" not in message
    assert "trust_remote_code" not in message


def test_a_whole_folder_loads_without_a_word(whole: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, tokenizer = load_pretrained(str(whole))
    own, _ = TinyPolicy(hidden_size=32, num_layers=2).load()
    assert tokenizer("1+1=")["input_ids"]
    for (name, value), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
    assert len(recwarn) == 0


def test_weights_that_are_not_used_are_told(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "policy")
    weights(lambda state: state.update(x=torch.zeros(2)))(tmp_path / "policy")
    with pytest.warns(UserWarning, match=r"holds 1 weights that its model does not have, for example 'x'"):
        load_pretrained(str(tmp_path / "policy"))


def test_code_of_a_folder_is_never_run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "policy"
    shutil.copytree(whole, folder)
    with_code(folder)
    settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})(folder)
    load_pretrained(str(folder))
    settings(model_type="foo")(folder)
    with pytest.raises(ValueError, match="never run"):
        load_pretrained(str(folder))
    assert not Path("PWNED").exists()


def test_nothing_that_is_loaded_may_bring_code() -> None:
    files = [*ROOT.glob("sparse_rl_lightning/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    calls = [
        (file.name, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) >= 2
    for name, node in calls:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        value = given.get("trust_remote_code")
        assert isinstance(value, ast.Constant), f"{name}:{node.lineno} does not say trust_remote_code=False"
        assert value.value is False, f"{name}:{node.lineno}"


def test_a_model_in_memory_is_looked_at_too() -> None:
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()
    model.get_parameter(LAYER).data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=rf"the model given: 1 weights hold NaN or infinity, for example '{LAYER}'"):
        LoadedPolicy(model, tokenizer).load()


def test_a_checkpoint_with_nan_is_refused_before_a_weight_is_overwritten() -> None:

    module = SparseGRPO(TinyPolicy(hidden_size=32, num_layers=2), RKV(12), arithmetic_reward)
    module.configure_model()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.on_load_checkpoint({"state_dict": state})
    state[f"policy.{LAYER}"][0, 0] = float("inf")
    with pytest.raises(ValueError, match=rf"ckpt_path: this checkpoint: 1 weights hold NaN .* 'policy.{LAYER}'"):
        module.on_load_checkpoint({"state_dict": state})


def test_a_policy_without_an_end_is_told_of() -> None:
    model, tokenizer = TinyPolicy(hidden_size=32, num_layers=2).load()

    def begin(**options: Any) -> None:
        module = SparseGRPO(LoadedPolicy(model, tokenizer), RKV(12), arithmetic_reward, **options)
        module.configure_model()
        module.trainer = Trainer(accelerator="cpu", logger=False)
        module.on_fit_start()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin()
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        begin(sampling=SamplingParams(num_generations=8, stop_strings=("#",)))
    with pytest.warns(
        UserWarning,
        match=r"names a token that ends a completion.*model\.rollout\.end_tokens or model\.sampling\.stop_s",
    ):
        begin()
