"""train.py: a run that is stopped, resumed or divided over processes is the same run, no way of
ending it loses it, and its numbers are those that a sum by hand gives. test_bad_input.py tests
mistakes in the command line."""
import collections
import errno
import itertools
import math
import multiprocessing
import os
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import SIGNALS, TINY, contents, fails, write_stream
from torch.utils._python_dispatch import TorchDispatchMode

import sample
import train
from config import Mistake, devices, runs
from config.runs import model_options, read_checkpoint, read_records
from data.shards import Split, Writer
from model import GPT, GPTConfig

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
    return read_checkpoint(str(out))

def same(a, b):
    """Whether two checkpoints hold the same weights and moments, bit by bit."""
    states = [checkpoint["optimizer"]["state"].values() for checkpoint in (a, b)]
    return (all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
            and all(torch.equal(x[k], y[k]) for x, y in zip(*states) for k in x))

def losses(out):
    """{step: training loss} and the records of evaluations."""
    records = read_records(out / "log.jsonl")
    steps = {record["step"]: record["loss"] for record in records if "lr" in record}
    return steps, [record for record in records if "val/loss" in record]

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
             f"--pe={dice.choice(['pope', 'learned', 'fox', 'cope', 't5'])}", "--log_interval=1"]
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
    flags.append(f"--random_positions={dice.choice([0, 40])}")
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
    run(data, tmp_path / "a", *flags, "--learning_rate=0.0", "--dropout=0.0", "--max_iters=8",
        "--eval_interval=100", ranks=ranks)
    net, saved = runs.load_model(tmp_path / "a")
    batch_size, block_size, batches = (
        saved["config"][key] for key in ("batch_size", "block_size", "eval_batches"))
    steps, evals = losses(tmp_path / "a")
    for step in range(8):
        x, y = map(torch.from_numpy, Split(data, "train").batch(step, batch_size, block_size, 1337))
        assert steps[step + 1] == pytest.approx(by_hand(net, x, y)[0], abs=1e-5)
    val = Split(data, "val")
    starts = val.windows(block_size, batches * batch_size or None)
    loss, *errors = by_hand(net, *map(torch.from_numpy, val.read(starts, block_size)))
    assert [record["step"] for record in evals] == [0, 8]
    for got in evals:
        assert got["val/loss"] == pytest.approx(loss, abs=1e-5)
        if val.rows:
            found = [got["val/token_error"], got["val/sequence_error"]]
            assert found == pytest.approx(errors)

@pytest.mark.parametrize("kind", ["stream", "rows"])
@pytest.mark.parametrize("count, n, ranks", [
    (7, 3, 1), (10, 4, 1), (2, 5, 1), (7, 2, 2), (3, 2, 4)])
def test_scores_of_any_number_of_windows(kind, count, n, ranks, request):
    """The windows that fill up the last batch, so that all have one size, do not count. The sums of
    several processes are added up, and a process without a window adds nothing."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=1, n_head=2, n_embd=16)).eval()
    sizes = []
    hook = net.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    split = Split(request.getfixturevalue(kind), "val")
    starts = split.windows(16, count)
    sums = 0
    for rank in range(ranks):
        sizes.clear()
        own = starts[rank::ranks]
        sums = sums + train.score_sums(net, split, own, 16, n)
        assert len(sizes) == math.ceil(len(own) / n) and len(set(sizes)) <= 1
    hook.remove()
    found = train.scores(sums)
    want = by_hand(net, *map(torch.from_numpy, split.read(starts, 16)))
    names = ["loss", "token_error", "sequence_error"][: 3 if split.masks else 1]
    assert list(found) == names
    assert list(found.values()) == pytest.approx(want[: len(names)], rel=1e-6)

def test_no_compiled_graph_is_dynamic(tmp_path, monkeypatch):
    """Training and evaluation are each compiled once, for the sizes of a whole batch, although 9
    windows in batches of 4 leave one window for the last batch."""
    with Writer(tmp_path / "data", 29, "bytes") as writer:
        for split in ("train", "val"):
            writer.write(split, np.arange(9 * 16 + 1) % 29)
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(x.shape) if isinstance(x, torch.Tensor) else (x,) for x in inputs])
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    run(tmp_path / "data", tmp_path / "a", "--compile", "--pe=rope", "--n_layer=1",
        "--eval_batches=0", "--eval_interval=1", "--max_iters=2")
    assert len(shapes) == 2
    for graph in shapes:
        assert (4, 16) in graph
        sizes = [size for shape in graph for size in shape]
        assert all(type(size) is int for size in sizes), f"a symbol stands for a size: {shapes}"

@pytest.mark.parametrize("ranks, micro_batch, clip", [(1, 3, 0.01), (2, 1, 100.0)])
def test_first_step_is_adamw(rows, tmp_path, ranks, micro_batch, clip):
    """One step against PyTorch's AdamW on the gradients of the whole batch, whose rows have
    different numbers of targets: clipping, warm-up, decay and betas."""
    flags = ["--max_iters=1", "--dropout=0.0", "--warmup_iters=3", "--weight_decay=50.0",
             f"--grad_clip={clip}", "--beta1=0.8", "--beta2=0.9", "--seed=7",
             f"--micro_batch={micro_batch}"]
    after = run(rows, tmp_path / "a", *flags, ranks=ranks)
    torch.manual_seed(7)
    net = GPT(GPTConfig(**model_options(after)))
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

class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch by their names."""
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

