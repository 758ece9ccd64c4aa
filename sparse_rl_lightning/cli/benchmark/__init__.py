"""``sparse-rl benchmark``: compressors side by side on a policy and its problems, random eviction in the first row."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparse_rl_lightning import __version__
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.benchmark.methods import Method
from sparse_rl_lightning.cli.calibrate import device_of, progress_bar
from sparse_rl_lightning.cli.classes import argument_names, imported
from sparse_rl_lightning.compressors import Compressor, FullKV, LearnedScore
from sparse_rl_lightning.errors import UserError, check_number, check_seed
from sparse_rl_lightning.files import stored_tensors, writable_folder, write_whole
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.text import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparse_rl_lightning.quality.cells import Bench, Cell
    from sparse_rl_lightning.quality.results import Results

PACKAGE = "sparse_rl_lightning"
FLOOR = Method("RandomEviction, prompt kept", f"{PACKAGE}.compressors.RandomEviction")
FULL = Method("full cache", f"{PACKAGE}.compressors.FullKV")
OF_DATA = ("prompt_column", "answer_column", "answer_pattern", "prompt_template", "as_chat")
PROBE = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
"""Sizes at which a class of the user's is held to the contract."""


def main(args: Sequence[str]) -> list[Cell]:
    """Measure compressors on a policy, and write the table.

    Args:
        args: Arguments after ``sparse-rl benchmark``.

    Returns:
        The rows of the table.

    Raises:
        ValueError: If a name, the policy, the data or a number is wrong, at a budget nothing would be evicted, or
            nothing can be measured.
    """
    from sparse_rl_lightning.quality import page
    from sparse_rl_lightning.quality.results import Results

    given = options.benchmark().parse_args(args)
    methods = _methods(given.methods)
    check_seed(given.seed, "--seed")
    check_number("--timed", given.timed, least=0)
    for name in ("problems", "samples", "max_completion_length", "num_slots", "buffer", "window"):
        check_number(f"--{name}", getattr(given, name), least=1, or_none=True)
    check_number("--num_sinks", given.num_sinks, least=0, or_none=True)
    bench = _bench(given)
    folder = writable_folder(given.output, "--output", "table.json", ("table.md", "table.png"))
    settings = {
        "policy": fingerprint(policy=bench.model), "data or tasks": fingerprint(rows=bench.rows),
        "tokenizer": fingerprint(tokenizer=bench.tokenizer),
        "sampling": fingerprint(params=bench.params, ends=bench.sampler(FullKV()).end_token_ids),
        "version": __version__,
    }  # fmt: skip
    results = Results(folder / "table.json", settings, len(bench.rows) * bench.params.num_generations)
    bench, mean, longest = _beside(bench, results)
    budgets, sizes = _sizes(given, mean, longest)
    for method in methods:
        if method.arguments is not None:  # a mistake in a file ends this before hours are measured
            method.compressor({**sizes, "budget": budgets[-1]})
    cells: list[Cell] = []
    with progress_bar(1 + len(budgets) * (len(methods) - 1)) as progress:
        for method in methods:
            for budget in [None] if method is FULL else budgets:
                progress(f"{method.name}, budget {budget or 'full'}", len(cells))
                cells.append(_measured(bench, results, method, budget, sizes))
    say(page.terminal(cells))
    if all(cell.reason for cell in cells):
        raise UserError(f"Nothing could be measured, not even the full cache: {cells[0].reason}")
    write_whole(folder / "table.md", page.markdown(cells))
    written = ["table.json", "table.md"]
    try:
        page.draw(cells, folder / "table.png")
        written.append("table.png")
    except ImportError:
        say("No picture: it needs matplotlib, pip install 'sparse-rl-lightning[report]'.")
    say(f"Written: {', '.join(written[:-1])} and {written[-1]} to {folder}")
    return cells


# ---------------------------------------------------------------- what is measured, and on what


