"""Pictures of a run: from plain numbers to a table, a PNG and a self-contained HTML page; nothing here needs torch."""

from __future__ import annotations

from sparse_rl_lightning.report.charts import picture, vector_charts
from sparse_rl_lightning.report.page import page
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.terminal import summary_text

__all__ = ["RunRecord", "page", "picture", "summary_text", "vector_charts"]
