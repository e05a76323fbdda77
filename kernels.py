"""
Optional fast paths: PoPE and CoPE attention as Triton kernels. No T x T matrix is materialised.
First the derivation, then both methods in ten lines of PyTorch, the kernels, and their launches.

Attention. i is a query, j and t are keys, d is the head width. dX is the gradient of the loss with
respect to X, o multiplies entry by entry. The logits S are -inf where j > i.

    P = softmax(S)    O = P V
    dV = P^T dO       dP = dO V^T
    dS = P o (dP - rowsum(P o dP)) = P o (dP - rowsum(dO o O))

The two sums are equal: sum_t P_it dP_it = sum_t P_it (dO_i . V_t) = dO_i . O_i. The forward pass
stores the log-sum-exp L of each row. The backward pass recomputes P = exp(S - L) tile by tile.
Dropout puts the same mask on P and dP, and changes nothing else.

PoPE (arXiv:2509.10534, eq. 5). mu is softplus or the identity, theta_c = base^(-c/d):

    S_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) theta_c + delta_c) / sqrt(d)

The cosine of a difference is the dot product of two unit vectors. So each entry of q and k becomes
a pair, and S is a product of vectors 2d wide. v stays d wide.

    q'_ic = mu(q_ic) (cos a, sin a),  a = i theta_c - delta_c
    k'_jc = mu(k_jc) (cos a, sin a),  a = j theta_c

Backward: dq' = dS k' / sqrt(d), dk' = dS^T q' / sqrt(d). Let (g_x, g_y) be the gradient of a pair
(x, y) = mu(u) (cos a, sin a). Its part along the pair goes to mu, its part across it to the phase:

    dmu = g_x cos a + g_y sin a = (g_x x + g_y y) / mu
    da  = g_y x - g_x y        ddelta is the sum of -da over the queries
    du  = dmu mu'(u)           softplus has mu'(u) = sigmoid(u) = 1 - exp(-mu)

CoPE (arXiv:2405.18719, section 4, Listing 1). The bias of a logit depends on how many of the keys
j to i the query counts. z_i = q_i e, npos long, is the bias at whole positions.

    g_ij = sigmoid(S_ij)                      the gate: does i count j? Or of gate_q . gate_k
    p_ij = min(g_ij + .. + g_ii, npos - 1)    the position of key j, as query i sees it
    b_ij = (1 - w) z_i[c] + w z_i[c + 1]      the bias; column c = floor(p_ij), w = p_ij - c

Backward: dS is the gradient of S + b. The slope of b is z_i[c + 1] - z_i[c], and 0 where p is
clamped or whole. The gate g_ij is a term of p_it for t = j and for every t left of j:

    dp_it = dS_it slope_it
    dg_ij = sum over t <= j of dp_it          a running sum along the row
    dS_ij += dg_ij g_ij (1 - g_ij)            last, through the sigmoid into the gate's logit

dz_i[c] sums dS (1 - w) over the keys in column c, and dS w over those in column c - 1. That needs
no scatter-add: p falls from left to right, so a column's keys are one run, and by at most 1, so no
column is skipped. Let F and C (floor, ceil) be the running sums of dS (1 - w) and dS w, and F[c],
C[c] their values at the last key of run c. Run c + 1 ends where run c begins, which gives

    dz[c] = (F[c] - F[c + 1]) + (C[c - 1] - C[c])    0 left of the first run; no C in dz[0]

For example, the row of query 5: six keys, npos = 4, z = (0, 2, 1, 3), and dS that sum to 0:

    key          0     1     2     3     4     5
    g           .5   .75   .75    .5    .5   .75
    p            3     3   2.5  1.75  1.25   .75    summed from the right; 3.75 and 3.25 are clamped
    c            3     3     2     1     1     0    runs: keys 0 and 1, key 2, keys 3 and 4, key 5
    w            0     0    .5   .75   .25   .75
    dS           2    -4     6    -4     8    -8
    slope        0     0     2    -1    -1     2
    dp           0     0    12     4    -8   -16
    dg           0     0    12    16     8    -8    summed from the left
    F            2    -2     1     0     6     4    F[3] = -2, F[2] = 1, F[1] = 6, F[0] = 4
    C            0     0     3     0     2    -4    C[3] = 0, C[2] = 3, C[1] = 2, C[0] = -4
    dz          -2    -1     2     1                dz[2] = (1 + 2) + (2 - 3)

One tile of queries, i0 to i0 + M - 1. Once all its rows have counted to npos - 1, the keys further
left all have the bias z_i[npos - 1]: plain attention, without gates or look-ups.

     key 0                                       key i0        i0 + M
       +--------------------+----------------------+-------------+
       |     saturated      |       counted        |   masked,   |
       |    p = npos - 1    | gates, sums, look-up | and counted |
       +--------------------+----------------------+-------------+
                            <------------------------------------  cope_forward sums p
       --------------------------------------------------------->  cope_backward_q sums dg, F and C

Rounding. The passes add the gates in different orders, and inexact sums would disagree about
floor(p). So gates are rounded to multiples of 1/2048, whose sums are exact. Gradients ignore it. A
gate below 1/4096 counts as 0 here, but not where model.py decodes. Two kernels may round one
gate to neighbours; then p differs by 1/2048. Against exact gates in float64, rounding costs 0.13 ..
0.24% of o, 0.24 .. 0.6% of dz and 6 .. 13% of the gates' gradients (T = 1024, npos = 64, normal q,
k and z, mean gates of 0.5 .. 0.02). PyTorch in bfloat16 is off by 0.6%, 1.2% and 9 .. 19%.

Limits. As many queries as keys: PyTorch decodes. B H <= 65,535. Offsets in a head must fit 32 bits.
No atomics: the same input gives the same bits. No second derivatives. Not yet run on any GPU.
"""
import math
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # this module still imports, so that why_not can name what is missing
    constexpr = float
    triton = SimpleNamespace(jit=lambda f=None, **_: f or (lambda f: f), __version__=None)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when it is imported
ASM = constexpr(not INTERPRET)  # the interpreter cannot run inline assembly
LOG2E, LN2 = constexpr(math.log2(math.e)), constexpr(math.log(2))

# --- both methods in PyTorch, with T x T tensors --------------------------------------------------

def naive_pope(q, k, v, delta, base=10000.0):
    """PoPE eq. 5, with a cosine per distance. q, k, v (B, H, T, d), delta (H, d) -> (B, H, T, d)"""
    T, d = q.shape[2:]
    t = torch.arange(T, device=q.device)
    distance = (t - t[:, None]).to(q.dtype)  # (T, T): j - i
    theta = base ** (-torch.arange(d).to(q) / d)  # (d,)
    cos = (distance[:, :, None] * theta + delta[:, None, None]).cos()  # (H, T, T, d)
    s = torch.einsum("bhic, bhjc, hijc -> bhij", F.softplus(q), F.softplus(k), cos) * d**-0.5
    return s.masked_fill(distance > 0, -math.inf).softmax(-1) @ v

