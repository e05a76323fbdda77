"""
CARoPE Table 1, GPT-tiny: 44M parameters on FineWeb-Edu; perplexity at 512 (as trained) and 1024
tokens.

    python -m data.fineweb_edu
    torchrun --standalone --nproc_per_node=2 train.py config/carope_44m.py
    python sample.py out/carope_44m_{carope,rope,learned,sinusoidal} \
        --extrapolate=1,2 --split=test --eval_tokens=10000000

    flags             512       1024
    (none: CARoPE)    28.99     36.74
    --pe=rope         29.33     81.27
    --pe=learned      30.48     -
    --pe=sinusoidal   30.62     223.28

(Learned positions end at 512, and --extrapolate says so.) The paper's 44M are 44.7M here, 44.9M
with learned positions. The rest of carope_124m.py applies here. Memory, 64 sequences a pass: 23 GB.
"""
from config.carope_124m import *  # noqa: F403

n_layer = 6
n_head = 8
n_embd = 512
micro_batch = 64
