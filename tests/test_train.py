"""train.py and checkpoint.py: a run that is stopped, resumed or divided over processes is the same
run, no way of ending it loses it, and its numbers are those that a sum by hand gives. What is
refused before training is in test_bad_input.py."""
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import SIGNALS, TINY, contents, fails, write_stream

import checkpoint
import config
import sample
import train
from checkpoint import load_weights, model_config, read
from data import shards
from data.shards import Split, Writer
from eval import results
from model import GPT

# Each process is forked from a server that has imported torch but not used it, so it starts at once
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "torch._dynamo", "pytest"])
# INTERRUPTIONS=40 pytest tests/test_train.py -k random_moments    is a longer trial
INTERRUPTIONS = int(os.environ.get("INTERRUPTIONS", 3))

def run(data, out, *flags, ranks=1):
    """Trains, on several processes if `ranks` is above 1. Returns the checkpoint."""
    words = [f"--data={data}", f"--out_dir={out}", *TINY, *flags]
    if ranks == 1:
        train.main(words)
    else:
        processes = start(f"{out}.printed", words, ranks)
        for process in processes:
            process.join(120)
        printed = open(f"{out}.printed").read()
        assert [process.exitcode for process in processes] == [0] * ranks, printed
    return read(str(out))

def same(a, b):
    """Whether two checkpoints hold the same weights and moments, bit by bit."""
    states = [checkpoint["optimizer"]["state"].values() for checkpoint in (a, b)]
    return (all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
            and all(torch.equal(x[k], y[k]) for x, y in zip(*states) for k in x))

def log(out):
    return [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]

def losses(out):
    """{step: training loss} and the records of evaluations."""
    records = log(out)
    steps = {record["step"]: record["loss"] for record in records if "lr" in record}
    return steps, [record for record in records if "split" in record]

