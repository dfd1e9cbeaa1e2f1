"""Small models of real architectures, a bigram model whose probabilities are known, and tokenizers made on the spot."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 32


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # far from uniform, so that a wrong position shows
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).eval()


def bigram(logits: torch.Tensor) -> LlamaForCausalLM:
    """A Llama whose next-token logits are `logits[current token]`: one-hot embedding, a layer that adds nothing.

    The norm multiplies a one-hot vector of size V by sqrt(V); the head divides by it.
    """
    size = logits.shape[0]
    model = llama(
        vocab_size=size,
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits.T / size**0.5)
    return model


def chain(*paths: tuple[int, ...], size: int = VOCAB) -> LlamaForCausalLM:
    """A bigram model that follows each path with certainty and stays at its last id; elsewhere it is uniform."""
    logits = torch.full((size, size), -1000.0)
    for ids in paths:
        for current, following in zip(ids, [*ids[1:], ids[-1]], strict=True):
            logits[current, following] = 0.0
    return bigram(logits)


def letters() -> PreTrainedTokenizerFast:
    """ids 0..25 are the letters a..z; 26 <pad>, 27 <eos>, 28 <end> are special; 29..31 are digits."""
    vocab = {chr(97 + i): i for i in range(26)} | {"<pad>": 26, "<eos>": 27, "<end>": 28, "0": 29, "1": 30, "2": 31}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<end>"]
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 tokens, one for each byte (id = place in the byte-level alphabet), and <eos> = 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(alphabet)} | {"<eos>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
