"""
CoPE Table 5, WordCount-hard: as cope_wordcount.py, with three stories to a sample. NLL, and accuracy in percent.

    python -m data.wordcount --join=3 --tokenizer=hf-internal-testing/llama-tokenizer --out=data/wordcount_hard_llama
    torchrun --standalone --nproc_per_node=8 train.py config/cope_wordcount_hard.py --init_from=RUN

RoPE: 0.24, 66.9; CoPE + RoPE in every sixth layer: 0.18, 77.7. Llama-3.1-70B, not fine-tuned: 3.4. What is said in
cope_wordcount.py holds here.
"""
from config.cope_wordcount import *  # noqa: F403

data = "data/wordcount_hard_llama"
