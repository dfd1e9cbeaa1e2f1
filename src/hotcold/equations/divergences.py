"""How far the policy is from the reference, or from itself before the update, and how strongly that is penalised.

d = logp - logp_ref of the sampled token. For tokens sampled from the policy, k1 and k3 estimate KL(pi || ref) without
bias. What is unbiased as a value need not be as a gradient: see each function.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import check_number, check_whole, expm1, finite_gradient, per_token
from hotcold.equations.logprobs import check_sequence, shift_right, state_kl


def _log_ratio_to_ref(logp: Tensor, logp_ref: Tensor) -> Tensor:
    logp, logp_ref = per_token(logp=logp, logp_ref=logp_ref)
    return logp - logp_ref


def kl_k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """The log-ratio as an estimate of KL(pi || ref).

    k1 = d = logp - logp_ref

    logp, logp_ref: [B, T] in nats; result [B, T] in nats, of either sign. Its mean under pi is the KL by definition.
    Its place is the reward: there its expected gradient is that of the KL. As a loss its expected gradient is 0,
    E[grad log pi] = 0. Source: Schulman 2020, "Approximating KL Divergence".

    >>> kl_k1(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]))
    tensor([[1.]])
    """
    return _log_ratio_to_ref(logp, logp_ref)


def kl_k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Half the squared log-ratio: a biased estimate whose gradient is right.

    k2 = d^2 / 2

    logp, logp_ref: [B, T] in nats; result [B, T], at least 0. As a loss its gradient is d grad log pi, whose mean is
    the gradient of each visited state's KL(pi || ref). Source: Schulman 2020.

    >>> kl_k2(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]))
    tensor([[2.]])
    """
    d = finite_gradient(_log_ratio_to_ref(logp, logp_ref))
    return d**2 / 2


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """The estimate of KL(pi || ref) that is unbiased and never negative.

    k3 = exp(-d) - 1 + d

    logp, logp_ref: [B, T] in nats; result [B, T] in nats. exp(-d) - 1 has mean 0 under pi, so adding it to k1 changes
    the variance and not the mean; e^x >= 1 + x makes it non-negative. By expm1, because exp(-d) - 1 loses every digit
    for small d in float32. As a loss its expected gradient is that of KL(ref || pi), the other direction, of each
    visited state. Source: Schulman 2020; used by GRPO (Shao et al. 2024, eq. 4).

    >>> kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]))  # e^-1
    tensor([[0.3679]])
    """
    d = _log_ratio_to_ref(logp, logp_ref)
    return expm1(-d) + d


def kl_exact(logits: Tensor, logits_ref: Tensor, temperature: float = 1.0) -> Tensor:
    """The full-vocabulary KL of the policy from the reference in the state in which each token was chosen.

    KL_t = sum_v p_v (log p_v - log q_v),  p, q = softmax of z_(t-1), z_ref_(t-1) at the temperature,  KL_0 = 0

    logits, logits_ref: [B, T, V] (or [T, V]); result [B, T] in nats. No estimator noise from the token that was drawn.
    As a loss its gradient is that of each visited state's KL; what the token does to later states is missing and
    belongs into the reward (estimator "exact"), together the exact gradient of KL(pi || ref) over responses.

    >>> logits, ref = torch.zeros(1, 2, 2), torch.tensor([[[0.9, 0.1], [0.9, 0.1]]]).log()
    >>> kl_exact(logits, ref)
    tensor([[0.0000, 0.5108]])
    """
    check_sequence(logits, "logits")
    return shift_right(state_kl(logits, logits_ref, temperature))


def approx_kl(log_ratio: Tensor) -> Tensor:
    """How far the policy has moved since the rollout: an estimate of KL(pi_old || pi).

    approx_kl = r - 1 - log r,  r = exp(log_ratio)

    log_ratio = logp - logp_old: [B, T] in nats; result [B, T], at least 0. The tokens come from pi_old, so the ratio is
    the k3 of that direction: E_old[r - 1] = 0. By expm1, see kl_k3.

    >>> approx_kl(torch.tensor([[0.0, 1.0]]))  # 0 and e - 2
    tensor([[0.0000, 0.7183]])
    """
    (log_ratio,) = per_token(log_ratio=log_ratio)
    return expm1(log_ratio) - log_ratio


def adaptive_beta(beta: float, kl: float, target: float, horizon: float, num_responses: int) -> float:
    """The KL coefficient of the next step: up when the measured KL is above the target, down when below.

    beta' = beta (1 + clip(kl / target - 1, -0.2, 0.2) num_responses / horizon)

    kl, target: nats per response; horizon: in responses; beta: reward per nat. A float. A proportional controller: the
    clip bounds one step, the horizon makes the rate independent of the batch size. Source: Ziegler et al. 2019,
    section 2.2.

    >>> round(adaptive_beta(0.15, kl=12.0, target=6.0, horizon=10_000, num_responses=512), 6)
    0.151536
    """
    beta = check_number("beta", beta, low=0)
    kl = check_number("kl", kl, low=-torch.inf)
    target = check_number("target", target, low=0, above=True)
    horizon = check_number("horizon", horizon, low=0, above=True)
    num_responses = check_whole("num_responses", num_responses, low=0)
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * num_responses / horizon)
