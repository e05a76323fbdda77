"""
A GPT whose positional encoding (PE) is one option, as in GPT(GPTConfig(pe="cope+rope")).

Read this file from top to bottom. It holds the options, the hooks through which a method can act, a
plain GPT that calls the hooks, a small class for each method, in the order of the lesson
(eval/walk.md), and the table PES, which names all methods. In this picture of one forward pass, the
hooks are in capitals:

    positions -> PER_POSITION -> all that ENCODE_QK must know about each position
    tokens -> wte -> EMBED -> blocks -> norm -> lm_head -> logits

    block       x = x + attention(norm(x)), and then x = x + mlp(norm(x))

    attention   x -> INPUTS -> c_qk -> q, k -> ENCODE_QK -> q, k    k and v go into the cache
                x -> c_v -> v
                x, k, v -> PER_KEY -> all that LOGIT_BIAS must know about each key
                softmax(q.k / sqrt(d) + LOGIT_BIAS + causal mask) v -> c_proj

    If the bias is the difference of a number of the key and one of the query, as in ALiBi and FoX,
    a method overrides KEY_BIAS rather than LOGIT_BIAS, and costs hardly more than no bias.

No hook does anything unless a method overrides it, so pe="nope" is a plain GPT. With
pe="cope+rope", four of the hooks act: RoPE overrides PER_POSITION and ENCODE_QK, which together
rotate q and k, and CoPE overrides PER_KEY and LOGIT_BIAS, which turn counts of keys into a bias.

Shapes    B  sequences in the batch
          T  new tokens, each with one query; t of them where a function gets only some
          S  keys, those of the cached and of the new tokens; s where a function gets only some
          C  n_embd, the width of the residual stream
          H  n_head, the number of heads
          d  C / H, the width of a head
Symbols   i is the position of a query and j that of a key. c indexes dimensions, or pairs of them,
          and theta_c is the frequency of dimension or pair c. Otherwise each class keeps its
          paper's symbols

An option that makes no sense raises Mistake, a ValueError that names the value and the mend. This
file imports nothing of the project (but for kernels.py, which is optional), so you may copy it.
"""
import math
import re
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 128  # Attention.chunked takes at most this many queries at a time, unless compiled

class Mistake(ValueError):
    """Something that the user of a model can mend. The scripts print it as one line."""

def require(condition, text):
    """Raises Mistake with this text unless the condition holds."""
    if not condition:
        raise Mistake(text)

@dataclass
class GPTConfig:
    """The options of a model. The first group is the GPT's. The headings of the other groups name
    the methods that use them. Skip those until you read the classes, which explain the symbols."""
    block_size: int = 1024  # tokens per training sequence; only 'learned' cannot go past it
    vocab_size: int = 50304  # number of token ids
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block (H)
    n_embd: int = 768  # width of the residual stream (C)
    dropout: float = 0.0  # on embeddings, attention weights and both branches of a block
    bias: bool = True  # biases in linear layers (but never in lm_head) and LayerNorms
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # before each branch and before lm_head
    hard_attention: bool = False  # all weight on the largest logit (CoPE appendix C, an ablation)
    mlp: Literal["gelu", "swiglu"] = "gelu"  # the kind of MLP
    mlp_width: int = 0  # hidden width; 0: 4 C (gelu), 8/3 C rounded up to a multiple of 64 (swiglu)
    tie: bool = True  # the output layer uses the token embeddings' weights
    random_positions: int = 0  # draw the training positions at random below this; 0: count from 0
    pe: str = "learned"  # a key of model.PES; a+b: both in each layer; a,b,c: the layers take turns

    # sinusoidal, rope, pope, carope
    base: float = 10000.0  # sets the frequencies theta_c; each class gives its formula
    # sinusoidal
    sinusoidal_scale: bool = True  # scale token embeddings by sqrt(C) (Vaswani does, ExPE does not)
    # expe, exqpe
    expe_l: int = 0  # l, the number of dimensions that hold the position; 0: C / 8
    expe_S: float = 0.0  # S, added to every value
    expe_theta: float = 1 / 2048  # expe: step per position and per dimension; exqpe: per dimension
    expe_theta2: float = 1 / 16  # exqpe: step of the one dimension that grows at each position
    expe_once: bool = False  # write positions only before the first block (dropout acts on them)
    expe_same: bool = False  # expe: the same value in all l dimensions
    expe_learned: Literal["no", "random", "init"] = "no"  # train S and theta; init: start as above
    expe_scale: float = 1.0  # at test time: scales all but S; 0.5 fits twice the trained length
    # relative
    relative_capped: bool = False  # distances past the table get its last vector, rather than none
    # t5
    t5_buckets: int = 32  # number of buckets; half of them hold one distance each
    t5_max_distance: int = 128  # all distances from here on share the last bucket
    # alibi
    alibi_fraction: float = 1.0  # the fraction of the heads that have a slope; the others have none
    # rope
    rope_fraction: float = 1.0  # rotate only so many of a head's dimensions, with all frequencies
    rope_p: float = 1.0  # p-RoPE: rotate only the fastest pairs, this fraction of them
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"  # to read longer texts
    rope_factor: float = 1.0  # rope_scaling: the longer texts' length / the trained length, > 1
    rope_trained: int = 0  # yarn: the trained length, if block_size was raised; 0: block_size
    # pope
    pope_mu: Literal["softplus", "relu", "identity"] = "softplus"  # maps q and k to magnitudes
    pope_delta: Literal["zero", "uniform", "none"] = "zero"  # initial delta; none: no delta
    # cope, cope_mlp, cope_alibi
    cope_gates: Literal["keys", "sep-keys", "values"] = "keys"  # what q is dotted with in the gates
    # cope, cope_mlp
    cope_npos: int = 64  # number of positions; p is clamped to npos - 1
    cope_scale_z: bool = False  # divide q.e by sqrt(d), as the released code does
    # cope
    cope_shared: bool = True  # one table for the model, rather than one per layer
    cope_per_head: bool = False  # one table per head, rather than one for all of them
    # cope_mlp
    cope_mlp_width: int = 64  # N, the hidden width
    # cope_alibi
    cope_slopes: Literal["alibi", "geometric", "learned"] = "alibi"  # geometric: m0, m0/2, m0/4 ...
    cope_m0: float = 1.0  # geometric: the first head's slope
    # carope
    carope_x: Literal["input", "embedding"] = "input"  # of attention, or of the token; sets f

# The options that may be changed after training, because no weight depends on them
TEST_TIME = ("rope_scaling", "rope_factor", "rope_trained", "expe_scale", "relative_capped")

