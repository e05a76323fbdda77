"""
A GPT whose positional encoding (PE) is one switch: GPTConfig(pe="pope"), pe="cope+rope", and so on.

Read it from top to bottom: the config, the hooks that a method may override, a plain GPT that calls
them, the methods, one small class each, and their table PES. The rest can wait. One forward pass:

    tokens -> wte -> EMBED -> blocks -> norm -> lm_head
    block:      x + attention(norm(x)), then x + MLP(norm(x))
    attention:  INPUTS -> c_qk, c_v -> ROTATE -> cache -> q.k + LOGIT_BIAS -> softmax -> c_proj

The words in capitals are hooks. A hook does nothing unless a method overrides it.

Shapes   B batch, T queries (the new tokens), S keys (cached and new), C = n_embd, H = n_head,
         d = C / H. A comment `# (B, H, T, d)` is the shape of its line's result
Symbols  i is the position of a query, j that of a key, theta_c the frequency of dimension or pair
         c. For the rest, each class keeps the symbols of its paper
"""
import difflib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 128  # layers with a bias on the logits take this many queries at a time

@dataclass
class GPTConfig:
    block_size: int = 1024  # tokens per training sequence; only 'learned' cannot go past it
    vocab_size: int = 50304  # number of token ids
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads per block (H)
    n_embd: int = 768  # width of the residual stream (C)
    dropout: float = 0.0  # on embeddings, attention weights and both branches of a block
    bias: bool = True  # biases in linear layers and LayerNorms
    norm: str = "layernorm"  # layernorm | rmsnorm
    hard_attention: bool = False  # all weight on the largest logit (CoPE appendix C, an ablation)
    mlp: str = "gelu"  # gelu | swiglu
    mlp_width: int = 0  # hidden width; 0: 4 C (gelu), 8/3 C rounded up to a multiple of 64 (swiglu)
    tie: bool = True  # the output layer uses the token embeddings' weights
    pe: str = "learned"  # a name of PES; a+b: both in a layer; a,b,c: a pattern over the layers
    # options of the positional encodings, by method
    base: float = 10000.0  # theta_c = base^(-c/n), n: d/2 in (ca)rope, d in pope, C/2 in sinusoidal
    sinusoidal_scale: bool = True  # multiply the token embeddings by sqrt(C) (Vaswani, not ExPE)
    rel_max: int = 0  # relative: how many distances have a vector; 0: block_size
    rel_capped: bool = False  # longer distances reuse the last vector; else they add nothing
    rel_shared: bool = True  # relative: one table for the model, not one per layer
    t5_buckets: int = 32  # t5: distance buckets; half hold one distance each
    t5_max_distance: int = 128  # t5: from here on all distances share the last bucket
    rope_scaling: str = "none"  # none | linear | ntk | yarn: stretch rope at test time ...
    rope_factor: float = 1.0  # ... to this many times the trained length
    rope_trained: int = 0  # yarn: the trained length, if block_size was raised; 0: block_size
    cope_npos: int = 64  # cope, cope_mlp: number of positions; p is clamped to npos - 1
    cope_gates: str = "keys"  # keys | sep-keys | values: what q is dotted with to form the gates
    cope_shared: bool = True  # cope: one table for the model, not one per layer
    cope_per_head: bool = False  # cope: a table for each head, not one for all of them
    cope_scale_z: bool = False  # divide q.e by sqrt(d) too (official code; Listing 1 does not)
    cope_mlp_width: int = 64  # cope_mlp: N, hidden width
    cope_slopes: str = "alibi"  # cope_alibi: alibi | geometric (m0, m0/2, ...) | learned (from 0)
    cope_m0: float = 1.0  # cope_alibi: the first head's slope, if geometric
    pope_softplus: bool = True  # magnitudes are softplus(q), softplus(k); else q, k themselves
    pope_delta: str = "zero"  # zero | uniform: start of the learned phase delta | none: no delta
    expe_l: int = 0  # expe, exqpe: l, how many dimensions hold the position; 0: C / 8
    expe_S: float = 0.0  # S, added to every value
    expe_theta: float = 1 / 2048  # theta (expe), theta_1 (exqpe): step from dimension to dimension
    expe_theta2: float = 1 / 16  # theta_2 (exqpe): step of one dimension per position
    expe_v: bool = False  # write positions into the input of the values too
    expe_once: bool = False  # only before the first block, not in every block
    expe_same: bool = False  # expe: the same value in all l dimensions
    expe_learned: str = "no"  # no | random | init: train S and theta, from random or given values
    expe_scale: float = 1.0  # test time: multiply all but S by this (0.5: twice the length)

