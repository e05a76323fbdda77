"""
An optional fast path: causal attention as Triton kernels, without a T x T matrix in memory. Only
CoPE's backward pass keeps something that grows with T^2, namely T^2 / 32 numbers per head.

The same kernels serve four methods, and combinations such as `pope+fox`. ALiBi and FoX add a bias
to the logit of each key. CoPE finds its bias by counting keys. PoPE is plain attention whose
q and k have width 2d. PyTorch rotates them beforehand, so the kernel reads twice the memory for q
and k that it would read if it rotated them itself (PoPE, section 3). In return, one kernel serves
every method.

Read FlashAttention-2 first (arXiv:2307.08691). On a first reading, skip what this text says from
CoPE on, and each `if COUNTS` in the code. What is left is FlashAttention with a bias for each key.

Attention. i is a query, j and t are keys, and d is the width of v. dX is the gradient of the loss
with respect to X, and * multiplies entry by entry. S_ij is -inf where j > i.

    S = Q K^T / sqrt(d)    P = softmax(S)    O = P V
    dV = P^T dO            dP = dO V^T
    dS = P * (dP - rowsum(P * dP)) = P * (dP - rowsum(dO * O))
    dQ = dS K / sqrt(d)    dK = dS^T Q / sqrt(d)

The two row sums are equal because sum_t P_it dP_it = sum_t P_it (dO_i . V_t) = dO_i . O_i. The
forward pass stores the log-sum-exp L of each row, from which the backward passes recompute P =
exp(S - L) tile by tile (FlashAttention, arXiv:2205.14135). With dropout's factors R,
O = (R * P) V, dV = (R * P)^T dO and dP = R * (dO V^T). The P in dS has no factor.

A bias for each key. ALiBi and FoX add b_j - b_i to S_ij. In ALiBi b_j = m j, and in FoX
b_j = -(log f_0 + .. + log f_j). In the softmax b_i cancels, because it is the same for all keys
of a row. So the kernels take only b_j, the key_bias, and its gradient is

    db_j = sum_i dS_ij - sum_t dS_jt          d(log f_l) = - sum over j >= l of db_j

where dS is the gradient of S + b. The second sum, a row sum of dS, is the gradient of the b_i that
cancelled. In exact arithmetic it is 0. But O is stored in 16 bits, so the sum is not quite 0,
and d(log f_l) would add up the errors of all rows j >= l. With the second sum, the terms dS_it with
t >= l cancel, and only those with t < l <= i are left. Each has an error in proportion to its
weight P_it, which forgetting makes small. In bfloat16 with T = 1024 and gates near 1/2, the
gradient of the gates is off by 0.2%, and by 2 to 13% without the second sum.

CoPE (arXiv:2405.18719, section 4, Listing 1). P = softmax(S + a), where the bias a depends on how
many of the keys j to i the query counts. z_i = q_i e (e is learned) holds a_ij for integer p_ij.

    g_ij = sigmoid(S_ij)                      the gate, of S or of gate_q.gate_k / sqrt(d)
    p_ij = min(g_ij + .. + g_ii, npos - 1)    the position of key j, as query i sees it
    a_ij = (1 - w) z_i[c] + w z_i[c + 1]      the bias; column c = floor(p_ij), w = p_ij - c

In the backward pass, dS is the gradient of S + a. The slope of a in p is z_i[c + 1] - z_i[c]. But
it is 0 if p is an integer (as a clamped p is), because Listing 1 then reads only z_i[p]. A gate
g_ij is a term of p_it for all t <= j, so

    dp_it = dS_it slope_it
    dg_ij = sum over t <= j of dp_it          a running sum along the row
    dG_ij = dg_ij g_ij (1 - g_ij)             the gradient of the gate's own logit

dQ and dK take dS + dG. If the gates have a gate_q and gate_k of their own, these take dG, and dQ
and dK take only dS.

The gradient dz_i[c] sums dS (1 - w) over the keys in column c, and dS w over those in column c-1.
To scatter these terms would need atomics. But from left to right p never rises, so the keys of
column c are neighbours. Call them run c. From one key to the next, p falls by at most 1, so no
column but 0 is skipped, and run c begins where run c + 1 ends. A sum over run c is therefore the
difference of a running sum between the ends of runs c + 1 and c. Two running sums from the left
are enough: lower, of dS (1 - w), and upper, of dS w. lower[c] and upper[c] are their values at the
last key of run c (for column 0, at the query), or 0 for columns above that of the leftmost run. So

    dz[c] = (lower[c] - lower[c + 1]) + (upper[c - 1] - upper[c])

where the second term is left out of dz[0]. This example is the row of query 5, with npos = 4 and
z = (0, 2, 1, 3). The dS of its six keys sum to 0:

    key          0     1     2     3     4     5
    g           .5   .75   .75    .5    .5   .75
    p            3     3   2.5  1.75  1.25   .75    summed from the right; 3.75, 3.25 are clamped
    c            3     3     2     1     1     0    runs: keys 0 and 1, key 2, keys 3 and 4, key 5
    w            0     0    .5   .75   .25   .75
    dS           2    -4     6    -4     8    -8
    slope        0     0     2    -1    -1     2
    dp           0     0    12     4    -8   -16
    dg           0     0    12    16     8    -8    summed from the left
    lower        2    -2     1     0     6     4    at the ends of runs 3 .. 0: -2, 1, 6 and 4
    upper        0     0     3     0     2    -4    at the ends of runs 3 .. 0: 0, 3, 2 and -4
    dz          -2    -1     2     1                for c = 0 .. 3; dz[2] = (1 - (-2)) + (2 - 3)

The kernels see this row in tiles of keys and carry the sums from one tile to the next. Here they
are for two tiles of three keys, in the order of the passes. units_right is the sum of the gates to
the right of a tile, and units_total is that of the whole row. dp_left, lower_left and upper_left
are the sums to its left. The code counts in units of 1/2048 of a gate, so 1.75 here is 3584 there:

    pass                   keys     before the tile                after the tile
    attention_forward      3 .. 5   units_right 0                  units_right 1.75
                           0 .. 2   units_right 1.75               units_right 3.75 = units_total
    attention_backward_q   0 .. 2   units_right 3.75, dp_left 0,   units_right 1.75, dp_left 12,
                                    lower_left 0, upper_left 0     lower_left 1, upper_left 3
                           3 .. 5   units_right 1.75, dp_left 12,  units_right 0, dp_left -8,
                                    lower_left 1, upper_left 3     lower_left 4, upper_left -4

Within the tile of keys 0 .. 2 the gates sum to (2, 1.5, .75) from the right. With the 1.75 of the
keys to the right, that makes 3.75, 3.25 and 2.5, which are the p of the table before the clamp.
attention_backward_q walks the other way, so it takes the 2 of this tile off the total first. It
stores the 1.75 and the dp_left of 0 for attention_backward_kv, which sees only this tile of keys.
Runs 3 and 2 end here, so the pairs (lower, upper) at their last keys, (-2, 0) and (1, 3), are
stored for dz. Run 0 ends at the query itself, and its pair is stored after the walk.

Three parts. Once all rows of a tile of QUERIES queries have counted to npos - 1, the keys further
left all have the bias z_i[npos - 1], and there CoPE is plain attention. Without CoPE, nothing is
counted, and everything left of the mask is plain. A tile that begins with query i0 sees these keys,
and the passes walk over them as the arrows show:

     key 0                                       key i0     i0 + QUERIES
       +--------------------+----------------------+-------------+
       |       plain        |       counted        |   masked,   |
       |    p = npos - 1    | gates, sums, look-up | and counted |
       +--------------------+----------------------+-------------+
                            <------------------------------------  attention_forward sums gates
       ------------------->                                        attention_forward, after that
       --------------------------------------------------------->  attention_backward_q sums dp

attention_backward_kv has a tile of keys j0 .. j0 + N - 1 and visits the queries that see it. Each
tile of queries stopped counting at a key of its own, so counted and plain tiles may alternate:

     query j0      j0 + N                                                T
       +-------------+---------+-------+---------+------------------------+
       |   masked,   | counted | plain | counted |         plain          |
       | and counted |         |       |         |                        |
       +-------------+---------+-------+---------+------------------------+
        visited first   second    third   second    third

Rounding. The passes add the gates in different orders, and inexact sums would disagree about
floor(p). Therefore the kernels round gates to multiples of 1/2048, the unit of positions, whose
sums are exact in any order. Only a logit that two passes compute differently in its last bit can
move a gate by one unit. Gradients ignore the rounding, apart from the slope at an integer. (There
model.py takes z[p + 1] - z[p]. But hardly any p is an integer there, because they are not rounded.)

No atomics are used, so the same input gives the same bits. The kernels have not run on a GPU yet.
"""
import functools
import math
import os
from types import SimpleNamespace
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the import must not fail, so that why_not can name what is missing
    constexpr = float  # or anything else that can be called with a number
    triton = SimpleNamespace(jit=lambda kernel: kernel, __version__=None)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads this when it is imported
