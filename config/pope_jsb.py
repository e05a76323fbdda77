"""
PoPE Table 2, Bach's chorales (JSB): NLL on the test split, in nats per note.

    python -m data.jsb
    python train.py config/pope_jsb.py
    python sample.py out/pope_jsb_pope out/pope_jsb_rope --figure=frequency --split=test

    flags          NLL
    (none: PoPE)   0.4889
    --pe=rope      0.5081

The paper reports the best NLL of a run, the lowest of all evaluations on test: the line `done:`.
Its runs take three minutes on a TITAN V. Open, and ours: no biases (see pope_124m.py), tied
embeddings. Memory: 1.1 GB.

On a laptop, 128 wide, 3 layers, 256 notes at a time, ten minutes a row on one core:

    python -m data.jsb --length=256
    python train.py config/pope_jsb.py --data=jsb@length=256 --n_layer=3 --n_embd=128 \
        --block_size=256 --batch_size=8 --max_iters=1000 --out_dir=out/pope_jsb_small
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
