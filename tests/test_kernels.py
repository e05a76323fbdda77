"""kernels.py against the papers' equations in float64, written out below.

In float32, which only the interpreter takes, the output and all gradients are within 2e-5 of them.
In 16 bits, the kernels may be off by twice as much as dense attention, and the gradient of z by
what the rounding of O explains.

Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs that are absent.
Triton reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own.
With a GPU: python -m pytest tests/test_kernels.py -m gpu
"""
import io
import math
import multiprocessing
import re
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model

kernels = pytest.importorskip("kernels")  # which needs Triton

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
on_gpu = [pytest.mark.gpu, needs_gpu]
DEADLINE = 600  # seconds for one check in another process; the slowest takes about 40

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
    torch.use_deterministic_algorithms(True)  # it fills what is not initialised with NaN
    patch_once()

def interpreters(n):
    """Returns a pool of n processes with the interpreter. Each sets the variable before it imports
    this file. Leaving the pool kills its processes. (A test run once waited forever for the end of
    two that had used torch.distributed.)"""
    code = "import os; os.environ['TRITON_INTERPRET'] = '1'"
    return multiprocessing.get_context("spawn").Pool(n, exec, (code,))

@pytest.fixture(scope="module")
def run():
    """run(device, check, *args) calls check(*args), in the interpreter if the device is the CPU."""
    with interpreters(1) as pool:
        def call(device, check, *args):
            if device == "cuda":
                check(*args, device=device)
            else:
                pool.apply_async(check, args).get(DEADLINE)
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

# --- the equations, with T x T tensors ------------------------------------------------------------

def equation(q, k, v, z=None, gate_q=None, gate_k=None, forget=None, slope=None):
    """Textbook attention with logits in float32 at least. z: CoPE's Listing 1. gate_q without
    gate_k: the gates come from the values. forget (B, H, T): logits of FoX's gates. slope: ALiBi's
    m."""
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
        gate_logits = content
        if gate_q is not None:
            gate_logits = (gate_q @ (v if gate_k is None else gate_k).mT).to(wide) * scale
        g = torch.where(past, gate_logits.sigmoid(), 0)
        p = g.flip(-1).cumsum(-1).flip(-1).clamp(max=z.size(3) - 1)
        below = p.detach().long()
        above = (below + 1).clamp(max=z.size(3) - 1)
        w, z = p - below, z.to(wide)
        logits = logits + z.gather(-1, below) * (1 - w) + z.gather(-1, above) * w
    weights = torch.where(past, logits, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v

def kernel(q, k, v, z=None, gate_q=None, gate_k=None, forget=None, slope=None):
    """The same with kernels.py."""
    bias = None
    if forget is not None:
        bias = -F.logsigmoid(forget.float()).cumsum(-1)
    if slope is not None:
        alibi = (slope * torch.arange(q.size(2), device=q.device)).expand(q.shape[:3])
        bias = alibi if bias is None else bias + alibi
    if gate_q is not None and gate_k is None:
        gate_k = v
    return kernels.attention(q, k, v, bias, z, gate_q, gate_k)

# --- the methods ----------------------------------------------------------------------------------

# The arguments of `inputs`. A tile has 16, 32 or 64 rows
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
    "CoPE, wide head": dict(T=70, d=128, npos=64, gates="separate", centre=-5),
    "CoPE, half saturated": dict(T=257, d=64, npos=64),
    "CoPE, saturated at once": dict(T=257, d=32, npos=4, centre=5),
    "CoPE, some rows saturated": dict(T=257, d=32, npos=4, gates="mixed"),
    "CoPE, never saturated": dict(T=130, d=32, npos=64, gates="separate", centre=-5),
    "CoPE, two positions": dict(T=130, d=16, npos=2),
    "CoPE, integer positions": dict(T=100, d=32, npos=16, gates="half"),
    "CoPE, gates from values": dict(T=100, d=80, npos=16, gates="values"),
    "CoPE + PoPE": dict(T=130, d=32, D=64, npos=16),
    "CoPE + FoX, large table": dict(T=130, d=32, npos=256, biases="fox"),
    "everything": dict(T=130, d=40, D=80, npos=16, gates="separate", biases="fox, alibi"),
}
IN_16_BITS = ["PoPE + FoX", "ALiBi", "CoPE, padded head", "CoPE, wide head", "CoPE, two positions",
              "everything"]

