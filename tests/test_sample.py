"""sample.py against losses computed by hand, one plain forward pass per window, and its tables."""
import csv
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import TINY, fails

import sample
import train
from assets import figures
from data.shards import Split, Writer
from model import GPT
from train import load_weights, model_config, read_checkpoint


@pytest.fixture(scope="module")
def runs(stream, tmp_path_factory):
    """Run directories of tiny models, trained for a few steps at 16 tokens."""
    folder = tmp_path_factory.mktemp("out")
    for pe in ("pope", "learned", "rope", "expe", "cope"):
        train.main([f"--data={stream}", f"--out_dir={folder / pe}", *TINY, f"--pe={pe}", "--max_iters=30"])
    return folder


def by_hand(run, stream, length, longest, count, **changes):
    """Mean loss over windows of this length that tile `count` stretches of the longest length."""
    checkpoint = read_checkpoint(str(run))
    net = GPT(model_config(checkpoint, **changes)).eval()
    load_weights(net, checkpoint, "run")
    tokens = np.fromfile(os.path.join(stream, "val_000000.bin"), "<u2").astype(int)
    terms = []
    for start in Split(stream, "val").windows(longest, count):
        for a in range(start, start + longest - length + 1, length):
            w = torch.from_numpy(tokens[a : a + length + 1])[None]
            with torch.no_grad():
                logp = net(w[:, :-1], w[:, 1:])[0].double().log_softmax(-1)
            terms += (-logp[0, torch.arange(length), w[0, 1:]]).tolist()
    return sum(terms) / len(terms)


def table(path):
    with open(path) as file:
        return {(os.path.basename(r["run"]), int(r["multiple"])): r["loss"] for r in csv.DictReader(file)}


def test_extrapolation(runs, stream, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "SEGMENT", 20)  # so that 32 and 64 tokens go on from the cache
    names = [str(runs / "pope"), str(runs / "learned"), str(runs / "rope@rope_scaling=linear,rope_factor=4"),
             str(runs / "expe@expe_scale=0.5")]
    out = tmp_path / "new" / "ex"
    sample.main([*names, "--extrapolate=4,1,2", "--eval_tokens=256", f"--out={out}", "--device=cpu"])
    got = table(f"{out}.csv")
    for m in (1, 2, 4):
        assert float(got["pope", m]) == pytest.approx(by_hand(runs / "pope", stream, 16 * m, 64, 4), abs=1e-4)
        want = by_hand(runs / "rope", stream, 16 * m, 64, 4, rope_scaling="linear", rope_factor=4.0)
        assert float(got["rope@rope_scaling=linear,rope_factor=4", m]) == pytest.approx(want, abs=1e-4)
        want = by_hand(runs / "expe", stream, 16 * m, 64, 4, expe_scale=0.5)
        assert float(got["expe@expe_scale=0.5", m]) == pytest.approx(want, abs=1e-4)
    assert float(got["learned", 1]) == pytest.approx(by_hand(runs / "learned", stream, 16, 64, 4), abs=1e-4)
    assert got["learned", 2] == got["learned", 4] == ""
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith(names[0]))
    loss = float(got["pope", 1])
    assert f"{loss:.4f} ({math.exp(loss):.2f})" in row
    assert next(line for line in printed.splitlines() if line.startswith(names[1])).count("ends at 16") == 2


