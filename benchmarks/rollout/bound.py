"""What a decode step cannot be faster than: its matrix products alone, and its keys and values read once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.ops.timing import Call, elapsed
from sparse_rl_lightning.calibration import Hardware

STREAM_BYTES = 2**28  # no cache holds so much
COPIED = 2**32  # bytes, on a GPU: a copy of fewer is over before all of its memory works
WIDTHS = {"cpu": 1024, "cuda": 8192}  # of matrices whose product is all arithmetic
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
REPEATS = 7


@dataclass(frozen=True)
class Bound:
    """The two measured speeds."""

    product_seconds: float  # of one step
    product_form: str
    bandwidth: float  # bytes per second

    def seconds(self, read_bytes: float) -> float:
        """Seconds of a step that reads ``read_bytes`` of keys and values."""
        return self.product_seconds + read_bytes / self.bandwidth


class BoundMeter:
    """Measures the bound of a policy again and again, in turns with what is held against it.

    Args:
        policy: Whose linear modules are multiplied.
        rows: Of every product.
        stream_bytes: What the stream reads.
    """

    def __init__(self, policy: PreTrainedModel, rows: int, stream_bytes: int = STREAM_BYTES) -> None:
        self.forms = product_forms(policy, rows)
        self.device = policy.device.type
        self.stream_bytes = stream_bytes

    def __call__(self) -> Bound:
        """The fastest form now, and the stream now."""
        times = {name: seconds(call, self.device) for name, call in self.forms.items()}
        form = min(times, key=lambda name: times[name])
        return Bound(times[form], form, bandwidth(self.device, self.stream_bytes))


def bandwidth(device: str, count: int = STREAM_BYTES) -> float:
    """Bytes per second of a plain sum (CPU: reading) or copy (GPU: reading and writing)."""
    if device == "cpu":
        return count / seconds(torch.ones(count // 4).sum, device)
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source), device)


def machine(dtype: torch.dtype, device: str) -> Hardware:
    """The bandwidth, and operations per second of a plain product of square matrices."""
    width = WIDTHS[device]
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return Hardware(bandwidth(device), 2 * width**3 / seconds(lambda: left @ right, device))


def seconds(call: Call, device: str) -> float:
    """Median time of a call; the first one warms up."""
    return statistics.median([elapsed(call, device) for _ in range(REPEATS + 1)][1:])


def product_forms(policy: PreTrainedModel, rows: int) -> dict[str, Call]:
    """Calls that compute every matrix product of one decode step, in the plain forms torch offers."""
    single = [(module.weight, module.bias) for module in policy.modules() if type(module) is nn.Linear]
    joined = list(_joined(policy))
    dtype, device = single[0][0].dtype, single[0][0].device
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]).to(device, dtype) for weight, _ in single}
    forms: dict[str, Call] = {
        "one by one": lambda: [F.linear(inputs[weight.shape[1]], weight, bias) for weight, bias in single],
        "joined": lambda: [F.linear(inputs[weight.shape[1]], weight, bias) for weight, bias in joined],
    }
    packable = {"joined and packed": (inputs, joined)}
    if dtype == torch.bfloat16:
        widened = [(weight.float(), None if bias is None else bias.float()) for weight, bias in joined]
        packable["joined and packed, as float32"] = {width: x.float() for width, x in inputs.items()}, widened
    for name, (given, pairs) in packable.items():
        try:
            forms[name] = packed(given, pairs, rows)
            forms[name]()
        except (RuntimeError, AttributeError, NotImplementedError):  # no oneDNN, or not for this type or device
            forms.pop(name, None)
    return {name: torch.no_grad()(call) for name, call in forms.items()}


def packed(inputs: dict[int, Tensor], pairs: list[tuple[Tensor, Tensor | None]], rows: int) -> Call:
    """Products with weights in oneDNN's own layout."""
    product = torch.ops.mkldnn._linear_pointwise.default
    weights = [(w.shape[1], torch.ops.mkldnn._reorder_linear_weight(w, rows), b) for w, b in pairs]
    return lambda: [product(inputs[width], w, b, "none", [], "") for width, w, b in weights]


def _joined(policy: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights and biases with those that read the same input put together."""
    for parent in policy.modules():
        linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in JOINED:
            if linears.keys() >= set(names):
                group = [linears.pop(name) for name in names]
                biases = [g.weight.new_zeros(len(g.weight)) if g.bias is None else g.bias.detach() for g in group]
                yield torch.cat([g.weight.detach() for g in group]), torch.cat(biases)
        yield from ((module.weight.detach(), module.bias) for module in linears.values())
