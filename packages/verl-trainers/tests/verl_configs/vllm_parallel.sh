# An inference engine over several devices, with a share of their memory.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/train.parquet \
    actor_rollout_ref.model.path=./models/base \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.free_cache_engine=True \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=0.9 \
    reward.custom_reward_function.path=rewards/math.py \
    trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.total_epochs=1
