"""Normalisation of observations and rewards, and how rollouts teach its moments (rule: `networks/moments.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pala.networks.network import FlatParameters

OBSERVATIONS, RETURNS = "observation_moments", "return_moments"


class Normalization:
    """Normalises what one rank's environments, B of them, give.

    Rewards are divided by the deviation of the discounted return so far, R <- gamma R + r, as in Gymnasium's
    NormalizeReward. R begins at 0 with each episode (there only after a termination).
    """

    def __init__(self, flat: FlatParameters, gamma: float) -> None:
        """`flat`: parameters of an `ActorCritic`; its names of the moments are used here."""
        self._flat = flat
        self._gamma = gamma
        self._of = flat.moments
        self._samples: dict[str, list[Tensor]] = {what: [] for what in self._of}
        self._returns_B: Tensor | None = None

    def reset(self) -> None:
        """Begin new episodes in all environments."""
        self._returns_B = None
        for samples in self._samples.values():
            samples.clear()

    def observe(self, observations_BN: Tensor) -> None:
        """Note what the environments show before a step."""
        if OBSERVATIONS in self._of:
            size = len(self._of[OBSERVATIONS].mean)  # images behind the vectors are left alone
            self._samples[OBSERVATIONS].append(observations_BN[:, :size])

    def rewards(self, rewards_B: Tensor, ended_B: Tensor) -> Tensor:
        """Return what the learner sees of a step's rewards; `ended_B` float: 1 where the episode or its return
        ended."""
        if RETURNS not in self._of:
            return rewards_B
        before = torch.zeros_like(rewards_B) if self._returns_B is None else self._returns_B
        returns_B = before * self._gamma + rewards_B
        self._samples[RETURNS].append(returns_B.unsqueeze(-1))
        self._returns_B = torch.where(ended_B > 0, 0.0, returns_B)  # also of one that is not finite
        return self._of[RETURNS].scaled(rewards_B)

    def gather(self) -> None:
        """Put what the rollout saw behind the flat gradient, where the ranks' may be averaged."""
        for what, samples in self._samples.items():
            seen = torch.cat(samples)
            if self._of[what].is_new:  # a model with new moments would spoil those of peers that mix it in
                finite = seen[seen.isfinite().all(-1)]
                seen = finite if len(finite) else seen
            self._of[what].see(seen)

    def is_finite(self) -> bool:
        """Return whether the gathered figures are finite."""
        return bool(self._flat.gradient[self._flat.num_learned :].isfinite().all())

    def learn(self, healthy: bool) -> None:
        """Update the moments with what was gathered if the update is `healthy`; if not, only those that have seen
        nothing yet, and only from finite samples. A reward that was not finite does not stay in the next rollout's
        returns."""
        if not healthy and self._returns_B is not None:
            self._returns_B = self._returns_B.nan_to_num(0.0, 0.0, 0.0)
        for what, samples in self._samples.items():
            moments = self._of[what]
            if healthy or (moments.is_new and all(bool(seen.isfinite().all()) for seen in moments.seen.values())):
                moments.learn(sum(map(len, samples)))
            samples.clear()
