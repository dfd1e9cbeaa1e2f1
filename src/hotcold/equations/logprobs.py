"""From logits to log-probabilities, entropy and KL, and the one shift that lays them on the tokens.

A model's logits at position t - 1 are the distribution from which token t was chosen. The functions of whole sequences
(`token_logp`, `entropy`, and `kl_exact` in divergences.py) are a function of single states (`selected_logp`,
`state_entropy`, `state_kl`) followed by `shift_right`. An engine that has logits at some positions only uses the parts.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import as_float, as_ids, check_number, check_shapes


def shift_right(x: Tensor) -> Tensor:
    """What a model says at position t - 1, laid on token t.

    shifted_t = x_(t-1), shifted_0 = 0

    x: [B, T] (or [T]), any unit; the same shape. The last entry, which speaks of a token that is not there, falls off;
    token 0 has no state before it and gets 0.

    >>> shift_right(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[0., 1., 2.]])
    """
    return torch.cat([torch.zeros_like(x[..., :1]), x[..., :-1]], dim=-1)


def check_sequence(logits: Tensor, name: str) -> None:
    if as_float(name, logits).dim() not in (2, 3):
        raise ValueError(f"{name} has shape {list(logits.shape)}; needed [B, T, V], or [T, V] for one row.")


def _scaled(logits: Tensor, temperature: float, name: str = "logits") -> tuple[Tensor, Tensor]:
    """Logits [..., V] over the temperature, and which states [...] have a distribution.

    A state without one (a NaN or +inf among its logits, or all of them -inf) is given the uniform one here, and its
    result is set to NaN by the caller: visible if it is used, and without a NaN gradient if it is masked away.
    """
    temperature = check_number("temperature", temperature, low=0, above=True)
    logits = as_float(name, logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} has shape {list(logits.shape)}; needed [..., V] with at least one token in V.")
    scaled = logits if temperature == 1 else logits / temperature
    valid = scaled.detach().amax(-1).isfinite()
    if not bool(valid.all()):
        scaled = torch.where(valid[..., None], scaled, 0.0)
    return scaled, valid


def _log_softmax(logits: Tensor, temperature: float, name: str = "logits") -> tuple[Tensor, Tensor]:
    """Log-probabilities [..., V] at the temperature, and which states [...] have a distribution."""
    scaled, valid = _scaled(logits, temperature, name)
    return torch.log_softmax(scaled, dim=-1), valid


def _mark_invalid(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, float("nan"))


def _check_one_id_per_state(ids: Tensor, logits: Tensor) -> None:
    if ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"Token ids have shape {list(ids.shape)}, logits {list(logits.shape)}. "
            "Needed: one id for each state, [B, T] with logits [B, T, V]."
        )


def selected_logp(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of one chosen token in each state.

    logp = z_id / temperature - log sum_v exp(z_v / temperature)

    logits z: [..., V]; ids: [...]; result [...] in nats, float32 or wider. The largest logit is subtracted first, so
    nothing overflows; a logit of -inf (a token outside a kept set) has probability 0 and no part in the sum. logsumexp
    adds in pairs: over a vocabulary of 50 thousand that is several times closer in float32 than log_softmax's sum.

    >>> selected_logp(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    tensor([-0.0181])
    """
    ids = as_ids("ids", ids)
    scaled, valid = _scaled(logits, temperature)
    _check_one_id_per_state(ids, logits)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < scaled.shape[-1]:
        raise ValueError(
            f"Token ids from {int(ids.min())} to {int(ids.max())}; the logits have V = {scaled.shape[-1]}."
        )
    below = scaled - scaled.detach().amax(-1, keepdim=True)  # a constant: it cancels, in the gradient too
    return _mark_invalid(below.gather(-1, ids[..., None])[..., 0] - torch.logsumexp(below, -1), valid)


def state_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of the next-token distribution of each state.

    H = -sum_v p_v log p_v,  p = softmax(z / temperature)

    logits z: [..., V]; result [...] in nats, between 0 and log V. A token of probability 0 (logit -inf) adds 0, its
    limit, and gradient 0.

    >>> state_entropy(torch.tensor([[0.0, 0.0, float("-inf")]]))  # log 2
    tensor([0.6931])
    """
    logp, valid = _log_softmax(logits, temperature)
    p, kept = logp.exp(), logp > float("-inf")
    return _mark_invalid(-(p * torch.where(kept, logp, 0.0)).sum(-1), valid)


def state_kl(logits: Tensor, logits_ref: Tensor, temperature: float = 1.0) -> Tensor:
    """The KL divergence of the policy from the reference in each state, over the whole vocabulary.

    KL = sum_v p_v (log p_v - log q_v),  p, q = softmax of logits, logits_ref at the temperature

    logits, logits_ref: [..., V]; result [...] in nats, at least 0 up to rounding. A token of policy probability 0 adds
    0; one that only the reference excludes makes the divergence inf, and sends no gradient.

    >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    >>> state_kl(p.log(), q.log())  # 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1)
    tensor([0.5108])
    """
    check_shapes("[..., V]", None, logits=as_float("logits", logits), logits_ref=as_float("logits_ref", logits_ref))
    logp, valid = _log_softmax(logits, temperature)
    logq, valid_ref = _log_softmax(logits_ref, temperature, "logits_ref")
    p, has_p, has_q = logp.exp(), logp > float("-inf"), logq > float("-inf")
    kl = (p * torch.where(has_p & has_q, logp - logq, 0.0)).sum(-1)
    escaped = ((p > 0) & ~has_q).any(-1)
    return _mark_invalid(torch.where(escaped, float("inf"), kl), valid & valid_ref)


def token_logp(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token given the tokens before it.

    logp_t = log softmax(z_(t-1) / temperature)[token_t],  logp_0 = 0

    logits z: [B, T, V] as the model gives them ([T, V] with tokens [T] is one row); tokens: [B, T]; result [B, T] in
    nats, float32 or wider. Every position is filled, prompt and padding too; a mask selects later. The log-probability
    of a response is the sum over its tokens, because the probability factorises: pi(y|x) = prod_t pi(y_t|s_t).
    The temperature is that of sampling: otherwise these are the log-probabilities of another policy.

    >>> bigram = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]).log()
    >>> tokens = torch.tensor([0, 1, 2, 0])
    >>> token_logp(bigram[tokens], tokens)  # log of 0.5, 0.8, 0.6
    tensor([ 0.0000, -0.6931, -0.2231, -0.5108])
    """
    check_sequence(logits, "logits")
    tokens = as_ids("tokens", tokens)
    _check_one_id_per_state(tokens, logits)
    # The last position is paired with token 0 here; shift_right drops it.
    return shift_right(selected_logp(logits, tokens.roll(-1, -1), temperature))


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of the distribution from which each token was chosen.

    H_t = -sum_v p_v log p_v,  p = softmax(z_(t-1) / temperature),  H_0 = 0

    logits z: [B, T, V] (or [T, V]); result [B, T] in nats. Aligned with token_logp: H_t is minus the expected logp_t.

    >>> entropy(torch.zeros(1, 3, 4))  # log 4, except at token 0
    tensor([[0.0000, 1.3863, 1.3863]])
    """
    check_sequence(logits, "logits")
    return shift_right(state_entropy(logits, temperature))
