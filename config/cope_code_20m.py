"""
CoPE Table 6, code: 20M parameters, Llama-2's architecture and tokenizer; test perplexity and millions of parameters.

    python -m data.code
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py                 # CoPE: 3.9, 20.8
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py --pe=learned    # absolute PE: 4.7, 20.8
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py --pe=rope       # RoPE: 4.1, 19.8
    torchrun --standalone --nproc_per_node=8 train.py config/cope_code_20m.py --pe=cope+rope  # CoPE + RoPE: 4.0, 20.8

The paper's data, Llama-2's mix of code, are private, so its perplexities cannot be met, only its order. Its 20.8M for CoPE
are 4096 x 256 more than RoPE's 19.8M, as for absolute PE: 4096 positions, it seems, in tables that heads do not share; ours
has 64, shared. Given: learning rate 5e-4, context 4096, 100B tokens. Open, and ours as in Llama 2: 4M tokens a step,
cosine to a tenth, warm-up 2000, weight decay 0.1, betas 0.9, 0.95. On a laptop: config/cope_code_small.py.
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

batch_size = 1024
micro_batch = 8
max_iters = 23842
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 2000
beta2 = 0.95

eval_interval = 1000
eval_batches = 1
compile = True