def start(printed, words, ranks=1, setup=int):
    """Starts processes that train together, as torchrun does. RANK in a word becomes the
    number of each process. Their output is appended to the file `printed`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=port)
    processes = []
    for rank in map(str, range(ranks)):
        own = [word.replace("RANK", rank) for word in words]
        given = str(printed), own, setup, dict(group, RANK=rank)
        processes.append(FORKS.Process(target=child, args=given, daemon=True))
        processes[-1].start()
    return processes

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
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.02)

# the same run, for settings that a seed draws

def draw(seed, request):
    """Returns a data set, its flags, and on how many processes to train."""
    dice = random.Random(seed)
    data = dice.choice(["stream", "rows"])
    batch_size = dice.choice([2, 4, 6])
    flags = [f"--block_size={dice.randint(11, 20)}", f"--batch_size={batch_size}",
             f"--micro_batch={dice.choice([0, 1, 2])}", f"--eval_batches={dice.randint(0, 3)}",
             f"--pe={dice.choice(['pope', 'cope', 'fox', 'learned'])}", "--log_interval=1"]
    ranks = 1 + seed % 2
    print(f"seed {seed}: {data}, {ranks} processes, {' '.join(flags)}")
    return request.getfixturevalue(data), flags, ranks

@pytest.mark.parametrize("seed", range(6))
def test_a_resumed_run_is_the_uninterrupted_one(seed, request, tmp_path):
    """The weights, the moments, all losses and all evaluations, although the data have moved to
    another folder meanwhile. The run directory holds two files."""
    data, flags, ranks = draw(seed, request)
    dice = random.Random(seed)
    flags += [f"--dropout={dice.choice([0.0, 0.3])}", f"--eval_interval={dice.randint(2, 5)}"]
    stop = dice.randint(1, 9)
    whole = run(data, tmp_path / "a", *flags, "--max_iters=10", ranks=ranks)
    half = run(data, tmp_path / "b", *flags, f"--max_iters={stop}", ranks=ranks)
    assert half["step"] == stop and not same(whole, half)
    moved = shutil.copytree(data, tmp_path / "moved" / os.path.basename(data))
    again = run(moved, tmp_path / "b", *flags, "--max_iters=10", "--resume=True", ranks=ranks)
    assert same(whole, again)
    steps, evals = losses(tmp_path / "a")
    steps_again, evals_again = losses(tmp_path / "b")
    assert steps == steps_again and len(steps) == 10
    assert all(record in evals_again for record in evals)
    assert again["best"]["loss"] == min(record["loss"] for record in evals_again)
    assert log(tmp_path / "b")[-1] == dict(ended=10, best=again["best"])
    assert sorted(os.listdir(tmp_path / "b")) == ["ckpt.pt", "log.jsonl"]

def by_hand(net, x, y):
    """The mean loss of the targets, and the percentages of wrong targets and of rows with one,
    among the rows that have a target."""
    log_p = net(x, x)[0].double().log_softmax(-1)
    targets = [(row, i) for row, i in np.ndindex(*y.shape) if y[row, i] != -1]
    nats = [-log_p[row, i, y[row, i]].item() for row, i in targets]
    wrong = [(row, i) for row, i in targets if log_p[row, i].argmax() != y[row, i]]
    rows = {row for row, _ in targets}
    wrong_rows = {row for row, _ in wrong}
    return (sum(nats) / len(nats), 100 * len(wrong) / len(targets),
            100 * len(wrong_rows) / len(rows))

@pytest.mark.parametrize("seed", range(6))
def test_losses_by_hand(seed, request, tmp_path):
    """Each loss of training and evaluation, in float64. With a learning rate of 0, all steps have
    the weights of the checkpoint."""
    data, flags, ranks = draw(100 + seed, request)
    checkpoint = run(data, tmp_path / "a", *flags, "--learning_rate=0.0", "--dropout=0.0",
                     "--max_iters=8", "--eval_interval=100", ranks=ranks)
    net = GPT(model_config(checkpoint)).eval()
    load_weights(net, checkpoint, "a")
    batch_size, block_size, batches = (
        checkpoint["config"][key] for key in ("batch_size", "block_size", "eval_batches"))
    steps, evals = losses(tmp_path / "a")
    for step in range(8):
        x, y = map(torch.from_numpy, Split(data, "train").batch(step, batch_size, block_size, 1337))
        assert steps[step + 1] == pytest.approx(by_hand(net, x, y)[0], abs=1e-5)
    val = Split(data, "val")
    starts = val.windows(block_size, batches * batch_size or None)
    loss, *errors = by_hand(net, *map(torch.from_numpy, val.read(starts, block_size)))
    assert [record["step"] for record in evals] == [0, 8]
    for got in evals:
        assert got["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["ppl"] == pytest.approx(math.exp(loss), rel=1e-4)
        if val.rows:
            assert [got["token_error"], got["sequence_error"]] == pytest.approx(errors)

@pytest.mark.parametrize("ranks, micro_batch, clip", [(1, 3, 0.01), (2, 1, 100.0)])
def test_first_step_is_adamw(rows, tmp_path, ranks, micro_batch, clip):
    """One step against PyTorch's AdamW on the gradients of the whole batch, whose rows have
    different numbers of targets: clipping, warm-up, decay and betas."""
    flags = ["--max_iters=1", "--dropout=0.0", "--warmup_iters=3", "--weight_decay=50.0",
             f"--grad_clip={clip}", "--beta1=0.8", "--beta2=0.9", "--seed=7",
             f"--micro_batch={micro_batch}"]
    after = run(rows, tmp_path / "a", *flags, ranks=ranks)
    torch.manual_seed(7)
    net = GPT(model_config(after))
    x, y = (torch.from_numpy(a) for a in Split(rows, "train").batch(0, 4, 16, 7))
    net(x, y)[1].backward()
    optimizer = net.configure_optimizers(50.0, 1e-2 / 4, (0.8, 0.9), "cpu")
    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    net.clamp_parameters()
    for name, weight in net.state_dict().items():
        assert (after["model"][name] - weight).abs().max() < 1e-4, name
    moments = [each["state"].values() for each in (after["optimizer"], optimizer.state_dict())]
    for got, want in zip(*moments, strict=True):
        assert torch.allclose(got["exp_avg"], want["exp_avg"], 1e-3, 1e-8)
        assert torch.allclose(got["exp_avg_sq"], want["exp_avg_sq"], 1e-3, 1e-12)

def test_dropout_differs_by_step_and_process(tmp_path):
    """All tokens are equal and the learning rate is 0, so only dropout makes losses differ. Two
    processes with the same dropout would have the mean loss of one with half the batch."""
    writer = Writer(tmp_path / "data")
    for split in ("train", "val"):
        writer.write(split, np.zeros(100, dtype=int))
    writer.finish(vocab_size=9, tokenizer="bytes")
    found = set()
    for ranks in (1, 2):
        run(tmp_path / "data", tmp_path / str(ranks), "--learning_rate=0.0", "--dropout=0.5",
            "--max_iters=3", "--log_interval=1", f"--batch_size={2 * ranks}", ranks=ranks)
        found.update(losses(tmp_path / str(ranks))[0].values())
    assert len(found) == 6

# signals and kills

def test_nohup(stream, tmp_path):
    """A signal that the shell ignores stays ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(stream, tmp_path / "a", "--max_iters=1")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert callable(signal.getsignal(signal.SIGTERM))