ASM = constexpr(not INTERPRET)  # the interpreter cannot run inline assembly
LOG2E = constexpr(math.log2(math.e))

# --- shared by all kernels ------------------------------------------------------------------------
# A program takes M queries or N keys of head bh = 0 .. B H - 1. q and k have width D; v and the
# gates' vectors have width DV, the d of the derivation. A tensor (B, H, T, width) is given as
# (pointer, strides of batch, head, token). Logits in base 2 have a factor of log2(e), for exp2

@triton.jit
def load(x, bh, H, rows, T, WIDTH, EDGE=True):
    """Loads rows of one head. The tile is as wide as the smallest power of two that holds WIDTH,
    and it is 0 outside the tensor. EDGE must be set if some rows may lie past T."""
    cols = tl.arange(0, triton.next_power_of_2(WIDTH))
    at = x[0] + bh // H * x[1] + bh % H * x[2] + rows[:, None] * x[3] + cols[None, :]
    mask = (cols < WIDTH)[None, :]
    if EDGE:
        mask &= (rows < T)[:, None]
    return tl.load(at, mask=mask, other=0.0)

@triton.jit
def store(x, bh, H, rows, tile, T, WIDTH):
    cols = tl.arange(0, tile.shape[1])
    at = x[0] + bh // H * x[1] + bh % H * x[2] + rows[:, None] * x[3] + cols[None, :]
    mask = (rows < T)[:, None] & (cols < WIDTH)[None, :]
    tl.store(at, tile.to(x[0].dtype.element_ty), mask=mask)

@triton.jit
def load_bias(key_bias, bh, j, T):
    return tl.load(key_bias + bh * T + j, mask=j < T, other=0.0) * LOG2E  # for logits in base 2

@triton.jit
def matmul(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # no tf32 where the inputs are float32

@triton.jit
def mask_future(x, causal, NEEDED, value=0.0):
    """If NEEDED, sets x to value where causal is False because the key follows the query."""
    if NEEDED:
        x = tl.where(causal, x, value)
    return x

@triton.jit
def mix(x):
    """Hashes 32 bits, as Wellons' lowbias32 does: flipping any bit of x flips each bit of the
    result about half of the time."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)

@triton.jit
def dropout(seed, bh, i, j, DROPOUT):
    """Returns dropout's factors, which are 0 for a random fraction of the weights. They depend only
    on seed, head, query and key, so every pass draws the same mask, whatever its tiles are. Queries
    and keys are hashed separately first, so that each pair needs only one more hash."""
    factor = 1.0
    if DROPOUT > 0:
        seed_bits = tl.load(seed)
        head_hash = mix(seed_bits.to(tl.uint32) ^ bh.to(tl.uint32))
        query_hash = mix(head_hash ^ mix(i.to(tl.uint32)))
        key_hash = mix((seed_bits >> 32).to(tl.uint32) + j.to(tl.uint32))
        dropped = mix(query_hash ^ key_hash) < tl.cast(DROPOUT * 4294967296.0, tl.uint32)  # 2^32
        factor = tl.where(dropped, 0.0, 1 / (1 - DROPOUT))
    return factor

@triton.jit
def online_softmax(s, scale, v, factor, row_max, weight_sum, acc):
    """Adds a tile of keys with logits s * scale (M, N) to weight_sum (M,), the sum of weights, and
    to acc (M, DV), that of weighted values, both relative to 2^row_max. Dropout scales only acc."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    weights = tl.exp2(s * scale - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    weight_sum = weight_sum * shrink + tl.sum(weights, 1)
    acc = matmul((weights * factor).to(v.dtype), v, acc * shrink[:, None])  # (M, N) x (N, DV)
    return new_max, weight_sum, acc

# --- how CoPE counts ------------------------------------------------------------------------------
# Positions are integers, in units of 1/2048. z_pairs (B, H, T, npos) packs z[c] and z[c + 1] into
# one word of 32 bits, so that a look-up is one load

PLAIN, COUNTED, MASKED = constexpr(0), constexpr(1), constexpr(2)  # the parts of the pictures above
BITS = constexpr(11)  # of a position's fraction; with more, float16 could not hold every gate
UNIT = constexpr(2048)  # 2^BITS, a gate of 1
MAGIC = constexpr(2.0**23)  # a float32 of this size has no bits for a fraction, so adding it rounds
MAGIC_BITS = constexpr(0x4B000000)  # the bits of 2^23; those of 2^23 + x are MAGIC_BITS + x
TILES_PER_CHECK = constexpr(2)  # tiles of keys between checks of whether all rows are at npos - 1
COLUMNS = constexpr(64)  # columns of dz that store_dz takes at a time

@triton.jit
def round_to_int(x):
    """Rounds x, a float32 from 0 to 2^23, to an int32, more cheaply than a conversion would."""
    return (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS

@triton.jit
def clamp(p, NPOS):
    """Clamps p, in units, to 0 .. npos - 1 gates. It can be below 0 if the logits of two passes
    differ in the last bit."""
    return tl.maximum(tl.minimum(p, (NPOS - 1) * UNIT), 0)

@triton.jit
def gates_of(logit, causal, NEEDED):
    """Returns the gates, and the gates in units, rounded but still in float32. Only the latter are
    0 in the future."""
    root = tl.rsqrt(1.0 + tl.exp2(-logit))
    gate = root * root  # the sigmoid; Triton's division would take more instructions
    return gate, mask_future((gate * UNIT + MAGIC) - MAGIC, causal, NEEDED)

@triton.jit
def triangle(N, DTYPE):
    """Returns (N, N) with ones on and below the diagonal. x (M, N) @ triangle sums x from each key
    to the right end, and x @ triangle^T from the left end to each key. Tensor cores do both."""
    return (tl.arange(0, N)[:, None] >= tl.arange(0, N)[None, :]).to(DTYPE)

@triton.jit
def prefix_sums(x, left, N, DTYPE):
    """Returns the running sums of x (M, N) along the keys, and `left` for the next tile. left (M,)
    is the sum over the tiles to the left. x is added to it before the rounding to DTYPE, because
    16-bit rounding errors would build up."""
    sums = matmul(x.to(DTYPE), tl.trans(triangle(N, DTYPE)))  # (M, N) x (N, N) -> (M, N)
    return left[:, None] + sums, left + tl.sum(x, 1)

@triton.jit
def unpack(word, ZTYPE):
    """Returns the z[c] and z[c + 1] of a word of z_pairs, in float32."""
    if ZTYPE == tl.bfloat16:  # a bfloat16 is the upper half of a float32
        z_floor = (word << 16).to(tl.float32, bitcast=True)
        z_ceil = (word & -65536).to(tl.float32, bitcast=True)
    else:  # float16, to which a float32 z was rounded too
        z_floor = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        z_ceil = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return z_floor, z_ceil

@triton.jit
def last_bias(z_pairs, row, NPOS, ZTYPE):
    """Returns z[npos - 1] times log2(e), the bias of all plain keys."""
    return unpack(tl.load(z_pairs + row * NPOS + NPOS - 1), ZTYPE)[0] * LOG2E

@triton.jit
def load_words(at):
    """Loads a tile of 32-bit words from scattered addresses. This is in assembly, because tl.load
    would first move the addresses through shared memory."""
    if ASM:
        words = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)],
                                          dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = tl.load(at)
    return words

