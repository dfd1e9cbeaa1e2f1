"""Keys of the critic, the leash, adapters, mismatch, truncated responses and demonstrations: read, stored, refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hotcold.algorithms.options import resolved_values
from hotcold.config.checks import check_not_given, check_reward_given, check_sampling_keys
from hotcold.config.keys import ALGORITHM_KEYS, TRAIN_KEYS
from hotcold.config.schema import Config, decided, train_config
from hotcold.config.show import describe, flat_values, resolved, to_yaml
from hotcold.errors import InputError

ENOUGH = ("model=m", "data=d.jsonl", "reward=r.py")


def train(name: str, *words: str) -> Config:
    return train_config([name, *ENOUGH, *words])


def complaint(name: str, *words: str) -> str:
    with pytest.raises(InputError) as caught:
        train(name, *words)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


def recipe(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


def lines_of(config: Config) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()[1:]) for line in describe(config).splitlines()}


# ---- every key is read and stored

# key -> (algorithm, what else it takes, value as written, value as read)
WRITTEN: dict[str, tuple[str, tuple[str, ...], str, Any]] = {
    "data.response": ("sft", (), "solution", "solution"),
    "data.train_on": ("sft", (), "all", "all"),
    "reference": ("grpo", ("beta=0.1",), "runs/base/model", "runs/base/model"),
    "critic.init": ("ppo", (), "runs/rm/model", "runs/rm/model"),
    "critic.learning_rate": ("ppo", (), "1e-5", 1e-5),
    "critic.max_grad_norm": ("ppo", (), "none", "none"),
    "lora.rank": ("grpo", (), "16", 16),
    "lora.alpha": ("grpo", ("lora.rank=16",), "8", 8.0),
    "lora.targets": ("grpo", ("lora.rank=16",), "[q_proj, v_proj]", ("q_proj", "v_proj")),
    "lora.critic": ("ppo", ("lora.rank=16",), "false", False),
    "truncated": ("grpo", (), "mask", "mask"),
    "overlong.buffer": ("grpo", ("truncated=penalty",), "20", 20),
    "overlong.penalty": ("dapo", (), "0.5", 0.5),
    "mismatch": ("grpo", (), "truncate", "truncate"),
    "mismatch.level": ("grpo", ("mismatch=mask",), "geometric", "geometric"),
    "mismatch.cap": ("grpo", ("mismatch=truncate",), "3", 3.0),
    "mismatch.low": ("grpo", ("mismatch=mask",), "0.2", 0.2),
    "mismatch.high": ("grpo", ("mismatch=mask",), "10", 10.0),
    "dtype": ("grpo", (), "bf16", "bf16"),
    "gradient_checkpointing": ("grpo", (), "true", True),
    "beta": ("grpo", (), "0.05", 0.05),
    "kl.placement": ("grpo", ("beta=0.1",), "reward", "reward"),
    "kl.estimator": ("rloo", ("beta=0.1",), "exact", "exact"),
    "kl.target": ("rloo", ("beta=0.1",), "6", 6),
    "kl.horizon": ("rloo", ("beta=0.1", "kl.target=6"), "5000", 5000),
    "lam": ("ppo", (), "0.95", 0.95),
    "whiten": ("ppo", (), "false", False),
    "dual_clip": ("ppo", (), "3", 3),
    "value_clip": ("ppo", (), "0.2", 0.2),
    "entropy_bonus": ("rloo", (), "0.01", 0.01),
    "max_approx_kl": ("ppo", ("epochs_per_batch=4",), "0.1", 0.1),
    "critic.lam": ("ppo", (), "1.0", 1.0),
    "critic.warmup": ("ppo", (), "10", 10),
    "drop_zero_variance": ("grpo", (), "true", True),
    "refill": ("grpo", ("drop_zero_variance=true",), "2", 2),
    "reward_dialect": ("grpo", (), "verl", "verl"),
    "reward_workers": ("grpo", (), "3", 3),
    "reward_timeout": ("grpo", (), "5", 5.0),
    "reward_retries": ("grpo", (), "0", 0),
    "reward_on_error": ("grpo", (), "-0.5", -0.5),
    "reward_max_failures": ("grpo", (), "0.1", 0.1),
    "reward_memory": ("grpo", (), "800MB", 0.8),
    "reward_env": ("grpo", (), "[HOME,TERM]", ("HOME", "TERM")),
    "watchdog": ("grpo", (), "60", 60.0),
}
ELSEWHERE = """
    algorithm model data data.prompt data.split data.chat data.too_long reward reward_weights steps prompts_per_step
    group_size epochs_per_batch minibatches stop_at learning_rate warmup_steps max_grad_norm optimizer temperature
    max_tokens stop top_p top_k min_p sampler baseline scale_by_std objective weighting clip_low clip_high gamma
    keep_rule threshold fraction start_from eval.data eval.every eval.samples eval.prompts tokens_per_microbatch
    max_memory device threads run resume allow_changed save_every keep_checkpoints seed sandbox.require