class PE(nn.Module):
    """The base of all methods. A method overrides the hooks through which it acts.

    The model makes one instance for each layer that uses the method. GPT.__init__ says how layers
    share a parameter. `per_position` and `embed` are called only on the first layer's instance, so
    all layers must share the parameters that these two read. The others would never learn.

    `cache` belongs to one method in one layer. While tokens are generated, `encode_qk` and
    `per_key` find in this dict what earlier calls stored there. In any other pass it starts empty.
    (The cache of a whole layer also holds keys and values. In a layer of `fox+rope` it is
    {"k": encoded keys, "v": values, "pes": {"fox": {"sums": ...}, "rope": {}}}.)

    For a method of your own:

    - An nn.Linear or nn.Embedding that __init__ creates gets GPT-2's initialisation, whatever
      values it had, and weight decay, like any other. A bare nn.Parameter keeps the value that
      __init__ gives it, and does not decay.
    - If a parameter has to stay within bounds, start there and name them in `bounds`. Do not clamp
      it in a hook: the gradient of a clamp is zero outside of the bounds, so a value that has
      crossed one would never come back.
    - Parameters may be bfloat16, so a hook that computes in float32 has to cast them. Autocast
      computes all matrix products in bfloat16, so a hook that needs a precise one calls
      precise_product.
    """
    reads = ()  # options that are refused if no method of the model names them here
    limit = math.inf  # the longest input that it can encode
    recompute = False  # True: the backward pass computes the logits again, rather than keep them
    bounds = {}  # {name of a parameter: (lowest, highest)}, which hold after each training step

    def __init__(self, cfg, shared_from=None):
        super().__init__()
        self.cfg = cfg
        self.H = cfg.n_head
        self.d = cfg.n_embd // cfg.n_head

    def per_position(self, x, pos):
        """Returns what encode_qk needs to know about the positions pos (T,) of the new tokens, such
        as angles. This is called once per forward pass, on the first layer's instance, and all
        layers use the result. x (B, T, C) holds the token embeddings, which most methods use only
        for their dtype and device."""

    def embed(self, x, pos):
        """Returns the token embeddings x (B, T, C), changed or not. This is called once per forward
        pass, on the first layer's instance."""
        return x

    def inputs(self, x, pos):
        """Returns the input x (B, T, C) of the projection to q and k, changed or not. The values
        are always computed from the unchanged x."""
        return x

    def encode_qk(self, q, k, x, per_position, cache):
        """Returns q and k with positions encoded in them, so that q.k depends on positions. q and
        k are (B, H, T, d), and the results may be wider (2d in PoPE). x (B, T, C) is the
        attention's input. Attention caches the encoded keys, so no key is encoded twice."""
        return q, k

    def per_key(self, x, k, v, cache):
        """Returns a tensor (B, H, S, ..) with what logit_bias must know about each key. The encoded
        k and v hold all S tokens. x (B, T, C) holds only the new ones, so a method has to cache
        what it computes from x. A method that needs nothing returns k, as here, because attention
        in chunks slices the result."""
        return k

    def logit_bias(self, q, logits, i, j, per_key):
        """Returns what to add to the logits, in any shape that broadcasts to (B, H, t, s) and of
        dtype at_least_float32(q). It must be finite for keys in the future (j > i) too, because
        the mask adds -inf there and inf - inf is NaN. So log(1 + i - j), for example, needs
        (i - j).clamp(min=0).

            q         (B, H, t, d)   some of the queries, as they were before encode_qk, because
                                     what they are multiplied with here is not rotated either
            logits    (B, H, t, s)   the products q.k / sqrt(d) of these queries with the keys, both
                                     as they are after encode_qk
            i         (t, 1)         positions of these queries
            j         (s,)           positions of the keys, up to the last of these queries
            per_key   (B, H, s, ..)  what the hook of that name returned, for these keys

        By default it is the difference b_j - b_i of what key_bias returns.
        """
        b = self.key_bias(as_float64(j), per_key)  # (H, s) or (B, H, s)
        first = j.size(0) - i.size(0)  # the index of the first query among the keys
        # Far into a text, all values of b may be so large that float32 would round their difference
        # coarsely. So one of them, that of the first query, is subtracted from all
        b = (b - b[..., first : first + 1]).to(at_least_float32(q))
        return b[..., None, :] - b[..., first:, None]  # (H, t, s) or (B, H, t, s)

    def key_bias(self, j, per_key):
        """Returns b, (H, S) or (B, H, S), of a method whose bias is b_j - b_i, where b is a number
        per position and head. j (S,) are the positions of the keys in float64, and b should keep
        this precision. Such a method overrides this hook rather than logit_bias. Training then
        costs hardly more than without a bias, because softmax drops b_i, which is the same for all
        keys of a row, and b_j is one more entry of k (see `with_bias_columns`, and `can_fuse` for
        the exceptions)."""
        return torch.zeros_like(j).expand(self.H, -1)

    @torch.no_grad()
    def clamp_parameters(self):
        """Moves parameters back into their bounds, after each step of the optimizer."""
        for name, (lowest, highest) in self.bounds.items():
            if getattr(self, name) is not None:  # an option may have left it out
                getattr(self, name).clamp_(lowest, highest)

def overrides(cls, hook):
    """True if cls, the class of a method, overrides the hook of this name."""
    return getattr(cls, hook) is not getattr(PE, hook)

def has_key_bias(pe):
    """True if the bias of a method is the difference b_j - b_i of its key_bias. In a subclass of
    ALiBi that overrides logit_bias, the inherited key_bias no longer describes the bias, so its
    attention is computed from logit_bias, in chunks."""
    return overrides(type(pe), "key_bias") and not overrides(type(pe), "logit_bias")

# --- a plain GPT ----------------------------------------------------------------------------------

def at_least_float32(x):
    """Returns float32, or float64 if x is float64. bfloat16 is too coarse for biases and phases."""
    return torch.promote_types(x.dtype, torch.float32)

def as_float64(x):
    """Returns x in float64, or in float32 on Apple's GPUs, which lack float64."""
    return x.float() if x.device.type == "mps" else x.double()

