"""Sources of a policy's weights, and the requirements on its model."""

from sparse_rl_lightning.policies.lora import LoraPolicy
from sparse_rl_lightning.policies.source import LoadedPolicy, PolicySource, PretrainedPolicy
from sparse_rl_lightning.policies.tiny import TinyPolicy

__all__ = ["LoadedPolicy", "LoraPolicy", "PolicySource", "PretrainedPolicy", "TinyPolicy"]
