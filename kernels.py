"""
Optional fast paths: attention whose positional encoding lives inside Triton kernels. Tensors in,
tensors out. tests/test_kernels.py checks them, tests/bench.py times them.

PoPE attention ("Decoupling the What and Where With Polar Coordinate Positional Embedding", eq. 5),
causal, per head:

    a_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) theta_c + delta_c) / sqrt(d),  theta_c = base^(-c/d)
    o_i  = sum_j softmax_j(a_ij) v_j over j <= i,                     mu = softplus or the identity

The kernels compute a_ij as the dot product of vectors 2d wide, with delta on the queries (on the
keys in the paper's eq. 6, 7 and 9). v stays d wide, where flash attention would want 2d:

    q'_i = mu(q_i) (cos(i theta - delta), sin(i theta - delta))
    k'_j = mu(k_j) (cos(j theta), sin(j theta))

CoPE attention (arXiv:2405.18719, section 4 and Listing 1) adds to each logit a bias that depends
on how many keys between the two tokens the query counts:

    g_ij = sigmoid(gate_q_i . gate_k_j / sqrt(d))      by default gate_q = q and gate_k = k
    p_ij = min(g_ij + g_i,j+1 + .. + g_ii, npos - 1)   the position of key j as query i sees it
    b_ij = (1 - w) z_i[floor p_ij] + w z_i[ceil p_ij]  w = p_ij - floor p_ij, z_i = q_i e

Once all rows of a tile have counted to npos - 1, the keys further left have the bias z_i[npos - 1]
and attention is ordinary. Gates are rounded to multiples of 1/2048: float sums taken in two
directions would disagree about floor p. A gate below 1/4096 counts as zero, in training only.
Gradients pass the rounding as if it were not there; the slope of b is 0 where p is clamped and
where it is an integer. Against exact gates in float64 rounding costs (T = 1024, npos = 64, q and k
unit-normal, z white noise, mean gates of 0.5 .. 0.02) 0.13 .. 0.24% of o, 0.24 .. 0.6% of dz and 6
.. 13% of the gates' gradients, where bfloat16 costs PyTorch's dense path 0.6%, 1.2% and 9 .. 19%.

Both take d = 32, 48, 64 or 128 in float16, bfloat16 or float32, any T, and as many queries as keys
(decoding is left to PyTorch). Sums are in float32. Nothing of size T x T is kept, and no atomics:
the same input gives the same bits. Dropout draws random numbers, which the backward pass draws
again. There are no second derivatives. CoPE's backward pass borrows 8 npos + T / 8 bytes a row,
for as many heads at a time as fit in 256 MB.

No kernel has run on a GPU yet; README says which of its numbers are measured, emulated and
modelled.
"""
import math
import os
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the module imports all the same, so that why_not can say what is missing
    constexpr = float
    triton = SimpleNamespace(jit=lambda f=None, **_: f or (lambda f: f), __version__=None)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton itself looks at it when imported
ASM = constexpr(not INTERPRET)  # the interpreter knows no assembly
WIDTHS = (32, 48, 64, 128)  # head widths that are tested
TRITON = (3, 6)  # the oldest that was seen to compile all kernels
LOG2E = constexpr(math.log2(math.e))
LN2 = constexpr(math.log(2))

# -------------------------------------------------------------------------------------------------
# shared by the kernels of both methods. i are queries and j keys, M and N how many of them a tile
# has; D is the head width and P the power of two that holds it; bh counts the B H heads. Strided
# tensors come as the tuples that strided() makes. Logits and the logs of their sums are powers of
# two, as exp2 is what the hardware has.


def strided(*xs):
    """Tensors (B, H, T, n) as tuples (pointer, strides of batch, head and token), the last stride
    being 1. None stays None."""
    for x in xs:
        if x is not None and x.stride(-1) != 1:
            x = x.contiguous()
        yield None if x is None else (x, *x.stride()[:3])


def launch(kernel, grid, x, *args, **options):
    """x: the first argument, strided. Triton launches on the current device, wherever x is."""
    options["enable_fp_fusion"] = True  # one instruction for x * scale - top, in all versions
    with torch.cuda.device_of(x[0]):
        kernel[grid](x, *args, **options)


@triton.jit
def head_of(x, bh, H):
    return x[0] + bh // H * x[1] + bh % H * x[2]


@triton.jit
def load_rows(x, stride, rows, T, D: constexpr, P: constexpr, EDGE: constexpr = True):
    """x[rows] of a (T, D) matrix as a tile P wide, 0 outside. EDGE: there may be rows past T."""
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
def load(x, bh, H, rows, T, D: constexpr, P: constexpr, EDGE: constexpr = True):
    """These rows of one head of a strided tensor."""
    return load_rows(head_of(x, bh, H), x[3], rows, T, D, P, EDGE)


@triton.jit
def store(x, bh, H, rows, tile, T, D: constexpr, P: constexpr):
    cols = tl.arange(0, P)
    at = head_of(x, bh, H) + rows[:, None] * x[3] + cols[None, :]
    tl.store(at, tile.to(x[0].dtype.element_ty), mask=(rows < T)[:, None] & (cols < D)[None, :])


@triton.jit
def matmul(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # no tf32 where the inputs are float32


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^-x). Triton's division takes many instructions, this one does not."""
    r = tl.rsqrt(1.0 + tl.exp2(-x))
    return r * r


@triton.jit
def drop(x, seed, bh, i, j, DROPOUT: constexpr):
    """Dropout of x, a tile of pairs of queries i and keys j. Philox makes a random number of the
    seed and the place alone, so that the passes agree, whatever their tiles. 7 of its rounds pass
    BigCrush."""
    if DROPOUT > 0:
        bits, _, _, _ = tl.philox(tl.load(seed), j, i, bh.to(tl.int32), 0, 7)
        uniform = (bits >> 9 | 0x3F800000).to(tl.float32, bitcast=True)  # a float in [1, 2)
        x = tl.where(uniform >= 1.0 + DROPOUT, x, 0.0) * (1 / (1 - DROPOUT))
    return x


