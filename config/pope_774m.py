"""
PoPE Tables 4 and 5 and Figure 2: 774M parameters on OpenWebText; validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_774m.py
    python sample.py out/pope_774m_pope --evaluate=val

    flags          perplexity
    (none: PoPE)   15.45
    --pe=rope      15.85

Figure 2, perplexity at 1024 to 10,240 tokens on all of PG-19's test books, stays flat for PoPE and
explodes for RoPE:

    python -m data.pg19
    python sample.py out/pope_774m_pope out/pope_774m_rope --data=pg19 --split=test \
        --extrapolate=1,2,3,4,5,6,7,8,9,10 --eval_tokens=20000000

Table 5, zero-shot accuracy in percent; the last column is the mean of the six:

    python sample.py out/pope_774m_pope out/pope_774m_rope \
        --tasks=lambada_openai,blimp,cbt,hellaswag,piqa,arc_easy

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    35.95    81.05  52.56  35.39      63.55  42.28  51.80
    PoPE    36.89    82.03  53.67  35.86      63.93  42.37  52.46

Compare acc; see pope_124m.py.

Figures 3 to 6 for this size, which the paper leaves out; see pope_124m.py:

    python sample.py out/pope_774m_pope out/pope_774m_rope --figure=frequency

The paper's runs take 38.7 (PoPE) and 36.5 (RoPE) hours on eight V100. Open, and ours: no biases
(see pope_124m.py), tied embeddings. That makes 772M parameters, with biases 773M: 774M is the size
of GPT-2, which has learned positions too. Memory, 8 sequences a pass: 44 GB for PoPE and 36 GB for
RoPE, and under torchrun 3 GB more to exchange gradients.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 36
n_head = 20
n_embd = 1280
micro_batch = 8
