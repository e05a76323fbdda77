"""kernels.py against the papers' equations in float64, written out below. The kernels may be off by
twice as much as dense attention in the same precision.

Without a GPU they run in Triton's interpreter, and are compiled for GPUs that are absent. Triton
reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own. That is
this file as a script. It reads calls such as ["check_plain", "one token", "float16"], one per line.
With a GPU: python -m pytest tests/test_kernels.py -m gpu
"""
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # when this file is the script

import kernels  # noqa: E402
import model  # noqa: E402

EMULATED = "ttsem" in sys.modules  # an emulator of compiled kernels, from PyPI; it runs no assembly
if EMULATED:
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

    def send(self, name, *args):
        self.process.stdin.write(json.dumps([name, *args]) + "\n")
        self.process.stdin.flush()

    def receive(self):
        error = json.loads(self.process.stdout.readline())
        assert not error, error

    def close(self):
        self.process.stdin.close()
        self.process.wait()

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
        children[0].send(name, *args)
        children[0].receive()

    yield call
    for child in children:
        child.close()

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

# --- the two snippets of assembly, first on a GPU -------------------------------------------------

def assembly(table, at, words, x, y, mask, pairs):
    lane = kernels.tl.arange(0, 128)
    kernels.tl.store(words + lane, kernels.load_words(table + kernels.tl.load(at + lane)))
    there = kernels.tl.load(mask + lane) != 0
    kernels.store_two(pairs + 2 * lane, kernels.tl.load(x + lane), kernels.tl.load(y + lane), there)

@needs_triton
@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(EMULATED, reason="the emulator runs no assembly")
def test_assembly_loads_and_stores_the_same():
    """Both are held against PyTorch's indexing. All other GPU tests rely on them."""
    torch.manual_seed(0)
    table = torch.randint(-2**31, 2**31, (1000,), dtype=torch.int32, device="cuda")
    at = torch.randint(1000, (128,), dtype=torch.int32, device="cuda")
    x, y = torch.randn(2, 128, device="cuda")
    mask = torch.randint(2, (128,), dtype=torch.int32, device="cuda")
    words = torch.zeros_like(at)
    pairs = torch.full((128, 2), 7.0, device="cuda")
    kernels.triton.jit(assembly)[(1,)](table, at, words, x, y, mask, pairs)
    assert torch.equal(words, table[at.long()])
    stored = mask[:, None] != 0
    assert torch.equal(pairs, torch.where(stored, torch.stack((x, y), 1), 7.0))

# --- the equations, with T x T tensors ------------------------------------------------------------

def equation(q, k, v, z=None, gate_q=None, gate_k=None, forget=None, slope=None, units=None,
             mask=None):
    """Textbook attention with logits in float32 at least. z: CoPE's Listing 1. forget (B, H, T):
    logits of FoX's gates. slope: ALiBi's m. units: gates are multiples of 1 / units. mask: the
    weights that dropout keeps, times what it scales them by."""
    wide = torch.promote_types(q.dtype, torch.float32)
    T = q.size(2)
    scale = v.size(3) ** -0.5  # PoPE makes q and k twice as wide
    t = torch.arange(T, device=q.device)
    past = t[:, None] >= t
    content = (q @ k.mT).to(wide) * scale
    logits = content
    if forget is not None:
        total = F.logsigmoid(forget.to(wide)).cumsum(-1)
        logits = logits + total[..., :, None] - total[..., None, :]
    if slope is not None:
        logits = logits - slope * (t[:, None] - t)
    if z is not None:
        g = torch.sigmoid(content if gate_q is None else (gate_q @ gate_k.mT).to(wide) * scale)
        if units:
            g = g + (torch.floor(g * units + 0.5) / units - g).detach()
        p = torch.where(past, g, 0).flip(-1).cumsum(-1).flip(-1).clamp(max=z.size(3) - 1)
        below, above = p.detach().floor(), p.detach().ceil()
        w, z = p - below, z.to(wide)
        logits = logits + z.gather(-1, below.long()) * (1 - w) + z.gather(-1, above.long()) * w
    weights = torch.where(past, logits, -torch.inf).softmax(-1)
    if mask is not None:
        weights = weights * mask
    return weights.to(v.dtype) @ v

