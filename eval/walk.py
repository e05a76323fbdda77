# %% [markdown]
r"""
# A first lesson in positional encodings

You know attention: queries are compared with keys, and softmax makes weights of the results. How
does it learn the *order* of words? For an exercise, change a line of [walk.py](walk.py), which also
opens as a notebook, and run `python eval/walk.py` (half a minute, after `pip install matplotlib`).

## 1. Can attention tell two orders apart?

In "dog bites man ?", let the "?" ask who bites. Each key k has two entries here, "I am a noun" and
"I am a verb", so that of "dog" is (1, 0). The query is q = (2, 0), so it looks for nouns. The
product q·k (here without the usual 1/√d) is called a **logit**.
"""

# %%
import math

import torch
import walk_parts as parts  # texts, tables and pictures

WORDS = {"dog": (1, 0), "man": (1, 0), "cat": (1, 0), "bites": (0, 1), "sleeps": (0, 1)}
q = torch.tensor([2.0, 0.0])

def keys(sentence):  # (T, 2), for T words
    return torch.tensor([WORDS.get(word, (0, 0)) for word in sentence.split()]).float()

def read(method, sentence, logits):
    """Prints the weights that the last word gives."""
    weights = zip(sentence.split(), logits.softmax(0))
    print(f"{method:9}", "   ".join(f"{word} {weight:.2f}" for word, weight in weights))

short, swapped = "dog bites man ?", "man bites dog ?"
for sentence in (short, swapped):
    read("nope", sentence, keys(sentence) @ q)

# %% [markdown]
"""
By hand: the logits are 2, 0, 2 and 0, and e² is 7.39, so a noun gets 7.39 / (2 · 7.39 + 2) = 0.44.

With `nope` (no positional encoding), a word has the same weight wherever it stands. The result is
the sum of the words' values with these weights, and a sum has no order. So both sentences are the
same to the "?". (In a GPT, each word sees only itself and those before it, from which several
layers can learn a little about the order.)

**Still wrong:** neither q nor k says where a word stands.

**Exercise.** Read "dog dog bites man ?". What does attention notice?
<details><summary>Answer</summary>

Each noun gets 7.39 / (3 · 7.39 + 2) = 0.31, so the dogs get 0.61 together. Attention notices how
often a word occurs.
</details>

## 2. Can we add the position to the word?

A model computes q and k from a vector per word, the embedding. `learned` adds to it a learned
vector w per position. Let the w of position 0 reach the key as (1.5, 0), which adds 2 · 1.5 = 3 to
the logit:
"""

# %%
w = torch.zeros(9, 2)
w[0, 0] = 1.5
longer = "today dog bites man ?"
for sentence in (short, swapped, longer):
    k = keys(sentence)
    read("learned", sentence, (k + w[: len(k)]) @ q)

# %% [markdown]
"""
Now the order counts. But with one more word in front, "today" wins. And positions beyond those of
training have no vectors.

`sinusoidal` needs no table. Two entries of a vector are an arrow in the plane. To the word's arrow,
this method adds one that rotates by an angle θ per position, like the hand of a clock. The product
of the hands at i and j is cos((i - j)θ), which depends only on the **distance** i - j. But it is
one of four terms:

(q + w_i)·(k + w_j) = q·k + q·w_j + w_i·k + w_i·w_j

The two in the middle depend on the places. So a noun three words before the "?" gets another logit
at each place (θ is 60°):
"""

# %%
def rotate(arrow, angle):  # (.., 2) and (..)
    x, y = arrow.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((x * cos - y * sin, x * sin + y * cos), -1)

theta = math.radians(60)
noun = torch.tensor([1.0, 0.0])
w = rotate(noun, torch.arange(9) * theta)
logits = [(q + w[j + 3]) @ (noun + w[j]) for j in range(4)]
parts.print_columns("noun at", range(4), {"sinusoidal": logits})

# %% [markdown]
"""
`expe` writes the position itself into some entries of the vectors from which q and k are computed.
Let it be the second entry of k, where q has -1 or 1:
"""

