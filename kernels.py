"""
Optional fast paths: attention whose positional encoding lives inside Triton kernels. Tensors in, tensors out.
tests/test_kernels.py checks them, tests/bench.py times them.

PoPE attention ("Decoupling the What and Where With Polar Coordinate Positional Embedding", eq. 5), causal,
per head:

    a_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) theta_c + delta_c) / sqrt(d),   theta_c = base^(-c/d), c < d
    o_i  = softmax_j(a_ij) v_j over j <= i,   mu = softplus or the identity

computed as dot products of vectors 2d wide, q' with delta and k' without (the paper's eq. 6, 7 and 9 put it
on the keys):

    q'_i = mu(q_i) (cos(i theta - delta), sin(i theta - delta)),   k'_j = mu(k_j) (cos(j theta), sin(j theta))

v stays d wide, where flash attention would want 2d. q' and k' are kept for the backward pass in the place of
q and k.

CoPE attention (arXiv:2405.18719, section 4 and Listing 1) adds to each logit a bias that depends on how many
keys between the two tokens the query counts:

    g_ij = sigmoid(gate_q_i . gate_k_j / sqrt(d))      a gate per pair, gate_q = q and gate_k = k by default
    p_ij = min(g_ij + g_i,j+1 + .. + g_ii, npos - 1)   the position of key j as query i sees it
    b_ij = (1 - w) z_i[floor p_ij] + w z_i[ceil p_ij]  w = p_ij - floor p_ij, z_i = q_i e (npos values)

Positions are counts of 1/2048, to which gates are rounded: float sums taken in two directions would disagree
about floor p. p is off by 1.4e-4 sqrt(n) in the root mean square after n gates; gates below 1/4096 count as
zero, in training only, as decoding does not round. The forward and the backward passes may round a gate to
neighbours, as they compute its logit in other orders. Gradients pass the rounding as if it were not there;
the slope of b is 0 where p is clamped and where it is an integer. Relative errors of rounding against exact
gates in float64, at T = 1024, npos = 64, unit-normal q, k, mean gates of 0.5 .. 0.02 and z of white noise
(what bfloat16 costs the dense path): o 0.13 .. 0.24% (0.6), dz 0.24 .. 0.6% (1.2), gate gradients, which add
up slopes that jump at the integers, 6 .. 13% (9 .. 19). Left of the key where every row of a tile has counted
to npos - 1 the bias is z_i[npos - 1], and attention ordinary.

Both: any T; d = 32, 48, 64 or 128; float16, bfloat16 or float32, sums in float32; dropout by random numbers
that the backward pass draws again; no T x T tensor, no atomics: the same input gives the same bits. As many
queries as keys (decoding is left to PyTorch), no second derivatives. Offsets are int32: B H <= 65535, T times
a token's stride below 2^31, T < 2^20 for CoPE. CoPE's backward pass borrows 8 npos + T / 8 bytes a row, as
many heads at a time as fit in 256 MB.

Measured on a GPU: nothing, no kernel has run on one. Emulated: some of the GPU tests, README says which.
Modelled, from counts of the machine code for an H100 at B 16, H 12, T 1024, d 64, bfloat16, microseconds of
attention forward and backward: RoPE in Triton 382; PoPE 556; CoPE 995 with all keys gated, 735 with half.
"""
import math
import os
import sys
from types import SimpleNamespace
from typing import Optional

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the module imports all the same, so that why_not can say what is missing
    triton = SimpleNamespace(jit=lambda f=None, **_: f or (lambda f: f), __version__=None)
    tl = SimpleNamespace(constexpr=float, float32=None, float16=None, bfloat16=None)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton itself looks at it when it is imported
WIDTHS = (32, 48, 64, 128)  # head widths that are tested
TRITON = (3, 6)  # the oldest that was seen to compile all kernels
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# ---------------------------------------------------------------------------------------------------
# shared by the kernels of both methods. i are queries and j keys, M and N how many of them a tile has; D is
# the head width and P the power of two that holds it. Tensors may have any strides but the last; xs = (batch,
# head, token) are those of x. Logits and the logs of their sums are powers of two, as exp2 is what the
# hardware has.


