"""What a user names to be read is read or refused by name: no pipe is waited for, nothing endless is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration.query_statistics import encode_texts
from sparse_rl_lightning.calibration.shapes import H200, Hardware
from sparse_rl_lightning.checkpoints.manifest import digest, read_manifest
from sparse_rl_lightning.checkpoints.reading import check_whole
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.benchmark import Method
from sparse_rl_lightning.cli.messages import user_message
from sparse_rl_lightning.cli.options import Parser
from sparse_rl_lightning.compressors.learned_score import load_network
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics
from sparse_rl_lightning.data.files import read_json_lines, read_table
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evaluation.results import ResultFolder
from sparse_rl_lightning.files import append, check_regular, output_file, whole_file
from sparse_rl_lightning.integrations.record import read_record
from sparse_rl_lightning.planning.blueprint import read_config
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.quality.results import Results
from sparse_rl_lightning.testing import character_tokenizer

READERS: dict[str, Callable[[Path], object]] = {
    "schedule.yaml": LengthSchedule.from_file,
    "hardware.json": Hardware.from_file,
    "manifest.json": lambda path: read_manifest(path.parent),
    "method.yaml": lambda path: Method.of(str(path)),
    "statistics.safetensors": lambda path: QueryStatistics.load(path, "QFilters"),
    "network.safetensors": lambda path: load_network(str(path)),
    "record.safetensors": read_record,
    "rows.jsonl": lambda path: read_json_lines(str(path)),
    "rows.csv": lambda path: read_table(str(path), None, "train"),
    "results.json": lambda path: Results(path, {}),
    "math500.json": lambda path: ResultFolder(path.parents[1]).load("math500", path.parent.name, {}),
    "last.ckpt": check_whole,
    "config.json": lambda path: read_config(str(path.parent)),
    "tokenizer.json": lambda path: load_pretrained(str(path.parent)),
}


def endless(path: Path) -> None:
    """A file of 1 TB, without a block on the disk."""
    with path.open("wb") as file:
        file.truncate(10**12)


def noise(path: Path) -> None:
    """Bytes that are no text, no JSON and no archive."""
    path.write_bytes(bytes(range(128, 256)) * 4)


@contextmanager
def seconds(number: int) -> Iterator[None]:
    """Raise TimeoutError inside if it takes longer: a reader that waits for a pipe has no end."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(number)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [os.mkfifo, endless, noise])
@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_is_refused_by_name(
    name: str, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / name)
    with seconds(60), pytest.raises((UserError, SystemExit)) as caught:
        READERS[name](tmp_path / name)
    said = f"{caught.value}{capsys.readouterr().err}"
    assert name in said or str(tmp_path) in said


def test_lines_end_at_line_ends_alone(tmp_path: Path) -> None:
    """U+2028 and the like stand in texts as they are; a file may begin with a mark."""
    odd = "a\u2028b\u2029c\x85d"
    rows = [{"prompt": odd, "completion": "a"}, {"prompt": "b"}]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "t.jsonl").write_bytes(content.encode("utf-8-sig"))
    assert [row["prompt"] for *_, row in read_json_lines(str(tmp_path / "t.jsonl"))] == [odd, "b"]


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": 5}, {"completion": "a"}, {"prompt": 5}])
def test_what_is_no_text_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^t.jsonl, line 2: expected a prompt, and text as completion"):
        encode_texts([("t.jsonl, line 1", {"prompt": "a"}), ("t.jsonl, line 2", row)], character_tokenizer("a"), 8)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with seconds(10):
        for use in (digest, whole_file, check_regular, lambda path: append(path, "x")):
            with pytest.raises(OSError, match="pipe"):
                use(tmp_path / "pipe")


@pytest.mark.parametrize(("option", "name"), [("--config", "own.yaml"), ("--model", 'Parser key "model"')])
def test_a_configuration_that_is_no_text_is_refused_by_name(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(tmp_path / "own.yaml")
    with pytest.raises((UserError, SystemExit)) as caught:
        main(["fit", f"{option}={tmp_path / 'own.yaml'}"])
    assert name in f"{caught.value}{capsys.readouterr().err}"


def test_the_message_names_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("12345")
    with pytest.raises(UserError, match=f"^'{tmp_path}/file': it is larger than 4 bytes$"):
        whole_file(tmp_path / "file", 4)
    assert whole_file(tmp_path / "file", 5) == b"12345"


@pytest.mark.parametrize("most", [0, 10])
def test_a_file_that_says_it_is_empty_is_not_read_beyond_the_bound(most: int) -> None:
    """As one that grows while it is read, or is another by the time it is opened."""
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(UserError, match=f"larger than {most} bytes"):
        whole_file("/proc/self/maps", most)
    assert whole_file("/proc/self/maps", 2**24).endswith(b"\n")


def test_a_folder_and_a_socket_are_errors_by_themselves(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        whole_file(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(UserError, match="a socket"):
            whole_file(tmp_path / "s")


@pytest.mark.parametrize("place", ["/dev/fd/0", "/proc/self/fd/0", "/proc/thread-self/fd/0", "/dev/stdin"])
def test_what_a_shell_makes_of_a_command_is_read(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--config <(envsubst < run.yaml)``, ``| ... --config /dev/stdin``: a pipe, and somebody writes to it."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, b"seed_everything: 1234\n")
    os.close(writer)
    os.dup2(reader, 0)
    try:
        with seconds(60), pytest.raises(SystemExit):
            main(["fit", "--config", place, "--model=SparseGRPO", "--print_config"])
    finally:
        os.dup2(before, 0)
    assert "seed_everything: 1234" in capsys.readouterr().out


MOMENTS = QueryStatistics(torch.zeros(1, 2, 4), torch.zeros(1, 2, 2), torch.zeros(1, 1, 4))


@pytest.mark.parametrize("save", [LengthSchedule([0, 8], [4, 8]).save, H200.save, MOMENTS.save])
def test_what_a_user_names_is_written_where_a_link_leads(save: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "file").stat().st_size
    with pytest.raises(UserError, match="is a folder"):
        save(tmp_path / "disk")


def test_an_unknown_option_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="x").parse_args(["--\x1b[2J"])
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"\x1b[2J" in said


@pytest.mark.parametrize("name", ["x" * 300, "file/x", "missing\0", "circle"])
def test_output_file_refuses_in_words_what_the_system_cannot_look_at(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("back")
    (tmp_path / "back").symlink_to("circle")
    with pytest.raises(UserError, match=r"^(folder of )?--output=.* cannot be written: "):
        output_file(tmp_path / name, "--output")


def test_a_place_of_somebody_else_is_a_line() -> None:
    """Which any command may meet, where it looks whether there is a file."""
    message = user_message(PermissionError(13, "Permission denied", "theirs/x"))
    assert message == "[Errno 13] Permission denied: 'theirs/x'. Name a place that you may use."
    assert user_message(PermissionError(1, "Operation not permitted")) is None


def test_output_file_leaves_links_of_a_folder_that_we_name_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert output_file(tmp_path / "link", "--output", follows=False) == tmp_path / "link"
    with pytest.raises(UserError, match="is a folder"):
        output_file(tmp_path / "link", "--output")
    with pytest.raises(UserError, match="is a folder"):
        output_file(tmp_path / "folder", "--output", follows=False)
