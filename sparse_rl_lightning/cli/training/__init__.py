"""``sparse-rl fit|validate|test|predict|export``: a LightningCLI."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from sparse_rl_lightning.callbacks.best_effort import BestEffortWrite
from sparse_rl_lightning.cli.launch import set_threads
from sparse_rl_lightning.cli.messages import ClearParser, explain, is_from, own_error
from sparse_rl_lightning.cli.options import COMMANDS
from sparse_rl_lightning.cli.quiet import prepared
from sparse_rl_lightning.cli.training import checks
from sparse_rl_lightning.cli.training.export import ExportingTrainer
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.data.files import read_table
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.modules import Evaluation, SparseGRPO
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.text import nearby, say


class SparseRLCLI(LightningCLI):
    """LightningCLI that checks the configuration before any model is built, and never starts over silently."""

    def __init__(self, *classes: Any, **settings: Any) -> None:
        args = settings.get("args")
        words = args if isinstance(args, list) else sys.argv[1:] if args is None else []
        self._first_word = words[0] if words else ""
        self._num_loggers = sum(word.startswith("--trainer.logger+") for word in words)
        super().__init__(*classes, **settings)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static there, and called on the instance
        """Subcommands of Lightning, and ``export``; only the requested one, as all parsers take long."""
        commands = LightningCLI.subcommands() | {"export": {"model", "datamodule"}}
        return {name: commands[name] for name in ([self._first_word] if self._first_word in commands else commands)}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **settings: Any) -> LightningArgumentParser:
        """Describe a subcommand as the table does: a first line of Lightning's docstrings may end in mid-sentence."""
        settings["description"] = COMMANDS[subcommand].line
        return super()._prepare_subcommand_parser(klass, subcommand, **settings)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the number of torch threads: on a small machine the default may be too many."""
        parser.add_argument(
            "--num_threads", type=PositiveInt | None, default=None, help="CPU threads of torch, null: default"
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; the seed of the process is checked before anything else could use it."""
        super().parse_arguments(parser, args)
        checks.check_process_seed(self.config[self.config.subcommand] if "subcommand" in self.config else self.config)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let a checkpoint's ``hyper_parameters`` change configuration and classes."""

    def before_instantiate_classes(self) -> None:
        """Check folders and checkpoint, and apply settings of the whole process.

        Raises:
            ValueError: If the checkpoint to resume from does not exist, an output folder cannot be written, or strategy
                and processes do not fit together.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        checks.name_logger(config, self._num_loggers)
        checks.check_launch(config)
        checks.check_folders(config)
        checks.check_checkpoint(config, self.subcommand or "fit")
        if self.subcommand == "validate" and config.trainer.limit_val_batches == 0:
            config.trainer.limit_val_batches = None  # the 0 in a configuration is meant for `fit`
        set_threads(config.num_threads)

    def instantiate_classes(self) -> None:
        """Build everything; of an error, show the message of the class without the parser's frame around it."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise own_error(error) or UserError(explain(str(error))) from error.__cause__
        except TypeError as error:
            if not is_from(error, "lightning"):
                raise
            raise UserError(f"trainer: {error}") from error
        except RuntimeError as error:
            if "more than one stateful callback" not in str(error):
                raise
            raise UserError(f"trainer.callbacks: {str(error).partition('. ')[0]}. Remove one of them.") from error

    def before_fit(self) -> None:
        """Warn of files that will be overwritten."""
        checks.warn_of_earlier_run(self.config[self.subcommand])

    def before_test(self) -> None:
        """Refuse modules that generate nothing."""
        if not isinstance(self.model, (SparseGRPO, Evaluation)):
            raise UserError(
                f"sparse-rl {self.subcommand} needs a model that generates, such as SparseGRPO, got "
                f"model={type(self.model).__name__}. Use fit or validate."
            )

    def before_predict(self) -> None:
        """Refuse to write the completions over the prompts."""
        self.before_test()
        rank = f"_{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
        self.predictions = Path(self.trainer.default_root_dir) / f"predictions{rank}.jsonl"
        sources = {"data": self.datamodule, "data.train": getattr(self.datamodule, "train", None)}
        places = [(at, name, source) for at, source in sources.items() for name in ("path", "val_path")]
        inputs = {f"{at}.{name}": str(getattr(source, name, "")) for at, name, source in places}
        inputs |= {f"data.own.{name}": each.file for name, each in getattr(self.datamodule, "known", {}).items()}
        for name, file in inputs.items():
            if os.path.realpath(os.path.expanduser(file)) == os.path.realpath(self.predictions):
                raise UserError(
                    f"{name} is {self.predictions}, which predict writes. Set another trainer.default_root_dir."
                )
        if self.predictions.exists() and not _are_completions(self.predictions):
            raise UserError(
                f"{self.predictions}, which predict would write, is no file of completions. Move it away, or set "
                "another trainer.default_root_dir."
            )

    def after_predict(self) -> None:
        """Write the completed rows to ``predictions.jsonl`` in ``trainer.default_root_dir``."""
        rows = [row for batch in self.trainer.predict_loop.predictions for row in batch]
        path = self.predictions
        try:
            write_whole(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
        except OSError as error:
            raise UserError(f"trainer.default_root_dir: {path} cannot be written: {error}.") from error
        say(f"Written: {len(rows)} completions to {nearby(path)}")


def _are_completions(path: Path) -> bool:
    """Whether the rows of a file are those of an earlier predict, or there are none."""
    try:
        rows = [row for _, row in read_table(str(path))]
    except (OSError, ValueError):
        return False
    return all(row.keys() & {"completion", "completions"} for row in rows)


class SaveRunConfig(SaveConfigCallback):
    """Writes the whole configuration as ``run_config.yaml`` beside the metrics when training begins.

    It is not written earlier: a start that fails, or a validation, leaves the last training's configuration unchanged.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Deferred to ``on_train_start``."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the seeds that were not set into the configuration."""
        for name, seed in pl_module.seeds.items() if isinstance(pl_module, PolicyModule) else ():
            checks.note_seed(self.config, name.split("."), seed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, unless the disk is full."""
        folder = trainer.log_dir  # a collective: all ranks must call it
        if folder is not None and "://" in folder:
            super().setup(trainer, pl_module, "fit")
        elif folder is not None and trainer.is_global_zero:
            text = self.parser.dump(self.config, skip_none=False)
            BestEffortWrite(self.config_filename)(lambda: write_whole(Path(folder) / self.config_filename, text))


def run(args: ArgsType = None) -> LightningCLI:
    """Run a subcommand; see :func:`sparse_rl_lightning.cli.main`."""
    with prepared():
        return SparseRLCLI(
            PolicyModule,
            PromptDataModule,
            trainer_class=ExportingTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            parser_class=ClearParser,
            # not config.yaml: the folder may contain the user's own
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True, "config_filename": "run_config.yaml"},
            parser_kwargs={"prog": "sparse-rl"},
            args=args,
        )
