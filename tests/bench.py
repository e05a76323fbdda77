"""Times everything that one wants to know on the first day with a GPU, the most useful lines first:

    python tests/bench.py                     a table, which takes hours
    python tests/bench.py --minutes=10        starts no line after ten minutes
    python tests/bench.py --only=pope,fox     only lines whose names contain one of these
    python tests/bench.py --dry               tiny sizes on a CPU, with PyTorch instead of kernels

There are two kinds of lines. `step` is a whole training step of a GPT of 124M parameters, eager and
compiled. `attention` is attention by itself, forward and with its backward pass, in kernels.py and
in PyTorch, for 1,024 to 32,768 tokens. A fast but wrong kernel does not pass: a step's loss is
compared with that of the dense path, and attention's output and the gradients of a few queries with
those in float64. Times are medians. A line that fails says why, and does not end the run.
"""
import argparse
import copy
import os
import sys
import time
from functools import partial

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from model import GPT, PES, WITH_KERNEL, GPTConfig, key_bias, triton_attention  # noqa: E402

# --- how a line is measured -----------------------------------------------------------------------

class Bench:
    def __init__(self, only, minutes, dry):
        self.only = only.split(",")  # [""], which is part of every name, if nothing is given
        self.end = time.monotonic() + 60 * minutes
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.lines = []
        print(f"{'kind':9} {'name':34} {'T':>6}  result", flush=True)

    def line(self, kind, name, T, measure, *arguments):
        """Prints what measure(self, *arguments) returns, a dict, or why it failed."""
        if not any(part in f"{kind} {name}" for part in self.only) or time.monotonic() > self.end:
            return
        try:
            result = measure(self, *arguments)
            text = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
        except Exception as error:  # no memory, a kernel that does not compile, a wrong result
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
    result = {}
    if use_kernels:
        result["loss_error"] = loss_error(bench, net, compiled)
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
    result.update(ms=ms, tokens_per_s=B * cfg.block_size / ms * 1000)
    result["peak_GiB"] = bench.peak_gib(step)
    return result

def loss_error(bench, net, compiled):
    """Makes net use the kernels. Returns how far its loss is from that of the dense path in
    float32, relative to it, for a copy whose weights are so large that attention matters."""
    copied = copy.deepcopy(net)
    torch.manual_seed(0)
    for p in copied.parameters():
        torch.nn.init.normal_(p, std=len(p) ** -0.5)
    copied.clamp_parameters()
    idx = torch.randint(net.cfg.vocab_size, (1, net.cfg.block_size), device=bench.device)
    with torch.no_grad():
        want = copied(idx, idx)[1].item()
        for model in (net, copied):
            said = model.use_kernels(torch.bfloat16)
        if "triton" not in said and not bench.dry:
            raise ValueError(said)
        f = torch.compile(copied) if compiled else copied
        with torch.autocast(bench.device.type, torch.bfloat16):
            found = f(idx, idx, return_logits=False)[1].item()
    error = abs(found / want - 1)
    if not error < 0.02:
        raise ValueError(f"wrong: the loss is {found}, and that of the dense path is {want}")
    torch._dynamo.reset()
    return error

FIRST = ("rope", "pope", "cope", "fox", "alibi")  # the methods of the most useful lines

def step_lines(bench, methods, compiled):
    T = 16 if bench.dry else 1024
    mode = "compiled" if compiled else "eager"
    for pe in methods:
        bench.line("step", f"{pe}, {mode}", T, training_step, pe, False, compiled)
        if PES[pe] in WITH_KERNEL:
            bench.line("step", f"{pe}, {mode}, kernel", T, training_step, pe, True, compiled)

# --- attention by itself --------------------------------------------------------------------------
# All lines of a method get the operands of the same layer of model.py, which Attention.textbook
# explains. Its q and k are already rotated, so only the `step` lines include rotations

NEVER_SATURATED = "cope, never saturated"  # the most expensive case, in which all keys are counted

