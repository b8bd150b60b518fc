# Several turns with tools.
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/config"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files=data/train.parquet data.train_batch_size=32 data.return_raw_chat=True \
    actor_rollout_ref.model.path=./models/instruct actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$CONFIG_PATH/tools.yaml" \
    actor_rollout_ref.rollout.agent.num_workers=4 \
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
    reward.custom_reward_function.path=rewards/search.py reward.num_workers=6 \
    trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_epochs=1
