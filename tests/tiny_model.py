"""A tiny model folder with a tokenizer of single characters, for tests that go through the command line."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+= abcdefgh?"
EOS = len(CHARACTERS)  # also the pad id


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)} | {"</s>": EOS}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>", unk_token="?")


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def write_tiny(folder: Path, seed: int = 0) -> Path:
    tiny_llama(seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
