"""Calibration: what compressors know of a policy, schedules of budgets that hold the tail, and the cost of rollouts."""

from sparse_rl_lightning.calibration.cost import CostModel, Work, entries_read
from sparse_rl_lightning.calibration.imitation import imitate_attention
from sparse_rl_lightning.calibration.query_statistics import encode_texts, gather_statistics, pad
from sparse_rl_lightning.calibration.shapes import H200, SHAPES, Hardware, ModelShape

__all__ = [
    "H200",
    "SHAPES",
    "CostModel",
    "Hardware",
    "ModelShape",
    "Work",
    "encode_texts",
    "entries_read",
    "gather_statistics",
    "imitate_attention",
    "pad",
]
