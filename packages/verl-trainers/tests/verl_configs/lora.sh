# Low-rank adapters instead of all weights.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files=data/train.parquet data.train_batch_size=16 \
    actor_rollout_ref.model.path=./models/base \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size=40 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \
    reward.custom_reward_function.path=rewards/math.py \
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_epochs=1
