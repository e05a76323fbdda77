"""
CoPE Tables 2 and 11, selective copy: error in percent of whole copies, mean (deviation) of 3 seeds.

    python train.py config/cope_selective_copy.py
    python sample.py out/cope_selective_copy_cope --evaluate=val,dense,sparse

    flags          in distribution   dense         sparse
    (none: CoPE)   0.0 (0.0)         0.0 (0.0)     0.004 (0.006)
    --pe=rope      40.1 (3.5)        100.0 (0.0)   100.0 (0.0)
    --pe=learned   16.9 (3.7)        25.6 (3.8)    85.2 (8.4)

(--seed=1338 and --seed=1339 for the other two seeds.) A row is the sequence_error of val, dense and
sparse. 256 letters stand among 256 blanks, in dense among 128, in sparse among 512. The paper gives
the model, the vocabulary of 16 and the 100,000 steps. Open, and ours: batch 64, so 640,000 rows are
each seen ten times; AdamW as for Flip-Flop, but 1e-3 and a warm-up of 1000; npos = 320, since the
letter to copy is 256 letters back; 25,000 rows in each test set, so that 0.004% is one row. The
data take 1.7 GB and half a minute to write; evaluating them once costs 0.4% of the training.
"""
data = "selective_copy@val=25000,dense=25000,sparse=25000"
pe = "cope"

n_layer = 2
n_head = 2
n_embd = 64
block_size = 1023  # of the sparse split; training rows have 767 tokens to learn from
cope_npos = 320

batch_size = 64
max_iters = 100000
learning_rate = 1e-3
beta2 = 0.999
schedule = "linear"
warmup_iters = 1000

eval_interval = 5000
eval_batches = 2
eval_splits = "val,dense,sparse"
