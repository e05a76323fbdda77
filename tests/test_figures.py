"""Tests the tables and pictures of eval/, apart from those of the lesson. Their numbers are
compared with float64 loops and with plain forward passes, and what is drawn or printed with the
numbers."""
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from conftest import TINY

import model
import sample
import train
from config import Mistake
from data.shards import Split
from eval import attention, curves, report
from model import GPT, GPTConfig
from train import read_records

pytest.importorskip("matplotlib")


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
    got = attention.measure(net, texts, attention.norms)
    assert list(got) == layers
    for i in layers:
        for side in (0, 1):
            of_layer = [calls[n] for n in range(12) if n // 2 % 3 == i]
            y = np.concatenate([arguments[side - 2] for _, arguments, _ in of_layer])
            if "pope" not in options["pe"]:
                n = round(4 * net.cfg.rope_fraction)  # pairs that rotate
                want = np.hypot(y[:, :n], y[:, n : 2 * n])
            else:
                want = np.log(1 + np.exp(y))
            assert got[i][side].numpy() == pytest.approx(want.mean(0), rel=1e-4)

def test_periods():
    """The axis shows the periods of the model's frequencies, which rope_scaling changes."""
    for pe, factor in (("rope", 4), ("carope,rope", 1)):  # of layer 0
        net = small(pe=pe, base=100, rope_scaling="linear", rope_factor=4)[0]
        run = SimpleNamespace(model=net, trained=16)
        figure = attention.draw_lines(run, {0: torch.ones(2, 4)}, ("queries", "keys"))
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
    got_gates = attention.measure(net, idx, attention.gates)
    got_positions = attention.measure(net, idx, attention.position_weights)
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
@pytest.mark.parametrize("carope_x", ["input", "embedding"])
def test_learned_rotation(carope_x):
    """The figure shows PoPE's delta, and CARoPE's frequencies, as a mean over tokens, divided by
    RoPE's."""
    net, idx, params = small(pe="carope,pope,nope", carope_x=carope_x)
    got = attention.measure(net, idx, attention.learned_rotation)
    assert list(got) == [0, 1] and (got[1] == net.h[1].attn.pes[0].delta).all()
    x = net.wte(idx[0])
    if carope_x == "input":
        x = net.h[0].ln_1(x)
    x = x.double().numpy()
    b = np.log(np.expm1(10000 ** (2 / 8) - 1))  # W = 0 would give RoPE's frequencies
    f = 1 / (np.log1p(np.exp(x @ params["h.0.attn.pes.0.W"] + b)) + 1)  # (tokens, heads)
    for c in range(4):
        want = (f**c).mean(0) * 10000 ** (c / 4)
        assert got[0][:, c].numpy() == pytest.approx(want, rel=1e-4)

# --- trained runs ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tmp_path_factory, stream):
    """Runs of a few steps at 16 tokens."""
    folder = tmp_path_factory.mktemp("figures")
    for name, seed in (("rope", 1), ("rope_seed2", 2), ("learned", 1), ("carope+cope", 1)):
        pe = name.partition("_")[0]
        train.main([f"--data={stream}", f"--out_dir={folder / name}", *TINY, f"--pe={pe}",
                    f"--seed={seed}", "--max_iters=20"])
    return folder

def test_attention_of_a_run(runs, tmp_path, drawn):
    """Every picture of attention, and what a run lacks."""
    run = str(runs / "carope+cope")
    for figure in attention.TITLES:
        attention.main([figure, run, "--device=cpu"])
    # a panel for each layer, or for each head and the colour bar
    assert [len(figure.axes) for figure in drawn] == [2, 2, 5, 5]
    assert drawn[2].axes[2].get_title() == "layer 2, head 1"
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for words, message in (
        (["gates", str(runs / "rope")], "has nothing to show of"),
        (["gates", run, f"--text={tmp_path / 'latin'}"], "is not UTF-8"),
        (["gates", run, run, "--out=x.png"], "there are 2 runs"),
    ):
        with pytest.raises(Mistake, match=message):
            attention.main([*words, "--device=cpu"])

def test_loss_by_position(runs, stream, drawn, monkeypatch):
    """Segments of eight times the trained length, whose positions are averaged in 32 groups.
    `learned` reads the beginnings of the same segments. The curve of rope is the mean of two
    seeds."""
    monkeypatch.setattr(sample, "SEGMENT", 50)  # so that the cache is used
    words = [str(runs / name) for name in ("rope", "rope_seed2", "learned")]
    curves.main(["loss_by_position", *words, "--device=cpu", "--eval_tokens=400"])
    x_all, y_all = (torch.from_numpy(part)[0] for part in Split(Path(stream), "val").read([0], 599))
    starts = [0, (599 - 128) // 2, 599 - 128]  # three segments of 128 tokens

    def loss(name, length):
        net = sample.Run(str(runs / name), "cpu").model
        losses = torch.zeros(length)
        for start in starts:
            x, y = x_all[start : start + length], y_all[start : start + length]
            with torch.no_grad():
                logp = net(x[None], y[None])[0][0].log_softmax(-1)
            losses -= logp[torch.arange(length), y] / len(starts)
        return losses.view(-1, 4).mean(1).numpy()

    rope, learned, *dashed = drawn[0].axes[0].lines
    assert rope.get_label() == "rope" and learned.get_label() == "learned"
    seeds = loss("rope", 128), loss("rope_seed2", 128)
    assert rope.get_ydata() == pytest.approx(sum(seeds) / 2, abs=1e-5)
    assert rope.get_xdata() == pytest.approx(np.arange(2.5, 128, 4))
    assert learned.get_ydata() == pytest.approx(loss("learned", 16), abs=1e-5)
    assert [line.get_xdata()[0] for line in dashed] == [16]

def test_training_curves(runs, tmp_path, drawn):
    """Of a step that appears twice, the last record counts. A torn line is skipped."""
    folder = tmp_path / "rope"
    folder.mkdir()
    log = (runs / "rope" / "log.jsonl").read_text()
    again = '\n{"step": 10, "loss": 7.0, "lr": 0.5}\n{"step": 20, "lo'
    (folder / "log.jsonl").write_text(log + again)
    curves.main(["training", str(folder), str(runs / "rope_seed2")])
    loss, other = ({line["step"]: line["loss"]
                    for line in read_records(runs / name / "log.jsonl") if "loss" in line}
                   for name in ("rope", "rope_seed2"))
    loss[10] = 7.0
    panel = next(ax for ax in drawn[0].axes if ax.get_ylabel() == curves.METRICS["loss"])
    want = [[step, (loss[step] + other[step]) / 2] for step in (10, 20)]
    assert panel.lines[0].get_xydata() == pytest.approx(np.array(want))
    assert len(panel.lines) == 1 and panel.lines[0].get_label() == "rope"

# --- reports --------------------------------------------------------------------------------------

ABOUT = dict(config="config/x.py", pe="pope", flags={}, settings=1, seed=1, step=9, options={},
             trained=8, multiple=None, tokens=None, window=None, data="d", split="val",
             fingerprint=5, length=8, metric="loss")

def measured(folder, *values, **changes):
    """Writes a run directory with these results, each of which is (value, what differs from ABOUT
    and the changes)."""
    folder.mkdir(exist_ok=True)
    records = []
    for value, own in values:
        record = ABOUT | changes | own | dict(run="elsewhere")
        if record["window"] is None:
            del record["window"]  # as in eval/results.jsonl, which leaves out what is empty
        records.append(record | dict(values={record.pop("metric"): value}))
    train.append_records(folder / "results.jsonl", *records)

def tables(capsys):
    """Returns {title: {label: its other cells}} of the tables that were printed."""
    found = {}
    title = ""
    for part in capsys.readouterr().out.split("\n\n"):
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:1] == "|"]
        if rows:
            found[title] = {label: cells for label, *cells in rows if label != "---"}
        title = part.strip()
    return found

