"""Holds write_documents and the text corpora against files built by hand, one token at a time.

The corpora are local stand-ins of the originals' formats, no tokenizer needs a download, and
interruptions are real kills.
"""

import concurrent.futures
import contextlib
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, one_line

from data import (
    c4,
    code,
    fineweb,
    fineweb_edu,
    maestro,
    openwebtext,
    pg19,
    shards,
    tinystories,
    wikitext103,
    wordcount,
)
from data import text as text_corpora
from data.shards import Split
from data.text import load_encoding, texts, tokenizer, write_documents

ROOT = Path(__file__).parent.parent
CORPORA = [
    "openwebtext",
    "fineweb_edu",
    "fineweb",
    "c4",
    "pg19",
    "tinystories",
    "wikitext103",
    "code",
]


def documents(skip, count=300, delay=0.0):
    """A source that any process can name: texts of 0 to 400 letters, not all ASCII, and the
    separator spelled out."""
    for i in range(skip, count):
        time.sleep(delay)
        rng = random.Random(i)
        yield "".join(rng.choices([*"abcdefghijkl é🐍", "<|endoftext|>"], k=rng.randrange(400)))


def part(first, last):
    """Documents first to last - 1 as one split of a corpus."""
    return lambda skip: documents(first + skip, last)


# name -> (where each split's documents begin, the options of write_documents)
SHAPES = {
    "one split": ({"train": 0}, {}),
    "before": ({"train": 0}, {"separator": "before"}),
    "two sources": ({"val": 0, "train": 7}, {}),
    "a split of nothing": ({"val": 0, "train": 0}, {}),
    "three, unseparated": ({"train": 0, "val": 50, "test": 57}, {"separator": None}),
    "by tokens": ({"val": 0}, {"tokens": {"val": 3000, "train": None}, "separator": "before"}),
    "budget": (
        {"val": 0},
        {"tokens": {"val": 2500, "test": 2501, "train": 15000}, "shortest": 150},
    ),
    "budgets of one document": (
        {"val": 0},
        {"tokens": {"val": 5, "test": 1, "dev": 6, "train": 2}},
    ),
    "budget beyond the text": (
        {"a": 0, "val": 50},
        {"tokens": {"val": 10**4, "train": 10**9}, "shortest": 1},
    ),
}


def corpus(shape, count=100):
    begins, options = SHAPES[shape]
    ends = [*list(begins.values())[1:], count]
    return {split: part(begin, end) for (split, begin), end in zip(begins.items(), ends)}, options


def by_hand(
    parts,
    shard_tokens,
    separator="after",
    tokens=None,
    shortest=0,
    encode=lambda text: [*text.encode()],
    end=256,
):
    """-> the files a corpus {split: texts} must become, and its words by split."""
    splits, words, tokens = {}, {}, tokens or {}
    for split, source in parts.items():
        for text in source:
            ids = encode(text)
            if len(ids) < shortest:
                continue
            ids = {"before": [end, *ids], "after": [*ids, end], None: ids}[separator]
            last = (
                None not in tokens.values()
                and split in tokens
                and all(len(splits.get(s, [])) == n for s, n in tokens.items())
            )
            if last:
                break
            while len(splits.get(split, [])) == tokens.get(split):
                split = list(tokens)[list(tokens).index(split) + 1]
            words[split] = words.get(split, 0) + len(re.findall(r"\S+", text))
            for token in ids:
                names = list(tokens)[list(tokens).index(split) :] if split in tokens else [split]
                free = [s for s in names if len(splits.get(s, [])) != tokens.get(s)]
                if free:
                    split = free[0]
                    splits.setdefault(split, []).append(token)
    files = {}
    for split, ids in splits.items():
        for k in range(0, len(ids), shard_tokens):
            data = b"".join(t.to_bytes(2, "little") for t in ids[k : k + shard_tokens])
            files[f"{split}_{k // shard_tokens:06d}.bin"] = data
    return files, words


def check(folder, want, separator=256):
    files, words = want
    got = contents(folder)
    meta = json.loads(got.pop("meta.json"))
    assert got == files
    assert meta["shards"] == {name: len(data) // 2 for name, data in sorted(files.items())}
    assert (meta["tokenizer"], meta["separator"], meta["vocab_size"]) == ("bytes", separator, 257)
    assert (meta["row_length"], meta["loss"]) == ({}, "all")
    assert {split: n for split, n in meta["words"].items() if n} == {
        split: n for split, n in words.items() if n
    }


# writing


@pytest.mark.parametrize("shard_tokens", [190, 10**6])  # many shards a document; one
@pytest.mark.parametrize("shape", SHAPES)
def test_documents_become_the_right_files(tmp_path, shard_tokens, shape):
    parts, options = corpus(shape)
    write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=shard_tokens, **options)
    want = by_hand(
        {split: list(source(0)) for split, source in parts.items()}, shard_tokens, **options
    )
    check(tmp_path, want, 256 if options.get("separator", "after") else None)