def _methods(given: Sequence[str]) -> list[Method]:
    """The rows of the table, each under a name of its own."""
    found = {FLOOR.name: FLOOR, FULL.name: FULL}
    for text in dict.fromkeys(given):
        method = Method.of(text)
        if imported(method.path) is FullKV:
            continue  # has its row
        found[text if method.name in found else method.name] = method
    return [Method(name, m.path, m.arguments) if m.name != name else m for name, m in found.items()]


def _bench(given: argparse.Namespace) -> Bench:
    """Policy, problems and judge."""
    from sparse_rl_lightning.quality.cells import Bench
    from sparse_rl_lightning.rewards import arithmetic_reward, boxed_math_reward
    from sparse_rl_lightning.rewards.scoring import Rewards

    rows = _rows(given)
    model, tokenizer = load_pretrained(given.policy, given.dtype)
    model.to(device_of())  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    usual = arithmetic_reward if "task" in rows[0] else boxed_math_reward
    try:
        judge = Rewards(imported(given.reward) if given.reward else usual) if rows[0]["answer"] else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--reward={given.reward!r} cannot be imported: {error}.") from error
    if judge is not None:
        judge.check(rows)
    length = given.max_completion_length or (512 if given.data else 64)
    params = SamplingParams(given.samples, length, temperature=given.temperature, seed=given.seed)
    return Bench(model.eval(), tokenizer, rows, judge, params, given.num_slots, given.timed)


def _rows(given: argparse.Namespace) -> Rows:
    from sparse_rl_lightning.data import ArithmeticTasks, JsonlPrompts
    from sparse_rl_lightning.data.files import read_table

    if given.data:
        columns = [name for _, row in read_table(given.data)[:1] for name in row]
        answer = given.answer_column or ("answer" if "answer" in columns else None)
        own = {name: getattr(given, name) for name in OF_DATA} | {"answer_column": answer}
        rows = JsonlPrompts(given.data, **own).train_rows()[: given.problems]
        if not rows:
            raise UserError(f"--data={given.data!r} has no rows. Give a file with prompts to draw for.")
        return rows
    for name in OF_DATA:
        if getattr(given, name) not in (None, False, "prompt"):
            raise UserError(f"--{name} is about the rows of a file: add --data FILE, or leave it out.")
    tasks = ArithmeticTasks(given.tasks, given.num_terms, num_train=1, num_val=given.problems, seed=given.seed)
    return tasks.val_rows()


def _beside(bench: Bench, results: Results) -> tuple[Bench, int, int]:
    """The bench that knows lengths of the full cache, their mean and the largest, noted for a run that goes on."""
    if results.content.get("completions") is None:
        rollout = bench.draw(FullKV())
        lengths = [round(float(rollout.lengths.double().mean())), int(rollout.lengths.max())]
        results.write(lengths=lengths, completions=rollout.completion_lengths.tolist())
    mean, longest = results.content["lengths"]
    return replace(bench, full_lengths=torch.tensor(results.content["completions"])), mean, longest