@triton.jit
def store_two(at, x, y, mask):
    """Stores x and y side by side. Assembly does it in one instruction, and returns a 0 because
    Triton requires a result."""
    if ASM:
        code: constexpr = ("{ .reg .pred p; setp.ne.b32 p, $4, 0; "
                           "@p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }")
        tl.inline_asm_elementwise(code, "=r,l,f,f,r", [at.to(tl.int64), x, y, mask.to(tl.int32)],
                                  dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, x, mask=mask)
        tl.store(at + 1, y, mask=mask)

@triton.jit
def look_up(z_pairs, row, p, NPOS, ZTYPE):
    """Returns the bias times log2(e) at clamped positions p, the slope of the bias without that
    factor, and w."""
    z_floor, z_ceil = unpack(load_words(z_pairs + (row * NPOS + (p >> BITS))), ZTYPE)
    # the bits of the fraction make a float in [1, 2), from which 1 is subtracted
    w = ((p << (23 - BITS)) & 0x7FF000 | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    slope = tl.where(w > 0, z_ceil - z_floor, 0.0)
    return (z_floor + w * (z_ceil - z_floor)) * LOG2E, slope, w

@triton.jit
def store_dz(dz, dz_row, run_ends, row, valid, first_run, NPOS):
    """Stores dz[c] = (lower[c] - lower[c + 1]) + (upper[c - 1] - upper[c]), COLUMNS at a time. The
    leftmost run of a row is in column first_run (M,), and above it both sums are 0. If lower[c] is
    at `at`, upper[c] is at `at + 1`, lower[c + 1] at `at + 2` and upper[c - 1] at `at - 1`."""
    for c0 in range(0, NPOS, COLUMNS):
        c = c0 + tl.arange(0, COLUMNS)[None, :]
        row_exists = valid[:, None]
        has_run = row_exists & (c <= first_run[:, None])
        at = run_ends + (row[:, None] * NPOS + c) * 2
        lower = tl.load(at, mask=has_run, other=0.0)
        next_lower = tl.load(at + 2, mask=row_exists & (c < first_run[:, None]), other=0.0)
        previous_has_run = row_exists & (c > 0) & (c - 1 <= first_run[:, None])
        previous_upper = tl.load(at - 1, mask=previous_has_run, other=0.0)
        upper = tl.load(at + 1, mask=has_run & (c > 0), other=0.0)
        tl.store(dz + dz_row[:, None] * NPOS + c, lower - next_lower + previous_upper - upper,
                 mask=row_exists & (c < NPOS))

# --- the kernels ----------------------------------------------------------------------------------
# inputs: q, k, v; key_bias (B, H, T) in float32; gate_q, gate_k; z_pairs. All but q, k and v may be
# None, and Triton then leaves out their code. Without z_pairs nothing is counted. Without gate_q
# the gates reuse the logits. In Triton, `s += x` makes a new s, so gate_logit = s keeps the old one

@triton.jit
def attention_forward(inputs, saved, seed, T, H, QUERIES: constexpr, KEYS: constexpr,
                      NPOS: constexpr, DROPOUT: constexpr, D: constexpr, DV: constexpr,
                      M: constexpr, N: constexpr):
    """Computes o of one tile of queries. CoPE takes tiles of keys leftwards from the diagonal until
    every row is at npos - 1, and then the other keys from left to right, as plain attention.

    Fills saved: o; and lse (B, H, T), the log-sum-exp of each row in base 2. If it counts, it
    also fills o_residual, which is what rounding removed from o (without it, dz and dg would add up
    the errors of rowsum(dO * O)); units_total (B, H, T), each row's sum of gates; and plain_keys
    (B H, tiles), the number of keys at the left that each tile does not count."""
    tl.static_assert(M % N == 0, "the mask must begin where a tile of keys begins")
    q, k, v, key_bias, gate_q, gate_k, z_pairs = inputs
    COUNTS: constexpr = z_pairs is not None
    o, lse, o_residual, units_total, plain_keys = saved
    scale: constexpr = LOG2E * DV**-0.5
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # launches the longest rows first
    i = tile * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    q_tile = load(q, bh, H, i, T, D)
    row_max = tl.full((M,), -1e30, tl.float32)
    weight_sum = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, triton.next_power_of_2(DV)), tl.float32)
    diagonal = tile * M // N  # the first tile of keys under the mask
    right_edge = tl.cdiv(tl.minimum(tile * M + M, T), N)  # tiles of keys 0 .. right_edge - 1
    bounds = (0, diagonal, right_edge)  # of the tiles that step 2 takes without and with a mask

    # 1. the keys that are counted, from right to left, beginning with those under the mask
    if COUNTS:
        tl.static_assert(M == QUERIES, "the backward passes rely on where each tile stopped")
        tl.static_assert(N % KEYS == 0, "a tile of attention_backward_kv is counted or plain")
        z_pairs += bh * T * NPOS
        if gate_q is not None:
            gate_q_tile = load(gate_q, bh, H, i, T, DV)
        row = tl.minimum(i, T - 1)  # rows past T read the z of the last row
        units_right = tl.zeros((M,), tl.int32)  # units counted over the keys to the right
        # With masked = 1, one round of the `while` takes all tiles under the mask. It always runs,
        # because nothing is counted yet. With masked = 0, each round takes TILES_PER_CHECK tiles,
        # until all rows are at npos - 1
        for masked in tl.static_range(1, -1, -1):
            leftmost = diagonal if masked else 0
            while (right_edge > leftmost) & (tl.min(units_right, axis=0) < (NPOS - 1) * UNIT):
                next_edge = leftmost if masked else tl.maximum(right_edge - TILES_PER_CHECK, 0)
                for back in range(0, right_edge - next_edge):
                    j = (right_edge - 1 - back) * N + tl.arange(0, N)
                    k_tile = load(k, bh, H, j, T, D, masked)
                    s = matmul(q_tile, tl.trans(k_tile)) * scale  # (M, D) x (D, N) -> (M, N)
                    gate_logit = s  # without any bias
                    if gate_q is not None:  # (M, DV) x (DV, N) -> (M, N)
                        gate_k_tile = load(gate_k, bh, H, j, T, DV, masked)
                        gate_logit = matmul(gate_q_tile, tl.trans(gate_k_tile)) * scale
                    causal = i[:, None] >= j[None, :]
                    _, units = gates_of(gate_logit, causal, masked)
                    suffix = matmul(units.to(tl.float16), triangle(N, tl.float16))  # (M, N)
                    p = clamp(units_right[:, None] + round_to_int(suffix), NPOS)
                    bias, _, _ = look_up(z_pairs, row[:, None], p, NPOS, q_tile.dtype)
                    units_right += tl.sum(units, 1).to(tl.int32)
                    s += bias
                    if key_bias is not None:
                        s += load_bias(key_bias, bh, j, T)[None, :]
                    s = mask_future(s, causal, masked, float("-inf"))
                    v_tile = load(v, bh, H, j, T, DV, masked)
                    factor = dropout(seed, bh, i[:, None], j[None, :], DROPOUT)
                    row_max, weight_sum, acc = online_softmax(s, 1.0, v_tile, factor, row_max,
                                                              weight_sum, acc)
                right_edge = next_edge
        plain_bias = last_bias(z_pairs, row, NPOS, q_tile.dtype)
        row_max -= plain_bias  # below, s and row_max leave out this bias, because all keys share it
        bounds = (0, right_edge, right_edge)

    # 2. plain attention, from left to right; it ends under the mask if nothing is counted
    s_scale: constexpr = scale if key_bias is None else 1.0  # what online_softmax multiplies s by
    for masked in tl.static_range(1 if COUNTS else 2):
        for n in range(bounds[masked], bounds[masked + 1]):
            j = n * N + tl.arange(0, N)
            k_tile = load(k, bh, H, j, T, D, masked)
            s = matmul(q_tile, tl.trans(k_tile))  # (M, D) x (D, N) -> (M, N)
            if key_bias is not None:
                s = s * scale + load_bias(key_bias, bh, j, T)[None, :]
            s = mask_future(s, i[:, None] >= j[None, :], masked, float("-inf"))
            v_tile = load(v, bh, H, j, T, DV, masked)
            factor = dropout(seed, bh, i[:, None], j[None, :], DROPOUT)
            row_max, weight_sum, acc = online_softmax(s, s_scale, v_tile, factor, row_max,
                                                      weight_sum, acc)
    if COUNTS:
        row_max += plain_bias  # with the bias again
    # lse is stored before o, because the other order may spill registers
    tl.store(lse + bh * T + i, row_max + tl.log2(weight_sum), mask=i < T)
    acc /= weight_sum[:, None]
    store(o, bh, H, i, acc, T, DV)
    if COUNTS:
        store(o_residual, bh, H, i, acc - acc.to(q_tile.dtype).to(tl.float32), T, DV)
        tl.store(units_total + bh * T + i, units_right, mask=i < T)
        tl.store(plain_keys + bh * tl.num_programs(0) + tile, right_edge * N)

