# GRPO on one node, with a reward function of one's own.
set -x

data_dir=${DATA_DIR:-$HOME/data/arithmetic}

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$data_dir/train.parquet \
    data.val_files=$data_dir/test.parquet \
    data.train_batch_size=128 \
    data.max_prompt_length=256 \
    data.max_response_length=$((256 * 3)) \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path="$HOME/models/small" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.n=5 \
    reward.custom_reward_function.path=rewards/arithmetic.py \
    reward.custom_reward_function.name=score \
    +reward.custom_reward_function.reward_kwargs.strict=True \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.project_name='examples' \
    trainer.experiment_name="grpo_$(date +%m%d)" \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 "$@"
