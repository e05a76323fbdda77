"""
PoPE Table 1, Indirect Indexing: accuracy in percent on the target, mean +- deviation of the paper's 3 seeds.

    python train.py config/pope_indirect.py                # PoPE: 94.82 +- 2.91
    python train.py config/pope_indirect.py --pe=rope      # RoPE: 11.16 +- 2.45
    python sample.py out/pope_indirect_pope --evaluate=test

(--seed=... for the other two.) The row is 100 - token_error of test, 10,000 rows. The paper's runs take 0.70 and 0.62
hours on an RTX 3090. Its Table 7 says "sequence length 40", which cannot hold 40 letters and the question: rows have up
to 48 characters. Open, and ours: biases (none) and tying (untied); where the shift would leave the string, see
data/indirect_indexing.py.
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