def test_no_more_is_read_than_the_budgets_take(tmp_path, monkeypatch):
    """An endless source comes to an end, and a document of just the least length counts."""
    monkeypatch.setattr(text_corpora, "BLOCK", 10)

    def source(skip):
        return itertools.cycle(["four", "five5", "sixsix"])

    write_documents(
        tmp_path, lambda: {"val": source}, "bytes", tokens={"val": 10, "train": 20}, shortest=5
    )
    whole = [*b"five5", 256, *b"sixsix", 256] * 3
    for split, want in (("val", whole[:10]), ("train", whole[10:30])):
        assert np.fromfile(tmp_path / f"{split}_000000.bin", dtype="<u2").tolist() == want


def test_a_second_start(tmp_path, capsys):
    parts, options = corpus("two sources", count=9)
    for _ in range(2):
        write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=300)
        check(tmp_path, by_hand({split: list(source(0)) for split, source in parts.items()}, 300))
        (tmp_path / "progress.json").write_text(
            "{}"
        )  # killed between meta.json and the removal of this
    assert "whole already" in capsys.readouterr().out
    write_documents(
        tmp_path, lambda: 1 / 0, "bytes", shard_tokens=300
    )  # nor is the corpus loaded again


def test_a_tokenizer_must_fit_uint16(tmp_path, monkeypatch):
    monkeypatch.setattr(
        text_corpora, "load_encoding", lambda name: types.SimpleNamespace(n_vocab=100_277)
    )
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path, lambda: 1 / 0, "cl100k_base")
    one_line(error, "cl100k_base", "100277", "65536")


def test_the_disk_is_looked_at_first(tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return types.SimpleNamespace(free=19_999_000_000)

    monkeypatch.setattr(shards.shutil, "disk_usage", usage)
    folder = tmp_path / "not" / "yet"
    for options in ({"expect": 10**10}, {"tokens": {"val": 10**9, "train": 9 * 10**9}}):
        with pytest.raises(ValueError) as error:
            write_documents(
                folder, lambda: 1 / 0, "bytes", **options
            )  # before the corpus is loaded
        one_line(error, str(folder), "20.0 GB", "--out")
    assert asked == [tmp_path, tmp_path] and not folder.parent.exists()
    write_documents(folder, lambda: {"train": part(0, 3)}, "bytes", expect=9_999_000_000)
    write_documents(folder, lambda: 1 / 0, "bytes", expect=10**12)  # whole: needs nothing
    monkeypatch.setattr(
        shards.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=18 * 10**9)
    )
    with pytest.raises(ValueError) as error:
        openwebtext.prepare(tmp_path / "out", tokenizer="bytes", load=lambda: 1 / 0)
    one_line(error, "18.1 GB", "18.0 GB")
    for free, moment in (
        (20_000, 5),
        (18_000, 0),
    ):  # after an interruption: 1000 tokens are there, the other 9000 fit
        monkeypatch.setattr(
            shards.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free)
        )
        with death_at(monkeypatch, moment) as died:
            write_documents(
                tmp_path / "half",
                lambda: {"train": part(0, 60)},
                "bytes",
                expect=10_000,
                shard_tokens=500,
            )
        assert bool(died) == bool(moment)


@contextlib.contextmanager
def death_at(monkeypatch, moment, after=False):
    """Ends the block before or right after file number `moment` gets its name; `died` tells
    whether it did."""
    replace, renamed, died = os.replace, [], []

    def dying(source, target):
        renamed.append(target)
        now = len(renamed) == moment
        if now and not after:
            raise KeyboardInterrupt
        replace(source, target)
        if now:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        try:
            yield died
        except KeyboardInterrupt:
            died.append(True)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("shape", ["two sources", "budget"])
def test_stopped_at_every_renaming(tmp_path, monkeypatch, shape, after):
    """A death at each moment at which a file gets its name, then one more start."""
    parts, options = corpus(shape, 60)
    want = by_hand({split: list(source(0)) for split, source in parts.items()}, 2500, **options)
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        with death_at(monkeypatch, moment, after) as died:
            write_documents(folder, lambda: parts, "bytes", shard_tokens=2500, **options)
        if not died:
            break
        if not (after and (folder / "meta.json").exists()):
            with pytest.raises(FileNotFoundError):
                Split(folder, "train")
        write_documents(folder, lambda: parts, "bytes", shard_tokens=2500, **options)
        check(folder, want)
    assert moment >= 2 * len(want[0])  # each shard, the note after each full one, meta.json


