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
from config.runs import TrainedRun, append, read_records
from data import place
from data.shards import Split
from eval import attention, curves, draw, records, report
from model import GPT, GPTConfig

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

def test_axes_of_learned_rotations(stream, tmp_path, drawn):
    """PoPE's delta is negative, so only CARoPE's panels have a logarithmic axis."""
    train.main([f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, "--pe=pope,carope",
                "--max_iters=2"])
    attention.main(["rotation", str(tmp_path / "a"), "--device=cpu"])
    pope, carope = drawn[0].axes
    assert (pope.get_ylabel(), pope.get_yscale()) == ("delta, radians", "linear")
    assert (carope.get_ylabel(), carope.get_yscale()) == (
        "mean frequency / initial one", "log")
    low, high = pope.get_ylim()
    assert all(low <= y <= high for line in pope.lines[:2] for y in line.get_ydata())

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
        net = TrainedRun(str(runs / name), "cpu").model
        losses = torch.zeros(length)
        for start in starts:
            x, y = x_all[start : start + length], y_all[start : start + length]
            with torch.no_grad():
                logp = net(x[None], y[None])[0][0].log_softmax(-1)
            losses -= logp[torch.arange(length), y] / len(starts)
        return losses.view(-1, 4).mean(1).numpy()

    *named, dashed = drawn[0].axes[0].lines
    named = {line.get_label(): line for line in named}
    rope, learned = named.pop("rope"), named.pop("learned")
    assert not named
    seeds = loss("rope", 128), loss("rope_seed2", 128)
    assert rope.get_ydata() == pytest.approx(sum(seeds) / 2, abs=1e-5)
    assert rope.get_xdata() == pytest.approx(np.arange(2.5, 128, 4))
    assert learned.get_ydata() == pytest.approx(loss("learned", 16), abs=1e-5)
    assert dashed.get_xdata()[0] == 16

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
    panel = next(ax for ax in drawn[0].axes if ax.get_ylabel() == draw.METRICS["loss"])
    want = [[step, (loss[step] + other[step]) / 2] for step in (10, 20)]
    assert panel.lines[0].get_xydata() == pytest.approx(np.array(want))
    assert len(panel.lines) == 1 and panel.lines[0].get_label() == "rope"

# --- reports --------------------------------------------------------------------------------------

ABOUT = dict(config="config/x.py", pe="pope", flags={}, settings=1, seed=1, step=9, options={},
             trained=8, multiple=None, tokens=None, window=None, data="d", split="val",
             fingerprint=5, length=8, metric="loss")

def lines_of(tmp_path, *records_):
    """Returns the lines that eval.report reads of results, each of which is a dict with a `run`, a
    value and what differs from ABOUT. They are recorded as a run records them."""
    for n, record_ in enumerate(records_):
        changes = {name: value for name, value in record_.items() if name not in ("run", "value")}
        about = ABOUT | changes
        where = place(about["data"], about["split"], about["length"])
        measured(tmp_path / record_["run"], (record_["value"], where | changes))
    return records.read(dict.fromkeys(str(tmp_path / record_["run"]) for record_ in records_))

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
    with open(folder / "results.jsonl", "a") as file:
        for record in records:
            append(file, record)

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

