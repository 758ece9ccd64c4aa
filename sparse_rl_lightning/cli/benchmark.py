"""``sparse-rl benchmark``: compressors side by side on a policy and its problems, random eviction in the first row."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from sparse_rl_lightning import __version__
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.calibrate import device_of
from sparse_rl_lightning.cli.classes import argument_names, imported, known_classes
from sparse_rl_lightning.cli.messages import LOOKED_FOR, ClearParser, explain, own_error
from sparse_rl_lightning.cli.yaml_files import read
from sparse_rl_lightning.compressors import Compressor, FullKV, LearnedScore
from sparse_rl_lightning.errors import UserError, check_number, check_seed
from sparse_rl_lightning.files import stored_tensors, whole_file, writable_folder, write_whole
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.text import nearby, say

if TYPE_CHECKING:
    from sparse_rl_lightning.quality.cells import Bench, Cell
    from sparse_rl_lightning.quality.results import Results


@dataclass(frozen=True)
class Method:
    """A row of the table: a class by its name, or one with its arguments as in a configuration."""

    name: str
    path: str
    arguments: dict[str, Any] | None = None  # its own, as of a file, before those that all methods share

    @classmethod
    def of(cls, spec: str) -> Method:
        """The method that ``SnapKV``, ``mine.Method``, ``method.yaml`` or ``{class_path: SnapKV, ...}`` names.

        Raises:
            ValueError: If there is no such class or file, or it is no compressor.
        """
        is_file = spec.endswith((".yaml", ".yml"))
        if not is_file and not spec.startswith("{"):
            return cls(spec.rpartition(".")[2], _checked_path(spec))
        try:
            method = read(whole_file(spec, 2**24).decode(), spec) if is_file else read(spec)
            path, arguments = method.pop("class_path"), {**(method.pop("init_args", None) or {})}
            if method:
                raise UserError(f"{', '.join(map(str, method))} beside them would be ignored")
        except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{spec!r} does not hold a class_path with init_args, as a compressor in a configuration: {error!r}."
            ) from error
        return cls(Path(spec).stem, _checked_path(path), arguments)

    def compressor(self, sizes: dict[str, Any]) -> Compressor:
        """Build the compressor with the sizes that its class takes; its own arguments override all but the budget.

        Raises:
            ValueError: If the arguments do not fit.
        """
        taken = {name: value for name, value in sizes.items() if name in argument_names(self.path)}
        compressor = built(self.path, taken | (self.arguments or {}))
        return compressor if self.arguments is None else compressor.with_budget(sizes["budget"])


def built(path: str, arguments: dict[str, Any]) -> Compressor:
    """The compressor of a class and its arguments.

    Raises:
        ValueError: If the arguments do not fit.
    """
    parser: Any = ClearParser(exit_on_error=False)
    parser.add_subclass_arguments(Compressor, "method")
    try:
        config = {"class_path": path, "init_args": arguments}
        compressor: Compressor = parser.instantiate(parser.parse_object({"method": config})).method
    except Exception as error:
        raise own_error(error) or UserError(explain(str(error))) from error
    return compressor


def _checked_path(name: str) -> str:
    """The import path of a compressor's class."""
    try:
        compressor_class = imported(name) if "." in name else known_classes()[name]
    except KeyError as error:
        raise UserError(explain(f"Expected a dot import path string: {name}").partition("\n")[2]) from error
    except Exception as error:  # whatever the user's module raises
        hint = f" {LOOKED_FOR}" if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{name!r} cannot be imported: {type(error).__name__}: {error}.{hint}") from error
    if not (inspect.isclass(compressor_class) and issubclass(compressor_class, Compressor)):
        raise UserError(f"{name!r} is no compressor: derive it from sparse_rl_lightning.compressors.Compressor.")
    return f"{compressor_class.__module__}.{compressor_class.__qualname__}"


