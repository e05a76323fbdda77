"""train.py against itself: however a run is cut, resumed, shared out or evaluated, it must be the same
run; and against sums done by hand."""
import dataclasses
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, contents, fails

import train
from data.shards import Split, Writer
from model import GPT
from train import load_weights, model_config, read_checkpoint


def run(data, out, *flags):
    train.main([f"--data={data}", f"--out_dir={out}", *TINY, *flags])
    return read_checkpoint(str(out))


def same(a, b):
    return all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])


def moments(checkpoint):
    """The running mean of the gradients: Adam's steps alone would hide their scale."""
    return torch.cat([state["exp_avg"].flatten() for state in checkpoint["optimizer"]["state"].values()])


def log(out):
    return [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]


def losses(out):
    records = log(out)
    return {r["step"]: r["loss"] for r in records if "ms" in r}, [r for r in records if "split" in r]


def test_resuming_is_exact(stream, tmp_path):
    whole = run(stream, tmp_path / "a", "--max_iters=12")
    half = run(stream, tmp_path / "b", "--max_iters=6")
    assert half["step"] == 6 and not same(whole, half)
    again = run(stream, tmp_path / "b", "--max_iters=12", "--resume=True")
    assert same(whole, again)
    for a, b in zip(whole["optimizer"]["state"].values(), again["optimizer"]["state"].values()):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_evaluating_does_not_change_training(stream, tmp_path):
    a = run(stream, tmp_path / "a", "--max_iters=8", "--eval_interval=100")
    b = run(
        stream,
        tmp_path / "b",
        "--max_iters=8",
        "--eval_interval=3",
        "--eval_splits=val,train",
        "--log_interval=1",
    )
    assert same(a, b)
    steps, evals = losses(tmp_path / "b")
    assert list(steps) == list(range(1, 9))
    assert [(r["step"], r["split"]) for r in evals] == [
        (s, n) for s in (0, 3, 6, 8) for n in ("val", "train")
    ]


def test_it_learns(stream, tmp_path):
    run(stream, tmp_path / "a", "--max_iters=150", "--eval_interval=150", "--dropout=0.0")
    evals = losses(tmp_path / "a")[1]
    assert evals[0]["loss"] > 3.2 and evals[-1]["loss"] < 1.9  # from ln 29 towards ln 3


def test_seed_decides_weights_and_batches(stream, tmp_path):
    a, b, c = (
        run(stream, tmp_path / n, "--max_iters=2", f"--seed={s}") for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same(a, b) and not same(a, c)


@pytest.mark.parametrize("data", ["stream", "rows"])
def test_micro_batches_add_up(data, request, tmp_path):
    """Also where micro-batches carry different numbers of targets."""
    folder = request.getfixturevalue(data)
    flags = ["--max_iters=5", "--dropout=0.0", "--log_interval=1", "--grad_clip=0.0"]
    a, b = run(folder, tmp_path / "a", *flags), run(folder, tmp_path / "b", *flags, "--micro_batch=1")
    one, four = losses(tmp_path / "a")[0], losses(tmp_path / "b")[0]
    assert max(abs(one[s] - four[s]) for s in one) < 1e-5
    assert max((a["model"][k] - b["model"][k]).abs().max() for k in a["model"]) < 1e-4
    assert (moments(a) - moments(b)).norm() < 1e-3 * moments(a).norm()


@pytest.mark.parametrize("data", ["stream", "rows"])
def test_two_processes_are_one(data, request, tmp_path):
    folder = request.getfixturevalue(data)
    flags = [
        "--max_iters=6",
        "--dropout=0.0",
        "--log_interval=1",
        "--micro_batch=1",
        "--eval_interval=3",
        "--grad_clip=0.0",
    ]
    a = run(folder, tmp_path / "one", *flags)
    command = [sys.executable, "-m", "torch.distributed.run"]
    words = ["train.py", f"--data={folder}", f"--out_dir={tmp_path / 'two'}", *TINY, *flags]
    if data == "stream":
        started = [[*command, "--standalone", "--nproc_per_node=2", *words]]
    else:  # as two machines: the same command on each
        with socket.socket() as free:
            free.bind(("localhost", 0))
            where = f"--rdzv_endpoint=localhost:{free.getsockname()[1]}"
        started = 2 * [[*command, "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", where, *words]]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for words in started]
    printed = "".join(process.communicate(timeout=120)[0] for process in started)
    assert all(process.returncode == 0 for process in started)
    assert len(re.findall(r"tokens/s", printed)) == 6  # one process speaks
    (one, evals), (two, evals2) = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(one) == list(two) and max(abs(one[s] - two[s]) for s in one) < 1e-4
    assert len(evals) == len(evals2) and max(abs(a["loss"] - b["loss"]) for a, b in zip(evals, evals2)) < 1e-4
    assert (moments(a) - moments(read_checkpoint(str(tmp_path / "two")))).norm() < 1e-3 * moments(a).norm()
    # and a checkpoint of two processes goes on in one
    a = run(folder, tmp_path / "one", *flags, "--max_iters=8", "--resume=True")
    b = run(folder, tmp_path / "two", *flags, "--max_iters=8", "--resume=True")
    assert max((a["model"][k] - b["model"][k]).abs().max() for k in a["model"]) < 1e-3


