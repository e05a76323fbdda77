"""train.py: a run that is stopped, resumed or split over processes is the same run, and no way to
end it loses it. Its numbers are checked against sums done by hand."""
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile

import numpy as np
import pytest
import torch
from conftest import SIGNALS, TINY, contents, fails

import train
from checkpoint import load_weights, model_config, read
from data.shards import Split, Writer
from eval import results
from model import GPT

# Each process is forked from a server that has imported torch but not used it, so it starts at once
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "torch._dynamo", "pytest"])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

def run(data, out, *flags):
    train.main([f"--data={data}", f"--out_dir={out}", *TINY, *flags])
    return read(str(out))

def same(a, b):
    return all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])

def moments(checkpoint):
    """The running mean of the gradients: Adam's steps alone would hide their scale."""
    states = checkpoint["optimizer"]["state"].values()
    return torch.cat([state["exp_avg"].flatten() for state in states])

def log(out):
    return [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]

def losses(out):
    """{step: training loss} and the records of evaluations."""
    records = log(out)
    steps = {record["step"]: record["loss"] for record in records if "ms" in record}
    return steps, [record for record in records if "split" in record]

def start(printed, words, setup=int, **environ):
    """A process that trains with these words. Its output is appended to the file `printed`."""
    process = FORKS.Process(target=child, args=(str(printed), words, setup, environ), daemon=True)
    process.start()
    return process

def child(printed, words, setup, environ):
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # as in a terminal; nohup and `&` ignore some
    os.environ.update(environ)
    setup()
    train.main(words)

def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)

def wait_for_text(path, text):
    wait_for(lambda: path.exists() and text in path.read_text())

