"""Do the tests see it when an equation is wrong? Small faults, one at a time, against the tests without a model.

    make mutants     (or: python benchmarks/mutants.py [--only FILE ...] [--limit N] [--jobs 1] [--list] [--out FOLDER])

A mutant is the package with one expression changed: a sign, an index by 1, min for max, < for <=, a detach, mask or
clamp that is gone, sum for mean, another denominator, `and` for `or`. All of `equations/`, `batch.py`, `algorithms/`
and `training/batching.py` are changed, except texts, tables and checks of what a user gives: `raise`, `assert`,
conditions of a `raise`, functions named check_*, default values, and the files in LEFT_OUT. `--limit` takes a sample
of fixed seed that has every file and operator in it as far as it reaches.

Source and tests are copied to a temporary folder and changed there, never in the working tree. One process imports what
is slow, forks for each mutant, and the child runs pytest until the first failure: first the tests of the changed file,
then the others. It may take 20 s of CPU time (other work on the machine does not count). A mutant that no test kills is
a survivor, unless equivalent_mutants.toml proves that no input can tell. Before all, the unchanged package must pass,
and each file with a `raise` at its end must fail. Writes results.json and results.md; exit code 1 if fewer than 98 % of
the mutants that are not equivalent are killed, if there are fewer than 200, or if one that is called equivalent is
killed or is not there.
"""

