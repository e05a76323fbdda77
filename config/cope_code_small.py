"""
CoPE Table 6, code, small: the Python standard library's source as bytes; validation perplexity per
byte.

    python train.py config/cope_code_small.py                 # CoPE
    python train.py config/cope_code_small.py --pe=learned    # and so on; --seed=1 for another seed
    python train.py config/cope_code_small.py --pe=rope
    python train.py config/cope_code_small.py --pe=cope+rope

The blocks of cope_code_20m.py (RMSNorm, SwiGLU, no biases), 128 wide, at 256 bytes a sequence. The
last line is the table's row.
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
beta2 = 0.95

eval_interval = 500
eval_batches = 128
