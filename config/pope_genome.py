"""
PoPE Table 3, the human reference genome: NLL on the test split, in nats per token (mostly 6-mers).

    python -m data.human_genome
    torchrun --standalone --nproc_per_node=8 train.py config/pope_genome.py
    python -m eval.scores out/pope_genome_pope --splits=test

    flags          NLL
    (none: PoPE)   4.152
    --pe=rope      4.217

The paper says that these are the best values, and that its runs take 15.6 hours (PoPE) and 14 hours
(RoPE) on eight V100s. It follows the Nucleotide Transformer in preprocessing and tokenization.

Our choices. We read "best" as in pope_jsb.py. Training reads 1024 rows of test for each evaluation,
whereas the third command reads all 8469. In each of the 12.8 epochs, the rows start at the same
nucleotides, whereas the Nucleotide Transformer draws their starts anew (see data/human_genome.py).
There are no biases (see pope_124m.py), and the embeddings are tied.

Memory at micro_batch=8 is about 14 GB.
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
eval_splits = "test,val"  # the first decides which was best
