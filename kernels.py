"""
Optional fast paths: attention whose positional encoding lives inside Triton kernels. Tensors in, tensors out.

    python kernels.py      checks every kernel and times it on the GPU; without one, checks it in Triton's
                           interpreter and compiles it ahead of time for two GPUs

PoPE attention ("Decoupling the What and Where With Polar Coordinate Positional Embedding", eq. 5), causal, per head:

    a_ts = sum_c mu(q_tc) mu(k_sc) cos((s - t) theta_c + delta_c) / sqrt(d),   theta_c = base^(-c/d), c = 0 .. d-1
    o_t  = softmax_s(a_ts) v_s,   s <= t,   mu = softplus or the identity

computed as the dot products of vectors 2d wide. Delta is moved from the keys to the queries, so that one small table
of phases serves the keys of all heads (the paper's eq. 6, 7 and 9 leave it on the keys):

    q'_t = mu(q_t) (cos(t theta - delta), sin(t theta - delta)),   k'_s = mu(k_s) (cos(s theta), sin(s theta))

v stays d wide, where flash attention would want it padded to 2d: the forward matmuls are 1.5 times RoPE's, not 2. k' is
written to memory once a pass; q' is made in registers and written for the backward pass alone. There are no atomics:
the same input gives the same bits, in the gradients too.

Limits of both: d = 32, 48, 64 or 128; float16, bfloat16 or float32, with sums and phases in float32; any T; as many queries
as keys (decoding from a cache is left to PyTorch); no dropout; no second derivatives.

CoPE attention (arXiv:2405.18719, section 4 and Listing 1) adds to the logit of query i and
key j a bias that depends on how many keys between them the query counts:

    g_ij = sigmoid(gate_q_i . gate_k_j / sqrt(d))      a gate per pair, gate_q = q and gate_k = k by default
    p_ij = min(g_ij + g_i,j+1 + .. + g_ii, npos - 1)   the position of key j as query i sees it
    b_ij = (1 - w) z_i[floor p_ij] + w z_i[ceil p_ij]  w = p_ij - floor p_ij, z_i = q_i e, one value per position
    o_i  = softmax_j(q_i . k_j / sqrt(d) + b_ij) v_j   over j <= i

Fixed-point positions. p is summed over the whole row, piece by piece and in both directions; float sums would
disagree about floor p wherever p is close to an integer. So a gate is rounded to a multiple of 1/2048, p is an int32
count of such units, and every sum is exact for T < 2^20. A gate is off by 1/4096 at most and p by n/4096 after n
gates, 1.4e-4 sqrt(n) in the root mean square; gates below 1/4096 count as zero. Relative errors against exact gates in
float64, at T = 1024, npos = 64, unit-normal q, k and mean gates of 0.5 .. 0.02 (and what the dense path in bfloat16
adds of its own), for a table of white noise and for one that is smooth over 8 positions:

    white noise    o 0.13 .. 0.24% (0.6)    dz 0.24 .. 0.6% (1.2)    gate gradients 6 .. 13% (9 .. 19)
    smooth         o 0.01 .. 0.02% (0.5)    dz 0.14 .. 0.4% (0.8)    gate gradients 1.4 .. 6% (3 .. 4)

A gate's gradient feels it most: it adds up slopes of b, which jump at the integers. Gradients pass the rounding as if
it were not there. The slope is 0 where p is clamped and where it is an integer, as floor and ceil meet there.

Saturation. Left of the key where every row of a tile has counted to npos - 1 the bias is z_i[npos - 1]: there the
kernels run ordinary attention, with neither gates nor look-ups nor gate gradients. One row that hardly counts keeps
its whole tile from that.

Memory. The forward pass keeps o and 8 bytes a row. The backward pass borrows 16 npos bytes a row for the table and its
gradient, and 8 bytes per row and tile of 32 keys, T^2 / 4 a head, for as many heads at a time as fit into 256 MB.

Measured by `python kernels.py` (median ms forward, forward + backward; MB at the peak):
GPU rows: not yet measured, nor has any kernel run on one; checked in the interpreter and compiled ahead of time.
"""
import datetime
import io
import math
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Optional

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the module imports all the same, so that why_not can say what is missing
    triton, tl = SimpleNamespace(jit=lambda f: f, __version__=None), SimpleNamespace(constexpr=float)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton itself looks at it when it is imported
WIDTHS = (32, 48, 64, 128)  # head widths that are tested
LN2 = tl.constexpr(math.log(2))

# ---------------------------------------------------------------------------------------------------
# shared by the kernels of all methods

noting = None  # or (chip, list): launches are noted in the list, as if for that chip, and not made


@contextmanager
def noted(chip):
    """Within it the operators run without their kernels, on any device; gives the list of (kernel, args, options)."""
    global noting
    noting = (chip, [])
    try:
        yield noting[1]
    finally:
        noting = None