def naive_cope(q, k, v, z):
    """CoPE's Listing 1. q, k, v (B, H, T, d), z (B, H, T, npos) -> (B, H, T, d)"""
    s = q @ k.mT * q.size(-1) ** -0.5  # (B, H, T, T)
    future = torch.ones_like(s, dtype=torch.bool).triu(1)
    g = s.sigmoid().masked_fill(future, 0)
    p = g.flip(-1).cumsum(-1).flip(-1).clamp(max=z.size(-1) - 1)
    w = p - p.floor()
    bias = (1 - w) * z.gather(-1, p.floor().long()) + w * z.gather(-1, p.ceil().long())
    return (s + bias).masked_fill(future, -math.inf).softmax(-1) @ v

# --- shared by all kernels ------------------------------------------------------------------------
# A program takes M queries or N keys of head bh = 0 .. B H - 1. D is the head width, P the power of
# two that holds it. scale is log2(e) / sqrt(d): the hardware has exp2

@triton.jit
def load(x, bh, H, rows, T, D, P, EDGE=True):
    """Rows of one head of x (B, H, T, D), given as (pointer, strides of batch, head and row). The
    tile is P wide, 0 outside x. EDGE: some rows may lie past T."""
    cols = tl.arange(0, P)
    at = x[0] + bh // H * x[1] + bh % H * x[2] + rows[:, None] * x[3] + cols[None, :]
    if EDGE:
        tile = tl.load(at, mask=(rows < T)[:, None] & (cols < D)[None, :], other=0.0)
    elif D < P:
        tile = tl.load(at, mask=(cols < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile

@triton.jit
def store(x, bh, H, rows, tile, T, D):
    cols = tl.arange(0, tile.shape[1])
    at = x[0] + bh // H * x[1] + bh % H * x[2] + rows[:, None] * x[3] + cols[None, :]
    tl.store(at, tile.to(x[0].dtype.element_ty), mask=(rows < T)[:, None] & (cols < D)[None, :])

@triton.jit
def matmul(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # no tf32 where the inputs are float32

@triton.jit
def mask_future(x, causal, NEEDED, value=0.0):
    """If NEEDED, puts value where the key comes after the query, so that causal is False."""
    if NEEDED:
        x = tl.where(causal, x, value)
    return x

@triton.jit
def dropout(x, seed, bh, i, j, DROPOUT):
    """Zeroes a share of x, a tile of weights or of their gradients. The random numbers depend on
    seed, head, query and key alone, so every pass draws the same mask, whatever its tiles."""
    if DROPOUT > 0:
        bits, _, _, _ = tl.philox(tl.load(seed), j, i, bh.to(tl.int32), 0, 7)  # 7 rounds suffice
        uniform = (bits >> 9 | 0x3F800000).to(tl.float32, bitcast=True)  # a float in [1, 2)
        x = tl.where(uniform >= 1.0 + DROPOUT, x, 0.0) * (1 / (1 - DROPOUT))
    return x

@triton.jit
def online_softmax(s, scale, v, row_max, row_sum, acc, seed, bh, i, j, DROPOUT):
    """Adds a tile of keys with logits s * scale (M, N) to the sums of weights, row_sum (M,), and of
    weighted values, acc (M, P), both relative to 2^row_max. Dropout acts after the softmax."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    prob = tl.exp2(s * scale - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(prob, 1)
    prob = dropout(prob, seed, bh, i[:, None], j[None, :], DROPOUT)
    acc = matmul(prob.to(v.dtype), v, acc * shrink[:, None])  # (M, N) x (N, P) -> (M, P)
    return new_max, row_sum, acc

# --- PoPE -----------------------------------------------------------------------------------------

@triton.jit
def phases(table, delta, rows, h, T, D, P, M):
    """Cosine and sine of rows * theta - delta, or of rows * theta if delta is None. table (T, 2D)
    and delta (H, 2D) hold pairs of cosine and sine; the addition theorem combines them."""
    pairs = load((table, 0, 0, 2 * D), 0, 1, rows, T, 2 * D, 2 * P)
    cosine, sine = tl.split(pairs.reshape(M, P, 2))
    if delta is not None:
        cols = tl.arange(0, 2 * P)
        turn = tl.load(delta + h * 2 * D + cols, mask=cols < 2 * D, other=0.0)
        x, y = tl.split(turn[None, :].reshape(1, P, 2))
        cosine, sine = cosine * x + sine * y, sine * x - cosine * y
    return cosine, sine

@triton.jit
def pope_rotate(x, pairs, table, delta, T, H, SOFTPLUS: constexpr, D: constexpr, P: constexpr,
                M: constexpr):
    """x (B, H, T, D) -> pairs (B, H, T, 2D), (x, y) side by side: q' with delta, k' without."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    mu = load(x, bh, H, rows, T, D, P).to(tl.float32)
    if SOFTPLUS:  # max(x, 0) + log(1 + e), and what 1 + e lost by rounding: all of it for x < -17
        e = tl.exp(-tl.abs(mu))
        u = 1.0 + e
        mu = tl.maximum(mu, 0.0) + (tl.log(u) + (e - (u - 1.0)) / u)
    cosine, sine = phases(table, delta, rows, bh % H, T, D, P, M)
    store(pairs, bh, H, rows, tl.interleave(mu * cosine, mu * sine), T, 2 * D)

@triton.jit
def pope_forward(v, o, q_pairs, k_pairs, lse, seed, scale, T, H, DROPOUT: constexpr, D: constexpr,
                 P: constexpr, M: constexpr, N: constexpr):
    """o (B, H, T, D) and the log-sum-exp lse (B, H, T) of one tile of queries."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # long rows first, so no program lags
    i = i0 + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    q_pairs = (q_pairs + bh * T * 2 * D, 0, 0, 2 * D)  # of this head, as load() wants it
    k_pairs = (k_pairs + bh * T * 2 * D, 0, 0, 2 * D)
    q_tile = load(q_pairs, bh, H, i, T, 2 * D, 2 * P)
    row_max, row_sum = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    bounds = (0, i0, tl.minimum(i0 + M, T))
    for masked in tl.static_range(2):  # first the keys that every query sees, then the diagonal
        for j0 in range(bounds[masked], bounds[masked + 1], N):
            j = j0 + tl.arange(0, N)
            k_tile = load(k_pairs, bh, H, j, T, 2 * D, 2 * P, masked)
            s = matmul(q_tile, tl.trans(k_tile))  # (M, 2P) x (2P, N) -> (M, N)
            s = mask_future(s, i[:, None] >= j[None, :], masked, float("-inf"))
            v_tile = load(v, bh, H, j, T, D, P, masked)
            row_max, row_sum, acc = online_softmax(s, scale, v_tile, row_max, row_sum, acc, seed,
                                                   bh, i, j, DROPOUT)
    store(o, bh, H, i, acc / row_sum[:, None], T, D)
    tl.store(lse + bh * T + i, row_max + tl.log2(row_sum), mask=i < T)

@triton.jit
def pope_gradient(g, pairs, table, delta, rows, h, T, SOFTPLUS, D, P, M):
    """du of entries and da of phases, (M, P) each, from the gradient g (M, 2P) of their pairs."""
    g_x, g_y = tl.split(g.reshape(M, P, 2))
    x, y = tl.split(load(pairs, 0, 1, rows, T, 2 * D, 2 * P).to(tl.float32).reshape(M, P, 2))
    if SOFTPLUS:  # mu'(u) / mu; for mu < 1e-3 by its series, as 1 - exp(-mu) would cancel
        mu = tl.sqrt(tl.maximum(x * x + y * y, 1e-30))
        slope_over_mu = tl.where(mu < 1e-3, 1 - mu / 2, (1 - tl.exp2(-mu * LOG2E)) / mu)
        du = (g_x * x + g_y * y) * slope_over_mu
    else:  # mu = u may be 0, where the pair has no direction
        cosine, sine = phases(table, delta, rows, h, T, D, P, M)
        du = g_x * cosine + g_y * sine
    return du, g_y * x - g_x * y

@triton.jit
def pope_backward_q(v, o, do, dq, q_pairs, k_pairs, ddelta, lse, do_dot_o, table, delta, seed,
                    scale, T, H, SOFTPLUS: constexpr, DROPOUT: constexpr, D: constexpr,
                    P: constexpr, M: constexpr, N: constexpr):
    """dq of one tile of queries, and its share of ddelta (B, H, tiles, D). Stores rowsum(dO o O) in
    do_dot_o (B, H, T), for pope_backward_kv."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i0 = tile * M
    i = i0 + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    q_pairs = (q_pairs + bh * T * 2 * D, 0, 0, 2 * D)  # of this head, as load() wants it
    k_pairs = (k_pairs + bh * T * 2 * D, 0, 0, 2 * D)
    do_tile = load(do, bh, H, i, T, D, P)
    o_tile = load(o, bh, H, i, T, D, P)
    row_do_o = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(do_dot_o + bh * T + i, row_do_o, mask=i < T)
    row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))  # past T weights are 0
    q_tile = load(q_pairs, bh, H, i, T, 2 * D, 2 * P)
    acc = tl.zeros((M, 2 * P), tl.float32)
    bounds = (0, i0, tl.minimum(i0 + M, T))
    for masked in tl.static_range(2):
        for j0 in range(bounds[masked], bounds[masked + 1], N):
            j = j0 + tl.arange(0, N)
            k_tile = load(k_pairs, bh, H, j, T, 2 * D, 2 * P, masked)
            s = matmul(q_tile, tl.trans(k_tile)) * scale  # (M, 2P) x (2P, N) -> (M, N)
            prob = tl.exp2(s - row_lse[:, None])
            prob = mask_future(prob, i[:, None] >= j[None, :], masked)
            v_tile = load(v, bh, H, j, T, D, P, masked)
            dprob = matmul(do_tile, tl.trans(v_tile))  # (M, P) x (P, N) -> (M, N)
            dprob = dropout(dprob, seed, bh, i[:, None], j[None, :], DROPOUT)
            ds = prob * (dprob - row_do_o[:, None])
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)  # (M, N) x (N, 2P) -> (M, 2P)
    acc *= scale * LN2  # 1 / sqrt(d)
    du, da = pope_gradient(acc, q_pairs, table, delta, i, bh % H, T, SOFTPLUS, D, P, M)
    store(dq, bh, H, i, du, T, D)
    cols = tl.arange(0, P)
    at = ddelta + (bh * tl.num_programs(0) + tile) * D + cols
    tl.store(at, -tl.sum(da, 0), mask=cols < D)  # rows past T were loaded as 0

