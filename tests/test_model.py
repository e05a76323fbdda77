"""model.py against tests/oracles.py (float64 loops from the equations), against PyTorch, and against itself:
with a cache, in chunks, shifted, compiled, in bfloat16."""
import math

import numpy as np
import oracles
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model
from model import GPT, PE, PES, GPTConfig
from train import error_sums, load_weights, pick_device, scores

SMALL = dict(block_size=16, vocab_size=19, n_layer=2, n_head=4, n_embd=32)
# every method, every option that changes what is computed, and the mixes
CASES = {name: dict(pe=name) for name in PES} | {
    "llama": dict(pe="rope", norm="rmsnorm", mlp="swiglu", bias=False, tie=False),
    "rope-linear": dict(pe="rope", rope_scaling="linear", rope_factor=4.0),
    "rope-ntk": dict(pe="rope", rope_scaling="ntk", rope_factor=4.0),
    # frequencies of 41 to 0.2 turns
    "rope-yarn": dict(pe="rope", rope_scaling="yarn", rope_factor=4.0, block_size=256, base=1000.0),
    "relative-short": dict(pe="relative", rel_max=5),
    "relative-capped": dict(pe="relative", rel_max=5, rel_capped=True),
    "relative-per-layer": dict(pe="relative", rel_shared=False),
    "t5-coarse": dict(pe="t5", t5_buckets=8, t5_max_distance=13),
    "alibi-12-heads": dict(pe="alibi", n_head=12, n_embd=48),
    "cope-saturated": dict(pe="cope", cope_npos=3),
    "cope-sep-keys": dict(pe="cope", cope_gates="sep-keys"),
    "cope-values": dict(pe="cope", cope_gates="values", cope_scale_z=True),
    "cope-per-layer": dict(pe="cope", cope_shared=False),
    "cope-per-head": dict(pe="cope", cope_per_head=True),
    "cope-per-head-and-layer": dict(pe="cope", cope_per_head=True, cope_shared=False),
    "sinusoidal-unscaled": dict(pe="sinusoidal", sinusoidal_scale=False),
    "rope-yarn-longer": dict(pe="rope", rope_scaling="yarn", rope_factor=4.0, block_size=512,
                             rope_trained=128, base=1e3),
    "fox+rope": dict(pe="fox+rope"),
    "rope+alibi": dict(pe="rope+alibi"),
    "cope+cope_mlp": dict(pe="cope+cope_mlp", cope_gates="sep-keys"),  # both remember keys for their gates
    "cope+rope-values": dict(pe="cope+rope", cope_gates="values"),
    "cope_mlp-small": dict(pe="cope_mlp", cope_npos=4, cope_mlp_width=8, cope_scale_z=True),
    "cope_alibi-geometric": dict(pe="cope_alibi", cope_slopes="geometric", cope_m0=0.25),
    "cope_alibi-learned": dict(pe="cope_alibi", cope_slopes="learned"),
    "pope-uniform": dict(pe="pope", pope_delta="uniform"),
    "pope-no-delta": dict(pe="pope", pope_delta="none"),
    "pope-no-softplus": dict(pe="pope", pope_softplus=False),
    "expe-values": dict(pe="expe", expe_v=True, expe_l=5, expe_S=0.5, expe_theta=0.1, expe_scale=0.5),
    "expe-once": dict(pe="expe", expe_once=True),
    "expe-same": dict(pe="expe", expe_same=True, expe_theta=0.1),
    "expe-learned": dict(pe="expe", expe_learned="init"),
    "expe-random": dict(pe="expe", expe_learned="random"),
    "exqpe-scaled": dict(pe="exqpe", expe_l=5, expe_S=0.5, expe_theta=0.1, expe_theta2=0.3, expe_scale=0.5),
    "exqpe-learned": dict(pe="exqpe", expe_learned="init"),
    "cope+rope": dict(pe="cope+rope"),
    "cope+pope": dict(pe="cope+pope"),
    "cope+carope": dict(pe="carope+cope"),
    "cope+relative": dict(pe="cope+relative"),
    "cope+pope-sep-keys": dict(pe="pope+cope", cope_gates="sep-keys"),
    "rope-hard": dict(pe="rope", hard_attention=True),
    "cope-hard": dict(pe="cope", hard_attention=True),
    "pattern": dict(pe="rope,rope,cope+rope", n_layer=3),
    "pattern-learned": dict(pe="nope,learned+alibi", n_layer=3),
}
EVERY = pytest.mark.parametrize("case", CASES)


