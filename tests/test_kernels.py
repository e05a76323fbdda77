"""kernels.py against the papers' equations in float64, written out below. The kernels may be off by
twice as much as model.py's dense path in the same precision.

Without a GPU they run in Triton's interpreter, and are compiled for GPUs that are absent. Triton
reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own. That is
this file as a script: it reads calls such as ["check_pope", 64, 64, null, true, "float16"], one a
line. With a GPU: python -m pytest tests/test_kernels.py -m gpu
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

if "ttsem" in sys.modules:  # an emulator of compiled kernels, from PyPI; it runs no assembly
    kernels.ASM = kernels.constexpr(False)

needs_triton = pytest.mark.skipif(kernels.triton.__version__ is None, reason="no triton")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

def devices(interpreted, gpu):
    """Cases of both. A GPU takes every dtype; the interpreter computes bfloat16 wrongly."""
    return [("cpu", *case) for case in interpreted] + [
        pytest.param("cuda", *case, dtype, marks=[pytest.mark.gpu, needs_gpu])
        for case in gpu for dtype in ("float32", "float16", "bfloat16")]

class Child:
    """A process that calls functions of this file in the interpreter."""
    def __init__(self):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        env = os.environ | {"TRITON_INTERPRET": "1"}
        self.process = subprocess.Popen([sys.executable, __file__], env=env, **pipes)

    def __call__(self, name, *args):
        self.process.stdin.write(json.dumps([name, *args]) + "\n")
        self.process.stdin.flush()
        error = json.loads(self.process.stdout.readline())
        assert not error, error

def serve():
    torch.set_num_threads(1)
    patch_once()
    answers = os.dup(1)
    os.dup2(2, 1)  # compilers print too
    for line in sys.stdin:
        name, *args = json.loads(line)
        error = ""
        try:
            globals()[name](*args)
        except Exception:
            error = traceback.format_exc()
        os.write(answers, (json.dumps(error) + "\n").encode())

def patch_once():
    """The interpreter patches triton.language for each call of a function in a kernel, and restores
    it afterwards. Here it stays patched, which gives the same bits in half the time."""
    from triton import language
    from triton.runtime import interpreter

    patch, seen = interpreter._patch_lang, set()  # it patches what fn's file imports

    def once(fn):
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            patch(fn)
            # Triton 3.6 makes an int of an array with one number, which NumPy 2.4 refuses
            language.tensor.__index__ = lambda self: int(self.handle.data.item())
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once

@pytest.fixture(scope="module")
def run():
    """run(device, name, *args) calls a function of this file, on the CPU in the interpreter."""
    children = []

    def call(device, name, *args):
        if device == "cuda":
            return globals()[name](*args, device=device)
        if not children:
            children.append(Child())
        children[0](name, *args)

    yield call
    for child in children:
        child.process.stdin.close()
        child.process.wait()

def results(f, x, do):
    """The output of f(**x) and its gradients by every tensor of x, by name."""
    x = {name: a.detach().requires_grad_() for name, a in x.items()}
    o = f(**x)
    return dict(zip(("o", *x), (o.detach(), *torch.autograd.grad(o, list(x.values()), do.to(o)))))

def double(x):
    return {name: a.double() for name, a in x.items()}

def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)

def size(x):
    """Root mean square and largest value."""
    return x.square().mean().sqrt().item(), x.abs().max().item()

# --- PoPE -----------------------------------------------------------------------------------------

# T, d, delta, softplus: one token, one less than a tile, a tile, several and a part of one
POPE = [(1, 32, "uniform", True), (63, 48, "uniform", True), (64, 64, None, True),
        (64, 128, "uniform", False), (100, 32, "zero", False), (257, 64, "uniform", True),
        (130, 128, "uniform", True)]

def pope_equation(q, k, v, delta, softplus=True):
    """PoPE eq. 5: a cosine of every distance, in every dimension. delta (H, d)"""
    (B, H, T, d), mu = q.shape, F.softplus if softplus else lambda x: x
    t = torch.arange(T, device=q.device)
    theta = 10000.0 ** (-torch.arange(d, device=q.device).double() / d)
    distance, rows = t - t[:, None], []  # (T, T): j - i
    for b in range(B):
        for h in range(H):
            cos = (distance[..., None] * theta + delta[h]).cos()  # (T, T, d)
            s = torch.einsum("tc,sc,tsc->ts", mu(q[b, h]), mu(k[b, h]), cos) / math.sqrt(d)
            rows.append(s.masked_fill(distance > 0, -math.inf).softmax(-1) @ v[b, h])
    return torch.stack(rows).unflatten(0, (B, H))

def pope_dense(q, k, v, delta=None, softplus=True):
    """What model.py computes."""
    H, d = q.size(1), q.size(3)
    cfg = model.GPTConfig(n_head=H, n_embd=H * d, pope_softplus=softplus, pope_delta="none")
    pe = model.PoPE(cfg)
    pe.delta = delta
    wide = pe.rotate(q, k, q, torch.arange(q.size(2), device=q.device), None)
    return F.scaled_dot_product_attention(*wide, v, is_causal=True, scale=d**-0.5)

def pope_inputs(T, d, delta, dtype, device="cpu", B=1, H=2):
    """q, k, as model.py cuts them out of one projection, v and delta by name, and o's gradient."""
    def heads(x):
        return x.unflatten(-1, (H, d)).transpose(1, 2).to(device, getattr(torch, dtype))

    q, k = map(heads, torch.randn(B, T, 2 * H * d).chunk(2, -1))
    v, do = map(heads, torch.randn(2, B, T, H * d))
    x = dict(q=q, k=k, v=v)
    if delta:
        lowest = -2 * math.pi if delta == "uniform" else 0.0
        x["delta"] = lowest * torch.rand(H, d).to(device)
    return x, do