def alone_among_two(monkeypatch, all_reduce):
    """As if torchrun had started this process and another one, played by all_reduce."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(train.dist, "init_process_group", lambda *_: None)
    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(train.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda net: net)

# the same run

def test_resuming_is_exact(stream, tmp_path):
    """The same weights and moments. The run directory holds two files."""
    whole = run(stream, tmp_path / "a", "--max_iters=12")
    half = run(stream, tmp_path / "b", "--max_iters=6")
    assert half["step"] == 6 and not same(whole, half)
    again = run(stream, tmp_path / "b", "--max_iters=12", "--resume=True")
    assert same(whole, again)
    states = (checkpoint["optimizer"]["state"].values() for checkpoint in (whole, again))
    for a, b in zip(*states):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert sorted(os.listdir(tmp_path / "b")) == ["ckpt.pt", "log.jsonl"]

def test_evaluating_does_not_change_training(stream, tmp_path):
    a = run(stream, tmp_path / "a", "--max_iters=8", "--eval_interval=100")
    b = run(stream, tmp_path / "b", "--max_iters=8", "--eval_interval=3",
            "--eval_splits=val,train", "--log_interval=1")
    assert same(a, b)
    steps, evals = losses(tmp_path / "b")
    assert list(steps) == list(range(1, 9))
    want = [(step, split) for step in (0, 3, 6, 8) for split in ("val", "train")]
    assert [(record["step"], record["split"]) for record in evals] == want

@pytest.mark.parametrize("data", ["stream", "rows"])
def test_micro_batches_add_up(data, request, tmp_path):
    """In rows, each has a different number of targets."""
    folder = request.getfixturevalue(data)
    flags = ["--max_iters=5", "--dropout=0.0", "--log_interval=1", "--grad_clip=0.0"]
    a = run(folder, tmp_path / "a", *flags)
    b = run(folder, tmp_path / "b", *flags, "--micro_batch=1")
    one, four = losses(tmp_path / "a")[0], losses(tmp_path / "b")[0]
    assert max(abs(one[s] - four[s]) for s in one) < 1e-5
    assert max((a["model"][k] - b["model"][k]).abs().max() for k in a["model"]) < 1e-4
    assert (moments(a) - moments(b)).norm() < 1e-3 * moments(a).norm()

def signal_to_the_second():
    """SIGTERM, while it reads the batch of step 6."""
    def batch(self, step, *rest, real=train.Split.batch):
        if step == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step, *rest)

    train.Split.batch = batch

@pytest.mark.parametrize("data", ["stream", "rows"])
def test_two_processes_are_one(data, request, tmp_path):
    """The same losses, gradients and evaluations. A signal to one ends both, with a checkpoint that
    a single process resumes."""
    folder, two, printed = request.getfixturevalue(data), tmp_path / "two", tmp_path / "printed"
    flags = ["--dropout=0.0", "--log_interval=1", "--micro_batch=1", "--eval_interval=3",
             "--grad_clip=0.0"]
    a, ranks = run(folder, tmp_path / "one", *flags, "--max_iters=6"), []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    for rank in ("0", "1"):
        words = [f"--data={folder}", f"--out_dir={two}", *TINY, *flags]
        ranks.append(start(printed, words, signal_to_the_second, RANK=rank, **group))
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == -signal.SIGTERM
    b, (steps, evals), (steps2, evals2) = (
        read(str(two)), losses(tmp_path / "one"), losses(two))
    assert len(re.findall("tokens/s", printed.read_text())) == 6  # one process speaks
    assert b["step"] == 6 and list(steps) == list(steps2) and len(evals2) == 2
    assert max(abs(steps[s] - steps2[s]) for s in steps) < 1e-4
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(evals, evals2)) < 1e-4
    assert (moments(a) - moments(b)).norm() < 1e-3 * moments(a).norm()
    a = run(folder, tmp_path / "one", *flags, "--max_iters=8", "--resume=True")
    b = run(folder, two, *flags, "--max_iters=8", "--resume=True")
    assert max((a["model"][k] - b["model"][k]).abs().max() for k in a["model"]) < 1e-3

def test_dropout_differs_by_step_and_process(tmp_path, monkeypatch):
    """The text is one token and the learning rate 0, so only dropout makes losses differ."""
    writer = Writer(tmp_path / "data")
    for split in ("train", "val"):
        writer.write(split, np.zeros(100, dtype=int))
    writer.finish(vocab_size=9, tokenizer="bytes")
    seen = []

    def forward(self, *args, real=GPT.forward):
        logits, loss = real(self, *args)
        seen.extend([loss.item()] * self.training)
        return logits, loss

    monkeypatch.setattr(GPT, "forward", forward)
    alone_among_two(monkeypatch, lambda tensor, op: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run_flags = ["--learning_rate=0.0", "--dropout=0.5", "--max_iters=3"]
        train.main([f"--data={tmp_path / 'data'}", f"--out_dir={tmp_path / rank}", *TINY,
                    *run_flags])
    assert len(seen) == len(set(seen)) == 8

# signals and kills

def test_a_signal_during_a_collective_is_not_forgotten(stream, tmp_path, monkeypatch):
    """It arrives after this process has told the others that there is none."""
    told, ended = [], []

    def all_reduce(tensor, op):
        if op == train.dist.ReduceOp.MAX:
            told.append(int(tensor))
            if len(told) == 6:
                os.kill(os.getpid(), signal.SIGTERM)  # heard here, before the result is read

    def kill(pid, number, real=os.kill):
        return real(pid, number) if len(told) == 6 else ended.append(number)

    alone_among_two(monkeypatch, all_reduce)
    monkeypatch.setattr(os, "kill", kill)
    flags = ["--max_iters=30", "--eval_interval=100", "--eval_batches=1"]
    checkpoint = run(stream, tmp_path / "a", *flags)
    assert told[5:] == [0, signal.SIGTERM] and ended == [signal.SIGTERM]
    assert checkpoint["step"] < 30

def test_nohup(stream, tmp_path):
    """A signal that the shell ignores stays ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(stream, tmp_path / "a", "--max_iters=1")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert callable(signal.getsignal(signal.SIGTERM))

def close_terminal():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)

@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_with_a_checkpoint(stream, tmp_path, number):
    """Resuming it gives the uncut run. SIGHUP comes from a closed terminal."""
    flags, printed = ["--log_interval=1", "--eval_interval=4000"], tmp_path / "printed"
    words = [f"--data={stream}", f"--out_dir={tmp_path / 'cut'}", *TINY, *flags]
    gone = number == signal.SIGHUP
    process = start(printed, [*words, "--max_iters=4000"], close_terminal if gone else int)
    wait_for_text(printed, "step 20/")
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == -number  # a shell then leaves `&&` and loops
    text = printed.read_text()
    assert "stopped by a signal at step" in text and "Traceback" not in text
    assert gone or "stopping after this step or batch" in text
    step = read(str(tmp_path / "cut"))["step"]
    assert 20 <= step < 4000
    end = f"--max_iters={step + 5}"
    again = run(stream, tmp_path / "cut", *flags, end, "--resume=True")
    assert same(again, run(stream, tmp_path / "whole", *flags, end))

def endless_evaluation():
    train.error_sums = lambda *_: print("begun", flush=True) or time.sleep(3600)

