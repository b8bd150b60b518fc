# PPO with generalized advantages and a critic of its own.
MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
python3 -m verl.trainer.main_ppo \
 algorithm.adv_estimator=gae \
 algorithm.gamma=0.99 algorithm.lam=0.95 \
 data.train_files="$HOME/data/gsm8k/train.parquet" \
 data.val_files="$HOME/data/gsm8k/test.parquet" \
 data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \
 actor_rollout_ref.model.path=$MODEL \
 actor_rollout_ref.actor.optim.lr=1e-6 \
 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
 actor_rollout_ref.actor.use_dynamic_bsz=True \
 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
 actor_rollout_ref.rollout.name=vllm \
 critic.optim.lr=1e-5 \
 critic.model.path=$MODEL \
 critic.ppo_max_token_len_per_gpu=98304 \
 algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001 \
 trainer.critic_warmup=10 \
 trainer.logger=console trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15