def test_a_report_averages_what_is_alike(tmp_path, capsys):
    """Runs are averaged if their config file, pe, flags, step and options at test time are equal.
    The label has the flags that some of the others lack. A run that was trained from another one
    may have its own seed, and so may that one. An edited config file is not the same one."""
    measured(tmp_path / "a", (1.0, {}), flags=dict(init_from="out/x", lr=2))
    measured(tmp_path / "b", (4.0, {}), flags=dict(init_from="out/x_seed2", lr=2), seed=2)
    for name, change in dict(
        plain={}, more=dict(flags={"k": 1}), step=dict(step=10),
        options=dict(options=dict(rope_factor=8.0, base=3)),
        other_pe=dict(pe="rope"), edited=dict(pe="rope", settings=2),
    ).items():
        measured(tmp_path / name, (2.0, {}), **change)
    report.main([str(path) for path in sorted(tmp_path.iterdir())])
    (rows,) = tables(capsys).values()
    assert rows.pop("row") == ["seeds", "val"]
    assert rows == {
        "`pope --init_from=out/x --lr=2`": ["2", "2.500 (1.000–4.000)"],
        "`pope --k=1`": ["1", "2.000"],
        "`pope (step 9)`": ["1", "2.000"], "`pope (step 10)`": ["1", "2.000"],
        "`pope@rope_factor=8,base=3`": ["1", "2.000"],
        "`rope (settings 1)`": ["1", "2.000"], "`rope (settings 2)`": ["1", "2.000"]}

