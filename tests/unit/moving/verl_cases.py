"""Commands of verl as its users write them; their lines of shell are expanded."""

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
COMMON = f"""
    algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
    data.filter_overlong_prompts=True data.truncation='error' {M}.use_remove_padding=True {A}.use_kl_loss=True
    {A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0 {A}.optim.lr=1e-6
    {R}.log_prob_micro_batch_size_per_gpu=16 {R}.name=vllm {R}.gpu_memory_utilization=0.6 {R}.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 algorithm.use_kl_in_reward=False trainer.critic_warmup=0
    trainer.project_name='p' trainer.experiment_name='e' trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
    trainer.total_epochs=15
"""
FSDP = f"""
    python3 -m verl.trainer.main_ppo {COMMON} data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
    {M}.path=/models/8B {A}.ppo_mini_batch_size=256 {A}.ppo_micro_batch_size_per_gpu=32 {M}.enable_gradient_checkpointing=True
    {A}.fsdp_config.param_offload=False {A}.fsdp_config.optimizer_offload=False {R}.tensor_model_parallel_size=2
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 $@
"""
LORA = f"""
    python3 -m verl.trainer.main_ppo {COMMON} trainer.val_before_train=False data.train_batch_size=16 data.shuffle=False
    data.max_prompt_length=512 data.max_response_length=1024 {M}.path=/models/3B {M}.lora_rank=64 {M}.lora_alpha=32
    {A}.optim.lr=3e-6 {A}.ppo_mini_batch_size=16 {R}.tensor_model_parallel_size=2 {R}.load_format=safetensors
    {R}.layered_summon=True trainer.n_gpus_per_node=2
"""
MEGATRON = f"""
    python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml {COMMON}
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 {M}.path=/models/7B
    {R}.expert_parallel_size=4 {A}.ppo_mini_batch_size=256 {A}.megatron.pipeline_model_parallel_size=2 {A}.megatron.tensor_model_parallel_size=2
    {A}.megatron.virtual_pipeline_model_parallel_size=null +{A}.megatron.override_transformer_config.moe_grouped_gemm=True
    {R}.tensor_model_parallel_size=2 {R}.data_parallel_size=2 trainer.n_gpus_per_node=16
"""
DAPO = f"""
    python3 -m recipe.dapo.main_dapo {COMMON} data.truncation='left' data.filter_overlong_prompts=False data.train_batch_size=512
    data.max_prompt_length=2048 data.max_response_length=8192 {M}.path=/models/32B {A}.use_kl_loss=False {A}.kl_loss_coef=0.0
    {A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 {A}.clip_ratio_c=10.0 {A}.loss_agg_mode=token-mean {A}.use_dynamic_bsz=True
    {A}.ppo_max_token_len_per_gpu=10240 {A}.ulysses_sequence_parallel_size=4 {A}.ppo_mini_batch_size=32 {R}.n=16
    {A}.optim.lr_warmup_steps=10 {A}.optim.weight_decay=0.1 {A}.grad_clip=1.0 {R}.tensor_model_parallel_size=4 {R}.data_parallel_size=2
    {R}.enable_chunked_prefill=True {R}.val_kwargs.temperature=1.0 {R}.val_kwargs.top_p=0.7 {R}.val_kwargs.do_sample=True
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=acc
    reward_model.reward_manager=dapo reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
    reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_training_steps=100 trainer.resume_mode=disable
"""
REFUSED = f"""
    python3 -m verl.trainer.main_ppo data.train_files=/data/a.parquet algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True
    {A}.loss_agg_mode=sample-mean {A}.fsdp_config.offload_policy=True trainer.logger=['console','swanlab'] {M}.path=$MODEL_PATH trainer.n_gpus_per_node=3
    critic.optim.lr=1e-5 custom_reward_function.path=reward.py custom_reward_function.name=score nonsense.name=1
    data.train_batch_size=100 {A}.ppo_mini_batch_size=32 {R}.n=many
    {R}.expert_parallel_size=4
"""
