"""recipes/code_smollm2.yaml: its tasks can be solved, and their tests tell a wrong solution."""

import json
from pathlib import Path

from hotcold.config.schema import train_config
from tests.rewards.scored import scored

RECIPES = Path(__file__).parents[2] / "recipes"
SOLUTIONS = """
double: 2 * x
square: x * x
add: a + b
subtract: a - b
multiply: a * b
negate: -x
is_even: n % 2 == 0
is_odd: n % 2 == 1
is_positive: x > 0
larger: a if a > b else b
smaller: a if a < b else b
distance: abs(a - b)
last_digit: n % 10
half: n // 2
cube: x**3
first: items[0]
last: items[-1]
count_items: len(items)
total: sum(numbers)
largest: max(numbers)
reverse_text: s[::-1]
shout: s.upper()
length: len(s)
greet: "Hello, " + name + "!"
starts_with_a: s[:1] == "a"
join_words: " ".join(words)
repeat: s * n
evens: [x for x in numbers if x % 2 == 0]
doubled: [2 * x for x in numbers]
count_down: list(range(n, 0, -1))
"""


def test_every_task_has_a_solution_that_passes_and_another_does_not() -> None:
    rows = [json.loads(line) for line in (RECIPES / "code_tasks.jsonl").read_text().splitlines()]
    solutions = dict(line.split(": ", 1) for line in SOLUTIONS.strip().splitlines())
    heads = [row["prompt"][0]["content"].split("function ")[1].split(" that")[0] for row in rows]
    assert [head.split("(")[0] for head in heads] == list(solutions) and len(rows) == 30
    right = [f"```python\ndef {head}:\n    return {solutions[head.split('(')[0]]}\n```" for head in heads]
    wrong = [f"```python\ndef {head}:\n    return None\n```" for head in heads]
    tests = [row["tests"] for row in rows]
    assert scored(right, tests=tests) == [1.0] * 30
    assert scored(wrong, tests=tests) == [0.0] * 30


def test_the_recipe_is_read() -> None:
    config = train_config([str(RECIPES / "code_smollm2.yaml")])
    assert config.reward == ("code?partial=true&timeout=2",)
    assert config.data.path == str(RECIPES / "code_tasks.jsonl")
