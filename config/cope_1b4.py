"""
CoPE Figure 5 and Table 12: 1.4B parameters, CoPE + RoPE in every sixth layer, RoPE in the others.

    python -m data.c4 --tokenizer=hf-internal-testing/llama-tokenizer --out=data/c4_llama
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/cope_1b4.py
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/cope_1b4.py --pe=rope
    python sample.py RUN RUN --tasks=boolq,piqa,social_iqa,hellaswag,winogrande,arc_easy,arc_challenge,openbookqa

(The same command on each of four machines; HOST is one of them.)

After 1T tokens the paper's CoPE has about 3% less perplexity than RoPE, and benchmarks 1% higher on average. Its data are
Llama-2's private mix; C4 is what it evaluates on. Given: sizes, learning rate 4e-4, context 4096, 64 positions. Llama 2's,
as the paper says: 4M tokens a step, cosine to a tenth, warm-up 2000, weight decay 0.1, betas 0.9, 0.95. Open: the MLP's
width (5632 gives 1.36B). The paper's tables add 0.04% of the parameters, one per head; ours serve all heads of a layer.

It fits an 80 GB GPU: weights, gradients and AdamW's two moments take 1.36G x 16 bytes = 22 GB, a forward pass of two
sequences keeps some 34 bytes x 2 x 4096 x 2048 x 24 layers = 14 GB, and 2 x 4096 x 32000 logits x 8 bytes = 2 GB.
"""
data = "data/c4_llama"
pe = "rope,rope,rope,rope,rope,cope+rope"

n_layer = 24
n_head = 16
n_embd = 2048
block_size = 4096
norm = "rmsnorm"
mlp = "swiglu"
mlp_width = 5632
bias = False
tie = False

batch_size = 1024
micro_batch = 2
max_iters = 238419
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 2000
beta2 = 0.95

eval_interval = 1000
eval_batches = 1
compile = True
