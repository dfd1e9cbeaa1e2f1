"""`hotcold verify`: from words and keys to what is printed. Certificates are computed by two processes."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.presets import PRESETS
from hotcold.algorithms.rehearsal import rehearse
from hotcold.config.keys import ALGORITHM_KEYS, TRAIN_KEYS, all_names, unknown_keys_error
from hotcold.config.sources import Keys, read_arguments, read_recipe, whole_name
from hotcold.errors import InputError, did_you_mean
from hotcold.lab.case import WORLDS, Case, Situation
from hotcold.lab.catalogue import Section, catalogue, full_product
from hotcold.lab.certificate import Certificate, certify
from hotcold.lab.checks import run_checks
from hotcold.lab.own import Own, certify_all, check_size, stated_by
from hotcold.lab.predicted import predicted
from hotcold.lab.refused import refusals
from hotcold.lab.stated import World
from hotcold.training.mismatch import Mismatch
from hotcold.verify.page import as_html
from hotcold.verify.plain import Plain, of_chapter, of_model, of_run
from hotcold.verify.report import Part, Report
from hotcold.verify.table import as_markdown, as_text, with_tables

Say = Callable[[str], None]
WORKERS = 2
ONE_WORLDS = ("fixed", "variable", "fixed, steps", "variable, steps", "variable, tool")
SITUATION_KEYS = ("truncated", "mismatch.mode", "mismatch.level", "mismatch.cap", "mismatch.low", "mismatch.high")
NO_EFFECT = "has no effect here: responses are not sampled but listed"


@dataclass(frozen=True)
class Options:
    """What is asked for, and where the result goes beside the terminal."""

    everything: bool = False
    chapter: bool = False
    on_model: bool = False
    json: str | None = None  # - is the terminal: nothing else is printed there
    html: str | None = None
    markdown: str | None = None

    @property
    def questions(self) -> list[str]:
        asked = {"--all": self.everything, "--chapter": self.chapter, "--on-model": self.on_model}
        return [flag for flag, is_set in asked.items() if is_set]


def verify(tokens: Sequence[str], options: Options, echo: Say, say: Say = lambda _: None) -> int:
    """0: all is as stated; 1: a row differs or a check fails. `say` takes what is being done."""
    check_options(options)
    if options.on_model:
        return put(lambda: of_model(tokens, say), options, echo)
    words, keys = read_arguments(tokens)
    if len(words) > 1:
        raise InputError(f"{words[1]!r} is not understood. After the first word, write KEY=VALUE, as in group_size=4.")
    if options.questions and (words or keys):
        raise InputError(f"{options.questions[0]} stands alone: leave {[*words, *keys][0]} out.")
    if options.chapter:
        return put(of_chapter, options, echo)
    if not words and keys:
        raise InputError(f"{next(iter(keys))}=... of which algorithm? Write its name first: hotcold verify rloo ...")
    if words and words[0] not in PRESETS and Path(words[0]).is_dir():
        return put(lambda: of_run(words[0], keys, say), options, echo)
    start = time.perf_counter()
    torch.set_num_threads(1)
    if options.everything:
        return _product(options, echo)
    report = _one(words[0], keys, say) if words else of_catalogue(say=say)
    report = replace(report, seconds=time.perf_counter() - start)
    write(report, options, echo, is_long=bool(words))
    return 0 if report.is_good else 1


# ---- the catalogue


def of_catalogue(workers: int = WORKERS, say: Say = lambda _: None) -> Report:
    sections, parts = catalogue(), []
    cases = [case for section in sections for case in section.cases]
    found = iter(certificates(cases, workers))
    for number, section in enumerate(sections, start=1):
        say(f"{section.title} ({number} of {len(sections)}, {len(section.cases)} rows)")
        parts.append(_part(section, list(islice(found, len(section.cases)))))
    return Report(tuple(parts), tuple(refusals()))


def _part(section: Section, found: list[Certificate | str]) -> Part:
    for case, certificate in zip(section.cases, found, strict=True):
        assert isinstance(certificate, Certificate), f"{case.label}: {certificate}"
    return Part(section.title, section.about, tuple(c for c in found if isinstance(c, Certificate)))


def certificates(cases: Iterable[Case], workers: int) -> Iterator[Certificate | str]:
    """In order; a text where the case is refused."""
    if workers <= 1:
        yield from map(certificate_or_reason, cases)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(certificate_or_reason, cases, chunksize=8)


def certificate_or_reason(case: Case) -> Certificate | str:
    try:
        return certify(case)
    except InputError as error:
        return " ".join(str(error).split())


def _product(options: Options, echo: Say) -> int:
    """Everything, in parts, as long as it takes: what differs is shown at once."""
    start, rest, good, found = time.perf_counter(), full_product(), [], 0
    refused = 0
    while part := list(islice(rest, 512)):
        for row in certificates(part, WORKERS):
            if isinstance(row, str):
                refused += 1
                continue
            found += 1
            good.append(row)
            if not row.agrees:
                echo(f"! {row.case.label}; {row.case.where}: {row.verdict}; stated: {row.predicted}")
        echo(f"{found} rows, {refused} refused, {time.perf_counter() - start:.0f} s; now {part[-1].label}")
    notes = (f"{refused} combinations are refused.",)
    report = Report((Part("everything", "the product of all axes", tuple(good)),), notes=notes)
    report = replace(report, seconds=time.perf_counter() - start)
    write(report, options, echo, is_long=False)
    return 0 if report.is_good else 1


# ---- one algorithm


def _one(word: str, keys: Keys, say: Say) -> Report:
    notes: tuple[str, ...] = ()
    if word.endswith((".yaml", ".yml")):
        recipe = read_recipe(word)
        if "algorithm" not in recipe:
            raise InputError(f"{word} names no algorithm: add a line such as `algorithm: grpo`.")
        name = str(recipe.pop("algorithm").value)
        keys, notes = _of_recipe(word, name, {**recipe, **keys})
    else:
        name = word
    if name in PRESETS:
        report = of_preset(name, _options(name, keys), _situation(name, keys), say)
    elif ".py" in name:
        report = of_own(name, keys, say)
    else:
        raise InputError(
            f"{name!r} is no algorithm.{did_you_mean(name, list(PRESETS))}\n"
            f"There are: {', '.join(PRESETS)}; a recipe.yaml; FILE.py:CLASS for your own; or the folder of a run."
        )
    return replace(report, notes=(*notes, *report.notes))


def _of_recipe(path: str, name: str, keys: Keys) -> tuple[Keys, tuple[str, ...]]:
    """The keys that concern the algorithm; the others are a run's."""
    run_keys = {whole_name(key) for key in all_names(TRAIN_KEYS)} - set(ALGORITHM_KEYS) - set(SITUATION_KEYS)
    rest = {key: given for key, given in keys.items() if key not in run_keys}
    left = [key for key in keys if key in run_keys]
    return rest, (f"of {path} only what concerns the algorithm is used; not {', '.join(left)}.",) if left else ()


