"""The table of commands, from which help, dispatch and the subcommands of the LightningCLI come."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from sparse_rl_lightning.cli import options


@dataclass(frozen=True)
class Command:
    """A command of ``sparse-rl``; without a ``home`` it is a subcommand of the LightningCLI."""

    line: str  # what it does, for --help
    home: str | None = None  # module and function, which is called with the arguments that follow
    parser: Callable[[], argparse.ArgumentParser] | None = None  # answers --help without the home
    is_bare: bool = False  # runs before anything is imported that could fail, or would take seconds


COMMANDS = {
    "fit": Command("train a policy as a configuration says"),
    "validate": Command("compute a configuration's validation metrics once"),
    "test": Command("measure a policy on held-out problems"),
    "predict": Command("write a policy's completions to predictions.jsonl"),
    "export": Command("write the policy of a checkpoint as a folder that from_pretrained reads"),
    "calibrate": Command("find a schedule of budgets for a policy, or measure this machine", "calibrate:main"),
    "statistics": Command(
        "gather what QFilters, TriAttention and LearnedScore need to know of a policy", "calibrate:statistics_main"
    ),
    "report": Command("write the page of a run, or of several side by side", "report:main", options.report, True),
    "plan": Command("predict memory and time of a configuration, or write one for a card", "plan:main", options.plan),
    "benchmark": Command("measure compressors side by side on a policy", "benchmark:main", options.benchmark),
    "record": Command(
        "check whether an engine's evictions explain its log-probabilities", "record:main", options.record
    ),
    "import-gguf": Command(
        "write a GGUF file, llama.cpp's format, as a folder that policies are read from",
        "training.import_gguf:main",
        options.import_gguf,
    ),
    "doctor": Command("say which kernels run here, and what is missing", "doctor:main", options.doctor, True),
}