def kernel(q, k, v, z=None, gate_q=None, gate_k=None, forget=None, slope=None, share=0.0):
    """The same by kernels.py. share: the fraction that dropout drops."""
    bias = None
    if forget is not None:
        bias = -F.logsigmoid(forget.float()).cumsum(-1)
    if slope is not None:
        B, H, T, _ = q.shape
        alibi = (slope * torch.arange(T, device=q.device)).expand(B, H, T)
        bias = alibi if bias is None else bias + alibi
    return kernels.attention(q, k, v, bias, z, gate_q, gate_k, dropout=share)

# --- PoPE, FoX and ALiBi --------------------------------------------------------------------------

# T, width of q and k, width of v, and the biases. The widths of 2d are PoPE's
PLAIN = {
    "one token": (1, 32, 32, "fox"),
    "PoPE, 63 tokens, padded head": (63, 96, 48, ""),
    "PoPE, a tile": (64, 128, 64, ""),
    "PoPE, wide head": (130, 256, 128, ""),
    "PoPE, several tiles": (257, 128, 64, ""),
    "PoPE + FoX": (130, 64, 32, "fox"),
    "FoX, narrow head": (100, 16, 16, "fox"),
    "FoX, wide head": (64, 128, 128, "fox"),
    "FoX, several tiles": (257, 64, 64, "fox"),
    "ALiBi": (130, 48, 48, "alibi"),
    "ALiBi + FoX": (200, 64, 64, "alibi, fox"),
}

def plain_inputs(case, dtype, device="cpu", B=1, H=2):
    """The arguments by name, as model.py cuts them out of one projection, and o's gradient."""
    T, D, d, biases = PLAIN[case]

    def heads(x):
        return x.unflatten(-1, (H, -1)).transpose(1, 2).to(device, getattr(torch, dtype))

    q, k = map(heads, torch.randn(B, T, 2 * H * D).chunk(2, -1))
    v, do = map(heads, torch.randn(2, B, T, H * d))
    x = dict(q=q, k=k, v=v)
    if "fox" in biases:
        x["forget"] = torch.randn(B, H, T, device=device)
    return x, do, 0.125 if "alibi" in biases else None

def hold(errors, dense_errors, tiny, most=4):
    """At most twice the dense path's error in the mean square, and `most` times its largest error,
    which is a matter of luck."""
    for name in errors:
        (mean, top), (dense_mean, dense_top) = size(errors[name]), size(dense_errors[name])
        assert mean <= 2 * dense_mean + tiny, f"{name}: rms {mean:.2g}, dense {dense_mean:.2g}"
        assert top <= most * dense_top + tiny, f"{name}: largest {top:.2g}, dense {dense_top:.2g}"

def check_plain(case, dtype, device="cpu"):
    torch.manual_seed(list(PLAIN).index(case))
    x, do, slope = plain_inputs(case, dtype, device, B=2)
    fast = partial(kernel, slope=slope)
    mine = results(fast, x, do)
    assert same(mine, results(fast, x, do)), "the second run gave other bits"
    dense = results(partial(equation, slope=slope), x, do)
    exact = results(partial(equation, slope=slope), double(x), do)
    assert all(mine[name].dtype == dense[name].dtype for name in dense)
    hold({name: mine[name] - exact[name] for name in exact},
         {name: dense[name] - exact[name] for name in exact}, tiny=2e-6)

@needs_triton
@pytest.mark.parametrize("device, case, dtype", devices(
    [(case, "float16") for case in PLAIN]
    + [("PoPE, 63 tokens, padded head", "float32"), ("ALiBi + FoX", "float32")],
    [(case,) for case in PLAIN if "wide head" not in case]) + [
        pytest.param("cuda", case, dtype, marks=[pytest.mark.gpu, needs_gpu])  # float32 stops at 64
        for case in PLAIN if "wide head" in case for dtype in ("float16", "bfloat16")])
def test_plain(run, device, case, dtype):
    run(device, "check_plain", case, dtype)

