"""kernels.py against the papers' equations in float64, written out below. The kernels may be off by
twice as much as dense attention in the same precision, and the gradient of z by three times.

Without a GPU they run in Triton's interpreter, and are compiled for GPUs that are absent. Triton
reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own.
With a GPU: python -m pytest tests/test_kernels.py -m gpu
"""
import io
import math
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import kernels
import model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

needs_triton = pytest.mark.skipif(kernels.triton.__version__ is None, reason="no triton")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
on_gpu = [pytest.mark.gpu, needs_gpu]

def devices(interpreted, gpu):
    """Returns (device, case, dtype) for the CPU and the GPU. The interpreter errs in bfloat16."""
    found = [("cpu", case, "float16") for case in interpreted]
    for case in gpu:
        for dtype in ("float16", "bfloat16"):
            found.append(pytest.param("cuda", case, dtype, marks=on_gpu))
    return found

def patch_once():
    """The interpreter patches triton.language for each call of a function in a kernel, and restores
    it afterwards. Here it stays patched, which gives the same bits in half the time."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang  # it patches what fn's file imports
    seen = set()

    def once(fn):
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            patch(fn)
            # Triton 3.6 makes an int of an array with one number, which NumPy 2.4 refuses
            language.tensor.__index__ = lambda self: int(self.handle.data.item())
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once

if kernels.INTERPRET:
    torch.set_num_threads(1)
    patch_once()

def interpreters(n):
    """Returns an executor of n processes with the interpreter. Each sets the variable before it
    imports this file."""
    code = "import os; os.environ['TRITON_INTERPRET'] = '1'"
    return ProcessPoolExecutor(n, multiprocessing.get_context("spawn"), exec, (code,))

@pytest.fixture(scope="module")
def run():
    """run(device, check, *args) calls check(*args), in the interpreter if the device is the CPU."""
    with interpreters(1) as executor:
        def call(device, check, *args):
            if device == "cuda":
                check(*args, device=device)
            else:
                executor.submit(check, *args).result()
        yield call

def results(f, x, do):
    """Returns the output of f(**x), and its gradients with respect to each tensor of x, by name."""
    x = {name: a.detach().requires_grad_() for name, a in x.items()}
    o = f(**x)
    grads = torch.autograd.grad(o, list(x.values()), do.to(o))
    return dict(zip(x, grads), o=o.detach())

def double(x):
    return {name: a.double() for name, a in x.items()}

def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)

def size(x):
    """Returns the root mean square and the largest absolute value."""
    return x.square().mean().sqrt().item(), x.abs().max().item()

# --- the two snippets of assembly, to be tested first on a GPU ------------------------------------

def assembly(table, at, words, x, y, mask, pairs):
    lane = kernels.tl.arange(0, 128)
    kernels.tl.store(words + lane, kernels.load_words(table + kernels.tl.load(at + lane)))
    there = kernels.tl.load(mask + lane) != 0
    kernels.store_two(pairs + 2 * lane, kernels.tl.load(x + lane), kernels.tl.load(y + lane), there)

@pytest.mark.gpu
@needs_gpu
def test_assembly_loads_and_stores_the_same():
    """Both are compared with PyTorch's indexing. All other GPU tests rely on them."""
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
    factors by which dropout multiplies the weights, 0 for those that it drops."""
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
    """The same with kernels.py. share is the fraction of the weights that dropout drops."""
    bias = None
    if forget is not None:
        bias = -F.logsigmoid(forget.float()).cumsum(-1)
    if slope is not None:
        B, H, T, _ = q.shape
        alibi = (slope * torch.arange(T, device=q.device)).expand(B, H, T)
        bias = alibi if bias is None else bias + alibi
    return kernels.attention(q, k, v, bias, z, gate_q, gate_k, dropout=share)

# --- the methods ----------------------------------------------------------------------------------

# The arguments of `inputs`
CASES = {
    "PoPE, padded head": dict(T=63, d=48, D=96, B=2),
    "PoPE, several tiles": dict(T=257, d=64, D=128),
    "PoPE, wide head": dict(T=130, d=128, D=256),
    "PoPE + FoX": dict(T=130, d=32, D=64, biases="fox"),
    "FoX, one token": dict(T=1, d=32, biases="fox"),
    "FoX, narrow head": dict(T=100, d=16, biases="fox"),
    "FoX, wide head": dict(T=64, d=128, biases="fox"),
    "ALiBi": dict(T=130, d=80, biases="alibi"),
    "ALiBi + FoX": dict(T=200, d=64, biases="alibi, fox"),
    "CoPE, one token": dict(T=1, d=32, npos=4),
    "CoPE, padded head": dict(T=63, d=48, npos=16, B=2),
    "CoPE, wide head": dict(T=64, d=128, npos=64, gates="separate", centre=-5),
    "CoPE, half saturated": dict(T=257, d=64, npos=64),
    "CoPE, saturated at once": dict(T=257, d=32, npos=4, centre=5),
    "CoPE, some rows saturated": dict(T=257, d=32, npos=4, gates="mixed"),
    "CoPE, never saturated": dict(T=257, d=32, npos=64, gates="separate", centre=-5),
    "CoPE + PoPE": dict(T=130, d=32, D=64, npos=16),
    "CoPE + FoX, large table": dict(T=130, d=32, npos=256, biases="fox"),
}
# The kernel's float32 sigmoid and the oracle's in float64 sometimes round to neighbours. Here this
# costs up to 5e-5 of the rms and 3e-4 of the largest value. A run of keys missing in dz costs 1e-2
FLIPS, FLIPS_MAX = 2e-4, 2e-3

def inputs(T, d, D=0, biases="", npos=0, gates="keys", centre=0, B=1, H=2, dtype="float32",
           device="cpu"):
    """Returns the tensors by name, cut out of projections as in model.py; ALiBi's slope or None;
    and the gradient of o. q and k have width D, or d. centre is added to every logit of a gate."""
    dtype = getattr(torch, dtype)

    def heads(width):
        x = torch.randn(B, T, H, width).to(device, dtype)
        # a load that is wider than the head reads the NaN beside it
        return F.pad(x, (0, 16), value=math.nan).transpose(1, 2)[..., :width]

    q, k = heads(D or d), heads(D or d)
    v, do = heads(d), heads(d)
    x = dict(q=q, k=k, v=v)
    if npos:
        x["z"] = torch.randn(B, H, T, npos).to(device, dtype)
    if gates == "keys" and centre:
        q[..., 0] = math.copysign((abs(centre) * d**0.5) ** 0.5, centre)
        k[..., 0] = abs(q[..., 0])
    if gates != "keys":
        x["gate_q"] = heads(d)
        x["gate_q"][..., 0] = centre
        x["gate_k"] = heads(d)
        x["gate_k"][..., 0] = d**0.5
    if gates == "mixed":  # the rows of every fourth tile hardly count, nor does a row of another
        i = torch.arange(T, device=device)
        rarely = (i // 32 % 4 == 3) | (i == 200)
        x["gate_q"][..., 0] = torch.where(rarely, -5.0, 5.0)
    if "fox" in biases:
        x["forget"] = torch.randn(B, H, T, device=device)
    slope = 0.125 if "alibi" in biases else None
    return x, slope, do

def check_case(case, dtype, device="cpu"):
    """The kernel is compared with the equations in float64, in which CoPE's gates are rounded too.
    Its error may be a multiple of that of dense attention, whose gates are not rounded."""
    torch.manual_seed(700 + list(CASES).index(case))
    x, slope, do = inputs(**CASES[case], dtype=dtype, device=device)
    mine = results(partial(kernel, slope=slope), x, do)
    if do.size(2) < 100 or device != "cpu":
        assert same(mine, results(partial(kernel, slope=slope), x, do)), "it gave other bits"
    dense = results(partial(equation, slope=slope), x, do)
    exact = results(partial(equation, slope=slope), double(x), do)
    rounded = results(partial(equation, slope=slope, units=2048), double(x), do)
    for name, want in exact.items():
        assert mine[name].dtype == dense[name].dtype
        near, near_max = size(mine[name] - rounded[name])
        slow, slow_max = size(dense[name] - want)
        rms, largest = size(want)
        tiny = 2e-6  # where the exact answer is 0
        # dz adds up dS, whose row sums are not 0 because P is rounded before P V (measured: 2.6)
        times = 3 if name == "z" else 2
        most = times * slow + tiny
        most_max = 2 * times * slow_max + tiny  # the largest is a matter of luck
        if "z" in x:
            most += FLIPS * rms
            most_max += FLIPS_MAX * largest
        assert near <= most, f"{name}: rms {near:.1e}, dense {slow:.1e}"
        assert near_max <= most_max, f"{name}: largest {near_max:.1e}, dense {slow_max:.1e}"

@needs_triton
@pytest.mark.parametrize("device, case, dtype", devices(
    [case for case in CASES if "never" not in case], CASES))
def test_methods(run, device, case, dtype):
    run(device, check_case, case, dtype)

def check_forget_gates(dtype, device="cpu"):
    """With gates near 1/2, the gradient of a gate adds up the gradients of all later biases, so
    rounding that does not cancel there grows with T (see the top of kernels.py)."""
    torch.manual_seed(1)
    x, _, do = inputs(1024, 64, biases="fox", H=1, dtype=dtype, device=device)
    exact = results(equation, double(x), do)["forget"]
    mine, dense = (size(results(f, x, do)["forget"] - exact)[0] for f in (kernel, equation))
    rms, _ = size(exact)
    assert mine <= 2 * dense, f"off by {mine / rms:.2%}, dense by {dense / rms:.2%}"

@needs_triton
@pytest.mark.parametrize("device, dtype", [
    ("cpu", "float16"), pytest.param("cuda", "bfloat16", marks=on_gpu)])
def test_forget_gates_of_long_sequences(run, device, dtype):
    run(device, check_forget_gates, dtype)

def check_little_memory():
    x, _, do = inputs(63, 48, npos=16, H=3, dtype="float16")
    mine = results(kernel, x, do)
    scratch = 8 * 63 * (1 + 16)  # bytes of one head
    kernels.free_memory = lambda device: 4 * 2 * scratch  # two heads at a time, then the third
    assert same(mine, results(kernel, x, do)), "heads overwrite each other's scratch"

@needs_triton
def test_heads_at_a_time(run):
    run("cpu", check_little_memory)

# --- dropout: the mask is read out, and the equations use it --------------------------------------

SHARE = 0.25
DIGITS = {"float16": 11, "bfloat16": 8}  # a number's relative rounding error is 2^-digits at most

def dropped(**x):
    torch.manual_seed(7)
    return kernel(**x, share=SHARE)

def dropout_mask(x):
    """Returns (B, H, T, T), 1 where a weight is kept. With a v whose columns are each 1 at one key
    and 0 elsewhere, o shows which weights are not 0."""
    B, H, T, d = x["v"].shape
    columns = []
    for start in range(0, T, d):
        v = torch.zeros(T, d)
        v[start : start + d] = torch.eye(d)[: T - start]
        v = v.to(x["v"]).expand(B, H, T, d)
        weak = {name: 0.1 * a for name, a in x.items()}  # no weight is so small that it becomes 0
        if "forget" in x:
            weak["forget"] = weak["forget"] + 9
        weak["v"] = v
        columns.append(dropped(**weak) != 0)
    return torch.cat(columns, -1)[..., :T].float()

def check_mask(mask):
    """Asserts that the right fraction is kept, independently of neighbours and of other heads."""
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
    x, _, do = inputs(**CASES[case], dtype=dtype, device=device)
    with torch.no_grad():
        mask = dropout_mask(x)
    check_mask(mask)
    mine = results(dropped, x, do)
    assert same(mine, results(dropped, x, do)), "the same seed gave other bits"
    torch.manual_seed(8)
    with torch.no_grad():
        assert not kernel(**x, share=SHARE).equal(kernel(**x, share=SHARE)), "two masks are equal"
    scaled = mask.double() / (1 - SHARE)
    exact = results(partial(equation, units=2048, mask=scaled), double(x), do)
    for name, want in exact.items():
        error = (mine[name] - want).abs().max()
        bound = want.abs().max() * 8 * 2.0 ** -DIGITS[dtype] + 1e-5
        assert error <= bound, f"{name}: off by {error:.1e}, where {bound:.1e} is allowed"

@needs_triton
@pytest.mark.parametrize("device, case, dtype", devices(
    ["PoPE + FoX", "CoPE + PoPE", "ALiBi"], ["PoPE + FoX", "CoPE + PoPE", "ALiBi"]))
def test_dropout(run, device, case, dtype):
    run(device, check_dropout, case, dtype)

# --- as an operator of PyTorch, and in a model ----------------------------------------------------

def check_operator(device="cpu"):
    """PyTorch's own checks, with and without the optional inputs. Fake tensors, eager mode, and
    graphs of the forward and backward pass agree."""
    torch.manual_seed(0)
    x, _, do = inputs(40, 32, npos=4, gates="separate", dtype="float16", device=device)
    q, k, v, z, gate_q, gate_k = (a.requires_grad_() for a in x.values())
    bias = torch.randn(q.shape[:3], device=device, requires_grad=True)
    seed = torch.empty(0, dtype=torch.int64, device=device)  # there is no dropout
    for optional in ((bias, None, None, None), (bias, z, gate_q, gate_k)):
        arguments = q, k, v, *optional, seed, 0.0
        torch.library.opcheck(kernels.forward_op, arguments)
    one = torch.ones((), device=device)  # the gradient of sum() is one number, expanded
    assert same(results(kernels.attention, x, one.expand(do.shape)),
                results(kernels.attention, x, torch.ones_like(do)))

@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_operator(run, device):
    run(device, check_operator)

def tiny_gpt(pe, **options):
    torch.manual_seed(3)  # with this seed no rounded gate takes a position across an integer
    sizes = dict(n_layer=2, n_head=2, n_embd=64, cope_npos=8)
    net = model.GPT(model.GPTConfig(vocab_size=11, pe=pe, **dict(block_size=40) | sizes | options))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(std=0.2)
            if name.endswith("delta"):
                p.uniform_(-6, 0)
    return net

def check_model(pe, cope_gates):
    """Compares logits and gradients with and without kernels, and the loss with a compiled one."""
    torch._dynamo.reset()  # it keeps the graphs of 8 models
    net = tiny_gpt(pe, cope_gates=cope_gates)
    idx = torch.randint(11, (2, 40))

    def run():
        logits, loss = net(idx, idx)
        return loss, logits, torch.autograd.grad(loss, list(net.parameters()))

    def change(fast, slow):
        return ((fast - slow).abs().max() / (slow.abs().max() + 1e-9)).item()

    _, slow_logits, slow_grads = run()
    said = net.use_kernels(torch.float32)
    assert all(f"triton {mix}" in said for mix in pe.split(","))
    loss, logits, grads = run()
    traced = torch.compile(net, backend="eager", fullgraph=True)(idx, idx)[1]
    assert (traced - loss).abs() < 1e-5
    most, most_grad = 1e-5, 1e-4
    if "cope" in pe:  # its gates are rounded
        most = 3e-3
        most_grad = 6e-3 if cope_gates == "keys" else 0.1
    assert change(logits, slow_logits) < most
    for (name, _), fast, slow in zip(net.named_parameters(), grads, slow_grads):
        assert change(fast, slow) < most_grad, name

@needs_triton
@pytest.mark.parametrize("pe, cope_gates", [
    ("rope+fox,pope+alibi", "keys"), ("cope+pope,cope+fox", "keys"), ("cope+rope", "values")])
def test_models_use_the_kernels(run, pe, cope_gates):
    run("cpu", check_model, pe, cope_gates)

def check_rank(rank, world, meeting_point):
    """Runs one process of a compiled model that accumulates two micro-batches under DDP. Its
    gradients must be those of one eager model with the sequences of all processes."""
    torch.distributed.init_process_group("gloo", f"file://{meeting_point}", timedelta(minutes=5),
                                         world, rank)
    net = tiny_gpt("cope+fox", n_layer=1)
    net.use_kernels(torch.float32)
    idx = torch.randint(11, (world, 2, 2, 40))  # (rank, micro-batch, sequence, token), same in all
    batch = idx.flatten(0, 2)
    want = torch.autograd.grad(net(batch, batch)[1], list(net.parameters()))
    compiled = torch.compile(net, backend="aot_eager")
    ddp = torch.nn.parallel.DistributedDataParallel(compiled, gradient_as_bucket_view=True)
    for micro in range(2):
        ddp.require_backward_grad_sync = micro == 1
        (ddp(idx[rank, micro], idx[rank, micro])[1] / 2).backward()
    for (name, p), exact in zip(net.named_parameters(), want):
        assert (p.grad - exact).abs().max() <= 1e-4 * exact.abs().max() + 1e-7, name
    torch.distributed.destroy_process_group()

@needs_triton
@pytest.mark.slow
def test_accumulation_in_a_compiled_model_under_ddp(tmp_path):
    with interpreters(2) as executor:
        ranks = [executor.submit(check_rank, rank, 2, tmp_path / "meeting") for rank in range(2)]
        for rank in ranks:
            rank.result()

def train_on_gpu(rank, world, meeting_point, pe):
    """Compares the loss and all gradients of a compiled model under autocast (and DDP, if there are
    several GPUs) that uses the kernels, with those of the dense path in float32."""
    torch.cuda.set_device(rank)
    net = tiny_gpt(pe, block_size=300).to(rank)
    idx = torch.randint(11, (world, 2, 300), device=rank)  # the same in all processes
    want = net(idx.flatten(0, 1), idx.flatten(0, 1))[1]
    exact = torch.autograd.grad(want, list(net.parameters()))
    said = net.use_kernels(torch.bfloat16)
    assert "triton" in said, said
    f = torch.compile(net)
    if world > 1:
        torch.distributed.init_process_group("nccl", f"file://{meeting_point}", None, world, rank)
        f = torch.nn.parallel.DistributedDataParallel(f, device_ids=[rank])
    with torch.autocast("cuda", torch.bfloat16):
        loss = f(idx[rank], idx[rank], return_logits=False)[1]
    loss.backward()
    if world > 1:
        torch.distributed.all_reduce(loss)
        loss = loss / world
        torch.distributed.destroy_process_group()
    assert abs(loss.item() - want.item()) < 0.02 * want.item()
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    exact = torch.cat([gradient.flatten() for gradient in exact])
    most = 0.3 if "cope" in pe else 0.05  # CoPE's gates are rounded
    assert (found - exact).norm() < most * exact.norm()

@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pe", ["pope", "cope", "fox+rope", "alibi"])
def test_training_on_gpus(pe, tmp_path):
    """Each method in a process of its own for each GPU, of which two are enough."""
    world = min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(train_on_gpu, (world, tmp_path / "meeting", pe), world)

def test_why_not(monkeypatch):
    """What keeps a layer from the kernel, in the words that the training log prints."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(kernels.triton, "__version__", "3.6.0")

    def ask(*names, d=64, dtype=torch.float16):
        return kernels.why_not(names, d, "cpu", dtype)

    assert ask("pope", d=16) is None and ask("pope", d=128) is None
    assert ask("cope", "pope", d=128) == "head width 128 is not within 16 to 64"
    assert kernels.why_not(["cope"], 128, "cpu", torch.float16) is None
    assert "head width 128" in kernels.why_not(["cope"], 128, "cpu", torch.float16, own_gates=True)
    assert ask("pope", dtype=torch.float64) == "torch.float64 inputs"
    assert "interpreter" in ask("pope", dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    assert ask("pope") == "no GPU"

def test_without_triton():
    """Without Triton one can import the module, ask, and get one clear line from a call."""
    code = ("import sys; sys.modules['triton'] = None; import kernels, torch; "
            "assert kernels.why_not(['pope'], 64, 'cuda', None) == 'no triton'; "
            "q = torch.zeros(1, 1, 9, 32).half(); kernels.attention(q, q, q)")
    failed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE,
                            text=True)
    assert failed.stderr.splitlines()[-1].startswith("ValueError: q is on cpu; ")

