"""
PoPE Table 1, Indirect Indexing: accuracy in percent on the target, mean +- deviation of 3 seeds.

    python train.py config/pope_indirect.py
    python sample.py out/pope_indirect_pope --evaluate=test

    flags          accuracy
    (none: PoPE)   94.82 +- 2.91
    --pe=rope      11.16 +- 2.45

(--seed=1338 and --seed=1339 for the other two seeds.) A row is 100 - token_error of test, 10,000
rows. Whether a seed learns the task is hit or miss, and learning can start late. With twice the
steps:

    python train.py config/pope_indirect.py --max_iters=200000 --out_dir=out/pope_indirect_200k

Which frequencies the heads use:

    python sample.py out/pope_indirect_pope out/pope_indirect_rope --figure=frequency --split=test

The paper's runs take 0.70 (PoPE) and 0.62 (RoPE) hours on an RTX 3090. Its Table 7 says "sequence
length 40", which cannot hold 40 letters and the question: rows have up to 48 characters. Open, and
ours: no biases (see pope_124m.py), embeddings not tied; for shifts that leave the string, see
data/indirect_indexing.py. Memory: 1.3 GB.
"""
data = "indirect_indexing"
pe = "pope"

n_layer = 8
n_head = 8
n_embd = 512
block_size = 47
norm = "rmsnorm"
bias = False
tie = False
pope_delta = "uniform"

batch_size = 64
max_iters = 100000
learning_rate = 2e-4
min_lr = 2e-5
warmup_iters = 4000
weight_decay = 0.01
beta2 = 0.99

eval_interval = 5000
eval_batches = 0
eval_splits = "val,test"
