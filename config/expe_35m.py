"""
ExPE Tables 2 and 7: 35M parameters on FineWeb's long documents. Loss at 1, 2 and 4 times the
trained length of 512.

    python -m data.fineweb
    python train.py config/expe_35m.py
    python sample.py out/expe_35m_{expe,rope,sinusoidal} \
        --extrapolate=1,2,4 --split=test --eval_tokens=10000000

    flags                                     1x     2x     4x     time of an epoch
    (none: ExPE)                              3.93   3.87   3.88   1
    --pe=sinusoidal --sinusoidal_scale=False  4.0    4.75   5.64
    --pe=rope                                 3.88   4.37   5.05
    --expe_same=True                          4.26   4.21   4.24   1
    --expe_l=1                                4.48   4.83   6.01   1
    --expe_learned=init                       3.88   3.82   4.89   1.6
    --expe_learned=random                     7.33   7.34   7.61   1.6
    --expe_once=True                          4.43   4.82   6.18   1

The paper says that it trains on one A40, in float32, on 600M tokens. Its sinusoidal baseline does
not scale the token embeddings (eq. 13). The paper contradicts itself about ExPE at four times the
length, where the loss is 3.88 in Table 2 and 4.26 in Table 7.

Our choices. The paper does not say how long it trains. We take 2289 steps of 512 sequences, which
hold as many tokens as the set (37% of it is never read, because sequences are drawn at random),
with a cosine schedule. GELU, LayerNorm and biases are GPT's. The embeddings are not tied, because
that gives 35M parameters. S is 0, and theta is 1/1024, which is the paper's 1/(2m) for m = 512.
With --expe_learned=random, S and theta start from N(0, 1). The positions are written after the
block's norm, as in expe_135m.py.

Memory at micro_batch=64 is about 17 GB.
"""
data = "fineweb"
pe = "expe"

n_layer = 6
n_head = 12
n_embd = 384
block_size = 512
dropout = 0.1
tie = False
expe_l = 24
expe_theta = 1 / 1024  # 1 / (2 m), where m = 512 is the trained length

batch_size = 512
micro_batch = 64
max_iters = 2289
learning_rate = 1e-3
min_lr = 3e-6
warmup_iters = 229  # 10%
dtype = "float32"

eval_interval = 200
eval_batches = 4
compile = True
