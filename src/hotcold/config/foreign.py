"""Keys of TRL, verl and OpenRLHF, each with what to write here instead. One table, no dependency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    name: str  # as its library writes it
    library: str  # or several, "TRL, OpenRLHF"
    ours: str = ""  # our key; empty: there is none, or none yet
    convert: str = "same value"  # how a value carries over, or what to do where there is no key


_PER_DEVICE = "theirs counts responses, ours counts tokens; leave it out, it does not change the gradient"
_PASSES = "write steps; a pass over N prompts is N / prompts_per_step steps"
_LOSS_TYPE = (
    "weighting is grpo: mean_per_response, dapo and bnpo: mean_per_token, dr_grpo: fixed_length; "
    "cispo: write hotcold train cispo, whose clip_high is their epsilon_high minus 1"
)
_VERL_ESTIMATOR = (
    "write it first: gae is ppo, reinforce_plus_plus reinforce_pp, remax reinforce baseline=greedy; most others "
    "have the same name"
)
_OPENRLHF_ESTIMATOR = "write it first: gae is ppo, group_norm grpo, reinforce_baseline reinforce; others are the same"
_VLLM = "responses are sampled with transformers; leave it out"
_KL_TARGET = "theirs is nats per token, ours nats per response: times the mean length"
_KL_ESTIMATOR = "k1 is right in the reward, k2 and k3 in the loss: see kl.placement"
_NO_WHITEN = "rewards are not whitened; whiten does it to advantages, and ppo has it on"
_FIXED_REFERENCE = "the reference never moves; leave it out"
_CORRECTION = "truncate or mask, with mismatch.level=token, sequence or geometric; false is off"
_NO_DROPOUT = "adapters have no dropout; leave it out"
_NO_PACKING = "rows are not packed; leave it out"
_LEARNED = "a Python function, which may ask a reward model: reward=FILE.py:NAME"

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
    Foreign("mask_truncated_completions", "TRL", "truncated", "true: mask"),
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
    Foreign("bf16", "TRL, OpenRLHF", "dtype", "true: bf16, of the computation; parameters are fp32"),
    Foreign("fp16", "TRL", "dtype", "bf16 or fp32"),
    Foreign("torch_dtype", "TRL", "dtype", "fp32 or bf16, of the computation; parameters are fp32"),
    Foreign("delta", "TRL", "dual_clip"),
    Foreign("importance_sampling_level", "TRL", "objective", "sequence: sequence_clipped_surrogate, as in gspo"),
    Foreign("top_entropy_quantile", "TRL", "", "every token is trained; leave it out"),
    Foreign("off_policy_mask_threshold", "TRL", "", "there is no such mask; leave it out"),
    Foreign("use_bias_correction_kl", "TRL", "kl.placement", "true: loss_times_ratio"),
    Foreign("vllm_importance_sampling_correction", "TRL", "mismatch", _CORRECTION),
    Foreign("vllm_importance_sampling_mode", "TRL", "mismatch", _CORRECTION),
    Foreign("vllm_importance_sampling_cap", "TRL", "mismatch.cap", "same value; with a mask it is mismatch.high"),
    Foreign("vllm_importance_sampling_clip_max", "TRL", "mismatch.cap", "same value; with a mask it is mismatch.high"),
    Foreign("vllm_importance_sampling_clip_min", "TRL", "mismatch.low", "with mismatch=mask; truncate has no floor"),
    Foreign("ref_model", "TRL", "reference"),
    Foreign("sync_ref_model", "TRL", "", _FIXED_REFERENCE),
    Foreign("ref_model_mixup_alpha", "TRL", "", _FIXED_REFERENCE),
    Foreign("ref_model_sync_steps", "TRL", "", _FIXED_REFERENCE),
    Foreign("value_model", "TRL", "critic.init"),
    Foreign("sft_model_path", "TRL", "model"),
    Foreign("reward_model_path", "TRL", "reward", _LEARNED),
    Foreign("kl_coef", "TRL", "beta"),
    Foreign("kl_estimator", "TRL, OpenRLHF", "kl.estimator", _KL_ESTIMATOR),
    Foreign("cliprange", "TRL", "clip_low", "same value, and the same for clip_high"),
    Foreign("cliprange_value", "TRL", "value_clip"),
    Foreign("vf_coef", "TRL", "", "the critic has an optimiser of its own; leave it out"),
    Foreign("whiten_rewards", "TRL", "", _NO_WHITEN),
    Foreign("num_ppo_epochs", "TRL", "epochs_per_batch"),
    Foreign("num_mini_batches", "TRL", "minibatches"),
    Foreign("total_episodes", "TRL", "steps", "theirs counts responses: divide by prompts_per_step x group_size"),
    Foreign("response_length", "TRL", "max_tokens"),
    Foreign("missing_eos_penalty", "TRL", "truncated", "the nearest is penalty, which grows towards max_tokens"),
    Foreign("use_peft", "TRL", "lora.rank", "true: a rank above 0, 16 is usual"),
    Foreign("lora_r", "TRL", "lora.rank"),
    Foreign("lora_alpha", "TRL, OpenRLHF", "lora.alpha"),
    Foreign("lora_target_modules", "TRL", "lora.targets", "same names; all-linear is the default"),
    Foreign("lora_dropout", "TRL, OpenRLHF", "", _NO_DROPOUT),
    Foreign("assistant_only_loss", "TRL", "data.train_on", "true: assistant, false: all"),
    Foreign("completion_only_loss", "TRL", "data.train_on", "true: assistant, false: all"),
    Foreign("packing", "TRL", "", _NO_PACKING),
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
        "token-mean: mean_per_token, seq-mean-token-mean: mean_per_response, seq-mean-token-sum: sum_per_response, "
        "seq-mean-token-sum-norm: fixed_length",
    ),
    Foreign("actor_rollout_ref.actor.clip_ratio_c", "verl", "dual_clip"),
    Foreign(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "verl",
        "objective",
        "vanilla: clipped_surrogate, gspo: sequence_clipped_surrogate, cispo: truncated_is_policy_gradient",
    ),
    Foreign("actor_rollout_ref.actor.entropy_coeff", "verl", "entropy_bonus"),
    Foreign("actor_rollout_ref.actor.use_kl_loss", "verl", "kl.placement", "true: loss; beta says how strong it is"),
    Foreign("actor_rollout_ref.actor.kl_loss_coef", "verl", "beta", "same value, with kl.placement=loss"),
    Foreign(
        "actor_rollout_ref.actor.kl_loss_type",
        "verl",
        "kl.estimator",
        "k2 or mse: k2, k3 or low_var_kl: k3, full: exact; k1 or kl does nothing in a loss",
    ),
    Foreign("actor_rollout_ref.actor.tis_imp_ratio_cap", "verl", "mismatch.cap", "same value, with mismatch=truncate"),
    Foreign("actor_rollout_ref.ref.model.path", "verl", "reference"),
    Foreign("actor_rollout_ref.rollout.calculate_log_probs", "verl", "", "they are always kept; leave it out"),
    Foreign("actor_rollout_ref.rollout.dtype", "verl", "dtype", "bfloat16: bf16; one dtype computes everything"),
    Foreign("actor_rollout_ref.model.enable_gradient_checkpointing", "verl", "gradient_checkpointing"),
    Foreign("actor_rollout_ref.model.lora_rank", "verl", "lora.rank"),
    Foreign("actor_rollout_ref.model.lora_alpha", "verl", "lora.alpha"),
    Foreign("actor_rollout_ref.model.target_modules", "verl", "lora.targets", "same names; all-linear is the default"),
    Foreign("critic.model.path", "verl", "critic.init"),
    Foreign("critic.model.lora_rank", "verl", "lora.critic", "true or false; the rank is the policy's"),
    Foreign("critic.optim.lr", "verl", "critic.learning_rate"),
    Foreign("critic.grad_clip", "verl", "critic.max_grad_norm"),
    Foreign("critic.cliprange_value", "verl", "value_clip"),
    Foreign("critic.ppo_epochs", "verl", "epochs_per_batch", "one number for policy and critic"),
    Foreign("trainer.critic_warmup", "verl", "critic.warmup"),
    Foreign(
        "algorithm.adv_estimator",
        "verl",
        "algorithm",
        _VERL_ESTIMATOR,
    ),
    Foreign("algorithm.gamma", "verl", "gamma"),
    Foreign("algorithm.lam", "verl", "lam"),
    Foreign("algorithm.norm_adv_by_std_in_grpo", "verl", "scale_by_std"),
    Foreign("algorithm.use_kl_in_reward", "verl", "kl.placement", "true: reward; beta says how strong it is"),
    Foreign("algorithm.kl_penalty", "verl", "kl.estimator", "kl or k1: k1, the one that is right in the reward"),
    Foreign("algorithm.kl_ctrl.kl_coef", "verl", "beta", "same value, with kl.placement=reward"),
    Foreign("algorithm.kl_ctrl.type", "verl", "kl.target", "fixed: off; adaptive: the target"),
    Foreign("algorithm.kl_ctrl.target_kl", "verl", "kl.target", _KL_TARGET),
    Foreign("algorithm.kl_ctrl.horizon", "verl", "kl.horizon", "same value, both count responses"),
    Foreign("algorithm.filter_groups.enable", "verl", "drop_zero_variance", "true or false; dapo has it on"),
    Foreign("algorithm.filter_groups.max_num_gen_batches", "verl", "refill", "theirs counts the first too: less 1"),
    Foreign("algorithm.filter_groups.metric", "verl", "", "groups are judged by their scores; leave it out"),
    Foreign(
        "algorithm.rollout_correction.rollout_is",
        "verl",
        "mismatch",
        "token or sequence: truncate, with that mismatch.level",
    ),
    Foreign("algorithm.rollout_correction.rollout_is_threshold", "verl", "mismatch.cap"),
    Foreign(
        "algorithm.rollout_correction.rollout_rs",
        "verl",
        "mismatch",
        "token, sequence or geometric: mask, with that mismatch.level",
    ),
    Foreign("algorithm.rollout_correction.rollout_rs_threshold", "verl", "mismatch.high"),
    Foreign("algorithm.rollout_correction.rollout_rs_threshold_lower", "verl", "mismatch.low"),
    Foreign("reward_model.overlong_buffer.enable", "verl", "truncated", "true: penalty"),
    Foreign("reward_model.overlong_buffer.len", "verl", "overlong.buffer"),
    Foreign("reward_model.overlong_buffer.penalty_factor", "verl", "overlong.penalty"),
    Foreign("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "verl", "truncated", "true: penalty"),
    Foreign("reward_model.reward_kwargs.overlong_buffer_cfg.len", "verl", "overlong.buffer"),
    Foreign("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "verl", "overlong.penalty"),
    Foreign("data.response_key", "verl", "data.response"),
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
    Foreign(
        "advantage_estimator",
        "OpenRLHF",
        "algorithm",
        _OPENRLHF_ESTIMATOR,
    ),
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
    Foreign("critic_pretrain", "OpenRLHF", "critic.init"),
    Foreign("critic_learning_rate", "OpenRLHF", "critic.learning_rate"),
    Foreign("freezing_actor_steps", "OpenRLHF", "critic.warmup", "same value; -1 there is 0"),
    Foreign("lambd", "OpenRLHF", "lam"),
    Foreign("eps_clip_low_high", "OpenRLHF", "clip_low", "the first of the two; the second is clip_high"),
    Foreign("policy_loss_type", "OpenRLHF", "objective", "ppo: clipped_surrogate, gspo: sequence_clipped_surrogate"),
    Foreign("entropy_loss_coef", "OpenRLHF", "entropy_bonus"),
    Foreign("init_kl_coef", "OpenRLHF", "beta"),
    Foreign("use_kl_loss", "OpenRLHF", "kl.placement", "true: loss, false: reward"),
    Foreign("kl_target", "OpenRLHF", "kl.target", _KL_TARGET),
    Foreign("kl_horizon", "OpenRLHF", "kl.horizon", "same value, both count responses"),
    Foreign("lora_rank", "OpenRLHF", "lora.rank"),
    Foreign("target_modules", "OpenRLHF", "lora.targets", "same names; all-linear is the default"),
    Foreign("dynamic_filtering", "OpenRLHF", "drop_zero_variance", "true or false; refill bounds the new prompts"),
    Foreign("dynamic_filtering_reward_range", "OpenRLHF", "", "groups of equal scores are dropped; leave it out"),
    Foreign("overlong_buffer_len", "OpenRLHF", "overlong.buffer", "same value, with truncated=penalty"),
    Foreign("overlong_penalty_factor", "OpenRLHF", "overlong.penalty"),
    Foreign("enable_vllm_is_correction", "OpenRLHF", "mismatch", _CORRECTION),
    Foreign("vllm_is_correction_type", "OpenRLHF", "mismatch", "tis: truncate, icepop: mask; see mismatch.level"),
    Foreign("vllm_is_truncated_threshold", "OpenRLHF", "mismatch.cap", "the upper one; a mask has low and high"),
    Foreign("normalize_reward", "OpenRLHF", "", _NO_WHITEN),
    Foreign("reward_pretrain", "OpenRLHF", "reward", _LEARNED),
    Foreign("output_key", "OpenRLHF", "data.response"),
    Foreign("packing_samples", "OpenRLHF", "", _NO_PACKING),
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
