"""SparseServer: verl's rollout server on our sampler, an actor of Ray that answers one request per call."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import torch
from transformers import PreTrainedModel
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import SampledRecord, record_bytes
from sparse_rl_lightning.integrations.verl import options
from sparse_rl_lightning.integrations.verl.batches import FIELD
from sparse_rl_lightning.integrations.verl.weights import Bucket, check_names, tensors
from sparse_rl_lightning.policies.modes import freeze
from sparse_rl_lightning.policies.pretrained import load_model
from sparse_rl_lightning.policies.updates import WeightUpdates
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import Request, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.request_thread import RequestThread


class SparseServer:
    """A model with its sampler: the methods that verl's replica, client and checkpoint engine call.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: verl's ``HFModelConfig``.

    Raises:
        ValueError: As :func:`~sparse_rl_lightning.integrations.verl.options.sampler_options`, or if the model is not
            one that the sampler knows, or whose weights verl can send, or its folder is not whole.
    """

    def __init__(self, config: Any, model_config: Any) -> None:
        self.config = omega_conf_to_dataclass(config)
        arguments = options.sampler_options(self.config)
        self.record: bool = arguments.pop("record")
        model_config = omega_conf_to_dataclass(model_config)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.device("cpu"):  # whatever the actor's default is: the host reads, the device gets what is whole
            self.model: PreTrainedModel = load_model(model_config.local_path, self.config.dtype)
        check_names(self.model)
        freeze(self.model)
        self._move(self.device)
        sampler = RolloutSampler(self.model, tokenizer=model_config.tokenizer, **arguments)
        limits = SamplingParams(max_completion_length=self.config.response_length)
        self.requests = RequestThread(sampler, limits, self.config.prompt_length)
        self._asleep = set[str]()  # weights, kv_cache
        self.global_steps: int | None = None
        merge = "both must be of one model, with adapters merged (actor_rollout_ref.model.lora.merge=true)"
        self.updates = WeightUpdates(self.model, merge)
        self._writing = asyncio.Lock()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
    ) -> TokenOutput:
        """Complete a prompt: its tokens, their log-probabilities under the compressed cache, the record of evictions.

        Raises:
            ValueError: If the request has images, video or sound, or is not one for the sampler.
        """
        if image_data or video_data or audio_data:
            raise UserError("This rollout is for text: it cannot read images, video or sound.")
        params = options.sampling_params(self.config, sampling_params)
        # verl's client makes up the name, so a seed repeats nothing unless rollout.full_determinism is set
        digest = sha256(f"{request_id} {self.global_steps}".encode()).digest()
        number = int.from_bytes(digest[:8], "little", signed=True)
        if len(prompt_ids) > self.config.prompt_length:
            raise UserError(
                f"A prompt has {len(prompt_ids)} tokens, and the server was made for {self.config.prompt_length} "
                "(verl's rollout.prompt_length)."
            )
        pending = self.requests.pending(Request(list(prompt_ids), params, (number,)), request_id)
        try:
            completed = await asyncio.wrap_future(self.requests.submit(pending))
        except asyncio.CancelledError:
            self.requests.cancel(pending)
            raise
        fields: dict[str, Any] = {"global_steps": self.global_steps}
        if completed is None:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
        rollout = completed.rollout
        is_completion = rollout.completion_mask[0]
        if self.record:
            fields[FIELD] = await asyncio.to_thread(_record, rollout, params)
        return TokenOutput(
            token_ids=rollout.sequences[0, is_completion].tolist(),
            log_probs=rollout.sampler_logprobs[0, is_completion].tolist() if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields=fields,
        )

    # ---------------------------------------------------------------- requests in flight

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort all requests; those that follow wait for :meth:`resume_generation`, or are aborted too."""
        names = await asyncio.to_thread(self.requests.abort_all, reject_request)
        return {"aborted_count": len(names), "request_ids": names}

    async def resume_generation(self) -> None:
        """Draw again."""
        self.requests.resume()

    # ---------------------------------------------------------------- memory and weights

    async def sleep(self) -> None:
        """Complete the running requests, then hold neither cache nor weights in the device's memory until woken up."""
        if self.config.free_cache_engine:
            await asyncio.to_thread(self.requests.close, "asleep")
            self._asleep = {"weights", "kv_cache"}
            self._move(torch.device("cpu"))
            self._free()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring the weights back, or the cache, or both; then draw again."""
        if tags is None or "weights" in tags:
            self._move(self.device)
        self._asleep -= {"weights", "kv_cache"} if tags is None else set(tags)
        if not self._asleep:
            self.requests.open("asleep")

    async def release_kv_cache(self) -> None:
        """Complete the running requests, then hold no cache until :meth:`resume_kv_cache`."""
        await asyncio.to_thread(self.requests.close, "no cache")
        self._free()

    async def resume_kv_cache(self) -> None:
        """Draw again, which makes a cache."""
        self.requests.open("no cache")

    async def load_weights(self, bucket: Bucket, is_first: bool, is_last: bool) -> None:
        """Take a bucket of an update, which is written after its last, all at once: until then the old weights draw.

        An update that is not continued for ten minutes is given up.

        Raises:
            ValueError: If weights do not fit the model, or are missing at the end; then nothing of the update is kept.
        """
        self.updates.keep()
        await asyncio.to_thread(self.updates.take, tensors(bucket), is_first)
        if not is_last:
            self.updates.drop_later()
            return
        weights = self.updates.whole()
        async with self._writing:
            try:
                await asyncio.to_thread(self.requests.close, "update")
            except BaseException:  # nothing has been written
                self.requests.open("update")
                raise
            await asyncio.to_thread(self.updates.write, weights)
            self.requests.open("update")

    async def set_global_steps(self, global_steps: int) -> None:
        """Note the trainer's step, which every answer carries."""
        self.global_steps = global_steps

    async def nothing(self, *_: Any, **__: Any) -> None:
        """What has nothing to do here: prefixes are not kept between requests, and there is no profiler."""

    clear_kv_cache = start_profile = stop_profile = nothing

    def _move(self, device: torch.device) -> None:
        self.model.to(device=device)  # type: ignore[call-arg]  # transformers' wrapper hides the signature

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the actor, which is another process


def _record(rollout: Rollout, params: SamplingParams) -> bytes | None:
    """The content of the record's file; None if deaths alone do not say what the sampler saw, or nothing can die."""
    if rollout.evictions is None or not rollout.evictions.num_layers:
        return None
    return record_bytes(SampledRecord.of(rollout, params.temperature or 1.0))