def check_forget_gates(dtype, device="cpu"):
    """With gates near 1/2, the gradient of a gate adds up the gradients of all later biases, so
    rounding that does not cancel there grows with T (see the top of kernels.py)."""
    torch.manual_seed(1)
    q, k, v, do = torch.randn(4, 1, 1, 1024, 64).to(device, getattr(torch, dtype))
    x = dict(q=q, k=k, v=v, forget=torch.randn(1, 1, 1024, device=device))
    exact = results(equation, double(x), do)["forget"]
    mine, dense = (size(results(f, x, do)["forget"] - exact)[0] for f in (kernel, equation))
    print(f"{dtype}: kernel {mine / size(exact)[0]:.4%}, dense {dense / size(exact)[0]:.4%}")
    assert mine <= 2 * dense, f"the gates' gradient is off by {mine / size(exact)[0]:.1%}"

@needs_triton
@pytest.mark.parametrize("device, dtype", [("cpu", "float16")] + [
    pytest.param("cuda", dtype, marks=[pytest.mark.gpu, needs_gpu])
    for dtype in ("float16", "bfloat16")])
def test_forget_gates_of_long_sequences(run, device, dtype):
    run(device, "check_forget_gates", dtype)

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
    z = torch.randn(B, H, T, npos).half()  # in float32 the kernels look up a z rounded to float16
    x = dict(q=q, k=k, v=v, z=z)
    if gates == "rotated":
        angle = torch.arange(T)[:, None] * 100.0 ** -torch.linspace(0, 1, d // 2)
        cos, sin = angle.cos(), angle.sin()
        x |= dict(gate_q=q, gate_k=k)
        x |= dict(q=model.rotate_pairs(q, cos, sin), k=model.rotate_pairs(k, cos, sin))
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
            return lambda **x: f(**x, gate_q=x["q"], gate_k=x["v"], **options)
        return lambda **x: f(**x, **options)

    mine = results(complete(kernel), x, do)
    if T < 100 or device != "cpu":
        assert same(mine, results(complete(kernel), x, do)), "the second run gave other bits"
    dense = results(complete(equation), x, do)
    exact = results(complete(equation), double(x), do)
    rounded = results(complete(equation, units=2048), double(x), do)
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
    [(case,) for case in COPE if case != "64, wide head"]) + [
        pytest.param("cuda", "64, wide head", dtype, marks=[pytest.mark.gpu, needs_gpu])
        for dtype in ("float16", "bfloat16")])
def test_cope(run, device, case, dtype):
    run(device, "check_cope", case, dtype)

def check_little_memory():
    x, do = cope_inputs(63, 48, 16, "keys", 0, "float16", H=3)
    mine = results(kernel, x, do)
    scratch = 8 * 63 * (1 + 16)  # bytes of one head
    kernels.free_memory = lambda device: 4 * 2 * scratch  # two heads at a time, then the third
    assert same(mine, results(kernel, x, do)), "heads overwrite each other's scratch"
    kernels.free_memory = lambda device: 0  # one head at a time
    assert same(mine, results(kernel, x, do)), "heads overwrite each other's scratch"

@needs_triton
def test_heads_at_a_time(run):
    run("cpu", "check_little_memory")

