"""
A GPT whose positional encoding is one switch: `GPTConfig(pe="pope")`, `pe="cope+rope"`, ...

Read it top to bottom: the config, one small class per positional encoding (PE), the table PES that
names them, and a plain GPT that calls a PE at the four places where one can act. Only torch is needed.

Shapes     B batch, T queries (the new tokens), S keys (cached + new), C = n_embd, H = n_head,
           d = C / H, the head width; a comment such as `# (B, H, T, d)` gives the shape of its line
Symbols    t or i: position of a query; s or j: of a key; theta: frequency; theta_c: that of dimension c;
           phi: phase; delta: PoPE's learned phase; g, p, e, z: CoPE's gates, positions, table and q.e
Papers     PoPE "Decoupling the What and Where With Polar Coordinate Positional Embedding";
           CoPE arXiv:2405.18719; ExPE "Exact Positional Encodings"; CARoPE "Context-aware Rotary
           Position Embedding"; RoPE arXiv:2104.09864; ALiBi arXiv:2108.12409; T5 arXiv:1910.10683;
           Shaw arXiv:1803.02155; Vaswani arXiv:1706.03762; YaRN arXiv:2309.00071
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 128  # queries that the dense attention handles at a time: no T x T tensor is ever whole


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
    mlp_width: int = 0  # hidden width of the MLP; 0: 4 C for gelu, 8/3 C rounded up to 64s for swiglu
    tie: bool = True  # the output layer uses the token embeddings' weights
    pe: str = "learned"  # a name of PES; `a+b`: both in a layer; `a,b,c`: a pattern tiled over the layers (embeddings: once)
    # options of the positional encodings, named by the papers' symbols
    base: float = 10000.0  # theta, the base wavelength of sinusoidal, rope, carope, pope
    rope_scaling: str = "none"  # none | linear | ntk | yarn: stretch rope at test time ...
    rope_factor: float = 1.0  # ... to this many times the trained length
    share_table: bool = True  # relative, cope (not cope_mlp, cope_alibi): one table for the model, not one per layer
    rel_max: int = 0  # relative: distances with an embedding; 0: block_size
    rel_capped: bool = False  # relative: distances past the table use its last row, else they add nothing
    t5_buckets: int = 32  # t5: distance buckets, half of them one distance wide
    t5_max_distance: int = 128  # t5: from here on all distances share the last bucket
    cope_npos: int = 64  # cope, cope_mlp: number of positions; p is clamped to npos - 1
    cope_gates: str = "keys"  # keys | sep-keys | values: what q is compared with to count a token
    cope_scale_z: bool = False  # divide q.e by sqrt(d) too (the official code; the paper's Listing 1 does not)
    cope_mlp_width: int = 64  # cope_mlp: N, hidden width
    cope_slopes: str = "alibi"  # cope_alibi: alibi (its rule) | geometric (m0, m0/2, ...) | learned (from 0)
    cope_m0: float = 1.0  # cope_alibi: first head's slope when geometric
    pope_softplus: bool = True  # magnitudes are softplus(q), softplus(k); else q, k themselves
    pope_delta: str = "zero"  # zero | uniform: start of the learned phase delta | none: no delta
    expe_l: int = 0  # expe, exqpe: l, overridden dimensions; 0: C / 8
    expe_S: float = 0.0  # S, added to every value
    expe_theta: float = 1 / 2048  # theta (expe), theta_1 (exqpe): step from a dimension to the next
    expe_theta2: float = 1 / 16  # theta_2 (exqpe): step of one dimension per position
    expe_v: bool = False  # override the input of the values too
    expe_once: bool = False  # only before the first block, not in every block
    expe_same: bool = False  # expe: the same value in all l dimensions
    expe_learned: str = "no"  # no | random | init: train S and theta, from random or from the values above
    expe_scale: float = 1.0  # test time: multiply all of it but S by this (0.5: twice the length)


# ---------------------------------------------------------------------------------------------------
# what several of the classes below use


def frequencies(base, n, device):
    """theta_c = base^(-c/n), c = 0..n-1. Float32, made anew: a buffer would follow .bfloat16()."""
    return base ** (-torch.arange(n, device=device).float() / n)


def turn(x, angle):
    """Rotate the pairs (x[c], x[c + d/2]) of x (B, H, T, d) by float32 angle (.., T, d/2) radians, in float32."""
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def alibi_slopes(H, device):
    """(H, 1, 1): 2^(-8h/H), h = 1..H; no power of two: those of the next smaller power, then every other one of
    the next larger (ALiBi section 3 and its footnote)."""
    n = 2 ** int(math.log2(H))
    h = torch.arange(H, device=device)
    return 2.0 ** -torch.where(h < n, (h + 1) * (8 / n), (h - n + 0.5) * (8 / n))[:, None, None]


def heads(x, H):
    """(B, T, C) -> (B, H, T, d)"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def extend(cache, name, new):
    """Append new (B, H, T, .) to what the layer's cache holds under this name; returns all of it (B, H, S, .)."""
    if cache is None:
        return new
    cache[name] = torch.cat((cache[name], new), 2) if name in cache else new
    return cache[name]


