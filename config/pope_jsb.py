"""
PoPE Table 2, Bach's chorales (JSB): NLL on the test split, in nats per note.

    python -m data.jsb
    python train.py config/pope_jsb.py
    python sample.py out/pope_jsb_pope out/pope_jsb_rope --figure=frequency --split=test

    flags          NLL
    (none: PoPE)   0.4889
    --pe=rope      0.5081

A smaller run for a laptop, with width 128, 3 layers and 256 notes at a time, takes ten minutes on
one core:

    python -m data.jsb --length=256
    python train.py config/pope_jsb.py --data=jsb@length=256 --n_layer=3 --n_embd=128 \
        --block_size=256 --batch_size=8 --max_iters=1000 --out_dir=out/pope_jsb_small

The paper says that these are the best values of a run, so the lowest of all evaluations on test,
which training prints in its line `done:`. Its runs take three minutes on a TITAN V.

Our choices. There are no biases (see pope_124m.py), and the embeddings are tied.

Memory is about 1.1 GB.
"""
data = "jsb"
pe = "pope"

n_layer = 6
n_head = 8
n_embd = 256
block_size = 2048
norm = "rmsnorm"
bias = False
dropout = 0.2
pope_delta = "uniform"

batch_size = 4
max_iters = 3000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 10
weight_decay = 0.01
beta2 = 0.99

eval_interval = 250
eval_batches = 0
eval_splits = "test,val"  # the first decides which was best
