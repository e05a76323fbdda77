"""sample.py. Losses are compared with sums by hand, over plain forward passes. What sample.py
refuses is in test_bad_input.py."""
import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY

import sample
import train
from config.runs import TrainedRun, read_checkpoint, read_records
from data.shards import Split, Writer
from data.tokenizer import Tiktoken, tokenizer
from eval import scores

ROOT = Path(__file__).parent.parent
# the options of TINY that change what a run learns, apart from pe
FLAGS = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, learning_rate=0.01,
             schedule="constant", dropout=0.1)

@pytest.fixture(scope="module")
def runs(stream, rows, tmp_path_factory):
    """Run directories of tiny models, trained for a few steps at 16 tokens, except that `task` half
    knows its rows by heart."""
    folder = tmp_path_factory.mktemp("out")
    for name in ("pope", "learned", "rope", "expe", "task"):
        flags = [f"--data={stream}", f"--pe={name}", "--max_iters=10"]
        if name == "task":
            flags = [f"--data={rows}", "--pe=rope", "--max_iters=150", "--eval_splits=train"]
        train.main([*TINY, *flags, f"--out_dir={folder / name}", "--eval_batches=0"])
    return folder

def token_losses(run, tokens, windows):
    """Returns the losses of the targets of each window (begin, end, first), from `first` on."""
    net = TrainedRun(str(run), device="cpu").model
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
    """Returns {the multiple of the trained length, or the split: its last measurement}."""
    run = TrainedRun(str(run), "cpu")
    return {record.get("multiple") or record["split"]: record["values"][metric]
            for record in read_records(f"{run.folder}/results.jsonl")
            if record["options"] == run.options and metric in record["values"]}

# losses