@triton.jit
def attend(a, scale, v, top, total, acc, seed, bh, i, j, DROPOUT: constexpr):
    """One step of the online softmax over logits a * scale: top are the rows' largest so far, total
    the sums of their weights, acc the weighted values, both relative to 2^top. Dropout comes after
    the softmax, so total knows nothing of it."""
    higher = tl.maximum(top, tl.max(a, 1) * scale)
    p = tl.exp2(a * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, 1)
    p = drop(p, seed, bh, i[:, None], j[None, :], DROPOUT)
    return higher, total, matmul(p.to(v.dtype), v, acc * fade[:, None])


# -------------------------------------------------------------------------------------------------
# the host's side of both methods


def empty_heads(x):
    """An empty (B, H, T, d) with the memory of a (B, T, H, d), whose heads merge into (B, T, C) for
    free."""
    B, H, T, d = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


ROWS, KEYS = 64, 64  # in a tile of cope_forward: the grains of exits, and of right and left
# (M, N, warps, stages) for 16 bits and P < 128, 16 bits and P = 128, and both for float32, which is
# there to be checked against. Chosen by counts of what the compiled code does: 16 rows a warp, or
# wgmma computes them twice; two programs on a multiprocessor, to hide each other's loads. CoPE has
# one stage, as Triton 3.6 and 3.8 cannot pipeline a loop that looks something up. In the queries'
# kernels N divides M, as the masked part starts at a multiple of M
TILES = {
    "pope_forward": ((128, 64, 4, 2), (128, 32, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "pope_backward_q": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "pope_backward_kv": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "cope_forward": 4 * ((ROWS, KEYS, 4, 1),),
    "cope_backward_q": 4 * ((64, 32, 4, 1),),
    "cope_backward_kv": 4 * ((32, KEYS, 4, 1),),
}


def sizes(x, kernel):
    """The kernel's options for heads like those of x."""
    P = triton.next_power_of_2(x.size(-1))
    column = 2 * (x.dtype == torch.float32) + (P > 64)
    M, N, warps, stages = TILES[kernel.__name__][column]
    return dict(D=x.size(-1), P=P, M=M, N=N, num_warps=warps, num_stages=stages)


def operator(name, arguments, results, forward, gradients, backward, spared=0):
    """A PyTorch operator with a gradient, one node in the graphs of torch.compile. arguments is its
    schema, tensors before numbers. results(*arguments) allocates a list, whose first is the answer,
    and forward(list, *arguments) fills it. gradients and backward do the same for the gradients of
    the tensors. Their arguments are the gradient of the answer, what was saved (all tensors but the
    first `spared`, then the results) and the numbers."""

    def custom_op(name, arguments, allocate, fill):
        def call(*inputs):
            tensors = allocate(*inputs)
            fill(tensors, *inputs)
            return tensors

        schema = f"({arguments}) -> Tensor[]"
        op = torch.library.custom_op(name, call, mutates_args=(), schema=schema)
        op.register_fake(allocate)
        return op

    def save(ctx, inputs, output):
        ctx.numbers = [float(x) for x in inputs if isinstance(x, (int, float))]
        ctx.save_for_backward(*inputs[spared:len(inputs) - len(ctx.numbers)], *output)

    def differentiate(ctx, grads):
        found = backward_op(grads[0], list(ctx.saved_tensors), ctx.numbers)
        return *found, *[None] * (arguments.count(",") + 1 - len(found))

    # custom_op rather than triton_op, as it runs the interpreter's kernels on CPU tensors too
    op = custom_op(f"{name}::forward", arguments, results, forward)
    backward_op = custom_op(f"{name}::backward", "Tensor do, Tensor?[] saved, float[] numbers",
                            gradients, backward)
    op.register_autograd(differentiate, setup_context=save)
    return op


def refuse_large(*xs, reach=0):
    """ValueError for what the kernels' grid, or their int32 offsets, cannot reach. reach: the
    largest offset within a head of a tensor that is none of xs."""
    B, H, T, d = xs[0].shape  # a token of o is H d wide, one of q' 2 d
    if B * H > 65535:
        raise ValueError(f"{B} x {H} heads are more than the kernels' 65535; use a smaller batch")
    if max(reach, T * d * max(H, 2), *(T * x.stride(2) for x in xs if x is not None)) >= 2**31:
        raise ValueError(f"{T} tokens are more than the kernels can address; shorten the sequence")


def draw_seed(x, dropout):
    """Where the random numbers of one call start: drawn by PyTorch's generator, so that
    torch.manual_seed repeats them."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
    return torch.randint(2**62, (1,), device=x.device) if dropout else None


# -------------------------------------------------------------------------------------------------
# PoPE. A vector q' or k' is 2d wide, cosine and sine of each dimension side by side


@triton.jit
def magnitude(x, SOFTPLUS: constexpr):
    """mu(x). softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|), to a few ulp at both ends: the
    last term restores what 1 + e has rounded away, which for x < -17 is all there is."""
    if SOFTPLUS:
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        x = tl.maximum(x, 0.0) + (tl.log(u) + (e - (u - 1.0)) / u)
    return x


@triton.jit
def pairs_of(x, M: constexpr, P: constexpr):
    """A tile (M, 2P) of pairs -> its first and its second components, (M, P) each."""
    return tl.split(x.to(tl.float32).reshape(M, P, 2))


@triton.jit
def phases(table, delta, rows, h, T, D: constexpr, P: constexpr, M: constexpr):
    """Cosine and sine of rows * theta - delta by the addition theorem; table (T, 2D) and delta (H,
    2D) hold the pairs of each. Without delta those of rows * theta."""
    cosine, sine = pairs_of(load_rows(table, 2 * D, rows, T, 2 * D, 2 * P), M, P)
    if delta is not None:
        cols = tl.arange(0, 2 * P)
        turn = tl.load(delta + h * 2 * D + cols, mask=cols < 2 * D, other=0.0)
        x, y = pairs_of(turn[None, :], 1, P)
        cosine, sine = cosine * x + sine * y, sine * x - cosine * y
    return cosine, sine


@triton.jit
def pope_rotate(x, x2, table, delta, T, H, SOFTPLUS: constexpr, D: constexpr, P: constexpr,
                M: constexpr):
    """x (B, H, T, D) -> x2 (B, H, T, 2D), the pairs mu(x) (cos, sin): q' with delta, k' without."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    mu = magnitude(load(x, bh, H, rows, T, D, P).to(tl.float32), SOFTPLUS)
    cosine, sine = phases(table, delta, rows, bh % H, T, D, P, M)
    store(x2, bh, H, rows, tl.interleave(mu * cosine, mu * sine), T, 2 * D, 2 * P)


@triton.jit
def pope_gradient(g, x2, table, delta, rows, h, T, SOFTPLUS: constexpr, D: constexpr,
                  P: constexpr, M: constexpr):
    """The gradients of x[rows] and of its phases, from the gradient g of its pairs x2 = mu(x) (cos,
    sin)."""
    g_x, g_y = pairs_of(g, M, P)
    x, y = pairs_of(load_rows(x2, 2 * D, rows, T, 2 * D, 2 * P), M, P)
    if SOFTPLUS:  # the slope of mu is 1 - exp(-mu), and the pair over mu the direction
        mu = tl.sqrt(tl.maximum(x * x + y * y, 1e-30))
        slope_over_mu = tl.where(mu < 1e-3, 1 - mu / 2, (1 - tl.exp2(-mu * LOG2E)) / mu)
        dx = (g_x * x + g_y * y) * slope_over_mu
    else:  # mu = x may be 0, where its pair tells no direction
        cosine, sine = phases(table, delta, rows, h, T, D, P, M)
        dx = g_x * cosine + g_y * sine
    return dx, g_y * x - g_x * y


@triton.jit
def pope_forward(v, o, q2, k2, lse, seed, scale, T, H, DROPOUT: constexpr, D: constexpr,
                 P: constexpr, M: constexpr, N: constexpr):
    """o (B, H, T, D) and lse (B, H, T) of one tile of queries. scale = log2(e) / sqrt(d)."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows first, for an even end
    i = i0 + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    q2 += bh * T * 2 * D
    k2 += bh * T * 2 * D
    q = load_rows(q2, 2 * D, i, T, 2 * D, 2 * P)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    edges = (0, i0, tl.minimum(i0 + M, T))
    for diagonal in tl.static_range(2):  # first the keys that all queries see, then the masked
        for j0 in range(edges[diagonal], edges[diagonal + 1], N):
            j = j0 + tl.arange(0, N)
            a = matmul(q, tl.trans(load_rows(k2, 2 * D, j, T, 2 * D, 2 * P, diagonal)))
            if diagonal:
                a = tl.where(i[:, None] >= j[None, :], a, float("-inf"))
            v_tile = load(v, bh, H, j, T, D, P, diagonal)
            top, total, acc = attend(a, scale, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
    store(o, bh, H, i, acc / total[:, None], T, D, P)
    tl.store(lse + bh * T + i, top + tl.log2(total), mask=i < T)


@triton.jit
def pope_backward_q(v, o, do, dq, q2, k2, ddelta, lse, mean, table, delta, seed, scale, T, H,
                    SOFTPLUS: constexpr, DROPOUT: constexpr, D: constexpr, P: constexpr,
                    M: constexpr, N: constexpr):
    """One tile of queries: dq, its part of ddelta (B, H, tiles, D), and for the keys' kernel mean
    (B, H, T), rowsum(o do), the average of dp over a row."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i0 = tile * M
    i = i0 + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    q2 += bh * T * 2 * D
    k2 += bh * T * 2 * D
    g = load(do, bh, H, i, T, D, P)
    row_mean = tl.sum(load(o, bh, H, i, T, D, P).to(tl.float32) * g.to(tl.float32), 1)
    tl.store(mean + bh * T + i, row_mean, mask=i < T)
    # infinite past the last query, for no weights there
    row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
    q = load_rows(q2, 2 * D, i, T, 2 * D, 2 * P)
    acc = tl.zeros((M, 2 * P), tl.float32)
    edges = (0, i0, tl.minimum(i0 + M, T))
    for diagonal in tl.static_range(2):
        for j0 in range(edges[diagonal], edges[diagonal + 1], N):
            j = j0 + tl.arange(0, N)
            k = load_rows(k2, 2 * D, j, T, 2 * D, 2 * P, diagonal)
            p = tl.exp2(matmul(q, tl.trans(k)) * scale - row_lse[:, None])
            if diagonal:
                p = tl.where(i[:, None] >= j[None, :], p, 0.0)
            dp = matmul(g, tl.trans(load(v, bh, H, j, T, D, P, diagonal)))
            dp = drop(dp, seed, bh, i[:, None], j[None, :], DROPOUT)
            acc = matmul((p * (dp - row_mean[:, None])).to(k.dtype), k, acc)
    acc *= scale * LN2  # 1 / sqrt(d)
    dx, dphase = pope_gradient(acc, q2, table, delta, i, bh % H, T, SOFTPLUS, D, P, M)
    store(dq, bh, H, i, dx, T, D, P)
    cols = tl.arange(0, P)  # rows past T were read as zero and add nothing
    at = ddelta + (bh * tl.num_programs(0) + tile) * D + cols
    tl.store(at, -tl.sum(dphase, 0), mask=cols < D)


@triton.jit
def pope_backward_kv(v, do, dk, dv, q2, k2, lse, mean, table, seed, scale, T, H,
                     SOFTPLUS: constexpr, DROPOUT: constexpr, D: constexpr, P: constexpr,
                     M: constexpr, N: constexpr):
    """dk and dv of one tile of keys, from all queries that see it. Scores are held transposed,
    (keys, queries)."""
    j0 = tl.program_id(0) * N
    j = j0 + tl.arange(0, N)
    bh = tl.program_id(1).to(tl.int64)
    q2 += bh * T * 2 * D
    k2 += bh * T * 2 * D
    k = load_rows(k2, 2 * D, j, T, 2 * D, 2 * P)
    v_tile = load(v, bh, H, j, T, D, P)
    acc_k = tl.zeros((N, 2 * P), tl.float32)
    acc_v = tl.zeros((N, P), tl.float32)
    below = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from this query on, all see the whole tile
    for diagonal in tl.static_range(2):
        for i0 in range(j0 // M * M if diagonal else below, below if diagonal else T, M):
            i = i0 + tl.arange(0, M)
            q = load_rows(q2, 2 * D, i, T, 2 * D, 2 * P)
            row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
            p = tl.exp2(matmul(k, tl.trans(q)) * scale - row_lse[None, :])
            if diagonal:
                p = tl.where(i[None, :] >= j[:, None], p, 0.0)
            g = load(do, bh, H, i, T, D, P)
            dp = matmul(v_tile, tl.trans(g))
            row_mean = tl.load(mean + bh * T + i, mask=i < T, other=0.0)
            dp = drop(dp, seed, bh, i[None, :], j[:, None], DROPOUT)
            kept = drop(p, seed, bh, i[None, :], j[:, None], DROPOUT)
            acc_v = matmul(kept.to(g.dtype), g, acc_v)
            acc_k = matmul((p * (dp - row_mean[None, :])).to(q.dtype), q, acc_k)
    dx, _ = pope_gradient(acc_k * (scale * LN2), k2, table, None, j, bh % H, T, SOFTPLUS, D, P, N)
    store(dk, bh, H, j, dx, T, D, P)
    store(dv, bh, H, j, acc_v, T, D, P)


def pairs(x):
    """(cos x, sin x), the pairs of a table of angles"""
    return torch.stack((x.cos(), x.sin()), -1).float()


def pope_rotated(x, x2, table, delta, softplus):
    """Fills x2 (B, H, T, 2d) for x (B, H, T, d); the pairs of delta or None."""
    B, H, T, d = x.shape
    P = triton.next_power_of_2(d)
    M = 2048 // P
    launch(pope_rotate, (triton.cdiv(T, M), B * H), *strided(x, x2), table, delta, T, H,
           SOFTPLUS=softplus, D=d, P=P, M=M, num_warps=4, num_stages=1)


def pope_results(q, k, v, delta, table, seed, softplus, dropout):
    """o, lse, and q' and k', which the backward pass takes in the place of q and k"""
    q2 = q.new_empty(*q.shape[:3], 2 * q.size(3))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return [empty_heads(q), lse, q2, torch.empty_like(q2)]


def run_pope(results, q, k, v, delta, table, seed, softplus, dropout):
    o, lse, q2, k2 = results
    B, H, T, d = q.shape
    pope_rotated(q, q2, table, pairs(delta), softplus)
    pope_rotated(k, k2, table, None, softplus)
    options = sizes(q, pope_forward)
    launch(pope_forward, (triton.cdiv(T, options["M"]), B * H), *strided(v, o), q2, k2, lse, seed,
           d**-0.5 / math.log(2), T, H, DROPOUT=dropout, **options)


def pope_gradients(do, saved, numbers):
    v, delta = saved[:2]
    return [empty_heads(v), empty_heads(v), empty_heads(v), torch.empty_like(delta)]


def run_pope_backward(grads, do, saved, numbers):
    dq, dk, dv, ddelta = grads
    v, delta, table, seed, o, lse, q2, k2 = saved
    softplus, dropout = numbers
    B, H, T, d = v.shape
    mean, scale = torch.empty_like(lse), d**-0.5 / math.log(2)
    both = dict(SOFTPLUS=bool(softplus), DROPOUT=dropout)
    options = sizes(v, pope_backward_q)
    tiles = triton.cdiv(T, options["M"])
    parts = lse.new_empty(B, H, tiles, d)  # of ddelta
    launch(pope_backward_q, (tiles, B * H), *strided(v, o, do, dq), q2, k2, parts, lse, mean, table,
           pairs(delta), seed, scale, T, H, **both, **options)
    torch.sum(parts, (0, 2), out=ddelta)
    options = sizes(v, pope_backward_kv)
    launch(pope_backward_kv, (triton.cdiv(T, options["N"]), B * H), *strided(v, do, dk, dv), q2, k2,
           lse, mean, table, seed, scale, T, H, **both, **options)


pope_op = operator(
    "pope", "Tensor q, Tensor k, Tensor v, Tensor delta, Tensor table, Tensor? seed, "
    "bool softplus, float dropout",
    pope_results, run_pope, pope_gradients, run_pope_backward, spared=2)


def pope_attention(q, k, v, delta, base=10000.0, softplus=True, dropout=0.0):
    """Causal PoPE attention, see the top of this file. q, k, v (B, H, T, d) as projected, of one
    dtype; delta (H, d) or None. Returns (B, H, T, d); q, k, v and delta get gradients. Where the
    first token stands makes no difference. dropout: the share of attention weights that are set to
    0, drawn anew by every call."""
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"pope_attention wants q, k, v of one shape and dtype, got {shapes}")
    refuse_large(q, k, v)
    T, d = q.shape[2:]
    theta = base ** (-torch.arange(d, device=q.device, dtype=torch.float64) / d)
    # in float64, as a float32 angle is off by 1e-3 at position 16384
    angle = torch.arange(T, device=q.device, dtype=torch.float64)[:, None] * theta  # (T, d)
    delta = torch.zeros(q.size(1), d, device=q.device) if delta is None else delta.float()
    return pope_op(q, k, v, delta, pairs(angle), draw_seed(q, dropout), softplus, dropout)[0]


# -------------------------------------------------------------------------------------------------
# CoPE. A position is an int32, in units of 1 / 2048; z comes as the pairs that cope_attention makes

BITS = constexpr(11)  # of a position's fraction: as many as leave every gate exact in fp16
UNIT = constexpr(2048)  # 2^BITS, a whole position
MAGIC = constexpr(2.0**23)  # x + 2^23 is rounded to a whole number, which the low bits of the float
MAGIC_BITS = constexpr(0x4B000000)  # then hold: cheaper than floor and a conversion
CHUNK = constexpr(2)  # tiles of keys between two looks whether all rows are saturated
BORROWED = 2**28  # bytes that the backward pass may borrow for its kernels' tables, or one head's
# parts of a triangle of attention, in the order of the keys
SATURATED, COUNTED, MASKED = constexpr(0), constexpr(1), constexpr(2)


@triton.jit
def gather(at, WIDE: constexpr):
    """Words from anywhere, of 32 bits or, if WIDE, 64. tl.load would carry the addresses through
    shared memory first, and back its result."""
    if ASM and not WIDE:
        words = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)],
                                          dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = tl.load(at)
    return words