# --- compiled ahead of time -----------------------------------------------------------------------

# Bytes of shared memory for a program. Each takes 1 KB more, and a multiprocessor has 1 KB more
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Bytes of registers that a thread may spill to memory, by chip and width of v. Narrower tiles spill
# less, but take more instructions per pair of query and key, even with those of the spills counted
SPILLED = {(80, 64): 512, (86, 64): 64, (90, 64): 128, (80, 128): 512, (90, 128): 1024,
           (100, 64): 64, (120, 64): 512}

def launches(method, d, T, share, monkeypatch):
    """Returns (kernel, arguments, options) of the kernels of one step in bfloat16."""
    seen = []

    def launch(kernel, grid, *args, **options):
        seen.append((kernel, args, options | dict(enable_fp_fusion=True)))

    monkeypatch.setattr(kernels, "launch", launch)
    D = 2 * d if "pope" in method else d
    npos = 64 if "cope" in method else 0
    gates = "separate" if "separate" in method else "keys"
    x, _, do = inputs(T, d, D, biases=method, npos=npos, gates=gates, dtype="bfloat16")
    if npos:
        x["z"] = x["z"].float()  # as model.py's is under autocast
    results(partial(kernel, share=share), x, do)
    return seen

def check_compiled(target, fn, args, options):
    """Compiles a kernel for compute capability target / 10. Asserts what makes it fast."""
    from triton import knobs

    fn.device_caches.clear()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.compilation.always_compile = True  # what comes from the cache brings no log,
        knobs.nvidia.dump_ptxas_log = True  # and only the assembler's log says what was spilled
        compiled = fn.warmup(*args, grid=(1,), **options)
    log = log.getvalue()
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    shared = compiled.metadata.shared
    warps = options["num_warps"]
    rows = options["N" if fn.__name__.endswith("_kv") else "M"]
    says = f"{fn.__name__}: {registers} registers, {spilled} spilled, {shared} bytes shared"
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
    # each architecture and each method once; 1000 is no multiple of a tile, or of 16
    (80, "cope, separate", 64, 1000, 0.0), (86, "pope+fox", 64, 1024, 0.1),
    (90, "pope", 64, 1024, 0.0), (100, "cope", 64, 1000, 0.1), (120, "pope", 64, 1024, 0.0),
    # other sizes and combinations
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (80, "pope", 128, 1000, 0.0), (90, "cope", 64, 1, 0.0), (90, "cope", 128, 1000, 0.0),
        (90, "cope", 64, 1000, 0.1), (100, "pope", 64, 1024, 0.0), (120, "cope", 64, 1000, 0.1)])])
