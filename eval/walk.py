# %% [markdown]
r"""
# A first lesson in positional encodings

This lesson is for readers who know attention, but not yet how a model learns the order of its
input. [walk.md](walk.md) is the lesson with all that its code prints and draws, so it can be read
without running anything. To try changes, edit `eval/walk.py` and run `python -m eval.walk` (after
`pip install matplotlib`), which takes about a minute and writes its pictures to `out/`.
"""

# %%
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path += [".", ".."]  # where model.py is, from the repository's root or from eval/

import model
from eval import walk_parts as parts  # small models, and pictures
from model import GPT, PE, PES, GPTConfig, RoPE, rotate_pairs, scaled_dot_products, split_heads

parts.begin(__doc__)
torch.set_num_threads(1)  # these models are so small that more threads would wait for each other

# %% [markdown]
"""
## 1. Attention has no order

Attention compares a query with every key, and adds up the values of those that fit. A sum does not
depend on the order of its terms. Here two models of one layer learn to answer "who bites?" from the
same twelve examples. One has no encoding (`nope`), and the other one has RoPE.
"""

# %%
words = ["cat", "dog", "fox", "man", "bites", "who?"]
examples = torch.tensor([[a, 4, b, 5] for a in range(4) for b in range(4) if a != b])

parts.heading("1. Attention has no order: two models answer two questions")  # in a terminal
for name in ("nope", "rope"):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(pe=name, vocab_size=len(words), n_layer=1, n_head=2, n_embd=32))
    optimizer = gpt.configure_optimizers(0.0, 1e-2, (0.9, 0.99), "cpu")
    for _ in range(100):
        logits, _ = gpt(examples)  # (12, 1, V), of the word after "who?"
        F.cross_entropy(logits[:, 0], examples[:, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for question in ("dog bites man who?", "man bites dog who?"):
        logits, _ = gpt(torch.tensor([[words.index(word) for word in question.split()]]))
        answer = logits[0, 0].softmax(-1)
        print(f"{name}:  {question}  dog {answer[1]:4.0%}  man {answer[3]:4.0%}")

# %% [markdown]
"""
To `nope`, both questions are the same set of words, so it can only guess, however long it is
trained. (A model with several layers can learn something about order without any encoding, because
the causal mask lets each token see a different number of tokens.)

## 2. Where a position can enter

A method acts through hooks, which are functions that the model calls at fixed places. Four of them
change something, and each method uses one or two of these:
"""

# %%
parts.heading("2. Where a position can enter: the hooks, and the methods that act through them")
for hook in ("embed", "inputs", "encode_qk", "logit_bias"):
    print(f"{hook:11}", *[name for name, cls in PES.items() if model.overrides(cls, hook)])

# %% [markdown]
"""
`embed` changes the token embeddings, `inputs` the vectors from which q and k are computed,
`encode_qk` q and k themselves, and `logit_bias` adds a number to each logit, which is q.k / √d. Two
more hooks prepare this. `per_position` computes what depends only on positions, such as angles, and
`per_key` what `logit_bias` has to know about each key.

Here a layer of `cope+rope` reads the five letters of "hello", with three heads of width 8. We call
its hooks by hand, in the order in which the model does, and print the shape of each result. In the
end, we check that the layer itself returns the same.
"""

# %%
gpt = GPT(GPTConfig(pe="cope+rope", vocab_size=256, n_layer=1, n_head=3, n_embd=24, cope_npos=6))
attn = gpt.h[0].attn
cope, rope = attn.pes
nn.init.normal_(cope.e)  # CoPE's table starts at zero, and would add nothing
pos = torch.arange(5)

def step(where, result, letters, what):
    """Prints a step and returns its result."""
    print(f"{where:18} {str(tuple(result.shape)):14} {letters:11} {what}")
    return result

parts.heading("   The steps of a layer of cope+rope, with the shapes of their results")
with torch.no_grad():
    x = gpt.wte(torch.tensor([list(b"hello")]))  # a byte is a token
    angles = step("PER_POSITION rope", rope.per_position(x, pos), "2, T, d/2", "cosines and sines")
    x = step("EMBED", rope.embed(cope.embed(x, pos), pos), "B, T, C", "x (both leave it)")
    x = gpt.h[0].ln_1(x)
    x_qk = step("INPUTS", rope.inputs(cope.inputs(x, pos), pos), "B, T, C", "x (both leave it)")
    q, k = (split_heads(y, 3) for y in attn.c_qk(x_qk).chunk(2, -1))
    v = split_heads(attn.c_v(x), 3)
    step("c_qk, c_v", q, "B, H, T, d", "q, and also k and v")
    rotated_q, k = rope.encode_qk(q, k, x, angles, {})
    step("ENCODE_QK    rope", rotated_q, "B, H, T, d", "q rotated, and also k")
    keys = step("PER_KEY      cope", cope.per_key(x, k, v, {}), "B, H, S, d", "the keys to count")
    logits = step("q.k / √d", scaled_dot_products(rotated_q, k, 8), "B, H, T, S", "logits")
    bias = step("LOGIT_BIAS   cope", cope.logit_bias(q, logits, pos[:, None], pos, keys),
                "B, H, T, S", "a number for each query and key")
    mask = torch.full((5, 5), -torch.inf).triu(1)
    weights = step("softmax", (logits + bias + mask).softmax(-1), "B, H, T, S", "weights")
    y = step("weights times v", weights @ v, "B, H, T, d", "a sum of values for each query")
    y = step("c_proj", attn.c_proj(y.transpose(1, 2).flatten(2)), "B, T, C", "what is added to x")
    assert torch.allclose(y, attn(x, pos, pos, {"cope": None, "rope": angles}), atol=1e-6)

# %% [markdown]
"""
B counts sequences, T new tokens, S keys, and H heads. C is the width of x, and d that of a head.

## 3. Three answers

Once it has entered, what does the effect of a position depend on? There are three answers, and the
picture has a row for each. It shows what each method adds to the logits of "a giraffe ate a bun".
All queries are the same vector here, and so are all keys, so without a method all logits would be
equal. Parameters are random or set by hand, because nothing is trained.
"""

# %%
parts.draw_methods()

# %% [markdown]
"""
- **Where query and key are.** `learned` and `sinusoidal` add a vector to each token embedding.
  `expe` writes the position as a number into some entries of the vectors from which q and k are
  computed. Here the head reads only the first of these entries. In `exqpe` it grows only at every
  fifth letter, because five entries take turns.
- **Their distance.** Nothing changes if both move along, so a panel has one colour along each
  diagonal. `alibi` adds -m (i - j), with a fixed slope m. `relative` has a learned vector for each
  distance i - j, which is multiplied with q, and `t5` a learned number for each range of distances.
  `rope` and `pope` add up waves, to which the next section comes.
- **The letters between them.** A long word need not be farther away than a short one. In `fox` each
  token has a forget gate, a number between 0 and 1, and the logarithms of all gates between key and
  query are added to the logit. All kinds of `cope` count letters, to which section 7 comes. Which
  letters matter is learned.

A panel's mean is subtracted, because softmax heeds only differences.

## 4. Rotation: what content sets, and what position sets

RoPE (rotary), PoPE (polar) and CARoPE (context-aware rotary) rotate pairs of entries of q and k. A
pair is a point in the plane. The picture shows it for two keys with different contents (dark and
pale), at the positions 0 to 6, of which 0 has the thick line. The panels below have the product of
each key with the same query, over the distance.
"""

# %%
@torch.no_grad()
def pair(name, content, pos):
    """Returns the pair of a key with this content, at the positions pos: (T, 2). RoPE and PoPE
    rotate it by 1/3 radian, or 19 degrees, per position."""
    d = 2 if name == "pope" else 4  # PoPE makes a pair of each entry, and thus uses content[0] only
    pe = PES[name](GPTConfig(n_head=1, n_embd=d, base=9.0))
    x = torch.ones(1, len(pos), d)  # the tokens, which only CARoPE looks at
    if name == "carope":
        pe.W[0] = 3.0  # most tokens rotate little,
        x[:, 2::3] = -1.0  # and every third one much
    k = torch.zeros(1, 1, len(pos), d)
    k[..., 1::2] = torch.tensor(content)[: d // 2]  # entries 1 and 3 are a pair
    _, k = pe.encode_qk(k, k, x, pe.per_position(x, pos), {})
    return k[0, 0, :, [1, 3]]

contents = [(0.9, 0.25), (0.3, 0.6)]  # of the two keys
points, products = {}, {}
for name in ("rope", "pope", "carope"):
    query = pair(name, (0.9, 0.0), torch.arange(25))[-1]  # at position 24
    keys = [pair(name, content, torch.arange(25)) for content in contents]
    points[name] = [key[:7] for key in keys]
    products[name] = [(key @ query).flip(0) for key in keys]  # the nearest key first
parts.draw_pairs(points, products)

parts.heading("4. With RoPE, only the distance counts: the product of a query and a key")
for i, j in ((5, 2), (1005, 1002), (5, 1)):
    query = pair("rope", (0.9, 0.0), torch.tensor([i]))
    key = pair("rope", contents[0], torch.tensor([j]))
    print(f"query at {i:4}, key at {j:4}: {(query * key).sum():.3f}")

# %% [markdown]
"""
- **RoPE:** content sets the length and the angle at position 0. From there, each position rotates
  the pair by the same angle θ. Over the distance, the product is a wave, and content shifts it.
- **PoPE:** content sets only the length, which is the softplus of one entry, and position sets the
  whole angle. So content can make a wave higher, but not shift it. All waves have a crest at
  distance 0, until training moves the crests (by the parameter δ, which no content enters).
- **CARoPE:** like RoPE, but each token decides how far it rotates itself and all tokens after it.
  So the product depends on which tokens lie between query and key.

A logit is a sum of such products, one for each pair, and each pair has its own θ.

## 5. Why RoPE fails beyond the trained length

A small RoPE model learns from segments of 64 bytes, and then reads 512. Its heads have eight pairs.
Below, each dial is the circle of one pair. Within 64 bytes, pairs 0 to 2 make at least one full
rotation, so they have met every angle. The others have met only the grey part of their circles. In
512 bytes, they also reach the coloured angles, for which no training example has taught the model
what a logit means.
"""

# %%
scalings = {name: dict(rope_scaling=name, rope_factor=8.0) for name in ("linear", "ntk", "yarn")}
parts.draw_dials({"rope": {}, **scalings})

# %% [markdown]
"""
The other rows are remedies that scale the frequencies of a trained model. `linear` divides them all
by eight. Then no angle is new, but neighbours look almost alike. `ntk` divides that of the last
pair by eight, leaves that of the first one, and those in between change by degrees. `yarn` divides
a frequency by eight if the pair makes at most one rotation within the trained length, and leaves it
if the pair makes 32 or more. Here even pair 0 makes only 10, so `yarn` changes all of them. It also
makes all logits larger, here by the factor 1.46.

Are the new angles to blame, or only the length of the text? To find out, we let some pairs of the
trained model stop: at distances above 63, they stay at the angle of 63. Then we look at the loss
(in nats, so lower is better) at each position of texts that were not in training.
"""

# %%
class Stopped(RoPE):
    pairs = []  # those that stop

    def logit_bias(self, q, logits, i, j, k):
        """Replaces the part of the logits that comes from the pairs that stop. k is rotated
        already, and q is not."""
        def rotated(x, pos):
            return rotate_pairs(x, *self.per_position(x, pos))

        mine = torch.zeros(2, self.d // 2)
        mine[:, self.pairs] = 1.0
        mine = mine.flatten()  # entries c and c + d/2 are a pair
        now = scaled_dot_products(rotated(q, i[:, 0]) * mine, k, self.d)
        unrotated_k = rotated(k, -j)  # turned back, so q at 63 is at the distance 63
        at_63 = scaled_dot_products(rotated(q, torch.tensor([63])) * mine, unrotated_k, self.d)
        return torch.where(i - j > 63, at_63 - now, 0.0)

PES["stopped"] = Stopped
gpt = parts.train("rope")
stopped = {"rope": parts.losses_of(gpt)}
for speed, pairs in (("fast", [0, 1, 2]), ("slow", [3, 4, 5, 6, 7])):
    Stopped.pairs = pairs
    stopped[f"{speed} pairs stop"] = parts.losses_of(parts.changed(gpt, pe="stopped"))
scaled = {"rope": stopped["rope"]}
for name, options in scalings.items():
    scaled[name] = parts.losses_of(parts.changed(gpt, **options))
parts.draw_losses({"Some pairs stop at the angle of 63": stopped, "All pairs rotate on": scaled})

# %% [markdown]
"""
The new angles are to blame. If the slow pairs stop, the loss stays near that of the first 64 bytes,
although the text is as long as before. If the fast pairs stop, it rises as `rope` does. (We tried
five seeds. In the last 64 bytes, the loss was 0.6 to 1.1 nats higher than in the first 64. It was
0.5 to 1.1 higher if the fast pairs stopped, but only 0.0 to 0.1 if the slow pairs did.)

The right panel shows what the remedies cost. `linear` and `yarn` do not get worse with length, but
they are bad from the start, because this model was trained with other angles for each distance.
`ntk` puts off the rise until more of its pairs meet new angles. Therefore a model is often trained
a little more after scaling.

## 6. The loss beyond the trained length

The models above are too small for comparing methods. The picture shows the larger ones of
[README.md](../README.md), which were trained on 128 bytes of Python code at a time. They read texts
of 128 bytes (1x) to 1024 bytes (8x). Each curve is a mean over three to five seeds, and its band
goes from the lowest to the highest.
"""

# %%
methods = ["rope", "carope", "pope", "cope", "fox", "alibi"]
parts.draw_lengths(methods, in_windows="rope")

# %% [markdown]
"""
At the trained length, ALiBi is behind, FoX a little, and the others are about equal. Beyond it, all
that rotate get worse. PoPE and CARoPE meet new angles too, but are harmed less than RoPE. CoPE's
counts end at npos - 1, so it meets no new positions. The biases of FoX and ALiBi only continue to
fall.

The dashed curve belongs to the same RoPE models on the same bytes, but here they read windows of
128 bytes that overlap by half, so that each byte sees 65 to 128 bytes and no distance is new. This
project makes two comparisons:

- **With the loss at the trained length** (B - A): how much does the loss rise when a model reads
  longer texts than in training?
- **With the last 128 bytes** (B - C): how much higher is the loss of the same model on the same
  bytes if it sees all of the text, rather than only the last 128 bytes? Above zero, distant text
  harms the predictions. Below zero, it helps.
"""

# %%
parts.heading("6. What long texts cost: both comparisons, in nats per byte")
parts.print_costs(methods)

# %% [markdown]
"""
The second number is a little larger than the first, because at 1x the first bytes of each text are
predicted from very few others.

None of these models gains from distant text. They have not learned to find anything there (with
[ten times the training](README.md#ten-times-the-steps), ALiBi and FoX do). Others of the same size
were trained longer, on 128 bytes at a time of a text in which spans come again
([data/echo.py](../data/echo.py)). A model that finds the earlier copy of a span predicts the span
nearly for free, and all five methods have learned that. The upper pictures show what they do with
1024 bytes of ordinary code (left), and with a span whose copy stands in 1024 bytes (right):

![The loss of five methods over length and over the distance of a copy](echoes.png)

ALiBi and FoX gain from distant text, and the right picture shows why. Where a curve is as high as
without a copy, the method has not found the copy. RoPE finds hardly any, not even 64 bytes back. It
rotates what content adds to a logit, and the angles of distant keys are new, so these keys may draw
attention away from near copies, too. ALiBi and FoX only subtract something from a logit, so their
heads can still find what looks alike. CoPE's positions end at npos - 1. It finds copies in part,
and best those at the start of the text, which it sees as in training. The lower pictures show the
same models after further training on 1024 bytes. Now all five gain from distant text ([the
numbers](README.md#what-distant-text-is-worth)).

## 7. CoPE counts

In CoPE (contextual), a position is a count. The gate sigmoid(q_i.k_j / √d) says how much query i
counts key j, and the position p of a key is the sum of the gates from this key to the query. A
learned table e gives the bias: z = q_i.e has an entry for each integer, and between two integers
the bias is interpolated. Here is what query 5 sees, with gates that are chosen by hand,
and z = (0, 2, 1, 3).
"""

# %%
@torch.no_grad()
def row_of_last_query(gates, z):
    """Returns the gates, positions and biases of all keys, as the last query sees them, (3, T)."""
    T = len(gates)
    pos = torch.arange(T)
    cope = PES["cope"](GPTConfig(n_head=1, n_embd=1, cope_npos=len(z)))
    cope.e[:] = torch.tensor(z)
    q = torch.ones(1, 1, T, 1)  # so q.e is e
    logits = torch.tensor(gates).logit().expand(1, 1, T, T)
    gates = cope.gates(q, logits, pos[:, None], pos, None)  # (1, 1, T, T)
    p = cope.positions(gates)
    return torch.stack((gates, p, cope.bias_at(p, q)))[:, 0, 0, -1]

parts.heading("7. CoPE counts: six keys, as query 5 sees them")
rows = row_of_last_query([0.5, 0.75, 0.75, 0.5, 0.5, 0.75], z=[0.0, 2, 1, 3])
print("key  ", *[f"{key:5}" for key in range(6)])
for name, values in zip(("gate", "p", "bias"), rows):
    print(f"{name:5}", *[f"{value:5.3g}" for value in values])

# %% [markdown]
"""
Read p from the right. Key 2, for example, has p = 0.75 + 0.5 + 0.5 + 0.75 = 2.5. This lies halfway
between 2 and 3, so its bias is halfway between z[2] = 1 and z[3] = 3. From p = 3 on, all keys have
the bias z[3], the last one of the table. ([kernels.py](../kernels.py) computes the gradients of
this row.)

Now let the gate be 1 at spaces and 0 elsewhere. Then p says how many words back a letter is. With
z = (0, 9, 0, 0, ..), the head attends to the word before (^), however long it is. No method that
sees only i and j can do this, because words differ in length.
"""

# %%
sentence = "no encoding of i and j can count words"
_, p, bias = row_of_last_query([float(letter == " ") for letter in sentence], [0, 9.0] + [0] * 14)
parts.heading("   How many words back each letter is, and where a head attends that looks one back")
print(sentence)
print("".join(f"{count:.0f}" for count in p))
print("".join("^" if weight > 0.01 else " " for weight in bias.softmax(0)).rstrip())

# %% [markdown]
"""
## 8. A method of your own in six lines

A method is a class that overrides the hooks it needs, and has a name in the table PES. This one is
ALiBi with learned slopes, whereas those of ALiBi are 1/4, 1/16, 1/64 and 1/256 in a layer of four
heads. Like any other method, it can be trained, can generate with a cache, and can read longer
texts.
"""

# %%
class Slope(PE):
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.m = nn.Parameter(torch.zeros(self.H, 1, 1))

    def logit_bias(self, q, logits, i, j, per_key):
        return self.m * (j - i).to(model.at_least_float32(q))  # bfloat16 would round distances

PES["slope"] = Slope
parts.heading("8. A method of your own beside ALiBi: two small models, trained on 64 bytes")
for name in ("alibi", "slope"):
    gpt = parts.train(name)
    losses = parts.losses_of(gpt)
    print(f"{name}: loss {losses[:64].mean():.2f} in the first 64 bytes, and "
          f"{losses[448:].mean():.2f} in the last 64 of 512")
print("slopes of layer 1:", *[f"{m:.2f}" for m in gpt.h[0].attn.pes[0].m.flatten().tolist()])

# %% [markdown]
"""
`m` is learned here, so the model itself has found how fast attention should fade.

From here, read [model.py](../model.py) from the top. Each method of this lesson is a class there.
"""