def test_a_copied_run_counts_once(tmp_path, capsys):
    """Otherwise a link or a copy of a directory would be one more run in the mean."""
    measured(tmp_path / "a", (1.0, {}))
    measured(tmp_path / "b", (2.0, {}), seed=2)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    (tmp_path / "d").symlink_to(tmp_path / "b")
    report.main([str(path) for path in sorted(tmp_path.iterdir())])
    printed = capsys.readouterr()
    assert "| `pope` | 2 | 1.500 (1.000–2.000) |" in printed.out
    assert printed.err.splitlines() == [
        f"{tmp_path}/{first} and {tmp_path}/{second} are the same row with the same seed, so only "
        "the second one counts" for first, second in ("bc", "cd")]

def test_a_table(tmp_path, capsys):
    """The best row comes first, by the last column but window_loss, which is shown only at the
    largest multiple. A cell says if it lacks a run, and a row that goes nowhere is the last."""
    def losses(*values, metric="loss"):
        return [(value, dict(multiple=m, length=8 * m, tokens=9, metric=metric))
                for m, value in zip((1.0, 2.0), values)]

    measured(tmp_path / "a1", *losses(1.0, 3.0), *losses(1.0, 0.5, metric="window_loss"))
    measured(tmp_path / "a2", *losses(1.5), seed=2)
    measured(tmp_path / "b", *losses(2.0, 2.5), pe="rope")
    measured(tmp_path / "c", *losses(0.5), pe="learned")
    sources = [str(path) for path in sorted(tmp_path.iterdir())]
    picture = f"--out={tmp_path / 'a' / 'b.png'}"
    report.main([*sources, picture])
    assert (tmp_path / "a" / "b.png").exists()
    (title, rows), = tables(capsys).items()
    assert title == "x, d, step 9: loss, nats per token, mean (lowest–highest), sorted by val 2x"
    assert list(rows.items()) == [
        ("row", ["seeds", "val 1x", "val 2x", "val 2x in windows"]),
        ("`rope`", ["1", "2.000", "2.500", "–"]),
        ("`pope`", ["2", "1.250 (1.000–1.500)", "3.000 [1 of 2 seeds]", "0.500 [1 of 2 seeds]"]),
        ("`learned`", ["1", "0.500", "–", "–"])]
    report.main([*sources, "--rows=rope,learned", "--only=x", "--metrics=loss", picture])
    assert [*tables(capsys)[title]] == ["row", "`rope`", "`learned`"]
    with pytest.raises(Mistake, match="--only=y leaves nothing; there are x"):
        report.main([*sources, "--only=y", picture])
    with pytest.raises(Mistake, match="no table has these --rows"):
        report.main([*sources, "--rows=roqe", picture])