# %%
k = keys(longer)
k[:, 1] = torch.arange(len(k))
for slope in (-1.0, 1.0):
    read(f"expe {slope:+.0f}", longer, k @ torch.tensor([2.0, slope]))

# %% [markdown]
"""
The logit is 2 · noun + slope · position. Over the positions, the second part is a straight line,
which is highest at an end. So ExPE can find the first noun or the last, if being a noun counts for
more (here 2) than all words before it or after it (here 1 each). It cannot find one three words
back. And in longer texts, the positions are numbers that training never had.

**Still wrong:** "three words back" is a distance.

**Exercise.** For `sinusoidal`, let q and the noun be zero. Which term is left?
<details><summary>Answer</summary>

w_i·w_j, which is cos 180° = -1 at all four places.
</details>

## 3. Can we add a distance instead?

Let us add a number b to each logit that depends only on the distance:
"""

# %%
b = torch.tensor([0.0, 0, 0, 3, 0])  # for the distances 0, 1, 2, 3, 4
for sentence in (short, longer):
    k = keys(sentence)
    distance = len(k) - 1 - torch.arange(len(k))
    read("distance", sentence, k @ q + b[distance])

# %% [markdown]
"""
One more word in front changes almost nothing. This is what three methods add (made up, except for
`alibi`):
"""

# %%
parts.draw_distance()

# %% [markdown]
"""
- `relative` learns a vector a per distance, and adds q·a. If distance 3 has a = (1.5, 0), our q
  gets 3 there. A query for verbs, (0, 2), gets 0, and may prefer another distance. Beyond its
  table, it adds nothing.
- `t5` learns a number per *range* of distances, the same for all queries. The ranges grow, because
  it hardly matters whether a word is 70 or 71 back.
- `alibi` learns nothing, and subtracts m (i - j). Layers have several **heads**, which are
  attentions that run in parallel, and each has another m. With a large m, a head sees only what is
  near. With a very small m, it sees all words nearly alike, as with `nope`.

ALiBi's -m (i - j) is m j - m i. Softmax ignores m i, which is the same for all words, and m j is
one more entry of k, to which q's entry is 1. So ALiBi needs no table of distances:
"""

# %%
k = keys(short)
b = 0.5 * torch.arange(len(k))  # m = 0.5
read("alibi", short, torch.cat((k, b[:, None]), 1) @ torch.tensor([2.0, 0.0, 1.0]))

# %% [markdown]
"""
**Still wrong:** ALiBi only prefers what is near. Can q and k carry "three words back"?

**Exercise.** With which m does "dog" get half of what "man" gets?
<details><summary>Answer</summary>

The dog is two words farther back, so e^(-2m) is 1/2. With m = ln(2) / 2 = 0.35, they get 0.28 and
0.56.
</details>

## 4. Can q and k carry the distance?

Adding an arrow to the word left two terms too many. RoPE rotates the word's own arrow:

1. The arrow of q has a length r and an angle α, which come from the word. At position i, it is
   rotated by iθ, to α + iθ.
2. The arrow of k has a length s and an angle β. At position j, it is rotated to β + jθ.
3. The product of two arrows is r s times the cosine of the angle between them.
4. This angle is (α + iθ) - (β + jθ) = (i - j)θ + α - β.
5. So q·k = r s cos((i - j)θ + α - β). Of the positions, only the distance is left.

This is a wave over the distance. For our q and nouns, α and β are 0, so its crest is at distance 0.
For -q, it is half a rotation away, at 3:
"""

# %%
def rope(k, q):
    pos = torch.arange(len(k))
    return rotate(k, pos * theta) @ rotate(q, pos[-1] * theta)

nouns = noun.expand(10, 2)
parts.print_columns("words back", range(10), {
    "q, nouns": rope(nouns, q).flip(0), "-q, nouns": rope(nouns, -q).flip(0)})
for sentence in (short, longer):
    read("rope, -q", sentence, rope(keys(sentence), -q))

