"""Every equation as one function on tensors. Names and signatures are fixed; nothing here knows a model or a loop.

[B, T] tensors are aligned with the tokens: entry t concerns token t, entry 0 and everything outside the response mask
is 0. float64 in, float64 out; bf16, fp16 and integers give float32. Functions with a mask give 0 and gradient 0 outside
it, whatever stands there. What a caller gets wrong (a shape, a scalar out of range) is a ValueError.
"""

from hotcold.equations.baselines import batch_mean, group_mean, group_std, leave_one_out
from hotcold.equations.critics import clipped_value_loss, explained_variance, value_loss
from hotcold.equations.divergences import adaptive_beta, approx_kl, kl_exact, kl_k1, kl_k2, kl_k3
from hotcold.equations.evaluation import pass_at_k
from hotcold.equations.logprobs import entropy, token_logp
from hotcold.equations.masking import masked_mean, masked_sum, masked_var, whiten
from hotcold.equations.off_policy import mismatch_weights
from hotcold.equations.preferences import preference_loss
from hotcold.equations.returns import (
    gae,
    kl_shaped_rewards,
    reward_to_go,
    soft_overlong_penalty,
    td_errors,
    terminal_rewards,
)
from hotcold.equations.surrogates import (
    clip_selected,
    clipped_surrogate,
    importance_weighted,
    policy_gradient,
    sequence_log_ratio,
    truncated_is_policy_gradient,
)
from hotcold.equations.weighting import fixed_length, mean_per_response, mean_per_token, sum_per_response

__all__ = [
    "adaptive_beta",
    "approx_kl",
    "batch_mean",
    "clip_selected",
    "clipped_surrogate",
    "clipped_value_loss",
    "entropy",
    "explained_variance",
    "fixed_length",
    "gae",
    "group_mean",
    "group_std",
    "importance_weighted",
    "kl_exact",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_shaped_rewards",
    "leave_one_out",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "mean_per_response",
    "mean_per_token",
    "mismatch_weights",
    "pass_at_k",
    "policy_gradient",
    "preference_loss",
    "reward_to_go",
    "sequence_log_ratio",
    "soft_overlong_penalty",
    "sum_per_response",
    "td_errors",
    "terminal_rewards",
    "token_logp",
    "truncated_is_policy_gradient",
    "value_loss",
    "whiten",
]