def test_what_is_turned_off_costs_nothing(stream, tmp_path, monkeypatch):
    """Without clipping, no gradient is multiplied, but a norm that is not finite still ends the
    run. Without dropout, a step does not set the seed."""
    seeds = []

    def manual_seed(seed, real=torch.manual_seed):
        seeds.append(seed)
        return real(seed)

    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    found = []
    for flags in (["--grad_clip=0", "--dropout=0"], ["--grad_clip=1", "--dropout=0.1"]):
        seeds.clear()
        with Operations() as operations:
            run(stream, tmp_path / flags[0], *flags, "--max_iters=3", "--seed=5")
        found.append((operations.counts["_foreach_mul_"], len(seeds)))
    assert found == [(0, 1), (3, 1 + 3)]
    monkeypatch.setattr(train, "get_total_norm", lambda tensors: torch.tensor(math.inf))
    with pytest.raises(Mistake, match="the gradient became inf before step 1, so"):
        run(stream, tmp_path / "inf", "--grad_clip=0", "--max_iters=3", "--log_interval=1")

def test_dropout_differs_by_step_process_and_seed(tmp_path):
    """All tokens are equal and the learning rate is 0, so only dropout makes losses differ. Two
    processes with the same dropout would have the mean loss of one with half the batch. The masks
    of seed 1 at step t + 1 must not be those of seed 2 at step t."""
    seeds = {train.random_seed(seed, step, rank)
             for seed in range(9) for step in range(9) for rank in range(9)}
    assert len(seeds) == 9**3
    with Writer(tmp_path / "data", 9, "bytes") as writer:
        for split in ("train", "val"):
            writer.write(split, np.zeros(100, dtype=int))
    found = set()
    for ranks in (1, 2):
        run(tmp_path / "data", tmp_path / str(ranks), "--learning_rate=0.0", "--dropout=0.5",
            "--max_iters=3", "--log_interval=1", f"--batch_size={2 * ranks}", ranks=ranks)
        found.update(losses(tmp_path / str(ranks))[0].values())
    assert len(found) == 6

@pytest.mark.parametrize("device, width, given, threads", [
    ("cpu", 128, None, 1), ("cpu", 257, None, 3), ("cpu", 128, "3", 3), ("cuda", 128, None, 3)])
def test_threads_of_small_models(monkeypatch, device, width, given, threads):
    """One on a CPU, because more would wait for each other, unless OMP_NUM_THREADS says otherwise.
    """
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    chosen = [3]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    devices.set_threads(torch.device(device), width)
    assert chosen[-1] == threads

# signals and kills

def handlers():
    return {number: signal.getsignal(number) for number in SIGNALS}