def split_heads(x, H):
    """(B, T, C) -> (B, H, T, d)"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)

def scaled_dot_products(q, k, d):
    """Returns q.k / sqrt(d), (B, H, t, s). Autocast rounds the products to bfloat16. d is an
    argument because q and k are of width 2d after PoPE, which still divides by sqrt(d)."""
    return (q @ k.mT).to(at_least_float32(q)) * d**-0.5

def extend_cache(cache, name, new):
    """Appends new (B, H, T, ..) to the cached tensor of that name and returns it, (B, H, S, ..)."""
    if name in cache:
        new = torch.cat((cache[name], new), 2)
    cache[name] = new
    return new

class Attention(nn.Module):
    def __init__(self, cfg, names, pes):
        super().__init__()
        self.cfg = cfg
        self.H = cfg.n_head
        self.d = cfg.n_embd // cfg.n_head
        self.c_qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=cfg.bias)
        # separate, because expe changes the input of q and k only
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.names = names  # of this layer's methods, such as ["cope", "rope"]
        self.pes = nn.ModuleList(pes)  # their instances, in the same order
        self.bias_pes = [pe for pe in pes if has_key_bias(pe) or overrides(type(pe), "logit_bias")]
        self.has_key_bias = self.bias_pes and all(map(has_key_bias, self.bias_pes))
        self.recompute = any(pe.recompute for pe in pes)
        self.use_triton = False  # set by GPT.use_kernels

    def forward(self, x, pos, j, per_position, cache=None):
        """Returns what attention adds to the residual stream, (B, T, C). x (B, T, C) is the
        block's normed input, pos (T,) and j (S,) are the positions of its tokens and of all keys,
        and per_position maps the name of a method to what its hook of that name returned. The new
        keys and values are added to cache, this layer's dict."""
        q, k, v, unencoded_q, per_key = self.encode(
            x, pos, per_position, {} if cache is None else cache)
        i = pos[:, None]  # (T, 1)
        y = self.attend(q, k, v, unencoded_q, i, j, per_key)  # (B, H, T, d)
        y = self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return F.dropout(y, self.cfg.dropout, self.training)

    def encode(self, x, pos, per_position, cache):
        """Calls the hooks that act on all tokens at once. Returns what `textbook` needs besides the
        positions: q, k, v, q as it was before encode_qk, and what each bias knows about keys."""
        x_qk = x
        for pe in self.pes:
            x_qk = pe.inputs(x_qk, pos)  # only expe and exqpe change anything
        q, k = self.c_qk(x_qk).chunk(2, -1)
        q, k = split_heads(q, self.H), split_heads(k, self.H)  # (B, H, T, d)
        v = split_heads(self.c_v(x), self.H)
        own_caches = cache.setdefault("pes", {})  # {name of a method: its cache}
        unencoded_q = q  # for biases that multiply q with what is not encoded, such as CoPE's e
        for name, pe in zip(self.names, self.pes):
            # only rope, carope and pope change anything, and a layer has at most one of them
            q, k = pe.encode_qk(q, k, x, per_position[name], own_caches.setdefault(name, {}))
        k = extend_cache(cache, "k", k)  # (B, H, S, d), or of width 2d after PoPE
        v = extend_cache(cache, "v", v)  # (B, H, S, d)
        per_key = []  # one tensor for each of bias_pes
        for name, pe in zip(self.names, self.pes):
            if pe in self.bias_pes:
                per_key.append(pe.per_key(x, k, v, own_caches[name]))
        return q, k, v, unencoded_q, per_key

    def textbook(self, q, k, v, unencoded_q, i, j, per_key):
        """Attention as the papers write it. The queries at positions i (t, 1) attend to the keys at
        positions j (s,). This function is the definition, and the methods below it compute the
        same result in less time or memory."""
        logits = scaled_dot_products(q, k, self.d)  # (B, H, t, s)
        bias = torch.where(j > i, -math.inf, 0.0)  # the causal mask (t, s)
        for pe, its_per_key in zip(self.bias_pes, per_key):
            bias = bias + pe.logit_bias(unencoded_q, logits, i, j, its_per_key)
        weights = (logits + bias).softmax(-1)
        if self.cfg.hard_attention:
            weights = harden(weights)
        weights = F.dropout(weights.to(v.dtype), self.cfg.dropout, self.training)
        return weights @ v  # (B, H, t, d)

    def attend(self, q, k, v, unencoded_q, i, j, per_key):
        """Calls the fastest equivalent of `textbook` that applies."""
        if self.use_triton and q.size(2) == k.size(2):  # kernels.py needs as many queries as keys
            return triton_attention(self, q, k, v, unencoded_q, j, per_key)
        if self.has_key_bias and q.size(2) == k.size(2):  # a few queries take little memory anyway
            b = self.key_bias(j, per_key)
            if self.can_fuse(q.device, q.dtype, b.requires_grad):
                # `fused` divides by sqrt(d)
                return self.fused(*with_bias_columns(q, k, b * self.d**0.5), v)
        elif not self.bias_pes and self.can_fuse(q.device, q.dtype):
            return self.fused(q, k, v)
        return self.chunked(q, k, v, unencoded_q, i, j, per_key)

    def can_fuse(self, device, dtype, bias_learns=False):
        """Returns whether `fused` may compute the attention of inputs on this device and of this
        dtype. bias_learns says whether the key_bias of the methods, if there is one, has a
        gradient."""
        if self.cfg.hard_attention:
            return False
        if self.cfg.dropout and self.training and device.type == "cpu":
            return False  # PyTorch does not fuse dropout there, and `chunked` is faster
        if not self.has_key_bias:
            return not self.bias_pes  # a bias of another kind needs the matrix
        if dtype == torch.bfloat16:
            return not bias_learns  # the columns are precise, but their gradient is not
        return dtype != torch.float16  # its numbers end at 65504, and b sqrt(d) may be larger

    def key_bias(self, j, per_key):
        """Returns the sum of the methods' key_bias, (H, S) or (B, H, S)."""
        biases = []
        for pe, its_per_key in zip(self.bias_pes, per_key):
            if has_key_bias(pe):
                biases.append(pe.key_bias(as_float64(j), its_per_key))
        return sum(biases)

    def chunked(self, q, k, v, unencoded_q, i, j, per_key):
        """`textbook` on one chunk of queries at a time. The result is the same, because no query
        depends on another. For each chunk, `rows` are its queries, and `seen` are the keys up to
        its last query. The mask would remove the other keys, which are nearly half of the T x S
        matrix in a long text.

        Without gradients, only one chunk's part of the matrix exists at a time. With gradients, all
        parts are kept for the backward pass, unless a method asks to compute them again."""
        # a matrix product would copy what is not contiguous, and do so again for each chunk
        q, k, v, unencoded_q = (y.contiguous() for y in (q, k, v, unencoded_q))
        T, S = q.size(2), k.size(2)
        n_chunks = math.ceil(T / CHUNK)
        if torch.compiler.is_compiling():
            # torch.compile unrolls this loop, and its graph should serve all lengths, so the number
            # of chunks is fixed. With 4 chunks, 6 of 16 parts of the matrix are never computed
            n_chunks = 4 if T >= 4 else 1
        textbook = self.textbook
        if n_chunks > 1 and self.recompute and not torch.compiler.is_compiling():
            textbook = partial(checkpoint, self.textbook, use_reentrant=False)
            n_chunks *= 2  # then only one chunk's part exists at a time, and it is half as large
        results = []
        for chunk in range(n_chunks):
            rows = slice(T * chunk // n_chunks, T * (chunk + 1) // n_chunks)
            seen = slice(0, S - T + rows.stop)
            seen_per_key = []
            # with a comprehension, torch.compile would not keep the length dynamic
            for its_per_key in per_key:
                seen_per_key.append(its_per_key[:, :, seen])
            results.append(textbook(q[:, :, rows], k[:, :, seen], v[:, :, seen],
                                    unencoded_q[:, :, rows], i[rows], j[seen], seen_per_key))
        return torch.cat(results, 2)

    def fused(self, q, k, v):
        """`textbook` without a bias, or with one that is in columns of q and k. PyTorch's fused
        kernels do not store the T x S logits."""
        T, S = q.size(2), k.size(2)
        d = v.size(3)
        if q.size(3) > d:
            # After PoPE or with a bias, q and k are wider than v. Flash attention needs equal
            # widths, so v gets columns of zeros, which are cut off the result
            v = F.pad(v, (0, q.size(3) - d))
        mask = None
        is_causal = True
        if T != S:  # is_causal would align the first query with the first key, a cached one
            is_causal = False
            if T > 1:  # a single query sees all keys
                mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        dropout = self.cfg.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=is_causal, scale=self.d**-0.5)
        return y[..., :d]

def with_bias_columns(q, k, b):
    """Returns q and k with more columns, so that q_i.k_j contains b_j as well:

        q_i.k_j + b_j = (q_i, 1).(k_j, b_j)

    The bias is b_j - b_i, but softmax drops b_i, which is the same for all keys of a row. b,
    (H, S) or (B, H, S), is in float64. bfloat16 has 8 significant bits, so there three columns of k
    add up to b_j.

    If b has a gradient, one more column of q holds b_i - b_i, and that of k ones. Its value is 0,
    but it has the gradient of the -b_i that was dropped. In exact arithmetic this gradient is 0,
    too, because those of the logits of a row sum to 0. But FoX adds up the gradients of b over a
    token and all later ones, and then the rounding errors of the two gradients cancel."""
    b = b.expand(k.shape[:3])
    k_columns = []
    rest = b
    for _ in range(3 if k.dtype == torch.bfloat16 else 1):
        k_columns.append(rest.to(k.dtype))
        rest = rest - k_columns[-1]
    one = torch.ones_like(k_columns[0])
    q_columns = [one] * len(k_columns)
    if b.requires_grad:
        q_columns.append((b.detach() - b).to(q.dtype))
        k_columns.append(one)
    missing = -(q.size(3) + len(q_columns)) % 8  # GPUs need a width that is a multiple of 8
    q = torch.cat((q, F.pad(torch.stack(q_columns, -1), (0, missing))), -1)
    k = torch.cat((k, F.pad(torch.stack(k_columns, -1), (0, missing))), -1)
    return q, k

def harden(weights):
    """Puts all weight on the key with the largest weight, but keeps the gradient of the softmax.
    This straight-through estimator is our choice. The CoPE paper does not give its own."""
    hard = F.one_hot(weights.argmax(-1), weights.size(-1))
    return hard + weights - weights.detach()

class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gated = cfg.mlp == "swiglu"
        self.dropout = cfg.dropout
        if cfg.mlp_width:
            width = cfg.mlp_width
        elif self.gated:
            width = 64 * math.ceil(8 * cfg.n_embd / 3 / 64)
        else:
            width = 4 * cfg.n_embd
        self.c_fc = nn.Linear(cfg.n_embd, 2 * width if self.gated else width, bias=cfg.bias)
        self.c_proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x)
        return F.dropout(self.c_proj(x), self.dropout, self.training)

def norm(cfg):
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, eps=1e-5)
    return nn.LayerNorm(cfg.n_embd, eps=1e-5, bias=cfg.bias)