def test_a_start_with_other_arguments_is_refused(tmp_path, monkeypatch):
    parts, options = corpus("budget")
    with death_at(monkeypatch, 8):
        write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=500, limit=7, **options)
    for change in (
        {"limit": 8},
        {"shortest": 151},
        {"tokens": {"val": 2500}},
        {"tokenizer": "gpt2"},
        {"separator": None},
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
            patch.setattr(
                text_corpora,
                "load_encoding",
                lambda name: types.SimpleNamespace(n_vocab=257, eot_token=256),
            )
            arguments = {"tokenizer": "bytes", "shard_tokens": 500, "limit": 7, **options, **change}
            write_documents(tmp_path, lambda: 1 / 0, **arguments)
        one_line(error, "'limit': 7", str(change)[1:-1], "delete")
    write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=500, limit=7, **options)
    check(tmp_path, by_hand({"val": list(documents(0, 100))}, 500, **options))


def test_killed_at_random_moments(tmp_path):
    """SIGKILL, which no handler sees, until one start gets through."""
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import os, random, signal, sys, threading, time
from data import text as text_corpora
{inspect.getsource(documents)}
def corpus():
    def val(skip):
        return documents(200 + skip, 1200, 0.001)
    return {{"dev": lambda skip: documents(skip, 200, 0.001), "val": val}}
if __name__ == "__main__":
    death = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL))
    death.daemon = True  # it does not keep alive what has come to its end
    death.start()
    tokens = {{"val": 25_000, "test": 24_999, "train": None}}
    text_corpora.BLOCK = 20_000
    how = dict(tokens=tokens, shortest=40, shard_tokens=10000)
    text_corpora.write_documents(sys.argv[1], corpus, "bytes", **how)
