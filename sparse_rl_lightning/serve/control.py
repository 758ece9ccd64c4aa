"""Control of a server: pauses, and weights from folders; for a trainer that has the key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.pretrained import load_model
from sparse_rl_lightning.policies.updates import UPDATE_SECONDS, WeightUpdates
from sparse_rl_lightning.rollout.request_thread import RequestThread
from sparse_rl_lightning.serve import bodies, transfer
from sparse_rl_lightning.serve.adapters import MOST_ADAPTERS, Adapters
from sparse_rl_lightning.serve.bodies import BadRequest
from sparse_rl_lightning.serve.transfer import Announced, Group, TrainerGoneError

MODES, TAGS = ("abort", "wait", "keep"), ("weights", "kv_cache")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def routes_of(posts: Mapping[str, Endpoint], gets: Mapping[str, Endpoint]) -> list[Route]:
    """Routes by their paths and methods."""
    methods = {"POST": posts, "GET": gets}
    return [
        Route(path, endpoint, methods=[name]) for name, paths in methods.items() for path, endpoint in paths.items()
    ]


class Control:
    """The routes of a trainer.

    Args:
        thread: Thread of the engine.
        weights_from: Folder below which weights may be read, None for none.
        trainer: Host that may broadcast weights, None for none.
        max_lora_rank: Largest rank of adapters that may be loaded, in place of weights; None for none.
        facts: What ``/server_info`` tells of the server.
    """

    def __init__(
        self,
        thread: RequestThread,
        weights_from: Path | None,
        trainer: str | None,
        max_lora_rank: int | None,
        facts: dict[str, Any],
    ) -> None:
        self.thread, self.weights_from, self.trainer, self.facts = thread, weights_from, trainer, facts
        self.mode: str | None = None  # how the server is paused
        self.num_updates = 0
        self.updates = WeightUpdates(thread.sampler.model, "both must be of one model, with adapters merged")
        self.adapters = None if max_lora_rank is None else Adapters(thread.sampler.model, max_lora_rank)
        thread.select = None if self.adapters is None else self.adapters.select
        self.num_bytes = sum(weight.numel() * 4 for weight in thread.sampler.model.state_dict().values())
        self._group: Group | None = None  # with the trainer
        self.device = torch.device(facts["device"])  # also while the model is asleep
        self._asleep = set[str]()  # which of TAGS are
        self._joining = asyncio.Lock()
        self._changing = asyncio.Lock()  # one pause or update at a time

    @property
    def routes(self) -> list[Route]:
        """All of them; each needs the key."""
        posts = {
            "/pause": self.pause, "/resume": self.resume, "/abort_requests": self.abort, "/sleep": self.sleep,
            "/wake_up": self.wake_up, "/update_weights": self.update_weights, "/reset_prefix_cache": self.nothing,
            "/update_weight_version": self.update_version, "/init_weight_transfer_engine": self.init_transfer,
            "/start_weight_update": self.start_update, "/finish_weight_update": self.finish_update,
            "/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter,
            "/load_lora_adapter": self.load_adapter,
        }  # fmt: skip
        gets = {
            "/is_paused": self.is_paused, "/get_world_size": self.world_size, "/server_info": self.server_info,
            "/weight_info": self.weight_info,
        }  # fmt: skip
        return routes_of(posts, gets)

    # ---------------------------------------------------------------- pauses

    async def pause(self, request: Request) -> Response:
        """Draw nothing until :meth:`resume`: requests are aborted, completed, or kept where they are."""
        waits = request.query_params.get("wait_for_inflight_requests", "").lower()  # an older spelling
        mode = "wait" if waits in ("true", "1", "yes", "on", "t", "y") else _mode(request, "abort")
        async with self._changing:
            if mode == "keep":
                await asyncio.to_thread(self.thread.freeze)
            else:
                if mode == "abort":
                    self.thread.cancel_all()
                self.thread.thaw()  # what an earlier pause has kept ends now
                await asyncio.to_thread(self.thread.close, "pause")
            self.mode = mode
        return JSONResponse({"status": "paused", "mode": mode})

    async def resume(self, _: Request) -> Response:
        """Draw again."""
        async with self._changing:
            self.mode = None
            self.thread.open("pause")
            self.thread.thaw()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        """Whether nothing is drawn."""
        return JSONResponse({"is_paused": self.mode is not None})

    async def abort(self, request: Request) -> Response:
        """End all requests with what they have."""
        if (await bodies.receive(request, or_empty=True)).get("request_ids"):
            raise BadRequest("request_ids: all requests are aborted together here. Leave it empty.", "request_ids")
        return JSONResponse({"status": "ok", "aborted": self.thread.cancel_all()})

    async def sleep(self, request: Request) -> Response:
        """Complete the running requests, or abort them, then hold neither cache nor weights in the device's memory."""
        mode = _mode(request, "wait")
        async with self._changing:
            if "keep" in (mode, self.mode):
                raise BadRequest(
                    "The memory of slots is needed: not by mode=keep, nor until /resume or a pause by abort."
                )
            if mode == "abort":
                self.thread.cancel_all()
            await asyncio.to_thread(self.thread.close, "sleep")
            self._asleep = set(TAGS)
            await self._move(torch.device("cpu"))
        return JSONResponse({"status": "sleeping", "level": request.query_params.get("level", "1")})

    async def wake_up(self, request: Request) -> Response:
        """Bring back the weights, or the cache, or both; then draw again."""
        tags = request.query_params.getlist("tags") or list(TAGS)
        if unknown := set(tags) - {*TAGS, "scheduling"}:
            raise BadRequest(f"tags must be among {', '.join(TAGS)}, got {', '.join(sorted(unknown))!r:.40}.", "tags")
        async with self._changing:
            if "weights" in tags:
                await self._move(self.device)
            self._asleep -= set(tags)
            if not self._asleep:
                self.thread.open("sleep")
        return JSONResponse({"status": "awake", "tags": tags})

    # ---------------------------------------------------------------- weights

    async def init_transfer(self, request: Request) -> Response:
        """Join the group of a trainer that broadcasts weights."""
        if self.trainer is None:
            raise BadRequest("Weights are received where the server was started with --trainer.")
        info = _object_of(await bodies.receive(request), "init_info")
        async with self._joining:
            self._group = await asyncio.to_thread(transfer.join, info, self.trainer, self.device, UPDATE_SECONDS)
        return JSONResponse({"status": "ok"})

    async def start_update(self, _: Request) -> Response:
        """Begin an update; what has come of one that did not end is forgotten."""
        self._refuse_beside_adapters()
        async with self._changing:
            self.updates.take([], is_first=True)
            self.updates.drop_later()
        return JSONResponse({"status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        """Take the weights of a folder, or those that the trainer broadcasts now, which wait for the end of the update.

        A folder is read and checked whole, and drawn with from the next step on. Requests that are being drawn go on
        with the new weights; their records cannot be replayed.
        """
        body = await bodies.receive(request)
        self._refuse_beside_adapters()
        if "update_info" in body:
            weights = transfer.announced(_object_of(body, "update_info"), self.num_bytes)
            async with self._changing:
                await self._receive(weights)
            return JSONResponse({"status": "ok"})
        folder, version = self._folder(body.get("weight_dir")), _version(body)
        async with self._changing:
            # in the engine's thread: transformers sets a default type for as long as it loads, for all threads
            new = await asyncio.wrap_future(self.thread.call(lambda: self._read(folder)))
            return await self._written(new, version)

    async def finish_update(self, request: Request) -> Response:
        """Draw with the weights that have come from the next step on, if they are all of the model's."""
        version = _version(await bodies.receive(request, or_empty=True))
        async with self._changing:
            self.updates.keep()
            return await self._written(self.updates.whole(), version)

    async def _receive(self, weights: Sequence[Announced]) -> None:
        """Receive what was announced, all of it whatever is wrong with it: the trainer waits until it has been taken.

        Raises:
            BadRequest: If the trainer has gone, or the weights are not those of an update of this model.
        """
        group = self._group
        if group is None:
            raise BadRequest("No trainer has been joined: send /init_weight_transfer_engine first.")

        def receive() -> UserError | None:
            wrong: UserError | None = None
            for piece in transfer.received(group, weights, self.device):
                try:
                    if wrong is None:
                        self.updates.take(piece, is_first=False)
                except UserError as error:
                    wrong = error
            return wrong

        self.updates.keep()
        try:
            wrong = await asyncio.to_thread(receive)
        except TrainerGoneError:
            self._group = None if self._group is group else self._group  # which may have been joined since
            self.updates.drop()
            raise
        if wrong is not None:
            raise wrong
        self.updates.drop_later()

    async def _written(self, new: dict[str, torch.Tensor], version: str | None) -> Response:
        """Write the weights of a whole update between two steps."""

        def write() -> None:
            self.updates.write(new)
            self.num_updates += 1
            self.thread.has_new_weights = True
            self.thread.weight_version = str(self.num_updates) if version is None else version

        await asyncio.wrap_future(self.thread.call(write))
        return JSONResponse({"status": "ok", "weight_version": self.thread.weight_version})

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter, which requests name as their model."""
        body = await bodies.receive(request)
        name, folder = body.get("lora_name"), self._folder(body.get("lora_path"), "lora_path")
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 128:
            raise BadRequest("lora_name must be a text of 1 to 128 characters.", "lora_name")
        if name == self.facts["model"]:
            raise BadRequest("lora_name is the served model's.", "lora_name")
        async with self._changing:
            await asyncio.to_thread(self._enabled.load, name, folder)
        return JSONResponse({"status": "ok"})

    async def unload_adapter(self, request: Request) -> Response:
        """Forget an adapter; requests that have come for it are drawn with it."""
        self._enabled.unload(str((await bodies.receive(request)).get("lora_name")))
        return JSONResponse({"status": "ok"})

    @property
    def adapter_names(self) -> list[str]:
        """Adapters that are loaded."""
        return [] if self.adapters is None else self.adapters.names

    @property
    def _enabled(self) -> Adapters:
        if self.adapters is None:
            raise BadRequest("Adapters are loaded where the server was started with --max_lora_rank.")
        return self.adapters

    def _refuse_beside_adapters(self) -> None:
        if self.adapters is not None:
            raise BadRequest("Weights are not updated where adapters are loaded: leave out --max_lora_rank.")

    def _folder(self, name: Any, field: str = "weight_dir") -> Path:
        """The folder of a request, which lies below the one that weights may be read from."""
        if self.weights_from is None:
            raise BadRequest("Weights are read from folders where the server was started with --weights_from.")
        if not isinstance(name, str) or "\0" in name:
            raise BadRequest(f"{field} must be the path of a folder.", field)
        folder = (self.weights_from / name).resolve()
        if not folder.is_relative_to(self.weights_from) or not folder.is_dir():
            raise BadRequest(f"{field} is no folder below that of --weights_from.", field)
        return folder

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a folder, complete, finite and of this model."""
        try:
            with torch.device("cpu"):
                model = load_model(str(folder), self.thread.sampler.model.dtype)
            update = WeightUpdates(self.thread.sampler.model, self.updates.remedy)
            update.take(model.state_dict().items(), is_first=True)
            return update.whole()
        except UserError as error:
            raise BadRequest(str(error).replace(str(folder), folder.name), "weight_dir") from error

    async def update_version(self, request: Request) -> Response:
        """Name the version of the weights."""
        body = await bodies.receive(request)
        version = _version(body, "new_version" if "new_version" in body else "weight_version")
        if version is None:
            raise BadRequest("new_version is missing.", "new_version")
        self.thread.weight_version = version
        return await self.weight_info(request)

    async def weight_info(self, _: Request) -> Response:
        """The version of the weights."""
        return JSONResponse({"weight_version": self.thread.weight_version})

    # ---------------------------------------------------------------- facts

    async def world_size(self, _: Request) -> Response:
        """Number of processes."""
        return JSONResponse({"world_size": 1})

    async def server_info(self, _: Request) -> Response:
        """The server in vLLM's words, and in ours."""
        usage = self.thread.usage
        vllm = {
            "weight_transfer_config": self.trainer and {"backend": "nccl"},
            "lora_config": self.adapters and {"max_lora_rank": self.adapters.max_rank, "max_loras": MOST_ADAPTERS},
            "parallel_config": {"data_parallel_size": 1},
            "model_config": {"logprobs_mode": "processed_logprobs", "dtype": str(self.thread.sampler.model.dtype)},
        }  # fmt: skip
        plan = self.thread.sampler.memory_plan
        ours = {"slots": usage.num_slots, "cache_bytes": usage.cache_bytes, "memory_plan": plan and plan.why}
        return JSONResponse({"vllm_config": vllm, "sparse_rl": self.facts | ours})

    async def nothing(self, _: Request) -> Response:
        """What has nothing to do here: prefixes are not kept between requests."""
        return JSONResponse({"success": True})

    async def _move(self, device: torch.device) -> None:
        model: Any = self.thread.sampler.model  # transformers' wrapper hides the signature
        await asyncio.wrap_future(self.thread.call(lambda: model.to(device=device)))


def _object_of(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object.", name)
    return value


def _mode(request: Request, default: str) -> str:
    mode = request.query_params.get("mode", default)
    if mode not in MODES:
        raise BadRequest(f"mode must be one of {', '.join(MODES)}, got {mode!r:.40}.", "mode")
    return mode


def _version(body: Mapping[str, Any], name: str = "weight_version") -> str | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > 128):
        raise BadRequest(f"{name} must be a number or a text of at most 128 characters.", name)
    return None if value is None else str(value)
