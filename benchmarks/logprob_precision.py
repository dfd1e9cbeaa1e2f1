"""How far sampled and recomputed log-probabilities of a real model are from float64, and from each other.

    python benchmarks/logprob_precision.py [model=smollm2]

12 responses of at most 24 tokens to three sums, sampled at temperature 1; the reference is the same model in float64.
"""

import copy
import sys

import torch

from hotcold.batch import Rollout, collate
from hotcold.chat import encode_prompt
from hotcold.models.loading import load_model
from hotcold.models.policy import measure, trained_logits
from hotcold.sampling.base import Request, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler

SUMS = ((3, 4), (17, 8), (20, 2))


def show(name: str, difference: torch.Tensor) -> None:
    print(f"{name:<44} mean {difference.abs().mean():.1e}  max {difference.abs().max():.1e}")


def main() -> None:
    spec = sys.argv[1].removeprefix("model=") if len(sys.argv) > 1 else "smollm2"
    model = load_model(spec)
    sampler = TransformersSampler(model.module, model.tokenizer, model.eos_ids, model.context_length, model.pad_id)
    texts = [f"What is {a} + {b}? Reply with only the number." for a, b in SUMS]
    prompts = [encode_prompt(model.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    requests = [Request(ids, draw, sample) for draw, ids in enumerate(prompts) for sample in range(4)]
    responses = sampler.sample(requests, SamplingOptions(max_tokens=24))
    batch = collate(
        [
            Rollout(q.prompt_ids, r.ids, q.draw, i, reward=0.0, logp_sampler=r.logp)
            for i, (q, r) in enumerate(zip(requests, responses, strict=True))
        ]
    )
    trained = batch.trained
    with torch.no_grad():
        recomputed = measure(model.module, batch, frozenset({"logp"}), 1.0).forward.logp[trained]
        logits = trained_logits(model.module, batch, *trained.nonzero(as_tuple=True))
        exact = measure(copy.deepcopy(model.module).double(), batch, frozenset({"logp"}), 1.0).forward.logp[trained]
    ids = batch.tokens[trained][:, None]
    print(f"{int(trained.sum())} tokens, {torch.get_num_threads()} threads, torch {torch.__version__}")
    show("sampled - float64", batch.logp_sampler[trained].double() - exact)
    show("recomputed - float64", recomputed.double() - exact)
    show("float32 logits, softmax in float64 - float64", logits.double().log_softmax(-1).gather(1, ids)[:, 0] - exact)
    show("float32 logits, torch's log_softmax - float64", logits.log_softmax(-1).gather(1, ids)[:, 0].double() - exact)
    show("recomputed - sampled", recomputed - batch.logp_sampler[trained])


if __name__ == "__main__":
    main()
