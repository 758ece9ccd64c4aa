"""LoraPolicy: train low-rank adapters on a frozen policy, which is its own reference with the adapters off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import peft as adapting
from transformers.utils.peft_utils import check_peft_version

from sparse_rl_lightning.errors import UserError, check_choice, check_number, check_seed
from sparse_rl_lightning.ops.keyed_random import seed_of
from sparse_rl_lightning.policies.modes import eval_mode, exact_angles
from sparse_rl_lightning.policies.quantized import Quantization, quantize
from sparse_rl_lightning.policies.source import PolicySource, check_heads, resolve_policy


class LoraPolicy(PolicySource):
    """A policy whose weights are frozen under low-rank adapters (LoRA, arXiv 2106.09685), through peft.

    Frozen weights stay in the type of their folder, adapters are float32. The reference policy of the KL penalty is the
    same model with its adapters switched off, without a second copy.
    Export writes a plain model with the adapters merged. Needs the extra ``lora``.

    Args:
        policy: Base policy: a Hugging Face folder or hub name, or a source of models.
        r: Rank of the adapters.
        lora_alpha: Numerator of the factor lora_alpha / r on the adapters' output.
        lora_dropout: Dropout on the adapters' input; has no effect with the module's ``disable_dropout``.
        target_modules: Names of the linear layers that get an adapter, ``all-linear`` for all but the output head:
            in mixtures of experts also the router and, r for every expert, the packed experts.
        quantization: The frozen linear layers in 4 bits (``nf4``, QLoRA, arXiv 2305.14314; needs the extra
            ``quantization``) or in 8 (``int8``), for sampler and learner alike. Null leaves them.
        seed: Seed of the adapters' initial weights, null for that of ``seed_everything``.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        r: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        target_modules: list[str] | str = "all-linear",
        quantization: Quantization | None = None,
        seed: int | None = None,
    ) -> None:
        check_adapter(r, lora_alpha, seed)
        check_choice("quantization", quantization, Quantization, "LoraPolicy", or_none=True)
        check_number("lora_dropout", lora_dropout, least=0, below=1)
        self.base = resolve_policy(policy).as_stored()
        self.attn_implementation = self.base.attn_implementation
        self.options: dict[str, Any] = {"r": r, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
        self.target_modules = target_modules
        self.quantization = quantization
        self.seed = seed
        self._model: PreTrainedModel | None = None

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The base policy with fresh adapters, whose output is zero until they are trained."""
        model, tokenizer = self.base.load()
        self.adapt(model)
        self._model = model
        return model, tokenizer

    def adapt(self, model: PreTrainedModel) -> None:
        """Quantize a model if ``quantization`` is set, and add fresh adapters, in place; works on shapes alone too."""
        if self.quantization is not None:
            quantize(model, self.quantization)
        add_adapter(model, self.target_modules, self.seed, **self.options)

    def load_reference(self) -> PreTrainedModel:
        """The model of the last :meth:`load` with its adapters switched off, for log-probs only."""
        model = self.load()[0] if self._model is None else self._model
        return cast(PreTrainedModel, _AdaptersOff(model))


class _OutsideAutocast:
    """True outside of autocast, which casts a layer's input itself, once for all layers that read it.

    peft casts it to the type of the adapter before, each layer for itself: a fifth more activations to keep.
    """

    def __bool__(self) -> bool:
        return not any(torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda"))


class _AdaptersOff:
    """The interface of a model that log-probs need, without its adapters and without dropout."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def config(self) -> Any:
        return self.model.config

    def modules(self) -> Iterator[torch.nn.Module]:
        return self.model.modules()

    def get_decoder(self) -> Any:
        return self._decode

    def get_output_embeddings(self) -> torch.nn.Module:
        head = self.model.get_output_embeddings()
        return cast(torch.nn.Module, getattr(head, "base_layer", head))

    def to(self, **_: Any) -> _AdaptersOff:
        return self  # always on the policy's device

    def _decode(self, **inputs: Any) -> Any:
        with eval_mode(self.model), exact_angles(self.model):
            self.model.disable_adapters()
            try:
                return self.model.get_decoder()(**inputs)
            finally:
                self.model.enable_adapters()


def check_adapter(r: int, lora_alpha: float, seed: int | None) -> None:
    """Refuse an adapter that would train nothing, or cannot be drawn."""
    check_seed(seed, "adapter.seed")
    check_number("r", r, least=1)
    check_number("lora_alpha", lora_alpha, above=0)


def add_adapter(model: PreTrainedModel, target_modules: list[str] | str, seed: int | None, **options: Any) -> None:
    """Freeze a model under fresh adapters, the same for the same seed, whose output is zero until they are trained.

    Arguments are those of :class:`LoraPolicy`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("Adapters (LoRA) need peft: pip install 'sparse-rl-lightning[lora]'") from error
    try:
        check_peft_version(adapting.MIN_PEFT_VERSION)
    except ValueError as error:
        raise UserError(
            f"Adapters (LoRA): transformers {transformers.__version__} asks for peft {adapting.MIN_PEFT_VERSION} or "
            "newer. pip install 'sparse-rl-lightning[lora]' brings versions that go together."
        ) from error
    _check_targets(model, target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed))
        try:
            model.add_adapter(LoraConfig(**options, target_modules=target_modules))
        except Exception as error:  # peft has several classes for what it cannot adapt
            raise UserError(
                f"LoraPolicy: peft refuses target_modules={target_modules!r}: {error} This policy's linear layers are "
                f"{_linear(model)}; give a list of some of them, or 'all-linear' (without lora_dropout if experts are "
                "packed)."
            ) from error
        for parameter in adapters(model):  # peft gives them their layer's type; 16 bits would lose small steps
            parameter.data = parameter.data.to(torch.promote_types(model.dtype, torch.float32))
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                setattr(module, "cast_input_dtype_enabled", _OutsideAutocast())  # noqa: B010  # typed as bool
    _check_trainable(model)


def adapters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The weights of a model's adapters."""
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def _check_targets(model: PreTrainedModel, targets: list[str] | str) -> None:
    """Refuse names that match no module, which peft would silently skip."""
    if isinstance(targets, str):
        return  # "all-linear" or a pattern, which peft refuses if nothing matches
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unknown or not targets:
        raise UserError(
            f"target_modules: {unknown or 'an empty list'} would train nothing. This policy's linear layers are "
            f"{_linear(model)}; give some of them, or 'all-linear'."
        )


def _linear(model: PreTrainedModel) -> list[str]:
    """The names of a model's linear layers, without those that they are within."""
    return sorted({n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})


def _check_trainable(model: PreTrainedModel) -> None:
    """Refuse if anything but adapters could change the policy, or export could not merge them."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    some = any(p.is_meta or bool(p.any()) for p in trainable.values())  # a model of shapes alone has no values
    if not some or any("lora_" not in name for name in trainable):
        raise UserError(
            f"LoRA would train {len(trainable)} of the policy's tensors, but every one must be an adapter's and some "
            "must not be zero. Check target_modules, and that the policy below has no adapters of its own."
        )
    check_heads(model)
