"""
CoPE Table 5, WordCount: fine-tuned 1.4B models; NLL, and accuracy in percent.

    python -m data.wordcount --tokenizer=hf-internal-testing/llama-tokenizer --out=data/wordcount_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount.py --init_from=RUN
    python sample.py out/cope_wordcount_PE --evaluate=val

RoPE: 0.055, 94.8; CoPE + RoPE in every sixth layer: 0.045, 96.0. RUN is any run directory: its weights and its model's
options are taken over, and the data must have been written with its tokenizer. NLL is the loss of val, over the tokens
of the answer and the end; accuracy is 100 - sequence_error, the answers that greedy decoding gets right.

A try on a laptop, from the quickstart and any folder of *.txt:

    python -m data.wordcount --stories=FOLDER --tokenizer=bytes --length=2048 --out=data/wordcount_bytes
    python train.py config/cope_wordcount.py --init_from=out/quickstart_cope --data=data/wordcount_bytes --batch_size=4
    python sample.py out/cope_wordcount_cope    # answers, marked right or wrong

The paper fine-tunes on 1.5B tokens, learning rate 1e-4, dropout 0.1, 262,144 tokens a step, context 4096, the rest as in
its pre-training (cosine, AdamW; no more is said). Examples are packed into rows of 4096: the paper does not say.
"""
data = "data/wordcount_llama"
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
