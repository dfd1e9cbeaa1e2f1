"""The critic: zero at the start, values at the right places, gradients, and folders it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
)

from hotcold.batch import Batch, Rollout, collate
from hotcold.errors import InputError
from hotcold.models.adapters import LoraSettings, add_lora
from hotcold.models.critic import (
    VALUE_HEAD,
    Critic,
    critic_from_policy,
    load_critic,
    measure_values,
    save_critic,
    trunk_of,
)
from hotcold.models.loading import LoadedModel, load_model
from hotcold.models.reference import check_apart
from tests.models.test_loading import edit, llama, saved, tokenizer
from tests.toy_policies import TINY, assert_close, ragged_rollouts, relative_gap


def row(prompt: tuple[int, ...], response: tuple[int, ...], **fields: Any) -> Rollout:
    return Rollout(prompt, response, 0, 0, reward=1.0, **fields)


def loaded(module: Any, words: Any = None, source: str = "m") -> LoadedModel:
    return LoadedModel(module, words or tokenizer(eos_token="<eos>"), (1,), 0, 40, source, "abc", ())


def critic_of(name: str, head: bool = True) -> Critic:
    """Of a tiny model, its head drawn at random so that values differ between states."""
    critic = critic_from_policy(loaded(TINY[name]().eval()), "cpu")
    if head:
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            critic.head.weight.normal_(generator=random)
            critic.head.bias.fill_(0.25)
    return critic


class Table(nn.Module):
    """A trunk whose hidden state at a position is a known vector of the token there."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(last_hidden_state=self.rows[input_ids])


def table_critic(rows: Sequence[Sequence[float]]) -> Critic:
    """V = 3 h_0 + h_1 + 0.5."""
    critic = Critic(Table(rows), width=2)
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([[3.0, 1.0]]))
        critic.head.bias.fill_(0.5)
    return critic


HIDDEN = [[1.0, 0.0], [0.0, 2.0], [-1.0, 4.0], [math.nan, math.inf]]
VALUES = [3.5, 2.5, 1.5]  # of the states after tokens 0, 1 and 2


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", list(TINY))
def test_a_new_critic_says_exactly_zero_everywhere(name: str) -> None:
    values = measure_values(critic_of(name, head=False), collate(ragged_rollouts()))
    assert values.dtype == torch.float32 and bool((values == 0).all())


def test_the_value_of_a_token_is_that_of_the_state_in_which_it_was_chosen() -> None:
    """A01 for values: [0, 1, 2 | 0, 1] has its trained tokens after 2 and after 0."""
    values = measure_values(table_critic(HIDDEN), collate([row((0, 1, 2), (0, 1))]))
    assert_close(values, [[0, 0, 0, VALUES[2], VALUES[0]]])
    assert values.dtype == torch.float64


def test_a_forward_gives_the_value_of_every_position() -> None:
    ids = torch.tensor([[0, 1, 2], [2, 2, 0]])
    values = table_critic(HIDDEN)(input_ids=ids, attention_mask=ids, position_ids=ids, use_cache=False)
    assert_close(values, [[VALUES[0], VALUES[1], VALUES[2]], [VALUES[2], VALUES[2], VALUES[0]]])


def test_values_are_zero_outside_the_trained_tokens() -> None:
    gap = row((0,), (1, 2, 0), response_mask=(True, False, True))
    rejected = Rollout((0,), (2,), 0, 1, reward=None)
    values = measure_values(table_critic(HIDDEN), collate([gap, row((0, 1), (2,)), rejected]))
    assert_close(values, [[0, VALUES[0], 0, VALUES[2]], [0, 0, VALUES[1], 0], [0, 0, 0, 0]])


