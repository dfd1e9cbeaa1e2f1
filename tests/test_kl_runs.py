"""Whole runs with a leash: which reference, where it stays, what is reported, and how beta moves."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.test_end_to_end import here, metrics, same, train, weights
from tests.tiny_model import write_tiny

__all__ = ["here"]  # the fixture

TEMPERATURE = 0.8


def leashed(*words: str, run: str = "runs/one", algorithm: str = "rloo", steps: int = 3) -> int:
    given = {word.split("=")[0] for word in words}
    settings = ("beta=0.1", "learning_rate=0.02", f"temperature={TEMPERATURE}", "save_every=1", "keep_checkpoints=9")
    common = [word for word in (*settings, "eval.every=0") if word.split("=")[0] not in given]
    return train(*common, *words, run=run, algorithm=algorithm, steps=steps)


def environment(run: str) -> list[dict[str, Any]]:
    return json.loads(Path(run, "env.json").read_text())["attempts"]


def state(run: str, step: int) -> dict[str, Any]:
    return json.loads(Path(run, "checkpoints", f"step_{step:06d}", "trainer", "state.json").read_text())


def file_sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# ---- the reference


def test_a_reference_given_by_path_is_known_by_its_weights_wherever_it_lies(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(here / "ref", seed=1)
    write_tiny(here / "another", seed=2)
    assert leashed("reference=ref", steps=1) == 0
    expected = file_sha256("ref/model.safetensors")
    assert f"the reference is ref (SHA-256 {expected[:12]})" in capsys.readouterr().out
    assert environment("runs/one")[0]["reference_sha256"] == expected == state("runs/one", 1)["reference_sha256"]
    assert metrics("runs/one")[0]["kl"] > 1e-3  # another model than the policy from the first step on
    for words in (["reference=another"], []):
        before = Path("runs/one/metrics.jsonl").read_text()
        assert leashed(*words, "resume=auto", steps=2) == 2
        assert "the reference's weights are not the same" in capsys.readouterr().err
        assert Path("runs/one/metrics.jsonl").read_text() == before
    shutil.copytree("ref", "moved")
    shutil.rmtree("ref")
    assert leashed("reference=moved", "resume=auto", steps=2) == 0
    assert [attempt["reference_sha256"] for attempt in environment("runs/one")][-1] == expected


def test_a_reference_that_is_not_there_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leashed("reference=nowhere") == 2
    message = capsys.readouterr().err
    assert "reference=nowhere" in message and len(message.strip().splitlines()) <= 5
    assert not Path("runs").exists()


def test_without_beta_no_reference_is_held_and_none_may_be_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leashed("beta=0", steps=1) == 0
    assert "the reference is" not in capsys.readouterr().out
    assert environment("runs/one")[0]["reference_sha256"] is None
    assert state("runs/one", 1)["reference_sha256"] is None
    assert not {"kl", "kl/response", "beta"} & metrics("runs/one")[0].keys()
    assert leashed("beta=0", "reference=model", run="runs/two", steps=1) == 2
    assert "reference=model has no effect" in capsys.readouterr().err
    assert leashed(run="runs/three", steps=1) == 0
    assert "the reference is the starting model" in capsys.readouterr().out
    assert environment("runs/three")[0]["reference_sha256"] == file_sha256("model/model.safetensors")


def test_the_policys_own_folder_as_the_reference_is_a_copy_that_does_not_follow(here: Path) -> None:
    """D07: KL 0 at first, above 0 after one update; the same run as with the starting model by default."""
    assert leashed("reference=model") == 0
    kl = [row["kl"] for row in metrics("runs/one")]
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-5 and kl[2] > 1e-5
    assert leashed(run="runs/default") == 0
    assert same(weights("runs/one/model"), weights("runs/default/model"))
    assert [row["kl"] for row in metrics("runs/default")] == kl


# ---- what is reported


def logp_of_states(folder: str | Path, rows: list[dict[str, Any]]) -> list[Tensor]:
    """[n, V] for each row: log-probabilities at the sampling temperature in the state of every response token."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = []
    for row in rows:
        ids, first = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, first - 1 : -1]
        out.append((logits / TEMPERATURE).double().log_softmax(-1))
    return out


