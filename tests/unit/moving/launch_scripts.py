"""Launch scripts of verl and slime as files: variables, lists, sums, launchers and other commands around the trainer's."""

VERL = r"""#!/usr/bin/env bash
set -xeuo pipefail
project_name='DAPO'
exp_name="DAPO-${MODEL_SIZE:-7B}"   # of the model
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
loss_agg_mode="seq-mean-token-mean"
train_prompt_bsz=512
n_resp_per_prompt=16
MODEL_PATH=${MODEL_PATH:-"${HOMES:-/models}/Qwen2.5-${MODEL_SIZE:-7B}"}
offload=True
actor_ppo_max_token_len=$(( (max_prompt_length + max_response_length) * 2 ))

python3 examples/data_preprocess/gsm8k.py --local_dir /data

DATA=(
    data.train_files="['/data/a.parquet', '/data/b.parquet']"
    data.max_prompt_length=${max_prompt_length}  # tokens
    # data.max_response_length=1
    data.max_response_length=${max_response_length}
)
DATA+=(data.train_batch_size=${train_prompt_bsz})

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" --working-dir "${PWD}" \
    -- python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \
    trainer.save_freq=10 \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" $@ 2>&1 | tee log
"""

SLIME = r"""#!/bin/bash
pkill -9 python
ray stop --force
export PYTHONUNBUFFERED=1
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B
   #--hf-checkpoint /models/Qwen3-4B-FP8
   --ref-load /models/Qwen3-4B_torch_dist
   --save /runs/4B/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl
   --input-key prompt
   --apply-chat-template
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
)
WANDB_ARGS=(
   # --use-wandb
   # --wandb-project slime-dev
)
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${WANDB_ARGS[@]}
"""
