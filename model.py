"""
A GPT whose positional encoding (PE) is one switch: `GPTConfig(pe="pope")`, `pe="cope+rope"`, ...

Read it top to bottom: the config, a plain GPT that calls its PEs where one can act, the PEs, one
small class each, and the table PES that names them. Only torch is needed. A forward pass goes

    wte -> embed -> [ norm -> enter -> c_qk, c_v -> rotate -> cache -> q.k + logit_bias -> softmax
                      -> c_proj; norm -> MLP ] in every block -> norm -> lm_head

where embed, enter, rotate and logit_bias are the hooks of `class PE`. Each does nothing unless a
method overrides it; the calls below name the methods that do.

Shapes    B batch, T queries (the new tokens), S keys (cached and new), t and s: those of a chunk,
          C = n_embd, H = n_head, d = C / H. A comment `# (B, H, T, d)` gives its line's shape
Symbols   i: position of a query; j: of a key; theta_c: frequency of dimension or pair c; phi: phase
          A paper's other symbols stay in its class: delta, mu (PoPE); g, p, e, z (CoPE);
          m (ALiBi); f, W, b (CARoPE, FoX); l, expe_S, expe_theta (ExPE)
Papers    PoPE arXiv:2509.10534; CoPE arXiv:2405.18719; ExPE arXiv:2509.19569; CARoPE
          arXiv:2507.23083; FoX arXiv:2503.02130; RoPE arXiv:2104.09864; YaRN arXiv:2309.00071;
          ALiBi arXiv:2108.12409; T5 arXiv:1910.10683; Shaw arXiv:1803.02155;
          Vaswani arXiv:1706.03762
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
    mlp_width: int = 0  # its hidden width; 0: 4 C for gelu, 8/3 C rounded up to 64s for swiglu
    tie: bool = True  # the output layer uses the token embeddings' weights
    pe: str = "learned"  # a name of PES; a+b: both in a layer; a,b,c: a pattern over the layers

    # options of the positional encodings, by method
    base: float = 10000.0  # sinusoidal, rope, carope, pope: theta_c = base^(-c/n), c = 0..n-1
    share_table: bool = True  # relative, cope: one table for the model, not one per layer
    sinusoidal_scale: bool = True  # multiply the token embeddings by sqrt(C) (Vaswani, not ExPE)
    rel_max: int = 0  # relative: distances with a vector of their own; 0: block_size
    rel_capped: bool = False  # relative: farther ones take the last vector, else they add nothing
    t5_buckets: int = 32  # t5: distance buckets, half of them one distance wide
    t5_max_distance: int = 128  # t5: from here on all distances share the last bucket
    rope_scaling: str = "none"  # none | linear | ntk | yarn: stretch rope at test time ...
    rope_factor: float = 1.0  # ... to this many times the trained length
    rope_trained: int = 0  # yarn: the trained length, after block_size was raised; 0: block_size
    cope_npos: int = 64  # cope, cope_mlp: number of positions; p is clamped to npos - 1
    cope_gates: str = "keys"  # keys | sep-keys | values: vectors that q is compared with to count
    cope_per_head: bool = False  # cope: a table for each head, not one for all of them
    cope_scale_z: bool = False  # divide q.e by sqrt(d) too (official code; Listing 1 does not)
    cope_mlp_width: int = 64  # cope_mlp: N, hidden width
    cope_slopes: str = "alibi"  # cope_alibi: alibi | geometric (m0, m0/2, ...) | learned (from 0)
    cope_m0: float = 1.0  # cope_alibi: first head's slope when geometric
    pope_softplus: bool = True  # magnitudes are softplus(q), softplus(k); else q, k themselves
    pope_delta: str = "zero"  # zero | uniform: start of the learned phase delta | none: no delta
    expe_l: int = 0  # expe, exqpe: l, overridden dimensions; 0: C / 8
    expe_S: float = 0.0  # S, added to every value
    expe_theta: float = 1 / 2048  # theta (expe), theta_1 (exqpe): growth from a dimension to the next
    expe_theta2: float = 1 / 16  # theta_2 (exqpe): growth of one dimension per position
    expe_v: bool = False  # override the input of the values too
    expe_once: bool = False  # only before the first block, not in every block
    expe_same: bool = False  # expe: the same value in all l dimensions
    expe_learned: str = "no"  # no | random | init: train S and theta from random or the given ones
    expe_scale: float = 1.0  # test time: multiply the values, less S, by this (0.5: twice the length)


def choose(name, value, options):
    """The value, if it is among the options; else a ValueError that lists them."""
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(options)}")
    return value


def wide(x):
    """The dtype of logits and phases: float32, or float64 where x is float64."""
    return torch.promote_types(x.dtype, torch.float32)


def heads(x, H):
    """(B, T, C) -> (B, H, T, d)"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def part(cache, pe):
    """The part of a layer's cache that belongs to one PE; None without a cache."""
    return None if cache is None else cache.setdefault(pe, {})


