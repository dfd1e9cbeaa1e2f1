"""What was measured, as numbers and as a page of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hotcold.bench.watch import STAGES, Seen
from hotcold.models.reading import Laying

NAMES = (*STAGES[:1], "scoring by reward", *STAGES[1:], "everything else")
MEMORY = {"sampling": "memory/sample", "log-probs": "memory/reads", "update": "memory/update"}
LEAST_SHARE = 0.05  # of a step: a smaller part is not worth a word
NEAR = 1.4  # times the limit
NOTABLE = 0.1  # share of a step, or of the computed tokens


@dataclass(frozen=True)
class PartOfStep:
    """Medians over the measured steps. `limit`: necessary work over the matrix rate; None: no matrix arithmetic."""

    name: str
    seconds: float
    share: float  # of the sum of all parts
    limit: float | None = None
    ratio: float | None = None  # seconds / limit
    work: float | None = None  # floating-point operations
    needed_tokens: int | None = None  # each distinct token once in a pass
    computed_tokens: int | None = None  # that went through a model, padding and repetitions included
    peak_memory: float | None = None  # GB, the largest of the steps; as the loop reports it


@dataclass(frozen=True)
class Setting:
    """What the advice and the head of the page depend on."""

    algorithm: str
    model: str
    device: str
    dtype: str
    threads: int
    recomputes: bool = False  # activations, in the backward pass
    laying: Laying = Laying.PACKED
    reads: tuple[str, ...] = ()  # models that are asked before the update
    tokens_per_microbatch: int = 0


@dataclass(frozen=True)
class Measured:
    setting: Setting
    num_steps: int
    parts: tuple[PartOfStep, ...]
    step: PartOfStep
    tokens_per_second: float | None  # sampled tokens (sft: those of the responses), median
    peak_memory: int  # bytes: of the process, or on a GPU of its tensors there
    rates: tuple[float, float]  # operations per second of a matrix product, before and after
    notes: tuple[str, ...] = ()
    verdict: str = ""
    per_step: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.setting),
            "steps": self.num_steps,
            "matrix_rate": {"before": self.rates[0], "after": self.rates[1], "used": max(self.rates)},
            "parts": [asdict(part) for part in self.parts],
            "step": asdict(self.step),
            "tokens_per_second": self.tokens_per_second,
            "peak_memory": self.peak_memory,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "per_step": list(self.per_step),
        }


def seconds_of(metrics: dict[str, Any]) -> dict[str, float]:
    """The loop's own times as parts that do not overlap. What a method does not have takes none."""
    sample, score, logp, update, step = (
        float(metrics.get(f"time/{name}") or 0.0) for name in ("sample", "score", "logp", "update", "step")
    )
    return dict(zip(NAMES, (sample, score, logp, update - logp, step - sample - score - update), strict=True))


def parts_of(steps: Sequence[Seen], rate: float) -> tuple[PartOfStep, ...]:
    times = [seconds_of(seen.metrics) for seen in steps]
    seconds = {name: median(of[name] for of in times) for name in NAMES}
    whole = sum(seconds.values())
    parts = []
    for name in NAMES:
        share = seconds[name] / whole if whole else 0.0
        work = median(seen.work[name] for seen in steps) if name in STAGES else 0
        if not work:
            parts.append(PartOfStep(name, seconds[name], share))
            continue
        needed, computed = (int(median(getattr(seen, k)[name] for seen in steps)) for k in ("needed", "computed"))
        limit = work / rate
        ratio, peak = seconds[name] / limit, _peak(steps, name)
        parts.append(PartOfStep(name, seconds[name], share, limit, ratio, work, needed, computed or None, peak))
    return tuple(parts)


def _peak(steps: Sequence[Seen], name: str) -> float | None:
    return max((peak for seen in steps if (peak := seen.metrics.get(MEMORY[name])) is not None), default=None)


def whole_step(steps: Sequence[Seen], rate: float) -> PartOfStep:
    seconds, work = median(s.metrics["time/step"] for s in steps), median(sum(s.work.values()) for s in steps)
    limit = work / rate
    needed, computed = (int(median(sum(getattr(s, k).values()) for s in steps)) for k in ("needed", "computed"))
    ratio = seconds / limit if limit else None
    return PartOfStep("step", seconds, 1.0, limit or None, ratio, work, needed, computed or None)


# ---- in words


