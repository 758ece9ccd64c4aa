"""The pages in a real browser: nothing overflows on a phone, and the policy blocks nothing that the page needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, record, row

from sparse_rl_lightning.report import comparison, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

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
    sample = {
        "cache": "sparse",
        "prompt": word,
        "completion": word,
        "answer": word,
        "reward": 0.0,
        "kinds": ["rejected"],
    }
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


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(name: str, width: int, found: dict[tuple[str, int], dict[str, Any]]) -> None:
    seen = found[name, width]
    assert (seen["width"], seen["scroll"]) == (width, width)
    assert seen["wide"] == []
    assert seen["labels"] == [], "labels of axes are whole"
    assert seen["columns"] == (1 if width == 390 else 3)
    assert seen["evil"] == 0


def test_lines_have_the_colors_of_the_style_sheet(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    assert {seen["stroke"] for seen in found.values()} == {"rgb(232, 235, 239)"}, "--grid of the page, on light ground"


def test_a_page_can_be_photographed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(record()), "utf-8")
    shot = tmp_path / "shot.png"
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    subprocess.run([*command, "--window-size=1240,2000", (tmp_path / "page.html").as_uri()], check=True, timeout=120)
    data = shot.read_bytes()
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1240, 2000)
    assert len(data) > 50_000, "an empty page is smaller"