def test_compiles_for(target, method, d, T, share, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setattr(kernels, "is_small", lambda device: target in (86, 120))
    found = launches(method, d, T, share, monkeypatch)
    assert len(found) == 3
    driver.set_active(SimpleNamespace(  # of a GPU that is not there
        get_current_target=lambda: GPUTarget("cuda", target, 32),
        get_current_device=lambda: target, get_current_stream=lambda device: 0))
    try:
        for launched in found:
            check_compiled(target, *launched)
    finally:
        driver.set_active(None)

# --- tests/bench.py, on a CPU ---------------------------------------------------------------------

@needs_triton
def test_the_benchmark_builds_all_its_inputs(capsys):
    import bench

    lines = bench.main(["--dry"])
    printed = capsys.readouterr().out.splitlines()
    assert len(lines) == len(printed) - 1  # the first one is the heading
    failed = [line["name"] for line in lines if "error" in line]
    assert all(name.endswith("flex_attention") for name in failed), failed  # not on a CPU
    assert {line["kind"] for line in lines} == {"attention", "step"}
    assert all(line["rel_error"] < 1e-4 for line in lines if "rel_error" in line)

# --- wrong input ----------------------------------------------------------------------------------

def meta(T=9, d=32, B=1, H=2, stride=None):
    """A tensor of this shape without memory; stride: from one token to the next."""
    x = torch.empty(B, H, T, d, device="meta")
    return x if stride is None else x.as_strided(x.shape, (0, d, stride, 1))

@pytest.mark.parametrize("words, x, changed", [
    ("^v is .* it must be", {}, dict(v=meta().half())),
    ("^z is .* 2 columns", {}, dict(z=meta(d=1))),
    ("own need z and gate_k as well", {}, dict(gate_q=meta())),
    ("own need z as well", {}, dict(gate_q=meta(), gate_k=meta())),
    ("width 130;", dict(d=130), {}),
    ("32768 sequences of 2 heads", dict(B=32768), {}),
    ("bfloat16 wrongly", {}, dict(q=meta().bfloat16())),
    ("^dropout=1.0 must", {}, dict(dropout=1.0)),
    ("^2097152 tokens", dict(T=2**21, stride=1024), {}),
    ("^1000 tokens", dict(T=1000), dict(z=meta(T=1000, d=2**21)))])
def test_errors_of_arguments(words, x, changed, monkeypatch):
    """Each message is one line. Offsets over 32 bits, in q or run_ends, would leave the tensor."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    arguments = dict(q=meta(**x), k=meta(**x), v=meta(**x))
    with pytest.raises(ValueError, match=words) as error:
        kernels.attention(**arguments | changed)
    assert "\n" not in str(error.value)