# %% [markdown]
"""
This head reads "three back" without a table. But 9 back looks like 3 back, because the arrows have
made a full rotation, like the last digit of a counter after ten steps. So a counter has more
digits, each ten times slower. RoPE, too, has n arrows, which are **pairs** of entries, each slower
than the one before by the same factor, and the logit is the sum of their products. Pair c rotates
by θ_c = base^(-c/n) radians per position (a radian is 57°). With n = 4 and base 10000, these are 1,
0.1, 0.01 and 0.001. Fast pairs tell neighbours apart, and slow ones near from far. `base` says how
slow they get:
"""

# %%
parts.draw_base()

# %% [markdown]
"""
With base 10000, half of the pairs hardly rotate in 64 positions. Their products say what the words
are, but hardly where they are.

**Still wrong:** line 5 has α - β in it, which comes from the words.

**Exercise.** Which q of length 2 prefers nouns 1 back?
<details><summary>Answer</summary>

`rotate(q, torch.tensor(-theta))`, which is (1, -1.73). Its wave is 2 cos((i - j) 60° - 60°).
</details>

## 5. Must a word move the wave?

A verb's arrow is a quarter of a rotation from a noun's. So the head that reads nouns 3 back also
reads verbs 4 and 5 back (left):
"""

# %%
parts.draw_words()

# %% [markdown]
"""
In PoPE (right), each *entry* is an arrow. Its length is softplus(x) = ln(1 + e^x) > 0, set only by
the word, and its angle is set only by the position. Each entry adds this to the logit:

softplus(q) softplus(k) cos((i - j)θ - δ)

So a word can make a wave higher, but not move it. Only δ can (here -180°), which is learned per
head and entry, from -360° to 0, a full rotation.

Does it matter? Let one query learn to read "3 back" among random words. This loop trains all models
here, and RoPE and PoPE now come from [model.py](../model.py):
"""

# %%
from model import GPT, PE, PES, GPTConfig, overrides, scaled_dot_products

STEPS = 300

def learn(model, loss_of, rate):
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99))
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.clamp_parameters()  # keeps δ within its bounds
    return model

def loss_of_three_back(pe):
    k = torch.randn(64, 1, 16, 16)  # 64 sentences of 16 words, with 16 entries
    q = pe.q.expand_as(k)
    # None: the words, which only CARoPE reads. {}: an empty cache
    q, k = pe.encode_qk(q, k, None, pe.per_position(k, torch.arange(16)), {})
    logits = scaled_dot_products(q[:, :, -1:], k, 16)
    return -logits.log_softmax(-1)[..., -4].mean()  # -4 is the key 3 back

for name in ("rope", "pope"):
    torch.manual_seed(0)
    pe = PES[name](GPTConfig(n_head=1, n_embd=16, base=100.0))
    pe.q = torch.nn.Parameter(torch.randn(16))
    loss = loss_of_three_back(learn(pe, loss_of_three_back, 0.03)).item()
    print(f"{name}: the word 3 back gets {math.exp(-loss):.2f}")

# %% [markdown]
"""
With RoPE, this word gets 1/16, no better than a guess, because random words move the waves at
random.

**Still wrong:** our texts were as long as in training.

**Exercise.** Add 1 to `k` before it is rotated. Why does this help RoPE?
<details><summary>Answer</summary>

With `k = 1 + torch.randn(64, 1, 16, 16)`, RoPE has 0.28 and PoPE 0.36. What all words have in
common makes a wave that no word moves.
</details>

## 6. What goes wrong in longer texts?

A small GPT with RoPE (n = 8, base = 10000) learns from 64 bytes of Python code at a time, and then
reads 512. This is the circle of each pair:
"""

# %%
parts.draw_dials()

# %% [markdown]
"""
A pair has met all angles in training if it made a full rotation there, 64 θ_c ≥ 2π. The others meet
new ones, and nothing has taught the model what these mean. Are they to blame, or the length? As a
control, let some pairs stop. For keys more than 63 bytes away, they keep the angle of 63.

The table shows the loss, which is -ln of the probability of the byte that came, in **nats**. In the
last column, the model reads the same last bytes, but sees at most 64:
"""

# %%
def angles_if_far(pairs, i, j, theta):
    of_q, of_k = i * theta, j * theta  # only their difference counts
    of_q[:, pairs] = 63 * theta[pairs]  # as if q were at 63
    of_k[:, pairs] = 0  # and k at 0
    return of_q, of_k

