"""
PoPE Table 1, Indirect Indexing: accuracy in percent on the target, mean +- deviation of 3 seeds.

    python train.py config/pope_indirect.py
    python -m eval.scores out/pope_indirect_pope --splits=test

    flags                             accuracy
    (none: PoPE)                      94.82 +- 2.91
    --pe=rope                         11.16 +- 2.45
    --pe=rope --rope_fraction=0.5     28.50 +- 6.10
    --pe=alibi --alibi_fraction=0.5   27.35 +- 10.77
    --pe=learned                      10.08 +- 0.19
    --pe=sinusoidal                   1.90 +- 0.04

Accuracy is 100 - token_error of test, 10,000 rows. The other two seeds are --seed=1338 and
--seed=1339. The last four are baselines from the paper's later version. With --rope_fraction=0.5,
half of RoPE's channels are not rotated, and with --alibi_fraction=0.5, half of ALiBi's heads have
no bias.

In an independent replication, some seeds did not learn the task (see eval/papers.md). If yours does
not, try --max_iters=200000.

The paper says that its runs take 0.70 hours (PoPE) and 0.62 hours (RoPE) on an RTX 3090, and that
the sequence length is 40.

Our choices. Rows have up to 48 characters, because 40 letters and the question do not fit into 40.
The letter that is asked about is drawn from those whose target lies inside the string, because the
paper does not say what happens otherwise (see data/indirect_indexing.py). There are no biases (see
pope_124m.py), and the embeddings are not tied.

Memory is about 1.3 GB.
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
