"""The format of data/, its reader, its writer and its commands, against plain arrays.

Text corpora are in test_corpora.py and the tasks are in test_tasks.py.
"""
import importlib
import inspect
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import contents, killed_at, one_line

from data import echo, flip_flop, options, stdlib, write_if_missing
from data.shards import Split, Writer, whole_file
from data.tokenizer import tokenizer

ROOT = Path(__file__).parent.parent
# KILLS=40 pytest tests/test_data.py -k killed    is a longer trial
KILLS = int(os.environ.get("KILLS", 4))
LARGEST_CHUNK = 90  # the most tokens or rows that the fixture `drawn` writes at a time

@pytest.fixture(scope="module", params=range(10))
def drawn(request, tmp_path_factory):
    """A set of random splits, which are written in interleaved chunks of random sizes. `splits` has
    the tokens, the mask and the row_length of each. The tokens and the mask are (n,) if row_length
    is 0, and (n, row_length) otherwise. The mask is None in a set without masks."""
    folder = tmp_path_factory.mktemp("drawn") / "set"
    dice = np.random.default_rng(request.param)
    vocab_size = int(dice.choice([2, 300, 65536]))
    shard_tokens = int(dice.integers(20, 300))
    is_masked = bool(dice.integers(2))
    splits = {}
    for name in ("test", "test_ood", "val")[: dice.integers(1, 4)]:
        row_length = int(dice.choice([0, 2, 13, 29]))
        count = dice.integers(2, 600)
        shape = (count, row_length) if row_length else (count,)
        mask = dice.integers(0, 2, shape) if is_masked else None
        splits[name] = dice.integers(0, vocab_size, shape), mask, row_length
    begins = dict.fromkeys(splits, 0)
    written = b""
    with Writer(folder, vocab_size, "bytes", 1, shard_tokens) as writer:
        while begins:
            name = str(dice.choice(list(begins)))
            tokens, mask, _ = splits[name]
            chunk = slice(begins[name], begins[name] + int(dice.integers(0, LARGEST_CHUNK)))
            writer.write(name, tokens[chunk], None if mask is None else mask[chunk])
            written += tokens[chunk].astype("<u2").tobytes()
            if mask is not None:
                written += mask[chunk].astype("u1").tobytes()
            begins[name] = chunk.stop
            if chunk.stop >= len(tokens):
                del begins[name]
    return SimpleNamespace(folder=folder, seed=request.param, shard_tokens=shard_tokens,
                           splits=splits, checksum=zlib.crc32(written))

def test_what_is_read_is_what_was_written(drawn):
    dice = np.random.default_rng(drawn.seed)
    for name, (tokens, mask, row_length) in drawn.splits.items():
        split = Split(drawn.folder, name)
        rows = len(tokens) if row_length else 0
        assert (split.tokens, split.row_length, split.rows) == (tokens.size, row_length, rows)
        assert all(isinstance(array, np.memmap) for array in split.bins)  # a batch reads little
        flat = tokens.ravel()
        targets = flat if mask is None else np.where(mask.ravel(), flat, -1)
        sizes = [1, 2, int(dice.integers(1, len(flat))), len(flat) - 1]
        for size in [row_length - 1] if row_length else sizes:
            starts = dice.integers(0, len(flat) - size, 20)
            x, y = split.read(starts, size)
            assert x.dtype == y.dtype == np.int64
            places = starts[:, None] + np.arange(size)
            assert np.array_equal(x, flat[places]) and np.array_equal(y, targets[places + 1])

