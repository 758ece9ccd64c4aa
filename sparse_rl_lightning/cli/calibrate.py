"""``sparse-rl calibrate`` and ``sparse-rl statistics``: from texts to schedules of budgets, and to query statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt

from sparse_rl_lightning.calibration.calibrate import Calibration
from sparse_rl_lightning.calibration.calibrate import calibrate as run_calibration
from sparse_rl_lightning.calibration.hardware import measure_hardware
from sparse_rl_lightning.calibration.imitation import imitate_attention
from sparse_rl_lightning.calibration.query_statistics import MAX_LENGTH, encode_texts, gather_statistics, pad
from sparse_rl_lightning.calibration.sweep import FINGERPRINT, Sweep
from sparse_rl_lightning.calibration.table import Binning
from sparse_rl_lightning.cli.launch import set_threads
from sparse_rl_lightning.cli.messages import ClearParser, explain, own_error
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.compressors.learned_score import save_network
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.data.files import read_table
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evaluation.time_left import TimeLeft
from sparse_rl_lightning.files import output_file, writable_folder
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.policies.source import PolicySource, resolve_policy
from sparse_rl_lightning.report.charts import write_picture
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import RolloutOptions, SamplingParams
from sparse_rl_lightning.rollout.prompts import encode_prompts
from sparse_rl_lightning.text import nearby, say

RESULTS = ("schedule.yaml", "table.csv", "calibration.json", "table.png")
OF_SAMPLERS = (
    "num_slots", "memory_limit", "kv_dtype", "cuda_graphs", "keep_pool", "decoder", "head_in_float32", "record_routing"
)  # fmt: skip
"""Options of rollouts that are arguments of samplers under the same name."""
PARSER: dict[str, Any] = {"as_positional": False, "parser_class": ClearParser, "prog": "sparse-rl calibrate"}


def calibrate(
    policy: str | PolicySource,
    data: PromptDataModule,
    budgets: list[int],
    compressor: Compressor | None = None,
    retriever: Retriever | None = None,
    folder: str = "runs/calibrate",
    num_prompts: PositiveInt = 64,
    sampling: SamplingParams = SamplingParams(num_generations=8, max_completion_length=4096, top_logprobs=20),  # noqa: B008
    rollout: RolloutOptions = RolloutOptions(),  # noqa: B008  # frozen, like the others
    binning: Binning = Binning(),  # noqa: B008
    target: float | None = None,
    check: bool = True,
    monotone: bool | None = None,
    prompts_per_part: PositiveInt = 64,
    micro_batch: PositiveInt = 8,
    device: str | None = None,
    num_threads: PositiveInt | None = None,
) -> Calibration:
    """Find the cheapest budget per bin of sequence lengths that keeps the sparse policy close to the dense one.

    Every budget draws completions for the same prompts with the compressor, the dense policy scores them, and the
    5th percentile of the acceptance is computed in every length bin. It writes schedule.yaml, table.csv, table.png and
    calibration.json; finished parts are kept, so the same command continues after an interruption.

    Args:
        policy: Hugging Face folder, hub name, or a policy source.
        data: Source of the prompts: its validation rows first, then training rows.
        budgets: Budgets to sweep, in tokens.
        compressor: Compressor whose budget is swept; with a retriever, the one that evicts beside it.
        retriever: Retriever whose budget is swept.
        folder: Folder for the results and the finished parts.
        num_prompts: Prompts to draw for.
        sampling: Sampling parameters, as in training; ``top_logprobs`` most likely tokens bound the acceptance, and the
            whole vocabulary makes it exact (on a CPU; a GPU reports at most 256).
        rollout: Memory and speed of rollouts, end tokens and rendering of prompts, as in training.
        binning: Bins of sequence lengths, and how their tails are judged.
        target: 5th percentile to hold; null for Sparrow's 0.86, scaled from its ceiling of 0.945 to the one measured.
        check: Whether to draw once more with the schedule that was picked.
        monotone: Whether no budget may be smaller than that of shorter sequences, since evicted tokens do not come
            back; null for compressors only.
        prompts_per_part: Prompts whose completions are one finished part.
        micro_batch: Sequences per dense forward pass.
        device: Device to use, null for a GPU where there is one.
        num_threads: CPU threads of torch, null for the default.

    Raises:
        ValueError: If there are no prompts, the policy generates nothing, or the target cannot be reached.
    """
    set_threads(num_threads)
    method: Compressor | Retriever | None = retriever or compressor
    if method is None:
        raise UserError("calibrate: give a compressor or a retriever, whose budget is to be found.")
    output_folder = writable_folder(folder, "folder", f"parts/{FINGERPRINT}", RESULTS)
    model, tokenizer = resolve_policy(policy).as_stored().load()
    model.to(device_of(device))  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    rows = [*data.val_rows(), *data.train_rows()][:num_prompts]
    params = rollout.for_evaluation(sampling)
    params = replace(params, top_logprobs=min(params.top_logprobs, model.config.vocab_size))
    ends = rollout.sampler(model, tokenizer, FullKV()).end_token_ids
    options = {name: getattr(rollout, name) for name in OF_SAMPLERS}
    options |= {"end_token_ids": ends, "tokenizer": tokenizer}
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows], rollout.chat_template_kwargs)
    keeps = compressor if retriever and compressor else FullKV()
    sweep = Sweep(model, prompts, params, output_folder / "parts", prompts_per_part, micro_batch, keeps, options)
    left = TimeLeft(1 + len(set(budgets)) + check)
    calibration = run_calibration(sweep, method, budgets, binning, target, check, monotone, left.tell)
    calibration.write(output_folder)
    title = f"{type(method).__name__}, {len(prompts)} prompts x {params.num_generations}"
    *names, picture = RESULTS
    written = [output_folder / name for name in names]
    written += write_picture(output_folder / picture, lambda: calibration.picture(title))
    say(f"Ceiling {calibration.ceiling:.4f}, target {calibration.target:.4f}. Schedule: {calibration.schedule!r}")
    for note in calibration.notes:
        say(f"- {note}")
    say(f"Written: {', '.join(map(nearby, written))}")
    return calibration


def main(args: Sequence[str]) -> Calibration | None:
    """``sparse-rl calibrate --config FILE``, or ``--hardware FILE`` to measure the machine only.

    Raises:
        ValueError: For the reasons of :func:`calibrate`.
    """
    if any(argument.partition("=")[0] == "--hardware" for argument in args):
        auto_cli(hardware, args=switched(args), **PARSER)
        return None
    try:
        return auto_cli(calibrate, args=list(args), **PARSER)  # type: ignore[no-any-return]  # jsonargparse returns Any
    except ValueError as error:
        raise own_error(error) or UserError(explain(str(error))) from error.__cause__


def hardware(hardware: str, num_layers: PositiveInt = 28, device: str | None = None, overwrite: bool = False) -> None:
    """Measure memory bandwidth, matrix products and the cost of a decode step without work, and write them down.

    Args:
        hardware: The file to write.
        num_layers: Layers of the model that rollouts will be of.
        device: Device to use, null for a GPU where there is one.
        overwrite: Replace the file if it exists.
    """
    target, torch_device = output_file(hardware, "hardware", replaces=lambda _: overwrite), device_of(device)
    dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    measured = measure_hardware(torch_device, dtype, num_layers)
    is_gpu = torch_device.type == "cuda"
    name = torch.cuda.get_device_name(torch_device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    measured.save(target, device=name, dtype=str(dtype).removeprefix("torch."), num_layers=str(num_layers))
    say(
        f"{name}: {measured.bandwidth / 1e9:,.1f} GB/s, {measured.flops / 1e12:,.2f} TFLOP/s, "
        f"{1e3 * measured.step_overhead:,.2f} ms per decode step of {num_layers} layers without work. "
        f"Written: {hardware}"
    )


def statistics(
    policy: str, texts: str, statistics: str, max_length: PositiveInt = MAX_LENGTH, batch_size: PositiveInt = 4,
    method: Literal["QFilters", "TriAttention", "LearnedScore"] = "TriAttention", overwrite: bool = False,
) -> None:  # fmt: skip
    """Gather what a compressor has to know of a policy from its own texts.

    Args:
        policy: Hugging Face folder or hub name.
        texts: JSONL, CSV or parquet file, rows with prompt and (better) completion.
        statistics: Path of the safetensors file to write, of statistics or of the network.
        max_length: Number of tokens to read of each text.
        batch_size: Texts per forward pass, and per step of the network's training.
        method: Compressor that the file is for: statistics of queries for QFilters and TriAttention alike, or a network
            that imitates the full cache's attention for LearnedScore.
        overwrite: Replace the file if it exists.

    Raises:
        ValueError: If the policy or the texts cannot be read, or the file cannot be written.
    """
    target = output_file(statistics, "statistics", replaces=lambda _: overwrite)
    model, tokenizer = load_pretrained(policy)
    ids, lengths = pad(encode_texts(read_table(texts), tokenizer, max_length))
    model.to(device_of())  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    what = "statistics"
    if method == "LearnedScore":
        network, explained = imitate_attention(model, ids, lengths, batch_size=batch_size)
        save_network(network, target)
        what = f"a network that explains {explained:.0%} of the variance of log attention"
    else:
        gather_statistics(model, ids, lengths, batch_size).save(target)
    say(f"Written: {what} of {int(lengths.sum())} tokens of {len(lengths)} texts to {statistics}")


def statistics_main(args: Sequence[str]) -> None:
    """``sparse-rl statistics POLICY TEXTS.jsonl STATISTICS.safetensors``; errors as of :func:`statistics`."""
    auto_cli(statistics, args=switched(args), **PARSER | {"as_positional": True, "prog": "sparse-rl statistics"})


# ---------------------------------------------------------------- inside


def switched(args: Sequence[str]) -> list[str]:
    """The arguments with a value behind ``--overwrite``, as the parser wants one."""
    return ["--overwrite=true" if word == "--overwrite" else word for word in args]


def device_of(name: str | None = None) -> torch.device:
    """A device that can be used here, by default the GPU where there is one.

    Raises:
        ValueError: If there is none of this name.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device={name!r} cannot be used here: {reason}. Give cpu, or cuda where there is one."
        ) from error
    return device