""",
        encoding="utf-8",
    )
    folder, rng, grown = tmp_path / "out", random.Random(0), []
    while len(grown) < 50 and not (folder / "meta.json").exists():
        # the sleeps of one undisturbed run alone add up to 1.2 s; the time grows, so that a slow
        # machine comes to an end too
        after = rng.uniform(0, 0.4) * (1 + len(grown) / 5)
        run = subprocess.run(
            [sys.executable, script, folder, str(after)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert run.returncode in (0, -signal.SIGKILL)
        note = folder / "progress.json"
        noted = json.loads(note.read_text(encoding="utf-8"))["shards"] if note.exists() else {}
        assert all((folder / name).exists() for name in noted)
        grown.append(len(noted) if noted else grown[-1] if (folder / "meta.json").exists() else 0)
    print("shards noted at each end:", grown)
    assert len(grown) >= 3 and grown == sorted(grown)  # whole shards stay
    parts = {"dev": list(documents(0, 200)), "val": list(documents(200, 1200))}
    check(
        folder,
        by_hand(parts, 10000, tokens={"val": 25_000, "test": 24_999, "train": None}, shortest=40),
    )


def test_progress_tells_rate_and_time_left(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))  # looked at once a document
    monkeypatch.setattr(text_corpora, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))

    def source(skip):
        return iter(["x" * 999_999] * (5 - skip))

    write_documents(tmp_path / "known", lambda: {"train": source}, "bytes", expect=9_000_000)
    lines = [line.strip() for line in capsys.readouterr().out.split("\r")]
    want = [
        f"{100 * i / 9:.0f}%, {i},000,000 tokens, 250,000 a second, 0:00:{4 * (9 - i):02d} left"
        for i in range(1, 6)
    ]
    assert lines[1:] == [*want, f"{tmp_path / 'known'}: train 5,000,000 tokens of 5 words"]
    # after an interruption: two of the five texts are there, and one is looked at again; so three in 16 s
    how = dict(expect=9_000_000, shard_tokens=1_000_000)
    with death_at(monkeypatch, 5):
        write_documents(tmp_path / "again", lambda: {"train": source}, "bytes", **how)
    capsys.readouterr()
    write_documents(tmp_path / "again", lambda: {"train": source}, "bytes", **how)
    assert "\r56%, 5,000,000 tokens, 187,500 a second, 0:00:21 left" in capsys.readouterr().out
    write_documents(tmp_path / "unknown", lambda: {"train": source}, "bytes")
    line = capsys.readouterr().out
    assert "5,000,000 tokens, 250,000 a second" in line and "left" not in line


def test_books_and_stories_come_in_even_blocks(monkeypatch):
    monkeypatch.setattr(text_corpora, "BLOCK", 10_000)
    assert [len(block) for block in text_corpora.blocks(["x" * 600] * 100)] == [17] * 5 + [15]
    assert [len(block) for block in text_corpora.blocks(["x" * 10_000] * 3)] == [1, 1, 1]
    assert list(text_corpora.blocks([])) == [] and list(text_corpora.blocks([""])) == [[""]]


def test_the_source_is_read_a_little_ahead(monkeypatch):
    """So that memory does not grow with the corpus: at most two blocks per core are between
    source and writer."""
    taken, ahead = 0, []
    monkeypatch.setattr(text_corpora, "CORES", 3)
    monkeypatch.setattr(text_corpora, "BLOCK", 2000)

    def source():
        nonlocal taken
        for taken in range(1, 101):
            yield "x" * 1500

    how = load_encoding("bytes"), "after", 0
    with concurrent.futures.ProcessPoolExecutor(
        1, initializer=text_corpora.start_encoder, initargs=how
    ) as pool:
        for written, _ in enumerate(text_corpora.encode_all(source(), pool), 1):
            ahead.append(taken - written)
    assert written == 100 and 10 < max(ahead) <= 2 * 7  # two texts are a block


# tokenizers of the hub


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A byte-level tokenizer.json, trained here; its end is </s>, as Llama's."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    # line ends are frequent, so that there are tokens for several in a row
    trained.train_from_iterator([*documents(0), *wiki(200)], trainer)
    # what a tokenizer.json may bring along and a corpus must not get
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    trained.enable_truncation(20)
    trained.enable_padding(length=20)
    path = str(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
    trained.save(path)
    return path


def test_a_tokenizer_file(vocabulary, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 6, "</s>": 2}, unk_token="a")).save(
        str(tmp_path / "gaps.json")
    )
    assert load_encoding(str(tmp_path / "gaps.json")).n_vocab == 7
    encoding = load_encoding(vocabulary)
    assert (encoding.n_vocab, encoding.eot_token) == (400, 1)
    text = "def naïve(): return 'κόσμε 🐍' </s> <s>" * 9
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 20 and 0 not in ids and 1 not in ids  # spelled out, not the tokens
    assert encoding.decode(ids) == text
    mine = tokenizer({"tokenizer": vocabulary})
    assert mine.encode("ab</s>cd") == [
        *encoding.encode_ordinary("ab"),
        1,
        *encoding.encode_ordinary("cd"),
    ]
    assert mine.decode(mine.encode(text)) == text
    assert encoding.encode_ordinary(text) == ids  # after the other kind
    assert (
        pickle.loads(pickle.dumps(encoding)).encode_ordinary(text) == ids
    )  # where processes are not forked


def test_a_tokenizer_file_in_a_corpus(tmp_path, vocabulary):
    pytest.importorskip("tokenizers")
    write_documents(tmp_path, lambda: {"train": documents}, vocabulary)
    encoding, want = load_encoding(vocabulary), []
    for text in documents(0):
        want += [*encoding.encode_ordinary(text), 1]
    split = Split(tmp_path, "train")
    assert split.read([0], len(want) - 1)[0].tolist() == [want[:-1]] and split.tokens == len(want)
    assert (split.meta["tokenizer"], split.meta["separator"], split.vocab_size) == (
        vocabulary,
        1,
        400,
    )


def test_tokenizers_that_cannot_be_loaded(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare.save(str(tmp_path / "bare.json"))
    for name in ("missing.json", "bare.json"):
        with pytest.raises(ValueError) as error:
            load_encoding(str(tmp_path / name))
        one_line(error, name, "tokenizers library", "</s>")

    def offline(name):
        raise OSError("no network\nat all")

    monkeypatch.setattr("data.text.HubEncoding", offline)
    with pytest.raises(ValueError) as error:
        load_encoding("somebody/tokenizer")
    one_line(error, "'somebody/tokenizer'", "OSError", "network", "hf auth login")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError) as error:
        load_encoding("somebody/tokenizer")
    one_line(error, "somebody/tokenizer", "pip install tokenizers")


# the scripts


def rows(path, texts, column="text"):
    """A function: load_dataset's of a local file of these rows."""
    pytest.importorskip("datasets")
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(
        pa.table({"url": [str(i) for i in range(len(texts))], column: texts}),
        path,
        row_group_size=50,
    )

    def load(**how):
        import datasets

        return datasets.load_dataset(
            "parquet", data_files=str(path), split="train", cache_dir=str(path.parent / "hf"), **how
        )

    return load


