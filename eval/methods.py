"""
Draws eval/methods.png, which needs no trained model:

    python -m eval.methods

It shows how each method of ROWS changes what attention sees. The query is the same at every
position i. Keys are of two kinds: those of the first letters of words, which match the query, and
all others. CoPE counts the first letters, FoX forgets at them, and CARoPE rotates at them. Tables
are random, and the other parameters are set by hand.
"""
import math
import sys

import torch

from eval.figures import panels, save
from model import PES, GPTConfig, scaled_dot_products

TEXT = "the cat ate a tiny bird and felt no remorse whatsoever for days on end"
ROWS = {  # what the effect of a method depends on: the methods, one panel each
    "by i and j": ("learned", "sinusoidal", "expe", "exqpe"),
    "by i – j only": ("rope", "pope", "relative", "t5", "alibi"),
    "by what lies between": ("carope", "fox", "cope", "cope_mlp", "cope_alibi"),
}

@torch.no_grad()
def effect(name, first):
    """Returns what the method adds to the logit of query i and key j, (T, T), minus its mean over
    all keys of the same kind. It is nan in the future. first (T,) is True where a word begins."""
    torch.manual_seed(1)
    T = len(first)
    C = 32
    cfg = GPTConfig(block_size=T, n_head=1, n_embd=C, base=100.0, t5_buckets=16, expe_theta=1 / 32,
                    sinusoidal_scale=False)
    pe = PES[name](cfg)
    for key, p in pe.named_parameters():
        if key not in ("W", "b", "delta"):
            p.normal_(0, 0.7)
    x = torch.zeros(1, T, C)  # what FoX and CARoPE read
    if hasattr(pe, "W"):
        x[..., 0] = torch.where(first, 0.0, 4.0)
        pe.W[0] = 1.0
    a = torch.randn(C)
    liked = torch.where(first, 5.0, -5.0)[:, None] * a / a.square().sum() * C**0.5  # (T, C)
    q = a.expand(1, T, C)
    k = torch.randn(C) + liked[None]
    without = scaled_dot_products(q, k, C)
    j = torch.arange(T)
    q, k = (pe.inputs(pe.embed(y, j), j)[:, None] for y in (q, k))  # (1, 1, T, C)
    rotated_q, k = pe.rotate(q, k, x, pe.angles(x, j), {})
    logits = scaled_dot_products(rotated_q, k, C)
    bias = pe.logit_bias(q, logits, j[:, None], j, pe.per_key(x, k, k, {}))
    added = (logits + bias - without)[0, 0].masked_fill(j > j[:, None], math.nan)
    for kind in (first, ~first):
        added[:, kind] -= added[:, kind].nanmean()
    return added

def draw_effects(path):
    """Draws a panel for each method of ROWS, in <path>.png."""
    across = max(len(names) for names in ROWS.values())
    figure, axes = panels(len(ROWS) * across, across, 2, 2, sharex=True, sharey=True)
    starts = [t for t in range(len(TEXT)) if t == 0 or TEXT[t - 1] == " "]
    first = torch.tensor([t in starts for t in range(len(TEXT))])
    for r, (what, names) in enumerate(ROWS.items()):
        axes[r * across].set_ylabel(what)
        for c in range(across):
            ax = axes[r * across + c]
            if c >= len(names):
                ax.set_visible(False)
                continue
            added = effect(names[c], first)
            most = added.nan_to_num().abs().max().item() or 1
            ax.imshow(added.numpy(), "RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
            ax.set(title=names[c], facecolor="0.9", yticks=starts, yticklabels=[])
            ax.set_xticks(starts, [TEXT[t] for t in starts], fontsize=7)
    figure.supxlabel("key j, the first letters of words marked; query i downwards", fontsize=10)
    save(figure, path)

if __name__ == "__main__":
    if len(sys.argv) > 1:  # for example --help, which should not change any file
        print(__doc__.strip())
    else:
        draw_effects("eval/methods")