def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(stream, tmp_path):
    """A scheduler signals all processes, and torchrun passes its signal on: SIGTERM comes twice."""
    printed, words = tmp_path / "printed", [f"--data={stream}", f"--out_dir={tmp_path / 'a'}"]
    process = start(printed, [*words, *TINY], endless_evaluation)
    wait_for_text(printed, "begun")
    for _ in range(20):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)
    assert process.is_alive()
    began = time.monotonic()
    while process.is_alive() and time.monotonic() - began < 60:
        subprocess.run(["kill", "-INT", str(process.pid)])  # no error if it has just ended
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGINT

def slow_evaluation():
    train.error_sums = lambda *_: print("begun", flush=True) or time.sleep(1) or torch.ones(5)
    train.scores = lambda *_: sys.exit("evaluated to the end")

def test_a_long_evaluation_loses_nothing(stream, tmp_path):
    """The checkpoint is written first, and a signal stops the evaluation after its batch."""
    out, printed = tmp_path / "a", tmp_path / "printed"
    run(stream, out, "--max_iters=2")
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, "--eval_interval=3", "--resume=True"]
    process = start(printed, [*words, "--eval_batches=8"], slow_evaluation)
    wait_for_text(printed, "begun")
    assert read(str(out))["step"] == 3
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    assert "stopped by a signal at step 3" in printed.read_text()

def kill_often(data, folder, kills):
    """Kill a run at random moments and resume it each time. It must end as an uncut run does.
    Returns the steps of its checkpoints."""
    out, dice, reached = folder / "cut", random.Random(0), []
    flags = ["--checkpoint_interval=2", "--eval_interval=100000", "--log_interval=100"]
    words = [f"--data={data}", f"--out_dir={out}", *TINY, *flags, "--resume=True"]
    for _ in range(kills):
        process = start(folder / "printed", [*words, "--max_iters=1000000"])
        if not reached:  # the time to the first checkpoint tells how fast the machine is
            began = time.monotonic()
            wait_for((out / "ckpt.pt").exists)
            pace = time.monotonic() - began
        time.sleep(dice.uniform(0, 2 * pace))
        process.kill()
        process.join()
        reached.append(read(str(out))["step"])
        for line in (out / "log.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)
    assert "Traceback" not in (folder / "printed").read_text() and reached == sorted(reached)
    end = f"--max_iters={reached[-1] + 5}"
    whole = run(data, folder / "whole", *flags, end)
    assert same(whole, run(data, out, *flags, end, "--resume=True"))
    return reached

def test_killed_at_random_moments(stream, tmp_path):
    """SIGKILL leaves no time to tidy up: the checkpoint must be complete at every instant."""
    assert len(set(kill_often(stream, tmp_path, 12))) > 3  # it made progress between kills

def test_one_run_at_a_time(stream, tmp_path):
    """A second process in a run directory is refused and changes nothing. A kill frees it."""
    out, printed = tmp_path / "a", tmp_path / "printed"
    flags = ["--log_interval=1", "--checkpoint_interval=5", "--resume=True"]
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, *flags, "--max_iters=100000"]
    first = start(printed, words)
    wait_for_text(printed, "step 20/")
    before = (out / "log.jsonl").read_bytes()
    line = fails("train.py", *words, "--max_iters=1")
    assert f"another process is training in {out}; end it first" in line
    first.kill()
    first.join()
    assert (out / "log.jsonl").read_bytes().startswith(before)
    (out / "ckpt.pt.tmp").write_bytes(b"of a kill")
    end = read(str(out))["step"] + 1
    assert run(stream, out, *flags, f"--max_iters={end}")["step"] == end
    assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]