@pytest.fixture
def in_a_terminal():
    """Ctrl-C raises KeyboardInterrupt, even if these tests run behind nohup, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

def test_signals_are_heard_only_while_a_run_trains(stream, tmp_path, monkeypatch, in_a_terminal):
    """One that the shell ignores, as nohup does, stays ignored."""
    monkeypatch.setattr(train, "learning_rate", lambda step, cfg: seen.append(handlers()) or 0.1)
    seen = []
    before = handlers()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(stream, tmp_path / "a", "--max_iters=1")
    ignored = signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert ignored == signal.SIG_IGN == seen[0][signal.SIGHUP]
    assert all(seen[0][number].__name__ == "hear" for number in (signal.SIGTERM, signal.SIGINT))
    assert handlers() == before

@pytest.mark.parametrize("moment", ["step", "evaluation"])
def test_the_stop_button_of_a_notebook(stream, tmp_path, monkeypatch, moment, in_a_terminal):
    """It interrupts the cell with a KeyboardInterrupt, after the run is saved, and the notebook
    lives on. So does a second run, which resumes."""
    name = {"step": "update", "evaluation": "score_sums"}[moment]

    def interrupted(*args, real=getattr(train, name)):
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    words = ["--eval_interval=3", "--resume"]
    run(stream, tmp_path / "a", *words, "--max_iters=2")
    before = handlers()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(train, name, interrupted)
        run(stream, tmp_path / "a", *words, "--max_iters=6")
    assert handlers() == before
    assert read_checkpoint(tmp_path / "a")["step"] == 3
    assert run(stream, tmp_path / "a", *words, "--max_iters=6")["step"] == 6
    assert kept.value.__traceback__

def test_a_plain_run_is_not_resumed_as_a_fine_tuned_one(stream, tmp_path):
    """Nor the other way round, whatever the other run is."""
    run(stream, tmp_path / "a", "--max_iters=1")
    run(stream, tmp_path / "b", "--max_iters=1")
    with pytest.raises(Mistake, match="with --init_from=nothing, not with --init_from=.*b;"):
        run(stream, tmp_path / "a", f"--init_from={tmp_path / 'b'}", "--max_iters=2", "--resume")

def test_training_in_a_thread(stream, tmp_path):
    """As the back end of a notebook or a web page does it, where signals cannot be handled."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, stream, tmp_path / "a", "--max_iters=1").result()
    assert read_checkpoint(tmp_path / "a")["step"] == 1

def slow_evaluation():
    def forward(self, *args, real=GPT.forward, **options):
        if not self.training:
            print("begun", flush=True)
            time.sleep(0.3)
        return real(self, *args, **options)

    GPT.forward = forward

@pytest.mark.parametrize("number, times", [
    (signal.SIGTERM, 20),  # a scheduler and torchrun may both send it, and repeat it
    (signal.SIGINT, 1), (signal.SIGKILL, 1)])
def test_signals_during_an_evaluation(stream, tmp_path, number, times):
    """They end the run at once, because its step is saved before. The evaluation is repeated when
    the run is resumed."""
    out, printed = tmp_path / "a", tmp_path / "printed"
    words = ["--eval_interval=4", "--eval_batches=0", "--resume"]
    run(stream, out, "--max_iters=2", *words)
    (process,) = start(printed, [f"--data={stream}", f"--out_dir={out}", *TINY, *words,
                                 "--max_iters=1000000"], setup=slow_evaluation)
    wait_for(lambda: printed.exists() and "begun" in printed.read_text())
    for _ in range(times):
        subprocess.run(["kill", f"-{number}", str(process.pid)])  # no error if it has just ended
        time.sleep(0.05)  # two signals at the same time are one
    process.join(60)
    assert process.exitcode == -number and read_checkpoint(str(out))["step"] == 4
    assert printed.read_text().count("begun") <= 3  # of the 10 batches
    assert 4 not in [record["step"] for record in losses(out)[1]]
    run(stream, out, *words, "--max_iters=4")
    assert [record["step"] for record in losses(out)[1]].count(4) == 1

def test_a_signal_during_the_last_evaluation(stream, tmp_path):
    """The run ends as the signal would have ended it, so that a shell loop ends too."""
    out, printed = tmp_path / "a", tmp_path / "printed"
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, "--max_iters=0"]
    (process,) = start(printed, words, setup=slow_evaluation)
    wait_for(lambda: printed.exists() and "begun" in printed.read_text())
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == -signal.SIGINT and read_checkpoint(str(out))["step"] == 0
    assert "stopped by a signal" in printed.read_text()

def close_terminal():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)

def test_a_closed_terminal(stream, tmp_path):
    """Nobody can read what it prints, so its signal must still save the run."""
    words = [f"--data={stream}", f"--out_dir={tmp_path / 'a'}", *TINY, "--max_iters=1000000"]
    (process,) = start(tmp_path / "printed", words, setup=close_terminal)
    wait_for(lambda: (tmp_path / "a" / "log.jsonl").exists()
             and '"lr"' in (tmp_path / "a" / "log.jsonl").read_text())
    os.kill(process.pid, signal.SIGHUP)
    process.join(60)
    assert process.exitcode == -signal.SIGHUP
    assert read_checkpoint(str(tmp_path / "a"))["step"] > 0

