"""
CoPE Table 6, code: 20M parameters in Llama 2's architecture and with its tokenizer.

    python -m data.code
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py
    python -m eval.scores out/cope_code_20m_cope --splits=test

    flags           test perplexity   parameters, M
    (none: CoPE)    3.9               20.8
    --pe=learned    4.7               20.8
    --pe=rope       4.1               19.8
    --pe=cope+rope  4.0               20.8

The paper says that it trains on 100B tokens of Llama 2's mix of code, with a context of 4096 and a
learning rate of 5e-4.

Our choices. The paper's data are private, so our runs can match its ranking but not its
perplexities. Our data have about a sixth of the 100B tokens, so that each token is read about six
times. The MLP is of width 768, which gives RoPE's 19.8M parameters. The rest is as in Llama 2,
except for AdamW's eps (see cope_1b4.py). CoPE has one table per head for the whole model, with as
many positions as the context, because the paper names no limit for code and its 20.8M parameters
are 4096 x 256 more than RoPE's. A table per layer and head with 1024 positions has the same size
(--cope_shared=False --cope_npos=1024).

Memory at micro_batch=4 is about 7 GB, for CoPE as for RoPE.
"""
data = "code"
pe = "cope"

n_layer = 4
n_head = 8
n_embd = 256
block_size = 4096
norm = "rmsnorm"
mlp = "swiglu"
mlp_width = 768
bias = False
tie = False
cope_npos = 4096
cope_per_head = True

batch_size = 1024
micro_batch = 4
max_iters = 23842
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 2000

eval_interval = 1000
eval_batches = 1
compile = True
