"""Whole runs of supervised fine-tuning on a tiny model: which tokens are trained, what falls, resuming, wrong input."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.test_end_to_end import hotcold, metrics, same, weights
from tests.tiny_model import CHARACTERS, EOS, character_tokenizer, write_tiny

PAIRS = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(3, 6)]
HELD = [("9+0=", "9"), ("0+9=", "9")]
TEMPLATE = (  # user turns end with "?", assistant turns with the EOS token
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% else %}?{% endif %}{% endfor %}"
)
LIKENESS = "def reward(completion, answer):\n    return (len(completion) + (completion[:1] == answer)) / 10\n"


def write_rows(path: str, rows: Sequence[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model without and one with a chat template, demonstrations to train on and others to watch."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "model")
    shutil.copytree("model", "chat")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("chat")
    for name, pairs in (("data", PAIRS), ("held", HELD)):
        write_rows(f"{name}.jsonl", [{"prompt": p, "response": r, "answer": r} for p, r in pairs])
        rows = [[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in pairs]
        write_rows(f"{name}_messages.jsonl", [{"messages": messages} for messages in rows])
    Path("likeness.py").write_text(LIKENESS)
    return tmp_path


def sft(*words: str, run: str = "runs/one", steps: int = 3) -> int:
    given = {word.split("=")[0] for word in words}
    common = ["model=model", "data=data.jsonl", "eval.data=held.jsonl", "prompts_per_step=4", "eval.every=0"]
    common = [word for word in common if word.split("=")[0] not in given]
    return hotcold("train", "sft", *common, f"steps={steps}", f"run={run}", *words)


# ---- what is trained


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def response_and_eos(prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Ids, and the places whose token is trained."""
    before, after = ids(prompt), [*ids(response), EOS]
    return before + after, list(range(len(before), len(before) + len(after)))


def everything(prompt: str, response: str) -> tuple[list[int], list[int]]:
    row, _ = response_and_eos(prompt, response)
    return row, list(range(1, len(row)))  # nothing stands before the first token


def assistant_turn(prompt: str, response: str) -> tuple[list[int], list[int]]:
    return response_and_eos(prompt + "?", response)


def everything_of_messages(prompt: str, response: str) -> tuple[list[int], list[int]]:
    return everything(prompt + "?", response)


Form = Callable[[str, str], tuple[list[int], list[int]]]