def _sizes(given: argparse.Namespace, mean: int, longest: int) -> tuple[list[int], dict[str, Any]]:
    """Budgets in tokens, and what all compressors have in common beside them.

    Raises:
        ValueError: If a budget is 0, sinks and window do not fit into it, or nothing would be evicted.
    """
    budgets = sorted({round(own * mean) if own < 1 else int(own) for own in given.budgets})
    least = budgets[0]
    if least < 1:
        raise UserError(
            f"--budgets: {min(given.budgets):g} of the mean length with the full cache, {mean} tokens, is a budget of "
            "0 tokens. Raise the share, or give a number of tokens."
        )
    third = max(1, least // 3)
    usual = {"buffer": min(128, third), "num_sinks": min(4, least // 8), "window": min(8, third)}
    sizes = {name: value if getattr(given, name) is None else getattr(given, name) for name, value in usual.items()}
    for budget in budgets:
        if budget + sizes["buffer"] >= longest:
            raise UserError(
                f"--budgets: with budget={budget} and buffer={sizes['buffer']} nothing is evicted: the longest text "
                f"drawn with the full cache has {longest} tokens, {mean} on average. Lower the budget or --buffer."
            )
        FLOOR.compressor(_of_method(FLOOR, sizes, budget))  # sizes that do not fit end this before hours are measured
    return budgets, {**sizes, "protect_prompt": given.protect_prompt}


def _of_method(method: Method, sizes: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """The sizes of a cell: random eviction keeps the prompt, whatever the others do."""
    always = {"protect_prompt": True} if method is FLOOR else {}
    return {**sizes, **always, "budget": budget}


# ---------------------------------------------------------------- a cell


def _measured(bench: Bench, results: Results, method: Method, budget: int | None, sizes: dict[str, Any]) -> Cell:
    """A cell that was measured before, or now; what a method raises becomes the reason of an empty one."""
    from sparse_rl_lightning.quality.cells import Cell

    try:
        compressor = _compressor(bench, results, method, _of_method(method, sizes, budget))
        timed = [bench.num_timed, str(bench.model.device)] if bench.num_timed else []
        own = fingerprint(method=compressor, rewards=getattr(bench.judge, "functions", []), timed=timed)
        known = results.find(method.name, budget, own)
        if known:
            return known
        found = bench.measure(compressor)
        if bench.judge is not None:
            bench.judge.settle()  # type: ignore[attr-defined]  # one of Rewards: raises if they failed everywhere
        return results.put(Cell(method.name, budget, own, **found))
    except Exception as error:
        kind = "" if isinstance(error, (UserError, AssertionError)) else f"{type(error).__name__}: "
        return results.put(Cell(method.name, budget, reason=kind + " ".join(str(error).split())))


def _compressor(bench: Bench, results: Results, method: Method, sizes: dict[str, Any]) -> Compressor:
    """The compressor: with a file where it has to know the policy, else held to the contract if it is the user's."""
    from sparse_rl_lightning.testing import check_compressor

    if method.arguments is not None:
        return method.compressor(sizes)
    files = {}
    for argument in _asked(method):
        path = results.path.with_name(f"{argument}-{fingerprint(**results.content['settings'])[:16]}.safetensors")
        if stored_tensors(path) is None:  # from other completions of the same prompts
            MAKERS[argument](bench.model, bench.draw(FullKV(), seed=1), path)
        files[argument] = str(path)
    if not files and not method.path.startswith(f"{PACKAGE}."):
        check_compressor(method.compressor(PROBE))
    return method.compressor({**sizes, **files})


def _asked(method: Method) -> list[str]:
    """The arguments that name files with what the class has to know of a policy."""
    taken = argument_names(method.path) & MAKERS.keys()
    return sorted(taken if issubclass(imported(method.path), LearnedScore) else taken - {"weights"})


def _statistics(model: PreTrainedModel, rollout: Rollout, path: Path) -> None:
    """Statistics of the queries in a rollout."""
    from sparse_rl_lightning.calibration.query_statistics import MAX_LENGTH, gather_statistics

    shown = rollout.sequences[:, :MAX_LENGTH], rollout.lengths.clamp(max=MAX_LENGTH)
    gather_statistics(model, *shown).save(str(path))


def _network(model: PreTrainedModel, rollout: Rollout, path: Path) -> None:
    """A network that imitates the full cache's attention in a rollout."""
    from sparse_rl_lightning.calibration.imitation import HORIZON, imitate_attention
    from sparse_rl_lightning.calibration.query_statistics import MAX_LENGTH
    from sparse_rl_lightning.compressors.learned_score import save_network

    horizon = min(HORIZON, max(1, int(rollout.lengths.max()) // 2))
    shown = rollout.sequences[:, :MAX_LENGTH], rollout.lengths.clamp(max=MAX_LENGTH)
    network, _ = imitate_attention(model, *shown, horizon=horizon, seed=0)
    save_network(network, path)


MAKERS = {"statistics": _statistics, "weights": _network}
"""Arguments of compressors that have to know the policy, and what writes their file."""
