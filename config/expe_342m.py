"""
ExPE Tables 1, 3 and 4, medium: 342M parameters on FineWeb-Edu; loss at 1, 2, 4, 8, 16 times the trained length of 512.

    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 --out=data/fineweb_edu_mistral
    torchrun --standalone --nproc_per_node=8 train.py config/expe_342m.py               # ExPE: 2.63, 2.59, 2.71, 5.19, 7.56
    torchrun --standalone --nproc_per_node=8 train.py config/expe_342m.py --pe=exqpe    # ExQPE: 2.63, 2.59, 2.68, 5.01, 7.39
    torchrun --standalone --nproc_per_node=8 train.py config/expe_342m.py --pe=rope     # Llama: 2.63, 3.45, 4.55
    python sample.py out/expe_342m_expe out/expe_342m_exqpe out/expe_342m_rope --extrapolate=1,2,4,8,16
    python sample.py out/expe_342m_expe@expe_scale=0.5 out/expe_342m_exqpe@expe_scale=0.5 --extrapolate=1,2,4,8,16

The last command scales the positions by a half, without training: ExPE 2.76, 2.71, 2.68, 2.98, 5.65; ExQPE 2.74, 2.69, 2.65,
2.76, 4.98. As expe_135m.py, with tied embeddings and an MLP 2816 wide, which gives 342M.
"""
from config.expe_135m import *  # noqa: F403

n_layer = 24
n_head = 16
n_embd = 1024
mlp_width = 2816
learning_rate = 3e-4
min_lr = 3e-5
tie = True