def check_pope(T, d, delta, softplus, dtype, device="cpu"):
    """The same bits twice; over some draws, at most twice the dense path's error in the mean square
    and four times its largest error, which is a matter of luck."""
    def fast(**x):
        return kernels.pope_attention(**dict(delta=None) | x, softplus=softplus)

    errors = {}
    for draw in range(2 if device == "cpu" else 3):
        torch.manual_seed(1000 * draw + T + d)
        x, do = pope_inputs(T, d, delta, dtype, device, B=2 if T < 100 else 1)
        none = torch.zeros(2, d, device=device, dtype=torch.float64)
        exact = results(lambda **x: pope_equation(**dict(delta=none) | x, softplus=softplus),
                        double(x), do)
        ours = results(fast, x, do)
        dense = results(lambda **x: pope_dense(**x, softplus=softplus), x, do)
        for name, want in exact.items():
            assert ours[name].dtype == dense[name].dtype
            errors.setdefault(name, []).append(torch.stack((ours[name] - want, dense[name] - want)))
        if draw == 0 and (T <= 64 or device != "cpu"):
            assert same(ours, results(fast, x, do)), "the second run gave other bits"
    for name, draws in errors.items():
        (mean, top), (dense_mean, dense_top) = map(size, torch.stack(draws, 1))
        assert mean <= 2 * dense_mean + 2e-6, f"{name}: rms {mean:.2g}, dense {dense_mean:.2g}"
        assert top <= 4 * dense_top + 2e-6, f"{name}: largest {top:.2g}, dense {dense_top:.2g}"

@needs_triton
@pytest.mark.parametrize("device, T, d, delta, softplus, dtype", devices(
    [(*case, "float16") for case in POPE] + [(*POPE[i], "float32") for i in (1, 4)],
    POPE + [(1025, 64, "uniform", True)]))
def test_pope(run, device, T, d, delta, softplus, dtype):
    run(device, "check_pope", T, d, delta, softplus, dtype)

