"""Retrievers: which pages of the KV cache a query reads, while all of them are kept."""

from sparse_rl_lightning.retrievers.base import Retriever
from sparse_rl_lightning.retrievers.centroid import Centroid
from sparse_rl_lightning.retrievers.quest import Quest

__all__ = ["Centroid", "Quest", "Retriever"]