def verdict(parts: Sequence[PartOfStep], setting: Setting) -> str:
    """The part that is farthest from its limit and what can be done; then a part without a limit that is large."""
    known = [part for part in parts if part.ratio is not None and part.share >= LEAST_SHARE]
    said = []
    if known:
        worst = max(known, key=lambda part: part.ratio or 0.0)
        is_near = (worst.ratio or 0.0) <= NEAR
        head = f"Farthest from its limit: {worst.name}, {worst.ratio:.1f} times ({worst.share:.0%} of a step)"
        said.append(f"{head}, which leaves little to gain." if is_near else f"{head}. {advice(worst, setting)}")
    others = {part.name: part for part in parts if part.limit is None and part.share >= NOTABLE}
    if part := others.get("scoring by reward"):
        said.append(f"Scoring takes {part.share:.0%} of a step: make the reward async, or score all responses at once.")
    if part := others.get("everything else"):
        said.append(f"{part.share:.0%} of a step is neither model nor reward: with a model this small, overhead.")
    return " ".join(said) or "No part with matrix arithmetic takes a notable share of a step."


def advice(part: PartOfStep, setting: Setting) -> str:
    if part.name == "sampling":
        return (
            "Each token is computed after the one before it, few rows at a time: more responses in a step "
            "(prompts_per_step, group_size) fill the machine better, a smaller max_tokens cuts the tail of long ones."
        )
    padding = 1 - (part.needed_tokens or 0) / part.computed_tokens if part.computed_tokens else 0.0
    if padding > NOTABLE and setting.laying is Laying.ROWS:
        return f"{padding:.0%} of its tokens are repeated prompts or padding: the prompts of this model are not shared."
    if padding > NOTABLE:
        return f"{padding:.0%} of its tokens are padding or repeated prompts: try another tokens_per_microbatch."
    if part.name == "log-probs":
        dear = {
            "policy": "with epochs_per_batch=1 and minibatches=1 log pi_old need not be computed",
            "reference": "beta=0 needs no reference",
        }
        ways = [text for model, text in dear.items() if model in setting.reads]
        return "; ".join(["With fewer passes a step is shorter", *ways]) + "."
    if setting.recomputes:
        return "gradient_checkpointing computes activations twice; without it a step is faster and needs more memory."
    if (part.needed_tokens or 0) <= setting.tokens_per_microbatch:
        return (
            "It is one micro-batch already, and the optimiser's step costs the same for few tokens as for many: "
            "more responses in a step (prompts_per_step, group_size) cost less each."
        )
    return "A larger tokens_per_microbatch computes more rows at once, as far as memory allows."


def as_text(measured: Measured) -> str:
    setting = measured.setting
    threads = f", {setting.threads} thread{'s' * (setting.threads != 1)}" if setting.device == "cpu" else ""
    before, after = (rate / 1e9 for rate in measured.rates)
    speed = "-" if measured.tokens_per_second is None else f"{measured.tokens_per_second:.1f}"
    lines = [
        f"{setting.algorithm}, {setting.model}, {setting.device}, {setting.dtype}{threads}: "
        f"medians of {measured.num_steps} step{'s' * (measured.num_steps != 1)} after one to warm up",
        "",
        f"{'part':<18}{'seconds':>10}{'limit':>10}{'x limit':>9}{'share':>8}{'tokens needed':>15}{'computed':>10}"
        f"{'peak GB':>9}",
        *(_line(part) for part in (*measured.parts, measured.step)),
        "",
        f"{'tokens per second':<18}{speed:>10}",
        f"{'peak memory':<18}{measured.peak_memory / 1e9:>10.2f} GB",
        f"{'matrix rate':<18}{max(before, after):>10.1f} GFLOP/s ({before:.1f} before the steps, {after:.1f} after)",
        "",
        measured.verdict,
        *(f"note: {note}" for note in measured.notes),
    ]
    return "\n".join(lines)


def _line(part: PartOfStep) -> str:
    limit, ratio = ("-" if x is None else f"{x:.3g}" for x in (part.limit, part.ratio))
    needed, computed = ("-" if n is None else str(n) for n in (part.needed_tokens, part.computed_tokens))
    peak = "-" if part.peak_memory is None else f"{part.peak_memory:.2f}"
    times = f"{part.name:<18}{part.seconds:>10.3g}{limit:>10}{ratio:>9}{part.share:>8.1%}"
    return f"{times}{needed:>15}{computed:>10}{peak:>9}"
