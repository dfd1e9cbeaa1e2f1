"""Whole runs that train adapters: what stays, what is written, resuming, the critic's, the reference."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hotcold.assemble import assemble
from hotcold.config.schema import Config
from hotcold.models.adapters import AdapterOff, StartingAdapter
from tests.test_end_to_end import here, metrics, same, train, weights
from tests.test_kl_runs import TEMPERATURE, recounted

__all__ = ["here"]  # the fixture

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = ("lora.rank=2", "learning_rate=0.02", "eval.every=0", "save_every=1", "keep_checkpoints=9")


def lora(*words: str, run: str = "runs/one", algorithm: str = "rloo", steps: int = 3) -> int:
    given = {word.split("=")[0] for word in words}
    common = [word for word in LORA if word.split("=")[0] not in given]
    return train(*common, *words, run=run, algorithm=algorithm, steps=steps)


def checkpoint(run: str, step: int) -> Path:
    return Path(run, "checkpoints", f"step_{step:06d}")


def trainer(run: str, step: int) -> dict[str, dict[str, Tensor]]:
    return {path.stem: load_file(path) for path in (checkpoint(run, step) / "trainer").glob("*.safetensors")}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 10, 2, 11, 13], [4, 5, 6, 7, 8]])).logits


def sum_of(folder: str, name: str, base: Tensor) -> Tensor:
    """W + alpha/rank B A of one layer, from the files of a PEFT folder."""
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    stored = load_file(Path(folder) / "adapter_model.safetensors")
    layer = "base_model.model." + name.removesuffix(".weight")
    a, b = stored[f"{layer}.lora_A.weight"], stored[f"{layer}.lora_B.weight"]
    return base + (b @ a) * (config["lora_alpha"] / config["r"])


def is_adapted(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in LINEAR


# ---- what is written


def test_the_model_is_its_base_bit_for_bit_plus_the_adapter(here: Path) -> None:
    """D09: nothing was ever added to a base parameter and taken away again."""
    assert lora(steps=3) == 0
    base, merged = weights("model"), weights("runs/one/model")
    assert base.keys() == merged.keys() and any(map(is_adapted, base))
    for name, tensor in merged.items():
        assert torch.equal(tensor, sum_of("runs/one/adapter", name, base[name]) if is_adapted(name) else base[name])
        assert torch.equal(tensor, base[name]) != is_adapted(name)
        assert tensor.dtype == torch.float32


def test_plain_peft_loads_the_adapter_of_a_run_and_of_its_checkpoints(here: Path) -> None:
    assert lora(steps=2) == 0
    base = AutoModelForCausalLM.from_pretrained("model")
    merged = logits(AutoModelForCausalLM.from_pretrained("runs/one/model"))
    assert float((merged - logits(base)).abs().max()) > 1e-3
    for folder in ("runs/one/adapter", checkpoint("runs/one", 2)):
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), str(folder))
        assert float((logits(adapted) - merged).abs().max()) < 1e-6
        assert not (Path(folder) / "model.safetensors").exists()  # the base is named, not copied
        assert json.loads(Path(folder, "adapter_config.json").read_text())["base_model_name_or_path"] == "model"


def test_only_the_layers_that_were_named_are_adapted(here: Path) -> None:
    assert lora("lora.targets=[q_proj, v_proj]", "lora.alpha=3", steps=1) == 0
    base, merged = weights("model"), weights("runs/one/model")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in changed} == {"q_proj", "v_proj"}
    name = min(changed)
    assert torch.equal(merged[name], sum_of("runs/one/adapter", name, base[name]))
    assert json.loads(Path("runs/one/adapter/adapter_config.json").read_text())["lora_alpha"] == 3


def test_a_resumed_run_is_the_run_that_was_never_stopped(here: Path) -> None:
    """D02, with adapters in policy and critic and the base as the reference."""
    words = ["beta=0.1", "epochs_per_batch=2", "minibatches=2"]
    assert lora(*words, run="runs/whole", algorithm="ppo", steps=4) == 0
    assert lora(*words, run="runs/parts", algorithm="ppo", steps=2) == 0
    assert lora(*words, "resume=auto", run="runs/parts", algorithm="ppo", steps=4) == 0
    whole, parts = trainer("runs/whole", 4), trainer("runs/parts", 4)
    assert set(whole) == set(parts) == {"adapter", "critic", "optimizer", "critic_optimizer"}
    assert all(same(whole[name], parts[name]) for name in whole)
    assert same(weights("runs/whole/model"), weights("runs/parts/model"))
    assert same(weights("runs/whole/critic"), weights("runs/parts/critic"))
    keys = ("reward", "loss", "kl", "grad_norm", "value/loss", "value/mean")
    rows = [[[row[key] for key in keys] for row in metrics(run)] for run in ("runs/whole", "runs/parts")]
    assert rows[0] == rows[1]


# ---- the critic


def test_the_critic_of_an_adapted_policy_gets_adapters_of_its_own(here: Path) -> None:
    assert lora(algorithm="ppo", steps=2) == 0
    held = trainer("runs/one", 2)
    assert {name.split(".")[0] for name in held["critic"]} == {"trunk", "head"}
    trunk = [name for name in held["critic"] if name.startswith("trunk")]
    assert len(trunk) == 2 * len(LINEAR) and all("lora_" in name for name in trunk)
    assert len(held["adapter"]) == len(trunk)
    drawn = trainer("runs/one", 1)  # as long as B is 0, A has no gradient
    mine = {name.removeprefix("model."): a for name, a in drawn["adapter"].items() if "lora_A" in name}
    theirs = {name.removeprefix("trunk."): a for name, a in drawn["critic"].items() if "lora_A" in name}
    assert mine.keys() == theirs.keys() and not any(torch.equal(mine[name], theirs[name]) for name in mine)
    base, critic = weights("model"), weights("runs/one/critic")
    for name, tensor in critic.items():
        assert torch.equal(tensor, base[f"model.{name}"]) != is_adapted(name)


def test_without_adapters_the_critic_beside_an_adapted_policy_is_trained_whole(here: Path) -> None:
    assert lora("lora.critic=false", algorithm="ppo", steps=2) == 0
    held, base = trainer("runs/one", 2), weights("model")
    trunk = {n.removeprefix("trunk."): t for n, t in held["critic"].items() if n.startswith("trunk")}
    assert {f"model.{name}" for name in trunk} == base.keys()
    assert not any(torch.equal(tensor, base[f"model.{name}"]) for name, tensor in trunk.items())
    merged = weights("runs/one/model")
    assert all(torch.equal(merged[name], base[name]) != is_adapted(name) for name in base)  # the policy's is not


# ---- the reference


def leashed_config(model: str, **keys: object) -> Config:
    common = {"algorithm": "rloo", "data": "prompts.jsonl", "reward": "reward.py", "beta": 0.1, "max_tokens": 5}
    return Config.from_keys(model=model, **common, **keys)


def test_no_second_model_is_held_for_the_reference_of_an_adapter(here: Path) -> None:
    models = assemble(leashed_config("model", lora__rank=2)).models
    assert isinstance(models.reference, AdapterOff) and models.reference.policy is models.policy.module
    assert lora(steps=1) == 0
    models = assemble(leashed_config("runs/one/adapter")).models
    assert isinstance(models.reference, StartingAdapter) and models.reference.policy is models.policy.module


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_kl_is_that_to_the_base_without_the_adapter(here: Path, estimator: str) -> None:
    words = [f"temperature={TEMPERATURE}", "beta=0.1", f"kl.estimator={estimator}", "learning_rate=0.05"]
    assert lora(*words, steps=2) == 0
    first, second = metrics("runs/one")
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    file = "runs/one/rollouts/step_000002.parquet"
    per_token, per_response = recounted(checkpoint("runs/one", 1), "model", file, exact=estimator == "exact")
    assert second["kl"] == pytest.approx(per_token, rel=1e-3) and second["kl"] > 1e-5
    assert second["kl/response"] == pytest.approx(per_response, rel=1e-3)


def test_a_run_from_an_adapter_goes_on_with_it_and_is_held_to_where_it_began(here: Path) -> None:
    assert lora(steps=3) == 0
    words = ["model=runs/one/adapter", "lora.rank=0", f"temperature={TEMPERATURE}", "beta=0.1", "learning_rate=0.05"]
    assert lora(*words, run="runs/two", steps=2) == 0
    first, second = metrics("runs/two")
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    file = "runs/two/rollouts/step_000002.parquet"
    policy = checkpoint("runs/two", 1)
    assert second["kl"] == pytest.approx(recounted(policy, "runs/one/model", file, exact=False)[0], rel=1e-3)
    assert second["kl"] < 0.5 * recounted(policy, "model", file, exact=False)[0]  # not to the base
    base, start, end = weights("model"), weights("runs/one/model"), weights("runs/two/model")
    for name in base:
        assert torch.equal(end[name], sum_of("runs/two/adapter", name, base[name]) if is_adapted(name) else base[name])
        assert torch.equal(end[name], start[name]) != is_adapted(name)


def test_a_rank_beside_a_model_that_is_an_adapter_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lora(steps=1) == 0
    assert lora("model=runs/one/adapter", "lora.rank=4", run="runs/two") == 2
    message = capsys.readouterr().err
    assert "is an adapter of rank 2 already" in message and len(message.strip().splitlines()) <= 5
    assert not Path("runs/two").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lora.targets=[q_porj]"], "q_proj"),
        (["lora.rank=0", "lora.alpha=4"], "lora.alpha=4.0 has no effect"),
        (["lora.critic=true"], "lora.critic=true has no effect"),
        (["lora.rank=-1"], "lora.rank=-1"),
    ],
)
def test_adapter_keys_that_cannot_be_are_one_short_message_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert lora(*words) == 2
    message = capsys.readouterr().err
    assert says in message and len(message.strip().splitlines()) <= 5, message
    assert not Path("runs").exists()
