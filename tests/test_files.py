"""Files are written whole or not at all, through no link, and no text from outside names one."""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import file_size_limit
from hypothesis import given
from hypothesis import strategies as st
from killed import killed_at_rename

from sparse_rl_lightning.evaluation.results import BenchmarkResult, ResultFolder
from sparse_rl_lightning.files import (
    LONGEST_NAME,
    append,
    append_rows,
    file_name,
    incomplete,
    own_folder,
    recover,
    replace_folder,
    swap,
    write_files,
    write_whole,
)
from sparse_rl_lightning.metrics import Accuracy

PACKAGE = Path(__file__).resolve().parents[1] / "sparse_rl_lightning"


@given(
    st.text() | st.sampled_from(["..", ".", "", "/etc/passwd", "../../x", "a\0b", "C:\\x", "~", "\ud800", "x" * 999])
)
def test_any_text_becomes_the_name_of_a_file_in_its_folder(text: str) -> None:
    name = file_name(text)
    assert not {"/", "\\", "\0", ":", "~"} & set(name)
    assert not name.startswith((".", "-"))
    assert 1 <= len(name.encode()) <= LONGEST_NAME
    assert Path("folder", name).resolve().parent == Path("folder").resolve()


def test_names_stay_what_they_are_and_apart() -> None:
    plain = ["math500", "aime24", "RKV-512", "RKV-512#2", "gpqa_diamond.v1", "data"]
    assert [file_name(name) for name in plain] == plain
    texts = ["../x", "..x", "/x", "x/", "x ", "x\n", "x" * 200, "x" * 201, ".x"]
    assert len({file_name(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("name", ["../../../precious", "/{tmp}/precious", "a/../../../../precious"])
def test_a_benchmark_s_name_leaves_its_folder_nowhere(name: str, tmp_path: Path) -> None:
    name = name.replace("/{tmp}", str(tmp_path))
    for suffix in (".json", ".parquet"):
        (tmp_path / f"precious{suffix}").write_text("mine")
    folder = ResultFolder(tmp_path / "run" / "evaluation")
    one = Accuracy(1, 1, 0.0, 0.0, 1.0)
    result = BenchmarkResult(name, "dense", one, one, 1.0, 0.0, 0.0, 0.0, 0, 0.0)
    folder.save(result, {"benchmark": [name]}, {"weights": "f"})
    assert {(tmp_path / f"precious{suffix}").read_text() for suffix in (".json", ".parquet")} == {"mine"}
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 4
    assert sum(path.is_file() for path in (folder.path / "dense").iterdir()) == 2
    assert folder.load(name, "dense", {"weights": "f"}) == result
    assert folder.load(f"{name}x", "dense", {}) is None


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "first", tmp_path / "b" / "c" / "second"
    write_files({first: lambda new: new.write_text("1"), second: lambda new: new.write_text("2")})
    with file_size_limit(4096), pytest.raises(OSError, match="File too large"):
        write_files({first: lambda new: new.write_text("new"), second: lambda new: new.write_text("x" * 9999)})
    assert (first.read_text(), second.read_text()) == ("1", "2")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["first", "second"]


def test_no_link_is_written_through(tmp_path: Path) -> None:
    victim, elsewhere = tmp_path / "victim", tmp_path / "elsewhere"
    victim.write_text("mine")
    elsewhere.mkdir()
    place = tmp_path / "run" / ".incomplete" / "last.ckpt"
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    (tmp_path / "run" / "last.ckpt").symlink_to(victim)
    write_files({tmp_path / "run" / "last.ckpt": lambda new: new.write_text("own")}, durable=True)
    assert (tmp_path / "run" / "last.ckpt").read_text() == "own"
    assert not (tmp_path / "run" / "last.ckpt").is_symlink()

    (tmp_path / "run" / "report.html").symlink_to(victim)
    write_whole(tmp_path / "run" / "report.html", "own")
    (tmp_path / "run" / "log.csv").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        append(tmp_path / "run" / "log.csv", "own")

    (tmp_path / "run" / "weights").symlink_to(elsewhere)
    with pytest.raises(OSError, match="weights is a link, and nothing is written through links"):
        own_folder(tmp_path / "run" / "weights")
    place.parent.rmdir()
    place.parent.symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link, and nothing is written through links"):
        write_files({tmp_path / "run" / "last.ckpt": lambda new: new.write_text("x")}, durable=True)
    assert victim.read_text() == "mine"
    assert not list(elsewhere.iterdir())


def test_lines_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "log.csv"
    append(path, "head\n")
    with file_size_limit(4096), pytest.raises(OSError, match="File too large"):
        append(path, "x" * 9999)
    append(path, "\ud800\n")
    assert path.read_text() == "head\n\\ud800\n"


def test_a_table_has_the_columns_of_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.csv"
    append_rows(path, [{"step": 0, "b": "x,\ny"}])
    append_rows(path, [{"b": 1.5, "step": 1}])
    assert path.read_text() == 'step,b\n0,"x,\ny"\n1,1.5\n'
    with file_size_limit(8), pytest.raises(OSError, match="File too large"):
        append_rows(path, [{"step": 2, "new": None}])
    append_rows(path, [{"step": 2, "new": "\ud800"}])
    append_rows(path, [{"step": 3}])
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "b", "new"], ["0", "x,\ny", ""], ["1", "1.5", ""], ["2", "", "\\ud800"], ["3", "", ""]
        ]  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["a.csv"]


def test_a_table_keeps_rows_however_long_and_whatever_their_bytes(tmp_path: Path) -> None:
    """Text of more characters than Python's csv takes by default, no UTF-8, and a row with too many cells."""
    path, limit = tmp_path / "a.csv", csv.field_size_limit()
    path.write_bytes(b"step,text\n0," + b"x" * (limit + 1) + b"\n1,\xff\n2,a,b\n")
    append_rows(path, [{"step": 3, "new": 1}])
    assert path.read_text() == f"step,text,new\n0,{'x' * (limit + 1)},\n1,\\xff,\n2,a,\n3,,1\n"
    assert csv.field_size_limit() == limit


def test_a_table_in_place_of_a_link_has_nothing_of_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine\n")
    (tmp_path / "a.csv").symlink_to(tmp_path / "victim")
    append_rows(tmp_path / "a.csv", [{"step": 0}])
    assert not (tmp_path / "a.csv").is_symlink()
    assert ((tmp_path / "a.csv").read_text(), (tmp_path / "victim").read_text()) == ("step\n0\n", "mine\n")


def writes(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "policy"

    def fails(new: Path) -> None:
        writes("half")(new)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_folder(folder, fails)
    assert not list(folder.parent.iterdir())
    replace_folder(folder, writes("old"))
    (folder / "stale").touch()
    with pytest.raises(OSError, match="No space"):
        replace_folder(folder, fails)
    assert (folder / "config.json").read_text() == "old"
    replace_folder(folder, writes("new"))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


def make(path: Path, sort: str, text: str) -> None:
    """A file, a folder with a file, or a relative link to such a folder, which leads nowhere from another place."""
    if sort == "file":
        path.write_text(text)
        return
    folder = path.parents[path.parent.name.startswith(".")] / f"step-{text}" if sort == "link" else path
    folder.mkdir()
    (folder / "config.json").write_text(text)
    if sort == "link":
        path.symlink_to(folder.name)


def content(path: Path) -> str:
    return (path / "config.json" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("new", ["file", "folder", "link"])
@pytest.mark.parametrize("old", ["file", "folder", "link"])
def test_a_kill_at_any_rename_leaves_the_old_or_the_new(old: str, new: str, tmp_path: Path) -> None:
    """A link to a checkpoint was in the way of a folder of FSDP2: between two renames nothing had its name for good."""
    survivors = []
    for number in range(4):
        path = tmp_path / str(number) / "last.ckpt"
        incomplete(path).parent.mkdir(parents=True)
        make(path, old, "old")
        make(incomplete(path), new, "new")
        killed_at_rename(number, lambda path=path: swap(path))  # type: ignore[misc]
        recover(path)
        survivors.append(content(path))
        if survivors[-1] == "old":
            swap(path)
        assert content(path) == "new"
    is_at_once = old != "folder" != new
    assert survivors == ["new"] * 4 if is_at_once else ["old", "old", "new", "new"]


def test_the_next_one_clears_away_what_a_kill_has_left(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    for number in range(4):
        replace_folder(folder, writes("old"))
        killed_at_rename(number, lambda: replace_folder(folder, writes("new")))
        replace_folder(folder, writes("next"))
        assert (folder / "config.json").read_text() == "next"
        assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_folder_that_is_half_removed_does_not_come_back(tmp_path: Path) -> None:
    """As after a kill while gigabytes are removed; whoever then removes the folder has removed it."""
    folder = tmp_path / "policy"
    replace_folder(folder, writes("old"))
    incomplete(folder).parent.mkdir()
    folder.rename(incomplete(folder).with_name(".old-x"))
    recover(folder)
    assert not folder.exists()
    replace_folder(folder, writes("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_folder_that_cannot_take_its_place_leaves_the_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    replace_folder(folder, writes("old"))
    with pytest.raises(FileNotFoundError):
        replace_folder(folder, lambda new: new.rmdir())
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


WRITERS = {"write_text", "write_bytes", "symlink_to", "touch"}
EXEMPT = {"files.py", "checkpoints/files.py", "checkpoints/manifest.py"}  # the last makes a key, for one reader only


def bare_writes(source: str) -> list[int]:
    """Lines that write a file by themselves: ``write_text``, ``open`` for writing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [*node.args, *(k.value for k in node.keywords if k.arg == "mode")] if name == "open" else []
        texts = [str(mode.value) for mode in modes if isinstance(mode, ast.Constant)]
        if name in WRITERS or any(text and set(text) <= set("wax+bt") for text in texts):
            found.append(node.lineno)
    return found


def test_files_are_written_in_one_place() -> None:
    assert bare_writes("p.open('wb')\nopen(p, mode='a')\np.write_text('')\np.open()\nopen(p, 'r')") == [1, 2, 3]
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {name: bare_writes(path.read_text("utf-8")) for name, path in found.items() if name not in EXEMPT}
    assert {name: own for name, own in lines.items() if own} == {}
