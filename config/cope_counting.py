"""
CoPE Tables 3, 4 and 10 and Figure 2, counting: wrong answers in percent, mean (std) over 3 seeds.

    python train.py config/cope_counting.py
    python train.py config/cope_counting.py --data=counting@variables=3 --out_dir=out/counting3_cope
    python train.py config/cope_counting.py --data=counting@variables=5 --out_dir=out/counting5_cope

    flags           1 variable   pass100     pass10       3 variables   5 variables
    (none: CoPE)    0.0 (0.0)    0.0 (0.0)   4.0 (4.1)    1.2 (2.1)     7.4 (8.5)
    --pe=relative   1.1 (0.4)    8.8 (1.1)   34.1 (2.5)   17.8 (7.8)    22.4 (5.1)
    --pe=learned    5.3 (0.8)    -           -            67.6 (1.5)    71.5 (1.5)

(--seed=1338 and --seed=1339 for the other two seeds.) The first command gives the first three
columns: the token_error of test, pass100 and pass10 in its last lines, 1000 programs each. Always
answering 10 gets 81% of test wrong.

Figure 2 plots the error on val against the number of training programs. Its points:

    for n in 2000 3000 5000 10000; do
        python train.py config/cope_counting.py --data=counting@train=$n --eval_splits=val \
            --out_dir=out/counting_cope_$n
        python train.py config/cope_counting.py --data=counting@train=$n --eval_splits=val \
            --pe=relative --out_dir=out/counting_relative_$n
    done

The paper does not say how long it trains on fewer programs. Here it is as many steps as for 10,000.

The paper gives 10,000 programs of up to 512 operations. The rest follows the released code,
facebookresearch/RAM, projects/cope (run.sh, context_position.py, trainer.py): 4 layers, 256 wide,
4 heads, dropout 0.1, Adam at a constant 7e-5, batches of 64, 100 epochs (15,700 steps), no gradient
clipping, the output layer tied to the embeddings. Its CoPE has a table per layer of block_size + 1
= 513 positions and divides q.e by sqrt(d) too; its relative embeddings share one table. In our
blocks that is 3,295,488 parameters for one variable. Two differences: its blocks are post-norm with
ReLU, ours pre-norm with GELU; it ends an epoch with a smaller batch, we continue into the next
epoch. Memory: 9.8 GB for CoPE, 4 GB for relative.
"""
data = "counting"
pe = "cope"
cope_npos = 513
cope_scale_z = True
cope_shared = False

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
grad_clip = 0.0

eval_interval = 785
eval_batches = 0
eval_splits = "test,pass100,pass10"
