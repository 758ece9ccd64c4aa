"""Writing files: complete or not at all, never through planted links, under names safe for any text."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TextIO, get_args, get_origin, get_type_hints

from sparse_rl_lightning.errors import FileError, UserError

LONGEST_NAME = 120
"""Number of characters that :func:`file_name` leaves alone; file systems allow 255 bytes, and suffixes follow."""


def _memory() -> int:
    """Bytes of this machine's memory, or of the part of it that its container may take."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


LARGEST = _memory() // 4
"""Bytes of the largest file that is read whole: beside them stand its text, its lines and what is parsed from them."""
UNUSABLE = (OSError, ValueError, RuntimeError)
"""Errors of a path: nothing to be done there, a null character, and a circle of links or an unknown user's ``~``."""


def file_name(text: str) -> str:
    """A safe file name in one of our folders for text that anyone may have written: a row, a header, a column.

    A name of letters, digits and ``._-+=#`` stays as it is. Any other text, be it a path, hidden, empty or long, keeps
    its harmless characters, and gets a hash to distinguish it.

    >>> file_name("math500"), file_name("RKV-512#2")
    ('math500', 'RKV-512#2')
    >>> file_name("../../etc/passwd")
    'etc_passwd-3754d6cb'
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=#-]*", text) and len(text) <= LONGEST_NAME:
        return text
    harmless = re.sub(r"[^A-Za-z0-9+=#-]+", "_", text).strip("_-")[: LONGEST_NAME // 2]
    return f"{harmless or 'name'}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def whole_file(path: str | Path, most: int = LARGEST) -> bytes:
    """The content of a regular file: a link may lead to a device that never ends, a pipe keeps its reader waiting.

    Args:
        path: File, or a link to one; ``~`` is the home.
        most: Largest number of bytes to read.

    Raises:
        OSError: If it cannot be read, is no regular file, or is larger.
    """
    path = os.path.expanduser(path)
    check_regular(path, most)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        check_regular(path, most, file.fileno())  # it may have been replaced
        parts = [file.read(os.fstat(file.fileno()).st_size)]
        while sum(map(len, parts)) <= most and (more := file.read(2**20)):  # it may grow
            parts.append(more)
    content = b"".join(parts)
    if len(content) > most:
        _refuse_size(path, most)
    return content


def from_json(cls: type, values: Mapping[str, Any]) -> Any:
    """An object of a dataclass that an earlier run has stored as JSON.

    Raises:
        TypeError: If a field is missing, unknown, or of another type than the class says.
    """
    loaded = cls(**values)
    if wrong := [name for name, hint in get_type_hints(cls).items() if not is_of(getattr(loaded, name), hint)]:
        raise TypeError(f"{', '.join(wrong)}: of another type")
    return loaded


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value of a JSON file is of a type: numbers, texts, None, and lists and dictionaries of them.

    >>> is_of({"a": [1, 2.5]}, dict[str, list[float]]), is_of("1", float | None)
    (True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(is_of(value, choice) for choice in inner)
    if origin is None:
        return isinstance(value, (int, float) if hint is float else hint)
    entries = value.values() if origin is dict and isinstance(value, dict) else ()
    return (
        isinstance(value, origin)
        and all(is_of(entry, inner[0]) for entry in value)
        and all(is_of(entry, inner[-1]) for entry in entries)
    )


def stored_tensors(path: Path) -> dict[str, Any] | None:
    """The tensors of a safetensors file that an earlier run wrote; None without one, or if it is damaged."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception:  # foreign data
        return None


