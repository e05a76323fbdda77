"""
Lookup by content or by position: which methods can do which? A run takes a minute on one core.

    python train.py config/lookup_small.py              # PoPE
    python train.py config/lookup_small.py --pe=rope    # or another of PES; other seeds: --seed=1
    python -m eval.scores out/lookup_small_{pope,rope} \
        --splits=content,position,content_x2,position_x2,content_x3,position_x3

One model learns to answer both kinds of questions, "what is the value of key a?" and "what is the
value of the item four tokens back?", on the same rows of keys and values (data/lookup.py). The
token_error of each split is the percentage of wrong answers; always giving the same answer gets 75%
wrong.

Our choices. This is not an experiment from a paper. The model is that of copy_small.py, and the
learning rate is the same for all methods.
"""
from config.copy_small import *  # noqa: F403

title = "looking up a value"
data = "lookup@train=160000"
block_size = 15
expe_theta = 1 / 30  # 1 / (2 block_size), as in expe_35m.py

batch_size = 64
max_iters = 2500
learning_rate = 1e-2
eval_splits = "content,position"