import argparse
import ast
import collections
import compileall
import datetime
import gc
import hashlib
import importlib
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hotcold"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
CPU_SECONDS, WALL_SECONDS = 20, 600
LEAST_SHARE, LEAST_NUMBER = 0.98, 200
PACKAGES = ("hotcold", "torch", "numpy", "pytest")
PRELOADED = (  # what the package and the tests import, so that a fork has it
    "torch",
    "torch._dynamo",
    "numpy",
    "pytest",
    "pydantic",
    "hypothesis",
    "polgrad",
    "safetensors.torch",
    "tokenizers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
LEFT_OUT = {  # tables of presets and keys, and checks of what a user gives
    "algorithms/presets.py",
    "algorithms/checks.py",
    "algorithms/rehearsal.py",
    "algorithms/options.py",
    "algorithms/build.py",
}


# ---- what is changed

NEAR = {"min": "max", "minimum": "maximum", "amin": "amax", "cummin": "cummax"}
OPPOSITE = {**NEAR, **{v: k for k, v in NEAR.items()}}
MEANS = {"mean": "sum", "sum": "mean", "masked_mean": "masked_sum", "masked_sum": "masked_mean"}
AXIS_METHODS = {"sum", "mean", "any", "all", "amax", "amin", "cumsum", "cummin", "flip", "gather", "logsumexp"}
COUNTS = re.compile(r"mask|trained|any\(|^self$|^groups$")  # sums of bools, whose mean is an error of dtype; no tensors
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def name_of(call: ast.AST) -> str:
    """Of `f(x)` and `a.f(x)`: f; of everything else nothing."""
    f = call.func if isinstance(call, ast.Call) else None
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def changed(node: ast.AST, **fields: object) -> ast.AST:
    copy = deepcopy(node)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def renamed(call: ast.Call, name: str) -> ast.AST:
    f = call.func
    return changed(call, func=changed(f, attr=name) if isinstance(f, ast.Attribute) else ast.Name(name))


def integer(node: ast.AST | None) -> int | None:
    """The value of 3 and of -3."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and (value := integer(node.operand)) is not None:
        return -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def shifted(node: ast.AST, by: int) -> ast.expr:
    value = integer(node)
    if value is not None:
        return ast.Constant(value + by)
    return ast.BinOp(deepcopy(node), ast.Add() if by > 0 else ast.Sub(), ast.Constant(1))


def is_collection(node: ast.BinOp) -> bool:
    """[True] * n and names - {"logp"} are no arithmetic."""
    return any(isinstance(side, (ast.List, ast.Set)) for side in (node.left, node.right))


def sign(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and not is_collection(node):
        yield changed(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    if isinstance(node, ast.BinOp) and (integer(node.left) or 0) < 0:
        yield changed(node, left=ast.Constant(-integer(node.left)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and integer(node) is None:
        yield node.operand
    if isinstance(node, ast.Call) and name_of(node) == "neg":
        yield node.func.value


def product(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and not is_collection(node):
        yield changed(node, op=ast.Div() if isinstance(node.op, ast.Mult) else ast.Mult())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield changed(node, op=ast.Mult())


def denominator(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        yield changed(node, right=shifted(node.right, 1))
        yield node.left


def index(node: ast.AST) -> Iterator[ast.AST]:
    """Integers in subscripts, bounds of slices, ends of ranges, shifts, axes, and `+ 1` in sums, by 1."""
    if isinstance(node, ast.Subscript):
        yield from _subscripts(node)
    elif isinstance(node, ast.Call) and name_of(node) in ("arange", "range", "roll") and node.args:
        place = 0 if name_of(node) == "roll" else min(1, len(node.args) - 1)
        for by in (1, -1):
            yield changed(node, args=[shifted(a, by) if i == place else a for i, a in enumerate(node.args)])
    elif isinstance(node, ast.Call) and name_of(node) in AXIS_METHODS and node.args:
        axis = integer(node.args[0])
        if axis is not None:
            yield changed(node, args=[ast.Constant({0: 1, 1: 0}.get(axis, axis - 1)), *node.args[1:]])
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if integer(node.right) is not None:
            yield node.left
        elif integer(node.left) is not None and isinstance(node.op, ast.Add):
            yield node.right


def _subscripts(node: ast.Subscript) -> Iterator[ast.AST]:
    for number in range(len(_places(node))):
        for by in (1, -1):
            copy = deepcopy(node)
            holder, name, where = _places(copy)[number]
            value = getattr(holder, name)
            if name in ("elts", "slice") and by > 0 and (integer(value if where is None else value[where]) or 0) > 0:
                continue  # beyond the end of most: an error, no fault
            if where is None:
                setattr(holder, name, shifted(value, by))
            else:
                value[where] = shifted(value[where], by)
            yield copy


def _places(node: ast.Subscript) -> list[tuple[ast.AST, str, int | None]]:
    """Where the integers and the bounds of slices of a subscript stand: object, its field, place in the field."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    out: list[tuple[ast.AST, str, int | None]] = []
    for i, part in enumerate(parts):
        if isinstance(part, ast.Slice):
            out += [(part, bound, None) for bound in ("lower", "upper") if getattr(part, bound) is not None]
        elif integer(part) is not None:
            out.append((node.slice, "elts", i) if isinstance(node.slice, ast.Tuple) else (node, "slice", None))
    return out


def extremum(node: ast.AST) -> Iterator[ast.AST]:
    """min for max; a bound that is gone."""
    if isinstance(node, ast.Constant) and node.value in OPPOSITE:
        yield ast.Constant(OPPOSITE[node.value])
    if not isinstance(node, ast.Call):
        return
    if name_of(node) in OPPOSITE:
        yield renamed(node, OPPOSITE[name_of(node)])
    elif name_of(node) == "clamp":
        yield node.func.value
        bounds = node.keywords or [ast.keyword(n, value) for n, value in zip(("min", "max"), node.args, strict=False)]
        if len(bounds) == 1:
            yield changed(node, args=[], keywords=[ast.keyword(OPPOSITE[bounds[0].arg], bounds[0].value)])
        for bound in bounds if len(bounds) == 2 else []:
            yield changed(node, args=[], keywords=[bound])


def comparison(node: ast.AST) -> Iterator[ast.AST]:
    for i, op in enumerate(node.ops) if isinstance(node, ast.Compare) else ():
        if type(op) in COMPARISONS:
            yield changed(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]])


def detach(node: ast.AST) -> Iterator[ast.AST]:
    if name_of(node) == "detach":
        yield node.func.value


def mask(node: ast.AST) -> Iterator[ast.AST]:
    """A torch.where that always takes one side (not one that is a mere number), a selection that takes all."""
    if name_of(node) == "where":
        yield from (side for side in node.args[1:] if not isinstance(side, ast.Constant))
    if isinstance(node, ast.Subscript) and re.search(r"(mask|keep)$| [<>] ", ast.unparse(node.slice)):
        yield node.value


