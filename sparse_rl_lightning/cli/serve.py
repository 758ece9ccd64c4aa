"""``sparse-rl serve``: completions under a compressed KV cache for clients of OpenAI's and vLLM's routes."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.benchmark import Method, built
from sparse_rl_lightning.cli.calibrate import device_of
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import whole_file
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.request_thread import RequestThread
from sparse_rl_lightning.text import say

if TYPE_CHECKING:
    from sparse_rl_lightning.serve.app import Server

LEAST = {
    "num_slots": 1, "max_length": 2, "max_logprobs": 0, "max_prefill_tokens": 1, "max_queue": 1, "shutdown_timeout": 0,
    "port": 0, "max_lora_rank": 1,
}  # fmt: skip
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
CHARACTERS = 32
"""Characters of text for each token of a sequence, above which a prompt is refused before it is tokenized."""
MAX_BODY = 2**22
"""Bytes of a body, or more where one prompt of token ids needs them."""


def main(args: Sequence[str]) -> None:
    """Serve until the process is told to end.

    Args:
        args: Arguments after ``sparse-rl serve``.

    Raises:
        ValueError: If an option is wrong, or the extra ``serve`` is not installed.
    """
    arguments = options.serve().parse_args(args)
    try:
        import uvicorn
    except ImportError as error:
        raise UserError(
            "sparse-rl serve needs Starlette and uvicorn: pip install 'sparse-rl-lightning[serve]'."
        ) from error
    server = build(arguments, *_keys(arguments))
    config = uvicorn.Config(
        server.app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=arguments.shutdown_timeout,
        limit_concurrency=arguments.max_queue + 64, server_header=False, log_level="warning",
    )  # fmt: skip
    bound, usage = config.bind_socket(), server.thread.usage
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    say(
        f"Serving {server.settings.name!r} at http://{host}:{bound.getsockname()[1]} with "
        f"{server.thread.sampler.compressor}, {usage.num_slots} slots, {usage.cache_bytes:,} bytes of keys and values."
    )
    uvicorn.Server(config).run([bound])


def build(arguments: argparse.Namespace, key: str | None = None, update_key: str | None = None) -> Server:
    """The server that options describe, its model loaded and its engine's thread started.

    Raises:
        ValueError: If an option is wrong.
    """
    from sparse_rl_lightning.serve.app import Server, Settings
    from sparse_rl_lightning.serve.bodies import Limits

    for name, least in LEAST.items():
        check_number(f"--{name}", getattr(arguments, name), least=least, or_none=True)
    check_number("--request_timeout", arguments.request_timeout, above=0)
    method = Method.of(arguments.compressor)
    compressor = built(method.path, method.arguments or {})
    folder = Path(arguments.policy).expanduser()
    model, tokenizer = load_pretrained(arguments.policy, arguments.dtype)
    check_number("--max_logprobs", arguments.max_logprobs, most=model.config.vocab_size)
    model.eval().to(device_of(arguments.device))
    sampler = RolloutSampler(
        model, compressor, arguments.num_slots, max_prefill_tokens=arguments.max_prefill_tokens, tokenizer=tokenizer,
        kv_dtype=arguments.kv_dtype, memory_limit=arguments.memory_limit,
    )  # fmt: skip
    context = context_length(model.config)
    length = arguments.max_length or context
    if length is None or (context is not None and length > context):
        raise UserError(
            f"--max_length={length} tokens, and the model is made for {context}."
            if length
            else "The model names no context length: give --max_length."
        )
    limits = Limits(length, arguments.max_logprobs, model.config.vocab_size, CHARACTERS * length)
    # a sequence has `length` tokens, however many of them are the prompt's
    thread = RequestThread(
        sampler, SamplingParams(max_completion_length=1, top_logprobs=arguments.max_logprobs), length - 1
    )
    thread.prepare()  # what does not fit ends this, and not the first client's request
    own_host = (*LOOPBACK, arguments.host) if _is_loopback(arguments.host) and key is None else ("*",)
    settings = Settings(
        name=arguments.served_model_name or (folder.resolve().name if folder.is_dir() else arguments.policy),
        key=key,
        hosts=arguments.allowed_hosts or own_host,
        max_queue=arguments.max_queue,
        timeout=arguments.request_timeout,
        max_body=max(MAX_BODY, 16 * length),
        update_key=update_key,
        weights_from=None if arguments.weights_from is None else Path(arguments.weights_from).resolve(),
        trainer=arguments.trainer,
        max_lora_rank=arguments.max_lora_rank,
    )
    return Server(thread, tokenizer, limits, settings)


def _keys(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The keys that clients and a trainer must send.

    Raises:
        ValueError: If a file holds none, or one is missing.
    """
    key = _key("SPARSE_RL_API_KEY", "--api_key_file", arguments.api_key_file)
    if key is None and not _is_loopback(arguments.host):
        raise UserError(
            f"--host={arguments.host} serves other machines, which needs a key: set SPARSE_RL_API_KEY or give "
            "--api_key_file."
        )
    update_key = _key("SPARSE_RL_UPDATE_KEY", "--update_key_file", arguments.update_key_file)
    if arguments.allow_updates and (update_key is None or update_key == key):
        raise UserError("--allow_updates needs a key of its own: set SPARSE_RL_UPDATE_KEY or give --update_key_file.")
    if arguments.weights_from is not None and not (arguments.allow_updates and Path(arguments.weights_from).is_dir()):
        raise UserError(f"--weights_from={arguments.weights_from!r} must be a folder, and goes with --allow_updates.")
    if (arguments.trainer or arguments.max_lora_rank) and not arguments.allow_updates:
        raise UserError("--trainer and --max_lora_rank go with --allow_updates.")
    if arguments.max_lora_rank is not None and (arguments.weights_from is None or arguments.trainer is not None):
        raise UserError("--max_lora_rank needs --weights_from, where adapters are, and does not go with --trainer.")
    return key, update_key if arguments.allow_updates else None


def _key(variable: str, option: str, file: str | None) -> str | None:
    """A key of a file or the environment.

    Raises:
        ValueError: If the file holds none.
    """
    if file is None:
        return os.environ.get(variable) or None
    try:
        key = whole_file(file, 2**12).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}={file!r} cannot be read: {error}.") from error
    if not key:
        raise UserError(f"{option}={file!r} is empty.")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