def test_sliding_window(runs, stream, tmp_path, capsys):
    """Every target of a stretch, predicted from a slice of its own, which begins at a multiple of 8 and
    has at most 16 tokens, but at least 9 where there are as many."""
    words = ["--extrapolate=0.5,1,1.5,2.5", "--eval_tokens=160", f"--out={tmp_path / 'ex'}", "--device=cpu"]
    sample.main([str(runs / "pope"), str(runs / "learned"), *words])
    with open(tmp_path / "ex.csv") as file:
        got = list(csv.DictReader(file))
    assert [row["multiple"] for row in got] == ["0.5", "1", "1.5", "2.5"] * 2
    assert [int(row["length"]) for row in got] == [8, 16, 24, 40] * 2
    tokens = np.fromfile(os.path.join(stream, "val_000000.bin"), "<u2").astype(int)
    for row in got:
        name, length = os.path.basename(row["run"]), int(row["length"])
        checkpoint = read_checkpoint(str(runs / name))
        net = GPT(model_config(checkpoint)).eval()
        load_weights(net, checkpoint, "run")
        terms = []
        for stretch in Split(stream, "val").windows(40, 4):
            for start in range(stretch, stretch + 40 - length + 1, length):
                for t in range(length):  # the position of the token that predicts the next
                    begin = 0 if t < 16 else (t // 8 - 1) * 8
                    with torch.no_grad():
                        logits = net(torch.from_numpy(tokens[None, start + begin : start + t + 1]))[0][0, -1]
                    terms.append(-logits.double().log_softmax(-1)[tokens[start + t + 1]].item())
        assert float(row["window_loss"]) == pytest.approx(sum(terms) / len(terms), abs=1e-4)
        if length <= 16:
            assert row["loss"] == row["window_loss"]
        if name == "pope":
            assert float(row["loss"]) == pytest.approx(by_hand(runs / name, stream, length, 40, 4), abs=1e-4)
    printed = capsys.readouterr().out
    assert printed.count("seeing the last 16") == 2 and f"{float(got[3]['window_loss']):.4f}" in printed


def test_picture(runs, tmp_path):
    pytest.importorskip("matplotlib")
    sample.main([str(runs / "pope"), str(runs / "learned"), "--extrapolate=1,2", "--eval_tokens=64",
                 f"--out={tmp_path / 'ex'}"])
    with open(tmp_path / "ex.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_no_matplotlib(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sample.main([str(runs / "pope"), "--extrapolate=1", "--eval_tokens=64", f"--out={tmp_path / 'ex'}"])
    assert capsys.readouterr().out.endswith("no picture without one more package: pip install matplotlib\n")
    assert os.path.exists(tmp_path / "ex.csv")


def test_no_matplotlib_said_once(task, tmp_path, monkeypatch, capsys):
    """Recall has two pictures."""
    shutil.copytree(task / "data", tmp_path / "recall")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sample.main([str(task / "run"), "--evaluate=val,long", f"--data={tmp_path / 'recall'}",
                 f"--out={tmp_path / 'ev'}"])
    assert capsys.readouterr().out.count("pip install matplotlib") == 1


def test_text(runs, capsys):
    words = ["--prompt=s3 s10", "--max_new_tokens=20", "--num_samples=2", "--device=cpu"]
    sample.main([str(runs / "pope"), str(runs / "rope"), *words])
    first = capsys.readouterr().out
    texts = [line.split() for line in first.splitlines() if not line.startswith("---")]
    assert [len(t) for t in texts] == [22] * 4 and all(t[:2] == ["s3", "s10"] for t in texts)
    assert texts[0] != texts[1]  # samples differ
    sample.main([str(runs / "pope"), str(runs / "rope"), *words])
    assert capsys.readouterr().out == first  # but a seed repeats
    sample.main([str(runs / "pope"), "--temperature=0.0", "--num_samples=2", "--max_new_tokens=5"])
    greedy = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("---")]
    assert greedy[0] == greedy[1] and len(greedy[0]) == 5  # from the separator, which is not printed
    sample.main([str(runs / "pope"), "--temperature=5.0", "--top_k=1", "--num_samples=1",
                 "--max_new_tokens=5"])
    assert capsys.readouterr().out.split("\n")[1].split() == greedy[0]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A run of a task half learned: after 7 come two answers, the first of them easy."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    writer = Writer(folder / "data")
    for split, n, T in (("train", 256, 8), ("val", 40, 8), ("long", 24, 12)):
        tokens = rng.integers(0, 5, (n, T))
        tokens[:, 4:7] = np.stack((np.full(n, 7), tokens[:, 3], rng.integers(0, 2, n)), 1)
        loss = np.zeros_like(tokens)
        loss[:, 5:7] = 1
        writer.write(split, tokens, loss)
    writer.finish(vocab_size=8, tokenizer={"symbols": list("abcdefgh")})
    train.main([f"--data={folder / 'data'}", f"--out_dir={folder / 'run'}", *TINY, "--max_iters=150",
                "--batch_size=16", "--pe=rope",
                "--dropout=0.0"])
    return folder


def test_rows_show_the_answers_that_greedy_decoding_gives(task, capsys):
    capsys.readouterr()
    sample.main([str(task / "run"), "--num_samples=24", "--split=long", "--device=cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("long split; the model's answers are [right] or [wrong, not right]")
    checkpoint = read_checkpoint(str(task / "run"))
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "run")
    rows = np.fromfile(task / "data" / "long_000000.bin", "<u2").reshape(24, 12).astype(int)
    seen = set()
    for i, row in enumerate(rows):
        text, words = ["abcdefgh"[token] for token in row], []
        for t in (5, 6):  # each answer after the right tokens before it
            said = "abcdefgh"[int(net(torch.tensor(row[None, :t]))[0].argmax())]
            words.append(f"[{said}]" if said == text[t] else f"[{said}, not {text[t]}]")
        right = sum("not" not in word for word in words)
        seen.add(right)
        assert lines[1 + 2 * i :][:2] == [f"--- row {i + 1}, {right} of 2 right", " ".join(text[:5] + words)]
    assert len(seen) > 1, "the test needs right and wrong answers"


def test_evaluate_whole_splits(task, runs, stream, tmp_path, capsys):
    capsys.readouterr()
    sample.main([str(task / "run"), "--evaluate=val,long", f"--out={tmp_path / 'ev'}", "--device=cpu"])
    header, names, row, wrote = capsys.readouterr().out.splitlines()[:4]
    assert wrote == f"wrote {tmp_path / 'ev.csv'}"
    assert header == "wrong targets, then rows with one" and names.split() == ["val", "long"]
    assert row.startswith(str(task / "run"))
    found = list(csv.DictReader(open(tmp_path / "ev.csv")))
    checkpoint = read_checkpoint(str(task / "run"))
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "run")
    for i, (line, name, n, T) in enumerate(zip(found, ("val", "long"), (40, 24), (8, 12), strict=True)):
        rows = np.fromfile(task / "data" / f"{name}_000000.bin", "<u2").reshape(n, T).astype(int)
        decoded = net.generate(torch.tensor(rows[:, :5]), 2, temperature=0)[:, 5:].numpy()
        answers = rows[:, 5:7].tolist()
        wrong = sum(tuple(a) != tuple(b) for a, b in zip(decoded.tolist(), answers))  # greedy
        assert 0 < wrong < n, "the test needs right and wrong rows"
        assert (line["run"], line["split"]) == (str(task / "run"), name)
        assert (int(line["windows"]), int(line["length"])) == (n, T - 1)
        assert float(line["sequence_error"]) == pytest.approx(100 * wrong / n, abs=1e-4)
        assert row.split()[1 + 2 * i :][1] == f"{100 * wrong / n:.2f}%"
    sample.main([str(runs / "pope"), str(runs / "learned"), "--evaluate=val", f"--out={tmp_path / 'ev'}",
                 "--device=cpu"])
    header, names, pope, learned = capsys.readouterr().out.splitlines()[:4]
    assert header.startswith("loss in nats (perplexity)") and names.split() == ["val"]
    first, second = csv.DictReader(open(tmp_path / "ev.csv"))
    assert (first["windows"], first["length"]) == (second["windows"], second["length"]) == ("37", "16")
    for line, row, name in ((first, pope, "pope"), (second, learned, "learned")):
        loss = by_hand(runs / name, stream, 16, 16, 37)
        assert float(line["loss"]) == pytest.approx(loss, abs=1e-4) and "token_error" not in line
        assert row.split()[1:] == [f"{loss:.4f}", f"({math.exp(loss):.2f})"] and "error" not in row


def test_report(runs, task, tmp_path, capsys):
    """Three seeds of one run, a run of another method and one of another config, from numbers
    written by hand."""
    folder = tmp_path / "out"
    numbers = {"x_pope": 1.0, "x_pope_seed2": 2.0, "x_pope_seed3": 6.0, "x_rope": 0.5, "y_rope": 4.0}
    for name, value in numbers.items():
        (folder / name).mkdir(parents=True)
        seed = int(name.partition("_seed")[2] or 1337)
        lines = [dict(run=str(folder / name), config=f"config/{name[0]}.py", pe=name.split("_")[1],
                      seed=seed, split=split, trained=16, length=16, metric="loss", value=v, steps=9,
                      commit="c", torch="t", machine="m")
                 for split, v in (("val", 77.0), ("val", value), ("val 2x", value + 1))
                 if (split, name) != ("val 2x", "x_rope")]
        if name == "y_rope":  # a task
            lines += [lines[0] | dict(metric="ppl"), lines[0] | dict(metric="token_error")]
        (folder / name / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    sample.main([*(str(folder / name) for name in numbers), f"--report={tmp_path / 'new' / 'r'}"])
    printed = capsys.readouterr().out
    columns = "| run | seeds | val | val 2x |\n| --- | --- | --- | --- |\n"
    assert f"\nconfig/x.py: loss, nats\n\n{columns}" in printed
    assert f"\nconfig/y.py: loss, nats\n\n{columns}| rope | 1 | 4 | 5 |\n" in printed
    assert "| pope | 3 | 3 (1 to 6) | 4 (2 to 7) |\n| rope | 1 | 0.5 | – |\n" in printed
    assert "config/y.py: wrong targets, %" in printed and "perplexity" not in printed
    assert "steps" not in printed
    with open(tmp_path / "new" / "r.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 11 and {row["seed"] for row in rows} == {"1337", "2", "3"}
    assert list(rows[0]) == ["run", "config", "pe", "seed", "split", "trained", "length", "metric",
                             "value", "steps", "commit", "torch", "machine"]
    other = folder / "x_rope" / "results.jsonl"
    other.write_text(other.read_text().replace('"steps": 9', '"steps": 1200'))
    sample.main([*(str(folder / name) for name in numbers), f"--report={tmp_path / 'new' / 'r'}"])
    printed = capsys.readouterr().out
    assert "| pope, 9 steps | 3 | 3 (1 to 6) | 4 (2 to 7) |\n| rope, 1,200 steps | 1 | 0.5 | – |" in printed
    assert "| rope | 1 | 4 | 5 |\n" in printed


def test_each_number_is_kept_with_all_that_made_it(runs, task, tmp_path):
    out = [f"--out={tmp_path / 'x'}", "--device=cpu"]
    pope = str(runs / "pope")
    sample.main([pope, "--extrapolate=1,2", "--eval_tokens=64", *out])
    sample.main([str(task / "run"), "--evaluate=val", *out])
    text, errors = ["window_loss", "loss", "ppl"], ["loss", "ppl", "token_error", "sequence_error"]
    for run, split, metrics, pe, steps in ((pope, "val (64 tokens) 2x", text, "pope", 30),
                                           (str(task / "run"), "val", errors, "rope", 150)):
        with open(os.path.join(run, "results.jsonl")) as file:
            lines = [line for line in map(json.loads, file) if line["split"] == split][-len(metrics) :]
        assert sorted(line["metric"] for line in lines) == sorted(metrics)
        with open(tmp_path / "x.csv") as file:
            row = list(csv.DictReader(file))[-1]
        for line in lines:
            if run != pope:
                assert float(row[line["metric"]]) == line["value"]
            assert (line["run"], line["pe"], line["seed"], line["steps"]) == (run, pe, 1337, steps)
            assert line["torch"] == torch.__version__ and line["machine"]
            assert "commit" in line and "config" in line


def test_evaluate_recall(tmp_path, capsys):
    """A key, its value, three fillers or nineteen, the key again, and the value, which carries loss."""
    imread = pytest.importorskip("matplotlib.image").imread
    writer, rng = Writer(tmp_path / "recall"), np.random.default_rng(0)
    for split, fillers in (("train", 3), ("val", 3), ("x2", 19)):
        pairs = rng.integers(0, 4, (30, 2)) + [0, 4]
        rows = np.concatenate((pairs, np.full((30, fillers), 8), pairs), 1)
        writer.write(split, rows, np.arange(fillers + 4) == np.full((30, 1), fillers + 3))
    writer.finish(9, {"symbols": list("abcdefghi")})
    runs = [str(tmp_path / pe) for pe in ("learned", "rope")]
    for run in runs:
        train.main([f"--data={tmp_path / 'recall'}", f"--out_dir={run}", *TINY,
                    f"--pe={os.path.basename(run)}", "--max_iters=5"])
    capsys.readouterr()
    sample.main([*runs, "--evaluate=val,x2", f"--out={tmp_path / 'ev'}", "--device=cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(runs[0]) and lines[2].endswith("ends at 16") and lines[2].count("%") == 2
    assert lines[3].startswith(runs[1]) and lines[3].count("%") == 4
    assert lines[4:] == [f"wrote {tmp_path / name}" for name in ("ev.csv", "ev.png", "ev_distance.png")]
    for name in ("ev.png", "ev_distance.png"):
        pixels = imread(tmp_path / name)[..., :3]
        assert ((pixels.max(-1) - pixels.min(-1)) > 0.1).mean() > 0.001


@pytest.mark.parametrize("words, message", [
    ([], "no run directory given; e.g. python sample.py out/quickstart_pope"),
    (["nowhere"], "run directory 'nowhere' does not exist; train one with"),
    (["RUN/ckpt.pt"], "ckpt.pt' is a file; give the run directory that holds it, RUN"),
    (["RUN", "--temperature=-1"], "temperature=-1.0 is negative; use 0 or more"),
    (["RUN", "--top_k=-1"], "top_k=-1 in --top_k=-1 is negative; use 0 or more"),
    (["RUN@n_layer=-1"], "@n_layer=-1 is negative; use 0 or more"),
    (["RUN@rope_scale=2"], "unknown key 'rope_scale' in "),
    (["RUN@rope_scaling=cubic"], "rope_scaling='cubic' is unknown; choose one of none, linear, ntk, yarn"),
    (["RUN@n_embd=32"], "holds another architecture"),
    (["RUN@n_embd=x"], "n_embd='x' in "),
    (["RUN", "--extrapolate=a"], "extrapolate='a' is no list of multiples; write e.g. --extrapolate=1,2,4,8"),
    (["RUN", "--extrapolate=1,2.5x"], "extrapolate='1,2.5x' is no list of multiples"),
    (["RUN", "--extrapolate=1,0.01"], "extrapolate='1,0.01' is no list of multiples"),
    (["RUN", "--extrapolate=1,inf"], "extrapolate='1,inf' is no list of multiples"),
    (["RUN", "--extrapolate=1", "--split=dev"], "has no split 'dev'"),
    (["RUN", "--extrapolate=1000"], "has 600 tokens"),
    (["RUN", "--evaluate=val,dev"], "has no split 'dev'; it has: train, val"),
    (["RUN", "--evaluate=val", "--data=OTHER"], "holds tokens of "),
    (["RUN", "--prompt=zz"], "'zz' is no symbol of this set"),
    (["RUN", "--temp=1"], "unknown key 'temp' in --temp=1"),
    (["RUN", "--temperature=1e-320"], "temperature=1e-320 is too small to divide by; use 0"),
    (["RUN", "--extrapolate"], "flag '--extrapolate' has no value; write e.g. --extrapolate=1,2,4,8"),
    (["TASK", "--prompt=a"], "prompt='a' is for text, but TASK was trained on a task; leave it out"),
    (["gpt2"], "train one with `python train.py config/quickstart.py`, public weights are not read"),
    (["out/quickstart_cope+rope_seed7"], "with `python train.py config/quickstart.py --pe=cope+rope`"),
    (["x/cope_counting_small_cope_mlp/"], "`python train.py config/cope_counting_small.py --pe=cope_mlp`"),
    (["RUN", "--task_limit=-1"], "task_limit=-1 in --task_limit=-1 is negative; use 0 or more"),
    (["nowhere", "--report=r"], "results.jsonl does not exist; `python sample.py nowhere --evaluate=val`"),
    (["nowhere", "--figure=curves"], "log.jsonl does not exist; name run directories that train.py wrote"),
    (["RUN", "--figure=curves", "--keys=los"],
     "keys='los' is not in RUN/log.jsonl; it has loss, lr, ms, "),
    (["RUN", "--figure=curves", "--against=time"], "against='time' is unknown; choose one of step, tokens"),
    (["RUN", "--figure=gate"], "figure='gate' is unknown; choose one of frequency, positions, gates"),
    (["RUN", "--figure=gates"],
     "figure='gates' shows cope, cope_mlp or cope_alibi, but the run has pe='rope'"),
    (["RUN", "--figure=positions"],
     "figure='positions' shows cope, cope_mlp or cope_alibi, but the run has pe='rope'"),
    (["EXPE", "--figure=frequency"],
     "figure='frequency' shows rope, carope or pope, but the run has pe='expe'"),
    (["RUN", "--figure=frequency", "--text=nowhere.txt"],
     "text='nowhere.txt' is no file of UTF-8 text; name one"),
    (["RUN", "--figure=frequency", "--text=RUN/ckpt.pt"], "ckpt.pt' is no file of UTF-8 text; name one"),
    (["RUN", "--figure=frequency", f"--text={os.devnull}"], "is empty; name a file that holds some text"),
])
def test_wrong_input(runs, task, tmp_path, words, message):
    for name, path in dict(OTHER=task / "data", RUN=runs / "rope", EXPE=runs / "expe",
                           TASK=task / "run").items():
        words, message = [word.replace(name, str(path)) for word in words], message.replace(name, str(path))
    assert message in fails("sample.py", *words, f"--out={tmp_path / 'ex'}")


@pytest.mark.parametrize("words, message", [
    (["nowhere", "--extrapolate=1"], "run directory 'nowhere' does not exist"),
    (["nowhere", "--evaluate=val"], "run directory 'nowhere' does not exist"),
    (["TASK", "--extrapolate=1"], "holds rows of 8 tokens; extrapolation needs a stream of text"),
    (["--evaluate=val,dev"], "has no split 'dev'"),
])
def test_what_is_missing_is_said_before_anything_is_evaluated(runs, task, words, message, capsys):
    capsys.readouterr()
    assert message in fails("sample.py", str(runs / "rope"),
                            *(word.replace("TASK", str(task / "run")) for word in words))
    assert capsys.readouterr().out == ""


def test_figures(runs, rows, stream, tmp_path, monkeypatch, capsys):
    imread = pytest.importorskip("matplotlib.image").imread
    seen = []
    for name in ("norms", "maps", "weights_by_distance"):
        f = getattr(figures, name)

        def spy(model, idx, *more, f=f):
            seen.append(idx[0].tolist())
            return f(model, idx, *more)

        monkeypatch.setattr(figures, name, spy)
    text = tmp_path / "text"
    text.write_text("s3 s1 s4 " * 10)
    train.main([f"--data={rows}", f"--out_dir={tmp_path / 'task'}", *TINY, "--pe=cope+rope", "--max_iters=2"])
    start = {split: Split(stream, split).read([0], 16)[0][0].tolist() for split in ("train", "val")}
    for run, figure, words, want in (
        (runs / "pope", "frequency", [], start["val"]),
        (runs / "rope@rope_scaling=ntk,rope_factor=2", "frequency", ["--split=train"], start["train"]),
        (runs / "cope", "positions", [f"--text={text}"], [3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1, 4, 3]),
        (runs / "cope@block_size=20", "gates", [f"--text={text}"],
         [3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1, 4, 3, 1]),
        (tmp_path / "task", "gates", [], Split(rows, "val").read([0], 11)[0][0].tolist()),
        (runs / "rope", "distance", [], Split(stream, "val").read([0], 64)[0][0].tolist()),
        (runs / "learned", "distance", [], start["val"]),
        (tmp_path / "task", "distance", [], Split(rows, "val").read([0], 11)[0][0].tolist()),
        (tmp_path / "task@block_size=5", "gates", [], Split(rows, "val").read([0], 11)[0][0, :5].tolist()),
    ):
        capsys.readouterr()
        sample.main([str(run), f"--figure={figure}", f"--out={tmp_path / 'new' / 'x'}", "--device=cpu",
                     *words])
        path = tmp_path / "new" / f"{run.name}_{figure}.png"
        assert capsys.readouterr().out == f"wrote {path}\n" and seen.pop() == want
        pixels = imread(path)[..., :3]
        colours = ((pixels.max(-1) - pixels.min(-1)) > 0.1).mean()  # axes and letters have none
        assert colours > (0.002 if figure == "distance" else 0.05)


def test_figure_without_matplotlib(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = fails("sample.py", str(runs / "cope"), "--figure=gates")
    assert line == "ImportError: no picture without one more package: pip install matplotlib"


def test_a_path_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    line = fails("sample.py", str(runs / "pope"), "--extrapolate=1", "--eval_tokens=64",
                 f"--out={tmp_path / 'file' / 'x'}")
    assert line == (f"ValueError: the folder of '{tmp_path / 'file' / 'x'}' cannot be made (File exists); "
                    "name another by --out or --report")


def test_learned_writes_as_many_tokens_as_fit(runs, capsys):
    sample.main([str(runs / "learned"), "--num_samples=1", "--device=cpu"])
    title, text = capsys.readouterr().out.splitlines()
    assert title.endswith("sample 1, which ends at 16 tokens") and len(text.split()) == 16
    sample.main([str(runs / "learned"), "--num_samples=1", "--device=cpu", "--prompt=s1 s2 s3"])
    assert len(capsys.readouterr().out.splitlines()[1].split()) == 17  # the last token is not read again


def test_training_curves(runs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append((figure, path)))
    words = ["--figure=curves", "--keys=loss,val/ppl", f"--out={tmp_path / 'x'}"]
    for against, tokens in (("step", 1), ("tokens", 4 * 16)):
        sample.main([str(runs / "pope"), str(runs / "rope"), *words, f"--against={against}"])
        figure, path = drawn.pop()
        assert path == str(tmp_path / "x")
        for i, (name, line) in enumerate(zip(("pope", "rope"), figure.axes[0].lines)):
            with open(runs / name / "log.jsonl") as file:
                log = [json.loads(line) for line in file]
            steps = [line for line in log if "loss" in line and "split" not in line]
            want = [[line["step"] * tokens, line["loss"]] for line in steps]
            assert line.get_xydata().tolist() == want and len(want) == 3 and line.get_label() == name
            want = [[line["step"] * tokens, line["ppl"]] for line in log if line.get("split") == "val"]
            assert figure.axes[1].lines[i].get_xydata().tolist() == want and len(want) > 1


def test_columns_never_run_together(capsys):
    """At a perplexity of 2 and of e^100 alike."""
    for loss in (math.log(2), 11.5, 100.0):
        words = f"{loss:.4f}", f"({math.exp(loss):.2f})"
        sample.print_row("run", 3 * [sample.cell(dict(loss=loss, ppl=math.exp(loss)), None)], 5)
        assert capsys.readouterr().out.split() == ["run", *3 * words]


def test_empty_text(runs, tmp_path):
    (tmp_path / "text").write_text("\n")
    with pytest.raises(ValueError, match="is empty; name a file that holds some text"):
        sample.main([str(runs / "cope"), "--figure=gates", f"--text={tmp_path / 'text'}"])
