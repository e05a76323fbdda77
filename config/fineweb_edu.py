"""
PoPE and other methods on 10 billion tokens of FineWeb-Edu, at the size of GPT-2. This is not an
experiment from a paper, but a starting point for your own.

    python -m data.fineweb_edu
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_edu.py
    python sample.py out/fineweb_edu_{pope,rope} \
        --extrapolate=1,2,4,8 --split=test --eval_tokens=10000000

    flags            parameters, M   memory, GB
    (none: PoPE)     123.6           22
    --pe=rope        123.6           18
    --pe=carope      123.7           20
    --pe=alibi       123.6           26
    --pe=fox         123.7           26
    --pe=cope+rope   123.6           65

Our choices. The model is that of pope_124m.py. As in carope_124m.py, a step has half a million
tokens, so 19,000 steps read as many tokens as the set has. Sequences are drawn at random, which
leaves about a third of the set unread.

Memory at micro_batch=16 is in the table, for attention that PyTorch computes.
"""
from config.pope_124m import *  # noqa: F403

data = "fineweb_edu"
batch_size = 512
max_iters = 19000
warmup_iters = 750
weight_decay = 0.1

eval_interval = 1000
eval_batches = 4
