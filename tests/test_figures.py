"""assets/figures.py: its numbers against float64 loops, its pictures against the numbers."""
import json
import math

import numpy as np
import oracles
import pytest
import torch

from assets import figures
from data.shards import Split, Writer
from model import GPT, PES, GPTConfig


def small(**options):
    """A model whose parameters are large enough for every term to matter, 23 tokens, and its parameters
    in float64."""
    torch.manual_seed(1)
    options = dict(block_size=16, vocab_size=19, n_layer=3, n_head=2, n_embd=16) | options
    net = GPT(GPTConfig(**options)).eval()
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
    (dict(pe="rope,cope+rope", cope_npos=5, cope_shared=False), [1]),
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


@pytest.mark.parametrize("options", [
    *(dict(pe=name) for name in PES),
    dict(pe="cope+rope,nope,rope+alibi", norm="rmsnorm", bias=False),
    dict(pe="cope+carope", cope_gates="values"),
    dict(pe="learned", hard_attention=True),
], ids=str)
def test_weights_by_distance(options, monkeypatch):
    """The oracle's scores and biases, made weights, by distance, one query and one key at a time."""
    net, idx, params = small(**options | dict(block_size=23))
    with torch.no_grad():
        for pe in net.modules():
            if hasattr(pe, "clamp_parameters"):
                pe.clamp_parameters()
    params = {k: v.double().numpy() for k, v in net.state_dict().items()}
    calls = []
    for name in ("score", "bias"):
        f = getattr(oracles, name)

        def spy(*args, f=f, name=name):
            calls.append((name, f(*args)))
            return calls[-1][1]

        monkeypatch.setattr(oracles, name, spy)
    texts = torch.cat((idx, idx.flip(1)))
    sums, counts = np.zeros((3, 2, 23)), np.zeros(23)
    for text in texts.tolist():
        calls.clear()
        oracles.gpt(net.cfg, params, text)
        logits = []  # of layer 1 head 1, layer 1 head 2, layer 2 head 1, ...
        for name, values in calls:
            if name == "score":
                logits.append(values)
            else:
                logits[-1] = logits[-1] + values
        for n, a in enumerate(logits):
            for i in range(23):
                e = [math.exp(a[i, j] - max(a[i, : i + 1])) for j in range(i + 1)]
                for j in range(i + 1):
                    weight = e[j] / sum(e) if not net.cfg.hard_attention else float(e[j] == 1)
                    sums[n // 2, n % 2, i - j] += weight
                    counts[i - j] += n == 0
    got = figures.weights_by_distance(net, texts)
    assert list(got) == [0, 1, 2]
    for layer in range(3):
        assert np.abs(got[layer].numpy() - sums[layer] / counts).max() < 1e-4
    assert counts.tolist() == [2 * n for n in range(23, 0, -1)]


def test_labels():
    """The label is what differs; the seed does not count, options do."""
    def check(pes, *wanted):
        assert list(figures.labels(pes).values()) == list(wanted)

    check({"out/quickstart_pope": "pope"}, "pope")
    check({"out/quickstart_pope": "pope", "out/quickstart_cope+rope": "cope+rope"}, "pope", "cope+rope")
    check({"out/a_rope": "rope", "out/a_rope_seed1": "rope",
           "out/a_rope@rope_scaling=ntk,rope_factor=2": "rope"},
          "rope", "rope", "rope (rope_scaling=ntk, rope_factor=2)")
    check({"out/a_rope": "rope", "out/b_rope": "rope"}, "a_rope", "b_rope")
    check({"out/a_cope": "cope", "out/a_cope_16": "cope", "out/a_rope": "rope"}, "cope", "cope_16", "rope")
    check({"here/a_rope": "rope", "there/a_rope": "rope"}, "here/a_rope", "there/a_rope")
    check({"trial": "rope", "trial2": "rope"}, "trial", "trial2")


def test_curves_of_seeds_and_methods(tmp_path, monkeypatch):
    """A curve for each label: the mean of its seeds, in a band from the lowest to the highest, in its
    method's colour."""
    pytest.importorskip("matplotlib")
    losses = {"x_pope": [2.0, 3.0], "x_pope_seed2": [4.0, 4.0], "x_rope": [5.0, 7.0],
              "x_rope@rope_factor=2": [1.0, 1.0],
              "x_learned": [6.0]}
    table = []
    for run, values in losses.items():
        pe = "pope" if "pope" in run else "rope" if "rope" in run else "learned"
        for length in (16, 32):
            row = dict(run=run, pe=pe, trained=16, split="val", length=length, window_loss=0.5)
            if length // 32 < len(values):
                row["loss"] = values[length // 32]
            table.append(row)
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    by_position = {run: torch.arange(16.0 * len(values)) for run, values in losses.items()}
    figures.draw_extrapolation(table, by_position, str(tmp_path / "x"))
    left, right = drawn[0].axes
    found = {line.get_label(): line for line in left.lines if not line.get_label().startswith("_")}
    assert {label: line.get_xydata().tolist() for label, line in found.items()} == {
        "pope": [[16, 3], [32, 3.5]], "rope": [[16, 5], [32, 7]], "rope (rope_factor=2)": [[16, 1], [32, 1]],
        "learned": [[16, 6]]}
    colors = [figures.COLORS[pe] for pe in ("pope", "rope", "rope", "learned")]
    assert [line.get_color() for line in found.values()] == colors
    assert [line.get_linestyle() for line in found.values()] == ["-", "-", "--", "-"]
    bands = {tuple(map(tuple, band.get_paths()[0].vertices.tolist())) for band in left.collections}
    assert any({(16, 2), (16, 4), (32, 3), (32, 4)} <= set(band) for band in bands)
    for ax in (left, right):  # the trained length
        assert [16, 16] in [list(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "--"]
    assert right.lines[0].get_xydata().tolist() == [[4 * n + 2, 4 * n + 1.5] for n in range(8)]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == list(found)


@pytest.mark.parametrize("multiples", [range(1, 11), (1, 1.5, 2, 2.5), (1, 2, 4, 8, 16)], ids=str)
def test_lengths_do_not_overlap(multiples, monkeypatch):
    """Those of PoPE's Figure 2, CoPE's Figure 3 and ExPE's Table 3, in the picture of --extrapolate."""
    pytest.importorskip("matplotlib")
    table = []
    for n in multiples:
        row = dict(run="x_pope", pe="pope", trained=1024, split="val", window_loss=2.0, loss=2.0)
        table.append(row | dict(length=round(1024 * n)))
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.draw_extrapolation(table, {"x_pope": torch.ones(table[-1]["length"])}, "x")
    drawn[0].canvas.draw()
    boxes = [label.get_window_extent() for label in drawn[0].axes[0].get_xticklabels()]
    assert len(boxes) == len(table)
    for left, right in zip(boxes, boxes[1:]):
        assert left.x1 < right.x0
    figures.pyplot().close("all")


@pytest.mark.parametrize("late, top", [(2.9, 2.95), (9.0, 1.7 * 1.9 + 0.05)], ids=["kept", "cut"])
def test_losses_at_all_positions_are_in_the_picture(late, top, monkeypatch):
    """Those of the last positions are higher than the mean; but one that explodes is cut off."""
    pytest.importorskip("matplotlib")
    row = dict(run="x", pe="pope", trained=8, split="val", window_loss=1.9, loss=2.0)
    rows = [row | dict(length=length) for length in (8, 16)]
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.draw_extrapolation(rows, {"x": torch.tensor([2.0] * 14 + [late] * 2)}, "x")
    for ax in drawn[0].axes:
        assert ax.get_ylim() == pytest.approx((1.85, top))
    figures.pyplot().close("all")


def test_report(monkeypatch):
    """Losses at two lengths beside errors at three, and those of another split; what was measured at
    one length alone is no panel."""
    pytest.importorskip("matplotlib")
    lines = []
    for config, metric, splits in (("config/text.py", "loss", {"val 1x": 8, "val 2x": 16, "val": 8}),
                                   ("config/task.py", "token_error", {"val": 8, "x2": 16, "x4": 32}),
                                   ("config/other.py", "token_error", {"val": 8, "sparse": 8})):
        for n, (pe, seed) in enumerate((("pope", ""), ("pope", "_seed2"), ("rope", ""))):
            for split, length in splits.items():
                run = f"out/{config[7:-3]}_{pe}{seed}"
                other = metric == "loss" and split == "val"  # other windows than --extrapolate's
                lines.append(dict(run=run, config=config, pe=pe, split=split, trained=8, length=length,
                                  metric=metric, value=99.0 if other else 10.0 * n + length, steps=9))
                if split.endswith("x"):
                    lines.append(lines[-1] | dict(split=split.replace("val", "test"), value=0.0))
                lines.append(lines[-1] | dict(metric="ppl", value=0.0))
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.draw_report(lines, "x")
    (figure,) = drawn
    assert [ax.get_title() for ax in figure.axes[:3]] == ["text", "text, test", "task"]
    for ax, lengths in zip(figure.axes[::2], ((8, 16), (8, 16, 32))):
        pope, rope, trained = ax.lines
        assert pope.get_label() == "pope" and pope.get_xydata().tolist() == [[n, n + 5] for n in lengths]
        assert rope.get_label() == "rope" and rope.get_xydata().tolist() == [[n, n + 20] for n in lengths]
        assert list(trained.get_xdata()) == [8, 8]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pope", "rope"]
    drawn.clear()
    figures.draw_report(lines[-4:], "x")
    assert not drawn
    lines = [line | dict(steps=4) if line["run"].endswith("_seed2") else line for line in lines]
    figures.draw_report(lines, "x")  # a seed that is not as far is not in the mean
    assert drawn[0].axes[0].lines[0].get_xydata().tolist() == [[8, 8], [16, 16]]
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["pope, 9 steps", "pope, 4 steps", "rope, 9 steps"]


@pytest.mark.parametrize("figure, pe, chosen", [
    ("positions", "cope", "1.1"), ("gates", "cope", "3.2,1.1"), ("gates", "cope", ""),
    ("frequency", "rope", ""), ("distance", "cope", ""),
])
@pytest.mark.parametrize("options", ["", "@cope_npos=64,rope_factor=1.0,dropout=0.0,t5_buckets=32"])
def test_titles_fit_the_picture(figure, pe, chosen, options, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, (net, idx, _) = [], small(pe=pe)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.draw_heads("", f"out/x_{pe}{options}", figure, net, 16, idx, 23 * ["a"], chosen)
    drawn[0].canvas.draw()
    for text in drawn[0].texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= drawn[0].bbox.width
    figures.pyplot().close("all")


@pytest.mark.parametrize("names, rows", [
    (["pope", "rope", "cope"], 1),
    (["rope (rope_scaling=ntk, rope_factor=4)", "cope"], 2),
    ([f"a_name_of_20_letters{n}" for n in range(7)], 4),
])
def test_legend_fits_the_picture(names, rows):
    pytest.importorskip("matplotlib")
    figure, ((ax,),) = figures.subplots(1, 1, 6, 5)
    for name in names:
        ax.plot([0, 1], label=name)
    figures.legend(figure, ax)
    figure.canvas.draw()
    box, texts = figure.legends[0].get_window_extent(), figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == names
    assert 0 <= box.x0 and box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0 / 5) for text in texts}) == rows
    figures.pyplot().close("all")


def test_curves_leave_out_the_first_height(tmp_path, monkeypatch):
    """The beginning is drawn, but the axis is that of what comes after a twentieth of the run."""
    pytest.importorskip("matplotlib")
    drawn, cfg = [], dict(pe="rope", batch_size=2, block_size=8)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    steps = [(0, 10.0, 50.0), (99, 5.0, 0.0), (100, 3.0, 0.0), (2000, 2.0, 0.0)]
    (tmp_path / "run").mkdir()
    lines = [dict(config=cfg)]
    lines += [dict(step=x, split="val", loss=y, token_error=z) for x, y, z in steps]
    (tmp_path / "run" / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    figures.draw_training([str(tmp_path / "run")], ["val/loss", "val/token_error"], "tokens", "x")
    loss, error = drawn[0].axes
    assert loss.lines[0].get_xydata().tolist() == [[16 * x, y] for x, y, _ in steps]
    assert loss.get_ylim() == pytest.approx((1.95, 3.05)) and error.get_ylim() == pytest.approx((-0.05, 0.05))


def test_recall_map(monkeypatch):
    pytest.importorskip("matplotlib")
    errors = {(16, 1): [True, False], (32, 1): [False], (32, 2): [True]}
    drawn, checkpoint = [], dict(meta=dict(row_length=dict(train=17)))
    monkeypatch.setattr(figures, "recall_errors", lambda model, splits, device: errors)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    net = GPT(GPTConfig(block_size=16, vocab_size=9, n_layer=1, n_head=1, n_embd=8, pe="rope"))
    figures.draw_recall({"run": (net, checkpoint)}, {"run": []}, "cpu", "x")
    ax = drawn[0].axes[0]
    grid = ax.images[0].get_array()
    assert grid.filled(-1).tolist() == [[50, -1], [0, 100]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["16", "32"]
    (trained,) = ax.lines
    assert list(trained.get_ydata()) == [0.5, 0.5]  # between the trained rows and the longer ones


def test_recall_errors(tmp_path):
    """Rows of two pairs, fillers and two queries; wrong answers at random, counted by loops."""
    rng, writer = np.random.default_rng(0), Writer(tmp_path / "recall")
    for split, length in (("val", 12), ("x2", 24)):
        rows = np.full((20, length + 4), 9)  # 0..4 keys, 5..8 values, 9 fills
        for row in rows:
            first = int(rng.integers(0, length - 4))
            second = int(rng.integers(first + 2, length - 1))
            pairs = [(int(key), int(rng.integers(5, 9))) for key in rng.permutation(5)[:2]]
            row[first : first + 2], row[second : second + 2] = pairs
            row[length : length + 2], row[length + 2 :] = pairs[:: int(rng.choice([-1, 1]))]
        mask = np.zeros_like(rows)
        mask[:, length + 1 :: 2] = 1
        writer.write(split, rows, mask)
    writer.finish(10, {"symbols": list("abcdefghij")})
    splits = [Split(tmp_path / "recall", split) for split in ("val", "x2")]

    def model(x, y):  # the answer to each token is a function of it and its place alone
        answers = (x * 7 + torch.arange(x.size(1)) * 5) % 4 + 5
        return torch.nn.functional.one_hot(answers, 10).float(), None

    want = {}
    for split, length in zip(splits, (12, 24)):
        for row in split.bins[0].reshape(-1, length + 4).astype(int).tolist():
            for query in (length, length + 2):
                distance = query - next(j for j in range(length) if row[j] == row[query])
                wrong = (row[query] * 7 + query * 5) % 4 + 5 != row[query + 1]
                n = max(n for n in range(10) if 2**n <= distance)
                want.setdefault((length + 3, n), []).append(wrong)
    assert figures.recall_errors(model, splits, "cpu") == want and len(want) > 4


def test_every_method_has_a_colour_of_its_own():
    assert set(PES) < set(figures.COLORS) and len(set(figures.COLORS.values())) == len(figures.COLORS)


def test_drawing():
    """Every array lies where its labels say."""
    pytest.importorskip("matplotlib")
    norms = {3: torch.rand(2, 4, 10), 5: torch.rand(2, 4, 10)}
    figure = figures.draw_norms(norms, 100.0, 40)
    for side, ax in enumerate(figure.axes[:2]):
        drawn = ax.images[0].get_array()
        for j, i in enumerate(norms):
            assert ax.get_xticklabels()[j].get_text() == str(i + 1)
            for h in range(4):
                assert (drawn[:, 4 * j + h] == norms[i][side, h].numpy()).all()
                assert abs(4 * j + h - ax.get_xticks()[j]) < 2
    assert len({image.get_clim() for ax in figure.axes[:4] for image in ax.images}) == 1  # one scale
    for side, ax in enumerate(figure.axes[2:4]):  # the mean over heads
        for j, i in enumerate(norms):
            mean = sum(norms[i][side, h] for h in range(4)) / 4
            assert torch.allclose(torch.as_tensor(ax.images[0].get_array().data[:, j]), mean)
    for ax in figure.axes[:4]:  # 2 pi 100^(c/10) is 39.6 at c = 4 and 62.8 at c = 5
        (trained,) = ax.lines
        assert list(trained.get_ydata()) == [4.5, 4.5]
    periods = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert periods[:6] == [f"{2 * math.pi * 100 ** (c / 10):,.0f}" for c in range(6)]

    maps = {1: torch.rand(3, 30, 30), 2: torch.rand(3, 30, 30)}
    lines = figures.lines(["def", " f", ":\n", "\n", *"  pass", "\n  ", "x\n\n", *"last line, unfin"])
    assert [(first, last) for first, last, _ in lines] == [(0, 2), (3, 3), (4, 10), (11, 11), (12, 27)]
    assert "".join(text for _, _, text in lines) == "def f:\n\n  pass\n  x\n\nlast line, unfin"
    lines.append((28, 29, " = A title = \n"))
    figure = figures.draw_maps(figures.choose_heads(maps, ""), lines)
    for n, (i, h) in enumerate((i, h) for i in maps for h in range(3)):
        ax = figure.axes[n]
        assert ax.get_title() == f"layer {i + 1}, head {h + 1}"
        drawn = ax.images[0].get_array()
        for t in range(30):
            assert (drawn[t, : t + 1] == maps[i][h, t, : t + 1].numpy()).all()
            assert drawn.mask[t, t + 1 :].all()
        signs = ax.collections[0]
        # the fifth line does not end
        assert signs.get_offsets().tolist() == [[2, 2], [3, 3], [10, 10], [11, 11], [29, 29]]
        # large: an empty line, a title
        assert (signs.get_sizes() > 50).tolist() == [False, True, False, True, True]
        assert dict(zip(ax.get_yticks(), (t.get_text() for t in ax.get_yticklabels()))) == (
            {0: "def f:", 4: "pass", 12: "last line, unf"} if h == 0 else {})
        assert dict(zip(ax.get_xticks(), (t.get_text() for t in ax.get_xticklabels()))) == (
            {0: "def f:", 4: "pass", 12: "last line, unf"} if i == 2 else {})
    figure = figures.draw_maps(figures.choose_heads(maps, "3.1,2.3"), lines)
    assert [ax.get_title() for ax in figure.axes[:2]] == ["layer 3, head 1", "layer 2, head 3"]
    for ax, drawn in zip(figure.axes, (maps[2][0], maps[1][2])):
        assert (ax.images[0].get_array()[29] == drawn[29].numpy()).all()
    with pytest.raises(ValueError, match="heads='1.1' is no layer.head .*; choose among 2.1, 2.2, 2.3, 3.1"):
        figures.choose_heads(maps, "3.1,1.1")
    figure = figures.draw_distances({0: torch.rand(24, 64)}, 16)
    drawn = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines[:24]]
    assert len(set(drawn)) == 24  # no two heads look alike
    weights = {0: torch.rand(3, 64), 1: torch.rand(3, 64)}
    figure = figures.draw_distances(weights, 16)
    for ax, i in zip(figure.axes, weights):
        *heads, trained = ax.lines
        assert ax.get_title() == f"layer {i + 1}" and trained.get_xdata() == [16, 16]
        for h, line in enumerate(heads):
            x, y = line.get_xdata().tolist(), line.get_ydata().tolist()
            assert x[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 8] and x[-5:] == [41, 45, 49, 54, 59]
            for first, after, mean in zip(x, [*x[1:], 64], y, strict=True):
                assert mean == pytest.approx(sum(weights[i][h, first:after].tolist()) / (after - first))
    figures.pyplot().close("all")
