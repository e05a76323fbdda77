"""model.py against tests/oracles.py, which computes the same from the equations in float64, and
against itself: with a cache, in chunks, compiled, in bfloat16."""
import copy
import dataclasses
import inspect
import math
import re
import sys

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import model
from config.devices import pick_device
from config.runs import load_model
from model import GPT, PES, GPTConfig, at_least_float32, scaled_dot_products

SMALL = dict(block_size=16, vocab_size=19, n_layer=2, n_head=4, n_embd=32)
# every method, every option that changes what is computed, and the mixes
CASES = {name: dict(pe=name) for name in PES} | {
    "llama": dict(pe="rope", norm="rmsnorm", mlp="swiglu", bias=False, tie=False),
    "sinusoidal-unscaled": dict(pe="sinusoidal", sinusoidal_scale=False),
    "rope-linear": dict(pe="rope", rope_scaling="linear", rope_factor=4.0),
    "rope-ntk": dict(pe="rope", rope_scaling="ntk", rope_factor=4.0),
    # frequencies of 41 to 0.2 turns
    "rope-yarn": dict(pe="rope", rope_scaling="yarn", rope_factor=4.0, block_size=256, base=1e3),
    "rope-yarn-longer": dict(pe="rope", rope_scaling="yarn", rope_factor=4.0, block_size=512,
                             rope_trained=128, base=1e3),
    "rope-partial": dict(pe="rope", rope_fraction=0.25),
    "rope-partial-ntk": dict(pe="rope", rope_fraction=0.5, rope_scaling="ntk", rope_factor=4.0),
    "rope-p": dict(pe="rope", rope_p=0.5),
    "rope-p-partial-linear": dict(pe="rope", rope_p=0.7, rope_fraction=0.75, n_embd=64,
                                  rope_scaling="linear", rope_factor=4.0),
    "rope-hard": dict(pe="rope", hard_attention=True),
    "pope-no-delta": dict(pe="pope", pope_delta="none"),
    "pope-relu": dict(pe="pope", pope_mu="relu"),
    "pope-no-softplus": dict(pe="pope", pope_mu="identity"),
    "carope-embedding": dict(pe="carope+sinusoidal", carope_x="embedding"),
    "relative-short": dict(pe="relative", block_size=5),
    "relative-capped": dict(pe="relative", block_size=5, relative_capped=True),
    "t5-coarse": dict(pe="t5", t5_buckets=8, t5_max_distance=13),
    "alibi-12-heads": dict(pe="alibi", n_head=12, n_embd=48),
    "alibi-8-of-12-heads": dict(pe="alibi", alibi_fraction=0.66, n_head=12, n_embd=48),
    "fox+rope": dict(pe="fox+rope"),
    "cope-saturated": dict(pe="cope", cope_npos=3),
    "cope-values": dict(pe="cope", cope_gates="values", cope_scale_z=True),
    "cope-per-layer": dict(pe="cope", cope_shared=False),
    "cope-per-head": dict(pe="cope", cope_per_head=True),
    "cope+rope": dict(pe="cope+rope"),
    "cope+pope": dict(pe="cope+pope"),
    "cope+pope-sep-keys": dict(pe="pope+cope", cope_gates="sep-keys"),
    "cope+carope": dict(pe="carope+cope"),
    "cope+cope_mlp": dict(pe="cope+cope_mlp", cope_gates="sep-keys"),  # each caches gate keys
    "cope_mlp-small": dict(pe="cope_mlp", cope_npos=4, cope_mlp_width=8, cope_scale_z=True),
    "cope_alibi-geometric": dict(pe="cope_alibi", cope_slopes="geometric", cope_m0=0.3),
    "cope_alibi-learned": dict(pe="cope_alibi", cope_slopes="learned"),
    "expe-scaled": dict(pe="expe", expe_l=5, expe_S=0.5, expe_theta=0.1, expe_scale=0.5),
    "expe-once": dict(pe="expe", expe_once=True),
    "expe-same": dict(pe="expe", expe_same=True, expe_theta=0.1),
    "expe-learned": dict(pe="expe", expe_learned="init"),
    "exqpe-scaled": dict(pe="exqpe", expe_l=5, expe_S=0.5, expe_theta=0.1, expe_theta2=0.3,
                         expe_scale=0.5),
    "exqpe-learned": dict(pe="exqpe", expe_learned="init"),
    "pattern": dict(pe="rope,rope,cope+rope", n_layer=3),
    "pattern-learned": dict(pe="nope,learned+alibi", n_layer=3),
}
EVERY = pytest.mark.parametrize("case", CASES)
NAMES = pytest.mark.parametrize("case", PES)  # only one case of each method

def gpt(**changes):
    """A model as training initialises it."""
    return GPT(GPTConfig(**SMALL | changes))

def methods(net):
    """All instances of the PEs of a model."""
    return [pe for block in net.h for pe in block.attn.pes]

def build(case, **changes):
    """A model whose parameters are large enough for every term to matter. Those with bounds are
    drawn from all that the bounds allow, or from two units of it if there is only one bound."""
    torch.manual_seed(1)
    net = gpt(**CASES[case] | changes).eval()
    bounds = {getattr(pe, name): limits
              for pe in methods(net) for name, limits in pe.bounds.items()}
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p in bounds:
                lowest, highest = bounds[p]
                if math.isinf(highest):
                    highest = lowest + 2
                if math.isinf(lowest):
                    lowest = highest - 2
                p.uniform_(lowest, highest)
            elif name.endswith(("expe_S", "expe_theta", "expe_theta2")):
                p.uniform_(0.05, 0.2)
            elif "ln_" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(std=0.3)
    return net

def tokens(B, T, seed=0):
    return torch.randint(19, (B, T), generator=torch.Generator().manual_seed(seed))

@torch.no_grad()
def full(net, idx, cache=None):
    return net(idx, idx, cache)[0]

def length(case):
    return 16 if "learned" in CASES[case]["pe"] else 24  # past block_size where the method can

def expected(net, idx, pos=None):
    """The oracle's logits (T, V) of one row of tokens, at the positions pos or 0, 1, 2 ..."""
    params = {name: p.double().numpy() for name, p in net.state_dict().items()}
    return torch.from_numpy(oracles.gpt(net.cfg, params, idx.numpy(), pos))

def error(got, want):
    """The largest error, relative to the largest value."""
    return ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()

