"""The format of data/, its reader, its writer and its commands, against plain arrays.

Text corpora are in test_corpora.py, the tasks in test_tasks.py and refusals in test_bad_input.py.
"""
import itertools
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, one_line

from data import command, flip_flop, prepare_if_missing, stdlib
from data.shards import Split, Writer
from data.text import tokenizer

ROOT = Path(__file__).parent.parent
LARGEST_CHUNK = 90  # how many tokens or rows a drawn set gets in one write

def stream(folder, loss=None):
    """Writes a stream of one split in several shards, and returns its tokens."""
    values = np.random.default_rng(0).integers(0, 500, 1000)
    with Writer(folder, shard_tokens=170) as writer:
        for i in range(0, 1000, 37):  # the last chunk is shorter
            mask = None if loss is None else loss[i : i + 37]
            writer.write("train", values[i : i + 37], mask)
        writer.finish(vocab_size=500, tokenizer="bytes")
    return values

def drawn_set(folder, seed):
    """Writes a set of drawn splits in drawn chunks, one split's among another's. Returns its
    shard_tokens and {split: (tokens, mask)}, both (n,) of a stream and (n, row_length) of rows. The
    mask is None in a set without masks."""
    dice = np.random.default_rng(seed)
    vocab_size = int(dice.choice([2, 300, 65536]))
    shard_tokens = int(dice.integers(20, 300))
    is_masked = bool(dice.integers(2))
    splits = {}
    for split in ("test", "test_ood", "val")[: dice.integers(1, 4)]:
        shape = [int(dice.integers(2, 600))]
        if dice.integers(2):
            shape.append(int(dice.integers(2, 30)))
        mask = dice.integers(0, 2, shape) if is_masked else None
        splits[split] = dice.integers(0, vocab_size, shape), mask
    begins = dict.fromkeys(splits, 0)
    with Writer(folder, shard_tokens) as writer:
        while begins:
            split = str(dice.choice(list(begins)))
            tokens, mask = splits[split]
            chunk = slice(begins[split], begins[split] + int(dice.integers(0, LARGEST_CHUNK)))
            writer.write(split, tokens[chunk], None if mask is None else mask[chunk])
            begins[split] = chunk.stop
            if chunk.stop >= len(tokens):
                del begins[split]
        writer.finish(vocab_size, tokenizer="bytes", separator=1)
    return shard_tokens, splits

def row_length_of(tokens):
    return tokens.shape[1] if tokens.ndim == 2 else 0

# reading

@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_was_written(tmp_path, seed):
    _, splits = drawn_set(tmp_path / "set", seed)
    dice = np.random.default_rng(seed)
    for name, (tokens, mask) in splits.items():
        split = Split(tmp_path / "set", name)
        row_length = row_length_of(tokens)
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