def check_pope_details(device="cpu"):
    # with cosines and sines of 1, k' holds the kernel's softplus twice
    k = torch.linspace(-80, 80, 6400, device=device).view(1, 1, 100, 64)
    one, delta = torch.ones(100, 64, 2, device=device), torch.zeros(1, 64, device=device)
    *_, pairs = kernels.pope_op(k, k, k, delta, one, kernels.draw_seed(k, 0.0), True, 0.0)
    exact = k.double().clamp(min=0) + torch.log1p((-k.double().abs()).exp())
    error = ((pairs[..., 1::2] - exact) / exact).abs().max().item()
    # a GPU computes exp(-80) as 2^x for a float32 x = -80 log2(e), which is off by 4e-6
    assert error < (1e-6 if device == "cpu" else 1e-5), f"softplus is off by {error}"

    # fake tensors, traced graphs and eager mode agree
    x, do = pope_inputs(40, 32, "uniform", "float32", device)
    rest = torch.rand(40, 32, 2, device=device), kernels.draw_seed(k, 0.0), True, 0.0
    torch.library.opcheck(kernels.pope_op, (*[a.requires_grad_() for a in x.values()], *rest))
    traced = torch.compile(kernels.pope_attention, fullgraph=True, backend="aot_eager")
    assert same(results(kernels.pope_attention, x, do), results(traced, x, do))

    # the gradient of sum() is one number, expanded
    one = torch.ones((), device=device)
    assert same(results(kernels.pope_attention, x, one.expand(do.shape)),
                results(kernels.pope_attention, x, torch.ones_like(do)))

@needs_triton
@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_pope_details(run, device):
    run(device, "check_pope_details")

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

# --- CoPE -----------------------------------------------------------------------------------------

# T, d, npos, what is compared with q to form the gates, and where the gates' logits are centred
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
# The costs of rounded gates (kernels.py), relative to the root mean square of a result. In
# these cases dz changes by 0.0042, and what no gate's gradient goes into by 0.0012
ROUNDING_Z, ROUNDING = 0.01, 0.003
# The kernel's float32 sigmoid and the oracle's in float64 sometimes round to neighbours: 5e-5 at
# most here, and 3e-4 of the largest value. One run of keys missing in dz would cost 1e-2
FLIPS, FLIPS_MAX = 2e-4, 2e-3

def rounding_gates(T):
    """The same for the gradient of a gate, which adds up slopes z[c + 1] - z[c]. The sum of T
    rounded gates is off by about e = sqrt(T / 12) / 2048. So a share sqrt(2 / pi) e of the
    positions get another column c. Its slope is independent of the right one, which makes the error
    twice a slope's variance. The bound is twice the root of that, 0.12 for 257 tokens, as a few
    rows are a small sample."""
    return 2 * math.sqrt(2 * math.sqrt(2 / math.pi) * math.sqrt(T / 12) / 2048)

def cope_equation(q, k, v, z, gate_q=None, gate_k=None, units=None):
    """Listing 1, with logits in float32 at least. units: gates are multiples of 1 / units."""
    T, npos = q.size(2), z.size(3)
    scale = min(q.size(3), v.size(3)) ** -0.5  # PoPE makes q and k twice as wide
    gate_q, gate_k = q if gate_q is None else gate_q, k if gate_k is None else gate_k
    wide = torch.promote_types(q.dtype, torch.float32)
    t = torch.arange(T, device=q.device)
    past = t[:, None] >= t
    g = torch.sigmoid((gate_q @ gate_k.mT).to(wide) * scale)
    if units:
        g = g + (torch.floor(g * units + 0.5) / units - g).detach()
    p = torch.where(past, g, 0).flip(-1).cumsum(-1).flip(-1).clamp(max=npos - 1)
    below, above = p.detach().floor(), p.detach().ceil()
    w, z = p - below, z.to(wide)
    bias = z.gather(-1, below.long()) * (1 - w) + z.gather(-1, above.long()) * w
    logits = (q @ k.mT).to(wide) * scale + bias
    return torch.where(past, logits, -torch.inf).softmax(-1).to(v.dtype) @ v

