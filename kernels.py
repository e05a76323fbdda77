"""
An optional fast path: causal attention as Triton kernels, whose memory grows with T, not with T^2.

The same kernels serve PoPE, ALiBi, FoX, CoPE and combinations such as `pope+fox`. To the kernels,
PoPE is plain attention with q and k of width 2d, because PyTorch has already turned each entry into
(mu cos, mu sin). ALiBi, FoX and every other method with a key_bias add a number to the logits of
each key. CoPE finds its bias by counting keys. On a first reading, skip what this text says from
CoPE on, and each `if z is not None` in the code. What is left is FlashAttention-2
(arXiv:2307.08691) with a bias for each key.

Attention. i is a query, j and t are keys, and d is the width of v. dX is the gradient of the loss
with respect to X, and * multiplies entry by entry. S_ij is -inf where j > i.

    S = Q K^T / sqrt(d)    P = softmax(S)    O = P V
    dV = P^T dO            dP = dO V^T
    dS = P * (dP - rowsum(P * dP)) = P * (dP - rowsum(dO * O))
    dQ = dS K / sqrt(d)    dK = dS^T Q / sqrt(d)

The two row sums are equal because sum_t P_it dP_it = sum_t P_it (dO_i . V_t) = dO_i . O_i. The
forward pass sees a row tile by tile. It keeps the largest logit so far, and the sums of the weights
and of the weighted values relative to it, which shrink when a larger logit comes. At the end it
stores O and the log-sum-exp L of each row. The backward pass recomputes P = exp(S - L) from L.

A bias for each key. ALiBi and FoX add b_j - b_i to S_ij. In ALiBi b_j = m j, and in FoX
b_j = -(log f_0 + .. + log f_j). In the softmax b_i cancels, because it is the same for all keys
of a row. So the kernels take only b_j, the key_bias, and its gradient is

    db_j = sum_i dS_ij - sum_t dS_jt          d(log f_l) = - sum over j >= l of db_j

where dS is the gradient of S + b. The second sum is the gradient of the b_i that cancelled. In
exact arithmetic it is 0. But O is stored in 16 bits, so it is not quite 0, and d(log f_l) would add
up the errors of all rows j >= l. With the second sum, all terms dS_it with t >= l cancel. Only
those with t < l <= i are left, and their weights P_it are small, because the past is forgotten.

CoPE (arXiv:2405.18719, Listing 1). P = softmax(S + a), where the bias a depends on how many of the
keys j to i the query counts. z_i = q_i e (e is learned) holds a_ij for integer p_ij. PyTorch
computes z, and takes its gradient dz back to q and e.

    g_ij = sigmoid(S_ij)                      gate of S without biases or gate_q.gate_k / sqrt(d)
    p_ij = min(g_ij + .. + g_ii, npos - 1)    the position of key j, as query i sees it
    a_ij = z_i[c] + w (z_i[c + 1] - z_i[c])   the bias; column c = floor(p_ij), w = p_ij - c

Below, dS is the gradient of S + a, and slope_ij = z_i[c + 1] - z_i[c], or 0 where p is clamped. A
gate g_ij is a term of p_it for all t <= j, so

    dp_it = dS_it slope_it                    dz_i[c] and dz_i[c + 1] get dS_it (1 - w) and dS_it w
    dg_ij = sum over t <= j of dp_it          a running sum along the row
    dG_ij = dg_ij g_ij (1 - g_ij)             the gradient of the gate's own logit

dQ and dK take dS + dG. If the gates have a gate_q and gate_k of their own, these take dG, and dQ
and dK take only dS. For example, what query 5 sees with npos = 4:

    key          0     1     2     3     4     5
    g           .5   .75   .75    .5    .5   .75
    p            3     3   2.5  1.75  1.25   .75    summed from the right; 3.75, 3.25 are clamped
    c            3     3     2     1     1     0
    w            0     0    .5   .75   .25   .75
    dS           2    -4     6    -4     8    -8
    slope        0     0     2    -1    -1     2
    dp           0     0    12     4    -8   -16
    dg           0     0    12    16     8    -8    summed from the left

    column       0     1     2     3
    z            0     2     1     3
    dz          -2    -1     2     1                dz[2] = 6 * .5 - 4 * .75 + 8 * .25

In numpy, with g, z and dS as above:

    p = np.minimum(g[::-1].cumsum()[::-1], len(z) - 1)
    c = p.astype(int)
    w = p - c
    after = np.minimum(c + 1, len(z) - 1)
    slope = z[after] - z[c]
    dp = dS * slope
    dg = dp.cumsum()
    dz = np.zeros(len(z))
    np.add.at(dz, c, dS * (1 - w))
    np.add.at(dz, after, dS * w)

The order of the keys. p is summed from the right, so CoPE's forward pass walks from the diagonal to
key 0. In two tiles of three keys, it carries the sum of 1.75 from keys 3 .. 5 to keys 0 .. 2, and
stores the sum of 3.75. dg is summed from the left, so the backward pass walks from key 0. It
subtracts the 2 of keys 0 .. 2 from 3.75, which leaves the 1.75 to their right, and carries the dg
of 12 to keys 3 .. 5. A difference is less exact than a sum. In the tests the error of p is at most
1e-4 at 1,024 tokens and 5e-4 at 8,192, when all keys are counted.

The end of the count. Once all queries of a tile are at npos - 1, all keys to their left have the
bias z_i[npos - 1], and CoPE is plain attention. There the forward pass stops counting. It stores
how many tiles of keys are left, and the backward pass begins to count after those. So both passes
must have tiles of the same sizes.

Rows past T. The last tile may have rows past the end of the text. There q is loaded as 0, so all
gates are 1/2. In the forward pass this lets their positions grow until they are clamped, as those
of other rows do. In the backward pass their P and dS are 0, but no sum of gates was stored for
them, so their positions have no meaning and may be negative. `look_up` therefore clamps c, and
nothing is added to dz there.

Who stores what. Without CoPE, one kernel computes dQ and the row sums for a tile of queries, and
another one computes dK, dV and the column sums for a tile of keys. Each number is stored once, so
the same input gives the same bits. With CoPE, a tile of keys would need the carried sums of all
rows, which are T^2 / N numbers for tiles of N keys. Instead, the programs of the queries add their
parts of dK, dV and dz to float32 memory, by relaxed atomics. The order of these additions varies,
and so do the last bits of the gradients.

No GPU has run these kernels yet. The tests run this same code in Triton's interpreter, and compile
it for GPUs that are absent.
"""
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1, read when triton is imported

