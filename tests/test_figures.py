"""assets/figures.py: its numbers against float64 loops, its pictures against the numbers."""
import math

import numpy as np
import oracles
import pytest
import torch

from assets import figures
from model import GPT, GPTConfig


def small(**options):
    """A model whose parameters are large enough for every term to matter, 23 tokens, and its parameters in float64."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**dict(block_size=16, vocab_size=19, n_layer=3, n_head=2, n_embd=16) | options)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(1 if "ln_" in name else 0, 0.4)
    return net, torch.randint(19, (1, 23)), {k: v.double().numpy() for k, v in net.state_dict().items()}


def record(monkeypatch, name):
    """A list that fills with (arguments, result) of every call of that function of the oracle."""
    calls, f = [], getattr(oracles, name)

    def spy(*args):
        calls.append((args, f(*args)))
        return calls[-1][1]

    monkeypatch.setattr(oracles, name, spy)
    return calls


@pytest.mark.parametrize("options, layers", [
    (dict(pe="rope"), [0, 1, 2]),
    (dict(pe="nope,cope+rope"), [1]),
    (dict(pe="carope,nope,expe+rope", norm="rmsnorm", bias=False), [0, 2]),
    (dict(pe="pope"), [0, 1, 2]),
    (dict(pe="pope,nope", pope_softplus=False), [0, 2]),
])
def test_norms(options, layers, monkeypatch):
    net, idx, params = small(**options)
    calls = record(monkeypatch, "score")  # a call per layer and head, with q and k before rotation
    oracles.gpt(net.cfg, params, idx[0].numpy())
    got = figures.norms(net, idx)
    assert list(got) == layers
    for i in layers:
        for h in range(2):
            for side in (0, 1):
                y, T, want = calls[2 * i + h][0][6 + side], 23, []
                for c in range(8 if "pope" in options["pe"] else 4):
                    if "pope" not in options["pe"]:
                        terms = [math.sqrt(y[t, c] ** 2 + y[t, c + 4] ** 2) for t in range(T)]
                    elif net.cfg.pope_softplus:
                        terms = [math.log(1 + math.exp(y[t, c])) for t in range(T)]
                    else:
                        terms = [abs(y[t, c]) for t in range(T)]
                    want.append(sum(terms) / T)
                assert got[i][side, h].tolist() == pytest.approx(want, rel=1e-4)


def test_norms_of_two_kinds():
    net, idx, _ = small(pe="pope,rope")  # twice as many frequencies in one as in the other
    with pytest.raises(ValueError, match="shows rope, carope or pope, but the run has pe='pope,rope'"):
        figures.norms(net, idx)


@pytest.mark.parametrize("options, layers", [
    (dict(pe="cope"), [0, 1, 2]),
    (dict(pe="rope,cope+rope", cope_npos=5, share_table=False), [1]),
    (dict(pe="expe+cope", cope_gates="sep-keys"), [0, 1, 2]),
    (dict(pe="cope,nope", cope_gates="values", cope_scale_z=True, norm="rmsnorm", bias=False), [0, 2]),
    (dict(pe="alibi+cope_mlp"), [0, 1, 2]),
    (dict(pe="cope_alibi", cope_slopes="learned"), [0, 1, 2]),
])
def test_maps(options, layers, monkeypatch):
    net, idx, params = small(**options)
    gates, biases = record(monkeypatch, "gates"), record(monkeypatch, "bias")
    oracles.gpt(net.cfg, params, idx[0].numpy())
    biases = [z for (_, name, *_), z in biases if name.startswith("cope")]
    got_gates, got_positions = (figures.maps(net, idx, figure) for figure in ("gates", "positions"))
    assert list(got_gates) == list(got_positions) == layers
    for n, (i, h) in enumerate((i, h) for i in layers for h in range(2)):
        g, z, want = gates[n][1], biases[n], np.zeros((23, 23))
        for t in range(23):
            weights = [math.exp(z[t, s]) / sum(math.exp(z[t, u]) for u in range(t + 1)) for s in range(t + 1)]
            want[t, : t + 1] = [w / max(weights) for w in weights]
        assert np.abs(got_gates[i][h].numpy() - g).max() < 1e-4
        assert np.abs(got_positions[i][h].numpy() - want).max() < 1e-3 and want.std() > 0.1


def test_drawing():
    """Every array lies where its labels say."""
    plt = pytest.importorskip("matplotlib") and figures.pyplot()
    norms = {3: torch.rand(2, 4, 10), 5: torch.rand(2, 4, 10)}
    figure = figures.draw_norms(plt, norms, 100.0)
    for side, ax in enumerate(figure.axes[:2]):
        drawn = ax.images[0].get_array()
        for j, i in enumerate(norms):
            assert ax.get_xticklabels()[j].get_text() == str(i + 1)
            for h in range(4):
                assert (drawn[:, 4 * j + h] == norms[i][side, h].numpy()).all()
                assert abs(4 * j + h - ax.get_xticks()[j]) < 2
    periods = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert periods[:6] == [f"{2 * math.pi * 100 ** (c / 10):,.0f}" for c in range(6)]

    maps = {1: torch.rand(3, 30, 30), 2: torch.rand(3, 30, 30)}
    lines = figures.lines(["def", " f", ":\n", "\n", *"  pass", "\n  ", "x\n\n", *"last line, unfin"])
    assert [(first, last) for first, last, _ in lines] == [(0, 2), (3, 3), (4, 10), (11, 11), (12, 27)]
    assert "".join(text for _, _, text in lines) == "def f:\n\n  pass\n  x\n\nlast line, unfin"
    figure = figures.draw_maps(plt, maps, lines)
    for n, (i, h) in enumerate((i, h) for i in maps for h in range(3)):
        ax = figure.axes[n]
        assert ax.get_title() == f"layer {i + 1}, head {h + 1}"
        drawn = ax.images[0].get_array()
        for t in range(30):
            assert (drawn[t, : t + 1] == maps[i][h, t, : t + 1].numpy()).all() and drawn.mask[t, t + 1 :].all()
        signs = ax.collections[0]
        assert signs.get_offsets().tolist() == [[2, 2], [3, 3], [10, 10], [11, 11]]  # the last line does not end
        assert (signs.get_sizes() > 50).tolist() == [False, True, False, True]  # large: an empty line
        assert dict(zip(ax.get_yticks(), (t.get_text() for t in ax.get_yticklabels()))) == (
            {0: "def f:", 4: "pass", 12: "last line, unf"} if h == 0 else {})
    plt.close("all")
