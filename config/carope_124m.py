"""
CARoPE Table 1, GPT-small: 124M parameters on FineWeb-Edu; perplexity at 512 (as trained) and 1024
tokens.

    python -m data.fineweb_edu
    torchrun --standalone --nproc_per_node=2 train.py config/carope_124m.py
    python sample.py out/carope_124m_{carope,rope,learned,sinusoidal} \
        --extrapolate=1,2 --split=test --eval_tokens=10000000

    flags             512       1024
    (none: CARoPE)    21.23     21.39
    --pe=rope         21.31     56.61
    --pe=learned      21.90     -
    --pe=sinusoidal   22.14     166.18

(Learned positions end at 512, and --extrapolate says so.) The paper also reports 0.76M tokens a
second for CARoPE and 0.63M for RoPE, though CARoPE computes strictly more. Ours are in the logs:

    python sample.py out/carope_124m_{carope,rope} --figure=curves --keys=tokens_per_s

19,000 steps of 524,288 tokens, about one epoch, on two H100s in the paper. It trains on 9.9B tokens
and keeps 0.1B for evaluation. data/fineweb_edu.py keeps 0.1B for val and as much for test, and
trains on 9.8B. The paper says 10 heads, which do not divide 768, so we take GPT-2's 12. Its x is
"the embedding of the token"; ours is each attention's input. Weight decay, betas and dropout
are GPT-2's as commonly reproduced: 0.1, (0.9, 0.95), none. Memory, 32 sequences a pass: 19 GB.
"""
data = "fineweb_edu"
pe = "carope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 512
vocab_size = 50304

batch_size = 1024
micro_batch = 32
max_iters = 19000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 750
weight_decay = 0.1
beta2 = 0.95

eval_interval = 1000
eval_batches = 4
compile = True
