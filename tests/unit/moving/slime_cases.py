"""Commands of slime as its users write them; their lines of shell are expanded."""

MODEL = """
    --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm
"""
MISC = """
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash --balance-data --use-dynamic-batch-size --optimizer adam
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
DENSE_COLOCATED = f"""
    ray job submit --address http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
    {MODEL} {MISC}
    --hf-checkpoint /models/4B --ref-load /models/4B_dist --load /runs/4B --save /runs/4B --save-interval 20
    --prompt-data /data/math.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256
    --eval-interval 20 --eval-prompt-data aime /data/aime.jsonl --n-samples-per-eval-prompt 16 --eval-max-response-len 16384
    --eval-top-p 1 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
    --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --max-tokens-per-gpu 9216
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.98 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
"""
SEPARATE = f"""
    python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 {MODEL} {MISC}
    --hf-checkpoint /models/9B --prompt-data /data/math.jsonl --input-key messages --label-key label --rm-type dapo
    --num-epoch 2 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-steps-per-rollout 2
    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --tensor-model-parallel-size 2 --context-parallel-size 2 --max-tokens-per-gpu 4608 --advantage-estimator gspo
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 --eps-clip 4e-4 --lr 1e-6 --lr-decay-style cosine --min-lr 1e-7
    --lr-warmup-iters 10 --rollout-num-gpus-per-engine 2 --use-tis --tis-clip 2.0 --use-wandb --wandb-project p
    --update-weights-interval 2
"""
EXPERTS = f"""
    train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {MODEL} {MISC}
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-aux-loss-coeff 0
    --hf-checkpoint /models/30B --prompt-data /data/math.jsonl --input-key prompt --label-key label --rm-type math
    --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --global-batch-size 256
    --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --max-tokens-per-gpu 20480
    --advantage-estimator grpo --eps-clip 0.2 --lr 1e-6 --lr-decay-style constant --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 4 8 --calculate-per-token-loss
"""
OWN_CODE = f"""
    train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {MODEL}
    --hf-checkpoint /models/4B --prompt-data /data/search.jsonl --input-key prompt --rollout-batch-size 32
    --n-samples-per-prompt 8 --rollout-max-response-len 512 --global-batch-size 256 --num-rollout 3000
    --custom-generate-function-path generate.generate --custom-rm-path generate.reward_func --advantage-estimator ppo
    --optimizer sgd --lr 1e-6 --no-such-name 3
"""
