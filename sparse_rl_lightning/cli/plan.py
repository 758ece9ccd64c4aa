"""``sparse-rl plan``: what a configuration takes on a card, or a configuration for a model and a card."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from sparse_rl_lightning.callbacks import AcceptanceMonitor, SamplerSupport, ScoreCentering
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.classes import named_classes
from sparse_rl_lightning.cli.messages import ClearParser, explain, own_error
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import output_file, write_whole
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.planning import Job, Plan, Sharding, card_of, make_plan
from sparse_rl_lightning.planning.blueprint import Blueprint
from sparse_rl_lightning.planning.job import PROMPT
from sparse_rl_lightning.planning.knobs import advice
from sparse_rl_lightning.planning.propose import JUDGED, PROMPTS, configuration, propose
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.text import say

ALIASES = {"None": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Short forms of ``trainer.precision``."""


def main(args: Sequence[str]) -> Plan:
    """Predict a configuration (``--config``), or propose one (``--model``).

    Args:
        args: Arguments after ``sparse-rl plan``.

    Returns:
        The plan that fits.

    Raises:
        ValueError: If it does not fit, or an argument is wrong.
    """
    is_given = any(argument.partition("=")[0] in ("--config", "-c") for argument in args)
    return planned(args) if is_given else proposed(args)


def proposed(args: Sequence[str]) -> Plan:
    """Write a configuration that fits, and print its plan; errors as of :func:`main`."""
    arguments = options.plan().parse_args(args)
    card = card_of(arguments.card, arguments.memory)
    short = arguments.model.rstrip("/").rpartition("/")[2].lower()
    output = Path(arguments.output or f"{short}-{card.memory / 1e9:.0f}gb.yaml")
    target = output_file(output, "--output", replaces=lambda _: arguments.overwrite)
    say(
        f"Looking for a configuration of {arguments.model} with sequences of up to {arguments.length} tokens.",
        sys.stderr,
    )
    plan = propose(arguments.model, card, arguments.length)
    write_whole(target, configuration(plan, output))
    say(f"{plan.text}\n{JUDGED}\nWritten: {output}. It names data and rewards to begin with: change them to yours.")
    return plan


def planned(args: Sequence[str]) -> Plan:
    """Print the plan of a configuration; errors as of :func:`main`."""
    arguments, rest = options.plan(proposes=False).parse_known_args(args)
    card = card_of(arguments.card, arguments.memory)
    say("Reading the configuration", sys.stderr)
    job = job_of(rest, arguments.prompt)
    say(f"Counting {job.blueprint.path}: the learner's passes are walked through layer by layer", sys.stderr)
    plan = make_plan(job, card)
    say(plan.text)
    if not plan.fits:
        say("Looking for the setting that helps most", sys.stderr)
        raise UserError(f"{plan.verdict} {advice(plan)}")
    return plan


class _Configured(LightningCLI):
    """Parses a configuration and makes the module, which loads nothing yet; neither data nor trainer are made."""

    def _set_seed(self) -> None:
        """Nothing is drawn."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Take what `fit` takes beside model, data and trainer: a file of a run has it."""
        parser.add_argument("--num_threads", type=PositiveInt | None, default=None)
        parser.add_method_arguments(Trainer, "fit", skip=set(LightningCLI.subcommands()["fit"]))

    def instantiate_classes(self) -> None:
        self.model = self.made("model")

    def made(self, name: str) -> Any:
        """What the configuration says under a name."""
        try:
            only: Any = Namespace(**{name: self.config[name]})  # type: ignore[no-untyped-call]  # jsonargparse leaves it untyped
            return self.parser.instantiate(only)[name]
        except ValueError as error:
            raise own_error(error) or UserError(explain(str(error))) from error.__cause__

    @property
    def data_args(self) -> Any:
        """The arguments of the data; a module of a user's own need not have those of ours, or mean the same by them."""
        return getattr(self.config.data, "init_args", {})

    @property
    def num_prompts(self) -> int:
        """Prompts per rollout."""
        count = self.data_args.get("prompts_per_rollout")
        return count if isinstance(count, int) else PROMPTS

    @property
    def num_rows(self) -> int | None:
        """The number of training rows, None where they would have to be fetched."""
        count, path = self.data_args.get("num_train"), self.data_args.get("path")
        if isinstance(count, int):
            return count
        if not isinstance(path, (str, os.PathLike)) or not Path(path).expanduser().is_file():
            return None
        return len(self.made("data").train_rows())


