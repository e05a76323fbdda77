"""
PoPE Tables 4 and 5 and Figure 2: 774M parameters on OpenWebText. Validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_774m.py
    python -m eval.scores out/pope_774m_pope --splits=val

    flags          perplexity
    (none: PoPE)   15.45
    --pe=rope      15.85

Table 5 has zero-shot accuracies in percent, with the mean of the six in the last column:

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    35.95    81.05  52.56  35.39      63.55  42.28  51.80
    PoPE    36.89    82.03  53.67  35.86      63.93  42.37  52.46

The commands for Table 5 and Figure 2 are those of pope_124m.py, with this file's runs.

The paper says that its runs take 38.7 hours (PoPE) and 36.5 hours (RoPE) on eight V100s.

Our choices are those of pope_124m.py. They give 772M parameters, and biases would give 773M. GPT-2
of this shape has 774M, because it also has learned positions.

Memory at micro_batch=8 is about 44 GB for PoPE and 36 GB for RoPE.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 36
n_head = 20
n_embd = 1280
micro_batch = 8
