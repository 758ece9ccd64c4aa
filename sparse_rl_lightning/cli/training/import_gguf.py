"""``sparse-rl import-gguf``: a GGUF file as a Hugging Face folder, which policies are read from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sparse_rl_lightning.checkpoints.exports import check_replaceable, export_place
from sparse_rl_lightning.checkpoints.folders import save_folder
from sparse_rl_lightning.checkpoints.gguf import load_gguf
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.files import replace_folder
from sparse_rl_lightning.text import say


def main(args: Sequence[str]) -> None:
    """Convert a file.

    Args:
        args: Arguments after ``sparse-rl import-gguf``.

    Raises:
        ValueError: If the file cannot be read, or the folder is not empty or cannot be written.
    """
    arguments = options.import_gguf().parse_args(args)
    folder = export_place(arguments.folder)
    check_replaceable(folder, "FOLDER", replaces=False)
    model, tokenizer = load_gguf(arguments.file, getattr(torch, arguments.dtype))

    def write(new: Path) -> None:
        save_folder(new, model, tokenizer)
        check_replaceable(folder, "FOLDER", replaces=False)

    replace_folder(folder, write)
    count, model_type = sum(parameter.numel() for parameter in model.parameters()), model.config.model_type
    template = "its chat template" if getattr(tokenizer, "chat_template", None) else "no chat template"
    weights = f"{count / 1e6:,.0f} M weights in {arguments.dtype}"
    say(f"{arguments.folder}: {model_type}, {weights}, tokenizer and {template}.")
