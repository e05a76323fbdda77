"""
CoPE Table 2, Flip-Flop, small: 128 pairs instead of 256, in models of width 64 with 2 layers. A run
takes nine minutes on one CPU core with CoPE and five without.

    python train.py config/cope_flip_flop_small.py              # CoPE
    python train.py config/cope_flip_flop_small.py --pe=rope    # or learned; other seeds: --seed=1
    python sample.py out/cope_flip_flop_small_cope              # rows, with the model's answers

The last evaluations that training prints have the token_error of val (in distribution), sparse (the
paper's OOD) and dense, 1000 rows each.

Our choices. The task and CoPE's table are those of cope_flip_flop.py. The models and their training
are those of cope_counting_small.py, except for the batch size and beta2.
"""
from config.cope_counting_small import *  # noqa: F403

data = "flip_flop@length=256,train=32000,sparse=1000,dense=1000"
block_size = 255

batch_size = 16
beta2 = 0.999
eval_interval = 1000
eval_splits = "val,sparse,dense"
