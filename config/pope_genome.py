"""
PoPE Table 3, the human reference genome: NLL on the test split, in nats per token (mostly 6-mers).

    python -m data.human_genome
    torchrun --standalone --nproc_per_node=8 train.py config/pope_genome.py                # PoPE: 4.152
    torchrun --standalone --nproc_per_node=8 train.py config/pope_genome.py --pe=rope      # RoPE: 4.217
    python sample.py out/pope_genome_pope --evaluate=test

The paper reports the best NLL; its runs take 15.6 and 14 hours on eight V100. Open, and ours: biases (none), tying (tied).
"""
data = "human_genome"
pe = "pope"

n_layer = 16
n_head = 16
n_embd = 1024
block_size = 1000
norm = "rmsnorm"
bias = False
dropout = 0.1
pope_delta = "uniform"

batch_size = 64
micro_batch = 8
max_iters = 100000
learning_rate = 2.5e-4
min_lr = 2.5e-5
warmup_iters = 4000
weight_decay = 0.01
beta2 = 0.999

eval_interval = 5000
eval_batches = 16
eval_splits = "val,test"
