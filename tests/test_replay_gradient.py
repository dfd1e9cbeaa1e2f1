"""One step through the command line with replayed rows and plain SGD, against a gradient in plain PyTorch.

With optimizer=sgd a step is `after = before - rate * gradient`, so (before - after) / rate is what the program
computed. The expected gradient below uses transformers and torch alone: one row at a time, no padding, no masks built
by us, a baseline worked out in the open.
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hotcold.cli import main

EOS = 2  # also the pad id
RATE = 1.0

# prompt ids, response ids, mask over the response, reward (None: no score), truncated, group
ROWS = [
    ([5, 6, 7], [8, 9, EOS], None, 1.0, False, 0),
    ([5, 6, 7], [10, EOS], None, 0.0, False, 0),
    ([5, 6, 7], [11, 12, 13, 14], [True, False, False, True], 0.25, True, 0),  # a gap: tool output; truncated
    ([5, 6, 7], [9, EOS], None, None, False, 0),  # no score: leaves the statistics
    ([4], [EOS], None, 2.0, False, 1),
    ([4], [15, 16, 17, 18, 19, EOS], None, -1.0, False, 1),
    ([4], [15, EOS, 3], [True, True, False], 0.5, False, 1),
]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": EOS, **{f"t{i}": i for i in range(3, 32)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def make_model(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=EOS,
            bos_token_id=1,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=4, eos_token_id=EOS, bos_token_id=1)
        )
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path) -> Path:
    columns = list(zip(*ROWS, strict=True))
    masks = [m if m is not None else [True] * len(r) for m, r in zip(columns[2], columns[1], strict=True)]
    table = pa.table(
        {
            "step": pa.array([1] * len(ROWS)),
            "group": pa.array(columns[5]),
            "episode": pa.array(range(len(ROWS))),
            "prompt_ids": pa.array(columns[0], pa.list_(pa.int64())),
            "response_ids": pa.array(columns[1], pa.list_(pa.int64())),
            "response_mask": pa.array(masks, pa.list_(pa.bool_())),
            "reward": pa.array(columns[3], pa.float64()),
            "truncated": pa.array(columns[4]),
            "version": pa.array([0] * len(ROWS)),
        }
    )
    pq.write_table(table, path)
    return path


def row_logp(model: torch.nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """log-probabilities of the response tokens of one row, alone and without padding."""
    ids = torch.tensor([prompt + response])
    logp = model(input_ids=ids).logits[0].double().log_softmax(-1)
    return torch.stack([logp[len(prompt) + i - 1, token] for i, token in enumerate(response)])


def trained(row: tuple) -> list[bool]:
    return row[2] or [True] * len(row[1])


# Advantages worked out by hand from the rewards [1, 0, .25, None] and [2, -1, .5].
LOO = {0: 1 - 0.125, 1: 0 - 0.625, 2: 0.25 - 0.5, 4: 2 - (-0.25), 5: -1 - 1.25, 6: 0.5 - 0.5}
MEAN_0, MEAN_1 = 1.25 / 3, 0.5
STD_0 = (((1 - MEAN_0) ** 2 + MEAN_0**2 + (0.25 - MEAN_0) ** 2) / 2) ** 0.5
STD_1 = (((2 - 0.5) ** 2 + (-1 - 0.5) ** 2 + 0) / 2) ** 0.5
CENTRED = {0: 1 - MEAN_0, 1: -MEAN_0, 2: 0.25 - MEAN_0, 4: 1.5, 5: -1.5, 6: 0.0}
SCALED = {i: a / (STD_0 if i < 4 else STD_1) for i, a in CENTRED.items()}
BATCH = {i: ROWS[i][3] - 2.75 / 6 for i in CENTRED}  # the scored rewards sum to 2.75
RAW = {i: ROWS[i][3] for i in CENTRED}
KEPT = {0: 1.0, 4: 1.0}  # threshold 1

NUM_TRAINED = {i: sum(trained(ROWS[i])) for i in CENTRED}  # 3, 2, 2, 1, 6, 2


def sum_per_response(i: int, rows: dict[int, float]) -> float:
    return 1 / len(rows)


def mean_per_response(i: int, rows: dict[int, float]) -> float:
    return 1 / len(rows) / NUM_TRAINED[i]


def mean_per_token(i: int, rows: dict[int, float]) -> float:
    return 1 / sum(NUM_TRAINED[j] for j in rows)


def fixed_length_10(i: int, rows: dict[int, float]) -> float:
    return 1 / len(rows) / 10


CASES: dict[str, tuple[list[str], dict[int, float], Callable[[int, dict[int, float]], float]]] = {
    "reinforce without baseline": (["reinforce", "baseline=none"], RAW, sum_per_response),
    "reinforce with the batch mean": (["reinforce", "baseline=batch_mean"], BATCH, sum_per_response),
    "reinforce with leave-one-out": (["reinforce", "baseline=leave_one_out"], LOO, sum_per_response),
    "rloo": (["rloo"], LOO, sum_per_response),
    "rloo, mean per token": (["rloo", "weighting=mean_per_token"], LOO, mean_per_token),
    "grpo": (["grpo"], SCALED, mean_per_response),
    "grpo without std": (["grpo", "scale_by_std=false", "weighting=fixed_length:10"], CENTRED, fixed_length_10),
    "grpo, mean per token": (["grpo", "weighting=mean_per_token"], SCALED, mean_per_token),
    "expert iteration": (["expert_iteration", "threshold=1"], KEPT, mean_per_token),
}


def expected_gradient(
    folder: Path, advantages: dict[int, float], weight: Callable[[int, dict[int, float]], float]
) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = torch.zeros((), dtype=torch.float64)
    for i, advantage in advantages.items():
        logp = row_logp(model, ROWS[i][0], ROWS[i][1])
        chosen = torch.stack([value for value, mine in zip(logp, trained(ROWS[i]), strict=True) if mine])
        loss = loss - weight(i, advantages) * advantage * chosen.sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_through_the_command_line(tmp_path: Path, folder: Path, words: list[str]) -> dict[str, Tensor]:
    rows = write_rows(tmp_path / "rows.parquet")
    run = tmp_path / "run"
    arguments = [f"model={folder}", f"sampler=replay:{rows}", "optimizer=sgd", f"learning_rate={RATE}"]
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hotcold", "train", *words, *arguments, f"run={run}"])
        main()
    assert stop.value.code in (0, None)
    before, after = load_file(folder / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    return {name: (before[name].double() - after[name].double()) / RATE for name in before}


def relative_distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    difference = sum(float(((got[n] - want[n].double()) ** 2).sum()) for n in want)
    return (difference / sum(float((want[n].double() ** 2).sum()) for n in want)) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_the_plain_gradient(case: str, tmp_path: Path) -> None:
    """Ragged lengths, a gap in the mask, pad = EOS, a truncated row, a row without a score, in every case."""
    words, advantages, weight = CASES[case]
    folder = make_model(tmp_path / "model", "llama")
    got = step_through_the_command_line(tmp_path, folder, words)
    want = expected_gradient(folder, advantages, weight)
    # fp32 parameters of size ~0.02 hold the step to about 1e-9; the gradient is of order 1e-1
    assert relative_distance(got, want) <= 1e-5


def test_a_replayed_step_is_the_plain_gradient_with_learned_positions(tmp_path: Path) -> None:
    """A07: a model with absolute positions sees each row at its own positions."""
    folder = make_model(tmp_path / "model", "gpt2")
    got = step_through_the_command_line(tmp_path, folder, ["rloo"])
    assert relative_distance(got, expected_gradient(folder, LOO, sum_per_response)) <= 1e-5


def test_replay_says_what_has_no_effect_and_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = make_model(tmp_path / "model", "llama"), write_rows(tmp_path / "rows.parquet")

    def run(*words: str) -> int:
        base = ["hotcold", "train", *words, f"model={folder}", f"sampler=replay:{rows}", f"run={tmp_path / words[-1]}"]
        with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", base)
            main()
        return int(stop.value.code or 0)

    assert run("rloo", "prompts_per_step=2", "stop=x") == 0
    assert "prompts_per_step, stop: without effect, since the rows are replayed" in capsys.readouterr().out
    assert run("rloo", "steps=3") == 2
    assert "has 1 steps: use steps=1" in capsys.readouterr().err
    assert run("reinforce", "baseline=greedy") == 2
    assert "no row has a greedy_reward" in capsys.readouterr().err
    assert run("expert_iteration", "threshold=9") == 0
    assert "can train on none of the 7 rows" in capsys.readouterr().out
