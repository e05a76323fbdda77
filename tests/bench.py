"""Times attention and small models, in some minutes:

    python tests/bench.py

On a GPU, attention alone: ms of forward and of forward + backward, and MB at the peak. Beside the
kernels: RoPE, PoPE's vectors in PyTorch's own attention, and CoPE's Listing 1. On a CPU, ms of a
training step and of a token decoded with and without the cache. All are medians.
"""
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import kernels  # noqa: E402
from model import GPT, GPTConfig, turn  # noqa: E402

# --- on a GPU: attention alone. All functions get the same tables of angles -----------------------

def table(T, d, step, device):
    theta = 10000.0 ** (-torch.arange(0, d, step, device=device) / d)
    angle = torch.arange(T, device=device)[:, None] * theta
    return angle.cos(), angle.sin()  # (T, d / step)

def widen(x, cos, sin):  # PoPE's vectors, 2d wide
    mu = F.softplus(x.float())
    return torch.cat((mu * cos, mu * sin), -1).to(x.dtype)

def sdpa(backend, q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=v.size(-1) ** -0.5)

def listing1(q, k, v, e):
    return kernels.naive_cope(q, k, v, q @ e)

def attentions(B, H, T, d):
    """{name: (function, its inputs)}"""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = torch.randn(3, B, T, H, d, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    delta = torch.rand(H, d, device="cuda")
    e = torch.randn(d, 64, device="cuda", dtype=torch.bfloat16)
    idle = q.clone()  # gates that hardly count, so no row is ever saturated
    idle[..., 0], gate_k = -5 * d**0.5, torch.ones_like(k)
    rope_table, pope_table = table(T, d, 2, "cuda"), table(T, d, 1, "cuda")
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")

    def rope(backend):
        return lambda q, k, v: sdpa(backend, turn(q, *rope_table), turn(k, *rope_table), v)

    def padded(q, k, v):
        q, k = widen(q, *pope_table), widen(k, *pope_table)
        return sdpa("FLASH_ATTENTION", q, k, F.pad(v, (0, d)))[..., :d]

    def flex(q, k, v):
        q, k = widen(q, *pope_table), widen(k, *pope_table)
        return flex_attention(q, k, v, block_mask=mask, scale=d**-0.5)

    def cope(q, k, v, e, *gates):
        return kernels.cope_attention(q, k, v, q @ e, *gates)

    return {
        "rope, sdpa flash": (rope("FLASH_ATTENTION"), (q, k, v)),
        "rope, sdpa cudnn": (rope("CUDNN_ATTENTION"), (q, k, v)),
        "pope": (kernels.pope_attention, (q, k, v, delta)),
        "pope, dropout": (lambda *x: kernels.pope_attention(*x, dropout=0.1), (q, k, v, delta)),
        "pope, sdpa flash, v padded": (padded, (q, k, v)),
        "pope, flex_attention": (flex, (q, k, v)),
        "cope": (cope, (q, k, v, e)),
        "cope, no row saturated": (cope, (q, k, v, e, idle, gate_k)),
        "cope, listing 1, compiled": (listing1, (q, k, v, e)),
        "cope, listing 1": (torch.compiler.disable(listing1), (q, k, v, e)),
    }

def on_gpu(tokens=16384, H=12, d=64):
    import triton
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
          f"{triton.__version__}; {tokens} tokens, {H} heads of {d}, bfloat16, all compiled")
    print(f"{'T':>6} {'':28} {'forward':>9} {'+ backward':>11} {'peak MB':>8}")
    for T in (512, 1024, 2048, 4096, 8192, 16384):
        for name, (f, inputs) in attentions(max(1, tokens // T), H, T, d).items():
            torch._dynamo.reset()
            f = torch.compile(f, dynamic=False)
            inputs = [x.detach().requires_grad_() for x in inputs]

            def step():
                return torch.autograd.grad(f(*inputs), inputs, do, allow_unused=True)

            try:
                do = torch.randn_like(f(*inputs))
                with torch.no_grad():
                    forward = do_bench(lambda: f(*inputs), return_mode="median")
                both = do_bench(step, return_mode="median")
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                peak = (torch.cuda.max_memory_allocated() - held) / 2**20
                print(f"{T:6} {name:28} {forward:9.3f} {both:11.3f} {peak:8.0f}", flush=True)
            except RuntimeError as error:  # no memory, or no such backend for these shapes
                print(f"{T:6} {name:28} {type(error).__name__}", flush=True)

# --- on a CPU: small models -----------------------------------------------------------------------

def median_ms(f, runs=9):
    f()  # the first is slower
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        f()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)

def gpt(pe, T):
    torch.manual_seed(0)
    return GPT(GPTConfig(T, 256, n_layer=4, n_head=4, n_embd=256, pe=pe))

def training_step(pe, T, B=4):
    net, idx = gpt(pe, T), torch.randint(256, (B, T))

    return median_ms(lambda: net(idx, idx)[1].backward())

def decoding(pe, T, cached):
    """ms of a token that follows T - 1 others"""
    net, idx = gpt(pe, T).eval(), torch.randint(256, (1, T))
    with torch.inference_mode():
        if not cached:
            return median_ms(lambda: net(idx))
        caches = [net.new_cache() for _ in range(10)]
        for cache in caches:
            net(idx[:, :-1], cache=cache)
        return median_ms(lambda: net(idx[:, -1:], cache=caches.pop()))

def on_cpu():
    print(f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          "4 layers of 4 heads of 64, float32")
    for T in (256, 1024):
        steps = {pe: training_step(pe, T) for pe in ("learned", "rope", "pope", "cope")}
        for pe, ms in steps.items():
            print(f"training step, 4 x {T:4} tokens, {pe:8} {ms:8.1f} ms, "
                  f"{ms / steps['rope']:.2f} of rope's", flush=True)
    for pe in ("rope", "pope", "cope"):
        cached, without = decoding(pe, 1024, True), decoding(pe, 1024, False)
        print(f"a token after 1023, {pe:8} {cached:6.1f} ms with the cache, {without:6.1f} without")

if __name__ == "__main__":
    on_gpu() if torch.cuda.is_available() else on_cpu()