def test_the_label_of_a_run_that_was_trained_from_another(tmp_path, capsys):
    """It does not name the other's method and seed, which are its own, but its other options."""
    for name, source, pe, seed, loss in (
        ("a", "out/x_pope", "pope", 1, 1), ("b", "out/x_pope_seed2", "pope", 2, 3),
        ("c", "out/x_rope", "rope", 1, 4), ("d", "out/x_pope_base=100", "pope", 1, 5),
        ("e", "out/x_pope_base=100_seed2", "pope", 2, 7), ("f", "out/x_rope", "nope", 1, 8),
    ):
        measured(tmp_path / name, (loss, {}), pe=pe, seed=seed, flags=dict(init_from=source))
    report.main([str(tmp_path / name) for name in "abcde"])
    (rows,) = tables(capsys).values()
    assert rows == {"row": ["seeds", "val"], "`pope`": ["2", "2.000 (1.000–3.000)"],
                    "`pope from base=100`": ["2", "6.000 (5.000–7.000)"],
                    "`rope`": ["1", "4.000"]}
    report.main([str(tmp_path / name) for name in "cf"])
    (rows,) = tables(capsys).values()
    assert {*rows} == {"row", "`rope --init_from=out/x_*`", "`nope --init_from=out/x_rope`"}

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
    assert title == ("x, on d, trained on 8 tokens at a time, for 9 steps: loss, nats per token, "
                     "mean (lowest–highest), sorted by val 2x")
    assert list(rows.items()) == [
        ("row", ["seeds", "val 1x", "val 2x", "val 2x in windows"]),
        ("`rope`", ["1", "2.000", "2.500", "–"]),
        ("`pope`", ["2", "1.250 (1.000–1.500)", "3.000 [1 of 2 seeds]", "0.500 [1 of 2 seeds]"]),
        ("`learned`", ["1", "0.500", "–", "–"])]
    report.main([*sources, "--rows=rope,learned", "--only=x", "--metrics=loss", picture])
    assert [*tables(capsys)[title]] == ["row", "`rope`", "`learned`"]
    with pytest.raises(Mistake, match="--only=y leaves nothing; there are x"):
        report.main([*sources, "--only=y", picture])
    with pytest.raises(Mistake, match="no table has these rows and .* the rows learned, pope"):
        report.main([*sources, "--rows=roqe", picture])

def test_lengths_below_the_trained_one(tmp_path, capsys):
    """A table with such a column names lengths in tokens, because 1x would be the longest."""
    measured(tmp_path / "a", *((1.0, dict(multiple=m, length=int(8 * m))) for m in (0.5, 1.0)))
    report.main([str(tmp_path / "a"), f"--out={tmp_path / 'x.png'}"])
    (rows,) = tables(capsys).values()
    assert rows["row"] == ["seeds", "val 4", "val 8"]

def test_rows_with_no_other_options(tmp_path, capsys):
    for n, (flags, options) in enumerate([
        ({}, {}), ({"base": 100.0}, {}), ({"base": 5.0, "n_layer": 2}, {}),
        ({}, {"rope_scaling": "ntk"}), ({"base": 100.0}, {"rope_scaling": "ntk"}),
    ]):
        measured(tmp_path / str(n), (1.0, dict(flags=flags, options=options)), pe="rope")
    words = [str(path) for path in tmp_path.iterdir()] + [f"--out={tmp_path / 'x.png'}"]
    for options, rows in (
        ("none", {"`rope`"}),
        ("base", {"`rope`", "`rope --base=100`"}),
        ("rope_scaling", {"`rope`", "`rope@rope_scaling=ntk`"}),
    ):
        report.main([*words, f"--options={options}"])
        (found,) = tables(capsys).values()
        assert {*found} == {"row"} | rows

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
    out. A file of something else is refused, and nobody is told to delete it."""
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
    with pytest.raises(Mistake, match="does not hold results, which are in RUN/results.jsonl; na"):
        report.main([f"{tmp_path}/b"])

def test_the_curves_of_a_report(drawn, tmp_path):
    """A curve is the mean over seeds, in a band of their range. What one of the seeds lacks is left
    out. A method outside COLORS gets a colour that no other has, and rows beside it are thin.
    Windows are drawn only if they are asked for."""
    lines = []
    for run, pe, change, values in (
        ("a1", "rope", {}, (1.0, 2.0, 7.0)), ("a2", "rope", dict(seed=2), (5.0, 4.0)),
        ("b", "slope", {}, (3.0, 4.0)),
        ("c", "rope", dict(options=dict(k=1)), (8.0, 9.0)),
        ("a1", "rope", dict(metric="window_loss"), (1.0, 0.5)),
        ("d", "rope", {}, (5.0, 6.0))):
        for n, value in enumerate(values):
            lines.append(dict(run=run, pe=pe, multiple=2**n, tokens=9, length=8 * 2**n,
                              value=value, **change))
    own, other = lines_of(tmp_path, *lines[:-2]), lines_of(tmp_path, *lines[-2:])
    report.draw_panels(own + records.comparable(other, own), "x", windows=["rope"])
    (ax,) = drawn[0].axes
    found = {line.get_label(): (line.get_color(), line.get_linestyle(), line.get_xydata().tolist())
             for line in ax.lines if not line.get_label().startswith("_")}
    black = draw.COLORS["rope"]
    assert found["rope@k=1"] == (black, "--", [[8, 8], [16, 9]])
    assert found["slope"] == (draw.OTHER_COLORS[0], "-", [[8, 3], [16, 4]])
    assert found["rope, in windows of 8"] == (black, "-.", [[8, 1], [16, 0.5]])
    beside, own = sorted((line for line in ax.lines if line.get_label() == "rope"),
                         key=lambda line: line.get_linewidth())
    assert own.get_xydata().tolist() == [[8, 3], [16, 3]]
    assert beside.get_xydata().tolist() == [[8, 5], [16, 6]]
    assert own.get_color() == beside.get_color() == black
    assert beside.get_linewidth() < own.get_linewidth()
    bands = [set(map(tuple, band.get_paths()[0].vertices.tolist())) for band in ax.collections]
    assert any(band >= {(8, 1), (8, 5), (16, 2), (16, 4)} for band in bands)

def test_a_panel_for_each_set_of_lengths(drawn, tmp_path):
    """Losses, errors, and errors on two kinds of questions have their own panels. A whole split is
    left out of the losses, because its windows differ, and so is what has only one length."""
    lines = []
    for data, metric, splits, *multiples in (
        ("stdlib", "loss", {"val": 8}, 1.0, 2.0), ("stdlib", "loss", {"val": 4, "test": 8}),
        ("recall", "token_error", {"val": 8, "x2": 16}),
        ("flip_flop", "token_error", {"sparse": 8, "dense": 16}),
        ("lookup", "token_error", {"content": 8, "content_x2": 16}),
        ("lookup", "token_error", {"position": 8, "position_x2": 16}),
    ):
        for split, length in splits.items():
            for fingerprint in (0, 1) if "content" in split else (0,):
                for multiple in multiples or [None]:
                    length *= multiple or 1
                    lines.append(dict(
                        run=f"r{fingerprint}", config=f"{data}.py", title=f"the {data}", data=data,
                        split=split, metric=metric, length=length, multiple=multiple,
                        fingerprint=fingerprint, value=10.0 + length))
    report.draw_panels(lines_of(tmp_path, *lines), "x")
    axes = [ax for ax in drawn[0].axes if ax.get_visible()]
    assert [ax.get_title("left") for ax in axes] == [
        "the stdlib", "the recall", "the lookup: by its key (lookup, 0)",
        "the lookup: by counting back", "the lookup: by its key (lookup, 1)"]
    for ax in axes:
        assert ax.lines[0].get_xydata().tolist() == [[8, 18], [16, 26]]
        assert ax.get_xticks().tolist() == [8, 16]

def test_echoes_over_distance(drawn, tmp_path):
    """The loss of echoes has a panel over the distance of the copy, for each trained length, with
    the loss of new text to the right. Short rows, which have one distance, have no panel."""
    lines = []
    for experiment, trained in (("echo_small", 128), ("echo_long_small", 1024)):
        for split, length in (("new_128", 128), ("at64_128", 128), ("new_1024", 1024),
                              ("at64_1024", 1024), ("at900_1024", 1024)):
            for metric in ("loss", "token_error"):
                lines.append(dict(
                    run=f"r{trained}", config=f"config/{experiment}.py", data="echo",
                    metric=metric, split=split, length=length, trained=trained, value=len(lines)))
    report.draw_panels(lines_of(tmp_path, *lines), "x")
    assert [ax.get_title("left") for ax in drawn[0].axes] == [
        "echo_small: finding a copy in 1024 bytes", "echo_long_small: finding a copy in 1024 bytes"]
    for ax, first in zip(drawn[0].axes, (0, 10)):
        curve, apart, *_ = ax.lines
        assert curve.get_xydata().tolist() == [[64, first + 6], [900, first + 8]]
        assert apart.get_xydata().tolist() == [[2048, first + 4]]
        labels = [label.get_text() for label in ax.get_xticklabels()]
        assert dict(zip(ax.get_xticks(), labels)) == {64: "64", 900: "900", 2048: "no copy"}
        assert ax.get_ylabel() == "loss, nats per byte"

@pytest.mark.parametrize("n, name", [
    (3, "curve"), (23, "curve"), (13, "a name that needs two of the lines of a panel"),
    (60, "curve --learning_rate=0.001 --warmup_iters=100_of_a_long_name_without_a_space")])
def test_names_of_curves(n, name, capsys):
    """They stand beside the panel in the order in which the curves end, and within the figure. If
    there are more than MOST_CURVES curves, only those that end lowest are drawn."""
    figure, (ax,) = draw.panels(1, 1, 7, 3)
    lines = [ABOUT | dict(label=f"{name} {i}", at=at, y=at * i**3) for i in range(n)
             for at in (0, 1)]
    draw.curves(ax, lines, "y", draw.colors_of(lines))
    draw.name_curves(ax, 3)
    figure.draw_without_rendering()
    legend = ax.get_legend()
    names = ["".join(text.get_text().split()) for text in legend.get_texts()]
    assert names == ["".join(f"{name} {i}".split())
                     for i in reversed(range(min(n, draw.MOST_CURVES)))]
    assert ("drew only 24 of 60 curves" in capsys.readouterr().out) == (n == 60)
    box = legend.get_window_extent()
    assert box.x0 > ax.bbox.x1 and box.x1 <= figure.bbox.x1
    assert box.y0 >= 0 and box.y1 <= figure.bbox.y1
    assert ax.bbox.width > 2.5 * figure.dpi

def test_a_name_with_a_dollar(drawn, tmp_path):
    """It is not the start of a formula, which matplotlib could not read."""
    lines = [dict(run="r", flags=dict(k=f"/home/$HOME/{k}$"), title="a $ b $ c", multiple=m,
                  tokens=9, length=8 * m, value=1.0) for k in (1, 2) for m in (1, 2)]
    report.draw_panels(lines_of(tmp_path, *lines), "x")
    drawn[0].draw_without_rendering()
    drawn[0].savefig(tmp_path / "x.png")

def test_where_rows_stand(tmp_path, capsys):
    """The published methods a, b and c have a spread of 0.1 between seeds."""
    for pe, mean in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        for seed in (0, 1):
            measured(tmp_path / "published", (mean + 0.1 * (-1) ** seed / 2**0.5, {}), pe=pe,
                     seed=seed)
    measured(tmp_path / "own", (2.2, {}), pe="own")
    published = tmp_path / "published" / "results.jsonl"
    words = [f"--beside={published}", f"--out={tmp_path / 'x.png'}"]
    report.main([str(tmp_path / "own"), *words])
    printed = capsys.readouterr().out
    assert "| **own** | 1 | 2.200 |" in printed
    assert "\nval (a spread is 0.1): own is 2.0 spreads worse than b and 12.0 spreads w" in printed
    measured(tmp_path / "equal", (2.0, {}), pe="equal")
    published.write_text(published.read_text().replace("1.07", "1.97").replace("4.0", "2.0"))
    report.main([str(tmp_path / "equal"), *words])
    assert "One seed says little here, because the methods lie so clos" in capsys.readouterr().out
    measured(tmp_path / "new", (2.0, {}), pe="new", config="config/new.py")
    report.main([str(tmp_path / "new"), *words])
    assert "rows are bold" in printed and "rows are bold" not in capsys.readouterr().out
    published.write_text(published.read_text().split("\n")[1])
    report.main([str(tmp_path / "own"), *words])
    assert "val: there is too little to compare with." in capsys.readouterr().out

def test_one_row_however_the_config_file_was_named(tmp_path, capsys):
    """A path from the project and an absolute one are the same experiment, and the same seed is the
    same run."""
    measured(tmp_path / "a", (1.0, {}))
    measured(tmp_path / "b", (2.0, {}), config=str(tmp_path / "config" / "x.py"))
    report.main([str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr()
    assert "| `pope` | 1 | 2.000 |" in printed.out and "are the same row" in printed.err

def test_the_gain_of_each_data_set_and_window(tmp_path, capsys):
    """It is the loss in windows minus that with all in view, of the same texts."""
    def pair(loss, in_windows, **more):
        about = dict(multiple=2.0, length=16, tokens=9, **more)
        return [(loss, about), (in_windows, dict(about, metric="window_loss", window=8))]

    measured(tmp_path / "a", *pair(1.0, 1.5), *pair(2.0, 2.25, data="e", fingerprint=6))
    measured(tmp_path / "b", *pair(1.0, 1.125), pe="rope")
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--gain", f"--out={tmp_path / 'x.png'}"]
    report.main(words)
    (rows,) = tables(capsys).values()
    gains = [n for n, heading in enumerate(rows["row"]) if heading.startswith("gain")]
    assert [[cells[n] for n in gains] for cells in (rows["`pope`"], rows["`rope`"])] == [
        ["0.500", "0.250"], ["0.125", "–"]]
    report.main([*words, "--data=d", "--columns=gain"])
    (rows,) = tables(capsys).values()
    assert rows == {"row": ["seeds", "gain"], "`rope`": ["1", "0.125"], "`pope`": ["1", "0.500"]}
    about = dict(multiple=2.0, length=16, tokens=9, metric="window_loss")
    measured(tmp_path / "c", *pair(1.0, 1.5), (1.25, dict(about, window=4)))
    report.main([str(tmp_path / "c"), "--gain", f"--out={tmp_path / 'x.png'}"])
    (rows,) = tables(capsys).values()
    assert sorted(zip(rows["row"], rows["`pope`"]))[:2] == [
        ("gain over windows of 4", "0.250"), ("gain over windows of 8", "0.500")]

def test_a_curve_in_windows_names_them(drawn, tmp_path):
    """By their own length, which --window may have changed."""
    lines = [dict(run="r", multiple=m, tokens=9, length=8 * m, value=1.0, metric=metric, window=4)
             for m in (1, 2) for metric in ("loss", "window_loss")]
    report.draw_panels(lines_of(tmp_path, *lines), "x", windows=["pope"])
    assert "pope, in windows of 4" in drawn[0].axes[0].get_legend_handles_labels()[1]

def test_trained_lengths_are_not_mixed(tmp_path, capsys):
    """Rows of another trained length are not shown beside a run, and each table names it."""
    measured(tmp_path / "own", (1.0, {}))
    measured(tmp_path / "all", (2.0, {}), seed=2)
    measured(tmp_path / "all", (3.0, {}), trained=16, flags=dict(block_size=16))
    words = [f"--beside={tmp_path / 'all' / 'results.jsonl'}", f"--out={tmp_path / 'x.png'}"]
    report.main([str(tmp_path / "own"), *words])
    (title, rows), = tables(capsys).items()
    assert "trained on 8 tokens" in title and list(rows) == ["row", "**pope**", "`pope`"]

def test_one_seed(tmp_path, capsys):
    """A table of one seed leaves out the others, and 0 is a seed, too."""
    for seed in (0, 2):
        measured(tmp_path / f"{seed}", (1.0 + seed, {}), seed=seed)
    words = [str(tmp_path / "0"), str(tmp_path / "2"), f"--out={tmp_path / 'x.png'}"]
    cells = {"": "2.000 (1.000–3.000)", "--seed=0": "1.000", "--seed=2": "3.000"}
    for given, cell in cells.items():
        report.main([*words, *given.split()])
        (rows,) = tables(capsys).values()
        assert rows["`pope`"][1] == cell

def test_every_method_has_a_colour_of_its_own():
    """All methods and mixes that are published have one."""
    colors = [*draw.COLORS.values(), *draw.OTHER_COLORS]
    assert len(set(colors)) == len(colors)
    published = {line["pe"] for line in records.read(["eval/results.jsonl"])}
    assert published <= {*draw.COLORS} <= {*model.PES} | published

def test_axes_say_what_they_count(drawn, tmp_path):
    """Bytes, or the letters of a string, of which each comes again in the answer."""
    lines = []
    for data in ("stdlib", "flip_flop", "strings@task=copy,longest=12", "strings@task=addition"):
        for length in (24, 48):
            lines.append(dict(run="r", data=data, metric="token_error", length=length, trained=24,
                              multiple=length / 24, value=1.0))
    report.draw_panels(lines_of(tmp_path, *lines), "x")
    found = [(ax.get_xlabel().split()[1], *ax.get_xticks(), ax.lines[-1].get_xdata()[0])
             for ax in drawn[0].axes if ax.get_visible()]
    assert found == [("bytes;", 24, 48, 24), ("tokens;", 24, 48, 24), ("letters;", 12, 24, 12),
                     ("tokens;", 24, 48, 24)]