@pytest.mark.parametrize("numbers, ranks", [([signal.SIGKILL], 1), (SIGNALS, 1), (SIGNALS, 2)])
def test_interrupted_at_random_moments(stream, tmp_path, numbers, ranks):
    """A run is interrupted by signals to one of its processes, and resumed each time. It must end
    as an uninterrupted run does. SIGKILL leaves no time to tidy up, so the checkpoint must be
    complete at every moment, and a kill may have left half a line in the log."""
    out = tmp_path / "cut"
    printed = tmp_path / "printed"
    dice = random.Random(0)
    reached = [0]  # the steps of its checkpoints
    flags = ["--checkpoint_interval=100000", "--eval_interval=100000", "--log_interval=1"]
    if numbers == [signal.SIGKILL]:
        flags[0] = "--checkpoint_interval=2"
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, *flags, "--resume"]
    for n in range(INTERRUPTIONS):
        number = numbers[n % len(numbers)]
        processes = start(printed, [*words, "--max_iters=1000000"], ranks)
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
        reached.append(read_checkpoint(str(out))["step"])
        (out / "ckpt.pt.tmp").write_bytes(b"half")
        with open(out / "log.jsonl", "a") as file:
            file.write('{"step": 2, "lo')
    assert "Traceback" not in printed.read_text()
    assert reached == sorted(reached) and len(set(reached)) > 2
    end = f"--max_iters={reached[-1] + 5}"
    whole = run(stream, tmp_path / "whole", *flags, end, ranks=ranks)
    assert same(whole, run(stream, out, *flags, end, "--resume", ranks=ranks))
    assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]
    logged = {record["step"]: record["loss"] for record in read_records(out / "log.jsonl")
              if "lr" in record}
    assert logged.items() <= losses(tmp_path / "whole")[0].items()
    assert logged.keys() >= set(range(reached[-1] + 1, reached[-1] + 6))

def test_windows(stream, tmp_path, monkeypatch):
    """Without fcntl and SIGHUP, a run is trained and resumed."""
    monkeypatch.setattr(runs, "fcntl", None)
    monkeypatch.delattr(signal, "SIGHUP")
    for steps in (2, 4):
        last = run(stream, tmp_path / "run", "--resume=True", f"--max_iters={steps}")
    assert last["step"] == 4

def test_a_mistake_under_torchrun_is_one_line(tmp_path):
    """The rest is what torchrun prints itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=1", "train.py", *TINY, "--pe=zope", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and 'train.py", line' not in done.stderr
    assert done.stderr.count("train.py: error: pe='zope'") == 1

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
    assert not (tmp_path / "0" / "out").exists()
    assert text.count("Mistake: the processes have different options, data or checkpoints") == 2

# numbers

@pytest.mark.parametrize("checkpoint, ms", [  # of 2 steps, the step after an evaluation at 3, and
    (0, [500, 1000, 500]),  # 2 steps
    (5, [500, 1000, 1000])])  # the step after a checkpoint
def test_speed_in_bfloat16(rows, tmp_path, monkeypatch, capsys, checkpoint, ms):
    """By a clock that advances a second each time it is read. It starts anew after an evaluation,
    and after a checkpoint. Tokens per second and MFU count the 11 targets of a row of 12."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(train, "time", clock)
    saved = run(rows, tmp_path / "a", "--max_iters=6", "--log_interval=2", "--eval_interval=3",
                "--dtype=bfloat16", "--peak_tflops=1e-3", f"--checkpoint_interval={checkpoint}")
    assert {p.dtype for p in saved["model"].values()} == {torch.float32}
    lines = [record for record in read_records(tmp_path / "a" / "log.jsonl") if "lr" in record]
    assert [line["ms"] for line in lines] == ms
    assert lines[1]["tokens_per_s"] == 4 * 11
    net = GPT(GPTConfig(**model_options(saved)))
    assert lines[1]["mfu"] == pytest.approx(net.estimate_mfu(4, 1, 1e9, 11))
    assert "left 0:00:02\n" in capsys.readouterr().out  # at step 4 of 6

def test_nothing_is_read_back_between_log_lines(stream, rows, monkeypatch, tmp_path):
    """PyTorch's meta device has no contents, so whatever reads a number from it raises an error.
    Here it stands in for a GPU. The first error must come at the first log line."""
    for data in (stream, rows):
        steps = []
        monkeypatch.setattr(devices, "pick_device", lambda name: torch.device("meta"))
        monkeypatch.setattr(train, "evaluate", lambda *_: {})
        monkeypatch.setattr(train, "learning_rate", lambda step, cfg: steps.append(step) or 0.1)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it has no meta
        with pytest.raises(RuntimeError, match="meta"):
            run(data, tmp_path / os.path.basename(data), "--max_iters=20", "--log_interval=7")
        assert steps == list(range(7))