def _options(name: str, keys: Keys) -> dict[str, Any]:
    options = {key: given.value for key, given in keys.items() if key in ALGORITHM_KEYS}
    unknown = {key: given.where for key, given in keys.items() if key not in {*ALGORITHM_KEYS, *SITUATION_KEYS}}
    known = {whole_name(key) for key in all_names(TRAIN_KEYS)}
    if void := [key for key in unknown if key in known]:
        raise InputError(f"{keys[void[0]].where}{void[0]} {NO_EFFECT}. Leave it out.")
    if unknown:
        raise unknown_keys_error(unknown, [*ALGORITHM_KEYS, *SITUATION_KEYS])
    return options


def _situation(name: str, keys: Keys) -> Situation:
    given = {key: keys[key].value for key in SITUATION_KEYS if key in keys}
    truncated = given.pop("truncated", PRESETS[name].general.get("truncated", "keep") if name in PRESETS else "keep")
    if truncated not in ("keep", "mask", "penalty"):
        raise InputError(f"truncated={truncated!r}: keep, mask or penalty is needed.")
    rule = {key.removeprefix("mismatch."): value for key, value in given.items()}
    groups = 2 if name == "sft" else 1
    if rule.get("mode", "off") == "off":
        if len(rule) > ("mode" in rule):
            raise InputError(
                f"mismatch.{next(k for k in rule if k != 'mode')} takes effect with mismatch=truncate or mask."
            )
        return Situation(groups=groups, truncated=truncated)
    return Situation(groups, "another engine", mismatch=_mismatch(rule), truncated=truncated)


def _mismatch(rule: Mapping[str, Any]) -> Mismatch:
    if rule["mode"] not in ("truncate", "mask"):
        raise InputError(f"mismatch={rule['mode']!r}: off, truncate or mask is needed.")
    if rule.get("level", "token") not in ("token", "sequence", "geometric"):
        raise InputError(f"mismatch.level={rule['level']!r}: token, sequence or geometric is needed.")
    for key in ("cap", "low", "high"):
        if key in rule and (isinstance(rule[key], bool) or not isinstance(rule[key], int | float) or rule[key] < 0):
            raise InputError(f"mismatch.{key}={rule[key]!r}: a number of at least 0 is needed.")
    return Mismatch(**rule)


