"""Tests eval/figures.py: its numbers against float64 loops, its pictures against the numbers."""
import math
import runpy
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch

from eval import figures, methods
from model import GPT, GPTConfig


def small(**options):
    """Returns a model whose parameters are large enough for every term to matter, 23 tokens, and
    the model's parameters in float64."""
    torch.manual_seed(1)
    options = dict(block_size=16, vocab_size=19, n_layer=3, n_head=2, n_embd=16) | options
    net = GPT(GPTConfig(**options)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(1 if "ln_" in name else 0, 0.4)
    params = {key: value.double().numpy() for key, value in net.state_dict().items()}
    return net, torch.randint(19, (1, 23)), params

def record(monkeypatch, *names):
    """Returns a list that collects (name, arguments, result) of each call of these oracles."""
    calls = []
    for name in names:
        def spy(*args, name=name, f=getattr(oracles, name)):
            calls.append((name, args, f(*args)))
            return calls[-1][2]

        monkeypatch.setattr(oracles, name, spy)
    return calls

@torch.no_grad()
@pytest.mark.parametrize("options, layers", [
    (dict(pe="carope,nope,expe+rope", norm="rmsnorm", bias=False), [0, 2]),
    (dict(pe="rope", rope_fraction=0.5), [0, 1, 2]),
    (dict(pe="pope"), [0, 1, 2]),
])
def test_norms(options, layers, monkeypatch):
    """The figure shows the magnitudes of q and k at each frequency, in the layers that rotate them,
    as a mean over two texts."""
    net, idx, params = small(**options)
    texts = torch.cat((idx, idx.flip(1)))
    calls = record(monkeypatch, "score")  # for each layer and head, q and k before the rotation
    for text in texts.numpy():
        oracles.gpt(net.cfg, params, text)
    got = figures.measure(net, texts, "frequency")
    assert list(got) == layers
    for i in layers:
        for side in (0, 1):
            of_layer = [calls[n] for n in range(12) if n // 2 % 3 == i]
            y = np.concatenate([arguments[6 + side] for _, arguments, _ in of_layer])
            if "pope" not in options["pe"]:
                n = round(4 * net.cfg.rope_fraction)  # pairs that rotate
                want = np.hypot(y[:, :n], y[:, n : 2 * n])
            else:
                want = np.log(1 + np.exp(y))
            assert got[i][side].numpy() == pytest.approx(want.mean(0), rel=1e-4)

def test_periods():
    """The axis shows the periods of the model's frequencies, which rope_scaling changes."""
    pytest.importorskip("matplotlib")
    for pe, factor in (("rope", 4), ("carope,rope", 1)):  # of layer 0
        net = small(pe=pe, base=100, rope_scaling="linear", rope_factor=4)[0]
        run = SimpleNamespace(model=net, trained=16)
        figure = figures.draw_lines(run, {0: torch.ones(2, 4)}, ("queries", "keys"))
        want = [2 * math.pi * factor * 100 ** (c / 4) for c in range(4)]
        assert figure.axes[0].lines[0].get_xdata() == pytest.approx(want)

@torch.no_grad()
@pytest.mark.parametrize("options, layers", [
    (dict(pe="rope,cope+rope", cope_npos=5, cope_shared=False), [1]),
    (dict(pe="cope,nope", cope_gates="values", cope_scale_z=True, norm="rmsnorm"), [0, 2]),
    (dict(pe="cope_alibi", cope_slopes="learned"), [0, 1, 2]),
])
def test_maps(options, layers, monkeypatch):
    """The maps show gates, or attention from position alone, in the layers that have CoPE."""
    net, idx, params = small(**options)
    gates, biases = record(monkeypatch, "gates"), record(monkeypatch, "bias")
    oracles.gpt(net.cfg, params, idx[0].numpy())
    biases = [z for _, (_, name, *_), z in biases if name.startswith("cope")]
    got_gates, got_positions = (figures.measure(net, idx, name) for name in ("gates", "positions"))
    assert list(got_gates) == list(got_positions) == layers
    future = np.triu(np.ones((23, 23)), 1) > 0
    for n, (i, h) in enumerate((i, h) for i in layers for h in range(2)):
        z = np.where(future, -np.inf, biases[n])
        want = np.exp(z - z.max(1, keepdims=True))
        for got, want in ((got_gates, gates[n][2]), (got_positions, want)):
            got = got[i][h].numpy()
            assert np.isnan(got[future]).all() and want[~future].std() > 0.001
            assert np.abs(got - want)[~future].max() < 1e-3

def test_a_panel_for_each_set_of_lengths(drawn):
    """Losses, errors, and errors on two kinds of questions have their own panels. A whole split is
    left out of the losses, because its windows differ."""
    lines = []
    for config, metric, splits in (
        ("config/text.py", "loss", {"val 1x": 8, "val 2x": 16, "val": 4, "test": 8}),
        ("config/task.py", "token_error", {"val": 8, "x2": 16}),
        ("config/task.py", "token_error", {"data/other val": 8, "data/other x2": 16}),
        ("config/lookup_small.py", "token_error", {"content": 8, "content_x2": 16}),
        ("config/lookup_small.py", "token_error", {"position": 8, "position_x2": 16}),
    ):
        for split, length in splits.items():
            lines.append(dict(run="x_pope", config=config, pe="pope", split=split, trained=16,
                              length=length, metric=metric, value=10.0 + length, steps=9,
                              data=length if "position" in split else 0))
    figures.draw_by_length(lines, "x")
    axes = [ax for ax in drawn[0].axes if ax.get_visible()]
    assert [ax.get_title() for ax in axes] == [
        "text", "task", "task, data/other", "lookup, content",
        "lookup, position, on different data"]
    for ax in axes:
        assert ax.lines[0].get_xydata().tolist() == [[8, 18], [16, 26]]
        assert ax.get_xticks().tolist() == [8, 16]

def test_a_curve_has_one_style_in_all_panels(drawn):
    rows = [{"run": run, "pe": "rope", "step": step, key: 1.0}
            for run, key in (("a", "loss"), ("b", "loss"), ("b", "lr")) for step in (1, 2)]
    figures.draw_training(rows, "x")
    lines = [line for ax in drawn[0].axes for line in ax.lines]
    assert {(line.get_label(), line.get_linestyle()) for line in lines} == {("a", "-"), ("b", "--")}

def test_methods_picture(drawn, monkeypatch):
    """What depends only on i - j is constant along diagonals, for keys of one kind."""
    monkeypatch.setattr("sys.argv", ["methods"])
    runpy.run_path(methods.__file__, run_name="__main__")
    marked = [methods.TEXT[t] for t in drawn[0].axes[0].get_xticks()]
    assert "".join(marked) == "tcaatbafnrwfdoe"  # the first letters of the words
    titles = [ax.get_title() for ax in drawn[0].axes if ax.get_visible()]
    assert titles == [name for names in methods.ROWS.values() for name in names]
    first = torch.tensor([True, True, False, False, True, True, False, False, False, True, False])
    for name in titles:
        effect = methods.effect(name, first)
        assert (effect.isnan() == torch.ones(11, 11, dtype=torch.bool).triu(1)).all(), name
        same = [effect[i + 4, i] for i in range(7) if not first[i]]  # distance 4
        is_relative = torch.allclose(torch.stack(same), same[0], atol=1e-5)
        assert is_relative == (name in methods.ROWS["by i – j only"]), name

@torch.no_grad()
def test_learned_rotation():
    """The figure shows PoPE's delta, and CARoPE's frequencies, as a mean over tokens, divided by
    RoPE's."""
    net, idx, params = small(pe="carope,pope,nope")
    got = figures.measure(net, idx, "rotation")
    assert list(got) == [0, 1] and (got[1] == net.h[1].attn.pes[0].delta).all()
    x = net.h[0].ln_1(net.wte(idx[0])).double().numpy()
    b = np.log(np.expm1(10000 ** (2 / 8) - 1))  # W = 0 would give RoPE's frequencies
    f = 1 / (np.log1p(np.exp(x @ params["h.0.attn.pes.0.W"] + b)) + 1)  # (tokens, heads)
    for c in range(4):
        want = (f**c).mean(0) * 10000 ** (c / 4)
        assert got[0][:, c].numpy() == pytest.approx(want, rel=1e-4)
