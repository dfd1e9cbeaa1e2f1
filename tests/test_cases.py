"""Public bug reports of other trainers that concern several parts at once; the id of each stands in the name."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hotcold.batch import Rollout, collate
from hotcold.config.schema import Config
from hotcold.errors import InputError
from hotcold.models.policy import measure
from hotcold.sampling.choice import choose
from tests.tiny_model import tiny_llama


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """BPE whose merges turn the ids of "he" + "llo" into "hello"; B02's vocabulary {he: 1, llo: 2, hello: 3}."""
    vocabulary = {"<unk>": 0, "he": 1, "llo": 2, "hello": 3, "h": 4, "e": 5, "l": 6, "o": 7, "ll": 8}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), unk_token="<unk>")


def test_b02_the_trained_tokens_are_the_sampled_ones_not_their_text_tokenised_again() -> None:
    tokenizer = merging_tokenizer()
    sampled = (1, 2)
    text = tokenizer.decode(sampled).replace(" ", "")
    assert text == "hello" and tokenizer(text)["input_ids"] == [3]  # the trap is set: one token, never sampled
    rollout = Rollout((4,), sampled, group=0, episode=0, reward=1.0, text=text, logp_sampler=(-0.5, -0.25))
    batch = collate([rollout])
    assert batch.tokens.tolist() == [[4, 1, 2]]
    assert batch.logp_sampler is not None and batch.logp_sampler.tolist() == [[0.0, -0.5, -0.25]]


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_a21_options_that_change_the_sampled_distribution_are_refused_in_training(key: str) -> None:
    """min_length, a banned EOS or a repetition penalty are no keys at all; what truncates is refused by name."""
    value = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}[key]
    with pytest.raises(InputError, match=key):
        Config.from_keys(model="m", data="d.jsonl", reward=len, algorithm="rloo", **{key: value})
    for foreign in ("min_length", "repetition_penalty"):
        with pytest.raises(InputError, match=foreign):
            Config.from_keys(model="m", data="d.jsonl", reward=len, algorithm="rloo", **{foreign: 2})


def test_a23_sampler_and_trainer_use_the_same_temperature() -> None:
    """Logits [2, 0] at temperature .5: -.018150 and -4.018150; at 1 they would be -.126928 and -2.126928."""
    _, logp = choose(torch.tensor([[2.0, 0.0]] * 2), torch.tensor([0.0, 0.999], dtype=torch.float64), temperature=0.5)
    assert logp.tolist() == pytest.approx([-0.018150, -4.018150], abs=1e-6)


def test_a29_rows_of_a_batch_do_not_see_each_other() -> None:
    """Nothing is packed: each row's log-probs are those of the row alone, whatever its neighbours are."""
    model = tiny_llama().eval()
    rows = [Rollout((1, 2, 3), (4, 5), 0, 0, reward=1.0), Rollout((6,), (7, 8, 9, 10), 1, 1, reward=1.0)]
    with torch.no_grad():
        together = measure(model, collate(rows), frozenset({"logp"}), 1.0).forward.logp
        alone = [measure(model, collate([row]), frozenset({"logp"}), 1.0).forward.logp for row in rows]
    assert together is not None
    for i, single in enumerate(alone):
        assert single is not None
        assert (together[i, : single.shape[1]] - single[0]).abs().max() < 1e-5
        assert together[i, single.shape[1] :].abs().sum() == 0
