"""Learning a reward from comparisons."""

import torch
from torch import Tensor

from hotcold.equations.checks import as_float, check_number, check_shapes


def preference_loss(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """The negative log-likelihood that the chosen response is preferred.

    loss = -log sigma(chosen - rejected - margin)

    chosen, rejected: [pairs], scores; margin: how much better the chosen one must be, a number or one for each pair,
    constant; result [pairs] in nats. The Bradley-Terry model: P(chosen preferred) = sigma(difference of the scores).
    By log-sigmoid, exact where sigma itself would round to 0 or 1. Source: Bradley and Terry 1952; Ouyang et al. 2022,
    eq. 1; margin: Touvron et al. 2023 (Llama 2), eq. 2.

    >>> preference_loss(torch.tensor([1.0, 1.5]), torch.tensor([1.0, -0.5]))
    tensor([0.6931, 0.1269])
    """
    chosen, rejected = as_float("chosen", chosen), as_float("rejected", rejected)
    check_shapes("[pairs]", 1, chosen=chosen, rejected=rejected)
    if isinstance(margin, Tensor) and margin.dim() > 0:
        margin = as_float("margin", margin).detach()
        check_shapes("[pairs]", 1, chosen=chosen, margin=margin)
    else:
        margin = check_number("margin", margin, low=-torch.inf)
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)
