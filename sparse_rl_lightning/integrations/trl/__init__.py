"""TRL's GRPOTrainer on rollouts under a compressed cache, with the loss that they need."""

try:
    import trl as _trl  # noqa: F401  # the base class of all below
except ImportError as _error:
    raise ImportError("The integration with TRL needs trl: pip install 'sparse-rl-lightning[trl]'") from _error

from sparse_rl_lightning.integrations.trl.trainer import SparseGRPOTrainer

__all__ = ["SparseGRPOTrainer"]
