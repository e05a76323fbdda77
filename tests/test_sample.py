"""Tests sample.py and eval/. Losses are compared with sums by hand, over plain forward passes. What
sample.py refuses is in test_bad_input.py."""
import dataclasses
import glob
import itertools
import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, write_stream

import eval
import sample
import train
from data.shards import Writer
from eval import figures, losses, results


@pytest.fixture(scope="module")
def runs(stream, rows, tmp_path_factory):
    """Run directories of tiny models, and in `data` a stream in which few tokens carry loss. All
    are trained for a few steps at 16 tokens, except that `task` half knows its rows by heart."""
    folder = tmp_path_factory.mktemp("out")
    masked = write_stream(folder / "data", fraction=0.05)
    special = {"masked": (masked, "pope", 10), "task": (rows, "rope", 150)}
    for name in ("pope", "learned", "rope", "expe", "carope+cope", *special):
        data, pe, steps = special.get(name, (stream, name, 10))
        train.main([f"--data={data}", f"--out_dir={folder / name}", *TINY, f"--pe={pe}",
                    f"--max_iters={steps}", "--eval_batches=0",
                    f"--eval_splits={'train' if name == 'task' else 'val'}"])
    return folder

def token_losses(run, tokens, windows):
    """Returns the losses of the targets of each window (begin, end, first), from `first` on."""
    net = sample.Run(str(run), device="cpu").model
    found = {}
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
    """Returns {the last word of the split: its last measurement}."""
    folder, options = results.split_options(str(run))
    return {line["split"].split()[-1]: line["value"]
            for line in results.records(folder, "results.jsonl")
            if line["options"] == options and line["metric"] == metric}

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
    names = [str(runs / name) for name in ("pope", "learned", "expe@expe_scale=0.5", "masked")]
    asked = ",".join(map(str, multiples))
    sample.main([*names, f"--eval_tokens={eval_tokens}", f"--extrapolate={asked}", "--device=cpu"])
    printed = capsys.readouterr().out
    assert printed.count("loss in nats (perplexity), on ") == 2  # one for each data set
    for name, m in itertools.product(names, multiples):
        tokens = tokens_of(stream, "val")
        mask = np.ones(599)
        if "masked" in name:
            tokens = tokens_of(runs / "data", "val")
            mask = np.fromfile(runs / "data" / "val_000000.loss", "u1")[1:]
        mask = np.concatenate([mask[start:stop] for start, stop in spans])
        length = round(16 * m)
        windows = []
        for start, stop in tiles(spans, length):
            windows.append((start, min(start + 16, stop), start))
            while windows[-1][1] < stop:
                end = min(windows[-1][1] + 8, stop)
                windows.append((end - 16, end, windows[-1][1]))
        want = np.average(token_losses(name, tokens, windows), weights=mask)
        assert numbers(name, "window_loss")[f"{m}x"] == pytest.approx(want, abs=1e-5)
        if "learned" in name and m > 1:
            assert f"{m}x" not in numbers(name) and "ends at 16" in printed
            continue
        tiled = [(start, stop, start) for start, stop in tiles(spans, length)]
        want = np.average(token_losses(name, tokens, tiled), weights=mask)
        loss = numbers(name)[f"{m}x"]
        assert loss == pytest.approx(want, abs=1e-5)
        assert f"{loss:.4f} ({math.exp(loss):.2f})" in printed

