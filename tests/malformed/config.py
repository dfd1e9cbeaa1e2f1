"""Keys, values and recipes."""

from tests.malformed.case import Case, Content, Make, endless, file, folder, loop, nothing, pipe, sparse

RECIPE = "algorithm: rloo\nmodel: model\ndata: prompts.jsonl\nreward: exact\nrun: runs/one\nsteps: 1\n"
DIGITS = "9" * 5000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NESTED_LAUGHS = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{{', '.join(f'{key}: *{before}' for key in 'pqrstuvw')}}}\n"
    for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


def key(says: str, *words: str, make: Make = nothing) -> Case:
    return Case(f"key {' '.join(words)[:40]}", says, words, make)


KEYS = [
    key("lerning_rate", "lerning_rate=1"),
    key("\u0455teps", "\u0455teps=5"),  # a Cyrillic letter
    key("steps", "steps=0"),
    key("steps", "steps=-1"),
    key("steps", "steps=1.5"),
    key("steps", "steps=nan"),
    key("steps", "steps=inf"),
    key("steps", "steps=1e400"),
    key("steps", "steps=true"),
    key("steps", "steps=null"),
    key("steps", "steps=many"),
    key("steps", "steps=[1]"),
    key("steps", f"steps={10**30}"),
    key("steps", f"steps={DIGITS}"),
    key("steps", "steps="),
    key("steps", "--steps"),
    key("steps", "steps=1", "steps=2"),
    key("prompts_per_step", "prompts_per_step=-3"),
    key("prompts_per_step", f"prompts_per_step={10**8}"),
    key("group_size", "group_size=0"),
    key("group_size", "group_size=1"),
    key("group_size", "group_size=two"),
    key("group_size", f"group_size={10**12}"),
    key("max_tokens", "max_tokens=0"),
    key("max_tokens", f"max_tokens={10**12}"),
    key("temperature", "temperature=0"),
    key("temperature", "temperature=-1"),
    key("temperature", "temperature=nan"),
    key("temperature", "temperature=1e-300"),
    key("learning_rate", "learning_rate=-1"),
    key("learning_rate", "learning_rate=nan"),
    key("learning_rate", "learning_rate=fast"),
    key("learning_rate", "learning_rate=1e400"),
    key("learning_rate", "learning_rate=1e300", "reward=reward.py"),
    key("seed", "seed=-1"),
    key("seed", f"seed={2**63}"),
    key("eval.every", "eval.every=-1"),
    key("eval.samples", f"eval.samples={10**12}"),
    key("save_every", "save_every=-1"),
    key("keep_checkpoints", "keep_checkpoints=0"),
    key("threads", "threads=0"),
    key("threads", f"threads={10**9}"),
    key("device", "device=gpu"),
    key("dtype", "dtype=fp16"),
    key("max_memory", "max_memory=-1"),
    key("max_memory", "max_memory=lots"),
    key("tokens_per_microbatch", "tokens_per_microbatch=0"),
    key("lora.rank", "lora.rank=-1"),
    key("lora.rank", f"lora.rank={10**12}"),
    key("lora.targets", "lora.rank=2", "lora.targets=nothing"),
    key("beta", "beta=-1"),
    key("clip_low", "objective=clipped_surrogate", "clip_low=nan"),
    key("gamma", "gamma=2"),
    key("weighting", "weighting=mean"),
    key("optimizer", "optimizer=adam"),
    key("stop", "stop=[a"),
    key("stop", "stop=[[a]]"),
    key("stop", 'stop=[""]'),
    key("stop", "stop=" + "[" * 5000),
    key("stop", "stop=[&a [x, x], *a, *a]"),
    key("reward", "!reward"),
    key("reward", "reward=[]"),
    key("reward_weights", "reward_weights=[1,2]"),
    key("reward_weights", "reward_weights=[nan]"),
    key("use smaller weights", "reward_weights=[1e300]", "reward=reward.py"),
    key("data", "!data"),
    key("model", "!model"),
    key("sampler", "sampler=vllm"),
    key("sampler", "sampler=replay:"),
    key("trust_remote_code", "trust_remote_code=true"),
    key("num_generations", "num_generations=8"),
    key("epochs", "epochs=3"),
    key("data.split", "data.split=train"),
    key("run", "run=" + "x" * 300),
    key("a-file", "run=a-file", make=file("runs/a-file", "")),
    key("a-file", "run=runs/a-file/x", make=file("runs/a-file", "")),
    key("run=..", "run=.."),
    key("run=.", "run=."),
    key("runs/two", "run=two", make=file("runs/two/letters.txt", "private")),
    key("resume", "resume=auto", "!run"),
    key("nothing-here", "resume=nothing-here", "!run"),
    key("config.yaml", "resume=folder", "!run", make=folder("folder")),
    key("n", "sample", "model", "prompt=1+1=", "n=0"),
    key("n", "sample", "model", "prompt=1+1=", f"n={10**12}"),
    key("prompt", "sample", "model", "prompt="),
    key("prompt", "sample", "model", "prompt=\udcff1"),
    key("prompt", "sample", "model"),
    key("samples", "eval", "model", "data=prompts.jsonl", "reward=exact", f"samples={10**12}"),
    key("top_k", "eval", "model", "data=prompts.jsonl", "reward=exact", "top_k=-1"),
    key("min_p", "eval", "model", "data=prompts.jsonl", "reward=exact", "min_p=2"),
    key("top_p", "eval", "model", "data=prompts.jsonl", "reward=exact", "top_p=0"),
    key("seed", "demo", "seed=x"),
    key("nonsense", "verify", "nonsense"),
    key("there/is/none", "verify", "rloo", "--json", "there/is/none.json"),
]