def test_files_are_as_documented(drawn):
    """Shards are raw uint16, of the size that was asked for, and meta.json lists them."""
    files = contents(drawn.folder)
    meta = json.loads(files.pop("meta.json"))
    assert list(meta["shards"]) == [name for name in files if name.endswith(".bin")]
    assert meta["checksum"] == drawn.checksum
    for split, (tokens, mask, row_length) in drawn.splits.items():
        names = [name for name in meta["shards"] if name.rpartition("_")[0] == split]
        sizes = [meta["shards"][name] for name in names]
        assert names == [f"{split}_{i:06d}.bin" for i in range(len(names))]
        assert b"".join(files[name] for name in names) == tokens.astype("<u2").tobytes()
        assert meta["loss"] == ("all" if mask is None else "mask")
        if mask is not None:
            masks = [files[name.replace(".bin", ".loss")] for name in names]
            assert b"".join(masks) == mask.astype("u1").tobytes()
        assert meta["row_length"].get(split, 0) == row_length
        if row_length:  # a shard has as many whole rows as fit, but at least one
            full = max(drawn.shard_tokens // row_length, 1) * row_length
            assert set(sizes[:-1]) <= {full} and sizes[-1] <= full
        else:  # a shard ends with the write that fills it
            assert all(0 <= size - drawn.shard_tokens < LARGEST_CHUNK for size in sizes[:-1])

def test_evaluation_windows_share_no_target(drawn):
    dice = random.Random(drawn.seed)
    for name, (tokens, _, row_length) in drawn.splits.items():
        split = Split(drawn.folder, name)
        size = row_length - 1 if row_length else dice.randint(1, tokens.size - 1)
        every = split.windows(size)
        assert len(every) == (len(tokens) if row_length else (tokens.size - 1) // size)
        for count in (1, 2, dice.randint(1, 50), 10**6):
            starts = split.windows(size, count)
            assert len(starts) == min(count, len(every)) and starts[0] == 0
            gaps = np.diff(starts)
            assert (gaps >= size).all() and starts[-1] + size < tokens.size
            if row_length:
                assert not (starts % row_length).any()
            elif len(starts) > 1:  # they are spread evenly, from end to end
                assert starts[-1] == tokens.size - 1 - size and np.ptp(gaps) <= 1

def test_batches_depend_only_on_seed_and_step(drawn):
    """Otherwise a resumed run, or one on several machines, would train on other data."""
    dice = random.Random(drawn.seed)
    for name, (tokens, _, row_length) in drawn.splits.items():
        size = (row_length or dice.randint(2, tokens.size)) - 1
        batch_size = dice.choice([4, 8, 24])
        split = Split(drawn.folder, name)
        straight = [split.batch(step, batch_size, size, drawn.seed) for step in range(6)]
        others = [split.batch(step, batch_size, size, drawn.seed + 1) for step in range(6)]
        assert tokens.size - size < 9 or str(others) != str(straight)
        resumed = Split(drawn.folder, name)
        for step, world in itertools.product((5, 2, 3, 0), (1, 2, 4)):
            ranks = [resumed.batch(step, batch_size, size, drawn.seed, rank, world)
                     for rank in range(world)]
            for whole, parts in zip(straight[step], zip(*ranks)):
                assert np.array_equal(np.concatenate(parts), whole)

@pytest.mark.parametrize("batch_size", [1, 50])
def test_epochs_hold_every_row_once(tmp_path, batch_size):
    rows = np.arange(23 * 6).reshape(23, 6)
    with Writer(tmp_path / "set", 200, "bytes", shard_tokens=25) as writer:
        writer.write("train", rows)
    split = Split(tmp_path / "set", "train")
    steps = -(-6 * 23 // batch_size)
    x = np.concatenate([split.batch(step, batch_size, 100, seed=9)[0] for step in range(steps)])
    epochs = x[: 6 * 23, 0].reshape(6, 23)
    assert (np.sort(epochs) == rows[:, 0]).all()
    assert len(np.unique(epochs, axis=0)) == 6  # each has an order of its own

def test_the_fingerprint_knows_where_a_split_ends(tmp_path):
    found = set()
    for border in (6, 4):
        folder = tmp_path / str(len(found)) / str(border)
        with Writer(folder, 10, "bytes") as writer:
            writer.write("train", np.arange(border))
            writer.write("val", np.arange(border, 10))
        found.add(Split(folder, "val").fingerprint)
    assert len(found) == 2

def test_a_damaged_set_is_not_read(tmp_path):
    """Otherwise a run would continue on a part of the data, or with shifted masks."""
    values = np.random.default_rng(0).integers(0, 500, 1000)
    with Writer(tmp_path / "set", 500, "bytes", shard_tokens=200) as writer:
        for chunk in values.reshape(-1, 40):
            writer.write("train", chunk, np.ones(40))
    for name in ("train_000003.bin", "train_000003.loss"):
        path = tmp_path / "set" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError) as error:
            Split(tmp_path / "set", "train")
        one_line(error, name, f"has {len(whole) - 1} bytes instead of {len(whole)}", "delete")
        path.write_bytes(whole)
    with pytest.raises(AssertionError, match="start at -1"):
        Split(tmp_path / "set", "train").read([3, -1], 60)

@pytest.mark.parametrize("tokens, vocab_size, part", [
    ([-1, 5], 9, "-1 to 5"), ([9], 9, "9 to 9"), ([0], 65537, "has 65537 tokens"),
    ([], 9, "got no tokens")])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path, tokens, vocab_size, part):
    """Otherwise uint16 would hold other tokens, or a model would have no embedding of them."""
    with pytest.raises(ValueError) as error, Writer(tmp_path / "a", vocab_size, "bytes") as writer:
        writer.write("train", tokens)
    one_line(error, part)
    assert not list(tmp_path.iterdir())

def overwrite(path):
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()  # otherwise a kill would leave the temporary file empty
        file.write(b" content")

@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_kill_leaves_a_complete_file(tmp_path, moment):
    """os.fsync is the first call that a kill can precede, and os.replace is the second."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    was_killed = killed_at(moment, overwrite, path)
    assert was_killed == (moment < 3)
    assert path.read_bytes() == (b"old" if was_killed else b"new content")
    overwrite(path)  # what the kill has left does not matter
    assert contents(tmp_path) == {"file": b"new content"}

def test_an_exception_leaves_the_old_file(tmp_path):
    """KeyboardInterrupt is not an Exception, and must not leave a temporary file either."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for kind in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(kind), whole_file(str(path)) as file:
            file.write(b"new")
            raise kind
        assert contents(tmp_path) == {"file": b"old"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), whole_file(tmp_path / "folder") as file:  # it cannot be replaced
        file.write(b"new")
    assert contents(tmp_path) == {"file": b"old", "folder": None}

def test_a_full_disk_is_one_line(tmp_path):
    """It names the file, and nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a larger file does not fit
    try:
        with pytest.raises(OSError) as error:
            flip_flop.prepare(tmp_path / "set", length=64, train=2000, val=9, sparse=9, dense=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one_line(error, "File too large: ", "dense_000000.bin")
    assert not list(tmp_path.iterdir())

SMALL = "flip_flop@train=2000,length=64,val=9,sparse=9,dense=9"
WRITES = "import sys, data; data.__file__ = sys.argv[1]; data.write_if_missing(sys.argv[2])"

def writer(folder):
    """Starts a process that writes the set SMALL, as train.py does."""
    words = [sys.executable, "-c", WRITES, folder / "data.py", SMALL]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The files of the set SMALL."""
    folder = tmp_path_factory.mktemp("small")
    assert writer(folder).wait(60) == 0
    assert [path.name for path in folder.iterdir()] == [SMALL]
    return contents(folder / SMALL)

def test_two_writers_at_once(tmp_path, small):
    """The set of the first one stays, and the other one is content with it."""
    processes = [writer(tmp_path) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
    assert contents(tmp_path / SMALL) == small
    assert [path.name for path in tmp_path.iterdir()] == [SMALL]

def test_a_missing_stream_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))
    write_if_missing("stdlib")
    assert (tmp_path / "stdlib" / "meta.json").exists()