def test_broken_pipe(stream, tmp_path):
    """`| head -1`: the run continues without output."""
    words = [f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, "--max_iters=30"]
    process = subprocess.Popen([sys.executable, "train.py", *words, "--log_interval=1"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    assert read(str(tmp_path / "a"))["step"] == 30
    assert len(losses(tmp_path / "a")[0]) == 30

ONE_FAILS = """
import os, sys
sys.path.insert(0, os.getcwd())
import train

def batch(self, step, *rest, real=train.Split.batch):
    if step == 3 and os.environ["RANK"] == "1":
        raise MemoryError("of the second process")
    return real(self, step, *rest)

train.Split.batch = batch
try:
    train.main(sys.argv[1:])
except (ValueError, OSError, MemoryError, RuntimeError) as error:
    sys.exit(train.last_words(error))
"""

@pytest.mark.parametrize("script, flag, message", [
    ("train.py", "--pe=zope", "pe='zope' is unknown"),
    # and not the broken connections of the others
    ("one_fails.py", "--max_iters=9", "out of memory (MemoryError: of the second process); try a"),
])
def test_the_last_line_of_torchrun_is_ours(stream, tmp_path, script, flag, message):
    """Once, without a traceback of train.py."""
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    path = script if script == "train.py" else tmp_path / script
    words = [path, f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, flag]
    done = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count(message) == 1, done.stderr
    assert f'{script}", line' not in done.stderr and 'train.py", line' not in done.stderr
    assert message in "".join(done.stderr.splitlines()[-3:])

# numbers

def test_evaluation_by_hand(rows, stream, tmp_path):
    checkpoint = run(rows, tmp_path / "a", "--max_iters=3", "--eval_batches=0")
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "a")
    tokens = np.fromfile(os.path.join(rows, "val_000000.bin"), "<u2").reshape(10, 12).astype(int)
    masks = np.fromfile(os.path.join(rows, "val_000000.loss"), "u1").reshape(10, 12)
    targets, total, wrong, wrong_rows = 0, 0.0, 0, 0
    for row, mask in zip(tokens, masks):
        x = torch.from_numpy(row[None, :-1])
        logp, misses = net(x, x)[0][0].double().log_softmax(-1), 0
        for i in range(11):
            if mask[i + 1]:
                targets, total = targets + 1, total - logp[i, row[i + 1]].item()
                misses += int(logp[i].argmax()) != row[i + 1]
        wrong, wrong_rows = wrong + misses, wrong_rows + (misses > 0)
    got = losses(tmp_path / "a")[1][-1]
    assert got["loss"] == pytest.approx(total / targets, abs=1e-5)
    assert got["ppl"] == pytest.approx(math.exp(total / targets), rel=1e-4)
    assert got["token_error"] == pytest.approx(100 * wrong / targets)
    assert got["sequence_error"] == pytest.approx(100 * wrong_rows / 10)

    # of a stream: 2 batches of 4 windows, from the first token to the last
    checkpoint = run(stream, tmp_path / "b", "--max_iters=3")
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "b")
    text = np.fromfile(os.path.join(stream, "val_000000.bin"), "<u2").astype(int)
    starts = (0, 83, 166, 249, 333, 416, 499, 583)
    windows = [torch.from_numpy(text[start : start + 17])[None] for start in starts]
    total = sum(net(window[:, :-1], window[:, 1:])[1].item() for window in windows)
    assert losses(tmp_path / "b")[1][-1]["loss"] == pytest.approx(total / 8, abs=1e-5)

def test_processes_share_an_evaluation(stream, tmp_path, monkeypatch):
    """Each window goes to one of them, and none holds more at once than it does in training."""
    split, seen = Split(stream, "val"), []
    alone_among_two(monkeypatch, lambda tensor, op: None)
    sums = torch.ones(5)
    monkeypatch.setattr(train, "error_sums", lambda net, x, y: seen[-1].append(x) or sums)
    flags = ["--batch_size=6", "--eval_batches=3", "--max_iters=0"]
    for rank in ("0", "1"):
        seen.append([])
        monkeypatch.setenv("RANK", rank)
        train.main([f"--data={stream}", f"--out_dir={tmp_path / rank}", *TINY, *flags])
    want = split.read(split.windows(16, 18), 16)[0].tolist()
    assert sorted(row for part in seen for x in part for row in x.tolist()) == sorted(want)
    assert [[len(x) for x in part] for part in seen] == [[3, 3, 3], [3, 3, 3]]

def test_speed(rows, tmp_path, monkeypatch):
    """Tokens per second and MFU count the 11 targets of a row of 12."""
    monkeypatch.setattr(train, "PEAK_FLOPS", {"cpu": 1e9})
    net = GPT(model_config(run(rows, tmp_path / "a", "--max_iters=2", "--log_interval=2")))
    record = next(record for record in log(tmp_path / "a") if "ms" in record)
    assert record["tokens_per_s"] * record["ms"] / 1e3 == pytest.approx(4 * 11)
    assert results.training([str(tmp_path / "a")])[-1]["tokens"] == 2 * 4 * 11
    assert record["mfu"] == pytest.approx(net.estimate_mfu(4, record["ms"] / 1e3, 1e9, 11))