@triton.jit
def attention_backward_q(inputs, do, saved, grads, scratch, seed, T, H, first_head,
                         QUERIES: constexpr, KEYS: constexpr, NPOS: constexpr, DROPOUT: constexpr,
                         D: constexpr, DV: constexpr, M: constexpr, N: constexpr):
    """Computes dq, dgate_q and dz of one tile of queries. It takes tiles of keys from left to
    right, so positions start at units_total and fall. saved was filled by attention_forward.

    grads: dq, dgate_q, dz and dkey_bias. The last gets minus the row sums of dS, to which
    attention_backward_kv adds the column sums. That kernel also reads the first three parts of
    scratch: do_dot_o (B, H, T), which is rowsum(dO * O); units_right_at (heads, tiles of KEYS, T),
    the units counted to the right of a tile; and dp_left_at, the sum of dp to its left. The fourth,
    run_ends (heads, T, npos, 2), holds lower[c] and upper[c] of each row. Apart from do_dot_o,
    scratch holds only the heads from first_head on."""
    tl.static_assert(M % N == 0, "the mask must begin where a tile of keys begins")
    q, k, v, key_bias, gate_q, gate_k, z_pairs = inputs
    COUNTS: constexpr = z_pairs is not None
    o, lse, o_residual, units_total, plain_keys = saved
    dq, dgate_q, dz, dkey_bias = grads
    do_dot_o, units_right_at, dp_left_at, run_ends = scratch
    scale: constexpr = LOG2E * DV**-0.5
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i = tile * M + tl.arange(0, M)
    slot = tl.program_id(1).to(tl.int64)  # the index of this head in scratch
    bh = first_head + slot
    row = tl.minimum(i, T - 1)  # rows past T read the z of the last row
    valid = i < T

    # 1. what the rows need: rowsum(dO * O), the log-sum-exp, and the first values of their sums
    q_tile = load(q, bh, H, i, T, D)
    do_tile = load(do, bh, H, i, T, DV)
    o_tile = load(o, bh, H, i, T, DV).to(tl.float32)
    if COUNTS:
        o_tile += load(o_residual, bh, H, i, T, DV).to(tl.float32)
    row_do_o = tl.sum(o_tile * do_tile.to(tl.float32), 1)
    tl.store(do_dot_o + bh * T + i, row_do_o, mask=valid)
    row_lse = tl.load(lse + bh * T + i, mask=valid, other=float("inf"))  # past T, weights are 0
    plain_offset = -row_lse  # what is added to the s of plain keys before exp2
    acc = tl.zeros((M, triton.next_power_of_2(D)), tl.float32)
    ds_row_sum = tl.zeros((M,), tl.float32)
    diagonal = tile * M // N  # the first tile of keys under the mask
    end = tl.cdiv(tl.minimum(tile * M + M, T), N)
    bounds = (0, diagonal, diagonal, end)  # of the parts PLAIN, COUNTED and MASKED
    if COUNTS:
        tl.static_assert(QUERIES % M == 0, "all M queries must stop counting at the same key")
        tl.static_assert(KEYS % N == 0, "carried sums are stored at whole tiles")
        z_pairs += bh * T * NPOS
        run_ends += slot * T * NPOS * 2
        carried_offset = slot * tl.cdiv(T, KEYS) * T
        units_right = tl.load(units_total + bh * T + i, mask=valid, other=0)
        first_run = tl.minimum(units_right, (NPOS - 1) * UNIT) >> BITS
        plain_offset += last_bias(z_pairs, row, NPOS, q_tile.dtype)
        if gate_q is not None:
            gate_q_tile = load(gate_q, bh, H, i, T, DV)
            acc_gate = tl.zeros((M, triton.next_power_of_2(DV)), tl.float32)
        dp_left = tl.zeros((M,), tl.float32)
        lower_left, upper_left = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
        n_plain = tl.load(plain_keys + bh * tl.cdiv(T, QUERIES) + tile * M // QUERIES) // N
        bounds = (0, n_plain, diagonal, end)

    # 2. the walk over the keys
    # PLAIN, COUNTED, MASKED; if nothing is counted, only PLAIN and MASKED
    for part in tl.static_range(0, 3, 1 if COUNTS else 2):
        for n in range(bounds[part], bounds[part + 1]):
            j = n * N + tl.arange(0, N)
            causal = i[:, None] >= j[None, :]
            k_tile = load(k, bh, H, j, T, D, part == MASKED)
            s = matmul(q_tile, tl.trans(k_tile)) * scale  # (M, D) x (D, N) -> (M, N)
            gate_logit = s
            if key_bias is not None:
                s += load_bias(key_bias, bh, j, T)[None, :]
            v_tile = load(v, bh, H, j, T, DV, part == MASKED)
            dprob = matmul(do_tile, tl.trans(v_tile))  # (M, DV) x (DV, N) -> (M, N)
            dprob *= dropout(seed, bh, i[:, None], j[None, :], DROPOUT)
            if part == PLAIN or not COUNTS:
                prob = mask_future(tl.exp2(s + plain_offset[:, None]), causal, part == MASKED)
                ds = prob * (dprob - row_do_o[:, None])
                if COUNTS:
                    lower_left += tl.sum(ds, 1)  # w = 0, so upper does not grow, and dp is 0
            else:
                # gates and positions, as in attention_forward
                if gate_q is not None:  # (M, DV) x (DV, N) -> (M, N)
                    gate_k_tile = load(gate_k, bh, H, j, T, DV, part == MASKED)
                    gate_logit = matmul(gate_q_tile, tl.trans(gate_k_tile)) * scale
                gate, units = gates_of(gate_logit, causal, part == MASKED)
                # a tile of KEYS keeps dp_left of its first N keys, and units_right of its last N,
                # which overwrites that of the others
                at = carried_offset + n // (KEYS // N) * T + i
                tl.store(dp_left_at + at, dp_left, mask=valid & (n % (KEYS // N) == 0))
                units_right -= tl.sum(units, 1).to(tl.int32)
                tl.store(units_right_at + at, units_right, mask=valid)
                suffix = matmul(units.to(tl.float16), triangle(N, tl.float16))  # (M, N)
                p = units_right[:, None] + round_to_int(suffix)  # before the clamp
                column = clamp(p, NPOS) >> BITS
                next_column = clamp(p - round_to_int(units), NPOS) >> BITS  # p_ij - g_ij = p_i,j+1
                bias, slope, w = look_up(z_pairs, row[:, None], clamp(p, NPOS), NPOS, q_tile.dtype)
                # dS, and its sums for dz
                ds = tl.exp2(s + bias - row_lse[:, None]) * (dprob - row_do_o[:, None])
                ds = mask_future(ds, causal, part == MASKED)
                upper, upper_left = prefix_sums(ds * w, upper_left, N, k_tile.dtype)
                lower, lower_left = prefix_sums(ds - ds * w, lower_left, N, k_tile.dtype)
                is_last = (column != next_column) & valid[:, None]  # of its run
                store_two(run_ends + (row[:, None] * NPOS + column) * 2, lower, upper, is_last)
                # the gradient of the gates, from the running sum of dp
                dg, dp_left = prefix_sums(ds * slope, dp_left, N, k_tile.dtype)
                dgate_logit = mask_future(dg * (gate - gate * gate), causal, part == MASKED)
            if dkey_bias is not None:
                ds_row_sum += tl.sum(ds, 1)
            if COUNTS and part != PLAIN:
                if gate_q is None:
                    ds += dgate_logit
                else:  # (M, N) x (N, DV) -> (M, DV)
                    acc_gate = matmul(dgate_logit.to(k_tile.dtype), gate_k_tile, acc_gate)
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)  # (M, N) x (N, D) -> (M, D)

    # 3. the gradients; dz from the differences of the run ends
    store(dq, bh, H, i, acc * DV**-0.5, T, D)
    if dkey_bias is not None:
        tl.store(dkey_bias + bh * T + i, -ds_row_sum, mask=valid)
    if COUNTS:
        if gate_q is not None:
            store(dgate_q, bh, H, i, acc_gate * DV**-0.5, T, DV)
        tl.store(run_ends + row * NPOS * 2, lower_left, mask=valid)  # run 0 ends here
        tl.store(run_ends + row * NPOS * 2 + 1, upper_left, mask=valid)
        tl.debug_barrier()  # waits for the run ends that other threads stored
        store_dz(dz, bh * T + row, run_ends, row, valid, first_run, NPOS)

@triton.jit
def attention_backward_kv(inputs, do, saved, grads, scratch, seed, T, H, first_head,
                          QUERIES: constexpr, KEYS: constexpr, NPOS: constexpr, DROPOUT: constexpr,
                          D: constexpr, DV: constexpr, M: constexpr, N: constexpr):
    """Computes grads, which are dk, dv, dgate_k and dkey_bias, of one tile of keys, from all
    queries that see it: first those under the mask, then the tiles of queries that counted these
    keys, then those for which they were plain. Tiles are transposed, (N, M). It reads what
    attention_backward_q has left in dkey_bias and scratch."""
    tl.static_assert(N % M == 0, "the mask must end where a tile of queries ends")
    q, k, v, key_bias, gate_q, gate_k, z_pairs = inputs
    COUNTS: constexpr = z_pairs is not None
    o, lse, o_residual, units_total, plain_keys = saved
    dk, dv, dgate_k, dkey_bias = grads
    do_dot_o, units_right_at, dp_left_at, run_ends = scratch
    scale: constexpr = LOG2E * DV**-0.5
    j0 = tl.program_id(0) * N
    j = j0 + tl.arange(0, N)
    slot = tl.program_id(1).to(tl.int64)
    bh = first_head + slot
    lse += bh * T
    do_dot_o += bh * T
    k_tile = load(k, bh, H, j, T, D)
    v_tile = load(v, bh, H, j, T, DV)
    acc_k = tl.zeros((N, triton.next_power_of_2(D)), tl.float32)
    acc_v = tl.zeros((N, triton.next_power_of_2(DV)), tl.float32)
    ds_column_sum = tl.zeros((N,), tl.float32)
    if key_bias is not None:
        bias_tile = load_bias(key_bias, bh, j, T)
    if COUNTS:
        tl.static_assert(QUERIES % M == 0, "all M queries must stop counting at the same key")
        tl.static_assert(N == KEYS, "attention_backward_q stores the sums of such tiles")
        z_pairs += bh * T * NPOS
        plain_keys += bh * tl.cdiv(T, QUERIES)
        carried_offset = (slot * tl.num_programs(0) + tl.program_id(0)) * T
        if gate_q is not None:
            gate_k_tile = load(gate_k, bh, H, j, T, DV)
            acc_gate = tl.zeros((N, triton.next_power_of_2(DV)), tl.float32)
    i_unmasked = tl.minimum(j0 + N, T)  # from here on, queries see all N keys

    # MASKED, COUNTED, PLAIN; if nothing is counted, only MASKED and PLAIN
    for part in tl.static_range(2, -1, -1 if COUNTS else -2):
        # The queries i_start .. i_end - 1 of each part are
        #     MASKED                     j0 .. i_unmasked - 1
        #     COUNTED, PLAIN             of each later tile of QUERIES, those of this kind
        #     PLAIN, without counting    i_unmasked .. T - 1
        first_tile, end_tile = 0, 1  # one range is enough
        if COUNTS and part != MASKED:
            first_tile, end_tile = i_unmasked // QUERIES, tl.cdiv(T, QUERIES)
        for query_tile in range(first_tile, end_tile):
            if part == MASKED:
                i_start, i_end = j0, i_unmasked
            elif COUNTS:
                i_start = tl.maximum(query_tile * QUERIES, i_unmasked)
                i_end = tl.minimum(query_tile * QUERIES + QUERIES, T)
                counted = tl.load(plain_keys + query_tile) <= j0
                is_this_kind = counted == (part == COUNTED)
                i_end = tl.where(is_this_kind, i_end, i_start)  # otherwise the range is empty
            else:
                i_start, i_end = i_unmasked, T
            for i0 in range(i_start, i_end, M):
                i = i0 + tl.arange(0, M)
                row = tl.minimum(i, T - 1)
                valid = i < T
                causal = i[None, :] >= j[:, None]
                q_tile = load(q, bh, H, i, T, D)
                s = matmul(k_tile, tl.trans(q_tile)) * scale  # (N, D) x (D, M) -> (N, M)
                row_lse = tl.load(lse + i, mask=valid, other=float("inf"))
                gate_logit = s
                if key_bias is not None:
                    s += bias_tile[:, None]
                if not COUNTS:
                    prob = tl.exp2(s - row_lse[None, :])
                elif part == PLAIN:
                    plain_offset = last_bias(z_pairs, row, NPOS, q_tile.dtype) - row_lse
                    prob = tl.exp2(s + plain_offset[None, :])
                else:
                    if gate_q is not None:  # (N, DV) x (DV, M) -> (N, M)
                        gate_q_tile = load(gate_q, bh, H, i, T, DV)
                        gate_logit = matmul(gate_k_tile, tl.trans(gate_q_tile)) * scale
                    gate, units = gates_of(gate_logit, causal, part == MASKED)
                    # (N, N) x (N, M) -> (N, M)
                    suffix = matmul(tl.trans(triangle(N, tl.float16)), units.to(tl.float16))
                    units_right = tl.load(units_right_at + carried_offset + i, mask=valid, other=0)
                    p = clamp(units_right[None, :] + round_to_int(suffix), NPOS)
                    bias, slope, _ = look_up(z_pairs, row[None, :], p, NPOS, q_tile.dtype)
                    prob = tl.exp2(s + bias - row_lse[None, :])
                prob = mask_future(prob, causal, part == MASKED)
                do_tile = load(do, bh, H, i, T, DV)
                dprob = matmul(v_tile, tl.trans(do_tile))  # (N, DV) x (DV, M) -> (N, M)
                factor = dropout(seed, bh, i[None, :], j[:, None], DROPOUT)
                dprob *= factor
                acc_v = matmul((prob * factor).to(k_tile.dtype), do_tile, acc_v)  # (N, M) x (M, DV)
                row_do_o = tl.load(do_dot_o + i, mask=valid, other=0.0)
                ds = prob * (dprob - row_do_o[None, :])
                if dkey_bias is not None:
                    ds_column_sum += tl.sum(ds, 1)
                if COUNTS and part != PLAIN:
                    dp = (ds * slope).to(do_tile.dtype)
                    dg = matmul(triangle(N, do_tile.dtype), dp)  # (N, N) x (N, M) -> (N, M)
                    dg += tl.load(dp_left_at + carried_offset + i, mask=valid, other=0.0)[None, :]
                    dgate_logit = mask_future(dg * (gate - gate * gate), causal, part == MASKED)
                    if gate_q is None:
                        ds += dgate_logit
                    else:  # (N, M) x (M, DV) -> (N, DV)
                        acc_gate = matmul(dgate_logit.to(do_tile.dtype), gate_q_tile, acc_gate)
                acc_k = matmul(ds.to(do_tile.dtype), q_tile, acc_k)  # (N, M) x (M, D) -> (N, D)

    store(dk, bh, H, j, acc_k * DV**-0.5, T, D)
    store(dv, bh, H, j, acc_v, T, DV)
    if dkey_bias is not None:
        minus_row_sum = tl.load(dkey_bias + bh * T + j, mask=j < T)
        tl.store(dkey_bias + bh * T + j, minus_row_sum + ds_column_sum, mask=j < T)
    if COUNTS and gate_q is not None:
        store(dgate_k, bh, H, j, acc_gate * DV**-0.5, T, DV)

# --- launching ------------------------------------------------------------------------------------
# The attention is a pair of PyTorch operators, made by custom_op because triton_op does not take
# the CPU tensors of the interpreter. torch.compile learns all shapes from empty_outputs and
# empty_gradients

QUERIES = 64  # M of attention_forward if it counts; all these rows stop counting at the same key
KEYS = 64  # N of attention_backward_kv if it counts; for each such tile it needs the carried sums
KERNELS = attention_forward, attention_backward_q, attention_backward_kv
# (M, N, warps, stages) of each of KERNELS, chosen by counting instructions. A warp needs 16 rows,
# or tensor cores do the same work twice. Two programs fit on a multiprocessor, so that one computes
# while the other loads. If CoPE counts, there is one stage, because Triton 3.6 and 3.8 cannot
# pipeline that loop
TILES = {
    "narrow": ((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),  # a v of width up to 64
    "narrow, small chip": ((128, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),  # for PoPE
    "wide": ((128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)),  # a v of width up to 128
    "counting": ((QUERIES, 64, 4, 1), (64, 32, 4, 1), (32, KEYS, 4, 1)),
}

def is_small(device):
    """Returns whether a program may have less than 128 KB of shared memory on this device. It is
    99 KB on an RTX 4090 and 163 KB on an A100."""
    if device.type != "cuda":
        return False
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"] < 128 * 1024

@functools.cache
def compiled_once(kernel):
    """Returns a copy of a kernel, compiled once for all T. Triton would otherwise compile CoPE anew
    at T = 1, where 3.6 and 3.8 fail, and at multiples of 16, where it needs more registers."""
    return triton.jit(kernel.fn, do_not_specialize=["T", "first_head"])

def configure(kernel, q, v, z_pairs, dropout):
    """Returns the kernel to launch, with its constants and options."""
    npos = 0 if z_pairs is None else z_pairs.size(3)
    if npos:
        tiles = TILES["counting"]
    elif v.size(3) > 64:
        tiles = TILES["wide"]
    elif q.size(3) > 64 and is_small(q.device):
        tiles = TILES["narrow, small chip"]
    else:
        tiles = TILES["narrow"]
    M, N, warps, stages = tiles[KERNELS.index(kernel)]
    options = dict(QUERIES=QUERIES, KEYS=KEYS, NPOS=npos, DROPOUT=dropout, D=q.size(3),
                   DV=v.size(3), M=M, N=N, num_warps=warps, num_stages=stages)
    if npos:
        kernel = compiled_once(kernel)
    return kernel, options

def strided(x):
    """Returns (B, H, T, d) as (pointer, strides of batch, head and token), or None for None."""
    if x is None:
        return None
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(2)

def empty_heads(x):
    """Returns an empty (B, H, T, d), stored as (B, T, H, d), so merging heads copies nothing."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)

def present(x):
    """Returns x, or None if it is empty, because an operator cannot return None in a list."""
    return x if x.numel() else None

def launch(kernel, grid, inputs, *args, **options):
    """Runs a kernel on q's device, which need not be the current one."""
    q = inputs[0][0]
    if triton.__version__ is None or not (INTERPRET or q.is_cuda):
        raise ValueError(f"q is on {q.device}; the kernels need Triton and an NVIDIA GPU, or "
                         "TRITON_INTERPRET=1 in the environment, which interprets them on a CPU")
    with torch.cuda.device_of(q):
        # with fusion, s * scale - row_max is one instruction
        kernel[grid](inputs, *args, **options, enable_fp_fusion=True)

def pack(z):
    """Packs each z[c] with its right neighbour into one int32. The last column needs no neighbour,
    because a clamped position is an integer. float32, which only tests use, becomes float16."""
    z = z.half() if z.dtype == torch.float32 else z
    return torch.stack((z, F.pad(z[..., 1:], (0, 1))), -1).view(torch.int32).squeeze(-1)

def free_memory(device):  # in bytes
    if device.type != "cuda":
        return 2**30
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached

def kernel_inputs(q, k, v, key_bias, gate_q, gate_k, z_pairs):
    return (strided(q), strided(k), strided(v), key_bias, strided(gate_q), strided(gate_k), z_pairs)

@torch.library.custom_op("flash::forward", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, key_bias: Optional[Tensor], z: Optional[Tensor],
               gate_q: Optional[Tensor], gate_k: Optional[Tensor], seed: Tensor,
               dropout: float) -> list[Tensor]:
    """Returns o, what else the backward pass needs (see attention_forward), and z_pairs."""
    results = empty_outputs(q, k, v, key_bias, z)
    if z is not None:
        results[-1] = pack(z)
    o, lse, o_residual, units_total, plain_keys, z_pairs = map(present, results)
    B, H, T, _ = q.shape
    inputs = kernel_inputs(q, k, v, key_bias, gate_q, gate_k, z_pairs)
    saved = strided(o), lse, strided(o_residual), units_total, plain_keys
    kernel, options = configure(attention_forward, q, v, z_pairs, dropout)
    launch(kernel, (math.ceil(T / options["M"]), B * H), inputs, saved, seed, T, H, **options)
    return results

@forward_op.register_fake
def empty_outputs(q, k, v, key_bias, z, *_):
    B, H, T, _ = q.shape
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    if z is None:
        return [empty_heads(v), lse] + [q.new_empty(0) for _ in range(4)]
    units_total = torch.empty_like(lse, dtype=torch.int32)
    plain_keys = units_total.new_empty(B * H, math.ceil(T / QUERIES))
    z_pairs = units_total.new_empty(z.shape)
    return [empty_heads(v), lse, empty_heads(v), units_total, plain_keys, z_pairs]

@torch.library.custom_op("flash::backward", mutates_args=())
def backward_op(do: Tensor, q: Tensor, k: Tensor, v: Tensor, key_bias: Optional[Tensor],
                gate_q: Optional[Tensor], gate_k: Optional[Tensor], bias_learns: bool,
                outputs: list[Tensor], seed: Tensor, dropout: float) -> list[Tensor]:
    """outputs is what forward_op returned. Returns dq, dk, dv, dkey_bias, dz, dgate_q, dgate_k."""
    results = empty_gradients(do, q, k, v, key_bias, gate_q, gate_k, bias_learns, outputs)
    dq, dk, dv, dkey_bias, dz, dgate_q, dgate_k = map(present, results)
    o, lse, o_residual, units_total, plain_keys, z_pairs = map(present, outputs)
    B, H, T, _ = q.shape
    do_dot_o = torch.empty_like(lse)
    heads = B * H  # per launch
    scratch = do_dot_o, None, None, None
    if z_pairs is not None:  # CoPE's scratch is large, so launch as many heads at a time as fit
        npos = z_pairs.size(3)
        tiles = math.ceil(T / KEYS)
        bytes_per_head = 8 * T * (tiles + npos)
        heads = free_memory(q.device) // 4 // bytes_per_head
        heads = min(max(heads, 1), B * H)
        scratch = (do_dot_o, units_total.new_empty(heads, tiles, T),
                   lse.new_empty(heads, tiles, T), lse.new_empty(heads, T, npos, 2))
    inputs = kernel_inputs(q, k, v, key_bias, gate_q, gate_k, z_pairs)
    saved = strided(o), lse, strided(o_residual), units_total, plain_keys
    grads_q = strided(dq), strided(dgate_q), dz, dkey_bias
    grads_kv = strided(dk), strided(dv), strided(dgate_k), dkey_bias
    kernel_q, options_q = configure(attention_backward_q, q, v, z_pairs, dropout)
    kernel_kv, options_kv = configure(attention_backward_kv, q, v, z_pairs, dropout)
    for first_head in range(0, B * H, heads):
        n_heads = min(heads, B * H - first_head)
        launch(kernel_q, (math.ceil(T / options_q["M"]), n_heads), inputs, strided(do), saved,
               grads_q, scratch, seed, T, H, first_head, **options_q)
        launch(kernel_kv, (math.ceil(T / options_kv["N"]), n_heads), inputs, strided(do), saved,
               grads_kv, scratch, seed, T, H, first_head, **options_kv)
    return results

@backward_op.register_fake
def empty_gradients(do, q, k, v, key_bias, gate_q, gate_k, bias_learns, outputs, *_):
    def like(x):
        return do.new_empty(0) if x is None else empty_heads(x)

    dkey_bias = torch.empty_like(key_bias) if bias_learns else do.new_empty(0)
    dz = do.new_empty(outputs[-1].shape)  # like z_pairs, which may be absent
    return [like(q), like(k), like(v), dkey_bias, dz, like(gate_q), like(gate_k)]

def setup_context(ctx, inputs, output):
    q, k, v, key_bias, _, gate_q, gate_k, seed, ctx.dropout = inputs
    ctx.set_materialize_grads(False)  # of the outputs, only o has a gradient
    ctx.save_for_backward(q, k, v, key_bias, gate_q, gate_k, seed, *output)

def backward(ctx, grads):
    q, k, v, key_bias, gate_q, gate_k, seed, *outputs = ctx.saved_tensors
    found = backward_op(grads[0], q, k, v, key_bias, gate_q, gate_k, ctx.needs_input_grad[3],
                        outputs, seed, ctx.dropout)
    found = tuple(present(grad) for grad in found)
    return found + (None, None)  # seed and dropout have no gradient

forward_op.register_autograd(backward, setup_context=setup_context)

def check(q, k, v, key_bias=None, z=None, gate_q=None, gate_k=None, dropout=0.0):
    """Raises ValueError if the arguments do not fit together or if the kernels cannot take them."""
    if INTERPRET and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly; use float16 or float32")
    if not INTERPRET and q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q is {q.dtype}; use float16 or bfloat16, because float32 spills tens of "
                         "kilobytes of registers, and on some GPUs does not fit at all")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be a fraction; use 0 <= dropout < 1")
    B, H, T, D = q.shape
    d = v.size(-1)
    npos = 0 if z is None else z.size(-1)
    given = dict(k=k, v=v, key_bias=key_bias, z=z, gate_q=gate_q, gate_k=gate_k)
    widths = dict(k=[D], v=[d], key_bias=[], z=[npos], gate_q=[d], gate_k=[d])
    for name, x in given.items():
        shape = B, H, T, *widths[name]
        dtype = torch.float32 if name == "key_bias" else q.dtype
        if x is not None and (x.shape != shape or x.dtype != dtype):
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}; it must be {shape} {dtype}")
    if not 16 <= d <= 128 or not d <= D <= 2 * d:
        raise ValueError(f"q and k have width {D}, and v has width {d}; choose 16 to 128 for v, "
                         "and for q and k at least the width of v and at most twice that")
    if z is not None and npos < 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must have 2 columns or more")
    missing = [name for name in ("z", "gate_q", "gate_k") if given[name] is None]
    if missing and (gate_q is not None or gate_k is not None):
        raise ValueError(f"gates with logits of their own need {' and '.join(missing)} as well")
    if B * H > 65535:
        raise ValueError(f"{B} sequences of {H} heads exceed 65535 heads per launch; use fewer")
    # Offsets within a head must stay below 2^31 in every tensor. o and the gradients store the
    # heads of a token side by side, so their stride is up to D H. CoPE adds run_ends and the tables
    # of carried sums
    strides = [x.stride(2) for x in (q, k, v, gate_q, gate_k) if x is not None] + [D * H]
    if npos:
        strides += [2 * npos, math.ceil(T / KEYS)]
    if T * max(strides) >= 2**31:
        raise ValueError(f"{T} tokens are more than the kernels can address; shorten the sequence")

def attention(q, k, v, key_bias=None, z=None, gate_q=None, gate_k=None, dropout=0.0):
    """Returns causal attention with logits q.k / sqrt(d), in v's shape. All tensors get gradients.

    q, k      (B, H, T, D) after any rotation, in float16 or bfloat16 (in Triton's interpreter, also
              in float32)
    v         (B, H, T, d), 16 <= d <= 128, and d <= D <= 2d, because PoPE's q and k have width 2d
    key_bias  (B, H, T) in float32 is added to the logits of each key, as in ALiBi and FoX
    z         (B, H, T, npos), npos >= 2, turns CoPE on; it is q @ e, with the q before rotation
    gate_q    (B, H, T, d), and gate_k likewise: the gates are sigmoids of gate_q.gate_k / sqrt(d).
              Without them they are sigmoids of the layer's own logits, as in Listing 1
    dropout   the fraction of attention weights that are set to 0, drawn anew by every call"""
    if z is not None:
        z = z.to(q.dtype)
    check(q, k, v, key_bias, z, gate_q, gate_k, dropout)
    if key_bias is not None:
        key_bias = key_bias.contiguous()
    # PyTorch's generator draws the seed, so that torch.manual_seed makes dropout reproducible
    seed = torch.randint(2**62, (int(dropout > 0),), device=q.device)  # empty without dropout
    return forward_op(q, k, v, key_bias, z, gate_q, gate_k, seed, dropout)[0]

def why_not(names, d, device, dtype, own_gates=False):
    """Returns the reason why the kernels cannot compute a layer, in words, or None if they can.
    names are those of the layer's methods that have a kernel, and d is the width of a head.
    own_gates says that CoPE's gates have logits of their own."""
    device = torch.device(device)
    widest = 128
    if "cope" in names and ("pope" in names or own_gates):
        widest = 64  # because wider ones spill too many registers
    if triton.__version__ is None:
        return "no triton"
    if INTERPRET and dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if not INTERPRET and device.type != "cuda":
        return "no GPU"
    if not INTERPRET and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "no NVIDIA GPU of compute capability 8.0 or later"
    if not 16 <= d <= widest:
        return f"head width {d} is not within 16 to {widest}"
    if dtype not in (torch.float16, torch.bfloat16) and not (INTERPRET and dtype == torch.float32):
        return f"{dtype} inputs"  # float32 would be correct but slow, because it spills registers