def inputs(T, d, D=0, biases="", npos=0, gates="keys", centre=0, B=1, H=2, dtype="float32",
           device="cpu"):
    """Returns the tensors by name, cut out of projections as in model.py; ALiBi's slope or None;
    and the gradient of o. q and k have width D, or d. centre is added to every logit of a gate."""
    dtype = getattr(torch, dtype)

    def heads(width):
        return torch.randn(B, T, 2 * H * width).to(device, dtype)[..., : H * width].view(
            B, T, H, width).transpose(1, 2)

    q, k = heads(D or d), heads(D or d)
    v, do = heads(d), heads(d)
    x = dict(q=q, k=k, v=v)
    if npos:
        x["z"] = torch.randn(B, H, T, npos).to(device, dtype)
    if gates == "half":
        q.zero_()  # so all gates are 1/2, and every other position is an integer
    if gates == "keys" and centre:
        q[..., 0] = math.copysign((abs(centre) * d**0.5) ** 0.5, centre)
        k[..., 0] = abs(q[..., 0])
    if gates == "values":
        x["gate_q"] = heads(d)
    if gates in ("separate", "mixed"):
        x["gate_q"] = heads(d)
        x["gate_q"][..., 0] = centre
        x["gate_k"] = heads(d)
        x["gate_k"][..., 0] = d**0.5
    if gates == "mixed":  # some queries, one in most tiles, count hardly any key
        rarely = torch.arange(T, device=device) % 60 == 59
        x["gate_q"][..., 0] = torch.where(rarely, -5.0, 5.0)
    if "fox" in biases:
        x["forget"] = torch.randn(B, H, T, device=device)
    slope = 0.125 if "alibi" in biases else None
    return x, slope, do

def check_case(case, dtype, device="cpu"):
    torch.manual_seed(700 + list(CASES).index(case))
    x, slope, do = inputs(**CASES[case], dtype=dtype, device=device)
    mine = results(partial(kernel, slope=slope), x, do)
    if "z" not in x:
        assert same(mine, results(partial(kernel, slope=slope), x, do)), "it gave other bits"
    dense = results(partial(equation, slope=slope), x, do)
    exact = results(partial(equation, slope=slope), double(x), do)
    # O is stored in 16 bits, which moves the sum of dS of each row by this. The columns of z divide
    # it among themselves, as they divide the weights
    by_rounding_o = (do.double() * (exact["o"] - exact["o"].to(do.dtype))).sum(-1)
    for name, want in exact.items():
        assert mine[name].dtype == dense[name].dtype
        near, near_max = size(mine[name] - want)
        slow, slow_max = size(dense[name] - want)
        rms, largest = size(want)
        tiny = 2e-6  # where the exact answer is 0
        if dtype == "float32":
            most, most_max = 2e-5 * rms + tiny, 2e-4 * largest + tiny
        else:
            most = 2 * slow + 2e-5 * rms + tiny
            most_max = 4 * slow_max + 2e-4 * largest + tiny  # the largest varies by luck
        if name == "z":
            more, more_max = size(by_rounding_o)
            most += more / want.size(3) ** 0.5
            most_max += 2 * more_max
        assert near <= most, f"{name}: rms {near:.1e}, {most:.1e} is allowed"
        assert near_max <= most_max, f"{name}: largest {near_max:.1e}, {most_max:.1e} is allowed"

def devices():
    """Returns (device, case, dtype) for the CPU and the GPU. The interpreter errs in bfloat16."""
    found = [("cpu", case, "float32") for case in CASES]
    found += [("cpu", case, "float16") for case in IN_16_BITS]
    for case in CASES:
        for dtype in ("float16", "bfloat16"):
            found.append(pytest.param("cuda", case, dtype, marks=on_gpu))
    return found

@pytest.mark.parametrize("device, case, dtype", devices())
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

@pytest.mark.parametrize("device, dtype", [
    ("cpu", "float16"), pytest.param("cuda", "bfloat16", marks=on_gpu)])
def test_forget_gates_of_long_sequences(run, device, dtype):
    run(device, check_forget_gates, dtype)

