"""
CoPE Table 5, WordCount-hard: as cope_wordcount.py, with three stories to a sample. NLL, and accuracy in percent.

    python -m data.wordcount --join=3 --tokenizer=hf-internal-testing/llama-tokenizer --out=data/wordcount_hard_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount_hard.py --init_from=RUN

RoPE: 0.24, 66.9; CoPE + RoPE in every sixth layer: 0.18, 77.7. Llama-3.1-70B, not fine-tuned: 3.4. What is said in
cope_wordcount.py holds here.
"""
data = "data/wordcount_hard_llama"
block_size = 4096
dropout = 0.1

batch_size = 64
micro_batch = 2
max_iters = 5722
learning_rate = 1e-4
min_lr = 1e-5
warmup_iters = 100

eval_interval = 500
eval_batches = 4
