"""sample.py and eval/: losses against sums by hand, of plain forward passes."""
import csv
import dataclasses
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, fails

import eval
import sample
import train
from data.shards import Split, Writer
from eval import figures, losses, results


@pytest.fixture(scope="module")
def runs(stream, tmp_path_factory):
    """Run directories of tiny models, trained for a few steps at 16 tokens."""
    folder = tmp_path_factory.mktemp("out")
    for pe in ("pope", "learned", "rope", "expe", "cope"):
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

def read(path):
    with open(path) as file:
        return list(csv.DictReader(file))

def values(path, metric="loss"):
    return {(os.path.basename(row["run"]), row["split"].split()[-1]): float(row["value"])
            for row in read(path) if row["metric"] == metric}

# extrapolation

@pytest.mark.parametrize("eval_tokens, spans, multiples", [
    # 16 stretches, with a shorter window at the end at 1.5x
    (512, [(i * 567 // 15, i * 567 // 15 + 32) for i in range(16)], (0.5, 1, 1.5, 2)),
    # all of the split, in segments, with a shorter window at the end
    (131072, [(0, 599)], (1, 2.5, 4)),
])
def test_extrapolation(runs, stream, tmp_path, monkeypatch, capsys, eval_tokens, spans, multiples):
    """Every multiple has the same targets. The windows of window_loss overlap by half."""
    monkeypatch.setattr(losses, "SEGMENT", 20)  # so that 32 and 64 tokens use the cache
    tokens, names = tokens_of(stream, "val"), ["pope", "learned", "expe@expe_scale=0.5"]
    out, asked = tmp_path / "new" / "ex.csv", ",".join(map(str, multiples))
    sample.main([*(str(runs / name) for name in names), f"--eval_tokens={eval_tokens}",
                 f"--extrapolate={asked}", f"--out={out}", "--device=cpu"])
    got, near = (values(out, key) for key in ("loss", "window_loss"))
    printed = capsys.readouterr().out.splitlines()
    for name in names:
        row = next(line for line in printed if line.startswith(str(runs / name)))
        for m in multiples:
            length, windows = round(16 * m), []
            for start, stop in tiles(spans, length):
                windows.append((start, min(start + 16, stop), start))
                while windows[-1][1] < stop:
                    end = min(windows[-1][1] + 8, stop)
                    windows.append((end - 16, end, windows[-1][1]))
            terms = token_losses(runs / name, tokens, windows)
            assert len(terms) == sum(stop - start for start, stop in spans)
            assert near[name, f"{m}x"] == pytest.approx(sum(terms) / len(terms), abs=1e-5)
            if name == "learned" and m > 1:
                assert (name, f"{m}x") not in got
                continue
            tiled = [(start, stop, start) for start, stop in tiles(spans, length)]
            terms = token_losses(runs / name, tokens, tiled)
            loss = got[name, f"{m}x"]
            assert loss == pytest.approx(sum(terms) / len(terms), abs=1e-5)
            assert f"{loss:.4f} ({math.exp(loss):.2f})" in row
        ends = sum(m > 1 for m in multiples) if name == "learned" else 0
        assert row.count("ends at 16") == ends
    assert sum("seeing the last 16" in line for line in printed) == 3
    assert sample.load(str(runs / names[2]))[0].cfg.expe_scale == 0.5

def test_one_multiple_has_one_number(runs, tmp_path):
    """Whatever other multiples are in the list."""
    found = set()
    for multiples in ("1", "0.5,1,2", "1,1.5,3"):
        sample.main([str(runs / "cope"), f"--extrapolate={multiples}", "--eval_tokens=768",
                     f"--out={tmp_path / 'ex'}", "--device=cpu"])
        found.add(values(tmp_path / "ex.csv")["cope", "1x"])
    assert len(found) == 1

def test_a_masked_stream_is_divided_by_its_targets(tmp_path):
    """One token in twenty carries loss."""
    rng, writer = np.random.default_rng(0), Writer(tmp_path / "data")
    for split, n in (("train", 2000), ("val", 500)):
        writer.write(split, rng.integers(0, 9, n), rng.random(n) < 0.05)
    writer.finish(vocab_size=9, tokenizer={"symbols": list("abcdefghi")})
    run = str(tmp_path / "run")
    train.main([f"--data={tmp_path / 'data'}", f"--out_dir={run}", *TINY, "--max_iters=2"])
    sample.main([run, "--extrapolate=1,3", f"--out={tmp_path / 'ex'}", "--device=cpu"])
    got, near = (values(tmp_path / "ex.csv", key) for key in ("loss", "window_loss"))
    tokens = tokens_of(tmp_path / "data", "val")
    mask = np.fromfile(tmp_path / "data" / "val_000000.loss", "u1")[1:]
    for m in (1, 3):
        windows = [(start, stop, start) for start, stop in tiles([(0, 499)], 16 * m)]
        terms = np.array(token_losses(run, tokens, windows))
        assert got["run", f"{m}x"] == pytest.approx(terms[mask == 1].mean(), abs=1e-5)
    assert near["run", "1x"] == got["run", "1x"] > 1

def colours(path):
    """The share of pixels that have a colour; axes and letters have none."""
    imread = pytest.importorskip("matplotlib.image").imread
    pixels = imread(path)[..., :3]
    return ((pixels.max(-1) - pixels.min(-1)) > 0.1).mean()

def test_pictures_of_losses(runs, tmp_path, monkeypatch, capsys):
    """Without matplotlib the numbers are still saved, and the error says what to install."""
    words = [str(runs / "pope"), "--extrapolate=1,2", "--eval_tokens=512",
             f"--out={tmp_path / 'ex'}", "--device=cpu"]
    sample.main(words)
    assert colours(tmp_path / "ex.png") > 0.001
    (tmp_path / "ex.csv").unlink()
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])  # as if it were not installed
    line = fails("sample.py", *words)
    assert line.startswith("ModuleNotFoundError: ") and line.endswith("; pip install matplotlib")
    assert "1x" in capsys.readouterr().out and len(values(tmp_path / "ex.csv")) == 2

def test_loss_by_position(runs, stream, tmp_path, monkeypatch):
    """Segments of eight times the trained length, whose positions are averaged in 32 groups.
    `learned` reads the beginnings of the same segments."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(losses, "SEGMENT", 50)  # so that the cache is used
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append((figure, path)))
    path = str(tmp_path / "new" / "x")
    sample.main([str(runs / "rope"), str(runs / "learned"), "--figure=loss_by_position",
                 f"--out={path}", "--device=cpu", "--eval_tokens=400"])
    tokens, table = tokens_of(stream, "val"), read(path + ".csv")
    ((figure, where),) = drawn
    assert where == path
    starts = [0, (599 - 128) // 2, 599 - 128]  # three segments of 128 tokens
    for name, length, line in (("rope", 128, figure.axes[0].lines[0]),
                               ("learned", 16, figure.axes[0].lines[1])):
        rows = [row for row in table if row["run"] == str(runs / name)]
        found = np.reshape(token_losses(
            runs / name, tokens, [(start, start + length, start) for start in starts]), (3, length))
        want = [[4 * n + 2.5, found[:, 4 * n : 4 * n + 4].mean()] for n in range(length // 4)]
        assert np.allclose([[float(row["position"]), float(row["loss"])] for row in rows], want)
        assert np.allclose(line.get_xydata(), want)
        assert line.get_label() == name
    assert list(figure.axes[0].lines[2].get_xdata()) == [16, 16]

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
    assert lines[0].endswith("long split; the model's answers are [right] or [wrong, not right]")
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

# whole splits, and what is kept

def test_evaluate_whole_splits(task, runs, stream, tmp_path, capsys):
    """sequence_error counts the rows that greedy decoding gets wrong."""
    capsys.readouterr()
    sample.main([str(task / "run"), "--evaluate=val,long", f"--out={tmp_path / 'ev'}"])
    header, names, row, wrote = capsys.readouterr().out.splitlines()[:4]
    assert wrote == f"wrote {tmp_path / 'ev.csv'}"
    assert header == "wrong targets, then rows with one" and names.split() == ["val", "long"]
    assert row.startswith(str(task / "run"))
    found = values(tmp_path / "ev.csv", "sequence_error")
    net = sample.load(str(task / "run"), "cpu")[0]
    for i, (name, n, T) in enumerate((("val", 40, 8), ("long", 24, 12))):
        rows = tokens_of(task / "data", name, n, T)
        decoded = net.generate(torch.tensor(rows[:, :5]), 2, temperature=0)[:, 5:].numpy()  # greedy
        wrong = int((decoded != rows[:, 5:7]).any(1).sum())
        assert 0 < wrong < n, "the test needs right and wrong rows"
        assert found["run", name] == pytest.approx(100 * wrong / n, abs=1e-4)
        assert row.split()[1 + 2 * i :][1] == f"{100 * wrong / n:.2f}%"
    sample.main([str(runs / "pope"), "--evaluate=val", f"--out={tmp_path / 'ev'}", "--device=cpu"])
    header, names, row = capsys.readouterr().out.splitlines()[:3]
    windows = [(start, start + 16, start) for start in Split(stream, "val").windows(16)]
    terms = token_losses(runs / "pope", tokens_of(stream, "val"), windows)
    loss = sum(terms) / len(terms)
    assert header == "loss in nats (perplexity)" and len(terms) == 37 * 16
    assert row.split()[1:] == [f"{loss:.4f}", f"({math.exp(loss):.2f})"]
    assert values(tmp_path / "ev.csv")["pope", "val"] == pytest.approx(loss, abs=1e-4)

def test_each_number_is_kept_with_all_that_made_it(runs, task, tmp_path):
    """In results.jsonl and in the CSV file. A number on other data names them."""
    pope, rope, other = str(runs / "pope"), str(task / "run"), str(tmp_path / "other")
    shutil.copytree(task / "data", other)
    loss, errors = ["loss", "ppl", "window_loss"], "loss ppl token_error sequence_error".split()
    for run, words, split, metrics, steps in (
        (pope, ["--extrapolate=1,2", "--eval_tokens=512"], "val (512 tokens) 2x", loss, 10),
        (rope, ["--evaluate=val"], "val", errors, 150),
        (rope, ["--evaluate=val", f"--data={other}"], f"{other} val", errors, 150),
    ):
        sample.main([run, *words, f"--out={tmp_path / 'x'}", "--device=cpu"])
        kept = [line for line in results.records(run, "results.jsonl") if line["split"] == split]
        table = [line for line in read(tmp_path / "x.csv") if line["split"] == split]
        for line, row, metric in zip(kept[-len(metrics) :], table, metrics, strict=True):
            assert row == {key: str(value) for key, value in line.items()}
            assert (line["run"], line["metric"], line["steps"]) == (run, metric, steps)
            assert line["seed"] == 1337 and line["torch"] == torch.__version__ and line["machine"]
            assert "commit" in line and "config" in line

def test_a_line_that_was_cut_short_costs_no_other(runs, tmp_path, capsys):
    run = tmp_path / "rope"
    shutil.copytree(runs / "rope", run)
    (run / "results.jsonl").unlink(missing_ok=True)
    for name in ("results.jsonl", "log.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"run": "out/x", "ste')
    words = ["--evaluate=val", f"--out={tmp_path / 'ev'}", "--device=cpu"]
    sample.main([str(run), *words])  # begins a new line
    capsys.readouterr()
    sample.main([str(run), f"--report={tmp_path / 'r'}"])
    loss, ppl = results.records(run, "results.jsonl")
    assert f"| rope | 1 | {loss['value']:#.4g} |" in capsys.readouterr().out
    assert len(results.training([str(run)])) == 2  # steps 0 and 10

def test_rows_without_a_target_are_not_counted():
    """Two rows of three have targets, and the model is wrong in one of them."""
    y = torch.tensor([[1, -1], [2, 2], [-1, -1]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0], [2, 0], [0, 0]]), 3).float()
    found = losses.error_sums(lambda x, y: (logits, torch.tensor(0.5)), y, y)
    assert found.tolist() == [1.5, 3, 1, 1, 2]
    assert losses.scores(found, masked=True)["sequence_error"] == 50

def write_results(folder, numbers):
    """Run directories with results written by hand: {name: value at 1x}; that at 2x is 1 more."""
    for name, value in numbers.items():
        (folder / name).mkdir(parents=True)
        line = dict(run=str(folder / name), config=f"config/{name[0]}.py", pe=name.split("_")[1],
                    seed=int(name.partition("_seed")[2] or 1337), trained=8, metric="loss", steps=9)
        lines = [line | dict(split=f"val {n}x", length=8 * n, value=value + n - 1) for n in (1, 2)]
        lines.insert(0, lines[0] | dict(value=99.0))  # measured again since
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "results.jsonl").write_text(text)
    return [str(folder / name) for name in numbers]

def test_report(tmp_path, monkeypatch, capsys):
    """Three seeds of one run, a run of another method and one of another config."""
    numbers = dict(x_pope=1.0, x_pope_seed2=2.0, x_pope_seed3=6.0, x_rope=0.5, y_rope=4.0)
    names, drawn = write_results(tmp_path / "out", numbers), []
    monkeypatch.setattr(figures, "draw_by_length", lambda lines, path: drawn.append(path))
    sample.main([*names, f"--report={tmp_path / 'new' / 'r'}"])
    printed = capsys.readouterr().out
    assert "config/x.py: loss, nats per token, mean ± standard deviation (range)" in printed
    assert "| run | seeds | val 1x | val 2x |\n| --- | --- | --- | --- |" in printed
    assert "| pope | 3 | 3.0 ± 2.6 (1.0 to 6.0) | 4.0 ± 2.6 (2.0 to 7.0) |" in printed
    assert "| rope | 1 | 0.5000 | 1.500 |" in printed and "| rope | 1 | 4.000 | 5.000 |" in printed
    rows = read(tmp_path / "new" / "r.csv")
    assert len(rows) == 10 and {row["seed"] for row in rows} == {"1337", "2", "3"}
    assert drawn == [str(tmp_path / "new" / "r")]
    path = tmp_path / "out" / "x_pope_seed3" / "results.jsonl"
    path.write_text(path.read_text().replace('"steps": 9', '"steps": 1200', 2))  # not val 2x
    sample.main([*names, f"--report={tmp_path / 'new' / 'r'}"])
    printed = capsys.readouterr().out
    assert "| pope, 9 steps | 3 | 1.50 ± 0.71 (1.00 to 2.00) | 4.0 ± 2.6 (2.0 to 7.0)" in printed
    assert "| pope, 1,200 steps | 1 | 6.000 | – |" in printed

def test_report_of_runs_that_differ_in_kind(tmp_path, monkeypatch, capsys):
    """One without results is left out. RUN stands for everything that was measured of it, and
    RUN@key=value for what was measured with these options. One run has one row, although it was
    measured under another path."""
    monkeypatch.setattr(figures, "draw_by_length", lambda lines, path: None)
    monkeypatch.chdir(tmp_path)
    write_results(tmp_path / "out", dict(x_pope=1.0, x_rope=2.0))  # under absolute paths
    (tmp_path / "out" / "x_new").mkdir()
    path = tmp_path / "out" / "x_rope" / "results.jsonl"
    line = json.loads(path.read_text().splitlines()[0]) | dict(value=5.0)
    with open(path, "a") as file:
        for run in ("out/x_rope", "elsewhere/x_rope@rope_factor=2"):
            file.write(json.dumps(line | dict(run=run)) + "\n")

    def rows(*names):
        sample.main([*names, "--report=r"])
        return [line for line in capsys.readouterr().out.splitlines() if "pe |" in line
                or "factor" in line]

    rope, factor = "| rope | 1 | 5.000 | 3.000 |", "| rope (rope_factor=2) | 1 | 5.000 | – |"
    assert rows("out/x_rope") == [rope, factor]
    assert rows("out/x_rope@rope_factor=2") == ["| rope (rope_factor=2) | 1 | 5.000 |"]
    assert rows("out/x_rope", "out/x_rope@rope_factor=2", "./out/x_rope") == [rope, factor]
    sample.main(["out/x_pope", "out/x_new", "--report=r"])
    left_out = "left out out/x_new, which has no results; evaluate it first\n"
    assert capsys.readouterr().err == left_out

@pytest.mark.parametrize("numbers, cell", [
    ([], "–"), ([1.51643], "1.516"),
    ([1.5110, 1.5160, 1.5230], "1.5167 ± 0.0060 (1.5110 to 1.5230)"),
    ([40.0, 80.0, 99.0], "73 ± 30 (40 to 99)"), ([0.0, 0.0], "0.000 ± 0.000 (0.000 to 0.000)"),
])
def test_digits_that_the_spread_warrants(numbers, cell):
    assert results.spread(numbers) == cell

# mistakes: one line, and nothing is measured before it

@pytest.mark.parametrize("words, message", [
    ("", "no run directory given; e.g. python sample.py out/quickstart_pope"),
    ("RUN/ckpt.pt", "RUN/ckpt.pt' is a file, and not a directory with a ckpt.pt; name the run"),
    ("RUN --temperature=-1", "temperature=-1.0 in --temperature=-1 is out of range; use 0 <= "),
    ("RUN --temperature=1e-300", "temperature=1e-300 is too small; use 0.001 or more, or 0 for"),
    ("RUN --seed=1e30", "seed=1"),
    ("RUN@n_embd=1000000000", "n_embd in RUN@n_embd=1000000000 is fixed by the weights"),
    ("RUN@pe=ropee", "pe='ropee' is unknown; choose one of rope, "),
    ("RUN@n_head", "run directory 'RUN@n_head' does not exist"),
    ("RUN --extrapolate=inf", "extrapolate='inf' is not a positive number; give multiples of "),
    ("RUN --extrapolate=1,nan", "extrapolate='nan' is not a positive number"),
    ("RUN --extrapolate=a", "extrapolate='a' is not a positive number"),
    ("RUN --extrapolate=-1", "extrapolate='-1' is not a positive number"),
    ("RUN --extrapolate=1,,2", "extrapolate='' is not a positive number"),
    ("RUN --extrapolate=1e300", "times 16 tokens is not in 1 to 599"),
    ("RUN --evaluate=", "--evaluate= is empty; see --help"),
    ("RUN --report=", "--report= is empty; see --help"),
    ("RUN --device=gpu", "device='gpu' is unknown; choose one of "),
    ("RUN --extrapolate=0.01", "extrapolate=0.01 times 16 tokens is not in 1 to 599"),
    ("RUN --extrapolate=99", "; use another multiple"),  # as the split has but 599 tokens
    ("RUN --extrapolate=2 --eval_tokens=256", "use --eval_tokens=512 or more"),
    ("RUN TASK --extrapolate=1", "holds rows of 8 tokens; extrapolation needs a stream"),
    ("RUN --evaluate=val,dev", "has no split 'dev'"),
    ("RUN --evaluate=val --data=OTHER", "OTHER was tokenized with "),
    ("RUN --evaluate=val --out=RUN/ckpt.pt/x", "Error: [Errno "),
    ("RUN --evaluate=val --extrapolate=1", "--evaluate and --extrapolate exclude each other"),
    ("RUN --figure=gates --evaluate=val", "--evaluate and --figure exclude each other; keep one"),
    ("RUN --evaluate=val --split=val", "--split does nothing for evaluate; leave it out"),
    ("RUN --figure=distance --heads=1.1", "--heads does nothing for distance; leave it out"),
    ("TASK --heads=1.1", "--heads does nothing for answers; leave it out"),
    ("RUN TASK", "answer the rows of a task, and others write text; name them in separate "),
    ("EMPTY --report=EMPTY/r", "none of these runs has results to report; evaluate them first"),
    ("RUN --figure=curves --keys=los", "keys='los' is unknown; choose one of loss, "),
    ("RUN --figure=gates", "figure='gates' has nothing to show of pe='rope'"),
    ("RUN --figure=distance --text=x --split=val", "text='x' takes the place of "),
    ("RUN EXPE --figure=distance --out=EMPTY/d", "one picture, and there are 2 runs"),
    (f"RUN --figure=frequency --text={os.devnull}", "holds no text; name files that do"),
])
def test_wrong_input(runs, task, tmp_path, monkeypatch, capsys, words, message):
    capsys.readouterr()
    paths = dict(OTHER=task / "data", RUN=runs / "rope", EXPE=runs / "expe", TASK=task / "run",
                 EMPTY=tmp_path)
    for name, path in paths.items():
        words, message = (text.replace(name, str(path)) for text in (words, message))
    monkeypatch.chdir(tmp_path)
    assert message in fails(sample.__file__, *words.split())
    assert capsys.readouterr().out == ""

def test_a_mistyped_run(tmp_path, monkeypatch):
    """The error names the existing runs, nearest first."""
    for name in ("quickstart_rope", "quickstart_pope", "other"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "ckpt.pt").touch()
    monkeypatch.chdir(tmp_path)
    for word in ("out/quickstart_poep", "quickstart_pope", "out/quickstart_pop@rope_factor=2"):
        line, name = fails(sample.__file__, word, "--evaluate=val"), word.partition("@")[0]
        assert line.startswith(
            f"ValueError: run directory '{name}' does not exist; the nearest: "
            "out/quickstart_pope, out/quickstart_rope, out/other; train")
    shutil.rmtree(tmp_path / "out")
    assert fails(sample.__file__, "gpt2").endswith(
        "does not exist; the nearest: none; train one with `python train.py config/quickstart.py`")

def test_a_run_is_named_once(runs, tmp_path, monkeypatch, capsys):
    """Whichever path leads to it. Files that a pattern such as out/* finds are left out."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "rope", "out/a@b")
    (tmp_path / "out" / "curves.png").touch()
    same = ["out/a@b", "./out//a@b/", str(tmp_path / "out" / "a@b")]
    other = "out/a@b@rope_factor=2"
    assert sample.run_names([*same, other]) == ["out/a@b", other]
    assert sample.run_names(["out/curves.png", "out/a@b"]) == ["out/a@b"]
    assert capsys.readouterr().err == "left out out/curves.png, which is not a run directory\n"
    shutil.copytree("out/a@b", "out/x@length=64")  # as data sets are named
    assert sample.run_names(["out/x@length=64"]) == ["out/x@length=64"]
    for name in ("out/a@b", "out/x@length=64", "out/a@b@rope_scaling=ntk,rope_factor=2"):
        factor = 2 if "ntk" in name else 1
        assert sample.load(name, "cpu")[0].cfg.rope_factor == factor

def test_yarn_knows_the_trained_length(runs, task):
    """A larger block_size is not the length that the run was trained at, nor is a row's."""
    yarn = "@rope_scaling=yarn,rope_factor=4"
    for run, more, trained in (
        (runs / "rope", "", 16), (runs / "rope", ",block_size=64", 16),
        (runs / "rope", ",block_size=64,rope_trained=9", 9), (task / "run", "", 7),
    ):
        assert sample.load(f"{run}{yarn}{more}", "cpu")[0].cfg.rope_trained == trained
    assert sample.load(str(runs / "rope"), "cpu")[0].cfg.rope_trained == 0

def test_the_front_doors_do_not_import_each_other():
    """train.py needs the scores of eval/losses.py, but neither pictures nor a tokenizer."""
    code = """
import sys, eval.losses
assert not {"train", "sample", "matplotlib", "tiktoken"} & sys.modules.keys()
import sample, eval.methods
assert "train" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

def test_ctrl_c_is_one_line(runs, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(losses, "evaluate", interrupted)
    words = ["sample.py", str(runs / "rope"), "--evaluate=val", f"--out={tmp_path / 'x'}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(sample.__file__, run_name="__main__")
    assert stop.value.code == "\nstopped; results.jsonl has what was measured so far"

# what each action reads

@pytest.fixture
def actions(runs, task, monkeypatch):
    """{action: the words of a command line that chooses it}"""
    monkeypatch.setattr(eval, "harness", SimpleNamespace(score_tasks=lambda *_: None),
                        raising=False)
    cope = str(runs / "cope")
    found = {"text": [cope], "answers": [str(task / "run")], "evaluate": [cope, "--evaluate=val"],
             "extrapolate": [cope, "--extrapolate=1"], "tasks": [cope, "--tasks=x"],
             "report": [cope, "--report=x"]}
    for figure in ("distance", "gates", "positions", "loss_by_position", "curves"):
        found[figure] = [cope, f"--figure={figure}"]
    found["frequency"] = [str(runs / "rope"), "--figure=frequency"]
    return found

def test_every_key_is_read_or_refused(actions, tmp_path, monkeypatch, capsys):
    """Each action reads exactly the keys that ACTIONS lists for it, and all others are refused."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert actions.keys() == sample.ACTIONS.keys()
    keys = [field.name for field in dataclasses.fields(sample.SampleConfig)]
    reads = set()

    class Spy(sample.SampleConfig):
        def __getattribute__(self, name):
            reads.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(sample, "SampleConfig", Spy)
    before = {"figure", "data", "device"}  # read where the action is chosen and the runs are loaded
    passed_on = {"heads"}  # by draw_attention, although only maps use it
    called = []
    for action, words in actions.items():
        act = sample.ACTIONS[action]

        def spy(cfg, runs, act=act):
            called.append(act)
            reads.clear()
            act.function(cfg, runs)

        monkeypatch.setitem(sample.ACTIONS, action, dataclasses.replace(act, function=spy))
        sample.main(words)
        assert called.pop() is act
        listed = set(act.keys)
        assert (reads - passed_on) & set(keys) <= listed <= reads | before, action
        nothing = dataclasses.replace(act, function=lambda cfg, runs: called.append("nothing"))
        monkeypatch.setitem(sample.ACTIONS, action, nothing)
        for key in keys:
            if key in sample.FLAGS:  # it chooses another action
                continue
            value = getattr(sample.SampleConfig, key)
            if value == "":
                value = "x"
            if key in listed:
                sample.main([*words, f"--{key}={value}"])
                assert called.pop() == "nothing"
                continue
            with pytest.raises(ValueError, match=f"--{key} |--{key}$"):
                sample.main([*words, f"--{key}={value}"])

# figures from the command line

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
    val = tokens_of(stream, "val").tolist()
    monkeypatch.chdir(tmp_path)
    for run, figure, words, want in (
        (runs / "rope@rope_scaling=ntk,rope_factor=2", "frequency", ["--split=train"],
         tokens_of(stream, "train")[:16].tolist()),
        (runs / "rope", "frequency", ["--text=text,short"], [3, 1]),
        (runs / "cope@block_size=20", "gates", ["--text=text"], [3, 1, 4] * 6 + [3, 1]),
        (runs / "rope", "distance", [], val[:64]),
        (runs / "learned", "distance", [], val[:16]),
        (tmp_path / "task@block_size=5", "gates", ["--heads=1.2"], tokens_of(rows, "val")[:5]),
    ):
        sample.main([str(run), f"--figure={figure}", "--device=cpu", *words])
        folder, at, options = str(run).partition("@")
        assert drawn.pop() == os.path.join(folder, figure + at + options)
        assert seen.pop() == list(want)
    monkeypatch.setattr(figures, "save", save)
    capsys.readouterr()
    sample.main([str(runs / "cope"), "--figure=gates", "--heads=1.1", "--out=named.png"])
    assert capsys.readouterr().out == "wrote named.png\n" and colours("named.png") > 0.05

@pytest.mark.parametrize("against, scale", [("step", 1), ("tokens", 4 * 16)])
def test_training_curves(runs, tmp_path, monkeypatch, against, scale):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append((figure, path)))
    rope = str(runs / "rope")
    sample.main([str(runs / "pope"), rope, f"{rope}@rope_scaling=ntk,rope_factor=2",
                 "--figure=curves", "--keys=loss,val/ppl", f"--out={tmp_path / 'x'}",
                 f"--against={against}"])
    ((figure, path),) = drawn
    assert path == str(tmp_path / "x")
    assert len(figure.axes[0].lines) == 2  # rope once, although named twice
    for i, name in enumerate(("pope", "rope")):
        log = results.records(runs / name, "log.jsonl")
        for ax, key, split in zip(figure.axes, ("loss", "ppl"), (None, "val")):
            want = [[line["step"] * scale, line[key]] for line in log
                    if key in line and line.get("split") == split]
            assert ax.lines[i].get_xydata().tolist() == want and want
            assert ax.lines[i].get_label() == name