class LastTile:
    """A kernel, of whose programs the interpreter runs only those of the last tile."""
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        from triton.runtime.interpreter import interpreter_builder as builder

        builder.set_grid_idx = lambda x, y, z: setattr(builder, "grid_idx", (grid[0] - 1, y, z))
        return self.kernel[(1, *grid[1:])]

def check_positions(T, largest_error):
    """The positions in the last row of a long text, read out of the backward pass. The bias is
    -p / 4, so dv_j, which is P_ij for this gradient of o, gives p. The row before counts hardly any
    key, so all keys are counted."""
    torch.manual_seed(0)
    d, npos = 16, 64
    q = torch.zeros(1, 1, T, d)
    v = torch.randn(1, 1, T, d, requires_grad=True)
    z = (-torch.arange(npos) / 4).expand(1, 1, T, npos)
    gate_q, gate_k = 4 * torch.randn(2, 1, 1, T, d)
    gate_k[..., 0] = 20
    gate_q[..., 0] = 0
    gate_q[0, 0, -2] = torch.tensor([-20.0] + [0] * (d - 1))
    do = torch.zeros_like(v)
    do[0, 0, -1, 0] = 1
    with pytest.MonkeyPatch.context() as patch:
        from triton.runtime.interpreter import interpreter_builder as builder

        patch.setattr(builder, "set_grid_idx", None)  # so that it is restored
        for name in ("forward_kernel", "backward_queries"):
            patch.setattr(kernels, name, LastTile(getattr(kernels, name)))
        o = kernels.attention(q, q, v, None, z, gate_q, gate_k)
        (dv,) = torch.autograd.grad(o, v, do)
    g = (gate_k[0, 0].double() @ gate_q[0, 0, -1].double() * d**-0.5).sigmoid()
    p = g.flip(0).cumsum(0).flip(0)
    lse = torch.logsumexp(-p.clamp(max=npos - 1) / 4, 0)
    found = -4 * (dv[0, 0, :, 0].double().log() + lse)
    assert (found - p)[p < npos - 1].abs().max() < largest_error

@pytest.mark.parametrize("T, largest_error", [
    (1024, 1e-4), pytest.param(8192, 5e-4, marks=pytest.mark.slow)])
def test_positions_of_long_sequences(run, T, largest_error):
    run("cpu", check_positions, T, largest_error)

def test_worked_row():
    """The example at the top of kernels.py, by the numpy code there and by PyTorch's autograd."""
    table, code = kernels.__doc__.split("key          0")[1].split("In numpy, with ")
    row = {}
    for name, n in dict(g=6, p=6, c=6, w=6, dS=6, slope=6, dp=6, dg=6, z=4, dz=4).items():
        words = re.search(rf"\n    {name} +(\S.*)", table)[1].split()
        row[name] = np.array([float(word) for word in words[:n]])
    by_numpy = dict(np=np, g=row["g"], z=row["z"], dS=row["dS"])
    lines = [line[4:] for line in code.split("\n\n")[1].splitlines()]
    exec("\n".join(lines), by_numpy)

    g, z = (torch.tensor(row[name], requires_grad=True) for name in ("g", "z"))
    p = g.flip(0).cumsum(0).flip(0).clamp(max=3)
    p.retain_grad()
    c = p.long()
    slope = z[(c + 1).clamp(max=3)] - z[c]
    (z[c] + (p - c) * slope).backward(torch.tensor(row["dS"]))
    by_torch = dict(p=p, c=c, w=p - c, slope=slope, dp=p.grad, dg=g.grad, dz=z.grad)
    for name, found in by_torch.items():
        assert found.tolist() == by_numpy[name].tolist() == row[name].tolist(), name

# --- as an operator of PyTorch, and in a model ----------------------------------------------------

def check_operator(device="cpu"):
    """PyTorch's own checks, with and without the optional inputs. Fake tensors, eager mode, and
    graphs of the forward and backward pass agree."""
    torch.manual_seed(0)
    x, _, do = inputs(40, 32, npos=4, gates="separate", dtype="float16", device=device)
    tensors = (a.transpose(1, 2).contiguous().requires_grad_() for a in x.values())
    q, k, v, z, gate_q, gate_k = tensors
    z = z.detach().transpose(1, 2).contiguous().requires_grad_()
    bias = torch.randn(z.shape[:3], device=device, requires_grad=True)
    for optional in ((bias, None, None, None), (bias, z, gate_q, gate_k)):
        torch.library.opcheck(kernels.forward_op, (q, k, v, *optional))
    one = torch.ones((), device=device)  # the gradient of sum() is one number, expanded
    del x["z"], x["gate_q"], x["gate_k"]
    assert same(results(kernels.attention, x, one.expand(do.shape)),
                results(kernels.attention, x, torch.ones_like(do)))

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_operator(run, device):
    run(device, check_operator)

