"""
CoPE Tables 6 and 9 and Figure 3, Wikitext-103: perplexity per GPT-2 token on val / test, and millions of parameters.

    python -m data.wikitext103
    python train.py config/cope_wikitext103.py                                          # CoPE: 22.55 / 23.46, 123.7
    python train.py config/cope_wikitext103.py --pe=learned                             # absolute PE: 23.96 / 24.87, 124.4
    python train.py config/cope_wikitext103.py --pe=relative                            # relative PE: 22.90 / 23.81, 123.7
    python train.py config/cope_wikitext103.py --pe=cope+relative                       # CoPE + relative: 22.31 / 23.23, 123.7
    python train.py config/cope_wikitext103.py --cope_gates=values --out_dir=out/w1     # value gates: 22.40 / 23.33, 123.7
    python train.py config/cope_wikitext103.py --cope_gates=sep-keys --out_dir=out/w2   # separate keys: 22.39 / 23.18, 130.8
    python train.py config/cope_wikitext103.py --share_table=False --out_dir=out/w3     # a table per layer: 22.56 / 23.58, 123.7
    python train.py config/cope_wikitext103.py --cope_npos=16 --out_dir=out/w4          # 16 positions: 22.45 / 23.22, 123.7
    python train.py config/cope_wikitext103.py --cope_npos=1024 --out_dir=out/w5        # 1024 positions: 22.46 / 23.31, 123.7
    python train.py config/cope_wikitext103.py --pe=cope_alibi                          # CoPE_ALiBi: 24.16 / 25.09, 123.7
    python sample.py out/cope_wikitext103_cope --evaluate=val,test
    python sample.py out/cope_wikitext103_{cope,relative} out/cope_wikitext103_relative@rel_capped=True --extrapolate=1,2

The last command is Figure 3 (left); for its right side train at --block_size=512 and take --extrapolate=1,2,4. Given: GPT-2's
shape, context 1024, batch 64, 100 epochs (117.8M tokens each, 179,800 steps in all), 64 positions. Open, and ours: the
learning rate and its schedule, dropout, AdamW's betas.
"""
data = "wikitext103"
pe = "cope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1

batch_size = 64
micro_batch = 16
max_iters = 179800
learning_rate = 2.5e-4
min_lr = 2.5e-5
warmup_iters = 2000

eval_interval = 1798
eval_batches = 0
eval_splits = "val,test"
compile = True
