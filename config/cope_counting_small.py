"""
CoPE Tables 3 and 4, counting, small: programs of up to 120 operations instead of 512, in models of
width 64 with 2 layers.

    python train.py config/cope_counting_small.py              # CoPE
    python train.py config/cope_counting_small.py --pe=rope    # or relative, learned
    python sample.py out/cope_counting_small_cope --split=pass10

The last evaluations that training prints have the token_error of test (50 passes per set), pass100
and pass10, 1000 rows each. Always answering 1 gets 82% of test, 76% of pass100 and 87% of pass10
wrong.

Our choices. This is not cope_counting.py made small. The learning rate is larger and decays,
because there are 2000 steps rather than 15,700, and the optimizer's other settings are train.py's
defaults. CoPE is that of Listing 1, as in all small runs. It has one table of 64 positions for both
layers, and q.e is not divided by sqrt(d).
"""
data = "counting@steps=120,length=160,train=64000"
pe = "cope"

n_layer = 2
n_head = 2
n_embd = 64
block_size = 159

batch_size = 32
max_iters = 2000
learning_rate = 1e-3
schedule = "linear"
warmup_iters = 50

eval_batches = 0
eval_splits = "test,pass100,pass10"