def job_of(args: Sequence[str], prompt: int = PROMPT) -> Job:
    """The job of a configuration with overrides, as they follow ``sparse-rl fit``.

    Args:
        args: ``--config FILE`` and overrides.
        prompt: Tokens of the longest prompt.

    Raises:
        ValueError: If the configuration is wrong, or of a module that does not roll out.
    """
    cli = _Configured(
        PolicyModule, PromptDataModule, subclass_mode_model=True, subclass_mode_data=True, run=False,
        auto_configure_optimizers=False, seed_everything_default=False, parser_class=ClearParser,
        save_config_callback=None, args=list(args), parser_kwargs={"prog": "sparse-rl plan"},
    )  # fmt: skip
    module, trainer = cli.model, cli.config.trainer
    if not isinstance(module, SparseGRPO):
        raise UserError(
            f"sparse-rl plan knows modules that roll out and learn from it (SparseGRPO and those built on it), got "
            f"model={type(module).__name__}."
        )
    check_number("trainer.accumulate_grad_batches", trainer.accumulate_grad_batches, least=1)
    generator, options, sharding = module.generator, module.learner.options, sharding_of(trainer)
    prompts = max(1, round(cli.num_prompts / generator.options.oversampling))
    block = BlockPlan(
        prompts, module.group_size, module.steps_per_generation, module.num_passes,
        trainer.accumulate_grad_batches, options.packs,
    )  # fmt: skip
    return Job(
        Blueprint.of(module.policy_source), generator.compressor, _with_monitors(generator.sampling, trainer),
        generator.options, options,
        module.optimizer_factory, block, generator.retriever, module.loss.beta,
        _precision(trainer.precision), sharding, prompt,
        module.keeps_evictions, num_steps(cli, block, sharding.ranks),
    )  # fmt: skip


def _precision(given: Any) -> str:
    """``trainer.precision`` spelled out.

    Raises:
        ValueError: If a plan does not know it.
    """
    precision = ALIASES.get(str(given), str(given))
    if precision.endswith(("-true", "-mixed")):
        return precision
    raise UserError(f"trainer.precision={given!r}: a plan knows 16-, bf16-, 32- and 64-true, 16- and bf16-mixed.")


def _with_monitors(sampling: SamplingParams, trainer: Any) -> SamplingParams:
    """The sampling of a rollout with the most likely tokens that callbacks want, which take memory."""
    names = {AcceptanceMonitor.__name__: "top_k", ScoreCentering.__name__: "top", SamplerSupport.__name__: "top"}
    named = ((callback.class_path.rpartition(".")[2], callback) for callback in named_classes(trainer.callbacks))
    wanted = [getattr(callback.init_args, names[name]) for name, callback in named if name in names]
    return replace(sampling, top_logprobs=max([sampling.top_logprobs, *wanted]))


def num_steps(cli: _Configured, block: BlockPlan, ranks: int) -> int | None:
    """The optimizer steps of a whole run, None where nothing ends it, or rows do that are not at hand."""
    trainer, most = cli.config.trainer, cli.config.trainer.max_steps
    epochs = 1000 if trainer.max_epochs is None and most < 0 else trainer.max_epochs  # 1000 is Lightning's choice
    rows = None if epochs is None or epochs < 0 or trainer.limit_train_batches is not None else cli.num_rows
    if rows is None:
        return most if most >= 0 else None
    steps: int = epochs * (rows // (cli.num_prompts * ranks)) * block.optimizer_steps
    return steps if most < 0 else min(steps, most)


def _count(devices: Any, is_alone: bool) -> int:
    """The number of GPUs in ``trainer.devices``; "all that there are" is one for a run that names no strategy."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdigit():
        return int(devices)
    if "," in str(devices):
        return len([device for device in str(devices).split(",") if device.strip()])
    if devices == "auto" and is_alone:
        return 1
    raise UserError(f"trainer.devices={devices!r}: a plan has to know how many GPUs. Give --trainer.devices=N.")


def sharding_of(trainer: Any) -> Sharding:
    """What the ranks of a trainer's configuration share.

    Raises:
        ValueError: If the strategy is none of those that a plan knows, or the number of GPUs is left open.
    """
    strategy = trainer.strategy
    ranks = _count(trainer.devices, is_alone=strategy == "auto") * trainer.num_nodes
    if ranks < 1:
        raise UserError(
            f"A plan is for at least one GPU, got trainer.devices={trainer.devices!r} and trainer.num_nodes="
            f"{trainer.num_nodes}. Leave both out for one."
        )
    if isinstance(strategy, str):
        entry = StrategyRegistry[strategy] if strategy in StrategyRegistry else None
        strategy_class, arguments = (entry["strategy"].__name__, entry["init_params"]) if entry else (strategy, {})
    else:
        strategy_class, arguments = strategy.class_path.rpartition(".")[2], strategy.init_args
    if strategy_class == "SparseRLDeepSpeed" and arguments.get("config") is None:
        return Sharding(arguments["stage"], ranks, arguments["offload_optimizer"], arguments["offload_parameters"])
    if strategy_class in ("auto", "DDPStrategy", "SingleDeviceStrategy"):
        return Sharding(0, ranks)
    name = strategy if isinstance(strategy, str) else f"{strategy.class_path} with settings of its own"
    raise UserError(f"trainer.strategy: a plan knows ddp and sparse_rl_deepspeed_stage_1 to 3 by name, not {name}.")