# --- shared by all kernels ------------------------------------------------------------------------
# A program owns M rows of one head, bh = 0 .. B H - 1, and its loop takes N rows of the other kind
# at a time. q and k have width D; v, o and the vectors of the gates have width DV, the d of the
# derivation. These are (B, T, H, width), z is (B, H, T, NPOS), and one number per row is (B, H, T).
# key_bias, z, gate_q and gate_k may be None, and Triton then leaves out their code

@triton.jit
def place(x, bh, rows, T, H, WIDTH: tl.constexpr):
    """Returns the addresses of some rows of one head of x, and which of them exist. The tile is as
    wide as the smallest power of two that holds WIDTH."""
    cols = tl.arange(0, triton.next_power_of_2(WIDTH))
    first = (bh // H * T * H + bh % H) * WIDTH  # in 64 bits, like bh
    at = x + first + rows[:, None] * (H * WIDTH) + cols[None, :]
    return at, (rows < T)[:, None] & (cols < WIDTH)[None, :]

@triton.jit
def load(x, bh, rows, T, H, WIDTH: tl.constexpr):
    at, exists = place(x, bh, rows, T, H, WIDTH)
    return tl.load(at, mask=exists, other=0.0)

@triton.jit
def store(x, tile, bh, rows, T, H, WIDTH: tl.constexpr):
    at, exists = place(x, bh, rows, T, H, WIDTH)
    tl.store(at, tile, mask=exists)

@triton.jit
def add(x, tile, bh, rows, T, H, WIDTH: tl.constexpr):
    """Adds the tile to x in memory, to which other programs add as well."""
    at, exists = place(x, bh, rows, T, H, WIDTH)
    tl.atomic_add(at, tile, mask=exists, sem="relaxed")

@triton.jit
def add_key_bias(s, key_bias, bh, j, T):
    """Returns the logits s (M, N) plus the bias of each key."""
    if key_bias is not None:
        s += tl.load(key_bias + bh * T + j, mask=j < T, other=0.0)[None, :]
    return s

@triton.jit
def look_up(z_row, gate, gates_right, NPOS: tl.constexpr):
    """Returns CoPE's bias, its slope, the column c and w of a tile of keys, each (M, N). z_row
    (M, 1) points to the z_i of each query. gate (M, N) is 0 where a query does not see the key, and
    gates_right (M,) are the sums of the gates to the right of the tile."""
    p = tl.minimum(gates_right[:, None] + tl.cumsum(gate, 1, reverse=True), NPOS - 1)
    c = tl.maximum(p.to(tl.int32), 0)  # p may be below 0, by its error or in a row past T
    here = tl.load(z_row + c).to(tl.float32)
    slope = tl.load(z_row + tl.minimum(c + 1, NPOS - 1)).to(tl.float32) - here
    return here + (p - c) * slope, slope, c, p - c

# --- the forward pass -----------------------------------------------------------------------------

@triton.jit
def online_softmax(s, v_tile, row_max, weight_sum, acc):
    """Adds a tile of keys with logits s (M, N) to weight_sum (M,), the sums of the weights, and to
    acc (M, DV), those of the weighted values. Both are relative to exp(row_max)."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shrink = tl.exp(row_max - new_max)
    weights = tl.exp(s - new_max[:, None])
    weight_sum = weight_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return new_max, weight_sum, acc

@triton.jit(do_not_specialize=["T"])  # otherwise T=1 and multiples of 16 would compile anew
def forward_kernel(q, k, v, key_bias, z, gate_q, gate_k, o, lse, gate_sum, n_plain, T, H,
                   D: tl.constexpr, DV: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
                   N: tl.constexpr):
    """Computes o and lse, the log-sum-exp, of M queries. With CoPE, it also stores the sum of the
    counted gates of each query, and n_plain, the number of tiles of keys that are not counted."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * M + tl.arange(0, M)
    scale: tl.constexpr = DV**-0.5
    q_tile = load(q, bh, i, T, H, D)
    row_max = tl.full((M,), -1e30, tl.float32)  # not -inf, because -inf - -inf would be NaN
    weight_sum = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, triton.next_power_of_2(DV)), tl.float32)
    n_left = tl.cdiv(tl.minimum(tl.program_id(0) * M + M, T), N)  # tiles of keys still to come

    # 1. CoPE counts keys, from right to left, until all queries are at npos - 1
    if z is not None:
        z_row = z + (bh * T + tl.minimum(i, T - 1)) * NPOS
        gates_right = tl.zeros((M,), tl.float32)
        if gate_q is not None:
            gate_q_tile = load(gate_q, bh, i, T, H, DV)
        while (n_left > 0) & (tl.min(gates_right, 0) < NPOS - 1):
            n_left -= 1
            j = n_left * N + tl.arange(0, N)
            seen = i[:, None] >= j[None, :]
            s = tl.dot(q_tile, tl.trans(load(k, bh, j, T, H, D))) * scale
            gate_logits = s
            if gate_q is not None:
                gate_k_tile = load(gate_k, bh, j, T, H, DV)
                gate_logits = tl.dot(gate_q_tile, tl.trans(gate_k_tile)) * scale
            gate = tl.where(seen, tl.sigmoid(gate_logits), 0.0)
            bias, _, _, _ = look_up(z_row[:, None], gate, gates_right, NPOS)
            gates_right += tl.sum(gate, 1)
            s = tl.where(seen, add_key_bias(s + bias, key_bias, bh, j, T), float("-inf"))
            v_tile = load(v, bh, j, T, H, DV)
            row_max, weight_sum, acc = online_softmax(s, v_tile, row_max, weight_sum, acc)
        tl.store(gate_sum + bh * T + i, gates_right, mask=i < T)
        tl.store(n_plain + bh * T + i, n_left, mask=i < T)
        last_bias = tl.load(z_row + NPOS - 1).to(tl.float32)

    # 2. attention to the other keys, which without CoPE are all keys
    for n in range(n_left):
        j = n * N + tl.arange(0, N)
        s = tl.dot(q_tile, tl.trans(load(k, bh, j, T, H, D))) * scale
        s = add_key_bias(s, key_bias, bh, j, T)
        if z is not None:
            s += last_bias[:, None]
        s = tl.where(i[:, None] >= j[None, :], s, float("-inf"))
        v_tile = load(v, bh, j, T, H, DV)
        row_max, weight_sum, acc = online_softmax(s, v_tile, row_max, weight_sum, acc)
    store(o, acc / weight_sum[:, None], bh, i, T, H, DV)
    tl.store(lse + bh * T + i, row_max + tl.log(weight_sum), mask=i < T)