def test_rows_beside_others(tmp_path, capsys):
    """A file of results is read like a run. Only numbers that were measured here too are shown of
    it, and other contents of a data set are pointed out. Nothing is averaged with it."""
    (tmp_path / "own").mkdir()
    for data, fingerprint in (("d", 5), ("e", 6)):
        own = dict(data=data, fingerprint=fingerprint, metric="token_error")
        measured(tmp_path / data, (10.0, {}), (30.0, dict(split="x2")), (9.0, dict(split="x3")),
                 **own)
        measured(tmp_path / "own", (20.0, {}), (10.0, dict(split="x2")), **(own | dict(
            fingerprint=5)))
    others = tmp_path / "all.jsonl"
    others.write_text("".join((tmp_path / name / "results.jsonl").read_text() for name in "de"))
    report.main([str(tmp_path / "own"), f"--beside={others}", f"--out={tmp_path / 'x.png'}"])
    printed = capsys.readouterr().out
    assert "your data set e has other contents than the one" in printed and "set d" not in printed
    assert "| row | seeds | val, d | x2, d | val, e | x2, e |" in printed
    assert printed.index("| **pope** | 1 | 20.0 | 10.0 | 20.0 | 10.0 |") < printed.index(
        "| `pope` | 1 | 10.0 | 30.0 | 10.0 | 30.0 |")

def test_different_data_have_different_columns(tmp_path, capsys):
    for seed, checksum in ((1, 5), (2, 5), (3, 6)):
        measured(tmp_path / f"a{seed}", (float(seed), {}), seed=seed, fingerprint=checksum)
    report.main([str(path) for path in sorted(tmp_path.iterdir())])
    (rows,) = tables(capsys).values()
    assert rows == {
        "row": ["seeds", "val (data 5)", "val (data 6)"],
        "`pope`": ["3", "1.500 (1.000–2.000) [2 of 3 seeds]", "3.000 [1 of 3 seeds]"]}

