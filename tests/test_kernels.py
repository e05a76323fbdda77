"""kernels.py against the papers' equations, written out in float64 below: it may be off by twice as much as
model.py is in the same precision. Without a GPU the kernels run in Triton's interpreter and are compiled for
two that are not there. Both are done by this file as a script, each in a process of its own, as Triton reads
TRITON_INTERPRET once and for good:

    python tests/test_kernels.py      calls the functions that it reads, one a line, such as ["pope_summed"]

With a GPU: python -m pytest tests/test_kernels.py -m gpu. So too under an emulator of the compiled kernels.
"""
import io
import json
import math
import os
import re
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # when this file is the script

import kernels  # noqa: E402
import model  # noqa: E402

if "ttsem" in sys.modules:  # an emulator: it runs what Triton's compiler makes of a kernel, but no assembly
    kernels.ASM = kernels.constexpr(False)

# T, d, delta, softplus: one token, one more or less than a tile, several tiles and a rest
POPE = [(1, 32, "uniform", True), (63, 48, "uniform", True), (64, 64, None, True),
        (64, 128, "uniform", False), (100, 32, "zero", False), (257, 64, "uniform", True),
        (130, 128, "uniform", True)]
NAMES = ("o", "dq", "dk", "dv", "ddelta")


def names(cases):
    return ["-".join(map(str, case)) for case in cases]


# ---------------------------------------------------------------------------------------------------
# PoPE: the equation, the dense path, and the errors of both


def pope_equation(q, k, v, delta, softplus):
    """PoPE eq. 5 for float64 q, k, v (B, H, T, d), delta (H, d): a cosine of every distance, in every
    dimension."""
    (B, H, T, d), mu = q.shape, F.softplus if softplus else lambda x: x
    t, theta = torch.arange(T, device=q.device), 10000.0 ** (-torch.arange(d, device=q.device).double() / d)
    future = t > t[:, None]  # (T, T): row t, column s
    rows = []
    for b in range(B):
        for h in range(H):
            cos = ((t - t[:, None])[..., None] * theta + delta[h]).cos()  # (T, T, d)
            a = torch.einsum("tc,sc,tsc->ts", mu(q[b, h]), mu(k[b, h]), cos) / math.sqrt(d)
            rows.append(a.masked_fill(future, -math.inf).softmax(-1) @ v[b, h])
    return torch.stack(rows).view(B, H, T, -1)


def pope_dense(q, k, v, delta, softplus):
    """What model.py computes."""
    H, d = q.size(1), q.size(3)
    cfg = model.GPTConfig(n_head=H, n_embd=H * d, pope_softplus=softplus, pope_delta="none")
    pe = model.PoPE(cfg)
    pe.delta = delta
    wide = pe.rotate(q, k, q, torch.arange(q.size(2), device=q.device), None)
    return F.scaled_dot_product_attention(*wide, v, is_causal=True, scale=q.size(3) ** -0.5)


def differentiate(f, inputs, do):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = f(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(o))]


def pope_inputs(T, d, delta, dtype, device="cpu", B=1, H=2):
    """q, k as model.py cuts them out of one projection, v, delta (H, d) or None, and the gradient of the
    output."""
    def heads(x):
        return x.unflatten(-1, (H, d)).transpose(1, 2)

    q, k = torch.randn(B, T, 2 * H * d).to(device, dtype).chunk(2, -1)
    v, do = torch.randn(2, B, T, H * d).to(device, dtype)
    start = {None: None, "zero": torch.zeros(H, d, device=device)}
    delta = start[delta] if delta in start else -2 * math.pi * torch.rand(H, d).to(device)
    return [heads(q), heads(k), heads(v)] + ([] if delta is None else [delta]), heads(do)


def pope_errors(T, d, delta, softplus, dtype, device="cpu"):
    """T, d, delta, softplus, dtype as in POPE and "float16" -> {tensor: ((root mean square, largest) error of
    the kernels, that of the dense path)} over three draws of the inputs, and whether a second run, which long
    sequences are spared, gives the same bits."""
    def fast(q, k, v, delta=None):
        return kernels.pope_attention(q, k, v, delta, softplus=softplus)

    def slow(q, k, v, delta=None):
        return pope_dense(q, k, v, delta, softplus)

    def size(x):
        return x.square().mean().sqrt().item(), x.abs().max().item()

    found, same = {name: ([], []) for name in NAMES}, True
    for draw in range(3):
        torch.manual_seed(1000 * draw + T + d)
        inputs, do = pope_inputs(T, d, delta, getattr(torch, dtype), device, B=2 if T < 100 else 1)
        none = torch.zeros(inputs[0].size(1), d, device=device, dtype=torch.float64)
        exact = differentiate(lambda q, k, v, delta=none: pope_equation(q, k, v, delta, softplus),
                              [x.double() for x in inputs], do)
        ours, dense = differentiate(fast, inputs, do), differentiate(slow, inputs, do)
        assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(ours, dense))
        for name, x, y, z in zip(NAMES, ours, dense, exact):
            found[name][0].append(x - z)
            found[name][1].append(y - z)
        if draw == 0 and (T <= 100 or device != "cpu"):
            same = all(x.equal(y) for x, y in zip(ours, differentiate(fast, inputs, do)))
    return {name: [size(torch.stack(x)) for x in both] for name, both in found.items() if both[0]}, same


