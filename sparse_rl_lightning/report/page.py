"""The HTML page of a run: one file, no network, no script, readable on a phone."""

from __future__ import annotations

from html import escape

from sparse_rl_lightning.report.charts import vector_charts
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.terminal import CACHES, facts, results
from sparse_rl_lightning.report.text import number, printable

CSS = """
:root { color-scheme: light; --ink: #1f2937; --soft: #4b5563; --line: #e5e7eb; --blue: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; }
.tiles, .charts { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.tile, figure, article { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; overflow-wrap: anywhere; }
.tile span, figcaption, .soft { color: var(--soft); font-size: .875rem; }
figure { margin: 0; } figure h3 { margin: 0 0 .25rem; font-size: 1rem; } figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; width: 100%; border: 1px solid var(--line); }
th, td { text-align: left; padding: .45rem .75rem; border-top: 1px solid var(--line); vertical-align: top; }
th { background: #f1f5f9; } td { overflow-wrap: break-word; }
article { margin-bottom: .75rem; }
pre { margin: .4rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .875rem/1.45 ui-monospace, monospace; }
@media (min-width: 700px) { .tiles { grid-template-columns: repeat(auto-fill, minmax(195px, 1fr)); } }
@media (max-width: 480px) { main { padding: .75rem .6rem 2rem; } .tile, figure, article { padding: .6rem .7rem; }
  .tile b { font-size: 1.15rem; } }
.right { color: #15803d; } .wrong { color: #b91c1c; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: even a page full of hostile completions loads nothing and runs nothing."""


def page(record: RunRecord) -> str:
    """The page as text.

    Without matplotlib it has everything but the charts and says what to install.

    Args:
        record: The run. All its text is escaped.
    """
    body = "\n".join([_tiles(record), _charts(record), _samples(record), _tables(record)])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_text(record.title)}</title>
<style>{CSS}</style>
</head>
<body><main>
<h1>{_text(record.title)}</h1>
{body}
</main></body>
</html>
"""


def _tiles(record: RunRecord) -> str:
    tiles = []
    for cache, name in CACHES.items():
        if cache in record.before or cache in record.after:
            change = f"{number(record.before.get(cache))} → {number(record.after.get(cache))}"
            tiles.append((f"greedy {record.measure}, {name}", change))
    tiles += facts(record)
    cells = "\n".join(f'<div class="tile"><b>{_text(v)}</b><span>{_text(k)}</span></div>' for k, v in tiles)
    return f'<div class="tiles">\n{cells}\n</div>'


def _charts(record: RunRecord) -> str:
    try:
        drawn = vector_charts(record)
    except ModuleNotFoundError as error:
        return f'<p class="soft">{_text(str(error))}</p>'
    figures = [
        f"<figure><h3>{_text(chart.title)}</h3>{svg}<figcaption>{_text(chart.caption)}</figcaption></figure>"
        for chart, svg in drawn
    ]
    return '<h2>Course of the run</h2>\n<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def _samples(record: RunRecord) -> str:
    if not record.samples:
        return ""
    return "<h2>Held-out problems after training, greedy</h2>\n" + "\n".join(map(_sample, record.samples))


def _sample(sample: dict[str, object]) -> str:
    reward = sample["reward"]
    assert isinstance(reward, float)
    kind = "right" if reward > 0 else "wrong"
    answer = f" · answer {_text(str(sample['answer']))}" if sample.get("answer") is not None else ""
    cache = CACHES.get(str(sample["cache"]), str(sample["cache"]))
    return (
        f'<article><span class="soft">{_text(cache)}{answer} · '
        f'<b class="{kind}">reward {number(reward, 2)}</b></span>'
        f'<pre class="soft">{_text(str(sample["prompt"]))}</pre><pre>{_text(str(sample["completion"]))}</pre></article>'
    )


def _tables(record: RunRecord) -> str:
    parts = []
    rows = results(record)
    if rows:
        parts.append(f"<h2>Numbers</h2>\n{_table(rows)}")
    if record.settings:
        parts.append(f"<h2>Settings</h2>\n{_table([['setting', 'value'], *map(list, record.settings.items())])}")
    return "\n".join(parts)


def _table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _text(text: str) -> str:
    """Escaped for HTML, line breaks kept, control characters visible."""
    return escape("\n".join(printable(line) for line in text.split("\n")))
