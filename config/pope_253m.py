"""
PoPE Tables 4 and 5 and Figures 2, 5 and 6: 253M parameters on OpenWebText. Validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_253m.py
    python -m eval.scores out/pope_253m_pope --splits=val

    flags                   perplexity
    (none: PoPE)            18.55
    --pe=rope               18.88
    --pope_mu=identity      18.93
    --pope_mu=relu          18.90
    --pope_delta=none       18.57

The last three come from the paper's later version. Table 5 has zero-shot accuracies in percent,
with the mean of the six in the last column:

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    31.38    79.12  48.51  31.47      62.24  39.87  48.76
    PoPE    30.47    80.01  49.39  31.82      61.70  39.32  48.78

The commands for Table 5 and Figures 2, 5 and 6 are those for Table 5 and Figures 2, 3 and 4 in
pope_124m.py, with this file's runs.

The paper says that its runs take 13.5 hours (PoPE) and 12.3 hours (RoPE) on eight V100s.

Our choices are those of pope_124m.py. Biases would be compatible with 253M parameters as well.

Memory at micro_batch=8 is about 18 GB for PoPE and 15 GB for RoPE.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 16
n_head = 16
n_embd = 1024
micro_batch = 8
