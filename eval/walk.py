# %% [markdown]
# # A walk through positional encodings
#
# This page is a script. `python -m eval.walk` runs it in about two minutes on a laptop and saves
# its pictures in `out/`. It needs matplotlib and the packages in `requirements.txt`. An editor that
# supports cells (such as VS Code) runs it piece by piece, and `jupytext --to notebook eval/walk.py`
# turns it into a notebook.

# %%
import math
import os
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn as nn

sys.path += [".", ".."]  # where model.py is, from the repository's root or from eval/

import model
from eval import attention, curves
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
# are the scaled products of q and k. Here we call these hooks by hand, for one head and one short
# text.
#
# To see only what a method does, we leave out the content. Every query is the same vector, and so
# is every key, so without a method all logits would be equal. The picture shows what the method
# adds to each of them, minus the mean. Each line of a panel is a letter that looks back, the query,
# and each column is a letter that it sees, the key. Along a line, the redder a key is, the more of
# the query's attention it gets.
#
# The picture has three rows, because there are three answers to what this effect depends on:
#
# - In the top row, it depends on where query and key are in the text. `expe` writes the position
#   as a number into some entries of the vectors that q and k are made of. Here the head reads only
#   the first of them. In `exqpe`, this one grows only at every fifth letter, because five entries
#   take turns.
# - In the middle row, it depends only on the distance, so a panel has one colour along a diagonal.
#   `rope` and `pope` add up waves. In `rope`, the content of q and k decides where a wave begins,
#   whereas in `pope` all waves have a crest at distance 0, until training moves it.
# - In the bottom row, it depends on the letters in between, so a long word may be no farther away
#   than a short one. Which letters matter is learned. Here `carope` and all kinds of `cope` heed
#   the first letters of words, and `fox` heeds every "a".
#
# The learned vectors and tables are random here, and the other parameters are set by hand. Training
# would change both.

# %%
line = "a giraffe ate a bun"
begins_word = torch.tensor([t == 0 or line[t - 1] == " " for t in range(len(line))])
is_a = torch.tensor([letter == "a" for letter in line])
d = 32  # the size of the only head

