"""What a configuration takes before it runs: memory by part, seconds per rollout, and the setting that helps most."""

from sparse_rl_lightning.planning.cards import CARDS, Card, card_of
from sparse_rl_lightning.planning.job import Job, Sharding
from sparse_rl_lightning.planning.knobs import best_knob
from sparse_rl_lightning.planning.plan import Plan, make_plan

__all__ = ["CARDS", "Card", "Job", "Plan", "Sharding", "best_knob", "card_of", "make_plan"]
