"""The format of data/, its reader, its writer and its commands, against plain arrays.

Text corpora are in test_corpora.py and the tasks are in test_tasks.py.
"""
import itertools
import json
import random
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import contents, one_line

from data import flip_flop, prepare_if_missing, stdlib
from data.shards import Split, Writer
from data.tokenizer import tokenizer

ROOT = Path(__file__).parent.parent
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
    with Writer(folder, shard_tokens) as writer:
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
        writer.finish(vocab_size, tokenizer="bytes", separator=1)
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
    with Writer(tmp_path, 25) as writer:
        writer.write("train", rows)
        writer.finish(vocab_size=200, tokenizer="bytes")
    split = Split(tmp_path, "train")
    steps = -(-6 * 23 // batch_size)
    x = np.concatenate([split.batch(step, batch_size, 100, seed=9)[0] for step in range(steps)])
    epochs = x[: 6 * 23, 0].reshape(6, 23)
    assert (np.sort(epochs) == rows[:, 0]).all()
    assert len(np.unique(epochs, axis=0)) == 6  # each has an order of its own

def test_the_fingerprint_knows_where_a_split_ends(tmp_path):
    found = set()
    for border in (6, 6, 4):
        with Writer(tmp_path / str(len(found)) / str(border)) as writer:
            writer.write("train", np.arange(border))
            writer.write("val", np.arange(border, 10))
            writer.finish(vocab_size=10, tokenizer="bytes")
        found.add(Split(writer.folder, "val").fingerprint)
    assert len(found) == 2

def test_a_damaged_set_is_not_read(tmp_path):
    """Otherwise a run would continue on a part of the data, with shifted masks or with tokens that
    the model does not have."""
    values = np.random.default_rng(0).integers(0, 500, 1000)
    with Writer(tmp_path, shard_tokens=200) as writer:
        for chunk in values.reshape(-1, 40):
            writer.write("train", chunk, np.ones(40))
        writer.finish(vocab_size=500, tokenizer="bytes")
    for name in ("train_000003.bin", "train_000003.loss"):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError) as error:
            Split(tmp_path, "train")
        one_line(error, name, f"has {len(whole) - 1} bytes instead of {len(whole)}", "delete")
        path.write_bytes(whole)
    shard = np.memmap(tmp_path / "train_000002.bin", dtype="<u2", mode="r+")
    shard[0] = 500
    shard.flush()
    split = Split(tmp_path, "train")
    split.read([340, 401], 59)
    for start in (340, 400):  # as the last target, and as the first input
        with pytest.raises(ValueError) as error:
            split.read([0, start], 60)
        one_line(error, str(tmp_path), "token 500", "vocab_size=500")

@pytest.mark.parametrize("tokens, part", [
    ([-1, 5], "-1 to 5"), ([65536], "65536 to 65536"), ([], "got no tokens")])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path, tokens, part):
    """Otherwise uint16 would hold other tokens than those that were written."""
    with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
        writer.write("train", tokens)
        writer.finish(vocab_size=65536, tokenizer="bytes")
    one_line(error, part)
    assert not (tmp_path / "a").exists()

def test_a_full_disk_is_one_line(tmp_path):
    """What was saved is in the unfinished folder, and none of it gets into the next set."""
    how = dict(length=64, train=2000, val=9, sparse=9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a larger file does not fit
    try:
        with pytest.raises(OSError) as error:
            flip_flop.prepare(tmp_path / "set", **how, dense=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    unfinished = tmp_path / "set.part"
    one_line(error, str(unfinished / "dense_000000.bin"), "make room, or write")
    saved = contents(unfinished)
    assert "train_000000.bin" in saved and "dense_000000.bin" not in saved
    for name in ("train_000001.bin.tmp", "meta.json.tmp", "val_000007.loss"):  # as a kill may leave
        (unfinished / name).write_bytes(b"{")
    for name in ("set", "direct"):
        flip_flop.prepare(tmp_path / name, **how, dense=9)
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")
    assert not unfinished.exists()

PREPARES = "import sys, data; data.prepare_if_missing(*sys.argv[1:])"  # as train.py does

@pytest.mark.parametrize("end", ["finished", "stopped", "gone"])
def test_a_start_waits_for_another(tmp_path, end):
    """The other process finishes the set, or stops and leaves some files, or stops and removes the
    unfinished folder."""
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
    if end == "finished":
        assert Split(tmp_path / "set", "train").row_length == 6
    else:
        assert contents(tmp_path / "set") == contents(tmp_path / "direct")
    assert not (tmp_path / "set.part").exists()

# tokenizers of sets, commands, and the standard library

def test_bytes_and_symbols_round_trip():
    bytewise = tokenizer({"tokenizer": "bytes"})
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(f"{text}<|endoftext|>b") == [*text.encode(), 256, 98]
    assert bytewise.decode([*text.encode(), 256, 98, 257, 60000]) == f"{text}<|endoftext|>b"
    symbols = tokenizer({"tokenizer": {"symbols": ["w", "r", "i", "0", "1"]}})
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
    assert f"{tmp_path / 'out'}: {sizes}" in capsys.readouterr().out
    meta = Split(tmp_path / "out", "val").meta
    assert (meta["vocab_size"], meta["separator"]) == (257, 256)
