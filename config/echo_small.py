"""
Echoes: how far back does a method find a copy? A run takes five to ten minutes on one core.

    python train.py config/echo_small.py              # PoPE
    python train.py config/echo_small.py --pe=rope    # or another of PES; other seeds: --seed=1338
    python -m eval.scores out/echo_small_{pope,rope} --splits=new_128,at64_128,new_1024,at64_1024
    python sample.py out/echo_small_{pope,rope} --data=stdlib --split=val --extrapolate=1,8

The text is Python's own source, in which spans of 24 to 48 bytes come again (data/echo.py). Models
are trained on 128 bytes at a time. The loss of at64_1024 is that of a span that also stands 64
bytes earlier in 1024 bytes, and that of new_1024 is the loss of a span without a copy. The last
command shows what they have learned about ordinary code. The control is echo_long_small.py.

Our choices. This is not an experiment from a paper. The model is the quickstart's, but reads three
times as many tokens, at twice the learning rate, because a model learns to copy suddenly, and with
fewer tokens some seeds did not.
"""
from config.quickstart import *  # noqa: F403

title = "trained on 128 bytes with copies"
data = "echo"

batch_size = 16
max_iters = 2400
learning_rate = 4e-3
eval_splits = "at64_128,new_128"
eval_batches = 0