def of_preset(name: str, options: dict[str, Any], situation: Situation, say: Say = lambda _: None) -> Report:
    """Five worlds, two prompts in a step where that is small enough, and the checks."""
    cases = [Case(name, options, world, situation) for world in ONE_WORLDS]
    algorithm = cases[0].build()
    rehearse(algorithm)
    size = World(cases[0]).group_size
    for case in cases:
        check_size(size, len(case.tiny.responses), situation.groups)
    if size <= 3 and algorithm.plan is not None:
        cases.append(Case(name, options, "fixed", replace(situation, groups=2)))
    if cases[0].has_critic:
        cases += [Case(name, options, "variable, steps", replace(situation, critic=c)) for c in ("zero", "exact")]
    rows = []
    for number, case in enumerate(cases, start=1):
        say(f"world {case.where} ({number} of {len(cases)})")
        rows.append(certify(case))
    say("checks")

    def make(group_size: int) -> Algorithm:
        return Case(name, {**options, "group_size": group_size}, "variable", situation).build()

    compares = predicted(cases[1]).factor is not None or bool(
        options.get("scale_by_std", "scale_by_std" in cases[0].values)
    )
    checks = run_checks(algorithm, None if name == "sft" else make, compares)
    changed = ", ".join(f"{key}={value}" for key, value in options.items())
    about = PRESETS[name].about + (f"; here with {changed}" if changed else "")
    return Report((Part(name, about, tuple(rows)),), checks=tuple(checks))


def of_own(name: str, keys: Keys, say: Say = lambda _: None) -> Report:
    """A user's class: what it expects on every world, and the checks."""
    given = {key: value for key, value in keys.items() if key != "expect"}
    if void := [key for key in given if key in SITUATION_KEYS]:
        raise InputError(f"{void[0]} {NO_EFFECT} by an algorithm of your own. Leave it out.")
    options = {key: value.value for key, value in given.items()}

    def make(group_size: int | None = None) -> Algorithm:
        sized = options if group_size is None else {**options, "group_size": group_size}
        algorithm = build_algorithm(name, sized, WORLDS["variable"].max_tokens)
        check_algorithm(algorithm, None)
        return algorithm

    algorithm = make()
    rehearse(algorithm)
    expects = stated_by(algorithm, keys["expect"].value if "expect" in keys else None)
    own = Own(name, algorithm, options, expects)
    say("every response of five worlds")
    rows = certify_all(own)
    say("checks")
    sized = make if _has_size(algorithm) else None
    checks = run_checks(algorithm, sized, compares=expects != "elsewhere")
    about = {"unbiased": "its author states: unbiased", "multiple": "it should be a positive multiple of the target"}
    return Report(
        (Part(name, about.get(expects, "nothing is stated of its direction"), tuple(rows)),), checks=tuple(checks)
    )


def _has_size(algorithm: Algorithm) -> bool:
    return hasattr(algorithm, "group_size")


# ---- writing


def check_options(options: Options) -> None:
    """Before anything is computed: one question, and the folders of its answers are there."""
    if len(options.questions) > 1:
        raise InputError(f"{' and '.join(options.questions)} are two questions: ask one.")
    for flag, path in (("json", options.json), ("html", options.html), ("markdown", options.markdown)):
        if path is None or (path == "-" and flag == "json"):
            continue
        if not Path(path).resolve().parent.is_dir():
            raise InputError(f"--{flag} {path}: there is no folder {Path(path).resolve().parent}.")
        if Path(path).is_dir():
            raise InputError(f"--{flag} {path} is a folder: name a file.")


def write(report: Report, options: Options, echo: Say, is_long: bool) -> None:
    if options.html is not None:
        Path(options.html).write_text(as_html(report), encoding="utf-8")
    if options.markdown is not None:
        file = Path(options.markdown)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(with_tables(before, as_markdown(report)), encoding="utf-8")
    _print(as_text(report, is_long), report.as_json(), options, echo)


def put(find: Callable[[], Plain], options: Options, echo: Say) -> int:
    for flag, path in (("html", options.html), ("markdown", options.markdown)):
        if path is not None:
            raise InputError(f"--{flag} is for tables of expected gradients; here is none. Leave it out; --json works.")
    found = find()
    _print(found.text, found.as_json, options, echo)
    return 0 if found.is_good else 1


def _print(text: str, rows: dict[str, Any], options: Options, echo: Say) -> None:
    as_json = json.dumps(rows, indent=2, ensure_ascii=False)
    if options.json not in (None, "-"):
        Path(str(options.json)).write_text(as_json + "\n", encoding="utf-8")
    echo(as_json if options.json == "-" else text)