def choose(name, value, options):
    """options[value] (value itself where options is a tuple), or a ValueError that lists them."""
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(options)}")
    return options[value] if isinstance(options, dict) else value


# ---------------------------------------------------------------------------------------------------
# positional encodings: a PE overrides the hooks where it acts, embed, enter, rotate, logit_bias; the others do nothing


class PE(nn.Module):
    """`nope`: no positional encoding at all. The causal mask alone tells a token what came before it."""

    kernel = None  # or a method that stands in for rotate or logit_bias and the softmax, by kernels.py: GPT.use_kernels
    limit = None  # or the number of positions past which the method is not defined

    def __init__(self, cfg, first=None):
        """first: the object of this class in the first layer that has one (None there), to share with."""
        super().__init__()
        self.cfg, self.d = cfg, cfg.n_embd // cfg.n_head

    def embed(self, x, pos):
        """x (B, T, C), the token embeddings, once per model; pos (T,) positions. Returns x."""
        return x

    def enter(self, x, x_v, pos):
        """The inputs (B, T, C) of the q, k projections and of the v projection, in every block."""
        return x, x_v

    def rotate(self, q, k, x, pos, cache):
        """q, k (B, H, T, d) of the new tokens, before k enters the cache; x (B, T, C) the attention's input."""
        return q, k

    # None, so that PyTorch's fused attention can be used, or a method logit_bias(q, x, v, cache) -> f, called once per block
    # with q (B, H, T, d) before rotation, x (B, T, C) the attention's input, v (B, H, S, d) the values of all keys. For each
    # chunk of queries f(qk, rows, dist) returns what to add to their logits, any shape that broadcasts to (B, H, t, n): rows
    # tells which t queries they are, n how many keys they may see; qk are their scaled dot products before rotation, dist
    # (t, n) how far back each key lies (negative: the future, masked later, but what is nan there spoils the gradients)
    logit_bias = None

    def project(self):
        """Brings bounded parameters back into their bounds; the optimizer calls it after each step."""


