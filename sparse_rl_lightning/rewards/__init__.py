"""Reward functions, with TRL's signature, and the exact answer checker behind them."""

from sparse_rl_lightning.rewards.base import (
    RewardFunction,
    check_rewards,
    counting,
    reward_name,
    reward_names,
)
from sparse_rl_lightning.rewards.functions import (
    MathReward,
    arithmetic_reward,
    boxed_format_reward,
    boxed_math_reward,
    worked_steps_reward,
)
from sparse_rl_lightning.rewards.scoring import compute_rewards

__all__ = [
    "MathReward",
    "RewardFunction",
    "arithmetic_reward",
    "boxed_format_reward",
    "boxed_math_reward",
    "check_rewards",
    "compute_rewards",
    "counting",
    "reward_name",
    "reward_names",
    "worked_steps_reward",
]
