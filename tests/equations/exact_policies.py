"""The toy policies of tests/vectors/exact.json in the [B, T] layout: one row for each response, float64.

Summed with each response's probability, what real code computes on these rows is an expectation, not an estimate.
"""

import itertools
import json
from pathlib import Path

import torch

EXACT = json.loads((Path(__file__).parents[1] / "vectors" / "exact.json").read_text())


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def assert_equal(actual, expected, tolerance=1e-12):
    """Equal within the tolerance, relative to max(1, |expected|); NaN is equal to nothing."""
    actual, expected = actual.detach(), torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    gap = (actual.double() - expected).abs() / expected.abs().clamp(min=1)
    assert float(gap.max()) <= tolerance, (actual, expected)


class ExactPolicy:
    """A table of logits, one row per prefix, and all responses to one prompt token."""

    def __init__(self, responses, row_of_prefix, rewards):
        self.rewards = f64(rewards)
        width = 1 + max(len(y) for y in responses)
        self.tokens = torch.zeros(len(responses), width, dtype=torch.long)
        self.mask = torch.zeros(len(responses), width, dtype=torch.bool)
        self.rows = torch.zeros(len(responses), width, dtype=torch.long)
        for b, y in enumerate(responses):
            self.tokens[b, 1 : 1 + len(y)] = torch.tensor([int(token) for token in y])
            self.mask[b, 1 : 1 + len(y)] = True
            self.rows[b, : len(y)] = torch.tensor([row_of_prefix[y[:t]] for t in range(len(y))])

    def logits(self, table):
        """[B, T, V]; the last position, which predicts nothing, is NaN."""
        rows = table[self.rows]
        return torch.cat([rows[:, :-1], torch.full_like(rows[:, -1:], float("nan"))], dim=1)

    def members(self, group_size):
        """[N^G * G] the response of each row of all groups, in order, and the group of each row."""
        groups = list(itertools.product(range(len(self.tokens)), repeat=group_size))
        member = torch.tensor(groups).flatten()
        return member, torch.arange(len(groups)).repeat_interleave(group_size)


T1 = ExactPolicy(EXACT["T1"]["responses"], {"": 0, "0": 1, "1": 2}, EXACT["T1"]["reward"])
T2 = ExactPolicy(EXACT["T2"]["responses"], {"": 0, "1": 1, "11": 2}, EXACT["T2"]["reward"])


def table(name):
    """A T1 table ("theta" with gradient, "ref", "mu")."""
    return f64(EXACT["T1"][name]).requires_grad_(name == "theta")


def probabilities(name):
    return f64(EXACT["T1"]["prob"][name])


def expected_gradient(table_, per_token_loss, mask, row_probability):
    """Gradient of sum_b P(b) sum_t loss_bt with respect to the table."""
    per_row = torch.where(mask, per_token_loss, 0.0).sum(1)
    (gradient,) = torch.autograd.grad((row_probability * per_row).sum(), table_, retain_graph=True)
    return gradient