@triton.jit
def pope_backward_kv(v, do, dk, dv, q_pairs, k_pairs, lse, do_dot_o, table, seed, scale, T, H,
                     SOFTPLUS: constexpr, DROPOUT: constexpr, D: constexpr, P: constexpr,
                     M: constexpr, N: constexpr):
    """dk and dv of one tile of keys, from all queries that see it. Tiles are transposed: (N, M)."""
    j0 = tl.program_id(0) * N
    j = j0 + tl.arange(0, N)
    bh = tl.program_id(1).to(tl.int64)
    q_pairs = (q_pairs + bh * T * 2 * D, 0, 0, 2 * D)  # of this head, as load() wants it
    k_pairs = (k_pairs + bh * T * 2 * D, 0, 0, 2 * D)
    k_tile = load(k_pairs, bh, H, j, T, 2 * D, 2 * P)
    v_tile = load(v, bh, H, j, T, D, P)
    acc_k, acc_v = tl.zeros((N, 2 * P), tl.float32), tl.zeros((N, P), tl.float32)
    i_unmasked = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from here on, queries see the whole tile
    for masked in tl.static_range(2):
        i_start = j0 // M * M if masked else i_unmasked
        for i0 in range(i_start, i_unmasked if masked else T, M):
            i = i0 + tl.arange(0, M)
            q_tile = load(q_pairs, bh, H, i, T, 2 * D, 2 * P)
            row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
            s = matmul(k_tile, tl.trans(q_tile)) * scale  # (N, 2P) x (2P, M) -> (N, M)
            prob = tl.exp2(s - row_lse[None, :])
            prob = mask_future(prob, i[None, :] >= j[:, None], masked)
            do_tile = load(do, bh, H, i, T, D, P)
            dprob = matmul(v_tile, tl.trans(do_tile))  # (N, P) x (P, M) -> (N, M)
            row_do_o = tl.load(do_dot_o + bh * T + i, mask=i < T, other=0.0)
            dprob = dropout(dprob, seed, bh, i[None, :], j[:, None], DROPOUT)
            kept = dropout(prob, seed, bh, i[None, :], j[:, None], DROPOUT)
            acc_v = matmul(kept.to(do_tile.dtype), do_tile, acc_v)  # (N, M) x (M, P) -> (N, P)
            ds = prob * (dprob - row_do_o[None, :])
            acc_k = matmul(ds.to(q_tile.dtype), q_tile, acc_k)  # (N, M) x (M, 2P) -> (N, 2P)
    acc_k *= scale * LN2  # 1 / sqrt(d)
    du, _ = pope_gradient(acc_k, k_pairs, table, None, j, bh % H, T, SOFTPLUS, D, P, N)
    store(dk, bh, H, j, du, T, D)
    store(dv, bh, H, j, acc_v, T, D)

# --- CoPE -----------------------------------------------------------------------------------------
# Positions are integers, in units of 1/2048. z_pairs (B, H, T, npos) packs z[c] and z[c + 1] into
# one word, so that a look-up is one load

BITS = constexpr(11)  # of a position's fraction: the most that leave every gate exact in float16
UNIT = constexpr(2048)  # 2^BITS, a gate of 1
MAGIC = constexpr(2.0**23)  # a float x + 2^23 has no room for a fraction, so x is rounded. Its low
MAGIC_BITS = constexpr(0x4B000000)  # bits hold x, above these of 2^23: cheaper than a conversion
CHUNK = constexpr(2)  # tiles of keys between two checks whether all rows are saturated
COLUMNS = constexpr(64)  # columns of dz that store_dz takes at a time
SATURATED, COUNTED, MASKED = constexpr(0), constexpr(1), constexpr(2)  # parts of the picture