def launch(kernel, grid, *args, **options):
    # lets x * scale - top be one instruction; said aloud, as Triton versions differ about the default
    options["enable_fp_fusion"] = True
    if noting:
        noting[1].append((kernel, args, options))
        return
    with torch.cuda.device_of(args[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[grid](*args, **options)


def chip(x):
    """The compute capability that tiles are chosen for: 80 on an A100 and in the interpreter, 90 on an H100."""
    if noting:
        return noting[0]
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    return 10 * major + minor


def unit_stride(*xs):
    """Kernels take any strides but the last, so that the heads of a (B, T, C) need no copy."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in xs]


def empty_heads(x):
    """An empty (B, H, T, d) with the memory of a (B, T, H, d), whose heads merge into (B, T, C) for free."""
    B, H, T, d = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


@triton.jit
def load_rows(x, rows, stride, T, D: tl.constexpr, P: tl.constexpr):
    """x[rows] of a (T, D) matrix as a tile P wide, zero outside the matrix."""
    cols = tl.arange(0, P)
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    return tl.load(x + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(x, rows, stride, tile, T, D: tl.constexpr, P: tl.constexpr):
    cols = tl.arange(0, P)
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(x + rows[:, None] * stride + cols[None, :], tile.to(x.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------
# PoPE. In its kernels t are queries and s keys, M and N how many of them a tile has; D is the head width and P the
# power of two that holds it. A vector 2d wide is a pair of tiles, cosines (.._x) and sines (.._y).


@triton.jit
def magnitude(x, SOFTPLUS: tl.constexpr):
    """mu(x). softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|), to a few ulp at both ends: the last term restores
    what 1 + e has rounded away, which for x < -17 is all there is."""
    if SOFTPLUS:
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        x = tl.maximum(x, 0.0) + (tl.log(u) + (e - (u - 1.0)) / u)
    return x


@triton.jit
def phases(cos, sin, delta, rows, h, T, D: tl.constexpr, P: tl.constexpr):
    """Cosine and sine of rows * theta - delta by the addition theorem. cos, sin (T, D); delta (H, 2, D) holds its
    cosines and sines, or is None."""
    cosine, sine = load_rows(cos, rows, D, T, D, P), load_rows(sin, rows, D, T, D, P)
    if delta is not None:
        cols = tl.arange(0, P)
        delta_x = tl.load(delta + h * 2 * D + cols, mask=cols < D, other=0.0)[None, :]
        delta_y = tl.load(delta + h * 2 * D + D + cols, mask=cols < D, other=0.0)[None, :]
        cosine, sine = cosine * delta_x + sine * delta_y, sine * delta_x - cosine * delta_y
    return cosine, sine


@triton.jit
def polar(x, stride, cos, sin, delta, rows, h, T, SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """The pair mu(x[rows]) (cos, sin), in float32."""
    mu = magnitude(load_rows(x, rows, stride, T, D, P).to(tl.float32), SOFTPLUS)
    cosine, sine = phases(cos, sin, delta, rows, h, T, D, P)
    return mu * cosine, mu * sine


@triton.jit
def polar_gradient(g_x, g_y, x, stride, cos, sin, delta, rows, h, T, SOFTPLUS: tl.constexpr, D: tl.constexpr,
                   P: tl.constexpr):
    """The gradients of x[rows] and of the phases, from those of the pair. x and the tables are read a second time
    rather than held in registers all through the loop before."""
    x = load_rows(x, rows, stride, T, D, P).to(tl.float32)
    cosine, sine = phases(cos, sin, delta, rows, h, T, D, P)
    dx = g_x * cosine + g_y * sine
    return dx * tl.sigmoid(x) if SOFTPLUS else dx, magnitude(x, SOFTPLUS) * (g_y * cosine - g_x * sine)


@triton.jit
def load_pair(x, rows, T, D: tl.constexpr, P: tl.constexpr):
    return load_rows(x, rows, 2 * D, T, D, P), load_rows(x + D, rows, 2 * D, T, D, P)


@triton.jit
def store_pair(x, rows, a, b, T, D: tl.constexpr, P: tl.constexpr):
    store_rows(x, rows, 2 * D, a, T, D, P)
    store_rows(x + D, rows, 2 * D, b, T, D, P)


@triton.jit
def matmul(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # no tf32 where the inputs are float32


@triton.jit
def pope_keys(k, k2, cos, sin, T, H, kb, kh, kt, SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
              N: tl.constexpr):
    """k (B, H, T, D) -> k2 (B, H, T, 2D), which is k'."""
    s, bh = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    k_x, k_y = polar(k + bh // H * kb + bh % H * kh, kt, cos, sin, None, s, 0, T, SOFTPLUS, D, P)
    store_pair(k2 + bh * T * 2 * D, s, k_x, k_y, T, D, P)


@triton.jit
def pope_forward(q, k2, v, o, lse, cos, sin, delta, scale, T, H, qb, qh, qt, vb, vh, vt,
                 SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """o (B, T, H, D) and lse (B, H, T) of one tile of queries. scale = log2(e) / sqrt(d): scores and lse, the log
    of a row's sum, are powers of two. qb, qh, qt: q's strides by batch, head and token; so for v."""
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows first, for an even end
    t, bh = t0 + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    k2 += bh * T * 2 * D
    v += b * vb + h * vh
    q_x, q_y = polar(q + b * qb + h * qh, qt, cos, sin, delta, t, h, T, SOFTPLUS, D, P)
    q_x, q_y = q_x.to(k2.dtype.element_ty), q_y.to(k2.dtype.element_ty)
    top = tl.full((M,), float("-inf"), tl.float32)  # of the scores so far; finite once key 0 was seen
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, P), tl.float32)
    for diagonal in tl.static_range(2):  # first the keys that all queries of the tile see, then those under the mask
        for s0 in range(t0 if diagonal else 0, tl.minimum(t0 + M, T) if diagonal else t0, N):
            s = s0 + tl.arange(0, N)
            k_x, k_y = load_pair(k2, s, T, D, P)
            a = matmul(q_y, tl.trans(k_y), matmul(q_x, tl.trans(k_x)))
            if diagonal:
                a = tl.where(t[:, None] >= s[None, :], a, float("-inf"))
            higher = tl.maximum(top, tl.max(a, 1) * scale)
            p, fade = tl.exp2(a * scale - higher[:, None]), tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            acc = matmul(p.to(v.dtype.element_ty), load_rows(v, s, vt, T, D, P), acc * fade[:, None])
            top = higher
    store_rows(o + (b * T * H + h) * D, t, H * D, acc / total[:, None], T, D, P)
    tl.store(lse + bh * T + t, top + tl.log2(total), mask=t < T)


@triton.jit
def pope_backward_q(q, k2, v, o, do, dq, q2, ddelta, lse, mean, cos, sin, delta, scale, T, H, qb, qh, qt, vb, vh, vt,
                    ob, oh, ot, gb, gh, gt, SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr):
    """One tile of queries: dq, its part of ddelta (B, H, tiles, D), and what the keys' kernel reads of every query:
    q2 (B, H, T, 2D), which is q', and mean (B, H, T), rowsum(o do), the average of dp over a row."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    t0 = tile * M
    t, bh = t0 + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    q += b * qb + h * qh
    k2 += bh * T * 2 * D
    v += b * vb + h * vh
    q_x, q_y = polar(q, qt, cos, sin, delta, t, h, T, SOFTPLUS, D, P)
    q_x, q_y = q_x.to(k2.dtype.element_ty), q_y.to(k2.dtype.element_ty)
    store_pair(q2 + bh * T * 2 * D, t, q_x, q_y, T, D, P)
    g = load_rows(do + b * gb + h * gh, t, gt, T, D, P)
    row_mean = tl.sum(load_rows(o + b * ob + h * oh, t, ot, T, D, P).to(tl.float32) * g.to(tl.float32), 1)
    tl.store(mean + bh * T + t, row_mean, mask=t < T)
    row_lse = tl.load(lse + bh * T + t, mask=t < T, other=float("inf"))  # no weights past the last query
    g_x, g_y = tl.zeros((M, P), tl.float32), tl.zeros((M, P), tl.float32)
    for diagonal in tl.static_range(2):
        for s0 in range(t0 if diagonal else 0, tl.minimum(t0 + M, T) if diagonal else t0, N):
            s = s0 + tl.arange(0, N)
            k_x, k_y = load_pair(k2, s, T, D, P)
            p = tl.exp2(matmul(q_y, tl.trans(k_y), matmul(q_x, tl.trans(k_x))) * scale - row_lse[:, None])
            if diagonal:
                p = tl.where(t[:, None] >= s[None, :], p, 0.0)
            dp = matmul(g, tl.trans(load_rows(v, s, vt, T, D, P)))
            da = (p * (dp - row_mean[:, None])).to(k_x.dtype)
            g_x, g_y = matmul(da, k_x, g_x), matmul(da, k_y, g_y)
    dx, dphase = polar_gradient(g_x, g_y, q, qt, cos, sin, delta, t, h, T, SOFTPLUS, D, P)
    inv_sqrt_d = scale * LN2  # scale is log2(e) / sqrt(d)
    store_rows(dq + (b * T * H + h) * D, t, H * D, dx * inv_sqrt_d, T, D, P)
    cols = tl.arange(0, P)  # past T the tables were read as zero, so those rows add nothing
    part = ddelta + (bh * tl.num_programs(0) + tile) * D + cols
    tl.store(part, -tl.sum(dphase, 0) * inv_sqrt_d, mask=cols < D)


@triton.jit
def pope_backward_kv(k, q2, k2, v, do, dk, dv, lse, mean, cos, sin, scale, T, H, kb, kh, kt, vb, vh, vt, gb, gh, gt,
                     SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dk and dv of one tile of keys, from all queries that see it. Scores are held transposed, (keys, queries)."""
    s0 = tl.program_id(0) * N
    s, bh = s0 + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    q2 += bh * T * 2 * D
    do += b * gb + h * gh
    k_x, k_y = load_pair(k2 + bh * T * 2 * D, s, T, D, P)
    v_tile = load_rows(v + b * vb + h * vh, s, vt, T, D, P)
    g_x, g_y, g_v = tl.zeros((N, P), tl.float32), tl.zeros((N, P), tl.float32), tl.zeros((N, P), tl.float32)
    below = tl.minimum(tl.cdiv(s0 + N, M) * M, T)  # from this query on, all see the whole tile
    for diagonal in tl.static_range(2):
        for t0 in range(s0 // M * M if diagonal else below, below if diagonal else T, M):
            t = t0 + tl.arange(0, M)
            q_x, q_y = load_pair(q2, t, T, D, P)
            row_lse = tl.load(lse + bh * T + t, mask=t < T, other=float("inf"))
            p = tl.exp2(matmul(k_y, tl.trans(q_y), matmul(k_x, tl.trans(q_x))) * scale - row_lse[None, :])
            if diagonal:
                p = tl.where(t[None, :] >= s[:, None], p, 0.0)
            g = load_rows(do, t, gt, T, D, P)
            g_v = matmul(p.to(g.dtype), g, g_v)
            row_mean = tl.load(mean + bh * T + t, mask=t < T, other=0.0)
            da = (p * (matmul(v_tile, tl.trans(g)) - row_mean[None, :])).to(q_x.dtype)
            g_x, g_y = matmul(da, q_x, g_x), matmul(da, q_y, g_y)
    dx, _ = polar_gradient(g_x, g_y, k + b * kb + h * kh, kt, cos, sin, None, s, 0, T, SOFTPLUS, D, P)
    store_rows(dk + (b * T * H + h) * D, s, H * D, dx * (scale * LN2), T, D, P)  # scale is log2(e) / sqrt(d)
    store_rows(dv + (b * T * H + h) * D, s, H * D, g_v, T, D, P)


# (M, N, warps) for 16-bit inputs: for P < 128 and P = 128 on any chip, within the 99 KB of shared memory that the small
# ones have, and for P < 128 and P = 128 on an H100 or B200. Chosen by what compiles with next to no spilled registers,
# not yet by the clock. In the queries' kernels N divides M, since the part under the mask starts at a multiple of M.
POPE_TILES = {
    "pope_forward": ((128, 64, 8), (128, 32, 8), (128, 64, 8), (128, 32, 8)),
    "pope_backward_q": ((128, 32, 8), (64, 32, 8), (128, 64, 8), (64, 64, 8)),
    "pope_backward_kv": ((32, 64, 4), (32, 64, 8), (64, 64, 8), (32, 64, 8)),
}


def pope_options(x, kernel):
    d, P = x.size(-1), triton.next_power_of_2(x.size(-1))
    M, N, warps = POPE_TILES[kernel.__name__][2 * (90 <= chip(x) < 120) + (P > 64)]
    stages = 2
    if x.dtype == torch.float32:  # there to be checked against, without tensor cores and without haste
        M, N, warps, stages = (32, 32, 8, 1) if P <= 64 else (16, 16, 8, 1)
    return dict(D=d, P=P, M=M, N=N, num_warps=warps, num_stages=stages)


def write_keys(k, cos, sin, softplus):
    B, H, T, d = k.shape
    k2, P = k.new_empty(B, H, T, 2 * d), triton.next_power_of_2(d)
    N = 4096 // P
    launch(pope_keys, (triton.cdiv(T, N), B * H), k, k2, cos, sin, T, H, *k.stride()[:3],
           SOFTPLUS=softplus, D=d, P=P, N=N, num_warps=4, num_stages=1)
    return k2


def cos_sin(delta):
    return torch.stack((delta.cos(), delta.sin()), 1)  # (H, 2, d)


# custom_op rather than triton_op: torch.compile keeps either in one graph, and this one runs the interpreter's kernels
# on CPU tensors too. What a triton_op would add, sight of the kernels, the compiler has no use for here.
@torch.library.custom_op("pope::forward", mutates_args=())
def pope_forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, cos: torch.Tensor,
               sin: torch.Tensor, softplus: bool) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, T, d = q.shape
    q, k, v = unit_stride(q, k, v)
    o, lse = empty_heads(q), q.new_empty(B, H, T, dtype=torch.float32)
    options = pope_options(q, pope_forward)
    launch(pope_forward, (triton.cdiv(T, options["M"]), B * H), q, write_keys(k, cos, sin, softplus), v, o, lse, cos,
           sin, cos_sin(delta), d**-0.5 / math.log(2), T, H, *q.stride()[:3], *v.stride()[:3],
           SOFTPLUS=softplus, **options)
    return o, lse


@torch.library.custom_op("pope::backward", mutates_args=())
def pope_backward_op(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor,
                cos: torch.Tensor, sin: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, softplus: bool
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    B, H, T, d = q.shape
    do, q, k, v, o = unit_stride(do, q, k, v, o)
    dq, dk, dv, mean = empty_heads(q), empty_heads(k), empty_heads(v), torch.empty_like(lse)
    k2, scale, vs, gs = write_keys(k, cos, sin, softplus), d**-0.5 / math.log(2), v.stride()[:3], do.stride()[:3]
    q2, options = torch.empty_like(k2), pope_options(q, pope_backward_q)
    tiles = triton.cdiv(T, options["M"])
    ddelta = lse.new_empty(B, H, tiles, d)
    launch(pope_backward_q, (tiles, B * H), q, k2, v, o, do, dq, q2, ddelta, lse, mean, cos, sin, cos_sin(delta), scale,
           T, H, *q.stride()[:3], *vs, *o.stride()[:3], *gs, SOFTPLUS=softplus, **options)
    options = pope_options(q, pope_backward_kv)
    launch(pope_backward_kv, (triton.cdiv(T, options["N"]), B * H), k, q2, k2, v, do, dk, dv, lse, mean, cos, sin,
           scale, T, H, *k.stride()[:3], *vs, *gs, SOFTPLUS=softplus, **options)
    return dq, dk, dv, ddelta.sum((0, 2))


@pope_forward_op.register_fake
def _(q, k, v, delta, cos, sin, softplus):
    return empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@pope_backward_op.register_fake
def _(do, q, k, v, delta, cos, sin, o, lse, softplus):
    return empty_heads(q), empty_heads(k), empty_heads(v), torch.empty_like(delta)


def pope_save(ctx, inputs, output):
    *tensors, ctx.softplus = inputs
    ctx.save_for_backward(*tensors, *output)


def pope_backward_of(ctx, do, _):
    return *pope_backward_op(do, *ctx.saved_tensors, ctx.softplus), None, None, None


pope_forward_op.register_autograd(pope_backward_of, setup_context=pope_save)


def pope_attention(q, k, v, delta, base=10000.0, softplus=True):
    """Causal PoPE attention, see the top of this file. q, k, v (B, H, T, d) as projected, of one dtype; delta (H, d) or
    None. Returns (B, H, T, d); q, k, v and delta get gradients. Where the first token stands makes no difference."""
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"pope_attention wants q, k, v of one shape and dtype, got {shapes}")
    T, d = q.shape[2:]
    theta = base ** (-torch.arange(d, device=q.device, dtype=torch.float64) / d)
    # in float64, as a float32 angle is off by 1e-3 at position 16384; the table itself is float32
    angle = torch.arange(T, device=q.device, dtype=torch.float64)[:, None] * theta  # (T, d)
    delta = torch.zeros(q.size(1), d, device=q.device) if delta is None else delta.float()
    return pope_forward_op(q, k, v, delta, angle.cos().float(), angle.sin().float(), softplus)[0]


# ---------------------------------------------------------------------------------------------------
# CoPE. Pieces of a tile of query-key pairs. AXIS is the axis of the keys: 1 where rows are queries, 0 in the dk, dv
# kernel, whose tiles are transposed so that the matmuls find their operands in registers

BITS = tl.constexpr(11)  # of a position's fraction: as many as leave every gate exact in fp16
UNIT = tl.constexpr(2048)  # 2^BITS, a whole position
CHUNK = tl.constexpr(4)  # tiles between two looks at whether the rows are saturated
BORROWED = 2**28  # bytes that the backward pass may borrow for what its two kernels tell each other; one head's at least


@triton.jit
def load_repeated(X, index, D: tl.constexpr, P: tl.constexpr):
    """Rows of X (T, D), widened with zeros to the power of two that tl.dot asks for."""
    c = tl.arange(0, P)
    at = X + index[:, None] * D + c[None, :]
    if D == P:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=c[None, :] < D, other=0.0)
    return x


