"""Estimates a micro-batch's peak memory by running forward and backward on fake tensors.

The policy is built from its configuration under torch's fake tensors and goes forward and backward as in training, with
the learner's own options; what is allocated and freed is added up. Nothing is priced by hand, so a new family, adapters
and checkpointing count as they are. Where all layers are alike the pass goes through three, since a fake layer takes as
long as a small real one, and each of the others adds what the one in the middle does. Not in it: what an allocator
loses, and workspaces inside of kernels. Attention is that of a CPU's flash kernel, which keeps what a GPU's does:
queries, keys, values, output and a number per query.
Where transformers has only its eager one (gpt-oss), it is that, which keeps every probability.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparse_rl_lightning.learner.checkpointing import checkpoint_layers
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.logprobs import hidden_states, token_logprobs
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.output_head import LogitScaling, output_head
from sparse_rl_lightning.replay.hooks import CAUSAL, attention_implementation

Adapt = Callable[[PreTrainedModel], object]
"""Changes a model in place before it is trained, such as the adapters of LoRA."""
PASSED = 3
"""Layers that the pass goes through where all are alike: a first one, a last one, and one in between."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the learner together."""

    rows: int
    length: int  # tokens of the longest, prompt included
    completion: int  # tokens of each that log-probs are needed of


@dataclass(frozen=True)
class LearnerBytes:
    """The memory of a micro-batch's forward and backward pass, in bytes."""

    kept: int  # what the forward pass leaves for the backward pass
    peak: int  # most at any time, besides weights and their gradients
    host: int = 0  # what the forward pass leaves in the host's memory, where layer inputs are offloaded


def learner_bytes(
    config: PreTrainedConfig,
    micro_batch: MicroBatch,
    options: LearnerOptions,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    adapt: Adapt | None = None,
) -> LearnerBytes:
    """Memory that the learner needs for a micro-batch, beside weights, gradients and optimizer.

    Args:
        config: Configuration of the policy.
        micro_batch: Sequences of the micro-batch.
        options: Options of the learner.
        dtype: Type of the weights.
        autocast: Type of mixed precision, None without.
        adapt: Function that changes the policy before training, such as adding adapters.
    """
    with torch.device("meta"):  # adapters move what they are added to, which fake tensors do not bear
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if adapt is not None:
            adapt(model)
    layers, left_out = _shortened(model)
    with FakeTensorMode():
        _make_fake(model)
        model.train()
        host = _OffloadedBytes()
        checkpoint_layers(model, options.gradient_checkpointing, store=lambda: host)
        for parameter in model.parameters():  # as they are from the second micro-batch of a step on
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        mixed = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
        with LiveBytes() as live:
            trace = _MemoryTrace(live, host, layers[1:])
            with mixed:
                loss = _loss(model, micro_batch, options)
            trace.start_backward()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return trace.with_layers(left_out)


class _At(NamedTuple):
    """The bytes at a point of the pass."""

    now: int
    most: int
    host: int


class _MemoryTrace:
    """The memory of a pass where it enters layers and where it comes back from them."""

    def __init__(self, live: LiveBytes, host: _OffloadedBytes, layers: Sequence[nn.Module]) -> None:
        self.live, self.host = live, host
        self.forward, self.backward = list[_At](), list[_At]()
        self.hooks = [layer.register_forward_pre_hook(self._enter) for layer in layers]

    def _here(self) -> _At:
        return _At(self.live.now, self.live.most, self.host.bytes)

    def _enter(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.forward.append(self._here())
        args[0].register_hook(lambda gradient: self.backward.append(self._here()))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def start_backward(self) -> None:
        """Begin the backward pass: checkpointed layers run again, which does not count as entering them."""
        for hook in self.hooks:
            hook.remove()
        self.end = self._here()
        self.live.most = self.live.now

    def with_layers(self, number: int) -> LearnerBytes:
        """The memory of a pass through as many layers more, each of which takes what the one in the middle does."""
        if not number:
            return LearnerBytes(self.end.now, max(self.end.most, self.live.most), self.end.host)
        # weights that autocast rounded are there until it ends: a layer gives back less than it took
        took = number * (self.forward[1].now - self.forward[0].now)
        gave = number * (self.backward[0].now - self.backward[1].now)
        stored = number * (self.forward[1].host - self.forward[0].host)
        # behind the last layer the backward pass needs less and less, until it comes to the embeddings
        peak = max(self.end.most + took, self.backward[0].most + gave, self.live.most)
        return LearnerBytes(self.end.now + gave, peak, self.end.host + stored)


def _shortened(model: PreTrainedModel) -> tuple[list[nn.Module], int]:
    """The layers left in a model after shortening it, and the number removed: none where layers differ."""
    decoder: Any = model.get_decoder()
    layers, left_out = list(decoder.layers), len(decoder.layers) - PASSED
    if left_out <= 0 or len({_described(layer) for layer in layers}) > 1:
        return [], 0
    decoder.layers = decoder.layers[:PASSED]
    return layers[:PASSED], left_out


def _described(layer: nn.Module) -> str:
    """Modules, plain settings and parameters of a layer, without its index."""
    plain = (int, float, str, bool)
    parts = [
        (name, type(module), {n: v for n, v in vars(module).items() if isinstance(v, plain) and n != "layer_idx"})
        for name, module in layer.named_modules()
    ]
    return repr(
        (
            parts,
            [
                (name, parameter.shape, parameter.dtype, parameter.requires_grad)
                for name, parameter in layer.named_parameters()
            ],
        )
    )


class _OffloadedBytes(saved_tensors_hooks):
    """Counts saved tensors as memory of the host: they free their bytes here, and are allocated anew when unpacked."""

    def __init__(self) -> None:
        self.bytes = 0
        super().__init__(self._pack, lambda kept: torch.empty(kept[0], dtype=kept[1]))

    def _pack(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.bytes += tensor.nbytes
        return tensor.shape, tensor.dtype


def _make_fake(model: PreTrainedModel) -> None:
    """Replace a model's parameters and buffers by fake tensors of a CPU; shared ones stay shared."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in fakes:
                fakes[id(parameter)] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = None if parameter is None else cast(nn.Parameter, fakes[id(parameter)])
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _loss(model: PreTrainedModel, micro_batch: MicroBatch, options: LearnerOptions) -> Tensor:
    """The sum of the completions' log-probs, whose gradient needs them all."""
    ids = torch.zeros(micro_batch.rows, micro_batch.length, dtype=torch.int64)
    if model.config._attn_implementation == "eager":
        states = hidden_states(model, ids)[:, :-1]
    else:
        with attention_implementation(model, CAUSAL):
            states = hidden_states(model, ids, causal=None)[:, :-1]
    hidden = torch.cat(list(states[:, -micro_batch.completion :]))  # a copy, as a mask makes one
    del states
    logprobs, _ = token_logprobs(
        output_head(model), hidden, ids[:, -micro_batch.completion :].flatten(), 1.0,
        options.head_chunk_size, options.head_in_float32, LogitScaling.of(model.config),
    )  # fmt: skip
    return logprobs.sum()