@EVERY
def test_forward_equals_the_equations(case):
    net, idx = build(case), tokens(2, length(case))
    want = expected(net, idx[1])
    assert error(full(net, idx)[1], want) < 1e-5
    if case != "nope":  # an encoding that hardly mattered could be wrong
        plain = GPT(dataclasses.replace(net.cfg, pe="nope", rope_scaling="none", rope_factor=1.0,
                                        expe_scale=1.0, relative_capped=False))
        plain.eval()
        plain.load_state_dict(net.state_dict(), strict=False)
        assert error(full(plain, idx)[1], want) > 1e-3
    assert error(full(net.double(), idx)[1], want) < 1e-12
    assert error(full(net.train(), idx)[1], want) < 1e-12  # without dropout, it is the same

@NAMES
def test_long_texts_equal_the_equations(case):
    """A distance that is cut off, or an error at the border of two chunks, shows only here."""
    net = build(case, n_layer=1, n_head=2, n_embd=16, block_size=150).double()
    idx = tokens(1, 140)
    assert error(full(net, idx)[0], expected(net, idx[0])) < 1e-12

@EVERY
def test_training_from_the_start(case):
    """With the initial values that a method gives its parameters, which `build` replaces, they lie
    within their bounds, the loss is finite, and all of them learn within a few steps."""
    torch.manual_seed(0)
    net, idx = gpt(**CASES[case]), tokens(4, 16)
    optimizer = net.configure_optimizers(0.0, 1e-2, (0.9, 0.95), "cpu")
    learned = set()
    for _ in range(4):
        for pe in methods(net):
            for name, (lowest, highest) in pe.bounds.items():
                p = getattr(pe, name)
                assert p is None or lowest <= p.min() and p.max() <= highest, (
                    f"{name} is not within its bounds")
        loss = net(idx, idx.roll(-1, 1))[1]
        loss.backward()
        assert loss.isfinite()
        learned |= {name for name, p in net.named_parameters() if (p.grad != 0).any()}
        optimizer.step()
        net.clamp_parameters()
        optimizer.zero_grad()
    assert learned == {name for name, _ in net.named_parameters()}

@EVERY
@torch.no_grad()
def test_shift_of_all_positions(case):
    """It changes the logits as the equations do: not at all for relative methods."""
    net, idx, pos = build(case, block_size=64), tokens(2, 12), torch.arange(29, 41)
    x = net.wte(idx)
    per_position = {name: pe.per_position(x, pos) for name, pe in net.first_instance.items()}
    for pe in net.first_instance.values():
        x = pe.embed(x, pos)
    for block in net.h:
        x = block(x, pos, pos, per_position)
    assert error(net.lm_head(net.ln_f(x))[0], expected(net, idx[0], pos)) < 2e-5

@pytest.mark.parametrize("case", ["rope", "learned", "relative", "t5", "alibi", "cope", "expe"])
def test_random_positions_in_training(case):
    """They are sorted, distinct and below random_positions, new in each forward pass, and give the
    logits of the equations at these positions. Evaluation counts from 0."""
    net, idx, seen = build(case, random_positions=40).double(), tokens(2, 12), []
    net.h[0].register_forward_pre_hook(lambda block, args: seen.append(args[1].tolist()))
    for mode in (True, True, False):
        logits = full(net.train(mode), idx)
        assert error(logits[0], expected(net, idx[0], seen[-1])) < 1e-12
    first, second, last = seen
    assert first == sorted(set(first)) and len(first) == 12 and 12 < first[-1] < 40
    assert first != second and last == list(range(12))

@EVERY
def test_cache_equals_full_forward(case):
    net, idx = build(case), tokens(2, length(case))
    cache = net.new_cache()
    pieces = idx.tensor_split([1, 2, 3, 8, 9], dim=1)  # one token and several, in any order
    got = torch.cat([full(net, piece, cache) for piece in pieces], 1)
    assert (got - full(net, idx)).abs().max() < 1e-4

@EVERY
def test_no_position_sees_the_future(case):
    net, idx = build(case), tokens(1, length(case))
    other = idx.clone()
    other[0, 9:] = (other[0, 9:] + 7) % 19
    a, b = full(net, idx), full(net, other)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.allclose(a[:, 9], b[:, 9])

@EVERY
def test_gradients_equal_finite_differences(case):
    """So nothing is detached, and every parameter learns."""
    net, idx = build(case).double(), tokens(2, 16)
    net(idx, idx.roll(-1, 1))[1].backward()
    for name, p in net.named_parameters():
        assert p.grad.abs().max() > 1e-6, f"{name} does not learn"
        if net.cfg.hard_attention:
            continue  # its gradient is the softmax's, see below
        step, losses = 1e-6 * torch.randn_like(p), []
        with torch.no_grad():
            for sign in (1, -2, 1):
                p += sign * step
                losses.append(net(idx, idx.roll(-1, 1))[1].item())
        slope = (p.grad * step).sum().item()
        assert (losses[0] - losses[1]) / 2 == pytest.approx(slope, rel=1e-3, abs=1e-14), name

@EVERY
def test_bfloat16_stays_close(case):
    """Under autocast, and in a model of bfloat16 weights."""
    net, idx = build(case), tokens(2, 16)
    if net.cfg.hard_attention:
        return  # which key is the largest may change
    want = full(net, idx)
    with torch.autocast("cpu", torch.bfloat16):
        got = full(net, idx).float()
    assert (got - want).abs().mean() < 0.05 * want.abs().mean()
    assert (full(net.bfloat16(), idx).float() - want).abs().mean() < 0.2 * want.abs().mean()

@EVERY
@torch.no_grad()
def test_far_positions_in_bfloat16(case):
    """The hooks of a model of bfloat16, at the end of 4,001 tokens, do what they do in a model of
    the same rounded numbers in float32, and so do those of that model under autocast. bfloat16 has
    8 significant bits, so to it 4001 is 4000, and a bias or an angle that it has computed is off by
    whole radians."""
    net = build(case).bfloat16()
    exact = copy.deepcopy(net).float()
    T = int(min(4001, net.limit))
    pos = torch.arange(T)
    i, j = pos[-9:, None], pos
    H, d, C = net.cfg.n_head, net.h[0].attn.d, net.cfg.n_embd
    q, k, v = torch.randn(3, 1, H, T, d).bfloat16()
    x = torch.randn(1, T, C).bfloat16()

    def changes(pe, q, k, v, x):
        """What each hook makes of these tensors, for the last tokens."""
        found = [pe.embed(x, pos), pe.inputs(x, pos)]
        found += pe.encode_qk(q, k, x, pe.per_position(x, pos), {})
        found = [tensor[..., -9:, :] for tensor in found]
        if model.has_key_bias(pe) or model.overrides(type(pe), "logit_bias"):
            logits = scaled_dot_products(q[:, :, -9:], k, d)
            bias = pe.logit_bias(q[:, :, -9:], logits, i, j, pe.per_key(x, k, v, {}))
            assert bias.dtype == at_least_float32(q), "a bias must be at least float32"
            bias = bias.expand(1, H, 9, T)
            different.append([len(of_head.unique()) for of_head in bias[0, :, -1]])
            for keys in (bias[..., :9], bias[..., -17:-8]):  # the first ones, and the nearest
                found.append(keys - keys.amax(-1, keepdim=True))  # all that softmax heeds
        return found

    for pe, its_exact in zip(methods(net), methods(exact)):
        inputs = q.float(), k.float(), v.float(), x.float()
        different = []  # how many different biases the last query has, in each of the three cases
        want = changes(its_exact, *inputs)
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = changes(its_exact, *inputs)
        for got in (changes(pe, q, k, v, x), under_autocast):
            for a, b in zip(got, want):
                assert error(a.float(), b) < 0.02, type(pe).__name__
        for exactly, *rounded in zip(*different):  # of each head
            assert min(rounded) > 0.1 * exactly, "a bias in bfloat16 makes many distances the same"

