"""Keys of TRL, verl and OpenRLHF, each with what to write here instead. One table, no dependency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    name: str  # as its library writes it
    library: str
    ours: str = ""  # our key; empty: there is none, or none yet
    convert: str = "same value"  # how a value carries over, or what to do where there is no key


_PER_DEVICE = "theirs counts responses, ours counts tokens; leave it out, it does not change the gradient"
_PASSES = "write steps; a pass over N prompts is N / prompts_per_step steps"
_LOSS_TYPE = "weighting is grpo: mean_per_response, dapo and bnpo: mean_per_token, dr_grpo: fixed_length"
_ESTIMATOR = "write it first: hotcold train grpo, rloo or reinforce"
_VLLM = "responses are sampled with transformers; leave it out"
_KL = "there is no KL penalty in this version; leave it out"
_MASK_TRUNCATED = "only truncated=keep works yet: the length limit ends the response and its score counts"

FOREIGN: tuple[Foreign, ...] = (
    # TRL
    Foreign("model_name_or_path", "TRL", "model"),
    Foreign("train_dataset", "TRL", "data"),
    Foreign("dataset_name", "TRL", "data"),
    Foreign("dataset_train_split", "TRL", "data.split"),
    Foreign("eval_dataset", "TRL", "eval.data"),
    Foreign("reward_funcs", "TRL", "reward", "FILE.py:NAME, or a list of them"),
    Foreign("num_generations", "TRL", "group_size"),
    Foreign("num_generations_eval", "TRL", "eval.samples"),
    Foreign("max_steps", "TRL", "steps"),
    Foreign("num_train_epochs", "TRL", "steps", _PASSES),
    Foreign(
        "generation_batch_size",
        "TRL",
        "prompts_per_step",
        "theirs counts responses, ours prompts: divide by num_generations",
    ),
    Foreign(
        "steps_per_generation",
        "TRL",
        "minibatches",
        "optimiser steps on one batch; prompts_per_step is prompts of the whole batch",
    ),
    Foreign("per_device_train_batch_size", "TRL", "tokens_per_microbatch", _PER_DEVICE),
    Foreign("per_device_eval_batch_size", "TRL", "", "leave it out, evaluation chooses its own"),
    Foreign(
        "gradient_accumulation_steps",
        "TRL",
        "prompts_per_step",
        "responses of a step / group_size; micro-batches are cut by tokens_per_microbatch",
    ),
    Foreign("max_completion_length", "TRL", "max_tokens"),
    Foreign("max_prompt_length", "TRL", "data.too_long", "a prompt over the model's context is error or drop"),
    Foreign("num_iterations", "TRL", "epochs_per_batch"),
    Foreign("epsilon", "TRL", "clip_low", "same value, and the same for clip_high unless epsilon_high was set"),
    Foreign("epsilon_high", "TRL", "clip_high"),
    Foreign("scale_rewards", "TRL", "scale_by_std", "group: true, none: false; batch is not available yet"),
    Foreign("loss_type", "TRL", "weighting", _LOSS_TYPE),
    Foreign("mask_truncated_completions", "TRL", "truncated", _MASK_TRUNCATED),
    Foreign("optim", "TRL", "optimizer", "adamw or sgd"),
    Foreign("warmup_ratio", "TRL", "warmup_steps", "a number of steps, not a share"),
    Foreign("lr_scheduler_type", "TRL", "", "the rate is constant after warmup_steps; leave it out"),
    Foreign("weight_decay", "TRL", "", "it is 0 here; leave it out"),
    Foreign("output_dir", "TRL", "run", "the name of a folder under runs/, or a path"),
    Foreign("resume_from_checkpoint", "TRL", "resume", "no, auto or a run folder"),
    Foreign("save_steps", "TRL", "save_every"),
    Foreign("save_total_limit", "TRL", "keep_checkpoints"),
    Foreign("eval_steps", "TRL", "eval.every"),
    Foreign("logging_steps", "TRL", "", "every step is recorded; leave it out"),
    Foreign("use_vllm", "TRL", "sampler", _VLLM),
    Foreign("report_to", "TRL", "", "metrics.jsonl in the run folder has every number; leave it out"),
    Foreign("bf16", "TRL", "dtype", "only fp32 works yet"),
    Foreign("fp16", "TRL", "dtype", "only fp32 works yet"),
    Foreign("repetition_penalty", "TRL", "", "it makes the sampler differ from the trained policy; leave it out"),
    Foreign("generation_kwargs", "TRL", "", "write temperature, max_tokens, stop one by one"),
    Foreign("trust_remote_code", "TRL", "", "code that comes with a model is never run; leave it out"),
    # verl
    Foreign("actor_rollout_ref.model.path", "verl", "model"),
    Foreign("data.train_files", "verl", "data"),
    Foreign("data.val_files", "verl", "eval.data"),
    Foreign("data.prompt_key", "verl", "data.prompt"),
    Foreign("data.train_batch_size", "verl", "prompts_per_step", "same value, both count prompts"),
    Foreign("data.val_batch_size", "verl", "", "leave it out, evaluation chooses its own"),
    Foreign("data.max_prompt_length", "verl", "data.too_long", "a prompt over the model's context is error or drop"),
    Foreign("data.max_response_length", "verl", "max_tokens"),
    Foreign("data.truncation", "verl", "data.too_long", "error or drop; a prompt is never cut"),
    Foreign("custom_reward_function.path", "verl", "reward", "reward=FILE.py:NAME"),
    Foreign("custom_reward_function.name", "verl", "reward", "reward=FILE.py:NAME"),
    Foreign("actor_rollout_ref.rollout.n", "verl", "group_size"),
    Foreign("actor_rollout_ref.rollout.temperature", "verl", "temperature"),
    Foreign("actor_rollout_ref.rollout.top_p", "verl", "top_p", "only 1.0 in training"),
    Foreign("actor_rollout_ref.rollout.top_k", "verl", "top_k", "-1 there is 0 here; only that in training"),
    Foreign("actor_rollout_ref.rollout.name", "verl", "sampler", _VLLM),
    Foreign("actor_rollout_ref.rollout.response_length", "verl", "max_tokens"),
    Foreign("actor_rollout_ref.actor.ppo_epochs", "verl", "epochs_per_batch"),
    Foreign(
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "verl",
        "minibatches",
        "ours is a number of parts: train_batch_size / ppo_mini_batch_size",
    ),
    Foreign("actor_rollout_ref.actor.ppo_micro_batch_size", "verl", "tokens_per_microbatch", _PER_DEVICE),
    Foreign("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "verl", "tokens_per_microbatch", _PER_DEVICE),
    Foreign("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "verl", "tokens_per_microbatch"),
    Foreign("lr", "torch", "learning_rate"),
    Foreign("actor_rollout_ref.actor.optim.lr", "verl", "learning_rate"),
    Foreign("actor_rollout_ref.actor.optim.lr_warmup_steps", "verl", "warmup_steps"),
    Foreign("actor_rollout_ref.actor.grad_clip", "verl", "max_grad_norm"),
    Foreign("actor_rollout_ref.actor.clip_ratio", "verl", "clip_low", "same value, and the same for clip_high"),
    Foreign("actor_rollout_ref.actor.clip_ratio_low", "verl", "clip_low"),
    Foreign("actor_rollout_ref.actor.clip_ratio_high", "verl", "clip_high"),
    Foreign(
        "actor_rollout_ref.actor.loss_agg_mode",
        "verl",
        "weighting",
        "token-mean: mean_per_token, seq-mean-token-mean: mean_per_response, seq-mean-token-sum: sum_per_response",
    ),
    Foreign("actor_rollout_ref.actor.use_kl_loss", "verl", "", _KL),
    Foreign("actor_rollout_ref.actor.kl_loss_coef", "verl", "", _KL),
    Foreign("actor_rollout_ref.actor.kl_loss_type", "verl", "", _KL),
    Foreign("algorithm.adv_estimator", "verl", "algorithm", _ESTIMATOR),
    Foreign("algorithm.gamma", "verl", "gamma"),
    Foreign("algorithm.norm_adv_by_std_in_grpo", "verl", "scale_by_std"),
    Foreign("algorithm.use_kl_in_reward", "verl", "", _KL),
    Foreign("algorithm.kl_penalty", "verl", "", _KL),
    Foreign("algorithm.kl_ctrl.kl_coef", "verl", "", _KL),
    Foreign("trainer.total_training_steps", "verl", "steps"),
    Foreign("trainer.total_epochs", "verl", "steps", _PASSES),
    Foreign("trainer.experiment_name", "verl", "run"),
    Foreign("trainer.default_local_dir", "verl", "run", "the name of a folder under runs/, or a path"),
    Foreign("trainer.resume_mode", "verl", "resume", "disable is no; auto is auto; resume_path is the run folder"),
    Foreign("trainer.save_freq", "verl", "save_every"),
    Foreign("trainer.test_freq", "verl", "eval.every"),
    Foreign("trainer.max_actor_ckpt_to_keep", "verl", "keep_checkpoints"),
    Foreign("trainer.logger", "verl", "", "metrics.jsonl in the run folder has every number; leave it out"),
    Foreign("trainer.n_gpus_per_node", "verl", "", "one process on one device; leave it out"),
    Foreign("trainer.nnodes", "verl", "", "one process on one device; leave it out"),
    # OpenRLHF
    Foreign("pretrain", "OpenRLHF", "model"),
    Foreign("prompt_data", "OpenRLHF", "data"),
    Foreign("prompt_split", "OpenRLHF", "data.split"),
    Foreign("input_key", "OpenRLHF", "data.prompt"),
    Foreign("apply_chat_template", "OpenRLHF", "data.chat", "true or false"),
    Foreign("remote_rm_url", "OpenRLHF", "reward", "a Python function: reward=FILE.py:NAME"),
    Foreign("advantage_estimator", "OpenRLHF", "algorithm", _ESTIMATOR),
    Foreign("rollout_batch_size", "OpenRLHF", "prompts_per_step", "same value, both count prompts"),
    Foreign("n_samples_per_prompt", "OpenRLHF", "group_size"),
    Foreign("eval_n_samples_per_prompt", "OpenRLHF", "eval.samples"),
    Foreign(
        "train_batch_size",
        "OpenRLHF",
        "minibatches",
        "theirs counts responses, ours is a number of parts: prompts_per_step x group_size / train_batch_size",
    ),
    Foreign("micro_train_batch_size", "OpenRLHF", "tokens_per_microbatch", _PER_DEVICE),
    Foreign("micro_rollout_batch_size", "OpenRLHF", "", "leave it out, sampling chooses its own"),
    Foreign("train_max_tokens_per_gpu", "OpenRLHF", "tokens_per_microbatch"),
    Foreign("max_epochs", "OpenRLHF", "epochs_per_batch", "passes over one batch of responses; same value"),
    Foreign("num_episodes", "OpenRLHF", "steps", _PASSES),
    Foreign("prompt_max_len", "OpenRLHF", "data.too_long", "a prompt over the model's context is error or drop"),
    Foreign("generate_max_len", "OpenRLHF", "max_tokens"),
    Foreign("max_new_tokens", "OpenRLHF", "max_tokens"),
    Foreign("actor_learning_rate", "OpenRLHF", "learning_rate"),
    Foreign("max_norm", "OpenRLHF", "max_grad_norm"),
    Foreign("eps_clip", "OpenRLHF", "clip_low", "same value, and the same for clip_high"),
    Foreign("no_advantage_std_norm", "OpenRLHF", "scale_by_std", "the opposite: true there is false here"),
    Foreign("init_kl_coef", "OpenRLHF", "", _KL),
    Foreign("kl_estimator", "OpenRLHF", "", _KL),
    Foreign("use_kl_loss", "OpenRLHF", "", _KL),
    Foreign("save_path", "OpenRLHF", "run", "the name of a folder under runs/, or a path"),
    Foreign("ckpt_path", "OpenRLHF", "run", "checkpoints are in the run folder"),
    Foreign("load_checkpoint", "OpenRLHF", "resume", "no, auto or a run folder"),
    Foreign("max_ckpt_num", "OpenRLHF", "keep_checkpoints"),
    Foreign("use_wandb", "OpenRLHF", "", "metrics.jsonl in the run folder has every number; leave it out"),
)


def find_foreign(key: str) -> Foreign | None:
    """The row for a key as somebody would type it: whole, or the end of a dotted one (`rollout.n`, `ppo_epochs`)."""
    key = key.lstrip("+~")  # Hydra's prefixes
    for row in FOREIGN:
        if row.name == key:
            return row
    if "." not in key and "_" not in key:
        return None  # `n`, `path`, `lr` alone could mean anything
    return next((row for row in FOREIGN if row.name.endswith(f".{key}")), None)


def translation(key: str, row: Foreign) -> str:
    """One line: whose key it is and what to write here."""
    if not row.ours:
        return f"{key} is a key of {row.library}: {row.convert}."
    return f"{key} is a key of {row.library}; here it is {row.ours} ({row.convert})."