def test_which_records_count(tmp_path, capsys):
    """The last one of each number. Torn lines are skipped, and a folder without results is left
    out. Results of an older version are refused."""
    measured(tmp_path / "a", (1.0, {}), (2.0, dict(split="x2")))
    with open(tmp_path / "a" / "results.jsonl", "a") as file:
        file.write('\n{"run": "a", "val')
    measured(tmp_path / "a", (3.0, {}))
    (tmp_path / "b").mkdir()
    report.main([f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/a/"])
    printed = capsys.readouterr()
    assert "| `pope` | 1 | 3.000 | 2.000 |" in printed.out
    assert printed.err == f"left out {tmp_path}/b, which has no results.jsonl\n"
    with pytest.raises(Mistake, match="none of these runs has results"):
        report.main([f"{tmp_path}/b"])
    (tmp_path / "b" / "results.jsonl").write_text('{"run": "b", "value": 1}')
    with pytest.raises(Mistake, match="older version; delete it and measure the run again"):
        report.main([f"{tmp_path}/b"])

def test_the_curves_of_a_report(drawn, monkeypatch):
    """A curve is the mean over seeds, in a band of their range. What one of the seeds lacks is left
    out. A method outside COLORS gets a colour that no other has, and rows beside it are thin.
    Windows are drawn only if they are asked for."""
    monkeypatch.setattr(curves, "name_curves", lambda *axes: None)
    lines = []
    for run, pe, change, values in (
        ("a1", "rope", {}, (1.0, 2.0, 7.0)), ("a2", "rope", dict(seed=2), (5.0, 4.0)),
        ("b", "slope", {}, (3.0, 4.0)),
        ("c", "rope", dict(options=dict(k=1)), (8.0, 9.0)),
        ("d", "rope", dict(beside=True), (5.0, 6.0)),
        ("a1", "rope", dict(metric="window_loss"), (1.0, 0.5))):
        for n, value in enumerate(values):
            lines.append(ABOUT | dict(
                run=run, pe=pe, experiment="x", multiple=2**n, tokens=9, length=8 * 2**n,
                value=value) | change)
    report.draw(lines, "x", windows=["rope"])
    (ax,) = drawn[0].axes
    found = {line.get_label(): (line.get_color(), line.get_linestyle(), line.get_xydata().tolist())
             for line in ax.lines if not line.get_label().startswith("_")}
    black = curves.COLORS["rope"]
    assert found["rope@k=1"] == (black, "--", [[8, 8], [16, 9]])
    assert found["slope"] == (curves.OTHER_COLORS[0], "-", [[8, 3], [16, 4]])
    assert found["rope, in windows of 8"] == (black, "-.", [[8, 1], [16, 0.5]])
    own, beside = (line for line in ax.lines if line.get_label() == "rope")
    assert own.get_xydata().tolist() == [[8, 3], [16, 3]]
    assert beside.get_xydata().tolist() == [[8, 5], [16, 6]]
    assert own.get_color() == beside.get_color() == black
    assert own.get_linewidth() > beside.get_linewidth()
    band = set(map(tuple, ax.collections[0].get_paths()[0].vertices.tolist()))
    assert band >= {(8, 1), (8, 5), (16, 2), (16, 4)}

def test_a_panel_for_each_set_of_lengths(drawn, monkeypatch):
    """Losses, errors, and errors on two kinds of questions have their own panels. A whole split is
    left out of the losses, because its windows differ, and so is what has only one length."""
    monkeypatch.setattr(curves, "name_curves", lambda *axes: None)
    lines = []
    for experiment, metric, splits, *multiples in (
        ("quickstart", "loss", {"val": 8}, 1.0, 2.0), ("quickstart", "loss", {"val": 4, "test": 8}),
        ("task", "token_error", {"val": 8, "x2": 16}),
        ("task", "token_error", {"sparse": 8}),
        ("lookup_small", "token_error", {"content": 8, "content_x2": 16}),
        ("lookup_small", "token_error", {"position": 8, "position_x2": 16}),
    ):
        for split, length in splits.items():
            for fingerprint in (0, 1) if "content" in split else (0,):
                for multiple in multiples or [None]:
                    length *= multiple or 1
                    lines.append(ABOUT | dict(
                        run="r", experiment=experiment, split=split, metric=metric, length=length,
                        multiple=multiple, fingerprint=fingerprint, value=10.0 + length))
    report.draw(lines, "x")
    axes = [ax for ax in drawn[0].axes if ax.get_visible()]
    assert [ax.get_title("left") for ax in axes] == [
        "predicting text", "task", "looking up a value by its key (d, data 0)",
        "looking up a value by its key (d, data 1)", "looking up a value by counting back"]
    for ax in axes:
        assert ax.lines[0].get_xydata().tolist() == [[8, 18], [16, 26]]
        assert ax.get_xticks().tolist() == [8, 16]

def test_echoes_over_distance(drawn, monkeypatch):
    """The loss of echoes has a panel over the distance of the copy, for each trained length, with
    the loss of new text to the right. Short rows, which have one distance, have no panel."""
    monkeypatch.setattr(curves, "name_curves", lambda *axes: None)
    lines = []
    for experiment, trained in (("echo_small", 128), ("echo_long_small", 1024)):
        for split, length in (("new_128", 128), ("at64_128", 128), ("new_1024", 1024),
                              ("at64_1024", 1024), ("at900_1024", 1024)):
            for metric in ("loss", "token_error"):
                lines.append(ABOUT | dict(
                    run="r", experiment=experiment, data="echo", metric=metric, split=split,
                    length=length, trained=trained, value=len(lines)))
    report.draw(lines, "x")
    assert [ax.get_title("left") for ax in drawn[0].axes] == [
        "finding a copy in 1024 bytes, trained on 128",
        "finding a copy, trained further on 1024"]
    for ax, first in zip(drawn[0].axes, (0, 10)):
        points = [point for point in ax.lines[0].get_xydata().tolist() if not math.isnan(point[1])]
        assert points == [[64, first + 6], [900, first + 8], [2048, first + 4]]
        assert len(ax.lines[0].get_xydata()) == 4  # the curve has a gap before the last point
        labels = [label.get_text() for label in ax.get_xticklabels()]
        assert dict(zip(ax.get_xticks(), labels)) == {64: "64", 900: "900", 2048: "no copy"}
        assert ax.get_ylabel() == "loss, nats per byte"
        assert ax.get_ylim() == drawn[0].axes[0].get_ylim()

def draw_named(n, name):
    """Returns a panel with n curves, which end higher and higher, and the figure's height before
    they are named. The last curve but one ends early."""
    figure, (ax,) = curves.panels(1, 1, 5, 3)
    height = figure.get_figheight()
    lines = [ABOUT | dict(run=str(i), label=f"{name} {i}", at=at, y=(10 * i**3 if at else 1.0))
             for i in range(n) for at in (0, 0.5 if i == n - 2 else 1)]
    curves.draw_curves(ax, lines, "at", "y", curves.colors_of(lines))
    curves.name_curves(ax)
    figure.draw_without_rendering()
    return ax, height

def test_names_of_curves_do_not_overlap():
    """Nor do they leave the panel by much, or the order of the curves' ends. A line that crosses
    the panel is dotted."""
    from matplotlib.text import Text

    ax, _ = draw_named(12, "curve")
    # without the lines to the curves' ends, which belong to the extent of an annotation
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == [f"curve {n}" for n in range(12)]
    for low, high in zip(boxes, boxes[1:]):
        assert low.y1 <= high.y0 + 1
    assert boxes[-1].y1 < ax.bbox.y1 + 0.1 * ax.bbox.height
    styles = [text.arrow_patch.get_linestyle() for text in ax.texts]
    assert [n for n, style in enumerate(styles) if style in (":", "dotted")] == [10]

@pytest.mark.parametrize("n, name", [
    (23, "curve"), (13, "a name that needs two of the lines of a panel"),
    (60, "curve --learning_rate=0.001 --warmup_iters=100")])
def test_many_names_are_a_legend(n, name, capsys):
    """It is below the panel and within the figure, which grows. If there are more than MOST_CURVES
    curves, only those that end lowest are drawn."""
    ax, height = draw_named(n, name)
    names = [" ".join(text.get_text().split()) for text in ax.get_legend().get_texts()]
    assert names == [f"{name} {i}" for i in reversed(range(min(n, curves.MOST_CURVES)))]
    assert ("drew only 24 of 60 curves" in capsys.readouterr().out) == (n == 60)
    box = ax.get_legend().get_window_extent()
    assert box.y1 < ax.bbox.y0 and box.y0 >= 0 and box.x1 <= ax.figure.bbox.x1
    assert ax.figure.get_figheight() > height and ax.bbox.height > 2 * ax.figure.dpi
    assert not ax.texts

def test_every_method_has_a_colour_of_its_own():
    """All methods that are published have one, and also their mix."""
    colors = [*curves.COLORS.values(), *curves.OTHER_COLORS]
    assert len(set(colors)) == len(colors) and {*curves.COLORS} - {*model.PES} == {"cope+rope"}
    assert {line["pe"] for line in report.read(["eval/results.jsonl"])} <= {*curves.COLORS}

def test_axes_say_what_they_count(drawn, monkeypatch):
    """Bytes, or the letters of a string, of which each comes again in the answer."""
    lines = []
    for data in ("stdlib", "stdlib@tokenizer=gpt2", "strings@task=copy,longest=12", "recall@n=8"):
        for length in (24, 48):
            lines.append(ABOUT | dict(run="r", experiment="x", data=data, metric="token_error",
                                      length=length, trained=24, value=1.0))
    report.draw(lines, "x")
    found = [(ax.get_xlabel().split()[1], *ax.get_xticks()) for ax in drawn[0].axes]
    assert found == [("bytes;", 24, 48), ("tokens;", 24, 48), ("letters;", 12, 24),
                     ("tokens;", 24, 48)]