def write(module, folder, monkeypatch, moment, **options):
    """Prepare twice: straight, and again after a death."""
    module.prepare(folder / "whole", tokenizer="bytes", **options)
    with death_at(monkeypatch, moment) as died:
        module.prepare(folder / "again", tokenizer="bytes", **options)
    assert died
    module.prepare(folder / "again", tokenizer="bytes", **options)
    assert contents(folder / "again") == contents(folder / "whole")
    return folder / "whole"


def test_fineweb_edu(tmp_path, monkeypatch):
    source = list(documents(0))
    corpus = rows(tmp_path / "corpus.parquet", source)

    def load():
        return corpus(streaming=True)

    monkeypatch.setattr(fineweb_edu, "SHARD_TOKENS", 9000)
    monkeypatch.setattr(fineweb_edu, "TOKENS", 70_000)
    tokens = {"val": 9000, "test": 9000, "train": None}
    check(
        write(fineweb_edu, tmp_path, monkeypatch, 7, load=load),
        by_hand({"val": source}, 9000, "before", tokens),
    )
    fineweb_edu.prepare(tmp_path / "try", limit=20, tokenizer="bytes", load=load)
    check(
        tmp_path / "try",
        by_hand({"val": source[:20]}, 2000, "before", {"val": 2000, "test": 2000, "train": None}),
    )


def test_openwebtext(tmp_path, monkeypatch):
    source = list(documents(0, 2500))
    load = rows(tmp_path / "corpus.parquet", source)
    monkeypatch.setattr(openwebtext, "SHARD_TOKENS", 90_000)
    whole = write(openwebtext, tmp_path, monkeypatch, 5, load=load)
    # datasets': the first 0.0005 of its order, rounded up, are the test part
    order = [source[i] for i in np.random.default_rng(2357).permutation(2500)]
    check(whole, by_hand({"val": order[:2], "train": order[2:]}, 90_000))
    openwebtext.prepare(tmp_path / "try", limit=100, tokenizer="bytes", load=load)
    order = [source[i] for i in np.random.default_rng(2357).permutation(100)]
    check(tmp_path / "try", by_hand({"val": order[:1], "train": order[1:]}, 90_000))