def slow_evaluation():
    train.error_sums = lambda *_: print("begun", flush=True) or time.sleep(2) or torch.ones(5)

@pytest.mark.parametrize("number, interval, last_words", [
    (signal.SIGTERM, 50, "stopped by a signal at step 4"),
    (signal.SIGINT, 4, "Ctrl-C ends it at once, unsaved"),
])
def test_signals_during_an_evaluation(stream, tmp_path, number, interval, last_words):
    """A signal stops the evaluation after its batch and leaves a checkpoint, even if none is due.
    It may come many times, because a scheduler signals all processes and torchrun passes its own
    on. Only a second Ctrl-C ends the run at once, and a checkpoint that is due is there by then."""
    out, printed = tmp_path / "a", tmp_path / "printed"
    run(stream, out, "--max_iters=2")
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, "--resume=True", "--eval_batches=8",
             "--eval_interval=4", f"--checkpoint_interval={interval}"]
    (process,) = start(printed, words, setup=slow_evaluation)
    wait_for(lambda: printed.exists() and "begun" in printed.read_text())
    for _ in range(20):
        subprocess.run(["kill", f"-{number}", str(process.pid)])  # no error if it has just ended
    process.join(60)
    assert process.exitcode == -number and read(str(out))["step"] == 4
    text = printed.read_text()
    assert last_words in "".join(text.splitlines()[-2:])
    assert text.count("stopping after this step") == 1  # however often the signal came

def close_terminal():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)

@pytest.mark.parametrize("numbers, ranks", [([signal.SIGKILL], 1), (SIGNALS, 1), (SIGNALS, 2)])
def test_interrupted_at_random_moments(stream, tmp_path, numbers, ranks):
    """A run is interrupted by signals to one of its processes, and resumed each time. It must end
    as an uninterrupted run does. SIGKILL leaves no time to tidy up, so the checkpoint must be
    complete at every moment, and a kill may have left half a line in the log. Before SIGHUP, nobody
    can read what the run prints."""
    out = tmp_path / "cut"
    printed = tmp_path / "printed"
    dice = random.Random(0)
    reached = [0]  # the steps of its checkpoints
    flags = ["--checkpoint_interval=100000", "--eval_interval=100000", "--log_interval=1"]
    if numbers == [signal.SIGKILL]:
        flags[0] = "--checkpoint_interval=2"
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, *flags, "--resume=True"]
    for n in range(INTERRUPTIONS):
        number = numbers[n % len(numbers)]
        setup = close_terminal if number == signal.SIGHUP else int
        processes = start(printed, [*words, "--max_iters=1000000"], ranks, setup)
        # Before the first step, a process may not yet listen to signals
        wait_for(lambda: (out / "log.jsonl").exists()
                 and '"lr"' in "".join((out / "log.jsonl").read_text().split('{"config"')[n + 1 :]))
        if number == signal.SIGKILL:
            wait_for((out / "ckpt.pt").exists)
        time.sleep(dice.uniform(0.2, 2))
        assert f"another process is training in {out}; end it first" in fails("train.py", *words)
        os.kill(dice.choice(processes).pid, number)
        for process in processes:
            process.join(120)
            # a shell then leaves `&&` and loops
            assert process.exitcode == -number, printed.read_text()[-2000:]
        reached.append(read(str(out))["step"])
        for line in (out / "log.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)
        (out / "ckpt.pt.tmp").write_bytes(b"half")
        with open(out / "log.jsonl", "a") as file:
            file.write('{"step": 2, "lo')
    assert "Traceback" not in printed.read_text()
    assert reached == sorted(reached) and len(set(reached)) > 2
    end = f"--max_iters={reached[-1] + 5}"
    whole = run(stream, tmp_path / "whole", *flags, end, ranks=ranks)
    assert same(whole, run(stream, out, *flags, end, "--resume=True", ranks=ranks))
    assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]

