"""A tiny Llama and a character-level tokenizer, made on the spot: nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = "0123456789+="
EOS, UNKNOWN = "<eos>", "<unk>"


def make_toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character. The pad token is the EOS token, as in many real models; there is no BOS."""
    vocab = {character: i for i, character in enumerate([*ALPHABET, EOS, UNKNOWN])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, unk_token=UNKNOWN)


def make_toy_model(seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama of about 190 thousand parameters, from the seed alone, and its tokenizer."""
    tokenizer = make_toy_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        initializer_range=0.08,  # at 0.02 adding is learnt three times later, and for some seeds not in time
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval(), tokenizer
