"""
PoPE Tables 4, 5 and 8 and Figures 2, 3, 4: 124M parameters on OpenWebText; validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py
    python sample.py out/pope_124m_pope --evaluate=val

    flags                   perplexity
    (none: PoPE)            21.33
    --pe=rope               21.55
    --pope_softplus=False   21.57
    --pope_delta=none       21.42

(The last two need --out_dir=..., as their pe is PoPE's.) Figure 2, perplexity at 1024 to 10,240
tokens on all of PG-19's test books (--eval_tokens is more than they hold), stays flat for PoPE and
explodes for RoPE:

    python -m data.pg19
    python sample.py out/pope_124m_pope out/pope_124m_rope --data=pg19 --split=test \
        --extrapolate=1,2,3,4,5,6,7,8,9,10 --eval_tokens=20000000

Two runs that continue RoPE's belong beside it: YaRN, 500 steps at 4096 tokens, and DroPE
(arXiv:2512.12167), without any encoding for a hundredth of the training or less. The schedules are
ours:

    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py \
        --init_from=out/pope_124m_rope --out_dir=out/pope_124m_yarn \
        --pe=rope --rope_scaling=yarn --rope_factor=4 --rope_trained=1024 --block_size=4096 \
        --micro_batch=4 --max_iters=500 --warmup_iters=50
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py \
        --init_from=out/pope_124m_rope --out_dir=out/pope_124m_drope \
        --pe=nope --max_iters=1000 --warmup_iters=100

(The YaRN run's trained length is 4096: use --extrapolate=0.25,1,2,2.5.) Without training,
out/pope_124m_rope@rope_scaling=yarn,rope_factor=10 stretches RoPE at test time.

Table 5, zero-shot accuracy in percent; the last column is the mean of the six:

    python sample.py out/pope_124m_pope out/pope_124m_rope \
        --tasks=lambada_openai,blimp,cbt,hellaswag,piqa,arc_easy

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    28.74    77.55  38.80  29.55      60.28  37.08  45.33
    PoPE    27.67    77.75  44.43  29.18      59.58  38.52  46.19

Compare acc. For HellaSwag, PIQA and ARC-E the harness also prints acc_norm, which divides by the
length of the answer; the paper says only "accuracy".

Figures 3 and 4, which frequencies queries and keys use, mean over the heads and ten of
Shakespeare's sonnets. Which ten is open. Put each into its own file; without --text, ten stretches
of the split are read. The paper draws a heat map; we draw lines, a panel for each layer:

    python sample.py out/pope_124m_pope out/pope_124m_rope --figure=frequency \
        --text=$(echo sonnets/*.txt | tr ' ' ,)

The paper's runs take 12.3 (PoPE) and 11.2 (RoPE) hours on four RTX 3090. It says nothing about
biases: RMSNorm is its only change to a GPT, and a GPT has biases; 124M fits either way. Open, and
ours: no biases, tied embeddings. Memory, 16 sequences a pass: 21 GB for PoPE and 18 GB for RoPE;
--micro_batch=8 fits a 24 GB GPU with room to spare.
"""
data = "openwebtext"
pe = "pope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50257, rounded up for speed
norm = "rmsnorm"
bias = False

batch_size = 64
micro_batch = 16
max_iters = 100000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 1000
weight_decay = 0.01
beta2 = 0.95

eval_interval = 2000
eval_batches = 8
compile = True
