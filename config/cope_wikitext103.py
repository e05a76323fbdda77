"""
CoPE Tables 6 and 9 and Figures 3, 4, 7, Wikitext-103: perplexity per GPT-2 token, and millions of
parameters.

    python -m data.wikitext103
    python train.py config/cope_wikitext103.py
    python sample.py out/cope_wikitext103_cope --evaluate=val,test

Each row is the second command with these flags; rows that share a pe each need an --out_dir.

    flags                   val     test    parameters
    (none: CoPE)            22.55   23.46   123.7
    --pe=learned            23.96   24.87   124.4
    --pe=relative           22.90   23.81   123.7
    --pe=cope+relative      22.31   23.23   123.7
    --cope_gates=values     22.40   23.33   123.7
    --cope_gates=sep-keys   22.39   23.18   130.8
    --cope_shared=False     22.56   23.58   123.7
    --cope_npos=16          22.45   23.22   123.7
    --cope_npos=1024        22.46   23.31   123.7
    --pe=cope_alibi         24.16   25.09   123.7

Figure 3 (left), validation perplexity at 1024 to 2560 tokens, on the whole split:

    python sample.py out/cope_wikitext103_{cope,relative} \
        out/cope_wikitext103_relative@rel_capped=True --extrapolate=1,1.5,2,2.5 --eval_tokens=300000
    python sample.py out/cope_wikitext103_{cope,relative} --report=out/figure3

For its right side, do the same at 1, 2, 3, 4 and 5 times 512 tokens, with runs of as many epochs:

    for pe in cope relative; do
        python train.py config/cope_wikitext103.py --pe=$pe --block_size=512 --max_iters=359600 \
            --eval_interval=3596 --out_dir=out/cope_wikitext103_512_$pe
    done

Figures 4 and 7, from the sep-keys run, on the start of the split, or on a file with --text=FILE:

    python sample.py out/SEP_KEYS_RUN --figure=positions
    python sample.py out/SEP_KEYS_RUN --figure=gates

Given: GPT-2's shape, context 1024, batch 64, 100 epochs (117.8M tokens each, 179,800 steps in all),
p_max = 64. Open, and ours: the learning rate and its schedule, dropout, AdamW's betas; 64 positions
(65 if p_max = 64 is the last one, as in the other rows). Ours with sep-keys has 130.7M parameters:
a 768 x 768 projection and its biases in each layer. Memory, 8 sequences a pass, where PyTorch
computes CoPE: 35 GB, 40 GB for cope+relative; 10 GB for --pe=learned.
"""
data = "wikitext103"
pe = "cope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1

batch_size = 64
micro_batch = 8
max_iters = 179800
learning_rate = 2.5e-4
min_lr = 2.5e-5
warmup_iters = 2000

eval_interval = 1798
eval_batches = 0
eval_splits = "val,test"
compile = True
