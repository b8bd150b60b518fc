# The KL to the reference taken off the reward, with a coefficient that adapts.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=low_var_kl algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01 \
    algorithm.kl_ctrl.target_kl=0.2 algorithm.kl_ctrl.horizon=5000 \
    data.train_files=data/train.parquet data.train_batch_size=64 \
    actor_rollout_ref.model.path=./models/base actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \
    reward.custom_reward_function.path=rewards/math.py \
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps=50