def test_fineweb(tmp_path, monkeypatch):
    source = list(documents(0))
    corpus = rows(tmp_path / "corpus.parquet", source)
    monkeypatch.setattr(fineweb, "SHORTEST", 250)
    whole = write(
        fineweb, tmp_path, monkeypatch, 5, tokens=28_005, load=lambda: corpus(streaming=True)
    )
    want = by_hand(
        {"val": source}, 10**9, tokens={"val": 2000, "test": 2000, "train": 24_005}, shortest=250
    )
    assert {name: len(data) // 2 for name, data in want[0].items()} == {
        "val_000000.bin": 2000,
        "test_000000.bin": 2000,
        "train_000000.bin": 24_005,
    }
    check(whole, want)
    with pytest.raises(ValueError) as error:
        fineweb.prepare(tmp_path / "none", tokens=13, tokenizer="bytes", load=lambda: 1 / 0)
    one_line(error, "tokens=13")
    sizes = inspect.signature(fineweb.prepare).parameters["tokens"].default
    assert (sizes // 14, sizes - 2 * (sizes // 14)) == (50_000_000, 600_000_000)  # the paper's


def test_c4(tmp_path, monkeypatch):
    texts = list(documents(0))
    corpora = {
        "validation": rows(tmp_path / "v.parquet", texts[:60]),
        "train": rows(tmp_path / "t.parquet", texts[60:]),
    }

    def load(split):
        return corpora[split](streaming=True)

    whole = write(c4, tmp_path, monkeypatch, 3, val=20, train=100, load=load)
    check(whole, by_hand({"val": texts[:20], "train": texts[60:160]}, 10**9))
    c4.prepare(tmp_path / "default", tokenizer="bytes", load=load)
    check(tmp_path / "default", by_hand({"val": texts[:60], "train": texts[60:]}, 10**9))
    c4.prepare(tmp_path / "val", train=0, tokenizer="bytes", load=load)
    check(tmp_path / "val", by_hand({"val": texts[:60]}, 10**9))


def test_pg19(tmp_path, monkeypatch):
    books = ["".join(documents(20 * i, 20 * i + 20)) for i in range(10)]
    load = rows(tmp_path / "books.parquet", books)
    check(write(pg19, tmp_path, monkeypatch, 2, load=load), by_hand({"test": books}, 10**9))
    pg19.prepare(tmp_path / "try", limit=3, tokenizer="bytes", load=load)
    check(tmp_path / "try", by_hand({"test": books[:3]}, 10**9))


def test_tinystories(tmp_path, monkeypatch):
    texts = list(documents(0))
    train, validation = (
        rows(tmp_path / "t.parquet", texts[:250]),
        rows(tmp_path / "v.parquet", texts[250:]),
    )

    def load():
        return {"train": train(), "validation": validation()}

    check(
        write(tinystories, tmp_path, monkeypatch, 3, load=load),
        by_hand({"val": texts[250:], "train": texts[:250]}, 10**9),
    )
    tinystories.prepare(tmp_path / "try", limit=30, tokenizer="bytes", load=load)
    check(tmp_path / "try", by_hand({"val": texts[250:280], "train": texts[:30]}, 10**9))


def wiki(lines, seed=0):
    """Lines of WikiText's format: headings of several levels, empty lines, and a paragraph that
    looks like a heading."""
    rng, word = random.Random(seed), lambda: "".join(rng.choices("abcde@é=", k=rng.randrange(1, 7)))
    kinds = [
        " \n",
        " = {} = \n",
        " = = {} {} = = \n",
        " {} , {} . \n",
        " = {} \n",
        " {} <unk> {}{} \n",
        "  =  {} \n",
    ]
    return [" \n", *(rng.choice(kinds).format(word(), word(), word()) for _ in range(lines - 1))]


@pytest.mark.parametrize("names", ["wiki.{}.raw", "wiki.{}.tokens", "{}.txt"])
def test_wikitext103_from_files(tmp_path, monkeypatch, vocabulary, names):
    parts = {"train": wiki(900, 1), "val": wiki(50, 2), "test": wiki(70, 3)}
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        (tmp_path / names.format(name)).write_bytes("".join(parts[split]).encode())
    whole = write(wikitext103, tmp_path, monkeypatch, 5, source=str(tmp_path))
    check(
        whole,
        by_hand({split: ["".join(lines)] for split, lines in parts.items()}, 10**9, None),
        None,
    )

    # pieces are tokenised alone, and still the tokens are those of the text at once
    folder = tmp_path / "bpe"
    wikitext103.prepare(folder, source=str(tmp_path), tokenizer=vocabulary)
    encoding = load_encoding(vocabulary)
    for split, lines in parts.items():
        want = encoding.encode_ordinary("".join(lines))
        got = Split(folder, split)
        assert got.tokens == len(want) < len("".join(lines)) and got.read([0], len(want) - 1)[
            0
        ].tolist() == [want[:-1]]
        assert got.meta["words"][split] == len(re.findall(r"\S+", "".join(lines)))
    assert len(list(wikitext103.sections(parts["train"]))) > 100  # there are pieces


def test_wikitext103_from_rows(tmp_path, monkeypatch):
    parts = {"train": wiki(900, 1), "validation": wiki(50, 2), "test": wiki(70, 3)}
    loads = {
        name: rows(tmp_path / f"{name}.parquet", [line if line.strip() else "" for line in lines])
        for name, lines in parts.items()
    }  # the hub's way to write an empty line
    whole = write(
        wikitext103,
        tmp_path,
        monkeypatch,
        5,
        load=lambda: {name: load() for name, load in loads.items()},
    )
    want = {"train": parts["train"], "val": parts["validation"], "test": parts["test"]}
    check(
        whole,
        by_hand({split: ["".join(lines)] for split, lines in want.items()}, 10**9, None),
        None,
    )


def test_wikitext103_from_a_folder_of_less(tmp_path, capsys):
    with pytest.raises(FileNotFoundError) as error:
        wikitext103.prepare(tmp_path / "out", source=str(tmp_path), tokenizer="bytes")
    one_line(error, str(tmp_path), "wiki.train.raw")
    lines = wiki(60)
    (tmp_path / "valid.txt").write_bytes("".join(lines).encode())
    wikitext103.prepare(tmp_path / "out", source=str(tmp_path), limit=3, tokenizer="bytes")
    printed = capsys.readouterr().out
    assert all(
        f"{tmp_path} has no {split} file; that split is left out\n" in printed
        for split in ("train", "test")
    )
    heads = [i for i, line in enumerate(lines) if line.startswith(" = ")]
    check(tmp_path / "out", by_hand({"val": ["".join(lines[: heads[2]])]}, 10**9, None), None)


def test_code_of_a_folder(tmp_path, monkeypatch):
    folder = tmp_path / "source"
    files = {
        f"{'abc'[i % 3]}/[{i:03d}].{('py', 'rs', 'cu')[i % 3]}": text
        for i, text in enumerate(documents(0, 250))
    }
    for name, text in {**files, "a/data.json": "{}", "README": "no"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "a" / "dir.py").mkdir()
    whole = write(code, tmp_path, monkeypatch, 3, source=str(folder))
    texts = [files[name] for name in sorted(files)]
    check(
        whole,
        by_hand(
            {
                "val": texts[::100],
                "test": texts[1::100],
                "train": [text for i, text in enumerate(texts) if i % 100 > 1],
            },
            10**9,
        ),
    )
    code.prepare(tmp_path / "try", source=str(folder), limit=150, tokenizer="bytes")
    check(
        tmp_path / "try",
        by_hand(
            {
                "val": [texts[0], texts[100]],
                "test": [texts[1], texts[101]],
                "train": texts[2:100] + texts[102:150],
            },
            10**9,
        ),
    )
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source=str(folder / "a" / "dir.py"), tokenizer="bytes")
    one_line(error, "dir.py", ".rs")
    (folder / "broken.c").write_bytes(b"int x; // \xe9\n")
    count, text = code.load(str(folder / ".."), "content")
    assert "int x; // \ufffd\n" in [text(i) for i in range(count)]


