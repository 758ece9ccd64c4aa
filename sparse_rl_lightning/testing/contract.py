"""The contract of a compressor, and a complete check whose messages explain what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.testing import rules

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
"""Default arguments of a checked class: small, so that tiny sequences are evicted from."""

MAX_CAPACITY = 64


class ContractError(AssertionError):
    """A compressor breaks a rule; the message names the rule, what was found and what to change."""


@dataclass(frozen=True)
class Rule:
    """One promise of every compressor."""

    name: str
    change: str  # what to do if it is broken
    find: Callable[[Compressor], str | None]  # what is wrong, None if nothing is


RULES = (
    Rule(
        "declarations",
        "Call super().__init__(budget, **sizes) in an own __init__; num_queries is a whole number and state_fields a "
        "tuple of different names, head_state_fields(head_dim) a dictionary of names and whole numbers.",
        rules.declarations,
    ),
    Rule(
        "shape",
        "Return one floating-point number per entry: (slots, KV heads, entries), the shape of layer.valid.",
        rules.shape,
    ),
    Rule(
        "numbers",
        "Guard divisions by zero and logarithms. +inf (must stay) and -inf (goes first) are allowed, NaN is not.",
        rules.numbers,
    ),
    Rule(
        "read only",
        "Work on copies: the layer is the cache itself. Replace in-place operations (add_, x[...] = ...) of score.",
        rules.read_only,
    ),
    Rule(
        "determinism",
        "Draw random numbers as a function of layer.sequence_keys, layer.layer_index and layer.positions, with "
        "sparse_rl_lightning.ops.keyed_random.hash_uniform.",
        rules.determinism,
    ),
    Rule(
        "no state",
        "One instance serves all layers, slots and ranks: set attributes in __init__ only. Numbers that add up over "
        "the steps are named in state_fields and live in layer.state.",
        rules.no_state,
    ),
    Rule(
        "free memory",
        "Entries where layer.valid is False hold anything: mask them before every sum, mean, maximum or softmax over "
        "entries, for example layer.keys.masked_fill(~layer.valid.unsqueeze(-1), 0), and divide by layer.lengths.",
        rules.free_memory,
    ),
    Rule(
        "batch independence",
        "A score may not look at other slots or at its place among them: reduce over dimensions 1 and up, not over "
        "dimension 0, and keep no random numbers per slot.",
        rules.batch_independence,
    ),
    Rule(
        "ragged lengths",
        "Count entries by layer.lengths or layer.valid, never by the size of a tensor: slots differ in length, and "
        "memory behind the live entries may grow.",
        rules.ragged_lengths,
    ),
    Rule(
        "selection",
        "Write score only. Sinks, window, ties and budgets are the base's: do not override select or plan_eviction, "
        "and change no sizes after super().__init__.",
        rules.selection,
    ),
    Rule(
        "half precision",
        "Compute in float32, for example with layer.keys.float(): keys, values and queries come in the model's type.",
        rules.half_precision,
    ),
    Rule(
        "running state",
        "Write update.state[name] and update.head_state[name] in place in update_state (add_, mul_, copy_, scatter_), "
        "with numbers of the same slot and head, and nothing else; name in state_fields and head_state_fields what the "
        "cache is to keep.",
        rules.running_state,
    ),
    Rule(
        "reading",
        "A prompt comes in blocks, cut wherever memory allows: an update for Q tokens must do what Q updates for one "
        "do. Weigh each token of a block by its own age (a decay to the power of the tokens behind it), count "
        "update.positions.shape[1] tokens and not calls.",
        rules.reading,
    ),
    Rule(
        "copies",
        "Keep numbers, texts and tensors as attributes, no lambdas or open files: workers copy the compressor.",
        rules.copies,
    ),
    Rule(
        "replay",
        "Eviction must be the only thing that a compressor does: the learner attends under the record of evictions, "
        "and finds other log-probs if keys or values were changed as well.",
        rules.replay,
    ),
)


def check_compressor(compressor: Compressor | type[Compressor], **arguments: Any) -> None:
    """Check that a compressor keeps the whole contract, in less than a second; failures explain what to change.

    Random layers of two heads and 16 channels are scored in every way that a rollout does, and a rollout of
    ``tiny_model()`` is sampled and replayed. Statistics and networks of a compressor must therefore fit it.

    Args:
        compressor: Class, which is built with small sizes, or small instance (``budget + buffer`` up to 64).
        **arguments: Arguments of the class, besides or instead of ``budget=10, buffer=4, num_sinks=2, window=3``.

    Raises:
        ContractError: At the first rule that is broken.

    Example::

        check_compressor(KNorm)
        check_compressor(SnapKV(budget=12, buffer=4, num_sinks=1, window=4))
    """
    with torch.no_grad():  # as in rollouts
        _check(_build(compressor, arguments))


def _check(subject: Compressor) -> None:
    for rule in RULES:
        try:
            found = rule.find(subject)
        except Exception as error:
            found, change = f"{type(error).__name__}: {error}", f"The traceback above shows where. {rule.change}"
            _fail(subject, rule.name, found, change, error)
        if found is not None:
            _fail(subject, rule.name, found, rule.change)


def _build(compressor: Compressor | type[Compressor], arguments: dict[str, Any]) -> Compressor:
    if isinstance(compressor, Compressor):
        subject = compressor
    else:
        try:
            subject = compressor(**(SIZES | arguments))
        except Exception as error:
            change = (
                "An own __init__ takes budget and **sizes and passes them to super().__init__. Give arguments of your "
                "own to check_compressor, or check an instance: check_compressor(MyCompressor(...))."
            )
            _fail(compressor, "constructor", f"{type(error).__name__}: {error}", change, error)
    capacity = getattr(subject, "budget", 0) + getattr(subject, "buffer", 0)
    if capacity > MAX_CAPACITY:
        found = f"budget + buffer = {capacity} tokens"
        _fail(subject, "size", found, f"Check a small one, up to {MAX_CAPACITY}, such as budget=10, buffer=4.")
    return subject


def _fail(subject: Any, rule: str, found: str, change: str, cause: Exception | None = None) -> NoReturn:
    name = subject.__name__ if isinstance(subject, type) else type(subject).__name__
    raise ContractError(f"{name} breaks the rule {rule!r}.\n  Found: {found}\n  Change: {change}") from cause