def test_the_example_of_the_docstring():
    """Autograd reproduces the row of six keys at the top of kernels.py, and the sums that its two
    tiles of three keys carry are those of the parts."""
    number = r"-?\d*\.?\d+"
    rows = re.findall(rf"^    (\w+) +((?:{number} +)*{number})(?:  .*)?$", kernels.__doc__, re.M)
    row = {name: torch.tensor([float(x) for x in xs.split()]).double() for name, xs in rows}
    assert [len(x) for x in row.values()] == 11 * [6] + [4]
    g, z = row["g"].requires_grad_(), torch.tensor([0.0, 2, 1, 3]).double().requires_grad_()
    total = g.flip(0).cumsum(0).flip(0)
    p = total.clamp(max=3)
    c, w = p.detach().floor(), p - p.detach().floor()
    bias = (1 - w) * z[c.long()] + w * z[p.detach().ceil().long()]
    dg, dz = torch.autograd.grad(bias, (g, z), row["dS"], retain_graph=True)
    slope, = torch.autograd.grad(bias, p, torch.ones_like(p), retain_graph=True)
    lower, upper = (row["dS"] * (1 - w)).cumsum(0), (row["dS"] * w).cumsum(0)
    expected = dict(p=p, c=c, w=w, slope=slope, dp=row["dS"] * slope, dg=dg, dz=dz, lower=lower,
                    upper=upper)
    for name, x in expected.items():
        assert torch.equal(row[name], x), name

    def carried(table, name):
        return [float(x) for x in re.findall(rf"{name} (-?[.\d]+)", table)]

    forward, backward = re.search(r"attention_forward   .*?\n\n", kernels.__doc__, re.S)[0].split(
        "attention_backward_q")
    assert carried(forward, "units_right") == [0, total[3], total[3], total[0]]
    assert carried(backward, "units_right") == [total[0], total[3], total[3], 0]
    for name, sums in (("dp_left", expected["dp"].cumsum(0)), ("lower_left", lower),
                       ("upper_left", upper)):
        # both tiles stand side by side: before and after keys 0 .. 2, before and after 3 .. 5
        assert carried(backward, name) == [0, sums[2], sums[2], sums[5]], name

# --- dropout: the mask is read out, and the equations use it --------------------------------------

SHARE = 0.25
# 2^-digits is a type's rounding; in float32, what a gate costs that the oracle rounds otherwise
DIGITS = {"float32": 16, "float16": 11, "bfloat16": 8}

def dropped(x):
    torch.manual_seed(7)
    return kernel(**x, share=SHARE)

def dropout_mask(x):
    """(B, H, T, T), 1 where a weight survives. A v that is 1 at one key a column shows it in o."""
    B, H, T, d = x["v"].shape
    columns = []
    for start in range(0, T, d):
        v = torch.zeros(T, d)
        v[start : start + d] = torch.eye(d)[: T - start]
        v = v.to(x["v"]).expand(B, H, T, d)
        weak = {name: 0.1 * a for name, a in x.items()}  # no weight is so small that it becomes 0
        if "forget" in x:
            weak["forget"] = weak["forget"] + 9
        columns.append(dropped(weak | dict(v=v)) != 0)
    return torch.cat(columns, -1)[..., :T].float()

def check_mask(mask):
    """Weights are kept independently: in the right number, and without a correlation of a weight
    with its neighbours, or with the same weight of another head."""
    past = torch.ones_like(mask[0, 0]).tril().bool()
    centred = torch.where(past, mask - (1 - SHARE), 0)
    variance = SHARE * (1 - SHARE)
    n = mask.numel() / mask[0, 0].numel() * past.sum()
    assert abs(centred.sum()) < 5 * (variance * n) ** 0.5, "the wrong share is dropped"
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (2, 0), (0, 2)):
        shifted = centred.roll((down, right), (-2, -1))
        assert abs((centred * shifted).sum()) < 5 * variance * n**0.5, (down, right)
    heads = centred.flatten(0, 1)
    assert abs((heads[0] * heads[1]).sum()) < 5 * variance * past.sum() ** 0.5, "heads are alike"

def check_dropout(case, dtype, device="cpu"):
    torch.manual_seed(3)
    if case in PLAIN:
        x, do, _ = plain_inputs(case, dtype, device)
    else:
        x, do = cope_inputs(100, 64, 16, case, 0, dtype, device)
    with torch.no_grad():
        mask = dropout_mask(x)
    check_mask(mask)
    mine = results(lambda **x: dropped(x), x, do)
    assert same(mine, results(lambda **x: dropped(x), x, do)), "a seed gave other bits"
    torch.manual_seed(8)
    with torch.no_grad():
        assert not kernel(**x, share=SHARE).equal(kernel(**x, share=SHARE)), "one mask"
    scaled = mask.double() / (1 - SHARE)
    exact = results(lambda **x: equation(**x, units=2048, mask=scaled), double(x), do)
    for name, want in exact.items():
        error, largest = size(mine[name] - want)[1], size(want)[1]
        bound = largest * 8 * 2.0 ** -DIGITS[dtype] + 1e-5
        assert error <= bound, f"{name}: off by {error:.1e} of {largest:.1e}"