def judge(errors):
    """Twice the dense path's error in the mean square, and twice that for the largest, a matter of luck."""
    for name, ((mean, top), (dense_mean, dense_top)) in errors.items():
        assert mean <= 2 * dense_mean + 2e-6, f"{name}: error {mean:.2g}, dense path {dense_mean:.2g} (rms)"
        assert top <= 4 * dense_top + 2e-6, f"{name}: error {top:.2g}, dense path {dense_top:.2g} (largest)"


def softplus_error(device="cpu"):
    """Largest relative error of the kernels' softplus: with cosines and sines of 1 k' holds it twice."""
    k = torch.linspace(-80, 80, 6400, device=device).view(1, 1, 100, 64)
    one, delta = torch.ones(100, 64, 2, device=device), torch.zeros(1, 64, device=device)
    *_, ours = kernels.pope_op(k, k, k, delta, one, kernels.draw_seed(k, 0.0), True, 0.0)
    x = k.double()
    exact = x.clamp(min=0) + torch.log1p((-x.abs()).exp())
    return ((ours[..., 1::2] - exact) / exact).abs().max().item()


def pope_compiled(device="cpu"):
    """Whether fake tensors, traced graphs and eager mode agree; raises if the operators break a graph."""
    inputs, do = pope_inputs(40, 32, "uniform", torch.float32, device)
    table = torch.rand(40, 32, 2, device=device)
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(kernels.pope_op, (*leaves, table, kernels.draw_seed(table, 0.0), True, 0.0))

    def f(q, k, v, delta):
        return 2 * kernels.pope_attention(q, k, v, delta)

    traced = torch.compile(f, fullgraph=True, backend="aot_eager")
    return all(x.equal(y) for x, y in zip(differentiate(f, inputs, do), differentiate(traced, inputs, do)))


def pope_other_base(device="cpu"):
    """Largest change of the output with another base."""
    (q, k, v), _ = pope_inputs(50, 32, None, torch.float32, device)
    other = kernels.pope_attention(q, k, v, None, base=100.0)
    return (other - kernels.pope_attention(q, k, v, None)).abs().max().item()


def pope_summed(device="cpu"):
    """Whether a gradient that is one number expanded, as sum() sends, is as good as one in memory."""
    inputs, do = pope_inputs(20, 32, "zero", torch.float32, device)
    one = torch.ones((), device=device)
    pairs = zip(differentiate(kernels.pope_attention, inputs, one.expand(do.shape)),
                differentiate(kernels.pope_attention, inputs, torch.ones_like(do)))
    return all(x.equal(y) for x, y in pairs)


# ---------------------------------------------------------------------------------------------------
# in the interpreter. It computes bfloat16 wrongly, hence float16


