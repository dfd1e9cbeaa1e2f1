"""The configuration of a verb: every key with its value and the reason for it, checked once, then frozen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hotcold.algorithms.presets import NOT_BUILT, PRESETS
from hotcold.config.checks import (
    check_bounds,
    check_not_given,
    check_not_truncating,
    check_plain_step,
    check_record,
    check_reward_given,
    check_rewards,
    check_run_folder,
    check_void,
    epochs_error,
    explain,
    missing,
    samples,
    void_worker_keys,
)
from hotcold.config.keys import (
    ALGORITHM_KEYS,
    DATA,
    EVAL_KEYS,
    REWARD,
    SAMPLE_KEYS,
    SHORT,
    TRAIN_KEYS,
    WORKERS,
    Key,
    all_names,
    check_no_group,
    unknown_keys_error,
)
from hotcold.config.sources import Given, Keys, read_arguments, read_keywords, read_recipe, whole_name
from hotcold.config.values import (
    MOST_RANK,
    PYTHON,
    Auto,
    Count,
    CountOrZero,
    Device,
    Dtype,
    Few,
    FewOrZero,
    Gigabytes,
    Norm,
    NotNegative,
    OnError,
    PathText,
    Positive,
    Resume,
    Rewards,
    RewardWeights,
    SamplerName,
    Seed,
    Share,
    ShareAboveZero,
    Source,
    Temperature,
    TemperatureOrZero,
    Texts,
    TextsOrAuto,
    word_for_none,
)
from hotcold.errors import InputError, NotAvailableError, did_you_mean

_FROZEN = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, protected_namespaces=())


class DataSettings(BaseModel):
    model_config = _FROZEN

    path: Source = None  # a file or name; from Python also rows or a function
    prompt: str | None = None
    split: str | None = None
    chat: Annotated[bool | None, Auto] = None  # None: messages go through the template, text does not
    too_long: Literal["error", "drop"] = "error"


class TrainData(DataSettings):
    """The last two are for algorithms that imitate the data (sft)."""

    response: str | None = None  # a column; None: found by habit
    train_on: Literal["assistant", "all"] = "assistant"


class CriticSettings(BaseModel):
    """Of algorithms with a critic. `critic.lam` and `critic.warmup` are the algorithm's own."""

    model_config = _FROZEN

    init: PathText | None = None  # None: a copy of the policy's trunk
    learning_rate: Annotated[NotNegative | None, Auto] = None  # None: ten times the policy's
    max_grad_norm: Norm = None  # None: 1.0


class LoraKeys(BaseModel):
    model_config = _FROZEN

    rank: Annotated[CountOrZero, Field(le=MOST_RANK)] = 0  # 0: no adapters, all parameters are trained
    alpha: Annotated[Positive | None, Auto] = None  # None: twice the rank
    targets: TextsOrAuto = None  # ends of layer names; None: every linear layer but the head
    critic: Annotated[bool | None, Auto] = None  # None: as the policy


class MismatchSettings(BaseModel):
    """Correction for what the sampler's distribution differs by from the trained one."""

    model_config = _FROZEN

    mode: Literal["off", "truncate", "mask"] = "off"
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: Positive = 2.0  # truncate
    low: NotNegative = 0.5  # mask
    high: Positive = 5.0


class OverlongSettings(BaseModel):
    """With truncated=penalty."""

    model_config = _FROZEN

    buffer: Annotated[Count | None, Auto] = None  # tokens before max_tokens; None: a fifth of it, at least 1
    penalty: Positive = 1.0  # reward that a response of max_tokens loses


class EvalSettings(BaseModel):
    model_config = _FROZEN

    data: Source = None  # None: a part of `data` is held out
    every: CountOrZero = 20
    samples: FewOrZero = 1
    prompts: Count = 200


class Settings(BaseModel):
    """What the three verbs share. `reasons` says of each key, by its dotted name, why it has its value."""

    model_config = _FROZEN

    model: PathText
    data: DataSettings = DataSettings()
    max_tokens: Annotated[Count | None, Auto] = None  # None: 512, or 128 on a CPU
    stop: Texts = ()
    top_p: ShareAboveZero = 1.0
    top_k: CountOrZero = 0
    min_p: Share = 0.0
    seed: Seed = 0
    device: Device = "auto"
    threads: Annotated[Count | None, Auto] = None
    reasons: dict[str, str] = Field(default_factory=dict, exclude=True, repr=False)


