"""What `--help` prints. Built from the table of keys, so that it cannot miss one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from hotcold.algorithms.presets import PRESETS
from hotcold.config.keys import EVAL_KEYS, SAMPLE_KEYS, TRAIN_KEYS, Key

WIDTH = 100

ROOT = """\
hotcold trains a language model by policy gradient on any score.

Examples
  hotcold demo
  hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py
  hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py --dry-run
  hotcold eval runs/NAME/model data=prompts.jsonl reward=reward.py
  hotcold sample runs/NAME/model prompt="What is 2 + 3?"

Verbs
  train     train a model on a score; the result is a folder that transformers loads
  eval      greedy and sampled accuracy of a model on prompts, with 95 % intervals
  sample    print a model's responses to a prompt or a file of prompts
  verify    what gradient an algorithm expects, exactly: ours, with your keys, or your own
  bench     where a step's time goes on this machine, and how far from its limit each part is
  doctor    what ails a run, or whether a recipe will work, with what to do about it
  demo      the whole thing in a few minutes: a tiny model, made on the spot, learns arithmetic

Options
  --help      this page; `hotcold VERB --help` lists the keys of a verb
  --version   the version
"""

_TRAIN = """\
hotcold train NAME|recipe.yaml|FILE.py:CLASS KEY=VALUE ...

Examples
  hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py
  hotcold train rloo model=./my-model data=sums.csv reward=checks.py:exact steps=50 learning_rate=1e-6
  hotcold train recipe.yaml seed=1 eval.every=5         a key on the command line wins over the recipe
  hotcold train ppo model=smollm2 data=prompts.jsonl reward=reward.py beta=0.05
  hotcold train sft model=smollm2 data=answers.jsonl    imitate given responses: no reward is needed
  hotcold train my_idea.py:MyAlgorithm model=... data=... reward=...
  hotcold train resume=runs/NAME                        continue a run that was stopped

where reward.py holds, for example
  def reward(completion, answer):        # any column of the data, by its name
      return completion.strip() == answer

a.b=c, --a.b c and --a.b=c are the same; a list is written reward='[a.py, b.py:style]'.
Where the default begins with auto, null brings it back.
Paths in a recipe are looked for from the current directory, then beside the recipe.

Algorithms
"""

_EVAL = """\
hotcold eval MODEL KEY=VALUE ...

Examples
  hotcold eval smollm2 data=prompts.jsonl reward=reward.py
  hotcold eval runs/NAME/model data=prompts.jsonl reward=reward.py samples=8 --json

"""

_SAMPLE = """\
hotcold sample MODEL KEY=VALUE ...

Examples
  hotcold sample smollm2 prompt="What is 2 + 3?" chat=true
  hotcold sample runs/NAME/model data=prompts.jsonl n=4 max_tokens=64 --json

"""

VERIFY = """\
hotcold verify [NAME|recipe.yaml|FILE.py:CLASS|RUN_FOLDER KEY=VALUE ...]

What gradient does an algorithm expect? Every response of a tiny policy, and every group of them, is summed over with
its probability, through the code that trains. So the answer is exact: unbiased, unbiased up to a factor, or elsewhere,
with the reason and the variance. It is compared with what the documentation states.

Examples
  hotcold verify                                        every algorithm, each choice, about 400 rows
  hotcold verify rloo
  hotcold verify grpo group_size=4 scale_by_std=false
  hotcold verify rloo beta=0.05 kl.placement=loss kl.estimator=k2
  hotcold verify rloo mismatch=truncate mismatch.level=sequence     another engine samples
  hotcold verify recipe.yaml                            the algorithm of a recipe
  hotcold verify my_file.py:MyAlgorithm group_size=4    with checks of masks, order and micro-batches
  hotcold verify recipe.yaml --on-model                 the update of its own model, on a few of its prompts
  hotcold verify runs/NAME                              what other baselines would have done to its gradient's variance
  hotcold verify --chapter                              the numbers of the course chapter beside ours

Keys are those of the algorithm (`hotcold train --help`), truncated and mismatch. Of your own class also
  expect                 what you state of it: multiple (of the target), unbiased, or elsewhere (only the checks
                         count); as a field of the class: expects = "elsewhere" [multiple]
With --on-model they are those of `hotcold train`. Of a run's folder:
  steps                  how many of its steps, where their parameters are still there [2]
  prompts                of each step [16]
  dims                   numbers to which a gradient is projected [1024]
  seed                   of the projection and of the intervals [0]

Options
  --on-model             is the update the same for any micro-batch, padding, order, shared prompts, recomputing?
                         sampled against recomputed log-probabilities, finite differences; the largest difference
  --chapter              no model: the chapter's worked examples and answers
  --all                  every combination, as long as it takes
  --json FILE            the rows as JSON; - prints them instead of the table
  --html FILE            one page that needs nothing else
  --markdown FILE        the tables between two marks of the file, as in docs/verify.md
  --debug                show the traceback of an error