"""


def test_every_key_is_in_this_table_or_tested_elsewhere() -> None:
    assert set(WRITTEN) | set(ELSEWHERE.split()) == {key.name for keys in TRAIN_KEYS.values() for key in keys}


@pytest.mark.parametrize("key", WRITTEN)
def test_a_key_is_read_shown_stored_and_read_back(key: str, tmp_path: Path) -> None:
    name, others, text, value = WRITTEN[key]
    config = train(name, *others, f"{key}={text}")
    whole = {"mismatch": "mismatch.mode"}.get(key, key)
    assert flat_values(config)[whole] == value
    assert flat_values(train(name, *others)).get(whole) != value  # it is not the default
    assert lines_of(config)[whole].endswith("given on the command line")
    again = train_config([recipe(tmp_path, to_yaml(config))])
    assert flat_values(again) == flat_values(config)
    if key in ALGORITHM_KEYS:
        assert config.algorithm_options[key] == value
        assert resolved_values(name, config.algorithm_options)[key] == value


def test_nested_keys_have_three_spellings_in_python() -> None:
    ways: list[dict[str, Any]] = [
        {"kl": {"target": 6.0}, "critic": {"lam": 0.9, "learning_rate": 1e-4}},
        {"kl__target": 6.0, "critic__lam": 0.9, "critic__learning_rate": 1e-4},
        {"kl.target": 6.0, "critic.lam": 0.9, "critic.learning_rate": 1e-4},
    ]
    for way in ways:
        config = Config.from_keys(model="m", data="d", reward="r.py", algorithm="ppo", beta=0.1, **way)
        assert config.algorithm_options == {"beta": 0.1, "kl.target": 6.0, "critic.lam": 0.9}
        assert config.critic.learning_rate == 1e-4


def test_an_algorithms_dotted_keys_stand_in_their_group_beside_the_general_ones() -> None:
    stored = resolved(train("ppo", "critic.warmup=5", "critic.init=c", "beta=0.1", "kl.estimator=k2"))
    assert stored["critic"] == {"warmup": 5, "init": "c", "learning_rate": None, "max_grad_norm": None}
    assert stored["kl"] == {"estimator": "k2"} and stored["beta"] == 0.1


def test_dotted_keys_of_either_kind_are_decided_later(tmp_path: Path) -> None:
    config = decided(
        train("ppo", "beta=0.1"),
        {
            "critic.learning_rate": (1e-4, "ten times the policy's"),
            "critic.warmup": (0, "preset ppo"),
            "kl.placement": (None, "preset ppo"),
            "kl.estimator": ("exact", "preset ppo"),
            "dtype": ("fp32", "default on a CPU"),
        },
    )
    assert config.critic.learning_rate == 1e-4 and config.dtype == "fp32"
    assert config.algorithm_options == {
        "beta": 0.1, "critic.warmup": 0, "kl.placement": None, "kl.estimator": "exact"
    }  # fmt: skip
    lines = lines_of(config)
    assert lines["critic.warmup"] == "0 preset ppo" and lines["kl.placement"] == "none preset ppo"
    assert lines["critic.learning_rate"] == "0.0001 ten times the policy's"
    again = train_config([recipe(tmp_path, to_yaml(config))])
    assert flat_values(again) == flat_values(config)


def test_automatic_values_are_none_until_they_are_decided() -> None:
    words = ("critic.learning_rate", "critic.max_grad_norm", "lora.alpha", "lora.targets", "lora.critic", "dtype")
    config = train("ppo", "lora.rank=4", "truncated=penalty", "overlong.buffer=auto", *(f"{w}=auto" for w in words))
    for group in (config.critic, config.lora, config.overlong):
        assert {name: value for name, value in group if value is not None} in ({}, {"rank": 4}, {"penalty": 1.0})
    assert config.dtype is None
    assert lines_of(config)["dtype"] == "auto given on the command line"
    assert lines_of(train("ppo"))["critic.learning_rate"] == "auto default: ten times the policy's"


def test_every_linear_layer_has_peft_s_name_too() -> None:
    assert train("grpo", "lora.rank=4", "lora.targets=all-linear").lora.targets is None
    assert train("grpo", "lora.rank=4", "lora.targets=q_proj").lora.targets == ("q_proj",)


def test_paths_of_a_recipe_are_looked_for_beside_it(tmp_path: Path) -> None:
    for name in ("base.v1", "critic.v1"):
        (tmp_path / name).mkdir()
    text = "algorithm: ppo\nmodel: m\ndata: d\nreward: r\nbeta: 0.1\nreference: base.v1\ncritic: {init: critic.v1}\n"
    config = train_config([recipe(tmp_path, text)])
    assert (config.reference, config.critic.init) == (f"{tmp_path}/base.v1", f"{tmp_path}/critic.v1")


# ---- a preset's own defaults of general keys


def test_a_preset_sets_a_general_key_that_nobody_gave_and_says_so(tmp_path: Path) -> None:
    config = train("dapo")
    assert config.truncated == "penalty" and lines_of(config)["truncated"] == "penalty preset dapo"
    assert train("grpo").truncated == "keep" and lines_of(train("grpo"))["truncated"] == "keep default"
    assert train("dapo", "truncated=keep").truncated == "keep"
    again = train_config([recipe(tmp_path, to_yaml(config))])
    assert again.truncated == "penalty" and again.reasons["truncated"].startswith("recipe ")


def test_the_command_line_may_make_a_key_of_the_recipe_void(tmp_path: Path) -> None:
    stored = recipe(tmp_path, to_yaml(train("dapo", "overlong.buffer=9", "mismatch=mask", "beta=0.1", "reference=r")))
    config = train_config([stored, "truncated=keep", "mismatch=truncate", "beta=0"])
    values = flat_values(config)
    assert not {"overlong.buffer", "overlong.penalty", "mismatch.low", "mismatch.high", "reference"} & set(values)
    with pytest.raises(InputError, match=r"^overlong\.buffer=9 has no effect"):
        train_config([stored, "truncated=keep", "overlong.buffer=9"])
    with pytest.raises(InputError, match=r"^mismatch\.cap=3\.0 has no effect"):
        train_config(
            [recipe(tmp_path, to_yaml(train("grpo")).replace("mode: 'off'", "cap: 3").replace("mode: off", "cap: 3"))]
        )


# ---- values that cannot be


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("grpo", ["dtype=float16"], "dtype=float16: auto, fp32 or bf16 is needed; float16 is not offered"),
        ("grpo", ["dtype=fp16"], "bf16 has the range of fp32"),
        ("grpo", ["dtype=float32"], "dtype=float32: auto, fp32 or bf16 is needed: write fp32."),
        ("grpo", ["dtype=bfloat16"], "dtype=bfloat16: auto, fp32 or bf16 is needed: write bf16."),
        ("grpo", ["dtype=pure_bf16"], "dtype=pure_bf16: auto, fp32 or bf16 is needed; parameters are always fp32"),
        ("grpo", ["dtype=16"], "dtype=16: auto, fp32 or bf16 is needed"),
        ("grpo", ["gradient_checkpointing=maybe"], "true or false is needed"),
        ("grpo", ["truncated=drop"], "truncated=drop: 'keep', 'mask' or 'penalty' is needed"),
        ("dapo", ["overlong.buffer=0"], "overlong.buffer=0: at least 1 is needed"),
        ("dapo", ["overlong.penalty=0"], "overlong.penalty=0: more than 0 is needed"),
        ("dapo", ["overlong.buffer=65", "max_tokens=64"], "overlong.buffer=65 tokens are more than max_tokens=64"),
        ("grpo", ["mismatch=clip"], "mismatch.mode=clip: 'off', 'truncate' or 'mask' is needed"),
        ("grpo", ["mismatch=mask", "mismatch.level=word"], "'token', 'sequence' or 'geometric' is needed"),
        ("grpo", ["mismatch=truncate", "mismatch.cap=0"], "mismatch.cap=0: more than 0 is needed"),
        ("grpo", ["mismatch=mask", "mismatch.low=-1"], "mismatch.low=-1: at least 0 is needed"),
        ("grpo", ["mismatch=mask", "mismatch.low=6"], "mismatch.low=6 is above mismatch.high=5"),
        ("grpo", ["lora.rank=-1"], "lora.rank=-1: at least 0 is needed. 0 is off, 16 is usual."),
        ("grpo", ["lora.rank=4", "lora.alpha=0"], "lora.alpha=0: more than 0 is needed"),
        ("grpo", ["lora.rank=4", "lora.targets=['']"], "none of them empty"),
        ("grpo", ["lora.rank=4", "lora.targets=[]"], "at least one layer name"),
        ("ppo", ["critic.learning_rate=-1"], "critic.learning_rate=-1: at least 0 is needed"),
        ("ppo", ["critic.max_grad_norm=0"], "critic.max_grad_norm=0: a number above 0, auto, or none"),
        ("sft", ["data.train_on=prompt"], "'assistant' or 'all' is needed"),
        ("grpo", ["kl=0.1"], "kl is a group of keys: write one of kl.placement, kl.estimator, kl.target, kl.horizon."),
        ("grpo", ["kl=0.1"], "beta says how strong it is."),
        ("ppo", ["critic=m"], "critic is a group of keys: write one of critic.lam, critic.warmup, critic.init,"),
        ("grpo", ["lora=16"], "lora.rank=16 turns it on"),
        ("grpo", ["overlong=10"], "overlong is a group of keys: write one of overlong.buffer, overlong.penalty."),
        ("grpo", ["eval=10"], "eval is a group of keys: write one of eval.data, eval.every,"),
        ("grpo", ["lora.r=16"], 'Did you mean "lora.rank"'),
        ("grpo", ["kl.estimater=k3"], 'Did you mean "kl.estimator"'),
        ("grpo", ["mismatch=mask", "mismatch.mode=mask"], "mismatch.mode is given twice"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_is_needed(name: str, words: list[str], expected: str) -> None:
    assert expected in complaint(name, *words)


@pytest.mark.parametrize(
    ("name", "words", "key", "cause"),
    [
        ("grpo", ["mismatch.level=token"], "mismatch.level=token", "mismatch=truncate or mismatch=mask"),
        ("grpo", ["mismatch.cap=2.0"], "mismatch.cap=2.0", "mismatch=truncate"),
        ("grpo", ["mismatch=mask", "mismatch.cap=3"], "mismatch.cap=3.0", "mismatch=truncate"),
        ("grpo", ["mismatch=truncate", "mismatch.low=0.1"], "mismatch.low=0.1", "mismatch=mask"),
        ("grpo", ["mismatch=truncate", "mismatch.high=9"], "mismatch.high=9.0", "mismatch=mask"),
        ("grpo", ["overlong.buffer=9"], "overlong.buffer=9", "truncated=penalty"),
        ("dapo", ["truncated=mask", "overlong.penalty=1"], "overlong.penalty=1.0", "truncated=penalty"),
        ("grpo", ["lora.alpha=32"], "lora.alpha=32.0", "lora.rank above 0"),
        ("grpo", ["lora.targets=[q_proj]"], "lora.targets=[q_proj]", "lora.rank above 0"),
        ("grpo", ["reference=m"], "reference=m", "beta above 0"),
        ("grpo", ["reference=m", "beta=0"], "reference=m", "beta above 0"),
        ("grpo", ["reference=m", "beta=null"], "reference=m", "beta above 0"),
        ("grpo", ["critic.init=m"], "critic.init=m", "an algorithm that has a critic (ppo)"),
        ("rloo", ["critic.learning_rate=1e-4"], "critic.learning_rate=0.0001", "an algorithm that has a critic (ppo)"),
        ("grpo", ["lora.rank=4", "lora.critic=true"], "lora.critic=true", "an algorithm that has a critic (ppo)"),
        ("grpo", ["critic.max_grad_norm=none"], "critic.max_grad_norm=none", "an algorithm that has a critic (ppo)"),
    ],
)
def test_a_key_without_an_effect_is_refused_and_says_what_gives_it_one(
    name: str, words: list[str], key: str, cause: str
) -> None:
    assert complaint(name, *words) == f"{key} has no effect: it takes effect with {cause}. Leave it out."


def test_keys_without_an_effect_are_neither_shown_nor_stored() -> None:
    values = flat_values(train("grpo"))
    assert not {key for key in values if key.startswith(("critic.", "overlong.", "kl."))} and "reference" not in values
    assert [key for key in values if key.startswith("mismatch.")] == ["mismatch.mode"]
    assert [key for key in values if key.startswith("lora.")] == ["lora.rank"]
    with_beta = flat_values(train("grpo", "beta=0.1"))
    assert with_beta["reference"] is None and lines_of(train("grpo", "beta=0.1"))["reference"].startswith(
        "the starting"
    )


def test_a_plain_step_does_not_clip_the_critic_either(tmp_path: Path) -> None:
    config = train("ppo", "optimizer=sgd")
    assert config.critic.max_grad_norm == "none"
    assert config.reasons["critic.max_grad_norm"] == "optimizer=sgd takes a plain step"
    text = complaint("ppo", "optimizer=sgd", "critic.max_grad_norm=1")
    assert "critic.max_grad_norm=1.0 has no effect with optimizer=sgd" in text
    plain = train("grpo", "optimizer=sgd")  # no critic: nothing to say of its norm
    assert "critic" not in yaml.safe_load(to_yaml(plain))
    assert flat_values(train_config([recipe(tmp_path, to_yaml(plain))])) == flat_values(plain)


# ---- demonstrations


def test_sft_needs_no_reward_and_the_others_do() -> None:
    config = train_config(["sft", "model=m", "data=d.jsonl", "data.response=solution"])
    assert config.reward == () and config.data.response == "solution"
    assert train("sft").reward == ("r.py",)  # then held-out prompts are scored
    for name in ("reinforce", "rloo", "grpo", "ppo", "expert_iteration", "dapo"):
        with pytest.raises(InputError, match=r"^reward is missing"):
            train_config([name, "model=m", "data=d.jsonl"])
    with pytest.raises(InputError, match=r"^stop_at needs evaluations, and without a reward there are none"):
        train_config(["sft", "model=m", "data=d.jsonl", "stop_at=0.9"])
    with pytest.raises(InputError, match=r"^data is missing"):
        train_config(["sft", "model=m"])


def test_keys_of_the_other_kind_of_algorithm_are_refused() -> None:
    sampling = "an algorithm that learns from sampled responses"
    imitation = "an algorithm that imitates the data's responses (sft)"
    assert f"truncated=mask has no effect: it takes effect with {sampling}" in complaint("sft", "truncated=mask")
    assert f"mismatch.mode=mask has no effect: it takes effect with {sampling}" in complaint("sft", "mismatch=mask")
    assert f"data.response=b has no effect: it takes effect with {imitation}" in complaint("grpo", "data.response=b")
    assert f"data.train_on=all has no effect: it takes effect with {imitation}" in complaint("ppo", "data.train_on=all")
    stored = flat_values(train("sft"))
    assert "data.train_on" in stored and not {"truncated", "mismatch.mode"} & set(stored)


class Mine:
    """Stands for an algorithm object; the config passes it through unseen."""


def test_what_an_own_algorithm_needs_is_checked_once_it_is_known() -> None:
    config = train_config(["mine.py:Mine", "model=m", "data=d", "data.response=b", "reference=r", "critic.init=c"])
    with pytest.raises(InputError, match=r"^reward is missing: reward=reward\.py"):
        check_reward_given(config)
    with pytest.raises(
        InputError, match=r"^data\.response=b has no effect: it takes effect with an algorithm that imi"
    ):
        check_sampling_keys(config, samples=True)
    check_sampling_keys(config, samples=False)
    with pytest.raises(InputError, match=r"^reference=r has no effect: it takes effect with beta above 0"):
        check_not_given(config, {"reference": "beta above 0"})
    check_not_given(config, {"critic.learning_rate": "an algorithm that has a critic"})
    check_reward_given(train_config(["mine.py:Mine", "model=m", "sampler=replay:rows.parquet"]))
    masked = Config.from_keys(model="m", data="d", algorithm=Mine(), truncated="mask")
    with pytest.raises(
        InputError, match=r"^truncated=mask has no effect: it takes effect with an algorithm that learns"
    ):
        check_sampling_keys(masked, samples=False)
    check_sampling_keys(masked, samples=True)


def test_a_recipe_that_states_defaults_contradicts_nothing(tmp_path: Path) -> None:
    config = train_config([recipe(tmp_path, to_yaml(train("mine.py:Mine")))])
    check_sampling_keys(config, samples=True)
    check_sampling_keys(config, samples=False)
    with pytest.raises(InputError, match=r"^data\.train_on=assistant has no effect"):
        check_sampling_keys(train("mine.py:Mine", "data.train_on=assistant"), samples=True)


def test_an_own_algorithm_may_have_dotted_keys_but_none_with_the_name_of_a_group(tmp_path: Path) -> None:
    config = train("mine.py:Mine", "critic.extra=2", "kl.target=6", "my.rate=3", "critic.init=c", "beta=0.5")
    assert config.algorithm_options == {"critic.extra": 2, "kl.target": 6, "my.rate": 3, "beta": 0.5}
    assert config.critic.init == "c"
    assert flat_values(train_config([recipe(tmp_path, to_yaml(config))])) == flat_values(config)
    assert "critic is a group of keys" in complaint("mine.py:Mine", "critic=2")
    assert "my is a group of keys: write one of my.rate." in complaint("mine.py:Mine", "my=2", "my.rate=3")
