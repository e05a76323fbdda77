"""
CARoPE Table 1, GPT-small: 124M parameters on FineWeb-Edu. Perplexity at 512 tokens, the trained
length, and at 1024.

    python -m data.fineweb_edu
    torchrun --standalone --nproc_per_node=2 train.py config/carope_124m.py
    python sample.py out/carope_124m_{carope,rope,learned,sinusoidal} \
        --extrapolate=1,2 --split=test --eval_tokens=10000000
    python -m eval.curves training out/carope_124m_{carope,rope}  # also draws the speed

    flags             512       1024
    (none: CARoPE)    21.23     21.39
    --pe=rope         21.31     56.61
    --pe=learned      21.90     -
    --pe=sinusoidal   22.14     166.18

The paper says that it trains for 19,000 steps of 524,288 tokens, which is about one epoch, on two
H100 GPUs. Of its data, 9.9B tokens are for training and 0.1B for evaluation.

Our choices. data/fineweb_edu.py keeps 0.1B tokens for val and as many for test, so that 9.8B are
left for training. Sequences are drawn at random, so 19,000 steps leave 36% of these unread and read
others several times. There are 12 heads, as in GPT-2, because the paper's 10 do not divide 768. The
paper's x_t is "the embedding of the token", whereas ours is the input of each layer's attention,
because our small models read longer texts well only with that; --carope_x=embedding takes the
paper's words as they are. The paper starts CARoPE as RoPE but does not say how, so we add to x_t W
a constant that makes CARoPE equal to RoPE as long as W = 0. The sinusoidal baseline multiplies the
token embeddings by sqrt(768) = 27.7, as in Vaswani et al., unless --sinusoidal_scale=False; the
paper does not say whether it does. Weight decay, betas and dropout are those with which GPT-2 is
usually reproduced (0.1, 0.9 and 0.95, none), because the paper says only that they are GPT-2's.

Memory at micro_batch=32 is about 19 GB.
"""
data = "fineweb_edu"
pe = "carope"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 512
vocab_size = 50304

batch_size = 1024
micro_batch = 32
max_iters = 19000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 750

eval_interval = 1000
eval_batches = 4
compile = True
