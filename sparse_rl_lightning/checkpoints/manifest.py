"""The manifest of a checkpoint folder: which files belong to it, their hashes, and a signature of who wrote them."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import FileError, UserError
from sparse_rl_lightning.files import check_regular, sync, whole_file

NAME = "manifest.json"
KEY_VARIABLE = "SPARSE_RL_KEY_FILE"
SHORTEST_KEY = 16
"""Bytes; a key that a full disk cut may have none."""


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, digests: dict[str, str], **facts: Any) -> None:
    """Write ``manifest.json``, signed with this user's key: SHA-256 of every file by its path, and further facts."""
    body = json.dumps({"files": digests, **facts}, sort_keys=True)
    text = json.dumps({"body": body, "signature": _sign(body)})
    (folder / NAME).write_text(text, encoding="utf-8")
    sync(folder / NAME)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if this user signed it."""
    advice = (
        "Shards of DeepSpeed and FSDP2 are pickled, so only those are read that were written under this user's "
        "account. Start from its weights instead: sparse-rl export writes them as a folder to name under "
        f"model.policy. If it is your own from another account, set {KEY_VARIABLE} to that account's key file."
    )
    body, signature = _content(folder)
    try:
        expected = _sign(body)
    except OSError as error:  # for example a home that cannot be written
        raise UserError(
            f"ckpt_path={str(folder)!r} cannot be checked, since this account's key cannot be read or made: {error}. "
            f"Set {KEY_VARIABLE} to the key file of the account that wrote it."
        ) from error
    if not hmac.compare_digest(signature, expected):
        raise UserError(f"ckpt_path={str(folder)!r} carries another account's signature. {advice}")
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def check_unchanged(folder: Path, names: Collection[str]) -> None:
    """Refuse files of a folder that are not as they were written, whoever did; for readers that unpickle nothing."""
    body, _ = _content(folder)
    try:
        files = dict(json.loads(body)["files"])
    except (ValueError, KeyError, TypeError, RecursionError):  # nobody's signature is compared here
        files = {}
    if changed := changed_files(folder, {name: files.get(name, "") for name in names}):
        raise UserError(not_as_written(folder, changed))


def not_as_written(folder: Path, changed: Sequence[str]) -> str:
    """What is told of a folder with changed files."""
    setting, names = f"ckpt_path={str(folder)!r}", ", ".join(changed)
    return f"{setting} is not as it was written: {names}. Resume from, or export, another checkpoint."


def changed_files(folder: Path, digests: dict[str, str]) -> list[str]:
    """Names of files that are missing or have changed since they were written."""
    return [n for n, recorded in digests.items() if not (folder / n).is_file() or digest(folder / n) != recorded]


def _content(folder: Path) -> tuple[str, str]:
    """Text and signature of a manifest."""
    try:
        content = json.loads(whole_file(folder / NAME, 2**30))
        return str(content["body"]), str(content["signature"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"ckpt_path={str(folder)!r} has no readable {NAME}. Give a checkpoint that was written whole."
        ) from error


def _sign(body: str) -> str:
    return hmac.new(_key(), body.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's secret key, created on first use and readable by nobody else."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    path = Path(os.environ.get(KEY_VARIABLE) or state / "sparse-rl" / "checkpoint.key").expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_hex(32))
        try:
            with suppress(FileExistsError):  # another process was faster, whose key then counts
                os.link(temporary, path)
        finally:
            temporary.unlink()
    key = whole_file(path, 2**20)
    if len(key) < SHORTEST_KEY:  # of a write that a full disk cut; everyone could sign with an empty one
        why = f"it has fewer than {SHORTEST_KEY} bytes, so it is no key; remove it for a new one, or restore it"
        raise FileError(errno.EINVAL, why, str(path))
    return key