def tiny_gpt(pe, **options):
    torch.manual_seed(3)
    sizes = dict(n_layer=2, n_head=2, n_embd=64, cope_npos=8)
    net = model.GPT(model.GPTConfig(vocab_size=11, pe=pe, **dict(block_size=40) | sizes | options))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(std=0.2)
            if name.endswith("delta"):
                p.uniform_(-6, 0)
    return net

def check_model(pe, cope_gates):
    """Compares logits and gradients with and without kernels, eager and compiled. (The compiled
    gradients of pope+fox need strides that PyTorch predicts rightly for softplus_backward.)"""
    torch._dynamo.reset()  # it keeps the graphs of 8 models
    net = tiny_gpt(pe, cope_gates=cope_gates)
    idx = torch.randint(11, (2, 40))

    def run(f):
        logits, loss = f(idx, idx)
        return dict(zip(net.state_dict(), torch.autograd.grad(loss, list(net.parameters()))),
                    logits=logits)

    slow = run(net)
    said = net.use_kernels(torch.float32)
    assert all(f"triton {mix}" in said for mix in pe.split(","))
    for f in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        for name, fast in run(f).items():
            error = (fast - slow[name]).abs().max() / (slow[name].abs().max() + 1e-9)
            assert error < (1e-5 if name == "logits" else 1e-4), name

@pytest.mark.parametrize("pe, cope_gates", [
    ("pope+fox,rope+alibi", "keys"), ("cope+pope,cope+fox+alibi", "keys"), ("cope+rope", "values"),
    ("cope", "sep-keys")])
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

@pytest.mark.slow
def test_accumulation_in_a_compiled_model_under_ddp(tmp_path):
    ranks = [(rank, 2, tmp_path / "meeting") for rank in range(2)]
    with interpreters(2) as pool:
        pool.starmap_async(check_rank, ranks, chunksize=1).get(DEADLINE)

def train_on_gpu(rank, world, meeting_point, pe):
    """Compares the loss and all gradients of a compiled model under autocast (and DDP, if there are
    several GPUs) that uses the kernels, with those of the dense path in float32. The gradients may
    be off by twice as much as those of the dense path under autocast."""
    torch.cuda.set_device(rank)
    net = tiny_gpt(pe, block_size=300).to(rank)
    idx = torch.randint(11, (world, 2, 300), device=rank)  # the same in all processes

    def dense():
        loss = net(idx.flatten(0, 1), idx.flatten(0, 1))[1]
        grads = torch.autograd.grad(loss, list(net.parameters()))
        return loss, torch.cat([gradient.flatten() for gradient in grads])

    want, exact = dense()
    with torch.autocast("cuda", torch.bfloat16):
        _, rounded = dense()
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
    assert (found - exact).norm() < 2 * (rounded - exact).norm()

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
    assert kernels.why_not(16, "cpu", torch.float16) is None
    assert kernels.why_not(129, "cpu", torch.float16) == "head width 129 is not within 16 to 128"
    assert kernels.why_not(64, "cpu", torch.bfloat16) == "torch.bfloat16 inputs"
    monkeypatch.setattr(kernels, "INTERPRET", False)
    for dtype in (torch.float16, torch.float32):  # another dtype would not help
        assert kernels.why_not(64, "cpu", dtype).startswith("no NVIDIA GPU")
    q = torch.zeros(1, 1, 9, 32).half()
    with pytest.raises(ValueError, match="no NVIDIA GPU"):
        kernels.attention(q, q, q)

@pytest.mark.parametrize("wrong", [
    dict(k=(9, 16)), dict(v=(9, 65)), dict(key_bias=(8,)), dict(z=(9, 1)), dict(gate_q=(9, 32)),
    dict(gate_q=(9, 32), gate_k=(9, 32)), dict(z=(9, 4), gate_q=(9, 32))])
