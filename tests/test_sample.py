"""sample.py and eval/: losses against sums by hand, of plain forward passes. What sample.py refuses
stands in test_bad_input.py."""
import dataclasses
import json
import math
import os
import re
import runpy
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY

import eval
import sample
import train
from data.shards import Split, Writer
from eval import figures, losses, results


@pytest.fixture(scope="module")
def runs(stream, tmp_path_factory):
    """Run directories of tiny models, trained for a few steps at 16 tokens."""
    folder = tmp_path_factory.mktemp("out")
    for pe in ("pope", "learned", "rope", "expe", "carope+cope"):
        train.main([f"--data={stream}", f"--out_dir={folder / pe}", *TINY, f"--pe={pe}",
                    "--max_iters=10"])
    return folder

@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A run of a half-learned task: two answers follow a 7, the first of them easy."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    writer = Writer(folder / "data")
    for split, n, T in (("train", 256, 8), ("val", 40, 8), ("long", 24, 12)):
        tokens = rng.integers(0, 5, (n, T))
        tokens[:, 4:7] = np.stack((np.full(n, 7), tokens[:, 3], rng.integers(0, 2, n)), 1)
        loss = np.zeros_like(tokens)
        loss[:, 5:7] = 1
        writer.write(split, tokens, loss)
    writer.finish(vocab_size=8, tokenizer={"symbols": list("abcdefgh")})
    train.main([f"--data={folder / 'data'}", f"--out_dir={folder / 'run'}", *TINY,
                "--max_iters=150", "--batch_size=16", "--pe=rope", "--dropout=0.0"])
    return folder

def token_losses(run, tokens, windows):
    """The losses of each window (begin, end, first), of its targets from `first` on."""
    net, found = sample.load(str(run), "cpu")[0], {}
    for size in {end - begin for begin, end, _ in windows}:
        same = [window for window in windows if window[1] - window[0] == size]
        idx = torch.from_numpy(np.stack([tokens[begin : end + 1] for begin, end, _ in same]))
        with torch.no_grad():
            logp = net(idx[:, :-1], idx[:, 1:])[0].double().log_softmax(-1)
        found |= zip(same, -logp.gather(-1, idx[:, 1:, None])[..., 0])
    return torch.cat([found[window][window[2] - window[0] :] for window in windows]).tolist()

def tiles(spans, length):
    return [(a, min(a + length, stop)) for start, stop in spans for a in range(start, stop, length)]

def tokens_of(folder, split, *shape):
    tokens = np.fromfile(os.path.join(folder, f"{split}_000000.bin"), "<u2").astype(int)
    return tokens.reshape(shape or -1)

def numbers(run, metric="loss"):
    """{the last word of the split: number}, as they were measured last."""
    lines = results.records(results.split_options(str(run))[0], "results.jsonl")
    return {line["split"].split()[-1]: line["value"] for line in lines
            if line["run"] == str(run) and line["metric"] == metric}

# losses

