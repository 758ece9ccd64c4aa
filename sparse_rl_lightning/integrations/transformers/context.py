"""A context in which every ``model.generate`` has a compressed cache, for tools that call it themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.integrations.transformers.cache import KEYWORD, CompressedCache, given_cache


@contextmanager
def compressed_generation(model: PreTrainedModel, compressor: Compressor, **options: Any) -> Iterator[None]:
    """Let each call of ``model.generate`` within the context use a new ``CompressedCache``.

    Calls that bring a cache of their own keep it. Forward passes without a cache, such as those that
    score given texts, are the model's own.

    Args:
        model: Causal language model of transformers.
        compressor: Compressor of the caches.
        options: More arguments of ``CompressedCache``.

    Example::

        with compressed_generation(model, RKV(budget=512, buffer=128)):
            lm_eval.simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer), tasks=["gsm8k"])
    """
    CompressedCache(compressor, model, **options)  # what cannot be is refused here, not in the first call
    before, own = vars(model).get("generate"), cast("Callable[..., Any]", model.generate)

    @wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if given_cache(kwargs) is None:
            kwargs[KEYWORD] = CompressedCache(compressor, model, **options)
        return own(*args, **kwargs)

    vars(model)["generate"] = generate
    try:
        yield
    finally:
        if before is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = before
