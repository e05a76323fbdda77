"""
Copy, trained on strings of up to 12 letters and tested on up to 48. A run takes 30 to 60 seconds on
one core.

    python train.py config/copy_small.py              # PoPE
    python train.py config/copy_small.py --pe=rope    # or another of PES; other seeds: --seed=1
    python -m eval.scores out/copy_small_{pope,rope} --splits=val,x1.5,x2,x3,x4

The token_error of each split is the percentage of wrong letters, and sequence_error that of answers
with a wrong letter.

Our choices. The base is 100, because rows have 25 tokens (see pope_indirect_small.py).
"""
title = "copying letters"
seed = 0
data = "strings@task=copy,longest=12,train=64000"
pe = "pope"

n_layer = 2
n_head = 4
n_embd = 64
block_size = 24
norm = "rmsnorm"
bias = False
tie = False
base = 100.0
expe_theta = 1 / 48  # 1 / (2 block_size), as in expe_35m.py

batch_size = 32
max_iters = 1500
learning_rate = 3e-3
warmup_iters = 50

eval_batches = 0
