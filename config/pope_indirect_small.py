"""
PoPE Table 1, Indirect Indexing, small: strings of 6 to 8 letters from an alphabet of 8, and shifts
of -1, 0 and +1 instead of -15 to +15.

    python train.py config/pope_indirect_small.py                # PoPE
    python train.py config/pope_indirect_small.py --pe=rope      # RoPE; other seeds: --seed=1
    python sample.py out/pope_indirect_small_pope --split=test   # rows, with the model's answers

The last evaluation that training prints has the token_error of test, 10,000 rows. Copying the
letter that is asked about, which is right only if the shift is 0, gets 66% wrong.

Our choices. The base is 100, because rows have 15 positions. With the usual 10000, most of the
channels would hardly rotate.
"""
data = "indirect_indexing@letters=8,shortest=6,longest=8,shift=1,train=500000,val=1000"
pe = "pope"

n_layer = 2
n_head = 4
n_embd = 64
block_size = 15
norm = "rmsnorm"
bias = False
tie = False
pope_delta = "uniform"
base = 100.0

batch_size = 128
max_iters = 5000
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 100
weight_decay = 0.01
beta2 = 0.99

eval_interval = 1000
eval_batches = 0
eval_splits = "test"