def test_learning_rate_schedules():
    """At steps 0 and 3 of the warm-up, at its end, soon after that, half-way and at the end."""
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi / 5)) / 2
    for schedule, *after in (("linear", 0.82, 0.55, 0.1), ("cosine", cosine, 0.55, 0.1),
                             ("constant", 1, 1, 1)):
        cfg = train.TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=14,
                                schedule=schedule)
        rates = [train.learning_rate(step, cfg) for step in (0, 3, 4, 6, 9, 14)]
        assert rates == pytest.approx([0.2, 0.8, 1, *after])

def test_fine_tuning_starts_from_other_weights(stream, tmp_path):
    """From step 0. It takes the model's options, unless they are given, and no others."""
    first = run(stream, tmp_path / "a", "--max_iters=3")
    words = [f"--data={stream}", f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'b'}",
             "--block_size=24", "--device=cpu", "--eval_batches=1", "--schedule=constant"]
    train.main([*words, "--max_iters=0"])
    tuned = read_checkpoint(str(tmp_path / "b"))
    keys = "pe", "block_size", "dropout", "batch_size"
    assert [tuned["config"][key] for key in keys] == ["pope", 24, 0.1, 16]
    assert same(first, tuned) and tuned["step"] == 0
    train.main([*words, "--max_iters=1", "--resume"])
    assert read_checkpoint(str(tmp_path / "b"))["step"] == 1

def test_resuming_when_the_origin_has_moved(stream, tmp_path):
    """It needs only its own checkpoint, keeps the names of its flags, and may decay later. But a
    run that started from another origin is not resumed."""
    for name in ("a/rope", "b/rope"):
        run(stream, tmp_path / name, "--max_iters=1", "--pe=rope", f"--n_layer={len(name) - 5}")
    words = [f"--data={stream}", f"--out_dir={tmp_path / 'tuned'}", "--device=cpu", "--resume",
             "--eval_batches=1", "--dropout=0.3", "--block_size=24"]
    train.main([*words, f"--init_from={tmp_path / 'a/rope'}", "--schedule=constant",
                "--max_iters=2"])
    first = read_checkpoint(str(tmp_path / "tuned"))
    with pytest.raises(Mistake, match="started with .*a/rope, not with .*b/rope; give it the f"):
        train.main([*words, f"--init_from={tmp_path / 'b/rope'}", "--schedule=constant",
                    "--max_iters=4"])
    shutil.move(tmp_path / "a", tmp_path / "moved")
    train.main([*words, f"--init_from={tmp_path / 'moved/rope'}", "--schedule=linear",
                "--decay_iters=2", "--max_iters=4"])
    last = read_checkpoint(str(tmp_path / "tuned"))
    assert last["step"] == 4 and last["config"]["block_size"] == 24
    names = lambda saved: saved["flags"].keys() - {"data", "init_from"}  # noqa: E731
    assert names(first) == {"dropout", "block_size", "schedule"}
    assert names(last) == {"dropout", "block_size", "schedule", "decay_iters", "max_iters"}

def test_a_log_that_cannot_be_written(stream, tmp_path, monkeypatch, capsys):
    """The run goes on, because its checkpoint may still be saved."""
    def refuse(file, record, append=runs.append):
        if "lr" in record:
            raise OSError(28, "No space left on device", file.name)
        append(file, record)

    monkeypatch.setattr(runs, "append", refuse)
    assert run(stream, tmp_path / "a", "--max_iters=2", "--log_interval=1")["step"] == 2
    assert "No space left on device" in capsys.readouterr().out

def test_the_order_of_options_in_fine_tuning(stream, tmp_path, monkeypatch):
    """The model options of the other run override the config file, because its weights need them,
    except for block_size and dropout. Flags override all, and name the run if they differ from
    what it would have been without them."""
    monkeypatch.chdir(tmp_path)
    run(stream, tmp_path / "a", "--max_iters=1", "--pe=rope", "--rope_fraction=0.5")
    (tmp_path / "some.py").write_text("pe = 'alibi'\nrope_fraction = 1.0\nblock_size = 32\n")
    words = [f"--data={stream}", "--init_from=./a", "--out_dir=b", "--max_iters=0", "--device=cpu"]
    for flags, want in (([], ["rope", 0.5, 32, 0.1]),
                        (["--pe=nope", "--dropout=0.3"], ["nope", 0.5, 32, 0.3]),
                        (["--rope_fraction=1.0"], ["rope", 1.0, 32, 0.1])):
        train.main(["some.py", *words, *flags])
        saved = read_checkpoint("b")
        names = "pe", "rope_fraction", "block_size", "dropout"
        assert [saved["config"][name] for name in names] == want
        assert saved["flags"].keys() - {"data", "max_iters"} == {
            "init_from", *(flag[2:].split("=")[0] for flag in flags if "--pe" not in flag)}
        shutil.rmtree("b")

