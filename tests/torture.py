"""
Ends training in the ways that take minutes or a file system of one's own, and checks that nothing is lost:

    python tests/torture.py [kills] [disk] [lock] [signal] [sync]    all of them by default, ten minutes

kills    60 times SIGKILL at random moments, then the same weights as without
disk     a full disk, a read-only one and a run directory that vanishes (needs the right to mount a tmpfs)
lock     two runs in one directory, and a torchrun that is killed and leaves its ranks behind
signal   SIGTERM to torchrun in the middle of an evaluation that takes about its 30 seconds of grace
sync     the order of write, fsync and rename as the kernel sees it (needs strace)

Each prints one line with what it counted, or stops with an AssertionError.
"""
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.chdir(ROOT)

from conftest import TINY  # noqa: E402

import train  # noqa: E402
from data.shards import Writer  # noqa: E402

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def make_data(folder):
    writer, dice = Writer(folder), random.Random(0)
    for split, n in (("train", 50_000), ("val", 200_000)):
        writer.write(split, [dice.randrange(29) for _ in range(n)])
    writer.finish(vocab_size=29, tokenizer="bytes")


def words(folder, out, *flags):
    return [f"--data={folder / 'data'}", f"--out_dir={out}", *TINY, *flags]


def start(*command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_here(argv):
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(argv)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def step(out):
    return train.read_checkpoint(str(out))["step"] if (out / "ckpt.pt").exists() else 0


def same(a, b):
    a, b = (train.read_checkpoint(str(out)) for out in (a, b))
    return a["step"] == b["step"] and all(a["model"][key].equal(b["model"][key]) for key in a["model"])


def kills(folder):
    out, dice, reached = folder / "kills", random.Random(1), []
    flags = ["--checkpoint_interval=2", "--eval_interval=1000000", "--log_interval=100"]
    endless = words(folder, out, *flags, "--resume=True", "--max_iters=1000000")
    command = [sys.executable, "train.py", *endless]
    began = time.monotonic()
    first = start(*command)
    wait_for(lambda: step(out) > 0)
    first.kill()
    first.communicate()
    took = time.monotonic() - began  # from the start to the first checkpoint
    for _ in range(60):
        process = start(*command)
        time.sleep(dice.uniform(0.5, 1.5) * took)
        process.kill()
        errors = process.communicate()[1]
        assert not errors, errors
        reached.append(step(out))
        for line in (out / "log.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)
    assert reached == sorted(reached)
    end = f"--max_iters={reached[-1] + 5}"
    run_here(words(folder, out, *flags, "--resume=True", end))
    run_here(words(folder, folder / "whole", *flags, end))
    assert same(out, folder / "whole")
    return f"60 kills, {len(set(reached))} different checkpoints up to step {reached[-1]}, no bit lost"


def disk(folder):
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        flags = ["--checkpoint_interval=5", "--eval_interval=1000000", "--max_iters=20"]
        command = [sys.executable, "train.py", *words(folder, small / "run", *flags)]
        filler = small / "filler"
        run_here([*command[2:], "--max_iters=5"])
        before = (small / "run" / "ckpt.pt").read_bytes()
        filler.write_bytes(bytes(shutil.disk_usage(small).free - len(before) // 2))  # no room for a second
        done = subprocess.run([*command, "--resume=True"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        full = done.stderr
        assert "No space left on device" in full, full
        assert (small / "run" / "ckpt.pt").read_bytes() == before
        assert sorted(os.listdir(small / "run")) == ["ckpt.pt", "log.jsonl"]
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        done = subprocess.run([*command, "--resume=True"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert "Read-only file system" in done.stderr
        subprocess.run(["mount", "-o", "remount,rw", small], check=True)
        done = subprocess.run([*command, "--resume=True"], capture_output=True, text=True)
        assert done.returncode == 0 and step(small / "run") == 20, done.stderr
    finally:
        subprocess.run(["umount", small])
    out = folder / "vanishes"
    forever = words(folder, out, *flags[:2], "--max_iters=1000000")
    process = start(sys.executable, "train.py", *forever, "--log_interval=1000")
    wait_for(lambda: step(out) > 0)
    shutil.rmtree(out)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and errors.count("\n") == 1, errors
    assert "No such file or directory" in errors, errors
    return f"full disk: {full.strip()!r}; one line each if read-only or vanished; the run went on afterwards"


def lock(folder):
    out = folder / "lock"
    flags = ["--checkpoint_interval=5", "--eval_interval=1000000", "--max_iters=1000000", "--resume=True"]
    command = words(folder, out, *flags)
    first = start(sys.executable, "train.py", *command)
    wait_for(lambda: step(out) > 0)
    done = subprocess.run([sys.executable, "train.py", *command], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "another process is training in" in done.stderr
    first.kill()
    first.communicate()
    torchrun = subprocess.Popen([*TORCHRUN, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    held = step(out)
    wait_for(lambda: step(out) > held)
    ps = ["ps", "-o", "pid=", "--ppid", str(torchrun.pid)]
    ranks = subprocess.run(ps, capture_output=True, text=True).stdout.split()
    os.kill(torchrun.pid, signal.SIGKILL)  # torchrun alone
    torchrun.wait()
    time.sleep(1)
    done = subprocess.run([sys.executable, "train.py", *command], capture_output=True, text=True)
    for rank in ranks:
        os.kill(int(rank), signal.SIGKILL)
    assert done.returncode == 1 and "another process is training in" in done.stderr, (done.returncode, done.stderr)
    time.sleep(1)
    run_here([*command, f"--max_iters={step(out) + 1}"])
    return "a second run and a restart beside orphaned ranks were refused; the lock went with the processes"


def signal_in_evaluation(folder):
    out = folder / "signal"
    flags = ["--eval_interval=50", "--eval_batches=0", "--batch_size=2", "--log_interval=1"]
    process = subprocess.Popen([*TORCHRUN, *words(folder, out, *flags)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 50/"):
            time.sleep(3)  # the evaluation of step 50 has begun
            break
    began = time.monotonic()
    process.terminate()
    seen.append(process.stdout.read())
    process.wait(120)
    took = time.monotonic() - began
    assert step(out) == 50 and took < 25, (step(out), took, seen)
    assert "stopped by a signal at step 50" in "".join(seen)
    return f"torchrun ended {took:.1f} s after SIGTERM in a long evaluation, with the checkpoint of step 50"


def sync(folder):
    out, trace = folder / "sync", folder / "trace"
    strace = ["strace", "-f", "-y", "-e", "trace=fsync,rename,renameat,renameat2", "-o", trace]
    command = [sys.executable, "train.py", *words(folder, out, "--max_iters=1")]
    subprocess.run([*strace, *command], check=True, capture_output=True)
    calls = [line for line in trace.read_text().splitlines() if str(out) in line]
    names = [re.search(r"(fsync|rename)\w*\(", line)[1] for line in calls]
    assert names == 2 * ["fsync", "rename", "fsync"], calls  # before the last evaluation and after
    assert ".tmp" in calls[0] and "ckpt.pt" not in calls[2], calls
    return "the kernel saw fsync of the file, rename, fsync of the directory"


TESTS = dict(kills=kills, disk=disk, lock=lock, signal=signal_in_evaluation, sync=sync)

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(TESTS)
    if not set(chosen) <= TESTS.keys():
        sys.exit(__doc__.strip())
    with tempfile.TemporaryDirectory() as temporary:
        make_data(Path(temporary) / "data")
        for name in chosen:
            print(f"{name}: {TESTS[name](Path(temporary))}", flush=True)