def random_layer(bench, name, T):
    """Returns an attention layer with random weights, and its operands for random tokens."""
    H, d = (2, 32) if bench.dry else (12, 64)
    B = 1 if bench.dry else max(1, 32768 // T)
    gates = "sep-keys" if name == NEVER_SATURATED else "keys"
    torch.manual_seed(0)
    net = GPT(GPTConfig(T, 97, 1, H, H * d, pe=name.split(",")[0], cope_gates=gates))
    for p in net.parameters():
        torch.nn.init.normal_(p, std=len(p) ** -0.5)
    net.to(bench.device, torch.float32 if bench.dry else torch.bfloat16)
    layer = net.h[0].attn
    with torch.no_grad():
        x = torch.randn(B, T, H * d).to(layer.c_qk.weight)
        pos = torch.arange(T, device=bench.device)
        per_position = {name: pe.per_position(x, pos) for name, pe in net.first_instance.items()}
        q, k, v, unencoded_q, per_key = layer.encode(x, pos, per_position, {})
    if name == NEVER_SATURATED:
        unencoded_q[..., 0] = d**0.5
        per_key[0][..., 0] = -5  # which adds -5 to the logit of every gate
    return layer, [x.detach().clone().requires_grad_() for x in (q, k, v, unencoded_q, *per_key)]

def call(attend, q, k, v, unencoded_q, *per_key):
    j = torch.arange(k.size(2), device=k.device)
    return attend(q, k, v, unencoded_q, j[-q.size(2):, None], j, per_key)

def output_and_gradients(f, operands, do):
    o = f(*operands)
    return o, *torch.autograd.grad(o, operands, do.to(o), allow_unused=True)

def error(attend, layer, operands):
    """Returns the largest relative rms error among o and all gradients. Only 16 queries of one
    sequence have a loss. They are not the last ones, so that a missing mask shows."""
    one = [x[:1].detach().requires_grad_() for x in operands]
    stop = one[0].size(2) * 3 // 4 + 1
    exact_layer = copy.deepcopy(layer).double()

    def mine(*operands):
        return call(attend, *operands)[:, :, stop - 16 : stop]

    def exact(*operands):
        q, k, v, unencoded_q, *per_key = (x.double()[:, :, :stop] for x in operands)
        return call(exact_layer.textbook, q[:, :, -16:], k, v, unencoded_q[:, :, -16:], *per_key)

    do = torch.randn_like(mine(*one))
    pairs = zip(output_and_gradients(mine, one, do), output_and_gradients(exact, one, do))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs if b is not None)

def measure_attention(bench, make, name, T):
    layer, operands = random_layer(bench, name, T)
    attend = make(bench, layer, T)
    if not bench.dry:
        attend = torch.compile(attend, dynamic=False)
    do = torch.randn_like(operands[2])

    def both():
        return output_and_gradients(partial(call, attend), operands, do)

    def forward():
        with torch.no_grad():
            return call(attend, *operands)

    both()
    result = dict(forward_ms=bench.median_ms(forward), both_ms=bench.median_ms(both))
    result["peak_GiB"] = bench.peak_gib(both)
    result["rel_error"] = error(attend, layer, operands)
    if not result["rel_error"] <= 0.03:
        raise ValueError(f"wrong: {result}")
    return result

# Each of these returns an implementation for T tokens, with the arguments of Attention.textbook

def triton(bench, layer, T):
    if bench.dry:
        return layer.textbook

    def kernel(q, k, v, unencoded_q, i, j, per_key):
        return triton_attention(layer, q, k, v, unencoded_q, per_key)

    return kernel

def chunked(bench, layer, T):
    return layer.chunked

def sdpa_flash(bench, layer, T):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v, *_):
        with sdpa_kernel(SDPBackend.MATH if bench.dry else SDPBackend.FLASH_ATTENTION):
            return layer.fused(q, k, v)
    return attend

def flex_attention(bench, layer, T):
    from torch.nn.attention import flex_attention as flex

    def causal(b, h, i, j):
        return i >= j

    mask = flex.create_block_mask(causal, None, None, T, T, device=bench.device)

    def attend(q, k, v, unencoded_q, i, j, per_key):
        add_bias = None
        if layer.bias_pes:
            bias = key_bias(layer.bias_pes[0], unencoded_q, per_key[0]).expand(v.shape[:3])

            def add_bias(s, b, h, i, j):
                return s + bias[b, h, j]

        return flex.flex_attention(q, k, v, add_bias, mask, scale=layer.d**-0.5)
    return attend

IMPLEMENTATIONS = {
    "rope": (triton, chunked, sdpa_flash, flex_attention),
    "pope": (triton, chunked, sdpa_flash, flex_attention),
    "cope": (triton, chunked),
    NEVER_SATURATED: (triton,),
    "fox": (triton, chunked, flex_attention),
    "alibi": (triton, chunked, flex_attention),
}

def attention_lines(bench, *lengths):
    for T in lengths:
        for name, makes in IMPLEMENTATIONS.items():
            for make in makes:
                bench.line("attention", f"{name}, {make.__name__}", T, measure_attention, make,
                           name, T)

def all_lines(bench):
    """Measures all lines, in the order of their worth."""
    others = [pe for pe in PES if pe not in FIRST]
    if bench.dry:
        step_lines(bench, [*FIRST, *others], compiled=False)
        attention_lines(bench, 64)
        return
    step_lines(bench, FIRST, compiled=True)
    attention_lines(bench, 1024, 8192)
    step_lines(bench, FIRST, compiled=False)
    attention_lines(bench, 2048, 4096, 16384, 32768)
    step_lines(bench, others, compiled=True)
    step_lines(bench, others, compiled=False)

def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--minutes", type=float, default=float("inf"),
                        help="start no line after this time")
    parser.add_argument("--dry", action="store_true", help="a tiny size, on a CPU")
    options = parser.parse_args(words)
    if not options.dry:
        if not torch.cuda.is_available():
            parser.error("there is no CUDA GPU; --dry runs tiny sizes on a CPU")
        from triton import __version__

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
              f"{__version__}, bfloat16")
    bench = Bench(options.only, options.minutes, options.dry)
    all_lines(bench)
    return bench.lines

if __name__ == "__main__":
    main()
