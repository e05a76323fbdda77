"""Times everything that one wants to know on the first day with a GPU:

    python tests/bench.py                     a table, and then each of its lines as JSON
    python tests/bench.py --only=pope,fox     only lines whose names contain one of these
    python tests/bench.py --sweep             other tiles for each kernel, with registers and spills
    python tests/bench.py --dry               tiny sizes on a CPU, with PyTorch for the kernels

There are three kinds of lines. `step` is a whole training step of a GPT of 124M parameters, eager
and compiled. `attention` is attention by itself, forward and with its backward pass, in kernels.py
and in its competitors, for 1,024 to 32,768 tokens. Its error is against float64, for the output and
all gradients of a few queries, so that a fast but wrong kernel does not pass. `kernel` is the time
of each Triton kernel. Times are medians. A line that fails says why, and does not end the run.
"""
import argparse
import itertools
import json
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import kernels  # noqa: E402
from model import GPT, PES, GPTConfig, rotate_pairs  # noqa: E402
from train import PEAK_FLOPS  # noqa: E402

# --- how a line is measured -----------------------------------------------------------------------

class Bench:
    def __init__(self, only, dry):
        self.only = only.split(",")  # [""], which is part of every name, if nothing is given
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.lines = []
        print(f"{'kind':9} {'name':34} {'T':>6}  result", flush=True)

    def line(self, kind, name, T, measure, *arguments):
        """Prints what measure(self, *arguments) returns, a dict, or why it failed."""
        if not any(part in f"{kind} {name}" for part in self.only):
            return
        try:
            result = measure(self, *arguments)
            text = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
        except Exception as error:  # no memory, a package that is not installed, a wrong result
            result = dict(error=f"{type(error).__name__}: {error}".splitlines()[0])
            text = result["error"][:120]
        self.lines.append(dict(kind=kind, name=name, T=T, **result))
        print(f"{kind:9} {name:34} {T:6}  {text}", flush=True)
        torch._dynamo.reset()

    def median_ms(self, f):
        if not self.dry:
            from triton.testing import do_bench

            return do_bench(f, return_mode="median")
        start = time.perf_counter()
        f()
        return 1000 * (time.perf_counter() - start)

    def peak_gib(self, f):
        """Returns the GiB that f needs at most, besides what is held already."""
        if self.dry:
            f()
            return 0.0
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        f()
        return (torch.cuda.max_memory_allocated() - held) / 2**30

# --- a training step ------------------------------------------------------------------------------

def training_step(bench, pe, use_kernels, compiled):
    sizes = dict(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768)
    if bench.dry:
        sizes = dict(block_size=16, vocab_size=97, n_layer=2, n_head=2, n_embd=64)
    B = 2 if bench.dry else 16
    cfg = GPTConfig(pe=pe, **sizes)
    net = GPT(cfg).to(bench.device)
    optimizer = net.configure_optimizers(0.1, 6e-4, (0.9, 0.95), bench.device.type)
    said = net.use_kernels(torch.bfloat16) if use_kernels else ""
    if use_kernels and "triton" not in said and not bench.dry:
        raise ValueError(said)
    f = torch.compile(net) if compiled else net
    idx = torch.randint(cfg.vocab_size, (B, cfg.block_size), device=bench.device)

    def step():
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = f(idx, idx, return_logits=False)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    ms = bench.median_ms(step)
    result = dict(ms=ms, tokens_per_s=B * cfg.block_size / ms * 1000)
    result["peak_GiB"] = bench.peak_gib(step)
    if not bench.dry:
        peaks = [peak for gpu, peak in PEAK_FLOPS.items() if gpu in torch.cuda.get_device_name()]
        if peaks:
            result["mfu"] = net.estimate_mfu(B, ms / 1000, peaks[0], cfg.block_size)
    return result