class PE(nn.Module):
    """`nope`: no positional encoding. Only the causal mask tells a token what came before it.

    Every other method is a subclass that overrides the hooks where it acts. shared_from is this
    method's instance in the first layer that uses it (None in that layer), to share parameters
    with. An nn.Linear here is initialised and decays as any other; an nn.Parameter starts as
    __init__ sets it, and never decays. Arguments of the hooks:
        x         (B, T, C)      in embed the token embeddings, elsewhere the attention's input
        pos       (T,)           positions of the new tokens
        q, k      (B, H, T, d)   queries and keys of the new tokens
        cache     dict           this PE's own; kept between calls when decoding, else empty
    and in key_features and logit_bias:
        k, v      (B, H, S, d)   keys after rotation (PoPE's: 2d), and values, of all tokens so far
        q         (B, H, t, d)   a chunk of the queries, before rotation
        logits    (B, H, t, s)   q.k / sqrt(d) of these queries, after rotation
        i, j      (t, 1), (s,)   positions of these queries, and of the keys up to the last query
        features  (B, H, s, ..)  what key_features returned for these keys
    """
    def __init__(self, cfg, shared_from=None):
        super().__init__()
        self.cfg, self.H, self.d = cfg, cfg.n_head, cfg.n_embd // cfg.n_head

    def embed(self, x, pos):
        return x  # the new embeddings; called once, before the first block

    def inputs(self, x_qk, x_v, pos):
        return x_qk, x_v  # (B, T, C), the inputs of the q, k projection and of the v projection

    def rotate(self, q, k, x, pos, cache):
        return q, k  # rotated; this k goes into the layer's cache

    def key_features(self, x, k, v, cache):
        return k  # (B, H, S, ..), what logit_bias needs to know about each key

    def logit_bias(self, q, logits, i, j, features):
        """Returns what to add to the logits, broadcastable to (B, H, t, s), in precise(q). For keys
        in the future (j > i) it must be finite: the mask adds -inf to it."""
        return 0.0

    def clamp_parameters(self):
        """Moves parameters back into their bounds, after each optimizer step."""

# --- a plain GPT ----------------------------------------------------------------------------------

def split_heads(x, H):
    """(B, T, C) -> (B, H, T, d)"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)

def precise(x):
    """The dtype of logits and phases: float32, or float64 if x is float64."""
    return torch.promote_types(x.dtype, torch.float32)

def dots(q, k, d):
    """q.k / sqrt(d), (B, H, t, s). d is the width of a head, even where PoPE's q, k are 2d wide."""
    return (q @ k.mT).to(precise(q)) * d**-0.5

def append(cache, name, new):
    """Appends new (B, H, T, ..) to the tensor under that name. Returns it all (B, H, S, ..)."""
    cache[name] = torch.cat((cache[name], new), 2) if name in cache else new
    return cache[name]

class Attention(nn.Module):
    def __init__(self, cfg, mix, pes):
        super().__init__()
        self.mix = mix  # this layer's part of cfg.pe, such as "cope+rope", the names of pes
        self.cfg, self.H, self.d = cfg, cfg.n_head, cfg.n_embd // cfg.n_head
        self.c_qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=cfg.bias)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)  # apart: expe changes q, k only
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.pes = nn.ModuleList(pes)
        self.biases = [pe for pe in pes if type(pe).logit_bias is not PE.logit_bias]
        self.triton = False  # GPT.use_kernels turns it on where a Triton kernel fits
        self.kept = None  # set it to {} to collect the tensors of a forward pass

    def forward(self, x, pos, cache=None):
        """x (B, T, C) -> (B, T, C). cache: this layer's dict, which is read and extended."""
        x_qk = x_v = x
        for pe in self.pes:
            x_qk, x_v = pe.inputs(x_qk, x_v, pos)  # expe, exqpe
        q, k = (split_heads(y, self.H) for y in self.c_qk(x_qk).chunk(2, -1))  # (B, H, T, d)
        v = split_heads(self.c_v(x_v), self.H)
        if self.triton and cache is None and self.kept is None:  # a kernel fills neither
            y = triton_attention(self, q, k, v, x, pos)
        else:
            y = self.attention(q, k, v, x, pos, {} if cache is None else cache)
        y = self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return F.dropout(y, self.cfg.dropout, self.training)

    def attention(self, q, k, v, x, pos, cache):
        """(B, H, T, d) -> (B, H, T, d)"""
        raw_q, raw_k = q, k
        for pe in self.pes:
            q, k = pe.rotate(q, k, x, pos, cache.setdefault(pe, {}))  # rope, carope, pope
        k, v = append(cache, "k", k), append(cache, "v", v)  # (B, H, S, d); PoPE's k is 2d wide
        if not (self.biases or self.cfg.hard_attention or self.kept is not None):
            return self.fused(q, k, v)

        features = [pe.key_features(x, k, v, cache.setdefault(pe, {})) for pe in self.biases]
        q, k, v, raw_q = (y.contiguous() for y in (q, k, v, raw_q))  # once, not per chunk
        T, S, chunks = q.size(2), k.size(2), []
        j = pos[-1] + 1 - S + torch.arange(S, device=q.device)  # the last key is the last query's
        n = math.ceil(T / CHUNK)  # number of chunks: the T x T matrix may not fit in memory
        if torch.compiler.is_compiling():
            n = 4  # unrolled: one graph for all lengths. 4 chunks skip 3/8 of the pairs
        if self.kept is not None:
            self.kept.update(x=x, q=raw_q, k=raw_k, v=v)
            n = 1
        for c in range(n):
            rows = slice(T * c // n, T * (c + 1) // n)
            seen = slice(0, S - T + rows.stop)  # keys up to the last query of the chunk
            chunks.append(self.attend(q[:, :, rows], k[:, :, seen], v[:, :, seen], features,
                                      raw_q[:, :, rows], pos[rows, None], j[seen]))
        return torch.cat(chunks, 2)

    def attend(self, q, k, v, features, raw_q, i, j):
        """Textbook attention of queries at positions i (t, 1) to keys at positions j (s,)."""
        logits = dots(q, k, self.d)  # (B, H, t, s)
        bias = torch.where(j > i, -math.inf, 0.0)  # the causal mask (t, s)
        for pe, f in zip(self.biases, features):
            bias = bias + pe.logit_bias(raw_q, logits, i, j, f[:, :, : k.size(2)])
        weights = (logits + bias).softmax(-1)
        if self.cfg.hard_attention:  # forward hard, backward soft (ours; the paper is silent)
            weights = F.one_hot(weights.argmax(-1), k.size(2)) + weights - weights.detach()
        if self.kept is not None:
            self.kept.update(logits=logits, weights=weights)
        return F.dropout(weights.to(v.dtype), self.cfg.dropout, self.training) @ v  # (B, H, t, d)

    def fused(self, q, k, v):
        """The same without a bias, in PyTorch's fused attention."""
        T, S, d = q.size(2), k.size(2), v.size(3)
        if q.size(3) > d:  # PoPE: flash attention needs v as wide as q; also faster on CPUs
            v = F.pad(v, (0, q.size(3) - d))
        # is_causal alone would align query 0 with key 0, even if there are cached keys
        mask = None if T == S else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        dropout = self.cfg.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=self.d**-0.5)
        return y[..., :d]

