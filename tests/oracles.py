"""Every positional encoding once more: float64 loops, straight from the papers' equations.

The tests compare model.py with this file, so the two share no code. Here a score is computed for
one query i and one key j, a sum is a sum, and nothing is cached, batched or rearranged, although
that is slow. `gpt` at the end computes the logits of a whole model, for one sequence.

T tokens, C channels, H heads, d = C / H. The methods work on one head: q, k, v are (T, d), `pos`
holds the T positions, and a bias is a (T, T) array. Its entry (i, j), j <= i, is added to the
scaled score.

To test a method of your own:

1.  Write its equation here, as plain loops, without a look at your class. If it adds something to
    the scores, put its name into BIAS and the equation into `bias`. A rotation belongs in ROTATE
    and `score`, a change to the embeddings in ADD and `embed`, and a change to the input of q and k
    in OVERRIDE and `override`. If a parameter has bounds, assert them here.
2.  If all layers are to share a parameter, name it in SHARED.
3.  tests/test_model.py has a case for every name in PES. Add one to CASES for each value of your
    options, and one in combination with RoPE.

Then `python -m pytest tests/test_model.py -k NAME` compares the two. It also tests what holds for
every method: no token sees the future, a cache changes nothing, distant positions survive bfloat16,
all parameters learn and stay within their bounds, and torch.compile needs one graph.
"""
import math

import numpy as np

# --- small pieces ---------------------------------------------------------------------------------

def sigmoid(x):
    return 1 / (1 + math.exp(-x))

def softplus(x):
    return np.logaddexp(0, x)  # ln(e^0 + e^x), without overflow

def gelu(x):
    values = [0.5 * u * (1 + math.erf(u / math.sqrt(2))) for u in x.ravel()]
    return np.array(values).reshape(x.shape)

def causal(T, f):
    """Returns the (T, T) array of f(i, j) for j <= i. Its entries for the future, j > i, are zero,
    and f is not called for them."""
    return np.array([[f(i, j) if j <= i else 0.0 for j in range(T)] for i in range(T)])

def dots(q, k):
    """Scaled dot products, Vaswani et al. 2017 eq. (1)."""
    return causal(len(q), lambda i, j: q[i] @ k[j] / math.sqrt(q.shape[1]))

def rotate(x, angle):
    """Rotates the pair (c, c + d/2) of row t by angle[t][c]."""
    out = np.zeros_like(x)
    half = x.shape[1] // 2
    for t in range(len(x)):
        for c in range(half):
            cos, sin = math.cos(angle[t][c]), math.sin(angle[t][c])
            out[t, c] = x[t, c] * cos - x[t, c + half] * sin
            out[t, c + half] = x[t, c] * sin + x[t, c + half] * cos
    return out

# --- absolute: the embeddings or the input change -------------------------------------------------

def learned(x, pos, wpe):
    """Vaswani et al. 2017, section 3.5, the learned variant: x_t + wpe[t]."""
    return np.array([x[t] + wpe[n] for t, n in enumerate(pos)])