def test_yarn_knows_the_length_of_the_training_before(stream, tmp_path):
    """That is the length of the run that it starts from, or the one which that run knew if it used
    YaRN too."""
    run(stream, tmp_path / "0", "--pe=rope", "--max_iters=1")
    yarn = ["--rope_scaling=yarn", "--rope_factor=2"]
    for steps in (1, 2):  # a run that has no run before it resumes too
        run(stream, tmp_path / "z", "--pe=rope", *yarn, f"--max_iters={steps}", "--resume=True")
    for n, (length, flags, trained) in enumerate([(24, [], 16), (32, yarn, 24), (48, yarn, 24)]):
        words = [f"--data={stream}", f"--init_from={tmp_path / str(n)}", f"--block_size={length}",
                 f"--out_dir={tmp_path / str(n + 1)}", *flags, "--device=cpu", "--eval_batches=1",
                 "--schedule=constant"]
        for steps in (1, 2):
            train.main([*words, f"--max_iters={steps}", "--resume=True"])
        assert read_checkpoint(str(tmp_path / str(n + 1)))["config"]["rope_trained"] == trained

def test_runs_have_directories_of_their_own(stream, tmp_path, monkeypatch):
    """They are named after the flags, apart from those that do not change what the run learns."""
    monkeypatch.chdir(tmp_path)
    sizes = "".join(f"{word[2:].replace('--', '')}\n" for word in TINY if "device" not in word
                    and "schedule" not in word and "pe=" not in word)
    (tmp_path / "some.py").write_text(f"max_iters = 0\ndata = {stream!r}\n{sizes}")
    other = f"--data={shutil.copytree(stream, tmp_path / 'toy@length=5')}"
    for more in ([], ["--pe=rope"], ["--seed=7"], [other, "--seed=7"], ["--learning_rate=0.5"],
                 ["--learning_rate=0.25", "--log_interval=3", "--batch_size=4"]):
        train.main(["some.py", "--device=cpu", *more])
    assert sorted(os.listdir("out")) == [
        "some_learned", "some_learned_data=toy_length=5_seed7", "some_learned_learning_rate=0.25",
        "some_learned_learning_rate=0.5", "some_learned_seed7", "some_rope"]
    long = train.read_options(["some.py", f"--data={'x' * 300}"])[0].out_dir
    assert 100 < len(long) < 200 and long != train.read_options(
        ["some.py", f"--data={'x' * 301}"])[0].out_dir

def test_wandb(stream, tmp_path, monkeypatch):
    """It gets every record, and a resumed run keeps its wandb run."""
    wandb = MagicMock()
    wandb.init.return_value.id = "of-its-own"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (1, 2):
        run(stream, tmp_path / "a", f"--max_iters={steps}", "--log_interval=1",
            "--wandb_project=p", "--resume=True")
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "of-its-own"]
    its_run = wandb.init.return_value
    its_run.define_metric.assert_called_with("*", step_metric="step")
    logged = [values for (values,), _ in its_run.log.call_args_list]
    assert [(values["step"], *values)[:3] for values in logged[:3]] == [
        (0, "step", "val/loss"), (1, "step", "loss"), (1, "step", "val/loss")]

def test_what_may_change_on_resuming(stream, tmp_path):
    """A run is its options, so those that change what it learns must be given again. The data may
    have been renamed, but must have the same contents."""
    words = [f"--data={stream}", *TINY, "--schedule=linear", "--max_iters=4", "--resume"]
    whole = run(stream, tmp_path / "a", *words)
    printed = str(tmp_path / "printed")
    out = tmp_path / "b"
    words.append(f"--out_dir={out}")
    (process,) = start(printed, [*words, "--checkpoint_interval=2"], setup=die_at_step_3)
    process.join(60)
    assert read_checkpoint(str(out))["step"] == 2
    for name, value in dict(learning_rate=0.1, max_iters=5, seed=2, pe="rope", beta1=0.8,
                            dtype="bfloat16", batch_size=8).items():
        with pytest.raises(Mistake, match=f"was trained with --{name}=.*, not --{name}={value}.*; "
                                          f"resume it with .*--init_from={out} --out_dir"):
            train.main([*words, f"--{name}={value}"])
    with pytest.raises(Mistake, match="with --batch_size=4 --learning_rate=0.01, not .*"
                                      r"\(which changes the learning rate from step 0 on\)"):
        train.main([*words, "--learning_rate=0.1", "--batch_size=8"])
    other = write_stream(tmp_path / "other", fraction=0.5)
    with pytest.raises(Mistake, match="was trained with other data, not .*other"):
        train.main([*words, f"--data={other}"])
    renamed = shutil.copytree(stream, tmp_path / "renamed")
    train.main([*words, f"--data={renamed}", "--eval_splits=val,train", "--micro_batch=4",
                "--log_interval=1"])
    assert same(whole, read_checkpoint(str(out)))

