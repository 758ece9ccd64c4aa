"""What each correction makes of a rollout's gradient, by the callbacks that training has, and the policy trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.callbacks.base import CorrectionCallback
from sparse_rl_lightning.callbacks.corrections.centering import CenteredLoss, common_weights
from sparse_rl_lightning.corrections import expected_scores
from sparse_rl_lightning.learner.loss import GRPOLoss
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.records import Rollout


@dataclass(frozen=True)
class Variant:
    """A correction, as the loss sees it; ``replays`` trains the sampler's own policy instead of the dense one."""

    name: str
    callbacks: tuple[CorrectionCallback, ...] = ()
    loss: GRPOLoss = field(default_factory=GRPOLoss)
    replays: bool = False
    centers: bool = False

    def apply(self, module: SparseGRPO, batch: Rollout, logprobs: Tensor, likely: Tensor | None = None) -> Tensor:
        """The loss () of a micro-batch at the very policy that drew it: every staleness ratio is 1.

        ``likely`` (B, T, K) are the log-probs of the sampler's most likely tokens, for variants that center.
        """
        batch = replace(batch, keep=batch.completion_mask, weights=None, weight_reference=None, replay_logprobs=None)
        for callback in self.callbacks:
            callback.correct(None, module, batch)  # type: ignore[arg-type]  # none of these asks for the whole rollout
        batch.old_logprobs = logprobs.detach()
        denominators = self.loss.denominators(batch)
        if not self.centers:
            return self.loss(batch, logprobs, denominators).loss
        mask = batch.completion_mask
        scores = expected_scores(likely[mask], batch.topk_logprobs[mask], common_weights(self.callbacks))
        placed = torch.zeros_like(logprobs).masked_scatter(mask, scores)
        return CenteredLoss(**asdict(self.loss))(batch, logprobs, denominators, placed).loss


NAIVE, REPLAY = Variant("naive"), Variant("replay", replays=True)
CAPPED = ImportanceReweighting(clip_max=1.5)
VARIANTS = (
    NAIVE,
    Variant("rejection only", (SparsityAwareRejection(),)),
    Variant("reweighting only", (CAPPED,)),
    Variant("Sparse-RL", (SparsityAwareRejection(), CAPPED)),
    Variant("Sparse-RL (paper)", (SparsityAwareRejection(), ImportanceReweighting())),
    Variant(
        "Sparse-RL (official)",  # as in configs/sparse_rl_official.yaml
        (
            SparsityAwareRejection(low=0.5, high=1.5),
            ImportanceReweighting("token_mask", 0.5, 1.5, normalize="micro_batch", normalize_clip_max=1.5),
        ),
        GRPOLoss(denominator="kept_tokens", kl_on="kept"),
    ),
    REPLAY,
)


CENTERING, BOTH = Variant("centering", centers=True), Variant("centering and weights", (CAPPED,), centers=True)


def gradients(
    module: SparseGRPO, variants: Sequence[Variant], batch: Rollout, logprobs: Tensor, likely: Tensor | None = None
) -> list[Tensor]:
    """The gradient (number of weights,) of every variant, from one forward pass."""
    weights = [weight for weight in module.policy.parameters() if weight.requires_grad]
    losses = [variant.apply(module, batch, logprobs, likely) for variant in variants]
    parts = [torch.autograd.grad(loss, weights, retain_graph=loss is not losses[-1]) for loss in losses]
    return [torch.cat([gradient.flatten() for gradient in each]) for each in parts]
