"""
PoPE Tables 4 and 5 and Figure 2: 253M parameters on OpenWebText; validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_253m.py                          # PoPE: 18.55
    torchrun --standalone --nproc_per_node=8 train.py config/pope_253m.py --pe=rope                # RoPE: 18.88
    python sample.py out/pope_253m_pope --evaluate=val
    python sample.py out/pope_253m_pope out/pope_253m_rope --extrapolate=1,2,3,4,5,6,7,8,9,10 --data=pg19 --split=test    # Figure 2

The paper's runs take 13.5 (PoPE) and 12.3 (RoPE) hours on eight V100. On PG-19, perplexity stays flat for PoPE up to
10,240 tokens and explodes for RoPE. Downstream averages: 48.78 and 48.76. Open, and ours: no biases, tied embeddings.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 16
n_head = 16
n_embd = 1024
micro_batch = 8
