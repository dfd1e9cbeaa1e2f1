"""Where each row of the KL table ends (DESIGN section 6): four arms and the whole program.

The model is a tiny llama whose next token after "?" is one of four digits with probabilities .4, .3, .2, .1: the head
is set so that the logits are their logarithms. Scores are 1, 0, 0, 1 and beta is 0.5.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hotcold
from hotcold.errors import InputError
from tests.tiny_model import CHARACTERS, EOS, character_tokenizer

REFERENCE, SCORES, BETA = (0.4, 0.3, 0.2, 0.1), (1.0, 0.0, 0.0, 1.0), 0.5
ARMS = [CHARACTERS.index(digit) for digit in "0123"]
PROMPT = CHARACTERS.index("?")
NEVER = -30.0  # the logit of all other tokens: e^-30 of probability


def write_bandit(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    logits = torch.full((EOS + 1,), NEVER)
    logits[ARMS] = torch.tensor(REFERENCE).log()
    with torch.no_grad():
        state = model.model(torch.tensor([[PROMPT]])).last_hidden_state[0, 0]
        model.lm_head.weight.copy_(logits[:, None] * state / (state @ state))  # so that head(state) = logits
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def probabilities(folder: Path) -> torch.Tensor:
    """[V] of the token after the prompt, with plain transformers."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[PROMPT]])).logits[0, -1].double().softmax(0)


def score(completions: list[str]) -> list[float]:
    return [SCORES["0123".index(text)] for text in completions]


def train(folder: Path, beta: float, rate: float, steps: int, prompts: int, group: int, **keys: Any) -> torch.Tensor:
    """The distribution at the end of a run from the reference, by plain gradient steps."""
    run = hotcold.train(
        model=write_bandit(folder / "model"),
        data=[{"prompt": "?"}],
        reward=score,
        algorithm="rloo",
        echo=None,
        run=str(folder / "run"),
        max_tokens=1,
        beta=beta,
        learning_rate=rate,
        optimizer="sgd",
        steps=steps,
        prompts_per_step=prompts,
        group_size=group,
        save_every=0,
        eval__every=0,
        threads=1,
        **keys,
    )
    return probabilities(run.model_dir)


@dataclass(frozen=True)
class Row:
    ends: tuple[float, float, float, float]
    keys: dict[str, str] = field(default_factory=dict)
    rate: float = 0.5
    steps: int = 25
    prompts: int = 16
    group: int = 64


# Reverse KL: ref e^(r/beta)/Z, with e^2 = 7.38906: (2.95562, .3, .2, .73891)/4.19453. Forward KL: each arm has
# r - beta (1 - ref/pi) = c, so pi = beta ref/(c + beta - r): .25/(c - .5) + .25/(c + .5) = 1 at c = .80902.
TILTED = (0.705, 0.072, 0.048, 0.176)
FORWARD = (0.647, 0.115, 0.076, 0.162)
ROWS = {
    # At the optimum every response has the same reward with its cost, so few samples are needed.
    "reward k1": Row(TILTED, rate=1.0, steps=20, prompts=4),
    "loss k2": Row(TILTED, {"kl__placement": "loss", "kl__estimator": "k2"}, rate=0.3),
    "loss k3": Row(FORWARD, {"kl__placement": "loss", "kl__estimator": "k3"}, prompts=6),
    "loss_times_ratio k3": Row(TILTED, {"kl__placement": "loss_times_ratio", "kl__estimator": "k3"}, rate=0.3),
    # Here the noise of the scores is left in full: more responses and a smaller rate.
    "exact": Row(TILTED, {"kl__estimator": "exact"}, rate=0.25, steps=28, prompts=32),
}


def test_the_two_optima_are_what_the_table_says() -> None:
    weights = [p * math.exp(r / BETA) for p, r in zip(REFERENCE, SCORES, strict=True)]
    assert [w / sum(weights) for w in weights] == pytest.approx(TILTED, abs=6e-4)
    forward = [BETA * p / (0.80902 + BETA - r) for p, r in zip(REFERENCE, SCORES, strict=True)]
    assert sum(forward) == pytest.approx(1, abs=1e-4) and forward == pytest.approx(FORWARD, abs=6e-4)


def test_the_bandit_starts_at_its_reference(tmp_path: Path) -> None:
    start = probabilities(write_bandit(tmp_path))
    assert start[ARMS].tolist() == pytest.approx(REFERENCE, abs=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_a_leash_ends_where_the_table_says(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    end = train(tmp_path, BETA, row.rate, row.steps, row.prompts, row.group, **row.keys)
    assert end[ARMS].tolist() == pytest.approx(row.ends, abs=0.01)
    assert float(end[ARMS].sum()) == pytest.approx(1, abs=1e-6)


def test_without_a_leash_the_two_best_arms_take_all(tmp_path: Path) -> None:
    end = train(tmp_path, beta=0.0, rate=1.0, steps=40, prompts=4, group=64)
    assert float(end[ARMS][[0, 3]].sum()) >= 0.99


@pytest.mark.parametrize(
    ("placement", "estimator", "reason"),
    [
        ("reward", "k2", "points against"),
        ("reward", "k3", "points against"),
        ("reward", "exact", "each state's"),
        ("loss", "k1", "expected gradient is 0"),
    ],
)
def test_the_other_rows_of_the_table_are_refused_with_the_reason(
    tmp_path: Path, placement: str, estimator: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        train(tmp_path, BETA, 0.5, 1, 1, 2, kl__placement=placement, kl__estimator=estimator)
    assert not (tmp_path / "run").exists()