def extend(cache, name, new):
    """Append new (B, H, T, .) to what cache holds under this name; returns all (B, H, S, .)."""
    if cache is None:
        return new
    cache[name] = torch.cat((cache[name], new), 2) if name in cache else new
    return cache[name]


# -------------------------------------------------------------------------------------------------
# the GPT


class Attention(nn.Module):
    def __init__(self, cfg, name, pes):
        """name: the layer's part of cfg.pe, such as "cope+rope"; pes: its PEs, in that order."""
        super().__init__()
        self.name, self.hard, self.dropout = name, cfg.hard_attention, cfg.dropout
        self.H, self.d = cfg.n_head, cfg.n_embd // cfg.n_head
        self.c_qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=cfg.bias)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)  # a PE may act on q, k alone
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.pes = nn.ModuleList(pes)
        self.kernel = None  # the PE whose Triton kernel computes it all, see GPT.use_kernels
        self.biasing = [pe for pe in pes if pe.biases]
        rotating = [pe for pe in pes if pe.rotates]
        self.rotation = rotating[0] if rotating else None
        if len(rotating) > 1:
            known = ", ".join(key for key, method in PES.items() if method.rotates)
            raise ValueError(f"pe={cfg.pe!r} turns q and k twice in one layer; "
                             f"mix at most one of {known}")

    def forward(self, x, pos, cache=None):
        """x (B, T, C), pos (T,), cache: this layer's dict, read and extended. Returns (B, T, C)."""
        x_qk = x_v = x
        for pe in self.pes:
            x_qk, x_v = pe.enter(x_qk, x_v, pos)  # expe, exqpe
        q, k = (heads(y, self.H) for y in self.c_qk(x_qk).chunk(2, -1))  # (B, H, T, d)
        v = heads(self.c_v(x_v), self.H)
        if self.kernel is not None and cache is None:  # kernels serve training, not decoding
            dropout = self.dropout if self.training else 0.0
            y = self.kernel.kernel_attention(q, k, v, x, pos, self.rotation, dropout)
        else:
            y = self.attend(q, k, v, x, pos, cache)
        y = self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return F.dropout(y, self.dropout, self.training)

    def attend(self, q, k, v, x, pos, cache):
        """q, k, v (B, H, T, d) of the new tokens -> (B, H, T, d)"""
        raw_q, raw_k = q, None  # before rotation
        if self.rotation is not None:  # rope, carope, pope
            if any(pe.reads_qk for pe in self.biasing):  # cope, which counts by unturned keys
                raw_k = extend(cache, "raw_k", k)
            q, k = self.rotation.rotate(q, k, x, pos, part(cache, self.rotation))
        k, v = extend(cache, "k", k), extend(cache, "v", v)  # (B, H, S, d), k 2d wide for PoPE
        if not self.biasing and not self.hard:
            return self.fused(q, k, v)
        # fox remembers, and cope with gates from sep-keys or values; the others return None
        memories = [pe.remember(x, v, part(cache, pe)) for pe in self.biasing]
        return self.dense(q, k, v, pos, raw_q, raw_k, memories)

    def fused(self, q, k, v):
        """PyTorch's fused attention, for methods that leave the logits alone."""
        T, S, d = q.size(2), k.size(2), v.size(3)
        if q.size(3) > d:  # PoPE: flash attention asks for v of that width, and CPUs are faster so
            v = F.pad(v, (0, q.size(3) - d))
        causal = True if T == S else False  # under torch.compile T == S may be a symbol, not a bool
        mask = None  # one query sees all keys
        if 1 < T < S:  # causal=True would line query 0 up with key 0, not with its own key
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.d**-0.5)
        return y[..., :d]

    def dense(self, q, k, v, pos, raw_q, raw_k, memories):
        """softmax(q.k / sqrt(d) + biases) v, step by step, for methods that act on the logits.

        It takes a chunk of queries at a time and only the keys that they may see: an evaluation
        on 10k tokens fits in memory (in training, autograd keeps every chunk). raw_q, raw_k: q
        and k before rotation; memories: what PE.remember returned, for each bias."""
        T, S, chunks = q.size(2), k.size(2), []
        j = pos[-1] + 1 - S + torch.arange(S, device=q.device)  # positions of the keys
        for begin in range(0, T, CHUNK):
            rows = slice(begin, min(begin + CHUNK, T))
            seen = slice(0, S - T + rows.stop)  # keys up to the chunk's last query
            i = pos[rows]
            dist = i[:, None] - j[seen]  # (t, s), negative in the future
            logits = dots(q[:, :, rows], k[:, :, seen], self.d)  # (B, H, t, s)
            qk = logits if self.rotation is None else None
            if raw_k is not None:
                qk = dots(raw_q[:, :, rows], raw_k[:, :, seen], self.d)
            for pe, memory in zip(self.biasing, memories):
                memory = None if memory is None else memory[:, :, seen]
                logits = logits + pe.logit_bias(raw_q[:, :, rows], qk, i, dist, memory)
            a = logits.masked_fill(dist < 0, -math.inf).softmax(-1)
            if self.hard:  # straight-through: the softmax's gradient (ours, the paper is silent)
                a = F.one_hot(a.argmax(-1), a.size(-1)) + a - a.detach()
            a = F.dropout(a.to(v.dtype), self.dropout, self.training)
            chunks.append(a @ v[:, :, seen])
        return torch.cat(chunks, 2)  # (B, H, T, d)


