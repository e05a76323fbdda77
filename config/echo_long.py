"""
Echoes, the control: models that are trained on 1024 bytes at a time, rather than on 128. A run
takes 10 to 30 minutes on one core.

    python train.py config/echo_long.py --pe=rope      # with as many tokens as in echo_small.py
    python train.py config/echo_long.py --init_from=out/echo_small_rope \
        --max_iters=600 --learning_rate=1e-3           # from a model that copies within 128 bytes

Our choices. A step has as many tokens as in echo_small.py. With so few sequences, a model does not
learn to copy from nothing, so the second command starts from one that does.
"""
from config.echo_small import *  # noqa: F403

data = "echo@length=1024,train=5000"
block_size = 1024
batch_size = 2