def test_bfloat16_is_close_to_float32(stream, tmp_path):
    """--dtype decides; the parameters stay float32."""
    flags, dtypes = ["--max_iters=3", "--dropout=0.0", "--log_interval=1"], ("float32", "bfloat16")
    for dtype in dtypes:
        checkpoint = run(stream, tmp_path / dtype, *flags, f"--dtype={dtype}")
        assert {p.dtype for p in checkpoint["model"].values()} == {torch.float32}
    a, b = (losses(tmp_path / dtype)[0] for dtype in dtypes)
    assert all(0 < abs(a[step] - b[step]) < 0.03 for step in a)

def test_kernels_can_be_switched_off(stream, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(train.GPT, "use_kernels", lambda *_: asked.append(1) or "attention: asked")
    run(stream, tmp_path / "auto", "--max_iters=1")
    assert asked and "attention: asked" in capsys.readouterr().out
    run(stream, tmp_path / "off", "--max_iters=1", "--kernels=off")
    assert len(asked) == 1 and "attention: pytorch (kernels=off)" in capsys.readouterr().out

def test_learning_rate_schedules():
    def rates(schedule, *steps):
        cfg = train.TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=14,
                                schedule=schedule)
        return [train.learning_rate(step, cfg) for step in steps]

    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi / 5)) / 2
    assert rates("linear", 0, 1, 2, 3) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates("linear", 4, 9, 14) == pytest.approx([1, 0.55, 0.1])
    assert rates("cosine", 4, 6, 9, 14) == pytest.approx([1, cosine, 0.55, 0.1])
    assert rates("constant", 4, 14) == [1, 1]

def test_first_step_is_adamw(rows, tmp_path):
    """One step against Adam's formula on PyTorch's gradients: clipping, warm-up, decay groups, and
    a loss divided by the targets of the batch."""
    flags = ["--max_iters=1", "--dropout=0.0", "--warmup_iters=3", "--weight_decay=50.0",
             "--grad_clip=0.01", "--beta1=0.8", "--beta2=0.9", "--seed=7", "--log_interval=1"]
    after = run(rows, tmp_path / "a", *flags)
    torch.manual_seed(7)
    net = GPT(model_config(after))
    x, y = (torch.from_numpy(a) for a in Split(rows, "train").batch(0, 4, 16, 7))
    loss = net(x, y)[1]
    loss.backward()
    assert losses(tmp_path / "a")[0][1] == pytest.approx(loss.item(), abs=1e-5)
    norm = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in net.parameters()))
    lr, decays = 1e-2 / 4, lambda name, p: p.dim() == 2 and "delta" not in name
    groups = sorted(net.named_parameters(), key=lambda named: not decays(*named))  # decaying first
    for (name, p), state in zip(groups, after["optimizer"]["state"].values(), strict=True):
        g = p.grad * (0.01 / norm)
        assert torch.allclose(state["exp_avg"], 0.2 * g, 1e-3, 1e-8)
        assert torch.allclose(state["exp_avg_sq"], 0.1 * g * g, 1e-3, 1e-12)
        decay = 50 if decays(name, p) else 0
        want = (p * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)).detach()
        want = want.clamp(-2 * math.pi, 0) if "delta" in name else want
        assert (after["model"][name] - want).abs().max() < 1e-4, name

# what a run starts from, says and keeps

def test_fine_tuning_starts_from_other_weights(stream, tmp_path):
    """From step 0. It takes the model's options, unless they are given, and no others."""
    first, origin = run(stream, tmp_path / "a", "--max_iters=3"), f"--init_from={tmp_path / 'a'}"
    tuned = run(stream, tmp_path / "b", "--max_iters=0", origin, "--dropout=0.3")
    assert same(first, tuned) and tuned["step"] == 0
    plain = ["--block_size=24", "--batch_size=2", "--device=cpu", "--eval_batches=1"]
    train.main([f"--data={stream}", *plain, "--max_iters=0", origin, f"--out_dir={tmp_path / 'c'}"])
    other = read(str(tmp_path / "c"))
    got = [other["config"][key] for key in ("pe", "block_size", "dropout", "learning_rate")]
    assert same(first, other) and got == ["pope", 24, 0.1, train.TrainConfig.learning_rate]
    line = fails("train.py", f"--data={stream}", *TINY, origin, f"--out_dir={tmp_path / 'd'}",
                 "--n_embd=32")
    assert "holds another architecture" in line

def test_weights_of_a_shared_tensor(stream, tmp_path):
    """One table per layer does not load as a table that the layers share."""
    own = run(stream, tmp_path / "own", "--max_iters=3", "--pe=cope", "--cope_shared=False")
    with pytest.raises(ValueError, match="e of its own, which layers share in this model"):
        load_weights(GPT(model_config(own, cope_shared=True)), own, "own")

