"""
Addition, trained on numbers of up to 2 digits and tested on up to 8, with the units first. A run
takes a minute on one core.

    python train.py config/addition_small.py              # PoPE
    python train.py config/addition_small.py --pe=rope    # or another of PES; other seeds: --seed=1
    python sample.py out/addition_small_{pope,rope} --evaluate=val,x1.5,x2,x3,x4

The token_error of each split is the percentage of wrong digits, and sequence_error that of wrong
sums. Always answering 0 gets 71% of the digits of val wrong, and 80% to 86% of those of the
longer splits. Val draws from the 10% of all sums that are kept out of train.

Our choices. The model is that of copy_small.py.
"""
from config.copy_small import *  # noqa: F403

data = "strings@task=reversed_addition,longest=2,train=192000"
block_size = 8
expe_theta = 1 / 16  # 1 / (2 block_size), as in expe_35m.py

batch_size = 64
max_iters = 3000
weight_decay = 0.01
beta2 = 0.99
eval_interval = 1000
