"""Runs that are continued, and recorded rows."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.malformed.case import Case, Make, copied, cut, endless, file, folder, keys_set, longer, loop, pipe, sparse
from tests.malformed.data import not_utf8

RUN = "runs/one"
LAST, BEFORE = f"{RUN}/checkpoints/step_000002", f"{RUN}/checkpoints/step_000001"
STATE = f"{LAST}/trainer/state.json"


def signed(folder: str = LAST) -> None:
    """A manifest that is right for whatever is in the folder: the damage was done by somebody who knows of it."""
    names = sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())
    sign([entry(folder, name) for name in names if name != "MANIFEST.json"], folder)


def entry(folder: str, name: str) -> dict[str, Any]:
    raw = Path(folder, name).read_bytes()
    return {"path": name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def sign(entries: list[dict[str, Any]], folder: str = LAST) -> None:
    own = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    Path(folder, "MANIFEST.json").write_text(json.dumps({"files": entries, "sha256": own}, indent=1) + "\n")


def resumed(name: str, says: str, *changes: Make) -> Case:
    words = ("train", f"resume={RUN}", "steps=3")
    return Case(f"resume {name}", says, words, copied("whole", RUN, *changes))


def state(name: str, says: str, *changes: Make) -> Case:
    return resumed(f"state {name}", says, *changes, signed)


def progress(**values: Any) -> Make:
    def make() -> None:
        content = json.loads(Path(STATE).read_text())
        Path(STATE).write_text(json.dumps({**content, "progress": {**content["progress"], **values}}))

    return make


RESUMED = [
    resumed("config empty", "config.yaml", file(f"{RUN}/config.yaml", "")),
    resumed("config cut", "config.yaml", cut(f"{RUN}/config.yaml", 30)),
    resumed("config of NUL bytes", "config.yaml", file(f"{RUN}/config.yaml", b"\0" * 500)),
    resumed("config a pipe", "config.yaml", pipe(f"{RUN}/config.yaml")),
    resumed("config without end", "config.yaml", endless(f"{RUN}/config.yaml")),
    resumed("config a link to itself", "config.yaml", loop(f"{RUN}/config.yaml")),
    resumed(
        "config with a Python object", "config.yaml", file(f"{RUN}/config.yaml", "algorithm: !!python/name:os.system\n")
    ),
    resumed("config with another key", "config.yaml", longer(f"{RUN}/config.yaml", "stepz: 1\n")),
    Case("resume a file", "config.yaml", ("train", "resume=reward.py")),
    Case("resume of nothing", "config.yaml", ("train", "resume=runs/two")),
    Case("resume of a model", "config.yaml", ("train", "resume=model")),
    Case("resume by a name with a long path", "resume", ("train", f"resume={'x' * 5000}")),
    resumed(
        "metrics a folder",
        "metrics.jsonl",
        lambda: Path(f"{RUN}/metrics.jsonl").unlink(),
        folder(f"{RUN}/metrics.jsonl"),
    ),
    resumed("metrics a pipe", "metrics.jsonl", pipe(f"{RUN}/metrics.jsonl")),
    resumed("metrics without end", "metrics.jsonl", endless(f"{RUN}/metrics.jsonl")),
    state("empty", "state.json", file(STATE, "")),
    state("half", "state.json", cut(STATE, 50)),
    state("a list", "state.json", file(STATE, "[]")),
    state("an empty object", "state.json", file(STATE, "{}")),
    state("nested too deeply", "state.json", file(STATE, "[" * 100_000)),
    state("without progress", "state.json", keys_set(STATE, without=("progress",))),
    state("with progress of another kind", "state.json", keys_set(STATE, progress=[1])),
    state("with an identity of another kind", "state.json", keys_set(STATE, identity=5)),
    state("with an unknown field", "state.json", progress(mood="good")),
    state("with a step of text", "state.json", progress(step="two")),
    state("with a negative step", "state.json", progress(step=-1)),
    state("with an algorithm of text", "state.json", progress(algorithm="x")),
    state(
        "without an optimizer", "optimizer.safetensors", lambda: Path(LAST, "trainer/optimizer.safetensors").unlink()
    ),
    state("with half an optimizer", "optimizer.safetensors", cut(f"{LAST}/trainer/optimizer.safetensors", 400)),
    state(
        "with an optimizer of text", "optimizer.safetensors", file(f"{LAST}/trainer/optimizer.safetensors", "x" * 99)
    ),
    state("with a model of text", "model.safetensors", file(f"{LAST}/model.safetensors", "x" * 99)),
    state("without a model", "has no weights", lambda: Path(LAST, "model.safetensors").unlink()),
    state("with a config of text", "config.json", file(f"{LAST}/config.json", "llama")),
    state("of another model", "step_000002", keys_set(f"{LAST}/config.json", vocab_size=5)),
]

GOOD = {
    "step": [1, 1],
    "group": [0, 0],
    "episode": [0, 1],
    "prompt_ids": [[1, 2], [1, 2]],
    "response_ids": [[3, 22], [4]],
    "reward": [1.0, 0.0],
}


def replay(name: str, says: str, make: Make) -> Case:
    return Case(f"replay {name}", says, ("sampler=replay:bad.parquet", "!data", "!reward"), make)


def columns(name: str, says: str, without: str = "", **values: Any) -> Case:
    def make() -> None:
        table = {key: value for key, value in {**GOOD, **values}.items() if key != without}
        pq.write_table(pa.table(table), "bad.parquet")

    return replay(name, says, make)


def cut_off() -> None:
    pq.write_table(pa.table(GOOD), "bad.parquet")
    cut("bad.parquet", 300)()


REPLAYED = [
    Case("replay not there", "rows.parquet", ("sampler=replay:rows.parquet",)),
    replay("empty", "bad.parquet", file("bad.parquet", "")),
    replay("of JSON", "bad.parquet", file("bad.parquet", json.dumps(GOOD))),
    replay("cut off", "bad.parquet", cut_off),
    replay("a folder", "bad.parquet", folder("bad.parquet")),
    replay("a pipe", "bad.parquet", pipe("bad.parquet")),
    replay("without end", "bad.parquet", endless("bad.parquet")),
    replay("of terabytes", "bad.parquet", sparse("bad.parquet")),
    columns("without rewards", "reward", without="reward"),
    columns("with a misspelt column", "logp_samplr", logp_samplr=[[0.0, 0.0], [0.0]]),
    columns("without a step", "row 1", step=[1, None]),
    columns("with ids of text", "response_ids", response_ids=[["3"], ["4"]]),
    columns("with a negative id", "row 1", response_ids=[[3], [-4]]),
    columns("with a null id", "row 0", response_ids=[[None], [4]]),
    columns("with an id beyond the vocabulary", "row 1", response_ids=[[3], [10**12]]),
    columns("with no response", "row 0", response_ids=[None, [4]]),
    columns("with rewards of text", "reward", reward=["1.0", "high"]),
    columns("with a reward of NaN", "row 0", reward=[float("nan"), 0.0]),
    columns("with an infinite reward", "row 1", reward=[0.0, float("inf")]),
    columns("with a reward beyond float32", "row 0", reward=[1e300, 0.0]),
    columns("with an episode in two groups", "episode 0", group=[0, 1], episode=[0, 0]),
    columns("with a mask of another length", "row 0", response_mask=[[True], [True]]),
    columns("with a positive log-probability", "row 0", logp_sampler=[[0.5, -1.0], [-1.0]]),
    columns("with a log-probability of NaN", "row 1", logp_sampler=[[-0.5, -1.0], [float("nan")]]),
    columns("with a step outside", "row 0", steps=[[[7.0, 1.0]], []]),
    columns("with steps of text", "row 0", steps=[["a"], []]),
    columns("with parts that are no JSON", "row 0", parts=["{", "{}"]),
    columns("with text that is not UTF-8", "bad.parquet", text=pa.concat_arrays([not_utf8(), not_utf8()])),
    columns("with a row longer than the context", "row 0", response_ids=[[3] * 100, [4]]),
    columns("with no prompt", "row 0", prompt_ids=[[], [1]]),
    columns("with no row", "bad.parquet", **{key: pa.array([], pa.int64()) for key in GOOD}),
]
CASES = [*RESUMED, *REPLAYED]