@triton.jit
def running_sum(x, LEFTWARD: tl.constexpr, AXIS: tl.constexpr):
    """Sums of x over the keys up to each one (LEFTWARD: from each one on), itself included, as a matmul with a
    triangle of ones: cheaper than a scan on tensor cores."""
    n: tl.constexpr = x.shape[AXIS]
    a, b = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    if LEFTWARD == (AXIS == 1):
        triangle = (a >= b).to(x.dtype)
    else:
        triangle = (a <= b).to(x.dtype)
    if AXIS == 1:
        y = matmul(x, triangle)
    else:
        y = matmul(triangle, x)
    return y


@triton.jit
def gate(logit, seen):
    """The gate, and its units as whole numbers; a key in the future counts for nothing."""
    g = tl.sigmoid(logit)
    return g, tl.where(seen, tl.floor(g * UNIT + 0.5), 0.0)


@triton.jit
def clamp(p, NPOS: tl.constexpr):
    return tl.maximum(tl.minimum(p, (NPOS - 1) * UNIT), 0)


@triton.jit
def unpack(pair, DTYPE: tl.constexpr):
    """(z[c], z[c + 1]) as float32 from the word that pairs() made of them."""
    if DTYPE == tl.float32:
        low, high = pair.to(tl.int32).to(DTYPE, bitcast=True), (pair >> 32).to(tl.int32).to(DTYPE, bitcast=True)
    else:
        low, high = pair.to(tl.int16).to(DTYPE, bitcast=True), (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def pack(low, high):
    """Two float32 in one word, low in the lower half."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def look_up(Z, row, p, T, NPOS: tl.constexpr, ZTYPE: tl.constexpr):
    """Bias at the clamped positions p (in units), its slope and the weight of the right neighbour."""
    pair = tl.zeros(p.shape, Z.dtype.element_ty)
    if T > 0:  # always: a load outside a branch would be prefetched a tile ahead, with all that leads to its address
        pair = tl.load(Z + row * NPOS + (p >> BITS))
    low, high = unpack(pair, ZTYPE)
    w = (p & (UNIT - 1)).to(tl.float32) * (1.0 / UNIT)
    slope = tl.where(w > 0, high - low, 0.0)
    return low + w * slope, slope, w


@triton.jit
def last_bias(Z, row, NPOS: tl.constexpr, ZTYPE: tl.constexpr):
    return unpack(tl.load(Z + row * NPOS + NPOS - 1), ZTYPE)[0]


# ---------------------------------------------------------------------------------------------------
# the kernels. A program works on one tile and one head; rows and keys past T repeat the last one, so that loads
# need no mask, and are left out of every result


@triton.jit
def attend(s, v, m, l, acc):
    """One step of the online softmax: m the row maxima, l the sums, acc the weighted values so far."""
    m_new = tl.maximum(m, tl.max(s, 1))
    e, shrink = tl.exp(s - m_new[:, None]), tl.exp(m - m_new)
    acc = matmul(e.to(v.dtype), v, acc * shrink[:, None])
    return m_new, l * shrink + tl.sum(e, 1), acc


@triton.jit
def cope_forward(Q, K, V, Z, GQ, GK, O, LSE, COUNT, EXIT, scale, T, D: tl.constexpr, P: tl.constexpr,
                 NPOS: tl.constexpr, ZTYPE: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """A tile of M rows walks from the diagonal to the left, carrying the units that each row has counted. Stores o,
    the log-sum-exp, the count where the gates were left, and the key left of which they were (EXIT, one per tile)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1).to(tl.int64)
    Q, K, V, O, Z = Q + head * T * D, K + head * T * D, V + head * T * D, O + head * T * D, Z + head * T * NPOS
    i = tile * M + tl.arange(0, M)
    row = tl.minimum(i, T - 1)
    q = load_repeated(Q, row, D, P)
    if OWN:
        GQ, GK = GQ + head * T * D, GK + head * T * D
        gq = load_repeated(GQ, row, D, P)
    m, l, acc = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, P), tl.float32)
    count = tl.zeros((M,), tl.int32)

    todo = tl.cdiv(tl.minimum(tile * M + M, T), N)  # key tiles left to do: 0 .. todo - 1
    while (todo > 0) & (tl.min(count, 0) < (NPOS - 1) * UNIT):
        stop = tl.maximum(todo - CHUNK, 0)
        for back in range(0, todo - stop):  # an inner loop, as only those are pipelined
            j = (todo - 1 - back) * N + tl.arange(0, N)
            key = tl.minimum(j, T - 1)
            s = matmul(q, tl.trans(load_repeated(K, key, D, P))) * scale
            gs = s
            if OWN:
                gs = matmul(gq, tl.trans(load_repeated(GK, key, D, P))) * scale
            seen = row[:, None] >= j[None, :]
            g, units = gate(gs, seen)
            p = clamp(count[:, None] + running_sum(units.to(tl.float16), True, 1).to(tl.int32), NPOS)
            bias, slope, w = look_up(Z, row[:, None], p, T, NPOS, ZTYPE)
            count += tl.sum(units, 1).to(tl.int32)
            m, l, acc = attend(tl.where(seen, s + bias, float("-inf")), load_repeated(V, key, D, P), m, l, acc)
        todo = stop
    last = last_bias(Z, row, NPOS, ZTYPE)
    for n in range(0, todo):
        key = n * N + tl.arange(0, N)
        s = matmul(q, tl.trans(load_repeated(K, key, D, P))) * scale + last[:, None]
        m, l, acc = attend(s, load_repeated(V, key, D, P), m, l, acc)

    store_rows(O, i, D, acc / l[:, None], T, D, P)
    tl.store(LSE + head * T + i, m + tl.log(l), mask=i < T)
    tl.store(COUNT + head * T + i, count, mask=i < T)
    tl.store(EXIT + head * tl.num_programs(0) + tile, todo * N)