class Learned(PE):
    """`learned` absolute embeddings, added to the tokens' (GPT-2; Vaswani section 3.5). Ends at block_size."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        if first is None:  # it acts on the embeddings alone, so one table serves the model
            self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.limit = cfg.block_size

    def embed(self, x, pos):
        return x + self.wpe(pos)


class Sinusoidal(PE):
    """`sinusoidal` absolute encodings: dimensions 2c, 2c + 1 are sin, cos of pos * theta_c, theta_c = base^(-2c/C),
    added to the embeddings, which are multiplied by sqrt(C) first (Vaswani sections 3.4, 3.5)."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        if cfg.n_embd % 2:
            raise ValueError(f"sinusoidal pairs sines and cosines, but n_embd={cfg.n_embd} is odd; change it")

    def embed(self, x, pos):
        angle = pos.float()[:, None] * frequencies(self.cfg.base, x.size(-1) // 2, x.device)  # (T, C/2)
        return x * x.size(-1) ** 0.5 + torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(x.dtype)


class Relative(PE):
    """`relative`: q_i . (k_j + a[i-j]) / sqrt(d), a learned vector per distance, on keys (Shaw eq. 4)."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        shared = first is not None and cfg.share_table
        self.a = first.a if shared else nn.Parameter(0.02 * torch.randn(cfg.rel_max or cfg.block_size, self.d))

    def logit_bias(self, q, x, v, cache):
        R = len(self.a)

        def f(qk, rows, dist):
            z = (q[:, :, rows] @ self.a.T).float() * self.d**-0.5  # (B, H, t, R): q.a for every distance
            b = z.gather(-1, dist.clamp(0, R - 1).expand_as(qk))  # (B, H, t, n)
            return b if self.cfg.rel_capped else b.masked_fill(dist >= R, 0.0)

        return f


class T5(PE):
    """`t5`: a learned bias per head and bucket of distances, one table for all layers (T5 section 2.1).
    Half of the buckets hold one distance each, the others widen logarithmically up to t5_max_distance."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        if not 1 < cfg.t5_buckets // 2 < cfg.t5_max_distance:
            raise ValueError(f"t5_buckets={cfg.t5_buckets}, t5_max_distance={cfg.t5_max_distance}: need 4 buckets or more, and a "
                             "distance beyond half of them")
        self.table = nn.Parameter(torch.zeros(cfg.t5_buckets, cfg.n_head)) if first is None else first.table

    def logit_bias(self, q, x, v, cache):
        n, exact = self.cfg.t5_buckets, self.cfg.t5_buckets // 2
        span = math.log(self.cfg.t5_max_distance / exact)

        def f(qk, rows, dist):
            far = exact + ((dist.clamp(min=exact).float() / exact).log() / span * (n - exact)).long()
            bucket = torch.where(dist < exact, dist.clamp(min=0), far.clamp(max=n - 1))  # (t, n)
            return self.table[bucket].permute(2, 0, 1).float()  # (H, t, n)

        return f


class ALiBi(PE):
    """`alibi`: - m_h (i - j), a fixed slope per head and nothing learned (ALiBi section 3)."""

    def logit_bias(self, q, x, v, cache):
        m = alibi_slopes(self.cfg.n_head, x.device)
        return lambda qk, rows, dist: -m * dist


class RoPE(PE):
    """`rope`: dimensions (c, c + d/2) of q and k turn by the angle pos * theta_c, theta_c = base^(-2c/d), so
    that position enters q.k through the distance alone (RoPE eq. 16; its pairs are neighbours, the same up to the order of
    the dimensions). Test-time scaling to `factor` times the trained length: linear: pos / factor; ntk: base *
    factor^(d/(d-2)); yarn: fast pairs as trained, slow ones linear (YaRN section 3)."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        if self.d % 2:
            raise ValueError(f"rope turns pairs of dimensions, but n_embd / n_head = {self.d} is odd; change n_head")
        how = choose("rope_scaling", cfg.rope_scaling, ("none", "linear", "ntk", "yarn"))
        if how == "none" and cfg.rope_factor != 1:
            raise ValueError(f"rope_factor={cfg.rope_factor} does nothing without rope_scaling; choose linear, ntk or yarn")

    def rotate(self, q, k, x, pos, cache):
        how, factor, base, gain = self.cfg.rope_scaling, self.cfg.rope_factor, self.cfg.base, 1.0
        if how == "ntk":
            base = base * factor ** (self.d / (self.d - 2))
        theta = frequencies(base, self.d // 2, x.device)  # (d/2,)
        if how == "linear":
            theta = theta / factor
        if how == "yarn":
            turns = self.cfg.block_size * theta / (2 * math.pi)  # of each pair within the trained length
            keep = ((turns - 1) / (32 - 1)).clamp(0, 1)  # alpha = 1, beta = 32
            theta = theta * (keep + (1 - keep) / factor)
            gain = 0.1 * math.log(factor) + 1  # on q and on k: sharpens the softmax (YaRN eq. 22)
        angle = pos.float()[:, None] * theta  # (T, d/2)
        return turn(q, angle) * gain, turn(k, angle) * gain


class CARoPE(PE):
    """`carope`: RoPE whose phases are sums of learned, token- and head-dependent frequencies
    phi_c(i) = sum_{t<=i} f(x_t)^c, f(x) = 1 / (softplus(x W + b) + 1), c = 0..d/2-1 (CARoPE section 2).
    x is the block's attention input. The paper asks for a start as RoPE, which its formula cannot give:
    the constant b makes f = base^(-2/d) at W = 0, where f^c are RoPE's frequencies. Pair 0 stays content-free."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        if self.d % 2:
            raise ValueError(f"carope turns pairs of dimensions, but n_embd / n_head = {self.d} is odd; change n_head")
        self.W = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_head))
        y = cfg.base ** (2 / self.d) - 1  # b = ln(e^y - 1), so that softplus(b) = y
        self.b = y + math.log(-math.expm1(-y))

    def rotate(self, q, k, x, pos, cache):
        with torch.autocast(x.device.type, enabled=False):  # a phase summed in bf16 is off by radians
            log_f = -torch.log1p(F.softplus(x.float() @ self.W.float() + self.b)).transpose(1, 2)  # (B, H, T)
            phi = (log_f[..., None] * torch.arange(self.d // 2, device=x.device)).exp().cumsum(2)  # (B, H, T, d/2)
        if cache is not None:  # the running phase is all that later tokens need
            phi = phi + cache.get("phi", 0.0)
            cache["phi"] = phi[:, :, -1:]
        return turn(q, phi), turn(k, phi)


class PoPE(PE):
    """`pope`: sum_c mu(q_c) mu(k_c) cos((s - t) theta_c + delta_c), mu = softplus, theta_c = base^(-c/d),
    c = 0..d-1 (PoPE eq. 5): content sets the magnitudes and position the phases. Computed as a plain dot
    product of [mu cos, mu sin], 2d wide (eq. 6, 7, 9). The paper prints theta_c = base^(+c/d), a typo.
    delta (H, d) is kept in [-2 pi, 0] by project(): a clamp here would freeze it at the bound, where it starts."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        start = choose("pope_delta", cfg.pope_delta, {"zero": 0.0, "uniform": -2 * math.pi, "none": None})
        self.delta = None if start is None else nn.Parameter(start * torch.rand(cfg.n_head, self.d))

    def rotate(self, q, k, x, pos, cache):
        angle = angle_k = pos.float()[:, None] * frequencies(self.cfg.base, self.d, x.device)  # (T, d)
        if self.delta is not None:
            angle_k = angle + self.delta.float()[:, None]  # (H, T, d)
        return self.polar(q, angle), self.polar(k, angle_k)  # (B, H, T, 2d)

    def kernel(self, q, k, v, raw_q, raw_k, x):
        from kernels import pope_attention

        return pope_attention(q, k, v, self.delta, self.cfg.base, self.cfg.pope_softplus)

    def polar(self, x, angle):
        mu = F.softplus(x.float()) if self.cfg.pope_softplus else x
        return torch.cat((mu * angle.cos(), mu * angle.sin()), -1).to(x.dtype)

    @torch.no_grad()
    def project(self):
        if self.delta is not None:
            self.delta.clamp_(-2 * math.pi, 0)


class CoPE(PE):
    """`cope`: positions count what the query cares about. g_ij = sigmoid(q_i.k_j / sqrt(d)), p_ij = g_ij + ..
    + g_ii, clamped to npos - 1, and the bias is q_i.e[p_ij], interpolated between the two nearest rows
    (CoPE eq. 3-5, Listing 1; eq. 3 omits sqrt(d)). e (d, npos) serves all heads. In `cope+rope` gates and
    table see q and k as they were before rotation: turned ones would let distance into the counts."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        gates = choose("cope_gates", cfg.cope_gates, ("keys", "sep-keys", "values"))
        self.W_g = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias) if gates == "sep-keys" else None
        self.build(first if cfg.share_table else None)

    def build(self, first):
        self.e = nn.Parameter(torch.zeros(self.d, self.cfg.cope_npos)) if first is None else first.e

    def gate_keys(self, x, v, cache=None):
        """(B, H, S, d): what q is compared with to count a token; None: the keys, whose logits are there already."""
        if self.W_g is not None:
            return extend(cache, "k_g", heads(self.W_g(x), self.cfg.n_head))
        return v if self.cfg.cope_gates == "values" else None

    def logit_bias(self, q, x, v, cache):
        keys, lookup = self.gate_keys(x, v, cache), self.lookup(q)

        def f(qk, rows, dist):
            if keys is not None:
                qk = (q[:, :, rows] @ keys[:, :, : dist.size(1)].mT).float() * self.d**-0.5
            g = qk.masked_fill(dist < 0, -math.inf).sigmoid()  # (B, H, t, n)
            p = g.flip(-1).cumsum(-1).flip(-1)  # summed from the query leftwards, as exact as it gets
            return lookup(p, rows)

        return f

    def z(self, q, e):
        return (q @ e).float() * (self.d**-0.5 if self.cfg.cope_scale_z else 1.0)  # (B, H, T, npos)

    def lookup(self, q):
        z = self.z(q, self.e)

        def at(p, rows):
            p = p.clamp(max=self.cfg.cope_npos - 1)
            floor, ceil, z_i = p.floor().long(), p.ceil().long(), z[:, :, rows]
            return torch.lerp(z_i.gather(-1, floor), z_i.gather(-1, ceil), p - floor)

        return at

    def kernel(self, q, k, v, raw_q, raw_k, x):
        from kernels import cope_attention

        z, keys = self.z(raw_q, self.e), self.gate_keys(x, v)
        if keys is None and q is raw_q and k is raw_k:
            return cope_attention(q, k, v, z)
        return cope_attention(q, k, v, z, raw_q, raw_k if keys is None else keys)


class CoPE_MLP(CoPE):
    """`cope_mlp`: an MLP of N hidden units gives e[p] instead of a table: q_i . W2' gelu(p/npos W1 + b1) (CoPE
    appendix C; that p is clamped and divided by npos, and GELU, are our choices: the paper does not say)."""

    kernel = None

    def build(self, first):
        N = self.cfg.cope_mlp_width
        self.W1, self.b1 = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(N))
        self.W2 = nn.Parameter(0.02 * torch.randn(N, self.d))

    def lookup(self, q):
        u, npos = self.z(q, self.W2.T), self.cfg.cope_npos

        def at(p, rows):
            p = p.clamp(max=npos - 1)[..., None] / npos  # (B, H, t, n, 1)
            return (F.gelu(p * self.W1 + self.b1) @ u[:, :, rows, :, None])[..., 0]  # (B, H, t, n)

        return at


