"""One process of two: trains on its share of every generation batch, and saves what it saw. Started by test_trl.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from trl_runs import build, evicting, listening, logged, weights

from sparse_rl_lightning.callbacks import ImportanceReweighting

folder, replay = Path(sys.argv[1]), sys.argv[2] == "replay"
mine = folder / os.environ["RANK"]
mine.mkdir()
corrections = [] if replay else [ImportanceReweighting(clip_max=1.5, normalize="batch")]
trainer = build(
    mine, more={"compressor": evicting(), "replay": replay, "corrections": corrections}, ddp_backend="gloo",
    per_device_train_batch_size=2, num_generations=4,  # a group is on both
)  # fmt: skip
heard = listening(trainer)
trainer.train()
kept = {"weights": weights(trainer), "heard": heard, "kv": logged(trainer, "kv/saving_integral")}
torch.save(kept, folder / f"{os.environ['RANK']}.pt")