def test_runs_have_directories_of_their_own(stream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.py").write_text("max_iters = 0\n")
    for more in ([], ["--pe=rope"], ["--seed=7"]):
        train.main(["some.py", f"--data={stream}", *TINY, *more])
    assert sorted(os.listdir("out")) == ["some_pope", "some_pope_seed7", "some_rope"]

def test_wandb(stream, tmp_path, monkeypatch):
    """It gets every record, and a resumed run keeps its wandb run."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError) as error:
        run(stream, tmp_path / "a", "--max_iters=1", "--wandb_project=p")
    assert train.last_words(error.value).endswith("; pip install wandb")
    seen, begun = [], []

    def init(**given):
        begun.append((given["id"], given["resume"]))
        return types.SimpleNamespace(log=lambda values, step: seen.append((step, sorted(values))),
                                     id=given["id"] or "of-its-own", finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    flags = ["--log_interval=1", "--wandb_project=p"]
    run(stream, tmp_path / "b", "--max_iters=1", *flags)
    assert [step for step, _ in seen] == [0, 1, 1]
    assert "val/loss" in seen[0][1] and "train/loss" in seen[1][1]
    again = run(stream, tmp_path / "b", "--max_iters=2", *flags, "--resume=True")
    assert begun == [(None, "allow"), ("of-its-own", "allow")] and again["wandb"] == "of-its-own"

def test_what_changes_on_resuming(stream, tmp_path, capsys):
    """Each changed setting is named, and used from there on."""
    run(stream, tmp_path / "a", "--max_iters=2", "--weight_decay=0.1")
    capsys.readouterr()
    after = run(stream, tmp_path / "a", "--max_iters=3", "--weight_decay=0.5", "--beta1=0.8",
                "--learning_rate=3e-3", "--resume=True")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "from here on" in line] == [
        "max_iters=3 from here on; it was 2",
        "learning_rate=0.003 from here on; it was 0.01",
        "weight_decay=0.5 from here on; it was 0.1",
        "beta1=0.8 from here on; it was 0.9",
    ]
    groups = after["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["betas"], group["lr"]) for group in groups] == [
        (0.5, (0.8, 0.95), 3e-3), (0.0, (0.8, 0.95), 3e-3)]

def test_best_evaluation(stream, tmp_path, capsys):
    """The last line, record and checkpoint name it, also after resuming. The text has a pattern to
    learn, so the first run ends with its best."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=20", "--eval_interval=5")
    evals = losses(out)[1]
    assert evals[-1]["loss"] == min(record["loss"] for record in evals)
    assert read(str(out))["best"]["step"] == 20  # written again after its evaluation
    checkpoint = run(stream, out, "--max_iters=25", "--eval_interval=5", "--learning_rate=3.0",
                     "--resume=True")
    best = dict(step=20, split="val", loss=evals[-1]["loss"])
    assert checkpoint["best"] == best and checkpoint["step"] == 25
    assert log(out)[-1] == dict(ended=25, best=best)
    printed = capsys.readouterr().out
    assert f"ckpt.pt, best val loss {best['loss']:.4f} at step 20\n" in printed

def test_signs_of_life(stream, tmp_path, monkeypatch, capsys):
    """A long evaluation reports its progress. The time left counts steps and evaluations."""
    clock = [0.0]

    def pass_by(seconds):
        clock[0] += seconds
        return clock[0]

    monkeypatch.setattr(time, "monotonic", lambda: pass_by(4.0))
    run(stream, tmp_path / "a", "--max_iters=1", "--eval_batches=8", "--micro_batch=4")
    told = re.findall(r"evaluating val: window (\d+) of (\d+)", capsys.readouterr().out)
    assert told[:2] == [("12", "32"), ("24", "32")]
    monkeypatch.undo()

    # the time left: 7 s a step, and 100 s for an evaluation every 5 steps
    def slow(*args, real=train.error_sums):
        pass_by(50.0)
        return real(*args)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(train, "error_sums", slow)
    monkeypatch.setattr(train.GPT, "clamp_parameters", lambda self: pass_by(7.0))
    run(stream, tmp_path / "b", "--max_iters=10", "--eval_interval=5", "--log_interval=2")
    left = re.findall(r"left [\d:]+", capsys.readouterr().out)
    run(stream, tmp_path / "b", "--max_iters=12", "--log_interval=3", "--resume=True")
    assert [line["ms"] for line in log(tmp_path / "b") if "ms" in line] == [7e3] * 6  # 2 steps too
    assert left == [f"left 0:0{27 * n // 60}:{27 * n % 60:02}" for n in (8, 6, 4, 2, 0)]

