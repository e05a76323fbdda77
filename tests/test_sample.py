"""sample.py against losses computed by hand, one plain forward pass per window."""
import csv
import math
import os
import sys

import numpy as np
import pytest
import torch
from conftest import TINY, fails

import sample
import train
from data.shards import Split, Writer
from model import GPT, model_config, read_checkpoint


@pytest.fixture(scope="module")
def runs(stream, tmp_path_factory):
    """Run directories of tiny models, trained for a few steps at 16 tokens."""
    folder = tmp_path_factory.mktemp("out")
    for pe in ("pope", "learned", "rope", "expe"):
        train.main([f"--data={stream}", f"--out_dir={folder / pe}", *TINY, f"--pe={pe}", "--max_iters=30"])
    return folder


def by_hand(run, stream, length, longest, count, **changes):
    """Mean loss over windows of this length that tile `count` stretches of the longest length."""
    checkpoint = read_checkpoint(str(run))
    net = GPT(model_config(checkpoint, **changes)).eval()
    net.load(checkpoint, "run")
    tokens = np.fromfile(os.path.join(stream, "val_000000.bin"), "<u2").astype(int)
    terms = []
    for start in Split(stream, "val").windows(longest, count):
        for a in range(start, start + longest, length):
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


def test_picture(runs, tmp_path):
    pytest.importorskip("matplotlib")
    sample.main([str(runs / "pope"), str(runs / "learned"), "--extrapolate=1,2", "--eval_tokens=64", f"--out={tmp_path / 'ex'}"])
    with open(tmp_path / "ex.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_no_matplotlib(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sample.main([str(runs / "pope"), "--extrapolate=1", "--eval_tokens=64", f"--out={tmp_path / 'ex'}"])
    assert "no picture: pip install matplotlib" in capsys.readouterr().out
    assert os.path.exists(tmp_path / "ex.csv")


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
    train.main([f"--data={folder / 'data'}", f"--out_dir={folder / 'run'}", *TINY, "--max_iters=150", "--batch_size=16", "--pe=rope",
                "--dropout=0.0"])
    return folder


def test_rows_show_the_answers_that_greedy_decoding_gives(task, capsys):
    capsys.readouterr()
    sample.main([str(task / "run"), "--num_samples=24", "--split=long", "--device=cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("long split; the model's answers are [right] or [wrong, not right]")
    checkpoint = read_checkpoint(str(task / "run"))
    net = GPT(model_config(checkpoint)).eval()
    net.load(checkpoint, "run")
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


def test_evaluate_whole_splits(task, runs, stream, capsys):
    capsys.readouterr()
    sample.main([str(task / "run"), "--evaluate=val,long", "--device=cpu"])
    found = capsys.readouterr().out.splitlines()
    checkpoint = read_checkpoint(str(task / "run"))
    net = GPT(model_config(checkpoint)).eval()
    net.load(checkpoint, "run")
    for line, name, n, T in zip(found, ("val", "long"), (40, 24), (8, 12)):
        rows = np.fromfile(task / "data" / f"{name}_000000.bin", "<u2").reshape(n, T).astype(int)
        decoded = net.generate(torch.tensor(rows[:, :5]), 2, temperature=0)[:, 5:].numpy()
        wrong = sum(tuple(a) != tuple(b) for a, b in zip(decoded.tolist(), rows[:, 5:7].tolist()))  # greedy, from the prompt
        assert 0 < wrong < n, "the test needs right and wrong rows"
        assert line.startswith(f"{task / 'run'} {name}, {n} of {T - 1} tokens: ")
        assert line.endswith(f"sequence_error {100 * wrong / n:.4f}")
    sample.main([str(runs / "pope"), "--evaluate=val", "--device=cpu"])
    line = capsys.readouterr().out
    assert f"val, 37 of 16 tokens: loss {by_hand(runs / 'pope', stream, 16, 16, 37):.4f}, ppl" in line and "error" not in line


@pytest.mark.parametrize("words, message", [
    ([], "no run directory given; e.g. python sample.py out/quickstart_pope"),
    (["nowhere"], "run directory 'nowhere' does not exist; train one with"),
    (["RUN@rope_scale=2"], "unknown key 'rope_scale' in "),
    (["RUN@rope_scaling=cubic"], "rope_scaling='cubic' is unknown; choose one of none, linear, ntk, yarn"),
    (["RUN@n_embd=32"], "holds another architecture"),
    (["RUN@n_embd=x"], "n_embd='x' in "),
    (["RUN", "--extrapolate=a"], "extrapolate='a' is no list of multiples; write e.g. --extrapolate=1,2,4,8"),
    (["RUN", "--extrapolate=1,2.5"], "extrapolate='1,2.5' is no list of multiples"),
    (["RUN", "--extrapolate=1", "--split=dev"], "has no split 'dev'"),
    (["RUN", "--extrapolate=1000"], "has 600 tokens"),
    (["RUN", "--evaluate=val,dev"], "has no split 'dev'; it has: train, val"),
    (["RUN", "--prompt=zz"], "'zz' is no symbol of this set"),
    (["RUN", "--temp=1"], "unknown key 'temp' in --temp=1"),
])
def test_wrong_input(runs, tmp_path, words, message):
    words = [word.replace("RUN", str(runs / "rope")) for word in words]
    assert message in fails("sample.py", *words, f"--out={tmp_path / 'ex'}")