def test_a_stable_phase_that_decays_later(stream, tmp_path):
    """The schedule may change on resuming if it is the same for all steps that were taken: a run
    with a constant learning rate becomes longer, and then decays. It is the run that had this
    schedule from the start."""
    decay = ["--schedule=linear", "--warmup_iters=2", "--max_iters=8", "--decay_iters=3"]
    whole = run(stream, tmp_path / "a", *decay)
    for steps in (3, 5):
        run(stream, tmp_path / "b", "--warmup_iters=2", f"--max_iters={steps}", "--resume")
    assert same(whole, run(stream, tmp_path / "b", *decay, "--resume"))
    for flag in ("--decay_iters=4", "--max_iters=9", "--learning_rate=1"):
        with pytest.raises(Mistake, match="was trained with"):
            run(stream, tmp_path / "b", *decay, flag, "--resume")

def test_a_resume_that_finds_nothing_says_so(stream, tmp_path, capsys):
    """A forgotten flag means another directory."""
    run(stream, tmp_path / "a", "--max_iters=1", "--resume")
    assert capsys.readouterr().out.startswith(
        f"--resume found no run in {tmp_path / 'a'}, so this starts one\n")
    run(stream, tmp_path / "a", "--max_iters=1", "--resume")
    assert "--resume found" not in capsys.readouterr().out

def test_a_refused_start_leaves_nothing(stream, tmp_path):
    """Not even an empty log in a directory that was there."""
    for flag in ("--pe=zope", "--batch_size=0", "--vocab_size=3", "--eval_splits=vla"):
        with pytest.raises(ValueError):
            run(stream, tmp_path, flag)
    assert not os.listdir(tmp_path)

def test_a_run_that_still_saves_is_not_read(stream, tmp_path, monkeypatch):
    """The directory is locked before the checkpoint is read, so a job that is started again while
    the one before still saves cannot continue from an older state. The lock stays when the process
    that holds it has opened and closed the log once more."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=2")
    lock = runs.open_log(out)
    assert read_records(out / "log.jsonl")
    words = [f"--data={stream}", f"--out_dir={out}", *TINY, "--max_iters=3", "--resume"]
    (process,) = start(tmp_path / "printed", words)
    process.join(60)
    assert f"another process is training in {out}" in (tmp_path / "printed").read_text()
    assert process.exitcode == 1
    reads = []
    monkeypatch.setattr(runs, "read_checkpoint", reads.append)
    with pytest.raises(Mistake, match="another process is training"):
        run(stream, out, "--max_iters=3", "--resume")
    assert not reads
    lock.close()

def test_a_lost_checkpoint_does_not_take_the_log_along(stream, tmp_path, capsys):
    """A run whose ckpt.pt is gone starts anew with --resume. The old log stays in the file, but the
    lowest loss is that of the new run."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=4", "--eval_interval=2")
    before = read_records(out / "log.jsonl")
    (out / "ckpt.pt").unlink()
    run(stream, out, "--max_iters=1", "--resume", "--seed=2")
    assert read_records(out / "log.jsonl")[: len(before)] == before
    assert [record["step"] for record in runs.read_log(out) if "step" in record] == [
        0, 1]
    best = min(record["val/loss"] for record in runs.read_log(out)
               if "val/loss" in record)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"the lowest val/loss was {best:.4f}")

def die_at_step_3():
    def learning_rate(step, cfg, real=train.learning_rate):
        return real(step, cfg) if step < 3 else os._exit(1)

    train.learning_rate = learning_rate

