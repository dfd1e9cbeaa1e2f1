"""What `make mutants` changes, and that the list of its equivalent mutants is about mutants that exist."""

from __future__ import annotations

import pytest
from benchmarks import mutants

SOURCE = '''
def mean(x, mask, n):
    """1 + 1: a text is left alone."""
    check_whole("n", n, low=-1)
    if n < 0:
        raise ValueError(f"{n - 1} is too small")
    return torch.where(mask, x.detach()[:, 1:], 0.0).sum(-1) / max(n, 1)


def kept(mask, keep, score, least):
    return not (mask & keep).any() or score >= -least


LIMIT = 2 * 3
'''


def test_every_kind_of_fault_is_made_once_and_texts_and_checks_are_left_alone() -> None:
    total = "torch.where(mask, x.detach()[:, 1:], 0.0).sum(-1)"
    where, part = "torch.where(mask, x.detach()[:, 1:], 0.0)", "x.detach()[:, 1:]"
    expected = {
        ("product", f"{total} / max(n, 1) -> {total} * max(n, 1)"),
        ("denominator", f"{total} / max(n, 1) -> {total} / (max(n, 1) + 1)"),
        ("denominator", f"{total} / max(n, 1) -> {total}"),
        ("index by 1", f"{total} -> {where}.sum(-2)"),
        ("mask", f"{where} -> {part}"),
        ("index by 1", f"{part} -> x.detach()[:, 2:]"),
        ("index by 1", f"{part} -> x.detach()[:, 0:]"),
        ("detach", "x.detach() -> x"),
        ("min/max", "max(n, 1) -> min(n, 1)"),
        ("and/or/not", "not (mask & keep).any() or score >= -least -> not (mask & keep).any() and score >= -least"),
        ("and/or/not", "not (mask & keep).any() -> (mask & keep).any()"),
        ("and/or/not", "(mask & keep).any() -> (mask & keep).all()"),
        ("and/or/not", "mask & keep -> mask | keep"),
        ("comparison", "score >= -least -> score > -least"),
        ("sign", "-least -> least"),
    }
    made = list(mutants.mutants_of("file.py", SOURCE))
    assert {(m.operator, m.mutation) for m in made} == expected and len(made) == len(expected)


def test_a_mutant_differs_in_one_line_and_nothing_else() -> None:
    lines = SOURCE.splitlines()
    for mutant in mutants.mutants_of("file.py", SOURCE):
        changed = [i for i, line in enumerate(mutant.source.splitlines()) if line != lines[i]]
        assert changed == [mutant.line - 1] and lines[mutant.line - 1].strip() == mutant.code


@pytest.mark.parametrize(("rows", "wrong"), [((98, 2, 0), 0), ((97, 3, 0), 1), ((98, 2, 5), 0), ((98, 2, -1), 1)])
def test_the_verdict_counts_what_is_not_equivalent(rows: tuple[int, int, int], wrong: int) -> None:
    """Killed, survivors, equivalent: 98 and 97 of 100; five more that do not count; one that was killed after all."""
    killed, survived, equivalent = rows
    row = {"file": "a", "line": 1, "mutation": "x -> y", "test": "", "equivalent": ""}
    ends = [{**row, "end": "killed", "test": "t"}] * killed + [{**row, "end": "survived"}] * survived
    ends += [{**row, "end": "survived" if equivalent > 0 else "killed", "equivalent": "why"}] * abs(equivalent)
    sentences, counts = mutants.verdict(ends, [], whole=False)
    assert len(sentences) == wrong and counts["killed"] == killed
    assert len(mutants.verdict(ends, [], whole=True)[0]) == wrong + 1  # fewer than 200


def test_what_is_called_equivalent_is_a_mutant_of_today() -> None:
    """A line that was edited has to be judged again."""
    made = [m for name in mutants.files() for m in mutants.mutants_of(name, (mutants.PACKAGE / name).read_text())]
    assert set(mutants.equivalents()) <= {m.key for m in made}
    assert len(made) >= mutants.LEAST_NUMBER
    without_arithmetic = {"algorithms/base.py", "algorithms/rloo.py", "algorithms/sft.py"}
    assert {m.file for m in made} == set(mutants.files()) - without_arithmetic
    drawn = mutants.sample(made, 150)
    assert len(drawn) == 150 and drawn == mutants.sample(made, 150)
    assert {m.operator for m in drawn} == set(mutants.OPERATORS)