class Block(nn.Module):
    def __init__(self, cfg, names, pes):
        super().__init__()
        self.ln_1 = norm(cfg)
        self.attn = Attention(cfg, names, pes)
        self.ln_2 = norm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x, pos, j, per_position, cache=None):
        x = x + self.attn(self.ln_1(x), pos, j, per_position, cache)
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    """A decoder-only transformer whose positional encodings are those that cfg.pe names."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        # pe="rope,cope+rope" is [["rope"], ["cope", "rope"]], which repeats over the layers
        pattern = [mix.split("+") for mix in cfg.pe.split(",")]
        check_options(cfg, pattern)
        self.first_instance = {}  # name -> the PE of that name in the first layer that uses it
        blocks = []
        for layer in range(cfg.n_layer):
            names = pattern[layer % len(pattern)]
            pes = []
            for name in names:
                # A parameter that all layers share is created by the first instance, which gets
                # None here. The others get the first instance, and take its parameter:
                # self.a = shared_from.a if shared_from else nn.Parameter(..)
                pe = PES[name](cfg, shared_from=self.first_instance.get(name))
                self.first_instance.setdefault(name, pe)
                pes.append(pe)
            blocks.append(Block(cfg, names, pes))
        self.limit = min(pe.limit for pe in self.first_instance.values())
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.h = nn.ModuleList(blocks)
        self.ln_f = norm(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight
        # all Linear and Embedding layers start as in GPT-2, including those inside a PE
        for name, layer in self.named_modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                std = 0.02
                if name.endswith("c_proj"):  # the 2 * n_layer projections into the residual stream
                    std = 0.02 / math.sqrt(2 * cfg.n_layer)
                nn.init.normal_(layer.weight, std=std)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, idx, targets=None, cache=None, return_logits=True, reduction="mean"):
        """Returns logits and loss.

        idx        (B, T) token ids
        targets    (B, T) the ids that follow them, or -1 where there is no loss. With targets, the
                   logits are (B, T, V), V = vocab_size. Without targets, they are only those of the
                   last token, (B, 1, V), and the loss is None
        cache      from new_cache(). It holds the tokens before idx, and this call appends idx
        return_logits   False returns None in place of the logits, if there are targets. This saves
                   memory in training, because compiled code allocates a gradient for each output
        reduction  of the losses in nats. "none": (B, T), the loss of each target, or 0 where it is
                   -1. "sum": their sum. "mean": their mean over the targets that are not -1, or 0
                   if there are none
        """
        begin = 0
        if cache is not None and "k" in cache[0]:
            begin = cache[0]["k"].size(2)  # the number of cached tokens
        end = begin + idx.size(1)
        if end > self.limit:
            raise Mistake(f"pe={self.cfg.pe!r} has only {self.limit} positions, but the input "
                          f"needs {end}; shorten it, or generate with context={self.limit}")
        j = torch.arange(end, device=idx.device)  # (S,) the positions of all keys
        if self.training and self.cfg.random_positions:
            # Of a larger range, draw as many positions as there are tokens, and sort them. So the
            # model meets distances that are larger than its texts (Ruoss arXiv:2305.16843)
            j = torch.randperm(self.cfg.random_positions, device=idx.device)[:end].sort().values
        pos = j[begin:]  # (T,) those of the new tokens
        x = self.wte(idx)
        per_position = {name: pe.per_position(x, pos) for name, pe in self.first_instance.items()}
        for pe in self.first_instance.values():
            x = pe.embed(x, pos)  # learned, sinusoidal, and expe and exqpe with expe_once
        x = F.dropout(x, self.cfg.dropout, self.training)
        for layer, block in enumerate(self.h):
            x = block(x, pos, j, per_position, None if cache is None else cache[layer])
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        # bfloat16 logits are too coarse for the loss; float32 ones are not copied
        precise = logits.to(at_least_float32(logits))
        loss = F.cross_entropy(precise.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction="none" if reduction == "none" else "sum")
        if reduction == "none":
            loss = loss.view(targets.shape)
        elif reduction == "mean":
            loss = loss / (targets != -1).sum().clamp(min=1)
        if not return_logits:
            logits = None
        return logits, loss

    def new_cache(self):
        """Returns an empty cache, a dict for each layer. The class PE says what it will hold."""
        return [{} for _ in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, context=None):
        """Returns idx (B, T) followed by max_new_tokens new tokens. temperature=0 decodes greedily,
        and so does any temperature below 1e-6, because dividing the logits by so small a number
        could overflow. top_k=0 samples from all tokens. Call model.eval() first, to turn dropout
        off.

        The model sees at most the last `context` tokens, or all of them if context is None. When
        the text grows past that, it reads about the last half of them again, with an empty cache,
        and continues from there. The time per token therefore does not grow with the length of the
        text, and a method that gets worse beyond the trained length can write texts of any length.
        """
        cache = self.new_cache()
        begin = 0  # the first token that the model sees
        new = idx  # the tokens that it has not read yet
        for _ in range(max_new_tokens):
            T = idx.size(1)
            if context and T - begin > context:
                half = math.ceil(context / 2)
                # the first multiple of half from which the whole text fits into the context
                begin = half * math.ceil((T - context) / half)
                cache = self.new_cache()
                new = idx[:, begin:]
            logits, _ = self(new, cache=cache)
            logits = logits[:, -1].float()  # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature < 1e-6:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), 1)
        return idx

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type, pe_lr=1.0):
        """Returns AdamW. The weights of every Linear and Embedding decay, and nothing else does.
        The parameters of positional encodings learn at pe_lr times the learning rate. Whoever sets
        a group's lr multiplies it with the group's lr_scale."""
        decay = {m.weight for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        of_pe = {p for block in self.h for p in block.attn.pes.parameters()}
        groups = {}  # {(does it decay, lr_scale): parameters}
        for p in self.parameters():
            key = p in decay, pe_lr if p in of_pe else 1.0
            groups.setdefault(key, []).append(p)
        groups = [dict(params=params, weight_decay=weight_decay if decays else 0.0,
                       lr=scale * learning_rate, lr_scale=scale)
                  for (decays, scale), params in groups.items()]
        return torch.optim.AdamW(groups, learning_rate, betas, fused=device_type in ("cuda", "cpu"))

    def clamp_parameters(self):
        """Must be called after each step of the optimizer, because pope's delta has bounds."""
        for block in self.h:
            for pe in block.attn.pes:
                pe.clamp_parameters()

    def get_num_params(self):
        """Returns the number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak, T):
        """Returns the fraction of the peak FLOP/s that is used if fwdbwd_per_iter sequences of T
        tokens take dt seconds. A token takes 6 N + 12 L C T FLOPs (PaLM appendix B), where L is
        the number of layers and N that of the parameters, apart from those that are only looked up
        in a table."""
        N = sum(p.numel() for name, p in self.named_parameters() if "wpe" not in name)
        if not self.cfg.tie:
            N -= self.wte.weight.numel()
        per_token = 6 * N + 12 * self.cfg.n_layer * self.cfg.n_embd * T
        return per_token * T * fwdbwd_per_iter / dt / peak

    def use_kernels(self, dtype, kernels="auto"):
        """Makes each layer use the Triton kernels if they can compute it, unless kernels="off".
        Call this after the model has moved to its device. dtype is that of q, k and v, which is
        autocast's dtype if autocast is on.

        Returns a line that names the code that computes the attention of each kind of layer, and
        in brackets why it is not a kernel, such as "attention: fused rope (it needs no kernel),
        triton cope". fused is PyTorch's own attention, which never stores the T x T logits, and
        chunked is `textbook` on some queries at a time."""
        labels = []
        for block in self.h:
            attn = block.attn
            reason = "kernels=off" if kernels == "off" else why_no_kernel(attn, dtype)
            attn.use_triton = reason is None
            learns = any(True for pe in attn.bias_pes for _ in pe.parameters())
            if reason is None:
                label = f"triton {'+'.join(attn.names)}"
            elif attn.can_fuse(attn.c_v.weight.device, dtype, learns):
                label = f"fused {'+'.join(attn.names)} ({reason})"
            else:
                label = f"chunked {'+'.join(attn.names)} ({reason})"
            labels.append(label)
        return "attention: " + ", ".join(dict.fromkeys(labels))

# --- the methods ----------------------------------------------------------------------------------

class NoPE(PE):
    """`nope`: no encoding. Only the causal mask tells the order (Haviv et al. arXiv:2203.16634)."""

class Learned(PE):
    """`learned`: adds a learned vector per position to the token embeddings (Vaswani
    arXiv:1706.03762 section 3.5, and GPT-2)."""

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.limit = max(cfg.block_size, cfg.random_positions)
        self.wpe = shared_from.wpe if shared_from else nn.Embedding(self.limit, cfg.n_embd)

    def embed(self, x, pos):
        return x + self.wpe(pos)

def frequencies(base, n, x):
    """Returns theta_c = base^(-c/n), c = 0..n-1, as a tensor (n,). This is recomputed on every
    call, because model.bfloat16() would round a buffer, and the phases of distant positions would
    then be wrong by whole radians."""
    return base ** (-torch.arange(n, device=x.device, dtype=at_least_float32(x)) / n)

class Sinusoidal(PE):
    """`sinusoidal`: multiplies the token embeddings by sqrt(C), and adds sin(i theta_c) to
    dimension 2c and cos(i theta_c) to dimension 2c + 1, where theta_c = base^(-2c/C) (Vaswani
    arXiv:1706.03762 sections 3.4 and 3.5)."""
    reads = ("base", "sinusoidal_scale")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        require(cfg.n_embd % 2 == 0, f"sinusoidal needs pairs, but n_embd={cfg.n_embd} is odd")

    def embed(self, x, pos):
        C = x.size(-1)
        angle = pos[:, None] * frequencies(self.cfg.base, C // 2, x)  # (T, C/2)
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (T, C)
        if self.cfg.sinusoidal_scale:
            x = x * C**0.5
        return x + waves.to(x.dtype)

class ExPE(PE):
    """`expe` (Exact Positional Embeddings): overwrites the first l dimensions of the input of the
    projections to q and k. Dimension c becomes S + theta (i + c), c = 0..l-1 (ExPE
    arXiv:2509.19569 eq. 1-3, Figure 1). Every block does so after its norm, because the norm would
    change the values. Blocks share S and theta."""
    reads = (
        "expe_l", "expe_S", "expe_theta", "expe_once", "expe_same", "expe_learned", "expe_scale")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.l = cfg.expe_l or cfg.n_embd // 8
        require(1 <= self.l <= cfg.n_embd,
                f"expe would write positions into l = {self.l} of n_embd={cfg.n_embd} dimensions")
        self.expe_S = shared_from.expe_S if shared_from else self.initial(cfg.expe_S)
        self.expe_theta = shared_from.expe_theta if shared_from else self.initial(cfg.expe_theta)

    def initial(self, value):
        """Returns the value or, if it is learned, a parameter that starts there or at random."""
        if self.cfg.expe_learned == "no":
            return value
        if self.cfg.expe_learned == "random":
            return nn.Parameter(torch.randn(()))
        return nn.Parameter(torch.tensor(value))

    def growth(self, i, c):
        """Returns the values minus S, before expe_scale multiplies them, (T, l) or (T, 1). i (T, 1)
        are positions, and c (l,) dimensions."""
        return self.expe_theta * (i if self.cfg.expe_same else i + c)

    def overwrite(self, x, pos):
        """Returns x (B, T, C) with positions in its first l dimensions."""
        i = pos[:, None].to(at_least_float32(x))
        c = torch.arange(self.l, device=x.device, dtype=at_least_float32(x))
        values = self.expe_S + self.cfg.expe_scale * self.growth(i, c)
        values = values.to(x.dtype).expand(len(x), -1, self.l)  # (B, T, l)
        return torch.cat((values, x[..., self.l :]), -1)

    def embed(self, x, pos):
        return self.overwrite(x, pos) if self.cfg.expe_once else x

    def inputs(self, x, pos):
        return x if self.cfg.expe_once else self.overwrite(x, pos)

class ExQPE(ExPE):
    """`exqpe`: ExPE with the values S + theta_1 c + theta_2 n_c, where n_c is how many of the
    positions 0..i are congruent to c modulo l. Only one dimension changes from one position to the
    next, so its step theta_2 can be large enough for low precision (ExPE section 2.3). Eq. 5 is
    garbled, so n_c is our reading of it. Position 0 already counts, as in eq. 5."""
    reads = (
        "expe_l", "expe_S", "expe_theta", "expe_theta2", "expe_once", "expe_learned", "expe_scale")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg, shared_from)
        theta2 = self.initial(cfg.expe_theta2)
        self.expe_theta2 = shared_from.expe_theta2 if shared_from else theta2

    def growth(self, i, c):
        # The positions up to i that are congruent to c are c, c + l, c + 2l .., so there are
        # floor((i - c) / l) + 1 of them, which is 0 if i < c. This divides integers, because GPUs
        # may divide floats by multiplying by a reciprocal, and the floor of some exact quotients
        # would then be one too low
        n = torch.div((i - c).long(), self.l, rounding_mode="floor") + 1
        return self.expe_theta * c + self.expe_theta2 * n.to(c.dtype)

class Relative(PE):
    """`relative`: adds a learned vector per distance to the keys, so that the logit is
    q_i.(k_j + a[i-j]) / sqrt(d) (Shaw arXiv:1803.02155 eq. 4). As in CoPE's paper, the values get
    no such vectors. All heads and layers share a. A distance beyond the table gets no vector,
    whereas Shaw et al. clip it to the last one, as relative_capped does."""
    reads = ("relative_capped",)

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        R = max(cfg.block_size, cfg.random_positions)  # the number of distances that have a vector
        self.a = shared_from.a if shared_from else nn.Parameter(0.02 * torch.randn(R, self.d))

    def logit_bias(self, q, logits, i, j, per_key):
        R = len(self.a)
        distance = i - j  # (t, s)
        z = scaled_dot_products(q, self.a, self.d)  # (B, H, t, R), the bias at every distance
        B, H = q.shape[:2]
        index = distance.clamp(0, R - 1).expand(B, H, -1, -1)  # (B, H, t, s)
        bias = z.gather(-1, index)
        if not self.cfg.relative_capped:
            bias = bias.masked_fill(distance >= R, 0.0)
        return bias

class T5(PE):
    """`t5`: adds to the logit a learned number per head and bucket of distances (T5
    arXiv:1910.10683 section 2.1). Half of the buckets hold one distance each, and the widths of the
    others grow exponentially. All layers share one table.

    T5 itself does not divide logits by sqrt(d), draws its table at random, and is trained with
    Adafactor, whose steps grow with the size of a parameter. Here the table starts at zero, and
    Adam moves a number by at most about the learning rate in a step, so after a short training the
    bias is still small. With pe_lr=10 it learns ten times as fast."""
    reads = ("t5_buckets", "t5_max_distance")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        exact = cfg.t5_buckets // 2  # the number of buckets that hold one distance each
        require(2 <= exact < cfg.t5_max_distance,
                f"t5_buckets={cfg.t5_buckets} must be 4 or more, and half of it less than "
                f"t5_max_distance={cfg.t5_max_distance}")
        table = torch.zeros(cfg.t5_buckets, cfg.n_head)
        self.table = shared_from.table if shared_from else nn.Parameter(table)
        # The smallest distance of each bucket but the first. The buckets 1 .. exact - 1 hold one
        # distance each
        starts = list(range(1, exact))
        # The others begin at exact, exact r, exact r^2 .., rounded up, and the next one would begin
        # at t5_max_distance. Without the 1e-6, a rounding error could raise what is an integer
        n = cfg.t5_buckets - exact
        r = (cfg.t5_max_distance / exact) ** (1 / n)
        starts += [math.ceil(exact * r**bucket - 1e-6) for bucket in range(n)]
        self.register_buffer("starts", torch.tensor(starts), persistent=False)

    def logit_bias(self, q, logits, i, j, per_key):
        bucket = torch.bucketize(i - j, self.starts, right=True)  # (t, s), how many have begun
        # table[bucket] would be the same, but its backward pass is slow on GPUs
        bias = F.embedding(bucket, self.table)  # (t, s, H)
        return bias.permute(2, 0, 1).to(at_least_float32(q))

def alibi_slopes(H, x):
    """Returns the slopes m_h = 2^(-8h/H) of the heads h = 1..H, (H,). If H is not a power of two,
    the first heads get the slopes of the next lower power, and the others every other slope of the
    next higher one, as in the authors' code (for H = 6: 2^-2, 2^-4, 2^-6, 2^-8, 2^-1, 2^-3)."""
    lower = 2 ** int(math.log2(H))
    h = torch.arange(1, H + 1, device=x.device, dtype=at_least_float32(x))
    exponent = torch.where(h <= lower, h, h - lower - 0.5) * (8 / lower)
    return 2.0**-exponent

