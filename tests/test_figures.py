"""eval/figures.py: its numbers against float64 loops, its pictures against the numbers."""
import math
import runpy
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch

from eval import figures, methods, results
from model import GPT, PES, GPTConfig


def small(**options):
    """A model whose parameters are large enough for every term to matter, 23 tokens, and its
    parameters in float64."""
    torch.manual_seed(1)
    options = dict(block_size=16, vocab_size=19, n_layer=3, n_head=2, n_embd=16) | options
    net = GPT(GPTConfig(**options)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(1 if "ln_" in name else 0, 0.4)
    params = {key: value.double().numpy() for key, value in net.state_dict().items()}
    return net, torch.randint(19, (1, 23)), params

def record(monkeypatch, *names):
    """A list that fills with (name, arguments, result) of each call of these oracles."""
    calls = []
    for name in names:
        def spy(*args, name=name, f=getattr(oracles, name)):
            calls.append((name, args, f(*args)))
            return calls[-1][2]

        monkeypatch.setattr(oracles, name, spy)
    return calls

@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be saved."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(figures, "save", lambda figure, path: found.append(figure))
    return found

# learned attention patterns

@torch.no_grad()
@pytest.mark.parametrize("options, layers", [
    (dict(pe="nope,cope+rope"), [1]),
    (dict(pe="carope,nope,expe+rope", norm="rmsnorm", bias=False), [0, 2]),
    (dict(pe="rope", rope_fraction=0.5), [0, 1, 2]),
    (dict(pe="pope"), [0, 1, 2]),
    (dict(pe="pope,nope", pope_mu="identity"), [0, 2]),
])
def test_norms(options, layers, monkeypatch):
    """Magnitudes of q and k at each frequency, in the layers that rotate them."""
    net, idx, params = small(**options)
    calls = record(monkeypatch, "score")  # a call per layer and head, with q and k before rotation
    oracles.gpt(net.cfg, params, idx[0].numpy())
    got = figures.measure(net, idx, "frequency")
    assert list(got) == layers
    for i in layers:
        for side in (0, 1):
            y = np.concatenate([calls[2 * i + head][1][6 + side] for head in (0, 1)])
            if "pope" not in options["pe"]:
                n = round(4 * net.cfg.rope_fraction)  # pairs that rotate
                want = np.hypot(y[:, :n], y[:, n : 2 * n])
            else:
                want = np.log(1 + np.exp(y)) if net.cfg.pope_mu == "softplus" else np.abs(y)
            assert got[i][side].numpy() == pytest.approx(want.mean(0), rel=1e-4)

@torch.no_grad()
@pytest.mark.parametrize("options, layers", [
    (dict(pe="cope"), [0, 1, 2]),
    (dict(pe="rope,cope+rope", cope_npos=5, cope_shared=False), [1]),
    (dict(pe="expe+cope", cope_gates="sep-keys"), [0, 1, 2]),
    (dict(pe="cope,nope", cope_gates="values", cope_scale_z=True, norm="rmsnorm"), [0, 2]),
    (dict(pe="cope_alibi", cope_slopes="learned"), [0, 1, 2]),
])
def test_maps(options, layers, monkeypatch):
    """Gates, and attention from position alone, in the layers that have CoPE."""
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

@torch.no_grad()
@pytest.mark.parametrize("options", [
    dict(pe="pope"), dict(pe="fox"), dict(pe="relative"),
    dict(pe="cope+rope,nope,rope+alibi", norm="rmsnorm", bias=False),
    dict(pe="learned", hard_attention=True),
], ids=str)
def test_weights_by_distance(options, monkeypatch):
    """The oracle's attention weights, averaged over each diagonal."""
    net, idx, params = small(**options | dict(block_size=23))
    calls = record(monkeypatch, "score", "bias")
    texts, want = torch.cat((idx, idx.flip(1))), np.zeros((3, 2, 23))
    for text in texts.tolist():
        calls.clear()
        oracles.gpt(net.cfg, params, text)
        logits = []  # of layer 1 head 1, layer 1 head 2, layer 2 head 1, ...
        for name, _, values in calls:
            if name == "score":
                logits.append(values)
            else:
                logits[-1] = logits[-1] + values
        for n, a in enumerate(logits):
            a = np.where(np.tri(23), a, -np.inf)
            e = np.exp(a - a.max(1, keepdims=True))
            weights = e == 1 if net.cfg.hard_attention else e / e.sum(1, keepdims=True)
            want[n // 2, n % 2] += [weights.diagonal(-d).mean() / 2 for d in range(23)]
    got = figures.measure(net, texts, "distance")
    assert list(got) == [0, 1, 2]
    for layer in range(3):
        assert np.abs(got[layer].numpy() - want[layer]).max() < 1e-4

def test_a_line_for_each_head_and_side():
    """24 heads can be told apart; each point is a mean over an eighth of an octave."""
    pytest.importorskip("matplotlib")
    run = SimpleNamespace(trained=16, model=SimpleNamespace(cfg=GPTConfig(base=100.0)))
    weights = {0: torch.rand(24, 64), 1: torch.rand(24, 64)}
    figure = figures.draw_distances(run, weights, "", [])
    for ax, i in zip(figure.axes, weights):
        *heads, trained = ax.lines
        assert ax.get_title() == f"layer {i + 1}" and list(trained.get_xdata()) == [16, 16]
        assert len({(line.get_color(), line.get_linestyle()) for line in heads}) == 24
        for h, line in list(enumerate(heads))[::8]:
            x, y = line.get_xdata(), line.get_ydata()
            assert list(x[:9]) == [1, 2, 3, 4, 5, 6, 7, 8, 9] and list(x[-4:]) == [46, 50, 55, 60]
            for first, after, mean in zip(x, [*x[1:], 65], y, strict=True):
                assert mean == pytest.approx(weights[i][h, first - 1 : after - 1].mean().item())
    norms = {3: torch.rand(2, 10), 5: torch.rand(2, 10)}
    figure = figures.draw_norms(run, norms, "", [])
    for ax, (i, sides) in zip(figure.axes, norms.items()):
        assert ax.get_title() == f"layer {i + 1}"
        for line, name, side in zip(ax.lines, ("queries", "keys"), sides):
            assert line.get_label() == name and line.get_ydata() == pytest.approx(side.tolist())
            want = [2 * math.pi * 100 ** (c / 10) for c in range(10)]
            assert line.get_xdata() == pytest.approx(want)

def test_maps_show_their_text():
    """A sign marks the end of a line. --heads picks maps and their order, and these have room for
    the tokens."""
    pytest.importorskip("matplotlib")
    maps = {1: torch.rand(3, 12, 12), 2: torch.rand(3, 12, 12)}
    words = ["def", " f", ":\n", "\n", *"  pass", "x\n\n", "$"]
    figure = figures.draw_maps(None, maps, "", words)
    for ax, (i, h) in zip(figure.axes, ((i, h) for i in maps for h in range(3))):
        assert ax.get_title() == f"layer {i + 1}, head {h + 1}"
        assert (ax.images[0].get_array() == maps[i][h].numpy()).all()
        assert ax.collections[0].get_offsets().tolist() == [[2, 2], [3, 3], [10, 10]]
        assert len(ax.get_xticks()) < 12  # some indices
    figure = figures.draw_maps(None, maps, "3.1,2.3", words)
    for ax in figure.axes[:2]:
        for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
            shown = [label.get_text() for label in labels]
            assert shown == ["def", "·f", ":↵", "↵", "·", "·", *"pass", "x↵↵", r"\$"]
    assert [ax.get_title() for ax in figure.axes[:2]] == ["layer 3, head 1", "layer 2, head 3"]
    assert (figure.axes[0].images[0].get_array() == maps[2][0].numpy()).all()
    with pytest.raises(ValueError, match="heads='1.1' is unknown; choose one of 3.1, 2.1, "):
        figures.draw_maps(None, maps, "3.1,1.1", words)

# curves

def test_labels():
    """The label is what differs. The seed does not count, options do."""
    def check(pes, *wanted):
        rows = [dict(run=run, pe=pe) for run, pe in pes.items()]
        assert list(results.labels(rows).values()) == list(wanted)

    check({"out/quickstart_pope": "pope"}, "pope")
    check({"out/a_rope": "rope", "out/a_rope_seed1": "rope",
           "out/a_rope@rope_scaling=ntk,rope_factor=2": "rope"},
          "rope", "rope", "rope (rope_scaling=ntk, rope_factor=2)")
    check({"out/a_cope": "cope", "out/a_cope_16": "cope", "out/a_rope": "rope"},
          "cope", "cope_16", "rope")
    check({"here/a_rope": "rope", "there/a_rope": "rope"}, "here/a_rope", "there/a_rope")

def lines_of(config, values, **more):
    """Lines of results.jsonl: {run: {(split, length): {metric: value}}}."""
    for run, splits in values.items():
        pe = next(pe for pe in ("pope", "rope", "learned") if pe in run)
        for (split, length), metrics in splits.items():
            for metric, value in metrics.items():
                yield dict(run=run, config=config, pe=pe, split=split, trained=16, length=length,
                           metric=metric, value=value, steps=9) | more

def test_curves_of_seeds_and_methods(drawn):
    """A curve for each label: the mean of its seeds, in a band from the lowest to the highest, in
    its method's colour. The thin line: its window losses."""
    losses = {"x_pope": [2.0, 3.0], "x_pope_seed2": [4.0, 4.0], "x_rope": [5.0, 7.0],
              "x_rope@rope_factor=2": [1.0, 1.0], "x_learned": [6.0]}
    values = {}
    for run, (first, *second) in losses.items():
        values[run] = {("val 1x", 16): dict(loss=first, window_loss=0.5),
                       ("val 2x", 32): dict(window_loss=0.5) | {"loss": y for y in second}}
    figures.draw_by_length(list(lines_of("config/x.py", values)), "x")
    (ax,) = drawn[0].axes
    assert ax.get_title() == "x"
    found = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert {label: line.get_xydata().tolist() for label, line in found.items()} == {
        "pope": [[16, 3], [32, 3.5]], "rope": [[16, 5], [32, 7]],
        "rope (rope_factor=2)": [[16, 1], [32, 1]], "learned": [[16, 6]]}
    colors = [figures.COLORS[pe] for pe in ("pope", "rope", "rope", "learned")]
    assert [line.get_color() for line in found.values()] == colors
    assert [line.get_linestyle() for line in found.values()] == ["-", "-", "--", "-"]
    thin = [line for line in ax.lines if line.get_linewidth() < 0.7]
    assert [list(line.get_ydata()) for line in thin] == [[0.5, 0.5]] * 4
    bands = {tuple(map(tuple, band.get_paths()[0].vertices.tolist())) for band in ax.collections}
    assert any({(16, 2), (16, 4), (32, 3), (32, 4)} <= set(band) for band in bands)
    dashed = [list(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "--"]
    assert [16, 16] in dashed

def test_a_panel_for_each_set_of_lengths(drawn):
    """Losses of two splits, and errors. A single length makes no panel. A whole split is no
    multiple: its windows differ. Runs of other steps get their own curve."""
    lines = []
    for config, metric, splits in (
        ("config/text.py", "loss", {"val 1x": 8, "val 2x": 16, "val": 4, "test": 8}),
        ("config/text.py", "loss", {"test 1x": 8, "test 2x": 16}),
        ("config/task.py", "token_error", {"val": 8, "x2": 16, "x4": 32}),
        ("config/other.py", "token_error", {"val": 8, "sparse": 8}),
    ):
        for n, run in enumerate(("x_pope", "x_pope_seed2", "x_rope")):
            values = {(split, T): {metric: 10.0 * n + T} for split, T in splits.items()}
            lines += lines_of(config, {run: values})
    figures.draw_by_length(lines[-6:], "x")
    assert not drawn
    figures.draw_by_length(lines, "x")
    lines = [line | dict(steps=4) if line["run"].endswith("_seed2") else line for line in lines]
    figures.draw_by_length(lines, "x")
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes[:3]] == ["text", "text, test", "task"]
    for ax, lengths in zip(axes[::2], ((8, 16), (8, 16, 32))):
        pope, rope, trained = ax.lines
        assert list(trained.get_xdata()) == [16, 16]
        for line, label, more in ((pope, "pope", 5), (rope, "rope", 20)):
            assert line.get_label() == label
            assert line.get_xydata().tolist() == [[n, n + more] for n in lengths]
    curves = drawn[1].axes[0].lines[:3]
    assert curves[0].get_xydata().tolist() == [[8, 8], [16, 16]]
    names = [line.get_label() for line in curves]
    assert names == ["pope, 9 steps", "pope, 4 steps", "rope, 9 steps"]

def test_the_start_of_training_does_not_set_the_height(drawn):
    """Of a loss plot; errors are drawn from the first one on."""
    steps = [(0, 10.0, 50.0), (100, 3.0, 0.0), (2000, 2.0, 0.0)]
    rows = [{"run": "r", "pe": "rope", "step": x, "tokens": 16 * x, "val/loss": y,
             "val/token_error": z} for x, y, z in steps]
    figures.draw_training(rows, ["val/loss", "val/token_error"], "tokens", "x")
    loss, error = drawn[0].axes
    assert loss.lines[0].get_xydata().tolist() == [[16 * x, y] for x, y, _ in steps]
    assert loss.get_ylim() == pytest.approx((1.93, 3.47))
    assert error.get_ylim() == pytest.approx((-2.5, 52.5))

@pytest.mark.parametrize("multiples", [range(1, 11), (1, 1.5, 2, 2.5)], ids=str)
def test_lengths_do_not_overlap(multiples, drawn):
    """The tick labels of PoPE's Figure 2, which are rotated, and of CoPE's Figure 3."""
    splits = {(f"val {m}x", round(1024 * m)): dict(loss=2.0) for m in multiples}
    lines = list(lines_of("config/x.py", {"x_pope": splits}, trained=1024))
    lines += [line | dict(config="config/y.py") for line in lines]  # two panels are narrower
    figures.draw_by_length(lines, "x")
    drawn[0].draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn[0].axes[0].get_xticklabels()]
    assert len(boxes) == len(splits)
    for left, right in zip(boxes, boxes[1:]):
        assert left.x1 < right.x0

def test_legend_fits_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    figure, (ax,) = figures.panels(1, 1, 5, 4)
    names = [f"a_name_of_20_letters{n}" for n in range(7)]
    ax.plot([0, 1], [range(7)] * 2, label=names)
    figures.save(figure, str(tmp_path / "x"))
    box, texts = figure.legends[0].get_window_extent(), figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == names
    assert 0 <= box.x0 and box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0 / 5) for text in texts}) == 4  # rows

