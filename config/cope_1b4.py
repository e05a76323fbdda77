"""
CoPE Figure 5 and Table 12: 1.4B parameters, CoPE + RoPE in every sixth layer, RoPE in the others.

    python -m data.c4 --train=364868892 --out=data/c4_llama
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py config/cope_1b4.py --out_dir=out/cope_1b4_cope
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py config/cope_1b4.py --pe=rope
    python -m eval.curves training out/cope_1b4_{cope,rope}

Run the torchrun commands on each of four machines, one of which is HOST. The last command draws the
half of Figure 5 that is measured on C4. The other half is measured on Wikipedia, for which
WikiText-103 stands in here. The next commands measure only its last points. To have the points
before them, too, copy the run directories during training.

    python -m data.wikitext103 --tokenizer=hf-internal-testing/llama-tokenizer \
        --out=data/wikitext103_llama
    python -m eval.scores out/cope_1b4_{cope,rope} --splits=val --data=data/wikitext103_llama

Table 12 has accuracies in percent, whose mean is 47.7 for RoPE and 48.6 for CoPE + RoPE:

    python -m eval.tasks out/cope_1b4_{cope,rope} \
        --tasks=boolq,piqa,social_iqa,hellaswag,winogrande,arc_easy,arc_challenge,openbookqa
    python -m eval.tasks out/cope_1b4_{cope,rope} --tasks=mmlu --fewshot=5

                  BoolQ  PIQA  SIQA  HellaS  WinoG  ARCe  ARCc  OBQA  MMLU
    RoPE          61.4   73.0  41.2  45.5    60.4   64.3  30.2  25.2  27.8
    CoPE + RoPE   65.8   73.4  41.7  45.4    62.0   66.2  29.7  26.8  26.6

The paper says that after 1T tokens CoPE's perplexity is about 3% lower than RoPE's, which means a
loss lower by 0.03, and that on Wikipedia it needs 0.6T tokens to reach RoPE's final loss. It gives
the sizes, a learning rate of 4e-4, a context of 4096, a maximum position of 64 and, for MMLU, five
examples. For the rest it mostly follows Llama 2, which uses steps of 4M tokens, a cosine down to a
tenth, 2000 steps of warm-up, a weight decay of 0.1 and betas of 0.9 and 0.95. CoPE adds 0.04% to
the parameters. The added ones are 4 layers x 64 positions x 2048 = 524,288, so each of the four
layers has a table per head.

Our choices. CoPE is in layers 6, 12, 18 and 24, which is one reading of "every 6th layer". The
training data is C4, on which the paper evaluates, because its own is Llama 2's private mix. C4 has
0.18T tokens, so that training on 1T reads it more than five times. The MLP is of width 5632, which
gives 1.36B parameters. AdamW's eps is 1e-8, whereas Llama 2 has 1e-5. All tasks of Table 12 but
MMLU run without examples; the paper calls all of them few-shot, but gives a number only for MMLU.

Memory at micro_batch=1 is about 37 GB, for CoPE as for RoPE.
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
cope_shared = False
cope_per_head = True

batch_size = 1024
micro_batch = 1
max_iters = 238419
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 2000

eval_interval = 1000
eval_batches = 1
compile = True
