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
# ## 2. One query and one key under five methods
#
# Now let all tokens have the same query and the same key, so that content says nothing and any
# difference between two logits comes from the encoding. A method acts through a few hooks:
# `rotate` changes q and k, and `logit_bias` adds something to the logits. Here we call them by
# hand.
#
# In the picture, each row is a query and each column is a key. `nope` is flat. RoPE and PoPE
# oscillate with the distance i - j, so each diagonal has one colour. ALiBi falls steadily. CoPE
# falls too, but at a rate that the query sets, because its distance is a sum of gates, which say
# how much the query counts each key. All keys are equal here, so each counts the same. Section 4
# has keys that differ.

# %%
T, H, d = 64, 4, 32
pos = torch.arange(T)

@torch.no_grad()
def logits_of(name):
    """Returns the logits (T, T) of the first head if all tokens have the same query and key."""
    torch.manual_seed(4)
    pe = PES[name](GPTConfig(n_head=H, n_embd=H * d, block_size=T, cope_npos=16))
    q, k = torch.randn(2, 1, H, 1, d).expand(-1, -1, -1, T, -1)  # (1, H, T, d) each
    if name == "cope":
        # e is learned and starts at zero. With this e, q.e[p] is -p / 4 in the first head
        u = q[0, 0, 0]
        pe.e.copy_(-torch.arange(16) / 4 * (u / u.square().sum())[:, None])
    x = torch.zeros(1, T, H * d)  # the input of the layer, which none of these five reads
    rotated_q, rotated_k = pe.rotate(q, k, x, pe.angles(x, pos), {})
    logits = scaled_dot_products(rotated_q, rotated_k, d)
    bias = pe.logit_bias(q, logits, pos[:, None], pos, pe.per_key(x, rotated_k, k, {}))
    return (logits + bias)[0, 0].masked_fill(pos > pos[:, None], math.nan)

figure, axes = plt.subplots(1, 5, figsize=(12, 3.2), layout="constrained")
for ax, name in zip(axes, ("nope", "rope", "pope", "alibi", "cope")):
    logits = logits_of(name)
    ax.imshow(logits - logits[-1, -1], cmap="RdBu_r", vmin=-3, vmax=3)
    ax.set(title=name, xlabel="key j")
axes[0].set_ylabel("query i")
figure.suptitle("the logit of one query and one key, relative to distance 0 (blue: lower)")
figure.savefig("out/walk_logits.png", dpi=150)

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
    gpt = GPT(GPTConfig(pe=name, vocab_size=256, block_size=64, n_layer=2, n_head=H, n_embd=64,
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
    logits, _ = gpt(piece[:, :-1], piece[:, 1:])
    losses = nn.functional.cross_entropy(logits.mT, piece[:, 1:], reduction="none")
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
line = "no encoding of i and j can count words"
cope = PES["cope"](GPTConfig(n_head=1, n_embd=d))  # its gates are sigmoids of the logits
is_space = torch.tensor([letter == " " for letter in line])
pos = torch.arange(len(line))
logits = torch.where(is_space, 20.0, -20.0).expand(1, 1, len(line), -1)  # what q.k could be
gates = cope.gates(None, logits, pos[:, None], pos, None)  # (1, 1, T, T)
counts = cope.positions(gates)[0, 0, -1]  # as the last letter sees it
print(line)
print("".join(f"{count:.0f}" for count in counts.tolist()))

# %% [markdown]
# ## 5. A method of your own in six lines
#
# A method is a class that overrides the hooks it needs, and has a name in the table PES. This one
# is ALiBi with a learned slope per head. Like any other method, it can be trained, generate with a
# cache and read longer texts.

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