def recounted(policy: str | Path, reference: str, file: str, exact: bool) -> tuple[float, float]:
    """KL per token (k3, or exact) and per response (k1, or exact) of the recorded rows."""
    rows = pq.read_table(file).to_pylist()
    per_token, per_response = [], []
    pairs = zip(logp_of_states(policy, rows), logp_of_states(reference, rows), rows, strict=True)
    for ours, theirs, row in pairs:
        chosen = torch.tensor(row["response_ids"])[:, None]
        d = (ours - theirs).gather(1, chosen)[:, 0]
        whole = (ours.exp() * (ours - theirs)).sum(1)
        per_token.append(whole if exact else (-d).exp() - 1 + d)
        per_response.append(float((whole if exact else d).sum()))
    return float(torch.cat(per_token).mean()), sum(per_response) / len(rows)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [("rloo", []), ("grpo", []), ("rloo", ["kl.estimator=exact"]), ("ppo", ["reference=ref"])],
    ids=["rloo k1", "grpo k3", "exact", "ppo, given reference"],
)
def test_the_kl_of_a_resumed_run_is_that_of_its_policy_to_the_reference_it_began_with(
    here: Path, algorithm: str, words: list[str]
) -> None:
    """From the checkpoint before each step and the rows sampled in it; step 3 is the first after the resume."""
    write_tiny(here / "ref", seed=1)
    reference = "ref" if "reference=ref" in words else "model"
    assert leashed(*words, algorithm=algorithm, steps=2) == 0
    assert leashed(*words, "resume=auto", algorithm=algorithm, steps=3) == 0
    policies = ["model", *[f"runs/one/checkpoints/step_00000{step}" for step in (1, 2)]]
    for row, policy in zip(metrics("runs/one"), policies, strict=True):
        file = f"runs/one/rollouts/step_{row['step']:06d}.parquet"
        per_token, per_response = recounted(policy, reference, file, exact="kl.estimator=exact" in words)
        assert row["kl"] == pytest.approx(per_token, rel=1e-3, abs=1e-6), row["step"]
        assert row["kl/response"] == pytest.approx(per_response, rel=1e-3, abs=1e-5), row["step"]
    assert metrics("runs/one")[-1]["kl"] > 1e-4


def test_beta_moves_towards_the_target_by_the_responses_of_each_step(here: Path) -> None:
    """beta' = beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), n = 12 responses."""
    target, horizon = 0.02, 60
    words = [f"kl.target={target}", f"kl.horizon={horizon}"]
    assert leashed(*words, steps=5) == 0
    rows = metrics("runs/one")
    beta, moves = 0.1, []
    for row in rows:
        assert row["beta"] == pytest.approx(beta, rel=1e-6)
        moves.append(min(max(row["kl/response"] / target - 1, -0.2), 0.2))
        beta *= 1 + moves[-1] * 12 / horizon
    assert state("runs/one", 5)["progress"]["algorithm"]["beta"] == pytest.approx(beta, rel=1e-6)
    assert moves[0] == -0.2 and max(moves) > 0  # it fell at KL 0 and rose once the policy had moved


def test_a_strong_leash_keeps_the_policy_nearer_than_none(here: Path) -> None:
    """The mean KL of the sampled tokens to the start, recounted for both, since without beta none is reported."""
    words = ["learning_rate=0.02", "kl.estimator=exact"]
    assert leashed(*words, "beta=2", steps=12) == 0
    assert leashed("learning_rate=0.02", "beta=0", run="runs/free", steps=12) == 0
    ends = [
        recounted(f"runs/{run}/model", "model", f"runs/{run}/rollouts/step_000012.parquet", True)[0]
        for run in ("one", "free")
    ]
    assert ends[0] < 0.25 * ends[1]