class CoPE_ALiBi(CoPE):
    """`cope_alibi`: - m_h p_ij, with CoPE's contextual p in the place of ALiBi's distance, not clamped (CoPE
    eq. 10, which prints +m; with positive slopes that would favour what is far, so we take ALiBi's sign)."""

    kernel = None

    def build(self, first):
        how = choose("cope_slopes", self.cfg.cope_slopes, ("alibi", "geometric", "learned"))
        self.m = nn.Parameter(torch.zeros(self.cfg.n_head)) if how == "learned" else None

    def lookup(self, q):
        m = alibi_slopes(self.cfg.n_head, q.device)  # (H, 1, 1)
        if self.cfg.cope_slopes == "geometric":
            m = self.cfg.cope_m0 * 0.5 ** torch.arange(self.cfg.n_head, device=q.device)[:, None, None]
        if self.m is not None:
            m = self.m.float()[:, None, None]
        return lambda p, rows: -m * p


class ExPE(PE):
    """`expe`: the first l dimensions of the input of the q, k projections are overridden by exact positions
    p_n[j] = S + theta (n + j), j = 0..l-1, in every block, after its norm (ExPE eq. 1-3, Figure 1)."""

    def __init__(self, cfg, first=None):
        super().__init__(cfg)
        self.l = cfg.expe_l or cfg.n_embd // 8
        if not 0 < self.l <= cfg.n_embd:
            raise ValueError(f"expe_l={self.l} does not fit n_embd={cfg.n_embd}; choose 1 to {cfg.n_embd}")
        choose("expe_learned", cfg.expe_learned, ("no", "random", "init"))
        for name, value in self.constants().items():
            if cfg.expe_learned != "no":  # one S and theta for all blocks: "only two learned parameters"
                start = torch.randn(()) if cfg.expe_learned == "random" else torch.tensor(value)
                value = nn.Parameter(start) if first is None else getattr(first, name)
            setattr(self, name, value)

    def constants(self):
        return dict(S=self.cfg.expe_S, theta=self.cfg.expe_theta)

    def steps(self, n, j):
        return self.theta * (n + (0 * j if self.cfg.expe_same else j))

    def override(self, x, pos):
        p = self.steps(pos.float()[:, None], torch.arange(self.l, device=x.device).float())  # (T, l)
        p = (self.S + self.cfg.expe_scale * p).to(x.dtype)
        return torch.cat((p.expand(len(x), -1, -1), x[..., self.l :]), -1)

    def embed(self, x, pos):
        return self.override(x, pos) if self.cfg.expe_once else x

    def enter(self, x, x_v, pos):
        if self.cfg.expe_once:
            return x, x_v
        x = self.override(x, pos)
        return x, x if self.cfg.expe_v else x_v