def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path, small):
    dice = random.Random(0)
    for attempt in range(KILLS):
        process = writer(tmp_path)
        if attempt < KILLS - 1:
            time.sleep(dice.uniform(0.2, 1))
            process.kill()
        process.communicate(timeout=60)
        if (tmp_path / SMALL).exists():
            assert contents(tmp_path / SMALL) == small
            shutil.rmtree(tmp_path / SMALL)
        else:
            assert process.returncode != 0

def test_a_link_to_another_disk(tmp_path):
    """The set is written beside the folder that the link names, and gets its place."""
    (tmp_path / "big").mkdir()
    (tmp_path / "small").symlink_to(tmp_path / "big" / "set")  # which is not there yet
    with Writer(tmp_path / "small", 9, "bytes") as writer:
        assert writer.part.parent == tmp_path / "big"
        writer.write("train", [1, 2, 3])
    assert Split(tmp_path / "small", "train").tokens == 3
    assert not list(tmp_path.rglob("*.part"))

# tokenizers of sets, commands, and the standard library

WITH_OPTIONS = sorted(path.stem for path in (ROOT / "data").glob("*.py")
                      if "\ndef prepare(" in path.read_text())

@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_describes_every_option(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")  # argparse may break a line within a name
    script = importlib.import_module(f"data.{name}")
    with pytest.raises(SystemExit):
        options(script.prepare, ["--help"], script.__doc__)
    printed = " ".join(capsys.readouterr().out.split())
    _, *arguments = inspect.signature(script.prepare).parameters.values()
    for argument in arguments:
        default = re.escape(repr(argument.default))
        assert re.search(rf"--{argument.name} [A-Z]+ [^\[]+ \[{default}\]", printed)

def test_bytes_and_symbols_round_trip():
    bytewise = tokenizer("bytes")
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(f"{text}<|endoftext|>b") == [*text.encode(), 256, 98]
    assert bytewise.decode([*text.encode(), 256, 98, 257, 60000]) == f"{text}<|endoftext|>b"
    symbols = tokenizer({"symbols": ["w", "r", "i", "0", "1"]})
    assert symbols.encode("w 1  i 0\nr 1") == [0, 4, 2, 3, 1, 4]
    assert symbols.decode([0, 4, 2, 3, 1, 4, 5]) == "w 1 i 0 r 1"  # no symbol has the id 5

def test_stdlib_splits_by_file(tmp_path, monkeypatch, capsys):
    library = tmp_path / "site-packages"  # a folder of this name is skipped inside the library
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "x.py").write_bytes(b"other")
    (library / "notes.txt").write_bytes(b"other")
    want = {"train": [], "val": []}
    for i in range(25):
        content = f"# файл {i}\n".encode() + bytes([255, 0, 13, 10])
        (library / f"m{i:02d}.py").write_bytes(content)
        want["val" if i % 10 == 9 else "train"] += [*content, 256]
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    stdlib.prepare(tmp_path / "out")
    for split, tokens in want.items():
        written = np.fromfile(tmp_path / "out" / f"{split}_000000.bin", "<u2")
        assert written.tolist() == tokens
    sizes = f"train {len(want['train'])} tokens, val {len(want['val'])} tokens"
    assert f"wrote {tmp_path / 'out'}: {sizes}" in capsys.readouterr().out
    meta = Split(tmp_path / "out", "val").meta
    assert (meta["vocab_size"], meta["separator"]) == (257, 256)

