"""
CoPE Tables 3, 4 and 10, Figure 2, counting: wrong answers in percent, mean (deviation), 3 seeds.

    python train.py config/cope_counting.py

    flags           test        pass100     pass10
    (none: CoPE)    0.0 (0.0)   0.0 (0.0)   4.0 (4.1)
    --pe=relative   1.1 (0.4)   8.8 (1.1)   34.1 (2.5)
    --pe=learned    5.3 (0.8)   -           -

The other two seeds are --seed=1338 and --seed=1339. The columns are the token_error of three
splits, of 1000 programs each, in the last evaluation. Always answering 10 gets 81% of test wrong.
With three and five variables instead of one, these are the errors on test:

    flags                                          test
    --data=counting@variables=3                    1.2 (2.1)
    --data=counting@variables=3 --pe=relative      17.8 (7.8)
    --data=counting@variables=3 --pe=learned       67.6 (1.5)
    --data=counting@variables=5                    7.4 (8.5)
    --data=counting@variables=5 --pe=relative      22.4 (5.1)
    --data=counting@variables=5 --pe=learned       71.5 (1.5)

Figure 2 plots the error on val against the number of training programs. These runs are its points:

    for n in 2000 3000 5000 10000; do for pe in cope relative; do
        python train.py config/cope_counting.py --data=counting@train=$n --eval_splits=val \
            --pe=$pe --out_dir=out/counting_${pe}_$n
    done; done

The paper says that it trains on 10,000 programs of up to 512 operations. The rest is from the
released code, facebookresearch/RAM, projects/cope (run.sh, context_position.py, trainer.py). It has
4 layers of width 256 with 4 heads, dropout 0.1, Adam at a constant 7e-5, a batch size of 64, 100
epochs (15,700 steps), no gradient clipping, and an output layer tied to the embeddings. Its CoPE
has a table of 513 positions (its block_size + 1) in each layer and divides q.e by sqrt(d), whereas
all layers share one table of relative embeddings.

Our choices. Five things differ from the released code. When it rejects a program, it also draws a
new length, whereas ours keeps the old one (data/counting.py). Its blocks are post-norm with ReLU,
whereas ours are pre-norm with GELU. It also applies dropout to the hidden layer of the MLP. Its
initial values have other standard deviations: 0.0625 (256^-0.5) for embeddings and absolute
positions, 0.125 (64^-0.5) for the relative table, and PyTorch's default for linear layers, whereas
ours have 0.02. It ends an epoch with a smaller batch, whereas ours continues into the next epoch.
The paper does not say how long it trains on fewer programs, so for Figure 2 we take as many steps
as for 10,000 programs.

Memory is about 2.1 GB for CoPE and 4 GB for the relative encoding.
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
