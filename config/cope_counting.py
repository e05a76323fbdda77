"""
CoPE Tables 3, 4 and 10, counting: wrong answers in percent, mean (deviation) of the paper's 3 seeds.

    python -m data.counting --variables=3
    python -m data.counting --variables=5
    python train.py config/cope_counting.py                  # CoPE, 1 variable: 0.0; pass100 0.0; pass10 4.0 (4.1)
    python train.py config/cope_counting.py --pe=relative    # relative PE: 1.1 (0.4); pass100 8.8 (1.1); pass10 34.1 (2.5)
    python train.py config/cope_counting.py --pe=learned     # absolute PE: 5.3 (0.8)
    python train.py config/cope_counting.py --data=counting@variables=3 --out_dir=out/counting3_cope    # CoPE 1.2 (2.1)
    python train.py config/cope_counting.py --data=counting@variables=5 --out_dir=out/counting5_cope    # CoPE 7.4 (8.5)

With 3 and 5 variables relative PE has 17.8 (7.8) and 22.4 (5.1), absolute PE 67.6 (1.5) and 71.5 (1.5). The row is the
token_error of test, pass100 and pass10, 1000 programs each. Answering 10 always is wrong for 82% of test.

The paper gives 10,000 programs of up to 512 operations; the rest is what its code is known to use: 4 layers, 256 wide,
4 heads, dropout 0.1, Adam at a constant 7e-5, batches of 64, 100 epochs (15,700 steps), the output layer tied to the
embeddings. Two differences: its blocks are post-norm with ReLU, ours pre-norm with GELU; it counts an epoch's last,
smaller batch, we go on into the next epoch.
"""
data = "counting"
pe = "cope"

n_layer = 4
n_head = 4
n_embd = 256
block_size = 511
dropout = 0.1

batch_size = 64
max_iters = 15700
learning_rate = 7e-5
schedule = "constant"
beta2 = 0.999
weight_decay = 0.0

eval_interval = 785
eval_batches = 0
eval_splits = "test,pass100,pass10"