@torch.no_grad()
def effect(name, heeded):
    """Returns what the method adds to the logit of query i and key j, (T, T), minus its mean. It is
    nan where the key follows the query. heeded (T,) is True for the letters that matter to carope,
    fox and all kinds of cope."""
    torch.manual_seed(6)  # chosen so that no two panels look alike
    T = len(heeded)
    n_head = 4 if name == "alibi" else 1  # the first of four heads has the slope 1/4
    # most of these options make the steps large, so that so short a text shows them
    pe = PES[name](GPTConfig(
        n_head=n_head, n_embd=d, block_size=T, base=100.0, sinusoidal_scale=False, t5_buckets=8,
        t5_max_distance=16, cope_gates="values", cope_npos=8, cope_scale_z=True,
        cope_slopes="geometric", cope_m0=0.8, expe_l=5, expe_theta=0.25, expe_theta2=1.25))
    std = 0.5 if name == "learned" else 1.0  # learned vectors act twice, on q and on k
    for key, p in pe.named_parameters():
        if key == "W":
            p[0] = 1.0  # carope and fox read the first entry of x
        elif key not in ("b", "delta"):
            p.normal_(0, std)

    # the content: the layer's input x, which only carope and fox read, and q, k and v
    x = torch.zeros(1, T, d)
    x[..., 0] = torch.where(heeded, -1.0, 6.0)
    a, b = 1.5 * torch.randn(2, d)
    a[[0, d // 2]] = 0.0  # the pair that carope rotates by the same angle at every letter
    q = a.expand(1, T, d)
    k = b.expand(1, T, d)
    gate_logits = torch.where(heeded, 20.0, -20.0)  # which in cope are q.v / sqrt(d) here
    v = gate_logits[:, None] * a / a.square().sum() * d**0.5
    plain_logits = scaled_dot_products(q, k, d)  # those without the method

    # the hooks, in the order in which a layer calls them
    pos = torch.arange(T)
    q = pe.inputs(pe.embed(q, pos), pos)[:, None]  # (1, 1, T, d)
    k = pe.inputs(pe.embed(k, pos), pos)[:, None]
    if name in ("expe", "exqpe"):
        q = q * (torch.arange(d) == 0)  # the head reads only the first entry
    encoded_q, k = pe.encode_qk(q, k, x, pe.per_position(x, pos), {})
    logits = scaled_dot_products(encoded_q, k, d)
    per_key = pe.per_key(x, k, v[None, None], {})
    bias = pe.logit_bias(q, logits, pos[:, None], pos, per_key)

    added = (logits + bias - plain_logits)[0, 0].masked_fill(pos > pos[:, None], math.nan)
    return added - added.nanmean()

rows = {  # what the effect depends on: {method: what its panel shows}
    "The effect depends on where query and key are": {
        "learned": "a vector\nper position", "sinusoidal": "waves over\npositions",
        "expe": "the position\nas a number", "exqpe": "this number\nin big steps"},
    "It depends only on their distance, so each diagonal has one colour": {
        "rope": "waves that\ncontent shifts", "pope": "waves with a\ncommon crest",
        "relative": "a vector\nper distance", "t5": "a number per\ndistance range",
        "alibi": "fades with\ndistance"},
    "It depends on the letters between them: those that begin words count (in fox, every “a”)": {
        "carope": "rotates at\neach word", "fox": "fades at\neach “a”",
        "cope": "a vector per\nword count", "cope_mlp": "a curve over\nword counts",
        "cope_alibi": "fades with\nword count"},
}
figure = plt.figure(figsize=(9, 6.6), layout="constrained")
for part, (what, methods) in zip(figure.subfigures(3, 1), rows.items()):
    part.suptitle(what, x=0.01, ha="left", fontsize=11, weight="bold")
    axes = part.subplots(1, 5)
    for ax, (name, shows) in zip(axes, methods.items()):
        heeded = is_a if name == "fox" else begins_word
        image = ax.imshow(effect(name, heeded), "RdBu_r", vmin=-3, vmax=3)
        corner = dict(ha="right", va="top", transform=ax.transAxes)  # above the diagonal
        ax.text(1, 1, name, weight="bold", fontsize=10, **corner)
        ax.text(1, 0.88, shows, fontsize=9, **corner)
        ax.set_xticks(range(len(line)), line, fontsize=7.5, family="monospace")
        ax.set_yticks([])
        ax.tick_params(length=0, pad=1)
        ax.spines[:].set_visible(False)
    axes[0].set_yticks(range(len(line)), line, fontsize=7.5, family="monospace")
    for ax in axes[len(methods):]:  # the first row has room for a legend
        ax.axis("off")
        ax.text(0, 1, "Each line is a letter that\nlooks back (the query),\n"
                "each column a letter that\nit sees (the key).", fontsize=9, va="top")
        bar = part.colorbar(image, cax=ax.inset_axes([0, 0.3, 1, 0.07]), orientation="horizontal",
                            ticks=[-3, 0, 3])
        bar.set_label("added to the logit\n(red: attends more)", fontsize=9)
figure.savefig("out/walk_methods.png", dpi=150)

# %% [markdown]
# ## 3. What happens beyond the trained length
#
# Five small models learn to predict the next byte of `model.py` itself, in pieces of 64 bytes.
# Then they read pieces of 512 bytes. The picture shows the loss at each position, and the dashed
# line is where training ended.

# %%
text = torch.tensor(list(open(model.__file__, "rb").read()))
starts = torch.linspace(0, len(text) - 513, 64).long()[:, None]
long_pieces = text[starts + torch.arange(513)]  # (64, 513), spread evenly over the text

def train(name, steps=300):
    """Returns a model of two layers after training on pieces of 64 bytes."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(pe=name, vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64,
                        cope_npos=32))
    optimizer = gpt.configure_optimizers(0.1, 3e-3, (0.9, 0.99), "cpu")
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (16, 1))
        pieces = text[starts + torch.arange(65)]  # (16, 65)
        _, loss = gpt(pieces[:, :-1], pieces[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gpt.clamp_parameters()  # keeps pope's phase within its bounds
    return gpt.eval()

@torch.no_grad()
def loss_by_position(gpt):
    """Returns the loss in nats at each of 512 positions, averaged over the long pieces."""
    _, losses = gpt(long_pieces[:, :-1], long_pieces[:, 1:], reduction="none")
    return losses.mean(0)

models = {name: train(name) for name in ("nope", "rope", "pope", "alibi", "cope")}
figure, ax = plt.subplots(figsize=(8, 3.5), layout="constrained")
for name, gpt in models.items():
    losses = loss_by_position(gpt)
    print(f"{name:6} loss at positions 32-63: {losses[32:64].mean():.2f}, at 64-95: "
          f"{losses[64:96].mean():.2f}, at 448-511: {losses[448:].mean():.2f} nats")
    centers = torch.arange(16, 512, 32)
    means = losses.unflatten(0, (16, 32)).mean(1)  # of 32 positions each
    ax.plot(centers, means, color=curves.COLORS.get(name, curves.GREY), label=name)
ax.set(xlabel="position (each point is a mean over 32)", ylabel="loss in nats")
curves.decorate(ax, trained=[64])
curves.name_curves(ax)
figure.savefig("out/walk_length.png", dpi=150)

# %% [markdown]
# Hardly anything happens right at the dashed line, because the distances there are only a little
# longer than in training. Farther on, `rope` gets much worse. Its pairs of entries that rotate
# slowly reach angles that no training example contained, and nothing has taught the model what
# logits at such angles mean. `pope` meets new angles as well, and gets worse too.
#
# `alibi` and `cope` stay nearly level. In `cope`, positions are counts that end at npos - 1, so it
# meets no new ones. In `alibi`, attention fades with distance, but not equally fast in all heads.
# The next cell measures how much weight the last token of each piece puts on tokens more than 64
# back. It is almost nothing in two of the four heads. The other two, whose slopes are only 1/64 and
# 1/256, put more than a third and about three quarters of their weight there.
#
# These models are tiny, have one seed each and read the file that they were trained on, so compare
# each curve with its own height before the dashed line. Which curve is the lowest there depends on
# the seed, and on every change of `model.py`.

# %%
def weight_far_back(attn, x, q, k, v, unencoded_q, i, j, per_key):
    """Returns the fraction of its weight that the last query puts on keys more than 64 tokens back,
    (H,). Attention returns it if the values of these keys are 1 and all others are 0."""
    is_far = (i[-1] - j > 64).float()
    values = is_far[:, None].expand(*k.shape[:3], 1)  # (B, H, T, 1)
    last = slice(-1, None)
    y = attn.textbook(q[:, :, last], k, values, unencoded_q[:, :, last], i[last], j, per_key)
    return y.mean((0, 2, 3))  # of y (B, H, 1, 1)

far = attention.measure(models["alibi"], long_pieces[:, :-1], weight_far_back)
for layer, fractions in far.items():
    print(f"alibi, layer {layer + 1}: weight beyond 64 tokens, per head:",
          *[f"{fraction:.0%}" for fraction in fractions.tolist()])

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
      *[f"{m:.2f}" for m in gpt.h[0].attn.pes[0].m.flatten().tolist()], "in layer 1")
