"""Writing files: whole or not at all, never through a link that someone planted, under names safe for any text."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import UserError

LONGEST_NAME = 120
"""Characters of a name that :func:`file_name` leaves as it is; file systems allow 255 bytes, and suffixes follow."""


def file_name(text: str) -> str:
    """A name for a file in a folder that is ours, of text that anyone may have written: a row, a header, a column.

    A name of letters, digits and ``._-+=#`` stays as it is. Of any other text, be it a path, hidden, empty or long,
    what is harmless remains, and a hash tells two of them apart.

    >>> file_name("math500"), file_name("RKV-512#2")
    ('math500', 'RKV-512#2')
    >>> file_name("../../etc/passwd")
    'etc_passwd-3754d6cb'
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=#-]*", text) and len(text) <= LONGEST_NAME:
        return text
    harmless = re.sub(r"[^A-Za-z0-9+=#-]+", "_", text).strip("_-")[: LONGEST_NAME // 2]
    return f"{harmless or 'name'}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes by :func:`write_files`; lone surrogates become escapes."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    write_files({path: lambda new: new.write_bytes(data)})


def write_files(
    writers: Mapping[Path, Callable[[Path], object]],
    place: Callable[[Path], Path] | None = None,
    durable: bool = False,
) -> None:
    """Have files written under other names, and give them their own when all of them are written.

    Folders are made, those that were removed included. A link that has the name of a file, or the other one, is
    replaced and not followed.

    Args:
        writers: Each writes to the path that it is given, of an empty file.
        place: Where a file is written, on the same file system; default beside it, hidden.
        durable: Have all of it on the disk before a file gets its name.

    Raises:
        OSError: If one cannot be written; none has its name then, and the attempt takes no room.
    """
    make_folder = own_folder if place else _folder
    news = {path: place(path) if place else path.with_name(f".{path.name}.{os.getpid()}") for path in writers}
    try:
        for path, new in news.items():
            make_folder(new.parent)
            make_empty(new)
            writers[path](new)
            if durable:
                sync(new)
        for path, new in news.items():
            new.replace(path)
    except BaseException:
        for new in news.values():
            _remove_if_there(new)
        raise
    if durable:
        for parent in {path.parent for path in writers}:
            sync(parent)


def writable_folder(folder: str | Path, argument: str) -> Path:
    """Make sure now that files can be written there later, creating the folder.

    Args:
        folder: An existing or a new folder.
        argument: What the user would change, for the message.

    Returns:
        The folder as a path.

    Raises:
        ValueError: If it cannot be created or written.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(
            f"{argument}={str(path)!r} cannot be written: {error}. Give a folder you may write to."
        ) from error
    return path


def write_parquet(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """Write columns, all or none; text that is no valid Unicode gets escapes."""
    import pyarrow
    from pyarrow import parquet

    clean = {name: [_valid(value) for value in values] for name, values in columns.items()}
    content = pyarrow.table(clean)
    write_files({path: lambda new: parquet.write_table(content, new)})


def _valid(value: Any) -> Any:
    """Lone surrogates, which parquet's UTF-8 cannot hold, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def own_folder(path: Path) -> Path:
    """Make a folder that we name, below one that a user named, and return it.

    Raises:
        OSError: If it cannot be made, or is a link: what is written there would land elsewhere.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(f"{path} is a link, and nothing is written through links out of a run's folder. Remove it.")
    return path


def make_empty(path: Path) -> None:
    """An empty file in place of one that a killed process left, or of a link."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def append(path: Path, text: str) -> None:
    """Add text to a file, all of it or nothing, and make the file with its folder where it is not there.

    Raises:
        OSError: If it cannot be written, or is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file or a folder's entries on the disk before anything else happens."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _remove_if_there(path: Path) -> None:
    """As far as it goes: the error that is on its way says more."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass
