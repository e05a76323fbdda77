"""Tests the tables and pictures of eval/. Their numbers are compared with float64 loops and with
plain forward passes, and what is drawn or printed with the numbers."""
import csv
import json
import math
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
from model import GPT, GPTConfig, read_records

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
            y = np.concatenate([arguments[6 + side] for _, arguments, _ in of_layer])
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
def test_learned_rotation():
    """The figure shows PoPE's delta, and CARoPE's frequencies, as a mean over tokens, divided by
    RoPE's."""
    net, idx, params = small(pe="carope,pope,nope")
    got = attention.measure(net, idx, attention.learned_rotation)
    assert list(got) == [0, 1] and (got[1] == net.h[1].attn.pes[0].delta).all()
    x = net.h[0].ln_1(net.wte(idx[0])).double().numpy()
    b = np.log(np.expm1(10000 ** (2 / 8) - 1))  # W = 0 would give RoPE's frequencies
    f = 1 / (np.log1p(np.exp(x @ params["h.0.attn.pes.0.W"] + b)) + 1)  # (tokens, heads)
    for c in range(4):
        want = (f**c).mean(0) * 10000 ** (c / 4)
        assert got[0][:, c].numpy() == pytest.approx(want, rel=1e-4)

def test_what_each_method_depends_on():
    """In the walk's second section, what depends only on i - j is constant along diagonals, for
    keys of one kind."""
    source = Path("eval/walk.py").read_text("utf-8")
    section = source[source.index("# ## 2.") : source.index("figure, axes")]
    names = dict(vars(model), torch=torch, math=math)
    exec(section, names)
    assert sum(names["is_first"]) == 15  # words
    is_first = torch.tensor([True, True, False, False, True, True, *[False] * 3, True, False])
    for what, methods in names["methods"].items():
        for name in methods:
            effect = names["effect"](name, is_first)
            assert (effect.isnan() == torch.ones(11, 11).triu(1).bool()).all(), name
            same = [effect[i + 4, i] for i in range(7) if not is_first[i]]  # distance 4
            is_relative = torch.allclose(torch.stack(same), same[0], atol=1e-5)
            assert is_relative == (what == "by i – j only"), name

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
    attention.main(["gates", run, "--heads=2.1", "--device=cpu"])
    assert drawn[4].axes[0].get_title() == "layer 2, head 1"
    assert (drawn[4].axes[0].images[0].get_array() == drawn[2].axes[2].images[0].get_array()).all()
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for words, message in (
        (["gates", str(runs / "rope")], "has nothing to show of"),
        (["gates", run, "--heads=3.1"], "no head 3.1; choose from 1.1"),
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
                    for line in read_records(runs / name, "log.jsonl") if "loss" in line}
                   for name in ("rope", "rope_seed2"))
    loss[10] = 7.0
    panel = next(ax for ax in drawn[0].axes if ax.get_ylabel() == curves.METRICS["loss"])
    want = [[step, (loss[step] + other[step]) / 2] for step in (10, 20)]
    assert panel.lines[0].get_xydata() == pytest.approx(np.array(want))
    assert len(panel.lines) == 1 and panel.lines[0].get_label() == "rope"

# --- reports --------------------------------------------------------------------------------------

def measured(folder, values, **changes):
    """Writes a run directory with {split: loss} and options that differ from the defaults."""
    about = dict(seed=1, step=9, data_checksum=5, options="", device="cpu", config="config/x.py")
    about |= changes
    trained = dict(pe="pope", data="d", lr=1, out_dir=str(folder), device="cpu", seed=1)
    trained |= {key: about[key] for key in trained if key in about}
    folder.mkdir()
    (folder / "log.jsonl").write_text(
        '\n{"config": {"pe": "other"}}\n' + json.dumps({"config": trained}) + "\n")
    with open(folder / "results.jsonl", "a") as file:
        for split, value in values.items():
            length = 16 if split == "val 2x" else 8
            line = dict(run="elsewhere", options=about["options"], config=about["config"],
                        pe=trained["pe"], seed=about["seed"], step=about["step"], split=split,
                        trained=8, length=length, metric="loss", value=value,
                        data=about["data_checksum"])
            file.write(f"\n{json.dumps(line)}\n")

def table(capsys):
    """Returns the rows of the printed table, as {label: its other cells}."""
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.split("\n")
            if line.startswith("|")]
    return {label: cells for label, *cells in rows if label not in ("---", "run")}

def test_a_report_averages_what_is_alike(tmp_path, capsys):
    """Seeds are averaged, if all options of the training but those that do not change what a run
    learns, the step, the data and the options at test time are equal."""
    measured(tmp_path / "a_seed1", {"val": 1.0})
    measured(tmp_path / "a_seed2", {"val": 4.0}, seed=2, device="cuda")
    different = dict(b=dict(pe="rope"), c=dict(lr=2), d=dict(data="e"), e=dict(step=10),
                     f=dict(options="k=1,l=2"))
    for name, change in different.items():
        measured(tmp_path / f"{name}_seed3", {"val": 2.0}, seed=3, **change)
    out = tmp_path / "new" / "report"
    report.main([*map(str, sorted(tmp_path.iterdir())), f"--out={out}"])
    assert table(capsys) == {
        "a": ["2", "9", "2.500 ± 2.1 (1.000 to 4.000)"], "rope": ["1", "9", "2.000"],
        "c": ["1", "9", "2.000"], "d": ["1", "9", "2.000"], "e": ["1", "10", "2.000"],
        "pope (k=1, l=2)": ["1", "9", "2.000"]}
    rows = list(csv.DictReader(Path(f"{out}.csv").read_text().splitlines()))
    assert [(row["label"], float(row["value"])) for row in rows[:3]] == [
        ("a", 1), ("a", 4), ("rope", 2)]
    assert rows[0]["run"] == str(tmp_path / "a_seed1") and rows[0]["data"] == "5"

def test_the_picture_of_a_report(tmp_path, monkeypatch):
    """A curve is the mean over seeds, in a band of their range. What one of the seeds lacks is left
    out. Options at test time have a curve of their own, in another style."""
    drawn = []

    def save(figure, path, real=curves.save):
        drawn.append(figure)
        real(figure, path)

    monkeypatch.setattr(curves, "save", save)
    measured(tmp_path / "x_pope", {"val 1x": 1.0, "val 2x": 2.0})
    measured(tmp_path / "x_pope_seed2", {"val 1x": 5.0}, seed=2)
    measured(tmp_path / "x_rope", {"val 1x": 0.5, "val 2x": 1.5, "val": 9.0}, pe="rope")
    measured(tmp_path / "y_rope", {"val 1x": 3.0, "val 2x": 4.0}, pe="rope", options="k=1")
    report.main([*map(str, sorted(tmp_path.iterdir())), f"--out={tmp_path / 'r'}"])
    assert (tmp_path / "r.png").exists()
    (ax,) = drawn[0].axes
    found = [(line.get_label(), line.get_color(), line.get_linestyle(), line.get_xydata().tolist())
             for line in ax.lines if not line.get_label().startswith("_")]
    colors = curves.COLORS
    assert found == [
        ("pope", colors["pope"], "-", [[8, 3]]),
        ("rope", colors["rope"], "-", [[8, 0.5], [16, 1.5]]),
        ("rope (k=1)", colors["rope"], "--", [[8, 3], [16, 4]])]
    band = set(map(tuple, ax.collections[0].get_paths()[0].vertices.tolist()))
    assert band >= {(8, 1), (8, 5)}

def test_different_data_have_different_columns(tmp_path, capsys):
    for seed, checksum in ((1, 5), (2, 5), (3, 6)):
        measured(tmp_path / f"a_seed{seed}", {"val": float(seed)}, seed=seed,
                 data_checksum=checksum)
    report.main([*map(str, sorted(tmp_path.iterdir())), f"--out={tmp_path / 'x'}"])
    printed = capsys.readouterr().out
    assert "| run | seeds | step | val (data 5) | val (data 6) |" in printed
    assert ("| pope | 3 | 9 | 1.500 ± 0.71 (1.000 to 2.000) [2 of 3 runs] | 3.000 [1 of 3 runs] |"
            in printed)

def test_which_lines_of_results_count(tmp_path, capsys):
    """The last line of each number counts. Torn lines are skipped, and a folder without results is
    left out."""
    measured(tmp_path / "a", {"val": 1.0, "x2": 2.0})
    with open(tmp_path / "a" / "results.jsonl", "a") as file:
        file.write('{"run": "a", "val')
    lines = (tmp_path / "a" / "results.jsonl").read_text().split("\n")
    again = json.loads(lines[1]) | dict(value=3.0)
    with open(tmp_path / "a" / "results.jsonl", "a") as file:
        file.write("\n" + json.dumps(again) + "\n")
    (tmp_path / "b").mkdir()
    words = [f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/a/"]
    report.main([*words, f"--out={tmp_path / 'x'}"])
    printed = capsys.readouterr()
    assert "| pope | 1 | 9 | 3.000 | 2.000 |" in printed.out
    assert printed.err == f"left out {tmp_path}/b, which has no results.jsonl\n"
    with pytest.raises(Mistake, match="none of these runs has results"):
        report.main([f"{tmp_path}/b"])

def test_a_panel_for_each_set_of_lengths(drawn):
    """Losses, errors, and errors on two kinds of questions have their own panels. A whole split is
    left out of the losses, because its windows differ, and so is what has only one length."""
    lines = []
    for config, metric, splits in (
        ("config/text.py", "loss", {"val 1x": 8, "val 2x": 16, "val": 4, "test": 8}),
        ("config/task.py", "token_error", {"val": 8, "x2": 16}),
        ("config/task.py", "token_error", {"data/other val": 8, "data/other x2": 16}),
        ("config/task.py", "token_error", {"sparse": 8}),
        ("config/lookup_small.py", "token_error", {"content": 8, "content_x2": 16}),
        ("config/lookup_small.py", "token_error", {"position": 8, "position_x2": 16}),
    ):
        for split, length in splits.items():
            for data in (0, 1) if "content" in split else (0,):
                lines.append(dict(run="x_pope", label="pope", config=config, pe="pope", split=split,
                                  trained=16, length=length, metric=metric, value=10.0 + length,
                                  data=data))
    report.draw_by_length(lines, "x")
    axes = [ax for ax in drawn[0].axes if ax.get_visible()]
    assert [ax.get_title() for ax in axes] == [
        "text", "task", "task, data/other", "lookup, content (data 0)", "lookup, content (data 1)",
        "lookup, position"]
    for ax in axes:
        assert ax.lines[0].get_xydata().tolist() == [[8, 18], [16, 26]]
        assert ax.get_xticks().tolist() == [8, 16]