def launch(kernel, grid, *args, **options):
    options["enable_fp_fusion"] = True  # one instruction for x * scale - top; Triton versions differ about it
    with torch.cuda.device_of(args[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[grid](*args, **options)


def strided(*xs):
    """Each tensor, its last stride 1, followed by the other three; None by None."""
    for x in xs:
        if x is not None and x.stride(-1) != 1:
            x = x.contiguous()
        yield x
        yield x if x is None else x.stride()[:3]


def empty_heads(x):
    """An empty (B, H, T, d) with the memory of a (B, T, H, d), whose heads merge into (B, T, C) for free."""
    B, H, T, d = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


def refuse_large(*xs):
    """ValueError for what the kernels' grid, or their int32 offsets, cannot reach."""
    B, H, T = xs[0].shape[:3]
    if B * H > 65535:
        raise ValueError(f"{B} x {H} heads are more than the kernels' 65535; make the batch smaller")
    if any(x is not None and T * x.stride(2) >= 2**31 for x in xs):
        raise ValueError(f"{T} tokens are more than the kernels can address; shorten the sequence")


def draw_seed(x, dropout):
    """Where the random numbers of one call start: from PyTorch's generator, so that torch.manual_seed repeats
    them."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
    return torch.randint(2**62, (1,), device=x.device) if dropout else None


@triton.jit
def head_of(x, xs, b, h):
    return x + b * xs[0] + h * xs[1]


@triton.jit
def load_rows(x, rows, stride, T, D: tl.constexpr, P: tl.constexpr, EDGE: tl.constexpr):
    """x[rows] of a (T, D) matrix as a tile P wide, zero outside the matrix. EDGE: there may be rows past
    T."""
    cols = tl.arange(0, P)
    at = x + rows[:, None] * stride + cols[None, :]
    if EDGE:
        tile = tl.load(at, mask=(rows < T)[:, None] & (cols < D)[None, :], other=0.0)
    elif D < P:
        tile = tl.load(at, mask=(cols < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(x, rows, stride, tile, T, D: tl.constexpr, P: tl.constexpr):
    cols = tl.arange(0, P)
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(x + rows[:, None] * stride + cols[None, :], tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def matmul(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # no tf32 where the inputs are float32


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) for x in powers of two, log2(e) times the usual. Triton's division is many instructions,
    this one."""
    r = tl.rsqrt(1.0 + tl.exp2(-x))
    return r * r


@triton.jit
def drop(x, seed, bh, i, j, DROPOUT: tl.constexpr):
    """Dropout of x, a tile of pairs of queries i and keys j. Philox makes a random number of the seed and the
    place alone, so that the passes agree, whatever their tiles. 7 of its rounds pass BigCrush."""
    if DROPOUT > 0:
        bits, _, _, _ = tl.philox(tl.load(seed), j, i, bh.to(tl.int32), 0, 7)
        uniform = (bits >> 9 | 0x3F800000).to(tl.float32, bitcast=True)  # a float in [1, 2)
        x = tl.where(uniform >= 1.0 + DROPOUT, x, 0.0) * (1 / (1 - DROPOUT))
    return x


@triton.jit
def attend(a, scale, v, top, total, acc, seed, bh, i, j, DROPOUT: tl.constexpr):
    """One step of the online softmax over logits a * scale: top are the rows' largest so far, total the sums
    of their weights, acc the weighted values, both relative to 2^top. Dropout comes after the softmax, so
    total knows nothing of it."""
    higher = tl.maximum(top, tl.max(a, 1) * scale)
    p, fade = tl.exp2(a * scale - higher[:, None]), tl.exp2(top - higher)
    total = total * fade + tl.sum(p, 1)
    p = drop(p, seed, bh, i[:, None], j[None, :], DROPOUT)
    return higher, total, matmul(p.to(v.dtype), v, acc * fade[:, None])


# ---------------------------------------------------------------------------------------------------
# PoPE. A vector q' or k' is 2d wide, cosine and sine of each dimension side by side


@triton.jit
def magnitude(x, SOFTPLUS: tl.constexpr):
    """mu(x). softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|), to a few ulp at both ends: the last term
    restores what 1 + e has rounded away, which for x < -17 is all there is."""
    if SOFTPLUS:
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        x = tl.maximum(x, 0.0) + (tl.log(u) + (e - (u - 1.0)) / u)
    return x


@triton.jit
def pairs_of(x, M: tl.constexpr, P: tl.constexpr):
    """A tile (M, 2P) of pairs -> its first and its second components, (M, P) each."""
    return tl.split(x.to(tl.float32).reshape(M, P, 2))


@triton.jit
def phases(table, delta, rows, h, T, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Cosine and sine of rows * theta - delta by the addition theorem; table (T, 2D) and delta (H, 2D) hold
    the pairs of each. Without delta those of rows * theta."""
    cosine, sine = pairs_of(load_rows(table, rows, 2 * D, T, 2 * D, 2 * P, True), M, P)
    if delta is not None:
        cols = tl.arange(0, 2 * P)
        turn = tl.load(delta + h * 2 * D + cols, mask=cols < 2 * D, other=0.0)[None, :]
        x, y = pairs_of(turn, 1, P)
        cosine, sine = cosine * x + sine * y, sine * x - cosine * y
    return cosine, sine


@triton.jit
def pope_rotate(x, xs, x2, table, delta, T, H, SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                M: tl.constexpr):
    """x (B, H, T, D) -> x2 (B, H, T, 2D), the pairs mu(x) (cos, sin): q' with delta, k' without."""
    rows, bh = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    mu = magnitude(load_rows(head_of(x, xs, b, h), rows, xs[2], T, D, P, True).to(tl.float32), SOFTPLUS)
    cosine, sine = phases(table, delta, rows, h, T, D, P, M)
    store_rows(x2 + bh * T * 2 * D, rows, 2 * D, tl.interleave(mu * cosine, mu * sine), T, 2 * D, 2 * P)


@triton.jit
def pope_gradient(g, x2, table, delta, rows, h, T, SOFTPLUS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                  M: tl.constexpr):
    """The gradients of x[rows] and of its phases, from the gradient g of its pairs x2 = mu(x) (cos, sin)."""
    g_x, g_y = pairs_of(g, M, P)
    x, y = pairs_of(load_rows(x2, rows, 2 * D, T, 2 * D, 2 * P, True), M, P)
    if SOFTPLUS:  # no trigonometry: the slope of mu is 1 - exp(-mu), and the pair over mu the direction
        mu = tl.sqrt(tl.maximum(x * x + y * y, 1e-30))
        dx = (g_x * x + g_y * y) * tl.where(mu < 1e-3, 1 - mu / 2, (1 - tl.exp2(-mu * LOG2E)) / mu)
    else:  # mu = x may be 0, where its pair tells no direction
        cosine, sine = phases(table, delta, rows, h, T, D, P, M)
        dx = g_x * cosine + g_y * sine
    return dx, g_y * x - g_x * y


@triton.jit
def pope_forward(q2, k2, v, vs, o, lse, seed, scale, T, H, DROPOUT: tl.constexpr, D: tl.constexpr,
                 P: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """o (B, T, H, D) and lse (B, H, T) of one tile of queries. scale = log2(e) / sqrt(d)."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows first, for an even end
    i, bh = i0 + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    k2 += bh * T * 2 * D
    v = head_of(v, vs, b, h)
    q = load_rows(q2 + bh * T * 2 * D, i, 2 * D, T, 2 * D, 2 * P, True)
    top, total = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    for diagonal in tl.static_range(2):  # first the keys that all queries of the tile see, then the masked
        for j0 in range(i0 if diagonal else 0, tl.minimum(i0 + M, T) if diagonal else i0, N):
            j = j0 + tl.arange(0, N)
            a = matmul(q, tl.trans(load_rows(k2, j, 2 * D, T, 2 * D, 2 * P, diagonal)))
            if diagonal:
                a = tl.where(i[:, None] >= j[None, :], a, float("-inf"))
            v_tile = load_rows(v, j, vs[2], T, D, P, diagonal)
            top, total, acc = attend(a, scale, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
    store_rows(o + (b * T * H + h) * D, i, H * D, acc / total[:, None], T, D, P)
    tl.store(lse + bh * T + i, top + tl.log2(total), mask=i < T)


@triton.jit
def pope_backward_q(q2, k2, v, vs, o, os, do, gs, dq, ddelta, lse, mean, table, delta, seed, scale, T, H,
                    SOFTPLUS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr):
    """One tile of queries: dq, its part of ddelta (B, H, tiles, D), and for the keys' kernel mean (B, H, T),
    rowsum(o do), the average of dp over a row."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i0 = tile * M
    i, bh = i0 + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    q2 += bh * T * 2 * D
    k2 += bh * T * 2 * D
    v = head_of(v, vs, b, h)
    g = load_rows(head_of(do, gs, b, h), i, gs[2], T, D, P, True)
    o_tile = load_rows(head_of(o, os, b, h), i, os[2], T, D, P, True).to(tl.float32)
    row_mean = tl.sum(o_tile * g.to(tl.float32), 1)
    tl.store(mean + bh * T + i, row_mean, mask=i < T)
    row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))  # no weights past the last query
    q2_tile = load_rows(q2, i, 2 * D, T, 2 * D, 2 * P, True)
    acc = tl.zeros((M, 2 * P), tl.float32)
    for diagonal in tl.static_range(2):
        for j0 in range(i0 if diagonal else 0, tl.minimum(i0 + M, T) if diagonal else i0, N):
            j = j0 + tl.arange(0, N)
            k = load_rows(k2, j, 2 * D, T, 2 * D, 2 * P, diagonal)
            p = tl.exp2(matmul(q2_tile, tl.trans(k)) * scale - row_lse[:, None])
            if diagonal:
                p = tl.where(i[:, None] >= j[None, :], p, 0.0)
            dp = matmul(g, tl.trans(load_rows(v, j, vs[2], T, D, P, diagonal)))
            dp = drop(dp, seed, bh, i[:, None], j[None, :], DROPOUT)
            acc = matmul((p * (dp - row_mean[:, None])).to(k.dtype), k, acc)
    acc *= scale * LN2  # 1 / sqrt(d)
    dx, dphase = pope_gradient(acc, q2, table, delta, i, h, T, SOFTPLUS, D, P, M)
    store_rows(dq + (b * T * H + h) * D, i, H * D, dx, T, D, P)
    cols = tl.arange(0, P)  # rows past T were read as zero and add nothing
    tl.store(ddelta + (bh * tl.num_programs(0) + tile) * D + cols, -tl.sum(dphase, 0), mask=cols < D)


@triton.jit
def pope_backward_kv(q2, k2, v, vs, do, gs, dk, dv, lse, mean, table, seed, scale, T, H,
                     SOFTPLUS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr):
    """dk and dv of one tile of keys, from all queries that see it. Scores are held transposed, (keys,
    queries)."""
    j0 = tl.program_id(0) * N
    j, bh = j0 + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    q2 += bh * T * 2 * D
    k2 += bh * T * 2 * D
    do = head_of(do, gs, b, h)
    k2_tile = load_rows(k2, j, 2 * D, T, 2 * D, 2 * P, True)
    v_tile = load_rows(head_of(v, vs, b, h), j, vs[2], T, D, P, True)
    acc_k, acc_v = tl.zeros((N, 2 * P), tl.float32), tl.zeros((N, P), tl.float32)
    below = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from this query on, all see the whole tile
    for diagonal in tl.static_range(2):
        for i0 in range(j0 // M * M if diagonal else below, below if diagonal else T, M):
            i = i0 + tl.arange(0, M)
            q = load_rows(q2, i, 2 * D, T, 2 * D, 2 * P, True)
            row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
            p = tl.exp2(matmul(k2_tile, tl.trans(q)) * scale - row_lse[None, :])
            if diagonal:
                p = tl.where(i[None, :] >= j[:, None], p, 0.0)
            g = load_rows(do, i, gs[2], T, D, P, True)
            dp = matmul(v_tile, tl.trans(g))
            row_mean = tl.load(mean + bh * T + i, mask=i < T, other=0.0)
            dp = drop(dp, seed, bh, i[None, :], j[:, None], DROPOUT)
            acc_v = matmul(drop(p, seed, bh, i[None, :], j[:, None], DROPOUT).to(g.dtype), g, acc_v)
            acc_k = matmul((p * (dp - row_mean[None, :])).to(q.dtype), q, acc_k)
    dx, _ = pope_gradient(acc_k * (scale * LN2), k2, table, None, j, h, T, SOFTPLUS, D, P, N)
    store_rows(dk + (b * T * H + h) * D, j, H * D, dx, T, D, P)
    store_rows(dv + (b * T * H + h) * D, j, H * D, acc_v, T, D, P)


# (M, N, warps, stages) for 16-bit inputs, for P < 128 and P = 128, on any chip. Chosen by counts of what the
# compiled code does: 16 rows a warp, or wgmma computes them twice; two programs on a multiprocessor, to hide
# each other's loads. In the queries' kernels N divides M, as the masked part starts at a multiple of M
POPE_TILES = {
    "pope_forward": ((128, 64, 4, 2), (128, 32, 8, 2)),
    "pope_backward_q": ((64, 64, 4, 2), (64, 32, 4, 2)),
    "pope_backward_kv": ((64, 64, 4, 2), (32, 64, 4, 2)),
}


def pope_options(x, kernel):
    P = triton.next_power_of_2(x.size(-1))
    M, N, warps, stages = POPE_TILES[kernel.__name__][P > 64]
    if x.dtype == torch.float32:  # there to be checked against, without tensor cores and without haste
        M, N, warps, stages = (32, 32, 8, 1) if P <= 64 else (16, 16, 8, 1)
    return dict(D=x.size(-1), P=P, M=M, N=N, num_warps=warps, num_stages=stages)


def pairs(x):
    """(cos x, sin x), the pairs of a table of angles"""
    return torch.stack((x.cos(), x.sin()), -1).float()


def rotate(x, table, delta, softplus):
    """x (B, H, T, d) -> (B, H, T, 2d)"""
    B, H, T, d = x.shape
    x2, P = x.new_empty(B, H, T, 2 * d), triton.next_power_of_2(d)
    M = 2048 // P
    launch(pope_rotate, (triton.cdiv(T, M), B * H), *strided(x), x2, table, delta, T, H, SOFTPLUS=softplus,
           D=d, P=P, M=M, num_warps=4, num_stages=1)
    return x2


# custom_op rather than triton_op: torch.compile keeps either in one graph, and this one runs the
# interpreter's kernels on CPU tensors too. What a triton_op would add, sight of the kernels, the compiler has
# no use for here.
@torch.library.custom_op("pope::forward", mutates_args=())
def pope_forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor,
                    table: torch.Tensor, seed: Optional[torch.Tensor], softplus: bool,
                    dropout: float) -> list[torch.Tensor]:
    B, H, T, d = q.shape
    o, lse, options = empty_heads(q), q.new_empty(B, H, T, dtype=torch.float32), pope_options(q, pope_forward)
    q2, k2 = rotate(q, table, pairs(delta), softplus), rotate(k, table, None, softplus)
    launch(pope_forward, (triton.cdiv(T, options["M"]), B * H), q2, k2, *strided(v), o, lse, seed,
           d**-0.5 / math.log(2), T, H, DROPOUT=dropout, **options)
    return [o, lse, q2, k2]


@torch.library.custom_op("pope::backward", mutates_args=())
def pope_backward_op(do: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, table: torch.Tensor,
                     seed: Optional[torch.Tensor], o: torch.Tensor, lse: torch.Tensor, q2: torch.Tensor,
                     k2: torch.Tensor, softplus: bool, dropout: float) -> list[torch.Tensor]:
    B, H, T, d = v.shape
    dq, dk, dv = (empty_heads(v) for _ in range(3))
    mean, scale = torch.empty_like(lse), d**-0.5 / math.log(2)
    options = pope_options(v, pope_backward_q)
    tiles = triton.cdiv(T, options["M"])
    ddelta = lse.new_empty(B, H, tiles, d)
    launch(pope_backward_q, (tiles, B * H), q2, k2, *strided(v, o, do), dq, ddelta, lse, mean, table,
           pairs(delta), seed, scale, T, H, SOFTPLUS=softplus, DROPOUT=dropout, **options)
    options = pope_options(v, pope_backward_kv)
    launch(pope_backward_kv, (triton.cdiv(T, options["N"]), B * H), q2, k2, *strided(v, do), dk, dv, lse,
           mean, table, seed, scale, T, H, SOFTPLUS=softplus, DROPOUT=dropout, **options)
    return [dq, dk, dv, ddelta.sum((0, 2))]


@pope_forward_op.register_fake
def _(q, k, v, delta, table, seed, softplus, dropout):
    q2 = q.new_empty(*q.shape[:3], 2 * q.size(3))
    return [empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32), q2, torch.empty_like(q2)]


@pope_backward_op.register_fake
def _(do, v, delta, table, seed, o, lse, q2, k2, softplus, dropout):
    return [empty_heads(v), empty_heads(v), empty_heads(v), torch.empty_like(delta)]


def pope_save(ctx, inputs, output):
    _, _, *tensors, ctx.softplus, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *output)


def pope_backward_of(ctx, grads):
    return *pope_backward_op(grads[0], *ctx.saved_tensors, ctx.softplus, ctx.dropout), *[None] * 4


pope_forward_op.register_autograd(pope_backward_of, setup_context=pope_save)


def pope_attention(q, k, v, delta, base=10000.0, softplus=True, dropout=0.0):
    """Causal PoPE attention, see the top of this file. q, k, v (B, H, T, d) as projected, of one dtype; delta
    (H, d) or None. Returns (B, H, T, d); q, k, v and delta get gradients. Where the first token stands makes
    no difference. dropout: the share of attention weights that are set to 0, drawn anew by every call."""
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"pope_attention wants q, k, v of one shape and dtype, got {shapes}")
    refuse_large(q, k, v)
    T, d = q.shape[2:]
    theta = base ** (-torch.arange(d, device=q.device, dtype=torch.float64) / d)
    # in float64, as a float32 angle is off by 1e-3 at position 16384; the table of its pairs is float32
    angle = torch.arange(T, device=q.device, dtype=torch.float64)[:, None] * theta  # (T, d)
    delta = torch.zeros(q.size(1), d, device=q.device) if delta is None else delta.float()
    return pope_forward_op(q, k, v, delta, pairs(angle), draw_seed(q, dropout), softplus, dropout)[0]


# ---------------------------------------------------------------------------------------------------
# CoPE. A position is an int32, in units of 1 / 2048

BITS = tl.constexpr(11)  # of a position's fraction: as many as leave every gate exact in fp16
UNIT = tl.constexpr(2048)  # 2^BITS, a whole position
MAGIC = tl.constexpr(2.0**23)  # x + 2^23 is rounded to a whole number, then the low bits of the float:
MAGIC_BITS = tl.constexpr(0x4B000000)  # cheaper than floor and a conversion
KEYS = 64  # keys of a tile in forward and backward_kv, the grain of exits, right and left
BORROWED = 2**28  # bytes that the backward pass may borrow, or one head's, for what its kernels share
ASM = not INTERPRET  # the interpreter knows no assembly


@triton.jit
def gather(at, ASM: tl.constexpr):
    """32-bit words from anywhere. tl.load would carry the addresses through shared memory first, and back its
    result."""
    if ASM:
        words = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)],
                                          dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = tl.load(at)
    return words


@triton.jit
def scatter(at, a, b, here, ASM: tl.constexpr):
    """Stores the float32 a and b side by side, where `here` says so."""
    if ASM:
        code: tl.constexpr = ("{ .reg .pred p; setp.ne.b32 p, $4, 0; "
                              "@p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }")
        tl.inline_asm_elementwise(code, "=r,l,f,f,r", [at.to(tl.int64), a, b, here.to(tl.int32)],
                                  dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, a, mask=here)
        tl.store(at + 1, b, mask=here)


@triton.jit
def cope_pairs(z, zs, both, T, H, NPOS: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """z (B, H, T, NPOS) -> both, of the same shape: (z[c], z[c + 1]) in one word, so that a look-up is one
    load. The last column's neighbour is never used: a clamped position is an integer."""
    i, bh = (tl.program_id(0) * M + tl.arange(0, M))[:, None], tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)[None, :]
    at, here = head_of(z, zs, bh // H, bh % H) + i * zs[2] + c, (i < T) & (c < NPOS)
    low, high = tl.load(at, mask=here, other=0.0), tl.load(at + 1, mask=here & (c < NPOS - 1), other=0.0)
    if both.dtype.element_ty == tl.int64:
        low, high = low.to(tl.int32, bitcast=True).to(tl.int64), high.to(tl.int32, bitcast=True).to(tl.int64)
        word = (high << 32) | (low & 0xFFFFFFFF)
    else:
        low, high = low.to(tl.int16, bitcast=True).to(tl.int32), high.to(tl.int16, bitcast=True).to(tl.int32)
        word = (high << 16) | (low & 0xFFFF)
    tl.store(both + bh * T * NPOS + i * NPOS + c, word, mask=here)


@triton.jit
def unpack(word, ZTYPE: tl.constexpr):
    """(z[c], z[c + 1]) as float32"""
    if ZTYPE == tl.float32:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    elif ZTYPE == tl.bfloat16:  # the upper half of a float32
        low, high = word << 16, word & -65536
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    TYPE: tl.constexpr = ZTYPE if ZTYPE == tl.float16 else tl.float32
    low, high = low.to(TYPE, bitcast=True), high.to(TYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def look_up(z, row, p, NPOS: tl.constexpr, ZTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bias at the clamped positions p, its slope and the weight w of the right neighbour."""
    low, high = unpack(gather(z + (row * NPOS + (p >> BITS)), ASM and ZTYPE != tl.float32), ZTYPE)
    w = ((p << 12) & 0x7FF000 | 0x3F800000).to(tl.float32, bitcast=True) - 1.0  # 11 bits as a float in [1, 2)
    return low + w * (high - low), tl.where(w > 0, high - low, 0.0), w


@triton.jit
def last_bias(z, row, NPOS: tl.constexpr, ZTYPE: tl.constexpr):
    return unpack(tl.load(z + row * NPOS + NPOS - 1), ZTYPE)[0]


@triton.jit
def gates(logit, seen, MASK: tl.constexpr):
    """The gates, and their units as whole floats; MASK: there may be keys in the future, which count for
    nothing."""
    g = sigmoid(logit)
    units = (g * UNIT + MAGIC) - MAGIC
    if MASK:
        units = tl.where(seen, units, 0.0)
    return g, units


@triton.jit
def clamp(p, NPOS: tl.constexpr):
    """Below 0 it may be where the forward pass has rounded a gate to the neighbour of what this one does."""
    return tl.maximum(tl.minimum(p, (NPOS - 1) * UNIT), 0)


@triton.jit
def whole(x):
    return (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def triangle(n: tl.constexpr, DTYPE: tl.constexpr):
    """(n, n), 1 on and under the diagonal. x @ it sums x over the columns from each one on, x @ its transpose
    up to each one: exact for the units in fp16, and cheaper than a scan."""
    return (tl.arange(0, n)[:, None] >= tl.arange(0, n)[None, :]).to(DTYPE)


@triton.jit(do_not_specialize=["T"])
def cope_forward(q, qs, k, ks, v, vs, gq, gqs, gk, gks, z, o, rest, lse, count, exits, seed, scale, T, H,
                 DROPOUT: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NPOS: tl.constexpr,
                 ZTYPE: tl.constexpr, ASM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                 CHUNK: tl.constexpr):
    """A tile of queries walks from the diagonal to the left. Stores o, what 16 bits leave of it (rest), the
    log-sum-exp, the units counted where the gates were left, and the key left of which they were (exits, one
    per tile)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, for an even end
    i, bh = tile * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    k, v, z = head_of(k, ks, b, h), head_of(v, vs, b, h), z + bh * T * NPOS
    q_tile = load_rows(head_of(q, qs, b, h), i, qs[2], T, D, P, True)
    if gq is not None:
        gq_tile, gk = load_rows(head_of(gq, gqs, b, h), i, gqs[2], T, D, P, True), head_of(gk, gks, b, h)
    counted, row = tl.zeros((M,), tl.int32), tl.minimum(i, T - 1)
    top, total = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    todo = tl.cdiv(tl.minimum(tile * M + M, T), N)  # key tiles that are left: 0 .. todo - 1
    for diagonal in tl.static_range(1, -1, -1):  # first the masked keys, then those that all queries see
        leave = tile * M // N if diagonal else 0
        while (todo > leave) & (tl.min(counted, 0) < (NPOS - 1) * UNIT):  # CHUNK tiles between two looks
            stop = leave if diagonal else tl.maximum(todo - CHUNK, 0)
            for back in range(0, todo - stop):
                j = (todo - 1 - back) * N + tl.arange(0, N)
                s = matmul(q_tile, tl.trans(load_rows(k, j, ks[2], T, D, P, diagonal))) * scale
                if gq is None:
                    gate_logit = s
                else:
                    gk_tile = load_rows(gk, j, gks[2], T, D, P, diagonal)
                    gate_logit = matmul(gq_tile, tl.trans(gk_tile)) * scale
                seen = i[:, None] >= j[None, :]
                g, units = gates(gate_logit, seen, diagonal)
                p = counted[:, None] + whole(matmul(units.to(tl.float16), triangle(N, tl.float16)))
                bias, slope, w = look_up(z, row[:, None], clamp(p, NPOS), NPOS, ZTYPE, ASM)
                counted += tl.sum(units, 1).to(tl.int32)
                s += bias * LOG2E
                if diagonal:
                    s = tl.where(seen, s, float("-inf"))
                v_tile = load_rows(v, j, vs[2], T, D, P, diagonal)
                top, total, acc = attend(s, 1.0, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
            todo = stop
    last = last_bias(z, row, NPOS, ZTYPE) * LOG2E
    top -= last
    for n in range(0, todo):  # every row is saturated
        j = n * N + tl.arange(0, N)
        a = matmul(q_tile, tl.trans(load_rows(k, j, ks[2], T, D, P, False)))
        v_tile = load_rows(v, j, vs[2], T, D, P, False)
        top, total, acc = attend(a, scale, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
    acc /= total[:, None]
    at = (b * T * H + h) * D
    store_rows(o + at, i, H * D, acc, T, D, P)
    if rest is not None:
        store_rows(rest + at, i, H * D, acc - acc.to(o.dtype.element_ty).to(tl.float32), T, D, P)
    tl.store(lse + bh * T + i, top + last + tl.log2(total), mask=i < T)
    tl.store(count + bh * T + i, counted, mask=i < T)
    tl.store(exits + bh * tl.num_programs(0) + tile, todo * N)


@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_q(q, qs, k, ks, v, vs, gq, gqs, gk, gks, o, os, rest, do, dos, z, lse, count, exits, dq,
                    dgq, dz, ends, mean, right, left, seed, scale, T, H, first, ROWS: tl.constexpr,
                    KEYS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                    NPOS: tl.constexpr, ZTYPE: tl.constexpr, ASM: tl.constexpr, C: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr):
    """dq, d gate_q and dz; a tile of queries walks from left to right, so that a gate's gradient, the sum of
    dp over all keys to its left, is a running sum too. Writes for the keys' kernel mean (B H, T) = do . o,
    and per KEYS keys and row the units counted to their right and the sum of dp to their left.

    dz without a scattered sum: p falls along a row, in steps of one at most, so the keys with floor p = c are
    a run. Its last key stores the running sums of ds (1 - w) and of ds w in ends[c]; a run's own sum is the
    difference from the run before, column c + 1. The sums are carried in float32 from tile to tile, not as
    their rounded terms: where a row's positions stay in one column its sum nearly vanishes, as the ds of a
    row add up to 0."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, slot = tile * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    bh = first + slot
    b, h = bh // H, bh % H
    k, v, z, ends = head_of(k, ks, b, h), head_of(v, vs, b, h), z + bh * T * NPOS, ends + slot * T * NPOS * 2
    tables = slot * tl.cdiv(T, KEYS) * T
    row, real = tl.minimum(i, T - 1), i < T
    at = (b * T * H + h) * D
    q_tile = load_rows(head_of(q, qs, b, h), i, qs[2], T, D, P, True)
    g = load_rows(head_of(do, dos, b, h), i, dos[2], T, D, P, True)
    o_tile = load_rows(head_of(o, os, b, h), i, os[2], T, D, P, True).to(tl.float32)
    if rest is not None:
        o_tile += load_rows(rest + at, i, H * D, T, D, P, True).to(tl.float32)
    row_mean = tl.sum(o_tile * g.to(tl.float32), 1)
    tl.store(mean + bh * T + i, row_mean, mask=real)
    row_lse = tl.load(lse + bh * T + i, mask=real, other=float("inf"))  # no weights past the last query
    units_right = tl.load(count + bh * T + i, mask=real, other=0)
    top_column = tl.minimum(units_right, (NPOS - 1) * UNIT) >> BITS
    if gq is not None:
        gq_tile, gk = load_rows(head_of(gq, gqs, b, h), i, gqs[2], T, D, P, True), head_of(gk, gks, b, h)
        acc_g = tl.zeros((M, P), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    dp_left, low, high = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)

    start = tl.load(exits + bh * tl.cdiv(T, ROWS) + tile * M // ROWS) // N
    last = last_bias(z, row, NPOS, ZTYPE) * LOG2E - row_lse
    for n in range(0, start):
        j = n * N + tl.arange(0, N)
        k_tile = load_rows(k, j, ks[2], T, D, P, False)
        weight = tl.exp2(matmul(q_tile, tl.trans(k_tile)) * scale + last[:, None])
        dw = matmul(g, tl.trans(load_rows(v, j, vs[2], T, D, P, False)))
        dw = drop(dw, seed, bh, i[:, None], j[None, :], DROPOUT)
        ds = weight * (dw - row_mean[:, None])
        low += tl.sum(ds, 1)
        acc = matmul(ds.to(k_tile.dtype), k_tile, acc)
    for diagonal in tl.static_range(2):
        end = tl.cdiv(tl.minimum(tile * M + M, T), N)
        for n in range(tile * M // N if diagonal else start, end if diagonal else tile * M // N):
            j = n * N + tl.arange(0, N)
            k_tile = load_rows(k, j, ks[2], T, D, P, diagonal)
            s = matmul(q_tile, tl.trans(k_tile)) * scale
            if gq is None:
                gate_logit = s
            else:
                gk_tile = load_rows(gk, j, gks[2], T, D, P, diagonal)
                gate_logit = matmul(gq_tile, tl.trans(gk_tile)) * scale
            seen = i[:, None] >= j[None, :]
            gate, units = gates(gate_logit, seen, diagonal)
            table = tables + n // (KEYS // N) * T + i
            tl.store(left + table, dp_left, mask=real & (n % (KEYS // N) == 0))
            units_right -= tl.sum(units, 1).to(tl.int32)
            tl.store(right + table, units_right, mask=real)  # the last of the KEYS counts
            p = units_right[:, None] + whole(matmul(units.to(tl.float16), triangle(N, tl.float16)))
            column, next_column = clamp(p, NPOS) >> BITS, clamp(p - whole(units), NPOS) >> BITS
            bias, slope, w = look_up(z, row[:, None], clamp(p, NPOS), NPOS, ZTYPE, ASM)
            dw = matmul(g, tl.trans(load_rows(v, j, vs[2], T, D, P, diagonal)))
            dw = drop(dw, seed, bh, i[:, None], j[None, :], DROPOUT)
            ds = tl.exp2(s + bias * LOG2E - row_lse[:, None]) * (dw - row_mean[:, None])
            if diagonal:
                ds = tl.where(seen, ds, 0.0)
            upto = tl.trans(triangle(N, k_tile.dtype))
            part = ds * w
            high_sum = high[:, None] + matmul(part.to(k_tile.dtype), upto)
            high += tl.sum(part, 1)
            part = ds - part
            low_sum = low[:, None] + matmul(part.to(k_tile.dtype), upto)
            low += tl.sum(part, 1)
            scatter(ends + (row[:, None] * NPOS + column) * 2, low_sum, high_sum,
                    (column != next_column) & real[:, None], ASM)
            dp = ds * slope
            dg = dp_left[:, None] + matmul(dp.to(k_tile.dtype), upto)
            dp_left += tl.sum(dp, 1)
            dg *= gate - gate * gate
            if diagonal:
                dg = tl.where(seen, dg, 0.0)
            if gq is None:
                ds += dg
            else:
                acc_g = matmul(dg.to(k_tile.dtype), gk_tile, acc_g)
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)

    scatter(ends + row * NPOS * 2, low, high, real, False)  # column 0 is where every row ends
    store_rows(dq + at, i, H * D, acc * (scale * LN2), T, D, P)  # 1 / sqrt(d)
    if gq is not None:
        store_rows(dgq + at, i, H * D, acc_g * (scale * LN2), T, D, P)
    tl.debug_barrier()  # the rows' ends were stored by other threads
    for c0 in range(0, NPOS, C):
        c, here = c0 + tl.arange(0, C)[None, :], real[:, None]
        stored, above = here & (c <= top_column[:, None]), here & (c < top_column[:, None])
        left_stored = here & (c > 0) & (c <= top_column[:, None] + 1)
        low_c = ends + (row[:, None] * NPOS + c) * 2
        own = tl.load(low_c, mask=stored, other=0.0) - tl.load(low_c + 2, mask=above, other=0.0)
        left_high = tl.load(low_c - 1, mask=left_stored, other=0.0)
        high_c = tl.load(low_c + 1, mask=stored & (c > 0), other=0.0)
        tl.store(dz + (bh * T + row[:, None]) * NPOS + c, own + left_high - high_c, mask=here & (c < NPOS))


@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_kv(q, qs, k, ks, v, vs, gq, gqs, gk, gks, do, dos, z, lse, exits, dk, dv, dgk, mean, right,
                     left, seed, scale, T, H, first, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
                     D: tl.constexpr, P: tl.constexpr, NPOS: tl.constexpr, ZTYPE: tl.constexpr,
                     ASM: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dk, dv and d gate_k; a tile of keys visits all queries that see it: those under the mask, then the
    forward tiles that still counted when they met these keys, then those that were saturated."""
    j, slot = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bh = first + slot
    b, h = bh // H, bh % H
    q, do, z = head_of(q, qs, b, h), head_of(do, dos, b, h), z + bh * T * NPOS
    lse += bh * T
    mean += bh * T
    tables = (slot * tl.num_programs(0) + tl.program_id(0)) * T
    right += tables
    left += tables
    exits += bh * tl.cdiv(T, ROWS)
    j0 = tl.program_id(0) * N
    k_tile = load_rows(head_of(k, ks, b, h), j, ks[2], T, D, P, True)
    v_tile = load_rows(head_of(v, vs, b, h), j, vs[2], T, D, P, True)
    acc_k, acc_v = tl.zeros((N, P), tl.float32), tl.zeros((N, P), tl.float32)
    if gq is not None:
        gq, gk_tile = head_of(gq, gqs, b, h), load_rows(head_of(gk, gks, b, h), j, gks[2], T, D, P, True)
        acc_g = tl.zeros((N, P), tl.float32)
    below = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from this query on, all see the whole tile

    for diagonal in tl.static_range(1, -1, -1):
        for tile in range(0 if diagonal else below // ROWS, 1 if diagonal else tl.cdiv(T, ROWS)):
            if diagonal:
                i_start, i_end = j0 // M * M, below
            else:
                i_start = tl.maximum(tile * ROWS, below)
                i_end = tl.where(tl.load(exits + tile) <= j0, tl.minimum(tile * ROWS + ROWS, T), i_start)
            for i0 in range(i_start, i_end, M):
                i = i0 + tl.arange(0, M)
                row, real = tl.minimum(i, T - 1), i < T
                q_tile, g = load_rows(q, i, qs[2], T, D, P, True), load_rows(do, i, dos[2], T, D, P, True)
                row_lse = tl.load(lse + i, mask=real, other=float("inf"))
                row_mean = tl.load(mean + i, mask=real, other=0.0)
                s = matmul(k_tile, tl.trans(q_tile)) * scale
                if gq is None:
                    gate_logit = s
                else:
                    gq_tile = load_rows(gq, i, gqs[2], T, D, P, True)
                    gate_logit = matmul(gk_tile, tl.trans(gq_tile)) * scale
                seen = i[None, :] >= j[:, None]
                gate, units = gates(gate_logit, seen, diagonal)
                counted = whole(matmul(tl.trans(triangle(N, tl.float16)), units.to(tl.float16)))
                p = tl.load(right + i, mask=real, other=0)[None, :] + counted
                bias, slope, w = look_up(z, row[None, :], clamp(p, NPOS), NPOS, ZTYPE, ASM)
                weight = tl.exp2(s + bias * LOG2E - row_lse[None, :])
                if diagonal:
                    weight = tl.where(seen, weight, 0.0)
                dw = matmul(v_tile, tl.trans(g))
                dw = drop(dw, seed, bh, i[None, :], j[:, None], DROPOUT)
                kept = drop(weight, seed, bh, i[None, :], j[:, None], DROPOUT)
                acc_v = matmul(kept.to(g.dtype), g, acc_v)
                ds = weight * (dw - row_mean[None, :])
                dg = matmul(triangle(N, g.dtype), (ds * slope).to(g.dtype))
                dg += tl.load(left + i, mask=real, other=0.0)[None, :]
                dg *= gate - gate * gate
                if diagonal:
                    dg = tl.where(seen, dg, 0.0)
                if gq is None:
                    ds += dg
                else:
                    acc_g = matmul(dg.to(g.dtype), gq_tile, acc_g)
                acc_k = matmul(ds.to(g.dtype), q_tile, acc_k)
    for tile in range(below // ROWS, tl.cdiv(T, ROWS)):
        i_start = tl.maximum(tile * ROWS, below)
        i_end = tl.where(tl.load(exits + tile) <= j0, i_start, tl.minimum(tile * ROWS + ROWS, T))
        for i0 in range(i_start, i_end, M):
            i = i0 + tl.arange(0, M)
            real = i < T
            q_tile, g = load_rows(q, i, qs[2], T, D, P, True), load_rows(do, i, dos[2], T, D, P, True)
            row_lse = tl.load(lse + i, mask=real, other=float("inf"))
            last = last_bias(z, tl.minimum(i, T - 1), NPOS, ZTYPE) * LOG2E - row_lse
            weight = tl.exp2(matmul(k_tile, tl.trans(q_tile)) * scale + last[None, :])
            dw = matmul(v_tile, tl.trans(g))
            dw = drop(dw, seed, bh, i[None, :], j[:, None], DROPOUT)
            kept = drop(weight, seed, bh, i[None, :], j[:, None], DROPOUT)
            acc_v = matmul(kept.to(g.dtype), g, acc_v)
            ds = weight * (dw - tl.load(mean + i, mask=real, other=0.0)[None, :])
            acc_k = matmul(ds.to(g.dtype), q_tile, acc_k)

    at = (b * T * H + h) * D
    store_rows(dk + at, j, H * D, acc_k * (scale * LN2), T, D, P)
    store_rows(dv + at, j, H * D, acc_v, T, D, P)
    if gq is not None:
        store_rows(dgk + at, j, H * D, acc_g * (scale * LN2), T, D, P)


# (M, N, warps). One stage: the compilers of Triton 3.6 and 3.8 cannot pipeline a loop that looks something
# up, and two programs on a multiprocessor hide each other's loads as well
COPE_TILES = {
    "cope_forward": (64, KEYS, 4),
    "cope_backward_q": (64, 32, 4),
    "cope_backward_kv": (32, KEYS, 4),
}


def cope_options(x, kernel):
    P = max(64, triton.next_power_of_2(x.size(-1)))
    M, N, warps = COPE_TILES[kernel.__name__]
    return dict(D=x.size(-1), P=P, M=M, N=N, num_warps=warps, num_stages=1)


@torch.library.custom_op("cope::forward", mutates_args=())
def cope_forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor,
                    gate_q: Optional[torch.Tensor], gate_k: Optional[torch.Tensor],
                    seed: Optional[torch.Tensor], dropout: float) -> list[torch.Tensor]:
    B, H, T, d = q.shape
    npos, options = z.size(-1), cope_options(q, cope_forward)
    outputs = cope_forward_shapes(q, k, v, z, gate_q, gate_k, seed, dropout)
    o, lse, count, exits, both, *rest = outputs
    C = triton.next_power_of_2(npos)
    M = max(1, 4096 // C)
    launch(cope_pairs, (triton.cdiv(T, M), B * H), *strided(z), both, T, H, NPOS=npos, C=C, M=M, num_warps=4,
           num_stages=1)
    launch(cope_forward, (exits.size(1), B * H), *strided(q, k, v, gate_q, gate_k), both, o,
           rest[0] if rest else None, lse, count, exits, seed, d**-0.5 / math.log(2), T, H, DROPOUT=dropout,
           NPOS=npos, ZTYPE=TYPES[z.dtype], ASM=ASM, CHUNK=128 // options["N"], **options)
    return outputs


@cope_forward_op.register_fake
def cope_forward_shapes(q, k, v, z, gate_q, gate_k, seed, dropout):
    """o (B, H, T, d), lse (B H, T), count (B H, T) in units, exits (B H, row tiles) in keys, z in words, and
    what 16 bits leave of o"""
    B, H, T, d = q.shape
    tiles = math.ceil(T / cope_options(q, cope_forward)["M"])
    lse = q.new_empty(B * H, T, dtype=torch.float32)
    count, exits = (q.new_empty(B * H, n, dtype=torch.int32) for n in (T, tiles))
    both = z.new_empty(z.shape, dtype=torch.int32 if z.element_size() == 2 else torch.int64)
    return [empty_heads(q), lse, count, exits, both] + [empty_heads(q)] * (q.element_size() == 2)


@torch.library.custom_op("cope::backward", mutates_args=())
def cope_backward_op(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                     gate_q: Optional[torch.Tensor], gate_k: Optional[torch.Tensor],
                     seed: Optional[torch.Tensor], saved: list[torch.Tensor],
                     dropout: float) -> list[torch.Tensor]:
    B, H, T, d = q.shape
    o, lse, count, exits, both, *rest = saved
    npos, scale, tiles = both.size(-1), d**-0.5 / math.log(2), math.ceil(T / KEYS)
    grads = cope_backward_shapes(do, q, k, v, gate_q, gate_k, seed, saved, dropout)
    dq, dk, dv, dz, dgq, dgk = (*grads, None, None)[:6]
    heads = min(B * H, max(1, BORROWED // (8 * T * (tiles + npos))))  # at a time
    right, mean = count.new_empty(heads, tiles, T), torch.empty_like(lse)
    left, ends = torch.empty_like(right, dtype=torch.float32), lse.new_empty(heads, T, npos, 2)
    shared = dict(DROPOUT=dropout, NPOS=npos, ZTYPE=TYPES[q.dtype], ASM=ASM)
    shared["ROWS"] = cope_options(q, cope_forward)["M"]
    rows, keys = cope_options(q, cope_backward_q), cope_options(q, cope_backward_kv)
    for first in range(0, B * H, heads):
        n = min(heads, B * H - first)
        launch(cope_backward_q, (triton.cdiv(T, rows["M"]), n), *strided(q, k, v, gate_q, gate_k, o),
               rest[0] if rest else None, *strided(do), both, lse, count, exits, dq, dgq, dz, ends, mean,
               right, left, seed, scale, T, H, first, KEYS=KEYS, C=min(64, triton.next_power_of_2(npos)),
               **shared, **rows)
        launch(cope_backward_kv, (tiles, n), *strided(q, k, v, gate_q, gate_k, do), both, lse, exits, dk, dv,
               dgk, mean, right, left, seed, scale, T, H, first, **shared, **keys)
    return grads


@cope_backward_op.register_fake
def cope_backward_shapes(do, q, k, v, gate_q, gate_k, seed, saved, dropout):
    dz = q.new_empty(saved[4].shape)
    grads = [empty_heads(x) for x in (q, k, v, gate_q, gate_k) if x is not None]
    return [*grads[:3], dz, *grads[3:]]


def cope_save(ctx, inputs, output):
    q, k, v, _, gate_q, gate_k, seed, ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, gate_q, gate_k, seed, *output)


def cope_backward_of(ctx, grads):
    inputs, saved = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    found = cope_backward_op(grads[0], *inputs, saved, ctx.dropout)
    return *found, *[None] * (8 - len(found))


cope_forward_op.register_autograd(cope_backward_of, setup_context=cope_save)


def cope_attention(q, k, v, z, gate_q=None, gate_k=None, dropout=0.0):
    """Causal attention with CoPE's bias (top of this file), differentiable in all its arguments.

    q, k, v         (B, H, T, d), d <= 128, float16, bfloat16 or float32; q and k may be rotated (cope+rope)
    z               (B, H, T, npos), 2 <= npos: q @ e of the raw q, so that autograd gives e its gradient;
                    cast to q's dtype
    gate_q, gate_k  (B, H, T, d): by default q and k, whose logits then serve twice; gate_k = v for value
                    gates, a projection of the input for separate keys, the raw q and k in cope+rope
    dropout         the share of attention weights that are set to 0, drawn anew by every call
    returns o       (B, H, T, d)
    """
    if gate_q is not None or gate_k is not None:
        gate_q, gate_k = q if gate_q is None else gate_q, k if gate_k is None else gate_k
    for name, x in dict(q=q, k=k, v=v, gate_q=gate_q, gate_k=gate_k).items():
        if x is not None and (x.shape != q.shape or x.dtype != q.dtype or x.size(-1) > 128):
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; CoPE's kernels take the shape and dtype "
                             "of q, at most 128 wide")
    if z.shape[:3] != q.shape[:3] or z.size(-1) < 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be {tuple(q.shape[:3])} by npos >= 2")
    refuse_large(q, k, v, gate_q, gate_k)
    if max(q.size(2) * 2048, q.size(2) * z.size(3) * 2) >= 2**31:
        raise ValueError(f"{q.size(2)} tokens and {z.size(3)} positions are more than CoPE's kernels "
                         "can count; shorten the sequence")
    return cope_forward_op(q, k, v, z.to(q.dtype), gate_q, gate_k, draw_seed(q, dropout), dropout)[0]


# ---------------------------------------------------------------------------------------------------
# may a model use them?


def why_not(pe, head_dim, device, dtype, hard_attention=False):
    """Why no kernel computes the attention of a layer, in a few words, or None if one does. pe: the layer's
    methods, such as "cope+rope"."""
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
    if tuple(map(int, triton.__version__.split(".")[:2])) < TRITON:
        return f"triton {triton.__version__}, older than {'.'.join(map(str, TRITON))}"
    if not INTERPRET:
        if device.type != "cuda":
            return "no GPU"
        if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            return "no NVIDIA GPU of compute capability 8.0 or later"
    if head_dim not in WIDTHS:
        return f"head width {head_dim} is none of {', '.join(map(str, WIDTHS))}"
    if dtype == torch.float32 and not INTERPRET:
        return "float32"  # right, but without tensor cores and with registers spilled
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{dtype} inputs"
    return None


def main():
    """Says whether this machine can run the kernels."""
    if triton.__version__ is None:
        sys.exit("kernels.py needs triton (Linux, x86-64): pip install triton")
    reason = why_not("pope", 64, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    print(f"kernels on this machine: {reason or 'yes'}. Checks: python -m pytest tests/test_kernels.py; "
          "times: python tests/bench.py")


if __name__ == "__main__":
    main()
