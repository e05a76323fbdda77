"""
Draw eval/methods.png, how each method of model.PES changes what attention sees:

    python -m eval.methods

The same query stands at every position i. Keys are of two kinds: first letters of words, which
match the query, and others. CoPE counts the first letters, FoX forgets at them, CARoPE turns at
them. No parameter is trained: tables are random, the rest is set by hand.
"""
import math

import torch

from eval.figures import panels, save
from model import PES, GPTConfig, dots

TEXT = "the cat ate a tiny bird and felt no remorse whatsoever for days on end"
ROWS = {"i and j": "nope learned sinusoidal expe exqpe",
        "i – j alone": "rope pope relative t5 alibi",
        "what lies between": "carope fox cope cope_mlp cope_alibi"}

@torch.no_grad()
def effect(name, first):
    """(T, T): what the method adds to the logit of query i and key j, minus its mean over all keys
    of the same kind. nan in the future. first (T,): where words begin."""
    torch.manual_seed(1)
    T, C = len(first), 32
    cfg = GPTConfig(block_size=T, n_head=1, n_embd=C, base=100.0, t5_buckets=16, expe_theta=1 / 32,
                    sinusoidal_scale=False)
    pe, j = PES[name](cfg), torch.arange(T)
    for key, p in pe.named_parameters():
        if key not in ("W", "b", "delta"):
            p.normal_(0, 0.7)
    x = torch.zeros(1, T, C)  # what FoX and CARoPE read
    if hasattr(pe, "W"):
        x[..., 0], pe.W[0] = torch.where(first, 0.0, 4.0), 1.0
    a = torch.randn(C)
    liked = torch.where(first, 5.0, -5.0)[:, None] * a / a.square().sum() * C**0.5  # (T, C)
    q, k = a.expand(1, T, C), torch.randn(C) + liked[None]
    without = dots(q, k, C)
    q, k = (pe.inputs(pe.embed(y, j), y, j)[0][:, None] for y in (q, k))  # (1, 1, T, C)
    turned, k = pe.rotate(q, k, x, j, {})
    logits = dots(turned, k, C)
    bias = pe.logit_bias(q, logits, j[:, None], j, pe.key_features(x, k, k, {}))
    added = (logits + bias - without)[0, 0].masked_fill(j > j[:, None], math.nan)
    for kind in (first, ~first):
        added[:, kind] -= added[:, kind].nanmean()
    return added

if __name__ == "__main__":
    figure, axes = panels(15, 5, 2, 2, sharex=True, sharey=True)
    starts = [t for t in range(len(TEXT)) if t == 0 or TEXT[t - 1] == " "]
    first = torch.tensor([t in starts for t in range(len(TEXT))])
    for ax, name in zip(axes, " ".join(ROWS.values()).split()):
        added = effect(name, first)
        most = added.nan_to_num().abs().max().item() or 1
        ax.imshow(added.numpy(), "RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        ax.set(title=name, facecolor="0.9", yticks=starts, yticklabels=[])
        ax.set_xticks(starts, [TEXT[t] for t in starts], fontsize=7)
    for ax, what in zip(axes[::5], ROWS):
        ax.set_ylabel(f"by {what}")
    figure.supxlabel("key j, the first letters of words marked; query i downwards", fontsize=10)
    save(figure, "eval/methods")