class Child:
    """A process that calls functions of this file. Each test waits for its own calls alone."""

    def __init__(self, **env):
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | env
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, __file__], env=env, **pipes)

    def __call__(self, name, *args):
        self.process.stdin.write(json.dumps([name, *args]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]


def patch_once():
    """The interpreter patches triton.language for each call of a function in a kernel, and restores it
    afterwards. This process has no other use for it, so it stays patched: the same bits in half the time."""
    from triton import language
    from triton.runtime import interpreter

    patch, seen = interpreter._patch_lang, set()  # what is patched depends on the imports of fn's file

    def once(fn):
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            patch(fn)
            # Triton 3.6 makes an int of an array with one number, which NumPy 2.4 refuses
            language.tensor.__index__ = lambda self: int(self.handle.data.item())
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


def serve():
    torch.set_num_threads(1)
    if kernels.INTERPRET:
        patch_once()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else prints, the compilers among them, does so elsewhere
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = dict(result=globals()[name](*args))
        except Exception:
            answer = dict(error=traceback.format_exc())
        os.write(answers, (json.dumps(answer) + "\n").encode())


def pope_other_tiles():
    """More queries than keys in a tile, as another GPU may want them."""
    kept = kernels.TILES["pope_backward_kv"]
    kernels.TILES["pope_backward_kv"] = 4 * ((64, 32, 4, 1),)
    try:
        return pope_errors(130, 32, "uniform", True, "float16")[0]
    finally:
        kernels.TILES["pope_backward_kv"] = kept


needs_triton = pytest.mark.skipif(kernels.triton.__version__ is None, reason="no triton")


@pytest.fixture(scope="module")
def interpreted():
    child = Child(TRITON_INTERPRET="1")
    yield child
    child.process.kill()


# tiles of float32 are small: 130 tokens are several
INTERPRETED = [(*case, dtype) for case in POPE for dtype in ("float16", "float32")
               if case[0] < 257 or dtype == "float16"]


@needs_triton
@pytest.mark.parametrize("case", INTERPRETED, ids=names(INTERPRETED))
def test_pope(interpreted, case):
    errors, again = interpreted("pope_errors", *case)
    judge(errors)
    assert again, "the second run gave other bits"


@needs_triton
def test_pope_details(interpreted):
    assert interpreted("softplus_error") < 1e-6
    assert interpreted("pope_compiled") and interpreted("pope_summed")
    assert interpreted("pope_other_base") > 1e-2
    judge(interpreted("pope_other_tiles"))


# ---------------------------------------------------------------------------------------------------
# CoPE: Listing 1 in float64, with exact gates and with gates rounded as the kernels round them

# how far exact and rounded gates (multiples of 1/2048) lead apart, relative to the root mean square of a
# result: dz 0.0042 in these cases, everything that no gate's gradient goes into 0.0012
ROUNDING_Z, ROUNDING = 0.01, 0.003


def rounding_gates(T):
    """The same for a gate's gradient, of which it is a matter of inputs and not of their precision. It adds
    up slopes, z[c + 1] - z[c] at the floor c of each position. After n gates p is off by e = sqrt(n / 12) /
    2048 in the root mean square, so that the floor is another one for a share sqrt(2 / pi) e of the keys;
    each of those changes a slope for an independent one, an error of twice a slope's variance. Twice the root
    of that for the longest row, as the gradient of few rows, or of a small table, is a small sample: 0.12 at
    T = 257, 0.08 at T = 64."""
    return 2 * math.sqrt(2 * math.sqrt(2 / math.pi) * math.sqrt(T / 12) / 2048)


# the kernel's float32 and the oracle's float64 sigmoid now and then round to neighbours: 5e-5 at most in
# these cases (and 3e-4 of the largest value), where one run of keys lost from dz costs 1e-2 and more
FLIPS, FLIPS_MAX = 2e-4, 2e-3

# T, d, npos, what is compared with q to make gates, where gates are centred
COPE = {
    "one token": (1, 32, 4, "keys", 0),
    "63, padded head": (63, 48, 16, "keys", 0),
    "64, wide head": (64, 128, 64, "separate", -5),
    "half saturated": (257, 64, 64, "keys", 0),
    "saturated at once": (257, 32, 4, "keys", 5),
    "never saturated": (257, 64, 64, "keys", -5),
    "separate, half saturated": (257, 64, 16, "separate", 0),
    "separate, soon saturated": (257, 48, 64, "separate", 5),
    "separate, never saturated": (257, 32, 64, "separate", -5),
    "some rows saturated": (257, 32, 4, "mixed", 0),
    "values": (257, 32, 16, "values", 0),
    "rotated": (257, 64, 16, "rotated", 0),
    "beside PoPE": (130, 32, 16, "polar", 0),
    "large table": (130, 32, 256, "keys", 0),
}


def cope_equation(q, k, v, z, gate_q=None, gate_k=None, units=None, scale=None):
    """Listing 1 in the dtype of its arguments (float32 logits for float16); gates as multiples of 1/units."""
    T, npos, scale = q.size(2), z.size(3), scale or q.size(3) ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    past = torch.arange(T, device=q.device)[:, None] >= torch.arange(T, device=q.device)
    logits = (q @ k.mT).to(wide) * scale
    g = torch.sigmoid(logits if gate_q is None else (gate_q @ gate_k.mT).to(wide) * scale)
    if units:
        g = g + (torch.floor(g * units + 0.5) / units - g).detach()
    p = torch.where(past, g, 0).flip(-1).cumsum(-1).flip(-1).clamp(max=npos - 1)
    below, above = p.detach().floor(), p.detach().ceil()
    w = p - below
    bias = z.to(wide).gather(-1, below.long()) * (1 - w) + z.to(wide).gather(-1, above.long()) * w
    return torch.where(past, logits + bias, -torch.inf).softmax(-1).to(v.dtype) @ v


def cope_inputs(T, d, npos, dtype, gates, centre, B=1, H=2, device="cpu"):
    """dict of arguments, and the gradient of the result; every gate logit is shifted by centre"""
    q, k, v, gate_q, gate_k, do = torch.randn(6, B, H, T, d)
    if gates == "keys" and centre:
        q[..., 0] = k[..., 0] = (abs(centre) * d**0.5) ** 0.5
        q[..., 0] *= 1 if centre > 0 else -1
    gate_q[..., 0], gate_k[..., 0] = centre, d**0.5
    if gates == "mixed":  # the rows of every fourth tile hardly count, and one row of another
        i = torch.arange(T)
        gate_q[..., 0] = torch.where((i // 32 % 4 == 3) | (i == 200), -5.0, 5.0)
    x = dict(q=q, k=k, v=v, z=torch.randn(B, H, T, npos))
    if gates == "rotated":
        angle = torch.arange(T)[:, None] * 100.0 ** -torch.linspace(0, 1, d // 2)
        phase = torch.polar(torch.ones_like(angle), angle)

        def turn(a):
            pairs = torch.view_as_complex(a.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * phase).flatten(-2)

        x |= dict(q=turn(q), k=turn(k), gate_q=q, gate_k=k)
    if gates == "polar":  # q and k twice as wide as v
        x |= dict(q=torch.cat((q, gate_q), -1), k=torch.cat((k, gate_k), -1))
    if gates in ("separate", "mixed"):
        x |= dict(gate_q=gate_q, gate_k=gate_k)
    dtype = getattr(torch, dtype)
    return {name: a.to(device, dtype) for name, a in x.items()}, do.to(device, dtype)


def cope_evaluate(f, x, do, gates, dtype, **options):
    """The result and every gradient, in float64."""
    x = {name: a.to(dtype).detach().requires_grad_() for name, a in x.items()}
    extra = dict(gate_q=x["q"], gate_k=x["v"]) if gates == "values" else {}
    if gates == "polar":
        extra = dict(scale=x["v"].size(3) ** -0.5)
    o = f(**x, **extra, **options)
    grads = torch.autograd.grad(o, list(x.values()), do.to(dtype))
    return dict(zip(("o", *x), (a.detach().double() for a in (o, *grads))))


def cope_errors(case, dtype, device="cpu"):
    """case: a key of COPE. {name: [[mine - rounded oracle, mine - oracle, dense - oracle, rounded oracle -
    oracle, oracle] as rms, as max]}"""
    torch.manual_seed(list(COPE).index(case))
    T, d, npos, gates, centre = COPE[case]
    x, do = cope_inputs(T, d, npos, dtype, gates, centre, device=device)
    dtype = getattr(torch, dtype)

    def kernel(gate_q=None, scale=None, **rest):
        gate_q = None if gates == "values" else gate_q  # it may be left out
        return kernels.cope_attention(gate_q=gate_q, **rest)  # it finds the scale by itself

    mine = cope_evaluate(kernel, x, do, gates, dtype)
    if T < 100 or device != "cpu":
        again = cope_evaluate(kernel, x, do, gates, dtype)
        assert all(torch.equal(mine[name], again[name]) for name in mine), "two runs differ"
    dense = cope_evaluate(cope_equation, x, do, gates, dtype)
    paper = cope_evaluate(cope_equation, x, do, gates, torch.float64)
    rounded = cope_evaluate(cope_equation, x, do, gates, torch.float64, units=2048)
    out = {}
    for name in mine:
        a = torch.stack([mine[name] - rounded[name], mine[name] - paper[name], dense[name] - paper[name],
                         rounded[name] - paper[name], paper[name]]).flatten(1)
        out[name] = a.square().mean(1).sqrt().tolist(), a.abs().amax(1).tolist()
    return out


def cope_judge(result, T, gates):
    fed = {"keys": ("q", "k"), "polar": ("q", "k"), "values": ("q", "v")}.get(gates, ("gate_q", "gate_k"))
    for name, (rms, largest) in result.items():
        (near, far, dense, rounding, size), (near_max, _, dense_max, _, size_max) = rms, largest
        tiny = 1e-6  # where the exact answer is 0
        price = size * (rounding_gates(T) if name in fed else ROUNDING_Z if name == "z" else ROUNDING) + tiny
        assert near <= 2 * dense + FLIPS * size + tiny, f"{name}: rms {near:.1e}, dense {dense:.1e}"
        bound = 2 * dense_max + FLIPS_MAX * size_max + tiny
        assert near_max <= bound, f"{name}: max {near_max:.1e}, dense {dense_max:.1e}"
        assert rounding <= price, f"{name}: rounding costs {rounding / size:.1e}"
        assert far <= 2 * dense + price, f"{name}: rms {far:.1e}, dense {dense:.1e}"


def cope_variants():
    """Results that a graph, and that another number of heads at a time, changes."""
    x, do = cope_inputs(63, 48, 16, "float16", "keys", 0, H=3)
    mine = cope_evaluate(kernels.cope_attention, x, do, "keys", torch.float16)
    traced = torch.compile(kernels.cope_attention, fullgraph=True, backend="eager")
    traced = cope_evaluate(traced, x, do, "keys", torch.float16)
    kept, kernels.BORROWED = kernels.BORROWED, 2 * 8 * 63 * (1 + 16)  # two heads at a time, then the third
    alone = cope_evaluate(kernels.cope_attention, x, do, "keys", torch.float16)
    kernels.BORROWED = kept
    return [[name for name in mine if not torch.equal(mine[name], other[name])] for other in (traced, alone)]


MODELS = ("pope", "cope", "cope+rope", "cope+pope", "rope,pope", "cope+alibi", "cope_alibi")


def model_paths():
    """{pe or its gates: (what use_kernels says, largest change of the logits and of any gradient)}"""
    out = {}
    for pe, gates in [(pe, "keys") for pe in MODELS] + [("cope", "sep-keys"), ("cope+rope", "values")]:
        # with this seed and gates from keys, no rounding carries a position across an integer, where slopes jump
        torch.manual_seed(3)
        cfg = model.GPTConfig(40, 11, n_layer=2, n_head=2, n_embd=64, pe=pe, cope_gates=gates, cope_npos=8)
        net = model.GPT(cfg)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.normal_(std=0.2) if not name.endswith("delta") else p.uniform_(-6, 0)
        idx, results = torch.randint(11, (2, 40)), []
        for fast in (False, True):
            said = net.use_kernels(torch.float32) if fast else None
            logits, loss = net(idx, idx)
            results.append([logits, *torch.autograd.grad(loss, list(net.parameters()))])
        torch._dynamo.reset()
        traced = torch.compile(net, backend="eager", fullgraph=True)(idx, idx)[1]  # raises at a graph break
        assert (traced - loss).abs() < 1e-5
        change = [((a - b).abs().max() / (b.abs().max() + 1e-9)).item() for a, b in zip(*results)]
        cached = net(idx, idx, cache=net.new_cache())[0]  # the other path, whatever is fast
        out[f"{pe} {gates}"] = said, change[0], max(change[1:]), (cached - results[0][0]).abs().max().item()
    return out


@needs_triton
def test_models_use_the_kernels(interpreted):
    found = interpreted("model_paths")
    for name, (said, logits, gradients, cached) in found.items():
        assert cached < 1e-4, name
        if "triton" in said:  # CoPE's gates are rounded
            bounds = (3e-3, 6e-3 if name.endswith(" keys") else 0.1) if "cope" in name else (1e-5, 1e-4)
            assert logits < bounds[0] and gradients < bounds[1], (name, logits, gradients)
        else:
            assert logits == gradients == 0, name
    said = {name.split()[0]: found[name][0] for name in found if name.endswith("keys") and "sep" not in name}
    assert said == {"pope": "attention: triton pope", "cope": "attention: triton cope",
                    "cope+rope": "attention: triton cope+rope", "cope+pope": "attention: triton cope+pope",
                    "rope,pope": "attention: pytorch (rope: no kernel for it), triton pope",
                    "cope_alibi": "attention: pytorch (cope_alibi: no kernel for it)",
                    "cope+alibi": "attention: pytorch (cope+alibi: mixed)"}


def test_a_model_says_why_not(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    net = model.GPT(model.GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=64, pe="pope"))
    reason = "no GPU" if kernels.triton.__version__ else "no triton"
    assert net.use_kernels(torch.bfloat16) == f"attention: pytorch (pope: {reason})"
    assert not any(block.attn.triton for block in net.h)


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", COPE)
def test_cope(interpreted, case, dtype):
    cope_judge(interpreted("cope_errors", case, dtype), COPE[case][0], COPE[case][3])


def test_naive_versions():
    """The ten lines of each method, a reading aid, against the equations."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
    delta = -2 * math.pi * torch.rand(3, 8, dtype=torch.float64)
    z = torch.randn(2, 3, 20, 6, dtype=torch.float64)
    for found, expected in [(kernels.naive_pope(q, k, v, delta), pope_equation(q, k, v, delta, True)),
                            (kernels.naive_cope(q, k, v, z), cope_equation(q, k, v, z))]:
        assert (found - expected).abs().max() < 1e-12


def test_the_example_of_the_docstring():
    """The row of six keys at the top of kernels.py: autograd finds the same numbers."""
    rows = re.findall(r"^    (\w+) +((?:-?[.\d]+ +)*-?[.\d]+)(?:  .*)?$", kernels.__doc__, re.M)
    row = {name: torch.tensor([float(x) for x in xs.split()], dtype=torch.float64) for name, xs in rows}
    assert [len(x) for x in row.values()] == 11 * [6] + [4]
    g, z = row["g"].requires_grad_(), torch.tensor([0.0, 2, 1, 3], dtype=torch.float64, requires_grad=True)
    p = g.flip(0).cumsum(0).flip(0).clamp(max=3)
    c, w = p.detach().floor(), p - p.detach().floor()
    bias = (1 - w) * z[c.long()] + w * z[p.detach().ceil().long()]
    dg, dz = torch.autograd.grad(bias, (g, z), row["dS"], retain_graph=True)
    slope, = torch.autograd.grad(bias, p, torch.ones(6, dtype=torch.float64))
    expected = dict(p=p, c=c, w=w, slope=slope, dp=row["dS"] * slope, dg=dg, dz=dz,
                    F=(row["dS"] * (1 - w)).cumsum(0), C=(row["dS"] * w).cumsum(0))
    for name, x in expected.items():
        assert torch.equal(row[name], x), name


@needs_triton
def test_cope_differs_in_nothing(interpreted):
    assert interpreted("cope_variants") == [[], []]


@needs_triton
def test_cope_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        widths = (64, 64, 64, 7, 64, 64)
        x = [torch.empty(2, 3, 33, n, dtype=torch.bfloat16, requires_grad=True) for n in widths]
        o = kernels.cope_attention(*x)
        grads = torch.autograd.grad(o, x, torch.empty_like(o))
    assert o.shape == (2, 3, 33, 64) and [g.shape for g in grads] == [a.shape for a in x]


@pytest.mark.parametrize("name, wrong", [("k", lambda q: q[:, :1]), ("z", lambda q: q[..., :1]),
                                         ("gate_k", lambda q: q.half()), ("gate_k", lambda q: q[..., :16])])
def test_cope_errors_name_the_argument(name, wrong):
    q = torch.randn(1, 2, 9, 32)
    with pytest.raises(ValueError, match=f"^{name} is "):
        kernels.cope_attention(**dict(q=q, k=q, v=q, z=q) | {name: wrong(q)})


# ---------------------------------------------------------------------------------------------------
# dropout: the mask is read out, and the equations with it are held against the kernels

DROPOUT = ("pope", "cope", "cope, separate")
SHARE = 0.25
# 2^-digits is the rounding of a type; in float32 what a gate costs that the oracle rounds to its neighbour
DIGITS = {"float32": 16, "float16": 11, "bfloat16": 8}


def dropout_inputs(method, dtype, device):
    T, d = 100, 64
    if method == "pope":
        inputs, do = pope_inputs(T, d, "uniform", getattr(torch, dtype), device)
        return dict(zip(("q", "k", "v", "delta"), inputs)), do
    return cope_inputs(T, d, 16, dtype, "separate" if "," in method else "keys", 0, device=device)


def dropout_kernel(method, x):
    torch.manual_seed(7)
    attention = kernels.pope_attention if method == "pope" else kernels.cope_attention
    return attention(**x, dropout=SHARE)


def dropout_mask(method, x):
    """(B, H, T, T), 1 where a weight survives: the output is not 0 there, if v has a 1 at one key in each
    column."""
    B, H, T, d = x["v"].shape
    columns = []
    for start in range(0, T, d):
        v = torch.zeros(T, d)
        v[start:start + d] = torch.eye(d)[:T - start]
        v = v.to(x["v"]).expand(B, H, T, d)
        columns.append(dropout_kernel(method, {name: 0.1 * a for name, a in x.items()} | dict(v=v)) != 0)
    return torch.cat(columns, -1)[..., :T].float()


def dropout_equation(method, x, mask, units=2048):
    """The methods' equations with weights masked, in the dtype of x."""
    T, d = x["q"].shape[2:]
    scaled = mask.to(x["v"].dtype) / (1 - SHARE)
    # as values it brings the weights out
    eye = torch.eye(T, device=mask.device).to(x["v"].dtype).expand(*x["v"].shape[:2], T, T)
    if method == "pope":
        return scaled * pope_equation(x["q"], x["k"], eye, x["delta"], True) @ x["v"]
    return scaled * cope_equation(**x | dict(v=eye), units=units) @ x["v"]


def dropout_errors(method, dtype, device="cpu"):
    """{tensor: (largest error of the kernel, largest value)}, the share of weights that survive, whether a
    second run gives the same bits, whether another seed gives other ones, whether heads have masks of their
    own"""
    torch.manual_seed(3)
    x, do = dropout_inputs(method, dtype, device)
    with torch.no_grad():
        mask = dropout_mask(method, x)
    past = torch.ones_like(mask).tril()
    mine, again = ([], [])
    for results in (mine, again):
        leaves = {name: a.detach().requires_grad_() for name, a in x.items()}
        o = dropout_kernel(method, leaves)
        results += [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]
    leaves = {name: a.detach().double().requires_grad_() for name, a in x.items()}
    o = dropout_equation(method, leaves, mask)
    exact = [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do.double())]
    errors = {name: ((a - b).abs().max().item(), b.abs().max().item())
              for name, a, b in zip(("o", *x), mine, exact)}
    attention = kernels.pope_attention if method == "pope" else kernels.cope_attention
    other = attention(**x, dropout=SHARE)  # goes on in the generator's stream
    share, same = (mask * past).sum().item() / past.sum().item(), all(a.equal(b) for a, b in zip(mine, again))
    return errors, share, same, not other.equal(mine[0]), not mask[0, 0].equal(mask[0, 1])


def dropout_judge(found, digits):
    """digits: of the precision, 2^-digits is a rounding."""
    errors, share, same, other, heads = found
    assert same and other and heads
    assert abs(share - (1 - SHARE)) < 0.02  # of 10100 weights: five standard deviations
    for name, (error, size) in errors.items():
        assert error <= size * 8 * 2.0**-digits + 1e-5, f"{name}: off by {error:.1e} of {size:.1e}"


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("method", DROPOUT)
def test_dropout(interpreted, method, dtype):
    dropout_judge(interpreted("dropout_errors", method, dtype), DIGITS[dtype])


@needs_triton
def test_dropout_knows_no_tiles(interpreted):
    assert interpreted("masks_agree")


def masks_agree():
    """Whether tiles of another shape draw the same mask."""
    torch.manual_seed(3)
    x, _ = dropout_inputs("pope", "float16", "cpu")
    mask, kept = dropout_mask("pope", x), kernels.TILES["pope_forward"]
    kernels.TILES["pope_forward"] = 4 * ((32, 16, 4, 1),)
    other = dropout_mask("pope", x)
    kernels.TILES["pope_forward"] = kept
    return mask.equal(other)


# ---------------------------------------------------------------------------------------------------
# compiled ahead of time, by Triton's own launcher, which a driver for a GPU that is not there deceives

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may have, on an A100 and an H100
# bytes that a thread's registers may spill to memory, by chip and head width, with Triton 3.6, 3.8 and
# 3.9, in kernels of 3000 instructions and more. Gates of their own (456 on sm_90), dropout (668 on sm_80)
# and heads of 128 (1976) want more registers than there are. Narrower tiles spill less, but take more
# instructions a pair of query and key, with those of the spills counted
SPILLED = {(80, 64): 704, (90, 64): 480, (80, 128): 2048, (90, 128): 2048}


class Driver:
    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self):
        return self.target

    def get_current_stream(self, device):
        return 0


def launches(method, d, T, dropout):
    """{name: (kernel, arguments, options)} of all kernels of one step in bfloat16"""
    B, H, seen = 1, 2, {}
    dtype = torch.bfloat16

    def launch(kernel, grid, *args, **options):
        seen[kernel.__name__] = kernel, args, options | dict(enable_fp_fusion=True)

    kept, kernels.launch = kernels.launch, launch

    def heads(x):
        return x.unflatten(-1, (H, d)).transpose(1, 2)

    q, k = (heads(x) for x in torch.zeros(B, T, 2 * H * d, dtype=dtype).chunk(2, -1))
    v, gate_k, do = (heads(x) for x in torch.zeros(3, B, T, H * d, dtype=dtype))
    if method == "pope":
        x, f = [q, k, v, torch.zeros(H, d)], kernels.pope_attention
    else:  # z in float32, as model.py's under autocast
        own = [q, gate_k] if method == "cope, separate" else []
        x, f = [q, k, v, torch.zeros(B, H, T, 64), *own], kernels.cope_attention
    try:
        x = [a.detach().requires_grad_() for a in x]
        torch.autograd.grad(f(*x, dropout=dropout), x, do)
    finally:
        kernels.launch = kept
    return seen


def compiled_kernel(target, kernel, args, options):
    """What one kernel takes on a GPU of compute capability target / 10."""
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(Driver(target))
    kernel.device_caches.clear()
    with io.StringIO() as log, redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.compilation.always_compile = True  # what comes from the cache brings no log,
        knobs.nvidia.dump_ptxas_log = True  # and only the assembler's tells what was spilled
        compiled = kernel.warmup(*args, grid=(1,), **options)
        log = log.getvalue()
    name, registers = kernel.__name__, int(re.search(r"Used (\d+) registers", log)[1])
    warps, shared = options["num_warps"], compiled.metadata.shared
    by_registers = 65536 // (math.ceil(registers / 8) * 8 * 32 * warps)
    programs = min(by_registers, (SHARED[target] + 1024) // (shared + 1024))
    return dict(name=name, target=target, width=options.get("P", 64), warps=warps, registers=registers,
                spilled=int(re.search(r"(\d+) bytes spill stores", log)[1]), shared=shared, programs=programs,
                rows=options.get("N" if name.endswith("_kv") else "M"), dots="N" in options,
                wgmma="wgmma" in compiled.asm["ptx"])


def compile_all(target, method, d, T, dropout, tiles=None):
    """tiles: {kernel: (M, N, warps, stages)} in the place of its own, and no other kernels."""
    found = []
    for name, (kernel, args, options) in launches(method, d, T, dropout).items():
        if tiles is None or name in tiles:
            other = dict(zip(("M", "N", "num_warps", "num_stages"), (tiles or {}).get(name, ())))
            found.append(compiled_kernel(target, kernel, args, options | other))
    return found


def complaints(x):
    """What would make a compiled kernel slow, or stop it, in words."""
    found = []
    if x["shared"] > SHARED[x["target"]]:
        found.append("more shared memory than there is")
    if x["spilled"] > SPILLED[x["target"], x["width"]]:
        found.append("registers spilled")
    if x["dots"] and x["target"] == 90:
        if x["warps"] * 16 > x["rows"]:
            found.append("two warps share rows")  # and do the same work twice
        if not x["wgmma"]:
            found.append("no wgmma")  # but the tensor cores' older, slower instruction
        if x["width"] == 64 and x["programs"] < 2:
            found.append("alone on a multiprocessor")  # nothing to do while it waits for its loads
    return found


@pytest.fixture(scope="module")
def compiler():
    child = Child()
    yield child
    child.process.kill()


# T = 1 becomes a constant, and 1000 is no multiple of a tile, or of 16
AHEAD = [(90, "pope", 64, 1024, 0.0), (90, "pope", 64, 1000, 0.1), (90, "pope", 128, 1024, 0.0),
         (90, "cope", 64, 1, 0.0), (90, "cope", 64, 1000, 0.1), (90, "cope, separate", 64, 1024, 0.0),
         (90, "cope, separate", 128, 1024, 0.0), (80, "pope", 64, 1000, 0.1), (80, "cope", 64, 1000, 0.1),
         (80, "cope, separate", 128, 1024, 0.0)]


@needs_triton
@pytest.mark.parametrize("case", AHEAD, ids=names(AHEAD))
def test_compiles_for(compiler, case):
    found = compiler("compile_all", *case)
    assert len(found) == (4 if case[1] == "pope" else 3)
    assert not any(map(complaints, found)), [(x, complaints(x)) for x in found]


@needs_triton
@pytest.mark.parametrize("complaint, method, kernel, tile", [
    ("two warps share rows", "pope", "pope_backward_kv", (64, 64, 8, 2)),
    ("alone on a multiprocessor", "pope", "pope_backward_q", (128, 64, 8, 2)),
    ("no wgmma", "cope", "cope_backward_q", (32, 32, 4, 1)),
    ("registers spilled", "cope", "cope_backward_q", (64, 64, 4, 1))])
def test_bad_tiles_are_noticed(compiler, complaint, method, kernel, tile):
    found, = compiler("compile_all", 90, method, 64, 1024, 0.0, {kernel: tile})
    assert complaint in complaints(found), found


# ---------------------------------------------------------------------------------------------------
# on a GPU, and on none

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", POPE + [(1025, 64, "uniform", True)], ids=str)
def test_pope_on_gpu(case, dtype):
    errors, again = pope_errors(*case, dtype, "cuda")
    judge(errors)
    assert again, "the second run gave other bits"


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", COPE)
def test_cope_on_gpu(case, dtype):
    cope_judge(cope_errors(case, dtype, "cuda"), COPE[case][0], COPE[case][3])


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", DROPOUT)
def test_dropout_on_gpu(method, dtype):
    dropout_judge(dropout_errors(method, dtype, "cuda"), DIGITS[dtype])


@gpu
@needs_gpu
def test_pope_details_on_gpu():
    assert softplus_error("cuda") < 1e-5  # there exp(-80) is 2^x for a float32 x = -80 log2(e), off by 4e-6
    assert pope_compiled("cuda") and pope_summed("cuda")


def test_why_not(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(kernels.triton, "__version__", "3.6.0")

    def ask(pe="pope", d=64, device="cpu", dtype=torch.bfloat16, **more):
        return kernels.why_not(pe, d, device, dtype, **more)

    assert [ask(d=d) for d in (32, 48, 64, 128)] == [None] * 4
    assert [ask(pe) for pe in ("cope", "cope+rope", "carope+cope", "pope+learned")] == [None] * 4
    assert [ask("pope+cope", d) for d in (32, 64)] == [ask("cope+pope+expe")] * 2 == [None] * 2
    assert [ask(pe) for pe in ("cope+alibi", "pope+t5", "pope+rope", "cope+rope+fox")] == ["mixed"] * 4
    assert ask("rope") == ask("cope_mlp") == "no kernel for it"
    assert ask(hard_attention=True) == "hard attention"
    assert ask(d=80) == "head width 80 is none of 32, 48, 64, 128"
    assert ask("cope+pope", 128) == "head width 128 is none of 16, 24, 32, 64"  # q and k are twice as wide
    assert ask(dtype=torch.float64) == "torch.float64 inputs"
    monkeypatch.setattr(kernels, "INTERPRET", False)
    assert ask() == "no GPU"
    monkeypatch.setattr(kernels.triton, "__version__", "3.5.1")
    assert ask(device="cuda") == "triton 3.5.1, older than 3.6"
    monkeypatch.setattr(kernels.triton, "__version__", None)
    assert ask(device="cuda") == "no triton"


def test_without_triton():
    """A machine that has no Triton can import the module, and ask."""
    code = ("import sys; sys.modules['triton'] = None; import kernels; "
            "assert kernels.why_not('pope', 64, 'cuda', None) == 'no triton'")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_phases_of_late_tokens(monkeypatch):
    """A float32 angle would be off by 1e-3 at the end."""
    tables, T, d = [], 16384, 32

    def forward(q, k, v, delta, table, *rest):
        tables.append(table)
        return [q]

    monkeypatch.setattr(kernels, "pope_op", forward)
    q = torch.zeros(1, 1, T, d)
    kernels.pope_attention(q, q, q, None, base=500.0)
    cos, sin = tables[0].unbind(-1)
    for t, c in [(1, 0), (T - 1, 0), (T - 1, 1), (9999, 7), (T - 1, d - 1)]:
        angle = t * 500.0 ** (-c / d)
        assert abs(cos[t, c].item() - math.cos(angle)) < 1e-7
        assert abs(sin[t, c].item() - math.sin(angle)) < 1e-7


def meta(B=1, H=1, T=1, d=64, stride=None):
    """A tensor of this shape without memory; stride: from a token to the next."""
    x = torch.empty(B, H, T, d, device="meta")
    return x if stride is None else x.as_strided(x.shape, (0, d, stride, 1))


@pytest.mark.parametrize("fine, wrong, words", [
    (dict(T=2**21 - 1, stride=1024), dict(T=2**21, stride=1024), "2097152 tokens .* shorten"),
    (dict(H=32, T=2**20 - 1), dict(H=32, T=2**20), "1048576 tokens"),  # o is (B, T, H, d)
    (dict(T=2**24 - 1), dict(T=2**24), "16777216 tokens")])  # and q' is 2d wide
def test_what_offsets_cannot_reach_is_refused(fine, wrong, words):
    kernels.check(q=meta(**fine))
    with pytest.raises(ValueError, match=words):
        kernels.pope_attention(*3 * [meta(**wrong)], None)


@pytest.mark.parametrize("T, npos", [(2**20, 2), (1000, 2**21), (370728, 2)])
def test_what_cope_cannot_count_is_refused(T, npos):
    x = meta(T=T)
    with pytest.raises(ValueError, match=f"^{T} tokens are more than the kernels can address"):
        kernels.cope_attention(x, x, x, meta(T=T, d=npos))


def test_shapes_must_agree():
    q, v = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 6, 32)
    with pytest.raises(ValueError, match=r"\(1, 2, 6, 32\) torch.float32"):
        kernels.pope_attention(q, q, v, None)


if __name__ == "__main__":
    serve()