def test_garbage_under_the_padding_reaches_no_value_and_no_gradient() -> None:
    """A05: the hidden states of the pad token 3 are NaN and inf; the shorter row ends before them."""
    results = []
    for pad_id in (0, 3):
        critic = table_critic(HIDDEN)
        batch = collate([row((0,), (1,)), row((0, 1), (2, 0, 1))], pad_id)
        values = measure_values(critic, batch)
        (values**2).sum().backward()
        results.append((values.detach(), [p.grad for p in critic.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[1][0], [[0, VALUES[0], 0, 0, 0], [0, 0, VALUES[1], VALUES[2], VALUES[0]]])
    for clean, dirty in zip(results[0][1], results[1][1], strict=True):
        assert clean is not None and dirty is not None
        assert torch.equal(clean, dirty) and bool(dirty.isfinite().all())


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("pad_id", [0, 2, 23])
def test_what_stands_in_the_padding_changes_nothing(name: str, pad_id: int) -> None:
    """A05, A08 on real architectures: pad = EOS or any other id."""
    critic = critic_of(name)
    rows = [row((5, 6), (7, 2)), row((1,), (4,) * 9)]
    assert torch.equal(measure_values(critic, collate(rows, pad_id)), measure_values(critic, collate(rows, 11)))


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_a_row_has_the_same_values_alone_and_in_any_batch(name: str, extra: int) -> None:
    """A07: the row alone through the plain trunk; then with others, in another order, with more padding."""
    critic = critic_of(name)
    rows = [row((5, 6), (7, 8, 9)), row((1, 2, 3, 4, 5, 6, 7, 8, 9), (11, 12, 13, 14, 15, 16, 17))]
    longest = row((3,), (4,) * (15 + extra))
    together = measure_values(critic, collate([*rows, longest])).detach()
    turned = measure_values(critic, collate([longest, *reversed(rows)])).detach()
    assert float((together - turned.flip(0)).abs().max()) < 1e-6
    for i, r in enumerate(rows):
        ids, start = torch.tensor([[*r.prompt_ids, *r.response_ids]]), len(r.prompt_ids)
        with torch.no_grad():
            hidden = critic.trunk(input_ids=ids).last_hidden_state
            alone = (hidden[0, start - 1 : -1] * critic.head.weight[0]).sum(-1) + 0.25
        scale = max(1.0, float(alone.abs().max()))
        assert float((together[i, start : ids.shape[1]] - alone).abs().max()) < 1e-6 * scale
        assert bool((together[i, ids.shape[1] :] == 0).all()) and bool((together[i, :start] == 0).all())


def test_a_batch_without_a_trained_token_has_zero_values() -> None:
    """B09: an empty response."""
    assert measure_values(critic_of("llama"), collate([row((0,), ())])).tolist() == [[0]]


def test_a_first_token_has_no_state_and_no_value() -> None:
    with pytest.raises(AssertionError, match="at least one token before"):
        measure_values(table_critic(HIDDEN), collate([row((), (1, 2))]))


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", list(TINY))
def test_a_zero_head_gets_a_gradient_and_passes_it_on_after_one_step(name: str) -> None:
    critic, batch = critic_of(name, head=False), collate(ragged_rollouts())
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)

    def trunk_gradients() -> int:
        optimizer.zero_grad()
        ((measure_values(critic, batch) - 1) ** 2)[batch.trained].mean().backward()
        return sum(p.grad is not None and bool((p.grad != 0).any()) for p in critic.trunk.parameters())

    assert trunk_gradients() == 0  # V does not depend on the hidden states while the head is zero
    assert critic.head.bias.grad is not None and float(critic.head.bias.grad) == pytest.approx(-2.0, abs=1e-6)
    optimizer.step()
    assert trunk_gradients() == len(list(critic.trunk.parameters()))


def test_the_gradient_is_that_of_the_values() -> None:
    """One trained token after token 1: d V / d weight = h = [0, 2], d V / d bias = 1, d V / d h = weight."""
    critic = table_critic(HIDDEN)
    measure_values(critic, collate([row((0, 1), (2,))])).sum().backward()
    assert isinstance(critic.trunk, Table) and critic.trunk.rows.grad is not None
    assert_close(critic.head.weight.grad, [[0, 2]])
    assert_close(critic.head.bias.grad, [1])
    assert_close(critic.trunk.rows.grad, [[0, 0], [3, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("name", list(TINY))
def test_micro_batches_add_up_to_the_whole_gradient(name: str) -> None:
    """A17."""
    rows = ragged_rollouts()
    parts = []
    for chunks in ([rows], [rows[:5], rows[5:6], rows[6:]]):
        critic = critic_of(name)
        for chunk in chunks:
            (measure_values(critic, collate(chunk)) ** 2).sum().backward()
        parts.append([p.grad for p in critic.parameters() if p.grad is not None])
    assert relative_gap(parts[1], parts[0]) < 1e-6


def test_without_gradient_the_values_are_the_same() -> None:
    critic, batch = critic_of("llama"), collate(ragged_rollouts())
    with torch.no_grad():
        without = measure_values(critic, batch)
    assert not without.requires_grad and torch.equal(without, measure_values(critic, batch))


# ------------------------------------------------------------------ from the policy


@pytest.mark.parametrize("name", list(TINY))
def test_a_critic_of_the_policy_is_a_copy_that_shares_no_memory(name: str) -> None:
    policy = TINY[name]().eval()
    critic = critic_from_policy(loaded(policy), "cpu")
    check_apart(policy.parameters(), critic)
    trunk = dict(policy.base_model.named_parameters())
    assert all(torch.equal(p, trunk[n]) for n, p in critic.trunk.named_parameters())
    assert trunk.keys() == dict(critic.trunk.named_parameters()).keys()
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in critic.parameters()) and not critic.training


def test_a_frozen_policy_gives_a_critic_that_trains() -> None:
    policy = llama().requires_grad_(False)
    assert all(p.requires_grad for p in critic_from_policy(loaded(policy), "cpu").parameters())


@pytest.mark.parametrize("name", list(TINY))
def test_a_policy_with_an_adapter_gives_a_plain_critic_of_what_it_computes(name: str) -> None:
    pytest.importorskip("peft")
    policy, ids = TINY[name]().eval(), torch.tensor([[3, 4, 5]])
    add_lora(policy, LoraSettings(rank=2, alpha=4.0), seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        hidden = policy.base_model(input_ids=ids).last_hidden_state
    critic = critic_from_policy(loaded(policy), "cpu")
    assert {n for n, _ in critic.trunk.named_parameters()} == {n for n, _ in TINY[name]().base_model.named_parameters()}
    assert all(p.requires_grad for p in critic.parameters())
    check_apart(policy.parameters(), critic)
    with torch.no_grad():
        assert float((critic.trunk(input_ids=ids).last_hidden_state - hidden).abs().max()) < 1e-4
    assert sum(p.requires_grad for p in policy.parameters()) == 2 * len(adapter_places(policy))


def adapter_places(policy: nn.Module) -> list[str]:
    return [name for name, part in policy.named_modules() if hasattr(part, "lora_A")]


def test_a_critic_with_an_adapter_is_saved_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    critic = critic_of("llama")
    add_lora(critic.trunk, LoraSettings(rank=2, alpha=4.0), seed=0)
    with torch.no_grad():
        for parameter in critic.trunk.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    save_critic(critic, tmp_path)
    again = load_critic(str(tmp_path), "cpu", loaded(TINY["llama"]()))
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in critic_of("llama").named_parameters()}
    assert float((values_of(again) - values_of(critic)).abs().max()) < 1e-4
    assert float((values_of(again) - values_of(critic_of("llama"))).abs().max()) > 0.1


def test_a_float64_policy_gives_float64_values() -> None:
    critic = critic_from_policy(loaded(llama().double()), "cpu")
    assert measure_values(critic, collate([row((5, 6), (7, 8))])).dtype == torch.float64


def test_the_trunk_of_a_family_with_a_projection_after_it_is_as_wide_as_what_it_gives() -> None:
    """OPT-350m: hidden size 16, but its trunk gives vectors of the embedding's size, 12."""
    config = OPTConfig(
        vocab_size=16, hidden_size=16, word_embed_proj_dim=12, ffn_dim=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=40, dropout=0.0,
    )  # fmt: skip
    critic = critic_from_policy(loaded(OPTForCausalLM(config).eval()), "cpu")
    assert critic.head.in_features == 12
    assert measure_values(critic, collate([row((5, 6), (7, 8))])).shape == (1, 4)


def test_a_family_whose_trunk_cannot_be_loaded_alone_is_refused() -> None:
    config = BartConfig(vocab_size=16, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    with pytest.raises(InputError, match="no trunk that stands alone") as caught:
        critic_from_policy(loaded(BartForCausalLM(config).eval(), source="folder/bart"), "cpu")
    assert "folder/bart" in str(caught.value) and len(str(caught.value).splitlines()) <= 5


def test_a_module_without_a_trunk_is_refused() -> None:
    with pytest.raises(InputError, match="no trunk that stands alone"):
        trunk_of(nn.Linear(2, 2), "m")


def test_a_model_that_reads_later_tokens_is_refused() -> None:
    """BERT's class for causal language models reads both ways unless its config says that it is a decoder."""
    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(InputError, match="reads later tokens too"):
        critic_from_policy(loaded(BertLMHeadModel(config).eval()), "cpu")
    config.is_decoder = True
    critic_from_policy(loaded(BertLMHeadModel(config).eval()), "cpu")


# ------------------------------------------------------------------ folders


def values_of(critic: Critic) -> Tensor:
    rows = [row((5, 6), (7, 8, 9)), row((1,), (4, 3, 2, 10, 11, 12))]
    with torch.no_grad():
        return measure_values(critic, collate(rows))


def trained(critic: Critic) -> Critic:
    """After a few steps towards 1."""
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    batch = collate([row((5, 6), (7, 8, 9)), row((1,), (4, 3, 2, 10, 11, 12))])
    for _ in range(3):
        optimizer.zero_grad()
        ((measure_values(critic, batch) - 1) ** 2)[batch.trained].mean().backward()
        optimizer.step()
    return critic


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_critic_comes_back_with_the_same_values(tmp_path: Path, tied: bool) -> None:
    policy = load_model(str(saved(tmp_path / "m", llama(tie_word_embeddings=tied))))
    critic = trained(critic_from_policy(policy, "cpu"))
    save_critic(critic, tmp_path / "critic")
    again = load_critic(str(tmp_path / "critic"), "cpu", policy)
    assert bool((values_of(critic) != 0).any()) and torch.equal(values_of(again), values_of(critic))
    ours, theirs = critic.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert all(p.requires_grad for p in again.parameters())


def test_a_saved_critic_of_another_family_comes_back(tmp_path: Path) -> None:
    critic = critic_of("gpt2")
    policy = loaded(TINY["llama"]())
    save_critic(critic, tmp_path)
    assert torch.equal(values_of(load_critic(str(tmp_path), "cpu", policy)), values_of(critic))


def test_a_causal_language_model_gives_its_trunk_and_a_zero_head(tmp_path: Path) -> None:
    policy = load_model(str(saved(tmp_path / "m")))
    other = llama(num_hidden_layers=2, hidden_size=8)
    critic = load_critic(str(saved(tmp_path / "other", other)), "cpu", policy)
    assert bool((values_of(critic) == 0).all())
    assert all(torch.equal(p, dict(other.model.named_parameters())[n]) for n, p in critic.trunk.named_parameters())


def llama_classifier(num_labels: int) -> Any:
    config = llama().config
    config.num_labels, config.pad_token_id = num_labels, 2
    torch.manual_seed(3)
    return LlamaForSequenceClassification(config)


def gpt2_classifier() -> Any:
    config = TINY["gpt2"]().config
    config.num_labels, config.pad_token_id = 1, 2
    return GPT2ForSequenceClassification(config)


@pytest.mark.parametrize("make", [lambda: llama_classifier(1), gpt2_classifier])
def test_a_reward_model_gives_its_trunk_and_a_zero_head(tmp_path: Path, make: Callable[[], Any]) -> None:
    """The added pad token, as reward models often have one, does not matter."""
    policy = load_model(str(saved(tmp_path / "m")))
    model = make()
    critic = load_critic(str(saved(tmp_path / "reward", model, pad_token="<added>")), "cpu", policy)
    assert bool((values_of(critic) == 0).all())
    trunk = dict(model.base_model.named_parameters())
    assert all(torch.equal(p, trunk[n]) for n, p in critic.trunk.named_parameters()) and len(trunk) > 5
    critic.trunk.train()  # GPT-2's dropout of 0.1 is off
    with torch.no_grad():
        first, second = (critic.trunk(input_ids=torch.tensor([[3, 4]])).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)


def swapped(folder: Path) -> None:
    def exchange(content: dict[str, Any]) -> None:
        words = content["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]

    edit(folder / "tokenizer.json", exchange)


def reward_model(folder: Path, num_labels: int = 1) -> None:
    model = folder / "model.safetensors"
    model.unlink()
    llama_classifier(num_labels).save_pretrained(folder)


def saved_critic(folder: Path) -> None:
    """Without a tokenizer: `save_critic` writes none."""
    policy = load_model(str(folder))
    save_critic(critic_from_policy(policy, "cpu"), folder)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def small_critic(folder: Path) -> None:
    without_tokenizer(folder)
    save_critic(critic_from_policy(loaded(llama(vocab_size=24)), "cpu"), folder)


def spoilt_head(content: bytes | dict[str, Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        saved_critic(folder)
        if isinstance(content, bytes):
            (folder / VALUE_HEAD).write_bytes(content)
        else:
            save_file(content, folder / VALUE_HEAD)

    return spoil


def pickled(folder: Path) -> None:
    reward_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/critic-pickle-was-read'\ntR.")


def remote_code(folder: Path) -> None:
    reward_model(folder)
    edit(folder / "config.json", lambda c: c.update(auto_map={"AutoModelForSequenceClassification": "modeling_x.X"}))
    (folder / "modeling_x.py").write_text("raise SystemExit('remote code was run')")


def lost_layer(folder: Path) -> None:
    reward_model(folder)
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=2))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: reward_model(f, 2), "classifier with 2 labels; a reward model has one"),
        (lambda f: reward_model(f, 3), "classifier with 3 labels"),
        (swapped, "tokenizers of .* differ in 2 tokens: 'a' is id 3 in the policy, 4 there"),
        (small_critic, "vocabulary of 24 tokens, the policy .* of 16"),
        (lambda f: llama(vocab_size=15).save_pretrained(f), "15 rows"),
        (spoilt_head(b"no tensors"), "no value head"),
        (spoilt_head({"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}), "no value head .*size mismatch"),
        (spoilt_head({"weight": torch.zeros(1, 16)}), "no value head .*Missing key.*bias"),
        (pickled, "pickled weights only.*were not read"),
        (remote_code, "never run here"),
        (lost_layer, "would start at random"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: edit(f / "config.json", lambda c: c.update(architectures=["LlamaModel"])), "no causal language"),
    ],
)
def test_a_folder_that_makes_no_critic_is_refused_with_what_to_do_and_nothing_else_is_printed(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = load_model(str(saved(tmp_path / "policy")))
    folder = saved(tmp_path / "m")
    spoil(folder)
    capfd.readouterr()
    with pytest.raises(InputError, match=f"(?s){said}") as caught:
        load_critic(str(folder), "cpu", policy)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 5 and str(folder) in lines[0]
    assert capfd.readouterr() == ("", "")
    assert not Path("/tmp/critic-pickle-was-read").exists()


def test_a_model_without_rows_for_all_that_the_policy_may_sample_is_refused(tmp_path: Path) -> None:
    """The policy's embedding has 8 rows beyond the tokenizer's 16 tokens, as many have; an id of these can be drawn."""
    policy = load_model(str(saved(tmp_path / "padded", llama(vocab_size=24))))
    with pytest.raises(InputError, match=r"critic\.init: .* vocabulary of 16 tokens, the policy .* of 24"):
        load_critic(str(saved(tmp_path / "m")), "cpu", policy)
    wider = str(saved(tmp_path / "wide", llama(vocab_size=32)))
    assert load_critic(wider, "cpu", policy).trunk.get_input_embeddings().weight.shape[0] == 32


def test_a_missing_folder_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"critic\.init=.*nowhere: there is no such folder"):
        load_critic(str(tmp_path / "a" / "nowhere"), "cpu", loaded(llama()))


def test_the_head_file_holds_the_head_alone(tmp_path: Path) -> None:
    save_critic(critic_of("llama"), tmp_path)
    stored = load_file(tmp_path / VALUE_HEAD)
    assert {n: tuple(t.shape) for n, t in stored.items()} == {"weight": (1, 16), "bias": (1,)}


def test_batches_are_not_changed() -> None:
    batch = collate(ragged_rollouts())
    before: Batch = collate(ragged_rollouts())
    measure_values(critic_of("llama"), batch)
    assert torch.equal(batch.tokens, before.tokens) and batch.values_old is None
