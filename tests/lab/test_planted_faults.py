"""Ten known mistakes are found, and exit 1; four right algorithms that are written in another way pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hotcold.algorithms.kl
import hotcold.batch
import hotcold.models.policy
from hotcold.verify.command import Options, verify

HERE = Path(__file__).parent
Found = Callable[..., tuple[int, str]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """(exit code, what is printed) of `hotcold verify ...`."""

    def call(*words: str) -> tuple[int, str]:
        lines: list[str] = []
        threads = torch.get_num_threads()
        code = verify(words, Options(), lines.append)
        torch.set_num_threads(threads)
        return code, "\n".join(lines)

    return call


FILES = [
    ("group_by_layout:GroupByLayout", "FAILED    the same gradient for any order of the rows"),
    ("mean_of_micro_batch_means:MeanOfMeans", "FAILED    the same gradient for any micro-batch"),
    ("undetached_baseline:UndetachedBaseline", "because scores that are all equal move it too"),
    ("k3_in_the_reward:K3InTheReward", "k3 as a cost in the reward, which is no KL"),
    ("k3_reversed:K3Reversed", "k3 upside down"),
    ("ratio_upside_down:RatioUpsideDown", "points the other way: -1 times the target"),
    ("whitening_over_padding:WhiteningOverPadding", "FAILED    the width of the padding changes nothing"),
    ("reward_one_token_late:RewardOneTokenLate", "at which token gets which reward"),
]


@pytest.mark.parametrize(("fault", "said"), FILES, ids=[name.split(":")[0] for name, _ in FILES])
def test_a_planted_fault_in_an_algorithm_file_is_reported(fault: str, said: str, found: Found) -> None:
    code, text = found(f"{HERE}/planted/{fault}".replace(":", ".py:"))
    assert code == 1 and said in text


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits at a token's own position, which predict the next one."""
    right = hotcold.models.policy.trained_logits
    monkeypatch.setattr(
        hotcold.models.policy, "trained_logits", lambda module, batch, row, at: right(module, batch, row, at + 1)
    )


def eos_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a response is not trained."""
    right = hotcold.batch._row_mask
    monkeypatch.setattr(hotcold.batch, "_row_mask", lambda r: [*right(r)[:-1], len(r.response_ids) == 1])


def k3_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hotcold.algorithms.kl.kl_k3
    monkeypatch.setattr(hotcold.algorithms.kl, "kl_k3", lambda logp, logp_ref: right(-logp, -logp_ref))


def reward_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward on the way lands on the next token: only the variance shows it."""
    right = hotcold.batch._row_rewards

    def late(r: Any, mask: Any, dtype: Any) -> Any:
        rewards = right(r, mask, dtype)
        at = mask.nonzero().flatten()
        moved = rewards.clone()
        moved[at[:-1]] = 0.0
        moved[at[1:]] += rewards[at[:-1]]
        return moved

    monkeypatch.setattr(hotcold.batch, "_row_rewards", late)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (shifted, ("rloo", "group_size=2")),
        (eos_masked, ("rloo", "group_size=2")),
        (k3_reversed, ("grpo", "group_size=2", "beta=0.5")),
        (reward_late, ("rloo", "group_size=2")),
    ],
)
def test_a_fault_in_the_product_differs_from_what_is_stated(
    fault: Callable[[pytest.MonkeyPatch], None], words: tuple[str, ...], found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    code, text = found(*words)
    assert code == 1 and "differs from what is stated" in text and "the stated sums differ by" in text


@pytest.mark.parametrize(
    "name",
    [
        "leave_one_out_by_sums:LeaveOneOut",
        "kl_of_later_tokens:KLOfLaterTokens",
        "ratio_of_one:RatioOfOne",
        "best_of_the_others:BestOfTheOthers",
    ],
)
def test_a_right_algorithm_that_is_written_differently_passes(name: str, found: Found) -> None:
    code, text = found(f"{HERE}/right/{name}".replace(":", ".py:"))
    assert code == 0, text
    assert "0 differ from what is stated" in text and "FAILED" not in text