@EVERY
def test_what_is_saved_is_what_learns(case):
    """A number that is learned must be a parameter. The oracle would not notice a buffer."""
    net = gpt(**CASES[case])
    learned = dict(net.named_parameters(remove_duplicate=False))
    assert net.state_dict().keys() == learned.keys()

@EVERY
def test_layers_share_what_the_paper_shares(case):
    """oracles.SHARED says which parameters all layers have in common. The others are their own."""
    net = gpt(**CASES[case])
    tensors = {}  # {(method, name of a parameter): the tensors in all layers that use the method}
    for block in net.h:
        for method, pe in zip(block.attn.names, block.attn.pes):
            for name, p in pe.named_parameters():
                tensors.setdefault((method, name), []).append(p)
    for (method, name), found in tensors.items():
        shared = name in oracles.shared(net.cfg, method)
        assert len(set(found)) == (1 if shared else len(found)), (
            f"{method}.{name} is {'not ' if shared else ''}shared, unlike oracles.SHARED")

@EVERY
def test_bounds_hold_and_freeze_nothing(case):
    """Training moves each parameter of a method far up or down. clamp_parameters moves it back into
    its bounds, where the loss is finite and the parameter still learns. It does not if a hook
    clamps it instead, or if a bound was forgotten."""
    net, idx = build(case).double(), tokens(2, 16)
    start = copy.deepcopy(net.state_dict())
    assert net(idx, idx.roll(-1, 1))[1].isfinite(), (
        "the loss is not finite at the first weights; is the bias finite for keys in the future?")
    for pe in methods(net):
        for name, p in pe.named_parameters():
            lowest, highest = pe.bounds.get(name, (-math.inf, math.inf))
            for far in (10.0, -10.0):
                net.load_state_dict(start)
                net.zero_grad()
                with torch.no_grad():
                    p += far
                net.clamp_parameters()
                loss = net(idx, idx.roll(-1, 1))[1]
                loss.backward()
                assert lowest <= p.min() and p.max() <= highest, f"{name} has left its bounds"
                assert loss.isfinite() and p.grad.isfinite().all(), f"{name} needs bounds"
                if (p.grad == 0).all():  # the equation itself may be flat there, as a ReLU is
                    before = expected(net, idx[0])
                    with torch.no_grad():
                        p += 0.01 * torch.randn_like(p)
                    assert torch.equal(before, expected(net, idx[0])), f"{name} is frozen"

@EVERY
def test_bounds_do_not_freeze_each_other(case):
    """If several parameters reach their bounds at once, some of them must still learn, unless the
    equation is flat there. Otherwise a head whose parameters multiply each other is lost for good
    as soon as both are 0."""
    net, idx = build(case).double(), tokens(2, 16)
    start = copy.deepcopy(net.state_dict())
    for pe in methods(net):
        bounded = [p for name, p in pe.named_parameters() if name in pe.bounds]
        for far in (10.0, -10.0) if bounded else ():
            net.load_state_dict(start)
            net.zero_grad()
            with torch.no_grad():
                for p in bounded:
                    p += far
            net.clamp_parameters()
            net(idx, idx.roll(-1, 1))[1].backward()
            if all((p.grad == 0).all() for p in bounded):
                before = expected(net, idx[0])
                with torch.no_grad():
                    for p in bounded:
                        p -= 0.01 * math.copysign(1, far) * torch.rand_like(p)
                assert torch.equal(before, expected(net, idx[0])), (
                    f"{type(pe).__name__} is frozen when all of its parameters are at their bounds")

MIXES = ["pope,carope,expe,rope+learned+sinusoidal+exqpe", "cope+relative+t5+alibi+fox+rope",
         "cope_mlp+cope_alibi+nope"]
MIXED = set(re.split("[+,]", ",".join(MIXES)))

@pytest.mark.parametrize("pe", [*MIXES, *(name for name in PES if name not in MIXED)])
def test_one_graph_serves_many_lengths(pe):
    """Past eight graphs PyTorch gives up."""
    torch._dynamo.reset()
    sizes = dict(n_layer=pe.count(",") + 1, block_size=140, cope_mlp_width=4)
    net, graphs = build("nope", pe=pe, **sizes).double(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=True)
    for T in (41, 16, 140):
        idx = tokens(2, T)
        assert error(compiled(idx, idx)[0], full(net, idx)) < 1e-5
    assert len(graphs) == 1

def test_compiled_decoding():
    """A few tokens at a time, which are too few for four chunks."""
    torch._dynamo.reset()
    net, idx = build("nope", pe="cope+fox+rope", n_layer=1), tokens(2, 6)
    compiled, cache = torch.compile(net, backend="eager"), net.new_cache()
    with torch.no_grad():
        got = [compiled(token, token, cache)[0] for token in idx.split([3, 1, 2], 1)]
    assert error(torch.cat(got, 1), full(net, idx)) < 1e-5