@pytest.mark.parametrize("eval_tokens, spans, multiples", [
    # 16 stretches, with a shorter window at the end at 1.5x
    (512, [(i * 567 // 15, i * 567 // 15 + 32) for i in range(16)], (0.5, 1, 1.5, 2)),
    # all of the split, in segments, with a shorter window at the end
    (131072, [(0, 599)], (1, 2.5, 4)),
])
def test_extrapolation(runs, stream, monkeypatch, capsys, eval_tokens, spans, multiples):
    """Every multiple has the same targets. The windows of window_loss overlap by half."""
    monkeypatch.setattr(losses, "SEGMENT", 20)  # so that 32 and 64 tokens use the cache
    tokens = tokens_of(stream, "val")
    names = [str(runs / name) for name in ("pope", "learned", "expe@expe_scale=0.5")]
    asked = ",".join(map(str, multiples))
    sample.main([*names, f"--eval_tokens={eval_tokens}", f"--extrapolate={asked}", "--device=cpu"])
    printed = capsys.readouterr().out
    for name in names:
        for m in multiples:
            length, windows = round(16 * m), []
            for start, stop in tiles(spans, length):
                windows.append((start, min(start + 16, stop), start))
                while windows[-1][1] < stop:
                    end = min(windows[-1][1] + 8, stop)
                    windows.append((end - 16, end, windows[-1][1]))
            terms = token_losses(name, tokens, windows)
            assert len(terms) == sum(stop - start for start, stop in spans)
            near = numbers(name, "window_loss")[f"{m}x"]
            assert near == pytest.approx(sum(terms) / len(terms), abs=1e-5)
            if "learned" in name and m > 1:
                assert f"{m}x" not in numbers(name) and "ends at 16" in printed
                continue
            tiled = [(start, stop, start) for start, stop in tiles(spans, length)]
            terms = token_losses(name, tokens, tiled)
            loss = numbers(name)[f"{m}x"]
            assert loss == pytest.approx(sum(terms) / len(terms), abs=1e-5)
            assert f"{loss:.4f} ({math.exp(loss):.2f})" in printed
    assert sample.load(names[2])[0].cfg.expe_scale == 0.5

def test_a_masked_stream_is_divided_by_its_targets(tmp_path):
    """One token in twenty carries loss."""
    rng, writer = np.random.default_rng(0), Writer(tmp_path / "data")
    for split, n in (("train", 2000), ("val", 500)):
        writer.write(split, rng.integers(0, 9, n), rng.random(n) < 0.05)
    writer.finish(vocab_size=9, tokenizer={"symbols": list("abcdefghi")})
    run = str(tmp_path / "run")
    train.main([f"--data={tmp_path / 'data'}", f"--out_dir={run}", *TINY, "--max_iters=2"])
    sample.main([run, "--extrapolate=1,3", "--device=cpu"])
    tokens = tokens_of(tmp_path / "data", "val")
    mask = np.fromfile(tmp_path / "data" / "val_000000.loss", "u1")[1:]
    for m in (1, 3):
        windows = [(start, stop, start) for start, stop in tiles([(0, 499)], 16 * m)]
        terms = np.array(token_losses(run, tokens, windows))
        assert numbers(run)[f"{m}x"] == pytest.approx(terms[mask == 1].mean(), abs=1e-5)

def test_loss_by_position(runs, stream, tmp_path, monkeypatch):
    """Segments of eight times the trained length, whose positions are averaged in 32 groups.
    `learned` reads the beginnings of the same segments."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(losses, "SEGMENT", 50)  # so that the cache is used
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    sample.main([str(runs / "rope"), str(runs / "learned"), "--figure=loss_by_position",
                 f"--out={tmp_path / 'new' / 'x'}", "--device=cpu", "--eval_tokens=400"])
    tokens = tokens_of(stream, "val")
    starts = [0, (599 - 128) // 2, 599 - 128]  # three segments of 128 tokens
    lines = drawn[0].axes[0].lines
    for line, name, length in zip(lines, ("rope", "learned"), (128, 16)):
        found = np.reshape(token_losses(
            runs / name, tokens, [(start, start + length, start) for start in starts]), (3, length))
        want = [[4 * n + 2.5, found[:, 4 * n : 4 * n + 4].mean()] for n in range(length // 4)]
        assert np.allclose(line.get_xydata(), want) and line.get_label() == name
    assert list(lines[2].get_xdata()) == [16, 16]
    header, *rows = (tmp_path / "new" / "x.csv").read_text().splitlines()
    assert len(rows) == 32 + 4 and {"position", "loss"} <= set(header.split(","))

def test_evaluate_whole_splits(task, runs, stream, capsys):
    """sequence_error counts the rows that greedy decoding gets wrong."""
    sample.main([str(task / "run"), "--evaluate=val,long", "--device=cpu"])
    row = capsys.readouterr().out.splitlines()[-1]
    net = sample.load(str(task / "run"), "cpu")[0]
    for name, n, T in (("val", 40, 8), ("long", 24, 12)):
        rows = tokens_of(task / "data", name, n, T)
        decoded = net.generate(torch.tensor(rows[:, :5]), 2, temperature=0)[:, 5:].numpy()  # greedy
        wrong = int((decoded != rows[:, 5:7]).any(1).sum())
        assert 0 < wrong < n, "the test needs right and wrong rows"
        found = numbers(task / "run", "sequence_error")[name]
        assert found == pytest.approx(100 * wrong / n, abs=1e-4)
        assert f"{100 * wrong / n:.2f}%" in row
    sample.main([str(runs / "pope"), "--evaluate=val", "--device=cpu"])
    row = capsys.readouterr().out.splitlines()[-1]
    windows = [(start, start + 16, start) for start in Split(stream, "val").windows(16)]
    terms = token_losses(runs / "pope", tokens_of(stream, "val"), windows)
    loss = sum(terms) / len(terms)
    assert len(terms) == 37 * 16 and row.split()[1:] == [f"{loss:.4f}", f"({math.exp(loss):.2f})"]
    assert numbers(runs / "pope")["val"] == pytest.approx(loss, abs=1e-4)

def test_rows_without_a_target_are_not_counted():
    """Two rows of three have targets, and the model is wrong in one of them."""
    y = torch.tensor([[1, -1], [2, 2], [-1, -1]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0], [2, 0], [0, 0]]), 3).float()
    found = losses.error_sums(lambda x, y: (logits, torch.tensor(0.5)), y, y)
    assert found.tolist() == [1.5, 3, 1, 1, 2]
    assert losses.scores(found, masked=True)["sequence_error"] == 50

# text and answers

def test_text(runs, capsys):
    """Samples differ, a seed repeats them, and the separator is not printed."""
    def texts(*words):
        sample.main([*words, "--device=cpu"])
        lines = capsys.readouterr().out.splitlines()
        return [line.split() for line in lines if not line.startswith("---")]

    pope, rope = str(runs / "pope"), str(runs / "rope")
    words = [pope, rope, "--prompt=s3 s10", "--max_new_tokens=20"]
    first = texts(*words)
    assert [len(t) for t in first] == [22] * 4 and all(t[:2] == ["s3", "s10"] for t in first)
    assert first[0] != first[1] and texts(*words) == first
    greedy = texts(pope, "--temperature=0.0", "--max_new_tokens=5")
    assert greedy[0] == greedy[1] and len(greedy[0]) == 5
    assert texts(pope, "--temperature=5.0", "--top_k=1", "--max_new_tokens=5") == greedy

def test_learned_writes_as_many_tokens_as_fit(runs, capsys):
    for prompt, n in ("", 16), ("s1 s2 s3", 17):  # the last token is not read again
        sample.main([str(runs / "learned"), "--num_samples=1", f"--prompt={prompt}"])
        title, text = capsys.readouterr().out.splitlines()
        assert title.endswith("sample 1, which ends at 16 tokens") and len(text.split()) == n

def test_ids_that_the_data_lack_are_not_shown(stream, rows, tmp_path, capsys):
    """A model with a larger vocab_size draws them before it has learned anything."""
    for data in (stream, rows):
        words = [f"--data={data}", *TINY, "--max_iters=0", "--vocab_size=999"]
        train.main([*words, f"--out_dir={tmp_path / os.path.basename(data)}"])
        sample.main([str(tmp_path / os.path.basename(data)), "--device=cpu"])
        assert capsys.readouterr().out.count("\n--- ") == 2

def test_rows_show_the_answers_that_greedy_decoding_gives(task, capsys):
    capsys.readouterr()
    sample.main([str(task / "run"), "--num_samples=24", "--split=long", "--device=cpu"])
    lines, seen = capsys.readouterr().out.splitlines(), set()
    net = sample.load(str(task / "run"), "cpu")[0]
    for i, row in enumerate(tokens_of(task / "data", "long", 24, 12)):
        text, words = ["abcdefgh"[token] for token in row], []
        for t in (5, 6):  # each answer after the right tokens before it
            said = "abcdefgh"[int(net(torch.tensor(row[None, :t]))[0].argmax())]
            words.append(f"[{said}]" if said == text[t] else f"[{said}, not {text[t]}]")
        right = sum("not" not in word for word in words)
        seen.add(right)
        assert lines[1 + 2 * i] == f"--- row {i + 1}, {right} of 2 right"
        assert lines[2 + 2 * i] == " ".join(text[:5] + words)
    assert len(seen) > 1, "the test needs right and wrong answers"

# what is kept, and its report

def test_each_number_is_kept_with_all_that_made_it(runs, task, tmp_path):
    """A number on other data names them."""
    pope, rope, other = str(runs / "pope"), str(task / "run"), str(tmp_path / "other")
    shutil.copytree(task / "data", other)
    for run, words, split, metrics, steps in (
        (pope, ["--extrapolate=1,2", "--eval_tokens=512"], "val (512 tokens) 2x",
         ["loss", "ppl", "window_loss"], 10),
        (rope, ["--evaluate=val", f"--data={other}"], f"{other} val",
         ["loss", "ppl", "token_error", "sequence_error"], 150),
    ):
        sample.main([run, *words, "--device=cpu"])
        lines = results.records(run, "results.jsonl")[-len(metrics) :]
        assert [line["metric"] for line in lines] == metrics
        for line in lines:
            assert (line["run"], line["split"], line["steps"]) == (run, split, steps)
            assert line["seed"] == 1337 and line["torch"] == torch.__version__ and line["machine"]
            assert "commit" in line and "config" in line

def test_a_line_that_was_cut_short_costs_no_other(runs, tmp_path):
    run = str(tmp_path / "rope")
    shutil.copytree(runs / "rope", run)
    for name in ("results.jsonl", "log.jsonl"):
        with open(os.path.join(run, name), "a") as file:
            file.write('{"run": "out/x", "ste')
    sample.main([run, "--evaluate=val", "--device=cpu"])  # begins a new line
    assert numbers(run).keys() == {"val"}
    assert [row["step"] for row in results.training([run])] == [0, 10]

def write_results(folder, values):
    """Run directories with results written by hand: {name: value at 1x}; that at 2x is 1 more."""
    for name, value in values.items():
        (folder / name).mkdir(parents=True)
        line = dict(run=str(folder / name), config=f"config/{name[0]}.py", pe=name.split("_")[1],
                    seed=int(name.partition("_seed")[2] or 1337), trained=8, metric="loss", steps=9)
        lines = [line | dict(split=f"val {n}x", length=8 * n, value=value + n - 1) for n in (1, 2)]
        lines.insert(0, lines[0] | dict(value=99.0))  # measured again since
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "results.jsonl").write_text(text)

@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """A function that returns the table rows of a report: [(run, seeds, numbers of each cell)]"""
    monkeypatch.setattr(figures, "draw_by_length", lambda lines, path: None)
    monkeypatch.chdir(tmp_path)

    def rows(*names):
        sample.main([*names, "--report=new/r"])
        found = []
        for line in capsys.readouterr().out.splitlines():
            run, seeds, *cells = line.strip("| ").split(" | ") if line.startswith("|") else ["", ""]
            if seeds.isdigit():
                texts = [re.findall(r"[\d.]+", cell) for cell in cells]
                found.append((run, int(seeds), [[float(number) for number in t] for t in texts]))
        return found

    return rows

def test_report(tmp_path, report):
    """Three seeds of one run, a run of another method and one of another config. A cell holds the
    mean, the standard deviation and the range."""
    values = dict(x_pope=1.0, x_pope_seed2=2.0, x_pope_seed3=6.0, x_rope=0.5, y_rope=4.0)
    write_results(tmp_path / "out", values)
    assert report(*(f"out/{name}" for name in values)) == [
        ("pope", 3, [[3, 2.6, 1, 6], [4, 2.6, 2, 7]]),
        ("rope", 1, [[0.5], [1.5]]),
        ("rope", 1, [[4], [5]]),
    ]
    assert len((tmp_path / "new" / "r.csv").read_text().splitlines()) == 1 + 10

def test_report_of_runs_with_options(tmp_path, report, capsys):
    """RUN stands for everything that was measured of it, and RUN@key=value for what was measured
    with these options. One run has one row, although it was measured under another path. A run
    without results is left out."""
    write_results(tmp_path / "out", dict(x_pope=1.0, x_rope=2.0))  # under absolute paths
    (tmp_path / "out" / "x_new").mkdir()
    path = tmp_path / "out" / "x_rope" / "results.jsonl"
    line = json.loads(path.read_text().splitlines()[0]) | dict(value=5.0)
    with open(path, "a") as file:
        for run in ("out/x_rope", "elsewhere/x_rope@rope_factor=2"):
            file.write(json.dumps(line | dict(run=run)) + "\n")
    rope, factor = ("rope", 1, [[5], [3]]), "rope (rope_factor=2)"
    assert report("out/x_rope", "./out/x_rope") == [rope, (factor, 1, [[5], []])]
    assert report("out/x_rope@rope_factor=2") == [(factor, 1, [[5]])]
    sample.main(["out/x_pope", "out/x_new", "--report=r"])
    assert "left out out/x_new, which has no results" in capsys.readouterr().err

# runs and actions

def test_a_run_is_named_once(runs, tmp_path, monkeypatch, capsys):
    """Whichever path leads to it. Files that a pattern such as out/* finds are left out. A folder's
    own name may contain an @."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "rope", "out/a@length=64")
    (tmp_path / "out" / "curves.png").touch()
    ntk = "rope_scaling=ntk,rope_factor=2"
    same = ["out/a@length=64", "./out//a@length=64/", str(tmp_path / "out" / "a@length=64")]
    sample.main([*same, f"out/a@length=64@{ntk}", "out/curves.png", "--num_samples=1"])
    printed = capsys.readouterr()
    assert re.findall("--- (.*), sample", printed.out) == [same[0], f"{same[0]}@{ntk}"]
    assert "left out out/curves.png" in printed.err

def test_yarn_knows_the_trained_length(runs, task):
    """A larger block_size is not the length that the run was trained at, nor is a row's."""
    yarn = "@rope_scaling=yarn,rope_factor=4"
    for run, more, trained in (
        (runs / "rope", "", 16), (runs / "rope", ",block_size=64", 16),
        (runs / "rope", ",block_size=64,rope_trained=9", 9), (task / "run", "", 7),
    ):
        assert sample.load(f"{run}{yarn}{more}", "cpu")[0].cfg.rope_trained == trained
    assert sample.load(str(runs / "rope"), "cpu")[0].cfg.rope_trained == 0

def test_ctrl_c_is_one_line(runs, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(losses, "evaluate", interrupted)
    monkeypatch.setattr(sys, "argv", ["sample.py", str(runs / "rope"), "--evaluate=val"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(sample.__file__, run_name="__main__")
    assert stop.value.code == "\nstopped; results.jsonl has what was measured so far"

@pytest.fixture
def actions(runs, task, monkeypatch):
    """{action: the words of a command line that chooses it}"""
    monkeypatch.setattr(eval, "harness", SimpleNamespace(score_tasks=lambda *_: None),
                        raising=False)
    run = str(runs / "carope+cope")  # it has something to show in every figure
    found = {"text": [run], "answers": [str(task / "run")], "evaluate": [run, "--evaluate=val"],
             "extrapolate": [run, "--extrapolate=1"], "tasks": [run, "--tasks=x"],
             "report": [run, "--report=x"]}
    for figure in sample.ACTIONS.keys() - found.keys():
        found[figure] = [run, f"--figure={figure}"]
    return found

def test_every_key_is_read_or_refused(actions, tmp_path, monkeypatch):
    """Each action reads exactly the keys that ACTIONS lists for it, and all others are refused."""
    monkeypatch.setattr(figures, "save", lambda figure, path: None)
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    keys = {field.name for field in dataclasses.fields(sample.SampleConfig)}
    reads = set()
    called = []

    class Spy(sample.SampleConfig):
        def __getattribute__(self, name):
            reads.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(sample, "SampleConfig", Spy)
    before = {"figure", "data", "device"}  # read where the action is chosen and the runs are loaded
    passed_on = {"heads"}  # by draw_attention, although only maps use it
    for action in ("evaluate", *sorted(actions)):  # the first makes the results to report
        act = sample.ACTIONS[action]

        def spy(cfg, runs, act=act):
            reads.clear()
            act.function(cfg, runs)
            called.append(act)

        monkeypatch.setitem(sample.ACTIONS, action, dataclasses.replace(act, function=spy))
        sample.main(actions[action])
        listed = set(act.keys)
        assert called.pop() is act
        assert (reads - passed_on) & keys <= listed <= reads | before, action
        for key in keys - listed - set(sample.FLAGS):  # one of FLAGS chooses another action
            value = getattr(sample.SampleConfig, key) or "1"
            with pytest.raises(ValueError, match=f"--{key} |--{key}$"):
                sample.main([*actions[action], f"--{key}={value}"])
        monkeypatch.setitem(sample.ACTIONS, action, act)

def colours(path):
    """The share of pixels that have a colour; axes and letters have none."""
    pixels = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    return ((pixels.max(-1) - pixels.min(-1)) > 0.1).mean()

def test_figures(runs, rows, stream, tmp_path, monkeypatch, capsys):
    """The tokens that each is drawn on, and the file that it writes."""
    pytest.importorskip("matplotlib")
    seen, drawn, measure, save = [], [], figures.measure, figures.save

    def note(model, idx, name):
        seen.append(idx[0].tolist())
        return measure(model, idx, name)

    monkeypatch.setattr(figures, "measure", note)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(path))
    (tmp_path / "text").write_text("s3 s1 s4 " * 10)
    (tmp_path / "short").write_text("s2 s7")
    train.main([f"--data={rows}", f"--out_dir={tmp_path / 'task'}", *TINY, "--pe=cope+rope",
                "--max_iters=2"])
    monkeypatch.chdir(tmp_path)
    for run, figure, words, want in (
        (runs / "rope@rope_scaling=ntk,rope_factor=2", "frequency", ["--split=train"],
         tokens_of(stream, "train")[:16]),
        (runs / "rope", "frequency", ["--text=text,short"], [3, 1]),
        (runs / "carope+cope@block_size=20", "gates", ["--text=text"], [3, 1, 4] * 6 + [3, 1]),
        (runs / "learned", "distance", [], tokens_of(stream, "val")[:16]),
        (tmp_path / "task@block_size=5", "gates", ["--heads=1.2"], tokens_of(rows, "val")[:5]),
    ):
        sample.main([str(run), f"--figure={figure}", "--device=cpu", *words])
        folder, at, options = str(run).partition("@")
        assert drawn.pop() == os.path.join(folder, figure + at + options)
        assert seen.pop() == list(want)
    monkeypatch.setattr(figures, "save", save)
    sample.main([str(runs / "carope+cope"), "--figure=gates", "--heads=1.1", "--out=named.png"])
    assert capsys.readouterr().out.endswith("wrote named.png\n") and colours("named.png") > 0.05

def test_training_curves(runs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append((figure, path)))
    rope = str(runs / "rope")
    sample.main([str(runs / "pope"), rope, f"{rope}@rope_scaling=ntk,rope_factor=2",
                 "--figure=curves", f"--out={tmp_path / 'x'}"])
    ((figure, path),) = drawn
    curves = [line for ax in figure.axes for line in ax.lines]
    assert path == str(tmp_path / "x") and len(curves) == 4  # rope once, although named twice
    for name in ("pope", "rope"):
        log = results.records(runs / name, "log.jsonl")
        for split in (None, "val"):
            want = [[line["step"], line["loss"]] for line in log
                    if "loss" in line and line.get("split") == split]
            assert want in [line.get_xydata().tolist() for line in curves]
