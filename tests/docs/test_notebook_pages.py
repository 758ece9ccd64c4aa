"""Notebooks become pages: prose, code and every kind of output, however it is fenced."""

from __future__ import annotations

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from docs.notebook_pages import markdown_of


def test_a_notebook_becomes_markdown() -> None:
    outputs = [
        new_output("stream", name="stdout", text="```\n"),
        new_output("display_data", data={"image/png": "QUJD\nREU=\n", "text/plain": "<Figure>"}),
        new_output("execute_result", data={"text/html": "<b>x</b>", "text/plain": ""}),
        new_output("execute_result", data={"text/plain": "3"}),
        new_output("display_data", data={"text/plain": ""}),
    ]
    cells = [new_markdown_cell("# Title\n\n[a](../docs/a.md)"), new_code_cell("x = 1", outputs=outputs)]
    page = markdown_of(nbformat.writes(new_notebook(cells=cells)))
    assert page.split("\n\n") == [
        "# Title", "[a](../a.md)", "```python\nx = 1\n```", "````text\n```\n````",
        "![Output of the cell above](data:image/png;base64,QUJDREU=)", "```{raw} html\n<b>x</b>\n```",
        "```text\n3\n```\n",
    ]  # fmt: skip
