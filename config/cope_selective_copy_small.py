"""
CoPE Table 2, selective copy, small: 32 letters among 32 blanks instead of 256 among 256.

    python train.py config/cope_selective_copy_small.py              # CoPE
    python train.py config/cope_selective_copy_small.py --pe=rope    # or learned; seeds: --seed=1
    python sample.py out/cope_selective_copy_small_cope --split=sparse

The last evaluations that training prints have the sequence_error (rows with a wrong letter) and the
token_error (wrong letters) of val (in distribution), dense and sparse, 1000 rows each.

Our choices are those of cope_selective_copy.py, but the models and their training are those of
cope_counting_small.py.
"""
from config.cope_counting_small import *  # noqa: F403

data = "selective_copy@copy=32,blanks=32,train=64000"
block_size = 127  # of the sparse split; training rows have 95 tokens to learn from
eval_splits = "val,dense,sparse"