class ALiBi(PE):
    """`alibi`: adds -m_h (i - j) to the logit, so that attention decays with distance, with a fixed
    slope m_h per head (ALiBi arXiv:2108.12409 section 3). With alibi_fraction < 1, only that
    fraction of the heads, the first ones, have a slope, and the others ignore positions.

    -m_h (i - j) is m_h j - m_h i, the difference of a number of the key and one of the query, so
    no T x S matrix of biases is needed (see PE.key_bias)."""
    reads = ("alibi_fraction",)

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.heads = round(cfg.alibi_fraction * self.H)  # that have a slope
        require(1 <= self.heads <= self.H,
                f"alibi_fraction={cfg.alibi_fraction} gives a slope to {self.heads} of {self.H} "
                "heads")

    def key_bias(self, j, per_key):
        """Returns m_h j, (H, S)."""
        without = j.new_zeros(self.H - self.heads)  # the heads without a slope
        return torch.cat((alibi_slopes(self.heads, j), without))[:, None] * j

def rotate_pairs(x, cos, sin):
    """Rotates the pairs (x[c], x[c + n]), c = 0..n-1, of x (B, H, T, d), and leaves the dimensions
    from 2n on as they are. cos and sin (.., T, n) are those of the angles."""
    n = cos.size(-1)
    a, b, rest = x.split((n, n, x.size(-1) - 2 * n), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).to(x.dtype)