def test_windows(tmp_path, monkeypatch):
    """Without fcntl, SIGHUP and O_DIRECTORY, data are written, and a run is trained and resumed."""
    monkeypatch.setattr(checkpoint, "fcntl", None)
    monkeypatch.setattr(shards, "fcntl", None)
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(os, "O_DIRECTORY")
    data = write_stream(tmp_path / "data")
    for steps in (2, 4):
        last = run(data, tmp_path / "run", "--resume=True", f"--max_iters={steps}")
    assert last["step"] == 4

def test_the_last_line_of_torchrun_is_ours(tmp_path):
    """It says what the mistake is, and there is no traceback of train.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", "train.py", *TINY, "--pe=zope", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and 'train.py", line' not in done.stderr
    assert "pe='zope' is unknown" in "".join(done.stderr.splitlines()[-3:])

def enter_machine(folder):
    os.chdir(folder / os.environ["RANK"])

@pytest.mark.parametrize("differ", ["settings", "data", "checkpoint"])
def test_processes_that_differ_are_refused(stream, tmp_path, monkeypatch, differ):
    """On several machines, each may have its own copy of the data, and a disk of its own."""
    monkeypatch.chdir(tmp_path)
    words = ["--data=data/stream", "--out_dir=out", *TINY, "--max_iters=2", "--resume=True"]
    for rank in "01":
        shutil.copytree(stream, f"{rank}/data/stream")
    if differ == "settings":
        words.append("--learning_rate=1e-RANK")
    if differ == "data":
        path = tmp_path / "1" / "data" / "stream" / "meta.json"
        path.write_text(path.read_text().replace("s28", "s29"))
    if differ == "checkpoint":
        run("1/data/stream", "1/out", "--max_iters=1")
    for process in start(tmp_path / "printed", words, 2, partial(enter_machine, tmp_path)):
        process.join(60)
        assert process.exitcode == 1
    text = (tmp_path / "printed").read_text()
    assert text.count("ValueError: the processes have different settings, copies of ") == 2

# numbers

def test_speed_in_bfloat16(rows, tmp_path, monkeypatch, capsys):
    """By a clock that advances a second each time it is read: three times in a step with an
    evaluation, two of which measure it, and once for a log line. Tokens per second and MFU count
    the 11 targets of a row of 12. The first line has no speed, as the first step may compile."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "PEAK_FLOPS", {"cp": 1.0, "cpu": 1e9})  # only whole names count
    checkpoint = run(rows, tmp_path / "a", "--max_iters=6", "--log_interval=2", "--eval_interval=1",
                     "--dtype=bfloat16")
    assert {p.dtype for p in checkpoint["model"].values()} == {torch.float32}
    first, second, _ = (record for record in log(tmp_path / "a") if "lr" in record)
    assert "ms" not in first and second["ms"] == 1500
    assert second["tokens_per_s"] == pytest.approx(4 * 11 / 1.5)
    net = GPT(model_config(checkpoint))
    assert second["mfu"] == pytest.approx(net.estimate_mfu(4, 1.5, 1e9, 11))
    # two more steps of 1.5 seconds, each with an evaluation of 1 second
    assert re.search("step 4/6 .* left 0:00:05\n", capsys.readouterr().out)

def test_learning_rate_schedules():
    """At steps 0 and 3 of the warm-up, at its end, soon after that, half-way and at the end."""
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi / 5)) / 2
    for schedule, *after in (("linear", 0.82, 0.55, 0.1), ("cosine", cosine, 0.55, 0.1),
                             ("constant", 1, 1, 1)):
        cfg = train.TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=14,
                                schedule=schedule)
        rates = [train.learning_rate(step, cfg) for step in (0, 3, 4, 6, 9, 14)]
        assert rates == pytest.approx([0.2, 0.8, 1, *after])