def test_dropout_differs_by_step_and_process(tmp_path):
    """On a text of one token without learning nothing else makes a loss differ."""
    writer = Writer(tmp_path / "data")
    for split in ("train", "val"):
        writer.write(split, np.zeros(100, dtype=int))
    writer.finish(vocab_size=9, tokenizer="bytes")
    flags = [f"--data={tmp_path / 'data'}", *TINY, "--learning_rate=0.0", "--dropout=0.5", "--log_interval=1"]
    train.main([*flags, f"--out_dir={tmp_path / 'half'}", "--max_iters=4", "--batch_size=2"])
    half = losses(tmp_path / "half")[0]
    assert len(set(half.values())) == 4
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    subprocess.run(
        [*command, *flags, f"--out_dir={tmp_path / 'both'}", "--max_iters=1"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert abs(losses(tmp_path / "both")[0][1] - half[1]) > 1e-4  # the mean of two halves that differ


def default_signals():
    """Of a process of a terminal: nohup and `&` in a script have some ignored, which a child inherits."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def spawn(out, *flags, stderr=subprocess.STDOUT):
    command = [sys.executable, "train.py", f"--out_dir={out}", *TINY, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True,
                            preexec_fn=default_signals)


def alone_among_two(monkeypatch, all_reduce):
    """As if torchrun had started this process and another, whose part all_reduce plays."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(train.dist, "init_process_group", lambda *_: None)
    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(train.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda net: net)


def test_a_signal_during_a_collective_is_not_forgotten(stream, tmp_path, monkeypatch):
    """It comes after this process has told the others that there is none."""
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
    checkpoint = run(stream, tmp_path / "a", "--max_iters=30", "--eval_interval=100", "--eval_batches=1")
    assert told[5:] == [0, signal.SIGTERM] and ended == [signal.SIGTERM] and checkpoint["step"] < 30


def test_nohup(stream, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(stream, tmp_path / "a", "--max_iters=1")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and callable(signal.getsignal(signal.SIGTERM))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_with_a_checkpoint(stream, tmp_path, number):
    flags = [f"--data={stream}", "--max_iters=4000", "--log_interval=1", "--eval_interval=4000"]
    reader, writer = os.pipe()
    os.close(reader)
    gone = number == signal.SIGHUP  # a terminal that takes no more words
    process = spawn(tmp_path / "cut", *flags, stderr=writer if gone else subprocess.STDOUT)
    for line in process.stdout:
        if line.startswith("step 20/"):
            process.send_signal(number)
            break
    tail = process.stdout.read()
    os.close(writer)
    assert process.wait(120) == -number  # what a shell asks, before it goes on with `&&` or a loop
    assert "stopped by a signal at step" in tail and "Traceback" not in tail
    assert gone or "stopping after this step or batch" in tail
    cut = read_checkpoint(str(tmp_path / "cut"))
    assert 20 <= cut["step"] < 4000
    n = cut["step"] + 5
    again = run(stream, tmp_path / "cut", *flags[1:], f"--max_iters={n}", "--resume=True")
    assert same(again, run(stream, tmp_path / "whole", *flags[1:], f"--max_iters={n}"))


def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(stream, tmp_path):
    """SIGTERM comes twice where a scheduler signals torchrun and its processes, and torchrun passes it on."""
    slow = "train.error_sums = lambda *_: print('begun', flush=True) or time.sleep(3600)"
    script = f"import sys, time, train; {slow}; train.main(sys.argv[1:])"
    command = [sys.executable, "-c", script, f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "begun" in (line.strip() for line in process.stdout)
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert process.poll() is None
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < 60:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGINT


KILLER = """
import os, random, sys, time, torch._dynamo, train
dice, reached = random.Random(0), []
out = next(word for word in sys.argv if word.startswith("--out_dir="))[10:]
for _ in range(20):
    pid = os.fork()  # of a process that has imported all of torch that a run needs, but not used it
    if pid == 0:
        sys.stdout = open(os.devnull, "w")
        train.main(sys.argv[1:])
        os._exit(0)
    if not reached:  # the first lives until it has written a checkpoint, which tells how fast the machine is
        began = time.monotonic()
        while not os.path.exists(out + "/ckpt.pt") and time.monotonic() - began < 60:
            time.sleep(0.01)
        start = time.monotonic() - began
    time.sleep(dice.uniform(0, 2 * start))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    reached.append(train.read_checkpoint(out)["step"] if os.path.exists(out + "/ckpt.pt") else 0)
print(*reached)
"""


def test_killed_at_twenty_random_moments(stream, tmp_path):
    """SIGKILL leaves no time to tidy up: a checkpoint must be whole at every instant."""
    flags = ["--checkpoint_interval=2", "--eval_interval=100000", "--log_interval=1000", "--max_iters=20000"]
    argv = [f"--data={stream}", f"--out_dir={tmp_path / 'cut'}", *TINY, *flags, "--resume=True"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLER, *argv], check=True, timeout=120, capture_output=True, text=True
    )
    reached = [int(word) for word in killed.stdout.split()]
    assert len(reached) == 20 and reached == sorted(reached) and reached[-1] < 20000
    assert len(set(reached)) > 5  # it did get on between kills
    end = f"--max_iters={reached[-1] + 10}"
    assert same(
        run(stream, tmp_path / "whole", *flags, end),
        run(stream, tmp_path / "cut", *flags, end, "--resume=True"),
    )


def test_evaluation_by_hand(rows, stream, tmp_path):
    checkpoint = run(rows, tmp_path / "a", "--max_iters=3", "--eval_batches=0")
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "a")
    split, targets, total, wrong, wrong_rows = Split(rows, "val"), 0, 0.0, 0, 0
    tokens = np.fromfile(os.path.join(rows, "val_000000.bin"), "<u2").reshape(10, 12).astype(int)
    loss = np.fromfile(os.path.join(rows, "val_000000.loss"), "u1").reshape(10, 12)
    assert split.rows == 10
    for row, mask in zip(tokens, loss):
        x = torch.from_numpy(row[None, :-1])
        logp = net(x, x)[0][0].double().log_softmax(-1)
        misses = 0
        for i in range(11):
            if mask[i + 1]:
                targets, total = targets + 1, total - logp[i, row[i + 1]].item()
                misses += int(logp[i].argmax()) != row[i + 1]
        wrong, wrong_rows = wrong + misses, wrong_rows + (misses > 0)
    got = losses(tmp_path / "a")[1][-1]
    assert math.isclose(got["loss"], total / targets, abs_tol=1e-5)
    assert math.isclose(got["ppl"], math.exp(total / targets), rel_tol=1e-4)
    assert math.isclose(got["token_error"], 100 * wrong / targets)
    assert math.isclose(got["sequence_error"], 100 * wrong_rows / 10)

    # of a stream: 2 batches of 4 windows, from the first token to the last
    checkpoint = run(stream, tmp_path / "b", "--max_iters=3")
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "b")
    tokens = torch.from_numpy(np.fromfile(os.path.join(stream, "val_000000.bin"), "<u2").astype(int))
    windows = [tokens[start : start + 17][None] for start in (0, 83, 166, 249, 333, 416, 499, 583)]
    total = sum(net(w[:, :-1], w[:, 1:])[1].item() for w in windows)
    assert math.isclose(losses(tmp_path / "b")[1][-1]["loss"], total / 8, abs_tol=1e-5)


def test_processes_share_an_evaluation(stream, tmp_path, monkeypatch):
    """Each window goes to one of them, and none holds more at once than it does in training."""
    split, seen = Split(stream, "val"), []
    alone_among_two(monkeypatch, lambda tensor, op: None)
    monkeypatch.setattr(train, "error_sums", lambda net, x, y: seen[-1].append(x) or torch.ones(5))
    for rank in ("0", "1"):
        seen.append([])
        monkeypatch.setenv("RANK", rank)
        train.main([f"--data={stream}", f"--out_dir={tmp_path / rank}", *TINY, "--batch_size=6",
                    "--eval_batches=3", "--max_iters=0"])
    want = [tuple(row) for row in split.read(split.windows(16, 18), 16)[0].tolist()]
    assert sorted(tuple(row) for part in seen for x in part for row in x.tolist()) == sorted(want)
    assert [[len(x) for x in part] for part in seen] == [[3, 3, 3], [3, 3, 3]]


def test_speed(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "PEAK_FLOPS", {"cpu": 1e9})
    net = GPT(model_config(run(rows, tmp_path / "a", "--max_iters=2", "--log_interval=2")))
    record = next(r for r in log(tmp_path / "a") if "ms" in r)
    # a row of 12 has 11 to predict
    assert record["tokens_per_s"] * record["ms"] / 1e3 == pytest.approx(4 * 11)
    assert record["mfu"] == pytest.approx(net.estimate_mfu(4, record["ms"] / 1e3, 1e9, 11))


def test_bfloat16_is_close_to_float32(stream, tmp_path):
    flags = ["--max_iters=3", "--dropout=0.0", "--log_interval=1"]
    checkpoints = [
        run(stream, tmp_path / dtype, *flags, f"--dtype={dtype}") for dtype in ("float32", "bfloat16")
    ]
    a, b = (losses(tmp_path / dtype)[0] for dtype in ("float32", "bfloat16"))
    assert all(0 < abs(a[step] - b[step]) < 0.03 for step in a)
    assert all(p.dtype == torch.float32 for checkpoint in checkpoints for p in checkpoint["model"].values())


def test_kernels_can_be_switched_off(stream, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(train.GPT, "use_kernels", lambda *_: asked.append(1) or "attention: asked")
    run(stream, tmp_path / "auto", "--max_iters=1")
    assert asked and "attention: asked" in capsys.readouterr().out
    run(stream, tmp_path / "off", "--max_iters=1", "--kernels=off")
    assert len(asked) == 1 and "attention: pytorch (kernels=off)" in capsys.readouterr().out


def test_learning_rate_schedules():
    cfg = train.TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=14)

    def rate(step, schedule):
        return train.learning_rate(step, types.SimpleNamespace(**vars(cfg) | dict(schedule=schedule)))

    assert [rate(s, "linear") for s in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    for schedule in ("cosine", "linear", "constant"):
        assert rate(4, schedule) == 1.0
    assert rate(9, "linear") == pytest.approx(0.55) and rate(9, "cosine") == pytest.approx(0.55)
    assert rate(6, "cosine") == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 5)) / 2)
    assert (
        rate(14, "linear") == pytest.approx(0.1)
        and rate(14, "cosine") == pytest.approx(0.1)
        and rate(14, "constant") == 1.0
    )


