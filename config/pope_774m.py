"""
PoPE Tables 4 and 5 and Figure 2: 774M parameters on OpenWebText; validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_774m.py                          # PoPE: 15.45
    torchrun --standalone --nproc_per_node=8 train.py config/pope_774m.py --pe=rope                # RoPE: 15.85
    python sample.py out/pope_774m_pope --evaluate=val
    python sample.py out/pope_774m_pope out/pope_774m_rope --extrapolate=1,2,3,4,5,6,7,8,9,10 --data=pg19 --split=test    # Figure 2

The paper's runs take 38.7 (PoPE) and 36.5 (RoPE) hours on eight V100. On PG-19, perplexity stays flat for PoPE up to
10,240 tokens and explodes for RoPE. Downstream averages: 52.46 and 51.80. Open, and ours: no biases, tied embeddings.

It fits an 80 GB GPU: weights, gradients and AdamW's two moments take 772M x 16 bytes = 12.4 GB, and a forward pass of
eight sequences keeps some 34 bytes x 8 x 1024 x 1280 x 36 layers = 13 GB, and 8 x 1024 x 50304 logits x 8 bytes = 3 GB.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 36
n_head = 20
n_embd = 1280
micro_batch = 8