def test_fine_tuning_starts_from_other_weights(stream, tmp_path, capsys):
    """From step 0. It takes the model's options, unless they are given, and no others. It says
    which differ. Once there is a checkpoint, the origin may go."""
    first = run(stream, tmp_path / "a", "--max_iters=3")
    words = [f"--data={stream}", f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'b'}",
             "--block_size=24", "--device=cpu", "--eval_batches=1"]
    train.main([*words, "--max_iters=0"])
    printed = capsys.readouterr().out
    assert f"data={stream}, " in printed and "block_size=24 from here on; it was 16\n" in printed
    tuned = read(str(tmp_path / "b"))
    keys = "pe", "block_size", "dropout", "batch_size"
    assert [tuned["config"][key] for key in keys] == ["pope", 24, 0.1, 16]
    assert same(first, tuned) and tuned["step"] == 0
    origin = [-1, [checkpoint.experiment(first["history"], 3), 3]]  # a report compares it
    shutil.rmtree(tmp_path / "a")
    train.main([*words, "--max_iters=1", "--resume=True"])
    resumed = read(str(tmp_path / "b"))
    assert resumed["step"] == 1 and resumed["history"][0] == tuned["history"][0] == origin
    with pytest.raises(ValueError, match="was trained with init_from=.*, not 'c'"):
        train.main([*words, "--init_from=c", "--max_iters=2", "--resume=True"])

def test_an_experiment_is_the_same_for_all_seeds_and_only_for_them():
    def experiment(*starts, of=9, before=()):  # each start is (step, options)
        history = list(before)
        for step, options in starts:
            history = checkpoint.history(history, step, vars(train.TrainConfig(**options)))
        return checkpoint.experiment(history, of)

    short, long, changed = (0, {}), (0, dict(max_iters=20)), (5, dict(max_iters=20))
    origin = dict(before=[[-1, [6, 3]]])
    alike = [experiment(short), experiment((0, dict(seed=2)), (5, dict(micro_batch=3))),
             experiment(long, short),  # it was started over
             experiment(short, changed, (5, {})),  # no step of the change was saved
             experiment(short, changed, of=5)]  # these weights are from before the change
    fine = [experiment((0, dict(init_from=name)), **origin) for name in "ab"]
    fine.append(experiment(short, short, **origin))  # it was stopped at once and resumed
    others = [experiment(long), experiment(short, changed), experiment(short, (6, changed[1])),
              experiment((0, dict(data="other"))), experiment(short, before=[[-1, [6, 4]]]),
              experiment(short, before=[[-1, [7, 3]]])]
    assert len(set(alike)) == len(set(fine)) == 1
    assert len({*alike, *fine, *others}) == 2 + len(others)
    assert experiment(short, changed, of=6) == experiment(short, changed)

def test_a_run_knows_its_experiment_although_other_runs_change(stream, tmp_path):
    """The weights carry it, and the log has the same one. An origin that is trained on afterwards
    changes only the runs that start from it later."""
    found = {}
    for name, origin, steps in (("a", "", 3), ("b", "a", 4), ("a", "", 5), ("c", "a", 4)):
        words = [f"--init_from={tmp_path / origin}"] if origin else []
        run(stream, tmp_path / name, *words, f"--max_iters={steps}", "--resume=True",
            "--log_interval=1")
        for folder in {str(tmp_path / name), str(tmp_path / "a")}:
            found[name, folder] = sample.Run(folder, device="cpu").experiment
            rows = results.training([folder])
            assert {row["experiment"] for row in rows} == {found[name, folder]}
    assert len(set(found.values())) == 4

