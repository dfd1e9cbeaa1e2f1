"""`hotcold doctor CONFIG`: will this recipe work? Looked at on the user's own model, data and reward, in a minute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from hotcold.assemble import UNMEASURED, Assembled, algorithm_name, assemble
from hotcold.attempt import arithmetic, what_models
from hotcold.batch import Rollout
from hotcold.config.schema import Config, decided
from hotcold.disk import needed
from hotcold.doctor.budget import Budget
from hotcold.doctor.probe import judged, probe
from hotcold.doctor.report import Finding, Report, note, ok, problem
from hotcold.doctor.template import end_of_turn, ends, prompts_as_seen, round_trip
from hotcold.doctor.trial import (
    Trial,
    UpdateTime,
    sample_and_score,
    shares_prompts,
    time_update,
)
from hotcold.errors import InputError
from hotcold.intake import EncodedPrompts
from hotcold.launch import run_path
from hotcold.memory import GB, held_bytes, record_bytes
from hotcold.sizing import LONGEST, longest_row, sized
from hotcold.training.collect import PromptedRollouts, ReplayedRollouts
from hotcold.training.console import duration
from hotcold.training.dataset import EncodedDemonstrations

Say = Callable[[str], None]
LEAST = 2.0  # seconds that must be left for a part to be begun
MEMORY_SHARE = 0.6  # of what is left of the budget
TIMEOUT = 10.0  # seconds that a score may take here
FEW_GROUPS = 4  # below which no signal is no problem yet
ROWS_OF_UPDATE = 8  # prompts whose rows an update is timed on


def examine(config: Config, say: Say, budget: Budget) -> Report:
    """Writes nothing and changes no parameter. What no time is left for is said."""
    say("loading model and data")
    ready = assemble(_impatient(config))
    if ready.scorer is not None:
        ready.scorer.listen(say, lambda text: None)
    try:
        return _report(ready.config, list(_found(ready, say, budget)), budget)
    finally:
        if ready.scorer is not None:
            ready.scorer.close()


def _impatient(config: Config) -> Config:
    """A failing score is told at once, and nobody waits for it long."""
    why = "a preflight"
    timeout = min(config.reward_timeout, TIMEOUT)
    return decided(
        config, {"reward_on_error": ("stop", why), "reward_retries": (0, why), "reward_timeout": (timeout, why)}
    )


def _found(ready: Assembled, say: Say, budget: Budget) -> Iterator[Finding]:
    yield from (note("set-up", text) for text in ready.notes)
    for check in (batch, prompts_as_seen, ends, end_of_turn, round_trip, disk):
        yield from check(ready)
    if budget.left < LEAST:
        text = f"loading took {budget.spent:.0f} s of {budget.seconds:.0f}: nothing was sampled or timed"
        yield note("budget", text)
        return
    trial = Trial()
    if isinstance(ready.source, PromptedRollouts):
        say(f"scoring and sampling ({budget.left:.0f} s are left)")
        trial, findings = sampled(ready, ready.source, budget)
        yield from findings
    say(f"measuring memory ({budget.left:.0f} s are left)")
    ready, findings = memory(ready, trial, budget)
    yield from findings
    say(f"timing an update ({budget.left:.0f} s are left)")
    yield from times(ready, trial, _rows(ready, trial), budget)
    yield from peak(ready)


def _report(config: Config, findings: Sequence[Finding], budget: Budget) -> Report:
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "note")}
    words = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    subject = f"{algorithm_name(config)} on {config.model}: {words} ({budget.spent:.0f} s)"
    details = (("seconds", budget.spent), ("budget", budget.seconds))
    return Report(subject, tuple(findings), details=details)


# ---- known without the model's arithmetic


def batch(ready: Assembled) -> Iterator[Finding]:
    yield ok("batch", arithmetic(ready))
    if models := what_models(ready):
        yield ok("models", models)


def disk(ready: Assembled) -> Iterator[Finding]:
    folder, _ = run_path(ready.config)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    want, free = needed(ready), shutil.disk_usage(place).free
    text = (
        f"{want.total / GB:.3g} GB for {want.num_checkpoints} checkpoints of {want.checkpoint / GB:.3g} GB and the "
        f"final model, {free / GB:.3g} GB free in {place}"
    )
    if want.total > free:
        yield problem("disk", f"{text}: make room, set run=FOLDER on another disk, or fewer keep_checkpoints")
    else:
        yield ok("disk", text)


# ---- sampled and scored


def sampled(ready: Assembled, source: PromptedRollouts, budget: Budget) -> tuple[Trial, list[Finding]]:
    assert isinstance(ready.train, EncodedPrompts)
    probed = probe(ready.train, source.scorer, ready.model.tokenizer, budget)
    try:
        trial = sample_and_score(ready, source, budget, probed.per_score)
    except InputError as error:
        return Trial(), [*judged(probed, []), problem("sampling", " ".join(str(error).split()))]
    findings = list(judged(probed, [row.score for row in trial.rollouts]))
    if trial.failure:
        findings.append(problem("reward", f"it fails on a sampled response: {trial.failure}"))
    elif trial.rollouts:
        findings.append(signal(ready, trial))
    if trial.rollouts:
        return trial, [*findings, *lengths(ready, trial)]
    return trial, [*findings, note("signal", "no time was left to sample: a prompt takes too long on this machine")]


def signal(ready: Assembled, trial: Trial) -> Finding:
    """Prompts whose responses score differently: only they teach an algorithm that compares within groups."""
    groups = [[score for row in group if (score := row.score) is not None] for group in trial.groups()]
    groups = [scores for scores in groups if len(scores) > 1]
    cut = _cut(ready, trial) + _unscored(trial)
    if not groups:
        plan = ready.algorithm.plan
        size = plan.group_size if plan else 1
        return note("signal", f"nothing could be compared within a prompt's responses (group_size={size}){cut}")
    num = sum(max(scores) != min(scores) for scores in groups)
    mean = fmean(score for scores in groups for score in scores)
    text = f"{num} of {len(groups)} prompts have scores that differ (mean {mean:.3g}){cut}"
    if num:
        return ok("signal", text)
    remedy = "a larger group_size, easier prompts, or a score with partial credit"
    is_sure = len(groups) >= FEW_GROUPS and not cut
    return (problem if is_sure else note)("signal", f"{text}: nothing could be learnt from them. Try {remedy}.")


def _cut(ready: Assembled, trial: Trial) -> str:
    assert ready.config.max_tokens is not None
    if trial.cut >= ready.config.max_tokens or not trial.num_cut:
        return ""
    return (
        f"; to fit the budget responses were cut at {trial.cut} of {ready.config.max_tokens} tokens, and "
        f"{trial.num_cut} of {len(trial.rollouts)} were not at their end"
    )


def _unscored(trial: Trial) -> str:
    num = len(trial.rollouts)
    return f"; to fit the budget {trial.num_scored} of {num} responses were scored" if trial.num_scored < num else ""


def lengths(ready: Assembled, trial: Trial) -> Iterator[Finding]:
    num, ended = len(trial.rollouts), len(trial.rollouts) - trial.num_cut
    text = f"{ended} of {num} sampled responses ended by themselves (mean {trial.num_tokens / num:.0f} tokens)"
    if cut := _cut(ready, trial):
        yield (ok if ended else note)("length", text + cut)
    elif ended <= num / 2:
        yield problem(
            "length",
            f"{text}, the others at max_tokens={ready.config.max_tokens}: their score is that of a cut response. "
            "Raise max_tokens, or see whether prompt and template tell the model to stop.",
        )
    else:
        yield ok("length", text)


# ---- measured


def memory(ready: Assembled, trial: Trial, budget: Budget) -> tuple[Assembled, list[Finding]]:
    """`sizing`'s model of the peak, if its few forward and backward passes fit into the budget."""
    shape = longest_row(ready)
    near = shape.scaled(LONGEST)
    takes = 3 * trial.per_token * (5 * near.counted + 2 * near.prompt) * len(ready.algorithm.objectives)
    if takes > MEMORY_SHARE * budget.left or budget.left < LEAST:
        text = "no time was left to measure it; `hotcold train ... --dry-run` does, and so does every run at its start"
        return ready, [note("memory", text)]
    config, given = ready.config, ready.config.reasons.get("tokens_per_microbatch") != UNMEASURED
    asked = decided(config, {"tokens_per_microbatch": (config.tokens_per_microbatch, UNMEASURED)}) if given else config
    try:
        found = sized(replace(ready, config=asked))
    except InputError as error:
        return ready, [problem("memory", " ".join(str(error).split()))]
    tokens, why = found.config.tokens_per_microbatch, found.config.reasons["tokens_per_microbatch"]
    assert tokens is not None and config.tokens_per_microbatch is not None
    text = f"micro-batches of {tokens} tokens; beside the models an update takes, {why}"
    if given and tokens < config.tokens_per_microbatch:
        wanted = f"tokens_per_microbatch={config.tokens_per_microbatch} may not fit"
        return ready, [problem("memory", f"{wanted}: {why}. Leave it out, or set {tokens}.")]
    return ready if given else found, [ok("memory", text)]