class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gated, self.dropout = cfg.mlp == "swiglu", cfg.dropout
        width = cfg.mlp_width or (64 * math.ceil(cfg.n_embd / 24) if self.gated else 4 * cfg.n_embd)
        self.c_fc = nn.Linear(cfg.n_embd, 2 * width if self.gated else width, bias=cfg.bias)
        self.c_proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
        x = F.silu(gate) * x if self.gated else F.gelu(x)
        return F.dropout(self.c_proj(x), self.dropout, self.training)

def norm(cfg):
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, eps=1e-5)
    return nn.LayerNorm(cfg.n_embd, eps=1e-5, bias=cfg.bias)

class Block(nn.Module):
    def __init__(self, cfg, mix, pes):
        super().__init__()
        self.ln_1, self.attn = norm(cfg), Attention(cfg, mix, pes)
        self.ln_2, self.mlp = norm(cfg), MLP(cfg)

    def forward(self, x, pos, cache=None):
        x = x + self.attn(self.ln_1(x), pos, cache)
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        check(cfg)  # ValueError if it makes no sense
        self.cfg = cfg
        self.first_pe = {}  # name -> its PE in the first layer that uses it
        blocks, pattern = [], cfg.pe.split(",")
        for layer in range(cfg.n_layer):
            mix, pes = pattern[layer % len(pattern)], []
            for name in mix.split("+"):
                pes.append(PES[name](cfg, shared_from=self.first_pe.get(name)))
                self.first_pe.setdefault(name, pes[-1])
            blocks.append(Block(cfg, mix, pes))
        self.limit = cfg.block_size if "learned" in self.first_pe else math.inf  # positions
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.h = nn.ModuleList(blocks)
        self.ln_f = norm(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight
        # Linear and Embedding layers start as in GPT-2, also inside a PE
        for name, layer in self.named_modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                residual = name.endswith("c_proj")  # the 2 n_layer that add to the residual stream
                std = 0.02 / math.sqrt(2 * cfg.n_layer) if residual else 0.02
                nn.init.normal_(layer.weight, std=std)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) holds token ids, targets (B, T) the next ids, or -1 for no loss. Returns the
        logits (B, T, V), V = vocab_size, and the mean loss in nats, 0 if all targets are -1.
        Without targets, returns the last position's logits (B, 1, V) and None. cache: from
        new_cache(), of the tokens before idx; idx is added."""
        begin = cache[0]["k"].size(2) if cache and cache[0] else 0  # tokens in the cache
        end = begin + idx.size(1)
        if end > self.limit:
            raise ValueError(f"pe={self.cfg.pe!r} has {self.limit} positions, got {end}; "
                             "shorten the input, or use a larger block_size or another pe")
        pos = torch.arange(begin, end, device=idx.device)
        x = self.wte(idx)
        for pe in self.first_pe.values():
            x = pe.embed(x, pos)  # learned, sinusoidal; expe and exqpe with expe_once
        x = F.dropout(x, self.cfg.dropout, self.training)
        for block, its_cache in zip(self.h, cache or [None] * len(self.h)):
            x = block(x, pos, its_cache)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits, y = self.lm_head(x), targets.flatten()
        total = F.cross_entropy(logits.flatten(0, 1), y, ignore_index=-1, reduction="sum")
        return logits, total / (y != -1).sum().clamp(min=1)

    def new_cache(self):
        return [{} for _ in self.h]  # of keys, values and whatever a PE must remember

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0: the likeliest. Needs eval()."""
        cache, new = self.new_cache(), idx
        for _ in range(max_new_tokens):
            logits = self(new, cache=cache)[0][:, -1].float()  # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), 1)
        return idx

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW. The weights of every Linear and Embedding decay; nothing else does."""
        decay = {m.weight for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        params = list(self.parameters())
        groups = [dict(params=[p for p in params if p in decay], weight_decay=weight_decay),
                  dict(params=[p for p in params if p not in decay], weight_decay=0.0)]
        return torch.optim.AdamW(groups, learning_rate, betas, fused=device_type in ("cuda", "cpu"))

    def clamp_parameters(self):
        """Call this after each optimizer step: it keeps pope's delta within its bounds."""
        for pe in (pe for block in self.h for pe in block.attn.pes):
            pe.clamp_parameters()

    def get_num_params(self, non_embedding=True):
        """Number of parameters; learned absolute positions count only if non_embedding is False."""
        total = sum(p.numel() for p in self.parameters())
        if non_embedding and "learned" in self.first_pe:
            total -= self.first_pe["learned"].wpe.weight.numel()
        return total

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak=312e12, length=0):
        """Share of the peak FLOP/s (default: an A100's) if fwdbwd_per_iter sequences of `length`
        tokens (0: block_size) take dt seconds. 6 N + 12 L C T FLOPs a token (PaLM appendix B)."""
        T = length or self.cfg.block_size
        per_token = 6 * self.get_num_params() + 12 * self.cfg.n_layer * self.cfg.n_embd * T
        return per_token * T * fwdbwd_per_iter / dt / peak

    def use_kernels(self, dtype):
        """Uses a Triton kernel of kernels.py where one fits. Move the model to its device first.
        dtype: of q, k, v, so autocast's if it is on. Returns one line that says what layers run."""
        import kernels

        labels, device = [], self.wte.weight.device
        for attn in (block.attn for block in self.h):
            reason = kernels.why_not(attn.mix, attn.d, device, dtype, self.cfg.hard_attention)
            attn.triton = reason is None
            labels.append(f"pytorch ({attn.mix}: {reason})" if reason else f"triton {attn.mix}")
        return "attention: " + ", ".join(dict.fromkeys(labels))

