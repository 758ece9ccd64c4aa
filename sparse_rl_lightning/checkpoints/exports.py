"""Which folder an export may replace: an earlier export, and nothing that a run or its user still needs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import recover, whole_file, writable_folder

WRITTEN = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(merges|vocab)\.txt|(tokenizer|spiece|spm|sentencepiece(\.bpe)?)\.model"
    r"|chat_template\.(jinja|json)|additional_chat_templates(/[\w-]+\.jinja)?"
    r"|model\.safetensors|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json"
    r"|sparse_adapter(/(adapter_config|generation_config)\.json|/adapter_model\.safetensors)?"
)
"""Paths in the folder of an export."""
Kept = Sequence[tuple[str, str, bool]]
"""Folders that are needed, each with its name, and whether those in it are needed too."""


def export_place(folder: str | Path) -> Path:
    """The folder to write, with links followed: it is written beside its place, and renamed there."""
    return Path(os.path.realpath(Path(folder).expanduser()))


def check_replaceable(folder: Path, argument: str, kept: Kept = (), replaces: bool = True) -> None:
    """Refuse a folder that holds anything but an earlier export, is needed, or cannot be renamed.

    One that a killed process was replacing is brought back first.

    Args:
        folder: The folder, of :func:`export_place`.
        argument: What names it, for the message.
        kept: Folders that are needed beside the working directory.
        replaces: Whether an earlier export there may be replaced.

    Raises:
        ValueError: If it is such a folder, or the one around it cannot be written.
    """
    setting = f"{argument}={str(folder)!r}"
    try:
        if folder.is_mount():
            raise UserError(f"{setting} is a disk of its own, which is not replaced. Give a folder on it.")
        writable_folder(folder.parent, f"{argument}'s parent")
        recover(folder)
    except OSError as error:
        raise UserError(f"{setting} cannot be written: {error}. Give another folder, of a shorter name.") from error
    for name, path, is_closed in (("the working directory", os.getcwd(), False), *kept):
        needed = export_place(path)
        lies_in = "lies in" if is_closed and folder.is_relative_to(needed) else ""
        if relation := "is or holds" if needed.is_relative_to(folder) else lies_in:
            raise UserError(f"{setting} {relation} {name}, which is not replaced. Give another folder.")
    if not os.path.lexists(folder):  # a circle of links is there
        return
    if what := _other_than_export(writable_folder(folder, argument), replaces):
        raise UserError(f"{setting} {what}, so it is not replaced. Give a new folder, or empty this one.")


def _other_than_export(folder: Path, replaces: bool) -> str:
    """What is in a folder that no export has written, as the middle of a sentence; empty if there is nothing."""
    if not any(folder.iterdir()):
        return ""
    if not replaces:
        return "is not empty"
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not WRITTEN.fullmatch(name) or path.is_dir() != ("." not in name):
            return f"holds {name!r}, which no export writes"
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        if json.loads(whole_file(folder / "config.json", 2**24))["model_type"]:
            return ""
    return "is not empty and holds no model (no config.json with a model_type)"