def build(case, **changes):
    """A model in float32 whose parameters are large enough for every term to matter."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**SMALL | (CASES[case] if isinstance(case, str) else case) | changes)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("delta"):
                p.uniform_(-2 * math.pi, 0)
            elif name.endswith(("expe_S", "expe_theta", "expe_theta2")):
                p.uniform_(0.05, 0.2)
            elif "ln_" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(std=0.3)
    return net


def tokens(B, T, seed=0):
    return torch.randint(SMALL["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


def full(net, idx, cache=None):
    with torch.no_grad():
        return net(idx, idx, cache)[0]


def hidden(net, idx, start):
    """What the blocks compute if the first token stands at position start."""
    pos = torch.arange(start, start + idx.size(1))
    with torch.no_grad():
        x = net.wte(idx)
        for pe in net.first_pe.values():
            x = pe.embed(x, pos)
        for block in net.h:
            x = block(x, pos)
        return x


def length(case):
    return 16 if "learned" in CASES[case]["pe"] else 24  # past block_size where the method can


@EVERY
def test_forward_equals_the_equations(case):
    net, idx = build(case), tokens(2, length(case))
    params = {k: v.double().numpy() for k, v in net.state_dict().items()}
    for row, logits in zip(idx, full(net, idx)):
        want = oracles.gpt(net.cfg, params, row.numpy())
        assert np.abs(logits.numpy() - want).max() < 1e-5 * max(1, np.abs(want).max())


@EVERY
def test_float64_is_computed_in_float64(case):
    net, idx = build(case).double(), tokens(1, length(case))
    want = oracles.gpt(net.cfg, {k: v.numpy() for k, v in net.state_dict().items()}, idx[0].numpy())
    assert np.abs(full(net, idx)[0].numpy() - want).max() < 1e-12 * max(1, np.abs(want).max())


@EVERY
def test_the_oracle_notices_the_encoding(case):
    """The test above would mean little if the encoding hardly mattered to the logits."""
    if case == "nope":
        return
    net, idx = build(case), tokens(1, length(case))
    params = {k: v.double().numpy() for k, v in net.state_dict().items()}
    want = oracles.gpt(net.cfg, params, idx[0].numpy())
    net.cfg.pe = "nope"
    assert np.abs(want - oracles.gpt(net.cfg, params, idx[0].numpy())).max() > 1e-2


@EVERY
def test_cache_equals_full_forward(case):
    net, idx = build(case), tokens(2, length(case))
    want = full(net, idx)
    for cuts in (range(1, idx.size(1)), (5, 6, 13)):  # token by token, and in pieces
        cache, got = net.new_cache(), []
        for piece in idx.tensor_split(list(cuts), dim=1):
            got.append(full(net, piece, cache=cache))
        assert (torch.cat(got, 1) - want).abs().max() < 1e-4


@EVERY
def test_no_position_sees_the_future(case):
    net, idx = build(case), tokens(1, length(case))
    other = idx.clone()
    other[0, 9:] = (other[0, 9:] + 7) % SMALL["vocab_size"]
    a, b = full(net, idx), full(net, other)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.allclose(a[:, 9], b[:, 9])


@EVERY
def test_shift_of_all_positions(case):
    """It changes what the equations say it changes: nothing for relative methods."""
    net, idx = build(case, block_size=64), tokens(1, 12)
    params = {k: v.double().numpy() for k, v in net.state_dict().items()}
    want = oracles.gpt(net.cfg, params, idx[0].numpy(), start=29)
    with torch.no_grad():
        got = net.lm_head(net.ln_f(hidden(net, idx, 29)))[0]
    assert np.abs(got.numpy() - want).max() < 2e-5 * max(1, np.abs(want).max())


@EVERY
def test_gradients_reach_every_parameter(case):
    net, idx = build(case), tokens(2, 16)
    net(idx, idx.roll(-1, 1))[1].backward()
    assert [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-6] == []


@EVERY
def test_compiles_without_a_graph_break(case):
    torch._dynamo.reset()
    net, idx = build(case), tokens(2, 16)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    loss = compiled(idx, idx)[1]
    loss.backward()
    assert abs(loss.item() - net(idx, idx)[1].item()) < 1e-5


@pytest.mark.parametrize("pe", ["rope", "pope", "carope", "expe", "nope", "alibi", "fox", "cope+rope"])
def test_one_graph_serves_many_lengths(pe):
    """One graph for the first length, one for all others. Past eight graphs PyTorch gives up."""
    torch._dynamo.reset()
    net, graphs = build(dict(pe=pe)).double(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    for T in (16, 24, 130, 41, 300):
        idx = tokens(2, T)
        assert (compiled(idx, idx)[0] - net(idx, idx)[0]).abs().max() < 1e-5
    assert len(graphs) == 2


def test_compiles_to_machine_code():
    net, idx = build("pope", n_layer=1), tokens(2, 16)
    want = net(idx, idx)
    want[1].backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    got = torch.compile(net)(idx, idx)
    got[1].backward()
    assert (got[0] - want[0]).abs().max() < 1e-4
    assert max((p.grad - g).abs().max() for p, g in zip(net.parameters(), grads)) < 1e-4


@EVERY
def test_four_times_the_trained_length(case):
    net, idx = build(case), tokens(1, 64)
    if net.limit < 64:
        with pytest.raises(ValueError, match=r"has 16 positions, got 64; shorten the input"):
            net(idx)
    else:
        assert net(idx, idx)[1].isfinite()


# --- attention ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(getattr(self, "numel", 0), t.numel())
        return out


@pytest.mark.parametrize("pe", ["cope", "relative", "t5", "alibi", "cope+rope"])
def test_dense_attention_holds_one_chunk_of_queries(pe):
    T = 5 * model.CHUNK + 3
    net, idx = build(dict(pe=pe, n_layer=1, block_size=T)), tokens(1, T)
    with Largest() as seen:
        full(net, idx)
    assert seen.numel <= model.CHUNK * T * 4  # 4 heads


@pytest.mark.parametrize("pe, names", [
    ("rope+alibi", {"k", "v"}), ("cope+rope", {"k", "v"}), ("fox", {"k", "v", "log_f"}),
    ("cope+carope", {"k", "v", "phi"}),
])
def test_what_the_cache_holds(pe, names):
    """Keys and values, and what a PE needs besides. The keys before rotation are not among it."""
    net = build(dict(pe=pe))
    cache = net.new_cache()
    full(net, tokens(1, 8), cache)
    own = [name for value in cache[1].values() if isinstance(value, dict) for name in value]
    assert {name for name in cache[1] if isinstance(name, str)} | set(own) == names


def test_a_bias_is_told_the_positions_of_queries_and_keys():
    """Also in a piece that follows a cache: FIRE, for one, divides by them."""
    net, seen = build("alibi", n_layer=1), []
    bias = net.h[0].attn.biases[0]
    bias.logit_bias = lambda q, logits, i, j, f: seen.append((i.tolist(), j.tolist())) or 0.0
    cache = net.new_cache()
    full(net, tokens(1, 3), cache)
    full(net, tokens(1, 2), cache)
    assert seen == [([[0], [1], [2]], [0, 1, 2]), ([[3], [4]], [0, 1, 2, 3, 4])]


@pytest.mark.parametrize("case", ["rope", "pope", "cope+rope", "expe", "fox"])
def test_a_layer_keeps_what_it_computes_when_asked(case):
    net, idx = build(case), tokens(2, 24)
    want, attn = full(net, idx), net.h[1].attn
    attn.kept = {}
    assert (full(net, idx) - want).abs().max() < 1e-4
    kept = attn.kept
    assert kept["x"].shape == (2, 24, 32) and kept["q"].shape == kept["k"].shape == (2, 4, 24, 8)
    y = (kept["weights"] @ kept["v"]).transpose(1, 2).flatten(2)  # the values, weighted
    attn.kept = None
    with torch.no_grad():
        assert (attn.c_proj(y) - attn(kept["x"], torch.arange(24))).abs().max() < 1e-4
    q, k = kept["q"], kept["k"]
    if case in ("expe", "fox"):  # no rotation
        assert (kept["logits"] - q @ k.mT / 8**0.5).abs().max() < 1e-4
    assert (kept["weights"].sum(-1) - 1).abs().max() < 1e-5
    assert kept["weights"].triu(1).abs().max() == 0


def test_fox_keeps_its_digits_over_8192_tokens():
    """In pieces through the cache, against float64."""
    fox, x = build("fox", n_layer=1).h[0].attn.pes[0], torch.randn(1, 8192, 32)
    with torch.no_grad():
        log_f = torch.nn.functional.logsigmoid(x.double() @ fox.W.double() + fox.b.double()).mT
        total, cache, worst = log_f.cumsum(-1), {}, 0.0
        for begin in range(0, 8192, 128):
            i, j = torch.arange(begin, begin + 128)[:, None], torch.arange(begin + 128)
            features = fox.key_features(x[:, begin : begin + 128], None, None, cache)
            got = fox.logit_bias(torch.zeros(1), None, i, j, features)
            near = ((j <= i) & (i - j < 64)).expand_as(got)
            want = total[:, :, i[:, 0], None] - total[:, :, None, j]
            worst = max(worst, (got - want)[near].abs().max().item())
    assert worst < 5e-5  # from the start of the text on, sums are off by 6e-4


def test_chunks_do_not_change_the_result(monkeypatch):
    for case in ("cope", "relative-short", "t5", "cope+rope"):
        net, idx = build(case).double(), tokens(2, 23)  # float32 rounds by the machine, by 3e-5 on one
        want = full(net, idx)
        monkeypatch.setattr(model, "CHUNK", 5)
        assert (full(net, idx) - want).abs().max() < 1e-11
        monkeypatch.undo()


def test_dense_equals_fused_attention():
    """A bias of zero, so that the two paths compute the same softmax."""
    net, idx = build("rope"), tokens(2, 16)
    want = full(net, idx)
    for block in net.h:
        block.attn.biases = [PE(net.cfg)]
    assert (full(net, idx) - want).abs().max() < 1e-5


def test_attention_dropout_on_both_paths():
    for pe in ("rope", "alibi"):
        net, idx = build(dict(pe=pe, dropout=0.5)), tokens(1, 16)
        assert torch.equal(full(net, idx), full(net, idx))  # eval: none
        net.train()
        torch.manual_seed(0)
        a = full(net, idx)
        assert not torch.equal(a, full(net, idx))
        torch.manual_seed(0)
        assert torch.equal(a, full(net, idx))
        weights, attn = [], net.h[0].attn
        attn.biases = [] if pe == "rope" else [PE(net.cfg)]
        # uniform attention: dropout shows as a mean of 1 with a spread
        q, v = torch.zeros(1, 4, 8, 8), torch.ones(1, 4, 8, 8)
        for _ in range(200):
            weights.append(attn.attention(q, q, v, None, torch.arange(8), {}))
        weights = torch.stack(weights)
        assert 0.9 < weights.mean() < 1.1 and weights.std() > 0.2


# --- single methods -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_head", [1, 4, 16])
def test_carope_starts_as_rope(n_head):
    torch.manual_seed(0)
    cfg = SMALL | dict(block_size=64, n_head=n_head)
    rope, carope = (GPT(GPTConfig(**cfg | dict(pe=pe))).eval() for pe in ("rope", "carope"))
    carope.load_state_dict(rope.state_dict(), strict=False)  # all but W, which stays zero
    with torch.no_grad():
        for net in (rope, carope):
            for p in net.h.parameters():
                if p.dim() == 2 and p.shape != (32, n_head):
                    p.mul_(15)
    idx = tokens(1, 64)
    assert (full(rope, idx) - full(carope, idx)).abs().max() < 1e-4


def test_carope_phase_does_not_drift_in_the_cache():
    """Token by token for 8192 tokens, against one sum in float64."""
    encoding, T = build("carope", n_layer=1).h[0].attn.pes[0], 8192
    x, q = torch.randn(1, T, 32), torch.ones(1, 4, T, 8)
    want = encoding.double().rotate(q.double(), q.double(), x.double(), torch.arange(T), {})[0]
    cache, encoding = {}, encoding.float()
    for t in range(T):
        piece = slice(t, t + 1)
        got = encoding.rotate(q[:, :, piece], q[:, :, piece], x[:, piece], torch.tensor([t]), cache)[0]
    assert (got - want[:, :, -1:]).abs().max() < 7e-4  # without modulo: 15e-4 to 27e-4


def test_alibi_slopes_of_the_paper():
    def slopes(H):
        return model.alibi_slopes(H, torch.zeros(1)).flatten().tolist()

    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(1) == [2.0**-8]
    eight, sixteen = slopes(8), slopes(16)
    assert slopes(12) == eight + sixteen[0:8:2]  # every other one of the next power of two
    assert slopes(6) == slopes(4) + slopes(8)[0:4:2]


def test_pope_delta_is_bounded_but_never_frozen():
    net = GPT(GPTConfig(**SMALL | dict(pe="pope")))
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
    start = GPT(GPTConfig(**SMALL | dict(pe="pope", pope_delta="uniform"))).h[0].attn.pes[0].delta
    assert start.min() < -4 and start.max() < 0 and -4.2 < start.mean() < -2


def test_phases_are_float32_in_a_bfloat16_model():
    """Bfloat16 has 8 bits: position 4001 would be 4000, and the phase of RoPE's first pair wrong by a
    radian."""
    for pe in ("rope", "carope", "pope"):
        encoding = build(pe).bfloat16().h[0].attn.pes[0]
        theta = [10000 ** (-2 * c / 8) for c in range(4)]
        if pe == "pope":
            theta = [10000 ** (-c / 8) for c in range(8)]
        for n in (4001, 9999):
            # CARoPE's phase is a sum over the tokens so far, of frequencies as RoPE's where x = 0
            T = n if pe == "carope" else 1
            q, x = torch.ones(1, 4, T, 8).bfloat16(), torch.zeros(1, T, 32).bfloat16()
            if pe != "pope":
                want = [math.cos(n * t) - math.sin(n * t) for t in theta]
                want += [math.sin(n * t) + math.cos(n * t) for t in theta]
            else:
                phase = [n * t + x for t, x in zip(theta, encoding.delta[0].tolist())]
                mu = math.log1p(math.e)
                want = [mu * math.cos(p) for p in phase] + [mu * math.sin(p) for p in phase]
            k = encoding.rotate(q, q, x, torch.tensor([n]), {})[1]
            assert np.abs(k[0, 0, -1].detach().double().numpy() - want).max() < 0.02


def test_carope_phase_is_float32_under_autocast():
    net = build("carope")
    x, q, pos = torch.randn(1, 2000, 32), torch.ones(1, 4, 2000, 8), torch.arange(2000)
    want = net.h[0].attn.pes[0].rotate(q, q, x, pos, {})[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = net.h[0].attn.pes[0].rotate(q, q, x, pos, {})[0]
    assert (got - want).abs().max() < 1e-5


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


def test_shared_tables():
    for shared in (True, False):
        options = dict(pe="cope+relative", cope_shared=shared, rel_shared=not shared)
        net = GPT(GPTConfig(**SMALL | options))
        assert len({id(b.attn.pes[0].e) for b in net.h}) == (1 if shared else 2)
        assert len({id(b.attn.pes[1].a) for b in net.h}) == (2 if shared else 1)
    net = GPT(GPTConfig(**SMALL | dict(pe="cope", cope_gates="sep-keys")))
    assert len({id(b.attn.pes[0].W_g) for b in net.h}) == 2  # projections are each layer's own
    assert len({id(b.attn.pes[0].table) for b in GPT(GPTConfig(**SMALL | dict(pe="t5"))).h}) == 1


def test_biases_start_at_zero_and_vectors_small():
    """With the weights of `nope` a fresh T5 or CoPE computes the same; parameters that are no bias
    start as small as embeddings do."""
    plain, idx = build("nope"), tokens(2, 16)
    for changes in (dict(pe="t5"), dict(pe="cope"), dict(pe="cope_alibi", cope_slopes="learned")):
        net = GPT(GPTConfig(**SMALL | changes)).eval()
        net.load_state_dict(plain.state_dict(), strict=False)
        assert (full(net, idx) - full(plain, idx)).abs().max() < 1e-5
    for pe, name in (("relative", "a"), ("cope_mlp", "W2")):
        vectors = getattr(GPT(GPTConfig(**SMALL | dict(pe=pe, block_size=500))).h[0].attn.pes[0], name)
        assert abs(vectors.std() - 0.02) < 0.003


def test_learned_expe_has_one_set_of_constants():
    """For all blocks (its paper: "only two learned parameters"), starting from the given values or
    from random ones."""
    for pe, given in (("expe", dict(S=0.5, theta=0.25)), ("exqpe", dict(S=0.5, theta=0.25, theta2=0.125))):
        options = SMALL | dict(pe=pe) | {f"expe_{name}": value for name, value in given.items()}
        fixed, init, random = (
            GPT(GPTConfig(**options | dict(expe_learned=how))) for how in ("no", "init", "random")
        )
        count = fixed.get_num_params() + len(given)
        assert init.get_num_params() == random.get_num_params() == count
        start, drawn = (
            {name: getattr(net.h[1].attn.pes[0], f"expe_{name}").item() for name in given}
            for net in (init, random)
        )
        assert start == given and len({*given.values(), *drawn.values()}) == 2 * len(given)


# --- the GPT around them --------------------------------------------------------------------------


def test_dropout_on_embeddings_and_both_branches():
    net, seen = build(dict(pe="nope", dropout=0.25, n_layer=1)).train(), []
    net.h[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for module in (net.h[0].attn, net.h[0].mlp):
        module.register_forward_hook(lambda module, args, out: seen.append(out))
    net(tokens(8, 16))
    assert len(seen) == 3 and all(abs((x == 0).float().mean() - 0.25) < 0.04 for x in seen)


def test_optimizer_groups():
    net = GPT(GPTConfig(**SMALL | dict(pe="learned")))
    decay, rest = (g["params"] for g in net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups)
    # as GPT-2 is trained: matrices and embeddings decay, biases and norms do not
    assert {id(p) for p in decay} == {id(p) for p in net.parameters() if p.dim() >= 2}
    assert {id(p) for p in rest} == {id(p) for p in net.parameters() if p.dim() < 2}
    for case in CASES:
        net = GPT(GPTConfig(**SMALL | CASES[case]))
        groups = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups
        assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
        decay = {id(p) for p in groups[0]["params"]}
        table = [p for n, p in net.named_parameters() if ".pes." in n and "W_g" not in n and "wpe" not in n]
        assert not any(id(p) in decay for p in table)
        assert sum(len(g["params"]) for g in groups) == len(list(net.parameters()))


def test_a_methods_layers_start_as_gpt2s_and_its_parameters_as_it_says(monkeypatch):
    class Own(PE):
        def __init__(self, cfg, shared_from=None):
            super().__init__(cfg)
            self.layer, self.table = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.full((4, 4), 5.0))

    monkeypatch.setitem(PES, "own", Own)
    net = GPT(GPTConfig(**SMALL | dict(pe="own")))
    own = net.h[1].attn.pes[0]
    assert (own.table == 5).all() and abs(own.layer.weight.std() - 0.02) < 2e-3
    decay = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups[0]["params"]
    assert {id(own.layer.weight)} == {id(p) for p in own.parameters()} & {id(p) for p in decay}


def test_initialisation_and_tying():
    net = GPT(GPTConfig(vocab_size=500, n_layer=8, n_head=2, n_embd=64, pe="nope"))
    assert net.lm_head.weight is net.wte.weight
    assert abs(net.wte.weight.std() - 0.02) < 1e-3 and abs(net.h[0].mlp.c_fc.weight.std() - 0.02) < 1e-3
    for c_proj in (net.h[3].mlp.c_proj, net.h[3].attn.c_proj):
        assert abs(c_proj.weight.std() - 0.02 / 4) < 3e-4 and (c_proj.bias == 0).all()
    assert GPT(GPTConfig(**SMALL | dict(tie=False))).lm_head.weight.shape == (19, 32)
    assert GPT(GPTConfig(**SMALL | dict(mlp="swiglu"))).h[0].mlp.c_proj.weight.shape == (32, 128)
    assert GPT(GPTConfig(**SMALL | dict(mlp="swiglu", mlp_width=48))).h[0].mlp.c_proj.weight.shape == (32, 48)


def test_hard_attention_has_the_gradient_of_the_softmax():
    torch.manual_seed(0)
    attn = build("rope-hard").h[0].attn
    q, k, v = (torch.randn(1, 3, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    up = torch.randn(1, 3, 6, 8, dtype=torch.float64)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    got = torch.autograd.grad(attn.attend(q, k, v, [], q, i, j), (q, k, v), up)
    logits = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1) > 0, -math.inf)
    soft = torch.autograd.grad(logits.softmax(-1) @ v, (q, k), up)
    hard = torch.nn.functional.one_hot(logits.argmax(-1), 6).double()
    for a, b in zip(got, (*soft, hard.mT @ up)):
        assert (a - b).abs().max() < 1e-12 * b.abs().max()


def test_error_sums_against_a_count_by_hand():
    net, idx = build("rope"), tokens(5, 9, seed=3)
    targets = tokens(5, 9, seed=4)
    targets[0, 2:] = targets[1, ::2] = targets[2] = -1  # a row without a target, and a batch of it alone
    with torch.no_grad():
        logits = net(idx, idx)[0].double()
    targets[3] = logits[3].argmax(-1)  # a row that is right
    loss, n, wrong, wrong_rows = 0.0, 0, 0, 0
    for row in range(5):
        errors = 0
        for t in range(9):
            y = int(targets[row, t])
            if y != -1:
                n += 1
                loss += math.log(sum(math.exp(v) for v in logits[row, t].tolist())) - logits[row, t, y].item()
                errors += int(logits[row, t].argmax()) != y
        wrong += errors
        wrong_rows += errors > 0
    sums = sum(error_sums(net, idx[part], targets[part]) for part in (slice(2), slice(2, 3), slice(3, 5)))
    assert sums[1:].tolist() == [n, wrong, wrong_rows, 5] and sums[0].item() == pytest.approx(loss, rel=1e-5)
    ppl = pytest.approx(math.exp(loss / n), rel=1e-4)
    assert scores(sums, masked=False) == dict(loss=sums[0].item() / n, ppl=ppl)
    found = scores(sums, masked=True)
    assert (found["token_error"], found["sequence_error"]) == (100 * wrong / n, 100 * wrong_rows / 5)


def test_loss_ignores_masked_targets():
    net, idx = build("rope"), tokens(2, 16)
    targets = idx.roll(-1, 1)
    targets[0, 3:] = -1
    logits, loss = net(idx, targets)
    logp = logits.double().log_softmax(-1)
    terms = [-logp[b, t, targets[b, t]].item() for b in range(2) for t in range(16) if targets[b, t] >= 0]
    assert abs(loss.item() - sum(terms) / len(terms)) < 1e-5
    assert net(idx, torch.full_like(idx, -1))[1] == 0  # no target at all
    last, none = net(idx)
    assert none is None and torch.allclose(last, logits[:, -1:], atol=1e-5)


@pytest.mark.parametrize("case", ["rope", "pope", "carope", "cope+rope"])
def test_generate(case):
    net, idx = build(case), tokens(2, 5)
    out, slow = net.generate(idx, 30, temperature=0), idx
    for _ in range(30):
        slow = torch.cat((slow, full(net, slow)[:, -1:].argmax(-1)), 1)
    assert torch.equal(out, slow)
    torch.manual_seed(0)
    drawn = net.generate(idx[:1].expand(400, -1), 1, temperature=2.0, top_k=3)[:, -1]
    p = (full(net, idx[:1])[0, -1] / 2).softmax(-1)
    top = p.topk(3)
    counts = torch.bincount(drawn, minlength=19) / 400
    assert set(drawn.tolist()) <= set(top.indices.tolist())
    assert (counts[top.indices] - top.values / top.values.sum()).abs().max() < 0.1


def test_mfu():
    net = GPT(GPTConfig(**SMALL | dict(pe="learned")))
    n = net.get_num_params()
    assert n == net.get_num_params(non_embedding=False) - 16 * 32
    flops = 4 * 16 * (6 * n + 12 * 2 * 32 * 16)  # 4 sequences of 16 tokens
    assert math.isclose(net.estimate_mfu(4, 0.5, 1e9), flops / 0.5 / 1e9)
    assert math.isclose(net.estimate_mfu(4, 0.5), flops / 0.5 / 312e12)  # the A100's data sheet


def test_auto_takes_the_fastest_device(monkeypatch):
    for cuda, mps, want in ((True, True, "cuda:3"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        assert pick_device("auto", 3) == torch.device(want)


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, message", [
    (dict(pe="rotary"), "pe='rotary' is unknown; choose one of "),
    (dict(pe="cope+roap"), "pe='roap' is unknown; choose one of rope, "),
    (dict(pe="rope,pope+rope"), "pe='rope,pope+rope': pope and rope would both rotate q and k of one "
                                "layer; keep one of them"),
    (dict(n_head=5), "n_embd=32 is not divisible by n_head=5; change one of them"),
    (dict(pe="rope", n_embd=36), "n_embd / n_head = 9 is odd; change n_head"),
    (dict(pe="carope", n_embd=36), "n_embd / n_head = 9 is odd; change n_head"),
    (dict(pe="rope,rope,rope+pope"), "is a pattern of 3 layers, but n_layer=2; shorten it"),
    (dict(pe="rope", base=0.0), "base=0.0 must be positive"),
    (dict(pe="rope", base=math.nan), "base=nan must be positive"),
    (dict(pe="rope", rope_scaling="linear", rope_factor=-4.0), "rope_factor=-4.0 must be positive"),
    (dict(pe="cope_mlp", cope_mlp_width=0), "cope_mlp_width=0 must be positive"),
    (dict(norm="batchnorm"), "norm='batchnorm' is unknown; choose one of layernorm, rmsnorm"),
    (dict(mlp="relu"), "mlp='relu' is unknown; choose one of gelu, swiglu"),
    (dict(pe="rope", rope_scaling="cubic"), "rope_scaling='cubic' is unknown"),
    (dict(pe="rope", rope_factor=4.0),
     "rope_scaling='none' with rope_factor=4.0 does nothing; set both, as in rope_scaling=ntk,rope_factor=4"),
    (dict(pe="rope", rope_scaling="yarn"), "rope_scaling='yarn' with rope_factor=1.0 does nothing"),
    (dict(pe="t5", t5_max_distance=16),
     "t5_buckets=32 must be 4 or more, and half of it less than t5_max_distance=16"),
    (dict(pe="t5", t5_buckets=2), "t5_buckets=2 must be 4 or more"),
    (dict(pe="cope", cope_gates="queries"),
     "cope_gates='queries' is unknown; choose one of values, keys, sep-keys"),
    (dict(pe="cope_alibi", cope_slopes="flat"), "cope_slopes='flat' is unknown"),
    (dict(pe="pope", pope_delta="one"), "pope_delta='one' is unknown; choose one of none, zero, uniform"),
    (dict(pe="expe", expe_learned="yes"), "expe_learned='yes' is unknown"),
])
def test_wrong_config(changes, message):
    with pytest.raises(ValueError) as error:
        GPT(GPTConfig(**SMALL | changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_checkpoint_of_another_architecture():
    ours, theirs = build("rope"), build("rope", n_embd=64)
    different = "out/x holds another architecture: size mismatch for wte.weight"
    with pytest.raises(ValueError, match=different):
        load_weights(ours, dict(model=theirs.state_dict()), "out/x")
    with pytest.raises(ValueError, match="Unexpected key.*h.0.attn.pes.0.delta"):
        load_weights(ours, dict(model=build("pope").state_dict()), "out/x")
