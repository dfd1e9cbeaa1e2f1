import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotcold.models.loading import load_model
from hotcold.sampling.base import Request, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.toys import task as toy
from hotcold.toys.model import make_toy_model, make_toy_tokenizer


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = make_toy_tokenizer()
    ids = tokenizer("17+25=42")["input_ids"]
    assert ids == [1, 7, 10, 2, 5, 11, 4, 2]  # digits are their own ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "17+25=42"
    assert tokenizer("1 x")["input_ids"] == [1, tokenizer.unk_token_id, tokenizer.unk_token_id]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 12


def test_the_model_is_small_and_a_function_of_the_seed() -> None:
    model, again, other = make_toy_model(3)[0], make_toy_model(3)[0], make_toy_model(4)[0]
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_making_a_model_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    make_toy_model(1)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("pair", "prompt", "answer", "careless"),
    [((17, 25), "17+25=", "42", "32"), ((12, 34), "12+34=", "46", "46"), ((45, 45), "45+45=", "90", "80")],
)
def test_careless_answers_forget_the_carry(pair: toy.Sum, prompt: str, answer: str, careless: str) -> None:
    assert (toy.prompt_of(pair), toy.answer_of(pair), toy.careless_answer_of(pair)) == (prompt, answer, careless)


def test_the_held_out_sums_are_not_in_training_and_most_need_a_carry() -> None:
    task = toy.make_task(0)
    # a from 10 to 89, b from 10 to 99 - a: 80 * 81 / 2 = 3240 sums
    assert len(set(task.train)) == 3040 and len(set(task.held_out)) == 200
    assert not set(task.train) & set(task.held_out)
    assert sum(map(toy.needs_carry, task.held_out)) == 120
    assert max(map(sum, task.train)) == 99
    assert toy.make_task(0) == task != toy.make_task(1)


def test_supervision_learns_the_examples_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "SUPERVISED_STEPS", 80)
    monkeypatch.setattr(toy, "SUPERVISED_BATCH", 16)
    model, tokenizer = make_toy_model(0)
    pairs = ((12, 34), (21, 13), (55, 44), (33, 16))  # no carry: one answer each
    toy.supervise(model, tokenizer, toy.ToyTask(pairs, ()), seed=0)
    assert not model.training and all(p.grad is None for p in model.parameters())
    sampler = TransformersSampler(model, tokenizer, [tokenizer.eos_token_id], 64, tokenizer.pad_token_id)
    requests = [Request(tuple(tokenizer(toy.prompt_of(p))["input_ids"]), i) for i, p in enumerate(pairs)]
    responses = sampler.sample(requests, SamplingOptions(max_tokens=4, greedy=True))
    assert [(r.text, r.finish_reason) for r in responses] == [
        ("46", "stop"),
        ("34", "stop"),
        ("99", "stop"),
        ("49", "stop"),
    ]


def test_the_written_folder_loads_with_transformers_and_its_files_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "SUPERVISED_STEPS", 2)
    files = toy.write_toy(tmp_path / "toy", seed=0)
    rows = [json.loads(line) for line in files.train.read_text().splitlines()]
    held_out = [json.loads(line) for line in files.held_out.read_text().splitlines()]
    assert (len(rows), len(held_out)) == (3040, 200)
    for row in rows[:50] + held_out:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(a) + int(b))
    model = AutoModelForCausalLM.from_pretrained(files.model)
    assert AutoTokenizer.from_pretrained(files.model)("17+25=")["input_ids"] == [1, 7, 10, 2, 5, 11]
    loaded = load_model(str(files.model))
    assert (loaded.eos_ids, loaded.pad_id, loaded.context_length, loaded.notes) == ((12,), 12, 64, ())
    assert all(torch.equal(a, b) for a, b in zip(loaded.module.parameters(), model.parameters(), strict=True))