def test_torchrun_prints_an_error_once(stream, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    done = subprocess.run(
        [*command, f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, "--pe=zope"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.count("pe='zope' is unknown") == 1
    assert 'train.py", line' not in done.stderr  # torchrun adds a traceback of itself, the script none,
    assert "pe='zope' is unknown" in "".join(
        done.stderr.splitlines()[-3:]
    )  # and ends with the line that helps


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


def test_torchrun_prints_the_error_of_one_process(stream, tmp_path):
    """And not the broken connections of the others."""
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = [f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, "--max_iters=9"]
    done = subprocess.run(
        [*command, str(tmp_path / "one_fails.py"), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and 'train.py", line' not in done.stderr, done.stderr
    assert done.stderr.count("out of memory (MemoryError: of the second process); try a smaller") == 1


def test_first_step_is_adamw(stream, tmp_path):
    """One step against Adam's formula on PyTorch's gradients: clipping, warm-up, decay groups and all."""
    flags = [
        "--max_iters=1",
        "--dropout=0.0",
        "--warmup_iters=3",
        "--weight_decay=50.0",
        "--grad_clip=0.01",
        "--beta1=0.8",
        "--beta2=0.9",
        "--seed=7",
    ]
    after = run(stream, tmp_path / "a", *flags)
    torch.manual_seed(7)
    net = GPT(model_config(after))
    x, y = (torch.from_numpy(a) for a in Split(stream, "train").batch(0, 4, 16, 7))
    net(x, y)[1].backward()
    norm = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in net.parameters()))
    lr, decays = 1e-2 / 4, lambda name, p: p.dim() == 2 and "delta" not in name
    groups = sorted(net.named_parameters(), key=lambda named: not decays(*named))  # first those that decay
    for (name, p), state in zip(groups, after["optimizer"]["state"].values(), strict=True):
        g = p.grad * (0.01 / norm)
        assert torch.allclose(state["exp_avg"], 0.2 * g, 1e-3, 1e-8) and torch.allclose(
            state["exp_avg_sq"], 0.1 * g * g, 1e-3, 1e-12
        )
        decay = 50 if decays(name, p) else 0
        want = (p * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)).detach()
        want = want.clamp(-2 * math.pi, 0) if "delta" in name else want
        assert (after["model"][name] - want).abs().max() < 1e-4, name


def test_fine_tuning_starts_from_other_weights(stream, tmp_path):
    first = run(stream, tmp_path / "a", "--max_iters=3")
    tuned = run(stream, tmp_path / "b", "--max_iters=0", f"--init_from={tmp_path / 'a'}", "--dropout=0.3")
    assert same(first, tuned) and tuned["step"] == 0
    # the model's options come along, unless they are given
    plain = [
        f"--data={stream}",
        "--block_size=24",
        "--batch_size=2",
        "--device=cpu",
        "--eval_batches=1",
        "--max_iters=0",
    ]
    train.main([*plain, f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'c'}"])
    other = read_checkpoint(str(tmp_path / "c"))
    assert same(first, other) and (other["config"]["pe"], other["config"]["block_size"]) == ("pope", 24)
    assert (
        other["config"]["dropout"] == 0.1
        and other["config"]["learning_rate"] == train.TrainConfig.learning_rate
    )


def test_checkpoint_holds_tensors_and_plain_values(stream, tmp_path):
    checkpoint = run(stream, tmp_path / "a", "--max_iters=1")  # read with weights_only=True
    assert checkpoint["config"]["n_embd"] == 16 and checkpoint["meta"]["vocab_size"] == 29
    assert sorted(os.listdir(tmp_path / "a")) == ["ckpt.pt", "log.jsonl"]


def test_runs_have_directories_of_their_own(stream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.py").write_text("max_iters = 1\n")
    for more in ([], ["--pe=rope"], ["--seed=7"]):
        train.main(["some.py", f"--data={stream}", *TINY, *more])
    assert sorted(os.listdir("out")) == ["some_pope", "some_pope_seed7", "some_rope"]


def test_data_that_need_no_download_are_prepared(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for i in range(20):
        (tmp_path / "lib" / f"m{i:02}.py").write_text(f"x = {i}\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: dict(stdlib=str(tmp_path / "lib")))
    train.prepare("stdlib", str(tmp_path / "stdlib"))
    assert Split(tmp_path / "stdlib", "val").tokens == 2 * len("x = 19\n") + 1 * 2 - 1  # files 9 and 19
    with pytest.raises(
        FileNotFoundError, match="not prepared and needs a download; run `python -m data.openwebtext`"
    ):
        train.prepare("openwebtext", str(tmp_path / "openwebtext"))


def test_wandb(stream, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError) as error:
        run(stream, tmp_path / "a", "--max_iters=1", "--wandb_project=p")
    assert train.last_words(error.value).endswith("; pip install wandb")
    seen = []
    begun = []

    def init(**given):
        begun.append((given["id"], given["resume"]))
        name = given["id"] or "of-its-own"
        return types.SimpleNamespace(log=lambda values, step: seen.append((step, sorted(values))), id=name,
                                     finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    flags = ["--log_interval=1", "--wandb_project=p"]
    run(stream, tmp_path / "b", "--max_iters=1", *flags)
    assert [s for s, _ in seen] == [0, 1, 1] and "val/loss" in seen[0][1] and "train/loss" in seen[1][1]
    # a run that goes on does so in the same wandb run
    again = run(stream, tmp_path / "b", "--max_iters=2", *flags, "--resume=True")
    assert begun == [(None, "allow"), ("of-its-own", "allow")] and again["wandb"] == "of-its-own"


def test_weights_of_a_shared_tensor(stream, tmp_path):
    """Tables of one layer each are no shared table, whichever comes last."""
    own = run(stream, tmp_path / "own", "--max_iters=3", "--pe=cope", "--cope_shared=False")
    with pytest.raises(ValueError, match="e of its own, which layers share in this model"):
        load_weights(GPT(model_config(own, cope_shared=True)), own, "own")


# --- wrong input: one line that names the value and the mend, exit status 1 ------------------------


def test_exit_status():
    done = subprocess.run(
        [sys.executable, "train.py", "--pe=zope", "--data=x/"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


def test_wrong_input(stream, rows, tmp_path):
    out, base = f"--out_dir={tmp_path / 'a'}", [f"--data={stream}", *TINY]
    assert "unknown key 'n_layers' in --n_layers=3; did you mean 'n_layer'?" in fails(
        "train.py", "--n_layers=3"
    )
    assert "max_iters='x' in --max_iters=x is not of type int" in fails(
        "train.py", "config/quickstart.py", "--max_iters=x"
    )
    assert "pe='zope' is unknown; choose one of rope, pope, nope, cope," in fails("train.py", *base, out, "--pe=zope")
    assert "n_embd=16 is not divisible by n_head=3" in fails("train.py", *base, out, "--n_head=3")
    assert "n_embd / n_head = 1 is odd" in fails("train.py", *base, out, "--n_head=16", "--pe=rope")
    assert "schedule='step' is unknown; choose one of " in fails(
        "train.py", *base, out, "--schedule=step"
    )
    assert "kernels='on' is unknown; choose one of off, auto" in fails("train.py", *base, out, "--kernels=on")
    assert "device='tpu' is unknown; choose one of cpu, " in fails(
        "train.py", *base, out, "--device=tpu"
    )
    assert "has no split 'dev'; it has: train, val; change --eval_splits" in fails(
        "train.py", *base, out, "--eval_splits=dev"
    )
    assert "block_size=0 must be positive" in fails("train.py", *base, out, "--block_size=0")
    for key in ("batch_size", "eval_interval", "log_interval"):
        assert f"{key}=0 is too small; use 1 or more" in fails("train.py", *base, out, f"--{key}=0")
    assert "Invalid learning rate: -1.0" in fails("train.py", *base, out, "--learning_rate=-1")
    for key in ("max_iters", "micro_batch", "eval_batches", "checkpoint_interval", "seed"):
        assert f"{key}=-1 in --{key}=-1 is negative; use 0 or more" in fails(
            "train.py", *base, out, f"--{key}=-1"
        )
    assert "dropout probability has to be between 0 and 1" in fails("train.py", *base, out, "--dropout=2")
    assert "nothing to train; try python train.py config/quickstart.py" in fails("train.py")
    assert "no meta.json in" in fails("train.py", *base, out, f"--data={tmp_path}/nothing")
    assert "not prepared and needs a download" in fails("train.py", *base, out, "--data=openwebtext")
    assert "vocab_size=28 is less than the 29 of" in fails("train.py", *base, out, "--vocab_size=28")
    assert "block_size >= 11" in fails("train.py", *base, out, f"--data={rows}", "--block_size=10")
    assert "unknown key 'x' in x=1" in fails(
        "train.py", *base, out, "--data=stdlib@x=1"
    )
    assert "'nowhere' is not a directory with a ckpt.pt" in fails("train.py", *base, out, "--init_from=nowhere")
    assert not os.path.exists(tmp_path / "a" / "ckpt.pt")


def test_wrong_resume(stream, tmp_path):
    out, base = f"--out_dir={tmp_path / 'a'}", [f"--data={stream}", *TINY]
    run(stream, tmp_path / "a", "--max_iters=2")
    before = (tmp_path / "a" / "ckpt.pt").read_bytes()
    assert "already holds a run; continue it with --resume=True" in fails("train.py", *base, out)
    # what is wrong besides is said first
    assert "no meta.json in" in fails("train.py", *base, out, "--data=nonesuch/")
    assert "is not divisible by n_head=3" in fails("train.py", *base, out, "--n_head=3")
    line = fails("train.py", *base, out, "--resume=True", "--n_layer=3")
    assert "was trained with n_layer=2, not 3; keep it" in line
    line = fails(
        "train.py", *base, f"--out_dir={tmp_path / 'b'}", f"--init_from={tmp_path / 'a'}", "--n_embd=32"
    )
    assert "holds another architecture" in line
    assert (tmp_path / "a" / "ckpt.pt").read_bytes() == before
    (tmp_path / "a" / "ckpt.pt").write_bytes(before[: len(before) // 2])
    assert "is damaged or no checkpoint" in fails("train.py", *base, out, "--resume=True")


@pytest.mark.parametrize("more", [["--checkpoint_interval=1"], ["--eval_interval=1"], ["--max_iters=4"]])
def test_a_loss_that_is_not_finite(stream, tmp_path, more):
    """A run that diverges keeps the checkpoint from before: no interval and no end writes another."""
    flags = [f"--data={stream}", *TINY, f"--out_dir={tmp_path / 'a'}", "--norm=layernorm", "--grad_clip=0.0"]
    train.main([*flags, "--max_iters=3"])
    before = (tmp_path / "a" / "ckpt.pt").read_bytes()
    line = fails("train.py", *flags, "--max_iters=50", *more, "--learning_rate=1e38", "--resume=True")
    assert "loss is nan at step" in line and "try a lower learning_rate" in line
    assert (tmp_path / "a" / "ckpt.pt").read_bytes() == before
    assert f"{tmp_path / 'a' / 'ckpt.pt'} holds the good step 3" in line
    assert "no checkpoint yet" in fails(
        "train.py", *flags, "--learning_rate=1e38", f"--out_dir={tmp_path / 'b'}"
    )
    assert os.listdir(tmp_path / "b") == ["log.jsonl"]


def test_an_evaluation_that_is_not_finite(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "scores", lambda sums, masked: dict(loss=math.inf))
    with pytest.raises(
        ValueError, match="val loss is inf at step 0; no checkpoint yet; try a lower learning_rate"
    ):
        run(stream, tmp_path / "a", "--max_iters=3")
    assert os.listdir(tmp_path / "a") == ["log.jsonl"]
    with pytest.raises(ValueError, match="val loss is inf at step 0; .*ckpt.pt holds the good step 0"):
        run(stream, tmp_path / "b", "--max_iters=0")


# --- however it ends, nothing is lost -----------------------------------------------------------------


def test_a_long_evaluation_loses_nothing(stream, tmp_path):
    """The checkpoint comes before the evaluation, and a signal is heeded between its batches."""
    script = f"""
import os, sys, time
sys.path.insert(0, ".")
import train
sums = train.error_sums
def slow(*args):
    if os.path.exists({str(tmp_path / "a" / "ckpt.pt")!r}):
        print("batch", flush=True)
        time.sleep(1)
    return sums(*args)
train.error_sums = slow
train.main(sys.argv[1:])
"""
    flags = [
        f"--data={stream}",
        f"--out_dir={tmp_path / 'a'}",
        *TINY,
        "--eval_interval=3",
        "--eval_batches=8",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *flags], stdout=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    for line in process.stdout:
        if line == "batch\n":
            process.send_signal(signal.SIGTERM)
            break
    told = time.monotonic()
    tail = process.stdout.read()
    assert process.wait(60) == -signal.SIGTERM and time.monotonic() - told < 6  # of 8
    assert "stopped by a signal at step 3" in tail and read_checkpoint(str(tmp_path / "a"))["step"] == 3


def test_broken_pipe(stream, tmp_path):
    """`| head -1`: the run goes on without its screen."""
    process = subprocess.Popen(
        [
            sys.executable,
            "train.py",
            f"--data={stream}",
            f"--out_dir={tmp_path / 'a'}",
            *TINY,
            "--log_interval=1",
            "--max_iters=30",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    assert read_checkpoint(str(tmp_path / "a"))["step"] == 30 and len(losses(tmp_path / "a")[0]) == 30


def test_a_checkpoint_reaches_the_disk_before_its_name_does(stream, tmp_path, monkeypatch):
    """A power cut between two of these calls leaves the old file or the new one, whole."""
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


def test_one_run_at_a_time(stream, tmp_path):
    flags = [
        f"--data={stream}",
        "--max_iters=100000",
        "--log_interval=1",
        "--checkpoint_interval=5",
        "--resume=True",
    ]
    first = spawn(tmp_path / "a", *flags)
    next(line for line in first.stdout if line.startswith("step 20/"))
    log_then = (tmp_path / "a" / "log.jsonl").read_bytes()
    line = fails("train.py", f"--out_dir={tmp_path / 'a'}", *TINY, *flags)
    assert f"another process is training in {tmp_path / 'a'}; end it first" in line
    first.kill()  # its lock goes with it
    first.communicate()
    assert (tmp_path / "a" / "log.jsonl").read_bytes().startswith(log_then)
    (tmp_path / "a" / "ckpt.pt.tmp").write_bytes(b"of a kill")
    end = read_checkpoint(str(tmp_path / "a"))["step"] + 1
    assert run(stream, tmp_path / "a", *flags[1:], f"--max_iters={end}")["step"] == end
    assert sorted(os.listdir(tmp_path / "a")) == ["ckpt.pt", "log.jsonl"]


LIMITED = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); " \
    "sys.path.insert(0, '.'); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_no_room_for_a_checkpoint(stream, tmp_path):
    """Here a limit on the size of files; tests/torture.py has a full disk."""
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "train.py",
        f"--data={stream}",
        f"--out_dir={tmp_path / 'a'}",
        *TINY,
    ]
    done = subprocess.run([*command, "--max_iters=2"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "step 2 could not be written to" in done.stderr and "make room, then continue" in done.stderr
    assert "[Errno 27] File too large" in done.stderr  # the system's reason, not PyTorch's
    assert os.listdir(tmp_path / "a") == ["log.jsonl"]
    (tmp_path / "file").touch()
    line = fails("train.py", f"--data={stream}", *TINY, f"--out_dir={tmp_path / 'file' / 'a'}")
    assert "NotADirectoryError" in line


def test_a_line_cut_short_in_the_log(stream, tmp_path):
    run(stream, tmp_path / "a", "--max_iters=1")
    with open(tmp_path / "a" / "log.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    n = len((tmp_path / "a" / "log.jsonl").read_text().splitlines())
    run(stream, tmp_path / "a", "--max_iters=2", "--resume=True")
    assert "config" in log(tmp_path / "a")[n - 1]  # every line is JSON again


def test_out_of_memory(stream, tmp_path, monkeypatch):
    base = [f"--data={stream}", *TINY, f"--out_dir={tmp_path / 'a'}"]
    line = fails("train.py", *base, "--mlp_width=1e13")  # beyond any address space
    assert "out of memory" in line and "try a smaller --micro_batch" in line
    line = train.last_words(RuntimeError("Storage size calculation overflowed with sizes=[4, 2]"))
    assert "out of memory" in line
    line = train.last_words(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore"))
    assert line == ("out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.); "
                    "try a smaller --micro_batch or model")
    with pytest.raises(RuntimeError, match="a bug"):  # with its traceback
        train.last_words(RuntimeError("a bug"))


def test_what_changes_on_resuming(stream, rows, tmp_path, capsys):
    run(stream, tmp_path / "a", "--max_iters=2", "--weight_decay=0.1")
    capsys.readouterr()
    flags = ["--max_iters=3", "--weight_decay=0.5", "--beta1=0.8", "--learning_rate=3e-3", "--resume=True"]
    after = run(stream, tmp_path / "a", *flags)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "from here on" in line] == [
        "max_iters=3 from here on; it was 2",
        "learning_rate=0.003 from here on; it was 0.01",
        "weight_decay=0.5 from here on; it was 0.1",
        "beta1=0.8 from here on; it was 0.9",
    ]
    groups = after["optimizer"]["param_groups"]
    assert [(g["weight_decay"], g["betas"], g["lr"]) for g in groups] == [
        (0.5, (0.8, 0.95), 3e-3), (0.0, (0.8, 0.95), 3e-3)]

    # other data: another tokenizer, another text, another name; the same folder elsewhere is the same data
    def other(name, **changes):
        shutil.copytree(stream, tmp_path / name)
        path = tmp_path / name / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return fails(
            "train.py",
            f"--data={tmp_path / name}",
            *TINY,
            f"--out_dir={tmp_path / 'a'}",
            "--resume=True",
            "--max_iters=4",
        )

    assert "has another tokenizer; to fine-tune on it, use --init_from=" in other("b/stream", tokenizer="bytes")
    assert "has another name; to fine-tune on it, use --init_from=" in other("c/corpus")
    shutil.copytree(stream, tmp_path / "d" / "stream")
    assert run(tmp_path / "d" / "stream", tmp_path / "a", *flags, "--max_iters=4")["step"] == 4


def test_best_evaluation(stream, tmp_path, capsys):
    """In the last line and the last record, over interruptions."""
    run(stream, tmp_path / "a", "--max_iters=20", "--eval_interval=5")
    run(stream, tmp_path / "a", "--max_iters=25", "--eval_interval=5", "--learning_rate=3.0", "--resume=True")
    evals = losses(tmp_path / "a")[1]
    best = min(evals, key=lambda record: record["loss"])
    assert best["step"] < 25
    checkpoint = read_checkpoint(str(tmp_path / "a"))
    last = log(tmp_path / "a")[-1]
    assert checkpoint["best"] == last["best"] and checkpoint["step"] == 25
    assert last == dict(ended=25, best=dict(step=best["step"], split="val", loss=best["loss"]))
    assert f"ckpt.pt, best val loss {best['loss']:.4f} at step {best['step']}\n" in capsys.readouterr().out


def test_signs_of_life(stream, tmp_path, monkeypatch, capsys):
    """A long evaluation tells where it is; the time left has steps and evaluations in it."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 4.0) or clock[0])
    run(stream, tmp_path / "a", "--max_iters=1", "--eval_batches=8", "--micro_batch=4")
    assert re.findall(r"evaluating val: window (\d+) of (\d+)", capsys.readouterr().out)[:2] == [
        ("12", "32"),
        ("24", "32"),
    ]
    monkeypatch.undo()

    # the time left: 7 s a step, and 100 s for an evaluation every 5 steps
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    real = train.error_sums

    def slow(*args):
        clock[0] += 50.0
        return real(*args)

    monkeypatch.setattr(train, "error_sums", slow)
    monkeypatch.setattr(train.GPT, "clamp_parameters", lambda self: clock.__setitem__(0, clock[0] + 7.0))
    run(stream, tmp_path / "b", "--max_iters=10", "--eval_interval=5", "--eval_batches=2", "--log_interval=2")
    left = re.findall(r"left [\d:]+", capsys.readouterr().out)
    assert left == [f"left 0:0{27 * n // 60}:{27 * n % 60:02}" for n in (8, 6, 4, 2, 0)]


# --- wrong words, broken files: one line, status 1, nothing written -----------------------------------


def tree(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))


def wrong_words():
    """About 100 command lines, each wrong in one place."""
    for field in dataclasses.fields(train.TrainConfig):
        if field.type is int:
            wrong = ["many", "1.5", "-1", "1e400", ""]
        elif field.type is float:
            wrong = ["many", "None"]
        else:
            wrong = ["maybe", "1", ""]
        if field.type is not str:
            yield from (f"--{field.name}={value}" for value in wrong)
    for name in ("schedule", "dtype", "device", "pe", "norm", "mlp", "eval_splits", "data", "init_from"):
        yield f"--{name}=zope"
    for name in ("learning_rate", "beta1", "beta2"):
        yield f"--{name}=-0.5"
    for name in ("block_size", "n_layer", "n_head", "n_embd", "batch_size", "eval_interval", "log_interval"):
        yield f"--{name}=0"
    yield from (
        "--beta1=1.0",
        "--beta2=1.5",
        "--block_size=9999",
        "--vocab_size=1",
    )
    yield from (
        "--lr=1",
        "--resume",
        "--resume True",
        "--pe",
        "--",
        "--=",
        "--=1",
        "--data=",
        "--data=shards",
        "--data=__init__",
        "--data=../data/stdlib",
        "--data=stdlib@x=1",
        "--data=README.md",
        "--config=x.py",
        "--data=stdlib@",
        "--data=@",
        "--init_from=README.md",
        "--init_from=tests",
        "config",
        "README.md",
        "config/none.py",
        "a.py b.py",
        "--config",
        "--n_head=3",
    )


def test_wrong_words(stream, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "out").mkdir()
    before, seen = tree(tmp_path), set()
    for words in wrong_words():
        if words == "--data=stdlib@":
            continue
        line = fails(
            "train.py",
            f"--data={stream}",
            *TINY,
            f"--out_dir={tmp_path / 'out' / 'a'}",
            "--max_iters=1",
            *words.split(),
        )
        assert tree(tmp_path) == before, words
        assert re.match(r"(ValueError|FileNotFoundError): \S.{15}", line), (words, line)
        seen.add(words)
    assert len(seen) > 90


def damages(checkpoint, raw):
    """Files that are not this run's checkpoint: (what was done, bytes or something to save)."""
    dice = np.random.default_rng(0)
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        spans = [(raw.index(file.read(i)), i.file_size) for i in file.infolist() if i.file_size > 500]
    for k in range(20):
        begin, size = spans[k % len(spans)]
        bit = int(dice.integers(8 * begin, 8 * (begin + size)))
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)
    for k in range(8):
        yield f"cut off at {k}/8", raw[: len(raw) * k // 8]
    yield "a byte too few", raw[:-1]
    yield "zeros", bytes(len(raw))
    yield "random", dice.bytes(len(raw))
    yield "a hole", raw[: len(raw) // 2] + bytes(4096) + raw[len(raw) // 2 + 4096 :]
    yield "text", b"model\n"
    yield "a pickle", pickle.dumps(dict(step=1))
    for key, value in (("n_layer", 3), ("pe", "rope")):
        yield f"another {key}", checkpoint | dict(config=checkpoint["config"] | {key: value})
    meta = checkpoint["meta"]
    yield "another tokenizer", checkpoint | dict(meta=meta | dict(tokenizer="bytes"))
    yield "another text", checkpoint | dict(meta=meta | dict(shards={"train_000000.bin": 7}))


def test_damaged_checkpoints(stream, tmp_path):
    out = tmp_path / "a"
    checkpoint = run(stream, out, "--max_iters=2")
    raw, count = (out / "ckpt.pt").read_bytes(), 0
    for what, damaged in damages(checkpoint, raw):
        if isinstance(damaged, bytes):
            (out / "ckpt.pt").write_bytes(damaged)
        else:
            torch.save(damaged, out / "ckpt.pt")
        before = contents(out)
        line = fails(
            "train.py", f"--data={stream}", *TINY, f"--out_dir={out}", "--max_iters=4", "--resume=True"
        )
        assert contents(out) == before, what
        assert re.match(r"(ValueError|FileNotFoundError): \S.{15}", line), (what, line)
        count += 1
    assert count >= 35
    (out / "ckpt.pt").write_bytes(raw)
    assert run(stream, out, "--max_iters=4", "--resume=True")["step"] == 4


def test_a_checkpoint_of_an_earlier_version(stream, tmp_path):
    """Without what later versions wrote into it."""
    old = run(stream, tmp_path / "a", "--max_iters=2")
    for key in ("best", "wandb"):
        del old[key]
    del old["meta"]["shards"], old["config"]["expe_scale"]
    old["config"]["share_table"] = True
    twice = {name.replace("pes.0", "rotation"): x for name, x in old["model"].items() if "delta" in name}
    torch.save(old | dict(model=old["model"] | twice), tmp_path / "a" / "ckpt.pt")
    assert same(
        run(stream, tmp_path / "a", "--max_iters=4", "--resume=True"),
        run(stream, tmp_path / "b", "--max_iters=4"),
    )


def test_broken_shards(stream, tmp_path):
    def broken(change):
        folder = tmp_path / "data"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stream, folder)
        change(folder)
        return fails("train.py", f"--data={folder}", *TINY, f"--out_dir={tmp_path / 'a'}", "--max_iters=3")

    def shard(folder):
        return folder / "train_000000.bin"

    assert "is missing, though meta.json lists it" in broken(lambda f: shard(f).unlink())
    assert "has 5000 bytes instead of 10000" in broken(
        lambda f: shard(f).write_bytes(shard(f).read_bytes()[:5000])
    )
    assert "has token 999, beyond vocab_size=29" in broken(
        lambda f: shard(f).write_bytes(np.full(5000, 999, "<u2").tobytes())
    )