# --- the backward pass ----------------------------------------------------------------------------

@triton.jit(do_not_specialize=["T"])
def backward_queries(q, k, v, key_bias, z, gate_q, gate_k, do, o, lse, gate_sum, n_plain, delta,
                     dq, dk, dv, ds_rows, ds_columns, dz, dgate_q, dgate_k, T, H, D: tl.constexpr,
                     DV: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Computes dq, delta = rowsum(dO * O) and ds_rows, the row sums of dS, of M queries. With CoPE,
    it also computes all other gradients, and adds those of keys to what other programs add."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * M + tl.arange(0, M)
    scale: tl.constexpr = DV**-0.5
    q_tile = load(q, bh, i, T, H, D)
    do_tile = load(do, bh, i, T, H, DV)
    row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
    o_tile = load(o, bh, i, T, H, DV).to(tl.float32)
    row_delta = tl.sum(do_tile.to(tl.float32) * o_tile, 1)
    tl.store(delta + bh * T + i, row_delta, mask=i < T)
    acc = tl.zeros((M, triton.next_power_of_2(D)), tl.float32)
    ds_sum = tl.zeros((M,), tl.float32)
    end = tl.cdiv(tl.minimum(tl.program_id(0) * M + M, T), N)
    plain_end = end
    if z is not None:
        row = bh * T + tl.minimum(i, T - 1)
        plain_end = tl.load(n_plain + bh * T + tl.program_id(0) * M)
        last_bias = tl.load(z + row * NPOS + NPOS - 1).to(tl.float32)

    # 1. the keys that are not counted
    for n in range(plain_end):
        j = n * N + tl.arange(0, N)
        seen = i[:, None] >= j[None, :]
        k_tile = load(k, bh, j, T, H, D)
        v_tile = load(v, bh, j, T, H, DV)
        s = add_key_bias(tl.dot(q_tile, tl.trans(k_tile)) * scale, key_bias, bh, j, T)
        if z is not None:
            s += last_bias[:, None]
        prob = tl.where(seen, tl.exp(s - row_lse[:, None]), 0.0)
        ds = prob * (tl.dot(do_tile, tl.trans(v_tile)) - row_delta[:, None])
        ds_sum += tl.sum(ds, 1)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
        if z is not None:
            add(dv, tl.dot(tl.trans(prob.to(q_tile.dtype)), do_tile), bh, j, T, H, DV)
            add(dk, tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile) * scale, bh, j, T, H, D)
            if key_bias is not None:
                tl.atomic_add(ds_columns + bh * T + j, tl.sum(ds, 0), mask=j < T, sem="relaxed")

    # 2. the keys that CoPE counts, from left to right, as dg is summed
    if z is not None:
        # the keys that were not counted share the last column
        tl.atomic_add(dz + row * NPOS + NPOS - 1, ds_sum, mask=i < T, sem="relaxed")
        z_row = (z + row * NPOS)[:, None]
        dz_row = (dz + row * NPOS)[:, None]
        gates_right = tl.load(gate_sum + row)
        dgate_left = tl.zeros((M,), tl.float32)
        if gate_q is not None:
            gate_q_tile = load(gate_q, bh, i, T, H, DV)
            gate_acc = tl.zeros((M, triton.next_power_of_2(DV)), tl.float32)
        for n in range(plain_end, end):
            j = n * N + tl.arange(0, N)
            seen = i[:, None] >= j[None, :]
            k_tile = load(k, bh, j, T, H, D)
            v_tile = load(v, bh, j, T, H, DV)
            s = tl.dot(q_tile, tl.trans(k_tile)) * scale
            gate_logits = s
            if gate_q is not None:
                gate_k_tile = load(gate_k, bh, j, T, H, DV)
                gate_logits = tl.dot(gate_q_tile, tl.trans(gate_k_tile)) * scale
            gate = tl.where(seen, tl.sigmoid(gate_logits), 0.0)
            gates_right -= tl.sum(gate, 1)
            bias, slope, c, w = look_up(z_row, gate, gates_right, NPOS)
            s = add_key_bias(s + bias, key_bias, bh, j, T)
            prob = tl.where(seen, tl.exp(s - row_lse[:, None]), 0.0)
            ds = prob * (tl.dot(do_tile, tl.trans(v_tile)) - row_delta[:, None])
            ds_sum += tl.sum(ds, 1)
            counted = seen & (i < T)[:, None]
            tl.atomic_add(dz_row + c, ds * (1 - w), mask=counted, sem="relaxed")
            tl.atomic_add(dz_row + tl.minimum(c + 1, NPOS - 1), ds * w, mask=counted, sem="relaxed")
            add(dv, tl.dot(tl.trans(prob.to(q_tile.dtype)), do_tile), bh, j, T, H, DV)
            if key_bias is not None:
                tl.atomic_add(ds_columns + bh * T + j, tl.sum(ds, 0), mask=j < T, sem="relaxed")
            dgate = dgate_left[:, None] + tl.cumsum(ds * slope, 1)
            dgate_left += tl.sum(ds * slope, 1)
            dgate_logits = dgate * gate * (1 - gate)
            if gate_q is None:
                ds += dgate_logits
            else:
                dgate_logits = dgate_logits.to(q_tile.dtype)
                gate_acc = tl.dot(dgate_logits, gate_k_tile, gate_acc)
                dgate_k_tile = tl.dot(tl.trans(dgate_logits), gate_q_tile) * scale
                add(dgate_k, dgate_k_tile, bh, j, T, H, DV)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
            add(dk, tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile) * scale, bh, j, T, H, D)
        if gate_q is not None:
            store(dgate_q, gate_acc * scale, bh, i, T, H, DV)
    store(dq, acc * scale, bh, i, T, H, D)
    tl.store(ds_rows + bh * T + i, ds_sum, mask=i < T)