@pytest.mark.parametrize("device, backend", [  # compiling to machine code takes a CPU a minute
    ("cpu", "aot_eager_decomp_partition"),
    pytest.param("cuda", "inductor", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU")])])
def test_compiled_gradients(device, backend):
    torch._dynamo.reset()
    net, idx = build("pope", n_layer=1).to(device), tokens(2, 16).to(device)
    params = list(net.parameters())
    want, got = net(idx, idx), torch.compile(net, backend=backend)(idx, idx)
    assert error(got[0], want[0]) < 1e-4
    grads = [torch.autograd.grad(loss, params) for _, loss in (got, want)]
    for (name, _), a, b in zip(net.named_parameters(), *grads):
        assert (a - b).abs().max() < 1e-4, name

def test_learned_positions_end():
    with pytest.raises(model.Mistake, match="has only 16 positions, but the input needs 17"):
        gpt(pe="rope,learned")(tokens(1, 17))

# --- attention ------------------------------------------------------------------------------------

class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out

@pytest.mark.parametrize("case", ["cope", "relative", "t5", "alibi", "cope+rope"])
def test_dense_attention_holds_one_chunk_of_queries(case):
    T = 3 * model.CHUNK + 3
    net, idx = build(case, n_layer=1, block_size=T), tokens(1, T)
    with Largest() as seen:
        full(net, idx)
    assert seen.numel <= model.CHUNK * T * 4  # 4 heads

def kept(net, idx):
    """The number of elements that autograd keeps for the backward pass, and the gradients."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = net(idx, idx)[1]
        return sum(storages.values()), torch.autograd.grad(loss, list(net.parameters()))

@pytest.mark.parametrize("pe", ["alibi", "fox", "rope+alibi", "cope", "cope+rope"])
def test_no_matrix_is_kept(pe):
    """A bias of keys is a column of k, and CoPE computes its gates and positions again, with the
    same gradients. So a step keeps hardly more than with rope."""
    T = 4 * model.CHUNK
    nets = [build("nope", pe=pe, n_layer=1, n_embd=128, block_size=T) for pe in ("rope", pe)]
    (of_rope, _), (number, gradients) = (kept(net, tokens(1, T)) for net in nets)
    assert number < 1.15 * of_rope
    for block in nets[1].h:
        block.attn.recompute = block.attn.has_key_bias = False
    number, expected = kept(nets[1], tokens(1, T))
    assert number > 1.3 * of_rope
    for a, b in zip(gradients, expected):
        assert error(a, b) < 1e-4

@torch.no_grad()
def test_a_long_bias_in_columns():
    """In float32, the output of 2,048 tokens is off by 1e-6 of the largest value, although b
    grows to 1,700. In bfloat16, three columns are as precise as a bias in float32."""
    for pe, bound in (("alibi", 1e-5), ("fox", 1e-4)):
        net = gpt(pe=pe, n_layer=1, n_head=2, n_embd=64, block_size=2048).eval()
        args = operands(net, tokens(1, 2048))
        exact = [each.double() if each.is_floating_point() else each for each in args[:-1]]
        attn = net.h[0].attn
        want = attn.textbook(*exact, [each.double() for each in args[-1]])
        assert error(attn.attend(*args), want) < bound
        rounded = [each.bfloat16() if each.dtype == torch.float32 else each for each in args[:-1]]
        got = attn.attend(*rounded, args[-1]).double()
        dense = attn.textbook(*rounded, args[-1]).double()
        assert (got - want).norm() < 1.5 * (dense - want).norm()

@pytest.mark.parametrize("pe, names", [
    ("rope+alibi", {"k", "v"}), ("cope+rope", {"k", "v"}), ("fox", {"k", "v", "sums"}),
    ("cope+carope", {"k", "v", "phi"}),
])
def test_what_the_cache_holds(pe, names):
    """Keys and values, and whatever else a PE needs. Keys before rotation are not kept."""
    net = gpt(pe=pe)
    cache = net.new_cache()
    full(net, tokens(1, 8), cache)
    held = set()
    for name, value in cache[1].items():
        if name == "pes":
            held |= {name for of_method in value.values() for name in of_method}
        else:
            held.add(name)
    assert held == names

def operands(net, idx, cache=False):
    """The arguments of `textbook` in the last layer. With a cache, all but five tokens are in it.
    """
    seen = []
    hook = net.h[-1].attn.register_forward_pre_hook(lambda attn, args: seen.append(args))
    old = net.new_cache()
    with torch.no_grad():
        if cache:
            net(idx[:, :-5], cache=old)
            net(idx[:, -5:], cache=copy.deepcopy(old))
        else:
            net(idx)
    hook.remove()
    x, pos, j, per_position, _ = seen[-1]
    with torch.no_grad():
        *encoded, per_key = net.h[-1].attn.encode(x, pos, per_position, old[-1])
    return *encoded, pos[:, None], j, per_key

@EVERY
@pytest.mark.parametrize("cache", [False, True])
def test_every_path_equals_the_textbook(case, cache, monkeypatch):
    """Chunks of queries and PyTorch's fused attention; test_kernels.py does the same for Triton."""
    monkeypatch.setattr(model, "CHUNK", 3)
    net = build(case).double()
    attn = net.h[-1].attn
    args = operands(net, tokens(2, length(case)), cache)
    want = attn.textbook(*args)
    assert error(attn.attend(*args), want) < 1e-12
    if attn.bias_pes or net.cfg.hard_attention:
        assert error(attn.chunked(*args), want) < 1e-12

def test_compiled_code_computes_cosines_once(monkeypatch):
    """The forward pass computes those of the table that all layers share, and, by the same code for
    each layer, those that delta shifts. Without `stored` it would compute more. The C++ code is
    written but not compiled, which would take a minute, so the model computes nothing here."""
    from torch._inductor import async_compile, config, cpu_vec_isa
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # no vectors
    torch._dynamo.reset()
    net, idx = build("pope"), tokens(1, 16)

    def step():
        torch.compile(net)(idx, idx, return_logits=False)[1].backward()

    with config.patch(force_disable_caches=True, compile_threads=1):
        _, (forward, _) = run_and_get_code(step)
    assert forward.count("std::cos(") == 2

@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_sums_over_thousands_of_tokens(autocast):
    """Against sums in float64. CARoPE's angles at up to 4096 tokens are off by 1.35e-4, nearly all
    of it because they are rounded to float32, and FoX's biases of keys within 64 tokens, after 8192
    tokens, by 7.6e-6. Autocast changes neither, because both multiply x by W in float32."""
    carope = build("carope", n_layer=1, n_head=2, n_embd=128).h[0].attn.pes[0]
    fox = gpt(pe="fox", n_layer=1, n_head=2, n_embd=128).h[0].attn.pes[0]
    x = torch.randn(1, 8192, 128)
    start = x[:, :4096]
    q = torch.tensor([1.0, 0.0]).repeat_interleave(32).expand(1, 2, 4096, 64)  # (1, 0) in each pair
    i, j = torch.arange(8064, 8192)[:, None], torch.arange(8192)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cos, sin = carope.encode_qk(q, q, start, None, {})[0].double().chunk(2, -1)
        bias = fox.logit_bias(torch.zeros(1), None, i, j, fox.per_key(x, None, None, {}))

    f = 1 / (1 + F.softplus(start.double() @ carope.W.double() + carope.b))  # (1, T, H)
    phi = (f.mT[..., None] ** torch.arange(32)).cumsum(2)
    wrong = torch.atan2(sin * phi.cos() - cos * phi.sin(), cos * phi.cos() + sin * phi.sin())
    assert wrong.abs().max() < 1.6e-4

    sums = F.logsigmoid(x.double() @ fox.W.double() + fox.b.double()).mT.cumsum(-1)
    want = sums[:, :, i[:, 0], None] - sums[:, :, None]
    near = ((j <= i) & (i - j < 64)).expand_as(bias)
    assert (bias - want)[near].abs().max() < 9e-6  # sums in float32: 6e-4

def test_cope_keeps_its_digits_over_8192_tokens():
    g = torch.rand(1, 1, 1, 8192)
    p = build("cope").h[0].attn.pes[0].positions(g)
    want = g.double().flip(-1).cumsum(-1).flip(-1)
    assert (p - want)[..., -64:].abs().max() < 1e-5  # the total minus a prefix: 3e-4

@pytest.mark.parametrize("options, said", [
    (dict(pe="pope"), "triton pope"),
    (dict(pe="rope,cope+fox+alibi"),
     "fused rope (it needs no kernel), triton cope+fox+alibi"),
    (dict(pe="alibi,rope+fox"), "triton alibi, triton rope+fox"),
    (dict(pe="cope_mlp,cope_alibi+fox"), "chunked cope_mlp (its bias has no kernel), "
                                         "chunked cope_alibi+fox (its bias has no kernel)"),
    (dict(pe="rope", hard_attention=True), "chunked rope (hard attention has no kernel)"),
    (dict(pe="pope,fox", dropout=0.1), "chunked pope (dropout has no kernel), "
                                       "chunked fox (dropout has no kernel)"),
])
def test_which_layers_use_the_kernel(options, said, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("kernels"), "why_not", lambda *_: None)
    net = gpt(**options)
    assert net.use_kernels(torch.float16) == f"attention: {said}"
    assert "triton" not in net.use_kernels(torch.float16, "off")
    assert not any(block.attn.use_triton for block in net.h)

def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)  # so importing it raises ImportError
    assert gpt(pe="fox").use_kernels(torch.float16) == "attention: chunked fox (no triton)"
    assert gpt(pe="fox").use_kernels(torch.float32) == "attention: fused fox (no triton)"
    said = gpt(pe="fox,alibi").use_kernels(torch.bfloat16)
    assert said == "attention: chunked fox (no triton), fused alibi (no triton)"

@pytest.mark.parametrize("parent", ["alibi", "fox", "cope"])
def test_a_class_does_not_inherit_a_kernel(parent, monkeypatch):
    """Otherwise kernels=auto would compute the parent's bias."""
    class Steeper(PES[parent]):
        def logit_bias(self, *args):
            return 2 * super().logit_bias(*args)

    monkeypatch.setitem(PES, "steeper", Steeper)
    if parent != "cope":  # nor a column of k
        net = gpt(pe="steeper")
        assert net.use_kernels(torch.float32, "off") == "attention: chunked steeper (kernels=off)"
        args = operands(net, tokens(1, 16))
        assert error(net.h[-1].attn.attend(*args), net.h[-1].attn.textbook(*args)) < 1e-6
    monkeypatch.setattr(pytest.importorskip("kernels"), "why_not", lambda *_: None)
    said = gpt(pe=f"steeper,{parent}").use_kernels(torch.float16)
    assert said == f"attention: chunked steeper (its bias has no kernel), triton {parent}"

@pytest.mark.parametrize("path", ["textbook", "chunked", "fused"])
def test_attention_dropout(path):
    attn = gpt(pe="nope", dropout=0.5).h[0].attn
    q, v, j = torch.zeros(50, 4, 8, 8), torch.ones(50, 4, 8, 8), torch.arange(8)
    args = (q, q, v, q, j[:, None], j, [])

    def mean_of_v():  # so 1 without dropout
        return attn.fused(q, q, v) if path == "fused" else getattr(attn, path)(*args)

    y = mean_of_v()
    assert 0.9 < y.mean() < 1.1 and y.std() > 0.2
    attn.eval()
    assert (mean_of_v() - 1).abs().max() < 1e-5

# --- single methods -------------------------------------------------------------------------------

@pytest.mark.parametrize("n_head", [1, 4, 16])
def test_carope_starts_as_rope(n_head):
    rope, carope = (gpt(pe=pe, n_head=n_head).eval() for pe in ("rope", "carope"))
    for name, p in rope.named_parameters():
        if p.dim() == 2:
            p.data *= 15
    carope.load_state_dict(rope.state_dict(), strict=False)  # all but W, which stays zero
    idx = tokens(1, 64)
    assert (full(rope, idx) - full(carope, idx)).abs().max() < 1e-4

def test_carope_phase_does_not_drift_in_the_cache():
    """Token by token for 4096 tokens, against one sum in float64."""
    encoding, T, cache = build("carope", n_layer=1).h[0].attn.pes[0], 4096, {}
    x, q = torch.randn(1, T, 32), torch.ones(1, 4, T, 8)
    with torch.no_grad():
        for t in range(T):
            now = slice(t, t + 1)
            got = encoding.encode_qk(q[:, :, now], q[:, :, now], x[:, now], None, cache)[0]
        want = encoding.double().encode_qk(q.double(), q.double(), x.double(), None, {})[0]
    assert (got - want[:, :, -1:]).abs().max() < 1e-4  # a phase in float32: up to 7e-4

def test_pope_delta_is_bounded_but_never_frozen():
    net = gpt(pe="pope")
    delta = net.h[0].attn.pes[0].delta
    optimizer = net.configure_optimizers(0.0, 0.1, (0.9, 0.95), "cpu")
    assert (delta == 0).all()
    # up against a bound, away to the other, and back
    for sign, bound in ((-1, 0.0), (1, -2 * math.pi), (-1, 0.0)):
        for _ in range(100):
            delta.grad = torch.full_like(delta, sign)
            optimizer.step()
            net.clamp_parameters()
            assert -2 * math.pi - 1e-6 <= delta.min() and delta.max() <= 0
        assert (delta - bound).abs().max() < 1e-6
    start = gpt(pe="pope", pope_delta="uniform").h[0].attn.pes[0].delta
    assert start.min() < -4 and start.max() < 0 and -4.2 < start.mean() < -2

@pytest.mark.parametrize("pe", ["rope", "carope", "pope"])
def test_phases_are_float32_in_a_bfloat16_model(pe):
    """Bfloat16 has 8 significant bits: 4001 would be 4000, and RoPE's first pair a radian off."""
    encoding, n = build(pe).bfloat16().h[0].attn.pes[0], 4001
    T = n if pe == "carope" else 1  # CARoPE adds up RoPE's frequencies, as x = 0
    q, x = torch.ones(1, 4, T, 8).bfloat16(), torch.zeros(1, T, 32).bfloat16()
    angles = encoding.per_position(x, torch.tensor([n]))
    k = encoding.encode_qk(q, q, x, angles, {})[1][0, 0, -1].double()
    if pe == "pope":
        phase = n * 10000 ** (-torch.arange(8).double() / 8) + encoding.delta[0].double()
        want = math.log1p(math.e) * torch.cat((phase.cos(), phase.sin()))
    else:
        phase = n * 10000 ** (-torch.arange(4).double() / 4)
        want = torch.cat((phase.cos() - phase.sin(), phase.sin() + phase.cos()))
    assert (k - want).abs().max() < 0.02

@pytest.mark.parametrize("options", [
    dict(pe="t5"), dict(pe="cope"), dict(pe="cope_alibi", cope_slopes="learned")])
def test_biases_start_at_zero(options):
    """Given the weights of `nope`, a fresh model computes the same."""
    plain, net, idx = build("nope"), gpt(**options).eval(), tokens(2, 16)
    net.load_state_dict(plain.state_dict(), strict=False)
    assert (full(net, idx) - full(plain, idx)).abs().max() < 1e-5

@pytest.mark.parametrize("pe, given", [
    ("expe", dict(S=0.5, theta=0.25)), ("exqpe", dict(S=0.5, theta=0.25, theta2=0.125))])
def test_learned_expe_has_one_set_of_constants(pe, given):
    """For all blocks (its paper: "only two learned parameters"), starting from the given values or
    from random ones."""
    options, starts = {f"expe_{name}": value for name, value in given.items()}, {}
    for how in ("init", "random"):
        net = gpt(pe=pe, expe_learned=how, **options)
        assert net.get_num_params() == gpt(pe=pe).get_num_params() + len(given)
        starts[how] = [getattr(net.h[1].attn.pes[0], name).item() for name in options]
    assert starts["init"] == list(given.values())
    assert not set(starts["init"]) & set(starts["random"])

# --- the GPT around them --------------------------------------------------------------------------

def test_dropout_on_embeddings_and_both_branches():
    net, seen = gpt(pe="nope", dropout=0.25, n_layer=1), []
    net.h[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for module in (net.h[0].attn, net.h[0].mlp):
        module.register_forward_hook(lambda module, args, out: seen.append(out))
    net(tokens(8, 16))
    assert len(seen) == 3 and all(abs((x == 0).float().mean() - 0.25) < 0.04 for x in seen)

@EVERY
def test_matrices_decay_and_tables_do_not(case):
    """As GPT-2 is trained: matrices and embeddings decay; biases, norms and PEs' tables do not."""
    net = gpt(**CASES[case])
    groups = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = {p: name for name, p in net.named_parameters()}
    decay, rest = ({names[p] for p in group["params"]} for group in groups)
    assert decay | rest == set(names.values()) and not decay & rest
    for p, name in names.items():
        table = ".pes." in name and name.count(".") == 5  # a PE's own, not of a layer in it
        assert (name in decay) == (p.dim() >= 2 and not table), name

@EVERY
def test_methods_learn_at_their_own_rate(case):
    """pe_lr scales the first step of the parameters in a PE, and of no others."""
    idx = tokens(4, 16)
    steps = {}
    for pe_lr in (1.0, 3.0):
        net = build(case).double()
        before = copy.deepcopy(dict(net.named_parameters()))
        optimizer = net.configure_optimizers(0.0, 1e-5, (0.9, 0.95), "cpu", pe_lr)
        net(idx, idx.roll(-1, 1))[1].backward()
        optimizer.step()
        steps[pe_lr] = {name: (p - before[name]).detach() for name, p in net.named_parameters()}
    for name, step in steps[1.0].items():
        scale = 3.0 if ".pes." in name else 1.0
        assert error(steps[3.0][name] / 1e-5, scale * step / 1e-5) < 1e-6, name

def test_initialisation_and_tying():
    net = gpt(vocab_size=500, n_layer=8, n_embd=64, block_size=500, pe="relative,cope_mlp",
              cope_gates="sep-keys")
    assert net.lm_head.weight is net.wte.weight
    gates, table = net.h[1].attn.pes[0].W_g.weight, net.h[0].attn.pes[0].a
    for weight in (net.wte.weight, net.h[0].mlp.c_fc.weight, gates, table):
        assert abs(weight.std() - 0.02) < 3e-3
    for c_proj in (net.h[3].mlp.c_proj, net.h[3].attn.c_proj):
        assert abs(c_proj.weight.std() - 0.02 / 4) < 3e-4 and (c_proj.bias == 0).all()
    net = gpt(tie=False)
    assert net.lm_head.weight is not net.wte.weight
    assert gpt(mlp="swiglu").h[0].mlp.c_proj.weight.shape == (32, 128)
    assert gpt(mlp="swiglu", mlp_width=48).h[0].mlp.c_proj.weight.shape == (32, 48)

def test_hard_attention_has_the_gradient_of_the_softmax():
    torch.manual_seed(0)
    attn = build("rope-hard").h[0].attn
    q, k, v = torch.randn(3, 1, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    up = torch.randn(1, 3, 6, 8, dtype=torch.float64)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    got = torch.autograd.grad(attn.textbook(q, k, v, q, i, j, []), (q, k, v), up)
    logits = (q @ k.mT / 8**0.5).masked_fill(j > i, -math.inf)
    soft = torch.autograd.grad(logits.softmax(-1) @ v, (q, k), up)
    hard = F.one_hot(logits.argmax(-1), 6).double()
    for a, b in zip(got, (*soft, hard.mT @ up)):
        assert error(a, b) < 1e-12

def test_what_a_model_returns():
    """By default, the logits of all tokens if there are targets, or else of the last token."""
    net, idx = build("rope"), tokens(2, 16)
    logits, loss = net(idx, idx)
    none, same = net(idx, idx, return_logits=False)
    assert none is None and same == loss
    last, none = net(idx)
    assert none is None and torch.allclose(last, logits[:, -1:], atol=1e-5)

def test_the_loss_and_its_reductions():
    """Against a loop in float64. The gradient of the sum is that of the mean, times the number of
    targets. Without targets, the mean is 0, and so is its gradient."""
    net, idx = build("rope").double(), tokens(2, 16)
    y = idx.roll(-1, 1)
    y[0, 3:9] = y[1, 0] = -1
    logits = full(net, idx).tolist()
    want = torch.zeros(2, 16, dtype=torch.float64)
    for row, t in (y != -1).nonzero().tolist():
        total = sum(math.exp(logit) for logit in logits[row][t])
        want[row, t] = math.log(total) - logits[row][t][y[row, t]]
    n = 32 - 7
    gradients = {}
    for reduction, values in dict(none=want, sum=want.sum(), mean=want.sum() / n).items():
        loss = net(idx, y, reduction=reduction)[1]
        assert loss.shape == values.shape and error(loss, values) < 1e-12
        gradients[reduction] = torch.autograd.grad(loss.sum(), list(net.parameters()))
    assert (net(idx, y, reduction="none")[1][y == -1] == 0).all()
    for of_none, of_sum, of_mean in zip(*gradients.values()):
        assert error(of_none, of_sum) < 1e-12 and error(of_mean * n, of_sum) < 1e-12
    loss = net(idx, torch.full_like(idx, -1))[1]
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, list(net.parameters())))

@pytest.mark.parametrize("case", ["rope", "carope", "cope+rope"])
def test_generate(case):
    net, idx = build(case), tokens(2, 5)
    out, slow = net.generate(idx, 30, temperature=0), idx
    for _ in range(30):
        slow = torch.cat((slow, full(net, slow)[:, -1:].argmax(-1)), 1)
    assert torch.equal(out, slow)
    torch.manual_seed(0)
    drawn = net.generate(idx[:1].expand(400, -1), 1, temperature=2.0, top_k=3)[:, -1]
    top = (full(net, idx[:1])[0, -1] / 2).softmax(-1).topk(3)
    counts = torch.bincount(drawn, minlength=19)[top.indices] / 400
    assert counts.sum() == 1 and (counts - top.values / top.values.sum()).abs().max() < 0.1

@pytest.mark.parametrize("case", ["rope", "learned", "fox", "cope+carope", "expe-once"])
@pytest.mark.parametrize("context, prompt", [(5, 2), (8, 21), (1, 3)])
def test_generate_with_a_context(case, context, prompt):
    """A window that grows to `context` tokens and then loses its first half, without a cache. On
    average, the model reads at most two tokens for each that it writes."""
    net, idx = build(case), tokens(2, prompt)
    reads = []
    net.register_forward_pre_hook(lambda _, args: reads.append(args[0].size(1)))
    out = net.generate(idx, 40, temperature=0, context=context)
    assert sum(reads[1:]) <= 2 * 40
    window = want = idx
    for _ in range(40):
        while window.size(1) > context:
            window = window[:, math.ceil(context / 2) :]
        new = full(net, window)[:, -1:].argmax(-1)
        window, want = torch.cat((window, new), 1), torch.cat((want, new), 1)
    assert torch.equal(out, want)

@pytest.mark.parametrize("tie", [True, False])
def test_mfu(tie):
    """Positions are only looked up, without FLOPs, and so are tokens if lm_head is not tied."""
    net = gpt(pe="learned", tie=tie)
    n = sum(p.numel() for p in net.parameters())
    assert net.get_num_params() == n
    n -= 16 * 32 if tie else 16 * 32 + 19 * 32
    flops = 4 * 16 * (6 * n + 12 * 2 * 32 * 16)  # 4 sequences of 16 tokens
    assert math.isclose(net.estimate_mfu(4, 0.5, 1e9, 16), flops / 0.5 / 1e9)

@pytest.mark.parametrize("cuda, mps, want", [
    (True, True, "cuda:3"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_takes_the_fastest_device(monkeypatch, cuda, mps, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto") == torch.device(want)
    if not mps:
        with pytest.raises(ValueError, match="device='mps', but PyTorch sees none"):
            pick_device("mps")

# --- faults that users of other code have met -----------------------------------------------------

def test_the_loss_of_a_bfloat16_model():
    """It is computed from logits in float32. Logits in float32 are not copied."""
    net, idx = build("nope", vocab_size=300).bfloat16(), torch.randint(300, (2, 16))
    logits, loss = net(idx, idx)
    want = F.cross_entropy(logits.double().flatten(0, 1), idx.flatten())
    assert abs(loss.item() - want.item()) < 1e-5

class Reciprocal(TorchDispatchMode):
    """Divides by a number as CUDA does, by multiplying by its rounded reciprocal."""
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.div.Tensor and args[0].is_floating_point():
            x, divisor = args
            if not isinstance(divisor, torch.Tensor):
                return x * (1 / torch.tensor(divisor, dtype=x.dtype))
        return function(*args, **(kwargs or {}))

def test_exqpe_where_division_is_multiplication_by_a_reciprocal():
    """n_c is how many of the positions 0..i are c modulo l."""
    for l in (61, 3, 41):
        cfg = GPTConfig(n_head=1, n_embd=l, expe_l=l, expe_theta=0.0, expe_theta2=1.0)
        with Reciprocal():
            got = PES["exqpe"](cfg).inputs(torch.zeros(1, 900, l), torch.arange(900))[0]
        want = torch.nn.functional.one_hot(torch.arange(900) % l, l).cumsum(0)
        assert torch.equal(got, want.float())

def test_t5_at_the_borders_of_buckets():
    """Whole numbers decide, so that no rounding can move a border. Here distance 100 is half-way
    between 10 and 1000 in logarithms, which is where bucket 15 begins."""
    pe = PES["t5"](GPTConfig(n_head=1, t5_buckets=20, t5_max_distance=1000))
    with torch.no_grad():
        pe.table.copy_(torch.arange(20.0)[:, None])
    distances = torch.tensor([-3, 0, 1, 9, 10, 15, 16, 99, 100, 999, 1000, 5000])
    with Reciprocal():
        got = pe.logit_bias(torch.zeros(1), None, distances[:, None], torch.tensor([0]), None)
    assert got.flatten().tolist() == [0, 0, 1, 9, 10, 10, 11, 14, 15, 19, 19, 19]

def test_a_temperature_near_zero_is_greedy():
    net, idx = build("rope"), tokens(2, 5)
    greedy = net.generate(idx, 9, temperature=0)
    for temperature in (1e-7, 1e-39):
        assert torch.equal(net.generate(idx, 9, temperature=temperature), greedy)

# --- wrong input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, message", [
    (dict(pe="rope,alibi+alibi"), "names alibi twice"),
    (dict(pe="sinusoidal", n_embd=33, n_head=3), "n_embd=33 is odd"),
    (dict(pe="rope", n_head=16, rope_scaling="ntk", rope_factor=2.0), "ntk needs two pairs"),
    (dict(pe="rope", rope_fraction=0.4), "rope_fraction=0.4 of n_embd / n_head = 8 is 3"),
    (dict(pe="rope", rope_fraction=0.0), "is 0; it must be even and from 2 to 8"),
    (dict(pe="rope", rope_fraction=1.5), "is 12; it must be even and from 2 to 8"),
    (dict(pe="pope", mlp_width=-1), "mlp_width=-1 must not be negative"),
    (dict(pe="rope", rope_scaling="yarn", rope_factor=1e-6), "rope_factor=1e-06 is too low"),
    (dict(pe="rope", rope_scaling="yarn", rope_factor=4.0, rope_fraction=0.5), "=1, not 0.5"),
    (dict(pe="rope", rope_p=1.5), "rope_p=1.5 must be above 0, and at most 1"),
    (dict(pe="rope", rope_p=0.1), "rope_p=0.1 rotates no pair of a head"),
    (dict(pe="rope", random_positions=8), "random_positions=8 must be 0, or at least block_size="),
    (dict(pe="rope", rope_factor=4.0), "rope_scaling=none with rope_factor=4.0 does nothing"),
    (dict(pe="expe", expe_l=33), "into l = 33 of n_embd=32 dimensions"),
    (dict(pe="expe", n_embd=4), "into l = 0 of n_embd=4 dimensions"),
    (dict(pe="carope", base=1.0), "base > 1, because f starts below 1; got 1.0"),
    (dict(pe="carope", n_embd=36), "n_embd / n_head = 9 is odd"),
    (dict(pe="alibi", alibi_fraction=0.1), "alibi_fraction=0.1 gives a slope to 0 of 4 heads"),
    (dict(pe="alibi", alibi_fraction=1.3), "alibi_fraction=1.3 gives a slope to 5 of 4 heads"),
    (dict(pe="cope", cope_npos=1), "cope_npos=1 gives all keys the same position"),
    (dict(pe="t5", t5_max_distance=16), "t5_buckets=32 must be 4 or more"),
    (dict(pe="cope+roap"), "pe='roap' is unknown; choose from "),
    (dict(pe="rope,pope+rope"), "pope and rope cannot both encode q and k"),
    (dict(pe="expe+exqpe"), "expe and exqpe would write into the same dimensions"),
    (dict(pe="expe,exqpe", expe_once=True), "expe and exqpe would write into the same dimensions"),
    (dict(pe="rope,rope,rope+pope"), "is a pattern of 3 layers, but n_layer=2"),
    (dict(n_head=5), "n_head=5 must divide n_embd=32"),
    (dict(vocab_size=0), "vocab_size=0 must be positive"),
    (dict(base=math.nan), "base=nan must be positive"),
    (dict(dropout=1.5), "dropout=1.5 must be from 0"),
    (dict(norm="batchnorm"), "norm='batchnorm': choose one of layernorm, rmsnorm"),
])
def test_wrong_config(changes, message):
    with pytest.raises(model.Mistake) as error:
        gpt(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)

def test_every_option_of_a_method_is_refused_without_it():
    """As long as a class says that it reads the option."""
    for option in {option for cls in PES.values() for option in cls.reads}:
        assert option in {field.name for field in dataclasses.fields(GPTConfig)}
        for name, cls in PES.items():
            if option in cls.reads:
                model.refuse_idle_options(name, [option])
                model.refuse_idle_options(f"nope,rope+{name}", [option])
            else:
                with pytest.raises(model.Mistake, match=f"{option} does nothing for pe='{name}'"):
                    model.refuse_idle_options(name, [option])

def test_the_published_methods_name_their_options():
    """Those in the groups of GPTConfig whose headings name the methods, and base."""
    source = inspect.getsource(GPTConfig)
    for names, options in re.findall(r"\n    # ([a-z0-9_, ]+)\n((?:    \w+: .*\n)+)", source):
        first = re.findall(r"^    (\w+):", options, re.M)[0]
        for name in names.split(", "):
            assert first in PES[name].reads, (first, name)

def checkpoint(net, folder, **changes):
    """Saves a model as train.py does. `changes` are those of the options."""
    options = dataclasses.asdict(net.cfg) | changes
    folder.mkdir(exist_ok=True)
    torch.save(dict(model=net.state_dict(), optimizer={}, step=3, config=options,
                    meta={"row_length": {}}), folder / "ckpt.pt")

def test_a_trained_model(tmp_path):
    """It is the one that was saved, with the options that are changed, and without dropout."""
    net = gpt(pe="rope", dropout=0.5).eval()
    checkpoint(net, tmp_path / "a")
    idx = torch.randint(19, (2, 16))
    again, saved = load_model(tmp_path / "a")
    assert torch.equal(net(idx, idx)[0], again(idx, idx)[0]) and saved["step"] == 3
    scaled, _ = load_model(tmp_path / "a", rope_scaling="yarn", rope_factor=2.0)
    assert scaled.cfg.rope_trained == 16  # the length of the training
    with pytest.raises(ValueError, match="n_head cannot be changed after training"):
        load_model(tmp_path / "a", n_head=2)
    assert not torch.equal(net(idx, idx)[0], scaled(idx, idx)[0])

def test_weights_that_do_not_fit(tmp_path):
    for net, changes, words in (
        (gpt(pe="rope", n_embd=64), dict(n_embd=32), "size mismatch for"),
        (gpt(pe="pope"), dict(pe="rope"), "Unexpected key.*h.0.attn.pes.0.delta"),
        (tables_that_differ(), dict(cope_shared=True), "share .*pes.0.e, of which the run has sev"),
    ):
        checkpoint(net, tmp_path / "a", **changes)
        with pytest.raises(ValueError, match=words) as error:
            load_model(tmp_path / "a")
        assert "\n" not in str(error.value)

def tables_that_differ():
    net = gpt(pe="cope", cope_shared=False)
    for block in net.h:
        nn.init.normal_(block.attn.pes[0].e)
    return net

def test_a_damaged_checkpoint(tmp_path):
    net = gpt(pe="rope")
    checkpoint(net, tmp_path / "a")
    path = tmp_path / "a" / "ckpt.pt"
    content = path.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):  # a copy that was interrupted
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="ckpt.pt is damaged"):
            load_model(tmp_path / "a")
    torch.save(dict(model={}, optimizer={}, step=3, config={}, meta=print), path)
    with pytest.raises(ValueError, match="ckpt.pt is damaged"):  # loading it could run any code
        load_model(tmp_path / "a")
    torch.save({"model": {}, "config": {}}, path)  # like nanoGPT's
    with pytest.raises(ValueError, match="ckpt.pt is not a checkpoint of this train.py"):
        load_model(tmp_path / "a")
    with pytest.raises(ValueError, match="'x' is not a directory with a ckpt.pt"):
        load_model("x")