def cope_inputs(T, d, npos, gates, centre, dtype, device="cpu", B=1, H=2):
    """The arguments by name, and o's gradient. centre is added to every logit of a gate."""
    q, k, v, gate_q, gate_k, do = torch.randn(6, B, H, T, d)
    if gates == "keys" and centre:
        q[..., 0] = k[..., 0] = (abs(centre) * d**0.5) ** 0.5
        q[..., 0] *= 1 if centre > 0 else -1
    gate_q[..., 0], gate_k[..., 0] = centre, d**0.5
    if gates == "mixed":  # the rows of every fourth tile hardly count, nor does a row of another
        i = torch.arange(T)
        gate_q[..., 0] = torch.where((i // 32 % 4 == 3) | (i == 200), -5.0, 5.0)
    x = dict(q=q, k=k, v=v, z=torch.randn(B, H, T, npos))
    if gates == "rotated":
        angle = torch.arange(T)[:, None] * 100.0 ** -torch.linspace(0, 1, d // 2)
        cos, sin = angle.cos(), angle.sin()
        x |= dict(q=model.turn(q, cos, sin), k=model.turn(k, cos, sin), gate_q=q, gate_k=k)
    if gates == "polar":  # q and k twice as wide as v
        x |= dict(q=torch.cat((q, gate_q), -1), k=torch.cat((k, gate_k), -1))
    if gates in ("separate", "mixed"):
        x |= dict(gate_q=gate_q, gate_k=gate_k)
    dtype = getattr(torch, dtype)
    return {name: a.to(device, dtype) for name, a in x.items()}, do.to(device, dtype)

def check_cope(case, dtype, device="cpu"):
    """case: a key of COPE. The result is held against Listing 1 with the kernel's rounded gates,
    and within what rounding may cost against exact gates."""
    torch.manual_seed(list(COPE).index(case))
    T, d, npos, gates, centre = COPE[case]
    x, do = cope_inputs(T, d, npos, gates, centre, dtype, device)

    def complete(f, **options):
        if gates == "values":
            return lambda **x: f(**x, gate_k=x["v"], **options)
        return lambda **x: f(**x, **options)

    kernel = complete(kernels.cope_attention)
    mine = results(kernel, x, do)
    if T < 100 or device != "cpu":
        assert same(mine, results(kernel, x, do)), "the second run gave other bits"
    dense = results(complete(cope_equation), x, do)
    exact = results(complete(cope_equation), double(x), do)
    rounded = results(complete(cope_equation, units=2048), double(x), do)
    fed = {"keys": "qk", "polar": "qk", "values": "qv"}.get(gates, ("gate_q", "gate_k"))
    for name, want in exact.items():
        (near, near_max), (far, _) = size(mine[name] - rounded[name]), size(mine[name] - want)
        slow, slow_max = size(dense[name] - want)
        (rounding, _), (rms, largest) = size(rounded[name] - want), size(want)
        price = rounding_gates(T) if name in fed else ROUNDING_Z if name == "z" else ROUNDING
        price, tiny = price * rms + 1e-6, 1e-6  # where the exact answer is 0
        assert near <= 2 * slow + FLIPS * rms + tiny, f"{name}: rms {near:.1e}, dense {slow:.1e}"
        assert near_max <= 2 * slow_max + FLIPS_MAX * largest + tiny, f"{name}: max {near_max:.1e}"
        assert rounding <= price, f"{name}: rounding costs {rounding / rms:.1e}"
        assert far <= 2 * slow + price, f"{name}: rms {far:.1e}, dense {slow:.1e}"

@needs_triton
@pytest.mark.parametrize("device, case, dtype", devices(
    [(case, "float16") for case in COPE if "never" not in case]
    + [("63, padded head", "float32"), ("separate, half saturated", "float32")],
    [(case,) for case in COPE]))
def test_cope(run, device, case, dtype):
    run(device, "check_cope", case, dtype)

def check_cope_variants():
    x, do = cope_inputs(63, 48, 16, "keys", 0, "float16", H=3)
    mine = results(kernels.cope_attention, x, do)
    traced = torch.compile(kernels.cope_attention, fullgraph=True, backend="eager")
    assert same(mine, results(traced, x, do)), "a graph changes the result"
    kernels.BORROWED = 2 * 8 * 63 * (1 + 16)  # two heads at a time, then the third
    assert same(mine, results(kernels.cope_attention, x, do)), "heads borrow each other's memory"
    kernels.BORROWED = 2**28

@needs_triton
def test_cope_in_a_graph_and_with_little_memory(run):
    run("cpu", "check_cope_variants")

@needs_triton
def test_cope_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        widths = (64, 64, 64, 7, 64, 64)
        x = [torch.empty(2, 3, 33, n, dtype=torch.bfloat16, requires_grad=True) for n in widths]
        o = kernels.cope_attention(*x)
        grads = torch.autograd.grad(o, x, torch.empty_like(o))
    assert o.shape == (2, 3, 33, 64) and [g.shape for g in grads] == [a.shape for a in x]

def test_naive_versions():
    """The ten lines of each method in kernels.py compute the equations."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
    delta = -2 * math.pi * torch.rand(3, 8, dtype=torch.float64)
    z = torch.randn(2, 3, 20, 6, dtype=torch.float64)
    for found, want in [(kernels.naive_pope(q, k, v, delta), pope_equation(q, k, v, delta)),
                        (kernels.naive_cope(q, k, v, z), cope_equation(q, k, v, z))]:
        assert (found - want).abs().max() < 1e-12

def test_the_example_of_the_docstring():
    """Autograd reproduces the example with six keys at the top of kernels.py."""
    rows = re.findall(r"^    (\w+) +((?:-?[.\d]+ +)*-?[.\d]+)(?:  .*)?$", kernels.__doc__, re.M)
    row = {name: torch.tensor([float(x) for x in xs.split()]).double() for name, xs in rows}
    assert [len(x) for x in row.values()] == 11 * [6] + [4]
    g, z = row["g"].requires_grad_(), torch.tensor([0.0, 2, 1, 3]).double().requires_grad_()
    p = g.flip(0).cumsum(0).flip(0).clamp(max=3)
    c, w = p.detach().floor(), p - p.detach().floor()
    bias = (1 - w) * z[c.long()] + w * z[p.detach().ceil().long()]
    dg, dz = torch.autograd.grad(bias, (g, z), row["dS"], retain_graph=True)
    slope, = torch.autograd.grad(bias, p, torch.ones_like(p))
    expected = dict(p=p, c=c, w=w, slope=slope, dp=row["dS"] * slope, dg=dg, dz=dz,
                    F=(row["dS"] * (1 - w)).cumsum(0), C=(row["dS"] * w).cumsum(0))
    for name, x in expected.items():
        assert torch.equal(row[name], x), name

# --- dropout: the mask is read out, and the equations use it --------------------------------------

SHARE = 0.25
# 2^-digits is a type's rounding; in float32, what a gate costs that the oracle rounds otherwise
DIGITS = {"float32": 16, "float16": 11, "bfloat16": 8}

def dropped(method, x):
    torch.manual_seed(7)
    attention = kernels.pope_attention if method == "pope" else kernels.cope_attention
    return attention(**x, dropout=SHARE)

def dropout_mask(method, x):
    """(B, H, T, T), 1 where a weight survives. A v that is 1 at one key a column shows it in o."""
    B, H, T, d = x["v"].shape
    columns = []
    for start in range(0, T, d):
        v = torch.zeros(T, d)
        v[start : start + d] = torch.eye(d)[: T - start]
        v = v.to(x["v"]).expand(B, H, T, d)
        columns.append(dropped(method, {name: 0.1 * a for name, a in x.items()} | dict(v=v)) != 0)
    return torch.cat(columns, -1)[..., :T].float()

def dropout_equation(method, mask, **x):
    eye = torch.eye(mask.size(-1), device=mask.device).to(x["v"]).expand_as(mask)
    if method == "pope":  # with these values o is the weights
        weights = pope_equation(**x | dict(v=eye))
    else:
        weights = cope_equation(**x | dict(v=eye), units=2048)
    return weights * mask / (1 - SHARE) @ x["v"]

def check_dropout(method, dtype, device="cpu"):
    torch.manual_seed(3)
    T, d = 100, 64
    if method == "pope":
        x, do = pope_inputs(T, d, "uniform", dtype, device)
    else:
        x, do = cope_inputs(T, d, 16, "separate" if "," in method else "keys", 0, dtype, device)
    with torch.no_grad():
        mask = dropout_mask(method, x)
    share = mask.sum() / torch.ones_like(mask).tril().sum()
    assert abs(share - (1 - SHARE)) < 0.02  # of 10100 weights: five standard deviations
    assert not mask[0, 0].equal(mask[0, 1]), "heads have the same mask"
    mine = results(lambda **x: dropped(method, x), x, do)
    assert same(mine, results(lambda **x: dropped(method, x), x, do)), "a seed gave other bits"
    torch.manual_seed(8)
    seed = kernels.draw_seed(do, SHARE)
    assert not seed.equal(kernels.draw_seed(do, SHARE)), "every step drops the same weights"
    exact = results(lambda **x: dropout_equation(method, mask.double(), **x), double(x), do)
    for name, want in exact.items():
        error, largest = size(mine[name] - want)[1], size(want)[1]
        bound = largest * 8 * 2.0 ** -DIGITS[dtype] + 1e-5
        assert error <= bound, f"{name}: off by {error:.1e} of {largest:.1e}"

@needs_triton
@pytest.mark.parametrize("device, method, dtype", devices(
    [("pope", "float16"), ("cope", "float16"), ("cope, separate", "float32")],
    [("pope",), ("cope",), ("cope, separate",)]))
def test_dropout(run, device, method, dtype):
    run(device, "check_dropout", method, dtype)

# --- in a model -----------------------------------------------------------------------------------

def check_model(pe, gates, said):
    """A model with kernels against one without: logits, gradients, a graph. A cache needs none."""
    torch.manual_seed(3)  # with this seed no rounded gate takes a position across an integer
    net = model.GPT(model.GPTConfig(40, 11, n_layer=2, n_head=2, n_embd=64, pe=pe, cope_npos=8,
                                    cope_gates=gates))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.uniform_(-6, 0) if name.endswith("delta") else p.normal_(std=0.2)
    idx, found = torch.randint(11, (2, 40)), []
    for fast in (False, True):
        if fast:
            assert net.use_kernels(torch.float32) == f"attention: {said}"
        logits, loss = net(idx, idx)
        found.append([logits, *torch.autograd.grad(loss, list(net.parameters()))])
    traced = torch.compile(net, backend="eager", fullgraph=True)(idx, idx)[1]
    assert (traced - loss).abs() < 1e-5
    # CoPE's gates are rounded
    most = [3e-3, 6e-3 if gates == "keys" else 0.1] if "cope" in pe else [1e-5, 1e-4]
    for n, (slow, fast) in enumerate(zip(*found)):
        change = ((fast - slow).abs().max() / (slow.abs().max() + 1e-9)).item()
        assert change < most[n > 0], (n, change)
    cached = net(idx, idx, net.new_cache())[0]
    assert (cached - found[0][0]).abs().max() < 1e-4, "a kernel ran with a cache"

@needs_triton
@pytest.mark.parametrize("pe, gates, said", [
    ("rope,pope", "keys", "pytorch (rope: no kernel for it), triton pope"),
    ("cope", "sep-keys", "triton cope"),
    ("cope+rope", "keys", "triton cope+rope"), ("cope+rope", "values", "triton cope+rope"),
    ("cope+pope", "keys", "triton cope+pope")])
def test_models_use_the_kernels(run, pe, gates, said):
    run("cpu", "check_model", pe, gates, said)

def test_why_not(monkeypatch):
    """What keeps a layer from its kernel, in the words that the training log prints."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(kernels.triton, "__version__", "3.6.0")

    def ask(pe="pope", d=64, device="cpu", dtype=torch.bfloat16, **more):
        return kernels.why_not(pe, d, device, dtype, **more)

    assert [ask(d=d) for d in (32, 48, 64, 128)] == [None] * 4
    assert [ask(pe) for pe in ("cope", "cope+rope", "carope+cope", "pope+learned")] == [None] * 4
    assert [ask("pope+cope", d) for d in (32, 64)] == [ask("cope+pope+expe")] * 2 == [None] * 2
    mixed = "cope+alibi", "pope+t5", "pope+rope", "cope+rope+fox", "cope+cope"
    assert [ask(pe) for pe in mixed] == ["mixed"] * 5
    assert ask("rope") == ask("cope_mlp") == "no kernel for it"
    assert ask(hard_attention=True) == "hard attention"
    assert ask(d=80) == "head width 80 is none of 32, 48, 64, 128"
    assert ask("cope+pope", 128) == "head width 128 is none of 16, 24, 32, 64"  # q, k are 2d wide
    assert ask(dtype=torch.float64) == "torch.float64 inputs"
    monkeypatch.setattr(kernels, "INTERPRET", False)
    assert ask() == "no GPU"
    net = model.GPT(model.GPTConfig(8, 11, n_layer=2, n_head=2, n_embd=64, pe="pope"))
    assert net.use_kernels(torch.bfloat16) == "attention: pytorch (pope: no GPU)"
    assert not any(block.attn.triton for block in net.h)
    monkeypatch.setattr(kernels.triton, "__version__", "3.5.1")
    assert ask(device="cuda") == "triton 3.5.1, older than 3.6"
    monkeypatch.setattr(kernels.triton, "__version__", None)
    assert ask(device="cuda") == "no triton"

def test_without_triton():
    """Without Triton one can import the module, and ask."""
    code = ("import sys; sys.modules['triton'] = None; import kernels; "
            "assert kernels.why_not('pope', 64, 'cuda', None) == 'no triton'")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

# --- compiled ahead of time, with a driver for a GPU that is not there ----------------------------

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may have, on an A100 and an H100
# Bytes of registers that a thread may spill to memory, by chip and head width, with Triton 3.6, 3.8
# and 3.9, in kernels of 3000 instructions and more. Gates of their own (456 on sm_90), dropout (668
# on sm_80) and heads of 128 (1976) want more registers than there are. Narrower tiles spill less,
# but take more instructions for each pair of query and key, even with those of the spills counted
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

def launches(method, d, T, dropout, monkeypatch):
    """[(kernel, arguments, options)] of the kernels of one step in bfloat16."""
    seen, H = {}, 2

    def launch(kernel, grid, *args, **options):
        seen[kernel] = kernel, args, options | dict(enable_fp_fusion=True)

    def heads(x):
        return x.unflatten(-1, (H, d)).transpose(1, 2).requires_grad_()

    monkeypatch.setattr(kernels, "launch", launch)
    q, k = map(heads, torch.zeros(1, T, 2 * H * d, dtype=torch.bfloat16).chunk(2, -1))
    v, gate_k, do = map(heads, torch.zeros(3, 1, T, H * d, dtype=torch.bfloat16))
    if method == "pope":
        x = dict(q=q, k=k, v=v, delta=torch.zeros(H, d))
    else:  # z in float32, as model.py's under autocast
        x = dict(q=q, k=k, v=v, z=torch.zeros(1, H, T, 64))
        x |= dict(gate_q=q, gate_k=gate_k) if method == "cope, separate" else {}
    attention = kernels.pope_attention if method == "pope" else kernels.cope_attention
    results(lambda **x: attention(**x, dropout=dropout), x, do)
    return list(seen.values())

def check_compiled(target, kernel, args, options):
    """Compiles a kernel for compute capability target / 10. Asserts what makes it fast."""
    from triton import knobs

    kernel.device_caches.clear()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.compilation.always_compile = True  # what comes from the cache brings no log,
        knobs.nvidia.dump_ptxas_log = True  # and only the assembler's tells what was spilled
        compiled = kernel.warmup(*args, grid=(1,), **options)
    log = log.getvalue()
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    name, warps, shared = kernel.__name__, options["num_warps"], compiled.metadata.shared
    rows = options.get("N" if name.endswith("_kv") else "M")
    says = f"{name}: {registers} registers, {spilled} spilled, {shared} bytes shared"
    assert shared <= SHARED[target], f"{says}: more than there is"
    assert spilled <= SPILLED[target, options["P"]], f"{says}: too many spilled"
    if target == 90 and "N" in options:  # it has matrix products
        assert warps * 16 <= rows, f"{says}: two warps do the same rows"
        assert "wgmma" in compiled.asm["ptx"], f"{says}: not the fast tensor core instruction"
        threads = 32 * warps * 8 * math.ceil(registers / 8)
        programs = min(65536 // threads, (SHARED[target] + 1024) // (shared + 1024))
        # alone on a multiprocessor, it has nothing to do while it waits for its loads
        assert programs >= 2 or options["P"] > 64, f"{says}: one program a multiprocessor"

@needs_triton
@pytest.mark.parametrize("target, method, d, T, dropout", [
    (90, "pope", 64, 1024, 0.0), (90, "cope", 64, 1024, 0.0),
    (90, "cope, separate", 128, 1024, 0.0),
    # 1000 is no multiple of a tile, or of 16
    (80, "pope", 64, 1000, 0.1), (80, "cope", 64, 1000, 0.1)])
def test_compiles_for(target, method, d, T, dropout, monkeypatch):
    from triton.runtime import driver

    found = launches(method, d, T, dropout, monkeypatch)
    assert len(found) == (4 if method == "pope" else 3)
    driver.set_active(Driver(target))
    try:
        for launched in found:
            check_compiled(target, *launched)
    finally:
        driver.set_active(None)

# --- wrong input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("attention, name, wrong", [
    ("pope", "v", lambda q: q[:, :, :5]), ("cope", "k", lambda q: q[:, :1]),
    ("cope", "z", lambda q: q[..., :1]), ("cope", "gate_k", lambda q: q.half())])
def test_errors_name_the_argument(attention, name, wrong):
    q = torch.randn(1, 2, 9, 32)
    x = dict(q=q, k=q, v=q) | (dict(delta=None) if attention == "pope" else dict(z=q))
    with pytest.raises(ValueError, match=f"^{name} is "):
        getattr(kernels, f"{attention}_attention")(**x | {name: wrong(q)})

def meta(B=1, H=1, T=1, d=64, stride=None):
    """A tensor of this shape without memory; stride: from a token to the next."""
    x = torch.empty(B, H, T, d, device="meta")
    return x if stride is None else x.as_strided(x.shape, (0, d, stride, 1))

@pytest.mark.parametrize("fine, wrong, words", [
    (dict(T=2**21 - 1, stride=1024), dict(T=2**21, stride=1024), "2097152 tokens .* shorten"),
    (dict(H=32, T=2**20 - 1), dict(H=32, T=2**20), "1048576 tokens"),  # o is (B, T, H, d)
    (dict(T=2**24 - 1), dict(T=2**24), "16777216 tokens")])  # and q' is 2d wide
def test_offsets_past_int32_are_refused(fine, wrong, words):
    """They would read other tensors' memory."""
    kernels.check(q=meta(**fine))
    with pytest.raises(ValueError, match=words):
        kernels.pope_attention(*3 * [meta(**wrong)], None)

@pytest.mark.parametrize("T, npos", [(2**20, 2), (1000, 2**21), (370728, 2)])
def test_offsets_past_int32_in_cope_are_refused(T, npos):
    x = meta(T=T)
    with pytest.raises(ValueError, match=f"^{T} tokens are more than the kernels can address"):
        kernels.cope_attention(x, x, x, meta(T=T, d=npos))

if __name__ == "__main__":
    serve()