# --- the methods ----------------------------------------------------------------------------------

class Learned(PE):
    """`learned`: an embedding per position, added to the token's (Vaswani section 3.5, GPT-2)."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.wpe = shared_from.wpe if shared_from else nn.Embedding(cfg.block_size, cfg.n_embd)

    def embed(self, x, pos):
        return x + self.wpe(pos)

def frequencies(base, n, x):
    """theta_c = base^(-c/n), c = 0..n-1, (n,), in precise(x). kernels.py uses float64, which some
    devices lack. Not a buffer: model.bfloat16() would round it, with phases off by radians."""
    return base ** (-torch.arange(n, device=x.device, dtype=precise(x)) / n)

class Sinusoidal(PE):
    """`sinusoidal`: the token embeddings times sqrt(C), plus sin(i theta_c) in dimension 2c and
    cos(i theta_c) in 2c + 1, theta_c = base^(-2c/C) (Vaswani arXiv:1706.03762 section 3.5)."""
    def embed(self, x, pos):
        C = x.size(-1)
        angle = pos[:, None] * frequencies(self.cfg.base, C // 2, x)  # (T, C/2)
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (T, C)
        if self.cfg.sinusoidal_scale:
            x = x * C**0.5
        return x + waves.to(x.dtype)

def turn(x, cos, sin):
    """Rotate the pairs (x[c], x[c + d/2]) of x (B, H, T, d). cos and sin are (.., T, d/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

class RoPE(PE):
    """`rope`: the pair (c, c + d/2) of q and of k turns by the angle i theta_c, theta_c =
    base^(-2c/d), c = 0..d/2-1. So q.k depends on position only through the distance (RoPE
    arXiv:2104.09864 eq. 16; the paper pairs neighbours, which only reorders dimensions).

    Test-time scaling to `factor` times the trained length. linear: i / factor. ntk: base *
    factor^(d/(d-2)). yarn: theta_c / factor for a pair that turns once or less within the trained
    length, theta_c for one that turns 32 times or more, a linear blend in between (YaRN
    arXiv:2309.00071 section 3; deployed code often blends over c)."""
    def rotate(self, q, k, x, pos, cache):
        scaling, factor = self.cfg.rope_scaling, self.cfg.rope_factor
        base, gain = self.cfg.base, 1.0
        if scaling == "ntk":
            base = base * factor ** (self.d / (self.d - 2))
        theta = frequencies(base, self.d // 2, q)  # (d/2,)
        if scaling == "linear":
            theta = theta / factor
        if scaling == "yarn":
            turns = (self.cfg.rope_trained or self.cfg.block_size) * theta / (2 * math.pi)
            keep = ((turns - 1) / (32 - 1)).clamp(0, 1)  # alpha = 1, beta = 32
            theta = theta * (keep + (1 - keep) / factor)
            gain = 0.1 * math.log(factor) + 1  # on q and on k: sharpens the softmax (YaRN eq. 22)
        angle = pos[:, None] * theta  # (T, d/2)
        cos, sin = gain * angle.cos(), gain * angle.sin()
        return turn(q, cos, sin), turn(k, cos, sin)

class CARoPE(PE):
    """`carope`: RoPE, but each token sets its frequency, per head. A phase is their sum so far:
    phi_c(i) = sum_{t<=i} f(x_t)^c, f(x) = 1 / (softplus(x W + b) + 1), c = 0..d/2-1 (CARoPE
    arXiv:2507.23083 section 2). Pair 0 ignores content. x is the attention's input; the paper says
    "the embedding of the token". The constant b is ours: CARoPE is meant to start as RoPE, and with
    W = 0 this b gives f = base^(-2/d), whose powers f^c are RoPE's frequencies."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.W = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_head))
        y = cfg.base ** (2 / self.d) - 1  # b = ln(e^y - 1), so that softplus(b) = y
        self.b = y + math.log(-math.expm1(-y))

    def rotate(self, q, k, x, pos, cache):
        with torch.autocast(x.device.type, enabled=False):  # a bfloat16 sum is off by radians
            y = F.softplus(x.to(precise(x)) @ self.W.to(precise(x)) + self.b)
            log_f = -torch.log1p(y).transpose(1, 2)[..., None]  # (B, H, T, 1)
            c = torch.arange(self.d // 2, device=x.device)
            phi = (log_f * c).exp().cumsum(2)  # (B, H, T, d/2)
        phi = phi + cache["phi"] if "phi" in cache else phi
        cache["phi"] = phi[:, :, -1:] % (2 * math.pi)  # modulo: a large phase would lose digits
        cos, sin = phi.cos(), phi.sin()
        return turn(q, cos, sin), turn(k, cos, sin)

class PoPE(PE):
    """`pope`: sum_c mu(q_c) mu(k_c) cos((j - i) theta_c + delta_c) / sqrt(d), mu = softplus,
    theta_c = base^(-c/d), c = 0..d-1 (PoPE arXiv:2509.10534 eq. 5, which prints base^(+c/d), a
    typo). Content sets the magnitudes, position the phases, one per dimension, not per pair. It is
    computed as a plain dot product of [mu cos, mu sin], 2d wide (eq. 6, 7, 9).

    delta (H, d) stays in [-2 pi, 0]: clamp_parameters moves it back after each step. A clamp in the
    forward pass would freeze it, since past the bound it gets no gradient."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.delta = None
        if cfg.pope_delta != "none":
            lowest = -2 * math.pi if cfg.pope_delta == "uniform" else 0.0
            self.delta = nn.Parameter(lowest * torch.rand(cfg.n_head, self.d))

    def rotate(self, q, k, x, pos, cache):
        angle = angle_k = pos[:, None] * frequencies(self.cfg.base, self.d, q)  # (T, d)
        if self.delta is not None:
            angle_k = angle + self.delta.to(angle)[:, None]  # (H, T, d)
        return self.polar(q, angle), self.polar(k, angle_k)  # (B, H, T, 2d)

    def polar(self, x, angle):
        mu = F.softplus(x.to(precise(x))) if self.cfg.pope_softplus else x
        return torch.cat((mu * angle.cos(), mu * angle.sin()), -1).to(x.dtype)

    @torch.no_grad()
    def clamp_parameters(self):
        if self.delta is not None:
            self.delta.clamp_(-2 * math.pi, 0)

class Relative(PE):
    """`relative`: q_i . (k_j + a[i-j]) / sqrt(d), a learned vector per distance (Shaw
    arXiv:1803.02155 eq. 4)."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        R, shared = cfg.rel_max or cfg.block_size, shared_from and cfg.rel_shared
        self.a = shared_from.a if shared else nn.Parameter(0.02 * torch.randn(R, self.d))

    def logit_bias(self, q, logits, i, j, features):
        R = len(self.a)
        z = dots(q, self.a, self.d)  # (B, H, t, R): q.a / sqrt(d) for every distance
        row = (i - j).clamp(0, R - 1).expand(*q.shape[:2], -1, -1)  # (B, H, t, s)
        bias = z.gather(-1, row)
        return bias if self.cfg.rel_capped else bias.masked_fill(i - j >= R, 0.0)

class T5(PE):
    """`t5`: a learned bias per head and bucket of distances (T5 arXiv:1910.10683 section 2.1). Half
    the buckets hold one distance each; the rest grow logarithmically. All layers share them."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        table = torch.zeros(cfg.t5_buckets, cfg.n_head)
        self.table = shared_from.table if shared_from else nn.Parameter(table)

    def logit_bias(self, q, logits, i, j, features):
        dist, buckets, exact = i - j, self.cfg.t5_buckets, self.cfg.t5_buckets // 2
        # 0..1: where log(dist) lies between log(exact) and log(t5_max_distance)
        share = (dist.clamp(min=exact) / exact).log() / math.log(self.cfg.t5_max_distance / exact)
        far = exact + (share * (buckets - exact)).long()
        bucket = torch.where(dist < exact, dist.clamp(min=0), far.clamp(max=buckets - 1))  # (t, s)
        return self.table[bucket].permute(2, 0, 1).to(precise(q))  # (H, t, s)

def alibi_slopes(H, x):
    """m_h = 2^(-8h/H), h = 1..H, (H, 1, 1). If H is not a power of two: the slopes of the power
    below, then every other slope of the power above (ALiBi section 3, footnote)."""
    power = 2 ** int(math.log2(H))
    h = torch.arange(H, device=x.device, dtype=precise(x))
    exponent = torch.where(h < power, h + 1, h - power + 0.5) * (8 / power)
    return 2.0 ** -exponent.view(H, 1, 1)

class ALiBi(PE):
    """`alibi`: -m_h (i - j), a fixed slope per head (ALiBi arXiv:2108.12409 section 3)."""
    def logit_bias(self, q, logits, i, j, features):
        return -alibi_slopes(self.H, q) * (i - j)

class FoX(PE):
    """`fox`: sum_{l=j+1..i} log f_l, f_l = sigmoid(x_l W + b) per head. ALiBi with slopes set by
    the tokens: each makes the model forget some of what came before (FoX arXiv:2503.02130 section
    3). x is the attention's input. W and b start as in the authors' code, f near 1/2."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.W = nn.Parameter(0.02 * torch.randn(cfg.n_embd, cfg.n_head))
        self.b = nn.Parameter(torch.zeros(cfg.n_head))

    def key_features(self, x, k, v, cache):
        with torch.autocast(x.device.type, enabled=False):  # a bfloat16 sum would be off
            log_f = F.logsigmoid(x.to(precise(x)) @ self.W.to(precise(x)) + self.b)  # (B, T, H)
        return append(cache, "log_f", log_f.mT)  # (B, H, S)

    def logit_bias(self, q, logits, i, j, log_f):
        """The bias is total_j - total_i, total_j = sum_{l=j+1..a} log f_l, where a is the first of
        these queries; for j > a it is -sum_{l=a+1..j}. From position 0, sums would lose digits."""
        first = j.size(0) - i.size(0)  # the index of a among the keys
        left = log_f[..., 1 : first + 1].flip(-1).cumsum(-1).flip(-1)
        right = log_f[..., first + 1 :].cumsum(-1)
        total = torch.cat((left, torch.zeros_like(log_f[..., :1]), -right), -1)  # (B, H, s)
        return total[:, :, None] - total[:, :, first:, None]

class CoPE(PE):
    """`cope`: positions count what the query cares about. The gates g_ij = sigmoid(q_i.k_j /
    sqrt(d)) add up to positions p_ij = g_ij + .. + g_ii, clamped to npos - 1. (If all gates are 1,
    p_ij = i - j + 1.) The bias q_i.e[p_ij] is interpolated between the two nearest columns of e
    (CoPE arXiv:2405.18719 eq. 3-8, Listing 1; eq. 3 omits sqrt(d)). e: (d, npos) or (H, d, npos).

    As in Listing 1, gates from keys reuse the layer's logits, after rotation in `cope+rope`. On the
    quickstart (seed 1337) that gave 1.448, 1.440, 1.473, 1.559 nats at 1, 2, 4, 8 times the trained
    length, and gates before rotation 1.452, 1.439, 1.444, 1.467. The table sees q before rotation:
    a rotated q would make q.e depend on absolute position."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        if cfg.cope_gates == "sep-keys":
            self.W_g = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.add_parameters(shared_from if cfg.cope_shared else None)

    def add_parameters(self, shared_from):
        d, npos = self.d, self.cfg.cope_npos
        e = torch.zeros((self.H, d, npos) if self.cfg.cope_per_head else (d, npos))
        self.e = shared_from.e if shared_from else nn.Parameter(e)

    def key_features(self, x, k, v, cache):
        """The vectors that q meets in the gates, (B, H, S, d)."""
        if self.cfg.cope_gates == "sep-keys":
            return append(cache, "gate_k", split_heads(self.W_g(x), self.H))
        return v if self.cfg.cope_gates == "values" else k

    def logit_bias(self, q, logits, i, j, gate_k):
        g = self.gates(q, logits, i, j, gate_k)
        return self.bias_at(self.positions(g), q)

    def gates(self, q, logits, i, j, gate_k):
        """g (B, H, t, s), zero in the future"""
        if self.cfg.cope_gates != "keys":  # by default the logits serve
            logits = dots(q, gate_k, self.d)
        return logits.sigmoid() * (j <= i)

    def positions(self, g):
        """p (B, H, t, s), summed from the right: total minus prefix would lose digits."""
        return g.flip(-1).cumsum(-1).flip(-1)

    def bias_at(self, p, q):
        """The bias (B, H, t, s) at positions p."""
        z = self.z(q).to(precise(q))  # float32
        z_next = torch.cat((z[..., 1:], z[..., -1:]), -1)  # z at the next integer
        p = p.clamp(max=self.cfg.cope_npos - 1)
        floor = p.long().clamp_(min=0)  # NaN is no index; let it reach the loss
        return torch.lerp(z.gather(-1, floor), z_next.gather(-1, floor), p.frac())

    def z(self, q):
        """q.e (B, H, t, npos), the bias at every integer position"""
        z = q @ self.e
        return z * self.d**-0.5 if self.cfg.cope_scale_z else z

class CoPE_MLP(CoPE):
    """`cope_mlp`: an MLP of N hidden units stands in for the table: q_i . W2' gelu(p/npos W1 + b1)
    (CoPE appendix C, which gives only N: GELU, the clamp and p / npos are ours)."""
    def add_parameters(self, shared_from):
        N = self.cfg.cope_mlp_width
        self.W1, self.b1 = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(N))
        self.W2 = nn.Parameter(0.02 * torch.randn(N, self.d))

    def bias_at(self, p, q):
        u = (q @ self.W2.T).to(precise(q))  # (B, H, t, N)
        u = u * self.d**-0.5 if self.cfg.cope_scale_z else u
        p = p.clamp(max=self.cfg.cope_npos - 1) / self.cfg.cope_npos
        hidden = F.gelu(p[..., None] * self.W1 + self.b1)  # (B, H, t, s, N)
        return (hidden @ u[..., None])[..., 0].to(precise(q))  # (B, H, t, s)

class CoPE_ALiBi(CoPE):
    """`cope_alibi`: -m_h p_ij, ALiBi with CoPE's unclamped p as the distance (CoPE eq. 10, which
    prints +m; that would favour distant keys)."""
    def add_parameters(self, shared_from):
        if self.cfg.cope_slopes == "learned":
            self.m = nn.Parameter(torch.zeros(self.H))

    def bias_at(self, p, q):
        if self.cfg.cope_slopes == "alibi":
            m = alibi_slopes(self.H, q)
        elif self.cfg.cope_slopes == "geometric":
            m = self.cfg.cope_m0 * 0.5 ** torch.arange(self.H, device=q.device, dtype=precise(q))
        else:
            m = self.m.to(precise(q))
        return -m.view(self.H, 1, 1) * p

class ExPE(PE):
    """`expe`: overwrites the first l dimensions of the input of the q, k projections with positions
    S + theta (i + c), c = 0..l-1, in every block (ExPE arXiv:2509.19569 eq. 1-3, Figure 1). It acts
    after the block's norm, which would alter what it writes."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.l = cfg.expe_l or cfg.n_embd // 8
        self.expe_S, self.expe_theta = self.constant(cfg.expe_S), self.constant(cfg.expe_theta)
        if shared_from:  # one of each for all blocks, as in the paper
            self.expe_S, self.expe_theta = shared_from.expe_S, shared_from.expe_theta

    def constant(self, value):
        """A number from the config or, if it is learned, a parameter."""
        if self.cfg.expe_learned == "no":
            return value
        random = self.cfg.expe_learned == "random"
        return nn.Parameter(torch.randn(()) if random else torch.tensor(value))

    def growth(self, i, c):
        """The values minus S, (T, l), of positions i (T, 1) and dimensions c (l,)"""
        return self.expe_theta * (i if self.cfg.expe_same else i + c)

    def override(self, x, pos):
        i, c = pos[:, None].to(precise(x)), torch.arange(self.l, device=x.device, dtype=precise(x))
        values = self.expe_S + self.cfg.expe_scale * self.growth(i, c)
        values = values.to(x.dtype).expand(len(x), -1, self.l)  # (B, T, l)
        return torch.cat((values, x[..., self.l :]), -1)

    def embed(self, x, pos):
        return self.override(x, pos) if self.cfg.expe_once else x

    def inputs(self, x_qk, x_v, pos):
        if self.cfg.expe_once:
            return x_qk, x_v
        x_qk = self.override(x_qk, pos)
        return x_qk, x_qk if self.cfg.expe_v else x_v

class ExQPE(ExPE):
    """`exqpe`: S + theta_1 c + theta_2 n_c, where n_c of the positions 0..i equal c modulo l. One
    dimension moves per position, by a step large enough for low precision (ExPE section 2.3). Eq. 5
    is garbled; we keep that position 0 already adds theta_2 in dimension 0."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg, shared_from)
        theta2 = self.constant(cfg.expe_theta2)
        self.expe_theta2 = shared_from.expe_theta2 if shared_from else theta2

    def growth(self, i, c):
        return self.expe_theta * c + self.expe_theta2 * ((i - c) / self.l + 1).floor()

PES = {  #                   acts on        learns                       cache  when longer
    "nope": PE,  #               nowhere        nothing                       2d   degrades
    "learned": Learned,  #       embeddings     a vector per position         2d   impossible
    "sinusoidal": Sinusoidal,  # embeddings     nothing                       2d   degrades
    "rope": RoPE,  #             q, k           nothing                       2d   degrades
    "carope": CARoPE,  #         q, k           frequencies, by content       2d   degrades
    "pope": PoPE,  #             q, k           a phase per head, dimension   3d   degrades little
    "relative": Relative,  #     logits         a vector per distance         2d   degrades
    "t5": T5,  #                 logits         a number per head and bucket  2d   degrades
    "alibi": ALiBi,  #           logits         nothing                       2d   holds
    "fox": FoX,  #               logits         a forget gate per head        2d+1 holds
    "cope": CoPE,  #             logits         a vector per count            2d*  holds
    "cope_mlp": CoPE_MLP,  #     logits         an MLP of the count           2d*  not measured
    "cope_alibi": CoPE_ALiBi,  # logits         nothing, or slopes            2d*  holds
    "expe": ExPE,  #             input of q, k  nothing, or S and theta       2d   degrades
    "exqpe": ExQPE,  #           input of q, k  nothing, or S and thetas      2d   degrades
}  # cache: numbers per token and head; *: d more with sep-keys. eval/README.md has the losses

# --- the checks and the fast path -----------------------------------------------------------------

def choose(name, value, options):
    """The value, if it is among the options. Otherwise a ValueError lists them, nearest first."""
    near = difflib.get_close_matches(value, options, len(options), 0)
    refuse(value not in options, f"{name}={value!r} is unknown; choose one of {', '.join(near)}")
    return value

def refuse(wrong, message):
    if wrong:
        raise ValueError(message)

def check(cfg):
    """Raises ValueError for a GPTConfig that makes no sense."""
    for key in "block_size n_layer n_head n_embd base rope_factor cope_npos cope_mlp_width".split():
        value = getattr(cfg, key)
        refuse(not 0 < value < math.inf, f"{key}={value} must be positive and finite")
    choose("norm", cfg.norm, ("layernorm", "rmsnorm"))
    choose("mlp", cfg.mlp, ("gelu", "swiglu"))
    choose("rope_scaling", cfg.rope_scaling, ("none", "linear", "ntk", "yarn"))
    choose("cope_gates", cfg.cope_gates, ("keys", "sep-keys", "values"))
    choose("cope_slopes", cfg.cope_slopes, ("alibi", "geometric", "learned"))
    choose("pope_delta", cfg.pope_delta, ("zero", "uniform", "none"))
    choose("expe_learned", cfg.expe_learned, ("no", "random", "init"))

    C, H, d = cfg.n_embd, cfg.n_head, cfg.n_embd // cfg.n_head
    refuse(C % H, f"n_embd={C} is not divisible by n_head={H}; change one of them")
    pattern = cfg.pe.split(",")
    refuse(len(pattern) > cfg.n_layer, f"pe={cfg.pe!r} is a pattern of {len(pattern)} layers, but "
           f"n_layer={cfg.n_layer}; shorten it")
    used = {choose("pe", name, PES) for mix in pattern for name in mix.split("+")}
    for mix in pattern:
        rotating = [name for name in mix.split("+") if PES[name].rotate is not PE.rotate]
        refuse(len(rotating) > 1, f"pe={cfg.pe!r}: {' and '.join(rotating)} would both rotate q "
               "and k of one layer; keep one of them")
    refuse(used & {"rope", "carope"} and d % 2,
           f"rope and carope rotate pairs, but n_embd / n_head = {d} is odd; change n_head")
    refuse((cfg.rope_scaling == "none") != (cfg.rope_factor == 1),
           f"rope_scaling={cfg.rope_scaling!r} with rope_factor={cfg.rope_factor} does nothing; "
           "set both, as in rope_scaling=ntk,rope_factor=4")
    refuse(not 1 < cfg.t5_buckets // 2 < cfg.t5_max_distance, f"t5_buckets={cfg.t5_buckets} must "
           f"be 4 or more, and half of it less than t5_max_distance={cfg.t5_max_distance}")

def triton_attention(attn, q, k, v, x, pos):
    """Attention.attention, computed by kernels.py."""
    import kernels

    cfg, dropout = attn.cfg, attn.cfg.dropout if attn.training else 0.0
    pes = dict(zip(attn.mix.split("+"), attn.pes))
    if "pope" in pes and "cope" not in pes:  # this kernel rotates q and k by itself
        delta = pes["pope"].delta
        return kernels.pope_attention(q, k, v, delta, cfg.base, cfg.pope_softplus, dropout)
    z, gate_q, gate_k = pes["cope"].z(q), None, None
    if cfg.cope_gates != "keys":
        gate_q, gate_k = q, pes["cope"].key_features(x, k, v, {})
    for pe in attn.pes:
        q, k = pe.rotate(q, k, x, pos, {})
    return kernels.cope_attention(q, k, v, z, gate_q, gate_k, dropout)