def stored(table):
    """Returns the same table, but makes torch.compile store it. Otherwise each use of the table
    would compute the cosines and sines again, because torch.compile fuses what is cheap into its
    uses. It does not fuse through as_strided."""
    return table.as_strided(table.shape, table.stride())

class RoPE(PE):
    """`rope`: rotates the pair (c, c + n) of q by the angle i theta_c and that of k by j theta_c,
    where theta_c = base^(-c/n), c = 0..n-1, n = d/2. The product q.k then depends on positions only
    through the distance i - j (RoPE arXiv:2104.09864 eq. 16; the paper pairs adjacent dimensions,
    which is equivalent up to a permutation).

    Two options rotate only a part of the dimensions, and are easily confused. With
    rope_fraction < 1, n is smaller, and the fewer pairs have frequencies from 1 down to nearly
    1/base, as before (GPT-NeoX arXiv:2204.06745). With rope_p < 1, all pairs keep the frequencies
    that they have without the option, but the slowest ones do not rotate at all. Their product
    depends only on content, at any distance (p-RoPE arXiv:2410.06205 section 6).

    Three options let a trained model read longer texts, see `scale_frequencies` below."""
    reads = ("base", "rope_fraction", "rope_p", "rope_scaling", "rope_factor", "rope_trained")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        width = self.rotated_width(cfg)
        scaling, factor = cfg.rope_scaling, cfg.rope_factor
        require(width % 2 == 0 and 2 <= width <= self.d,
                f"rope rotates pairs, but rope_fraction={cfg.rope_fraction} of n_embd / n_head = "
                f"{self.d} is {width}; it must be even and from 2 to {self.d}")
        require((scaling == "none") == (factor == 1),
                f"rope_scaling={scaling} with rope_factor={factor} does nothing; set both")
        require(factor > 0 and (factor >= 1 or scaling != "yarn"),
                f"rope_factor={factor} is too low")
        require(scaling != "ntk" or width > 2, "ntk needs two pairs, but only one is rotated")
        require(0 < cfg.rope_p <= 1, f"rope_p={cfg.rope_p} must be above 0, and at most 1")
        require(round(cfg.rope_p * width / 2) > 0, f"rope_p={cfg.rope_p} rotates no pair of a head")
        require(scaling != "yarn" or width == self.d,
                f"yarn scales all logits, so it needs rope_fraction=1, not {cfg.rope_fraction}")

    @staticmethod
    def rotated_width(cfg):
        """Returns 2n, the number of dimensions of each head that are rotated."""
        return round(cfg.rope_fraction * cfg.n_embd / cfg.n_head)

    def theta(self, x):
        """Returns the frequencies (n,)."""
        n = self.rotated_width(self.cfg) // 2
        theta = scale_frequencies(frequencies(self.cfg.base, n, x), self.cfg)
        rotating = round(self.cfg.rope_p * n)
        return F.pad(theta[:rotating], (0, n - rotating))

    def per_position(self, x, pos):
        """Returns the cosines and sines of the angles, (2, T, n)."""
        angle = pos[:, None] * self.theta(x)  # (T, n)
        table = torch.stack((angle.cos(), angle.sin()))
        if self.cfg.rope_scaling == "yarn":
            gain = 0.1 * math.log(self.cfg.rope_factor) + 1  # YaRN eq. 22
            table = gain * table
        return stored(table)

    def encode_qk(self, q, k, x, per_position, cache):
        cos, sin = per_position
        return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)

def scale_frequencies(theta, cfg):
    """Returns RoPE's frequencies (n,) after rope_scaling, which lets a trained model read
    rope_factor times the trained length (YaRN arXiv:2309.00071 sections 2 and 3 describe all three
    ways):

        linear   divides every frequency by the factor, so no angle is larger than in training
        ntk      divides frequency c by factor^(c/(n-1)). So the slowest pair is scaled as with
                 linear, and the fastest, which tells neighbours apart, not at all. (This is the
                 same as a larger base, base factor^(n/(n-1)).)
        yarn     counts the rotations that a pair makes within the trained length. A pair with at
                 most 1 would meet new angles in longer texts, so its frequency is divided by the
                 factor. A pair with 32 or more has met every angle many times, and keeps its
                 frequency. In between, yarn interpolates linearly in the number of rotations
                 (deployed code often does so in c). It also scales cos and sin, which sharpens the
                 softmax
    """
    factor = cfg.rope_factor
    if cfg.rope_scaling == "linear":
        return theta / factor
    if cfg.rope_scaling == "ntk":
        n = len(theta)
        c = torch.arange(n, device=theta.device, dtype=theta.dtype)
        return theta / factor ** (c / (n - 1))
    if cfg.rope_scaling == "yarn":
        rotations = (cfg.rope_trained or cfg.block_size) * theta / (2 * math.pi)
        gamma = ((rotations - 1) / (32 - 1)).clamp(0, 1)  # alpha = 1, beta = 32
        return theta * (gamma + (1 - gamma) / factor)
    return theta

class PoPE(PE):
    """`pope` (Polar Coordinate Positional Embedding): the logit is
    sum_c mu(q_c) mu(k_c) cos((j - i) theta_c + delta_c) / sqrt(d), where mu is softplus and
    theta_c = base^(-c/d), c = 0..d-1 (PoPE arXiv:2509.10534 eq. 5; the paper prints
    base^(+c/d) under eq. 3, a typo). Content sets only the magnitudes, and position sets only the
    phases, of which there is one per dimension rather than one per pair. The cosine of a difference
    is the dot product of two unit vectors, so the logit is computed as the dot product of vectors
    [mu cos, mu sin] of width 2d (eq. 6, 7, 9).

    delta (H, d) is learned and stays in [-2 pi, 0]. The paper clamps it to these bounds, which it
    found to improve stability, although 0 and -2 pi are the same angle."""
    reads = ("base", "pope_mu", "pope_delta")
    bounds = {"delta": (-2 * math.pi, 0.0)}

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.delta = None
        if cfg.pope_delta != "none":
            lowest = -2 * math.pi if cfg.pope_delta == "uniform" else 0.0
            self.delta = nn.Parameter(lowest * torch.rand(cfg.n_head, self.d))

    def per_position(self, x, pos):
        """Returns the angles i theta_c (T, d), and their unit vectors (T, 2d)."""
        angle = pos[:, None] * frequencies(self.cfg.base, self.d, x)
        return angle, self.unit_vectors(angle)

    def unit_vectors(self, angle):
        """Returns [cos, sin] (.., T, 2d) of angles (.., T, d)."""
        return stored(torch.cat((angle.cos(), angle.sin()), -1))

    def encode_qk(self, q, k, x, per_position, cache):
        angle, of_q = per_position
        of_k = of_q
        if self.delta is not None:
            of_k = self.unit_vectors(angle + self.delta.to(angle)[:, None])  # (H, T, 2d)
        return self.polar(q, of_q), self.polar(k, of_k)  # (B, H, T, 2d)

    def polar(self, x, unit_vectors):
        """Returns [mu cos, mu sin] (B, H, T, 2d) of x (B, H, T, d)."""
        mu = x.to(at_least_float32(x))
        if self.cfg.pope_mu == "softplus":
            mu = F.softplus(mu)
        elif self.cfg.pope_mu == "relu":
            mu = F.relu(mu)
        return (torch.cat((mu, mu), -1) * unit_vectors).to(x.dtype)

