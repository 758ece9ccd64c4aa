"""Runs as they lie on disk: finished, killed, broken, hostile, and several of them compared."""

from __future__ import annotations

import copy
import errno
import importlib
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from html import escape, unescape
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, Parser, record, row, text_of
from tiny_run import run_console

from sparse_rl_lightning.cli.report import main
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.report import PROGRESS, SUMMARY, RunRecord, comparison, page, picture, read_run
from sparse_rl_lightning.report.charts import DARK, LIGHT, draw
from sparse_rl_lightning.report.page import STYLE, differing_settings
from sparse_rl_lightning.report.plots import plots_of_run


def write_run(folder: Path, run: RunRecord, name: str = SUMMARY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(run.as_json()), encoding="utf-8")
    return folder


def write_json(folder: Path, content: dict[str, Any]) -> Path:
    (folder / SUMMARY).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    run = record(
        worst=[{"rollout": 1, "kinds": ["rejected"], "prompt": "p", "completion": "c", "rejected": True}],
        warnings=[{"rollout": 3, "text": "TailGuard"}], validation=[{"rollout": 4.0, "dense": 0.3}],
        written="2030-01-01T00:00:00+00:00",
    )  # fmt: skip
    assert read_run(write_run(tmp_path, run)) == run


def test_progress_of_a_killed_run_comes_before_an_older_summary(tmp_path: Path) -> None:
    write_run(tmp_path, record(title="old"))
    write_run(tmp_path, record(title="new", state="running", after={}), PROGRESS)
    run = read_run(tmp_path)
    assert (run.title, run.state) == ("new", "running")
    assert "0.250 → " not in page(run)
    assert "Not finished: it goes on, or was killed." in text_of(page(run))


