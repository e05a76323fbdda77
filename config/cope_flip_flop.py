"""
CoPE Tables 2 and 8, Flip-Flop: error in percent of all bits read, mean (deviation) of the paper's 3 seeds.

    python train.py config/cope_flip_flop.py                            # CoPE: in distribution 0.03 (0.06), OOD 4.9 (4.4)
    python train.py config/cope_flip_flop.py --pe=learned               # absolute PE: 6.8 (6.9), 21.7 (7.9)
    python train.py config/cope_flip_flop.py --pe=rope                  # RoPE: 1.8 (3.1), 20.3 (2.9)
    python train.py config/cope_flip_flop.py --pe=learned --hard_attention=True --out_dir=out/flip_flop_hard    # 50.7, 49.1
    python train.py config/cope_flip_flop.py --pe=cope_mlp              # CoPE_MLP, N = 64, in all layers: 0.03, 5.9
    python train.py config/cope_flip_flop.py --pe=cope_mlp,nope,nope,nope    # in the first layer only: 0.9, 24.3
    python train.py config/cope_flip_flop.py --pe=cope_alibi --cope_slopes=geometric --cope_m0=1       # 0.0, 11.4 (3.4)
    python train.py config/cope_flip_flop.py --pe=cope_alibi --cope_slopes=geometric --cope_m0=0.25    # 0.0, 8.7 (7.6)
    python train.py config/cope_flip_flop.py --pe=cope_alibi --cope_slopes=geometric --cope_m0=0.0625  # 0.0, 17.1 (1.5)
    python train.py config/cope_flip_flop.py --pe=cope_alibi --cope_slopes=learned                     # 0.0, 11.4 (4.0)
    python sample.py out/cope_flip_flop_cope --evaluate=val,sparse,dense

(--seed=... for the others; --out_dir=... where two rows have the same pe.) The smaller models are --n_embd=128, --n_layer=2
and --n_head=2, as dim, layers / heads; CoPE: 256 2/4 0.0, 13.2; 256 4/2 0.0, 3.0; 256 2/2 0.0, 14.6; 128 4/4 0.2, 33.2;
128 2/4 0.03, 22.3; 128 4/2 0.03, 14.5; 128 2/2 0.02, 24.5; RoPE: 5.1, 14.7; 0.02, 19.0; 5.4, 19.8; 0.1, 8.9; 0.1, 18.2;
0.02, 17.3; 14.4, 25.2.

The row is the token_error of val and of sparse (p_i = 0.98), on the test sets of Liu et al., 1000 and 100,000 rows, by the
last command; training evaluates on a part. Open: "8 GPUs with batch size 16" is read as 16 in all, as in Liu et al., whose
warm-up and weight decay these are; npos; what stands with CoPE_MLP in the other layers (nothing: nope); how hard
attention is trained (straight-through).
"""
data = "flip_flop"
pe = "cope"

n_layer = 4
n_head = 4
n_embd = 256
block_size = 511

batch_size = 16
max_iters = 10000
learning_rate = 3e-4
beta2 = 0.999
schedule = "linear"
warmup_iters = 50
weight_decay = 0.1

eval_interval = 500
eval_splits = "val,sparse"
