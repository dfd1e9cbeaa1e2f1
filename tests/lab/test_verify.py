"""`hotcold verify`: what is printed and written, exit codes, and the documentation that the command generates."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold import launch
from hotcold.config import help_texts
from hotcold.config.schema import train_config
from hotcold.errors import InputError
from hotcold.lab.catalogue import catalogue
from hotcold.lab.certificate import certify
from hotcold.lab.chapter import Number
from hotcold.lab.on_model import Check
from hotcold.lab.refused import REFUSED, refusal, refusals
from hotcold.verify import command, plain
from hotcold.verify.command import Options, verify
from hotcold.verify.report import Part, Report, cells
from hotcold.verify.table import as_markdown, tables_of, with_tables
from tests.tiny_model import write_tiny

DOC = Path(__file__).parents[2] / "docs" / "verify.md"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*words: str, **options: Any) -> tuple[int, str]:
        lines: list[str] = []
        threads = torch.get_num_threads()
        try:
            code = verify(words, Options(**options), lines.append)
        finally:
            torch.set_num_threads(threads)
        return code, "\n".join(lines)

    return call


def refuse(run: Run, *words: str, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        run(*words, **options)
    assert len(str(error.value).splitlines()) <= 5
    return str(error.value)


# ------------------------------------------------------------------ one algorithm


def test_one_algorithm_on_every_world_with_checks(run: Run) -> None:
    code, text = run("rloo", "group_size=2")
    assert code == 0
    assert "6 rows: 6 unbiased. 0 differ from what is stated. 13 of 13 checks passed." in text
    assert len([line for line in text.splitlines() if line.startswith("  rloo group_size=2 ")]) == 6
    assert "world variable, tool: " in text and "world wide" not in text


def test_keys_reach_the_algorithm(run: Run) -> None:
    _, text = run("grpo", "group_size=4", "scale_by_std=false", "weighting=fixed_length:2")
    assert "grpo group_size=4 scale_by_std=false weighting=fixed_length:2" in text
    assert text.count("unbiased up to 0.375") == 5  # 3/4 and 1/2


def test_a_mismatch_makes_another_engine_sample(run: Run) -> None:
    code, text = run("rloo", "group_size=2", "mismatch=truncate", "mismatch.level=sequence")
    assert code == 0 and "sampled by another engine; mismatch=truncate, sequence, cap 2" in text


def test_json_to_the_terminal_is_nothing_else(run: Run) -> None:
    code, text = run("reinforce", "group_size=2", json="-")
    found = json.loads(text)
    assert code == 0 and found["good"] is True
    assert [row["verdict"] for row in found["rows"]] == ["unbiased up to 0.5"] * 5 + ["unbiased up to 0.75"]
    assert found["rows"][0]["scale"] == pytest.approx(0.5) and found["rows"][0]["agrees"] is True
    assert {check["passed"] for check in found["checks"]} <= {True, None}


def test_a_recipe_gives_its_algorithm_and_the_rest_is_named_and_left(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("algorithm: rloo\nmodel: nowhere\nreward: nothing.py\ngroup_size: 2\nbeta: 0.1\nsteps: 3\n")
    code, text = run(str(recipe), "group_size=3")
    assert code == 0 and "rloo group_size=3 beta=0.1" in text
    assert "only what concerns the algorithm is used; not model, reward, steps." in text


def test_a_users_class_states_what_it_expects(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from hotcold.algorithms.grpo import GRPO\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(GRPO):\n    group_size: int = 2\n"
    )
    code, text = run(f"{file}:Mine")
    assert code == 1 and "stated:   a positive multiple of the target" in text
    assert run(f"{file}:Mine", "expect=elsewhere")[0] == 0
    assert run(f"{file}:Mine", "expect=unbiased", "scale_by_std=false")[0] == 1
    assert "There are: unbiased, multiple, elsewhere" in refuse(run, f"{file}:Mine", "expect=right")


# ------------------------------------------------------------------ wrong input


def test_wrong_words_are_answered(run: Run, tmp_path: Path) -> None:
    assert 'Did you mean "rloo"?' in refuse(run, "rlo")
    assert "Write its name first" in refuse(run, "beta=1")
    assert "After the first word, write KEY=VALUE" in refuse(run, "rloo", "grpo")
    assert "has no effect here" in refuse(run, "rloo", "temperature=0.5")
    assert 'Did you mean "group_size"?' in refuse(run, "rloo", "grop_size=2")
    assert "leave rloo out" in refuse(run, "rloo", everything=True)
    assert "there is no folder" in refuse(run, "rloo", json=str(tmp_path / "none" / "x.json"))
    assert "is a folder" in refuse(run, "rloo", html=str(tmp_path))
    assert "group_size=20 or less" in refuse(run, "rloo", "group_size=64")
    assert "truncate or mask is needed" in refuse(run, "rloo", "mismatch=cut")
    assert "takes effect with mismatch=truncate or mask" in refuse(run, "rloo", "mismatch.cap=2")
    assert "kl.estimator=k1: its expected gradient is 0" in refuse(
        run, "rloo", "beta=1", "kl.placement=loss", "kl.estimator=k1"
    )
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("steps: 3\n")
    assert "names no algorithm" in refuse(run, str(recipe))


# ------------------------------------------------------------------ a small catalogue, from end to end


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of it and one refusal, in this process."""
    one = [refusal(*REFUSED[0])]
    monkeypatch.setattr(command, "refusals", lambda: one)
    sections = catalogue()
    few = [type(s)(s.title, s.about, s.cases[:3]) for s in sections[:1]]
    monkeypatch.setattr(command, "catalogue", lambda: few)
    monkeypatch.setattr(command, "WORKERS", 1)
    monkeypatch.setattr(command.of_catalogue, "__defaults__", (1, lambda _: None))


