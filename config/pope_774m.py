"""
PoPE Tables 4 and 5 and Figure 2: 774M parameters on OpenWebText. Validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=8 train.py config/pope_774m.py
    python sample.py out/pope_774m_pope --evaluate=val

    flags          perplexity
    (none: PoPE)   15.45
    --pe=rope      15.85

Figure 2 is perplexity at 1024 to 10,240 tokens on all of PG-19's test books:

    python -m data.pg19
    python sample.py out/pope_774m_pope out/pope_774m_rope --data=pg19 --split=test \
        --extrapolate=1,2,3,4,5,6,7,8,9,10 --eval_tokens=20000000

Table 5 has zero-shot accuracies in percent, with the mean of the six in the last column:

    python sample.py out/pope_774m_pope out/pope_774m_rope \
        --tasks=lambada_openai,blimp,cbt,hellaswag,piqa,arc_easy

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    35.95    81.05  52.56  35.39      63.55  42.28  51.80
    PoPE    36.89    82.03  53.67  35.86      63.93  42.37  52.46

Figures 3 to 6 leave this size out; the same pictures of it would be

    python sample.py out/pope_774m_pope out/pope_774m_rope --figure=frequency

The paper says that its runs take 38.7 hours (PoPE) and 36.5 hours (RoPE) on eight V100.

Our choices are those of pope_124m.py. They make 772M parameters, and biases would make 773M. 774M
is the size of GPT-2, which also has learned positions.

Memory at micro_batch=8 is about 44 GB for PoPE and 36 GB for RoPE. Under torchrun, exchanging
gradients takes 3 GB more.
"""
from config.pope_124m import *  # noqa: F403

n_layer = 36
n_head = 20
n_embd = 1280
micro_batch = 8
