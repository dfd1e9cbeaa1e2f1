"""What every algorithm must keep to, ours and a user's, tried on one batch of a tiny world.

The batch has two prompts or more whose rows stand interleaved, responses of several lengths, tool tokens, padding and
rewards on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective
from hotcold.batch import Batch, Rollout
from hotcold.errors import InputError
from hotcold.lab.expectation import Recorder, Setting, expected_update, prepared, sampler_report
from hotcold.lab.kl_parts import without_reference
from hotcold.lab.tiny import VARIABLE, Tiny, with_gap, with_steps
from hotcold.lab.truth import state_values
from hotcold.training.truncation import KEEP
from hotcold.training.update import UpdateSettings, fill_reads, update

UNLIKE = dict(zip(VARIABLE.responses, (1.1, 0.2, -0.6, -1.7), strict=True))  # with the steps, no two totals are equal
WORLD = with_gap(with_steps(replace(VARIABLE, reward=UNLIKE)))
SAME = 1e-12  # relative: float64 sums of the same terms in another order
PER_TOKEN = ("token_rewards", "logp_old", "logp_ref", "kl_old", "values_old", "logp_sampler", "advantages", "returns")


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None  # None: not asked of this algorithm
    evidence: str
    what_to_do: str

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Bench:
    """An algorithm with a batch, and what its update is."""

    algorithm: Algorithm
    make: Callable[[int], Algorithm] | None  # the same with another group size, where it has one
    compares: bool = True
    tiny: Tiny = WORLD

    @property
    def setting(self) -> Setting:
        return Setting(values=[v + (0.3, -0.4)[i % 2] for i, v in enumerate(state_values(self.tiny))])

    @property
    def size(self) -> int:
        return self.algorithm.plan.group_size if self.algorithm.plan else 1

    @property
    def has_critic(self) -> bool:
        return any(objective.model == "critic" for objective in self.algorithm.objectives)

    def rollouts(self) -> list[Rollout]:
        """Groups of unlike responses: first of every prompt, second of every prompt, ..."""
        num_groups, rows = max(2, math.ceil(4 / self.size)), []
        reported = sampler_report(self.tiny, self.setting)
        assert reported is not None
        for place in range(self.size):
            for group in range(num_groups):
                y = self.tiny.responses[(place + self.size * group) % len(self.tiny.responses)]
                row = self.tiny.rollout(y, group, place * num_groups + group, reported[y])
                rows.append(replace(row, demonstration=self.algorithm.plan is None))
        return rows

    def batch(self, rollouts: Sequence[Rollout] | None = None) -> Batch:
        return prepared(self.rollouts() if rollouts is None else rollouts, self.algorithm, KEEP)

    def update(self, batch: Batch, tokens_per_microbatch: int = 10**6) -> tuple[Tensor, Batch]:
        """The gradients of all models in one vector, and the batch as it comes from credit."""
        recorder = Recorder(self.tiny, self.setting, self.has_critic)
        state = self.algorithm.state()
        settings = UpdateSettings(tokens_per_microbatch)
        credited, _, _ = update(batch, self.algorithm, state, recorder, settings, self.step, lambda _: 0.0)
        return torch.cat([part.flatten() for parts in recorder.update.values() for part in parts]), credited

    @property
    def step(self) -> int:
        return 1 + max(objective.start for objective in self.algorithm.objectives)

    def read(self, batch: Batch) -> Batch:
        """With what credit and losses read, logp_old always among it."""
        recorder = Recorder(self.tiny, self.setting, self.has_critic)
        batch = fill_reads(batch, self.algorithm, recorder, UpdateSettings(10**6), self.step)
        if batch.logp_old is None:
            batch = batch.replace(**recorder.read(batch, frozenset({"logp_old"})))
        return batch

    def credit(self, batch: Batch) -> Batch:
        with torch.no_grad():
            return self.algorithm.credit(batch, self.algorithm.state())[0]


def run_checks(
    algorithm: Algorithm, make: Callable[[int], Algorithm] | None = None, compares: bool = True
) -> list[Check]:
    """Every check, in order. One that raises has failed, with the error as evidence.

    `compares`: scores are compared with something, so that a constant score should teach nothing.
    """
    bench = Bench(algorithm, make, compares)
    return [_asked(check, bench) for check in CHECKS]


def _asked(check: Callable[[Bench], Check], bench: Bench) -> Check:
    try:
        return check(bench)
    except Exception as error:
        name = (check.__doc__ or check.__name__).rstrip(".")
        text = " ".join(str(error).split())[:200]
        return Check(name, False, f"{type(error).__name__}: {text}", "It must go through without an error.")


# ---- gradients


def carries_no_gradient(bench: Bench) -> Check:
    """advantages, returns, rewards, old and reference log-probabilities carry no gradient."""
    _, credited = bench.update(bench.batch())
    columns = {name: getattr(credited, name) for name in PER_TOKEN} | credited.extras
    wrong = [name for name, value in columns.items() if isinstance(value, Tensor) and value.requires_grad]
    found = f"{', '.join(wrong)} would send one" if wrong else f"{sum(v is not None for v in columns.values())} columns"
    return _check(carries_no_gradient, not wrong, found, "Detach it: a gradient through an advantage is another one.")


# ---- masks


def masked_ids_do_not_matter(bench: Bench) -> Check:
    """the ids of tool tokens and padding change nothing."""
    batch = bench.batch()
    inside = torch.arange(batch.tokens.shape[1])[None, :] < batch.lengths[:, None]
    chosen = batch.response_mask | (torch.arange(batch.tokens.shape[1])[None, :] < batch.prompt_lengths[:, None])
    other = torch.where(inside, bench.tiny.vocabulary + 3, 1)
    changed = batch.replace(tokens=torch.where(chosen, batch.tokens, other))
    return _same(masked_ids_do_not_matter, bench, batch, changed, "Only tokens under batch.trained may enter.", 0.0)


def masked_numbers_do_not_matter(bench: Bench) -> Check:
    """masked tokens contribute exactly 0, whatever stands there."""
    return _garbage(masked_numbers_do_not_matter, bench, 7.5)


def nan_outside_the_mask_does_not_matter(bench: Bench) -> Check:
    """NaN outside the mask changes nothing."""
    return _garbage(nan_outside_the_mask_does_not_matter, bench, math.nan)


def padding_does_not_matter(bench: Bench) -> Check:
    """the width of the padding changes nothing."""
    batch = bench.batch()
    what = "Take means and sums over batch.trained (masked_mean, whiten with the mask), never over the whole tensor."
    return _same(padding_does_not_matter, bench, batch, wider(batch, 3), what)


def wider(batch: Batch, columns: int) -> Batch:
    width = batch.tokens.shape[1]
    changes = {
        f.name: torch.nn.functional.pad(value, (0, columns))
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and value.dim() == 2 and value.shape[1] == width
    }
    return batch.replace(**changes)


def _garbage(check: Callable[[Bench], Check], bench: Bench, value: float) -> Check:
    """`value` in every column outside the mask, first for credit, then for the losses and weightings."""
    todo = "Select with torch.where(batch.trained, ..., 0.0) before any arithmetic: 0 times NaN is NaN."
    batch = bench.read(bench.batch())
    plain, odd = bench.credit(batch), bench.credit(filled(batch, value))
    for name in ("advantages", "returns"):
        a, b = getattr(plain, name), getattr(odd, name)
        if a is not None and not torch.equal(a[batch.trained], b[batch.trained]):
            return _check(check, False, f"credit: {name} of trained tokens change", todo)
    for objective in bench.algorithm.objectives:
        expected = loss_gradients(objective, plain, 0.0)
        for name, gradient in loss_gradients(objective, filled(plain, value), value).items():
            if not torch.equal(gradient, expected[name]):
                return _check(check, False, f"the {objective.model}'s loss: {name} of trained tokens changes", todo)
    return _check(check, True, f"{value:g} in every column: credit and losses stay the same to the bit", todo)


def filled(batch: Batch, value: float) -> Batch:
    """`value` in every float column outside the trained tokens."""
    shape = batch.tokens.shape

    def put(x: Any) -> Any:
        is_column = isinstance(x, Tensor) and x.shape == shape and x.is_floating_point()
        return torch.where(batch.trained, x, value) if is_column else x

    changes = {name: put(getattr(batch, name)) for name in PER_TOKEN}
    return batch.replace(**changes, extras={name: put(x) for name, x in batch.extras.items()})


def loss_gradients(objective: Objective, batch: Batch, outside: float) -> dict[str, Tensor]:
    """The weighted loss of a model that says `outside` beyond the mask, and its gradients at trained tokens."""
    random = torch.Generator().manual_seed(0)

    def said() -> Tensor:
        inside = -torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64)
        return torch.where(batch.trained, inside, outside).requires_grad_()

    names = ("logp", "entropy", "kl", "values")
    needs = objective.needs | ({"logp"} if objective.model == "policy" else set())
    asked = {name: said() for name in names if name in needs}
    loss = objective.loss(Forward(**asked), batch).loss
    weights = objective.weighting(batch.trained)
    total = (torch.where(weights != 0, loss, 0.0) * weights).sum()
    if not total.requires_grad:
        return {"the loss": total.detach()}
    grads = torch.autograd.grad(total, list(asked.values()), allow_unused=True, materialize_grads=True)
    found = {f"the gradient to {name}": g[batch.trained] for name, g in zip(asked, grads, strict=True)}
    return {"the loss": total.detach(), **found}


# ---- order


def micro_batches_do_not_matter(bench: Bench) -> Check:
    """the same gradient for any micro-batch."""
    batch = bench.batch()
    together, _ = bench.update(batch)
    worst = max(difference(bench.update(batch, tokens)[0], together) for tokens in (1, 2 * int(batch.lengths.max())))
    return _within(
        micro_batches_do_not_matter,
        worst,
        "Do not average inside a loss or a credit that sees only a part: return the loss of each token, and let the "
        "weighting average over the whole step.",
    )


def row_order_does_not_matter(bench: Bench) -> Check:
    """the same gradient for any order of the rows."""
    if any(objective.minibatches > 1 for objective in bench.algorithm.objectives):
        return _check(row_order_does_not_matter, None, "minibatches deal rows at random", "")
    batch = bench.batch()
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    orders = (torch.arange(len(batch)).flip(0), batch.group.argsort(stable=True), shuffled)
    plain, _ = bench.update(batch)
    worst = max(difference(bench.update(batch.select(order))[0], plain) for order in orders)
    return _within(row_order_does_not_matter, worst, "Compare rows by batch.group, never by where they stand.")


def numbering_does_not_matter(bench: Bench) -> Check:
    """the same gradient however groups and episodes are numbered."""
    batch = bench.batch()
    renamed = batch.replace(group=17 - 5 * batch.group, episode=1000 - 3 * batch.episode)
    what = (
        "A group id is a name, not an index: use group_mean, leave_one_out, or torch.unique(..., return_inverse=True)."
    )
    return _same(numbering_does_not_matter, bench, batch, renamed, what)


# ---- rows that do not take part, rows that add nothing


def unscored_rows_are_dropped(bench: Bench) -> Check:
    """a row without a score is as if it were not there."""
    if bench.algorithm.plan is None:
        return _check(unscored_rows_are_dropped, None, "given rows need no score", "")
    rows = bench.rollouts()
    left = [replace(row, reward=None) if i == 0 else row for i, row in enumerate(rows)]
    a, b = bench.batch(left), bench.batch(rows[1:])
    return _equal(
        unscored_rows_are_dropped,
        bench.update(a)[0],
        bench.update(b)[0],
        "Rows with batch.keep False are not in the batch that credit sees; `keep` must not count them either.",
    )


def skipped_rows_count(bench: Bench) -> Check:
    """rows of advantage 0 that are not computed stay in the denominators."""
    batch = bench.batch()
    skipping, _ = bench.update(batch)
    everything, _ = bench.update(bench.read(batch))  # with log pi_old at hand no row is skipped
    return _equal(skipped_rows_count, skipping, everything, "The loss of a row that is skipped must be exactly 0.")


# ---- state, constant scores, groups of one


def state_is_json(bench: Bench) -> Check:
    """the state is JSON, before and after credit."""
    state = bench.algorithm.state()
    with torch.no_grad():
        _, after = bench.algorithm.credit(bench.read(bench.batch()), dict(state))
    for when, value in (("state()", state), ("the state after credit", after)):
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            return _check(
                state_is_json, False, f"{when} is {value!r}", "A dict of plain numbers: float(x) of a tensor."
            )
    return _check(state_is_json, True, f"{len(state)} numbers", "")


def constant_scores_teach_nothing(bench: Bench) -> Check:
    """a constant score has expected gradient 0."""
    policy = [o for o in bench.algorithm.objectives if o.model == "policy"]
    if any("entropy" in o.needs or not o.on_policy for o in policy):
        return _check(constant_scores_teach_nothing, None, "this objective is not only log pi weighed by scores", "")
    constant = without_reference(replace(VARIABLE, reward=dict.fromkeys(VARIABLE.responses, 1.0)))
    algorithm = bench.algorithm if bench.make is None or bench.size <= 2 else bench.make(2)
    values = [0.7] * len(constant.prefixes)
    gradient = expected_update(algorithm, constant, Setting(values=values)).gradient
    largest = float(gradient.abs().max())
    if largest > 1e-9 and not bench.compares:
        reason = "with these choices a longer or shorter response would be preferred, and that is known"
        return _check(constant_scores_teach_nothing, None, reason, "")
    todo = (
        "Scores that say nothing move the parameters: look at the baseline, the discount and how tokens are averaged."
    )
    return _check(constant_scores_teach_nothing, largest <= 1e-9, f"largest entry {largest:.1e}", todo)


def groups_of_one_are_finite(bench: Bench) -> Check:
    """a prompt with one scored response gives no NaN."""
    if bench.algorithm.plan is None:
        return _check(groups_of_one_are_finite, None, "given rows have no group", "")
    rows = bench.rollouts()
    first = next(i for i, row in enumerate(rows) if row.group == 0)
    alone = [row for i, row in enumerate(rows) if row.group != 0 or i == first]
    gradient, credited = bench.update(bench.batch(alone))
    numbers = [gradient, *(x[credited.trained] for x in (credited.advantages, credited.returns) if x is not None)]
    finite = all(bool(x.isfinite().all()) for x in numbers)
    evidence = f"{'finite' if finite else 'not finite'}; {_with_one(bench)}"
    what = "Drop such a row in `keep` (keep_where_baseline_exists), or give it advantage 0."
    return _check(groups_of_one_are_finite, finite, evidence, what)


def _with_one(bench: Bench) -> str:
    if bench.make is None or bench.size == 1:
        return "group_size is 1" if bench.size == 1 else "it has no key group_size"
    try:
        bench.make(1)
    except InputError:
        return "group_size=1 is refused"
    return "group_size=1 is allowed"


CHECKS: tuple[Callable[[Bench], Check], ...] = (
    carries_no_gradient,
    masked_ids_do_not_matter,
    masked_numbers_do_not_matter,
    nan_outside_the_mask_does_not_matter,
    padding_does_not_matter,
    micro_batches_do_not_matter,
    row_order_does_not_matter,
    numbering_does_not_matter,
    unscored_rows_are_dropped,
    skipped_rows_count,
    state_is_json,
    constant_scores_teach_nothing,
    groups_of_one_are_finite,
)


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the larger of 1 and the largest entry; inf where one is not finite."""
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return math.inf
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def _same(
    check: Callable[[Bench], Check], bench: Bench, a: Batch, b: Batch, what_to_do: str, tolerance: float = SAME
) -> Check:
    return _equal(check, bench.update(b)[0], bench.update(a)[0], what_to_do, tolerance)


def _equal(check: Callable[[Bench], Check], a: Tensor, b: Tensor, what_to_do: str, tolerance: float = SAME) -> Check:
    return _within(check, difference(a, b), what_to_do, tolerance)


def _within(check: Callable[[Bench], Check], worst: float, what_to_do: str, tolerance: float = SAME) -> Check:
    return _check(check, worst <= tolerance, f"largest difference {worst:.1e}", what_to_do)


def _check(check: Callable[[Bench], Check], passed: bool | None, evidence: str, what_to_do: str) -> Check:
    return Check((check.__doc__ or "").strip().rstrip("."), passed, evidence, what_to_do)
