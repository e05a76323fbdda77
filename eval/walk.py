# %% [markdown]
# # A walk through positional encodings
#
# This page is a script. `python -m eval.walk` runs it in about two minutes on a laptop and saves
# its pictures in `out/`, for which it needs matplotlib. An editor that supports cells (such as VS
# Code) runs it piece by piece, and `jupytext --to notebook eval/walk.py` turns it into a notebook.

# %%
import math
import os
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn as nn

sys.path += [".", ".."]  # where model.py is, from the repository's root or from eval/

import model
from model import GPT, PE, PES, GPTConfig, at_least_float32, scaled_dot_products

torch.set_num_threads(1)  # these models are so small that more threads would wait for each other
os.makedirs("out", exist_ok=True)

# %% [markdown]
# ## 1. Attention does not know the order of its input
#
# Attention compares a query with every key and adds up the values, and a sum has no order. In a
# model of one layer without any encoding (`nope`), the prediction after the last letter of a
# sentence therefore stays the same if all letters before it are shuffled. With RoPE it changes.
# (With several layers, `nope` can learn something about order, because the causal mask lets each
# token see a different number of tokens.)

# %%
torch.manual_seed(0)
sentence = torch.tensor([list(b"the dog bit the man")])  # (1, 19), a byte is a token
shuffled = torch.cat((sentence[:, torch.randperm(18)], sentence[:, 18:]), 1)
for name in ("nope", "rope"):
    gpt = GPT(GPTConfig(pe=name, vocab_size=256, n_layer=1, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        change = (gpt(sentence)[0] - gpt(shuffled)[0]).abs().max().item()
    print(f"{name}: shuffling changes the last prediction by up to {change:.1e}")

# %% [markdown]
# ## 2. What each method changes
#
# A method acts through a few hooks. `embed` and `inputs` change the vectors that q and k are made
# of, `encode_qk` changes q and k themselves, and `logit_bias` adds something to the logits, which
# are the scaled products of q and k. Here we call these hooks by hand, for one head and one line of
# text.
#
# To see only what a method does, we keep the content simple. Every query is the same vector. There
# are only two kinds of keys: those of the first letters of words, which match the query, and all
# others, which do not. Without a method, all keys of one kind would therefore have the same logit.
# The picture shows how far the method moves each logit from the mean of its kind. Red means that
# query i (downwards) attends more to key j (across), and blue means that it attends less.
#
# The methods differ in what this effect depends on, and the picture has a row for each answer:
#
# - In the top row, the effect depends on where i and j are in the text.
# - In the middle row, it depends only on the distance i - j, so along a diagonal it is the same for
#   all keys of one kind. RoPE and PoPE oscillate with the distance, and ALiBi falls steadily.
# - In the bottom row, it also depends on the tokens between j and i. CoPE counts the first letters,
#   FoX forgets at them, and CARoPE rotates at them. So a long word adds no more distance than a
#   short one.
#
# The learned tables are random here, and the other parameters are set by hand. Training would
# change both.

# %%
line = "the cat ate a tiny bird and felt no remorse whatsoever for days on end"
starts = [t for t in range(len(line)) if t == 0 or line[t - 1] == " "]
is_first = torch.tensor([t in starts for t in range(len(line))])
d = 32  # the size of the only head

@torch.no_grad()
def effect(name, is_first):
    """Returns what the method adds to the logit of query i and key j, (T, T), minus its mean over
    all keys of the same kind. It is nan where the key follows the query. is_first (T,) is True
    where a word begins."""
    torch.manual_seed(1)
    T = len(is_first)
    pe = PES[name](GPTConfig(block_size=T, n_head=1, n_embd=d, base=100.0, t5_buckets=16,
                             expe_theta=1 / 32, sinusoidal_scale=False))
    for key, p in pe.named_parameters():
        if key not in ("W", "b", "delta"):
            p.normal_(0, 0.7)
    x = torch.zeros(1, T, d)  # the input of the layer, which only FoX and CARoPE read
    if hasattr(pe, "W"):
        x[..., 0] = torch.where(is_first, 0.0, 4.0)
        pe.W[0] = 1.0

    # the content: q.k / sqrt(d) is 10 larger for the first letters than for the others
    a = torch.randn(d)
    match = torch.where(is_first, 5.0, -5.0)[:, None] * a / a.square().sum() * d**0.5  # (T, d)
    q = a.expand(1, T, d)
    k = torch.randn(d) + match[None]
    plain_logits = scaled_dot_products(q, k, d)  # those without the method

    # the hooks, in the order in which a layer calls them
    pos = torch.arange(T)
    q, k = (pe.inputs(pe.embed(y, pos), pos)[:, None] for y in (q, k))  # (1, 1, T, d)
    encoded_q, k = pe.encode_qk(q, k, x, pe.per_position(x, pos), {})
    logits = scaled_dot_products(encoded_q, k, d)
    bias = pe.logit_bias(q, logits, pos[:, None], pos, pe.per_key(x, k, k, {}))

    added = (logits + bias - plain_logits)[0, 0].masked_fill(pos > pos[:, None], math.nan)
    for kind in (is_first, ~is_first):
        added[:, kind] -= added[:, kind].nanmean()
    return added

methods = {  # what the effect depends on: the methods
    "by i and j": ("learned", "sinusoidal", "expe", "exqpe"),
    "by i – j only": ("rope", "pope", "relative", "t5", "alibi"),
    "by what lies between": ("carope", "fox", "cope", "cope_mlp", "cope_alibi"),
}
figure, axes = plt.subplots(3, 5, figsize=(11, 7.3), sharex=True, sharey=True, layout="constrained")
axes[0, 4].set_visible(False)
for row, (what, names) in zip(axes, methods.items()):
    row[0].set_ylabel(what)
    for ax, name in zip(row, names):
        added = effect(name, is_first)
        most = added.nan_to_num().abs().max()
        ax.imshow(added, "RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        ax.set(title=name, facecolor="0.9", yticks=starts, yticklabels=[])
        ax.set_xticks(starts, [line[t] for t in starts], fontsize=7)
figure.supxlabel("key j, the first letters of words marked; query i downwards", fontsize=10)
figure.savefig("out/walk_methods.png", dpi=120)

# %% [markdown]
# ## 3. What happens beyond the trained length
#
# Five small models learn to predict the next byte of `model.py` itself, in pieces of 64 bytes.
# Then they read pieces of 512 bytes. The picture shows the loss at each position.
#
# Beyond 64, RoPE gets worse, because the pairs of entries that rotate slowly reach angles that no
# training example contained, and nothing has taught the model what logits at such angles mean. PoPE
# meets new angles as well. ALiBi does not suffer, because it gives distant keys almost no weight.
# CoPE's positions are counts that end at npos - 1, so it meets no new ones. These models are tiny,
# have one seed each and read the file that they were trained on, so look at what happens at the
# dashed line rather than at the order of the curves.

# %%
text = torch.tensor(list(open(model.__file__, "rb").read()))

def train(name, steps=300):
    """Returns a model of two layers after training on pieces of 64 bytes."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(pe=name, vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64,
                        cope_npos=32))
    optimizer = gpt.configure_optimizers(0.1, 3e-3, (0.9, 0.99), "cpu")
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (16, 1))
        piece = text[starts + torch.arange(65)]  # (16, 65)
        gpt(piece[:, :-1], piece[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        gpt.clamp_parameters()  # keeps pope's phase within its bounds
    return gpt.eval()

@torch.no_grad()
def loss_by_position(gpt, length=512):
    """Returns the loss in nats at each position (length,), averaged over 64 pieces of the text."""
    starts = torch.linspace(0, len(text) - length - 1, 64).long()[:, None]
    piece = text[starts + torch.arange(length + 1)]
    _, losses = gpt(piece[:, :-1], piece[:, 1:], reduction="none")
    return losses.mean(0)

figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name in ("nope", "rope", "pope", "alibi", "cope"):
    losses = loss_by_position(train(name))
    print(f"{name:6} loss at positions 32-63: {losses[32:64].mean():.2f}, at 448-511: "
          f"{losses[448:].mean():.2f} nats")
    centers = torch.arange(16, 512, 32)
    ax.plot(centers, losses.unflatten(0, (16, 32)).mean(1), label=name)  # means of 32 positions
ax.axvline(64, color="gray", linestyle="--")  # the trained length
ax.set(xlabel="position", ylabel="loss in nats")
ax.legend()
figure.savefig("out/walk_length.png", dpi=150)

# %% [markdown]
# ## 4. CoPE counts words
#
# CoPE's position of key j, as query i sees it, is the sum of the gates from j to i, and the gate of
# key j is sigmoid(q_i.k_j / sqrt(d)). Here we choose the logits so that the gate is 1 at spaces and
# 0 elsewhere. The position then says how many words back a letter is. No encoding that sees only i
# and j can do this, because words differ in length.

# %%
sentence = "no encoding of i and j can count words"
cope = PES["cope"](GPTConfig(n_head=1, n_embd=d))  # its gates are sigmoids of the logits
is_space = torch.tensor([letter == " " for letter in sentence])
pos = torch.arange(len(sentence))
logits = torch.where(is_space, 20.0, -20.0).expand(1, 1, len(sentence), -1)  # what q.k could be
gates = cope.gates(None, logits, pos[:, None], pos, None)  # (1, 1, T, T)
counts = cope.positions(gates)[0, 0, -1]  # as the last letter sees it
print(sentence)
print("".join(f"{count:.0f}" for count in counts.tolist()))

# %% [markdown]
# ## 5. A method of your own in six lines
#
# A method is a class that overrides the hooks it needs, and has a name in the table PES. This one
# is ALiBi with a learned slope per head. Like any other method, it can be trained, can generate
# with a cache, and can read longer texts.

# %%
class Slope(PE):
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.m = nn.Parameter(torch.zeros(self.H, 1, 1))

    def logit_bias(self, q, logits, i, j, per_key):
        return self.m * (j - i).to(at_least_float32(q))  # bfloat16 would round large distances

PES["slope"] = Slope
gpt = train("slope")
print(f"slope: {loss_by_position(gpt)[448:].mean():.2f} nats at positions 448-511, with slopes",
      gpt.h[0].attn.pes[0].m.flatten().tolist(), "in layer 1")