def test_echoes(tmp_path, monkeypatch):
    """Rows of train are pieces of text in which spans come again. In the other splits, the last 32
    bytes also stand as far back as the name says, or nowhere else, and all else is the same."""
    random = np.random.default_rng(0)
    texts = {split: random.integers(0, 256, 500_000).astype(np.uint16)
             for split in ("train", "val")}
    monkeypatch.setattr(echo, "files", lambda: texts.items())
    echo.prepare(tmp_path / "set", train=40, test=7)
    train = Split(tmp_path / "set", "train")
    assert (train.rows, train.row_length) == (40, 129)
    copied = []  # in random bytes, a long copy is no accident
    for start in train.windows(128).tolist():
        x, y = train.read([start], 128)
        row = bytes(np.append(x[0], y[0, -1]).astype(np.uint8))
        copied += [row.find(row[i : i + 8]) < i for i in range(8, 121)]
        assert (y != -1).all()
    assert 0.3 < np.mean(copied) < 0.9

    rows = {}
    for size, distances in echo.DISTANCES.items():
        for split in ["new", *(f"at{distance}" for distance in distances)]:
            found = Split(tmp_path / "set", f"{split}_{size}")
            assert (found.rows, found.row_length) == (7, size + 1)
            x, y = found.read(found.windows(size), size)
            assert ((y != -1) == (np.arange(size) >= size - 24)).all()
            rows[split, size] = np.concatenate((x, y[:, -1:]), 1)
    text = bytes(texts["val"].astype(np.uint8))
    for (split, size), found in rows.items():
        new = rows["new", size]
        assert (new == rows["new", 1024][:, -size - 1 :]).all()
        for row, plain in zip(found, new):
            end = bytes(row[-32:].astype(np.uint8))
            assert end in text and bytes(plain[:-32].astype(np.uint8)) in text
            places = [m.start() for m in re.finditer(re.escape(end), bytes(row.astype(np.uint8)))]
            want = [size - 31]
            if split != "new":
                want.insert(0, size - 31 - int(split[2:]))
                changed = np.flatnonzero(row != plain)
                assert want[0] <= changed.min() and changed.max() < want[0] + 32
            assert places == want