# mistakes: one line that names the value and the mend, and nothing written

@pytest.mark.parametrize("words, message", [
    ("--n_layers=3", "unknown key 'n_layers' in --n_layers=3; did you mean 'n_layer'?"),
    ("--pe=zope", "pe='zope' is unknown; choose one of rope, pope, nope, cope,"),
    ("--n_head=3", "n_embd=16 is not divisible by n_head=3"),
    ("--schedule=step", "schedule='step' is unknown; choose one of "),
    ("--device=tpu", "device='tpu' is unknown; choose one of cpu, "),
    ("--eval_splits=dev", "has no split 'dev'; it has: train, val; change --eval_splits"),
    ("--batch_size=0", "batch_size=0 is too small; use 1 or more"),
    ("--log_interval=0", "log_interval=0 is too small; use 1 or more"),
    ("--data=nonesuch/", "no meta.json in"),
    ("--data=openwebtext", "not prepared and needs a download; run `python -m data.openwebtext`"),
    ("--data=stdlib@x=1", "unknown key 'x' in x=1"),
    ("--vocab_size=28", "vocab_size=28 is less than the 29 of"),
    ("--block_size=10 --data=ROWS", "block_size >= 11"),
    ("--init_from=nowhere", "'nowhere' is not a directory with a ckpt.pt"),
])
def test_wrong_input(stream, rows, tmp_path, words, message):
    out, words = tmp_path / "a", words.replace("ROWS", rows).split()
    line = fails("train.py", f"--data={stream}", *TINY, f"--out_dir={out}", *words)
    assert message in line and not out.exists()

def test_no_words_and_too_many_processes(monkeypatch):
    assert "nothing to train; try python train.py config/quickstart.py" in fails("train.py")
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = fails("train.py", *TINY)
    assert "batch_size=4 is not divisible by the 3 processes; change one of them" in line