def steps(bench):
    T = 16 if bench.dry else 1024
    for mode in ("eager",) if bench.dry else ("eager", "compiled"):
        compiled = mode == "compiled"
        for pe, method in PES.items():
            bench.line("step", f"{pe}, {mode}", T, training_step, pe, False, compiled)
            if method.has_kernel:
                bench.line("step", f"{pe}, {mode}, kernel", T, training_step, pe, True, compiled)

# --- attention by itself --------------------------------------------------------------------------
# A method is a function of the tensors x, which returns the operands of attention: q and k after
# rotation, v, and what acts on the logits. All implementations get operands of the same method

def angles(T, d, step, x):
    theta = 10000.0 ** (-torch.arange(0, d, step, device=x.device, dtype=torch.float64) / d)
    angle = torch.arange(T, device=x.device)[:, None] * theta
    return angle.cos().to(x), angle.sin().to(x)  # (T, d / step)

def rope(q, k, v):
    cos, sin = angles(q.size(2), q.size(3), 2, q)
    return dict(q=rotate_pairs(q, cos, sin), k=rotate_pairs(k, cos, sin), v=v)

def pope(q, k, v):
    cos, sin = angles(q.size(2), q.size(3), 1, q)
    q, k = F.softplus(q), F.softplus(k)
    return dict(q=torch.cat((q * cos, q * sin), -1), k=torch.cat((k * cos, k * sin), -1), v=v)

def alibi(q, k, v):
    B, H, T, _ = q.shape
    bias = alibi_slopes(H, q)[:, None] * torch.arange(T, device=q.device)
    return dict(q=q, k=k, v=v, key_bias=bias.expand(B, H, T))

def alibi_slopes(H, q):
    return 2.0 ** (-8 * torch.arange(1, H + 1, device=q.device) / H)

def fox(q, k, v, forget):
    return dict(q=q, k=k, v=v, key_bias=-F.logsigmoid(forget).cumsum(-1))

def cope(q, k, v, e, gate_q=None, gate_k=None):
    return dict(q=q, k=k, v=v, z=q @ e, gate_q=gate_q, gate_k=gate_k)

