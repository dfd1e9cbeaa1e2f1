"""The layers of the package: imports point down, or to a part of the same layer that stands above in the list."""

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "hotcold"

LAYERS: list[list[str]] = [
    ["errors", "user_file", "files", "stopping", "watchdog", "memory", "equations"],
    ["batch"],
    ["algorithms", "models", "prompts", "chat"],
    ["sandbox", "rewards", "sampling", "engines"],
    ["checkpoint", "optim", "runs"],
    ["training", "lab"],
    [
        "toys",
        "config",
        "intake",
        "lineup",
        "assemble",
        "sizing",
        "disk",
        "same_run",
        "attempt",
        "launch",
        "demo",
        "api",
        "verify",
        "bench",
        "doctor",
        "cli",
    ],
]
RANK = {part: (layer, place) for layer, parts in enumerate(LAYERS) for place, part in enumerate(parts)}
WITHOUT_A_LAYER = {"__init__", "__main__"}
LAZY = {"cli", "__init__", "__main__"}  # may import our modules inside functions


def part_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def own_imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """(part, statement) for every import of this package."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "hotcold"
                else [str(node.module)]
            )
        found += [(name.split(".")[1], node) for name in names if name.startswith("hotcold.")]
    return found


def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(SRC.rglob("*.py"))]


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path, _ in modules()} - WITHOUT_A_LAYER
    assert parts <= set(RANK), f"no layer for {sorted(parts - set(RANK))}"


def test_imports_point_to_a_lower_layer_or_above_in_the_same_one() -> None:
    wrong = []
    for path, tree in modules():
        part = part_of(path)
        if part in WITHOUT_A_LAYER:
            continue
        for target, node in own_imports(tree):
            if target != part and (target not in RANK or RANK[target] >= RANK[part]):
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} ({part}) imports {target}")
    assert wrong == []


def test_our_modules_are_imported_at_the_top_only() -> None:
    wrong = []
    for path, tree in modules():
        if part_of(path) in LAZY:
            continue
        for function in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]:
            wrong += [f"{path.relative_to(SRC)}:{node.lineno}" for _, node in own_imports(function)]
    assert wrong == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path, tree in modules():
        name = ".".join(["hotcold", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")
        graph[name] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hotcold"):
                graph[name].add(str(node.module))
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name in done:
            return
        for other in graph.get(name, ()):
            if other != "hotcold":
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_the_loop_is_blind_to_algorithms_engines_and_samplers() -> None:
    """training/ imports only the interfaces, and asks no algorithm what it is."""
    allowed = {"hotcold.algorithms.base", "hotcold.engines.base", "hotcold.sampling.base", "hotcold.rewards.base"}
    wrong = []
    for path in sorted((SRC / "training").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                if module.startswith(("hotcold.algorithms", "hotcold.engines", "hotcold.sampling", "hotcold.rewards")):
                    wrong += [] if module in allowed else [f"{path.name}:{node.lineno} imports {module}"]
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "hasattr")
            ):
                if "algorithm" in ast.unparse(node.args[0]):
                    wrong.append(f"{path.name}:{node.lineno} asks an algorithm what it is")
            if isinstance(node, ast.Constant) and node.value in (
                "reinforce",
                "rloo",
                "grpo",
                "expert_iteration",
                "ppo",
            ):
                wrong.append(f"{path.name}:{node.lineno} names {node.value}")
    assert wrong == []


def test_only_sampling_may_compare_with_a_pad_id() -> None:
    """A mask built by comparing ids with the pad id drops a sampled EOS wherever both are one id (A08)."""
    wrong = []
    for path, tree in modules():
        if part_of(path) == "sampling":
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Compare)
                and any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops)
                and any(
                    "pad_id" in ast.unparse(side) or "pad_token_id" in ast.unparse(side)
                    for side in [node.left, *node.comparators]
                )
            ):
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert wrong == []


def test_nothing_is_unpickled_and_no_remote_code_runs() -> None:
    wrong = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [str(getattr(node, "module", ""))]
                wrong += [
                    f"{path.name}:{node.lineno}" for n in names if n.split(".")[0] in ("pickle", "dill", "joblib")
                ]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                wrong.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    wrong.append(f"{path.name}:{node.value.lineno}")
    assert wrong == []