def test_a_finished_run_is_resumed(stream, tmp_path):
    """It evaluates again, perhaps other splits, but has nothing to save."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=2")
    before = contents(out)["ckpt.pt"], os.stat(out / "ckpt.pt").st_mtime_ns
    run(stream, out, "--max_iters=2", "--resume", "--eval_splits=val,train")
    assert (contents(out)["ckpt.pt"], os.stat(out / "ckpt.pt").st_mtime_ns) == before
    first, *_, again = losses(out)[1]
    assert [record["step"] for record in losses(out)[1]] == [0, 2, 2]
    assert "train/loss" in again and "train/loss" not in first

def test_the_lowest_loss_is_named_at_the_end(stream, tmp_path, capsys):
    """Also if it was before the run was resumed."""
    flags = ["--learning_rate=3", "--eval_interval=1", "--resume"]
    run(stream, tmp_path / "a", *flags, "--max_iters=2")
    run(stream, tmp_path / "a", *flags, "--max_iters=4")
    found = losses(tmp_path / "a")[1]
    best = min(found, key=lambda record: record["val/loss"])
    assert best["step"] < 3
    assert capsys.readouterr().out.endswith(
        f"the lowest val/loss was {best['val/loss']:.4f}, at step {best['step']}\n")

# what identifies a run

def test_flags_and_settings(stream, tmp_path, monkeypatch):
    """Flags are what differs from the config file, apart from the method, the seed and what does
    not change what a run learns. settings changes with what the config file says."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "some.py"
    path.write_text(f"weight_decay = 0.2\ndata = {stream!r}\nschedule = 'linear'\n")
    words = ["some.py", "--pe=rope", "--seed=3", "--weight_decay=0.2", "--log_interval=3",
             "--max_iters=7", "--base=100"]
    first = train.read_options(words)[1]
    assert first["flags"] == dict(max_iters=7, base=100.0)
    found = train.read_options([*words, "--schedule=constant"])[1]
    assert found == dict(flags=dict(base=100.0, schedule="constant"), settings=first["settings"])
    path.write_text(path.read_text() + "# a comment\nlog_interval = 5\n")
    assert train.read_options(words)[1] == first
    path.write_text(path.read_text() + "n_layer = 3\n")
    assert train.read_options(words)[1]["settings"] != first["settings"]

def test_they_are_saved(stream, tmp_path):
    """In the checkpoint and in the log."""
    out = tmp_path / "a"
    saved = run(stream, out, "--max_iters=1", "--pe=rope", "--base=100")
    about = read_records(out / "log.jsonl")[0]
    assert saved["flags"]["base"] == about["flags"]["base"] == 100.0
    assert saved["settings"] == about["settings"]

def test_a_run_of_an_older_version(stream, tmp_path):
    """Its checkpoint has no settings, and options that are gone. It is resumed and evaluated."""
    out = tmp_path / "a"
    saved = run(stream, out, "--max_iters=1")
    saved["config"]["gone"] = 1
    del saved["settings"], saved["flags"], saved["config"]["decay_iters"]
    torch.save(saved, out / "ckpt.pt")
    sample.main([str(out), "--max_new_tokens=2", "--device=cpu"])
    assert run(stream, out, "--max_iters=2", "--resume")["step"] == 2

@pytest.mark.parametrize("more", ["--log_interval=1", "--checkpoint_interval=1", "--max_iters=2"])
def test_a_loss_that_is_not_finite(stream, tmp_path, more):
    """A run that diverges ends with one line, at the next log line or checkpoint, and its weights
    are not saved."""
    out = tmp_path / "a"
    words = [f"--data={stream}", *TINY, "--norm=layernorm", "--grad_clip=0.0", "--pe=cope",
             "--learning_rate=1e38", "--max_iters=50", f"--out_dir={out}", more]
    line = fails("train.py", *words)
    assert re.search("the (loss|weights) became (nan|inf) before step [12], so", line)
    assert not (out / "ckpt.pt").exists()

# disks, memory and files

def test_no_room_for_a_checkpoint(stream, tmp_path):
    """A limit on file size stands in for a full disk. The checkpoint before it stays as it was."""
    out = tmp_path / "a"
    run(stream, out, "--max_iters=1", "--n_embd=256")
    before = contents(out)["ckpt.pt"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run(stream, out, "--resume", "--max_iters=2", "--n_embd=256")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]
    assert contents(out)["ckpt.pt"] == before

def test_a_file_system_without_fsync(stream, tmp_path, monkeypatch):
    """Some network drives refuse it. Any other error, such as a full disk, is one."""
    def fsync(number, code=errno.EINVAL):
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "fsync", fsync)
    assert run(stream, tmp_path / "a", "--max_iters=1")["step"] == 1
    monkeypatch.setattr(os, "fsync", partial(fsync, code=errno.ENOSPC))
    with pytest.raises(OSError, match="refused"):
        run(stream, tmp_path / "b", "--max_iters=1")
