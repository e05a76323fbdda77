"""
CoPE Table 5 and Figures 8 and 9, WordCount: fine-tuned 1.4B models; NLL, and accuracy in percent.

    python -m data.wordcount --tokenizer=hf-internal-testing/llama-tokenizer \
        --out=data/wordcount_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount.py \
        --init_from=out/cope_1b4_cope --out_dir=out/wordcount_cope
    python -m eval.scores out/wordcount_cope --splits=val

    --init_from           NLL     accuracy
    out/cope_1b4_cope     0.045   96.0
    out/cope_1b4_rope     0.055   94.8

--init_from takes any run, with its weights and model options, if the data were written with its
tokenizer (config/README.md has a trial on a laptop). Accuracy is 100 - sequence_error, the
percentage of answers that greedy decoding gets right.

The lengths of Figure 8 are `sentences` and `words` in the set's meta.json. The points of Figure 9
are the splits k1, k2, ..., which are the parts of val with the same k, one for each k that has at
least ten examples:

    python -m eval.scores out/wordcount_{cope,rope} --splits=k1,k2,k3,k4,k5,k10,k15

The paper says that it fine-tunes on 1.5B tokens, with a learning rate of 1e-4, dropout 0.1, 262,144
tokens per step and a context of 4096, and that "other parameters" are as in pre-training. These are
a cosine down to a tenth and 2000 steps of warm-up, which is a third of this run.

Our choices. NLL is the mean over the tokens of the answer and the end of text, and examples are
packed into rows of 4096 tokens, because the paper specifies neither.

Memory at micro_batch=1 is about 38 GB, for CoPE as for RoPE.
"""
data = "data/wordcount_llama"
block_size = 4096
dropout = 0.1

batch_size = 64
micro_batch = 1
max_iters = 5722
learning_rate = 1e-4
min_lr = 1e-5
warmup_iters = 2000

eval_batches = 4
