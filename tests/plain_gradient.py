"""What an update must compute, by torch and transformers alone: one row at a time, no padding, no code of hotcold.

The other side of test_replay_gradient.py (tiny models) and of benchmarks/replay_gradient.py (SmolLM2). Every case is
one configuration: the words of the command line, and the same in sums over single tokens. Models are float64 unless
float32 is asked for; all that comes after their logits and hidden states is float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

REAL = torch.float64


@dataclass(frozen=True)
class Row:
    """One response with its score."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    score: float | None  # None: none was given
    group: int
    mask: tuple[bool, ...] | None = None  # over the response; None: the policy chose every token
    steps: tuple[tuple[int, float], ...] = ()  # intermediate rewards: (position in the response, value)
    truncated: bool = False
    greedy: float | None = None  # score of the greedy response to the same prompt

    @property
    def chosen(self) -> list[int]:
        """Positions in the response of the tokens that are trained."""
        return [i for i in range(len(self.response)) if self.mask is None or self.mask[i]]

    @property
    def total(self) -> float:
        assert self.score is not None
        return self.score + sum(value for _, value in self.steps)


def write_rows(path: Path, rows: Sequence[Row], logp_sampler: Sequence[Sequence[float]] | None = None) -> Path:
    """As one recorded step, in the columns that `sampler=replay:FILE` reads."""
    lists, numbers = pa.list_(pa.int64()), pa.list_(pa.float64())
    columns = {
        "step": pa.array([1] * len(rows)),
        "group": pa.array([row.group for row in rows]),
        "episode": pa.array(range(len(rows))),
        "prompt_ids": pa.array([row.prompt for row in rows], lists),
        "response_ids": pa.array([row.response for row in rows], lists),
        "response_mask": pa.array([[i in row.chosen for i in range(len(row.response))] for row in rows]),
        "reward": pa.array([row.score for row in rows], pa.float64()),
        "steps": pa.array([[[float(p), value] for p, value in row.steps] for row in rows], pa.list_(numbers)),
        "truncated": pa.array([row.truncated for row in rows]),
        "version": pa.array([0] * len(rows)),
        "greedy_reward": pa.array([row.greedy for row in rows], pa.float64()),
    }
    if logp_sampler is not None:
        columns["logp_sampler"] = pa.array(logp_sampler, numbers)
    pq.write_table(pa.table(columns), path)
    return path


# ---- models


class PlainCritic(torch.nn.Module):
    """What a folder with a trunk and value_head.safetensors says of a state."""

    def __init__(self, folder: Path, dtype: torch.dtype = REAL):
        super().__init__()
        self.trunk = AutoModel.from_pretrained(folder, dtype=dtype).eval()
        head = load_file(folder / "value_head.safetensors")
        self.weight = torch.nn.Parameter(head["weight"].to(REAL))
        self.bias = torch.nn.Parameter(head["bias"].to(REAL))

    def values(self, row: Row) -> Tensor:
        """Of the states in which the trained tokens were chosen."""
        ids = torch.tensor([row.prompt + row.response])
        hidden = self.trunk(input_ids=ids).last_hidden_state[0].to(REAL)
        return torch.stack([hidden[len(row.prompt) + i - 1] @ self.weight[0] + self.bias[0] for i in row.chosen])