@pytest.mark.parametrize("eval_tokens, spans, multiples", [
    # 16 spans of 32 tokens; at 1.5x, the last piece of each is shorter
    (512, [(i * 567 // 15, i * 567 // 15 + 32) for i in range(16)], (0.5, 1, 1.5, 2)),
    # all of the split, in segments, with a shorter window at the end
    (131072, [(0, 599)], (1, 2.5, 4)),
])
def test_extrapolation(runs, stream, monkeypatch, capsys, eval_tokens, spans, multiples):
    """Every multiple has the same targets. The windows of window_loss overlap by half."""
    monkeypatch.setattr(sample, "SEGMENT", 20)  # so that all lengths above 20 tokens use the cache
    names = [str(runs / name) for name in ("pope", "learned", "expe@expe_scale=0.5")]
    asked = ",".join(map(str, multiples))
    sample.main([*names, f"--eval_tokens={eval_tokens}", f"--extrapolate={asked}", "--device=cpu"])
    printed = capsys.readouterr().out
    assert printed.count("loss in nats (perplexity), on ") == 1  # all read the same data
    assert printed.count("  seeing the last 16 ") == 3
    for name, m in itertools.product(names, multiples):
        tokens = tokens_of(stream, "val")
        length = round(16 * m)
        windows = []
        for start, stop in tiles(spans, length):
            windows.append((start, min(start + 16, stop), start))
            while windows[-1][1] < stop:
                end = min(windows[-1][1] + 8, stop)
                windows.append((end - 16, end, windows[-1][1]))
        want = np.mean(token_losses(name, tokens, windows))
        assert numbers(name, "window_loss")[m] == pytest.approx(want, abs=1e-5)
        if "learned" in name and m > 1:
            assert m not in numbers(name) and "ends at 16" in printed
            continue
        tiled = [(start, stop, start) for start, stop in tiles(spans, length)]
        want = np.mean(token_losses(name, tokens, tiled))
        loss = numbers(name)[m]
        assert loss == pytest.approx(want, abs=1e-5)
        assert f"{loss:.4f} ({math.exp(loss):.2f})" in printed

def test_evaluate_a_whole_stream(runs):
    """As at the end of training, which evaluates whole splits here too."""
    scores.main([str(runs / "pope"), "--splits=val", "--device=cpu"])
    loss = read_records(runs / "pope" / "log.jsonl")[-1]["val/loss"]
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

def test_the_context_of_a_text(runs, capsys):
    """By default, a model sees as many tokens as in training, so `learned` writes texts of any
    length. With 0 it sees all of them, as far as it can."""
    def text(name, *words):
        sample.main([str(runs / name), "--num_samples=1", "--temperature=0", "--prompt=s1 s2 s3",
                     "--max_new_tokens=60", "--device=cpu", *words])
        return capsys.readouterr().out.splitlines()[1].split()

    for name in ("learned", "rope"):
        net = TrainedRun(str(runs / name), "cpu").model
        idx = torch.tensor([[1, 2, 3]])
        for words, context in (([], 16), (["--context=5"], 5), (["--context=0"], None)):
            if name == "rope" or context:
                want = net.generate(idx, 60, temperature=0, context=context)[0].tolist()
                assert text(name, *words) == [f"s{token}" for token in want]
    with pytest.raises(ValueError, match="has only 16 positions, and would see .*--context=16"):
        text("learned", "--context=0")

def test_answers_are_those_of_greedy_decoding(runs, rows, tmp_path, capsys):
    """The model sees the right tokens before each answer, and sequence_error counts the rows with a
    wrong one. These rows are shorter than in training, and their padding is not shown."""
    tokens = tokens_of(rows, "train", 64, 12)[:, :10]
    masks = np.fromfile(f"{rows}/train_000000.loss", "u1").reshape(64, 12)[:, :10]
    masks[:, 6] = 1
    masks[:, 7:] = 0  # padding
    with Writer(tmp_path / "short", 9, {"symbols": list("abcdefghi")}) as writer:
        writer.write("train", tokens, masks)
    words = [str(runs / "task"), f"--data={tmp_path / 'short'}", "--device=cpu"]
    capsys.readouterr()
    sample.main([*words, "--num_samples=64"])  # of train, on which training evaluated
    lines = capsys.readouterr().out.splitlines()
    net = TrainedRun(words[0], device="cpu").model
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
    scores.main([*words, "--splits=train"])
    assert capsys.readouterr().out.endswith(f" in {100 * wrong_rows / 64:.2f}% of the rows\n")
    sample.main([words[0], "--num_samples=1", "--device=cpu"])  # a row that ends with an answer
    assert capsys.readouterr().out.endswith("]\n")

# what is kept, and trained models

def test_each_number_is_kept_with_all_that_made_it(runs, rows, tmp_path, monkeypatch):
    """A number on other data names them. If a later split is interrupted, the numbers from
    before are kept. A line that a full disk has cut short does not make the others unreadable."""
    run = runs / "task"
    (run / "results.jsonl").write_text('{"run": "cut by a full d')
    other = str(shutil.copytree(rows, tmp_path / "other"))

    def score_sums(model, split, *rest, score_sums=scores.score_sums):
        if split.split == "train":
            raise KeyboardInterrupt
        return score_sums(model, split, *rest)

    monkeypatch.setattr(scores, "score_sums", score_sums)
    with pytest.raises(KeyboardInterrupt):
        scores.main([str(run), "--splits=val,train", f"--data={other}", "--device=cpu"])
    (record,) = read_records(run / "results.jsonl")
    values = record.pop("values")
    assert list(values) == ["loss", "token_error", "sequence_error"] and min(values.values()) > 0
    assert record == dict(
        run=str(run), config="", pe="rope", flags=FLAGS | {"data": rows}, seed=1337, step=150,
        settings=read_checkpoint(run)["settings"], options={}, trained=11, data=other, split="val",
        fingerprint=Split(rows, "val").fingerprint, length=11, torch=torch.__version__,
        device="cpu", title="", unit="token", per_unit=1, axis="length", at=11, tick="", kind="")

def test_a_directory_that_cannot_be_written(runs, tmp_path, capsys, monkeypatch):
    """The numbers are printed all the same, of this run and of the next one."""
    def refuse(path, *records):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("config.runs.append", refuse)
    scores.main([str(runs / "pope"), str(runs / "rope"), "--device=cpu"])
    printed = capsys.readouterr()
    assert printed.out.count(", val: loss ") == 2
    assert printed.err.count("results.jsonl could not be written (Permission denied), so") == 2

def test_tokens_and_options_are_kept(runs):
    """Options that are changed at test time are recorded with their types and in the order of
    GPTConfig, in whatever order they were given."""
    run = f"{runs / 'rope'}@rope_factor=8,rope_scaling=ntk"
    sample.main([run, "--extrapolate=2", "--eval_tokens=512", "--device=cpu"])
    line = read_records(runs / "rope" / "results.jsonl")[-1]
    assert (line["multiple"], line["length"], line["tokens"], line["window"]) == (2.0, 32, 512, 16)
    assert list(line["options"].items()) == [("rope_scaling", "ntk"), ("rope_factor", 8.0)]

def test_only_some_options_change_a_trained_model(runs):
    """rope_scaling is one of them. Others would do harm, or nothing."""
    run = TrainedRun(f"{runs / 'rope'}/@rope_scaling=ntk,rope_factor=2", "cpu")
    assert run.folder == str(runs / "rope") and run.model.cfg.rope_factor == 2
    for change in ("base=100", "dropout=0.1", "cope_npos=9", "n_layer=2", "rope_fraction=0.5"):
        name = change.partition("=")[0]
        with pytest.raises(ValueError, match=f"{name} cannot be changed after"):
            TrainedRun(f"{runs / 'rope'}@{change}", "cpu")
    with pytest.raises(ValueError, match="expe_scale does nothing for pe='rope'"):
        TrainedRun(f"{runs / 'rope'}@expe_scale=0.5", "cpu")

def test_a_directory_with_an_at(runs, tmp_path):
    """It is the directory, unless what follows the @ are options."""
    home = shutil.copytree(runs / "rope", tmp_path / "me@lab" / "rope@1")
    for name, factor in ((home, 1), (f"{home}@rope_scaling=ntk,rope_factor=2", 2)):
        run = TrainedRun(str(name), "cpu")
        assert run.folder == str(home) and run.model.cfg.rope_factor == factor

def test_float32_is_exact_whatever_the_environment_says(runs):
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets the precision that is set here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    TrainedRun(str(runs / "rope"), "cpu")
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision(before)

def test_a_prompt_that_is_not_utf8():
    """Half a character at the end of a prompt, as `head -c` leaves it. Bytes stay as they are."""
    prompt = b"caf\xc3".decode(errors="surrogateescape")
    assert tokenizer("bytes").encode(prompt) == [99, 97, 102, 0xC3]
    hub = object.__new__(Tiktoken)
    hub.inner = SimpleNamespace(encode=lambda text, allowed_special: text)
    assert hub.encode(prompt) == "caf\N{REPLACEMENT CHARACTER}"

def test_yarn_knows_the_trained_length(runs, rows, tmp_path):
    """Which is not block_size if the rows were shorter."""
    yarn = f"{runs / 'rope'}@rope_scaling=yarn,rope_factor=4"
    for more, trained in (("", 16), (",rope_trained=9", 9)):
        assert TrainedRun(yarn + more, "cpu").model.cfg.rope_trained == trained
    # a run that was trained with it keeps the length that it took then
    words = [f"--data={rows}", *TINY, "--max_iters=1", "--pe=rope", "--block_size=80"]
    train.main([*words, "--rope_scaling=yarn", "--rope_factor=4", f"--out_dir={tmp_path / 'yarn'}"])
    train.main([*words, f"--out_dir={tmp_path / 'rope'}"])  # on rows of 11 tokens and a target
    for run, trained in (("yarn", 80), ("rope@rope_scaling=yarn,rope_factor=4", 11)):
        assert TrainedRun(str(tmp_path / run), "cpu").model.cfg.rope_trained == trained

def test_everything_but_pictures_works_without_eval(stream, tmp_path):
    """eval/ is optional: without it, a model trains, resumes, writes text and is measured."""
    for name in ("model.py", "kernels.py", "train.py", "sample.py", "config", "data"):
        if name.endswith(".py"):
            shutil.copy(ROOT / name, tmp_path)
        else:  # without the data sets that are there
            shutil.copytree(ROOT / name, tmp_path / name, ignore=lambda folder, names: [
                each for each in names if not each.endswith(".py")])
    training = ["train.py", f"--data={stream}", "--out_dir=run", *TINY]
    commands = [[*training, "--max_iters=1"], [*training, "--max_iters=2", "--resume"],
                ["sample.py", "run", "--max_new_tokens=3"],
                ["sample.py", "run", "--extrapolate=1,2", "--eval_tokens=512"]]
    code = ("import runpy, sys\n"  # one process, because importing torch takes seconds
            f"for sys.argv in {commands}:\n"
            "    runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert "  seeing the last 16" in done.stdout
