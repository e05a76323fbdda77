"""
PoPE Tables 4, 5 and 8 and Figure 2: 124M parameters on OpenWebText; validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py                          # PoPE: 21.33
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py --pe=rope                # RoPE: 21.55
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py --pope_softplus=False --out_dir=out/no_softplus    # 21.57
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py --pope_delta=none --out_dir=out/no_delta           # 21.42
    python sample.py out/pope_124m_pope --evaluate=val
    python sample.py out/pope_124m_pope out/pope_124m_rope --extrapolate=1,2,3,4,5,6,7,8,9,10 --data=pg19 --split=test    # Figure 2

The paper's runs take 12.3 (PoPE) and 11.2 (RoPE) hours on four RTX 3090. On PG-19, perplexity stays flat for PoPE up to
10,240 tokens and explodes for RoPE. Downstream averages: 46.19 and 45.33. Open, and ours: no biases, tied embeddings.
"""
data = "openwebtext"
pe = "pope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50257, rounded up for speed
norm = "rmsnorm"
bias = False

batch_size = 64
micro_batch = 16
max_iters = 100000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 1000
weight_decay = 0.01
beta2 = 0.95

eval_interval = 2000
eval_batches = 8
compile = True
