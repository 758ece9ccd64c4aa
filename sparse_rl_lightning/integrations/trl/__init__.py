"""TRL's GRPOTrainer on rollouts under a compressed cache, with the loss that they need."""

try:
    import trl as _trl  # the base class of all below
except ImportError as _error:
    raise ImportError("The integration with TRL needs trl: pip install 'sparse-rl-lightning[trl]'") from _error

from sparse_rl_lightning.integrations.trl.trainer import OVERRIDDEN as _OVERRIDDEN
from sparse_rl_lightning.integrations.trl.trainer import SparseGRPOTrainer

for _name in _OVERRIDDEN:
    if not hasattr(_trl.GRPOTrainer, _name):  # what replaces it would train naively, without a word
        raise ImportError(
            f"TRL {_trl.__version__} has no GRPOTrainer.{_name}, which SparseGRPOTrainer overrides: "
            "install trl==1.16.0, with which it is tested."
        )

__all__ = ["SparseGRPOTrainer"]
