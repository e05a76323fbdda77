"""
ExPE Tables 1, 3 and 4, medium: 342M parameters on FineWeb-Edu. Loss at 1 to 16 times the trained
length of 512.

    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 \
        --out=data/fineweb_edu_mistral
    torchrun --standalone --nproc_per_node=8 train.py config/expe_342m.py
    python sample.py out/expe_342m_{expe,exqpe,rope} out/expe_342m_{expe,exqpe}@expe_scale=0.5 \
        --extrapolate=1,2,4,8,16 --split=test --eval_tokens=10000000

    flags                          1x     2x     4x     8x     16x    time to train
    (none: ExPE)                   2.63   2.59   2.71   5.19   7.56   0.78
    --pe=exqpe                     2.63   2.59   2.68   5.01   7.39   0.78
    --pe=rope                      2.63   3.45   4.55   -      -      1
    ExPE, positions halved         2.76   2.71   2.68   2.98   5.65
    ExQPE, positions halved        2.74   2.69   2.65   2.76   4.98

The last two rows are the first two runs again, with positions that expe_scale=0.5 halves at test
time. Table 4 has accuracies as fractions:

    python -m eval.tasks out/expe_342m_{expe,exqpe,rope} out/expe_342m_{expe,exqpe}@expe_scale=0.5 \
        --tasks=hellaswag,mmlu,arc_challenge,arc_easy

    pe              HellaSwag  MMLU   ARC    ARC easy
    rope            0.31       0.26   0.26   0.30
    expe            0.31       0.26   0.25   0.30
    expe, halved    0.31       0.26   0.25   0.30
    exqpe           0.32       0.26   0.25   0.31
    exqpe, halved   0.32       0.26   0.25   0.31

The paper says that the medium models tie the embeddings. The rest is as in expe_135m.py.

Our choices are those of expe_135m.py, with an MLP of width 2816, which gives 342M parameters.

Memory at micro_batch=32 is about 33 GB.
"""
from config.expe_135m import *  # noqa: F403

n_layer = 24
n_head = 16
n_embd = 1024
mlp_width = 2816
learning_rate = 3e-4
min_lr = 3e-5
tie = True
