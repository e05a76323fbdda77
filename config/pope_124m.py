"""
PoPE Tables 4, 5 and 8, Figures 2 to 4: 124M parameters on OpenWebText. Validation perplexity.

    python -m data.openwebtext
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py
    python -m eval.scores out/pope_124m_pope --splits=val

    flags                   perplexity
    (none: PoPE)            21.33
    --pe=rope               21.55
    --pope_mu=identity      21.57
    --pope_mu=relu          21.55
    --pope_delta=none       21.42

ReLU in place of softplus comes from the paper's later version.

Figure 2 shows the perplexity at 1024 to 10,240 tokens. --eval_tokens is more than PG-19's 100 test
books have, so that all of them are read:

    python -m data.pg19
    python sample.py out/pope_124m_pope out/pope_124m_rope --data=pg19 --split=test \
        --extrapolate=1,2,3,4,5,6,7,8,9,10 --eval_tokens=20000000

A later version of the paper also fine-tunes two models at 4096 tokens: RoPE with YaRN, and PoPE
without any change.

    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py \
        --init_from=out/pope_124m_rope --out_dir=out/pope_124m_yarn \
        --pe=rope --rope_scaling=yarn --rope_factor=4 --block_size=4096 \
        --micro_batch=4 --max_iters=500 --warmup_iters=20 --learning_rate=6e-5 --schedule=constant
    torchrun --standalone --nproc_per_node=4 train.py config/pope_124m.py \
        --init_from=out/pope_124m_pope --out_dir=out/pope_124m_tuned --block_size=4096 \
        --micro_batch=4 --max_iters=500 --warmup_iters=20 --learning_rate=6e-5 --schedule=constant
    python sample.py out/pope_124m_yarn out/pope_124m_tuned --data=pg19 --split=test \
        --extrapolate=0.25,0.5,1,1.5,2,2.5 --eval_tokens=20000000

Table 5 has zero-shot accuracies in percent, with the mean of the six in the last column:

    python -m eval.tasks out/pope_124m_pope out/pope_124m_rope \
        --tasks=lambada_openai,blimp,cbt,hellaswag,piqa,arc_easy

            LAMBADA  BLiMP  CBT    HellaSwag  PIQA   ARC-E  mean
    RoPE    28.74    77.55  38.80  29.55      60.28  37.08  45.33
    PoPE    27.67    77.75  44.43  29.18      59.58  38.52  46.19

Figures 3 and 4 show which frequencies queries and keys use, as a mean over the heads and ten of
Shakespeare's sonnets. Put each sonnet into a file of its own. Where the paper draws a heat map, we
draw lines, with one panel per layer:

    python -m eval.attention frequency out/pope_124m_pope out/pope_124m_rope \
        --text=$(echo sonnets/*.txt | tr ' ' ,)

The paper says that its runs take 12.3 hours (PoPE) and 11.2 hours (RoPE) on four RTX 3090s. About
Figure 2 it says that PoPE extrapolates well at every size, whereas RoPE gets worse as models grow.
The later version fine-tunes for 500 steps of 64 sequences, with 20 steps of warm-up and a learning
rate of 6e-5 that does not decay.

Our choices. There are no biases and the embeddings are tied. The paper mentions neither; the only
change to GPT that it names is RMSNorm, and both choices are compatible with the 124M parameters
that it reports. The paper does not say which ten sonnets it reads.

Memory at micro_batch=16 is about 22 GB for PoPE and 18 GB for RoPE, so a 24 GB GPU needs
micro_batch=8.
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

eval_interval = 2000
eval_batches = 8
compile = True
