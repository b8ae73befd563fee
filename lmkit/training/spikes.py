"""Find steps whose loss or gradient is far above what was usual: `train.spike_sigmas`."""

from __future__ import annotations

import torch
from torch import Tensor

WARM_UP = 20
"""Good steps before any is judged."""
MEMORY = 100
"""Good steps over which the mean and the variance run."""


class SpikeGuard:
    """Judge loss and gradient norm by their running mean and deviation over good steps. The host waits for nothing.

    Args:
        sigmas: standard deviations above the mean from which on a step is a spike.

    Attributes:
        state: the number of good steps, and mean and variance of the loss and of the norm; (5,) float64.
    """

    def __init__(self, sigmas: float, device: torch.device | str = "cpu") -> None:
        self.sigmas = sigmas
        self.state = torch.zeros(5, dtype=torch.float64, device=device)

    def judge(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Tensor:
        """Return whether the step is a spike, a bool scalar; learn from it if it is none.

        Args:
            loss: mean over all ranks; norm: of the gradient before it was clipped; scalars, equal on all ranks.
            bad: whether the step is not applied anyway.
        """
        values = torch.stack((loss, norm)).double()
        steps, means, variances = self.state[0], self.state[1::2], self.state[2::2]
        above = values - means
        spike = ~bad & (steps >= WARM_UP) & (above > self.sigmas * variances.sqrt()).any()
        share = 1 / (steps + 1).clamp(max=MEMORY)
        learns = ~(bad | spike)
        # Finite even if the values are not: they are then not learnt from.
        above = torch.where(learns, above, 0.0)
        means += share * above
        variances += torch.where(learns, share * (above.square() * (1 - share) - variances), 0.0)
        steps += learns
        return spike
