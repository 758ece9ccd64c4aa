"""Makes ``actor_rollout_ref.rollout.name=sparse_rl`` known to verl: the module for ``VERL_USE_EXTERNAL_MODULES``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.options import NAME

if missing := [name for name in ("verl", "ray") if find_spec(name) is None]:
    raise UserError(
        f"The rollout for verl needs {' and '.join(missing)}: pip install 'sparse-rl-lightning[verl]', then "
        "pip install --no-deps verl (docs/from_verl.md says why)."
    )

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # after the check
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _replica() -> Any:
    from sparse_rl_lightning.integrations.verl.replica import SparseReplica

    return SparseReplica


RolloutReplicaRegistry.register(NAME, _replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "sparse_rl_lightning.integrations.verl.adapter.SparseAdapter"