def recipe(name: str, says: str, content: Content, *words: str) -> Case:
    return Case(f"recipe {name}", says, ("train", "bad.yaml", *words), file("bad.yaml", content))


def lines(name: str, says: str, more: str) -> Case:
    return recipe(name, says, RECIPE + more)


RECIPES = [
    recipe("empty", "bad.yaml", ""),
    recipe("of blanks", "bad.yaml", " \n\n"),
    recipe("a list", "bad.yaml", "- 1\n- 2\n"),
    recipe("a word", "bad.yaml", "grpo\n"),
    recipe("two documents", "bad.yaml", f"{RECIPE}---\n{RECIPE}"),
    recipe("half a list", "bad.yaml, line", RECIPE + "stop: [a\n"),
    recipe("tabs", "bad.yaml, line", RECIPE + "eval:\n\tevery: 3\n"),
    recipe("NUL bytes", "bad.yaml", RECIPE.encode() + b"\0\0\0"),
    recipe("UTF-16", "bad.yaml", RECIPE.encode("utf-16")),
    recipe("Latin-1", "bad.yaml", RECIPE.encode() + b"# caf\xe9\n"),
    recipe("a JPEG", "bad.yaml", b"\xff\xd8\xff\xe0\x00\x10JFIF" * 50),
    recipe("50 MB on one line", "bad.yaml", lambda: b"algorithm: " + b"x" * 50_000_000),
    recipe("nested too deeply", "bad.yaml", RECIPE + "stop: " + "[" * 20_000),
    recipe("of a recursive list", "bad.yaml, line 7", RECIPE + "stop: &a [*a]\n"),
    recipe("of a recursive group", "bad.yaml, line 7", RECIPE + "eval: &a {every: *a}\n"),
    recipe("billion laughs", "bad.yaml, line", LAUGHS + RECIPE + "stop: *i\n"),
    recipe("billion laughs of groups", "bad.yaml, line", NESTED_LAUGHS + RECIPE),
    recipe("an alias of nothing", "bad.yaml, line 7", RECIPE + "stop: *nowhere\n"),
    lines("a Python object", "bad.yaml, line 7", "stop: !!python/object/apply:os.system ['touch canary']\n"),
    lines("a Python name", "bad.yaml, line 7", "stop: !!python/name:os.system\n"),
    lines("an own tag", "bad.yaml, line 7", "stop: !mine x\n"),
    lines("a tag that does not fit", "bad.yaml, line 7", "seed: !!int abc\n"),
    lines("a bool that is none", "bad.yaml, line 7", "seed: !!bool perhaps\n"),
    lines("a timestamp that is none", "bad.yaml, line 7", "seed: !!timestamp soon\n"),
    lines("bytes", "bad.yaml, line 7", "seed: !!binary aGVsbG8=\n"),
    lines("a key twice", "bad.yaml, line 7", "steps: 2\n"),
    lines("a key twice, nested and dotted", "eval.every is given twice", "eval.every: 2\neval:\n  every: 3\n"),
    lines("a list as a key", "bad.yaml, line 7", "? [a, b]\n: 1\n"),
    lines("an unknown key", "bad.yaml, line 7", "stepz: 5\n"),
    lines("text for a number", "bad.yaml, line 7", "seed: 'zero'\n"),
    lines("a list for a number", "bad.yaml, line 7", "seed: [1, 2]\n"),
    lines("a number of 5000 digits", "bad.yaml, line 7", f"seed: {DIGITS}\n"),
    lines("NaN", "bad.yaml, line 7", "learning_rate: .nan\n"),
    lines("null for a number", "bad.yaml, line 7", "seed: null\n"),
    lines("a group as a number", "lora", "lora: 4\n"),
    recipe("NUL in a path", "model", RECIPE.replace("model: model", 'model: "mod\\0el"')),
    recipe("NUL in the name of the data", "cannot be read", RECIPE.replace("prompts.jsonl", '"prom\\0pts.jsonl"')),
    recipe("NUL in the name of the run", "run", RECIPE.replace("runs/one", '"runs/o\\0ne"')),
    recipe("a model with a long name", "model", RECIPE.replace("model: model", f"model: {'m' * 5000}")),
    recipe("no algorithm", "algorithm", "model: model\n"),
    recipe("a Python placeholder", "bad.yaml", RECIPE.replace("rloo", '"<from Python: Mine>"')),
    Case("recipe a folder", "bad.yaml", ("train", "bad.yaml"), folder("bad.yaml")),
    Case("recipe a pipe", "bad.yaml", ("train", "bad.yaml"), pipe("bad.yaml")),
    Case("recipe without end", "bad.yaml", ("train", "bad.yaml"), endless("bad.yaml")),
    Case("recipe a link to itself", "bad.yaml", ("train", "bad.yaml"), loop("bad.yaml")),
    Case("recipe of terabytes", "bad.yaml", ("train", "bad.yaml"), sparse("bad.yaml")),
    Case("recipe not there", "bad.yaml", ("train", "bad.yaml")),
    Case("recipe of verify", "bad.yaml", ("verify", "bad.yaml"), file("bad.yaml", "stop: &a [*a]\n")),
]
CASES = [*KEYS, *RECIPES]
