"""Calibration: what compressors know of queries, the schedule that holds the tail, and what rollouts cost."""

from sparse_rl_lightning.calibration.cost import CostModel, Pages, Work, entries_read
from sparse_rl_lightning.calibration.query_statistics import gather_statistics, pad, read_texts
from sparse_rl_lightning.calibration.shapes import H200, SHAPES, Hardware, ModelShape

__all__ = [
    "H200",
    "SHAPES",
    "CostModel",
    "Hardware",
    "ModelShape",
    "Pages",
    "Work",
    "entries_read",
    "gather_statistics",
    "pad",
    "read_texts",
]
