"""`hotcold doctor CONFIG`: what it says of templates and rewards, what it plans, and whole preflights."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.assemble import Assembled, assemble
from hotcold.batch import Rollout
from hotcold.config.schema import Config
from hotcold.doctor import preflight, template
from hotcold.doctor.budget import Budget
from hotcold.doctor.probe import KINDS, Probed, gold_of, judged, probe, responses_to
from hotcold.doctor.report import Finding, Report
from hotcold.doctor.trial import Trial, UpdateTime, plan, sample_and_score, time_update, tokens_of
from hotcold.intake import EncodedPrompts
from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorable, Score
from hotcold.training.collect import PromptedRollouts
from tests.tiny_model import EOS, character_tokenizer, write_tiny

CHATML = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}={% endif %}"
UNENDED = CHATML.replace("</s>", "+")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and 24 sums with their answers, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("model"))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(6)]
    Path("sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


def digits(completion: str) -> float:
    return sum(c in "0123" for c in completion) / 8


def config(**keys: Any) -> Config:
    given = {"algorithm": "rloo", "model": "model", "data": "sums.jsonl", "reward": digits, "group_size": 4}
    return Config.from_keys(**{**given, "max_tokens": 6, "steps": 5, "prompts_per_step": 3, **keys})


def ready(**keys: Any) -> Assembled:
    return assemble(config(**keys))


def lines(report: Report) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in report.findings:
        found.setdefault(finding.about, []).append(finding)
    return found


def examined(seconds: float = 60.0, **keys: Any) -> Report:
    return preflight.examine(config(**keys), lambda text: None, Budget(seconds))


# ---- the whole


def test_a_recipe_that_works_has_no_problem_and_every_part_was_looked_at(here: Path) -> None:
    before = sorted(here.rglob("*"))
    report = examined(reward="exact")
    found = lines(report)
    wanted = {"batch", "prompt, row 0", "EOS", "round trip", "BOS", "disk", "reward", "signal", "length", "memory"}
    assert wanted | {"time", "peak memory"} <= set(found)
    assert "5 steps of 3 prompts x 4 responses = 12 responses of at most 6 tokens" in found["batch"][0].text
    assert found["prompt, row 0"][0].text == '4 tokens: "0+0="'
    assert found["reward"][0].text.startswith("gold 1, empty 0, repeated 0, sampled 0")
    assert sorted(here.rglob("*")) == before, "nothing is written"


def test_a_preflight_changes_no_parameter_and_leaves_no_gradient(here: Path) -> None:
    assembled = ready()
    parameters = list(assembled.model.module.parameters())
    before = [p.detach().clone() for p in parameters]
    list(preflight._found(assembled, lambda text: None, Budget(60.0)))
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(p.grad is None for p in parameters)


def test_a_budget_that_loading_has_spent_is_said_and_nothing_is_sampled(here: Path) -> None:
    found = lines(examined(seconds=0.0))
    assert "nothing was sampled or timed" in found["budget"][0].text and "signal" not in found and "time" not in found


def test_a_budget_of_a_few_seconds_is_kept_with_a_slow_score(here: Path) -> None:
    """0.3 s a score, 96 responses: all of them would take 29 s."""
    Path("slow.py").write_text(
        "import time\n\ndef reward(completion):\n    time.sleep(0.3)\n    return float('1' in completion)\n"
    )
    start = time.perf_counter()
    report = examined(seconds=12.0, reward="slow.py")
    assert time.perf_counter() - start < 12.0
    found = lines(report)
    assert "responses were scored" in found["signal"][0].text
    assert any("scoring would take" in f.text for f in found["time"])


def test_ppo_with_critic_and_reference_and_sft_are_examined_too(here: Path) -> None:
    report = examined(algorithm="ppo", beta=0.1, minibatches=2, epochs_per_batch=2)
    assert "the critic starts as a copy" in lines(report)["models"][0].text
    assert "one update of" in lines(report)["time"][0].text
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "response": "{i + 1}"}}\n' for i in range(8)))
    sft = Config.from_keys(algorithm="sft", model="model", data="rows.jsonl", steps=5, prompts_per_step=4)
    found = lines(preflight.examine(sft, lambda text: None, Budget(60.0)))
    assert found["row 0"][0].text == '4 and 2 tokens: "0+1=", then "1</s>"' and "reward" not in found
    assert "extrapolated from one update of" in found["time"][0].text


def test_a_reward_that_fails_is_a_problem_with_its_cause_and_its_line(here: Path) -> None:
    Path("broken.py").write_text("def reward(completion):\n    return 1 / len(completion)\n")
    report = examined(reward="broken.py")
    texts = [f.text for f in lines(report)["reward"] if f.level == "problem"]
    assert report.exit_code == 1 and len(texts) >= 1
    assert texts[0].startswith("it fails on an empty response") and "broken.py:2" in texts[0]
    assert "one update of" in lines(report)["time"][0].text, "what does not need a score is measured all the same"


def test_a_reward_that_hangs_is_a_problem_and_does_not_hold_the_preflight_up(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TIMEOUT", 0.5)
    Path("hangs.py").write_text("import time\n\ndef reward(completion):\n    time.sleep(600)\n")
    start = time.perf_counter()
    report = examined(reward="hangs.py")
    assert time.perf_counter() - start < 20.0
    assert any(f.level == "problem" and "reward_timeout" in f.text for f in lines(report)["reward"])


def test_a_score_that_never_differs_is_a_problem(here: Path) -> None:
    Path("same.py").write_text("def reward(completion):\n    return 0.5\n")
    found = lines(examined(reward="same.py"))
    assert found["signal"][0].level == "problem" and found["signal"][0].text.startswith("0 of 1")
    assert any("scores as well as gold" in f.text for f in found["reward"])


def test_a_disk_that_is_too_small_is_a_problem(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(free: int) -> Any:
        return lambda place: type("Usage", (), {"free": free})

    assembled = ready()
    for free, level in ((2**20, "problem"), (2**40, "ok")):
        monkeypatch.setattr("shutil.disk_usage", usage(free))
        (finding,) = preflight.disk(assembled)
        assert finding.level == level


# ---- templates


def with_template(assembled: Assembled, text: str | None) -> Assembled:
    assembled.model.tokenizer.chat_template = text
    return assembled


def chat(here: Path, text: str) -> Assembled:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = text
    tokenizer.save_pretrained("model")
    return ready(**{"data.chat": True})


def test_the_token_that_ends_a_turn_must_end_a_response(here: Path) -> None:
    (fine,) = template.end_of_turn(chat(here, CHATML))
    assert fine.level == "ok" and f"</s> ({EOS})" in fine.text
    (bad,) = template.end_of_turn(chat(here, UNENDED))
    assert bad.level == "problem" and "ends an answer with + (10)" in bad.text and 'stop="+"' in bad.text
    assert list(template.end_of_turn(ready())) == [], "text goes through no template"


def test_a_model_without_an_eos_is_a_problem_unless_a_stop_string_ends_responses(here: Path) -> None:
    assembled = ready()
    without = replace(assembled, models=replace(assembled.models, policy=replace(assembled.model, eos_ids=())))
    assert [f.level for f in template.ends(without)] == ["problem"]
    stopped = replace(without, config=assembled.config.model_copy(update={"stop": ("=",)}))
    assert [f.level for f in template.ends(stopped)] == ["note"]
    (fine,) = template.ends(assembled)
    assert fine.level == "ok" and f"</s> ({EOS})" in fine.text


def encoded(assembled: Assembled, prompts: Sequence[tuple[str, tuple[int, ...]]]) -> Assembled:
    rows = [Prompt(i, text, {}) for i, (text, _) in enumerate(prompts)]
    return replace(assembled, train=EncodedPrompts(rows, [ids for _, ids in prompts]))


def test_text_that_the_tokenizer_does_not_know_is_a_problem_and_other_differences_a_note(here: Path) -> None:
    assembled, unknown = ready(), character_tokenizer().unk_token_id
    lost = next(template.round_trip(encoded(assembled, [("1+1=", (1, 10, 1, 11)), ("1!=", (1, unknown, 11))])))
    assert lost.level == "problem" and "1 of 2 prompts" in lost.text and 'row 1: "!=" comes back as "?="' in lost.text
    other = next(template.round_trip(encoded(assembled, [("1+1=", (1, 10, 2, 11))])))
    assert other.level == "note" and '"1=" comes back as "2="' in other.text


def test_two_bos_at_the_start_are_a_problem_and_one_is_none(here: Path) -> None:
    assembled = ready()
    assembled.model.tokenizer.bos_token = "+"
    for ids, level in (((10, 10, 1), "problem"), ((10, 1, 10), "ok"), ((1, 10, 10), "ok")):
        text = template.decoded(assembled.model.tokenizer, ids)
        *_, found = template.round_trip(encoded(assembled, [(text, ids)]))
        assert (found.about, found.level) == ("BOS", level)


def test_long_prompts_are_shown_with_their_start_and_end_in_one_line() -> None:
    assert template.in_one_line("a\nb") == '"a\\nb"'
    long = template.in_one_line("a" * 300 + "b" * 300)
    assert long == f'"{"a" * 200} ... {"b" * 200}"'


# ---- the reward on responses whose worth is known


def test_gold_is_the_first_known_column_that_holds_something() -> None:
    assert gold_of(Prompt(0, "p", {"solution": "x", "target": "y"})) == ("solution", "x")
    assert gold_of(Prompt(0, "p", {"answer": 7})) == ("answer", "7")
    assert gold_of(Prompt(0, "p", {"answer": " ", "target": "y"})) == ("target", "y")
    assert gold_of(Prompt(0, "p", {"answer": None, "other": "y"})) is None
    kinds = responses_to(Prompt(0, "p", {"answer": "forty"}))
    assert (kinds["gold"], kinds["empty"], kinds["truncated"], set(kinds)) == ("forty", "", "fo", set(KINDS))
    assert set(responses_to(Prompt(0, "p", {"answer": "5"}))) == {"gold", "empty", "repeated"}


def said(sampled: Sequence[float], column: str | None = "answer", **scores: float | None) -> list[str]:
    """Levels of what is said beside the scores themselves."""
    return [f.level for f in judged(Probed(scores, column), sampled)][1:]


def test_a_reward_that_pays_for_nothing_is_a_problem() -> None:
    assert said([0.0, 1.0], gold=1.0, empty=0.0, truncated=0.0, repeated=0.0) == []
    assert said([0.0, 1.0], gold=1.0, empty=1.0, truncated=0.0, repeated=0.0) == ["problem"]
    assert said([0.0, 1.0], gold=1.0, empty=0.0, truncated=0.0, repeated=1.0) == ["problem"]
    assert said([0.0, 1.0], gold=1.0, empty=0.99, truncated=0.0, repeated=0.99) == []
    assert said([0.0, 0.0], gold=0.0, empty=0.0, truncated=0.0, repeated=0.0) == ["problem"]
    assert said([], gold=None, empty=0.0) == ["problem"]


def test_gold_in_another_form_than_the_reward_wants_is_a_note_where_sampled_responses_do_better() -> None:
    assert said([0.0, 1.0], gold=0.0, empty=0.0, truncated=0.0, repeated=0.0) == ["note"]


def test_half_of_the_answer_that_scores_as_well_is_a_note() -> None:
    assert said([0.0, 1.0], gold=1.0, empty=0.0, truncated=1.0, repeated=0.0) == ["note"]


def test_without_gold_empty_and_repeated_are_held_against_sampled_responses() -> None:
    assert said([0.2, 0.5], None, empty=0.0, repeated=0.4) == ["note"]
    assert said([0.2, 0.5], None, empty=0.0, repeated=0.5) == ["note", "problem"]
    assert said([0.5, 0.5], None, empty=0.5, repeated=0.5) == ["note"], "nothing differs: the signal tells that"


@dataclass
class Scores:
    """Scores by a function of the text, and how many were asked for at each call."""

    of: Callable[[str], float]
    names: tuple[str, ...] = ("f",)

    def __post_init__(self) -> None:
        self.calls: list[int] = []

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        self.calls.append(len(items))
        return [Score(self.of(item.completion)) for item in items]

    def take_counts(self) -> dict[str, int]:
        return {}


def test_the_reward_is_asked_of_each_kind_with_the_mean_over_rows() -> None:
    """Answers of 2, 4 and 6 characters: gold 4, half 2, and 64 times "the "."""
    prompts = [Prompt(i, "p", {"answer": "a" * n}) for i, n in enumerate((2, 4, 6))]
    train = EncodedPrompts(prompts, [(1,)] * 3)
    found = probe(train, Scores(lambda text: float(len(text))), character_tokenizer(), Budget(60.0))
    assert found.scores == {"gold": 4.0, "empty": 0.0, "truncated": 2.0, "repeated": 256.0}
    assert found.column == "answer" and found.findings == ()


# ---- the trial


def test_the_plan_takes_as_many_groups_and_tokens_as_fit() -> None:
    """Ten seconds, a prompt 0.25 s, a token of a group 0.05 s: 8 groups leave 8 s, 0.4 s a token of all: 20."""
    assert plan(10.0, 0.25, 0.05, 128, 8) == (8, 20)
    assert plan(10.0, 0.25, 0.05, 12, 8) == (8, 12), "not more than max_tokens"
    assert plan(5.0, 0.25, 0.05, 128, 8) == (4, 20), "8 groups would have 7 tokens: too few"
    assert plan(1.0, 0.25, 0.05, 128, 8) == (1, 15), "one group, however short"
    assert plan(10.0, 0.25, 0.05, 128, 3) == (3, 61)
    assert plan(0.2, 0.25, 0.05, 128, 8) == (0, 0)


def rows(*lengths: int) -> list[Rollout]:
    """Two groups, one after the other, prompts of 10 tokens; a response of 9 is cut off."""
    return [
        Rollout((1,) * 10, (2,) * n, group=2 * i // len(lengths), episode=i, truncated=n == 9, reward=1.0)
        for i, n in enumerate(lengths)
    ]


def test_tokens_of_an_update_count_a_shared_prompt_once() -> None:
    assert tokens_of(rows(1, 2, 3, 4), shares=True) == 2 * 10 + 10
    assert tokens_of(rows(1, 2, 3, 4), shares=False) == 4 * 10 + 10


def test_the_time_of_an_update_grows_with_the_tokens_but_for_the_optimiser_steps() -> None:
    """10 s, of which 2 in optimiser steps, for 100 tokens: 500 tokens take 2 + 8 x 5."""
    assert UpdateTime(10.0, 2.0, 8, 100).of(500) == 42.0


def test_a_trial_samples_what_training_would_sample_first(here: Path) -> None:
    assembled = ready()
    source = assembled.source
    assert isinstance(source, PromptedRollouts)
    trial = sample_and_score(assembled, source, Budget(60.0), 0.0)
    first = source.collect(assembled.algorithm, 0, 0, lambda *progress: None).rollouts
    assert trial.cut == 6 and trial.num_scored == len(trial.rollouts) >= len(first) == 12
    for ours, trained in zip(trial.rollouts, first, strict=False):
        assert (ours.response_ids, ours.reward, ours.group) == (trained.response_ids, trained.reward, trained.group)


def test_scores_are_asked_for_a_group_then_two_then_four(here: Path) -> None:
    assembled, scores = ready(), Scores(lambda text: 1.0)
    source = assembled.source
    assert isinstance(source, PromptedRollouts)
    trial = sample_and_score(assembled, replace(source, scorer=scores), Budget(60.0), 0.0)
    assert scores.calls[:3] == [4, 8, 16] and sum(scores.calls) == len(trial.rollouts)
    none = sample_and_score(assembled, replace(source, scorer=scores), Budget(60.0), per_score=1000.0)
    assert none.num_scored == 0 and all(row.reward is None for row in none.rollouts)


def test_an_update_is_not_begun_where_it_would_take_too_long(here: Path) -> None:
    assembled = ready()
    trial = rows(3, 4, 3, 4)
    assert time_update(assembled, trial, Budget(60.0), per_token=10.0) is None
    timed = time_update(assembled, trial, Budget(60.0), per_token=0.0)
    assert timed is not None and timed.num_rows == 4 and 0 < timed.seconds_stepping < timed.seconds


def test_the_signal_counts_prompts_whose_scores_differ_and_says_where_responses_were_cut(here: Path) -> None:
    assembled = ready(max_tokens=20)
    scored = [replace(r, reward=float(i == 2)) for i, r in enumerate(rows(3, 4, 9, 9))]  # group 0: 0, 0; group 1: 1, 0
    found = preflight.signal(assembled, Trial(tuple(scored), cut=9, num_scored=4))
    assert found.level == "ok" and found.text.startswith("1 of 2 prompts have scores that differ (mean 0.25); to fit")
    assert "cut at 9 of 20 tokens, and 2 of 4 were not at their end" in found.text
    same = [replace(r, reward=0.0, group=i // 2) for i, r in enumerate(rows(3, 4, 3, 4, 3, 4, 3, 4))]
    assert preflight.signal(assembled, Trial(tuple(same), cut=20, num_scored=8)).level == "problem"
    few = Trial(tuple(same[:6]), cut=20, num_scored=6)
    assert preflight.signal(assembled, few).level == "note", "three prompts say little"


def test_responses_that_mostly_hit_the_limit_are_a_problem(here: Path) -> None:
    assembled = ready(max_tokens=9)
    for lengths, level in (((9, 9, 3, 3), "problem"), ((9, 3, 3, 3), "ok")):
        (found,) = preflight.lengths(assembled, Trial(tuple(rows(*lengths)), cut=9, num_scored=4))
        assert found.level == level and f"{lengths.count(3)} of 4 sampled responses ended" in found.text