def test_yarn_knows_the_length_of_the_training_before(stream, tmp_path):
    """That is the length of the run that it starts from, or the one which that run knew if it used
    YaRN too."""
    run(stream, tmp_path / "0", "--pe=rope", "--max_iters=1")
    yarn = ["--rope_scaling=yarn", "--rope_factor=2"]
    for steps in (1, 2):  # a run that has no run before it resumes too
        run(stream, tmp_path / "z", "--pe=rope", *yarn, f"--max_iters={steps}", "--resume=True")
    for n, (length, flags, trained) in enumerate([(24, [], 0), (32, yarn, 24), (48, yarn, 24)]):
        words = [f"--data={stream}", f"--init_from={tmp_path / str(n)}", f"--block_size={length}",
                 f"--out_dir={tmp_path / str(n + 1)}", *flags, "--device=cpu", "--eval_batches=1"]
        for steps in (1, 2):
            train.main([*words, f"--max_iters={steps}", "--resume=True"])
        assert read(str(tmp_path / str(n + 1)))["config"]["rope_trained"] == trained

def test_runs_have_directories_of_their_own(stream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.py").write_text(f"max_iters = 0\ndata = {stream!r}\n")
    other = f"--data={shutil.copytree(stream, tmp_path / 'toy@length=5')}"
    for more in ([], ["--pe=rope"], ["--seed=7"], [other, "--seed=7"]):
        train.main(["some.py", *TINY, *more])
    assert sorted(os.listdir("out")) == [
        "some_pope", "some_pope_seed7", "some_rope", "some_toy_length=5_pope_seed7"]

def test_wandb(stream, tmp_path, monkeypatch):
    """It gets every record, and a resumed run keeps its wandb run."""
    wandb = MagicMock()
    wandb.init.return_value.id = "of-its-own"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (1, 2):
        run(stream, tmp_path / "a", f"--max_iters={steps}", "--log_interval=1",
            "--wandb_project=p", "--resume=True")
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "of-its-own"]
    logged = [call.args for call in wandb.init.return_value.log.call_args_list]
    assert [(step, *values) for values, step in logged[:3]] == [
        (0, "val/loss", "val/ppl"), (1, "step/loss", "step/lr"), (1, "val/loss", "val/ppl")]

def test_what_changes_on_resuming(stream, tmp_path, capsys):
    """It is named, and used from there on. A best loss from other evaluations is dropped, but not
    if another split is evaluated too. The data may have been renamed."""
    run(stream, tmp_path / "a", "--max_iters=2", "--weight_decay=0.1")
    more = run(stream, tmp_path / "a", "--max_iters=3", "--eval_splits=val,train", "--resume=True",
               "--learning_rate=3", "--grad_clip=0")
    assert more["best"]["step"] < 3
    renamed = shutil.copytree(stream, tmp_path / "renamed")
    after = run(renamed, tmp_path / "a", "--max_iters=5", "--weight_decay=0.5", "--beta1=0.8",
                "--learning_rate=3", "--eval_batches=1", "--resume=True")
    assert "learning_rate=3.0 from here on; it was 0.01\n" in capsys.readouterr().out
    groups = after["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["betas"], group["lr"]) for group in groups] == [
        (0.5, (0.8, 0.95), 3.0), (0.0, (0.8, 0.95), 3.0)]
    assert after["best"]["step"] == 5

@pytest.mark.parametrize("more", ["--checkpoint_interval=1", "--eval_interval=1", "--max_iters=4"])
def test_a_loss_that_is_not_finite(stream, tmp_path, more):
    """A run that diverges keeps its last good checkpoint: no interval and no end overwrites it."""
    out = tmp_path / "a"
    flags = ["--norm=layernorm", "--grad_clip=0.0", "--pe=cope"]
    before = run(stream, out, *flags, "--max_iters=3")
    words = [f"--data={stream}", *TINY, *flags, "--learning_rate=1e38", "--max_iters=50", more]
    line = fails("train.py", *words, f"--out_dir={out}", "--resume=True")
    assert "loss is nan at step" in line and "try a lower learning_rate" in line
    assert f"{out / 'ckpt.pt'} is the last checkpoint" in line
    after = read(str(out))
    assert after["step"] == 3 and same(before, after)
    line = fails("train.py", *words, f"--out_dir={tmp_path / 'b'}", "--checkpoint_interval=99")
    assert "there is no checkpoint yet" in line

# disks, memory and files