def inputs(bench, method, T):
    """Returns the tensors of a method by name, as leaves."""
    H, d = (2, 32) if bench.dry else (12, 64)
    B = 1 if bench.dry else max(1, 32768 // T)
    torch.manual_seed(0)
    dtype = torch.float32 if bench.dry else torch.bfloat16
    x = {name: torch.randn(B, T, H, d, device=bench.device, dtype=dtype).transpose(1, 2)
         for name in "qkv"}
    if method is fox:
        x["forget"] = 4 + torch.randn(B, H, T, device=bench.device)
    if method is cope:
        x["e"] = torch.randn(d, 64, device=bench.device, dtype=dtype)
    return {name: tensor.requires_grad_() for name, tensor in x.items()}

def never_saturated(x):
    """CoPE's worst case: gates of their own that hardly count, so that all keys are counted."""
    gate_q, gate_k = torch.zeros_like(x["q"]), torch.ones_like(x["k"])
    gate_q[..., 0] = -5 * x["q"].size(-1) ** 0.5
    return x | dict(gate_q=gate_q.requires_grad_(), gate_k=gate_k.requires_grad_())

def dense(q, k, v, key_bias=None, z=None, gate_q=None, gate_k=None, queries=None):
    """Attention with a T x T matrix, or with some rows of it, whose logits are in float32 at least.
    CoPE's is Listing 1. queries: the indices of the rows."""
    T = q.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    if queries is None:
        queries = torch.arange(T, device=q.device)
    scale = v.size(3) ** -0.5
    future = torch.arange(T, device=q.device) > queries[:, None]
    content = (q[:, :, queries] @ k.mT).to(wide) * scale
    logits = content
    if key_bias is not None:
        logits = logits + key_bias[:, :, None]
    if z is not None:
        g = content.sigmoid()
        if gate_q is not None:
            g = ((gate_q[:, :, queries] @ gate_k.mT).to(wide) * scale).sigmoid()
        p = g.masked_fill(future, 0).flip(-1).cumsum(-1).flip(-1).clamp(max=z.size(-1) - 1)
        below = p.floor()
        z = z[:, :, queries].to(wide)
        bias = torch.lerp(z.gather(-1, below.long()), z.gather(-1, p.ceil().long()), p - below)
        logits = logits + bias
    return logits.masked_fill(future, -math.inf).softmax(-1).to(v.dtype) @ v

def error(f, method, x):
    """Returns the largest relative rms error, of o and of all gradients, if only 16 queries of one
    head have a loss."""
    T = x["q"].size(2)
    queries = torch.linspace(T // 4, T - 1, 16).long().unique().to(x["q"].device)
    head = {name: a[:1, :1] if a.dim() > 2 else a for name, a in x.items()}
    do = torch.randn(1, 1, len(queries), x["v"].size(3), device=x["q"].device).to(x["q"].dtype)

    def gradients(o, tensors):
        return torch.autograd.grad(o, list(tensors.values()), do.to(o), allow_unused=True)

    mine = {name: a.detach().clone().requires_grad_() for name, a in head.items()}
    o = f(**mine)[:, :, queries]
    exact = {name: a.detach().double().requires_grad_() for name, a in head.items()}
    o_exact = dense(**method(**exact), queries=queries)
    pairs = zip((o, *gradients(o, mine)), (o_exact, *gradients(o_exact, exact)))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs if b is not None)

def measure_attention(bench, make, method, x):
    f = make(bench, method, x["q"].size(2))
    run = f if bench.dry else torch.compile(f, dynamic=False)
    do = torch.randn_like(run(**x))

    def both():
        return torch.autograd.grad(run(**x), list(x.values()), do, allow_unused=True)

    def forward():
        with torch.no_grad():
            return run(**x)

    result = dict(forward_ms=bench.median_ms(forward), both_ms=bench.median_ms(both))
    result["peak_GiB"] = bench.peak_gib(both)
    result["rel_error"] = error(f, method, x)
    largest_error = 0.3 if method is cope else 0.03  # CoPE's kernel rounds its gates
    if not result["rel_error"] <= largest_error:
        raise ValueError(f"wrong: {result}")
    return result

# Each of these makes an implementation of a method for T tokens, a function of the method's tensors

def triton(bench, method, T):
    attention = dense if bench.dry else kernels.attention
    return lambda **x: attention(**method(**x))

def eager(bench, method, T):
    return lambda **x: dense(**method(**x))

def sdpa_flash(bench, method, T):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(**x):
        q, k, v = method(**x).values()
        d = v.size(3)
        with sdpa_kernel(SDPBackend.MATH if bench.dry else SDPBackend.FLASH_ATTENTION):
            wide = F.pad(v, (0, q.size(3) - d))  # flash attention needs equal widths
            o = F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=d**-0.5)
        return o[..., :d]
    return attend

def flex_attention(bench, method, T):
    from torch.nn.attention import flex_attention as flex

    def causal(b, h, i, j):
        return i >= j

    mask = flex.create_block_mask(causal, None, None, T, T, device=bench.device)

    def attend(**x):
        operands = method(**x)
        q, k, v = operands["q"], operands["k"], operands["v"]
        bias = operands.get("key_bias")

        def add_bias(s, b, h, i, j):
            return s if bias is None else s + bias[b, h, j]

        return flex.flex_attention(q, k, v, score_mod=add_bias, block_mask=mask,
                                   scale=v.size(3) ** -0.5)
    return attend

def flash_attn(bench, method, T):
    from flash_attn import flash_attn_func

    def attend(**x):
        operands = method(**x)
        q, k, v = (operands[name].transpose(1, 2) for name in "qkv")
        slopes = alibi_slopes(q.size(2), q) if method is alibi else None
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes).transpose(1, 2)
    return attend

