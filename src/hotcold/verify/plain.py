"""`hotcold verify` where the result is no table of expected gradients: the chapter, a model, the folder of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.config.schema import train_config
from hotcold.config.sources import Keys
from hotcold.errors import InputError, did_you_mean
from hotcold.lab.chapter import chapter_numbers
from hotcold.verify.models import verify_on_model, verify_run

Say = Callable[[str], None]
RUN_KEYS = {"steps": 2, "prompts": 16, "dims": 1024, "seed": 0}  # of verify_run, with their least values below
LEAST = {"steps": 1, "prompts": 2, "dims": 16, "seed": 0}


@dataclass(frozen=True)
class Plain:
    """What is printed, the same as JSON, and whether all is as it should be."""

    text: str
    as_json: dict[str, Any]
    is_good: bool


def of_chapter() -> Plain:
    numbers = chapter_numbers()
    wrong = sum(not number.passed for number in numbers)
    summary = f"{len(numbers)} numbers of the chapter: {wrong} differ."
    heading = f"{'':>2}  {'number of docs/chapter.md, and what':<68} {'chapter':>9}  {'ours':>10}"
    text = "\n".join([heading, *(number.text for number in numbers), summary])
    rows = [number.as_dict() for number in numbers]
    return Plain(text, {"good": not wrong, "summary": summary, "numbers": rows}, not wrong)


def of_model(tokens: Sequence[str], say: Say) -> Plain:
    """`tokens` are those of `hotcold train`."""
    config = train_config(tokens)
    for warning in config.warnings:
        say(f"warning: {warning}")
    checks = verify_on_model(config, say)
    measured = [check for check in checks if not check.skipped]
    passed = sum(check.passed for check in measured)
    skipped = len(checks) - len(measured)
    summary = f"{passed} of {len(measured)} checks passed" + (f", {skipped} not asked." if skipped else ".")
    good = all(check.passed for check in checks)
    heading = f"{config.algorithm} on {config.model}: the largest difference found by each check"
    lines = [heading, *(f"  {check.text}" for check in checks), summary]
    rows = [check.as_dict() for check in checks]
    return Plain("\n".join(lines), {"good": good, "summary": summary, "checks": rows}, good)


def of_run(folder: str, keys: Keys, say: Say) -> Plain:
    numbers = dict(RUN_KEYS)
    for key, given in keys.items():
        if key not in RUN_KEYS:
            raise InputError(
                f"{given.where}{key} is no key of hotcold verify RUN_FOLDER.{did_you_mean(key, list(RUN_KEYS))} "
                f"There are: {', '.join(RUN_KEYS)}."
            )
        if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < LEAST[key]:
            raise InputError(
                f"{given.where}{key}={given.value}: a whole number is needed, {LEAST[key]} or more; "
                f"{RUN_KEYS[key]} if left out."
            )
        numbers[key] = given.value
    report = verify_run(folder, **numbers, progress=say)
    return Plain(report.text, report.as_dict(), report.passed)