@needs_triton
@pytest.mark.parametrize("device, case, dtype", devices(
    [("PoPE + FoX", "float16"), ("keys", "float16"), ("separate", "float32")],
    [("PoPE + FoX",), ("keys",), ("separate",)]))
def test_dropout(run, device, case, dtype):
    run(device, "check_dropout", case, dtype)

# --- as an operator of PyTorch, and in a model ----------------------------------------------------

def check_operator(device="cpu"):
    """Fake tensors, traced graphs and eager mode agree, with and without each optional input."""
    torch.manual_seed(0)
    x, do = cope_inputs(40, 32, 4, "separate", 0, "float16", device)
    q, k, v, z, gate_q, gate_k = (a.requires_grad_() for a in x.values())
    bias = torch.randn(q.shape[:3], device=device, requires_grad=True)
    seed = torch.empty(0, dtype=torch.int64, device=device)  # there is no dropout
    for rest in ((bias, None, None, None), (None, z, None, None), (bias, z, gate_q, gate_k)):
        inputs = dict(zip(("key_bias", "z", "gate_q", "gate_k"), rest))
        names = "test_schema", "test_autograd_registration", "test_faketensor"
        if not EMULATED:  # the fourth asks for a driver
            names += ("test_aot_dispatch_dynamic",)
        torch.library.opcheck(kernels.forward_op, (q, k, v, *rest, seed, 0.0), test_utils=names)
        inputs = {name: a for name, a in inputs.items() if a is not None} | dict(q=q, k=k, v=v)
        mine = results(kernels.attention, inputs, do)
        if not EMULATED:  # torch.compile asks for a driver too
            traced = torch.compile(kernels.attention, fullgraph=True, backend="aot_eager")
            assert same(mine, results(traced, inputs, do)), "a graph changes the result"
        one = torch.ones((), device=device)  # the gradient of sum() is one number, expanded
        assert same(results(kernels.attention, inputs, one.expand(do.shape)),
                    results(kernels.attention, inputs, torch.ones_like(do)))

@needs_triton
@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_operator(run, device):
    run(device, "check_operator")

def tiny_gpt(pe, **options):
    torch.manual_seed(3)  # with this seed no rounded gate takes a position across an integer
    net = model.GPT(model.GPTConfig(40, 11, n_layer=2, n_head=2, n_embd=64, pe=pe, cope_npos=8,
                                    **options))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.uniform_(-6, 0) if name.endswith("delta") else p.normal_(std=0.2)
    return net

def check_model(pe, options, said):
    """A model with kernels against one without: logits, gradients, a graph. A cache needs none."""
    torch._dynamo.reset()  # it keeps the graphs of 8 models
    net = tiny_gpt(pe, **options)
    idx, found = torch.randint(11, (2, 40)), []
    for fast in (False, True):
        if fast:
            assert said in net.use_kernels(torch.float32)
        logits, loss = net(idx, idx)
        found.append([logits, *torch.autograd.grad(loss, list(net.parameters()))])
    traced = torch.compile(net, backend="eager", fullgraph=True)(idx, idx)[1]
    assert (traced - loss).abs() < 1e-5
    most = [1e-5, 1e-4]
    if "cope" in pe:  # its gates are rounded
        most = [3e-3, 0.1 if options else 6e-3]
    for n, (slow, fast) in enumerate(zip(*found)):
        change = ((fast - slow).abs().max() / (slow.abs().max() + 1e-9)).item()
        assert change < most[n > 0], (n, change)
    cache = net.new_cache()
    net(idx[:, :-1], cache=cache)
    cached = net(idx[:, -1:], cache=cache)[0]
    assert (cached - found[0][0][:, -1:]).abs().max() < most[0] + 1e-4

