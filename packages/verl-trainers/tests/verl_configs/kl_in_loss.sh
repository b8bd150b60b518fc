# The KL to the reference as a term of the loss.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    algorithm.kl_penalty=kl algorithm.kl_ctrl.type=fixed algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files=data/train.parquet data.train_batch_size=64 \
    actor_rollout_ref.model.path=./models/base \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.005 \
    actor_rollout_ref.actor.kl_loss_type=mse actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \
    reward.custom_reward_function.path=rewards/math.py \
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps=50
