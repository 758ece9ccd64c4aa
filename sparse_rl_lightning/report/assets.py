"""The style sheet and the script of a page. Line colours keep apart for colour-blind eyes, on light and on dark."""

from __future__ import annotations

LIGHT = ("#1d4ed8", "#c2410c", "#0e9f6e", "#4a044e")
DARK = ("#7aa8ff", "#ff8a3d", "#5eead4", "#fde68a")
"""Colours of lines. More lines than colours are dashed, then dotted."""


def _root(colors: tuple[str, ...], others: str) -> str:
    lines = " ".join(f"--c{place}: {color};" for place, color in enumerate(colors))
    return f":root {{ {lines} {others} }}"


STYLE = (
    _root(LIGHT, "color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2430; --soft: #56606e; "
          "--line: #dfe3e8; --grid: #e8ebef; --gray: #7b8794; --good: #15803d; --bad: #b42318; --warn: #fff4e0; "
          "--warn-ink: #7a4100;")
    + "@media (prefers-color-scheme: dark) { "
    + _root(DARK, "--page: #0f141b; --card: #18202a; --ink: #e6eaf0; --soft: #a5b0be; --line: #2c3744; "
            "--grid: #28323e; --gray: #8a96a5; --good: #5fd38d; --bad: #ff8f84; --warn: #33270f; --warn-ink: #ffd08a;")
    + """ }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1240px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: .975rem; line-height: 1.3; margin: 0; }
p { margin: .25rem 0; } .hint { margin: 1.5rem 0 -1rem; } p, li, summary { overflow-wrap: anywhere; }
.soft, .unit, figcaption, .tile span, caption { color: var(--soft); font-size: .85rem; }
.tiles, .charts, .cards { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(205px, 1fr)); margin-top: 1.25rem; }
.tile, figure, article, details, .wide { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .7rem .95rem; }
.tile b { display: block; font-size: 1.2rem; line-height: 1.35; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.runs { margin-top: 1.25rem; } .tile span { display: block; line-height: 1.35; }
figure { margin: 0; padding: .8rem .95rem .7rem; display: flex; flex-direction: column; min-width: 0; }
figcaption { margin-top: .35rem; line-height: 1.4; }
.unit { display: flex; justify-content: space-between; margin: 0 0 .35rem; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); } .cursor { stroke: var(--soft); stroke-dasharray: 2 2; }
.line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.thin { stroke-width: 1.5; } .pale { stroke-width: 1; opacity: .32; }
.band { fill: var(--c); stroke: var(--card); stroke-width: .6; } .dot { fill: var(--c); stroke: var(--card); }
.c0, .c4, .c8 { --c: var(--c0); } .c1, .c5, .c9 { --c: var(--c1); } .c2, .c6, .c10 { --c: var(--c2); }
.c3, .c7, .c11 { --c: var(--c3); } .ref { --c: var(--gray); } .line.ref { stroke-dasharray: 5 4; }
.c4, .c5, .c6, .c7 { stroke-dasharray: 8 4; } .c8, .c9, .c10, .c11 { stroke-dasharray: 1 5; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .35rem 0 0; padding: 0;
  font-size: .85rem; font-variant-numeric: tabular-nums; }
.legend i, .swatch { display: inline-block; width: 1.1em; height: 0; border-top: 3px solid var(--c);
  vertical-align: .28em; margin-right: .35em; }
.ref i { border-top-style: dashed; } .c4 i, .c5 i, .c6 i, .c7 i { border-top-style: dashed; }
.c8 i, .c9 i, .c10 i, .c11 i { border-top-style: dotted; }
.wide { overflow-x: auto; margin: 0 0 .75rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .6rem .95rem .4rem; }
th, td { text-align: left; padding: .4rem .95rem; border-top: 1px solid var(--line); vertical-align: top; }
thead th { white-space: nowrap; }
tbody th { font-weight: 400; color: var(--soft); min-width: 12rem; overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; min-width: 6rem; overflow-wrap: anywhere; }
.numbers td, .numbers thead th + th { text-align: right; }
.numbers td { white-space: nowrap; }
.warnings { background: var(--warn); color: var(--warn-ink); border-radius: 10px; padding: .7rem 1rem;
  margin-top: 1rem; }
.warnings ul { margin: .25rem 0 0; padding-left: 1.2rem; }
article { padding: .7rem .95rem; min-width: 0; }
pre { margin: .4rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.45 ui-monospace, monospace;
  max-height: 15rem; overflow-y: auto; }
.right { color: var(--good); } .wrong { color: var(--bad); }
details { padding: .6rem .95rem; margin-bottom: .75rem; } summary { cursor: pointer; }
details .wide { border: 0; margin: .4rem -.95rem -.6rem; border-radius: 0 0 10px 10px; }
@media (max-width: 700px) { main { padding: 1rem .7rem 3rem; } h1 { font-size: 1.3rem; }
  .charts, .cards { grid-template-columns: 1fr; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .5rem; } .tile { padding: .55rem .7rem; } .tile b { font-size: 1.1rem; }
  th, td, caption { padding-left: .6rem; padding-right: .6rem; } tbody th { min-width: 8rem; } td { min-width: 5.5rem; }
  .numbers td { white-space: normal; overflow-wrap: normal; } }
@media print { figure, article, .tile { break-inside: avoid; } }
"""
)  # fmt: skip

# One cursor for all charts: the legends show the values at the rollout under the pointer, and the last ones otherwise.
SCRIPT = """
"use strict";
const plots = [...document.querySelectorAll("svg.plot")].map(svg => ({
  svg, cursor: svg.querySelector(".cursor"), at: svg.parentNode.querySelector("[data-at]"),
  shown: [...svg.parentNode.querySelectorAll("[data-s]")],
  rest: [...svg.parentNode.querySelectorAll("[data-s]")].map(b => b.textContent),
  lines: [...svg.querySelectorAll("g[data-x]")].map(g => (
    {x: g.dataset.x.split(" ").map(Number), y: g.dataset.y.split(" ")})),
}));
function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}
function show(x) {
  for (const p of plots) {
    const d = p.svg.dataset, low = +d.low, high = +d.high;
    if (x === null || x < low - 0.5 || x > high + 0.5) {
      p.cursor.setAttribute("visibility", "hidden");
      p.at.textContent = "";
      p.shown.forEach((b, i) => { b.textContent = p.rest[i]; });
      continue;
    }
    let place = x;
    p.lines.forEach((line, i) => {
      const k = nearest(line.x, x), near = Math.abs(line.x[k] - x) <= Math.max(1, (high - low) / 20);
      if (near) place = line.x[k];
      p.shown[i].textContent = near ? line.y[k] : "\\u2013";
    });
    const px = +d.left + (place - low) / (high - low) * (d.right - d.left);
    p.cursor.setAttribute("x1", px);
    p.cursor.setAttribute("x2", px);
    p.cursor.setAttribute("visibility", "visible");
    p.at.textContent = "rollout " + place;
  }
}
for (const p of plots) {
  const move = event => {
    const box = p.svg.getBoundingClientRect(), d = p.svg.dataset, view = p.svg.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / box.width * view;
    const share = Math.min(1, Math.max(0, (px - d.left) / (d.right - d.left)));
    show(+d.low + share * (d.high - d.low));
  };
  p.svg.addEventListener("pointermove", move);
  p.svg.addEventListener("pointerdown", move);
  p.svg.addEventListener("pointerleave", () => show(null));
}
"""
