"""One step through the command line with replayed rows and plain SGD, against a gradient in plain PyTorch.

With optimizer=sgd a step is `after = before - rate * gradient`, so (before - after) / rate is what the program
computed. What it must be is worked out in plain_gradient.py: transformers and torch alone, one row at a time, no
padding, no masks built by us, every baseline and return in the open.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hotcold.cli import main
from tests.plain_gradient import (
    BETA,
    CASES,
    PPO,
    Case,
    Known,
    Loss,
    Row,
    Update,
    change_of,
    change_of_critic,
    charged_for_length,
    clipped,
    dual_clipped,
    fixed_length,
    gae,
    imitation,
    importance_weighted,
    in_group,
    leave_one_out,
    mean_per_response,
    mean_per_token,
    minus,
    minus_entropy,
    minus_then_whitened,
    none,
    plain_update,
    plus_exact_kl,
    plus_k2,
    plus_k3,
    policy_gradient,
    relative_distance,
    save_plain_critic,
    sequence_clipped,
    sum_per_response,
    truncated_weight,
    whole,
    with_k1,
    with_later_kl,
    write_rows,
)

EOS = 2  # also the pad id
RATE, CRITIC_RATE = 1.0, 0.25
TOLERANCE = 1e-5  # relative L2; about 5e-7 is found
VALUE_CLIP = 0.2

# The groups lie interleaved: a group is what the column says, not a run of rows.
ROWS = (
    Row((5, 6, 7), (8, 9, EOS), 1.0, group=0, greedy=0.25),
    Row((4,), (EOS,), 2.0, group=1, greedy=-0.5),
    Row((20, 21), (22, EOS), 0.75, group=2),  # a group without variance, and without a greedy response
    Row((5, 6, 7), (10, EOS), 0.0, group=0, greedy=0.25),
    # a gap (tool output), a reward that arrived in it, cut at the length limit
    Row((5, 6, 7), (11, 12, 13, 14), 0.25, 0, (True, False, False, True), ((2, 0.5),), truncated=True, greedy=0.25),
    Row((4,), (15, 16, 17, 18, 19, 20), -1.0, group=1, truncated=True, greedy=-0.5),
    Row((20, 21), (23, EOS, 24, EOS), 0.75, group=2),
    Row((4,), (15, EOS, 3), 0.5, 1, (True, True, False), greedy=-0.5),
    Row((5, 6, 7), (9, EOS), None, group=0, greedy=0.25),  # no score: leaves the statistics
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": EOS, **{f"t{i}": i for i in range(3, 32)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def make_model(folder: Path, family: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            eos_token_id=EOS,
            bos_token_id=1,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=4, initializer_range=0.1,
                eos_token_id=EOS, bos_token_id=1,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Workshop:
    """A folder with a model, a reference and a critic that are other models, and the rows."""

    def __init__(self, folder: Path, family: str, rows: Sequence[Row] = ROWS, logp_sampler: object = None):
        self.folder, self.rows = folder, rows
        self.model = make_model(folder / "model", family)
        self.reference = make_model(folder / "reference", family, seed=1)
        self.critic = save_plain_critic(make_model(folder / "other", family, seed=2), folder / "critic", seed=3)
        self.file = write_rows(folder / "rows.parquet", rows, logp_sampler)

    def program(self, case: Case, rate: float = RATE, critic_rate: float = CRITIC_RATE) -> Update:
        run = self.folder / "run"
        words = [*case.words.split(), f"model={self.model}", f"sampler=replay:{self.file}"]
        words += ["optimizer=sgd", f"learning_rate={rate}", f"temperature={case.temperature}"]
        words += [f"reference={self.reference}"] * case.needs_reference
        words += [f"critic.init={self.critic}", f"critic.learning_rate={critic_rate}"] * case.needs_critic
        assert command("train", *words, f"run={run}") == 0
        critic = change_of_critic(self.critic, run / "critic", critic_rate) if case.needs_critic else {}
        return Update(change_of(self.model, run / "model", rate), critic)

    def plain(self, case: Case, rate: float = RATE, critic_rate: float = CRITIC_RATE, correction=None) -> Update:
        where = (self.model, self.reference, self.critic)
        return plain_update(case, self.rows, *where, rate, critic_rate, correction)


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hotcold", *words])
        main()
    return int(stop.value.code or 0)


def check(got: Update, want: Update) -> None:
    """fp32 parameters of size 0.1 hold a step to about 1e-8; the gradient is of order 1e-1."""
    assert relative_distance(got.policy, want.policy) <= TOLERANCE
    assert bool(got.critic) == bool(want.critic)
    if want.critic:
        assert relative_distance(got.critic, want.critic) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_the_plain_gradient(name: str, tmp_path: Path) -> None:
    """A01, A08, A11, A16: ragged lengths, gaps, pad = EOS, mixed groups, truncated rows, a row without a score."""
    shop = Workshop(tmp_path, "llama")
    check(shop.program(CASES[name]), shop.plain(CASES[name]))


@pytest.mark.parametrize("name", ["rloo", "rloo + k1", "grpo + k3", "gspo", "ppo, lam 0.95 + k1", "sft"])
def test_a_replayed_step_is_the_plain_gradient_with_learned_positions(name: str, tmp_path: Path) -> None:
    """A07: a model with absolute positions sees each row at its own positions."""
    shop = Workshop(tmp_path, "gpt2")
    check(shop.program(CASES[name]), shop.plain(CASES[name]))


OTHER = {
    "rloo, mean per token": Case("rloo weighting=mean_per_token", minus(leave_one_out), mean_per_token),
    "rloo, discounted": Case("rloo gamma=0.5", minus(leave_one_out, gamma=0.5), sum_per_response),
    "rloo + k1, cooler (A23)": Case(
        f"rloo beta={BETA}", minus(leave_one_out, with_k1(BETA)), sum_per_response, temperature=0.7
    ),
    "rloo + k2": Case(
        f"rloo beta={BETA} kl.estimator=k2", minus(leave_one_out), sum_per_response, plus_k2(policy_gradient, BETA)
    ),
    "rloo + exact KL": Case(
        f"rloo beta={BETA} kl.estimator=exact",
        minus(leave_one_out, with_later_kl(BETA)),
        sum_per_response,
        plus_exact_kl(policy_gradient, BETA),
    ),
    "grpo, mean per token": Case("grpo weighting=mean_per_token", in_group(), mean_per_token, PPO),
    "grpo without std": Case(
        "grpo scale_by_std=false weighting=fixed_length:10", in_group(by_std=False), fixed_length(10), PPO
    ),
    "grpo + entropy": Case(
        "grpo entropy_bonus=0.25", in_group(), mean_per_response, minus_entropy(PPO, 0.25), temperature=1.5
    ),
    "grpo, truncated left out": Case("grpo truncated=mask", in_group(), mean_per_response, PPO, whole),
    "grpo, long charged": Case(
        "grpo truncated=penalty max_tokens=6 overlong.buffer=3",
        in_group(charged_for_length(6, 3)),
        mean_per_response,
        PPO,
    ),
    "reinforce_pp": Case("reinforce_pp", minus_then_whitened(none), mean_per_token, PPO),
    "expert iteration + exact KL": Case(
        f"expert_iteration threshold=-9 beta={BETA}",
        imitation,
        mean_per_token,
        plus_exact_kl(policy_gradient, BETA),
    ),
    "ppo, the critic's own lam": Case("ppo lam=0.9 critic.lam=0.5", gae(0.9, critic_lam=0.5), mean_per_token, PPO),
    "ppo, discounted, not whitened": Case(
        "ppo lam=0.8 gamma=0.9 whiten=false", gae(0.8, gamma=0.9, whiten=False), mean_per_token, PPO
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_key_that_changes_the_gradient_changes_it_to_the_plain_one(name: str, tmp_path: Path) -> None:
    shop = Workshop(tmp_path, "llama")
    check(shop.program(OTHER[name]), shop.plain(OTHER[name]))


def twice(case: Case, words: str = "") -> Case:
    return replace(case, words=f"{case.words} epochs_per_batch=2 {words}", num_steps=2)


LOW, HIGH = 0.3, 0.9  # a band so lopsided that some tokens lie where one end taken for the other would show
BAND = f"clip_low={LOW} clip_high={HIGH}"


def in_band(name: str, loss: Loss) -> Case:
    return twice(replace(CASES[name], loss=loss), BAND)


# with the rate, and what the loss is not: a wrong one must give something else
TWICE: dict[str, tuple[Case, float, list[Loss]]] = {
    "grpo + k3": (
        in_band("grpo + k3", plus_k3(clipped(LOW, HIGH), BETA)),
        0.25,
        [plus_k3(clipped(LOW, LOW), BETA), plus_k3(clipped(HIGH, HIGH), BETA), clipped(LOW, HIGH)],
    ),
    "grpo + k3 times the ratio": (
        twice(replace(CASES["grpo + k3"], loss=plus_k3(PPO, BETA, True)), "kl.placement=loss_times_ratio"),
        0.5,
        [plus_k3(PPO, BETA), PPO],
    ),
    "grpo, dual clip": (
        twice(replace(CASES["grpo"], loss=dual_clipped(0.2, 0.2, 1.1)), "dual_clip=1.1"),
        1.0,
        [PPO, dual_clipped(0.2, 0.2, 3.0)],
    ),
    "dapo": (in_band("dapo", clipped(LOW, HIGH)), 0.25, [clipped(LOW, LOW), clipped(HIGH, HIGH), policy_gradient]),
    "gspo": (
        in_band("gspo", sequence_clipped(LOW, HIGH)),
        0.25,
        [sequence_clipped(LOW, LOW), sequence_clipped(HIGH, HIGH), clipped(LOW, HIGH)],
    ),
    "cispo": (twice(CASES["cispo"]), 4.0, [truncated_weight(6.0), policy_gradient, importance_weighted]),
    "rloo, importance weighted": (
        twice(replace(CASES["rloo"], loss=importance_weighted), "objective=importance_weighted"),
        0.25,
        [policy_gradient, PPO],
    ),
    "expert iteration": (twice(CASES["expert iteration"]), 0.25, [importance_weighted]),
    "ppo, lam 0.95 + k1": (
        in_band("ppo, lam 0.95 + k1", clipped(LOW, HIGH)),
        0.25,
        [clipped(LOW, LOW), clipped(HIGH, HIGH), policy_gradient],
    ),
    "ppo, value clip": (
        twice(replace(CASES["ppo, lam 1"], value_clip=VALUE_CLIP), f"value_clip={VALUE_CLIP}"),
        0.5,
        [importance_weighted],
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_optimiser_steps_on_a_batch_are_two_plain_ones(name: str, tmp_path: Path) -> None:
    """A26: the second is taken where the ratio is not 1, beyond the clips for some; pi_old stays where it was."""
    case, rate, wrong = TWICE[name]
    shop = Workshop(tmp_path, "llama")
    want = shop.plain(case, rate)
    for loss in wrong:
        assert relative_distance(shop.plain(replace(case, loss=loss), rate).policy, want.policy) > 0.01
    check(shop.program(case, rate), want)


def test_the_value_clip_of_that_case_holds_back_the_critic(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, "llama")
    case, rate, _ = TWICE["ppo, value clip"]
    clipped_less = shop.plain(replace(case, value_clip=None), rate)
    assert relative_distance(shop.plain(case, rate).critic, clipped_less.critic) > 0.01


def test_the_micro_batch_does_not_matter(tmp_path: Path) -> None:
    """A17: one row at a time inside the program too; the denominators are those of the whole step."""
    shop = Workshop(tmp_path, "llama")
    case = CASES["ppo, lam 0.95 + k1"]
    check(shop.program(replace(case, words=f"{case.words} tokens_per_microbatch=1")), shop.plain(case))


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        ("mismatch=truncate mismatch.cap=1.5", lambda w: w.clip(max=1.5)),
        ("mismatch=truncate mismatch.cap=1.5 mismatch.level=sequence", lambda w: w.prod().expand(len(w)).clip(max=1.5)),
        ("mismatch=mask mismatch.low=0.7 mismatch.high=1.4", lambda w: torch.where((w >= 0.7) & (w <= 1.4), w, 0.0)),
    ],
)
def test_a_sampler_that_differs_is_corrected_by_plain_weights(words: str, weight, tmp_path: Path) -> None:
    """pi_old over what the sampler reported, for the trained tokens alone."""
    reported = [[-3.0 - 0.25 * ((i + 3 * n) % 5) for i in range(len(row.response))] for n, row in enumerate(ROWS)]
    shop = Workshop(tmp_path, "llama", logp_sampler=reported)

    def correction(k: Known) -> torch.Tensor:
        said = reported[shop.rows.index(k.row)]
        return weight((k.old.logp - torch.tensor([said[i] for i in k.row.chosen], dtype=torch.float64)).exp())

    case = CASES["grpo"]
    want = shop.plain(case, correction=correction)
    assert relative_distance(want.policy, shop.plain(case).policy) > 0.01  # the correction does something here
    check(shop.program(replace(case, words=f"{case.words} {words}")), want)


def test_replay_says_what_has_no_effect_and_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "model", "llama")
    rows = write_rows(tmp_path / "rows.parquet", [replace(row, greedy=None) for row in ROWS])

    def run(*words: str) -> int:
        return command("train", *words, f"model={folder}", f"sampler=replay:{rows}", f"run={tmp_path / words[-1]}")

    assert run("rloo", "prompts_per_step=2", "stop=x") == 0
    assert "prompts_per_step, stop: without effect, since the rows are replayed" in capsys.readouterr().out
    assert run("rloo", "steps=3") == 2
    assert "has 1 steps: use steps=1" in capsys.readouterr().err
    assert run("reinforce", "baseline=greedy") == 2
    assert "no row has a greedy_reward" in capsys.readouterr().err
    assert run("expert_iteration", "threshold=9") == 0
    assert "can train on none of the 9 rows" in capsys.readouterr().out