def mean(node: ast.AST) -> Iterator[ast.AST]:
    if name_of(node) not in MEANS:
        return
    of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name_of(node).startswith("masked") or (of and not COUNTS.search(of)):
        yield renamed(node, MEANS[name_of(node)])


def logic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield changed(node, op=ast.BitOr() if isinstance(node.op, ast.BitAnd) else ast.BitAnd())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield node.operand
    if isinstance(node, ast.Call) and name_of(node) in ("any", "all"):
        yield renamed(node, "all" if name_of(node) == "any" else "any")


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "sign": sign,
    "product": product,
    "denominator": denominator,
    "index by 1": index,
    "min/max": extremum,
    "comparison": comparison,
    "detach": detach,
    "mask": mask,
    "mean/sum": mean,
    "and/or/not": logic,
}


@dataclass(frozen=True)
class Mutant:
    file: str  # under src/hotcold
    line: int
    function: str
    code: str  # the line
    operator: str
    mutation: str
    source: str  # the whole file, changed

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.code, self.mutation


def is_check(node: ast.AST) -> bool:
    named = getattr(node, "name", "") or name_of(node)
    return bool(re.match(r"_?check_|__post_init__$", named)) or isinstance(node, (ast.Raise, ast.Assert))


def candidates(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every expression in a function that is computed, with the function's name."""
    if is_check(node) or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".lstrip(".")
        children: list[ast.AST] = list(node.body)
    elif isinstance(node, ast.If) and all(isinstance(statement, ast.Raise) for statement in node.body):
        children = list(node.orelse)
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.expr) and function:
        yield node, function
    for child in children:
        yield from candidates(child, function)


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file; of two alike, as of one function with a line twice, the second is called `... (2)`."""
    seen: collections.Counter = collections.Counter()
    lines = text.encode().splitlines(keepends=True)  # columns of `ast` count bytes
    for node, function in candidates(ast.parse(text)):
        before = b"".join([*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]])
        after = b"".join([lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]])
        for operator, mutate in OPERATORS.items():
            for new in mutate(node):
                mutation = f"{ast.unparse(node)} -> {ast.unparse(new)}"
                code = lines[node.lineno - 1].decode().strip()
                seen[function, code, mutation] += 1
                if (times := seen[function, code, mutation]) > 1:
                    mutation += f" ({times})"
                source = (before + f"({ast.unparse(new)})".encode() + after).decode()
                yield Mutant(file, node.lineno, function, code, operator, mutation, source)


def files() -> list[str]:
    paths = [*PACKAGE.glob("equations/*.py"), PACKAGE / "batch.py", *PACKAGE.glob("algorithms/*.py")]
    names = [str(path.relative_to(PACKAGE)) for path in [*paths, PACKAGE / "training" / "batching.py"]]
    return sorted(name for name in names if name not in LEFT_OUT and not name.endswith("__init__.py"))


def sample(mutants: list[Mutant], number: int) -> list[Mutant]:
    """`number` of them: first one of each file and operator as far as they reach, then by chance; in their order."""
    drawn = random.Random(0).sample(mutants, len(mutants))
    first: dict[tuple[str, str], Mutant] = {}
    for m in drawn:
        first.setdefault((m.file, m.operator), m)
    chosen = {id(m) for m in [*first.values(), *(m for m in drawn if m not in first.values())][:number]}
    return [m for m in mutants if id(m) in chosen]


# ---- running the tests

OF_EQUATIONS = (
    "tests/equations",
    "tests/test_batch.py",
    "tests/algorithms/test_credit.py",
    "tests/algorithms/test_ppo_by_hand.py",
)
OF_ALGORITHMS = (  # and of batches; an equation knows none of them, so its tests cannot tell
    "tests/test_batch.py",
    "tests/algorithms/test_credit.py",
    "tests/algorithms/test_ppo_by_hand.py",
    "tests/algorithms/test_build.py",
    "tests/training/test_batching.py",
    "tests/training/test_truncation.py",
    "tests/algorithms/test_kl_exact.py",
    "tests/algorithms/test_exact_gradients.py",
)
SLOW = re.compile(  # left out: the same enumeration with more responses
    r"test_exact_gradients\.py::.*([\[-][34]\]|group[1-9]|two_prompts|tool_token)|test_kl_exact\.py::.*rloo-group1"
)
OWN = {  # beside tests/equations/test_NAME.py
    "equations/checks.py": ("tests/equations/test_contract.py",),
    "batch.py": ("tests/test_batch.py", "tests/algorithms/test_credit.py"),
    "training/batching.py": ("tests/training/test_batching.py",),
    "algorithms/ppo.py": ("tests/algorithms/test_ppo_by_hand.py",),
    "algorithms/kl.py": ("tests/algorithms/test_credit.py", "tests/algorithms/test_kl_exact.py"),
}


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """What runs first, and what runs after it: tests without a model."""
    named = f"tests/equations/test_{Path(file).name}"
    is_equation = file.startswith("equations/")
    first = [named] if is_equation and (ROOT / named).exists() else list(OWN.get(file, OF_ALGORITHMS[1:4]))
    return first, [name for name in (OF_EQUATIONS if is_equation else OF_ALGORITHMS) if name not in first]


class Watch:
    """A pytest plugin that leaves out slow tests and keeps the name of the first failure."""

    def __init__(self) -> None:
        self.first = ""

    def note(self, report) -> None:
        self.first = self.first or (report.nodeid if report.failed else "")

    pytest_runtest_logreport = pytest_collectreport = note

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if not SLOW.search(item.nodeid)]


def run_tests(src: Path, file: str, answer: Path) -> None:
    """In the child: run pytest, write the first failure (or nothing) to `answer`, end."""
    import pytest

    signal.alarm(WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    output = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(src.parent)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[:0] = [str(src), str(src.parent)]
    watch = Watch()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    ends = []
    for names in tests_of(file):
        ends.append(int(pytest.main([*options, *names], plugins=[watch])))
        if watch.first or ends[-1]:
            break
    import hotcold

    inside = Path(hotcold.__file__).is_relative_to(src) if hasattr(hotcold, "__file__") else False
    answer.write_text(json.dumps({"failure": watch.first, "ends": ends, "inside": inside}))


@dataclass(frozen=True)
class Outcome:
    end: str  # "killed", "survived" or "time-out"
    test: str  # the first that failed
    seconds: float  # CPU
    wall: float


class Worker:
    """A copy of source and tests, in which one mutant at a time is tried."""

    def __init__(self, folder: Path):
        self.root, self.src = folder, folder / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, self.src / "hotcold", ignore=ignored)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        compileall.compile_dir(folder, quiet=2)
        self.whole: dict[str, str] = {}
        self.pid, self.started = 0, 0.0

    def start(self, file: str, source: str | None) -> None:
        """Fork a child that tries `source` in the place of `file` (None: unchanged)."""
        path = self.src / "hotcold" / file
        self.file = file
        if source is not None:
            self.whole[file] = path.read_text()
            path.write_text(source)
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink()
        (self.root / "answer").unlink(missing_ok=True)
        self.started = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                sys.dont_write_bytecode = source is not None
                run_tests(self.src, file, self.root / "answer")
            finally:
                os._exit(0)

    def end(self, status: int, used: resource.struct_rusage) -> Outcome:
        """After the child has ended: restore the file, say how it went."""
        if self.file in self.whole:
            (self.src / "hotcold" / self.file).write_text(self.whole.pop(self.file))
        seconds, wall = used.ru_utime + used.ru_stime, time.perf_counter() - self.started
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM):
            return Outcome("time-out", "", seconds, wall)
        log = (self.root / "answer.log").read_text()[-3000:]
        if os.WIFSIGNALED(status) or not (self.root / "answer").exists():
            raise SystemExit(f"{self.file}: the child ended without an answer (status {status}).\n{log}")
        answer = json.loads((self.root / "answer").read_text())
        if answer["failure"]:
            return Outcome("killed", answer["failure"], seconds, wall)
        if any(answer["ends"]) or not answer["inside"]:
            raise SystemExit(f"{self.file}: pytest ended with {answer}.\n{log}")
        return Outcome("survived", "", seconds, wall)


def try_all(jobs: list[tuple[str, str | None]], workers: list[Worker], shown: Callable[[int, Outcome], None]) -> None:
    """Every (file, source) once, as many at a time as there are workers."""
    waiting, running, free = list(enumerate(jobs)), {}, list(workers)
    while waiting or running:
        while waiting and free:
            number, (file, source) = waiting.pop(0)
            worker = free.pop()
            worker.start(file, source)
            running[worker.pid] = number, worker
        pid, status, used = os.wait4(-1, 0)
        number, worker = running.pop(pid)
        free.append(worker)
        shown(number, worker.end(status, used))


def controls(workers: list[Worker], names: list[str]) -> dict:
    """The unchanged package passes, for each file with its own order of the tests; a file that cannot be read fails."""
    seconds: list[float] = []

    def unchanged(number: int, outcome: Outcome) -> None:
        if outcome.end != "survived":
            raise SystemExit(f"The unchanged package fails: {outcome}")
        seconds.append(outcome.seconds)
        print(f"control: unchanged, {outcome.seconds:.1f} s of CPU", flush=True)

    def broken(number: int, outcome: Outcome) -> None:
        if outcome.end != "killed":
            raise SystemExit(f"{names[number]} with a raise at its end: {outcome}. The tests do not import the copy.")

    for worker in workers:  # one after the other: they write the caches
        for name in dict.fromkeys([names[0], names[-1], *(n for n in names if n.startswith("equations/"))][:3]):
            try_all([(name, None)], [worker], unchanged)
    ends = [(name, (PACKAGE / name).read_text() + "\nraise RuntimeError('control')\n") for name in names]
    try_all(ends, workers, broken)
    print(f"control: {len(names)} files with a raise at their end, all found", flush=True)
    return {"unchanged_cpu_seconds": max(seconds), "broken_files_found": len(names)}


# ---- the report


def equivalents() -> dict[tuple[str, str, str, str], str]:
    rows = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    return {(r["file"], r["function"], r["code"], r["mutation"]): r["reason"] for r in rows}


def hardware(jobs: int) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "jobs": jobs, "python": platform.python_version()}


def verdict(rows: list[dict], stale: list[tuple], whole: bool) -> tuple[list[str], dict]:
    """What is wrong, in sentences (nothing: all is well), and the counts."""
    counts = collections.Counter(r["end"] for r in rows)
    equivalent = sum(r["equivalent"] != "" for r in rows)
    judged = len(rows) - equivalent
    killed = sum(r["end"] != "survived" and not r["equivalent"] for r in rows)
    share = killed / judged if judged else 0.0
    refuted = [r for r in rows if r["equivalent"] and r["end"] != "survived"]
    wrong = [f"{r['file']}:{r['line']} `{r['mutation']}` is called equivalent: {r['end']} {r['test']}" for r in refuted]
    wrong += [f"equivalent_mutants.toml: no such mutant: {' | '.join(key)}" for key in stale]
    if share < LEAST_SHARE:
        wrong.append(f"Only {share:.2%} are killed; needed {LEAST_SHARE:.0%}.")
    if whole and len(rows) < LEAST_NUMBER:
        wrong.append(f"Only {len(rows)} mutants; needed {LEAST_NUMBER}.")
    numbers = {"mutants": len(rows), "equivalent": equivalent, "killed": killed, "share": share}
    return wrong, {**numbers, "time_outs": counts["time-out"]}


def table(rows: list[dict], column: str) -> list[str]:
    lines = [
        f"| {column} | mutants | killed | of these time-outs | equivalent | survivors |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r[column] for r in rows):
        mine = [r for r in rows if r[column] == name]
        ends = collections.Counter(r["end"] for r in mine if not r["equivalent"])
        counts = (
            len(mine),
            ends["killed"] + ends["time-out"],
            ends["time-out"],
            len(mine) - ends.total(),
            ends["survived"],
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return lines


def listed(rows: list[dict]) -> list[str]:
    return [f"- `{r['file']}:{r['line']}` `{r['function']}`: `{r['mutation']}`" for r in rows] or ["None."]


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    machine, versions, rows, n = results["hardware"], results["versions"], results["mutants"], results["counts"]
    control = results["controls"]
    equivalent = [f"{line}. {r['equivalent']}" for r in rows if r["equivalent"] for line in listed([r])]
    lines = [
        "# Do the tests see a wrong equation?",
        "",
        f"`{results['command']}`, {results['date']}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['jobs']} at a time, each on one core; Python {machine['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}. "
        f"SHA-256 of the sources that were changed `{results['sources_sha256']}`.",
        "",
        f"{n['mutants']} mutants of {results['generated']} that were generated, one at a time, each against the tests "
        f"without a model until the first failure. {n['killed']} killed ({n['time_outs']} of these by the limit of "
        f"{CPU_SECONDS} s of CPU time), {n['equivalent']} equivalent (no input can tell, with the reason below): "
        f"**{n['share']:.1%} of those not equivalent are killed** (at least {LEAST_SHARE:.0%} expected).",
        "",
        f"The unchanged package passes these tests in {control['unchanged_cpu_seconds']:.1f} s of CPU time; a `raise` "
        f"at the end of a file is found in all {control['broken_files_found']}. "
        f"{results['cpu_seconds'] / 60:.1f} minutes of CPU time in all, {results['seconds'] / 60:.1f} on the clock.",
        "",
        *(f"**{sentence}**\n" for sentence in results["wrong"]),
        *table(rows, "file"),
        "",
        *table(rows, "operator"),
        "",
        "## Survivors",
        "",
        *listed([r for r in rows if r["end"] == "survived" and not r["equivalent"]]),
        "",
        "## Killed by the time limit",
        "",
        *listed([r for r in rows if r["end"] == "time-out"]),
        "",
        "## Equivalent",
        "",
        *(equivalent or ["None."]),
        "",
    ]
    (out / "results.md").write_text("\n".join(lines))


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--only", nargs="+", default=files(), choices=files(), metavar="FILE")
    p.add_argument("--limit", type=int, default=None)
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--list", action="store_true", help="print the mutants and end")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    start, date = time.perf_counter(), datetime.date.today().isoformat()
    sources = {name: (PACKAGE / name).read_text() for name in a.only}
    generated = [mutant for name, text in sources.items() for mutant in mutants_of(name, text)]
    mutants = generated if a.limit is None else sample(generated, a.limit)
    if a.list:
        print(*(f"{m.file}:{m.line} {m.function} [{m.operator}] {m.mutation}" for m in mutants), sep="\n")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork keeps no threads
    for name in PRELOADED:
        importlib.import_module(name)
    assert "hotcold" not in sys.modules and threading.active_count() == 1
    gc.freeze()
    known, rows = equivalents(), []

    def shown(number: int, outcome: Outcome) -> None:
        m = mutants[number]
        row = {key: value for key, value in asdict(m).items() if key != "source"}
        rows.append({"number": number, **row, "equivalent": known.get(m.key, ""), **asdict(outcome)})
        mark = "equivalent" if rows[-1]["equivalent"] and outcome.end == "survived" else outcome.end
        where = f"{m.file}:{m.line}"
        print(f"{len(rows):>4}/{len(mutants)} {mark:<10} {outcome.wall:5.1f} s  {where:<34} {m.mutation}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(Path(folder) / str(i)) for i in range(a.jobs)]
        control = controls(workers, a.only)
        try_all([(m.file, m.source) for m in mutants], workers, shown)
    rows.sort(key=lambda row: row["number"])
    there = {m.key for m in generated}
    stale = [key for key in known if key[0] in a.only and key not in there]
    wrong, counts = verdict(rows, stale, whole=a.only == files() and a.limit is None)
    results = {
        "date": date,
        "command": " ".join(["python benchmarks/mutants.py", *(w for w in sys.argv[1:] if a.out is None)]),
        "hardware": hardware(a.jobs),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "sources_sha256": hashlib.sha256("".join(sources.values()).encode()).hexdigest(),
        "generated": len(generated),
        "controls": control,
        "counts": counts,
        "wrong": wrong,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
        "mutants": rows,
    }
    write(a.out or ROOT / "benchmarks" / "results" / f"{date}-mutants", results)
    print(f"{counts['killed']} of {counts['mutants'] - counts['equivalent']} killed ({counts['share']:.1%}).")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
