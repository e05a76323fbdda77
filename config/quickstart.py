"""
Three minutes on a laptop: 0.8M parameters learn the Python standard library's source, byte by byte.

    python train.py config/quickstart.py              # PoPE
    python train.py config/quickstart.py --pe=rope    # or another name of PES in model.py
    python sample.py out/quickstart_pope out/quickstart_rope --extrapolate=1,2,4,8

Our choices. This is not an experiment from a paper. It has the architecture of PoPE's paper, GPT
with RMSNorm, at the smallest size that shows its claim in part: beyond the trained length, PoPE
gets worse much more slowly than RoPE, if its delta starts at zero, as here (eval/README.md).
"""
title = "predicting text"
data = "stdlib"
pe = "pope"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
norm = "rmsnorm"
bias = False
expe_theta = 1 / 256  # 1 / (2 block_size), as in expe_35m.py

batch_size = 8
max_iters = 1600
learning_rate = 2e-3
warmup_iters = 40

eval_interval = 400
log_interval = 80