def _rows(ready: Assembled, trial: Trial) -> list[Rollout]:
    """On which an update is timed."""
    if isinstance(ready.source, ReplayedRollouts):
        return ready.source.recorded(1)
    if isinstance(ready.train, EncodedDemonstrations):
        return list(ready.train.rows[:ROWS_OF_UPDATE])
    return list(trial.rollouts)


def times(ready: Assembled, trial: Trial, rows: Sequence[Rollout], budget: Budget) -> Iterator[Finding]:
    """Seconds of a step, in proportion to what was measured."""
    try:
        timed = time_update(ready, rows, budget, trial.per_token)
    except InputError as error:
        yield problem("update", " ".join(str(error).split()))
        return
    if timed is None:
        yield note("time", "no time was left for an update, so a step is not foretold; `hotcold bench` measures steps")
        return
    parts, length = seconds_of_a_step(ready, trial, rows, timed)
    yield ok("time", foretold(ready, trial, timed, parts, length))
    share = parts.get("scoring", 0.0) / sum(parts.values())
    if share > 0.5:
        text = f"scoring would take {share:.0%} of a step: make the reward async, score all responses in one call"
        yield note("time", f"{text}, or set reward_workers=N")


def seconds_of_a_step(
    ready: Assembled, trial: Trial, rows: Sequence[Rollout], timed: UpdateTime
) -> tuple[dict[str, float], float]:
    """By part, in proportion to the tokens; and the length of a response that this supposes."""
    config, plan = ready.config, ready.algorithm.plan
    size = plan.group_size if plan and trial.rollouts else 1
    assert config.max_tokens is not None
    is_cut = bool(trial.num_cut) and trial.cut < config.max_tokens
    length = config.max_tokens if is_cut else fmean(len(row.response_ids) for row in rows)
    num = len(rows) if isinstance(ready.source, ReplayedRollouts) else config.prompts_per_step * size
    prompt = fmean(len(row.prompt_ids) for row in rows)
    prompts = config.prompts_per_step if shares_prompts(ready) and trial.rollouts else num
    update = timed.of(prompts * prompt + num * length)
    parts = {"update": update}
    if trial.rollouts:
        sampling = trial.seconds_sampling / trial.num_tokens * num * length
        parts = {"sampling": sampling, "scoring": trial.seconds_scoring / max(trial.num_scored, 1) * num, **parts}
    return parts, length


def foretold(ready: Assembled, trial: Trial, timed: UpdateTime, parts: Mapping[str, float], length: float) -> str:
    config, step = ready.config, sum(parts.values())
    shown = ", ".join(f"{name} {brief(seconds)}" for name, seconds in parts.items())
    basis = f"{len(trial.rollouts)} responses sampled, {trial.num_scored} scored and " if trial.rollouts else ""
    return (
        f"about {brief(step)} a step, if responses have {length:.0f} tokens ({shown}), {brief(step * config.steps)} "
        f"for {config.steps} steps; extrapolated from {basis}one update of {timed.num_rows} rows, in proportion to "
        "the tokens; evaluations apart"
    )


def brief(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def peak(ready: Assembled) -> Iterator[Finding]:
    device = ready.config.device
    on_gpu = torch.device(device).type == "cuda"
    held = held_bytes(device)
    most = torch.cuda.max_memory_allocated(device) if on_gpu else record_bytes()
    if held is not None and most is not None:
        yield ok("peak memory", f"{most / GB:.2f} GB so far, in this trial; {held / GB:.2f} GB are held now")