@triton.jit
def round_to_int(x):
    return (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS

@triton.jit
def clamp(p, NPOS):
    """To 0 .. npos - 1. p falls below 0 where two kernels rounded a gate differently."""
    return tl.maximum(tl.minimum(p, (NPOS - 1) * UNIT), 0)

@triton.jit
def gates_of(logit, causal, NEEDED):
    """Gates, and the same rounded to units, still in float32."""
    root = tl.rsqrt(1.0 + tl.exp2(-logit))
    gate = root * root  # sigmoid; Triton's division would take many instructions
    return gate, mask_future((gate * UNIT + MAGIC) - MAGIC, causal, NEEDED)

@triton.jit
def triangle(N, DTYPE):
    """(N, N), 1 on and under the diagonal. x (M, N) @ triangle sums x from each key to the right,
    x @ triangle^T from the left up to each key: cheaper than a scan."""
    return (tl.arange(0, N)[:, None] >= tl.arange(0, N)[None, :]).to(DTYPE)

@triton.jit
def prefix_sums(x, left, N, DTYPE):
    """Running sums of x (M, N) along the keys, and where the next tile starts. left (M,): where
    these start, in float32: a row's dS add up to 0, so 16-bit errors would show in F."""
    sums = matmul(x.to(DTYPE), tl.trans(triangle(N, DTYPE)))  # (M, N) x (N, N) -> (M, N)
    return left[:, None] + sums, left + tl.sum(x, 1)

@triton.jit
def unpack(word, ZTYPE):
    """A word of z_pairs -> z[c] and z[c + 1] in float32."""
    if ZTYPE == tl.float32:
        floor, ceil = word.to(tl.int32), (word >> 32).to(tl.int32)
    elif ZTYPE == tl.bfloat16:  # the upper half of a float32
        floor, ceil = word << 16, word & -65536
    else:
        floor, ceil = word.to(tl.int16), (word >> 16).to(tl.int16)
    TYPE: constexpr = ZTYPE if ZTYPE == tl.float16 else tl.float32
    return floor.to(TYPE, bitcast=True).to(tl.float32), ceil.to(TYPE, bitcast=True).to(tl.float32)

@triton.jit
def last_bias(z_pairs, row, NPOS, ZTYPE):
    """z[npos - 1], the bias of saturated keys."""
    return unpack(tl.load(z_pairs + row * NPOS + NPOS - 1), ZTYPE)[0]

@triton.jit
def look_up(z_pairs, row, p, NPOS, ZTYPE):
    """The bias at clamped positions p, its slope, and w."""
    at = z_pairs + (row * NPOS + (p >> BITS))
    if ASM and ZTYPE != tl.float32:  # tl.load would move the addresses through shared memory
        word = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)],
                                         dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = tl.load(at)
    floor, ceil = unpack(word, ZTYPE)
    # the bits of the fraction as a float in [1, 2), less 1
    w = ((p << 12) & 0x7FF000 | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return floor + w * (ceil - floor), tl.where(w > 0, ceil - floor, 0.0), w

@triton.jit(do_not_specialize=["T"])
def cope_forward(q, k, v, gates, o, o_residual, z_pairs, lse, units_total, saturated, seed, scale,
                 T, H, DROPOUT: constexpr, NPOS: constexpr, D: constexpr, P: constexpr,
                 M: constexpr, N: constexpr):
    """A tile of queries walks left from the diagonal while it counts. gates: (gate_q, gate_k), or
    None where the logits serve. Stores o and its rounding error (rowsum(dO o O) needs both), the
    log-sum-exp, base 2, and units of each row (B, H, T), and the saturated keys of each tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first, so no program lags
    i = tile * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    z_pairs += bh * T * NPOS
    q_tile = load(q, bh, H, i, T, D, P)
    if gates is not None:
        gate_q_tile = load(gates[0], bh, H, i, T, D, P)
    row = tl.minimum(i, T - 1)
    units_right = tl.zeros((M,), tl.int32)  # counted by the keys to the right
    row_max, row_sum = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    remaining = tl.cdiv(tl.minimum(tile * M + M, T), N)  # tiles of keys 0 .. remaining - 1
    for masked in tl.static_range(1, -1, -1):
        leftmost = tile * M // N if masked else 0
        while (remaining > leftmost) & (tl.min(units_right, 0) < (NPOS - 1) * UNIT):
            stop = leftmost if masked else tl.maximum(remaining - CHUNK, 0)
            for back in range(0, remaining - stop):
                j = (remaining - 1 - back) * N + tl.arange(0, N)
                k_tile = load(k, bh, H, j, T, D, P, masked)
                s = matmul(q_tile, tl.trans(k_tile)) * scale  # (M, P) x (P, N) -> (M, N)
                gate_logit = s
                if gates is not None:  # (M, P) x (P, N) -> (M, N)
                    gate_k_tile = load(gates[1], bh, H, j, T, D, P, masked)
                    gate_logit = matmul(gate_q_tile, tl.trans(gate_k_tile)) * scale
                causal = i[:, None] >= j[None, :]
                _, units = gates_of(gate_logit, causal, masked)
                lower = triangle(N, tl.float16)
                suffix = matmul(units.to(tl.float16), lower)  # (M, N) x (N, N) -> (M, N)
                p = clamp(units_right[:, None] + round_to_int(suffix), NPOS)
                bias, _, _ = look_up(z_pairs, row[:, None], p, NPOS, q_tile.dtype)
                units_right += tl.sum(units, 1).to(tl.int32)
                s = mask_future(s + bias * LOG2E, causal, masked, float("-inf"))
                v_tile = load(v, bh, H, j, T, D, P, masked)
                row_max, row_sum, acc = online_softmax(s, 1.0, v_tile, row_max, row_sum, acc, seed,
                                                       bh, i, j, DROPOUT)
            remaining = stop
    last = last_bias(z_pairs, row, NPOS, q_tile.dtype) * LOG2E
    row_max -= last  # all keys that remain have this bias: add it once, in lse
    for n in range(0, remaining):
        j = n * N + tl.arange(0, N)
        k_tile = load(k, bh, H, j, T, D, P, False)
        s = matmul(q_tile, tl.trans(k_tile))  # (M, P) x (P, N) -> (M, N)
        v_tile = load(v, bh, H, j, T, D, P, False)
        row_max, row_sum, acc = online_softmax(s, scale, v_tile, row_max, row_sum, acc, seed,
                                               bh, i, j, DROPOUT)
    acc /= row_sum[:, None]
    store(o, bh, H, i, acc, T, D)
    store(o_residual, bh, H, i, acc - acc.to(q_tile.dtype).to(tl.float32), T, D)
    tl.store(lse + bh * T + i, row_max + last + tl.log2(row_sum), mask=i < T)
    tl.store(units_total + bh * T + i, units_right, mask=i < T)
    tl.store(saturated + bh * tl.num_programs(0) + tile, remaining * N)

@triton.jit
def store_two(at, x, y, mask):
    """Stores x and y side by side. Assembly does it in one instruction."""
    if ASM:
        code: constexpr = ("{ .reg .pred p; setp.ne.b32 p, $4, 0; "
                           "@p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }")
        tl.inline_asm_elementwise(code, "=r,l,f,f,r", [at.to(tl.int64), x, y, mask.to(tl.int32)],
                                  dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, x, mask=mask)
        tl.store(at + 1, y, mask=mask)

@triton.jit
def store_dz(dz, dz_row, run_ends, row, valid, max_column, NPOS):
    """dz[c] = (F[c] - F[c + 1]) + (C[c - 1] - C[c]), COLUMNS at a time. A row begins in max_column
    (M,); above it F and C are 0. In memory they alternate: C[c - 1], F[c], C[c], F[c + 1]."""
    for c0 in range(0, NPOS, COLUMNS):
        c, here = c0 + tl.arange(0, COLUMNS)[None, :], valid[:, None]
        has_run, next_has_run = here & (c <= max_column[:, None]), here & (c < max_column[:, None])
        previous_has_run = here & (c > 0) & (c <= max_column[:, None] + 1)
        at = run_ends + (row[:, None] * NPOS + c) * 2
        F_run = tl.load(at, mask=has_run, other=0.0) - tl.load(at + 2, mask=next_has_run, other=0.0)
        C_previous = tl.load(at - 1, mask=previous_has_run, other=0.0)
        C_c = tl.load(at + 1, mask=has_run & (c > 0), other=0.0)
        dz_c = dz + dz_row[:, None] * NPOS + c
        tl.store(dz_c, F_run + C_previous - C_c, mask=here & (c < NPOS))

@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_q(q, k, v, gates, do, grads, z_pairs, saved, scratch, seed, scale, T, H, first,
                    FORWARD_M: constexpr, KV_N: constexpr, DROPOUT: constexpr, NPOS: constexpr,
                    D: constexpr, P: constexpr, M: constexpr, N: constexpr):
    """A tile of queries walks right; p falls from units_total. grads: dq, with gates dgate_q too.
    scratch: dz; run_ends (heads, T, npos, 2), with F and C; do_dot_o (B, H, T): rowsum(dO o O); for
    cope_backward_kv (heads, tiles of KV_N keys, T) the units right and the dp left of a tile."""
    o, o_residual, lse, units_total, saturated = saved  # by cope_forward
    dz, run_ends, do_dot_o, units_right_at, dp_left_at = scratch
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i = tile * M + tl.arange(0, M)
    slot = tl.program_id(1).to(tl.int64)  # which of the heads that share scratch
    bh = first + slot
    z_pairs += bh * T * NPOS
    run_ends += slot * T * NPOS * 2
    tables = slot * tl.cdiv(T, KV_N) * T
    row, valid = tl.minimum(i, T - 1), i < T

    # 1. what the rows need: rowsum(dO o O), log-sum-exp, and the columns where they begin
    q_tile = load(q, bh, H, i, T, D, P)
    do_tile = load(do, bh, H, i, T, D, P)
    o_tile = load(o, bh, H, i, T, D, P).to(tl.float32)
    o_tile += load(o_residual, bh, H, i, T, D, P).to(tl.float32)
    row_do_o = tl.sum(o_tile * do_tile.to(tl.float32), 1)
    tl.store(do_dot_o + bh * T + i, row_do_o, mask=valid)
    row_lse = tl.load(lse + bh * T + i, mask=valid, other=float("inf"))  # past T weights are 0
    units_right = tl.load(units_total + bh * T + i, mask=valid, other=0)
    max_column = tl.minimum(units_right, (NPOS - 1) * UNIT) >> BITS
    last = last_bias(z_pairs, row, NPOS, q_tile.dtype) * LOG2E - row_lse
    acc = tl.zeros((M, P), tl.float32)
    if gates is not None:
        gate_q_tile = load(gates[0], bh, H, i, T, D, P)
        acc_gate = tl.zeros((M, P), tl.float32)
    dp_left = tl.zeros((M,), tl.float32)
    F_left, C_left = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)

    # 2. the walk
    n_saturated = tl.load(saturated + bh * tl.cdiv(T, FORWARD_M) + tile * M // FORWARD_M) // N
    bounds = (0, n_saturated, tile * M // N, tl.cdiv(tl.minimum(tile * M + M, T), N))  # in tiles
    for part in tl.static_range(3):  # SATURATED, COUNTED, MASKED
        for n in range(bounds[part], bounds[part + 1]):
            j = n * N + tl.arange(0, N)
            causal = i[:, None] >= j[None, :]
            k_tile = load(k, bh, H, j, T, D, P, part == MASKED)
            s = matmul(q_tile, tl.trans(k_tile)) * scale  # (M, P) x (P, N) -> (M, N)
            v_tile = load(v, bh, H, j, T, D, P, part == MASKED)
            dprob = matmul(do_tile, tl.trans(v_tile))  # (M, P) x (P, N) -> (M, N)
            dprob = dropout(dprob, seed, bh, i[:, None], j[None, :], DROPOUT)
            if part == SATURATED:
                ds = tl.exp2(s + last[:, None]) * (dprob - row_do_o[:, None])
                F_left += tl.sum(ds, 1)  # w = 0
            else:
                # gates and positions, as in cope_forward
                gate_logit = s
                if gates is not None:  # (M, P) x (P, N) -> (M, N)
                    gate_k_tile = load(gates[1], bh, H, j, T, D, P, part == MASKED)
                    gate_logit = matmul(gate_q_tile, tl.trans(gate_k_tile)) * scale
                gate, units = gates_of(gate_logit, causal, part == MASKED)
                table = tables + n // (KV_N // N) * T + i
                tl.store(dp_left_at + table, dp_left, mask=valid & (n % (KV_N // N) == 0))
                units_right -= tl.sum(units, 1).to(tl.int32)
                tl.store(units_right_at + table, units_right, mask=valid)  # the last of KV_N stays
                lower = triangle(N, tl.float16)
                suffix = matmul(units.to(tl.float16), lower)  # (M, N) x (N, N) -> (M, N)
                p = units_right[:, None] + round_to_int(suffix)
                column = clamp(p, NPOS) >> BITS
                right_column = clamp(p - round_to_int(units), NPOS) >> BITS  # of the next key
                bias, slope, w = look_up(z_pairs, row[:, None], clamp(p, NPOS), NPOS, q_tile.dtype)
                # dS, and its sums for dz
                ds = tl.exp2(s + bias * LOG2E - row_lse[:, None]) * (dprob - row_do_o[:, None])
                ds = mask_future(ds, causal, part == MASKED)
                C, C_left = prefix_sums(ds * w, C_left, N, k_tile.dtype)
                F, F_left = prefix_sums(ds - ds * w, F_left, N, k_tile.dtype)
                is_end = (column != right_column) & valid[:, None]  # of a run
                store_two(run_ends + (row[:, None] * NPOS + column) * 2, F, C, is_end)
                # the gates' gradient, from the running sum of dp
                dg, dp_left = prefix_sums(ds * slope, dp_left, N, k_tile.dtype)
                dg = mask_future(dg * (gate - gate * gate), causal, part == MASKED)
                if gates is None:
                    ds += dg
                else:  # (M, N) x (N, P) -> (M, P)
                    acc_gate = matmul(dg.to(k_tile.dtype), gate_k_tile, acc_gate)
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)  # (M, N) x (N, P) -> (M, P)

    # 3. dq, dgate_q, and dz as differences of the run ends
    store(grads[0], bh, H, i, acc * (scale * LN2), T, D)  # scale * LN2 = 1 / sqrt(d)
    if gates is not None:
        store(grads[1], bh, H, i, acc_gate * (scale * LN2), T, D)
    tl.store(run_ends + row * NPOS * 2, F_left, mask=valid)  # every row ends in column 0
    tl.store(run_ends + row * NPOS * 2 + 1, C_left, mask=valid)
    tl.debug_barrier()  # other threads stored some of the run ends
    store_dz(dz, bh * T + row, run_ends, row, valid, max_column, NPOS)

@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_kv(q, k, v, gates, do, grads, z_pairs, saved, scratch, seed, scale, T, H, first,
                     FORWARD_M: constexpr, DROPOUT: constexpr, NPOS: constexpr, D: constexpr,
                     P: constexpr, M: constexpr, N: constexpr):
    """A tile of keys visits all queries that see it: those under the mask, then the tiles of
    cope_forward that still counted here, then the saturated ones. Tiles are transposed: (N, M).
    grads: dk, dv and, with gates, dgate_k. scratch: see cope_backward_q."""
    lse, saturated = saved
    do_dot_o, units_right_at, dp_left_at = scratch
    j0 = tl.program_id(0) * N
    j = j0 + tl.arange(0, N)
    slot = tl.program_id(1).to(tl.int64)
    bh = first + slot
    z_pairs += bh * T * NPOS
    lse += bh * T
    do_dot_o += bh * T
    saturated += bh * tl.cdiv(T, FORWARD_M)
    tables = (slot * tl.num_programs(0) + tl.program_id(0)) * T
    k_tile = load(k, bh, H, j, T, D, P)
    v_tile = load(v, bh, H, j, T, D, P)
    acc_k, acc_v = tl.zeros((N, P), tl.float32), tl.zeros((N, P), tl.float32)
    if gates is not None:
        gate_k_tile = load(gates[1], bh, H, j, T, D, P)
        acc_gate = tl.zeros((N, P), tl.float32)
    i_unmasked = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from here on, queries see the whole tile
    for part in tl.static_range(2, -1, -1):  # MASKED, COUNTED, SATURATED
        tile_end = 1 if part == MASKED else tl.cdiv(T, FORWARD_M)
        for tile in range(0 if part == MASKED else i_unmasked // FORWARD_M, tile_end):
            if part == MASKED:
                i_start, i_end = j0 // M * M, i_unmasked
            else:
                i_start = tl.maximum(tile * FORWARD_M, i_unmasked)
                i_end = tl.minimum(tile * FORWARD_M + FORWARD_M, T)
                counted = tl.load(saturated + tile) <= j0
                i_end = tl.where(counted == (part == COUNTED), i_end, i_start)
            for i0 in range(i_start, i_end, M):
                i = i0 + tl.arange(0, M)
                row, valid = tl.minimum(i, T - 1), i < T
                causal = i[None, :] >= j[:, None]
                q_tile = load(q, bh, H, i, T, D, P)
                do_tile = load(do, bh, H, i, T, D, P)
                row_lse = tl.load(lse + i, mask=valid, other=float("inf"))
                row_do_o = tl.load(do_dot_o + i, mask=valid, other=0.0)
                s = matmul(k_tile, tl.trans(q_tile)) * scale  # (N, P) x (P, M) -> (N, M)
                if part == SATURATED:
                    last = last_bias(z_pairs, row, NPOS, q_tile.dtype) * LOG2E - row_lse
                    prob = tl.exp2(s + last[None, :])
                else:
                    gate_logit = s
                    if gates is not None:  # (N, P) x (P, M) -> (N, M)
                        gate_q_tile = load(gates[0], bh, H, i, T, D, P)
                        gate_logit = matmul(gate_k_tile, tl.trans(gate_q_tile)) * scale
                    gate, units = gates_of(gate_logit, causal, part == MASKED)
                    upper = tl.trans(triangle(N, tl.float16))
                    suffix = matmul(upper, units.to(tl.float16))  # (N, N) x (N, M) -> (N, M)
                    suffix = round_to_int(suffix)
                    p = tl.load(units_right_at + tables + i, mask=valid, other=0)[None, :] + suffix
                    p = clamp(p, NPOS)
                    bias, slope, _ = look_up(z_pairs, row[None, :], p, NPOS, q_tile.dtype)
                    prob = tl.exp2(s + bias * LOG2E - row_lse[None, :])
                prob = mask_future(prob, causal, part == MASKED)
                dprob = matmul(v_tile, tl.trans(do_tile))  # (N, P) x (P, M) -> (N, M)
                dprob = dropout(dprob, seed, bh, i[None, :], j[:, None], DROPOUT)
                kept = dropout(prob, seed, bh, i[None, :], j[:, None], DROPOUT)
                acc_v = matmul(kept.to(do_tile.dtype), do_tile, acc_v)  # (N, M) x (M, P) -> (N, P)
                ds = prob * (dprob - row_do_o[None, :])
                if part != SATURATED:
                    dp = (ds * slope).to(do_tile.dtype)
                    dg = matmul(triangle(N, do_tile.dtype), dp)  # (N, N) x (N, M) -> (N, M)
                    dg += tl.load(dp_left_at + tables + i, mask=valid, other=0.0)[None, :]
                    dg = mask_future(dg * (gate - gate * gate), causal, part == MASKED)
                    if gates is None:
                        ds += dg
                    else:  # (N, M) x (M, P) -> (N, P)
                        acc_gate = matmul(dg.to(do_tile.dtype), gate_q_tile, acc_gate)
                acc_k = matmul(ds.to(do_tile.dtype), q_tile, acc_k)  # (N, M) x (M, P) -> (N, P)
    store(grads[0], bh, H, j, acc_k * (scale * LN2), T, D)
    store(grads[1], bh, H, j, acc_v, T, D)
    if gates is not None:
        store(grads[2], bh, H, j, acc_gate * (scale * LN2), T, D)

# --- launching ------------------------------------------------------------------------------------
# Each method is a pair of PyTorch operators, forward and backward: custom_op, as triton_op does not
# take the interpreter's CPU tensors. fake_... allocate results, and tell torch.compile the shapes

FORWARD_M, KV_N = 64, 64  # queries in a tile of cope_forward, keys in one of cope_backward_kv
BORROWED = 2**28  # bytes that CoPE's backward pass may borrow, or as much as one head needs
# (M, N, warps, stages): 16 bits and P < 128, 16 bits and P = 128, and both for float32, which only
# tests use. Chosen by counting instructions. A warp wants 16 rows, or tensor cores do the same work
# twice. Two programs share a multiprocessor: one computes while the other loads. CoPE has one
# stage: Triton 3.6 and 3.8 cannot pipeline look-ups. Where a program takes queries, N divides M
TILES = {
    "pope_forward": ((128, 64, 4, 2), (128, 32, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "pope_backward_q": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "pope_backward_kv": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "cope_forward": 4 * ((FORWARD_M, 64, 4, 1),),
    "cope_backward_q": 4 * ((64, 32, 4, 1),),
    "cope_backward_kv": 4 * ((32, KV_N, 4, 1),),
}

def tile_options(kernel, x):
    """The kernel's constants and options for heads like those of x (B, H, T, d)."""
    P = triton.next_power_of_2(x.size(-1))
    M, N, warps, stages = TILES[kernel.__name__][2 * (x.dtype == torch.float32) + (P > 64)]
    return dict(D=x.size(-1), P=P, M=M, N=N, num_warps=warps, num_stages=stages)

def strided(*xs):
    """Tensors (B, H, T, d) as the kernels take them: (pointer, strides of batch, head, token)."""
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    return tuple((x, *x.stride()[:3]) for x in xs)

def empty_heads(x):
    """An empty (B, H, T, d) like x, (B, T, H, d) in memory: merging heads then copies nothing."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)

def launch(kernel, grid, x, *args, **options):
    """x: the first argument, strided. Triton launches on the current device, so make it x's."""
    options["enable_fp_fusion"] = True  # s * scale - row_max in one instruction, in all versions
    with torch.cuda.device_of(x[0]):
        kernel[grid](x, *args, **options)

def check(q, reach=0, **others):
    """ValueError if tensors (B, H, T, d) differ from q in shape or dtype, or if they are too large
    for int32 offsets. reach: the largest offset into a head of another tensor."""
    _, H, T, d = q.shape
    for name, x in others.items():
        if x.shape != q.shape or x.dtype != q.dtype or d > 128:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; make it like q, d <= 128")
    # a token's stride is H d in o and 2 d in q'
    if max(reach, T * d * max(H, 2), *(T * x.stride(2) for x in (q, *others.values()))) >= 2**31:
        raise ValueError(f"{T} tokens are more than the kernels can address; shorten the sequence")

def draw_seed(x, dropout):
    """int64 (1,), or (0,) without dropout, by PyTorch's generator: torch.manual_seed repeats it."""
    return torch.randint(2**62, (1 if dropout else 0,), device=x.device)

def cos_sin(angle):
    return torch.stack((angle.cos(), angle.sin()), -1).float()

@torch.library.custom_op("pope::forward", mutates_args=())
def pope_op(q: Tensor, k: Tensor, v: Tensor, delta: Tensor, table: Tensor, seed: Tensor,
            softplus: bool, dropout: float) -> list[Tensor]:
    o, lse, q_pairs, k_pairs = results = fake_pope(q)
    B, H, T, d = q.shape
    P = triton.next_power_of_2(d)
    for x, pairs, turn in ((q, q_pairs, cos_sin(delta)), (k, k_pairs, None)):
        launch(pope_rotate, (triton.cdiv(T, 2048 // P), B * H), *strided(x, pairs), table, turn, T,
               H, SOFTPLUS=softplus, D=d, P=P, M=2048 // P, num_warps=4, num_stages=1)
    options = tile_options(pope_forward, q)
    launch(pope_forward, (triton.cdiv(T, options["M"]), B * H), *strided(v, o), q_pairs, k_pairs,
           lse, seed, d**-0.5 / math.log(2), T, H, DROPOUT=dropout, **options)
    return results

@pope_op.register_fake
def fake_pope(q, *_):
    q_pairs = q.new_empty(*q.shape[:3], 2 * q.size(3))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return [empty_heads(q), lse, q_pairs, torch.empty_like(q_pairs)]

@torch.library.custom_op("pope::backward", mutates_args=())
def pope_backward_op(do: Tensor, saved: list[Tensor], softplus: bool,
                     dropout: float) -> list[Tensor]:
    dq, dk, dv, ddelta = grads = fake_pope_backward(do, saved)
    v, delta, table, seed, o, lse, q_pairs, k_pairs = saved
    B, H, T, d = v.shape
    do_dot_o, scale = torch.empty_like(lse), d**-0.5 / math.log(2)
    switches = dict(SOFTPLUS=softplus, DROPOUT=dropout)
    options = tile_options(pope_backward_q, v)
    tiles = triton.cdiv(T, options["M"])
    ddelta_parts = lse.new_empty(B, H, tiles, d)
    launch(pope_backward_q, (tiles, B * H), *strided(v, o, do, dq), q_pairs, k_pairs, ddelta_parts,
           lse, do_dot_o, table, cos_sin(delta), seed, scale, T, H, **switches, **options)
    torch.sum(ddelta_parts, (0, 2), out=ddelta)
    options = tile_options(pope_backward_kv, v)
    launch(pope_backward_kv, (triton.cdiv(T, options["N"]), B * H), *strided(v, do, dk, dv),
           q_pairs, k_pairs, lse, do_dot_o, table, seed, scale, T, H, **switches, **options)
    return grads

@pope_backward_op.register_fake
def fake_pope_backward(do, saved, *_):
    v, delta, *_ = saved
    return [empty_heads(v), empty_heads(v), empty_heads(v), torch.empty_like(delta)]

def save_pope(ctx, inputs, output):
    q, k, *tensors, ctx.softplus, ctx.dropout = inputs  # q' and k' replace q and k
    ctx.save_for_backward(*tensors, *output)

def differentiate_pope(ctx, grads):
    found = pope_backward_op(grads[0], list(ctx.saved_tensors), ctx.softplus, ctx.dropout)
    return *found, None, None, None, None

pope_op.register_autograd(differentiate_pope, setup_context=save_pope)

def pope_attention(q, k, v, delta, base=10000.0, softplus=True, dropout=0.0):
    """Causal PoPE attention (eq. 5), differentiable in q, k, v and delta.

    q, k, v   (B, H, T, d) as projected, 16 <= d <= 128, float16, bfloat16 or float32
    delta     (H, d) in radians, or None for 0
    base      theta_c = base^(-c/d)
    softplus  False: magnitudes are q and k themselves
    dropout   the share of attention weights that are set to 0, drawn anew by every call
    returns   o (B, H, T, d). ValueError if shapes or dtypes differ, or the input is too large"""
    check(q, k=k, v=v)
    T, d = q.shape[2:]
    # A float32 angle is off by 1e-3 at position 16,384, but model.py has to run without float64. It
    # turns keys by delta. We turn queries by -delta: q'.k' depends on the difference alone
    theta = base ** (-torch.arange(d, device=q.device, dtype=torch.float64) / d)
    angle = torch.arange(T, device=q.device, dtype=torch.float64)[:, None] * theta  # (T, d)
    delta = torch.zeros(q.size(1), d, device=q.device) if delta is None else delta.float()
    return pope_op(q, k, v, delta, cos_sin(angle), draw_seed(q, dropout), softplus, dropout)[0]

@torch.library.custom_op("cope::forward", mutates_args=())
def cope_op(z: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], z_pairs: Tensor,
            seed: Tensor, scale: float, dropout: float) -> list[Tensor]:
    """gates: [gate_q, gate_k] or []. z stands here for its gradient; the kernels read z_pairs."""
    o, o_residual, lse, units_total, saturated = results = fake_cope(z, q)
    launch(cope_forward, saturated.shape[::-1], *strided(q, k, v), strided(*gates) or None,
           *strided(o, o_residual), z_pairs, lse, units_total, saturated, seed,
           scale / math.log(2), q.size(2), q.size(1), DROPOUT=dropout, NPOS=z.size(3),
           **tile_options(cope_forward, q))
    return results

@cope_op.register_fake
def fake_cope(z, q, *_):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    units_total = torch.empty_like(lse, dtype=torch.int32)
    saturated = units_total.new_empty(q.size(0) * q.size(1), math.ceil(q.size(2) / FORWARD_M))
    return [empty_heads(q), empty_heads(q), lse, units_total, saturated]

@torch.library.custom_op("cope::backward", mutates_args=())
def cope_backward_op(do: Tensor, saved: list[Tensor], scale: float, dropout: float) -> list[Tensor]:
    dz, dq, dk, dv, *dgates = grads = fake_cope_backward(do, saved)
    z_pairs, seed, o, o_residual, lse, units_total, saturated, q, k, v, *gates = saved
    B, H, T, npos = z_pairs.shape
    tiles = math.ceil(T / KV_N)
    heads = min(B * H, max(1, BORROWED // (8 * T * (tiles + npos))))  # at a time
    do_dot_o, run_ends = torch.empty_like(lse), lse.new_empty(heads, T, npos, 2)
    for_kv = do_dot_o, units_total.new_empty(heads, tiles, T), lse.new_empty(heads, tiles, T)
    inputs = *strided(q, k, v), strided(*gates) or None, *strided(do)
    saved = *strided(o, o_residual), lse, units_total, saturated
    constants = dict(FORWARD_M=FORWARD_M, DROPOUT=dropout, NPOS=npos)
    options_q, options_kv = tile_options(cope_backward_q, q), tile_options(cope_backward_kv, q)
    for first in range(0, B * H, heads):
        n, numbers = min(heads, B * H - first), (seed, scale / math.log(2), T, H, first)
        launch(cope_backward_q, (triton.cdiv(T, options_q["M"]), n), *inputs,
               strided(dq, *dgates[:1]), z_pairs, saved, (dz, run_ends, *for_kv), *numbers,
               KV_N=KV_N, **constants, **options_q)
        launch(cope_backward_kv, (tiles, n), *inputs, strided(dk, dv, *dgates[1:]), z_pairs,
               (lse, saturated), for_kv, *numbers, **constants, **options_kv)
    return grads

@cope_backward_op.register_fake
def fake_cope_backward(do, saved, *_):
    return [do.new_empty(saved[0].shape), *map(empty_heads, saved[7:])]  # z; q, k, v and gates

def save_cope(ctx, inputs, output):
    z, *qkv, gates, z_pairs, seed, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(z_pairs, seed, *output, *qkv, *gates)

def differentiate_cope(ctx, grads):
    found = cope_backward_op(grads[0], list(ctx.saved_tensors), ctx.scale, ctx.dropout)
    return *found[:4], found[4:], None, None, None, None

cope_op.register_autograd(differentiate_cope, setup_context=save_cope)

def cope_attention(q, k, v, z, gate_q=None, gate_k=None, dropout=0.0):
    """Causal CoPE attention (Listing 1), differentiable in all tensors.

    q, k     (B, H, T, d), 32 <= d <= 128, float16, bfloat16 or float32; after any rotation
    v        (B, H, T, d), or narrower: PoPE makes q and k twice as wide as v
    z        (B, H, T, npos), npos >= 2: q @ e of the unrotated q; cast to q's dtype
    gate_q   (B, H, T, d) or as narrow as v; by default q
    gate_k   likewise; by default k. Without both, the gates are sigmoids of the layer's own logits
    dropout  the share of attention weights that are set to 0, drawn anew by every call
    returns  o like v. ValueError if shapes or dtypes do not fit, or the input is too large"""
    width, gates = v.size(3), {}
    if gate_q is not None or gate_k is not None:
        gates = dict(gate_q=q if gate_q is None else gate_q, gate_k=k if gate_k is None else gate_k)
    if width < q.size(3):  # zeros make v as wide, and both gates, and change no product
        zeros = (0, q.size(3) - width)
        v = F.pad(v, zeros)
        if all(x.size(3) == width for x in gates.values()):
            gates = {name: F.pad(x, zeros) for name, x in gates.items()}
    T, npos = z.shape[2:]
    check(q, T * max(2048, 2 * npos, math.ceil(T / KV_N)), k=k, v=v, **gates)
    if z.shape[:3] != q.shape[:3] or npos < 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be {tuple(q.shape[:3])} by npos >= 2")
    z = z.to(q.dtype)
    # the last column needs no right neighbour: a clamped position is whole
    z_pairs = torch.stack((z.detach(), F.pad(z.detach()[..., 1:], (0, 1))), -1)
    z_pairs = z_pairs.view(torch.int32 if z.element_size() == 2 else torch.int64).squeeze(-1)
    seed, gates = draw_seed(q, dropout), [*gates.values()]
    return cope_op(z, q, k, v, gates, z_pairs, seed, width**-0.5, dropout)[0][..., :width]

def why_not(pe, head_dim, device, dtype, hard_attention=False):
    """Why no kernel computes a layer with these methods ("cope+rope"), or None if one does."""
    device, before = torch.device(device), {"nope", "learned", "sinusoidal", "expe", "exqpe"}
    mix = sorted(name for name in pe.split("+") if name not in before)  # act on q, k or the logits
    widths = (16, 24, 32, 64) if mix == ["cope", "pope"] else (32, 48, 64, 128)  # that are tested
    if not {"pope", "cope"} & set(mix):
        return "no kernel for it"
    if mix not in (["pope"], ["cope"], ["cope", "rope"], ["carope", "cope"], ["cope", "pope"]):
        return "mixed"
    if hard_attention:
        return "hard attention"
    if triton.__version__ is None:
        return "no triton"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        return f"triton {triton.__version__}, older than 3.6"  # the oldest version tested
    if not INTERPRET and device.type != "cuda":
        return "no GPU"
    if not INTERPRET and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "no NVIDIA GPU of compute capability 8.0 or later"
    if head_dim not in widths:
        return f"head width {head_dim} is none of {', '.join(map(str, widths))}"
    if dtype not in (torch.float16, torch.bfloat16) and not (INTERPRET and dtype == torch.float32):
        return f"{dtype} inputs"  # float32 would be right, but slow: it spills registers
    return None