def test_the_catalogue_with_all_outputs(run: Run, small: None, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"x.{name}") for name in ("json", "html", "markdown")}
    code, text = run(**paths)
    assert code == 0 and "3 rows: 3 unbiased up to a factor. 1 refused. 0 differ from what is stated." in text
    assert json.loads(Path(paths["json"]).read_text())["rows"][2]["where"] == "fixed, steps"
    markdown = Path(paths["markdown"]).read_text()
    assert "| reinforce group_size=2 | variable | unbiased up to 0.5 | 0.500 |" in markdown
    run(**paths)
    assert Path(paths["markdown"]).read_text() == markdown  # the part between the marks is replaced


class Page(HTMLParser):
    """Tags with their attributes, and the rows of the tables."""

    def __init__(self) -> None:
        HTMLParser.__init__(self)
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_from_outside(run: Run, small: None, tmp_path: Path) -> None:
    run(html=str(tmp_path / "x.html"))
    text = (tmp_path / "x.html").read_text()
    page = Page()
    page.feed(text)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert sum(tag == "tr" for tag, _ in page.tags) == 2 + 3 + 1  # two headers, three rows, a refusal


def test_a_row_that_differs_is_shown_and_exits_1(
    run: Run, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Theory with a wrong factor: the measurement and it no longer agree."""
    monkeypatch.setattr("hotcold.lab.predicted._credit", lambda world, reasons: 0.6)
    code, text = run(html=str(tmp_path / "x.html"))
    assert code == 1 and "3 differ from what is stated" in text
    assert "stated:   unbiased up to 0.6\n    measured: unbiased up to 0.5" in text
    assert (tmp_path / "x.html").read_text().count("<tr class=bad>") == 3


def test_everything_is_reported_in_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [*catalogue()[0].cases[:2], type(catalogue()[0].cases[0])("rloo", {"group_size": 1})]
    monkeypatch.setattr(command, "full_product", lambda: iter(few))
    monkeypatch.setattr(command, "WORKERS", 1)
    code, text = run(everything=True)
    assert code == 0 and "2 rows, 1 refused" in text and "2 rows: 2 unbiased up to a factor." in text


# ------------------------------------------------------------------ the chapter, a model, a run


def test_the_chapter(run: Run, tmp_path: Path) -> None:
    code, text = run(chapter=True, json=f"{tmp_path}/chapter.json")
    assert code == 0 and text.endswith(" numbers of the chapter: 0 differ.")
    rows = json.loads((tmp_path / "chapter.json").read_text())["numbers"]
    assert len(rows) > 70 and all(row["passed"] for row in rows)


def test_a_number_that_differs_exits_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "chapter_numbers", lambda: [Number(39, "one", "1/2", 0.5), Number(40, "two", "2", 2.1)])
    code, text = run(chapter=True)
    assert (
        code == 1
        and "1 differ" in text
        and [line.split()[-1] for line in text.splitlines()[1:3]]
        == [
            "agrees",
            "DIFFERS",
        ]
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_tiny(folder / "model")
    rows = [{"prompt": f"{i}+{i + 1}=" + "0" * (i % 3)} for i in range(9)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward(completion):\n    return float(len(set(completion)) % 3)\n")
    keys = {"algorithm": "grpo", "model": f"{folder}/model", "data": f"{folder}/prompts.jsonl", "group_size": 4}
    keys |= {"reward": f"{folder}/reward.py", "max_tokens": 5, "steps": 2, "prompts_per_step": 4, "eval.every": 0}
    (folder / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return folder


def test_a_recipe_on_its_model(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(f"{recipe}/recipe.yaml", "beta=0.1", on_model=True)
    assert code == 0 and "BAD" not in text and "finite differences of the policy's loss" in text
    assert re.search(r"\n(\d+) of \1 checks passed\.$", text)
    wrong = [Check("padding", "columns", 0.5, 1e-5), Check("KL", "", None, skipped="no reference")]
    monkeypatch.setattr(plain, "verify_on_model", lambda config, say: wrong)
    code, text = run(f"{recipe}/recipe.yaml", on_model=True, json="-")
    found = json.loads(text)
    assert code == 1 and found["summary"] == "0 of 1 checks passed, 1 not asked." and not found["good"]


def test_the_folder_of_a_run(run: Run, recipe: Path) -> None:
    launch.train(train_config([f"{recipe}/recipe.yaml", f"run={recipe}/run"]), echo=None)
    code, text = run(f"{recipe}/run", "steps=1", "dims=64", "seed=3")
    assert code == 0 and "leave-one-out would " in text and "gradients of 4 prompts" in text
    assert "projected to 64 numbers" in text
    code, text = run(f"{recipe}/run", "prompts=2", json="-")
    found = json.loads(text)
    assert code == 0 and found["passed"] and [step["num_used"] for step in found["steps"]] == [2, 2]
    message = refuse(run, f"{recipe}/run", "step=1")
    assert 'step is no key of hotcold verify RUN_FOLDER. Did you mean "steps"?' in message
    assert "prompts=1: a whole number is needed, 2 or more; 16 if left out" in refuse(run, f"{recipe}/run", "prompts=1")
    assert "no run folder" in refuse(run, str(recipe))


def test_questions_that_do_not_go_together_are_refused(run: Run, tmp_path: Path) -> None:
    assert "--all and --chapter are two questions" in refuse(run, everything=True, chapter=True)
    assert "--chapter stands alone: leave rloo out" in refuse(run, "rloo", chapter=True)
    assert "--html is for tables" in refuse(run, chapter=True, html=f"{tmp_path}/page.html")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_find_what_one_does() -> None:
    cases = catalogue()[0].cases[:2]
    alone = [certify(case).as_json() for case in cases]
    found = [row.as_json() for row in command.certificates(cases, 2) if not isinstance(row, str)]
    assert found == alone


# ------------------------------------------------------------------ the documentation


def documented_rows() -> dict[str, list[list[str]]]:
    """Heading -> cells of its rows."""
    tables: dict[str, list[list[str]]] = {}
    for block in tables_of(DOC.read_text(encoding="utf-8")).split("### ")[1:]:
        title, *lines = block.splitlines()
        rows = [line for line in lines if line.startswith("| ")][1:]
        tables[title.split(":")[0]] = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in rows]
    return tables


def test_the_documentation_has_a_row_for_each_case_of_the_catalogue() -> None:
    documented = documented_rows()
    for section in catalogue():
        expected = [[case.label, case.where] for case in section.cases]
        assert [row[:2] for row in documented[section.title]] == expected, (
            f"docs/verify.md is stale in {section.title!r}: run `hotcold verify --markdown docs/verify.md`"
        )


@pytest.mark.parametrize("section", range(len(catalogue())), ids=lambda i: catalogue()[i].title)
def test_the_documentation_says_what_is_measured(section: int) -> None:
    """Every ninth row, computed anew; a cosine or a variance that has changed in its last digit is stale too."""
    part = catalogue()[section]
    documented = documented_rows()[part.title]
    for case, row in list(zip(part.cases, documented, strict=True))[section % 3 :: 9]:
        found = [cell.replace("|", "\\|") for cell in cells(certify(case))]
        assert row == found, "docs/verify.md is stale: run `hotcold verify --markdown docs/verify.md`"


def test_the_documentation_has_what_is_refused() -> None:
    part = Report((), tuple(refusals()))
    assert as_markdown(part).split("### Refused")[1].split("\n\n0 rows")[0] in DOC.read_text(encoding="utf-8")


def test_the_summary_of_the_documentation_is_good() -> None:
    summary = tables_of(DOC.read_text(encoding="utf-8")).splitlines()[-1]
    num_cases = sum(len(section.cases) for section in catalogue())
    assert summary.startswith(f"{num_cases} rows: ") and summary.endswith("0 differ from what is stated.")


def test_tables_are_put_at_the_end_once() -> None:
    once = with_tables("# Title\n\ntext\n", "| a |")
    assert once.startswith("# Title\n\ntext\n") and tables_of(once) == "| a |"
    assert with_tables(once, "| b |") == once.replace("| a |", "| b |")


def test_help_names_every_way_to_call_it() -> None:
    for word in (
        "--all",
        "--chapter",
        "--on-model",
        "runs/NAME",
        "--json",
        "--html",
        "--markdown",
        "expect",
        "recipe.yaml",
        "my_file.py:MyAlgorithm",
    ):
        assert word in help_texts.VERIFY
    assert all(len(line) <= 130 for line in help_texts.VERIFY.splitlines())


def test_a_report_without_rows_is_good() -> None:
    assert Report((Part("x", "y", ()),)).is_good
