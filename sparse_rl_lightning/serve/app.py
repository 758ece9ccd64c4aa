"""The server's routes: bodies in, completions out; who may ask, and how much at a time."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning import __version__
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout import CompletedRequest
from sparse_rl_lightning.rollout.prompts import encode_prompt
from sparse_rl_lightning.rollout.request_thread import RequestThread
from sparse_rl_lightning.serve import answers, bodies
from sparse_rl_lightning.serve.adapters import Adapter
from sparse_rl_lightning.serve.answers import Completion, TextStream
from sparse_rl_lightning.serve.bodies import BadRequest, Limits, Wanted
from sparse_rl_lightning.serve.control import Control, routes_of
from sparse_rl_lightning.serve.drawing import Drawing, EngineError, Job
from sparse_rl_lightning.serve.records import Records

logger = logging.getLogger(__name__)
UNHEALTHY_SECONDS = 30.0  # after an error, unless something is drawn before
OPEN = {"/health", "/version"}  # need no key
ASIDE = ("return_sample_support", "return_eviction_record", "return_weight_versions")  # beside sampling_params
DEFAULT_TOKENS = 16  # of a completion that names no limit, as in vLLM
Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """What the server is, and whom it serves.

    Args:
        name: Name of the model.
        key: What clients send as ``Authorization: Bearer``, None for no key.
        hosts: Names by which the server is called, ``*`` for any.
        max_queue: Number of completions that run or wait, above which others are answered 429.
        timeout: Seconds after which a request ends with what it has.
        max_body: Bytes of a body.
        update_key: What a trainer sends, None without routes for one.
        weights_from: Folder below which a trainer's weights may be read.
        trainer: Host that may broadcast them.
        max_lora_rank: Largest rank of adapters that a trainer may load, in place of weights; None for none.
    """

    name: str
    key: str | None
    hosts: Sequence[str]
    max_queue: int
    timeout: float
    max_body: int
    update_key: str | None = None
    weights_from: Path | None = None
    trainer: str | None = None
    max_lora_rank: int | None = None


Choice: TypeAlias = Callable[[int, Completion], dict[str, Any]]
"""A choice of an answer, from its index and completion."""


@dataclass(frozen=True)
class Shape:
    """How the events of a stream are written."""

    piece: Callable[[str], dict[str, Any]] | None  # a text that has come; None sends nothing before the end
    last: Callable[[Completion, str], tuple[dict[str, Any], str]]  # the end, from what is left of the text; its reason
    first: dict[str, Any] | None = None  # before any text

    def contents(
        self, news: dict[int, list[int]] | CompletedRequest | None, texts: Sequence[TextStream]
    ) -> Iterator[tuple[int, dict[str, Any], str | None]]:
        """What is to be sent of a request's news: the sample, the content and what ended it."""
        if not isinstance(news, dict):
            for row, stream in enumerate(texts):
                completion = Completion(news, row, stream.wanted, stream.tokenizer)
                yield row, *self.last(completion, stream.rest(completion.text))
        elif self.piece is not None:
            for sample, ids in news.items():
                if text := texts[sample].add(ids):
                    yield sample, self.piece(text), None


