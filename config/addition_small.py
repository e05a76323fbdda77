"""
Addition, trained on up to 3 digits and tested on up to 12, units first: half a minute a run on one core.

    python train.py config/addition_small.py              # PoPE
    python train.py config/addition_small.py --pe=rope    # or another of PES; --seed=1 for another seed
    python sample.py out/addition_small_pope out/addition_small_rope --evaluate=val,x1.5,x2,x3,x4

The row is the token_error of each split, the sequence_error that of whole sums. `task=addition` writes the
digits in the order in which one reads them. In these 1500 steps no method that we tried learned to add: RoPE
got 10% of val's digits wrong, PoPE 30%, ALiBi 42% (one seed each). Larger, for a GPU:

    python train.py config/addition_small.py --data=strings@task=reversed_addition,longest=16,train=4000000 \
        --block_size=50 --n_layer=4 --n_embd=256 --batch_size=512 --max_iters=8000 --out_dir=out/addition_pope
"""
data = "strings@task=reversed_addition,longest=3,train=96000"
pe = "pope"

n_layer = 2
n_head = 4
n_embd = 64
block_size = 11
norm = "rmsnorm"
bias = False
tie = False
base = 100.0  # for rows of 12 tokens, as in pope_indirect_small.py
expe_theta = 1 / 24  # about 1 / (2 block_size), as in ExPE's small models

batch_size = 64
max_iters = 1500
learning_rate = 5e-3
warmup_iters = 50

eval_interval = 500
eval_batches = 0
