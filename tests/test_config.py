"""What is wrong with a configuration, what Python may pass, what is printed and stored."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hotcold.config.schema import Config, decided, eval_config, sample_config, train_config
from hotcold.config.show import describe, flat_values, resolved, to_yaml
from hotcold.errors import InputError, NotAvailableError

ENOUGH = ("model=m", "data=d.jsonl", "reward=r.py")


def train(*words: str) -> Config:
    return train_config(["grpo", *ENOUGH, *words])


def complaint(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        train(*words)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


def recipe(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


# ---- wrong input


def test_an_unknown_key_gets_the_nearest_one() -> None:
    assert complaint("stepz=5") == "unknown key 'stepz'. Did you mean \"steps\"?"
    assert complaint("--group-size", "4") == "unknown key 'group-size'. Did you mean \"group_size\"?"
    assert 'Did you mean "eval.every"' in complaint("eval.evry=3")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("learning_rate=-1e-5", "learning_rate=-1e-05: at least 0 is needed. 1e-5 is usual"),
        ("learning_rate=nan", "learning_rate=nan: at least 0 is needed"),
        ("learning_rate=inf", "learning_rate=inf: a finite number is needed"),
        ("learning_rate=true", "true and false are no numbers"),
        ("learning_rate=fast", "learning_rate=fast: a number is needed"),
        ("temperature=0", "temperature=0: more than 0 is needed. At 0 the responses to a prompt are all the same"),
        ("temperature=nan", "temperature=nan: more than 0 is needed"),
        ("steps=0", "steps=0: at least 1 is needed. `hotcold eval`"),
        ("steps=1.5", "steps=1.5: a whole number is needed"),
        ("steps=true", "true and false are no numbers"),
        ("steps=null", "steps=null: a whole number is needed"),
        ("prompts_per_step=0", "at least 1 is needed"),
        ("max_tokens=0", "at least 1 is needed"),
        ("warmup_steps=-1", "at least 0 is needed"),
        ("max_grad_norm=0", "a number above 0, auto, or none"),
        ("optimizer=adam", "optimizer=adam: 'adamw' or 'sgd' is needed"),
        ("seed=-1", "seed=-1: at least 0 is needed"),
        ("seed=9223372036854775808", "less than 9223372036854775808 is needed"),
        ("chat=maybe", "data.chat=maybe: true or false is needed"),
        ("data.too_long=cut", "'error' or 'drop' is needed"),
        ("device=gpu", "auto, cpu, cuda, cuda:1 or mps is needed"),
        ("sampler=tgi", "transformers or replay:FILE.parquet is needed"),
        ("sampler=replay:", "transformers or replay:FILE.parquet is needed"),
        ("stop_at=80", "stop_at=80: at most 1 is needed"),
        ("stop=['', a]", "none of them empty"),
        ("keep_checkpoints=0", "at least 1 is needed"),
        ("reward_weights=[1, 2]", "reward_weights has 2 numbers, reward has 1"),
        ("reward_weights=[nan]", "a finite number is needed"),
        ("top_p=0.9", "top_p=0.9: not in training. It would sample from another distribution"),
        ("top_k=40", "top_k=40: not in training"),
        ("min_p=0.1", "min_p=0.1: not in training"),
        ("resume=auto", "add run=NAME"),
        ("batch_size=8", "no batch size counts responses here: prompts_per_step"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_is_needed(word: str, expected: str) -> None:
    assert expected in complaint(word)


def test_truncating_options_are_accepted_in_training_where_they_change_nothing() -> None:
    assert train("top_p=1", "top_k=0", "min_p=0").top_p == 1.0


def test_a_rate_of_zero_is_allowed_with_a_warning() -> None:
    assert train().warnings == ()
    assert train("learning_rate=0").warnings == (
        "learning_rate=0: the parameters will not change, nothing will be learnt.",
    )


def test_null_and_auto_bring_an_automatic_key_back() -> None:
    for word in ("null", "auto"):
        keys = ("learning_rate", "max_tokens", "max_grad_norm", "tokens_per_microbatch", "threads", "chat", "device")
        config = train(*(f"{key}={word}" for key in keys))
        automatic = (config.learning_rate, config.max_tokens, config.max_grad_norm, config.tokens_per_microbatch)
        assert automatic == (None, None, None, None)
        assert (config.threads, config.data.chat, config.device) == (None, None, "auto")


def test_what_is_missing_is_said_with_an_example() -> None:
    for absent in ("model", "data", "reward"):
        words = [word for word in ENOUGH if not word.startswith(absent)]
        with pytest.raises(InputError, match=f"^{absent} is missing: {absent}="):
            train_config(["grpo", *words])
    with pytest.raises(InputError, match=r"^algorithm is missing: write it first"):
        train_config(list(ENOUGH))


def test_replayed_rows_need_neither_prompts_nor_reward() -> None:
    config = train_config(["reinforce", "model=m", "sampler=replay:rows.parquet", "optimizer=sgd"])
    assert config.replay_file == "rows.parquet"
    assert train().replay_file is None


def test_plain_sgd_has_no_warm_up_and_no_clip_and_says_so_when_asked_for_them() -> None:
    config = train("optimizer=sgd")
    assert (config.warmup_steps, config.max_grad_norm) == (0, "none")
    assert config.reasons["warmup_steps"] == "optimizer=sgd takes a plain step"
    assert "warmup_steps=3 has no effect with optimizer=sgd" in complaint("optimizer=sgd", "warmup_steps=3")
    assert "max_grad_norm=1.0 has no effect with optimizer=sgd" in complaint("optimizer=sgd", "max_grad_norm=1")


def test_stopping_at_an_accuracy_needs_evaluations() -> None:
    assert train("stop_at=0.8").stop_at == 0.8
    assert "eval.every=0 makes none" in complaint("stop_at=0.8", "eval.every=0")


def test_epochs_alone_offers_both_meanings_and_the_steps_of_a_pass(tmp_path: Path) -> None:
    text = complaint("epochs=3")
    assert "epochs_per_batch" in text and "steps = passes x prompts / prompts_per_step (16)" in text
    rows = tmp_path / "d.jsonl"
    rows.write_text('{"prompt": "a"}\n' * 50)
    with pytest.raises(InputError, match="has 50 rows: one pass is about 7 steps"):  # 50 / 8, rounded up
        train_config(["grpo", "model=m", f"data={rows}", "reward=r.py", "epochs=3", "prompts_per_step=8"])


@pytest.mark.parametrize("word", ["tracker=wandb", "max_staleness=1", "sampler=vllm"])
def test_what_a_later_version_builds_is_not_available_yet(word: str) -> None:
    with pytest.raises(NotAvailableError, match="is not available yet"):
        train(word)


def test_presets_of_a_later_version_are_not_available_yet() -> None:
    with pytest.raises(NotAvailableError, match="algorithm reward_model is not available yet"):
        train_config(["reward_model", *ENOUGH])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("num_generations=8", "num_generations is a key of TRL; here it is group_size (same value)."),
        ("--per_device_train_batch_size=4", "here it is tokens_per_microbatch (theirs counts responses, ours"),
        ("max_completion_length=64", "here it is max_tokens (same value)"),
        ("num_iterations=2", "here it is epochs_per_batch (same value)"),
        ("generation_batch_size=32", "here it is prompts_per_step (theirs counts responses, ours prompts: divide by"),
        ("num_train_epochs=1", "here it is steps (write steps; a pass over N prompts is N / prompts_per_step steps)"),
        ("actor_rollout_ref.model.path=m", "is a key of verl; here it is model"),
        ("rollout.n=8", "rollout.n is a key of verl; here it is group_size"),
        ("++data.train_batch_size=8", "here it is prompts_per_step (same value, both count prompts)"),
        ("ppo_mini_batch_size=8", "here it is minibatches (ours is a number of parts"),
        ("algorithm.adv_estimator=grpo", "here it is algorithm (write it first"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "is a key of verl; here it is beta (same value, with kl.placement=reward)."),
        (
            "actor.use_kl_loss=true",
            "here it is kl.placement (true: loss; beta says how strong it is)",
        ),
        ("kl_loss_type=low_var_kl", "here it is kl.estimator (k2 or mse: k2, k3 or low_var_kl: k3"),
        ("algorithm.kl_ctrl.target_kl=0.1", "here it is kl.target (theirs is nats per token, ours nats per response"),
        ("critic.optim.lr=1e-5", "is a key of verl; here it is critic.learning_rate (same value)"),
        ("trainer.critic_warmup=20", "here it is critic.warmup (same value)"),
        ("critic_warmup=20", "here it is critic.warmup (same value)"),
        ("algorithm.filter_groups.enable=true", "here it is drop_zero_variance"),
        ("overlong_buffer.len=100", "here it is overlong.buffer (same value)"),
        ("rollout_is_threshold=2", "here it is mismatch.cap (same value)"),
        ("delta=4", "is a key of TRL; here it is dual_clip (same value)"),
        ("loss_type=dr_grpo", "dr_grpo: fixed_length"),
        (
            "importance_sampling_level=sequence",
            "objective (sequence: sequence_clipped_surrogate, as in gspo)",
        ),
        ("vf_coef=0.1", "is a key of TRL: the critic has an optimiser of its own; leave it out."),
        ("mask_truncated_completions=true", "here it is truncated (true: mask)"),
        ("lora_r=16", "here it is lora.rank (same value)"),
        (
            "bf16=true",
            "is a key of TRL, OpenRLHF; here it is dtype (true: bf16, of the computation;",
        ),
        ("init_kl_coef=0.01", "is a key of OpenRLHF; here it is beta (same value)"),
        ("freezing_actor_steps=5", "here it is critic.warmup (same value; -1 there is 0)"),
        ("lambd=0.95", "here it is lam (same value)"),
        ("rollout_batch_size=8", "is a key of OpenRLHF; here it is prompts_per_step (same value, both count prompts)"),
        ("n_samples_per_prompt=8", "here it is group_size"),
        ("train_batch_size=128", "here it is minibatches (theirs counts responses, ours is a number of parts"),
        ("pretrain=m", "is a key of OpenRLHF; here it is model"),
    ],
)
def test_keys_of_other_libraries_are_answered_with_ours(word: str, expected: str) -> None:
    assert expected in complaint(word)


def test_many_wrong_keys_are_answered_in_five_lines() -> None:
    text = complaint("num_generations=8", "rollout.n=8", "stepz=1", "epsilon=0.2", "num_iterations=1", "tracker=x")
    assert len(text.splitlines()) == 5 and text.endswith("... and 2 more.")


def test_a_recipe_of_verl_is_translated_key_by_key(tmp_path: Path) -> None:
    path = recipe(tmp_path, "algorithm: grpo\nactor_rollout_ref:\n  rollout:\n    n: 8\n")
    with pytest.raises(InputError) as caught:
        train_config([path])
    expected = "line 4: actor_rollout_ref.rollout.n is a key of verl; here it is group_size (same value)."
    assert str(caught.value) == f"{path}, {expected}"


# ---- algorithms and Python


class Mine:
    """Stands for an algorithm object; the config passes it through unseen."""

    def __repr__(self) -> str:
        return "Mine()"


def test_an_algorithm_of_ones_own_may_have_keys_of_any_name() -> None:
    config = train_config(["mine.py:Mine", *ENOUGH, "surprise=0.5", "beta=1", "steps=3"])
    assert config.algorithm_options == {"surprise": 0.5, "beta": 1} and config.steps == 3


def test_python_objects_pass_through_and_nested_keys_have_three_spellings() -> None:
    def score(completion: str) -> float:
        return float(len(completion))

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    ways: list[dict[str, Any]] = [{"eval": {"every": 5}}, {"eval__every": 5}, {"eval.every": 5}]
    for way in ways:
        config = Config.from_keys(model=Path("m"), data=rows, reward=score, algorithm=(mine := Mine()), **way)
        assert config.eval.every == 5 and config.model == "m"
        assert config.data.path == rows and config.reward == (score,) and config.algorithm is mine
        assert config.reasons["model"] == "given in Python"
    plain = resolved(config)
    assert plain["algorithm"] == "<from Python: Mine()>" and plain["data"]["path"] == "<from Python: 2 rows>"
    assert plain["reward"][0].startswith("<from Python: ") and plain["reward"][0].endswith("score>")


def test_a_stored_python_object_must_be_given_again(tmp_path: Path) -> None:
    config = Config.from_keys(model="m", data="d", reward=lambda completion: 0.0, algorithm="grpo")
    with pytest.raises(InputError, match=r"line .*: it was a Python object, which a file cannot hold: give it again"):
        train_config([recipe(tmp_path, to_yaml(config))])
    assert train_config([recipe(tmp_path, to_yaml(config)), "reward=r.py"]).reward == ("r.py",)


def test_keys_of_an_algorithm_object_and_classes_are_refused() -> None:
    with pytest.raises(InputError, match="group_size belongs to the algorithm: set it in the object"):
        Config.from_keys(model="m", data="d", reward="r.py", algorithm=Mine(), group_size=4)
    with pytest.raises(InputError, match=r"algorithm=Mine is a class: pass an object, as in Mine\(\)"):
        Config.from_keys(model="m", data="d", reward="r.py", algorithm=Mine)


# ---- eval and sample


def test_eval_takes_the_model_first_and_needs_prompts_and_a_reward() -> None:
    config = eval_config(["m", "data=d", "reward=r.py", "samples=8", "top_p=0.9"])
    assert (config.model, config.samples, config.prompts, config.top_p) == ("m", 8, None, 0.9)
    with pytest.raises(InputError, match=r"^reward is missing"):
        eval_config(["m", "data=d"])
    with pytest.raises(InputError, match="Evaluations measure the greedy response too"):
        eval_config(["m", "data=d", "reward=r.py", "temperature=0"])


def test_sample_takes_a_prompt_or_a_file_and_may_be_greedy() -> None:
    assert sample_config(["m", "prompt=hello", "temperature=0"]).temperature == 0
    for words in ([], ["prompt=a", "data=d"]):
        with pytest.raises(InputError, match="give a prompt or data, one of them"):
            sample_config(["m", *words])
    with pytest.raises(InputError, match="all n=3 responses would be the same"):
        sample_config(["m", "prompt=a", "temperature=0", "n=3"])
    with pytest.raises(InputError, match="prompt= has no value"):
        sample_config(["m", "prompt="])


# ---- what is printed and stored


def test_the_stored_config_is_accepted_back_unchanged(tmp_path: Path) -> None:
    config = train(
        "group_size=4", "learning_rate=3e-6", "run=1e-5", 'stop=["\\n", "no", "5"]', "stop_at=0.9", "optimizer=sgd"
    )
    again = train_config([recipe(tmp_path, to_yaml(config))])
    assert flat_values(again) == flat_values(config)
    assert again.run == "1e-5" and again.stop == ("\n", "no", "5")  # text that looks like something else stays text
    assert yaml.safe_load(to_yaml(config))["stop"] == ["\n", "no", "5"]


def test_how_this_start_was_made_is_not_part_of_the_stored_config() -> None:
    assert "resume" not in resolved(train("resume=runs/a"))


def test_a_run_folder_alone_continues_with_its_own_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(train("seed=5", "group_size=4")))
    config = train_config([f"resume={tmp_path}"])
    assert (config.seed, config.algorithm_options["group_size"], config.resume) == (5, 4, str(tmp_path))


def test_what_is_decided_later_is_stored_with_its_reason() -> None:
    config = train()
    assert config.max_tokens is None and config.reasons["max_tokens"] == "default: 512, 128 on a CPU"
    later = decided(config, {"max_tokens": (128, "default on a CPU"), "clip_low": (0.2, "preset grpo")})
    assert (later.max_tokens, later.algorithm_options) == (128, {"clip_low": 0.2})
    assert config.max_tokens is None and config.algorithm_options == {}
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in describe(later).splitlines()}
    assert lines["max_tokens"] == "128 default on a CPU"
    assert lines["clip_low"] == "0.2 preset grpo"
    assert lines["model"] == "m given on the command line"
    assert lines["learning_rate"] == "auto default: 1e-5 below 0.5 B parameters, 1e-6 above, 1e-4 for LoRA"


def test_a_config_cannot_be_changed_and_takes_no_other_field() -> None:
    config = train()
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Config(algorithm="grpo", model="m", data={"path": "d"}, reward="r.py", stepz=5)  # type: ignore[arg-type,call-arg]