def dots(q, k, d):
    """q.k / sqrt(d), (B, H, t, s). d is the head width, also where PoPE's q and k are 2d wide."""
    return (q @ k.mT).to(wide(q)) * d**-0.5


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gated = choose("mlp", cfg.mlp, ("gelu", "swiglu")) == "swiglu"
        width = math.ceil(cfg.n_embd * 8 / (3 * 64)) * 64 if self.gated else 4 * cfg.n_embd
        width = cfg.mlp_width or width
        self.c_fc = nn.Linear(cfg.n_embd, 2 * width if self.gated else width, bias=cfg.bias)
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


def norm(cfg):
    if choose("norm", cfg.norm, ("layernorm", "rmsnorm")) == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, eps=1e-5)
    return nn.LayerNorm(cfg.n_embd, eps=1e-5, bias=cfg.bias)


class Block(nn.Module):
    def __init__(self, cfg, name, pes):
        super().__init__()
        self.ln_1 = norm(cfg)
        self.attn = Attention(cfg, name, pes)
        self.ln_2 = norm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x, pos, cache=None):
        x = x + self.attn(self.ln_1(x), pos, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        """Raises ValueError, naming the field, where cfg makes no sense."""
        super().__init__()
        for key in ("block_size", "n_layer", "n_head", "n_embd",
                    "base", "rope_factor", "cope_npos", "cope_mlp_width"):
            if not 0 < getattr(cfg, key) < math.inf:
                raise ValueError(f"{key}={getattr(cfg, key)} must be larger than 0, and finite")
        if cfg.n_embd % cfg.n_head:
            raise ValueError(f"n_embd={cfg.n_embd} does not divide into n_head={cfg.n_head} heads; "
                             "change one of them")
        pattern = cfg.pe.split(",")
        if len(pattern) > cfg.n_layer:
            raise ValueError(f"pe={cfg.pe!r} is a pattern of {len(pattern)} layers, "
                             f"n_layer={cfg.n_layer}; shorten it")
        self.cfg = cfg
        self.firsts = {}  # name -> its PE in the earliest layer that uses it, to share parameters
        blocks = []
        for depth in range(cfg.n_layer):
            mix, pes = pattern[depth % len(pattern)], []
            for name in mix.split("+"):
                method = PES[choose("pe", name, PES)]
                pes.append(method(cfg, self.firsts.get(name)))
                self.firsts.setdefault(name, pes[-1])
            blocks.append(Block(cfg, mix, pes))
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.h = nn.ModuleList(blocks)
        self.ln_f = norm(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight
        for name, layer in self.gpt2_layers().items():
            std = 0.02
            if name.endswith("c_proj"):  # 2 n_layer of these add to the residual stream
                std = 0.02 / math.sqrt(2 * cfg.n_layer)
            nn.init.normal_(layer.weight, std=std)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, idx, targets=None, cache=None, start=None):
        """idx (B, T) token ids; targets (B, T), -1 where there is no loss. Returns (logits, loss):
        with targets, logits (B, T, V) and the loss in nats per target; without, the logits of the
        last position alone (B, 1, V) and None. cache: from new_cache(), extended in place;
        start: position of idx[:, 0], by default the one after the cache's."""
        begin = start or 0
        if cache is not None:  # go on where it ends
            begin = cache[0].get("end", begin)
            if start not in (None, begin):
                raise ValueError(f"start={start} leaves a gap, the cache ends at {begin}; "
                                 "leave start out")
            cache[0]["end"] = begin + idx.size(1)
        end = begin + idx.size(1)
        pos = torch.arange(begin, end, device=idx.device)
        x = self.wte(idx)
        for name, pe in self.firsts.items():
            if pe.limit is not None and end > pe.limit:
                raise ValueError(f"pe={name!r} was trained for {pe.limit} positions, got {end}; "
                                 "shorten the input, or train with a larger block_size or another pe")
            x = pe.embed(x, pos)  # learned, sinusoidal; expe with expe_once
        x = F.dropout(x, self.cfg.dropout, self.training)
        for block, its_cache in zip(self.h, cache or [None] * len(self.h)):
            x = block(x, pos, its_cache)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def gpt2_layers(self):
        """{name: module} of the layers whose weights start and decay as GPT-2's: every Linear and
        Embedding of the GPT itself, and those submodules that a PE lists in as_gpt2. The rest of a
        PE starts as its class says and never decays."""
        not_gpt2 = set()
        for pe in self.modules():
            if isinstance(pe, PE):
                not_gpt2 |= {m for name, m in pe.named_modules() if name not in pe.as_gpt2}
        return {name: m for name, m in self.named_modules()
                if isinstance(m, (nn.Linear, nn.Embedding)) and m not in not_gpt2}

    def use_kernels(self, dtype):
        """Use the kernels of kernels.py in the layers for which there is one. dtype: that of q, k
        and v, so autocast's. Call it once, on the device. Returns a line about every layer."""
        import kernels

        device, labels = self.wte.weight.device, []
        for attn in (block.attn for block in self.h):
            reason = kernels.why_not(attn.name, attn.d, device, dtype, attn.hard)
            if reason:
                label = f"pytorch ({attn.name}: {reason})"
            else:
                attn.kernel = next(pe for pe in attn.pes if pe.kernel_attention is not None)
                label = f"triton {attn.name}"
            if label not in labels:
                labels.append(label)
        return "attention: " + ", ".join(labels)

    def new_cache(self):
        """A dict per layer, to be filled with keys, values and what a PE must remember."""
        return [{} for _ in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0: the likeliest token. In eval()."""
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
        """AdamW, in which the weights of gpt2_layers() decay and nothing else does. After each
        step it calls PE.clamp_parameters."""
        decay = {layer.weight for layer in self.gpt2_layers().values()}
        params = list(self.parameters())
        groups = [dict(params=[p for p in params if p in decay], weight_decay=weight_decay),
                  dict(params=[p for p in params if p not in decay], weight_decay=0.0)]
        fused = device_type in ("cuda", "cpu")
        optimizer = torch.optim.AdamW(groups, learning_rate, betas, fused=fused)
        pes = [module for module in self.modules() if isinstance(module, PE)]
        optimizer.register_step_post_hook(lambda *_: [pe.clamp_parameters() for pe in pes])
        return optimizer

    def get_num_params(self, non_embedding=True):
        """Number of parameters; learned absolute positions count only if non_embedding is False."""
        total = sum(p.numel() for p in self.parameters())
        if non_embedding and "learned" in self.firsts:
            total -= self.firsts["learned"].wpe.weight.numel()
        return total

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak=312e12, length=0):
        """Share of the peak FLOP/s (default: an A100's in bf16) when fwdbwd_per_iter sequences of
        `length` tokens (0: block_size) take dt seconds. Counts 6 N + 12 L C T per token (PaLM
        appendix B), and nothing for what a PE adds."""
        T = length or self.cfg.block_size
        per_token = 6 * self.get_num_params() + 12 * self.cfg.n_layer * self.cfg.n_embd * T
        return per_token * T * fwdbwd_per_iter / dt / peak


# -------------------------------------------------------------------------------------------------
# positional encodings: a PE overrides the hooks where it acts, the others do nothing


class PE(nn.Module):
    """`nope`: no positional encoding. The causal mask alone tells a token what came before it."""

    rotates = biases = False  # set by __init_subclass__: does a class have a rotate, a logit_bias?
    reads_qk = False  # does its logit_bias read qk?
    limit = None  # number of positions past which the method is not defined, if there is one
    as_gpt2 = ()  # names of its submodules that start and decay as the GPT's own layers do
    kernel_attention = None  # a method where a Triton kernel computes the layer's whole attention

    def __init_subclass__(cls):
        cls.rotates = cls.rotate is not PE.rotate
        cls.biases = cls.logit_bias is not PE.logit_bias

    def __init__(self, cfg, shared_from=None):
        """shared_from: this method's PE in the earliest layer that uses it, None in that layer.
        A method with one set of parameters for all layers takes them from there; one that learns a
        set for each layer ignores it."""
        super().__init__()
        self.cfg, self.d = cfg, cfg.n_embd // cfg.n_head

    def embed(self, x, pos):
        """Returns x (B, T, C), the token embeddings, changed; once per model. pos (T,)."""
        return x

    def enter(self, x, x_v, pos):
        """Returns the inputs (B, T, C) of the q, k projections and of v's, changed; in a block."""
        return x, x_v

    def rotate(self, q, k, x, pos, cache):
        """Returns q, k (B, H, T, d) of the new tokens, turned, before k enters the cache.
        x (B, T, C): the attention's input."""
        return q, k

    def remember(self, x, v, cache):
        """Once a block: returns what logit_bias needs of every key, (B, H, S, .), or None.
        x (B, T, C): the attention's input; v (B, H, S, d): the values of all keys."""
        return None

    def logit_bias(self, q, qk, i, dist, memory):
        """Returns the bias of a chunk of queries, of a shape that broadcasts to (B, H, t, s) and of
        dtype wide(q), as autocast may be on. q (B, H, t, d): the queries before rotation;
        qk (B, H, t, s): their q.k / sqrt(d) before rotation, which is there only if reads_qk is
        True; i (t,): their positions; dist (t, s): i - j. Keys with dist < 0 are masked later, but
        a nan there would spoil the gradients. memory (B, H, s, .): what remember returned for these
        s keys, the last t of which are the queries' own."""
        return 0.0

    def clamp_parameters(self):
        """Brings bounded parameters back into their bounds, after each optimizer step."""


class Learned(PE):
    """`learned` absolute embeddings, added to the tokens' (GPT-2; Vaswani section 3.5)."""
    as_gpt2 = ("wpe",)

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.wpe = shared_from.wpe if shared_from else nn.Embedding(cfg.block_size, cfg.n_embd)
        self.limit = cfg.block_size

    def embed(self, x, pos):
        return x + self.wpe(pos)


def frequencies(base, n, x):
    """theta_c = base^(-c/n), c = 0..n-1, (n,), in float32 at least. Made anew each time: .bfloat16()
    would round a buffer, and phases would be off by radians."""
    return base ** (-torch.arange(n, device=x.device, dtype=wide(x)) / n)


class Sinusoidal(PE):
    """`sinusoidal`: dimensions 2c and 2c + 1 of the embeddings, which are multiplied by sqrt(C)
    before, get sin and cos of i theta_c, theta_c = base^(-2c/C) (Vaswani sections 3.4, 3.5)."""

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        if cfg.n_embd % 2:
            raise ValueError(f"sinusoidal pairs sin and cos, but n_embd={cfg.n_embd} is odd; change it")

    def embed(self, x, pos):
        C = x.size(-1)
        angle = pos[:, None] * frequencies(self.cfg.base, C // 2, x)  # (T, C/2)
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (T, C)
        if self.cfg.sinusoidal_scale:
            x = x * C**0.5
        return x + waves.to(x.dtype)


def turn(x, angle):
    """Rotate the pairs (x[c], x[c + d/2]) of x (B, H, T, d) by angle (.., T, d/2), in radians."""
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def check_pairs(name, d):
    if d % 2:
        raise ValueError(f"{name} turns pairs of dimensions, but n_embd / n_head = {d} is odd; "
                         "change n_head")


class RoPE(PE):
    """`rope`: dimensions c and c + d/2 of q and k turn by the angle i theta_c, theta_c =
    base^(-2c/d), c = 0..d/2-1, so q.k depends on position through the distance alone (RoPE eq. 16;
    its pairs are neighbours, which is the same up to the order of dimensions).

    Test-time scaling to `factor` times the trained length: linear: i / factor; ntk: base *
    factor^(d/(d-2)); yarn: a pair that turns 32 times or more within the trained length stays as
    it is, one that turns once or less is divided by the factor, and one in between gets a blend,
    linear in its turns (YaRN section 3; deployed code often blends over c)."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        check_pairs("rope", self.d)
        scaling = choose("rope_scaling", cfg.rope_scaling, ("none", "linear", "ntk", "yarn"))
        if scaling == "ntk" and self.d == 2:
            raise ValueError("rope_scaling='ntk' needs n_embd / n_head > 2; change n_head")
        if (scaling == "none") != (cfg.rope_factor == 1):
            raise ValueError(f"rope_scaling={scaling!r} with rope_factor={cfg.rope_factor} does nothing; "
                             "give both, as rope_scaling=ntk,rope_factor=4")

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
        return turn(q, angle) * gain, turn(k, angle) * gain


class CARoPE(PE):
    """`carope`: RoPE whose phases are sums of learned frequencies that token and head set:
    phi_c(i) = sum_{t<=i} f(x_t)^c, f(x) = 1 / (softplus(x W + b) + 1), c = 0..d/2-1 (CARoPE
    section 2, without b). x is the attention's input. Pair 0 stays content-free. The constant b is
    ours: the paper asks for a start as RoPE, and with b, W = 0 gives f = base^(-2/d), whose powers
    f^c are RoPE's frequencies."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        check_pairs("carope", self.d)
        self.W = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_head))
        y = cfg.base ** (2 / self.d) - 1  # b = ln(e^y - 1), for which softplus(b) = y
        self.b = y + math.log(-math.expm1(-y))

    def rotate(self, q, k, x, pos, cache):
        with torch.autocast(x.device.type, enabled=False):  # a sum in bfloat16 is off by radians
            y = F.softplus(x.to(wide(x)) @ self.W.to(wide(x)) + self.b)
            log_f = -torch.log1p(y).transpose(1, 2)[..., None]  # (B, H, T, 1)
            c = torch.arange(self.d // 2, device=x.device)
            phi = (log_f * c).exp().cumsum(2)  # (B, H, T, d/2)
        if cache is not None:  # later tokens need the running phase
            phi = phi + cache.get("phi", 0.0)
            cache["phi"] = phi[:, :, -1:] % (2 * math.pi)  # a large one would lose digits
        return turn(q, phi), turn(k, phi)


class PoPE(PE):
    """`pope`: sum_c mu(q_c) mu(k_c) cos((j - i) theta_c + delta_c) / sqrt(d), mu = softplus,
    theta_c = base^(-c/d), c = 0..d-1 (PoPE eq. 5; the paper prints base^(+c/d), a typo). Content
    sets the magnitudes, position the phases, and each dimension, not each pair, has a phase.
    Computed as a plain dot product of [mu cos, mu sin], 2d wide (eq. 6, 7, 9).

    delta (H, d) is brought back into [-2 pi, 0] after each step. A clamp in the forward pass would
    not do: a delta past the bound would get no gradient, and never come back."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        choose("pope_delta", cfg.pope_delta, ("zero", "uniform", "none"))
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
        mu = F.softplus(x.to(wide(x))) if self.cfg.pope_softplus else x
        return torch.cat((mu * angle.cos(), mu * angle.sin()), -1).to(x.dtype)

    def kernel_attention(self, q, k, v, x, pos, rotation, dropout):
        """The kernel rotates q and k by itself."""
        from kernels import pope_attention

        base, softplus = self.cfg.base, self.cfg.pope_softplus
        return pope_attention(q, k, v, self.delta, base, softplus, dropout)

    @torch.no_grad()
    def clamp_parameters(self):
        if self.delta is not None:
            self.delta.clamp_(-2 * math.pi, 0)


class Relative(PE):
    """`relative`: q_i . (k_j + a[i-j]) / sqrt(d), a learned vector per distance (Shaw eq. 4)."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        if shared_from and cfg.share_table:
            self.a = shared_from.a
        else:
            self.a = nn.Parameter(0.02 * torch.randn(cfg.rel_max or cfg.block_size, self.d))

    def logit_bias(self, q, qk, i, dist, memory):
        R = len(self.a)
        z = dots(q, self.a, self.d)  # (B, H, t, R): q.a / sqrt(d) for every distance
        row = dist.clamp(0, R - 1).expand(*q.shape[:2], -1, -1)  # (B, H, t, s)
        bias = z.gather(-1, row)
        return bias if self.cfg.rel_capped else bias.masked_fill(dist >= R, 0.0)


class T5(PE):
    """`t5`: a learned bias per head and bucket of distances, one table for all layers (T5 section
    2.1). Half of the buckets hold one distance each; the others widen logarithmically."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        if not 1 < cfg.t5_buckets // 2 < cfg.t5_max_distance:
            raise ValueError(f"t5_buckets={cfg.t5_buckets}, t5_max_distance={cfg.t5_max_distance}: "
                             "need 4 buckets or more, and a distance beyond half of them")
        table = torch.zeros(cfg.t5_buckets, cfg.n_head)
        self.table = shared_from.table if shared_from else nn.Parameter(table)

    def logit_bias(self, q, qk, i, dist, memory):
        buckets, exact = self.cfg.t5_buckets, self.cfg.t5_buckets // 2
        # 0..1: where log(dist) lies between log(exact) and log(t5_max_distance)
        share = (dist.clamp(min=exact).float() / exact).log()
        share = share / math.log(self.cfg.t5_max_distance / exact)
        far = exact + (share * (buckets - exact)).long()
        bucket = torch.where(dist < exact, dist.clamp(min=0), far.clamp(max=buckets - 1))  # (t, s)
        return self.table[bucket].permute(2, 0, 1).to(wide(q))  # (H, t, s)


def alibi_slopes(H, x):
    """m_h = 2^(-8h/H), h = 1..H, (H, 1, 1). Where H is no power of two: those of the next smaller
    power, then every other one of the next larger (ALiBi section 3 and its footnote)."""
    power = 2 ** int(math.log2(H))
    h = torch.arange(H, device=x.device, dtype=wide(x))
    exponent = torch.where(h < power, h + 1, h - power + 0.5) * (8 / power)
    return 2.0 ** -exponent.view(H, 1, 1)


class ALiBi(PE):
    """`alibi`: - m_h (i - j), a fixed slope per head and nothing learned (ALiBi section 3)."""
    def logit_bias(self, q, qk, i, dist, memory):
        return -alibi_slopes(self.cfg.n_head, q) * dist


class FoX(PE):
    """`fox`: sum_{l=j+1..i} log f_l, f_l = sigmoid(x_l W + b) per head: an ALiBi whose slope the
    tokens set, by forgetting what came before them (FoX section 3). x is the attention's input.
    W and b start as in the authors' code, where f is near 1/2."""
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.W = nn.Parameter(0.02 * torch.randn(cfg.n_embd, cfg.n_head))
        self.b = nn.Parameter(torch.zeros(cfg.n_head))

    def remember(self, x, v, cache):
        """The sum of log f over all tokens up to each key, (B, H, S, 1)."""
        with torch.autocast(x.device.type, enabled=False):  # a sum in bfloat16 would be off
            log_f = F.logsigmoid(x.to(wide(x)) @ self.W.to(wide(x)) + self.b)  # (B, T, H)
        total = log_f.transpose(1, 2)[..., None].cumsum(2)  # (B, H, T, 1)
        if cache is not None and "total" in cache:
            total = total + cache["total"][:, :, -1:]
        return extend(cache, "total", total)

    def logit_bias(self, q, qk, i, dist, total):
        total = total[..., 0]  # (B, H, s); the last t keys are the queries' own
        return total[:, :, -len(i) :, None] - total[:, :, None]


class CoPE(PE):
    """`cope`: positions count what the query cares about. Gates g_ij = sigmoid(q_i.k_j / sqrt(d)),
    positions p_ij = g_ij + .. + g_ii, clamped to npos - 1 (if all gates are 1, p_ij = i - j + 1),
    and the bias q_i.e[p_ij], interpolated between the two nearest columns of e (CoPE eq. 3-8 and
    Listing 1; eq. 3 omits sqrt(d)). e (d, npos) serves all heads, or is (H, d, npos).

    In `cope+rope` gates and table see q and k as they were before rotation: turned ones would let
    distance into the counts."""
    as_gpt2 = ("W_g",)

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        gates = choose("cope_gates", cfg.cope_gates, ("keys", "sep-keys", "values"))
        self.reads_qk = gates == "keys"
        self.W_g = None
        if gates == "sep-keys":
            self.W_g = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.add_parameters(shared_from if cfg.share_table else None)

    def add_parameters(self, shared_from):
        shape = (self.d, self.cfg.cope_npos)
        if self.cfg.cope_per_head:
            shape = (self.cfg.n_head, *shape)
        self.e = shared_from.e if shared_from else nn.Parameter(torch.zeros(shape))

    def remember(self, x, v, cache):
        """The vectors (B, H, S, d) that q is compared with to count a token; None: the keys."""
        if self.W_g is not None:
            return extend(cache, "gate_k", heads(self.W_g(x), self.cfg.n_head))
        return v if self.cfg.cope_gates == "values" else None

    def logit_bias(self, q, qk, i, dist, gate_k):
        g = self.gates(q, qk, dist, gate_k)
        p = self.positions(g)
        return self.interpolate(q, p)

    def gates(self, q, qk, dist, gate_k):
        """g (B, H, t, s), zero in the future."""
        if gate_k is not None:
            qk = dots(q, gate_k, self.d)
        return qk.masked_fill(dist < 0, -math.inf).sigmoid()

    def positions(self, g):
        """p (B, H, t, s): a sum from the right, as total minus prefix would cancel digits."""
        return g.flip(-1).cumsum(-1).flip(-1)

    def interpolate(self, q, p):
        """The bias (B, H, t, s) at positions p."""
        z = self.z(q).to(wide(q))
        p = p.clamp(max=self.cfg.cope_npos - 1)
        floor, ceil = p.floor().long(), p.ceil().long()
        return torch.lerp(z.gather(-1, floor), z.gather(-1, ceil), p - floor)

    def z(self, q):
        """q.e (B, H, t, npos), the bias at every whole position."""
        z = q @ self.e
        return z * self.d**-0.5 if self.cfg.cope_scale_z else z

    def kernel_attention(self, q, k, v, x, pos, rotation, dropout):
        """The kernel takes the gates from its own logits, unless it is given gate_q and gate_k.
        rotation: the layer's PE that turns q and k, or None."""
        from kernels import cope_attention

        z, gate_k = self.z(q), self.remember(x, v, None)
        if rotation is None and gate_k is None:
            return cope_attention(q, k, v, z, dropout=dropout)
        gate_q = q
        if gate_k is None:
            gate_k = k
        if rotation is not None:
            q, k = rotation.rotate(q, k, x, pos, None)
        return cope_attention(q, k, v, z, gate_q, gate_k, dropout)


class CoPE_MLP(CoPE):
    """`cope_mlp`: an MLP of N hidden units gives e[p]: q_i . W2' gelu(p/npos W1 + b1) (CoPE
    appendix C; GELU, and that p is clamped and divided by npos, are ours: the paper is silent)."""
    kernel_attention = None

    def add_parameters(self, shared_from):
        N = self.cfg.cope_mlp_width
        self.W1, self.b1 = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(N))
        self.W2 = nn.Parameter(0.02 * torch.randn(N, self.d))

    def interpolate(self, q, p):
        u = (q @ self.W2.T).to(wide(q))  # (B, H, t, N)
        if self.cfg.cope_scale_z:
            u = u * self.d**-0.5
        p = p.clamp(max=self.cfg.cope_npos - 1) / self.cfg.cope_npos
        hidden = F.gelu(p[..., None] * self.W1 + self.b1)  # (B, H, t, s, N)
        return (hidden @ u[..., None])[..., 0]  # (B, H, t, s)


class CoPE_ALiBi(CoPE):
    """`cope_alibi`: - m_h p_ij, with CoPE's p, not clamped, for ALiBi's distance (CoPE eq. 10
    prints +m, which with positive slopes would favour what is far; ours is ALiBi's sign)."""
    kernel_attention = None

    def add_parameters(self, shared_from):
        slopes = choose("cope_slopes", self.cfg.cope_slopes, ("alibi", "geometric", "learned"))
        self.m = nn.Parameter(torch.zeros(self.cfg.n_head)) if slopes == "learned" else None

    def interpolate(self, q, p):
        H = self.cfg.n_head
        if self.cfg.cope_slopes == "alibi":
            m = alibi_slopes(H, q)
        elif self.cfg.cope_slopes == "geometric":
            m = self.cfg.cope_m0 * 0.5 ** torch.arange(H, device=q.device)
        else:
            m = self.m.to(wide(q))
        return -m.view(H, 1, 1) * p


class ExPE(PE):
    """`expe`: the first l dimensions of the input of the q, k projections become exact positions
    S + theta (i + c), c = 0..l-1, in every block (ExPE eq. 1-3, Figure 1). It acts after the
    block's norm, which would otherwise change the values, as it does with expe_once."""
    learnable = ("expe_S", "expe_theta")

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.l = cfg.expe_l or cfg.n_embd // 8
        if not 0 < self.l <= cfg.n_embd:
            raise ValueError(f"expe_l={self.l} does not fit n_embd={cfg.n_embd}; "
                             f"choose 1 to {cfg.n_embd}")
        choose("expe_learned", cfg.expe_learned, ("no", "random", "init"))
        for name in self.learnable:
            value = getattr(cfg, name)
            if cfg.expe_learned != "no":  # one of each for all blocks, as in the paper
                start = torch.randn(()) if cfg.expe_learned == "random" else torch.tensor(value)
                value = getattr(shared_from, name) if shared_from else nn.Parameter(start)
            setattr(self, name, value)

    def growth(self, i, c):
        """The values (T, l) without S, of positions i (T, 1) and dimensions c (l,)."""
        return self.expe_theta * (i if self.cfg.expe_same else i + c)

    def override(self, x, pos):
        i, c = pos[:, None].to(wide(x)), torch.arange(self.l, device=x.device, dtype=wide(x))
        values = self.expe_S + self.cfg.expe_scale * self.growth(i, c)
        values = values.to(x.dtype).expand(len(x), -1, self.l)  # (B, T, l)
        return torch.cat((values, x[..., self.l :]), -1)

    def embed(self, x, pos):
        return self.override(x, pos) if self.cfg.expe_once else x

    def enter(self, x, x_v, pos):
        if self.cfg.expe_once:
            return x, x_v
        x = self.override(x, pos)
        return x, x if self.cfg.expe_v else x_v


class ExQPE(ExPE):
    """`exqpe`: S + theta_1 c + theta_2 n_c, where n_c counts the positions 0..i that are c modulo l:
    one dimension moves per position, by an amount that survives low precision (ExPE section 2.3).
    Its eq. 5 is garbled; as printed, position 0 already carries theta_2 in dimension 0, and so it
    does here."""
    learnable = ("expe_S", "expe_theta", "expe_theta2")

    def growth(self, i, c):
        return self.expe_theta * c + self.expe_theta2 * ((i - c) / self.l + 1).floor()


# The switch. Of each method: where it acts, what it learns, the numbers that it caches per token
# and head, and its loss past the trained length, as measured in README and config/README.md.
PES = {
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
}  # * d more with sep-keys, and beside a rotation with gates from keys; beside pope d more as well