@pytest.mark.parametrize("seed", range(12))
def test_files_are_as_documented(tmp_path, seed):
    """Raw uint16 in shards of the size that was asked for, which meta.json lists."""
    shard_tokens, splits = drawn_set(tmp_path / "set", seed)
    files = contents(tmp_path / "set")
    meta = json.loads(files.pop("meta.json"))
    assert list(meta["shards"]) == [name for name in files if name.endswith(".bin")]
    for split, (tokens, mask) in splits.items():
        names = [name for name in meta["shards"] if name.rpartition("_")[0] == split]
        sizes = [meta["shards"][name] for name in names]
        assert names == [f"{split}_{i:06d}.bin" for i in range(len(names))]
        assert [len(files[name]) for name in names] == [2 * size for size in sizes]
        assert b"".join(files[name] for name in names) == tokens.astype("<u2").tobytes()
        assert meta["loss"] == ("all" if mask is None else "mask")
        if mask is not None:
            masks = [files[name.replace(".bin", ".loss")] for name in names]
            assert [len(part) for part in masks] == sizes
            assert b"".join(masks) == mask.astype("u1").tobytes()
        row_length = row_length_of(tokens)
        assert meta["row_length"].get(split, 0) == row_length
        if row_length:  # as many whole rows as fit, but at least one
            full = max(shard_tokens // row_length, 1) * row_length
            assert set(sizes[:-1]) <= {full} and sizes[-1] <= full
        else:  # a shard ends with the write that fills it
            assert all(0 <= size - shard_tokens < LARGEST_CHUNK for size in sizes[:-1])

@pytest.mark.parametrize("seed", range(8))
def test_evaluation_windows_share_no_target(tmp_path, seed):
    _, splits = drawn_set(tmp_path / "set", seed)
    dice = random.Random(seed)
    for name, (tokens, _) in splits.items():
        split = Split(tmp_path / "set", name)
        row_length = row_length_of(tokens)
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
            elif len(starts) > 1:  # spread evenly, from end to end
                assert starts[-1] == tokens.size - 1 - size and np.ptp(gaps) <= 1

@pytest.mark.parametrize("seed", range(8))
def test_batches_depend_on_seed_and_step_alone(tmp_path, seed):
    """Otherwise a resumed run, or one on several machines, would train on other data."""
    _, splits = drawn_set(tmp_path / "set", seed)
    dice = random.Random(seed)
    for name, (tokens, _) in splits.items():
        size = (row_length_of(tokens) or dice.randint(2, tokens.size)) - 1
        batch_size = dice.choice([4, 8, 24])
        split = Split(tmp_path / "set", name)
        straight = [split.batch(step, batch_size, size, seed) for step in range(6)]
        others = [split.batch(step, batch_size, size, seed + 1) for step in range(6)]
        assert tokens.size - size < 9 or str(others) != str(straight)
        resumed = Split(tmp_path / "set", name)
        for step, world in itertools.product((5, 2, 3, 0), (1, 2, 4)):
            ranks = [resumed.batch(step, batch_size, size, seed, rank, world)
                     for rank in range(world)]
            for whole, parts in zip(straight[step], zip(*ranks)):
                assert np.array_equal(np.concatenate(parts), whole)

@pytest.mark.parametrize("batch_size", [1, 8, 50])
def test_epochs_hold_every_row_once(tmp_path, batch_size):
    rows = np.arange(23 * 6).reshape(23, 6)
    with Writer(tmp_path, 25) as writer:
        writer.write("train", rows)
        writer.finish(vocab_size=200, tokenizer="bytes")
    split = Split(tmp_path, "train")
    steps = -(-6 * 23 // batch_size)
    x = np.concatenate([split.batch(step, batch_size, 100, seed=9)[0] for step in range(steps)])
    assert np.array_equal(x, rows[x[:, 0] // 6, :-1])
    epochs = x[: 6 * 23, 0].reshape(6, 23)
    assert (np.sort(epochs) == rows[:, 0]).all()
    assert len(np.unique(epochs, axis=0)) == 6  # each has an order of its own

def test_random_windows_begin_everywhere(tmp_path):
    with Writer(tmp_path, 30) as writer:
        writer.write("train", np.arange(101))  # a token is its offset, so x[0] is the start
        writer.finish(vocab_size=101, tokenizer="bytes")
    split = Split(tmp_path, "train")
    starts = [split.batch(step, 96, 5, seed=0)[0][:, 0] for step in range(20)]
    assert set(np.concatenate(starts).tolist()) == set(range(96))

@pytest.mark.parametrize("name", ["train_000003.bin", "train_000003.loss"])
def test_a_damaged_shard_is_not_read(tmp_path, name):
    """Otherwise a run would continue on a part of the data, or with shifted masks."""
    stream(tmp_path, loss=np.ones(1000))
    path = tmp_path / name
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            Split(tmp_path, "train")
        one_line(error, name, f"has {len(content)} bytes instead of {len(whole)}", "delete",
                 f"python -m data.NAME --out={tmp_path}")
    path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        Split(tmp_path, "train")

def test_token_beyond_the_vocabulary(tmp_path):
    stream(tmp_path)
    shard = np.memmap(tmp_path / "train_000002.bin", dtype="<u2", mode="r+")
    shard[380 - 2 * 185] = 500
    shard.flush()
    split = Split(tmp_path, "train")
    split.read([320, 381], 59)
    for start in (320, 380):  # as the last target, and as the first input
        with pytest.raises(ValueError) as error:
            split.read([0, start], 60)
        one_line(error, str(tmp_path), "token 500", "vocab_size=500")

# writing

@pytest.mark.parametrize("tokens, part", [
    ([-1, 5], "-1 to 5"), ([65536], "65536 to 65536"), ([], "got no tokens")])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path, tokens, part):
    """Otherwise uint16 would hold other tokens than those that were written."""
    with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
        writer.write("train", tokens)
        writer.finish(vocab_size=65536, tokenizer="bytes")
    one_line(error, part)
    assert not (tmp_path / "a").exists()

def test_a_set_has_its_name_when_it_is_complete(tmp_path):
    unfinished = tmp_path / "set.part"
    with Writer(tmp_path / "set", 20) as writer:
        writer.write("train", np.ones((9, 6)), np.ones((9, 6)))
        assert len(contents(unfinished)) == 6 and not (tmp_path / "set").exists()
    # what an error or a kill leaves does not get into the next set
    for name in ("train_000001.bin.tmp", "meta.json.tmp", "val_000007.loss"):
        (unfinished / name).write_bytes(b"{")
    stream(tmp_path / "set")
    stream(tmp_path / "direct")
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")
    assert not unfinished.exists()
    with pytest.raises(FileExistsError, match="is complete; delete it"):
        flip_flop.prepare(tmp_path / "set", train=3)
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")

def test_files_are_on_the_disk_before_the_set_has_its_name(tmp_path, monkeypatch):
    """Otherwise a power cut could leave a set with half-written files."""
    synced = {}  # inode: size
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def checking_rename(source, target):
        statuses = [path.stat() for path in Path(source).iterdir()]
        assert len(statuses) == 13
        assert all(synced[status.st_ino] == status.st_size for status in statuses)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", checking_rename)
    stream(tmp_path / "set", loss=np.ones(1000))
    assert len(contents(tmp_path / "set")) == 13

def test_a_full_disk_is_one_line(tmp_path):
    """What is saved stays, and the next start succeeds."""
    how = dict(length=64, train=2000, val=9, sparse=9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a larger file does not fit
    try:
        with pytest.raises(OSError) as error:
            flip_flop.prepare(tmp_path / "set", **how, dense=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = tmp_path / "set.part" / "dense_000000.bin"
    one_line(error, str(path), "make room there or use --out")
    assert "train_000000.bin" in contents(tmp_path / "set.part") and not path.exists()
    flip_flop.prepare(tmp_path / "set", **how, dense=9)
    assert Split(tmp_path / "set", "dense").rows == 9 and not (tmp_path / "set.part").exists()

# several writers of one set

PREPARES = "import sys, data; data.prepare_if_missing(*sys.argv[1:])"  # as train.py does

@pytest.mark.parametrize("end", ["finished", "stopped", "gone"])
def test_a_start_waits_for_another(tmp_path, end):
    """Whether the other finishes, leaves some files, or gives up and removes the .part folder."""
    name = "flip_flop@train=9,length=64,val=9,sparse=9,dense=9"
    prepare_if_missing(name, tmp_path / "direct")
    with Writer(tmp_path / "set", 20) as writer:
        words = [sys.executable, "-c", PREPARES, name, tmp_path / "set"]
        second = subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        waits = f"waiting for the process that writes {tmp_path / 'set'}\n"
        assert second.stdout.readline() == waits
        if end != "gone":
            writer.write("train", np.ones((9, 6)))
        if end == "finished":
            writer.finish(vocab_size=2, tokenizer="bytes")
    second.communicate(timeout=60)
    assert second.returncode == 0
    written = Split(tmp_path / "set", "train").row_length
    assert written == (6 if end == "finished" else 64)
    if end != "finished":
        assert contents(tmp_path / "set") == contents(tmp_path / "direct")
    assert not (tmp_path / "set.part").exists()

# tokenizers of sets, commands, and the standard library

def test_bytes_round_trip():
    bytewise = tokenizer({"tokenizer": "bytes"})
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(f"{text}<|endoftext|>b") == [*text.encode(), 256, 98]
    assert bytewise.decode([*text.encode(), 256, 98, 257, 60000]) == f"{text}<|endoftext|>b"

def test_symbols_round_trip():
    symbols = tokenizer({"tokenizer": {"symbols": ["w", "r", "i", "0", "1"]}})
    assert symbols.encode("w 1  i 0\nr 1") == [0, 4, 2, 3, 1, 4]
    assert symbols.decode([0, 4, 2, 3, 1, 4, 5]) == "w 1 i 0 r 1"  # no symbol has the id 5

def test_a_script_run_as_a_file_says_how_to_run_it():
    """Even one that imports numpy before `data`, which Python then finds in data/."""
    words = [sys.executable, str(ROOT / "data" / "flip_flop.py")]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "run it from the folder above: `python -m data.flip_flop`\n"

def test_help_has_every_key(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flip_flop", "--help"])
    with pytest.raises(SystemExit) as stop:
        command(flip_flop.prepare, flip_flop.__doc__)
    printed = capsys.readouterr().out
    assert not stop.value.code and flip_flop.__doc__.strip() in printed
    assert "--length (int), --train (int)" in printed and "--out (str)" in printed

def test_stdlib_splits_by_file(tmp_path, monkeypatch):
    library = tmp_path / "site-packages"  # a folder of this name is skipped inside the library
    files = {}
    for i in range(25):
        files[f"p{i % 3}/m{i:02d}.py"] = f"# файл {i}\n".encode() + bytes([255, 0, 13, 10]) * i
    others = dict.fromkeys(["site-packages/x.py", "dist-packages/y.py", "p0/notes.txt"], b"other")
    for name, content in (files | others).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    stdlib.prepare(tmp_path / "out")
    want = {"train": [], "val": []}
    for place, name in enumerate(sorted(files), start=1):
        split = "train" if place % 10 else "val"
        want[split] += [*files[name], 256]
    for split, tokens in want.items():
        written = np.fromfile(tmp_path / "out" / f"{split}_000000.bin", "<u2")
        assert written.tolist() == tokens
    meta = Split(tmp_path / "out", "val").meta
    assert (meta["vocab_size"], meta["separator"]) == (257, 256)
