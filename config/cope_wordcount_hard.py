"""
CoPE Table 5, WordCount-hard: as cope_wordcount.py, with three stories per example.

    python -m data.wordcount --join=3 --tokenizer=hf-internal-testing/llama-tokenizer \
        --out=data/wordcount_hard_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount_hard.py \
        --init_from=out/cope_1b4_cope --out_dir=out/wordcount_hard_cope
    python -m eval.scores out/wordcount_hard_cope --splits=val

    --init_from           NLL     accuracy
    out/cope_1b4_cope     0.18    77.7
    out/cope_1b4_rope     0.24    66.9

What the paper says, our choices and the memory are as in cope_wordcount.py.
"""
from config.cope_wordcount import *  # noqa: F403

data = "data/wordcount_hard_llama"