def plain_gradient(folder: str, form: Form) -> tuple[float, dict[str, Tensor]]:
    """Mean cross-entropy over the trained tokens of all rows and its gradient: torch and transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [form(*pair) for pair in PAIRS]
    total = torch.zeros(())
    for row, places in rows:
        logits = model(torch.tensor([row])).logits[0]
        for place in places:
            total = total + torch.nn.functional.cross_entropy(logits[place - 1], torch.tensor(row[place]))
    loss = total / sum(len(places) for _, places in rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES: dict[str, tuple[tuple[str, ...], Form]] = {
    "prompt and response": (("model=model", "data=data.jsonl"), response_and_eos),
    "prompt and response, all": (("model=model", "data=data.jsonl", "data.train_on=all"), everything),
    "messages": (("model=chat", "data=data_messages.jsonl", "eval.data=held_messages.jsonl"), assistant_turn),
    "messages, all": (
        ("model=chat", "data=data_messages.jsonl", "eval.data=held_messages.jsonl", "data.train_on=all"),
        everything_of_messages,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plain_step_on_all_rows_is_that_of_the_cross_entropy_of_the_trained_tokens(here: Path, case: str) -> None:
    words, form = CASES[case]
    rate = 1.0  # the gradient is about as large as the parameters
    step = ("optimizer=sgd", f"learning_rate={rate}", f"prompts_per_step={len(PAIRS)}")
    assert sft(*words, *step, steps=1) == 0
    loss, gradient = plain_gradient(words[0].removeprefix("model="), form)
    before, after = weights(words[0].removeprefix("model=")), weights("runs/one/model")
    assert gradient.keys() == before.keys()
    squares = [((before[n] - after[n]) / rate - g).pow(2).sum() for n, g in gradient.items()]
    assert float(sum(squares)) ** 0.5 <= 1e-5 * float(sum(g.pow(2).sum() for g in gradient.values())) ** 0.5
    assert metrics("runs/one")[0]["loss"] == pytest.approx(loss, rel=1e-6)


def test_what_is_trained_differs_between_the_forms(here: Path) -> None:
    """That the comparison above can tell them apart."""
    losses = [plain_gradient(folder, form)[0] for folder, form in (("model", response_and_eos), ("model", everything))]
    assert abs(losses[0] - losses[1]) > 1e-3


# ---- what falls


def test_the_loss_falls_and_without_a_reward_nothing_is_generated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("learning_rate=0.02", "prompts_per_step=12", "eval.every=20", steps=40) == 0
    rows = metrics("runs/one")
    assert rows[0]["loss"] > 2.5 and rows[-1]["loss"] < 0.5
    before = json.loads(Path("runs/one/eval/step_000000.json").read_text())
    after = json.loads(Path("runs/one/eval/step_000040.json").read_text())
    assert before["eval/loss"] > 2.5 and rows[-1]["eval/loss"] == after["eval/loss"]
    assert "eval/greedy" not in after and not after["rows"]
    assert f"held-out loss: {before['eval/loss']:.4f} nats per token before" in capsys.readouterr().out
    model, tokenizer = (cls.from_pretrained("runs/one/model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    answers = []
    for prompt, _ in PAIRS:
        out = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=4)
        answers.append(tokenizer.decode(out[0][len(prompt) :], skip_special_tokens=False))
    right = [answer.split("</s>")[0] == response for answer, (_, response) in zip(answers, PAIRS, strict=True)]
    assert sum(right) >= 10  # it says the response and ends


def test_the_held_out_loss_is_the_mean_over_the_tokens_of_the_held_out_rows(here: Path) -> None:
    assert sft("learning_rate=0.02", steps=2) == 0
    model = AutoModelForCausalLM.from_pretrained("runs/one/model")
    losses = []
    for pair in HELD:
        row, places = response_and_eos(*pair)
        logp = model(torch.tensor([row])).logits[0].log_softmax(-1)
        losses += [-float(logp[place - 1, row[place]]) for place in places]
    assert metrics("runs/one")[-1]["eval/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_with_a_reward_held_out_prompts_are_answered_and_scored(here: Path) -> None:
    assert sft("reward=likeness.py", "max_tokens=3", "learning_rate=0.02", "prompts_per_step=12", steps=15) == 0
    final = json.loads(Path("runs/one/eval/step_000015.json").read_text())
    assert final["eval/prompts"] == len(HELD) and 0 <= final["eval/greedy"] <= 1
    assert metrics("runs/one")[-1]["eval/greedy"] == final["eval/greedy"] and "eval/loss" in final
    model, tokenizer = (cls.from_pretrained("runs/one/model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    said = {}
    for prompt, _ in HELD:
        out = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=3)
        said[prompt] = tokenizer.decode(out[0][len(prompt) :], skip_special_tokens=True)
    recorded = {row["prompt"]: row["greedy"] for row in final["rows"]}
    assert recorded == said
    scores = [(len(said[prompt]) + (said[prompt][:1] == answer)) / 10 for prompt, answer in HELD]
    assert final["eval/greedy"] == pytest.approx(sum(scores) / len(scores)) and sum(scores) > 0


def test_held_out_prompts_without_responses_are_scored_and_have_no_loss(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows("asked.jsonl", [{"prompt": p, "wanted": r} for p, r in HELD])
    Path("wanted.py").write_text(LIKENESS.replace("answer", "wanted"))
    words = ["eval.data=asked.jsonl", "max_tokens=3", "prompts_per_step=12"]
    assert sft(*words, "reward=wanted.py", steps=1) == 0
    final = json.loads(Path("runs/one/eval/step_000001.json").read_text())
    assert final["eval/prompts"] == len(HELD) and "eval/loss" not in final
    assert "note: eval.data holds no demonstrations, so there is no held-out loss" in capsys.readouterr().out
    assert sft(*words[:1], run="runs/two", steps=1) == 2  # without a reward nothing could be done with them
    assert "data.response=COLUMN" in capsys.readouterr().err


def test_a_resumed_run_is_the_run_that_was_never_stopped(here: Path) -> None:
    """D02: three rows a step out of twelve, so that the order of two passes matters."""
    words = ["learning_rate=0.01", "prompts_per_step=3", "beta=0.1"]
    assert sft(*words, run="runs/whole", steps=7) == 0
    assert sft(*words, run="runs/parts", steps=3) == 0
    assert sft(*words, "resume=auto", run="runs/parts", steps=7) == 0
    assert same(weights("runs/whole/model"), weights("runs/parts/model"))
    whole, parts = metrics("runs/whole"), metrics("runs/parts")
    keys = ("step", "loss", "kl", "grad_norm", "learning_rate", "entropy")
    assert [[row[key] for key in keys] for row in whole] == [[row[key] for key in keys] for row in parts]
    write_rows("data.jsonl", [{"prompt": p, "response": r + "0"} for p, r in PAIRS])
    assert sft(*words, "resume=auto", run="runs/parts", steps=8) == 2


# ---- wrong input

WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no response": (["data=prompts.jsonl"], "data.response=COLUMN"),
    "no such column": (["data.response=reply"], "reply"),
    "blank response": (["data=blank.jsonl"], "blank"),
    "messages without a template": (["data=data_messages.jsonl", "eval.data=held_messages.jsonl"], "chat template"),
    "only the user speaks": (["model=chat", "data=asked.jsonl"], "no assistant turn"),
    "group size": (["group_size=4"], "group_size has no effect on sft"),
    "epochs per batch": (["epochs_per_batch=2"], "epochs_per_batch has no effect on sft"),
    "length limit": (["truncated=mask"], "truncated=mask has no effect"),
    "mismatch": (["mismatch=truncate"], "mismatch.mode=truncate has no effect"),
    "a critic": (["critic.init=model"], "critic.init=model has no effect"),
    "an estimator of samples": (["beta=0.1", "kl.estimator=k3"], "kl.estimator=exact"),
    "minibatches": (["minibatches=3"], "does not divide the 4 rows"),
    "too long": (["data=long.jsonl"], "64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_short_message_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    write_rows("prompts.jsonl", [{"prompt": p} for p, _ in PAIRS])
    write_rows("blank.jsonl", [{"prompt": p, "response": " "} for p, _ in PAIRS])
    write_rows("asked.jsonl", [{"messages": [{"role": "user", "content": p}]} for p, _ in PAIRS])
    write_rows("long.jsonl", [{"prompt": p, "response": "7" * 80} for p, _ in PAIRS])
    words, names = WRONG[case]
    assert sft(*words) == 2
    message = capsys.readouterr().err
    assert names in message, message
    assert len(message.strip().splitlines()) <= 5 and "Traceback" not in message
    assert not Path("runs").exists()