def test_shapes_that_would_read_past_a_tensor(wrong):
    shapes = dict(q=(9, 32), k=(9, 32), v=(9, 32)) | wrong
    with pytest.raises(AssertionError):
        kernels.attention(**{name: torch.zeros(1, 2, *shape) for name, shape in shapes.items()})

# --- compiled ahead of time -----------------------------------------------------------------------

SHARED = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # bytes of shared memory for a program
SPILLED = 640  # bytes of registers that a thread may spill to memory

def launches(method, d, monkeypatch):
    """Returns (kernel, arguments, options) of the kernels of one step in bfloat16."""
    seen = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((self.kernel, args, options))

    for name in ("forward_kernel", "backward_queries", "backward_keys"):
        monkeypatch.setattr(kernels, name, Recorded(getattr(kernels, name)))
    monkeypatch.setattr(kernels, "why_not", lambda *_: None)
    D = 2 * d if "pope" in method else d
    npos = 64 if "cope" in method else 0
    gates = "separate" if "separate" in method else "keys"
    x, _, do = inputs(1000, d, D, biases=method, npos=npos, gates=gates, dtype="bfloat16")
    results(kernel, x, do)
    return seen

IN_BRIEF = [(80, "cope, separate", 64), (90, "cope", 128), (90, "pope", 64), (120, "fox", 128)]
IN_FULL = [(chip, method, d) for chip in SHARED for d in (64, 128)
           for method in ("pope", "fox", "pope+fox", "cope", "cope, separate", "cope+pope")]

@pytest.mark.parametrize("chip, method, d", [
    *IN_BRIEF, *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_FULL
                 if case not in IN_BRIEF)])
def test_compiles_for(chip, method, d, monkeypatch):
    """Each kernel fits into a chip's memory, and spills little."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = launches(method, d, monkeypatch)
    assert len(found) == (2 if "cope" in method else 3)
    driver.set_active(SimpleNamespace(  # of a GPU that is not there
        get_current_target=lambda: GPUTarget("cuda", chip, 32),
        get_current_device=lambda: chip, get_current_stream=lambda device: 0))
    try:
        for fn, args, options in found:
            fn.device_caches.clear()
            with (knobs.nvidia.scope(), knobs.compilation.scope(),
                  redirect_stdout(io.StringIO()) as log):
                knobs.compilation.always_compile = True  # what comes from the cache brings no log,
                knobs.nvidia.dump_ptxas_log = True  # and only the assembler's says what was spilled
                compiled = fn.warmup(*args, grid=(1,), **options)
            spilled = int(re.search(r"(\d+) bytes spill stores", log.getvalue())[1])
            assert compiled.metadata.shared <= SHARED[chip], fn.__name__
            assert spilled <= SPILLED, f"{fn.__name__} spills {spilled} bytes"
    finally:
        driver.set_active(None)

def check_short_sequences(T, npos, device="cpu"):
    """Rows past T must neither read nor write before z and its gradient. In memory, NaN stands
    before z. The gradient of z is compared with the sum that softmax makes 0."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, T, 32, device=device)
    memory = torch.full((66, T, npos), math.nan, device=device)
    memory[-1] = torch.randn(T, npos)
    z = memory[-1:][None].requires_grad_()
    o = kernels.attention(q, q, q, z=z)
    (dz,) = torch.autograd.grad(o.square().sum(), z)
    assert o.isfinite().all() and dz.isfinite().all()
    assert dz.sum(-1).abs().max() < 1e-5

@pytest.mark.parametrize("T, npos", [(1, 2), (1, 64), (2, 2), (3, 4)])
def test_short_sequences_stay_within_memory(run, T, npos):
    run("cpu", check_short_sequences, T, npos)

# --- eval/cost.py ---------------------------------------------------------------------------------

def check_cost(device="cpu"):
    """A method whose attention has a kernel is measured with and without it, and the losses of the
    two are compared."""
    from eval import cost

    cost.TOKENS["cpu"] = 64
    for pe in ("fox", "cope+pope", "t5"):
        found = list(cost.variants(pe, 32, 64, torch.device(device)))
        assert found == ([f"`{pe}`"] if pe == "t5" else [f"`{pe}`", f"`{pe}`, kernels"])

def test_the_cost_of_kernels(run):
    run("cpu", check_cost)