class Server:
    """The routes of one model.

    Args:
        thread: Draws the requests.
        tokenizer: Tokenizer of the policy.
        limits: What a request may ask for.
        settings: What the server is.
    """

    def __init__(
        self, thread: RequestThread, tokenizer: PreTrainedTokenizerBase, limits: Limits, settings: Settings
    ) -> None:
        self.thread, self.tokenizer, self.limits, self.settings = thread, tokenizer, limits, settings
        self.drawing = Drawing(thread, limits, settings.max_queue, settings.timeout)
        self.started = int(time.time())
        facts = {
            "compressor": str(thread.sampler.compressor), "device": str(thread.sampler.model.device),
            "max_length": limits.max_length, "version": __version__, "model": settings.name,
        }  # fmt: skip
        self.control = Control(thread, settings.weights_from, settings.trainer, settings.max_lora_rank, facts)
        self.records = Records()
        self._texts = ThreadPoolExecutor(1, "sparse-rl texts")  # tokenizing and rendering do not block the loop

    @property
    def app(self) -> Starlette:
        """The application."""
        posts = {
            "/v1/completions": self.completions, "/v1/chat/completions": self.chat,
            "/inference/v1/generate": self.generate, "/tokenize": self.tokenize, "/detokenize": self.detokenize,
        }  # fmt: skip
        gets = {
            "/health": self.health, "/version": self.version, "/v1/models": self.models, "/metrics": self.metrics,
            "/v1/models/{name:path}": self.model, "/v1/eviction_records/{name}": self.record,
        }  # fmt: skip
        update_key = self.settings.update_key
        control = self.control.routes if update_key else []
        return Starlette(
            routes=[*control, *routes_of(posts, gets)],
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=list(self.settings.hosts), www_redirect=False),
                Middleware(
                    Guard,
                    key=self.settings.key,
                    update_key=update_key,
                    orders={route.path for route in control},
                ),
            ],
            exception_handlers={
                UserError: refused,
                HTTPException: refused,
                ClientDisconnect: gone,
                Exception: broken,
            },
            max_body_size=self.settings.max_body,
        )

    # ---------------------------------------------------------------- what draws nothing

    async def health(self, _: Request) -> Response:
        """Whether the engine has failed lately; after a while it may be tried again."""
        failed_at = self.thread.failed_at
        if failed_at is not None and time.monotonic() - failed_at < UNHEALTHY_SECONDS:
            return error_answer(503, "The engine has failed.")
        return JSONResponse({"status": "ok"})

    async def version(self, _: Request) -> Response:
        """The library's version."""
        return JSONResponse({"version": __version__})

    async def models(self, _: Request) -> Response:
        """The one model and its adapters, in a list."""
        adapters = [self._card | {"id": name, "parent": self.settings.name} for name in self.control.adapter_names]
        return JSONResponse({"object": "list", "data": [self._card, *adapters]})

    async def model(self, request: Request) -> Response:
        """The one model."""
        self._check_name(name := request.path_params["name"])
        return JSONResponse(self._card | {"id": name})

    @property
    def _card(self) -> dict[str, Any]:
        model = {"id": self.settings.name, "object": "model", "created": self.started, "owned_by": "sparse-rl"}
        return model | {"max_model_len": self.limits.max_length}

    async def record(self, request: Request) -> Response:
        """The octets of an eviction record that was too large for its answer."""
        content = self.records.get(request.path_params["name"])
        if content is None:
            raise BadRequest("There is no such eviction record, or others have come and it was forgotten.", status=404)
        return Response(content, media_type="application/octet-stream")

    async def metrics(self, _: Request) -> Response:
        """Gauges and counters under vLLM's names, and what is evicted under ours."""
        usage = self.thread.usage
        gauges = {
            "vllm:num_requests_running": usage.num_running, "vllm:num_requests_waiting": usage.num_waiting,
            "vllm:kv_cache_usage_perc": usage.num_occupied / max(1, usage.num_slots),
            "sparse_rl:slots": usage.num_slots, "sparse_rl:kv_cache_bytes": usage.cache_bytes,
        }  # fmt: skip
        name = self.settings.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines, label = list[str](), f'model_name="{name}"'
        for metric, value in gauges.items():
            lines += [f"# TYPE {metric} gauge", f"{metric}{{{label}}} {value}"]
        for key, value in sorted(self.drawing.counts.items()):
            metric, reason = (*key.split("/"), "")[:2]
            typed = f"# TYPE {metric}_total counter"
            lines += [] if typed in lines else [typed]
            labels = label + (f',finished_reason="{reason}"' if reason else "")
            lines.append(f"{metric}_total{{{labels}}} {value}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt or of messages."""
        body = await self._body(request)
        bodies.refuse_unhonored(body)
        if "messages" in body:
            tokens = await self._messages(body)
        else:
            tokens, *more = await self._prompts(body)
            if more:
                raise BadRequest("prompt must be one text.", "prompt")
        answer = {"count": len(tokens), "max_model_len": self.limits.max_length, "tokens": tokens, "token_strs": None}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        body = await self._body(request)
        ids = bodies.token_ids(body.get("tokens"), "tokens", self.limits.vocabulary, self.limits.max_length)
        return JSONResponse({"prompt": await self._in_thread(self.tokenizer.decode, ids)})

    # ---------------------------------------------------------------- what draws

    async def completions(self, request: Request) -> Response:
        """Complete texts or token ids, prompt by prompt."""
        body = await self._body(request, draws=True)
        echo, logprobs = bodies.flag(body, "echo"), bodies.number(body, "logprobs", None, 0, self.limits.max_logprobs)
        wanted = self._wanted(body | {"echo": None}, logprobs, echo)
        adapter, prompts = self._adapter(body), await self._prompts(body)
        jobs = self.drawing.jobs(prompts, wanted, DEFAULT_TOKENS, adapter)
        head = self._head("cmpl", "text_completion", body)

        def choice(index: int, completion: Completion) -> dict[str, Any]:
            ids = (
                {"token_ids": completion.ids, "prompt_token_ids": completion.prompt} if wanted.return_token_ids else {}
            )
            before = (
                str(self.tokenizer.decode(completion.prompt, skip_special_tokens=wanted.skip_special_tokens))
                if echo
                else ""
            )
            return {
                "index": index, "text": before + completion.text, "logprobs": completion.completion_logprobs(),
                "finish_reason": completion.reason,
            } | ids  # fmt: skip

        if wanted.stream:

            def piece(text: str) -> dict[str, Any]:
                return {"text": text, "logprobs": None}

            return self._streamed(head, jobs, wanted, Shape(piece, lambda c, text: (piece(text), c.reason)))
        return await self._answered(request, head, jobs, wanted, choice)

    async def chat(self, request: Request) -> Response:
        """Complete a conversation."""
        body = await self._body(request, draws=True)
        top = bodies.number(body, "top_logprobs", 0, 0, self.limits.max_logprobs)
        with_logprobs = bodies.flag(body, "logprobs")
        if top and not with_logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
        wanted = self._wanted(body, top if with_logprobs else None)
        with_calls = bool(body.get("tools")) and body.get("tool_choice") != "none"
        adapter, prompt = self._adapter(body), await self._messages(body)
        jobs = self.drawing.jobs([prompt], wanted, None, adapter)
        head = self._head("chatcmpl", "chat.completion", body)

        def choice(index: int, completion: Completion) -> dict[str, Any]:
            message, reason = answers.message(completion, with_calls)
            ids = {"token_ids": completion.ids} if wanted.return_token_ids else {}
            logprobs = completion.chat_logprobs()
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason} | ids

        if wanted.stream:
            return self._streamed(head | {"object": "chat.completion.chunk"}, jobs, wanted, chat_shape(with_calls))
        more = {"prompt_token_ids": prompt} if wanted.return_token_ids else {}
        return await self._answered(request, head | {"prompt_logprobs": None} | more, jobs, wanted, choice)

    async def generate(self, request: Request) -> Response:
        """Complete token ids, with token ids alone in the answer."""
        body = await self._body(request, draws=True)
        settings = bodies.value_or(body, "sampling_params", {})
        if not isinstance(settings, dict):
            raise BadRequest("sampling_params must be an object.", "sampling_params")
        if body.get("stream") or settings.get("stream"):
            raise BadRequest("stream is not supported on this route.", "stream")
        bodies.refuse_unhonored(body)
        top = bodies.number(settings, "logprobs", None, 0, self.limits.max_logprobs)
        wanted = bodies.wanted(
            settings | {name: body.get(name) for name in ASIDE if name in body}, self.limits,
            self.thread.sampler.end_token_ids, top,
        )  # fmt: skip
        prompt = bodies.token_ids(body.get("token_ids"), "token_ids", self.limits.vocabulary, self.limits.max_length)
        jobs = self.drawing.jobs([prompt], wanted, None, self._adapter(body))

        def choice(index: int, completion: Completion) -> dict[str, Any]:
            logprobs = completion.chat_logprobs(in_ids=True)
            more = {"rollout_sample_support": completion.sample_support()} if wanted.sample_support else {}
            return {
                "index": index, "token_ids": completion.ids, "logprobs": logprobs, "finish_reason": completion.reason
            } | more  # fmt: skip

        head = {"request_id": uuid.uuid4().hex, "prompt_logprobs": None, "kv_transfer_params": None}
        return await self._answered(request, head, jobs, wanted, choice)

    # ---------------------------------------------------------------- steps of these

    async def _body(self, request: Request, draws: bool = False) -> dict[str, Any]:
        """The body, of this model; where something is to be drawn, not while too many wait."""
        if draws:
            self.drawing.refuse_if_full()
        body = await bodies.receive(request)
        self._check_name(body.get("model"))
        return body

    def _adapter(self, body: dict[str, Any]) -> Adapter | None:
        name, adapters = body.get("model"), self.control.adapters
        return None if adapters is None or name in (None, self.settings.name) else adapters.named(name)

    def _check_name(self, name: Any) -> None:
        if name is not None and name != self.settings.name and name not in self.control.adapter_names:
            raise BadRequest(f"The model {name!r:.80} does not exist, this is {self.settings.name!r}.", "model", 404)

    def _wanted(self, body: dict[str, Any], logprobs: int | None, echo: bool = False) -> Wanted:
        if body.get("return_sample_support"):
            raise BadRequest("return_sample_support is for /inference/v1/generate.", "return_sample_support")
        return bodies.wanted(body, self.limits, self.thread.sampler.end_token_ids, logprobs, echo)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._texts, partial(function, *arguments))

    async def _encoded(self, function: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """Token ids of what may be wrong; an error tells no path, and not all of what was sent."""
        try:
            return await self._in_thread(function, *arguments)
        except UserError as error:
            raise BadRequest(str(error).replace(self.tokenizer.name_or_path, self.settings.name)[:300]) from None

    async def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        adds, tokenizer = bodies.flag(body, "add_special_tokens", True), self.tokenizer

        def encode(text: str) -> list[int]:
            return encode_prompt(tokenizer, text) if adds else tokenizer(text, add_special_tokens=False)["input_ids"]

        return [
            prompt if isinstance(prompt, list) else await self._encoded(encode, prompt)
            for prompt in bodies.prompts(body, self.limits)
        ]

    async def _messages(self, body: dict[str, Any]) -> list[int]:
        messages, options = bodies.messages(body, self.limits), bodies.template_options(body)
        if bodies.flag(body, "add_special_tokens"):
            raise BadRequest("add_special_tokens is for texts: the chat template has its own.", "add_special_tokens")
        return await self._encoded(encode_prompt, self.tokenizer, messages, options)

    def _head(self, prefix: str, object_type: str, body: dict[str, Any]) -> dict[str, Any]:
        identity = f"{prefix}-{uuid.uuid4().hex}"
        name = body.get("model") or self.settings.name
        return {"id": identity, "object": object_type, "created": int(time.time()), "model": name}

    async def _answered(
        self, request: Request, head: dict[str, Any], jobs: list[Job], wanted: Wanted, choice: Choice
    ) -> Response:
        """Draw, and answer when all is done."""
        with self.drawing.opened(jobs):
            completed = await self.drawing.complete(request, jobs)

        def answer() -> Response:
            choices, is_of_one = list[dict[str, Any]](), "prompt_logprobs" in head
            for job, done in zip(jobs, completed, strict=True):
                of_prompt = {"prompt_logprobs": answers.prompt_logprobs(job.scores, wanted, self.tokenizer)}
                for row in range(wanted.params.num_generations):
                    completion = Completion(done, row, wanted, self.tokenizer, job.request.prompt, job.scores)
                    entry = choice(len(choices), completion) | ({} if is_of_one else of_prompt)
                    if wanted.eviction_record:
                        entry |= self.records.answer(completion.rollout, row, wanted.params.temperature)
                    if wanted.weight_versions:
                        entry["weight_versions"] = completion.weight_versions()
                    choices.append(entry)
            return JSONResponse(
                head
                | (of_prompt if is_of_one else {})
                | {"choices": choices, "usage": answers.usage([job.request.prompt for job in jobs], completed)}
            )

        return await self._in_thread(answer)

    def _streamed(self, head: dict[str, Any], jobs: list[Job], wanted: Wanted, shape: Shape) -> Response:
        """Draw, and send texts as they come."""
        return EventStream(self._events(head, jobs, wanted, shape), self.drawing, jobs)

    async def _events(self, head: dict[str, Any], jobs: list[Job], wanted: Wanted, shape: Shape) -> AsyncIterator[str]:
        """The events of a stream."""
        count, completed = wanted.params.num_generations, list[CompletedRequest]()
        texts = [TextStream(wanted, self.tokenizer, job.request.prompt) for job in jobs for _ in range(count)]
        try:
            for index in range(len(texts)):
                if shape.first is not None:
                    yield event(head, index, shape.first)
            async for job, news in self.drawing.news(jobs):
                completed += [news] if isinstance(news, CompletedRequest) else []
                for index, content, reason in shape.contents(news, texts[job * count : (job + 1) * count]):
                    yield event(head, job * count + index, content, reason)
            if wanted.include_usage:
                usage = answers.usage([job.request.prompt for job in jobs], completed)
                yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            logger.error("A stream has failed: %s", error, exc_info=None if isinstance(error, UserError) else error)
            yield f"data: {json.dumps(error_body(500, failure(error)))}\n\n"


class EventStream(StreamingResponse):
    """Events about completions that count as open before the first of them is sent, and until the stream has ended.

    Args:
        events: The events.
        drawing: Draws the completions.
        jobs: Their prompts.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], drawing: Drawing, jobs: list[Job]) -> None:
        super().__init__(events)
        self.drawing, self.jobs = drawing, jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; refused before anything is sent if too many wait."""
        with self.drawing.opened(self.jobs):
            await super().__call__(scope, receive, send)


class Guard:
    """Refuses what a web page of somebody else could send, and clients without the key.

    Args:
        app: What follows.
        key: The clients' key, None for none.
        update_key: The trainer's, which counts as a client's, too.
        orders: Paths for the trainer alone.
    """

    def __init__(self, app: ASGIApp, key: str | None, update_key: str | None, orders: Set[str]) -> None:
        self.app, self.key, self.update_key, self.orders = app, key, update_key, orders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it; the answer has the request's name."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, answer = Headers(scope=scope), None
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        path, sent = scope["path"], sent_key(headers.get("authorization", ""))
        is_order = path in self.orders
        keys = [key.encode() for key in (None if is_order else self.key, self.update_key) if key is not None]
        is_open = path in OPEN or (self.key is None and not is_order)
        if scope["method"] == "POST" and media_type != "application/json" and not is_order:
            answer = error_answer(415, "Send application/json.")
        if not is_open and not any(hmac.compare_digest(sent, key) for key in keys):
            answer = error_answer(401, "The key is missing or wrong: send it as Authorization: Bearer KEY.")
        if not path.isprintable() or (is_order and "origin" in headers):  # the router takes "/pause\n" for "/pause"
            answer = error_answer(403, "No such path is served, or not to a page in a browser.")
        name = headers.get("x-request-id", uuid.uuid4().hex)[:128].encode("latin-1")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        await (self.app if answer is None else answer)(scope, receive, named)


def sent_key(header: str) -> bytes:
    """The key of a header, as a token or as the password of a URL, which is all that some clients can send."""
    scheme, _, value = header.partition(" ")
    sent = value.encode("latin-1")  # as starlette has decoded it
    if scheme.lower() != "basic":
        return sent if scheme.lower() == "bearer" else b""
    with suppress(ValueError):
        return base64.b64decode(sent, validate=True).partition(b":")[2]
    return b""


# ---------------------------------------------------------------- events and errors


def chat_shape(with_calls: bool) -> Shape:
    """The events of a chat; where there may be calls, all of a message is its last event."""

    def last(completion: Completion, text: str) -> tuple[dict[str, Any], str]:
        if not with_calls:
            return {"delta": {"content": text}}, completion.reason
        message, reason = answers.message(completion, with_tools=True)
        return {"delta": message}, reason

    piece: Callable[[str], dict[str, Any]] | None = None if with_calls else lambda text: {"delta": {"content": text}}
    return Shape(piece, last, {"delta": {"role": "assistant", "content": ""}})


def event(head: dict[str, Any], index: int, content: dict[str, Any], reason: str | None = None) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(head | {'choices': [{'index': index, **content, 'finish_reason': reason}]})}\n\n"


TYPES = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": TYPES.get(status, "BadRequestError"), "param": param, "code": status}}


def error_answer(status: int, message: str, param: str | None = None) -> Response:
    """The answer that says what is wrong."""
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse(error_body(status, message, param), status, headers)


async def refused(_: Request, error: Exception) -> Response:
    """Answer a request that is wrong."""
    if isinstance(error, HTTPException):
        return error_answer(error.status_code, str(error.detail))
    if isinstance(error, BadRequest):
        return error_answer(error.status, str(error), error.param)
    return error_answer(400, str(error))


async def gone(_: Request, __: Exception) -> Response:
    """Answer a client that has gone, in the log."""
    return Response(status_code=499)


async def broken(_: Request, error: Exception) -> Response:
    """Answer a request that met an error of ours."""
    return error_answer(500, failure(error))


def failure(error: Exception) -> str:
    """What a client is told of an error that is not its own."""
    return str(error) if isinstance(error, EngineError) else f"The server has failed: {type(error).__name__}."
