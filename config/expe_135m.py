"""
ExPE Tables 1 and 4, small: 135M parameters on FineWeb-Edu. Loss at 1, 2 and 4 times the trained
length of 512.

    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 \
        --out=data/fineweb_edu_mistral
    torchrun --standalone --nproc_per_node=8 train.py config/expe_135m.py
    python sample.py out/expe_135m_{expe,exqpe,rope} \
        --extrapolate=1,2,4 --split=test --eval_tokens=10000000
    python -m eval.curves training out/expe_135m_{expe,exqpe,rope}

    flags          1x     2x     4x     time to train
    (none: ExPE)   2.87   2.83   3.25   0.93
    --pe=exqpe     2.86   2.83   3.35   0.93
    --pe=rope      2.89   3.80   4.95   1

The last column is relative to RoPE's time, and the last command draws our own times. Table 4 has
accuracies as fractions:

    python -m eval.tasks out/expe_135m_{expe,exqpe,rope} \
        --tasks=hellaswag,mmlu,arc_challenge,arc_easy

    pe      HellaSwag  MMLU   ARC    ARC easy
    rope    0.29       0.26   0.24   0.30
    expe    0.28       0.26   0.24   0.29
    exqpe   0.27       0.26   0.24   0.29

The paper says that it uses Llama 3's architecture on 10B tokens, 9.8B of them for training, in
steps of half a million tokens, and Mistral's tokenizer. That tokenizer is gated, so downloading it
needs a Hugging Face login.

Our choices. Sequences are drawn at random, so 19,073 steps of half a million tokens leave 36% of
the 9.8B unread and read others several times. Every head has keys of its own, although Llama 3
shares keys among heads, because the paper gives only one number of heads. The MLP is of width 2048,
which gives 135M parameters with separate input and output embeddings. The positions are written
after the block's norm, because the norm would change them. Table 4 runs without examples, because
the paper does not give their number, and we take "ARC" to mean ARC-challenge. For both kinds of
ARC, the paper cites another benchmark, ConceptARC.

The paper's reason for ExQPE is that bfloat16 rounds ExPE's numbers. With l = 96, as here, all of
8192 positions stay distinct with either method.

Memory at micro_batch=32 is about 16 GB.
"""
data = "data/fineweb_edu_mistral"
pe = "expe"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 512
norm = "rmsnorm"
mlp = "swiglu"
bias = False
tie = False
# the defaults of expe_l, expe_S, expe_theta and expe_theta2 are the paper's

batch_size = 1024
micro_batch = 32
max_iters = 19073
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 954  # 5%

eval_interval = 1000
eval_batches = 4
compile = True
