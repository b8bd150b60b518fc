# Rollout and training apart, weights every fourth update.
train_prompt_mini_bsz=32
total_rollout_steps=$(((512*400)))
staleness_threshold=0.5
trigger_parameter_sync_step=4
test_freq=2

DATA=(
    data.train_files="${HOME}/data/dapo/train.parquet"
    data.val_files="${HOME}/data/dapo/val.parquet"
    data.train_batch_size=0
    data.gen_batch_size=1
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.return_raw_chat=True
)
ACTOR=(
    actor_rollout_ref.model.path="${HOME}/models/base"
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((2048 + 8192) * 2))
    actor_rollout_ref.actor.use_rollout_log_probs=True
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    rollout.nnodes=2
    rollout.n_gpus_per_node=8
    rollout.total_rollout_steps=${total_rollout_steps}
)
python3 -m verl.experimental.fully_async_policy.fully_async_main \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    algorithm.adv_estimator=grpo \
    reward.custom_reward_function.path=rewards/math.py \
    trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.total_epochs=10 trainer.test_freq=${test_freq} \
    async_training.staleness_threshold="${staleness_threshold}" \
    async_training.trigger_parameter_sync_step="${trigger_parameter_sync_step}" \
    async_training.require_batches=2 \
    async_training.partial_rollout=True