class CoPE(PE):
    """`cope` (Contextual Position Encoding): positions count the tokens that the query cares about.
    The gate g_ij = sigmoid(q_i.k_j / sqrt(d)) says how much query i counts key j. The position of
    key j is the sum of the gates from j to i, p_ij = g_ij + .. + g_ii, clamped to npos - 1. (If all
    gates are 1, p_ij is i - j + 1.) The bias is q_i.e[p_ij]. The table e has a vector for each
    integer, as (d, npos) or (H, d, npos), and between two integers q_i.e is interpolated linearly
    (CoPE arXiv:2405.18719 eq. 3-8 and Listing 1; eq. 3 omits sqrt(d)).

    Query 5 sees this, with npos = 4 and z = q_5.e = (0, 2, 1, 3). kernels.py continues the example
    with the gradients.

        key     0     1     2     3     4     5
        gate   .5   .75   .75    .5    .5   .75
        p       3     3   2.5  1.75  1.25   .75    summed from the right; 3.75, 3.25 are clamped
        bias    3     3     2  1.25  1.75   1.5    z at p: 2.5 is halfway between z[2] and z[3]

    Which q? In `cope+rope`, q and k are rotated, and what is dotted with a rotated vector must be
    rotated, too. So with cope_gates="keys", as in Listing 1, the gates come from the layer's own
    logits, the products of rotated q and k. But q.e, and the products with the gates' own keys or
    with values, take q as it was before the rotation, because e and the others are not rotated."""
    reads = ("cope_gates", "cope_npos", "cope_scale_z", "cope_shared", "cope_per_head")
    recompute = True  # 1024 tokens would otherwise take eight times as much memory as with rope

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        require(cfg.cope_npos > 1, f"cope_npos={cfg.cope_npos} gives all keys the same position")
        if cfg.cope_gates == "sep-keys":
            self.W_g = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.add_parameters(shared_from if cfg.cope_shared else None)

    def add_parameters(self, shared_from):
        """Creates e. The two variants of CoPE below create other parameters instead, which layers
        do not share."""
        shape = (self.d, self.cfg.cope_npos)
        if self.cfg.cope_per_head:
            shape = (self.H, *shape)
        self.e = shared_from.e if shared_from else nn.Parameter(torch.zeros(shape))

    def per_key(self, x, k, v, cache):
        """Returns what q is dotted with for the gates, (B, H, S, d)."""
        if self.cfg.cope_gates == "sep-keys":
            return extend_cache(cache, "gate_k", split_heads(self.W_g(x), self.H))
        if self.cfg.cope_gates == "values":
            return v
        return k

    def logit_bias(self, q, logits, i, j, gate_k):
        g = self.gates(q, logits, i, j, gate_k)
        return self.bias_at(self.positions(g), q)

    def gates(self, q, logits, i, j, gate_k):
        """Returns g (B, H, t, s), which is 0 in the future."""
        if self.cfg.cope_gates != "keys":
            logits = scaled_dot_products(q, gate_k, self.d)
        return logits.sigmoid() * (j <= i)

    def positions(self, g):
        """Returns p (B, H, t, s). The gates are summed from the right, because the difference of
        two sums from the left would lose precision."""
        return g.flip(-1).cumsum(-1).flip(-1)

    def bias_at(self, p, q):
        """Returns the bias (B, H, t, s) at the positions p."""
        z = self.z(q).to(at_least_float32(q))
        z_next = torch.cat((z[..., 1:], z[..., -1:]), -1)  # z at the next integer
        p = p.clamp(max=self.cfg.cope_npos - 1)
        below = p.long().clamp_(min=0)  # gather refuses the negative integer that NaN may become
        return torch.lerp(z.gather(-1, below), z_next.gather(-1, below), p.frac())

    def z(self, q):
        """Returns q.e (B, H, t, npos), the bias at every integer position."""
        z = q @ self.e
        return z * self.d**-0.5 if self.cfg.cope_scale_z else z

class CoPE_MLP(CoPE):
    """`cope_mlp`: CoPE with an MLP of N hidden units in place of the table, so that the bias is
    q_i . W2^T gelu(W1 p_ij / npos + b1) (CoPE appendix C). The paper gives only N. GELU, the clamp
    of p and the division by npos are our choices."""
    reads = ("cope_gates", "cope_npos", "cope_scale_z", "cope_mlp_width")

    def add_parameters(self, shared_from):
        N = self.cfg.cope_mlp_width
        self.W1 = nn.Parameter(torch.randn(N))
        self.b1 = nn.Parameter(torch.randn(N))
        self.W2 = nn.Parameter(0.02 * torch.randn(N, self.d))

    def bias_at(self, p, q):
        u = (q @ self.W2.T).to(at_least_float32(q))  # (B, H, t, N)
        if self.cfg.cope_scale_z:
            u = u * self.d**-0.5
        p = p.clamp(max=self.cfg.cope_npos - 1) / self.cfg.cope_npos
        hidden = F.gelu(p[..., None] * self.W1 + self.b1)  # (B, H, t, s, N)
        return (hidden @ u[..., None])[..., 0].to(at_least_float32(q))  # (B, H, t, s)

class CoPE_ALiBi(CoPE):
    """`cope_alibi`: adds -m_h p_ij to the logit, which is ALiBi with CoPE's unclamped position as
    the distance (CoPE eq. 10, which prints +m, although that would favour distant keys)."""
    reads = ("cope_gates", "cope_slopes", "cope_m0")
    recompute = False  # there are no look-ups, so less is kept

    def add_parameters(self, shared_from):
        if self.cfg.cope_slopes == "learned":
            self.m = nn.Parameter(torch.zeros(self.H))

    def bias_at(self, p, q):
        if self.cfg.cope_slopes == "alibi":
            m = alibi_slopes(self.H, q)
        elif self.cfg.cope_slopes == "geometric":
            h = torch.arange(self.H, device=q.device, dtype=at_least_float32(q))
            m = self.cfg.cope_m0 * 0.5**h
        else:
            m = self.m.to(at_least_float32(q))
        return -m.view(self.H, 1, 1) * p

def precise_product(x, W):
    """Returns x W in at least float32. Autocast would round it to bfloat16, and carope and fox,
    which add up the products of all tokens, would add up those errors too. (The same holds for
    TF32, which PyTorch uses only if torch.set_float32_matmul_precision or the environment's
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE asks for it.)"""
    dtype = at_least_float32(x)
    with torch.autocast(x.device.type, enabled=False):
        return x.to(dtype) @ W.to(dtype)

class FoX(PE):
    """`fox`: adds sum_{l=j+1..i} log f_l, where f_l = sigmoid(x_l W + b) is the forget gate that
    token l has in each head (FoX arXiv:2503.02130 section 3). It is like ALiBi with slopes that
    depend on content: each token's gate decides how much of the earlier context is kept. x is the
    attention's input. W and b start as in the authors' code, which makes f about 1/2. There they
    are an nn.Linear whose weight decays, and here they do not decay.

    In the backward pass, d(log f_l) sums dS, the gradient of the logits, over all pairs (i, j)
    whose path crosses l (j < l <= i)."""

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.W = nn.Parameter(0.02 * torch.randn(cfg.n_embd, cfg.n_head))
        self.b = nn.Parameter(torch.zeros(cfg.n_head))

    def per_key(self, x, k, v, cache):
        """Returns the running sums log f_0 + .. + log f_j at each key j, (B, H, S)."""
        log_f = F.logsigmoid(precise_product(x, self.W) + self.b)  # (B, T, H)
        # in float32, the sum over thousands of tokens would lose precision
        sums = as_float64(log_f.mT).cumsum(-1)  # (B, H, T)
        if "sums" in cache:
            sums = sums + cache["sums"][..., -1:]
        return extend_cache(cache, "sums", sums)

    def key_bias(self, j, sums):
        """Returns minus the running sums, because sums_i - sums_j is the sum over l = j+1..i."""
        return -sums