@triton.jit
def scatter(at, a, b, here):
    """Stores the float32 a and b side by side, where `here` says so."""
    if ASM:
        code: constexpr = ("{ .reg .pred p; setp.ne.b32 p, $4, 0; "
                           "@p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }")
        tl.inline_asm_elementwise(code, "=r,l,f,f,r", [at.to(tl.int64), a, b, here.to(tl.int32)],
                                  dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, a, mask=here)
        tl.store(at + 1, b, mask=here)


@triton.jit
def unpack(word, ZTYPE: constexpr):
    """The pair (z[c], z[c + 1]) in one word -> both as float32"""
    if ZTYPE == tl.float32:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    elif ZTYPE == tl.bfloat16:  # the upper half of a float32
        low, high = word << 16, word & -65536
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    TYPE: constexpr = ZTYPE if ZTYPE == tl.float16 else tl.float32
    low, high = low.to(TYPE, bitcast=True), high.to(TYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def look_up(z, row, p, NPOS: constexpr, ZTYPE: constexpr):
    """Bias at the clamped positions p, its slope and the weight w of the right neighbour."""
    word = gather(z + (row * NPOS + (p >> BITS)), ZTYPE == tl.float32)
    low, high = unpack(word, ZTYPE)
    # the fraction, as a float in [1, 2)
    w = ((p << 12) & 0x7FF000 | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return low + w * (high - low), tl.where(w > 0, high - low, 0.0), w


@triton.jit
def last_bias(z, row, NPOS: constexpr, ZTYPE: constexpr):
    return unpack(tl.load(z + row * NPOS + NPOS - 1), ZTYPE)[0]


@triton.jit
def gates(logit, seen, MASK: constexpr):
    """The gates, and their units as whole floats. MASK: there may be keys in the future, which
    count for nothing."""
    g = sigmoid(logit)
    units = (g * UNIT + MAGIC) - MAGIC
    if MASK:
        units = tl.where(seen, units, 0.0)
    return g, units


@triton.jit
def clamp(p, NPOS: constexpr):
    """Below 0 it may be where the forward pass has rounded a gate to the neighbour of what the
    backward pass rounds it to, having computed its logit in another order."""
    return tl.maximum(tl.minimum(p, (NPOS - 1) * UNIT), 0)


@triton.jit
def whole(x):
    return (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def triangle(n: constexpr, DTYPE: constexpr):
    """(n, n), 1 on and under the diagonal. x @ it sums x over the columns from each one on, x @ its
    transpose up to each one: exact for the units in fp16, and cheaper than a scan."""
    return (tl.arange(0, n)[:, None] >= tl.arange(0, n)[None, :]).to(DTYPE)


@triton.jit(do_not_specialize=["T"])
def cope_forward(q, k, v, gq, gk, o, rest, z, lse, count, exits, seed, scale, T, H,
                 DROPOUT: constexpr, NPOS: constexpr, D: constexpr, P: constexpr, M: constexpr,
                 N: constexpr):
    """A tile of queries walks from the diagonal to the left. Stores o, what 16 bits leave of it
    (rest), the log-sum-exp, the units counted where the gates were left, and the key left of which
    they were (exits, one per tile)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, for an even end
    i = tile * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    z += bh * T * NPOS
    q_tile = load(q, bh, H, i, T, D, P)
    if gq is not None:
        gq_tile = load(gq, bh, H, i, T, D, P)
    row = tl.minimum(i, T - 1)
    counted = tl.zeros((M,), tl.int32)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, P), tl.float32)
    todo = tl.cdiv(tl.minimum(tile * M + M, T), N)  # key tiles that are left: 0 .. todo - 1
    for diagonal in tl.static_range(1, -1, -1):  # first the masked keys
        leave = tile * M // N if diagonal else 0
        while (todo > leave) & (tl.min(counted, 0) < (NPOS - 1) * UNIT):
            stop = leave if diagonal else tl.maximum(todo - CHUNK, 0)
            for back in range(0, todo - stop):
                j = (todo - 1 - back) * N + tl.arange(0, N)
                s = matmul(q_tile, tl.trans(load(k, bh, H, j, T, D, P, diagonal))) * scale
                gate_logit = s
                if gq is not None:
                    gk_tile = load(gk, bh, H, j, T, D, P, diagonal)
                    gate_logit = matmul(gq_tile, tl.trans(gk_tile)) * scale
                seen = i[:, None] >= j[None, :]
                g, units = gates(gate_logit, seen, diagonal)
                p = counted[:, None] + whole(matmul(units.to(tl.float16), triangle(N, tl.float16)))
                bias, slope, w = look_up(z, row[:, None], clamp(p, NPOS), NPOS, q_tile.dtype)
                counted += tl.sum(units, 1).to(tl.int32)
                s += bias * LOG2E
                if diagonal:
                    s = tl.where(seen, s, float("-inf"))
                v_tile = load(v, bh, H, j, T, D, P, diagonal)
                top, total, acc = attend(s, 1.0, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
            todo = stop
    last = last_bias(z, row, NPOS, q_tile.dtype) * LOG2E
    top -= last
    for n in range(0, todo):  # every row is saturated
        j = n * N + tl.arange(0, N)
        a = matmul(q_tile, tl.trans(load(k, bh, H, j, T, D, P, False)))
        v_tile = load(v, bh, H, j, T, D, P, False)
        top, total, acc = attend(a, scale, v_tile, top, total, acc, seed, bh, i, j, DROPOUT)
    acc /= total[:, None]
    store(o, bh, H, i, acc, T, D, P)
    store(rest, bh, H, i, acc - acc.to(q_tile.dtype).to(tl.float32), T, D, P)
    tl.store(lse + bh * T + i, top + last + tl.log2(total), mask=i < T)
    tl.store(count + bh * T + i, counted, mask=i < T)
    tl.store(exits + bh * tl.num_programs(0) + tile, todo * N)


@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_q(q, k, v, gq, gk, o, rest, do, dq, dgq, z, lse, count, exits, dz, ends, mean,
                    right, left, seed, scale, T, H, first, ROWS: constexpr, KEYS: constexpr,
                    C: constexpr, DROPOUT: constexpr, NPOS: constexpr, D: constexpr, P: constexpr,
                    M: constexpr, N: constexpr):
    """dq, d gate_q and dz; a tile of queries walks from left to right, so that a gate's gradient,
    the sum of dp over all keys to its left, is a running sum too. Writes for the keys' kernel mean
    (B H, T) = do . o, and per KEYS keys and row the units counted to their right and the sum of dp
    to their left.

    dz without a scattered sum: p falls along a row, in steps of one at most, so the keys with floor
    p = c are a run. Its last key stores the running sums of ds (1 - w) and of ds w in ends[c]; a
    run's own sum is the difference from the run before, column c + 1. The sums are carried in
    float32 from tile to tile, not as their rounded terms: where a row's positions stay in one
    column its sum nearly vanishes, as the ds of a row add up to 0."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i = tile * M + tl.arange(0, M)
    slot = tl.program_id(1).to(tl.int64)
    bh = first + slot
    z += bh * T * NPOS
    ends += slot * T * NPOS * 2
    tables = slot * tl.cdiv(T, KEYS) * T
    row, real = tl.minimum(i, T - 1), i < T
    q_tile = load(q, bh, H, i, T, D, P)
    g = load(do, bh, H, i, T, D, P)
    o_tile = load(o, bh, H, i, T, D, P).to(tl.float32)
    o_tile += load(rest, bh, H, i, T, D, P).to(tl.float32)
    row_mean = tl.sum(o_tile * g.to(tl.float32), 1)
    tl.store(mean + bh * T + i, row_mean, mask=real)
    # infinite past the last query, for no weights there
    row_lse = tl.load(lse + bh * T + i, mask=real, other=float("inf"))
    units_right = tl.load(count + bh * T + i, mask=real, other=0)
    top_column = tl.minimum(units_right, (NPOS - 1) * UNIT) >> BITS
    last = last_bias(z, row, NPOS, q_tile.dtype) * LOG2E - row_lse
    acc = tl.zeros((M, P), tl.float32)
    if gq is not None:
        gq_tile = load(gq, bh, H, i, T, D, P)
        acc_g = tl.zeros((M, P), tl.float32)
    dp_left = tl.zeros((M,), tl.float32)
    low = tl.zeros((M,), tl.float32)
    high = tl.zeros((M,), tl.float32)

    left_at = tl.load(exits + bh * tl.cdiv(T, ROWS) + tile * M // ROWS) // N
    edges = (0, left_at, tile * M // N, tl.cdiv(tl.minimum(tile * M + M, T), N))  # in tiles of keys
    for part in tl.static_range(3):
        for n in range(edges[part], edges[part + 1]):
            j = n * N + tl.arange(0, N)
            seen = i[:, None] >= j[None, :]
            k_tile = load(k, bh, H, j, T, D, P, part == MASKED)
            s = matmul(q_tile, tl.trans(k_tile)) * scale
            dw = matmul(g, tl.trans(load(v, bh, H, j, T, D, P, part == MASKED)))
            dw = drop(dw, seed, bh, i[:, None], j[None, :], DROPOUT)
            if part == SATURATED:
                ds = tl.exp2(s + last[:, None]) * (dw - row_mean[:, None])
                low += tl.sum(ds, 1)
            else:
                gate_logit = s
                if gq is not None:
                    gk_tile = load(gk, bh, H, j, T, D, P, part == MASKED)
                    gate_logit = matmul(gq_tile, tl.trans(gk_tile)) * scale
                gate, units = gates(gate_logit, seen, part == MASKED)
                table = tables + n // (KEYS // N) * T + i
                tl.store(left + table, dp_left, mask=real & (n % (KEYS // N) == 0))
                units_right -= tl.sum(units, 1).to(tl.int32)
                tl.store(right + table, units_right, mask=real)  # the last of the KEYS counts
                counted = whole(matmul(units.to(tl.float16), triangle(N, tl.float16)))
                p = units_right[:, None] + counted
                column = clamp(p, NPOS) >> BITS
                next_column = clamp(p - whole(units), NPOS) >> BITS
                bias, slope, w = look_up(z, row[:, None], clamp(p, NPOS), NPOS, q_tile.dtype)
                ds = tl.exp2(s + bias * LOG2E - row_lse[:, None]) * (dw - row_mean[:, None])
                if part == MASKED:
                    ds = tl.where(seen, ds, 0.0)
                upto = tl.trans(triangle(N, k_tile.dtype))
                ds_w = ds * w
                high_sum = high[:, None] + matmul(ds_w.to(k_tile.dtype), upto)
                high += tl.sum(ds_w, 1)
                low_sum = low[:, None] + matmul((ds - ds_w).to(k_tile.dtype), upto)
                low += tl.sum(ds - ds_w, 1)
                run_ends = (column != next_column) & real[:, None]
                scatter(ends + (row[:, None] * NPOS + column) * 2, low_sum, high_sum, run_ends)
                dp = ds * slope
                dg = dp_left[:, None] + matmul(dp.to(k_tile.dtype), upto)
                dp_left += tl.sum(dp, 1)
                dg *= gate - gate * gate
                if part == MASKED:
                    dg = tl.where(seen, dg, 0.0)
                if gq is None:
                    ds += dg
                else:
                    acc_g = matmul(dg.to(k_tile.dtype), gk_tile, acc_g)
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)

    store(dq, bh, H, i, acc * (scale * LN2), T, D, P)  # 1 / sqrt(d)
    if gq is not None:
        store(dgq, bh, H, i, acc_g * (scale * LN2), T, D, P)
    tl.store(ends + row * NPOS * 2, low, mask=real)  # column 0 is where every row ends
    tl.store(ends + row * NPOS * 2 + 1, high, mask=real)
    tl.debug_barrier()  # the rows' ends were stored by other threads
    for c0 in range(0, NPOS, C):
        c, here = c0 + tl.arange(0, C)[None, :], real[:, None]
        stored, above = here & (c <= top_column[:, None]), here & (c < top_column[:, None])
        left_stored = here & (c > 0) & (c <= top_column[:, None] + 1)
        low_c = ends + (row[:, None] * NPOS + c) * 2
        own = tl.load(low_c, mask=stored, other=0.0) - tl.load(low_c + 2, mask=above, other=0.0)
        left_high = tl.load(low_c - 1, mask=left_stored, other=0.0)
        high_c = tl.load(low_c + 1, mask=stored & (c > 0), other=0.0)
        at = dz + (bh * T + row[:, None]) * NPOS + c
        tl.store(at, own + left_high - high_c, mask=here & (c < NPOS))


@triton.jit(do_not_specialize=["T", "first"])
def cope_backward_kv(q, k, v, gq, gk, do, dk, dv, dgk, z, lse, exits, mean, right, left, seed,
                     scale, T, H, first, ROWS: constexpr, DROPOUT: constexpr, NPOS: constexpr,
                     D: constexpr, P: constexpr, M: constexpr, N: constexpr):
    """dk, dv and d gate_k; a tile of keys visits all queries that see it: those under the mask,
    then the forward tiles that still counted when they met these keys, then those that were
    saturated."""
    j0 = tl.program_id(0) * N
    j = j0 + tl.arange(0, N)
    slot = tl.program_id(1).to(tl.int64)
    bh = first + slot
    z += bh * T * NPOS
    lse += bh * T
    mean += bh * T
    exits += bh * tl.cdiv(T, ROWS)
    tables = (slot * tl.num_programs(0) + tl.program_id(0)) * T
    k_tile = load(k, bh, H, j, T, D, P)
    v_tile = load(v, bh, H, j, T, D, P)
    acc_k = tl.zeros((N, P), tl.float32)
    acc_v = tl.zeros((N, P), tl.float32)
    if gq is not None:
        gk_tile = load(gk, bh, H, j, T, D, P)
        acc_g = tl.zeros((N, P), tl.float32)
    below = tl.minimum(tl.cdiv(j0 + N, M) * M, T)  # from this query on, all see the whole tile

    for part in tl.static_range(2, -1, -1):
        tile_end = 1 if part == MASKED else tl.cdiv(T, ROWS)
        for tile in range(0 if part == MASKED else below // ROWS, tile_end):
            if part == MASKED:
                i_start, i_end = j0 // M * M, below
            else:
                i_start = tl.maximum(tile * ROWS, below)
                i_end = tl.minimum(tile * ROWS + ROWS, T)
                counts = tl.load(exits + tile) <= j0
                i_end = tl.where(counts == (part == COUNTED), i_end, i_start)
            for i0 in range(i_start, i_end, M):
                i = i0 + tl.arange(0, M)
                row, real = tl.minimum(i, T - 1), i < T
                seen = i[None, :] >= j[:, None]
                q_tile = load(q, bh, H, i, T, D, P)
                g = load(do, bh, H, i, T, D, P)
                row_lse = tl.load(lse + i, mask=real, other=float("inf"))
                row_mean = tl.load(mean + i, mask=real, other=0.0)
                s = matmul(k_tile, tl.trans(q_tile)) * scale
                if part == SATURATED:
                    last = last_bias(z, row, NPOS, q_tile.dtype) * LOG2E - row_lse
                    weight = tl.exp2(s + last[None, :])
                else:
                    gate_logit = s
                    if gq is not None:
                        gq_tile = load(gq, bh, H, i, T, D, P)
                        gate_logit = matmul(gk_tile, tl.trans(gq_tile)) * scale
                    gate, units = gates(gate_logit, seen, part == MASKED)
                    counted = whole(matmul(tl.trans(triangle(N, tl.float16)), units.to(tl.float16)))
                    p = tl.load(right + tables + i, mask=real, other=0)[None, :] + counted
                    bias, slope, w = look_up(z, row[None, :], clamp(p, NPOS), NPOS, q_tile.dtype)
                    weight = tl.exp2(s + bias * LOG2E - row_lse[None, :])
                if part == MASKED:
                    weight = tl.where(seen, weight, 0.0)
                dw = matmul(v_tile, tl.trans(g))
                dw = drop(dw, seed, bh, i[None, :], j[:, None], DROPOUT)
                kept = drop(weight, seed, bh, i[None, :], j[:, None], DROPOUT)
                acc_v = matmul(kept.to(g.dtype), g, acc_v)
                ds = weight * (dw - row_mean[None, :])
                if part != SATURATED:
                    dg = matmul(triangle(N, g.dtype), (ds * slope).to(g.dtype))
                    dg += tl.load(left + tables + i, mask=real, other=0.0)[None, :]
                    dg *= gate - gate * gate
                    if part == MASKED:
                        dg = tl.where(seen, dg, 0.0)
                    if gq is None:
                        ds += dg
                    else:
                        acc_g = matmul(dg.to(g.dtype), gq_tile, acc_g)
                acc_k = matmul(ds.to(g.dtype), q_tile, acc_k)

    store(dk, bh, H, j, acc_k * (scale * LN2), T, D, P)
    store(dv, bh, H, j, acc_v, T, D, P)
    if gq is not None:
        store(dgk, bh, H, j, acc_g * (scale * LN2), T, D, P)


def cope_results(z, q, k, v, gate_q, gate_k, both, seed, dropout):
    """o and what 16 bits leave of it, lse (B H, T), count (B H, T) in units, exits (B H, tiles) in
    keys"""
    B, H, T, _ = q.shape
    lse = q.new_empty(B * H, T, dtype=torch.float32)
    count = torch.empty_like(lse, dtype=torch.int32)
    return [empty_heads(q), empty_heads(q), lse, count, count.new_empty(B * H, math.ceil(T / ROWS))]


def run_cope(results, z, q, k, v, gate_q, gate_k, both, seed, dropout):
    o, rest, lse, count, exits = results
    B, H, T, d = q.shape
    launch(cope_forward, exits.shape[::-1], *strided(q, k, v, gate_q, gate_k, o, rest), both, lse,
           count, exits, seed, d**-0.5 / math.log(2), T, H, DROPOUT=dropout, NPOS=z.size(-1),
           **sizes(q, cope_forward))


def cope_gradients(do, saved, numbers):
    *qkv_and_gates, both, _, _, _, _, _, _ = saved
    dz = do.new_empty(both.shape)
    return [dz, *(empty_heads(x) for x in qkv_and_gates if x is not None)]


def run_cope_backward(grads, do, saved, numbers):
    dz, dq, dk, dv, dgq, dgk = (*grads, None, None)[:6]
    q, k, v, gate_q, gate_k, both, seed, o, rest, lse, count, exits = saved
    B, H, T, d = q.shape
    npos, tiles, scale = dz.size(-1), math.ceil(T / KEYS), d**-0.5 / math.log(2)
    heads = min(B * H, max(1, BORROWED // (8 * T * (tiles + npos))))  # at a time
    mean = torch.empty_like(lse)
    right = count.new_empty(heads, tiles, T)
    left = lse.new_empty(heads, tiles, T)
    ends = lse.new_empty(heads, T, npos, 2)
    shared = dict(ROWS=ROWS, DROPOUT=numbers[0], NPOS=npos)
    rows, keys = sizes(q, cope_backward_q), sizes(q, cope_backward_kv)
    C = min(64, triton.next_power_of_2(npos))
    for first in range(0, B * H, heads):
        n = min(heads, B * H - first)
        launch(cope_backward_q, (triton.cdiv(T, rows["M"]), n),
               *strided(q, k, v, gate_q, gate_k, o, rest, do, dq, dgq), both, lse, count, exits, dz,
               ends, mean, right, left, seed, scale, T, H, first, KEYS=KEYS, C=C, **shared, **rows)
        launch(cope_backward_kv, (tiles, n), *strided(q, k, v, gate_q, gate_k, do, dk, dv, dgk),
               both, lse, exits, mean, right, left, seed, scale, T, H, first, **shared, **keys)


cope_op = operator(
    "cope", "Tensor z, Tensor q, Tensor k, Tensor v, Tensor? gate_q, Tensor? gate_k, Tensor both, "
    "Tensor? seed, float dropout",
    cope_results, run_cope, cope_gradients, run_cope_backward, spared=1)


def cope_attention(q, k, v, z, gate_q=None, gate_k=None, dropout=0.0):
    """Causal attention with CoPE's bias (top of this file), differentiable in all its arguments.

    q, k, v         (B, H, T, d), d <= 128, float16, bfloat16 or float32; q and k may be rotated
                    (cope+rope)
    z               (B, H, T, npos), 2 <= npos: q @ e of the raw q, so that autograd gives e its
                    gradient; cast to q's dtype
    gate_q, gate_k  (B, H, T, d): by default q and k, whose logits then serve twice; gate_k = v for
                    value gates, a projection of the input for separate keys, the raw q and k in
                    cope+rope
    dropout         the share of attention weights that are set to 0, drawn anew by every call
    returns o       (B, H, T, d)
    """
    if gate_q is not None or gate_k is not None:
        gate_q, gate_k = q if gate_q is None else gate_q, k if gate_k is None else gate_k
    for name, x in dict(q=q, k=k, v=v, gate_q=gate_q, gate_k=gate_k).items():
        if x is not None and (x.shape != q.shape or x.dtype != q.dtype or x.size(-1) > 128):
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; CoPE's kernels take the shape "
                             "and dtype of q, at most 128 wide")
    if z.shape[:3] != q.shape[:3] or z.size(-1) < 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be {tuple(q.shape[:3])} by npos >= 2")
    T, npos = z.shape[2:]
    refuse_large(q, k, v, gate_q, gate_k, reach=T * max(2048, 2 * npos, math.ceil(T / KEYS)))
    z = z.to(q.dtype)
    # (z[c], z[c + 1]) as one word, for one load. The last needs no neighbour, as a clamped position
    # is an integer
    both = torch.stack((z.detach(), F.pad(z.detach()[..., 1:], (0, 1))), -1)
    both = both.view(torch.int32 if z.element_size() == 2 else torch.int64).squeeze(-1)
    return cope_op(z, q, k, v, gate_q, gate_k, both, draw_seed(q, dropout), dropout)[0]


# -------------------------------------------------------------------------------------------------
# may a model use them?


def why_not(pe, head_dim, device, dtype, hard_attention=False):
    """Why no kernel computes the attention of a layer, in a few words, or None if one does. pe: the
    layer's methods, such as "cope+rope"."""
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
    print(f"kernels on this machine: {reason or 'yes'}. Checks: python -m pytest "
          "tests/test_kernels.py; times: python tests/bench.py")


if __name__ == "__main__":
    main()