@triton.jit
def cope_backward_q(Q, K, V, Z, GQ, GK, O, DO, LSE, COUNT, EXIT, DQ, DGQ, ENDS, MEAN, RIGHT, LEFT, scale, T, n_exits,
                    first, D: tl.constexpr, P: tl.constexpr, NPOS: tl.constexpr, ZTYPE: tl.constexpr,
                    OWN: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dq and d gate_q; a tile of rows walks from left to right, so that a gate's gradient, the sum of dp over all
    keys to its left, is a running sum too. Writes for the dk, dv kernel: MEAN (T,) = do . o, and per key tile and
    row the units counted to its RIGHT and the sum of dp to its LEFT.

    dz without a scattered sum: p falls along a row, in steps of one at most, so the keys with floor p = c are a run.
    Its last key stores the running sums of ds (1 - w) and of ds w in ENDS[c]; what the run added is their difference
    from the run before, column c + 1 (see cope_backward_op)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = first + tl.program_id(1).to(tl.int64)
    Q, K, V, O, DO, Z = Q + head * T * D, K + head * T * D, V + head * T * D, O + head * T * D, DO + head * T * D, Z + head * T * NPOS
    tables = (head - first) * tl.cdiv(T, N) * T
    RIGHT, LEFT = RIGHT + tables, LEFT + tables
    ENDS += head * T * NPOS
    i = tile * M + tl.arange(0, M)
    row, real = tl.minimum(i, T - 1), i < T
    q, do = load_repeated(Q, row, D, P), load_repeated(DO, row, D, P)
    row_mean = tl.sum(load_repeated(O, row, D, P).to(tl.float32) * do.to(tl.float32), 1)
    tl.store(MEAN + head * T + i, row_mean, mask=real)
    lse = tl.load(LSE + head * T + row)
    count = tl.load(COUNT + head * T + row)
    if OWN:
        GQ, GK = GQ + head * T * D, GK + head * T * D
        gq = load_repeated(GQ, row, D, P)
        dgq = tl.zeros((M, P), tl.float32)
    dq = tl.zeros((M, P), tl.float32)
    left, low, high = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)

    start = tl.load(EXIT + head * n_exits + tile * M // ROWS) // N
    last = last_bias(Z, row, NPOS, ZTYPE)
    for n in range(0, start):
        key = n * N + tl.arange(0, N)
        tl.store(RIGHT + n * T + i, count, mask=real)
        tl.store(LEFT + n * T + i, left, mask=real)
        k = load_repeated(K, key, D, P)
        s = matmul(q, tl.trans(k)) * scale + last[:, None]
        dw = matmul(do, tl.trans(load_repeated(V, key, D, P))) - row_mean[:, None]
        ds = (tl.exp(s - lse[:, None]) * dw).to(k.dtype)
        low += tl.sum(ds.to(tl.float32), 1)
        dq = matmul(ds, k, dq)
    for n in range(start, tl.cdiv(tl.minimum(tile * M + M, T), N)):
        j = n * N + tl.arange(0, N)
        key = tl.minimum(j, T - 1)
        k = load_repeated(K, key, D, P)
        s = matmul(q, tl.trans(k)) * scale
        gs = s
        if OWN:
            gk = load_repeated(GK, key, D, P)
            gs = matmul(gq, tl.trans(gk)) * scale
        seen = row[:, None] >= j[None, :]
        g, units = gate(gs, seen)
        count -= tl.sum(units, 1).to(tl.int32)
        tl.store(RIGHT + n * T + i, count, mask=real)
        tl.store(LEFT + n * T + i, left, mask=real)
        p = count[:, None] + running_sum(units.to(tl.float16), True, 1).to(tl.int32)
        column = clamp(p, NPOS) >> BITS
        next_column = clamp(p - units.to(tl.int32), NPOS) >> BITS
        bias, slope, w = look_up(Z, row[:, None], clamp(p, NPOS), T, NPOS, ZTYPE)
        dw = matmul(do, tl.trans(load_repeated(V, key, D, P))) - row_mean[:, None]
        ds = tl.where(seen, tl.exp(s + bias - lse[:, None]), 0.0) * dw

        end = (column != next_column) & real[:, None]
        part = (ds * (1 - w)).to(k.dtype)
        low_sum = low[:, None] + running_sum(part, False, 1)
        low += tl.sum(part.to(tl.float32), 1)
        part = (ds * w).to(k.dtype)
        high_sum = high[:, None] + running_sum(part, False, 1)
        high += tl.sum(part.to(tl.float32), 1)
        tl.store(ENDS + row[:, None] * NPOS + column, pack(low_sum, high_sum), mask=end)

        dp = (ds * slope).to(k.dtype)
        dg = left[:, None] + running_sum(dp, False, 1)
        left += tl.sum(dp.to(tl.float32), 1)
        dgs = tl.where(seen, dg * g * (1 - g), 0.0)
        if OWN:
            dgq = matmul(dgs.to(k.dtype), gk, dgq)
        else:
            ds += dgs
        dq = matmul(ds.to(k.dtype), k, dq)

    tl.store(ENDS + row * NPOS, pack(low, high), mask=real)  # column 0 is where every row ends
    store_rows(DQ + head * T * D, i, D, dq * scale, T, D, P)
    if OWN:
        store_rows(DGQ + head * T * D, i, D, dgq * scale, T, D, P)


@triton.jit
def cope_backward_kv(Q, K, V, Z, GQ, GK, DO, LSE, EXIT, DK, DV, DGK, MEAN, RIGHT, LEFT, scale, T, n_exits,
                     first, D: tl.constexpr, P: tl.constexpr, NPOS: tl.constexpr, ZTYPE: tl.constexpr,
                     OWN: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dk, dv and d gate_k; a tile of N keys visits all rows that see it, CHUNK tiles of M at a time: with gates
    where one of them still counts, without where all are saturated."""
    n = tl.program_id(0)
    head = first + tl.program_id(1).to(tl.int64)
    Q, K, V, DO, Z = Q + head * T * D, K + head * T * D, V + head * T * D, DO + head * T * D, Z + head * T * NPOS
    tables = ((head - first) * tl.num_programs(0) + n) * T
    RIGHT, LEFT, LSE, MEAN = RIGHT + tables, LEFT + tables, LSE + head * T, MEAN + head * T
    j = n * N + tl.arange(0, N)
    key = tl.minimum(j, T - 1)
    k, v = load_repeated(K, key, D, P), load_repeated(V, key, D, P)
    dk, dv = tl.zeros((N, P), tl.float32), tl.zeros((N, P), tl.float32)
    if OWN:
        GQ, GK = GQ + head * T * D, GK + head * T * D
        gk = load_repeated(GK, key, D, P)
        dgk = tl.zeros((N, P), tl.float32)

    for start in range(n * N // M * M, T, CHUNK * M):
        tiles = tl.minimum(tl.cdiv(T - start, M), CHUNK)
        rows = tl.minimum(start + M * tl.arange(0, CHUNK), T - 1)
        if tl.min(tl.load(EXIT + head * n_exits + rows // ROWS), 0) <= n * N:
            for step in range(0, tiles):
                i = start + step * M + tl.arange(0, M)
                row, real = tl.minimum(i, T - 1), i < T
                q, do = load_repeated(Q, row, D, P), load_repeated(DO, row, D, P)
                lse, row_mean = tl.load(LSE + row), tl.load(MEAN + row)
                s = matmul(k, tl.trans(q)) * scale
                gs = s
                if OWN:
                    gq = load_repeated(GQ, row, D, P)
                    gs = matmul(gk, tl.trans(gq)) * scale
                seen = (i[None, :] >= j[:, None]) & real[None, :]
                g, units = gate(gs, seen)
                p = tl.load(RIGHT + row)[None, :] + running_sum(units.to(tl.float16), True, 0).to(tl.int32)
                bias, slope, w = look_up(Z, row[None, :], clamp(p, NPOS), T, NPOS, ZTYPE)
                weight = tl.where(seen, tl.exp(s + bias - lse[None, :]), 0.0)
                dv = matmul(weight.to(q.dtype), do, dv)
                ds = weight * (matmul(v, tl.trans(do)) - row_mean[None, :])
                dg = tl.load(LEFT + row)[None, :] + running_sum((ds * slope).to(q.dtype), False, 0)
                dgs = tl.where(seen, dg * g * (1 - g), 0.0)
                if OWN:
                    dgk = matmul(dgs.to(q.dtype), gq, dgk)
                else:
                    ds += dgs
                dk = matmul(ds.to(q.dtype), q, dk)
        else:
            for step in range(0, tiles):
                i = start + step * M + tl.arange(0, M)
                row = tl.minimum(i, T - 1)
                q, do = load_repeated(Q, row, D, P), load_repeated(DO, row, D, P)
                lse = tl.load(LSE + i, mask=i < T, other=float("inf"))  # a row past T weighs exp(-inf) = 0
                bias = last_bias(Z, row, NPOS, ZTYPE) - lse
                weight = tl.exp(matmul(k, tl.trans(q)) * scale + bias[None, :])
                dv = matmul(weight.to(q.dtype), do, dv)
                ds = weight * (matmul(v, tl.trans(do)) - tl.load(MEAN + row)[None, :])
                dk = matmul(ds.to(q.dtype), q, dk)

    store_rows(DK + head * T * D, j, D, dk * scale, T, D, P)
    store_rows(DV + head * T * D, j, D, dv, T, D, P)
    if OWN:
        store_rows(DGK + head * T * D, j, D, dgk * scale, T, D, P)


# ---------------------------------------------------------------------------------------------------
# CoPE on the host: tiles, launches, autograd


def cope_tiles(x):
    """Options of forward, backward_q and backward_kv for heads as wide as those of x: 16-bit kernels spill at most
    24 bytes on sm_80 and sm_90; nothing was timed. The backward kernels share N, by which RIGHT and LEFT are kept; the
    M of forward is a multiple of backward_q's."""
    width = max(64, triton.next_power_of_2(x.size(-1)))
    warps = 8 if width > 64 else 4
    roomy = chip(x) == 80 or 90 <= chip(x) < 120  # over 160 KB of shared memory, not the 100 KB of desktop GPUs
    forward = dict(M=128, N=64 if width == 64 else 32, num_warps=8) if roomy else dict(M=64, N=32, num_warps=warps)
    backward_q, backward_kv = dict(M=32, N=32, num_warps=warps), dict(M=64, N=32, num_warps=8)
    if x.dtype == torch.float32:  # without tensor cores and with twice the registers, these do spill
        forward = backward_kv = backward_q
    return [dict(tile, P=width, num_stages=2) for tile in (forward, backward_q, backward_kv)]


def pairs(z):
    """z (B, H, T, npos) -> the same shape: (z[c], z[c + 1]) in one word, so that a look-up is one load and exact. The
    last column's neighbour is never used: a clamped position is an integer."""
    both = torch.stack((z, z.roll(-1, -1)), -1)
    return both.view(torch.int32 if z.element_size() == 2 else torch.int64)[..., 0]


@torch.library.custom_op("cope::forward", mutates_args=())
def cope_forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, gate_q: Optional[torch.Tensor],
                    gate_k: Optional[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    B, H, T, d = q.shape
    o, lse, count, exits = cope_forward_shapes(q, k, v, z, gate_q, gate_k)
    launch(cope_forward, (exits.size(1), B * H), q, k, v, pairs(z), gate_q, gate_k, o, lse, count, exits, d**-0.5, T,
           D=d, NPOS=z.size(-1), ZTYPE=getattr(tl, str(z.dtype)[6:]), OWN=gate_q is not None, **cope_tiles(q)[0])
    return o, lse, count, exits


@cope_forward_op.register_fake
def cope_forward_shapes(q, k, v, z, gate_q, gate_k):
    """o (B, H, T, d), lse (B H, T), count (B H, T) in units, exits (B H, row tiles) in keys"""
    B, H, T, d = q.shape
    tiles = -(-T // cope_tiles(q)[0]["M"])
    lse = q.new_empty(B * H, T, dtype=torch.float32)
    count, exits = (q.new_empty(B * H, n, dtype=torch.int32) for n in (T, tiles))
    return torch.empty_like(q), lse, count, exits


@torch.library.custom_op("cope::backward", mutates_args=())
def cope_backward_op(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor,
                     gate_q: Optional[torch.Tensor], gate_k: Optional[torch.Tensor], o: torch.Tensor, lse: torch.Tensor,
                     count: torch.Tensor, exits: torch.Tensor) -> list[torch.Tensor]:
    B, H, T, d = q.shape
    forward, backward_q, backward_kv = cope_tiles(q)
    grads = cope_backward_shapes(do, q, k, v, z, gate_q, gate_k, o, lse, count, exits)
    dq, dk, dv, dz, dgq, dgk = (*grads, None, None)[:6]
    ends = q.new_zeros(B, H, T, z.size(-1), dtype=torch.int64)
    tiles = -(-T // backward_q["N"])
    heads = min(B * H, max(1, BORROWED // (8 * tiles * T)))  # at a time
    right = count.new_empty(heads, tiles, T)
    left, mean, packed = torch.empty_like(right, dtype=torch.float32), torch.empty_like(lse), pairs(z)
    shared = dict(D=d, NPOS=z.size(-1), ZTYPE=getattr(tl, str(z.dtype)[6:]), OWN=gate_q is not None, ROWS=forward["M"])
    for first in range(0, B * H, heads):
        n = min(heads, B * H - first)
        launch(cope_backward_q, (-(-T // backward_q["M"]), n), q, k, v, packed, gate_q, gate_k, o, do, lse, count, exits,
               dq, dgq, ends, mean, right, left, d**-0.5, T, exits.size(1), first, **shared, **backward_q)
        launch(cope_backward_kv, (tiles, n), q, k, v, packed, gate_q, gate_k, do, lse, exits, dk, dv, dgk, mean,
               right, left, d**-0.5, T, exits.size(1), first, **shared, **backward_kv)
    # what each run of keys added to its own column, and to the one on its right
    low, high = ends.view(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    low[..., :-1] -= low[..., 1:].clone()
    high[..., :-1] -= high[..., 1:].clone()
    low[..., 1:] += high[..., :-1]
    dz.copy_(low)
    return grads


@cope_backward_op.register_fake
def cope_backward_shapes(do, q, k, v, z, gate_q, gate_k, o, lse, count, exits):
    return [torch.empty_like(x) for x in (q, k, v, z, gate_q, gate_k) if x is not None]


def cope_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def cope_backward_of(ctx, do, *_):
    grads = cope_backward_op(do.contiguous(), *ctx.saved_tensors)
    return tuple(grads) if len(grads) == 6 else (*grads, None, None)


cope_forward_op.register_autograd(cope_backward_of, setup_context=cope_save)


def cope_attention(q, k, v, z, gate_q=None, gate_k=None):
    """Causal attention with CoPE's bias (top of this file), differentiable in all its arguments.

    q, k, v         (B, H, T, d), d <= 128, float16, bfloat16 or float32; q and k may be rotated (cope+rope)
    z               (B, H, T, npos), 2 <= npos, any of these dtypes: q @ e of the raw q, so that autograd gives e its gradient
    gate_q, gate_k  (B, H, T, d): by default q and k, whose logits then serve twice; gate_k = v for value gates,
                    a projection of the input for separate keys, the raw q and k in cope+rope
    returns o       (B, H, T, d)
    """
    if gate_q is not None or gate_k is not None:
        gate_q, gate_k = q if gate_q is None else gate_q, k if gate_k is None else gate_k
    for name, x in dict(q=q, k=k, v=v, gate_q=gate_q, gate_k=gate_k).items():
        if x is not None and (x.shape != q.shape or x.dtype != q.dtype or x.size(-1) > 128):
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; CoPE's kernels take the shape and dtype of q, at most 128 wide")
    if z.shape[:3] != q.shape[:3] or z.size(-1) < 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be {tuple(q.shape[:3])} by npos >= 2")
    return cope_forward_op(*(x if x is None else x.contiguous() for x in (q, k, v, z, gate_q, gate_k)))[0]


# ---------------------------------------------------------------------------------------------------
# may a model use them?


def why_not(pe, head_dim, device, dtype, dropout=0.0, hard_attention=False):
    """Why no kernel computes the attention of a layer, in a few words, or None if one does. pe: the layer's methods,
    such as "cope+rope"."""
    device, names = torch.device(device), set(pe.split("+"))
    mixed = names - {"nope", "learned", "sinusoidal", "expe", "exqpe"}
    if not names & {"pope", "cope"}:
        return "no kernel for it"
    if mixed not in ({"pope"}, {"cope"}, {"cope", "rope"}, {"cope", "carope"}):
        return "mixed"
    if hard_attention:
        return "hard attention"
    if triton.__version__ is None:
        return "no triton"
    if not INTERPRET:
        if device.type != "cuda":
            return "no GPU"
        if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            return "no NVIDIA GPU of compute capability 8.0 or later"
    if head_dim not in WIDTHS:
        return f"head width {head_dim} is none of {', '.join(map(str, WIDTHS))}"
    if dropout:
        return "dropout"
    if dtype == torch.float32 and not INTERPRET:
        return "float32"  # right, but without tensor cores and with registers spilled
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{dtype} inputs"
    return None


# ---------------------------------------------------------------------------------------------------
# python kernels.py. A case makes random inputs and names the functions of them that compute the same thing, or are
# measured beside it: the first is the kernels', the second the dense path, which takes float64 too.


def pope_case(B, H, T, d, dtype, device):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    scale = d**-0.5
    q, k, v = torch.randn(3, B, T, H, d, device=device).to(dtype).transpose(2, 3)  # 3 of (B, H, T, d)
    delta = -2 * math.pi * torch.rand(H, d, device=device)
    if device == "cuda" and T % 128 == 0:
        mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T, device=device)

    def angles(x, step):
        wide = torch.promote_types(x.dtype, torch.float32)
        theta = 10000.0 ** (-torch.arange(0, d, step, device=device).to(wide) / d)
        return torch.arange(T, device=device)[:, None] * theta, x.to(wide)

    def widen(x, delta):
        angle, y = angles(x, 1)
        mu, angle = F.softplus(y), angle + delta
        return torch.cat((mu * angle.cos(), mu * angle.sin()), -1).to(x.dtype)

    def turn(x):
        angle, y = angles(x, 2)
        a, b = y.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x.dtype)

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def dense(q, k, v, delta):
        return F.scaled_dot_product_attention(widen(q, 0), widen(k, delta[:, None]), v, is_causal=True, scale=scale)

    def rope(q, k, v, delta):
        return flash(turn(q), turn(k), v)

    def widened(q, k, v, delta):
        return flash(widen(q, 0), widen(k, delta[:, None]), F.pad(v, (0, d)))[..., :d]

    def flex(q, k, v, delta):
        return flex_attention(widen(q, 0), widen(k, delta[:, None]), v, block_mask=mask, scale=scale)

    return (q, k, v, delta), {"pope triton": pope_attention, "pope dense": dense, "rope flash": rope,
                              "pope flash, v padded": widened, "pope flex": flex}


def listing1(q, k, v, e, gate_k=None, units=0):
    """CoPE with T x T tensors, after Listing 1 of the paper. e (d, npos); gate_k: separate keys for the gates; units:
    round the gates to multiples of 1 / units, as the kernels do, which is what these are checked against."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.mT).to(wide) * q.size(-1) ** -0.5  # (B, H, T, T)
    past = torch.ones_like(logits[0, 0], dtype=torch.bool).tril()
    g = logits if gate_k is None else (q @ gate_k.mT).to(wide) * q.size(-1) ** -0.5
    g = g.sigmoid()
    if units:
        g = g + ((g * units + 0.5).floor() / units - g).detach()
    p = g.masked_fill(~past, 0).flip(-1).cumsum(-1).flip(-1).clamp(max=e.size(-1) - 1)
    z, floor, ceil = (q @ e).to(wide), p.floor().long(), p.ceil().long()
    bias = torch.lerp(z.gather(-1, floor), z.gather(-1, ceil), p - floor)
    return (logits + bias).masked_fill(~past, -math.inf).softmax(-1).to(v.dtype) @ v


def cope_case(B, H, T, d, dtype, device):
    """Gates from the keys, near 0.5: after some 2 npos keys every row is saturated."""
    q, k, v = torch.randn(3, B, H, T, d, device=device).to(dtype)
    e = torch.randn(d, 64, device=device).to(dtype)
    return (q, k, v, e), {
        "cope triton": lambda q, k, v, e: cope_attention(q, k, v, q @ e),
        "cope listing 1, rounded": lambda q, k, v, e: listing1(q, k, v, e, units=2048), "cope listing 1": listing1,
        "cope listing 1, eager": torch.compiler.disable(listing1),
        "rope flash": lambda q, k, v, e: F.scaled_dot_product_attention(q, k, v, is_causal=True)}


def cope_gates_case(B, H, T, d, dtype, device):
    """Gates from separate keys, near 0: no row is ever saturated."""
    (q, k, v, e), _ = cope_case(B, H, T, d, dtype, device)
    gate_k = torch.randn_like(k)
    q[..., 0], gate_k[..., 0] = 5, -d**0.5
    return (q, k, v, e, gate_k), {
        "cope triton, sep-keys": lambda q, k, v, e, gate_k: cope_attention(q, k, v, q @ e, q, gate_k),
        "cope listing 1, sep-keys": lambda q, k, v, e, gate_k: listing1(q, k, v, e, gate_k, units=2048)}


CASES = [pope_case, cope_case, cope_gates_case]


def run(f, inputs):
    """The output of f, and the gradients of all inputs for a fixed random gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = f(*inputs)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def check(device, sizes, dtypes):
    """Prints the largest errors against float64 of the output and all gradients, the kernels' and the dense path's."""
    for case in CASES:
        for B, H, T, d in sizes:
            for dtype in dtypes:
                inputs, functions = case(B, H, T, d, dtype, device)
                (name, kernel), (_, dense) = list(functions.items())[:2]
                exact = run(dense, [x.double() for x in inputs])
                ours, theirs = ([(x - y).abs().max().item() for x, y in zip(run(f, inputs), exact)] for f in (kernel, dense))
                right = (x <= 4 * y + 1e-5 * z.abs().max() for x, y, z in zip(ours, theirs, exact))  # CoPE's dz: differences
                verdict = "ok" if all(right) else "WRONG"
                print(f"{verdict:5} {name} {B} x {H} x {T} x {d} {str(dtype)[6:]}: o and gradients off by",
                      *(f"{x:.1e}" for x in ours), "| dense path", *(f"{x:.1e}" for x in theirs), flush=True)


def measure(tokens=16384, H=12, d=64, dtype=torch.bfloat16):
    """Prints times and memory of every function of every case. All are compiled, so that rotations fuse."""
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
          f"{datetime.date.today()}; {tokens} tokens, {H} heads of {d}, {str(dtype)[6:]}")
    print(f"{'T':>6} {'':24} {'forward':>9} {'+ backward':>11} {'peak MB':>8}")
    for case in CASES:
        for T in (512, 1024, 2048, 4096, 8192, 16384):
            torch._dynamo.reset()
            inputs, functions = case(max(1, tokens // T), H, T, d, dtype, "cuda")
            inputs = [x.requires_grad_() for x in inputs]
            for name, f in functions.items():
                try:
                    f = torch.compile(f, dynamic=False)
                    with torch.no_grad():
                        forward = triton.testing.do_bench(lambda: f(*inputs), return_mode="median")
                    do = torch.randn_like(f(*inputs))
                    step = lambda: torch.autograd.grad(f(*inputs), inputs, do, allow_unused=True)
                    both = triton.testing.do_bench(step, return_mode="median")
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    step()
                    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
                    print(f"{T:6} {name:24} {forward:9.3f} {both:11.3f} {peak:8.0f}", flush=True)
                except Exception as error:  # no memory, or a backend that does not take these shapes: a row all the same
                    print(f"{T:6} {name:24} {type(error).__name__}", flush=True)


def compile_ahead(case, target, d, dtype=torch.bfloat16):
    """Compiles every kernel of a case for a GPU that need not be there (target 90: an H100). Yields of each its name,
    options and what it takes: registers of a thread, bytes of them spilled to memory, bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    inputs, functions = case(1, 2, 1000, d, dtype, "cpu")
    with noted(target) as launches:
        run(next(iter(functions.values())), inputs)
    for kernel, args, options in {kernel.__name__: (kernel, args, options) for kernel, args, options in launches}.values():
        how = {key: options[key] for key in ("num_warps", "num_stages", "enable_fp_fusion")}
        constants = {key: value for key, value in options.items() if key not in how}
        signature, aligned = dict.fromkeys(constants, "constexpr"), {}
        for i, (name, x) in enumerate(zip(kernel.arg_names, args)):
            if x is None:
                signature[name], constants[name] = "constexpr", None
            else:
                signature[name] = pointers[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"
            if isinstance(x, torch.Tensor) or isinstance(x, int) and x % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, aligned)
        log = io.StringIO()
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(log):
            triton.knobs.compilation.always_compile = True  # what comes from the cache brings no log,
            triton.knobs.nvidia.dump_ptxas_log = True  # and only the assembler's tells what was spilled
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=how)
        yield SimpleNamespace(name=kernel.__name__, options=options, shared=compiled.metadata.shared,
                              registers=int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
                              spilled=int(re.search(r"(\d+) bytes spill stores", log.getvalue())[1]))


def main():
    if triton.__version__ is None:
        sys.exit("kernels.py needs triton (Linux, x86-64): pip install triton")
    torch.manual_seed(0)
    if INTERPRET:
        check("cpu", [(1, 2, 100, 32), (1, 2, 130, 64)], (torch.float32, torch.float16))
    elif torch.cuda.is_available():
        check("cuda", [(2, 3, 1, 64), (2, 3, 1000, 48), (2, 3, 1000, 64), (2, 3, 1000, 128)],
              (torch.float32, torch.float16, torch.bfloat16))
        measure()
    else:
        print("no GPU: nothing is timed. In the interpreter:", flush=True)
        subprocess.run([sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
        print("compiled ahead of time, bfloat16:")
        for case in CASES:
            for d in (32, 64, 128):
                for target in (80, 90):
                    for x in compile_ahead(case, target, d):
                        tile = " x ".join(str(x.options[key]) for key in "MN" if key in x.options)
                        print(f"{x.name:18} d {d:3} sm_{target} tile {tile:8} {x.options['num_warps']} warps {x.registers:4} "
                              f"registers {x.spilled:4} B spilled {x.shared / 1024:4.0f} KB shared", flush=True)


if __name__ == "__main__":
    main()