@contextmanager
def raising_disk_errors() -> Iterator[None]:
    """Raise the disk's own errors: torch.save, safetensors and tokenizers report a full one as others."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        if not isinstance(error, OSError) and (code := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise


def check_regular(path: str | Path, most: int | None = None, descriptor: int | None = None) -> None:
    """Refuse a pipe, a socket or a device in place of a file, or a file of more bytes, before anything reads it.

    ``descriptor`` is of the file if it is open.

    Raises:
        OSError: If it is one, or cannot be found.
    """
    status = os.stat(path if descriptor is None else descriptor)
    mode = status.st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder is an error by itself
        raise FileError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))
    if most is not None and status.st_size > most:
        _refuse_size(path, most)


def _refuse_size(path: str | Path, most: int) -> NoReturn:
    raise FileError(errno.EINVAL, f"it is larger than {most:,} bytes", str(path))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes with :func:`write_files`; lone surrogates become escapes."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    write_files({path: lambda new: new.write_bytes(data)})


def write_files(writers: Mapping[Path, Callable[[Path], object]], durable: bool = False) -> None:
    """Write files under temporary names, and rename them once all of them are written.

    Folders are created, including any that were removed. A link with a file's final or temporary name is replaced and
    not followed.

    Args:
        writers: Function for each path that writes to the path it is given, where nothing is.
        durable: Whether to flush everything to the disk before a file gets its name, which may be a folder's now.

    Raises:
        OSError: If one cannot be written; none has its name then, and no disk space stays occupied.
    """
    news = {path: incomplete(path) if durable else path.with_name(f".{path.name}.{os.getpid()}") for path in writers}
    try:
        for path, new in news.items():
            new.parent.mkdir(parents=True, exist_ok=True)
            if durable:
                own_folder(new.parent)
            remove(new)  # of a process that was killed, or a link
            with raising_disk_errors():
                writers[path](new)
            if durable:
                sync(new)
        for path, new in news.items():
            swap(path) if durable else new.replace(path)
    except BaseException:
        for new in news.values():
            with suppress(OSError):  # the error being raised matters more
                remove(new)
        raise


# ---------------------------------------------------------------- what is whole at every moment


def incomplete(path: Path) -> Path:
    """The path at which ``path`` is written first.

    It is in a folder of its own, because ``ckpt_path=last`` takes the newest entry beside the checkpoints whose name
    contains "last".
    """
    return path.parent / ".incomplete" / path.name


def replaced(path: Path) -> Path:
    """The path to which the old ``path``, always whole, moves until it is replaced."""
    return path.parent / ".replaced" / path.name


def swap(path: Path) -> None:
    """Give the name ``path`` to the file, folder or link at :func:`incomplete`; what has the name now is removed.

    Of a process that is killed between two renames, :func:`recover` brings the old one back. Two processes may not do
    this to one path at the same time.

    Raises:
        OSError: If it cannot be renamed; the old one is there then.
    """
    new, old = incomplete(path), replaced(path)
    if not _is_folder(new) and not _is_folder(path):
        new.replace(path)
    else:
        recover(path)
        if os.path.lexists(path):
            _throw_away(path)  # a killed process had replaced it
            own_folder(old.parent)
            path.rename(old)
        try:
            new.rename(path)
        finally:
            recover(path)
    sync(path.parent)
    _throw_away(path)


def recover(path: Path) -> None:
    """Bring back what :func:`swap` was replacing, if the process ended before the other had the name.

    Any number of ranks may do so at the same time.
    """
    if os.path.lexists(path) or not os.path.lexists(replaced(path)):
        return
    try:
        replaced(path).rename(path)
    except FileNotFoundError:
        pass  # another rank was faster
    except OSError:
        if not path.exists():
            raise


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _throw_away(path: Path) -> None:
    """Remove what was replaced, by a name under which it does not come back: that may be interrupted as well."""
    old, trash = replaced(path), incomplete(path).parent
    if os.path.lexists(old):
        old.rename(Path(tempfile.mkdtemp(prefix=".old-", dir=own_folder(trash))) / old.name)
    for thrown in trash.glob(".old-*"):
        try:
            remove(thrown)
        except OSError as error:  # a network disk keeps files that a server has open
            warnings.warn(f"The earlier {path} could not be removed: {error}. Remove {thrown}.", stacklevel=4)


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder at :func:`incomplete`, and :func:`swap` it once it is whole.

    Args:
        folder: Its place; neither a link nor the working directory.
        write: Function that writes into the folder it is given, which is empty.

    Raises:
        OSError: If it cannot be written or renamed; the earlier folder is there then.
    """
    new = incomplete(folder)
    own_folder(new.parent)
    remove(new)  # of a process that was killed
    new.mkdir()
    try:
        with raising_disk_errors():
            write(new)
        swap(folder)
    except BaseException:
        remove(new)  # may be most of a full disk
        raise
    finally:
        for emptied in (new.parent, replaced(folder).parent):
            with suppress(OSError):
                emptied.rmdir()