@triton.jit(do_not_specialize=["T"])
def backward_keys(q, k, v, key_bias, do, lse, delta, dk, dv, ds_columns, T, H, D: tl.constexpr,
                  DV: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Without CoPE, computes dk, dv and ds_columns, the column sums of dS, of M keys, from all
    queries that see them. Its tiles of P and dS are transposed, (M keys, N queries)."""
    bh = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * M
    j = first + tl.arange(0, M)
    scale: tl.constexpr = DV**-0.5
    k_tile = load(k, bh, j, T, H, D)
    v_tile = load(v, bh, j, T, H, DV)
    dk_tile = tl.zeros((M, triton.next_power_of_2(D)), tl.float32)
    dv_tile = tl.zeros((M, triton.next_power_of_2(DV)), tl.float32)
    ds_sum = tl.zeros((M,), tl.float32)
    for start in range(first, T, N):
        i = start + tl.arange(0, N)
        q_tile = load(q, bh, i, T, H, D)
        do_tile = load(do, bh, i, T, H, DV)
        s = tl.dot(k_tile, tl.trans(q_tile)) * scale
        if key_bias is not None:
            s += tl.load(key_bias + bh * T + j, mask=j < T, other=0.0)[:, None]
        row_lse = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
        row_delta = tl.load(delta + bh * T + i, mask=i < T, other=0.0)
        prob = tl.where(i[None, :] >= j[:, None], tl.exp(s - row_lse[None, :]), 0.0)
        ds = prob * (tl.dot(v_tile, tl.trans(do_tile)) - row_delta[None, :])
        ds_sum += tl.sum(ds, 1)
        dv_tile = tl.dot(prob.to(do_tile.dtype), do_tile, dv_tile)
        dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile)
    store(dk, dk_tile * scale, bh, j, T, H, D)
    store(dv, dv_tile, bh, j, T, H, DV)
    tl.store(ds_columns + bh * T + j, ds_sum, mask=j < T)

# --- launching ------------------------------------------------------------------------------------
# The kernels are a pair of PyTorch operators. torch.compile learns the shapes of their results from
# empty_outputs and empty_gradients

def tile_sizes(D, counts):
    """Returns M and N for q of width D. Larger tiles would spill more registers to memory."""
    if counts:
        return (64, 16) if D <= 64 else (32, 16)
    if D <= 64:
        return 64, 64
    return (64, 32) if D <= 128 else (64, 16)

def launch(kernel, z, q, k, v, *others):
    """Runs a kernel for all tiles and heads on q's device, which need not be the current one."""
    assert all(x is None or x.is_contiguous() for x in (q, k, v, *others))
    B, T, H, D = q.shape
    M, N = tile_sizes(D, z is not None)
    npos = 0 if z is None else z.size(3)
    stages = 2 if z is None else 1  # Triton 3.6 and 3.8 abort when they pipeline CoPE's loops
    with torch.cuda.device_of(q):
        kernel[(triton.cdiv(T, M), B * H)](
            q, k, v, *others, T, H, D=D, DV=v.size(3), NPOS=npos, M=M, N=N, num_warps=4,
            num_stages=stages, enable_fp_fusion=True)  # a * b + c in one instruction

@torch.library.custom_op("nanope::attention", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, key_bias: Optional[Tensor], z: Optional[Tensor],
               gate_q: Optional[Tensor], gate_k: Optional[Tensor]) -> list[Tensor]:
    """Returns o, and lse, gate_sum and n_plain, which the backward pass needs. Without CoPE, the
    last two are 0."""
    reason = why_not(v.size(3), q.device, q.dtype)
    if reason:
        raise ValueError(f"the kernels cannot compute this: {reason}")
    outputs = empty_outputs(q, k, v)
    launch(forward_kernel, z, q, k, v, key_bias, z, gate_q, gate_k, *outputs)
    return outputs

@forward_op.register_fake
def empty_outputs(q, k, v, *_):
    B, T, H, _ = q.shape
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    gate_sum, n_plain = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.int32)
    return [torch.empty_like(v), lse, gate_sum, n_plain]

