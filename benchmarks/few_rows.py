"""Which product is faster for the few rows of a decoding step: x W^T, W x^T, or weights packed by oneDNN?

    python benchmarks/few_rows.py [--threads 2] [--out FOLDER]

The weight shapes of SmolLM2-135M, each with 20 matrices of its own (the head with one), so that weights come from
memory as in decoding. Best of seven. `models/products.py` takes W x^T in its range of rows. Writes results.md.
"""

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path

import torch
from replay_gradient import ROOT, hardware

from hotcold.models.products import FEW

SHAPES = {"query": (576, 576), "key": (576, 192), "up": (576, 1536), "down": (1536, 576), "head": (576, 49152)}
ROWS = (1, 2, 4, 8, 16, 32, 48, 56, 64, 128, 256)
TRIES = 7


def rate(product: Callable[[torch.Tensor], object], weights: list[torch.Tensor], operations: int) -> float:
    """GFLOP/s."""
    best = 0.0
    for _ in range(TRIES):
        start = time.perf_counter()
        for weight in weights:
            product(weight)
        best = max(best, len(weights) * operations / (time.perf_counter() - start))
    return best / 1e9


def measure(rows: int, shape: tuple[int, int]) -> tuple[float, float, float]:
    inner, outer = shape
    x = torch.randn(rows, inner)
    weights = [torch.randn(outer, inner) for _ in range(1 if outer > 10_000 else 20)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
    operations = 2 * rows * inner * outer
    return (
        rate(lambda w: torch.nn.functional.linear(x, w), weights, operations),
        rate(lambda w: (w @ x.t()).t().contiguous(), weights, operations),
        rate(lambda w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), packed, operations),
    )


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.set_grad_enabled(False)
    date, machine = datetime.date.today().isoformat(), hardware(a.threads)
    lines = [
        "# Products for few rows",
        "",
        f"`python benchmarks/few_rows.py --threads {a.threads}`, {date}. {machine['cpu']}, {machine['cores']} cores, "
        f"{a.threads} threads; torch {torch.__version__}. GFLOP/s of x W^T / W x^T / packed; W x^T is taken for "
        f"{FEW.start} to {FEW.stop - 1} rows.",
        "",
        f"| rows | {' | '.join(SHAPES)} |",
        f"|---|{'---|' * len(SHAPES)}",
    ]
    for rows in ROWS:
        cells = [" / ".join(f"{r:.0f}" for r in measure(rows, shape)) for shape in SHAPES.values()]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    out = a.out or ROOT / "benchmarks" / "results" / f"{date}-few-rows"
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