def test_a_method_keeps_its_colour():
    """Known methods differ, and a new one gets a colour that none of them has."""
    colors = dict(figures.COLORS)
    assert len(set(colors.values())) == len(colors)
    new = [figures.color_of("new"), figures.color_of("fox+rope"), figures.color_of("new")]
    assert new[0] == new[2] != new[1] and not set(new) & set(colors.values())
    assert figures.color_of("pope") == colors["pope"]

def test_methods_picture(monkeypatch, capsys):
    """A panel for every method with a kind, in the row of its kind. What depends on i - j alone is
    constant along diagonals, for keys of one kind. --help draws nothing."""
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(methods, "save", lambda figure, path: drawn.append(figure))
    methods.draw("x")
    titles = [ax.get_title() for ax in drawn[0].axes if ax.get_visible()]
    assert titles == [name for kind in methods.ROWS for name in PES if PES[name].kind == kind]
    first = torch.tensor([True, True, False, False, True, True, False, False, False, True, False])
    for name, method in PES.items():
        effect = methods.effect(name, first)
        assert (effect.isnan() == torch.ones(11, 11, dtype=torch.bool).triu(1)).all(), name
        same = [effect[i + 4, i] for i in range(7) if not first[i]]  # distance 4
        is_relative = torch.allclose(torch.stack(same), same[0], atol=1e-5)
        assert is_relative == (method.kind in (None, "relative")), name
    monkeypatch.setattr("sys.argv", ["methods", "--help"])
    runpy.run_path(methods.__file__, run_name="__main__")
    assert capsys.readouterr().out == f"{methods.__doc__.strip()}\n"