@needs_triton
@pytest.mark.parametrize("pe, options, said", [
    ("rope,pope", {}, "triton pope"),
    ("pope", dict(pope_mu="relu"), "triton pope"),
    ("fox,alibi", {}, "triton fox, triton alibi"),
    ("rope+fox,pope+alibi", {}, "triton rope+fox, triton pope+alibi"),
    ("cope", dict(cope_gates="sep-keys"), "triton cope"),
    ("cope+rope", dict(cope_gates="values"), "triton cope+rope"),
    ("cope+pope,cope+fox", {}, "triton cope+pope, triton cope+fox")])
def test_models_use_the_kernels(run, pe, options, said):
    run("cpu", "check_model", pe, options, said)

def check_rank(rank, world, meeting_point):
    """One process of a compiled model that accumulates two micro-batches under DDP. Its gradients
    are those of all processes' sequences in one batch, eager and alone."""
    torch.distributed.init_process_group("gloo", f"file://{meeting_point}", rank=rank,
                                         world_size=world)
    net = tiny_gpt("pope+fox,cope")
    net.use_kernels(torch.float32)
    idx = torch.randint(11, (world, 2, 2, 40))  # (rank, micro-batch, sequence, token), same in all
    batch = idx.flatten(0, 2)
    want = torch.autograd.grad(net(batch, batch)[1], list(net.parameters()))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    compiled = torch.compile(ddp, backend="aot_eager")
    for micro in range(2):
        ddp.require_backward_grad_sync = micro == 1
        (compiled(idx[rank, micro], idx[rank, micro])[1] / 2).backward()
    for (name, p), exact in zip(net.named_parameters(), want):
        assert (p.grad - exact).abs().max() <= 1e-4 * exact.abs().max() + 1e-7, name
    torch.distributed.destroy_process_group()

@needs_triton
def test_accumulation_in_a_compiled_model_under_ddp(tmp_path):
    ranks = [Child(), Child()]
    for rank, child in enumerate(ranks):
        child.send("check_rank", rank, len(ranks), str(tmp_path / "meeting_point"))
    for child in ranks:
        child.receive()
        child.close()

