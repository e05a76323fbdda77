"""
CoPE Table 6, code, small: the Python standard library's source as bytes; validation perplexity per
byte. With its evaluation, a row takes ten to twenty-five minutes on one CPU core.

    python train.py config/cope_code_small.py                 # CoPE
    python train.py config/cope_code_small.py --pe=learned    # and so on; --seed=1 for another seed
    python train.py config/cope_code_small.py --pe=rope
    python train.py config/cope_code_small.py --pe=cope+rope
    python sample.py out/cope_code_small_cope --evaluate=val  # the row: perplexity on all of val

The blocks of cope_code_20m.py (RMSNorm, SwiGLU, no biases), 128 wide, at 256 bytes a sequence.
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