@torch.library.custom_op("nanope::attention_backward", mutates_args=())
def backward_op(do: Tensor, q: Tensor, k: Tensor, v: Tensor, key_bias: Optional[Tensor],
                z: Optional[Tensor], gate_q: Optional[Tensor], gate_k: Optional[Tensor],
                o: Tensor, lse: Tensor, gate_sum: Tensor, n_plain: Tensor) -> list[Tensor]:
    """Returns the gradients of those of q .. gate_k that are not None."""
    inputs = q, k, v, key_bias, z, gate_q, gate_k
    do = do.contiguous()
    delta, ds_rows, ds_columns = torch.empty_like(lse), torch.empty_like(lse), torch.zeros_like(lse)

    def gradient(x):
        if x is None:
            return None
        if z is None:  # each number is stored once
            return torch.empty_like(x)
        return torch.zeros_like(x, dtype=torch.float32)  # the programs add their parts to it

    dq, dk, dv, _, dz, dgate_q, dgate_k = map(gradient, inputs)
    launch(backward_queries, z, *inputs, do, o, lse, gate_sum, n_plain, delta, dq, dk, dv, ds_rows,
           ds_columns, dz, dgate_q, dgate_k)
    if z is None:
        launch(backward_keys, z, q, k, v, key_bias, do, lse, delta, dk, dv, ds_columns)
    dkey_bias = ds_columns - ds_rows
    grads = dq, dk, dv, dkey_bias, dz, dgate_q, dgate_k
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs) if x is not None]

