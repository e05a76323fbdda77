"""
CARoPE Table 1, GPT-tiny: 44M parameters on FineWeb-Edu. Perplexity at 512 tokens, the trained
length, and at 1024.

    python -m data.fineweb_edu
    torchrun --standalone --nproc_per_node=2 train.py config/carope_44m.py
    python sample.py out/carope_44m_{carope,rope,learned,sinusoidal} \
        --extrapolate=1,2 --split=test --eval_tokens=10000000

    flags             512       1024
    (none: CARoPE)    28.99     36.74
    --pe=rope         29.33     81.27
    --pe=learned      30.48     -
    --pe=sinusoidal   30.62     223.28

The paper says that this model has 44M parameters. Ours has 44.7M, and 44.9M with learned positions.

Our choices are those of carope_124m.py.

Memory at micro_batch=64 is about 23 GB.
"""
from config.carope_124m import *  # noqa: F403

n_layer = 6
n_head = 8
n_embd = 512
micro_batch = 64