def writable_folder(folder: str | Path, argument: str, first: str = "", names: Iterable[str] = ()) -> Path:
    """Create a folder if needed, and check now that files can be written there later.

    Args:
        folder: The folder.
        argument: The setting's name, for the message.
        first: Of files that we name, the one that is written first: with it the others are of an earlier call.
        names: The others, which are something else's where the first is missing.

    Raises:
        ValueError: If it cannot be written, or a file of something else would be replaced.
    """
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except UNUSABLE as error:
        raise UserError(
            f"{argument}={str(folder)!r} cannot be written: {error}. Give a folder you may write to."
        ) from error
    existing = [name for name in names if os.path.lexists(path / name)]
    if existing and not os.path.lexists(path / first):
        raise UserError(
            f"{argument}={str(folder)!r} holds {', '.join(existing)} and no {first}: of something else, which would be "
            "replaced. Give another folder."
        )
    return path


def output_file(
    target: str | Path, argument: str, follows: bool = True, replaces: Callable[[Path], bool] = lambda _: True
) -> Path:
    """The file that a user names to be written, where a link leads.

    Args:
        target: The path.
        argument: What names it, for the message.
        follows: Whether a link is followed: not one in a folder whose files we name, which is replaced.
        replaces: Whether a file that is there may be replaced. Commands say no to what they have not written, inputs
            above all, without ``--overwrite``.

    Raises:
        ValueError: If it is a folder, a pipe or a device, its folder cannot be written, or it must not be replaced.
    """
    try:
        path = Path(target).expanduser()
        path = path.resolve() if follows else path
        mode = path.stat(follow_symlinks=follows).st_mode
    except (FileNotFoundError, NotADirectoryError):  # for the folder to say
        mode = stat.S_IFREG
    except UNUSABLE as error:
        raise UserError(f"{argument}={str(target)!r} cannot be written: {error}. Give another file.") from error
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise UserError(f"{argument}={str(target)!r} is {what}. Give the file to write.")
    if path.exists() and not replaces(path):
        raise UserError(f"{argument}={str(target)!r} exists. Give another name, or --overwrite.")
    writable_folder(path.parent, f"folder of {argument}")
    return path


def write_parquet(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """Write columns, all or none; text that is not valid Unicode gets escapes."""
    import pyarrow
    from pyarrow import parquet

    clean = {name: [_valid(value) for value in values] for name, values in columns.items()}
    content = pyarrow.table(clean)
    write_files({path: lambda new: parquet.write_table(content, new)})


def _valid(value: Any) -> Any:
    """The value with escapes for lone surrogates, which parquet's UTF-8 cannot store."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def own_folder(path: Path) -> Path:
    """Create a folder that we name, below one that a user named; a link there is an error: it leads elsewhere."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(f"{path} is a link, and nothing is written through links out of a run's folder. Remove it.")
    return path


def append(path: Path, text: str) -> None:
    """Append text to a file, all of it or nothing, creating the file and its folder if needed; not through a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise


def append_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], order: Callable[[Iterable[str]], list[str]] = list
) -> None:
    """Append rows to a CSV table; with a new column it is rewritten, completely or not at all. Not through a link.

    Args:
        path: The table, which is created if needed.
        rows: Cells by the name of their column; a missing one is empty.
        order: Function that brings the names into an order, default the table's own with new ones at the end.
    """
    with _table(path) as file:
        header = next(csv.reader(file), [])
        names = order(dict.fromkeys(chain(header, *rows)))
        if names != header:
            old = csv.DictReader(file, header)
            write_files({path: lambda new: _write_rows(new, names, chain(old, rows))})
            return
    text = io.StringIO(newline="")
    csv.DictWriter(text, names).writerows(rows)
    append(path, text.getvalue())


@contextmanager
def _table(path: Path) -> Iterator[TextIO]:
    """A CSV file to read, whatever its bytes and however long its cells; an empty one in place of none or a link."""
    limit = csv.field_size_limit(sys.maxsize)
    is_there = path.is_file() and not path.is_symlink()
    try:
        with path.open(newline="", encoding="utf-8", errors="backslashreplace") if is_there else io.StringIO() as file:
            yield file
    finally:
        csv.field_size_limit(limit)


def _write_rows(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        table = csv.DictWriter(file, names, extrasaction="ignore")  # cells beyond an edited header
        table.writeheader()
        table.writerows(rows)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk before anything else happens."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