@backward_op.register_fake
def empty_gradients(do, q, k, v, key_bias, z, gate_q, gate_k, *_):
    return [torch.empty_like(x) for x in (q, k, v, key_bias, z, gate_q, gate_k) if x is not None]

def setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # only o has a gradient
    ctx.save_for_backward(*inputs, *output)

def backward(ctx, grads):
    inputs = ctx.saved_tensors[:7]
    found = iter(backward_op(grads[0], *ctx.saved_tensors))
    return tuple(None if x is None else next(found) for x in inputs)

forward_op.register_autograd(backward, setup_context=setup_context)

def why_not(d, device, dtype):
    """Returns why the kernels cannot compute attention, in words, or None if they can. d is the
    width of v, and dtype is that of q, k and v."""
    device = torch.device(device)
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if not INTERPRET and not (is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)):
        return "no NVIDIA GPU of compute capability 8.0 or later"
    # the interpreter errs in bfloat16, and on a GPU float32 would spill kilobytes of registers
    if dtype not in (torch.float16, torch.float32 if INTERPRET else torch.bfloat16):
        return f"{dtype} inputs"
    if not 16 <= d <= 128:
        return f"head width {d} is not within 16 to 128"

def attention(q, k, v, key_bias=None, z=None, gate_q=None, gate_k=None):
    """Returns causal attention with logits q.k / sqrt(d), in v's shape. All tensors get gradients.

    q, k      (B, H, T, D) after any rotation, where d <= D <= 2d, because PoPE's have width 2d
    v         (B, H, T, d), of the same dtype
    key_bias  (B, H, T) in float32 is added to the logits of each key, as in ALiBi and FoX. Each
              query needs a key with a logit above -1e30
    z         (B, H, T, npos) turns CoPE on; it is q @ e, with the q before rotation
    gate_q    (B, H, T, d), and gate_k likewise: the gates are sigmoids of gate_q.gate_k / sqrt(d).
              Without them they are sigmoids of q.k / sqrt(d), as in Listing 1"""
    B, H, T, D = q.shape
    d = v.size(3)
    assert d <= D <= 2 * d and (gate_q is None) == (gate_k is None)
    assert B * H < 2**16 and T * H * D < 2**31, "a grid or a sequence is too large"
    for x, width in ((k, D), (v, d), (gate_q, d), (gate_k, d)):
        assert x is None or (x.shape == (B, H, T, width) and x.dtype == q.dtype)
    assert key_bias is None or key_bias.shape == (B, H, T) and key_bias.dtype == torch.float32
    assert gate_q is None if z is None else z.shape[:3] == (B, H, T) and z.size(3) > 1
    q, k, v, gate_q, gate_k = (  # (B, H, T, width) -> (B, T, H, width)
        None if x is None else x.transpose(1, 2).contiguous() for x in (q, k, v, gate_q, gate_k))
    key_bias, z = (None if x is None else x.contiguous() for x in (key_bias, z))
    return forward_op(q, k, v, key_bias, z, gate_q, gate_k)[0].transpose(1, 2)

# --- what to try first on a GPU -------------------------------------------------------------------
# No time has been measured yet, so these ideas are left out until a measurement shows what they are
# worth. Each must make a training step, or attention to 1,024 and 8,192 tokens, clearly faster:
#
# 1. exp2, with log2(e) in the scale, the biases and z, because GPUs compute exp as exp2 of a
#    product. It must make FoX's forward pass faster.
# 2. Other tiles, such as 128 queries in the forward pass, 64 keys for PoPE, and 64 queries for wide
#    CoPE. They must be faster on every chip, although more registers spill.
# 3. A loop without a mask for the tiles left of the diagonal. It must be faster at 1,024 tokens,
#    where an eighth of the tiles is on the diagonal.
# 4. CoPE's sums along a row as products with a triangle of ones, on tensor cores. The errors of p
#    and of the gradients must not grow, although the factors have only 16 bits.
# 5. z[c] and z[c + 1] packed into one word, so that a look-up is one load, and dz summed over the
#    keys of one column before its atomics. It must be faster with small gates, which never
#    saturate.