class ExQPE(ExPE):
    """`exqpe`: p_n[j] = S + theta_1 j + theta_2 (number of the steps 0..n that hit dimension j = step mod l):
    one dimension moves per position, by a step that survives low precision (ExPE section 2.3). Its eq. 5 is
    garbled; as printed, position 0 already carries theta_2 in dimension 0, and so it does here."""

    def constants(self):
        return dict(S=self.cfg.expe_S, theta=self.cfg.expe_theta, theta2=self.cfg.expe_theta2)

    def steps(self, n, j):
        return self.theta * j + self.theta2 * ((n - j) / self.l + 1).floor()


# the switch: name, where the method acts, what it learns, what happens past the trained length
PES = {
    "nope": PE,  #              nowhere; nothing; degrades
    "learned": Learned,  #      embeddings; a vector per position; impossible
    "sinusoidal": Sinusoidal,  # embeddings; nothing; degrades
    "relative": Relative,  #    logits; a vector per distance; unseen distances get none, or the last if capped
    "t5": T5,  #                logits; a bias per head and bucket; the last bucket
    "alibi": ALiBi,  #          logits; nothing; holds
    "rope": RoPE,  #            q, k; nothing; degrades, less with rope_scaling
    "carope": CARoPE,  #        q, k; frequencies from content; degrades
    "cope": CoPE,  #            logits; a vector per count; counts are clamped
    "cope_mlp": CoPE_MLP,  #    logits; an MLP of the count; counts are clamped
    "cope_alibi": CoPE_ALiBi,  # logits; nothing, or slopes; holds
    "pope": PoPE,  #            q, k; a phase per head and frequency; degrades little
    "expe": ExPE,  #            input of q, k; nothing, or S and theta; holds for a while, longer with expe_scale
    "exqpe": ExQPE,  #          input of q, k; nothing, or S and thetas; the same
}


