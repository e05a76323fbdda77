"""
CoPE Figure 5 and Table 12: 1.4B parameters, CoPE + RoPE in every sixth layer, RoPE in the others.

    python -m data.c4 --train=364868892 --out=data/c4_llama
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py config/cope_1b4.py --out_dir=out/cope_1b4_cope
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py config/cope_1b4.py --pe=rope
    python sample.py out/cope_1b4_{cope,rope} --figure=curves --keys=val/loss --against=tokens

Run the torchrun commands on each of four machines; HOST is one of them. The last command draws
Figure 5 on C4: after 1T tokens the paper's CoPE has about 3% less perplexity than RoPE (0.03 less
loss). On Wikipedia, CoPE needs 0.6T to reach RoPE's final loss. Here WikiText-103 stands in for it.
These commands give the end points; for others, copy the run directories during training:

    python -m data.wikitext103 --tokenizer=hf-internal-testing/llama-tokenizer \
        --out=data/wikitext103_llama
    python sample.py out/cope_1b4_{cope,rope} --evaluate=val --data=data/wikitext103_llama

Table 12, accuracy in percent, MMLU with five examples (the paper gives no number for the others).
The mean of the nine is 47.7 for RoPE, 48.6 for CoPE. Compare acc. For PIQA, HellaSwag, ARC and OBQA
the harness also prints acc_norm, and the paper does not say which it reports:

    python sample.py out/cope_1b4_cope out/cope_1b4_rope \
        --tasks=boolq,piqa,social_iqa,hellaswag,winogrande,arc_easy,arc_challenge,openbookqa
    python sample.py out/cope_1b4_cope out/cope_1b4_rope --tasks=mmlu --fewshot=5

                  BoolQ  PIQA  SIQA  HellaS  WinoG  ARCe  ARCc  OBQA  MMLU
    RoPE          61.4   73.0  41.2  45.5    60.4   64.3  30.2  25.2  27.8
    CoPE + RoPE   65.8   73.4  41.7  45.4    62.0   66.2  29.7  26.8  26.6

The paper trains on Llama-2's private mix. C4, on which it evaluates, has 0.18T tokens, so 1T reads
it more than five times. Given: sizes, learning rate 4e-4, context 4096, p_max = 64. The tables are
per layer and head: the 0.04% of the parameters that the paper adds are 4 layers x 64 positions x
2048 = 524,288. Llama 2's, as the paper says: 4M tokens a step, cosine to a tenth, warm-up 2000,
weight decay 0.1, betas 0.9, 0.95 (its AdamW has eps 1e-5, ours PyTorch's 1e-8). Open: the MLP's
width (5632 gives 1.36B); 64 positions, or 65 if the paper's 64 is the last one.

Memory: weights, gradients and AdamW's two moments take 1.36G x 16 bytes = 22 GB, and a pass over
one sequence keeps 34 GB when PyTorch computes CoPE, 15 GB for RoPE: 56 and 37 GB in all. Exchanging
gradients under torchrun takes 5 GB more.
"""
data = "data/c4_llama"
pe = "rope,rope,rope,rope,rope,cope+rope"

n_layer = 24
n_head = 16
n_embd = 2048
block_size = 4096
norm = "rmsnorm"
mlp = "swiglu"
mlp_width = 5632
bias = False
tie = False
cope_shared = False
cope_per_head = True

batch_size = 1024
micro_batch = 1
max_iters = 238419
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 2000
beta2 = 0.95

eval_interval = 1000
eval_batches = 1
compile = True