def test_another_model_or_other_data_is_refused(stream, tmp_path):
    """And the run stays as it is. The same data in another place are the same data."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=2")
    before = contents(out)

    def refusal(*flags):
        line = fails("train.py", f"--data={stream}", *TINY, f"--out_dir={out}", *flags)
        assert (out / "ckpt.pt").read_bytes() == before["ckpt.pt"]
        return line

    def other(name, **changes):
        shutil.copytree(stream, tmp_path / name)
        path = tmp_path / name / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return refusal(f"--data={tmp_path / name}", "--resume=True", "--max_iters=4")

    assert "already holds a run; continue it with --resume=True" in refusal()
    assert "no meta.json in" in refusal("--data=nonesuch/")  # other mistakes are named first
    assert "is not divisible by n_head=3" in refusal("--n_head=3")
    line = refusal("--resume=True", "--n_layer=3")
    assert "was trained with n_layer=2, not 3; keep it" in line
    mend = "; to fine-tune on it, use --init_from="
    assert f"differs in tokenizer{mend}" in other("b/stream", tokenizer="bytes")
    assert f"differs in name{mend}" in other("c/corpus")
    shutil.copytree(stream, tmp_path / "d" / "stream")
    after = run(tmp_path / "d" / "stream", out, "--max_iters=4", "--resume=True")
    assert after["step"] == 4

@pytest.mark.parametrize("more", ["--checkpoint_interval=1", "--eval_interval=1", "--max_iters=4"])
def test_a_loss_that_is_not_finite(stream, tmp_path, more):
    """A run that diverges keeps its last good checkpoint: no interval and no end overwrites it."""
    out, flags = tmp_path / "a", ["--norm=layernorm", "--grad_clip=0.0", "--pe=cope"]
    run(stream, out, *flags, "--max_iters=3")
    before = (out / "ckpt.pt").read_bytes()
    words = [f"--data={stream}", *TINY, *flags, "--learning_rate=1e38", "--max_iters=50", more]
    line = fails("train.py", *words, f"--out_dir={out}", "--resume=True")
    assert "loss is nan at step" in line and "try a lower learning_rate" in line
    assert f"{out / 'ckpt.pt'} holds the good step 3" in line
    assert (out / "ckpt.pt").read_bytes() == before

def test_an_evaluation_that_is_not_finite(stream, tmp_path, monkeypatch):
    """Before the first checkpoint, and after one."""
    monkeypatch.setattr(train, "scores", lambda sums, masked: dict(loss=math.inf))
    message = "val loss is inf at step 0; no checkpoint yet; try a lower learning_rate"
    with pytest.raises(ValueError, match=message):
        run(stream, tmp_path / "a", "--max_iters=3")
    assert os.listdir(tmp_path / "a") == ["log.jsonl"]
    with pytest.raises(ValueError, match="val loss is inf at step 0; .* holds the good step 0"):
        run(stream, tmp_path / "b", "--max_iters=0")

# disks, memory and files

def test_a_checkpoint_reaches_the_disk_before_its_name_does(stream, tmp_path, monkeypatch):
    """So a power cut between two of these calls leaves the old file or the new one."""
    calls = []

    def note(name, what):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: calls.append(what(*args)) or real(*args))

    note("fsync", lambda handle: ("fsync", os.readlink(f"/proc/self/fd/{handle}")))
    note("replace", lambda old, new: ("replace", old, new))
    run(stream, tmp_path / "a", "--max_iters=1")
    ckpt = str(tmp_path / "a" / "ckpt.pt")
    part = ckpt + ".tmp"
    once = [("fsync", part), ("replace", part, ckpt), ("fsync", str(tmp_path / "a"))]
    assert calls == 2 * once  # before the last evaluation, and with its result

@pytest.mark.parametrize("size", [16, 256])  # PyTorch hides the system's error on a large tensor
def test_no_room_for_a_checkpoint(stream, tmp_path, size):
    """Here through a limit on file size; tests/torture.py has a full disk."""
    words = [f"--data={stream}", *TINY, "--max_iters=2", f"--n_embd={size}"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        line = fails("train.py", *words, f"--out_dir={tmp_path / 'a'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step 2 could not be written to" in line and "free some space, then resume" in line
    assert "([Errno 27] File too large)" in line
    assert os.listdir(tmp_path / "a") == ["log.jsonl"]

def test_a_line_cut_short_in_the_log(stream, tmp_path):
    """It is dropped on resuming, so every line is JSON again."""
    run(stream, tmp_path / "a", "--max_iters=1")
    n = len(log(tmp_path / "a"))
    with open(tmp_path / "a" / "log.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    run(stream, tmp_path / "a", "--max_iters=2", "--resume=True")
    assert "config" in log(tmp_path / "a")[n]

def test_out_of_memory(stream, tmp_path):
    """It is one line, whichever error reports it. A bug keeps its traceback."""
    words = [f"--data={stream}", *TINY, f"--out_dir={tmp_path / 'a'}"]
    line = fails("train.py", *words, "--mlp_width=1e13")  # beyond any address space
    assert "out of memory" in line and "try a smaller --micro_batch" in line
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    assert train.last_words(error) == (
        "out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.); "
        "try a smaller --micro_batch or model")
    with pytest.raises(RuntimeError, match="a bug"):
        train.last_words(RuntimeError("a bug"))

def test_damaged_checkpoints(stream, tmp_path):
    """A flipped bit, a file cut short or another file: one line, and the file is left alone."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=2")
    path, dice = out / "ckpt.pt", random.Random(0)
    words = [f"--data={stream}", *TINY, f"--out_dir={out}", "--resume=True", "--max_iters=2"]
    raw = path.read_bytes()
    damages = [b"", raw[: len(raw) // 2], raw[:-1], b"model\n", pickle.dumps(dict(step=1))]
    with zipfile.ZipFile(path) as file:
        tensors = [name for name in file.namelist() if file.getinfo(name).file_size > 500]
        for name in dice.sample(tensors, 4):
            flipped = bytearray(raw)
            flipped[raw.index(file.read(name)) + dice.randrange(500)] ^= 1 << dice.randrange(8)
            damages.append(bytes(flipped))
    for damaged in damages:
        path.write_bytes(damaged)
        line = fails("train.py", *words)
        assert "is damaged or not a checkpoint" in line and path.read_bytes() == damaged

def test_a_checkpoint_of_an_earlier_version(stream, tmp_path):
    """It lacks keys added since, and holds some that are gone."""
    old = run(stream, tmp_path / "a", "--max_iters=2")
    for key in ("best", "wandb"):
        del old[key]
    del old["meta"]["shards"], old["config"]["expe_scale"]
    old["config"]["share_table"] = True
    torch.save(old, tmp_path / "a" / "ckpt.pt")
    again = run(stream, tmp_path / "a", "--max_iters=4", "--resume=True")
    assert same(again, run(stream, tmp_path / "b", "--max_iters=4"))