class SandboxSettings(BaseModel):
    """For programs that a model wrote."""

    model_config = _FROZEN

    require: Literal["any", "landlock", "namespaces", "strong"] = "any"


class ScoringSettings(Settings):
    """What train and eval share beside that: the rewards, and what their workers may take."""

    reward: Rewards = ()
    reward_weights: RewardWeights = None
    reward_dialect: Literal["auto", "plain", "trl", "verl", "openrlhf", "verifiers"] = "auto"  # of the user's own
    sandbox: SandboxSettings = SandboxSettings()
    reward_workers: Annotated[CountOrZero | None, Auto] = None  # None: 1; 0: rewards in files run in this process too
    reward_timeout: Positive = 60.0  # seconds
    reward_retries: CountOrZero = 1
    reward_on_error: OnError = "drop"
    reward_max_failures: Share = 0.5
    reward_memory: Gigabytes = None  # GB; None: half of what is free
    reward_env: Texts = ()


class Config(ScoringSettings):
    """`hotcold train`. None means: decided when the model and machine are known (`decided` fills it in)."""

    data: TrainData = TrainData()
    algorithm: Any  # the name of a preset, FILE.py:CLASS, or from Python an algorithm
    algorithm_options: dict[str, Any] = {}  # the algorithm's own keys, as given
    reference: PathText | None = None  # None: the starting model
    critic: CriticSettings = CriticSettings()
    lora: LoraKeys = LoraKeys()
    eval: EvalSettings = EvalSettings()
    steps: Count = 100
    prompts_per_step: Few = 16
    stop_at: Annotated[Share | None, word_for_none("off", "none")] = None
    learning_rate: Annotated[NotNegative | None, Auto] = None
    warmup_steps: CountOrZero = 3
    max_grad_norm: Norm = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    temperature: Temperature = 1.0
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    overlong: OverlongSettings = OverlongSettings()
    sampler: SamplerName = "transformers"
    mismatch: MismatchSettings = MismatchSettings()
    tokens_per_microbatch: Annotated[Count | None, Auto] = None  # None: as many as max_memory allows, measured
    max_memory: Gigabytes = None  # GB; None: a share of what is free
    dtype: Dtype = None
    gradient_checkpointing: bool = False
    run: PathText | None = None
    resume: Resume = "no"
    save_every: CountOrZero = 20
    keep_checkpoints: Count = 2
    allow_changed: Texts = ()  # keys in which a continued run may differ from the run it was
    watchdog: NotNegative = 900  # seconds without any progress; 0 is off

    @model_validator(mode="before")
    @classmethod
    def _plain_sgd(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("optimizer") != "sgd":
            return values
        critic = values.get("critic", {})
        if isinstance(critic, dict):
            values = {**values, "critic": {**critic, "max_grad_norm": _no_norm(critic)}}
        return {"warmup_steps": 0, **values, "max_grad_norm": _no_norm(values)}

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.data.path is None and self.replay_file is None:
            raise missing("data")
        if samples(self.algorithm):
            check_reward_given(self)
        check_rewards(self.reward, self.reward_weights)
        check_not_truncating(self.top_p, self.top_k, self.min_p)
        for check in (check_plain_step, check_record, check_void, check_bounds):
            check(self)
        return self

    @property
    def replay_file(self) -> str | None:
        head, _, file = self.sampler.partition(":")
        return file if head == "replay" else None

    @property
    def warnings(self) -> tuple[str, ...]:
        if self.learning_rate == 0:
            return ("learning_rate=0: the parameters will not change, nothing will be learnt.",)
        return ()

    @classmethod
    def from_keys(cls, **keywords: Any) -> Config:
        """As the command line, from Python: `Config.from_keys(model=..., algorithm="grpo", eval__every=5)`."""
        return _train_config(read_keywords(keywords))


class EvalConfig(ScoringSettings):
    """`hotcold eval`."""

    samples: FewOrZero = 1
    prompts: Annotated[Count | None, word_for_none("all")] = None  # None: all
    temperature: Temperature = 1.0

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        if self.data.path is None:
            raise missing("data")
        if not self.reward:
            raise missing("reward")
        check_rewards(self.reward, self.reward_weights)
        check_not_given(self, {key: needed for key, (_, needed) in void_worker_keys(self).items()})
        return self


class SampleConfig(Settings):
    """`hotcold sample`."""

    prompt: str | None = None
    n: Few = 1
    temperature: TemperatureOrZero = 1.0  # 0 is greedy

    @model_validator(mode="after")
    def _check(self) -> SampleConfig:
        if (self.prompt is None) == (self.data.path is None):
            raise InputError('give a prompt or data, one of them: prompt="What is 2 + 3?" or data=prompts.jsonl.')
        if self.prompt == "":
            raise InputError("the prompt is empty: give at least one character.")
        if self.prompt is not None and any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise InputError("the prompt has bytes that are not UTF-8, which no tokenizer reads. Remove them.")
        if self.temperature == 0 and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise InputError("temperature=0 is greedy: top_p, top_k and min_p have no effect. Leave them out.")
        if self.temperature == 0 and self.n > 1:
            raise InputError(f"temperature=0 is greedy: all n={self.n} responses would be the same. Use n=1.")
        return self


def _no_norm(values: dict[str, Any]) -> Any:
    """A plain step is not clipped; a number that was given stays, to be refused."""
    norm = values.get("max_grad_norm")
    return "none" if norm in (None, "auto") else norm


AnySettings = TypeVar("AnySettings", bound=Settings)

# ---- from what the user wrote


def train_config(tokens: Sequence[str]) -> Config:
    """`NAME|recipe.yaml|FILE.py:CLASS key=value ...`; what is on the command line wins over the recipe."""
    words, keys = read_arguments(tokens)
    if len(words) > 1:
        raise InputError(f"{words[1]!r} is not understood. After the first word, write KEY=VALUE, as in steps=50.")
    if not words:
        return _train_config({**_recipe_of_run(keys), **keys})
    if words[0].endswith((".yaml", ".yml")):
        return _train_config({**read_recipe(words[0]), **keys})
    if "algorithm" in keys:
        raise InputError(f"the algorithm is given twice: {words[0]} and {keys['algorithm'].value}. Keep one of them.")
    return _train_config({"algorithm": Given(words[0]), **keys})


def _recipe_of_run(keys: Keys) -> Keys:
    """`hotcold train resume=FOLDER` alone continues that run with its own recipe."""
    folder = keys["resume"].value if "resume" in keys else None
    if "algorithm" in keys or not isinstance(folder, str) or folder in ("no", "auto"):
        return {}
    check_run_folder(folder)
    path = f"{folder}/config.yaml"
    found = {key: given for key, given in read_recipe(path).items() if key != "run"}
    if "algorithm" not in found:
        raise InputError(f"{path} names no algorithm: it is not the configuration of a run.")
    return found


def eval_config(tokens: Sequence[str]) -> EvalConfig:
    return _build(EvalConfig, _model_first(tokens), EVAL_KEYS)


def reward_config(reward: str, keys: Keys) -> EvalConfig:
    """A reward and data, and no model."""
    groups = {"What": tuple(key for key in (*DATA, *REWARD) if key.name not in WITHOUT_MODEL), "Rewards": WORKERS}
    unknown = {key: given for key, given in keys.items() if key not in _whole_names(groups)}
    if unknown:
        raise _unknown(unknown, groups)
    return _build(EvalConfig, {"model": Given("none"), "reward": Given(reward), **keys}, EVAL_KEYS)


WITHOUT_MODEL = ("data.chat", "data.too_long", "reward", "reward_weights")  # keys that say nothing of a reward alone


def sample_config(tokens: Sequence[str]) -> SampleConfig:
    return _build(SampleConfig, _model_first(tokens), SAMPLE_KEYS)


def _model_first(tokens: Sequence[str]) -> Keys:
    words, keys = read_arguments(tokens)
    if len(words) > 1 or (words and "model" in keys):
        raise InputError(f"{words[-1]!r} is not understood. Write the model first or as model=..., then KEY=VALUE.")
    return {"model": Given(words[0]), **keys} if words else keys


def _train_config(keys: Keys) -> Config:
    if "epochs" in keys:
        per_step, source = keys.get("prompts_per_step"), keys.get("data.path")
        raise epochs_error(per_step and per_step.value, source and source.value)
    algorithm = keys.get("algorithm")
    if algorithm is None or algorithm.value is None:
        foreign = {key: given for key, given in keys.items() if key not in _whole_names(TRAIN_KEYS)}
        raise _unknown(foreign, TRAIN_KEYS) if foreign else missing("algorithm")
    _check_algorithm(algorithm)
    named = isinstance(algorithm.value, str)
    if named and algorithm.value in PRESETS:
        keys = {**_general_of(algorithm.value), **keys}
    options = {key: given for key, given in keys.items() if key in ALGORITHM_KEYS}
    if named and algorithm.value not in PRESETS:  # a user's class may have keys of any name
        options |= {key: given for key, given in keys.items() if key not in _whole_names(TRAIN_KEYS)}
        check_no_group(options, keys)
    if options and not named:
        raise InputError(f"{next(iter(options))} belongs to the algorithm: set it in the object that you pass.")
    general = {key: given for key, given in keys.items() if key not in options}
    return _build(Config, general, TRAIN_KEYS, options)


def _general_of(name: str) -> Keys:
    """A preset's own defaults of keys that all algorithms have."""
    return {whole_name(key): Given(value, reason=f"preset {name}") for key, value in PRESETS[name].general.items()}


def _check_algorithm(given: Given) -> None:
    name = given.value
    if inspect.isclass(name):
        raise InputError(f"algorithm={name.__name__} is a class: pass an object, as in {name.__name__}().")
    if not isinstance(name, str):
        return
    if name.startswith(PYTHON):
        raise InputError(f"{given.where}the algorithm was a Python object, which a file cannot hold: give it again.")
    if name in NOT_BUILT:
        raise NotAvailableError(f"{given.where}algorithm {name} is not available yet. There are: {', '.join(PRESETS)}.")
    if name not in PRESETS and ".py" not in name:
        raise InputError(
            f"{given.where}unknown algorithm {name!r}.{did_you_mean(name, list(PRESETS))}\n"
            f"There are: {', '.join(PRESETS)}; a recipe.yaml; or FILE.py:CLASS for your own."
        )


def _whole_names(groups: Mapping[str, tuple[Key, ...]]) -> frozenset[str]:
    return frozenset(whole_name(name) for name in all_names(dict(groups)))


def _unknown(keys: Keys, groups: dict[str, tuple[Key, ...]]) -> InputError:
    return unknown_keys_error({key: given.where for key, given in keys.items()}, [*all_names(groups), *SHORT])


def _build(
    cls: type[AnySettings], keys: Keys, groups: dict[str, tuple[Key, ...]], options: Keys | None = None
) -> AnySettings:
    unknown = {key: given for key, given in keys.items() if key not in _whole_names(groups)}
    if unknown:
        raise _unknown(unknown, groups)
    values: dict[str, Any] = {}
    for key, given in keys.items():
        outer, _, inner = key.partition(".")
        if inner:
            values.setdefault(outer, {})[inner] = given.value
        else:
            values[key] = given.value
    if options:
        values["algorithm_options"] = {key: given.value for key, given in options.items()}
    values["reasons"] = _reasons({**keys, **(options or {})}, groups)
    try:
        return cls(**values)
    except ValidationError as error:
        raise explain(error, lambda key: keys[key].where if key in keys else "") from None


def _reasons(keys: Keys, groups: dict[str, tuple[Key, ...]]) -> dict[str, str]:
    """Why each key has its value; for one that nobody gave, the rule by which it is decided."""
    reasons = {}
    for key in (key for group in groups.values() for key in group if key.name not in ALGORITHM_KEYS):
        rule = key.default.removeprefix("auto").lstrip(": ")
        reasons[whole_name(key.name)] = f"default: {rule}" if rule and key.default != rule else "default"
    if keys.get("optimizer", Given(None)).value == "sgd":
        plain = ("warmup_steps", "max_grad_norm", "critic.max_grad_norm")
        reasons |= dict.fromkeys(plain, "optimizer=sgd takes a plain step")
    return reasons | {key: given.reason for key, given in keys.items()}


# ---- what is done with it


def decided(config: AnySettings, choices: Mapping[str, tuple[Any, str]]) -> AnySettings:
    """The config with keys settled once model and machine are known: {"max_tokens": (128, "default on a CPU")}."""
    changes: dict[str, Any] = {}
    for key, (value, _) in choices.items():
        outer, _, inner = key.partition(".")
        part = changes.get(outer, getattr(config, outer, None))
        if inner and isinstance(part, BaseModel) and inner in type(part).model_fields:
            changes[outer] = part.model_copy(update={inner: value})
        elif key in type(config).model_fields:
            changes[key] = value
        else:  # the algorithm's own, whatever dots it has
            options = changes.get("algorithm_options", getattr(config, "algorithm_options", {}))
            changes["algorithm_options"] = {**options, key: value}
    reasons = {**config.reasons, **{key: reason for key, (_, reason) in choices.items()}}
    return config.model_copy(update={**changes, "reasons": reasons})