def test_loss_by_position(runs, stream, tmp_path, drawn, monkeypatch):
    """Segments of eight times the trained length, whose positions are averaged in 32 groups.
    `learned` reads the beginnings of the same segments."""
    monkeypatch.setattr(losses, "SEGMENT", 50)  # so that the cache is used
    sample.main([str(runs / "rope"), str(runs / "learned"), "--figure=loss_by_position",
                 f"--out={tmp_path / 'new' / 'x'}", "--device=cpu", "--eval_tokens=400"])
    assert drawn[0].axes[0].get_title() == "loss at each position, val (400 tokens)"
    tokens = tokens_of(stream, "val")
    starts = [0, (599 - 128) // 2, 599 - 128]  # three segments of 128 tokens
    lines = drawn[0].axes[0].lines
    for line, name, length in zip(lines, ("rope", "learned"), (128, 16)):
        found = np.reshape(token_losses(
            runs / name, tokens, [(start, start + length, start) for start in starts]), (3, length))
        want = [[4 * n + 2.5, found[:, 4 * n : 4 * n + 4].mean()] for n in range(length // 4)]
        assert np.allclose(line.get_xydata(), want) and line.get_label() == name
    assert list(lines[2].get_xdata()) == [16, 16]
    assert len((tmp_path / "new" / "x.csv").read_text().splitlines()) == 1 + 32 + 4

def test_evaluate_a_whole_stream(runs):
    """As at the end of training, which evaluates whole splits here too."""
    sample.main([str(runs / "pope"), "--evaluate=val", "--device=cpu"])
    loss = results.records(runs / "pope", "log.jsonl")[-2]["loss"]
    assert numbers(runs / "pope")["val"] == pytest.approx(loss)

# text and answers

def test_text(runs, capsys):
    """Samples differ, a seed repeats them, and the separator is not printed."""
    def texts(*words):
        sample.main([str(runs / "pope"), *words, "--device=cpu"])
        lines = capsys.readouterr().out.splitlines()
        return [line.split() for line in lines if not line.startswith("---")]

    first = texts("--prompt=s3 s10", "--max_new_tokens=20")
    assert [len(text) for text in first] == [22, 22] and first[0] != first[1]
    assert all(text[:2] == ["s3", "s10"] for text in first)
    assert texts("--prompt=s3 s10", "--max_new_tokens=20") == first
    greedy = texts("--temperature=0.0", "--max_new_tokens=5")
    assert greedy[0] == greedy[1] and len(greedy[0]) == 5
    assert texts("--temperature=5.0", "--top_k=1", "--max_new_tokens=5") == greedy

def test_learned_writes_as_many_tokens_as_fit(runs, capsys):
    for prompt, n in ("", 16), ("s1 s2 s3", 17):  # the last token is not read again
        sample.main([str(runs / "learned"), "--num_samples=1", f"--prompt={prompt}"])
        title, text = capsys.readouterr().out.splitlines()
        assert title.endswith("sample 1, which ends at 16 tokens") and len(text.split()) == n

def test_answers_are_those_of_greedy_decoding(runs, rows, tmp_path, capsys):
    """The model sees the right tokens before each answer, and sequence_error counts the rows with a
    wrong one. These rows are shorter than in training, and their padding is not shown."""
    tokens = tokens_of(rows, "train", 64, 12)[:, :10]
    masks = np.fromfile(f"{rows}/train_000000.loss", "u1").reshape(64, 12)[:, :10]
    masks[:, 6] = 1
    masks[:, 7:] = 0  # padding
    writer = Writer(tmp_path / "short")
    writer.write("train", tokens, masks)
    writer.finish(vocab_size=9, tokenizer={"symbols": list("abcdefghi")})
    words = [str(runs / "task"), f"--data={tmp_path / 'short'}", "--device=cpu"]
    capsys.readouterr()
    sample.main([*words, "--num_samples=64"])  # of train, on which training evaluated
    lines = capsys.readouterr().out.splitlines()
    net = sample.Run(words[0], device="cpu").model
    wrong_rows = 0
    for i, (row, mask) in enumerate(zip(tokens[:, :7], masks)):
        text = ["abcdefghi"[token] for token in row]
        asked = [t for t in range(1, 7) if mask[t]]
        right = 0
        for t in asked:
            said = "abcdefghi"[int(net(torch.tensor(row[None, :t]))[0].argmax())]
            right += said == text[t]
            text[t] = f"[{said}]" if said == text[t] else f"[{said}, not {text[t]}]"
        wrong_rows += right < len(asked)
        assert lines[1 + 2 * i] == f"--- row {i + 1}, {right} of {len(asked)} right"
        assert lines[2 + 2 * i] == " ".join(text)
    assert 0 < wrong_rows < 64, "the test needs right and wrong rows"
    sample.main([*words, "--evaluate=train"])
    assert capsys.readouterr().out.endswith(f" {100 * wrong_rows / 64:.2f}%\n")

# what is kept, and its report

def test_each_number_is_kept_with_all_that_made_it(runs, rows, tmp_path, monkeypatch):
    """A number on other data names them. An interruption in the next split costs no number, and a
    line that a full disk cut short costs no other."""
    run = runs / "task"
    (run / "results.jsonl").unlink(missing_ok=True)
    other = str(shutil.copytree(rows, tmp_path / "other"))

    def error_sums(model, x, y, error_sums=losses.error_sums):
        if len(x) > 10:  # val has 10 rows
            raise KeyboardInterrupt
        return error_sums(model, x, y)

    monkeypatch.setattr(losses, "error_sums", error_sums)
    with pytest.raises(KeyboardInterrupt):
        sample.main([str(run), "--evaluate=val,train", f"--data={other}", "--device=cpu"])
    lines = results.records(run, "results.jsonl")
    assert [line["metric"] for line in lines] == ["loss", "ppl", "token_error", "sequence_error"]
    for line in lines:
        assert line["run"] == str(run) and line["split"] == f"{other} val"
        assert line["seed"] == 1337 and line["torch"] == torch.__version__ and line["machine"]
        assert line.keys() >= {"commit", "config", "steps"}
        assert line["experiment"] == sample.Run(str(run)).experiment
    with open(run / "results.jsonl", "a") as file:
        file.write('{"run": "cut by a full d')
    sample.main([str(run), "--evaluate=val", "--device=cpu"])
    with pytest.raises(ValueError, match="results.jsonl is damaged in line 5; delete it"):
        results.records(run, "results.jsonl")
    good = (run / "results.jsonl").read_text().splitlines()[5:]
    assert [json.loads(line)["metric"] for line in good] == [line["metric"] for line in lines]

def test_numbers_do_not_go_to_the_run_that_took_a_place(runs, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(runs / "pope", folder)
    run = sample.Run(str(folder), device="cpu")
    folder.rename(tmp_path / "b")
    folder.mkdir()
    with pytest.raises(ValueError, match="a was moved, deleted or replaced while it was"):
        results.append(run, dict(split="val", length=16, loss=1.0))

def test_report(tmp_path, monkeypatch, capsys):
    """A cell holds the mean, the standard deviation and the range over seeds, and a curve is the
    mean in a band of the range. The last measurement counts. What was measured with options has a
    row of its own. A run has one row, although it was measured under another path."""
    pytest.importorskip("matplotlib")
    drawn = []

    def save(figure, path, real=figures.save):
        drawn.append(figure)
        real(figure, path)

    monkeypatch.setattr(figures, "save", save)
    monkeypatch.chdir(tmp_path)
    for folder, options, seed, *values in (
        ("x_pope", "", 1, 99, 99), ("x_pope", "", 1, 1, 2), ("x_pope_seed2", "", 2, 2, 3),
        ("x_pope_seed3", "", 3, 6), ("x_rope", "", 1, 0.5, 1.5),
        ("x_rope", "rope_factor=2", 1, 3, 4),
    ):
        os.makedirs(f"out/{folder}", exist_ok=True)
        with open(f"out/{folder}/results.jsonl", "a") as file:
            for n, value in enumerate(values, 1):
                line = dict(run=f"elsewhere/{folder}", options=options, config=f"/{seed}/x.py",
                            seed=seed, pe=folder[2:6], split=f"val {n}x", data=1, trained=8,
                            length=8 * n, steps=9, experiment=3, weights=4, read_at=2,
                            metric="loss", value=value)
                # an older checkpoint was put back, and an evaluation of other weights ended late
                for more in (dict(steps=12, weights=3, read_at=1, value=77), {},
                             dict(weights=5, read_at=1, value=88)):
                    file.write(f"{json.dumps({**line, **more})}\n\n")
    os.mkdir("out/z_new")
    sample.main([*sorted(glob.glob("out/*")), "./out/x_rope", "--report=new/r"])
    printed = capsys.readouterr()
    assert "left out out/z_new, which has no results" in printed.err
    assert printed.out.splitlines()[5:8] == [
        "| pope | 3 | 9 | 3.000 ± 2.6 (1.000 to 6.000) "
        "| 2.500 ± 0.71 (2.000 to 3.000) [2 of 3 runs] |",
        "| rope | 1 | 9 | 0.5000 | 1.500 |",
        "| rope (rope_factor=2) | 1 | 9 | 3.000 | 4.000 |"]
    assert len((tmp_path / "new" / "r.csv").read_text().splitlines()) == 1 + 9
    assert (tmp_path / "new" / "r.png").exists()
    (ax,) = drawn[0].axes
    found = [(line.get_label(), line.get_color(), line.get_linestyle(), line.get_xydata().tolist())
             for line in ax.lines if not line.get_label().startswith("_")]
    colors = figures.COLORS
    assert found == [
        ("pope", colors["pope"], "-", [[8, 3]]),  # one seed has no value at 16
        ("rope", colors["rope"], "-", [[8, 0.5], [16, 1.5]]),
        ("rope (rope_factor=2)", colors["rope"], "--", [[8, 3], [16, 4]])]
    band = set(map(tuple, ax.collections[0].get_paths()[0].vertices.tolist()))
    assert band >= {(8, 1), (8, 6)}

def test_runs_that_were_measured_on_different_data(capsys):
    line = dict(config="x", metric="loss", pe="pope", steps=9, split="val", value=1.0)
    lines = [dict(line, run=f"out/x_pope_seed{seed}", seed=seed, data=seed) for seed in (1, 2)]
    lines.append(dict(line, run="out/x_other_pope", seed=1, metric="window_loss"))
    for n, data in ((1, 3), (2, 4)):  # the set was written again in between
        lines.append(dict(lines[0], split=f"b val {n}x", data=data))
    results.print_tables(lines)
    printed = capsys.readouterr().out
    assert ("| run | seeds | steps | val, on different data | b val 1x, on different data "
            "| b val 2x, on different data |") in printed
    assert "| pope | 2 | 9 |" in printed and "| other_pope | 1 | 9 |" in printed  # in its own table

@pytest.mark.parametrize("change", [
    dict(steps=5), dict(pe="rope"), dict(experiment=7), dict(seed=1)])
def test_runs_of_one_name_that_differ_in_more_than_their_seed(change):
    rows = [dict(run=f"out/x_pope_seed{seed}", pe="pope", steps=9, experiment=6, seed=seed)
            for seed in (1, 2)]
    assert list(results.labels(rows).values()) == ["pope", "pope"]
    rows[1].update(change)
    assert list(results.labels(rows).values()) == ["pope_seed1", "pope_seed2"]
    rows = [dict(run=f"{name}_rope", pe="rope", config=f"{name}.py") for name in ("x", "x_small")]
    assert list(results.labels(rows).values()) == ["rope", "small_rope"]  # they share a panel

# runs and actions

def test_a_run_is_named_once(runs, tmp_path, monkeypatch, capsys):
    """It does not matter which path leads to it. Files that a pattern such as out/* finds are left
    out. A folder's own name may contain an @."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "rope", "a@length=64")
    (tmp_path / "curves.png").touch()
    changed = "a@length=64@rope_scaling=ntk,rope_factor=2"
    os.symlink("a@length=64", "link")
    sample.main(["a@length=64", "./a@length=64/", "link", str(tmp_path / "a@length=64"), changed,
                 "curves.png", "--num_samples=1"])
    printed = capsys.readouterr()
    assert re.findall("--- (.*), sample", printed.out) == ["a@length=64", changed]
    assert "left out curves.png" in printed.err

def test_yarn_knows_the_trained_length(runs, rows, tmp_path):
    """A larger block_size is not the length that the run was trained at."""
    yarn = f"{runs / 'rope'}@rope_scaling=yarn,rope_factor=4"
    for more, trained in ((",block_size=64", 16), (",rope_trained=9", 9)):
        assert sample.Run(yarn + more, device="cpu").model.cfg.rope_trained == trained
    # a run that was trained with it keeps the length that it took then
    words = [f"--data={rows}", *TINY, "--max_iters=1", "--pe=rope", "--block_size=80"]
    train.main([*words, "--rope_scaling=yarn", "--rope_factor=4", f"--out_dir={tmp_path / 'yarn'}"])
    train.main([*words, f"--out_dir={tmp_path / 'rope'}"])  # on rows of 11 tokens and a target
    for run, trained in (("yarn@block_size=160", 80), ("rope@rope_scaling=yarn,rope_factor=4", 11)):
        assert sample.Run(str(tmp_path / run), device="cpu").model.cfg.rope_trained == trained

def test_every_key_is_read_or_refused(runs, tmp_path, monkeypatch):
    """Each action reads the keys that ACTIONS lists for it, and all others are refused. A figure of
    one run is saved in its folder."""
    pytest.importorskip("matplotlib")
    saved = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: saved.update({path: figure}))
    monkeypatch.setattr(eval, "harness", SimpleNamespace(score_tasks=print), raising=False)
    monkeypatch.chdir(tmp_path)
    keys = {field.name for field in dataclasses.fields(sample.SampleConfig)}
    reads = set()

    class Spy(sample.SampleConfig):
        def __getattribute__(self, name):
            reads.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(sample, "SampleConfig", Spy)
    run = str(runs / "carope+cope")  # it has something to show in every figure
    commands = {"evaluate": [run, "--evaluate=val"], "report": [run, "--report=x"], "text": [run],
                "answers": [str(runs / "task")], "extrapolate": [run, "--extrapolate=1"],
                "tasks": [run, "--tasks=x"]}
    for figure in sample.ACTIONS.keys() - commands.keys():
        commands[figure] = [run, f"--figure={figure}"]
    commands["positions"].append("--heads=1.2")
    # These are read to choose the action, to load the runs, or to be passed on
    always = {"figure", "device", "data", "text", "heads"}
    for action, words in commands.items():
        reads.clear()
        sample.main(words)
        listed = set(sample.ACTIONS[action].keys)
        assert listed <= reads and reads & keys <= listed | always, action
        for key in keys - listed - set(sample.FLAGS):  # one of FLAGS chooses another action
            value = getattr(sample.SampleConfig, key) or "1"
            with pytest.raises(ValueError, match=f"--{key} |--{key}$"):
                sample.main([*words, f"--{key}={value}"])
    assert saved.keys() >= {f"{run}/{name}" for name in figures.FIGURES}

def test_tokens_of_a_figure(runs, stream, tmp_path):
    """A figure shows the beginnings of text files, cut to the shortest, or of segments."""
    (tmp_path / "text").write_text("s3 s1 s4 " * 10)
    (tmp_path / "short").write_text("s2 s7")
    for name, figure, files, want in (
        ("rope", "frequency", f"{tmp_path}/text,{tmp_path}/short", [[3, 1], [2, 7]]),
        ("rope@block_size=20", "gates", f"{tmp_path}/text", [[3, 1, 4] * 6 + [3, 1]]),
        ("rope", "positions", "", [tokens_of(stream, "val")[:16].tolist()]),
    ):
        run = sample.Run(str(runs / name), "", "cpu")
        assert figures.tokens_to_show(run, figure, files, "val").tolist() == want

def test_training_curves(runs, tmp_path, drawn):
    """One curve for each run, although rope is named twice."""
    names = [str(runs / name) for name in ("pope", "rope", "rope@rope_scaling=ntk,rope_factor=2")]
    sample.main([*names, "--figure=curves", f"--out={tmp_path}/x"])
    assert len(drawn[0].axes[0].lines) == 2
    curves = [line.get_xydata().tolist() for ax in drawn[0].axes for line in ax.lines]
    for name, split in itertools.product(names[:2], (None, "val")):
        assert [[line["step"], line["loss"]] for line in results.records(name, "log.jsonl")
                if "loss" in line and line.get("split") == split] in curves
