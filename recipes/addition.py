"""Sums of two numbers from 1 to 20 as chat prompts, in three parts that share no sum.

`test` is a fixed set of 100 sums that no run trains on or looks at; `stop` (50) is what a run may watch; `train` is the
rest.
"""

import random

PAIRS = [(a, b) for a in range(1, 21) for b in range(1, 21)]
random.Random(0).shuffle(PAIRS)


def _rows(pairs: list[tuple[int, int]]) -> list[dict]:
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with only the number."}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]


def test() -> list[dict]:
    return _rows(PAIRS[:100])


def stop() -> list[dict]:
    return _rows(PAIRS[100:150])


def train() -> list[dict]:
    return _rows(PAIRS[150:])
