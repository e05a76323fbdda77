"""What several test files share: two small data sets, the flags of a small run, the pictures that
would be saved, and what a script ends with."""
import os

# The models are tiny, so more threads would only wait for each other. This is set before torch is
# imported, and the processes that tests start inherit it
os.environ["OMP_NUM_THREADS"] = "1"

import itertools
import multiprocessing
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from data.shards import Writer

TINY = ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4",
        "--device=cpu", "--learning_rate=1e-2", "--schedule=constant", "--dropout=0.1",
        "--eval_batches=2", "--pe=pope"]
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP

def write_stream(folder, fraction=None):
    """Writes a stream of 5000 tokens with a pattern to learn. If a fraction is given, then only
    that share of them carries loss."""
    rng = np.random.default_rng(0)
    symbols = [f"s{i}" for i in range(29)]
    with Writer(folder, 29, {"symbols": symbols}, separator=0) as writer:
        for split, n in (("train", 5000), ("val", 600)):
            tokens = (np.arange(n) * 7 + rng.integers(0, 3, n)) % 29
            writer.write(split, tokens, None if fraction is None else rng.random(n) < fraction)
    return str(folder)

@pytest.fixture(scope="session")
def stream(tmp_path_factory):
    return write_stream(tmp_path_factory.mktemp("data") / "stream")

@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Rows of 12 tokens. The number of targets that carry loss varies. The first row of val has
    none."""
    folder = tmp_path_factory.mktemp("data") / "rows"
    rng = np.random.default_rng(1)
    with Writer(folder, 9, {"symbols": list("abcdefghi")}) as writer:
        for split, n in (("train", 64), ("val", 10)):
            tokens = rng.integers(0, 9, (n, 12))
            loss = rng.random((n, 12)) < rng.random((n, 1)) ** 3
            loss[:, -1] = True
            loss[0] &= split == "train"
            writer.write(split, tokens, loss)
    return str(folder)

@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be saved."""
    pytest.importorskip("matplotlib")
    from eval import draw  # here, because most tests also pass without eval/

    found = []
    monkeypatch.setattr(draw, "save", lambda figure, path: found.append(figure))
    return found

def fails(script, *words):
    """The one line that a script ends with: sys.exit(text) prints it and gives status 1."""
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        runpy.run_path(script, run_name="__main__")
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    return stop.value.code

def killed_at(moment, function, *arguments, **options):
    """Calls a function in a process that kills itself at call number `moment` to the functions that
    make files durable or give them their names. Returns whether it did."""
    calls = itertools.count(1)

    def or_die(function):
        def call(*arguments):
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*arguments)
        return call

    def run():
        for name in ("fsync", "replace", "rename"):
            setattr(os, name, or_die(getattr(os, name)))
        function(*arguments, **options)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0

def contents(folder):
    """{name: bytes} of the files in a folder and below it, and {name: None} of the folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(Path(folder).rglob("*"))}

def one_line(error, *parts):
    """The exception's text is one line that holds these parts."""
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in parts), text
