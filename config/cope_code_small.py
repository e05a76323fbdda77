"""
CoPE Table 6, code, small: the Python standard library's source as bytes, in models of width 128.
Perplexity per byte. A run and its evaluation take 10 to 25 minutes on one CPU core.

    python train.py config/cope_code_small.py                 # CoPE
    python train.py config/cope_code_small.py --pe=rope       # or learned, cope+rope
    python -m eval.scores out/cope_code_small_cope --splits=val  # perplexity on all of val

Our choices. The blocks are those of cope_code_20m.py (RMSNorm, SwiGLU, no biases), but sequences
have 256 bytes, and all heads and layers share one table of 64 positions.
"""
data = "stdlib"
pe = "cope"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
norm = "rmsnorm"
mlp = "swiglu"
bias = False
tie = False

batch_size = 8
max_iters = 1000
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100

eval_batches = 128