PACKAGE = "sparse_rl_lightning"
FLOOR = Method("RandomEviction, prompt kept", f"{PACKAGE}.compressors.RandomEviction", {"protect_prompt": True})
FULL = Method("full cache", f"{PACKAGE}.compressors.FullKV")
LEAST = {"timed": 0, "num_sinks": 0} | dict.fromkeys(
    ("problems", "samples", "max_completion_length", "num_slots", "buffer", "window"), 1
)
"""The smallest numbers that options may be."""
OF_DATA = ("prompt_column", "answer_column", "answer_pattern", "prompt_template", "as_chat")
PROBE = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
"""Sizes at which a user's class is checked against the contract."""


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
    from sparse_rl_lightning.evaluation.time_left import TimeLeft
    from sparse_rl_lightning.quality import page
    from sparse_rl_lightning.quality.results import Results

    arguments = options.benchmark().parse_args(args)
    methods = _methods(arguments.methods)
    check_seed(arguments.seed, "--seed")
    for name, least in LEAST.items():
        check_number(f"--{name}", getattr(arguments, name), least=least, or_none=True)
    bench = _bench(arguments)
    folder = writable_folder(arguments.output, "--output", "table.json", ["table.md"])
    settings = {
        "policy": fingerprint(policy=bench.model), "data or tasks": fingerprint(rows=bench.rows),
        "tokenizer": fingerprint(tokenizer=bench.tokenizer),
        "sampling": fingerprint(params=bench.params, ends=bench.sampler(FullKV()).end_token_ids),
        "version": __version__,
    }  # fmt: skip
    results = Results(folder / "table.json", settings)
    bench, mean, longest = _beside(bench, results)
    budgets, sizes = _sizes(arguments, mean, longest)
    for method in methods:
        if method.arguments is not None:  # a mistake in a file ends this before hours are measured
            method.compressor({**sizes, "budget": budgets[-1]})
    cells: list[Cell] = []
    left = TimeLeft(1 + len(budgets) * (len(methods) - 1))
    for method in methods:
        for budget in [None] if method is FULL else budgets:
            left.tell(f"{method.name}, budget {budget or 'full'}", len(cells))
            cells.append(_measured(bench, results, method, budget, sizes))
    say(page.terminal(cells))
    if all(cell.reason for cell in cells):
        raise UserError(f"Nothing could be measured, not even the full cache: {cells[0].reason}")
    write_whole(folder / "table.md", page.markdown(cells))
    say(f"Written: {nearby(results.path)}, {nearby(folder / 'table.md')}")
    return cells


# ---------------------------------------------------------------- what is measured, and on what


def _methods(specs: Sequence[str]) -> list[Method]:
    """The rows of the table, each under a name of its own."""
    methods = {FLOOR.name: FLOOR, FULL.name: FULL}
    for text in dict.fromkeys(specs):
        method = Method.of(text)
        if imported(method.path) is FullKV:
            continue  # has its row
        names = chain([method.name, text], (f"{text} ({number})" for number in count(2)))
        name = next(each for each in names if each not in methods)
        methods[name] = method
    return [Method(name, m.path, m.arguments) if m.name != name else m for name, m in methods.items()]


def _bench(arguments: argparse.Namespace) -> Bench:
    """Policy, problems and judge."""
    from sparse_rl_lightning.quality.cells import Bench
    from sparse_rl_lightning.rewards import arithmetic_reward, boxed_math_reward
    from sparse_rl_lightning.rewards.scoring import Rewards

    rows = _rows(arguments)
    model, tokenizer = load_pretrained(arguments.policy, arguments.dtype)
    model.to(device_of())  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    if arguments.reward and not rows[0]["answer"]:
        raise UserError("--reward judges answers, and these rows have none: add --answer_column, or leave it out.")
    usual = arithmetic_reward if "task" in rows[0] else boxed_math_reward
    try:
        judge = Rewards(imported(arguments.reward) if arguments.reward else usual) if rows[0]["answer"] else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--reward={arguments.reward!r} cannot be imported: {error}.") from error
    if judge is not None:
        judge.check(rows)
    length = arguments.max_completion_length or (512 if arguments.data else 64)
    params = SamplingParams(arguments.samples, length, temperature=arguments.temperature, seed=arguments.seed)
    return Bench(model.eval(), tokenizer, rows, judge, params, arguments.num_slots, arguments.timed)


def _rows(arguments: argparse.Namespace) -> Rows:
    from sparse_rl_lightning.data import ArithmeticTasks, JsonlPrompts
    from sparse_rl_lightning.data.files import read_table

    if arguments.data:
        if arguments.num_terms is not None:
            raise UserError("--num_terms is about the questions of --tasks: leave it out beside --data.")
        columns = [name for _, row in read_table(arguments.data)[:1] for name in row]
        answer = arguments.answer_column or ("answer" if "answer" in columns else None)
        settings = {name: getattr(arguments, name) for name in OF_DATA} | {"answer_column": answer}
        rows = JsonlPrompts(arguments.data, **settings).train_rows()[: arguments.problems]
        if not rows:
            raise UserError(f"--data={arguments.data!r} has no rows. Give a file with prompts to draw for.")
        return rows
    for name in OF_DATA:
        if getattr(arguments, name) not in (None, False, "prompt"):
            raise UserError(f"--{name} is about the rows of a file: add --data FILE, or leave it out.")
    terms = 4 if arguments.num_terms is None else arguments.num_terms
    tasks = ArithmeticTasks(arguments.tasks, terms, num_train=1, num_val=arguments.problems, seed=arguments.seed)
    return tasks.val_rows()