class Planted:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "cut": json.dumps(record().as_json()).encode()[:3000],
    "text": b"not JSON",
    "a list": b"[1, 2]",
    "no history": b'{"summary": {}}',
    "deep": b'{"history": ' + b"[" * 200_000,
    "number": b'{"history": [{"reward": ' + b"9" * 10_000 + b"}]}",
    "bytes": bytes(range(256)) * 10,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_a_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_bytes(content)
    with pytest.raises(ValueError, match=r"summary\.json cannot be read: .+\nNothing else in the folder"):
        read_run(tmp_path)
    (tmp_path / PROGRESS).write_bytes(content)
    run = read_run(write_run(tmp_path, record(title="whole")))
    assert run.title == "whole"
    assert "The page is made from summary.json." in text_of(page(run))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in (SUMMARY, PROGRESS, "checkpoints/last.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps(Planted(tmp_path / "planted")))
    with pytest.raises(ValueError, match="cannot be read"):
        read_run(tmp_path)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("title", ["t"], "title is not a str"), ("config", 7, "config is not a dict"),
        ("samples", {}, "samples is not a list"),
        ("history", [5], "object has no attribute"), ("summary", 3, "object has no attribute"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else_are_a_clear_error(name: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"summary\.json cannot be read: .*{said}"):
        read_run(write_json(tmp_path, record().as_json() | {name: value}))


WHOLE = record(
    history=[{"rollout": 0.0, "reward": 0.5}], title="A run", written="2030-01-01T00:00:00+00:00",
    config={"model.beta": "0"}, versions={"torch": "2"}, settings={"compressor": "RKV"},
    validation=[{"rollout": 4.0, "dense": 0.3}],
    warnings=[{"rollout": 3, "text": "TailGuard"}, {"file": "summary.json", "text": "cut"}],
    samples=[{"cache": "dense", "prompt": "p", "completion": "c", "reward": 1.0, "answer": "a"}],
    worst=[{"rollout": 1, "kinds": ["rejected"], "prompt": "p", "completion": "c", "rejected": True, "reward": 0.5,
            "finished": False, "ratio": 2.0, "token": "t", "token_place": 3, "length": 9, "index": 0, "answer": "a"}],
).as_json()  # fmt: skip


def changed(value: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The value with any one of its nodes replaced."""
    yield path, new
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for place, other in changed(item, new, f"{path}.{key}"):
            copied = copy.copy(value)
            copied[key] = other
            yield place, copied


@pytest.mark.thinned(3)
@pytest.mark.parametrize("wrong", [10**400, float("nan"), "x", None, True, [5], {"x": 5}])
def test_a_node_of_any_other_type_is_shown_or_named(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a traceback: a file that cannot be read is named."""
    module = importlib.import_module("sparse_rl_lightning.report.page")  # the package's own page is a function
    monkeypatch.setattr(module, "drawings", lambda plots: ["" for _ in plots])  # of numbers that are checked
    for place, content in changed(WHOLE, wrong):
        refused = f"{SUMMARY} cannot be read"
        try:
            run = read_run(write_json(tmp_path, content))
            page(run)
            differing_settings([("a", run), ("b", run)])
        except UserError as error:
            refused = str(error)
        except Exception as error:
            raise AssertionError(f"{place} = {wrong!r}") from error
        assert f"{SUMMARY} cannot be read" in refused, place


ENDLESS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo, "a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"), "a folder": Path.mkdir,
    "a file of holes": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
}  # fmt: skip


@pytest.mark.parametrize("name", [SUMMARY, PROGRESS])
@pytest.mark.parametrize("kind", ENDLESS)
def test_what_never_ends_is_named(kind: str, name: str, tmp_path: Path) -> None:
    ENDLESS[kind](tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')} cannot be read: .+\nNothing else in the folder"):
        read_run(tmp_path)


def test_numbers_that_no_axis_can_hold_are_left_out(tmp_path: Path) -> None:
    ratio = {"mismatch/ratio_p05": 5e-324}
    rows = [{**row(i), "reward": 5e-324, **ratio, "entropy": 1e200, "kl": None, "x": True} for i in range(3)]
    counts = {"measure": "accuracy", "held_out_problems": -5, "optimizer_steps": None}
    summary = {"before": {"dense": None}, "after": {"sparse": 0.5}, **counts}
    run = read_run(write_json(tmp_path, {"summary": summary, "history": [*rows, {}]}))
    assert [one["rollout"] for one in run.history] == [0, 1, 2]
    assert {one["reward"] for one in run.history} == {one["mismatch/ratio_p05"] for one in run.history} == {0.0}
    assert not any({"entropy", "kl", "x"} & set(one) for one in run.history)
    assert (run.before, run.after, run.steps, run.num_problems) == ({}, {"sparse": 0.5}, 0, 0)
    Parser(page(run))
    Parser(comparison([("a", run), ("b", record())]))


def test_hostile_text_comes_through_the_files(tmp_path: Path) -> None:
    sample = {"cache": "dense", "prompt": HOSTILE, "completion": "<" * 3_000_000, "reward": 0.0}
    run = record(samples=[sample], title=HOSTILE, config={"model.compressor": HOSTILE, "long": "y" * 3_000_000})
    read = read_run(write_run(tmp_path / "a", run))
    for html in (page(read), comparison([("a", read), (HOSTILE, record())])):
        html.encode("utf-8")
        parser = Parser(html)
        assert parser.tags.count("script") == 0
        assert "img" not in parser.tags
        assert len(html) < 400_000


@pytest.mark.parametrize("make", ["missing", "file", "empty", "checkpoints"])
def test_a_folder_without_a_run_is_a_clear_error(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if make == "file":
        folder.write_text("x")
    elif make != "missing":
        (folder / make).mkdir(parents=True)
    message = "is not a folder" if make in ("missing", "file") else r"no summary\.json or progress\.json"
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_command_writes_the_page_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", record(title="A run"))
    assert main([str(tmp_path / "a")]) == tmp_path / "a" / "report.html"
    assert "A run" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"Written: {tmp_path / 'a' / 'report.html'}\n"


def test_command_compares_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b"):
        write_run(tmp_path / name, record())
    assert main(["runs/a", "runs/b"]) == Path("comparison.html")
    assert main(["runs/a", "runs/b", "--output", "new/c.html"]) == Path("new/c.html")
    text = text_of((tmp_path / "new" / "c.html").read_text(encoding="utf-8"))
    assert "2 runs compared" in text
    assert "None: all 3 settings are the same." in text


def test_page_is_written_where_a_link_of_the_user_s_leads(tmp_path: Path) -> None:
    """And not where one in a run's folder does, which came with the run."""
    write_run(tmp_path / "run", record())
    (tmp_path / "mine.html").symlink_to(tmp_path / "there.html")
    main([str(tmp_path / "run"), "--output", str(tmp_path / "mine.html")])
    assert (tmp_path / "mine.html").is_symlink()
    assert "<html" in (tmp_path / "there.html").read_text()
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "elsewhere.html")
    main([str(tmp_path / "run")])
    assert not (tmp_path / "elsewhere.html").exists()
    assert not (tmp_path / "run" / "report.html").is_symlink()


@pytest.mark.parametrize("named", [[], ["--output", "run/report.html"]])
def test_a_place_that_cannot_be_written_is_refused(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named or not: a run's folder may be of somebody else, and hold what a page does not replace."""
    write_run(tmp_path / "run", record())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "report.html").mkdir()
    with pytest.raises(UserError, match=r"^--output='run/report.html' is a folder. Give the file to write.$"):
        main(["run", *named])
    (tmp_path / "run" / "report.html").rmdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", forbidden)
    with pytest.raises(UserError, match=r"^folder of --output='.*run' cannot be written: .* Give a folder you may"):
        main(["run", *named])


def forbidden(**where: Path) -> None:
    """As for another user: the tests may be those of root, who may write anywhere."""
    raise PermissionError(errno.EACCES, "Permission denied", str(where["dir"]))


def test_full_disk_is_a_line(tmp_path: Path) -> None:
    """Here a limit on the size of a file."""
    write_run(tmp_path / "a", record())
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    program = f"{limit}; sys.argv[1:] = ['report', 'a']\nfrom sparse_rl_lightning.cli import console\nconsole()"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    said = "error: [Errno 27] File too large. Make room on the disk, or name another place."
    assert (done.returncode, done.stderr.splitlines()) == (1, [said])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is not a folder. Give the folder of a run"),
        (["a", "--output", "/dev/null"], "--output='/dev/null' is a pipe, a socket or a device. Give the file to"),
        (["\x1b[31ma"], r"'\x1b[31ma' is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_run(folder / "a", record())
    assert run_console(monkeypatch, "report", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_picture_is_a_png_of_every_chart_with_data() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    data = picture(record())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels wide
    assert dict(matplotlib.rcParams) == before
    assert pictured(record()) == [
        "Greedy accuracy", "Reward", "Completion length", "Repeated and cut off", "Rejected", "Mismatch KL",
        "Ratio dense / sparse", "KV memory", "KV tokens saved",
    ]  # fmt: skip
    assert pictured(RunRecord(history=[{"rollout": 0.0, "reward": 1.0}])) == ["Reward"]


def pictured(run: RunRecord) -> list[str]:
    return [plot.panel.title for plot in plots_of_run(run) if plot.panel.pictured]


def drawn(run: RunRecord, title: str) -> Any:
    """The axes of one chart."""
    ax = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    draw(ax, next(plot for plot in plots_of_run(run) if plot.panel.title == title))
    return ax


UNUSUAL = {
    "empty": RunRecord(),
    "nan": RunRecord(history=[{"rollout": 0.0, "reward": math.nan}], before={"dense": 0.1}),
    "one": record(history=[{"rollout": 0.0, "reward": 1.0, "time/rollout": 1.0}], after={}, title="$\\frac{ $ <b>"),
    "few": record(history=[{"rollout": float(i), "kv/saving_final": 0.0, "kv/peak_bytes": 0.0} for i in range(3)]),
    "extreme": record(history=[{"rollout": float(i), "reward": -1.0, "mismatch/ratio_p05": 0.0} for i in range(30)]),
    "huge": record(history=[{"rollout": float(i), "reward": 1e30 * (-1) ** i, "time/rollout": 1e30} for i in range(9)]),
    "twice": record(
        history=[{"rollout": n, "time/rollout": 1.0, "time/update": 1.0} for n in (0.0, 1.0, 2.0, 2.0)]
        + [{"rollout": 2.0, "time/rollout": 1.0}]
    ),
    "tiny": record(history=[{"rollout": float(i), "reward": 1e-300 * i} for i in range(9)]),
}


@pytest.mark.parametrize("run", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_runs_are_shown_too(run: RunRecord) -> None:
    parser = Parser(page(run))
    assert parser.tags.count("svg") == parser.tags.count("figure") == len(plots_of_run(run))
    numbers = [value for name, value in parser.attributes if name in ("d", "cx", "cy", "x", "y") and value]
    assert not [value for value in numbers if "nan" in value or "inf" in value]
    pytest.importorskip("matplotlib")
    assert picture(run).startswith(b"\x89PNG")


def test_chart_shows_the_numbers() -> None:
    ax = drawn(record(history=[row(i) for i in range(3)]), "Rejected")
    sequences, tokens = ax.get_lines()
    assert list(sequences.get_ydata()) == [0.0, 10.0, 0.0]  # percent
    assert list(tokens.get_ydata()) == [10.0] * 3
    assert ax.get_ylim()[0] == 0


def test_tail_keeps_its_values_on_whole_decades() -> None:
    values = {"mismatch/ratio_p05": 0.7, "sampling/importance_sampling_ratio/min": 3e-4}
    ax = drawn(record(history=[row(i, **values) for i in range(9)] + [row(9, **{"mismatch/ratio_p05": 0.0})]),
               "Ratio dense / sparse")  # fmt: skip
    assert (ax.get_yscale(), ax.get_ylim()) == ("log", (1e-4, 1.0))
    percentile, smallest = ax.get_lines()
    assert list(percentile.get_ydata()) == [0.7] * 9 + [1e-4], "what has no logarithm lies on the axis"
    assert list(smallest.get_ydata())[:9] == [3e-4] * 9
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "0.1", "0.01", "0.001", "0.0001"]


# Colors as eyes without one of the three kinds of cones see them (Machado and others 2009), of linear RGB.
EYES = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(color: str) -> list[float]:
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(color: list[float]) -> tuple[float, float, float]:
    """CIELAB of linear RGB."""
    r, g, b = (min(1.0, max(0.0, c)) for c in color)
    xyz = (
        0.4339 * r + 0.3762 * g + 0.1899 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0177 * r + 0.1095 * g + 0.8729 * b,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("colors", "place"), [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_lines_stand_out_and_are_told_apart_by_every_eye(colors: tuple[str, ...], place: int) -> None:
    card = re.findall(r"--card: (#\w+);", STYLE)[place]
    card = card if len(card) == 7 else "#" + "".join(2 * digit for digit in card[1:])
    luminances = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (card, *colors))]
    for luminance in luminances[1:]:
        low, high = sorted((luminances[0], luminance))
        assert (high + 0.05) / (low + 0.05) >= 3, "WCAG 2.1, 1.4.11"
    for matrix in EYES.values():
        seen = [
            lab([sum(m * c for m, c in zip(line, linear(color), strict=True)) for line in matrix]) for color in colors
        ]
        assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 20


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip

MEASURE = """
const measure = frame => {
  const inner = frame.contentDocument, width = frame.clientWidth;
  const seen = [...inner.querySelectorAll("body *")].filter(e => !e.closest(".wide table") && !e.closest("svg"));
  const labels = [...inner.querySelectorAll("svg text")].filter(t => {
    const a = t.getBoundingClientRect(), b = t.closest("svg").getBoundingClientRect();
    return a.left < b.left - 0.5 || a.right > b.right + 0.5 || a.top < b.top - 0.5 || a.bottom > b.bottom + 0.5;
  });
  const wide = seen.filter(e => e.getBoundingClientRect().right > width + 0.5);
  const columns = new Set([...inner.querySelectorAll("figure")].map(f => f.getBoundingClientRect().left)).size;
  return {
    scroll: inner.documentElement.scrollWidth, width, columns, wide: wide.map(e => e.outerHTML.slice(0, 200)),
    labels: labels.map(t => t.textContent), evil: frame.contentWindow.evil || 0,
    stroke: getComputedStyle(inner.querySelector("svg path[stroke^=var]")).stroke,
  };
};
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


def long_words() -> str:
    """A page whose every text is one long word, with numbers of awkward widths."""
    word = HOSTILE + "x" * 500 + "<script>window.evil = 1</script>"
    history = [
        row(i, reward=-1234567.0 * i, **{"mismatch/kl_k3": 1e-9 * i, "guard/budget": 123456.0}) for i in range(30)
    ]
    texts = dict.fromkeys(("prompt", "completion", "answer"), word)
    sample = {"cache": "sparse", **texts, "reward": 0.0, "kinds": ["rejected"]}
    return page(
        record(
            history=history, samples=[sample], worst=[sample] * 3, title=word, config={word: word}, state=word,
            warnings=[{"rollout": 1, "text": word}], settings={word[:80]: word},
        )
    )  # fmt: skip


WIDTHS = (390, 1240)
PAGES = {
    "usual": lambda: page(record(history=[row(i) for i in range(40)])),
    "long words": long_words,
    "comparison": lambda: comparison(
        [(f"runs/a-rather-long-name-{n}", record(config={"a": str(n)})) for n in range(5)]
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What the browser says of every page in a window of every width, started once."""
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe srcdoc="{escape(make())}" style="border:0;width:{width}px;height:3000px"></iframe>'
        for make in PAGES.values() for width in WIDTHS
    )  # fmt: skip
    outer = folder / "outer.html"
    outer.write_text(f"<!DOCTYPE html><meta charset=utf-8><body><pre></pre>{frames}<script>{MEASURE}</script>", "utf-8")
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=200).stdout
    answers = json.loads(unescape(re.findall(r"<pre>(.*?)</pre>", dumped, re.DOTALL)[0]))
    return dict(zip(product(PAGES, WIDTHS), answers, strict=True))


@in_a_browser
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(name: str, width: int, found: dict[tuple[str, int], dict[str, Any]]) -> None:
    seen = found[name, width]
    assert (seen["width"], seen["scroll"]) == (width, width)
    assert seen["wide"] == []
    assert seen["labels"] == [], "labels of axes are whole"
    assert seen["columns"] == (1 if width == 390 else 3)
    assert seen["evil"] == 0


@in_a_browser
def test_lines_have_the_colors_of_the_style_sheet(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    assert {seen["stroke"] for seen in found.values()} == {"rgb(232, 235, 239)"}, "--grid of the page, on light ground"


@in_a_browser
def test_a_page_can_be_photographed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(record()), "utf-8")
    shot = tmp_path / "shot.png"
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    subprocess.run([*command, "--window-size=1240,2000", (tmp_path / "page.html").as_uri()], check=True, timeout=120)
    data = shot.read_bytes()
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1240, 2000)
    assert len(data) > 50_000, "an empty page is smaller"
