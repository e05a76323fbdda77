"""
Recall, a needle in a haystack: one key-value pair among 30 fillers, then among up to 510. A run
takes 15 to 35 seconds on one core.

    python train.py config/recall_small.py              # PoPE
    python train.py config/recall_small.py --pe=rope    # or another of PES; other seeds: --seed=1
    python -m eval.scores out/recall_small_{pope,rope} --splits=val,x2,x4,x8,x16

The token_error of each split is the percentage of wrong values; guessing gets 90% wrong.

Our choices. There is only one pair, although a model can then ignore the key. With more pairs, it
must find the key and then the value beside it, and RoPE, PoPE and ALiBi did not learn these two
steps from 100,000 rows of four pairs.
"""
title = "finding a value among fillers"
seed = 0
data = "recall@length=32,pairs=1,queries=1,train=12800,test=200"
pe = "pope"

n_layer = 2
n_head = 4
n_embd = 64
block_size = 33
norm = "rmsnorm"
bias = False
tie = False
expe_theta = 1 / 64  # about 1 / (2 block_size), as in expe_35m.py

batch_size = 32
max_iters = 400
learning_rate = 3e-3
warmup_iters = 50

eval_interval = 200
eval_batches = 0
