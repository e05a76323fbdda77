"""
CoPE Table 6, code: 20M parameters, Llama-2's architecture and tokenizer; test perplexity and
millions of parameters.

    python -m data.code --source=codeparrot/codeparrot-clean-train --out=data/code
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py
    python sample.py out/cope_code_20m_cope --evaluate=test

    flags           test perplexity   parameters
    (none: CoPE)    3.9               20.8
    --pe=learned    4.7               20.8
    --pe=rope       4.1               19.8
    --pe=cope+rope  4.0               20.8

The paper's data, Llama-2's mix of code, are private, so we can match its ranking but not its
perplexities. Ours have about a sixth of its 100B tokens, read again and again. Given: learning rate
5e-4, context 4096, 100B tokens. Open, and ours as in Llama 2: 4M tokens a step, cosine to a tenth,
warm-up 2000, weight decay 0.1, betas 0.9, 0.95.

The paper's 20.8M for CoPE are 4096 x 256 more than RoPE's 19.8M. Two layouts have that size: a
table per head for the whole model, with as many positions as the context of 4096, or one per layer
and head with 1024 positions (--cope_shared=False --cope_npos=1024). We take the first: the paper
names no limit for code.

Memory: PyTorch keeps 16 GB a sequence for CoPE, 63 GB for the 4 of a pass; --pe=rope needs 2 GB a
sequence. On a laptop: config/cope_code_small.py.
"""
data = "code"
pe = "cope"

n_layer = 4
n_head = 8
n_embd = 256
block_size = 4096
norm = "rmsnorm"
mlp = "swiglu"
mlp_width = 768
bias = False
tie = False
cope_npos = 4096
cope_per_head = True

batch_size = 1024
micro_batch = 4
max_iters = 23842
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 2000
beta2 = 0.95

eval_interval = 1000
eval_batches = 1
compile = True