def loss_of_text(gpt):
    segments = parts.random_segments(16, 65)
    _, loss = gpt(segments[:, :-1], segments[:, 1:])  # predicts each next byte
    return loss

def small_gpt(pe):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(pe=pe, vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64))
    return learn(gpt, loss_of_text, 0.003)

gpt = small_gpt("rope")
models = {"rope": gpt,
          "pairs 0 to 2 stop": parts.stopped(gpt, [0, 1, 2], angles_if_far),
          "pairs 3 to 7 stop": parts.stopped(gpt, [3, 4, 5, 6, 7], angles_if_far)}
for name in ("linear", "ntk"):
    models[name] = parts.changed(gpt, rope_scaling=name, rope_factor=8.0)
parts.draw_losses(parts.print_losses(models))

# %% [markdown]
"""
The new angles are to blame. If the slow pairs stop, the loss is nearly that of the last column,
although the text is as long as before. The fast pairs meet nothing new, so the harm remains if they
stop. (With five seeds, RoPE is 0.41 to 1.04 above the last column, 0.40 to 1.30 if the fast pairs
stop, and 0.03 to 0.07 if the slow ones do.)

As remedies, the last two rows slow the trained model's pairs, by s = 8 at most. `linear` divides
each θ_c by s. Then no angle is new, but neighbours look alike. `ntk` divides θ_c by s^(c/(n-1)), so
pair 0 rotates as before, and the last one s times slower. But pair 3 is only 2.4 times slower, so
within 512 bytes it still makes a full rotation, of which most is new. Both are worse within 64
bytes, because the model was trained with other angles.

**Still wrong:** angles count words. Is what we look for always as many words away?

**Exercise.** One pair does most of the harm. Guess which from the circles, and let only this one
stop.
<details><summary>Answer</summary>

Pair 3. With `[3]`, the last bytes cost 1.94, and with `[4, 5, 6, 7]` 2.76. Of the pairs with new
angles, pair 3 is the first to go far beyond what it has met. At 99 bytes, it has made half a
rotation, so its product is the opposite of that at 0. Pair 4 needs 314 bytes for this.
</details>

## 7. Is a position a distance?

In "cat sleeps . dog bites the old man ?", the dog is five words back, not three. But it is still
the second noun back, and the cat is in another sentence. So let words decide what counts:
"""

# %%
text = "cat sleeps . dog bites the old man ?"
k = keys(text)
is_noun = k[:, 0]
count = is_noun.flip(0).cumsum(0).flip(0)  # CoPE: nouns from each word to the "?"
e = torch.tensor([[0.0, 0], [0, 0], [1.5, 0], [0, 0]])  # CoPE: a vector per count
log_keep = torch.tensor([0.01 if word == "." else 1.0 for word in text.split()]).log()
fade = log_keep.sum() - log_keep.cumsum(0)  # FoX: gates from after each word to the "?"
step = math.radians(45)
angle = step * is_noun.cumsum(0)  # CARoPE: each noun rotates by 45°, and q prefers one noun away
logits = {"rope": rope(k, -q), "cope": k @ q + e[count.long()] @ q, "fox": k @ q + fade,
          "carope": rotate(k, angle) @ rotate(3 * q, angle[-1] - step)}  # 3q sharpens this
weights = {f"{name} reads": z.softmax(0) for name, z in logits.items()}
parts.print_columns("", text.split(), {"cope counts": count, "fox adds": fade, **weights})

# %% [markdown]
"""
- **CoPE:** a gate, sigmoid(q·k), says how much the query counts a key (here 1 for nouns). A key's
  position is the sum of the gates from the key itself to the query, so with all gates 1 it is
  i - j + 1. A learned vector e per integer adds q·e, interpolated between integers. Here only that
  of 2 adds something, to "sleeps", "." and "dog", of which q·k prefers the noun. So a head can read
  the second noun back, in however many words.
- **FoX:** each word has a forget gate between 0 and 1, and the logarithms of all gates after the
  key are added. The "." has 0.01, which adds -4.61 to all before it. So a head can forget the
  sentence before and keep all of its own, whereas ALiBi fades both. (If all gates are e^-m, FoX is
  ALiBi.)
- **CARoPE:** RoPE, but a word decides how far it rotates its own arrows and all later ones. So a
  head can prefer what is one noun away. This is again the dog, because only one noun follows it.

So an effect can depend on three things, which are the headings here. Each row of a panel is a word
that looks back, and each column one that it sees. Colours are relative to the panel's mean, because
softmax ignores what all keys share:
"""

