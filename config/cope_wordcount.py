"""
CoPE Table 5, WordCount: fine-tuned 1.4B models; NLL, and accuracy in percent.

    python -m data.wordcount --tokenizer=hf-internal-testing/llama-tokenizer \
        --out=data/wordcount_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount.py \
        --init_from=out/cope_1b4_cope --out_dir=out/wordcount_cope
    python sample.py out/wordcount_cope --evaluate=val

    --init_from           NLL     accuracy
    out/cope_1b4_cope     0.045   96.0
    out/cope_1b4_rope     0.055   94.8

--init_from takes any run, with its weights and model options. The data must have been written with
its tokenizer. NLL is the loss of val in RUN/results.jsonl, over the tokens of the answer and the
end; accuracy is 100 - sequence_error, the answers that greedy decoding gets right.
Llama-3.1-Instruct, not fine-tuned, has 17.1 (8B) and 16.4 (70B).

A trial on a laptop, from the quickstart and any folder of *.txt:

    python -m data.wordcount --stories=FOLDER --tokenizer=bytes --length=2048 \
        --out=data/wordcount_bytes
    python train.py config/cope_wordcount.py --init_from=out/quickstart_cope \
        --data=data/wordcount_bytes --batch_size=4 --max_iters=200 --warmup_iters=20 \
        --eval_interval=100 --out_dir=out/wordcount_trial
    python sample.py out/wordcount_trial    # answers, marked right or wrong

The paper fine-tunes on 1.5B tokens, learning rate 1e-4, dropout 0.1, 262,144 tokens a step, context
4096, "other parameters" as in pre-training: cosine to a tenth and 2,000 steps of warm-up, here a
third of the run. Open, and ours: NLL is the mean over the answer's tokens; examples are packed into
rows of 4096. Figure 8: `sentences` and `words` of the set's meta.json, {length: stories}. Figure 9
(splits k1, k2, ... of val, for each k with ten examples or more):

    python sample.py out/wordcount_cope out/wordcount_rope --evaluate=k1,k2,k3,k4,k5,k10,k15

Memory of a 1.4B model at one sequence a pass: 58 GB where PyTorch computes CoPE, 38 GB for RoPE.
Exchanging gradients under torchrun takes 5 GB more. Each process also reads the 16 GB of
--init_from into RAM.
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

eval_interval = 500
eval_batches = 4