@pytest.mark.parametrize("size", [16, 256])  # PyTorch hides the system's error on a large tensor
def test_no_room_for_a_checkpoint(stream, tmp_path, size):
    """A limit on file size stands in for a full disk. The checkpoint before it stays as it was."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=1", f"--n_embd={size}")
    before = contents(out)["ckpt.pt"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        line = fails("train.py", f"--data={stream}", f"--out_dir={out}", *TINY, "--resume=True",
                     "--max_iters=2", f"--n_embd={size}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step 2 could not be written to" in line and "with --resume=True" in line
    assert "([Errno 27] File too large)" in line
    assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]
    assert contents(out)["ckpt.pt"] == before

@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # as stderr is captured
@pytest.mark.parametrize("script", ["train.py", "sample.py", "data/flip_flop.py"])
def test_ctrl_c_ends_a_shell_loop(script, monkeypatch, capsys):
    ended_by = []
    monkeypatch.setattr(config, "typed", MagicMock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(signal, "raise_signal", ended_by.append)
    monkeypatch.setattr(sys, "argv", [script, "--seed=1"])
    runpy.run_path(script, run_name="__main__")
    assert ended_by == [signal.SIGINT] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert capsys.readouterr().err.startswith("\nstopped")

def test_a_closed_stdout_is_no_bug(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert "is not a directory with a ckpt.pt" in fails("sample.py", "x")

def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(config, "typed", lambda *_: int("a bug"))
    monkeypatch.setattr(sys, "argv", ["script", "--seed=1"])
    for script in ("train.py", "sample.py", "data/flip_flop.py"):
        with pytest.raises(ValueError, match="a bug"):
            runpy.run_path(script, run_name="__main__")

def test_a_run_that_was_moved_saves_no_more(stream, tmp_path, monkeypatch):
    """Otherwise it would overwrite the checkpoint of a run that has begun at its old place."""
    out, evaluate = tmp_path / "a", train.evaluate

    def move_and_replace(*rest):
        monkeypatch.setattr(train, "evaluate", evaluate)
        out.rename(tmp_path / "moved")
        run(stream, out, "--max_iters=1", "--seed=2")
        return evaluate(*rest)

    monkeypatch.setattr(train, "evaluate", move_and_replace)
    with pytest.raises(ValueError, match=f"was moved, deleted or .* so step 3 is in {out}/ckpt.pt"):
        run(stream, out, "--max_iters=3")
    assert read(str(out))["config"]["seed"] == 2
    os.rename(out / f"ckpt.pt.{os.getpid()}", tmp_path / "moved" / "ckpt.pt")
    saved = read(str(tmp_path / "moved"))
    assert saved["step"] == 3 and saved["config"]["seed"] == 1337

def test_a_run_that_starts_over_or_goes_back(stream, tmp_path):
    """Its log keeps all steps, but those that did not lead to its last weights do not count in
    pictures. They are from a run that failed before its first checkpoint, or from other branches if
    older checkpoints were put back."""
    out = tmp_path / "a"
    saved = {}
    run(stream, out, "--max_iters=2")
    for put_back, stop, rate, seed in ((0, 2, 1e-3, 7), (0, 4, 1e-3, 1), (2, 4, 9e-3, 7),
                                       (2, 4, 1e-3, 7), (4, 4, 1e-3, 1), (4, 6, 1e-3, 7)):
        (out / "ckpt.pt").unlink()
        if put_back:
            shutil.copy(saved[put_back, 1e-3, seed], out / "ckpt.pt")
        before = log(out)
        run(stream, out, f"--max_iters={stop}", f"--learning_rate={rate}", "--schedule=constant",
            "--pe=rope", "--log_interval=1", "--resume=True", f"--seed={seed}")
        assert log(out)[: len(before)] == before
        saved[stop, rate, seed] = shutil.copy(out / "ckpt.pt", tmp_path / f"{stop} {rate} {seed}")
    whole = tmp_path / "b"
    run(stream, whole, "--max_iters=6", "--learning_rate=1e-3", "--schedule=constant", "--pe=rope",
        "--log_interval=1", "--seed=7")
    found, expected = (results.training([str(path)]) for path in (out, whole))
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4, 5, 6]
    assert [row.get("loss") for row in found] == [row.get("loss") for row in expected]