@needs_triton
def test_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = (torch.empty(2, 3, 33, 128, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(2))
        bias = torch.empty(2, 3, 33, requires_grad=True)
        x = [q, k, *(torch.empty(2, 3, 33, n, dtype=torch.bfloat16, requires_grad=True)
                     for n in (64, 7, 64, 64))]
        o = kernels.attention(*x[:3], bias, *x[3:])
        grads = torch.autograd.grad(o, [*x, bias], torch.empty_like(o))
    assert o.shape == (2, 3, 33, 64) and [g.shape for g in grads] == [a.shape for a in (*x, bias)]

def test_why_not(monkeypatch):
    """What keeps a layer from the kernel, in the words that the training log prints."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(kernels.triton, "__version__", "3.6.0")

    def ask(*names, d=64, device="cpu", dtype=torch.bfloat16):
        return kernels.why_not(names or ["pope"], d, device, dtype)

    assert [ask(d=d) for d in (32, 48, 64, 128)] == [None] * 4
    assert [ask("pope", "cope", d=d) for d in (32, 64)] == [None] * 2
    assert ask(d=80) == "head width 80 is none of 32, 48, 64, 128"
    assert ask("cope", "pope", d=128) == "head width 128 is none of 16, 24, 32, 64"
    assert ask(dtype=torch.float64) == "torch.float64 inputs"
    monkeypatch.setattr(kernels, "INTERPRET", False)
    assert ask() == "no GPU"
    monkeypatch.setattr(kernels.triton, "__version__", "3.5.1")
    assert ask(device="cuda") == "triton 3.5.1, older than 3.6"
    monkeypatch.setattr(kernels.triton, "__version__", None)
    assert ask(device="cuda") == "no triton"

def test_without_triton():
    """Without Triton one can import the module, ask, and get one clear line from a call."""
    code = ("import sys; sys.modules['triton'] = None; import kernels, torch; "
            "assert kernels.why_not(['pope'], 64, 'cuda', None) == 'no triton'; "
            "q = torch.zeros(1, 1, 9, 32); kernels.attention(q, q, q)")
    failed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE,
                            text=True)
    assert failed.stderr.splitlines()[-1].startswith("ValueError: q is on cpu; ")

@needs_triton
def test_a_cpu_tensor_needs_the_interpreter():
    q = torch.zeros(1, 2, 9, 32)
    with pytest.raises(ValueError, match="^q is on cpu; the kernels need Triton and an NVIDIA GPU"):
        kernels.attention(q, q, q)

# --- compiled ahead of time, with a driver for a GPU that is not there ----------------------------

# Bytes that one program may have, and all programs of a multiprocessor, which each take 1 KB more
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# Bytes of registers that a thread may spill to memory, by chip and width of v. Gates of their own,
# heads of 128 and PoPE combined with CoPE want more registers than there are. Narrower tiles spill
# less, but take more instructions per pair of query and key, even with those of the spills counted
SPILLED = {(80, 64): 512, (86, 64): 512, (90, 64): 400, (80, 128): 2200, (90, 128): 1664}

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

def launches(method, d, T, share, monkeypatch):
    """[(kernel, arguments, options)] of the kernels of one step in bfloat16."""
    seen, H = [], 2

    def launch(kernel, grid, *args, **options):
        seen.append((kernel, args, options | dict(enable_fp_fusion=True)))

    def heads(x):
        return x.unflatten(-1, (H, -1)).transpose(1, 2).requires_grad_()

    monkeypatch.setattr(kernels, "launch", launch)
    D = 2 * d if "pope" in method else d
    q, k = map(heads, torch.zeros(1, T, 2 * H * D, dtype=torch.bfloat16).chunk(2, -1))
    v, gate_q, gate_k, do = map(heads, torch.zeros(4, 1, T, H * d, dtype=torch.bfloat16))
    x = dict(q=q, k=k, v=v)
    if "fox" in method:
        x["forget"] = torch.zeros(1, H, T)
    if "cope" in method:  # z in float32, as model.py's under autocast
        x["z"] = torch.zeros(1, H, T, 64)
    if "separate" in method:
        x |= dict(gate_q=gate_q, gate_k=gate_k)
    results(lambda **x: kernel(**x, share=share), x, do)
    return seen

def check_compiled(target, fn, args, options):
    """Compiles a kernel for compute capability target / 10. Asserts what makes it fast."""
    from triton import knobs

    fn.device_caches.clear()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.compilation.always_compile = True  # what comes from the cache brings no log,
        knobs.nvidia.dump_ptxas_log = True  # and only the assembler's tells what was spilled
        compiled = fn.warmup(*args, grid=(1,), **options)
    log = log.getvalue()
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    name, warps, shared = fn.__name__, options["num_warps"], compiled.metadata.shared
    rows = options.get("N" if name.endswith("_kv") else "M")
    says = f"{name}: {registers} registers, {spilled} spilled, {shared} bytes shared"
    assert shared <= SHARED[target], f"{says}: more than there is"
    assert spilled <= SPILLED[target, options["DV"]], f"{says}: too many spilled"
    assert warps * 16 <= rows, f"{says}: two warps do the same rows"
    if target == 90:
        assert "wgmma" in compiled.asm["ptx"], f"{says}: not the fast tensor core instruction"
    threads = 32 * warps * 8 * math.ceil(registers / 8)
    programs = min(65536 // threads, (SHARED[target] + 1024) // (shared + 1024))
    # alone on a multiprocessor, it has nothing to do while it waits for its loads
    assert programs >= 2 or options["DV"] > 64, f"{says}: one program per multiprocessor"

@needs_triton
@pytest.mark.parametrize("target, method, d, T, share", [
    (90, "pope", 64, 1024, 0.0), (90, "cope", 64, 1024, 0.0), (90, "fox", 64, 1024, 0.0),
    (90, "cope, separate", 128, 1024, 0.0), (90, "cope", 64, 1, 0.0), (90, "pope+fox", 64, 1, 0.0),
    (86, "pope+fox", 64, 1024, 0.0), (86, "cope", 64, 1024, 0.0), (86, "fox", 64, 1024, 0.0),
    # 1000 is no multiple of a tile, or of 16
    (80, "pope", 64, 1000, 0.1), (80, "cope", 64, 1000, 0.1), (80, "fox", 128, 1000, 0.0),
    (80, "pope", 128, 1024, 0.0)])
def test_compiles_for(target, method, d, T, share, monkeypatch):
    from triton.runtime import driver

    monkeypatch.setattr(kernels, "is_small", lambda device: target == 86)
    found = launches(method, d, T, share, monkeypatch)
    assert len(found) == 3
    driver.set_active(Driver(target))
    try:
        for launched in found:
            check_compiled(target, *launched)
    finally:
        driver.set_active(None)

# --- tests/bench.py, on a CPU ---------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("words", [["--dry"], ["--dry", "--sweep", "--only=cope"]])
def test_the_benchmark_builds_all_its_inputs(words, capsys):
    spec = importlib.util.spec_from_file_location("bench", os.path.join(ROOT, "tests", "bench.py"))
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    lines = bench.main(words)
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in printed if line.startswith("{")] == lines
    assert all(sum(line["name"] in text for text in printed) >= 2 for line in lines)
    absent = "flex_attention", "flash-attn", "fla"  # not on a CPU, or not installed
    failed = [line["name"] for line in lines if "error" in line]
    assert not [name for name in failed if not name.endswith(absent)], failed
    if "--sweep" not in words:
        assert {line["kind"] for line in lines} == {"attention", "kernel", "step"}
        assert all(line["rel_error"] < 1e-4 for line in lines if "rel_error" in line)

# --- wrong input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name, wrong", [
    ("k", lambda q: q[:, :1]), ("v", lambda q: q[:, :, :5]), ("v", lambda q: q.half()),
    ("key_bias", lambda q: q[..., 0].half()), ("z", lambda q: q[..., :1]),
    ("gate_k", lambda q: q[..., :16])])
def test_errors_name_the_argument(name, wrong):
    q = torch.randn(1, 2, 9, 32)
    x = dict(q=q, k=q, v=q, z=q, gate_q=q, gate_k=q)
    with pytest.raises(ValueError, match=f"^{name} is ") as error:
        kernels.attention(**x | {name: wrong(q)})
    assert "\n" not in str(error.value)

def meta(B=1, H=1, T=1, d=64, stride=None):
    """A tensor of this shape without memory; stride: from a token to the next."""
    x = torch.empty(B, H, T, d, device="meta")
    return x if stride is None else x.as_strided(x.shape, (0, d, stride, 1))

@pytest.mark.parametrize("fine, wrong, words", [
    (dict(T=2**21 - 1, stride=1024), dict(T=2**21, stride=1024), "2097152 tokens .* shorten"),
    (dict(H=32, T=2**20 - 1), dict(H=32, T=2**20), "1048576 tokens"),  # o is (B, T, H, d)
    (dict(B=4681, H=14), dict(B=4682, H=14), "4682 sequences of 14 heads"),
    (dict(d=16), dict(d=8), "width 8"), (dict(d=128), dict(d=130), "width 130")])
def test_sizes_past_the_limits_are_refused(fine, wrong, words):
    """Offsets that need more than 32 bits would read the memory of other tensors."""
    kernels.check(*3 * [meta(**fine)])
    with pytest.raises(ValueError, match=words):
        kernels.attention(*3 * [meta(**wrong)])

@pytest.mark.parametrize("T, npos", [(2**20, 2), (1000, 2**21), (370728, 2)])
def test_offsets_past_int32_in_cope_are_refused(T, npos):
    x = meta(T=T)
    with pytest.raises(ValueError, match=f"^{T} tokens are more than the kernels can address"):
        kernels.attention(x, x, x, z=meta(T=T, d=npos))

@pytest.mark.parametrize("arguments, words", [
    (dict(dropout=1.0), "dropout=1.0"), (dict(gate_q=torch.zeros(1, 2, 9, 32)), "only one of")])
def test_arguments_that_make_no_sense(arguments, words):
    q = torch.zeros(1, 2, 9, 32)
    with pytest.raises(ValueError, match=words):
        kernels.attention(q, q, q, **arguments)

if __name__ == "__main__":
    serve()