def save_plain_critic(trunk_from: Path, folder: Path, seed: int) -> Path:
    """The trunk of a model with a head that is not 0, so that values and GAE matter from the first step on."""
    trunk = AutoModel.from_pretrained(trunk_from, dtype=torch.float32)
    trunk.save_pretrained(folder)
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, trunk.config.hidden_size, generator=random) / trunk.config.hidden_size**0.5
    save_file({"weight": weight, "bias": torch.tensor([0.25])}, folder / "value_head.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Seen:
    """What a model says of a row: log-probabilities of all tokens [N, V] and of the chosen ones [N]."""

    all: Tensor
    logp: Tensor


def see(model: torch.nn.Module, row: Row, temperature: float) -> Seen:
    ids = torch.tensor([row.prompt + row.response])
    logits = model(input_ids=ids).logits[0].to(REAL)
    everything = torch.stack([(logits[len(row.prompt) + i - 1] / temperature).log_softmax(-1) for i in row.chosen])
    return Seen(everything, torch.stack([everything[n, row.response[i]] for n, i in enumerate(row.chosen)]))


@dataclass(frozen=True)
class Known:
    """A row before the update."""

    row: Row
    old: Seen
    ref: Seen | None
    values: Tensor | None  # [N]


# ---- rewards, token by token

Rewards = Callable[[Known], Tensor]


def score_at_the_end(k: Known) -> Tensor:
    """[N] intermediate rewards where they arrived (on the last trained token before a gap), the score on the last."""
    rewards = torch.zeros(len(k.row.chosen), dtype=REAL)
    for position, value in k.row.steps:
        rewards[max(n for n, i in enumerate(k.row.chosen) if i <= position)] += value
    assert k.row.score is not None
    rewards[-1] += k.row.score
    return rewards


def with_k1(beta: float) -> Rewards:
    """Every token pays beta (log pi - log pi_ref)."""

    def rewards(k: Known) -> Tensor:
        assert k.ref is not None
        return score_at_the_end(k) - beta * (k.old.logp - k.ref.logp)

    return rewards


def with_later_kl(beta: float) -> Rewards:
    """Every token pays for the whole KL of the state that it leads to."""

    def rewards(k: Known) -> Tensor:
        out = score_at_the_end(k)
        states = exact_kl(k.old, k.ref)
        for n in range(len(out) - 1):
            out[n] -= beta * states[n + 1]
        return out

    return rewards


def charged_for_length(limit: int, buffer: int) -> Rewards:
    """DAPO: over the last `buffer` tokens before the limit, up to 1 is taken from the score."""

    def rewards(k: Known) -> Tensor:
        out = score_at_the_end(k)
        out[-1] -= min(max((len(k.row.response) - (limit - buffer)) / buffer, 0.0), 1.0)
        return out

    return rewards


def exact_kl(now: Seen, ref: Seen | None) -> Tensor:
    assert ref is not None
    return (now.all.exp() * (now.all - ref.all)).sum(-1)


# ---- credit: from rewards to advantages, and returns for a critic

Credit = Callable[[list[Known]], tuple[list[Tensor], list[Tensor]]]
Baseline = Callable[[list[float], list[Known]], list[float]]


def to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    out = rewards.clone()
    for n in reversed(range(len(out) - 1)):
        out[n] += gamma * out[n + 1]
    return out


def mates(known: list[Known], i: int) -> list[int]:
    return [j for j, other in enumerate(known) if other.row.group == known[i].row.group]


def none(totals: list[float], known: list[Known]) -> list[float]:
    return [0.0] * len(totals)


def batch_mean(totals: list[float], known: list[Known]) -> list[float]:
    return [sum(totals) / len(totals)] * len(totals)


def leave_one_out(totals: list[float], known: list[Known]) -> list[float]:
    others = [[totals[j] for j in mates(known, i) if j != i] for i in range(len(known))]
    return [sum(of) / len(of) for of in others]


def greedy(totals: list[float], known: list[Known]) -> list[float]:
    return [float(k.row.greedy) for k in known if k.row.greedy is not None]


def minus(baseline: Baseline, rewards: Rewards = score_at_the_end, gamma: float = 1.0) -> Credit:
    def credit(known: list[Known]) -> tuple[list[Tensor], list[Tensor]]:
        per_token = [rewards(k) for k in known]
        baselines = baseline([float(r.sum()) for r in per_token], known)
        return [to_go(r, gamma) - b for r, b in zip(per_token, baselines, strict=True)], []

    return credit


def in_group(rewards: Rewards = score_at_the_end, by_std: bool = True, whole: bool = False) -> Credit:
    """Against the mean of the group, over its sample standard deviation. `whole`: one number for a response."""

    def credit(known: list[Known]) -> tuple[list[Tensor], list[Tensor]]:
        per_token = [rewards(k) for k in known]
        advantages = []
        for i, r in enumerate(per_token):
            totals = torch.stack([per_token[j].sum() for j in mates(known, i)])
            centred = (r.sum().expand(len(r)) if whole else to_go(r)) - totals.mean()
            if by_std:
                spread = float(totals.std()) if float(totals.max()) > float(totals.min()) else 0.0
                centred = centred / spread if spread else torch.zeros_like(centred)
            advantages.append(centred)
        return advantages, []

    return credit


def whitened(advantages: list[Tensor]) -> list[Tensor]:
    every = torch.cat(advantages)
    scale = (every.var(correction=0) + 1e-8).sqrt()
    return [(a - every.mean()) / scale for a in advantages]


def gae(
    lam: float,
    rewards: Rewards = score_at_the_end,
    gamma: float = 1.0,
    whiten: bool = True,
    critic_lam: float | None = None,
) -> Credit:
    """Advantages with `lam`; returns are values plus the advantages with `critic_lam`, before whitening."""

    def summed(k: Known, lam: float) -> Tensor:
        assert k.values is not None
        r, v = rewards(k), [*k.values.tolist(), 0.0]
        errors = [float(r[n]) + gamma * v[n + 1] - v[n] for n in range(len(r))]
        a = [sum((gamma * lam) ** (m - n) * errors[m] for m in range(n, len(r))) for n in range(len(r))]
        return torch.tensor(a, dtype=REAL)

    def credit(known: list[Known]) -> tuple[list[Tensor], list[Tensor]]:
        advantages = [summed(k, lam) for k in known]
        returns = [k.values + summed(k, lam if critic_lam is None else critic_lam) for k in known]
        return (whitened(advantages) if whiten else advantages), returns

    return credit


def imitation(known: list[Known]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.ones(len(k.row.chosen), dtype=REAL) for k in known], []


def minus_then_whitened(baseline: Baseline) -> Credit:
    return lambda known: (whitened(minus(baseline)(known)[0]), [])


# ---- losses of the tokens of a row

Loss = Callable[[Seen, Known, Tensor], Tensor]


def policy_gradient(now: Seen, k: Known, advantage: Tensor) -> Tensor:
    return -advantage * now.logp


def clipped(low: float, high: float) -> Loss:
    def loss(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        ratio = (now.logp - k.old.logp).exp()
        return -torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)

    return loss


def importance_weighted(now: Seen, k: Known, advantage: Tensor) -> Tensor:
    return -(now.logp - k.old.logp).exp() * advantage


def dual_clipped(low: float, high: float, most: float) -> Loss:
    """A token with a negative advantage costs at most `most` times that."""

    def loss(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        plain = clipped(low, high)(now, k, advantage)
        return torch.where(advantage < 0, torch.minimum(plain, -most * advantage), plain)

    return loss


def sequence_clipped(low: float, high: float) -> Loss:
    def loss(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        ratio = (now.logp - k.old.logp).mean().exp()  # one number for the response
        return -torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)

    return loss


def truncated_weight(highest: float) -> Loss:
    def loss(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        weight = (now.logp - k.old.logp).exp().detach().clip(max=highest)
        return -weight * advantage * now.logp

    return loss


def plus_k3(loss: Loss, beta: float, times_ratio: bool = False) -> Loss:
    def total(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        assert k.ref is not None
        behind = k.ref.logp - now.logp
        ratio = (now.logp - k.old.logp).exp() if times_ratio else 1.0
        return loss(now, k, advantage) + beta * ratio * (behind.exp() - 1 - behind)

    return total


def plus_k2(loss: Loss, beta: float) -> Loss:
    def total(now: Seen, k: Known, advantage: Tensor) -> Tensor:
        assert k.ref is not None
        return loss(now, k, advantage) + beta * (now.logp - k.ref.logp) ** 2 / 2

    return total


def plus_exact_kl(loss: Loss, beta: float) -> Loss:
    return lambda now, k, advantage: loss(now, k, advantage) + beta * exact_kl(now, k.ref)


def minus_entropy(loss: Loss, bonus: float) -> Loss:
    return lambda now, k, advantage: loss(now, k, advantage) + bonus * (now.all.exp() * now.all).sum(-1)


# ---- how tokens are averaged: what one token of each row weighs

Weigh = Callable[[list[int]], list[float]]  # from the numbers of trained tokens


def sum_per_response(lengths: list[int]) -> list[float]:
    return [1 / len(lengths) for _ in lengths]


def mean_per_response(lengths: list[int]) -> list[float]:
    return [1 / len(lengths) / n for n in lengths]


def mean_per_token(lengths: list[int]) -> list[float]:
    return [1 / sum(lengths) for _ in lengths]


def fixed_length(length: int) -> Weigh:
    return lambda lengths: [1 / len(lengths) / length for _ in lengths]


# ---- which rows take part

Takes = Callable[[Sequence[Row]], list[Row]]


def scored(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.score is not None]


def with_greedy(rows: Sequence[Row]) -> list[Row]:
    return [row for row in scored(rows) if row.greedy is not None]


def varied(rows: Sequence[Row]) -> list[Row]:
    """Without the groups whose scores are all equal."""
    totals: dict[int, set[float]] = {}
    for row in scored(rows):
        totals.setdefault(row.group, set()).add(row.total)
    return [row for row in scored(rows) if len(totals[row.group]) > 1]


def at_least(threshold: float) -> Takes:
    return lambda rows: [row for row in scored(rows) if row.total >= threshold]


def whole(rows: Sequence[Row]) -> list[Row]:
    return [row for row in scored(rows) if not row.truncated]


# ---- a configuration, and its update


@dataclass(frozen=True)
class Case:
    words: str  # of the command line
    credit: Credit
    weigh: Weigh
    loss: Loss = policy_gradient
    takes: Takes = scored
    num_steps: int = 1  # optimiser steps on the batch
    temperature: float = 1.0
    value_clip: float | None = None

    @property
    def needs_reference(self) -> bool:
        return "beta=" in self.words

    @property
    def needs_critic(self) -> bool:
        return self.words.startswith("ppo")


LIMIT, BUFFER = 6, 3  # max_tokens, and the tokens over which DAPO charges for length
BETA = 0.25
PPO = clipped(0.2, 0.2)

CASES: dict[str, Case] = {
    "reinforce, no baseline": Case("reinforce baseline=none", minus(none), sum_per_response),
    "reinforce, batch mean": Case("reinforce baseline=batch_mean", minus(batch_mean), sum_per_response),
    "reinforce, leave-one-out": Case("reinforce baseline=leave_one_out", minus(leave_one_out), sum_per_response),
    "reinforce, greedy": Case("reinforce baseline=greedy", minus(greedy), sum_per_response, takes=with_greedy),
    "expert iteration": Case("expert_iteration threshold=1", imitation, mean_per_token, takes=at_least(1.0)),
    "rloo": Case("rloo", minus(leave_one_out), sum_per_response),
    "rloo + k1": Case(f"rloo beta={BETA}", minus(leave_one_out, with_k1(BETA)), sum_per_response),
    "grpo": Case("grpo", in_group(), mean_per_response, PPO),
    "grpo + k3": Case(f"grpo beta={BETA}", in_group(), mean_per_response, plus_k3(PPO, BETA)),
    "dr_grpo": Case(f"dr_grpo max_tokens={LIMIT}", in_group(by_std=False), fixed_length(LIMIT), PPO),
    "dapo": Case(
        f"dapo max_tokens={LIMIT} overlong.buffer={BUFFER}",
        in_group(charged_for_length(LIMIT, BUFFER)),
        mean_per_token,
        clipped(0.2, 0.28),
        varied,
    ),
    "gspo": Case("gspo", in_group(whole=True), mean_per_response, sequence_clipped(3e-4, 4e-4)),
    "cispo": Case("cispo", in_group(), mean_per_token, truncated_weight(5.0)),
    "ppo, lam 1": Case("ppo", gae(1.0), mean_per_token, PPO),
    "ppo, lam 0.95 + k1": Case(f"ppo lam=0.95 beta={BETA}", gae(0.95, with_k1(BETA)), mean_per_token, PPO),
    "sft": Case("sft", imitation, mean_per_token, takes=list),
}


@dataclass(frozen=True)
class Update:
    """(before - after) / rate, by the names of the files: the gradient, summed over the optimiser steps."""

    policy: dict[str, Tensor]
    critic: dict[str, Tensor]  # the head's as head.weight and head.bias


def plain_update(
    case: Case,
    rows: Sequence[Row],
    model: Path,
    reference: Path | None = None,
    critic: Path | None = None,
    rate: float = 1.0,
    critic_rate: float = 1.0,
    correction: Callable[[Known], Tensor] | None = None,
    dtype: torch.dtype = REAL,
) -> Update:
    """`correction` [N]: what the loss of each token is multiplied by, known before the update."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    value = PlainCritic(critic, dtype) if critic is not None and case.needs_critic else None
    known = _known(case, rows, policy, reference, value, dtype)
    advantages, returns = case.credit(known)
    weights = case.weigh([len(k.row.chosen) for k in known])
    factors = [torch.ones(len(k.row.chosen), dtype=REAL) if correction is None else correction(k) for k in known]
    of_policy: dict[str, Tensor] = {}
    of_critic: dict[str, Tensor] = {}
    for _ in range(case.num_steps):
        for k, advantage, weight, factor in zip(known, advantages, weights, factors, strict=True):
            now = see(policy, k.row, case.temperature)
            (weight * factor * case.loss(now, k, advantage)).sum().backward()
        _descend(policy, rate, of_policy)
    for _ in range(case.num_steps if value is not None else 0):
        count = sum(len(k.row.chosen) for k in known)
        for k, target in zip(known, returns, strict=True):
            (_value_loss(value.values(k.row), k.values, target, case.value_clip).sum() / count).backward()
        _descend(value, critic_rate, of_critic)
    return Update(of_policy, {_name(name): gradient for name, gradient in of_critic.items()})


def _descend(module: torch.nn.Module, rate: float, total: dict[str, Tensor]) -> None:
    """A plain step; its gradient is added to `total`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                parameter -= rate * gradient
                total[name] = total[name] + gradient if name in total else gradient


def _name(of_critic: str) -> str:
    """As in the files: the trunk's own names, the head's with the head before them."""
    return of_critic.removeprefix("trunk.") if of_critic.startswith("trunk.") else f"head.{of_critic}"


def _known(
    case: Case,
    rows: Sequence[Row],
    policy: torch.nn.Module,
    reference: Path | None,
    critic: PlainCritic | None,
    dtype: torch.dtype,
) -> list[Known]:
    frozen = None
    if case.needs_reference:
        frozen = AutoModelForCausalLM.from_pretrained(reference, dtype=dtype).eval()
    with torch.no_grad():
        return [
            Known(
                row,
                see(policy, row, case.temperature),
                None if frozen is None else see(frozen, row, case.temperature),
                None if critic is None else critic.values(row),
            )
            for row in case.takes(rows)
        ]


def _value_loss(values: Tensor, old: Tensor | None, target: Tensor, clip: float | None) -> Tensor:
    if clip is None:
        return (values - target) ** 2 / 2
    assert old is not None
    near = torch.maximum(torch.minimum(values, old + clip), old - clip)
    return torch.maximum((values - target) ** 2, (near - target) ** 2) / 2


# ---- what the program did, read from its folders


def change_of(before: Path, after: Path, rate: float) -> dict[str, Tensor]:
    """(before - after) / rate of every tensor of two folders."""
    return _change(load_file(before / "model.safetensors"), load_file(after / "model.safetensors"), rate)


def change_of_critic(before: Path, after: Path, rate: float) -> dict[str, Tensor]:
    head = _change(*(load_file(folder / "value_head.safetensors") for folder in (before, after)), rate)
    return {**change_of(before, after, rate), **{f"head.{name}": change for name, change in head.items()}}


def _change(old: dict[str, Tensor], new: dict[str, Tensor], rate: float) -> dict[str, Tensor]:
    assert old.keys() == new.keys(), sorted(old.keys() ^ new.keys())
    return {name: (old[name].to(REAL) - new[name].to(REAL)) / rate for name in old}


def relative_distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """L2 norm of the difference over that of what is expected, over all tensors; one without gradient stays."""
    assert want and want.keys() <= got.keys(), sorted(want.keys() - got.keys())
    difference = sum(float((change.to(REAL) - want.get(name, 0.0)).square().sum()) for name, change in got.items())
    return (difference / sum(float(gradient.to(REAL).square().sum()) for gradient in want.values())) ** 0.5