class CARoPE(PE):
    """`carope` (Context-Aware Rotary Positional Embedding): RoPE whose frequencies depend on
    content. Each token x_t sets one frequency per head, f(x_t) = 1 / (softplus(x_t W + b) + 1), and
    the angle of pair c is the running sum
    phi_c(i) = sum_{t<=i} f(x_t)^c, c = 0..d/2-1 (CARoPE arXiv:2507.23083 section 2). Pair 0 does
    not depend on content, because f^0 = 1.

    carope_x says what x is. The paper's words are "the embedding of the token", but with that, our
    small models get worse in longer texts nearly as much as RoPE's, and the paper's models do not
    (eval/README.md). So x is the attention's input, unless carope_x="embedding".

    The paper does not say how CARoPE starts out as RoPE, which it is meant to do, so we add the
    constant b: with W = 0 it gives f = base^(-2/d), whose powers f^c are RoPE's frequencies."""
    reads = ("base", "carope_x")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        require(self.d % 2 == 0, f"carope rotates pairs, but n_embd / n_head = {self.d} is odd")
        require(cfg.base > 1, f"carope needs base > 1, because f starts below 1; got {cfg.base}")
        self.W = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_head))
        # f = 1 / (softplus(b) + 1) is base^(-2/d) if softplus(b), which is ln(1 + e^b), is this
        target = cfg.base ** (2 / self.d) - 1
        # so b = ln(e^target - 1), which would overflow as it stands if target is large
        self.b = target + math.log(-math.expm1(-target))

    def per_position(self, x, pos):
        """Returns the token embeddings (B, T, C) if they set the frequencies."""
        return x if self.cfg.carope_x == "embedding" else None

    def encode_qk(self, q, k, x, embeddings, cache):
        if embeddings is not None:
            x = embeddings
        u = precise_product(x, self.W) + self.b  # (B, T, H)
        log_f = -torch.log1p(F.softplus(u))
        c = torch.arange(self.d // 2, device=x.device)
        # f^c is computed as exp(c log f)
        phi = (log_f.mT[..., None] * c).exp().cumsum(2)  # (B, H, T, d/2)
        if "phi" in cache:
            phi = phi + cache["phi"]
        # Older keys are rotated already, so the last phase is enough. It is kept modulo 2 pi,
        # because a large phase would lose precision
        cache["phi"] = as_float64(phi[:, :, -1:]) % (2 * math.pi)
        cos, sin = phi.cos(), phi.sin()
        return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)

# cache: numbers per token and head (*: d more with sep-keys)
PES = {                        # acts on        learns                        cache
    "nope": NoPE,              # nothing        nothing                       2d
    "learned": Learned,        # embeddings     a vector per position         2d
    "sinusoidal": Sinusoidal,  # embeddings     nothing                       2d
    "expe": ExPE,              # input of q, k  nothing, or S and theta       2d
    "exqpe": ExQPE,            # input of q, k  nothing, or S and thetas      2d
    "relative": Relative,      # logits         a vector per distance         2d
    "t5": T5,                  # logits         a number per head and bucket  2d
    "alibi": ALiBi,            # logits         nothing                       2d
    "rope": RoPE,              # q, k           nothing                       2d
    "pope": PoPE,              # q, k           a phase per head, dimension   3d
    "cope": CoPE,              # logits         a vector per count            2d*
    "cope_mlp": CoPE_MLP,      # logits         an MLP of the count           2d*
    "cope_alibi": CoPE_ALiBi,  # logits         nothing, or slopes            2d*
    "fox": FoX,                # logits         a forget gate per head        2d+1
    "carope": CARoPE,          # q, k           frequencies, by content       2d
}

# --- the Triton kernels, which are optional -------------------------------------------------------
# kernels.py computes `textbook`, up to rounding, without storing the logits. It supports biases
# of keys, PoPE, whose q and k are wider, and CoPE, but not CoPE's subclasses, whose bias is another

def why_no_kernel(attn, dtype):
    """Returns why the kernels cannot compute a layer's attention, in words, or None if they can."""
    if attn.cfg.hard_attention:
        return "hard attention has no kernel"
    if attn.cfg.dropout:
        return "dropout has no kernel"
    if not all(has_key_bias(pe) or type(pe) is CoPE for pe in attn.bias_pes):
        return "its bias has no kernel"
    if not attn.bias_pes and not any(isinstance(pe, PoPE) for pe in attn.pes):
        return "it needs no kernel"
    try:
        import kernels
    except ImportError:
        return "no triton"
    return kernels.why_not(attn.d, attn.c_v.weight.device, dtype)

def triton_attention(attn, q, k, v, unencoded_q, j, per_key):
    """`textbook` for all T tokens of a layer that has a kernel."""
    import kernels

    bias = None
    if any(map(has_key_bias, attn.bias_pes)):
        bias = attn.key_bias(j, per_key).float().expand(v.shape[:3])
    cope = {}
    for pe, its_per_key in zip(attn.bias_pes, per_key):
        if type(pe) is CoPE:
            cope["z"] = pe.z(unencoded_q)
            if attn.cfg.cope_gates != "keys":  # otherwise the gates reuse the kernel's own logits
                cope.update(gate_q=unencoded_q, gate_k=its_per_key)
    return kernels.attention(q, k, v, bias, **cope)

# --- the checks -----------------------------------------------------------------------------------

def check_options(cfg, pattern):
    """Refuses options that would silently do something other than they say. Each class refuses
    those of its own method, and Python and PyTorch report other mistakes."""
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "base"):
        value = getattr(cfg, name)
        require(0 < value < math.inf, f"{name}={value} must be positive and finite")
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.type is int:
            require(value >= 0, f"{field.name}={value} must not be negative")
        elif get_origin(field.type) is Literal:
            choices = get_args(field.type)
            require(value in choices, f"{field.name}={value!r}: choose one of {', '.join(choices)}")
    require(0 <= cfg.dropout < 1, f"dropout={cfg.dropout} must be from 0 to below 1")
    require(not cfg.random_positions or cfg.random_positions >= cfg.block_size,
            f"random_positions={cfg.random_positions} must be 0, or at least block_size="
            f"{cfg.block_size}")
    require(cfg.n_embd % cfg.n_head == 0, f"n_head={cfg.n_head} must divide n_embd={cfg.n_embd}")
    require(len(pattern) <= cfg.n_layer,
            f"pe={cfg.pe!r} is a pattern of {len(pattern)} layers, but n_layer={cfg.n_layer}")
    for names in pattern:
        for name in names:
            require(name, f"pe={cfg.pe!r} has an empty name")
            require(name in PES, f"pe={name!r} is unknown; choose from {', '.join(PES)}")
            require(names.count(name) == 1, f"pe={cfg.pe!r} names {name} twice in one layer")
        encoding = [name for name in names if overrides(PES[name], "encode_qk")]
        require(len(encoding) <= 1,
                f"{' and '.join(encoding)} cannot both encode q and k of a layer")
    used = {name for names in pattern for name in names}
    groups = pattern  # expe and exqpe write into the input of their layer's attention
    if cfg.expe_once:
        groups = [used]  # they write into the embeddings, whichever layers name them
    for names in groups:
        both = {"expe", "exqpe"} <= set(names)
        require(not both, f"pe={cfg.pe!r}: expe and exqpe would write into the same dimensions")

def refuse_idle_options(pe, given):
    """Refuses an option among the names `given` that does nothing, because none of the methods in
    pe reads it. Otherwise somebody might take its row for another one."""
    methods = [cls for name, cls in PES.items() if name in re.split("[+,]", pe)]
    idle = {option for cls in PES.values() for option in cls.reads}
    idle -= {option for cls in methods for option in cls.reads}
    for option in given:
        require(option not in idle, f"{option} does nothing for pe={pe!r}; leave it out")