def _beside(bench: Bench, results: Results) -> tuple[Bench, int, int]:
    """The bench with completion lengths of the full cache, and their mean and maximum, stored for a resumed run."""
    if len(results.completions) != len(bench.rows) * bench.params.num_generations:
        rollout = bench.draw(FullKV())
        results.lengths = [round(float(rollout.lengths.double().mean())), int(rollout.lengths.max())]
        results.completions = rollout.completion_lengths.tolist()
        results.write()
    mean, longest = results.lengths
    return replace(bench, full_lengths=torch.tensor(results.completions)), mean, longest


def _sizes(arguments: argparse.Namespace, mean: int, longest: int) -> tuple[list[int], dict[str, Any]]:
    """Budgets in tokens, and what all compressors have in common beside them.

    Raises:
        ValueError: If a budget is 0, sinks and window do not fit into it, or nothing would be evicted.
    """
    budgets = sorted({round(share * mean) if share < 1 else int(share) for share in arguments.budgets})
    least = budgets[0]
    if least < 1:
        raise UserError(
            f"--budgets: {min(arguments.budgets):g} of the mean length with the full cache, {mean} tokens, is a budget "
            "of 0 tokens. Raise the share, or give a number of tokens."
        )
    third = max(1, least // 3)
    usual = {"buffer": min(128, third), "num_sinks": min(4, least // 8), "window": min(8, third)}
    sizes = {
        name: value if getattr(arguments, name) is None else getattr(arguments, name) for name, value in usual.items()
    }
    for budget in budgets:
        if budget + sizes["buffer"] >= longest:
            raise UserError(
                f"--budgets: with budget={budget} and buffer={sizes['buffer']} nothing is evicted: the longest text "
                f"drawn with the full cache has {longest} tokens, {mean} on average. Lower the budget or --buffer."
            )
        FLOOR.compressor({**sizes, "budget": budget})  # sizes that do not fit end this before hours are measured
    return budgets, {**sizes, "protect_prompt": arguments.protect_prompt}


# ---------------------------------------------------------------- a cell


def _measured(bench: Bench, results: Results, method: Method, budget: int | None, sizes: dict[str, Any]) -> Cell:
    """The stored cell, or a new measurement; an error of the method becomes the reason of an empty cell."""
    from sparse_rl_lightning.quality.cells import Cell

    try:
        compressor = _compressor(bench, results, method, {**sizes, "budget": budget})
        timed = [bench.num_timed, str(bench.model.device)] if bench.num_timed else []
        digest = fingerprint(method=compressor, rewards=getattr(bench.judge, "functions", []), timed=timed)
        stored = results.find(method.name, budget, digest)
        if stored:
            return stored
        numbers = bench.measure(compressor)
        if bench.judge is not None:
            bench.judge.settle()  # type: ignore[attr-defined]  # one of Rewards: raises if they failed everywhere
        return results.put(Cell(method.name, budget, digest, **numbers))
    except Exception as error:
        error_name = "" if isinstance(error, (UserError, AssertionError)) else f"{type(error).__name__}: "
        return results.put(Cell(method.name, budget, reason=error_name + " ".join(str(error).split())))


def _compressor(bench: Bench, results: Results, method: Method, sizes: dict[str, Any]) -> Compressor:
    """Build the compressor: with a file about the policy if it needs one, else checked if the class is a user's."""
    from sparse_rl_lightning.testing import check_compressor

    if method.arguments is not None:
        return method.compressor(sizes)
    names = {"statistics", "weights"} if issubclass(imported(method.path), LearnedScore) else {"statistics"}
    needed = sorted(argument_names(method.path) & names)
    files = {argument: _file_of_policy(bench, results, argument) for argument in needed}
    if not files and not method.path.startswith(f"{PACKAGE}."):
        check_compressor(method.compressor(PROBE))
    return method.compressor({**sizes, **files})


def _file_of_policy(bench: Bench, results: Results, argument: str) -> str:
    """Statistics of the policy's queries, or a network that imitates its attention, from other completions."""
    from sparse_rl_lightning.calibration.imitation import HORIZON, imitate_attention
    from sparse_rl_lightning.calibration.query_statistics import MAX_LENGTH, gather_statistics
    from sparse_rl_lightning.compressors.learned_score import save_network

    path = results.path.with_name(f"{argument}-{fingerprint(**results.settings)[:16]}.safetensors")
    if stored_tensors(path) is not None:
        return str(path)
    path.unlink(missing_ok=True)  # damaged, or a link
    rollout = bench.draw(FullKV(), seed=1)
    texts, lengths = rollout.sequences[:, :MAX_LENGTH], rollout.lengths.clamp(max=MAX_LENGTH)
    if argument == "statistics":
        gather_statistics(bench.model, texts, lengths).save(path)
    else:
        horizon = min(HORIZON, max(1, int(rollout.lengths.max()) // 2))
        network, _ = imitate_attention(bench.model, texts, lengths, horizon=horizon, seed=0)
        save_network(network, path)
    return str(path)
