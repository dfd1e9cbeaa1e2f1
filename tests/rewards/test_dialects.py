"""Rewards in the documented forms of TRL, verl, OpenRLHF and verifiers, run unchanged: here, in a worker, in a run."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from hotcold.config.schema import Config
from hotcold.errors import InputError, RewardError
from hotcold.prompts import make_prompts
from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import check_columns_of_rows, load_reward
from hotcold.rewards.scorer import FunctionScorer, load_scorer
from tests.test_end_to_end import here, metrics, train

__all__ = ["here"]  # the fixture

# Each scores 1 where the completion is the gold of its row, in its library's own form.
TRL = """
def reward_func(prompts, completions, completion_ids, answer, trainer_state=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    assert all(isinstance(c, list) == isinstance(p, list) for c, p in zip(completions, prompts))
    assert kwargs["log_metric"]("seen", len(texts)) is None
    return [float(text == gold) if text != "none" else None for text, gold in zip(texts, answer)]
"""
TRL_ASYNC = """
import asyncio

async def reward_func(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [float((c[0]["content"] if isinstance(c, list) else c) == gold) for c, gold in zip(completions, answer)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}
"""
VERL_BATCH = """
def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert set(data_sources) == {"sums"} and all(info["split"] == "train" for info in extra_infos)
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
"""
OPENRLHF = """
import numpy as np

def reward_func(queries, prompts, labels):
    rewards = [float(q == p + l) for q, p, l in zip(queries, prompts, labels, strict=True)]
    return {"rewards": np.array(rewards), "scores": np.zeros(len(rewards)), "extra_logs": {"dummy": rewards}}
"""
OPENRLHF_LIST = OPENRLHF.replace("return {", "return rewards\n    return {")
OPENRLHF_COLUMN = OPENRLHF.replace("return {", "return np.array(rewards)[:, None]\n    return {")
VERIFIERS = """
async def correct_answer(completion, answer, prompt, state, info, parser, task) -> float:
    said = completion[-1]["content"] if isinstance(completion, list) else completion
    assert parser.parse_answer(completion) == said.strip() and state["completion"] == completion
    assert info == {"level": 2} and task == "default" and state["prompt"] == prompt
    return 1.0 if said == answer else 0.0
"""
VERIFIERS_GROUP = """
def best_of_group(completions, answers, states):
    assert len({state["answer"] for state in states}) == 1  # one prompt's responses
    return [float((c if isinstance(c, str) else c[0]["content"]) == a) for c, a in zip(completions, answers)]
"""
RUBRIC = """
class Rubric:  # as verifiers has it
    def __init__(self, funcs, weights, parser=None):
        self.funcs, self.weights, self.parser, self.class_objects = funcs, weights, parser, {"factor": 2.0}

class Parser:
    def parse_answer(self, completion):
        return completion if isinstance(completion, str) else completion[-1]["content"]

async def right(completion, answer, parser, factor):
    return factor * (parser.parse_answer(completion) == answer)

def group(completions, answers, states):
    return [0.5] * len(completions)

def silent(state):
    return None

rubric = Rubric([right, group, silent], [0.25, 1.0, 0.0], Parser())
"""
FORMS = {
    "trl": TRL,
    "trl async": TRL_ASYNC,
    "verl": VERL,
    "verl batch": VERL_BATCH,
    "openrlhf": OPENRLHF,
    "openrlhf list": OPENRLHF_LIST,
    "openrlhf column": OPENRLHF_COLUMN,
    "verifiers": VERIFIERS,
    "verifiers group": VERIFIERS_GROUP,
}
ROW = {"data_source": "sums", "extra_info": {"split": "train"}, "info": '{"level": 2}', "ability": "sums"}


def rows(kind: str) -> list[dict[str, Any]]:
    """Two prompts in verl's columns, with the answers x and y."""
    texts = {"x": "say x", "y": "say y"}
    chat = {gold: [{"role": "user", "content": text}] for gold, text in texts.items()}
    prompts = texts if kind == "text" else chat
    return [{"prompt": prompts[g], "reward_model": {"style": "rule", "ground_truth": g}, **ROW} for g in texts]


def items(kind: str, *completions: str) -> list[Scorable]:
    """C09: as many for the first prompt as for the second."""
    prompts = make_prompts(rows(kind))
    half = len(completions) // 2
    pairs = zip([prompts[0]] * half + [prompts[1]] * half, completions, strict=True)
    return [Scorable(p.content, text, (1,), (2,), p.columns, row=p.index) for p, text in pairs]


def write(folder: Path, text: str, name: str = "theirs.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def in_a_worker() -> Iterator[Any]:
    made = []

    def make(spec: str, **options: Any) -> FunctionScorer:
        made.append(load_scorer([spec], [1.0], Limits(on_error="stop", retries=0), **options))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize("kind", ["text", "messages"])
@pytest.mark.parametrize("form", FORMS)
def test_c08_c09_each_form_runs_unchanged_on_text_and_on_messages(form: str, kind: str, tmp_path: Path) -> None:
    """C08: the completion has the form of the prompt where the library does so. C09: each with its own row."""
    reward = load_reward(write(tmp_path, FORMS[form]))
    assert reward.dialect.name == form.split()[0]
    check_columns_of_rows(reward, make_prompts(rows(kind)))
    scores = FunctionScorer([reward], [1.0]).score(items(kind, "x", "y", "x", "y"))
    assert [score.total for score in scores] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("openrlhf list", "verl batch")])
def test_each_form_gives_the_same_in_a_worker(form: str, tmp_path: Path, in_a_worker: Any) -> None:
    scores = in_a_worker(write(tmp_path, FORMS[form])).score(items("messages", "y", "x", "y", "y"))
    assert [score.total for score in scores] == [0.0, 1.0, 1.0, 1.0]


def test_none_of_trl_stays_no_score(tmp_path: Path) -> None:
    scores = FunctionScorer([load_reward(write(tmp_path, TRL))], [1.0]).score(items("messages", "none", "y"))
    assert [score.total for score in scores] == [None, 1.0]


def test_a_rubric_is_the_weighted_sum_of_its_functions_and_hands_them_its_objects(
    tmp_path: Path, in_a_worker: Any
) -> None:
    """0.25 * 2 for the right answer, 0.5 for each; the function of weight 0 has no score and does not count."""
    file = write(tmp_path, RUBRIC)
    batch = items("messages", "x", "y", "y", "x")
    reward = load_reward(file)
    assert reward.name == "rubric"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that nobody awaited
        assert [s.total for s in FunctionScorer([reward], [1.0]).score(batch)] == [1.0, 0.5, 1.0, 0.5]
    assert [s.total for s in in_a_worker(f"{file}:rubric").score(batch)] == [1.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("form", ["verl", "verl batch", "openrlhf"])
def test_c09_the_truth_is_the_librarys_own_column_also_beside_an_answer(form: str, tmp_path: Path) -> None:
    row = {"prompt": "say x", "reward_model": {"ground_truth": "x"}, "label": "x", "answer": "it is x", **ROW}
    prompt = make_prompts([row])[0]
    batch = [Scorable(prompt.content, text, (), (), prompt.columns, row=0) for text in ("x", "it is x")]
    scores = FunctionScorer([load_reward(write(tmp_path, FORMS[form]))], [1.0]).score(batch)
    assert [score.total for score in scores] == [1.0, 0.0]


PLAIN_FORMS = [
    "def f(completions): return [float(isinstance(c, str)) for c in completions]",
    "def f(prompts, completions, answer): return [float(isinstance(c, str)) for c in completions]",
    "def f(completion, answer): return float(isinstance(completion, str))",
    "def f(completion, **kwargs): return float(isinstance(completion, str))",
    "def f(responses, **kwargs): return [float(isinstance(c, str)) for c in responses]",
    "def f(completions, responses, **kwargs): return [float(isinstance(c, str)) for c in responses]",  # TRL's form
    "def f(completion, response, state): return float(isinstance(response, str))",  # verifiers'
]


@pytest.mark.parametrize("text", PLAIN_FORMS)
def test_a_plain_reward_gets_text_and_text_is_there_in_every_form(text: str, tmp_path: Path) -> None:
    scores = FunctionScorer([load_reward(write(tmp_path, text))], [1.0]).score(items("messages", "x", "y"))
    assert [score.total for score in scores] == [1.0, 1.0]


FORCED = [
    ("plain", "def f(completions, **kwargs): return [float(isinstance(c, str)) for c in completions]"),
    ("trl", "def f(completions, answer): return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]"),
    ("verifiers", "def f(completion, answer): return float(completion[-1]['content'] == answer)"),
    ("verl", "def f(solution_str, extra_info): return float(extra_info['split'] == 'train')"),
    ("openrlhf", "def f(prompts, labels): return [float(p == 'say ' + l) for p, l in zip(prompts, labels)]"),
]


@pytest.mark.parametrize(("dialect", "text"), FORCED)
def test_a_form_that_the_parameters_do_not_show_is_forced(
    dialect: str, text: str, tmp_path: Path, in_a_worker: Any
) -> None:
    file = write(tmp_path, text)
    here = FunctionScorer([load_reward(file, dialect)], [1.0]).score(items("messages", "x", "y"))
    assert [score.total for score in here] == [1.0, 1.0]
    there = in_a_worker(file, dialect=dialect).score(items("messages", "x", "y"))
    assert [score.total for score in there] == [1.0, 1.0]


def test_c08_what_a_form_needs_is_looked_for_before_the_run(tmp_path: Path) -> None:
    without = make_prompts([{"prompt": "say x"}])
    with pytest.raises(InputError, match=r'(?s)needs "data_source", "ground_truth".*Always there: solution_str'):
        check_columns_of_rows(load_reward(write(tmp_path, VERL)), without)
    with pytest.raises(
        InputError, match=r'needs "labels", which is no column of the data \(label or answer would do\)'
    ):
        check_columns_of_rows(load_reward(write(tmp_path, OPENRLHF, "two.py")), without)
    some = make_prompts([{"prompt": "a", "label": "x"}, {"prompt": "b"}])
    with pytest.raises(InputError, match=r'needs "labels", which row 1 of the data lacks'):
        check_columns_of_rows(load_reward(write(tmp_path, OPENRLHF, "two.py")), some)


def test_a_column_that_the_form_of_another_trainer_would_hide_is_told_with_the_way_out(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "def f(completion, state): return state"))
    with pytest.raises(InputError, match=r'(?s)never see the column "state".*, or set reward_dialect=plain'):
        reward.check({"state"})
    load_reward(str(tmp_path / "theirs.py"), "plain").check({"state"})


def test_a_trainer_state_may_be_asked_with_a_default(tmp_path: Path) -> None:
    text = "def f(completions, trainer_state, **kwargs): return [getattr(trainer_state, 'global_step', 3)] * 2"
    scores = FunctionScorer([load_reward(write(tmp_path, text))], [1.0]).score(items("messages", "x", "y"))
    assert [score.total for score in scores] == [3.0, 3.0]


WRONG = {
    "trainer_state": (
        "def f(completions, trainer_state, **kwargs): return [trainer_state.global_step] * len(completions)",
        r"trainer_state\.global_step is not known",
    ),
    "a dict without rewards": (
        "def f(queries, prompts, labels): return {'reward': [1.0, 1.0]}",
        '"rewards" or "scores" is needed',
    ),
    "C01, one score for all": ("def f(queries, prompts, labels): return {'rewards': [1.0]}", "1 scores for 2"),
    "C01, a group": ("def f(completions, states): return [1.0, 1.0]", "2 scores for 1 responses"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_had_or_read_is_an_error(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(RewardError, match=message):
        FunctionScorer([load_reward(write(tmp_path, text))], [1.0]).score(items("messages", "x", "y"))


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_a_run_with_one_reward_of_each_form_on_messages(here: Path) -> None:
    """Each counts the answer's digit in the text; the one of verifiers has weight 0 and is a metric."""
    config = json.loads((here / "model" / "tokenizer_config.json").read_text())
    (here / "model" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    chat = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"ground_truth": str(a + b)},
            "data_source": "sums",
        }
        for a in range(3)
        for b in range(4)
    ]
    (here / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    write(
        here,
        "def f(prompts, completions, answer, **kwargs):\n"
        "    return [float(a in c[0]['content']) for c, a in zip(completions, answer)]\n",
        "of_trl.py",
    )
    write(
        here,
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(ground_truth in solution_str)}\n",
        "of_verl.py",
    )
    write(
        here,
        "def reward_func(queries, prompts, labels):\n"
        "    texts = [q[len(p):] for q, p in zip(queries, prompts)]\n"
        "    return {'rewards': [float(l in t) for t, l in zip(texts, labels)]}\n",
        "of_openrlhf.py",
    )
    write(
        here,
        "async def f(completion, answer, state):\n    return float(answer in completion[-1]['content'])\n",
        "of_verifiers.py",
    )
    files = "reward=[of_trl.py:f,of_verl.py,of_openrlhf.py,of_verifiers.py:f]"
    words = [files, "reward_weights=[1,2,4,0]", "data=chat.jsonl", "eval.every=0", "max_tokens=8"]
    assert train(*words, steps=2) == 0
    num_right = 0
    for row in metrics("runs/one"):
        found = pq.read_table(f"runs/one/rollouts/step_{row['step']:06d}.parquet").to_pylist()
        right = [str(sum(map(int, r["prompt_text"].strip("=").split("+")))) in r["text"] for r in found]
        assert [r["reward"] for r in found] == [7.0 * is_right for is_right in right]
        num_right += sum(right)
        names = ("f", "compute_score", "reward_func", "f_2")
        assert {row[f"rewards/{name}/mean"] for name in names} == {sum(right) / len(right)}
    assert num_right > 0


def test_a_rubric_may_be_given_from_python() -> None:
    def right(completion: Any, answer: str) -> float:
        return float(completion == answer)

    rubric = SimpleNamespace(funcs=[right], weights=[2.0])
    config = Config.from_keys(model="m", data="d.jsonl", reward=rubric, algorithm="rloo")
    assert config.reward == (rubric,)
    scores = load_scorer(config.reward, [1.0], Limits()).score(items("text", "x", "x"))
    assert [score.total for score in scores] == [2.0, 0.0]