Exit codes: 0 all is as stated; 1 a row differs from what is stated, or a check fails; 2 wrong input.
"""

_BENCH = """\
hotcold bench NAME|recipe.yaml|FILE.py:CLASS KEY=VALUE ...

Runs a few steps of a training run with your model, data and reward, and forgets them: no run folder is written, no
model saved. The time of sampling, scoring, log-probabilities, update and everything else; beside it the limit, which is
the necessary arithmetic (each distinct prompt once in a pass, each response token once, three times in an update; the
head on sampled and trained tokens only) over the rate of a matrix product, measured before and after the steps. Tokens
per second, peak memory, and which part is farthest from its limit.

Examples
  hotcold bench grpo model=smollm2 data=prompts.jsonl reward=reward.py
  hotcold bench recipe.yaml steps=5
  hotcold bench ppo model=smollm2 data=prompts.jsonl reward=reward.py beta=0.05 --json

Keys are those of `hotcold train`, with the same defaults, but
  steps                  how many are measured, after one to warm up; that of a recipe does not count [3]

"""

DOCTOR = """\
hotcold doctor RUN_FOLDER
hotcold doctor NAME|recipe.yaml|FILE.py:CLASS KEY=VALUE ...
hotcold doctor REWARD data=FILE

Of a run, finished, killed or still going: what is wrong with it, what most matters first, each on one line with the
evidence, the steps, the likely cause and the key to set. If it stopped, how it goes on.

Of a recipe, in about a minute on your model, data and reward: prompts with their special tokens, what ends a response,
what the reward says of the right answer, an empty, a cut and an endless response, how many prompts have scores that
differ, memory, disk, and the time of a step. It samples what fits into 60 seconds, writes nothing and trains nothing.

Of a reward (FILE.py, FILE.py:NAME, a name), without any model: what it says of the right answer in several forms, of
empty, cut, repeated, wrong and prompt-echoing responses; whether twice the same; its time; its errors.

Examples
  hotcold doctor runs/NAME
  hotcold doctor runs/NAME --json
  hotcold doctor recipe.yaml
  hotcold doctor grpo model=smollm2 data=prompts.jsonl reward=reward.py
  hotcold doctor reward.py data=prompts.jsonl

Keys of a recipe are those of `hotcold train`. [problem] needs action, [note] is good to know, [ok] was looked at.

Options
  --json      print JSON
  --debug     show the traceback of an error

Exit codes: 0 healthy, or notes alone; 1 a problem; 2 wrong input.
"""

DEMO = """\
hotcold demo [seed=0] [run=NAME]

Makes a tiny model, teaches it some arithmetic by a few examples, then trains it on a score by policy
gradient, and shows held-out accuracy before and after. Nothing is downloaded.

Options
  --debug     show the traceback of an error
"""

_DEBUG = ("--debug", "show the traceback of an error")
_JSON = ("--json", "print JSON")
_DRY_RUN = ("--dry-run", "print every key with the reason for its value, the first prompt, the batch; train nothing")

EXIT_CODES = """
Exit codes: 0 done; 2 wrong input; 75 stopped by the disk, 130 and 143 by a signal: a run continues with resume.
"""


def train_help() -> str:
    algorithms = _rows((name, preset.about) for name, preset in PRESETS.items())
    return _TRAIN + algorithms + "\n" + _keys(TRAIN_KEYS) + _options(_DRY_RUN, _DEBUG) + EXIT_CODES


def bench_help() -> str:
    return _BENCH + _options(_JSON, _DEBUG)


def eval_help() -> str:
    return _EVAL + _keys(EVAL_KEYS) + _options(_JSON, _DEBUG)


def sample_help() -> str:
    return _SAMPLE + _keys(SAMPLE_KEYS) + _options(_JSON, _DEBUG)


def _options(*rows: tuple[str, str]) -> str:
    return "Options\n" + _rows(rows)


def _keys(groups: dict[str, tuple[Key, ...]]) -> str:
    parts = []
    for title, keys in groups.items():
        parts.append(f"Keys: {title.lower()}\n" + _rows((key.name, _meaning(key)) for key in keys) + "\n")
    return "".join(parts)


def _meaning(key: Key) -> str:
    return key.meaning if key.default == "-" else f"{key.meaning} [{key.default}]"


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, WIDTH - 25)
        lines.append(f"  {name:<22} {wrapped[0]}\n")
        lines += [f"{'':25}{line}\n" for line in wrapped[1:]]
    return "".join(lines)