def test_code_of_the_hub(tmp_path, monkeypatch):
    texts = list(documents(0))
    load = rows(tmp_path / "code.parquet", texts, "func")
    asked = []
    monkeypatch.setattr(code, "hub", lambda source, split: asked.append((source, split)) or load())
    whole = write(code, tmp_path, monkeypatch, 3, source="some/code", column="func")
    check(
        whole,
        by_hand(
            {
                "val": texts[::100],
                "test": texts[1::100],
                "train": [text for i, text in enumerate(texts) if i % 100 > 1],
            },
            10**9,
        ),
    )
    assert set(asked) == {("some/code", "train")}
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source="some/code", tokenizer="bytes")
    one_line(error, "column='content'", "func")


def test_rows_of_a_dataset(tmp_path):
    source = list(documents(0, 20))
    load = rows(tmp_path / "r.parquet", source)
    for dataset in (load(), load(streaming=True)):
        for limit in (None, 0, 7, 20, 99):
            for skip in (0, 3, 6, 7, 19):
                assert list(texts(dataset, limit)(skip)) == source[:limit][skip:]


@pytest.mark.parametrize("name", CORPORA)
def test_corpus_commands(tmp_path, name):
    """Without the optional package: one line on the screen, no traceback; and --help tells the
    flags."""
    (tmp_path / "datasets.py").write_text("raise ImportError")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", f"data.{name}"]
    options = ["--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    run = subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (
        run.returncode == 1
        and len(run.stderr.splitlines()) == 1
        and "pip install datasets" in run.stderr
    )
    assert not (tmp_path / "out").exists()
    run = subprocess.run([*command, "--help"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and "--tokenizer" in run.stdout and "--out" in run.stdout
    module = importlib.import_module(f"data.{name}")
    assert module.DOWNLOAD and f"python -m data.{name}\n" in re.sub(" +#.*", "", module.__doc__)


# workers that die


class DeadlyTokenizer:
    """bytes, and a word that kills the process that meets it, as the system does when memory runs out."""

    n_vocab, eot_token = 257, 256

    def encode_to_numpy(self, text, disallowed_special):
        if "poison" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.frombuffer(text.encode(), dtype=np.uint8)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_corpora, "BLOCK", 2000)
    healthy = ["text " * 100] * 40

    def write(texts):
        write_documents(
            tmp_path, lambda: {"train": lambda skip: texts[skip:]}, "bytes", shard_tokens=3000
        )

    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        patch.setattr(text_corpora, "load_encoding", lambda name: DeadlyTokenizer())
        write([*healthy[:30], "poison"])
    one_line(error, "worker", "killed", "memory", "same command again")
    assert not multiprocessing.active_children()
    write(healthy)  # goes on from the shards that are there
    check(tmp_path, by_hand({"train": healthy}, 3000))


def test_a_killed_worker_of_wordcount_and_maestro(tmp_path, monkeypatch):
    pytest.importorskip("nltk")
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "a.txt").write_text("A story. It ends.<|endoftext|>" * 9)
    monkeypatch.setattr(wordcount, "work", die)
    with pytest.raises(OSError) as error:
        wordcount.prepare(tmp_path / "a", stories=str(tmp_path / "stories"), tokenizer="bytes")
    one_line(error, "worker", "killed")
    pytest.importorskip("miditok")
    for i in range(3):
        (tmp_path / "stories" / f"{i}.mid").write_bytes(b"")
    monkeypatch.setattr(maestro, "encode", die)
    with pytest.raises(OSError) as error:
        maestro.prepare(tmp_path / "b", source=str(tmp_path / "stories"))
    one_line(error, "worker", "killed")