def fla(bench, method, T):
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    def attend(q, k, v, forget):
        q, k, v, g = (a.transpose(1, 2) for a in (q, k, v, F.logsigmoid(forget)))
        return parallel_forgetting_attn(q, k, v, g).transpose(1, 2)
    return attend

IMPLEMENTATIONS = {
    rope: (triton, eager, sdpa_flash, flex_attention, flash_attn),
    pope: (triton, eager, sdpa_flash, flex_attention),
    cope: (triton, eager),
    fox: (triton, eager, flex_attention, fla),
    alibi: (triton, eager, flex_attention, flash_attn),
}

def attentions(bench):
    for T in (64,) if bench.dry else (1024, 2048, 4096, 8192, 16384, 32768):
        for method, makes in IMPLEMENTATIONS.items():
            x = inputs(bench, method, T)
            for make in makes:
                name = f"{method.__name__}, {make.__name__}"
                bench.line("attention", name, T, measure_attention, make, method, x)
            if method is cope:
                x = never_saturated(x)
                bench.line("attention", "cope, triton, never saturated", T, measure_attention,
                           triton, cope, x)

# --- the kernels one by one, and other tiles ------------------------------------------------------

def captured_launches(bench, method, T):
    """Returns (kernel, grid, arguments, options) of each launch of forward and backward pass. They
    have run, unless this is dry, so their arguments are those of a real step."""
    launches = []
    launch = kernels.launch

    def record(kernel, grid, *args, **options):
        launches.append((kernel, grid, args, options))
        if not bench.dry:
            launch(kernel, grid, *args, **options)

    kernels.launch = record
    try:
        kernels.attention(**method(**inputs(bench, method, T))).sum().backward()
    finally:
        kernels.launch = launch
    return launches

def measure_kernel(bench, kernel, grid, args, options):
    if bench.dry:
        return dict(M=options["M"], N=options["N"])

    def run():
        return kernel[grid](*args, **options, enable_fp_fusion=True)

    compiled = run()
    ms = bench.median_ms(run)
    return dict(ms=ms, registers=compiled.n_regs, spills=compiled.n_spills,
                shared=compiled.metadata.shared)

def each_kernel(bench):
    T = 64 if bench.dry else 1024
    for method in (pope, cope, fox, alibi):
        for kernel, grid, args, options in captured_launches(bench, method, T):
            bench.line("kernel", f"{method.__name__}, {kernel.__name__}", T, measure_kernel,
                       kernel, grid, args, options)

def sweep(bench):
    T = 64 if bench.dry else 4096
    for method in (pope, cope, fox):
        for kernel, (_, heads), args, options in captured_launches(bench, method, T):
            of_keys = kernel.__name__ == "attention_backward_kv"
            sizes = 32, 64, 128
            for M, N, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3)):
                outer, inner = (N, M) if of_keys else (M, N)
                if outer % inner or 16 * warps > outer:
                    continue
                if method is cope and (stages > 1 or outer != (options["N" if of_keys else "M"])):
                    continue  # the scratch has the shape of today's tiles
                tile = dict(M=M, N=N, num_warps=warps, num_stages=stages)
                grid = math.ceil(T / outer), heads
                name = f"{method.__name__}, {kernel.__name__[10:]} {M}x{N} {warps}w {stages}s"
                bench.line("sweep", name, T, measure_kernel, kernel, grid, args, options | tile)

def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="times other tiles instead")
    parser.add_argument("--dry", action="store_true", help="a tiny size, on a CPU")
    options = parser.parse_args(words)
    if not options.dry:
        if not torch.cuda.is_available():
            parser.error("there is no CUDA GPU; --dry runs tiny sizes on a CPU")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
              f"{kernels.triton.__version__}, bfloat16")
    bench = Bench(options.only, options.dry)
    try:
        if options.sweep:
            sweep(bench)
        else:
            attentions(bench)
            each_kernel(bench)
            steps(bench)
    finally:
        for line in bench.lines:
            print(json.dumps(line))
    return bench.lines

if __name__ == "__main__":
    main()