def sinusoidal(x, pos, cfg):
    """Vaswani et al. 2017: embeddings times sqrt(C) (section 3.4), plus the sines and cosines of
    section 3.5. ExPE eq. (13) leaves the embeddings as they are."""
    C = x.shape[1]
    out = x * math.sqrt(C) if cfg.sinusoidal_scale else x.copy()
    for t, n in enumerate(pos):
        for i in range(C // 2):
            out[t, 2 * i] += math.sin(n / cfg.base ** (2 * i / C))
            out[t, 2 * i + 1] += math.cos(n / cfg.base ** (2 * i / C))
    return out

def expe(x, pos, cfg, S, theta):
    """ExPE eq. (3): dim j of the first l becomes S + theta (n + j). Section 4.3 scales the steps at
    test time. cfg.expe_same is Table 7's "p is stable": S + theta n in all of them."""
    out = x.copy()
    for t, n in enumerate(pos):
        for j in range(cfg.expe_l or x.shape[1] // 8):
            out[t, j] = S + cfg.expe_scale * theta * (n if cfg.expe_same else n + j)
    return out

def exqpe(x, pos, cfg, S, theta, theta2):
    """ExQPE eq. (5): S + i theta1, and each step m = 0, 1, ..., n adds theta2 to dim m mod l."""
    out = x.copy()
    width = cfg.expe_l or x.shape[1] // 8
    for t, n in enumerate(pos):
        for i in range(width):
            steps = sum(m % width == i for m in range(n + 1))
            out[t, i] = S + cfg.expe_scale * (i * theta + steps * theta2)
    return out

# --- rotations: the dot product changes -----------------------------------------------------------

def rope(q, k, pos, cfg):
    """Su et al. 2021, section 3.2.2: pair c at position n is rotated by the angle n theta_c, where
    theta_c = base^(-2c/d), c = 0..d/2-1.
    With cfg.rope_fraction, all this is done to the first dimensions, as to a head of that width
    (GPT-NeoX's rotary_pct), and the others stay as they are.
    With cfg.rope_p, only the first of the pairs rotate, which are the fastest (Barbero et al. 2025,
    section 6).
    With cfg.rope_scaling, linear divides the positions by s (Chen et al. 2023), ntk raises the base
    to base * s^(d/(d-2)), and yarn changes each frequency by the rotations r that it makes within
    the trained length (Peng et al. 2023, definitions 1 to 3)."""
    s = cfg.rope_factor
    L = cfg.rope_trained or cfg.block_size
    mode = cfg.rope_scaling
    d = round(q.shape[1] * cfg.rope_fraction)
    base = cfg.base * s ** (d / (d - 2)) if mode == "ntk" else cfg.base
    theta = [base ** (-2 * c / d) for c in range(d // 2)]
    if mode == "linear":
        theta = [th / s for th in theta]
    if mode == "yarn":
        for c, th in enumerate(theta):
            r = L * th / (2 * math.pi)
            gamma = min(max((r - 1) / (32 - 1), 0), 1)
            theta[c] = (1 - gamma) * th / s + gamma * th
    rotating = round(cfg.rope_p * len(theta))
    theta = [th if c < rotating else 0.0 for c, th in enumerate(theta)]
    temper = 0.1 * math.log(s) + 1 if mode == "yarn" else 1
    angle = [[n * th for th in theta] for n in pos]
    rotated = []
    for x in (q, k):
        out = x.copy()
        out[:, :d] = rotate(x[:, :d], angle) * temper
        rotated.append(out)
    return rotated

def carope(q, k, x, w, cfg):
    """CARoPE section 2: rotate by phi_c(m) = sum_{t<=m} f(x_t)^c, f(x) = 1 / (softplus(x w + b0)
    + 1). w (C,) is the head's column of W. The paper has no b0. With it, W = 0 is the RoPE that the
    paper says it starts from: f = theta_1 = base^(-2/d). c counts from 0, as RoPE's pairs do."""
    d = q.shape[1]
    y = cfg.base ** (2 / d) - 1  # softplus(b0) = 1 / theta_1 - 1
    b0 = y + math.log(-math.expm1(-y))  # ln(e^y - 1), which overflows as it stands when d is small
    f = [1 / (softplus(row @ w + b0) + 1) for row in x]
    phi = [[sum(f[t] ** c for t in range(m + 1)) for c in range(d // 2)] for m in range(len(x))]
    return rotate(q, phi), rotate(k, phi)

def pope_scores(q, k, pos, delta, cfg):
    """PoPE eq. (5), scaled: sum_c mu_q mu_k cos((s - t) theta_c + delta_c) / sqrt(d), query at t,
    key at s. theta_c = base^(-c/d) for c = 0..d-1 (the exponent under eq. (3) lacks the minus).
    delta is the head's (d,)."""
    d = q.shape[1]
    magnitude = {"softplus": softplus, "relu": lambda x: np.maximum(x, 0), "identity": np.copy}
    mu_q, mu_k = magnitude[cfg.pope_mu](q), magnitude[cfg.pope_mu](k)

    def score(i, j):
        total = 0.0
        for c in range(d):
            phase = (pos[j] - pos[i]) * cfg.base ** (-c / d) + delta[c]
            total += mu_q[i, c] * mu_k[j, c] * math.cos(phase)
        return total / math.sqrt(d)

    return causal(len(q), score)

# --- biases on the scaled score; q is never rotated -----------------------------------------------

def relative_bias(q, a, pos, cfg):
    """Shaw et al. 2018 eq. (4), keys only: q_i . a[n] / sqrt(d), where n is the distance. Distances
    past the table have no term, or that of the last a if capped."""
    R = max(cfg.block_size, cfg.random_positions)

    def term(i, j):
        n = pos[i] - pos[j]
        if n >= R and not cfg.relative_capped:
            return 0.0
        return q[i] @ a[min(n, R - 1)] / math.sqrt(q.shape[1])

    return causal(len(q), term)

def t5_bucket(n, cfg):
    """Raffel et al. 2020, section 2.1, causal: half of the buckets hold one distance each, and the
    rest grow logarithmically. If E of the B buckets are exact and M is t5_max_distance, n >= E is
    in bucket E + floor(log(n/E) / log(M/E) * (B - E)), or in the last one. This is computed in
    integers, because a rounded logarithm may miss a bucket's edge."""
    B = cfg.t5_buckets
    E = B // 2
    M = cfg.t5_max_distance
    if n < E:
        return n
    more = 0
    while more < B - E - 1 and M ** (more + 1) * E ** (B - E - more - 1) <= n ** (B - E):
        more += 1
    return E + more

def t5_bias(table, pos, cfg):
    """Raffel et al. 2020, section 2.1: one scalar per bucket. table is the head's column."""
    return causal(len(pos), lambda i, j: table[t5_bucket(pos[i] - pos[j], cfg)])

def alibi_slopes(H):
    """Press et al. 2022, section 3: 2^(-8/H), its square, ... If H is not a power of two, the
    authors' code takes the slopes of the power below, then every other one of the power above."""
    p = 1
    while 2 * p <= H:
        p *= 2
    slopes = [2 ** (-8 * (h + 1) / p) for h in range(p)]
    return slopes + [2 ** (-8 * (h + 1) / (2 * p)) for h in range(0, 2 * p, 2)][:H - p]

def alibi_bias(m, pos):
    """Press et al. 2022, section 3: -m times the distance."""
    return causal(len(pos), lambda i, j: -m * (pos[i] - pos[j]))

def fox_bias(x, w, b):
    """Lin et al. 2025 eq. (4): sum_{l=j+1..i} log f_l, f_l = sigmoid(w . x_l + b). w (C,), b of one
    head."""
    log_f = [math.log(sigmoid(row @ w + b)) for row in x]
    return causal(len(x), lambda i, j: sum(log_f[l] for l in range(j + 1, i + 1)))

def gates(scores):
    """CoPE eq. (3) as Listing 1 has it: g_ij = sigmoid of the scaled score, q_i . k_j / sqrt(d)."""
    return causal(len(scores), lambda i, j: sigmoid(scores[i, j]))

def positions(g):
    """CoPE eq. (4): p_ij = sum_{k=j..i} g_ik."""
    return causal(len(g), lambda i, j: sum(g[i, k] for k in range(j, i + 1)))

def cope_bias(q, p, e, cfg):
    """CoPE eqs. (7), (8): z = q_i . e between the two nearest integer positions. e (d, npos), p
    clamped. Listing 1 does not scale z; cfg.cope_scale_z divides it by sqrt(d) too."""
    scale = 1 / math.sqrt(q.shape[1]) if cfg.cope_scale_z else 1

    def term(i, j):
        at = min(p[i, j], cfg.cope_npos - 1)
        lo, hi = math.floor(at), math.ceil(at)
        return scale * ((at - lo) * (q[i] @ e[:, hi]) + (1 - at + lo) * (q[i] @ e[:, lo]))

    return causal(len(q), term)

def cope_mlp_bias(q, p, W1, b1, W2, cfg):
    """CoPE appendix C: an MLP of width N in place of the table, q_i . W2^T gelu(W1 p / npos + b1).
    Only N is the paper's: the activation, the division by npos and the clamp are our choices."""
    scale = 1 / math.sqrt(q.shape[1]) if cfg.cope_scale_z else 1

    def term(i, j):
        at = min(p[i, j], cfg.cope_npos - 1)
        return scale * (q[i] @ (W2.T @ gelu(W1 * at / cfg.cope_npos + b1)))

    return causal(len(q), term)

def cope_alibi_bias(p, m):
    """CoPE eq. (10), p unclamped: -m p_ij. The paper prints a plus, which would favour distant
    keys."""
    return causal(len(p), lambda i, j: -m * p[i, j])

# --- the model ------------------------------------------------------------------------------------

ADD = ("learned", "sinusoidal")
OVERRIDE = ("expe", "exqpe")
ROTATE = ("rope", "carope", "pope")
BIAS = ("relative", "t5", "alibi", "fox", "cope", "cope_mlp", "cope_alibi")

SHARED = {  # the parameters that all layers have in common
    "learned": ["wpe.weight"],  # Vaswani et al. 2017: positions are added before the first layer
    "relative": ["a"],  # CoPE section 5.5 has one table for all layers
    "t5": ["table"],  # Raffel et al. 2020, section 2.1
    "cope": ["e"],  # CoPE section 5.5, unless cfg.cope_shared is False
    "expe": ["expe_S", "expe_theta"],  # ExPE Table 7: "only two learned parameters"
    "exqpe": ["expe_S", "expe_theta", "expe_theta2"],
}

def shared(cfg, name):
    """The names of the parameters of a method that all layers share."""
    if name == "cope" and not cfg.cope_shared:
        return []
    return SHARED.get(name, [])

def methods(cfg, params, i):
    """Layer i's methods: (name, a function from a parameter's name to the parameter), in order."""
    pattern = cfg.pe.split(",")
    names = pattern[i % len(pattern)].split("+")
    for name in names:
        known = name in ("nope",) + ADD + OVERRIDE + ROTATE + BIAS
        assert known, f"add {name} to one of these tuples, and write its equation beside the others"
    return [(name, lambda key, j=j: params[f"h.{i}.attn.pes.{j}.{key}"])
            for j, name in enumerate(names)]

def override(cfg, name, p, x, pos):
    """x with its first l dims set by expe or exqpe, whose constants may be learned."""
    keys = ("expe_S", "expe_theta") if name == "expe" else ("expe_S", "expe_theta", "expe_theta2")
    values = [getattr(cfg, key) if cfg.expe_learned == "no" else float(p(key)) for key in keys]
    return (expe if name == "expe" else exqpe)(x, pos, cfg, *values)

def embed(cfg, params, x, pos):
    """The token embeddings x after all methods. Each acts once, however many layers name it."""
    done = set()
    for i in range(cfg.n_layer):
        for name, p in methods(cfg, params, i):
            if name in done:
                continue
            done.add(name)
            if name == "learned":
                x = learned(x, pos, p("wpe.weight"))
            if name == "sinusoidal":
                x = sinusoidal(x, pos, cfg)
            if name in OVERRIDE and cfg.expe_once:
                x = override(cfg, name, p, x, pos)
    return x

def score(cfg, name, p, h, x, embeddings, pos, q, k):
    """Head h's scaled scores (T, T), with q and k rotated if the method is a rotation. x is the
    normed input of the layer."""
    if name == "rope":
        return dots(*rope(q, k, pos, cfg))
    if name == "carope":
        source = embeddings if cfg.carope_x == "embedding" else x
        return dots(*carope(q, k, source, p("W")[:, h], cfg))
    if name == "pope":
        delta = np.zeros(q.shape[1]) if cfg.pope_delta == "none" else p("delta")[h]
        return pope_scores(q, k, pos, delta, cfg)
    return dots(q, k)

def bias(cfg, name, p, h, x, q, v, scores, pos):
    """What a method adds to head h's scores, (T, T). q is unrotated, even if the scores are not.
    pos are the positions of the tokens, which are not 0, 1, 2 ... if they are drawn at random."""
    H, d = cfg.n_head, q.shape[1]
    if name == "relative":
        return relative_bias(q, p("a"), pos, cfg)
    if name == "t5":
        return t5_bias(p("table")[:, h], pos, cfg)
    if name == "alibi":
        n = round(H * cfg.alibi_fraction)  # the first n heads have slopes, as in a model of n heads
        return alibi_bias(alibi_slopes(n)[h] if h < n else 0, pos)
    if name == "fox":
        return fox_bias(x, p("W")[:, h], p("b")[h])

    if cfg.cope_gates == "values":  # CoPE section 4: v or W_g x in place of k
        scores = dots(q, v)
    if cfg.cope_gates == "sep-keys":
        separate = x @ p("W_g.weight").T + (p("W_g.bias") if cfg.bias else 0)
        scores = dots(q, separate[:, h * d:(h + 1) * d])
    pij = positions(gates(scores))
    if name == "cope":
        return cope_bias(q, pij, p("e")[h] if cfg.cope_per_head else p("e"), cfg)
    if name == "cope_mlp":
        return cope_mlp_bias(q, pij, p("W1"), p("b1"), p("W2"), cfg)
    if cfg.cope_slopes == "learned":
        return cope_alibi_bias(pij, p("m")[h])
    if cfg.cope_slopes == "geometric":
        return cope_alibi_bias(pij, cfg.cope_m0 * 2.0 ** -h)
    return cope_alibi_bias(pij, alibi_slopes(H)[h])

def attention(cfg, params, i, x, embeddings, pos):
    """Causal self-attention of layer i on its normed input x (T, C)."""
    T, C = x.shape
    d = C // cfg.n_head
    prefix = f"h.{i}.attn."
    pes = methods(cfg, params, i)
    x_qk = x
    for name, p in pes:
        if name in OVERRIDE and not cfg.expe_once:
            x_qk = override(cfg, name, p, x_qk, pos)
    qk = linear(cfg, params, prefix + "c_qk", x_qk)
    v_all = linear(cfg, params, prefix + "c_v", x)

    y = np.zeros((T, C))
    for h in range(cfg.n_head):
        head = slice(h * d, (h + 1) * d)
        q, k, v = qk[:, :C][:, head], qk[:, C:][:, head], v_all[:, head]
        rotation, p = next((pe for pe in pes if pe[0] in ROTATE), ("nope", None))
        scores = a = score(cfg, rotation, p, h, x, embeddings, pos, q, k)
        for name, p in pes:
            if name in BIAS:
                a = a + bias(cfg, name, p, h, x, q, v, scores, pos)
        for t in range(T):
            e = np.exp(a[t, :t + 1] - a[t, :t + 1].max())
            if cfg.hard_attention:  # CoPE appendix C: the largest score takes all
                e = np.array([float(j == np.argmax(a[t, :t + 1])) for j in range(t + 1)])
            y[t, head] = sum(e[j] / e.sum() * v[j] for j in range(t + 1))
    return linear(cfg, params, prefix + "c_proj", y)

def linear(cfg, params, name, x):
    return x @ params[name + ".weight"].T + (params[name + ".bias"] if cfg.bias else 0)

def norm(cfg, params, name, x):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), token by token."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        if cfg.norm == "layernorm":
            row = row - row.mean()
        out[t] = row / math.sqrt((row * row).mean() + 1e-5) * params[name + ".weight"]
        if cfg.norm == "layernorm" and cfg.bias:
            out[t] += params[name + ".bias"]
    return out

def mlp(cfg, params, name, x):
    """GELU with erf, or SwiGLU (Shazeer 2020) whose gate is the first half of c_fc."""
    a = linear(cfg, params, name + ".c_fc", x)
    if cfg.mlp == "gelu":
        return linear(cfg, params, name + ".c_proj", gelu(a))
    width = a.shape[1] // 2
    u, w = a[:, :width], a[:, width:]
    return linear(cfg, params, name + ".c_proj", u / (1 + np.exp(-u)) * w)

def gpt(cfg, params, idx, pos=None):
    """Logits (T, vocab) of the tokens idx, which stand at the positions pos, or at 0, 1, 2 ..."""
    pos = list(range(len(idx)) if pos is None else pos)
    embeddings = np.array([params["wte.weight"][token] for token in idx])
    x = embed(cfg, params, embeddings, pos)
    for i in range(cfg.n_layer):
        normed = norm(cfg, params, f"h.{i}.ln_1", x)
        x = x + attention(cfg, params, i, normed, embeddings, pos)
        x = x + mlp(cfg, params, f"h.{i}.mlp", norm(cfg, params, f"h.{i}.ln_2", x))
    head = params["wte.weight"] if cfg.tie else params["lm_head.weight"]
    return norm(cfg, params, "ln_f", x) @ head.T