# what the rotations have learned, and two kinds of questions in one task

@torch.no_grad()
def test_learned_rotation():
    """PoPE's delta, and CARoPE's frequencies as a mean over tokens, divided by RoPE's."""
    net, idx, params = small(pe="carope,pope,nope")
    got = figures.measure(net, idx, "rotation")
    assert list(got) == [0, 1] and (got[1] == net.h[1].attn.pes[0].delta).all()
    x = net.h[0].ln_1(net.wte(idx[0])).double().numpy()
    b = np.log(np.expm1(10000 ** (2 / 8) - 1))  # W = 0 would give RoPE's frequencies
    f = 1 / (np.log1p(np.exp(x @ params["h.0.attn.pes.0.W"] + b)) + 1)  # (tokens, heads)
    for c in range(4):
        want = (f**c).mean(0) * 10000 ** (c / 4)
        assert got[0][:, c].numpy() == pytest.approx(want, rel=1e-4)

def test_kinds_of_questions_have_panels_of_their_own(drawn):
    splits = {("content", 15): 1.0, ("content_x2", 23): 2.0, ("position", 15): 3.0,
              ("position_x2", 23): 4.0}
    values = {"x_pope": {split: dict(token_error=y) for split, y in splits.items()}}
    figures.draw_by_length(list(lines_of("config/lookup_small.py", values)), "x")
    found = {ax.get_title(): ax.lines[0].get_xydata().tolist() for ax in drawn[0].axes}
    assert found == {"lookup, content": [[15, 1], [23, 2]], "lookup, position": [[15, 3], [23, 4]]}

def test_positions_that_stay_apart_in_bfloat16():
    for name, growth in (("expe", lambda i, c: (i + c) / 1000),
                         ("exqpe", lambda i, c: c / 1000 + (i - c + 3) // 3 / 16)):
        values = [[growth(i, c) for c in range(3)] for i in range(2000)]
        written = {tuple(row) for row in torch.tensor(values).bfloat16().tolist()}
        assert methods.positions_apart(name, 3, 1 / 1000, T=2000) == len(written)