# ---------------------------------------------------------------------------------------------------
# the GPT


class Attention(nn.Module):
    def __init__(self, cfg, pes):
        super().__init__()
        self.H, self.d, self.dropout = cfg.n_head, cfg.n_embd // cfg.n_head, cfg.dropout
        self.c_qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=cfg.bias)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)  # apart, as a PE may change the input of q, k alone
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.pes = nn.ModuleList(pes)
        self.hard = cfg.hard_attention
        self.fast_index = None  # which of them computes the attention with its Triton kernel, see GPT.use_kernels
        if sum(type(pe).rotate is not PE.rotate for pe in pes) > 1:
            turning = ", ".join(name for name, cls in PES.items() if cls.rotate is not PE.rotate)
            raise ValueError(f"pe={cfg.pe!r} turns q and k twice in one layer; mix at most one of {turning}")

    def forward(self, x, pos, cache=None):
        """x (B, T, C), pos (T,), cache: this layer's dict, read and extended. Returns (B, T, C)."""
        x_qk = x_v = x
        for pe in self.pes:
            x_qk, x_v = pe.enter(x_qk, x_v, pos)
        q, k = (heads(y, self.H) for y in self.c_qk(x_qk).chunk(2, -1))  # (B, H, T, d)
        v = heads(self.c_v(x_v), self.H)
        raw_q, raw_k = q, k
        # decoding is PyTorch's
        fast = self.pes[self.fast_index] if self.fast_index is not None and cache is None else None
        for pe in self.pes:
            if pe is not fast:
                q, k = pe.rotate(q, k, x, pos, cache)
        rotated = q is not raw_q or k is not raw_k
        k, v = extend(cache, "k", k), extend(cache, "v", v)  # (B, H, S, d), k 2d wide for PoPE

        biased = [pe for pe in self.pes if pe.logit_bias is not None]
        if fast is not None:
            y = fast.kernel(q, k, v, raw_q, raw_k, x)
        elif biased or self.hard:  # the raw keys are kept apart only where k was turned
            raw = (raw_q, extend(cache, "raw_k", raw_k)) if rotated and biased else None
            y = self.dense(q, k, v, raw, [pe.logit_bias(raw_q, x, v, cache) for pe in biased])
        else:
            y = self.fused(q, k, v)
        y = self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return F.dropout(y, self.dropout, self.training)

    def fused(self, q, k, v):
        """PyTorch's attention, for methods that leave the logits alone. The scale is d^-1/2 also where q is 2d wide."""
        T, S, d = q.size(2), k.size(2), v.size(3)
        if q.size(3) > d:  # the flash kernels ask for equal widths; on CPU padding v is 1.1 to 2.5 times as fast
            v = F.pad(v, (0, q.size(3) - d))
        mask = None  # with a cache is_causal would line query 0 up with key 0, not with its own key
        if 1 < T < S:
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0,
                                           is_causal=T == S, scale=self.d**-0.5)
        return y[..., :d]

    def dense(self, q, k, v, raw, biases):
        """softmax(q.k / sqrt(d) + biases) v in the open, for methods that act on the logits; float32 logits.
        A chunk of queries at a time and only the keys it may see, so 10k tokens fit in memory."""
        T, S, y = q.size(2), k.size(2), []
        key = torch.arange(S, device=q.device)
        for i in range(0, T, CHUNK):
            rows = slice(i, min(i + CHUNK, T))
            n = S - T + rows.stop  # keys up to the chunk's last query
            dist = key[S - T + i : n, None] - key[:n]  # (t, n), negative in the future
            logits = qk = (q[:, :, rows] @ k[:, :, :n].mT).float() * self.d**-0.5  # (B, H, t, n)
            if raw is not None:
                qk = (raw[0][:, :, rows] @ raw[1][:, :, :n].mT).float() * self.d**-0.5
            for bias in biases:
                logits = logits + bias(qk, rows, dist)
            a = logits.masked_fill(dist < 0, -math.inf).softmax(-1)
            if self.hard:  # forward all or nothing, backward the softmax (straight-through; the paper does not say)
                a = F.one_hot(a.argmax(-1), n) + a - a.detach()
            y.append(F.dropout(a.to(v.dtype), self.dropout, self.training) @ v[:, :, :n])
        return torch.cat(y, 2)  # (B, H, T, d)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gated = choose("mlp", cfg.mlp, {"gelu": False, "swiglu": True})
        width = cfg.mlp_width or (-(-cfg.n_embd * 8 // 3 // 64) * 64 if self.gated else 4 * cfg.n_embd)
        self.c_fc = nn.Linear(cfg.n_embd, width * (1 + self.gated), bias=cfg.bias)
        self.c_proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias)
        self.dropout = cfg.dropout

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, cfg, pes):
        super().__init__()
        self.ln_1, self.attn = norm(cfg), Attention(cfg, pes)
        self.ln_2, self.mlp = norm(cfg), MLP(cfg)

    def forward(self, x, pos, cache=None):
        x = x + self.attn(self.ln_1(x), pos, cache)
        return x + self.mlp(self.ln_2(x))


