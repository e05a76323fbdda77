"""
Echoes, the control: the models of echo_small.py, trained further on 1024 bytes at a time, for a
quarter of the steps. A run takes 4 to 20 minutes on one core.

    python train.py config/echo_long_small.py --init_from=out/echo_small_rope
    python -m eval.scores out/echo_long_small_rope_* --splits=new_128,at64_128,new_1024,at64_1024

Our choices. A step has as many tokens as in echo_small.py. RoPE and CoPE models that read only such
rows hardly learned to copy in 2400 steps (one seed each).
"""
from config.echo_small import *  # noqa: F403

title = "trained further, on 1024 bytes with copies"
data = "echo@length=1024,train=5000"
block_size = 1024

batch_size = 2
max_iters = 600
learning_rate = 1e-3
