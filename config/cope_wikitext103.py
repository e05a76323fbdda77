"""
CoPE Tables 6 and 9 and Figures 3, 4 and 7, Wikitext-103: perplexity per GPT-2 token.

    python -m data.wikitext103
    python train.py config/cope_wikitext103.py
    python -m eval.scores out/cope_wikitext103_cope --splits=val,test

    flags                   val     test    parameters, M
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

Figure 3 (left) is validation perplexity at 1024 to 2560 tokens, here on the whole split:

    python sample.py out/cope_wikitext103_{cope,relative} \
        out/cope_wikitext103_relative@relative_capped=True \
        --extrapolate=1,1.5,2,2.5 --eval_tokens=300000
    python -m eval.report out/cope_wikitext103_{cope,relative} --out=out/figure3.png

For its right side, do the same at 1, 2, 3, 4 and 5 times 512 tokens, with runs that take the same
number of epochs:

    for pe in cope relative; do
        python train.py config/cope_wikitext103.py --pe=$pe --block_size=512 --max_iters=359600 \
            --eval_interval=3596 --out_dir=out/cope_wikitext103_512_$pe
    done

Figures 4 and 7 are drawn from the sep-keys run, on the start of the split, or on a file with
--text=FILE:

    python -m eval.attention positions out/SEP_KEYS_RUN    # Figure 4
    python -m eval.attention gates out/SEP_KEYS_RUN        # Figure 7

The paper says that the model is GPT-2's, with a context of 1024 and p_max = 64, and that it trains
for 100 epochs with a batch size of 64. Its numbers of parameters imply GPT-2's vocabulary, in which
an epoch has 117.8M tokens, so that 100 epochs are 179,800 steps.

Our choices. Sequences are drawn at random, so an epoch is as many tokens as the set has, of which
37% are not read in any one epoch. The paper gives neither the learning rate and its schedule, nor
dropout, nor AdamW's betas and weight decay; ours are below, or train.py's defaults. We read p_max =
64 as 64 positions rather than 65 (0 to 64), and likewise for 16 and 1024. Sep-keys has 130.74M
parameters here, since each layer gets a 768 x 768 projection and its biases. With a table per layer
(--cope_shared=False) it has 130.79M, which is the 130.8M of Table 9, so the paper may have combined
the two.

Memory at micro_batch=8 is about 10 GB for CoPE, cope+relative and --pe=learned, and 20 GB for
--pe=relative.
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