def norm(cfg):
    if choose("norm", cfg.norm, ("layernorm", "rmsnorm")) == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, eps=1e-5)
    return nn.LayerNorm(cfg.n_embd, eps=1e-5, bias=cfg.bias)


class GPT(nn.Module):
    def __init__(self, cfg):
        """Raises ValueError, naming the field, where cfg makes no sense."""
        super().__init__()
        if cfg.n_embd % cfg.n_head:
            raise ValueError(f"n_embd={cfg.n_embd} does not divide into n_head={cfg.n_head} heads; change one of them")
        self.cfg, self.firsts = cfg, {}
        pattern = cfg.pe.split(",")
        blocks = []
        for i in range(cfg.n_layer):
            pes = []
            for name in pattern[i % len(pattern)].split("+"):
                pes.append(choose("pe", name, PES)(cfg, self.firsts.get(name)))
                self.firsts.setdefault(name, pes[-1])
            blocks.append(Block(cfg, pes))
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.h = nn.ModuleList(blocks)
        self.ln_f = norm(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight

        # linear and embedding weights as GPT-2; a PE's too; its bare nn.Parameters were set by its class
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith("c_proj")  # these write to the residual stream, 2 n_layer times
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * cfg.n_layer) if residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None, cache=None, start=None):
        """idx (B, T) token ids; targets (B, T), -1 where there is no loss. Returns (logits, loss): logits (B, T, V)
        with targets, else those of the last position alone (B, 1, V) and loss None. Loss in nats per target.
        cache: from new_cache(), extended in place; start: position of idx[:, 0], by default the one after the cache's."""
        if start is None:
            start = cache[0]["k"].size(2) if cache is not None and cache[0] else 0
        end = start + idx.size(1)
        pos = torch.arange(start, end, device=idx.device)
        x = self.wte(idx)
        for name, pe in self.firsts.items():
            if pe.limit is not None and end > pe.limit:
                raise ValueError(f"pe={name!r} was trained for {pe.limit} positions, got {end}; "
                                 "shorten the input, or train with a larger block_size or another pe")
            x = pe.embed(x, pos)
        x = F.dropout(x, self.cfg.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, pos, None if cache is None else cache[i])
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def use_kernels(self, dtype):
        """Let kernels.py compute the attention of PoPE and CoPE where nothing speaks against it; dtype: of q, k, v, so
        that of autocast. To be called once, on the device. Returns a line that says what computes the attention."""
        import kernels

        used = {}  # as an ordered set
        for attn in (block.attn for block in self.h):
            label = "pytorch"
            for i, pe in enumerate(attn.pes):
                if pe.kernel is not None:
                    others = [o for o in attn.pes if o is not pe and (o.logit_bias is not None or isinstance(o, PoPE))]
                    why_not = ("mixed" if others else "hard attention" if attn.hard else
                               kernels.why_not(self.wte.weight.device, attn.d, self.cfg.dropout, dtype))
                    name = type(pe).__name__.lower()
                    attn.fast_index, label = (i, f"triton {name}") if why_not is None else (None, f"pytorch ({name}: {why_not})")
            used[label] = None
        return "attention: " + ", ".join(used)

    def new_cache(self):
        """A dict per layer, to be filled with keys, values and what a PE must remember."""
        return [{} for _ in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0 takes the likeliest token. Call eval() first."""
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
        """AdamW. Weights of linear and embedding layers decay; norms, biases and a PE's bare nn.Parameters do not."""
        decay = {m.weight for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        params = list(self.parameters())
        groups = [dict(params=[p for p in params if p in decay], weight_decay=weight_decay),
                  dict(params=[p for p in params if p not in decay], weight_decay=0.0)]
        optimizer = torch.optim.AdamW(groups, learning_rate, betas, fused=device_type in ("cuda", "cpu"))
        pes = [module for module in self.modules() if isinstance(module, PE)]
        optimizer.register_step_post_hook(lambda *_: [pe.project() for pe in pes])
        return optimizer

    def get_num_params(self, non_embedding=True):
        """Number of parameters, without learned absolute positions unless non_embedding is False."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding and "learned" in self.firsts:
            n -= self.firsts["learned"].wpe.weight.numel()
        return n

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak=312e12, length=0):
        """Share of the peak FLOP/s (default: an A100's in bf16) when fwdbwd_per_iter sequences take dt seconds; length: T,
        tokens in each, 0: block_size. Counts 6 N + 12 L C T per token (PaLM appendix B); what a PE adds is not counted."""
        T = length or self.cfg.block_size
        per_token = 6 * self.get_num_params() + 12 * self.cfg.n_layer * self.cfg.n_embd * T
        return per_token * T * fwdbwd_per_iter / dt / peak
