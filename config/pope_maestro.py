"""
PoPE Table 2, MAESTRO (piano): NLL on the test split, in nats per token.

    python -m data.maestro
    python train.py config/pope_maestro.py

    flags          NLL
    (none: PoPE)   1.486
    --pe=rope      1.501

The paper says that these are the best values, and that its runs take 4.3 hours (PoPE) and 3.8 hours
(RoPE) on a V100.

Our choices are those of pope_jsb.py.

Memory is about 6 GB.
"""
from config.pope_jsb import *  # noqa: F403

data = "maestro"
n_embd = 384
dropout = 0.1

batch_size = 16
max_iters = 60000
warmup_iters = 500
eval_interval = 2000