def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import multiprocessing, os, signal
from data import text as text_corpora
def texts(skip):
    while True:
        yield "x" * 100_000
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        if len(pids) == text_corpora.CORES:
            open({str(tmp_path / "pids")!r}, "w").write(" ".join(pids))
            os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    text_corpora.CORES = 3
    text_corpora.write_documents({str(tmp_path / "set")!r}, lambda: {{"train": texts}}, "bytes")
"""
    )
    run = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == -signal.SIGKILL
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    deadline = time.monotonic() + 30
    while any(
        Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        for pid in pids
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# a text of one's own


def test_one_file_becomes_both_splits(tmp_path, capsys):
    text = "".join(documents(0, 40)) + "\r\nthe end"
    source = tmp_path / "input.txt"
    source.write_bytes(text.encode())
    text_corpora.prepare(tmp_path / "set", source=str(source))
    cut = round(len(text) * 0.9)
    check(tmp_path / "set", by_hand({"train": [text[:cut]], "val": [text[cut:]]}, 10**9))
    assert f"train.py config/quickstart.py --data={tmp_path / 'set'}/ " in capsys.readouterr().out
    text_corpora.prepare(tmp_path / "set", source=str(source))
    assert "whole already; delete it" in capsys.readouterr().out


def test_files_of_a_folder_become_both_splits(tmp_path):
    files = {f"{'ba'[i % 2]}/{i:02d}.md": text for i, text in enumerate(documents(0, 30))}
    for name, text in {**files, ".git/x": "\xe9", "a/.hidden": "no"}.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1" if name == ".git/x" else "utf-8"))
    how = dict(source=str(tmp_path / "source"), val=0.25)
    text_corpora.prepare(tmp_path / "set", **how)
    parts = {"train": [], "val": []}
    for name in sorted(files):
        cut = round(len(files[name]) * 0.75)
        parts["train"].append(files[name][:cut])
        parts["val"].append(files[name][cut:])
    check(tmp_path / "set", by_hand(parts, 10**9))


def test_a_set_of_another_text_is_not_taken_for_this_one(tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    for path in (first, second):
        path.write_text("a text " * 50)
    text_corpora.prepare(tmp_path / "set", source=str(first))
    before = contents(tmp_path / "set")
    for how in (dict(source=str(second)), dict(source=str(first), val=0.2)):
        with pytest.raises(ValueError) as error:
            text_corpora.prepare(tmp_path / "set", **how)
        one_line(error, f"{tmp_path / 'set'} was written with", str(first), "delete it", "--out")
    first.write_text("a text " * 51)
    with pytest.raises(ValueError) as error:
        text_corpora.prepare(tmp_path / "set", source=str(first))
    one_line(error, "'bytes': 350", "'bytes': 357")
    assert contents(tmp_path / "set") == before


def test_texts_that_are_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name, part in (
        ("latin", "byte 3"),
        ("empty", "no text"),
        ("folder", "folder"),
        ("none", "none"),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            text_corpora.prepare(tmp_path / "set", source=str(tmp_path / name))
        one_line(error, str(tmp_path / name), part)
    assert not (tmp_path / "set").exists()


def test_from_a_text_to_a_sentence(tmp_path):
    """README's three commands, in a folder of their own."""
    for pattern in ("*.py", "data/*.py", "config/*.py"):
        for path in ROOT.glob(pattern):
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question.\n" * 300)
    small = "--n_layer=1 --n_embd=16 --n_head=2 --max_iters=3 --eval_interval=3 --device=cpu"
    for line in (
        "-m data.text --source=input.txt",
        f"train.py config/quickstart.py --data=input --out_dir=out/input {small}",
        "sample.py out/input --prompt=To --max_new_tokens=9 --device=cpu",
    ):
        run = subprocess.run(
            [sys.executable, *line.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
    assert "To" in run.stdout and (tmp_path / "data" / "input" / "meta.json").exists()
    run = subprocess.run(
        [sys.executable, "train.py", "--data=input.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "`python -m data.text --source=input.txt`" in run.stderr


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"asked": {}}', "no shard", "a shorter shard"])
def test_a_damaged_start_is_refused(tmp_path, monkeypatch, damage):
    parts, options = corpus("budget")
    with death_at(monkeypatch, 8):
        write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=500, **options)
    if damage == "no shard":
        (tmp_path / "val_000001.bin").unlink()
    elif damage == "a shorter shard":
        (tmp_path / "val_000001.bin").write_bytes(b"\0\0")
    else:
        (tmp_path / "progress.json").write_text(damage)
    before = contents(tmp_path)
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=500, **options)
    one_line(error, "delete", str(tmp_path))
    assert contents(tmp_path) == before