# %%
parts.draw_methods()

# %% [markdown]
"""
**Still wrong:** all this was by hand. Do trained models use distant text?

**Exercise.** With which gate of "." does FoX give the cat half of what it gives the dog?
<details><summary>Answer</summary>

With 0.5, because e^(ln 0.5) is 0.5. Then the cat gets 0.15 and the dog 0.31.
</details>

## 8. Do models use distant text?

If pairs 3 to 7 stop, the loss stays flat in longer texts. This shows no harm, but no use either,
because the same model reached 1.91 with all text and 1.87 with at most the last 64 bytes. To use
distant text, a model must find something in it. So larger models learned from code with repeated
spans, 128 bytes at a time, and then read 1024:
"""

# %%
parts.draw_copies(("rope", "pope", "cope", "alibi", "fox"))

# %% [markdown]
"""
- **FoX** finds copies equally well at all distances. (One of three seeds copies less well.)
  **ALiBi** finds them less well the farther they are.
- **CoPE** finds best what stands at the start of the text (900 bytes back), where a byte sees no
  more than in training.
- **PoPE** finds copies up to 128 bytes back. **RoPE** finds hardly any, not even 64 bytes back,
  probably because keys at new angles distract it.

The bars compare 1024 bytes of ordinary code with at most the last 128. ALiBi and FoX gain there,
because these models have learned to copy. Without copies in training, they gain [0.04 at
most](README.md#ten-times-the-steps). After a quarter more training on 1024 bytes, [all five
gain](README.md#what-distant-text-is-worth).

**Still wrong:** we wrote the methods by hand. Where are they in a model?

**Exercise.** Draw `t5`, too. Which line is most like it, and why?
<details><summary>Answer</summary>

That of CoPE, because T5, too, sees the start of the text as in training.
</details>

## 9. Where does each act in model.py?

Each method is a class that overrides **hooks**, which the model calls at fixed places. Five change
something:
"""

# %%
for hook in ("embed", "inputs", "encode_qk", "logit_bias", "key_bias"):
    print(f"{hook:11}", *[name for name, cls in PES.items() if overrides(cls, hook)])

# %% [markdown]
"""
`embed` changes embeddings (section 2), `inputs` that from which q and k are computed (ExPE),
`encode_qk` rotates q and k (4, 5, 7), `logit_bias` adds to logits (3, 7), and `key_bias` adds
b_j - b_i through one more entry of k (3). `expe` is under `embed` for its option `expe_once`.
(`exqpe`, `cope_mlp` and `cope_alibi` are variants.)

Last, a method of our own. ALiBi prefers the nearest word. Ours prefers a distance c, which each
head learns:
"""

# %%
class Peak(PE):
    # shared_from: the first layer's instance, to share its parameters
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.c = torch.nn.Parameter(torch.arange(self.H).float().view(-1, 1, 1))  # 0, 1, 2, 3
        self.m = torch.nn.Parameter(torch.full((self.H, 1, 1), 0.5))

    def logit_bias(self, q, logits, i, j, per_key):
        return -self.m * (i - j - self.c).abs()

PES["peak"] = Peak
parts.print_losses({"peak": small_gpt("peak")})

# %% [markdown]
"""
Distant text neither harms nor helps it.

**Exercise.** Let c be `torch.zeros(1)`, without a Parameter. Which method is this, and how good?
<details><summary>Answer</summary>

ALiBi with learned slopes. In the first 64 bytes, it has 1.95.
</details>

Now read [model.py](../model.py), in the order that [README.md](../README.md#learn-it) gives.
"""
