"""Holds write_documents and the text corpora against files built by hand, one token at a time.

The corpora are local stand-ins of the originals' formats, no tokenizer needs a download, and
interruptions are real kills.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line

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
        {"val": 0},
        {"tokens": {"val": 10**4, "train": 10**9}, "shortest": 1},
    ),
}


def corpus(shape, count=100):
    begins, options = SHAPES[shape]
    ends = [*list(begins.values())[1:], count]
    return {split: part(begin, end) for (split, begin), end in zip(begins.items(), ends)}, options


def by_hand(parts, shard_tokens, separator="after", tokens=None, shortest=0):
    """-> the files a corpus {split: texts} must become, and its words by split. A shard, and a split
    that is to have so many tokens, ends with the document that brings it there."""
    shards, words = {}, {}
    for part, source in parts.items():
        for text in source:
            ids = [*text.encode()]
            if len(ids) < shortest:
                continue
            ids = {"before": [256, *ids], "after": [*ids, 256], None: ids}[separator]
            split = part
            if tokens:
                sizes = {s: sum(map(len, shards.get(s, []))) for s in tokens}
                free = [s for s in tokens if tokens[s] is None or sizes[s] < tokens[s]]
                if not free:
                    break
                split = free[0]
            mine = shards.setdefault(split, [[]])
            if len(mine[-1]) >= shard_tokens:
                mine.append([])
            mine[-1] += ids
            words[split] = words.get(split, 0) + len(re.findall(r"\S+", text))
    files = {}
    for split, parts in shards.items():
        for k, ids in enumerate(parts):
            files[f"{split}_{k:06d}.bin"] = b"".join(t.to_bytes(2, "little") for t in ids)
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


def test_no_more_is_read_than_the_budgets_take(tmp_path):
    """An endless source comes to an end, and a document of just the least length counts."""

    def source(skip):
        return itertools.cycle(["four", "five5", "sixsix"])

    how = dict(tokens={"val": 10, "train": 20}, shortest=5)
    write_documents(tmp_path, lambda: {"val": source}, "bytes", **how)
    pair = [*b"five5", 256, *b"sixsix", 256]
    for split, want in (("val", pair), ("train", [*pair, *pair])):
        assert np.fromfile(tmp_path / f"{split}_000000.bin", dtype="<u2").tolist() == want


def test_a_second_start(tmp_path, capsys):
    parts, options = corpus("two sources", count=9)
    write_documents(tmp_path / "set", lambda: parts, "bytes", shard_tokens=300, limit=7)
    want = by_hand({split: list(source(0)) for split, source in parts.items()}, 300)
    check(tmp_path / "set", want)
    capsys.readouterr()
    # the corpus is not loaded again
    write_documents(tmp_path / "set", lambda: 1 / 0, "bytes", shard_tokens=300, limit=7)
    assert capsys.readouterr().out == f"{tmp_path / 'set'} is whole already; delete it to write it again\n"
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path / "set", lambda: 1 / 0, "bytes", shard_tokens=300, limit=8)
    one_line(error, "was written with", "'limit': 7", "'limit': 8", "delete it", "--out")
    check(tmp_path / "set", want)


def test_a_tokenizer_must_fit_uint16(tmp_path, monkeypatch):
    monkeypatch.setattr(
        text_corpora, "load_encoding", lambda name: types.SimpleNamespace(n_vocab=100_277)
    )
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path, lambda: 1 / 0, "cl100k_base")
    one_line(error, "cl100k_base", "100277", "65536")


def test_the_disk_is_looked_at_first(tmp_path, monkeypatch):
    def disk_has(free):
        monkeypatch.setattr(
            shards.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free)
        )

    disk_has(19_999_000_000)
    for options in ({"expect": 10**10}, {"tokens": {"val": 10**9, "train": 9 * 10**9}}):
        with pytest.raises(ValueError) as error:  # before the corpus is loaded
            write_documents(tmp_path / "set", lambda: 1 / 0, "bytes", **options)
        one_line(error, str(tmp_path / "set"), "20 GB", "--out")
    assert not list(tmp_path.iterdir())
    write_documents(tmp_path / "set", lambda: {"train": part(0, 3)}, "bytes", expect=9_999_000_000)
    disk_has(18 * 10**9)
    with pytest.raises(ValueError) as error:
        openwebtext.prepare(tmp_path / "out", tokenizer="bytes", load=lambda: 1 / 0)
    one_line(error, "18.1 GB", "18 GB")
    how = dict(expect=10_000, shard_tokens=500)
    disk_has(20_000)
    with death_at(monkeypatch, 5) as died:
        write_documents(tmp_path / "half", lambda: {"train": part(0, 60)}, "bytes", **how)
    assert died
    disk_has(18_000)  # more than 1000 tokens are there, the others fit
    write_documents(tmp_path / "half", lambda: {"train": part(0, 60)}, "bytes", **how)


@contextlib.contextmanager
def death_at(monkeypatch, moment, after=False):
    """Ends the block before or right after file number `moment`, or last the folder, gets its name;
    `died` tells whether it did."""
    renamed, died = [], []

    def dying(rename):
        def rename_or_die(source, target):
            renamed.append(target)
            now = len(renamed) == moment
            if now and not after:
                raise KeyboardInterrupt
            rename(source, target)
            if now:
                raise KeyboardInterrupt

        return rename_or_die

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace))
        patch.setattr(os, "rename", dying(os.rename))
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
        if not folder.exists():
            with pytest.raises(FileNotFoundError):
                Split(folder, "train")
        write_documents(folder, lambda: parts, "bytes", shard_tokens=2500, **options)
        check(folder, want)
        assert not Path(f"{folder}.part").exists()
    assert moment >= 2 * len(want[0])  # each shard, the note after it, meta.json, the folder


def test_a_start_with_other_arguments_is_refused(tmp_path, monkeypatch):
    parts, options = corpus("budget")
    arguments = dict(options, tokenizer="bytes", shard_tokens=500, limit=7)
    with death_at(monkeypatch, 8):
        write_documents(tmp_path / "set", lambda: parts, **arguments)
    before = contents(tmp_path / "set.part")
    assert len(before) > 2
    for change in (
        {"limit": 8},
        {"shortest": 151},
        {"tokens": {"val": 2500}},
        {"separator": None},
        {"shard_tokens": 501},
    ):
        with pytest.raises(ValueError) as error:
            write_documents(tmp_path / "set", lambda: 1 / 0, **arguments | change)
        one_line(error, "set.part was written with", "'limit': 7", str(change)[1:-1], "delete")
    assert contents(tmp_path / "set.part") == before
    write_documents(tmp_path / "set", lambda: parts, **arguments)
    check(tmp_path / "set", by_hand({"val": list(documents(0, 100))}, 500, **options))


def test_killed_at_random_moments(tmp_path):
    """SIGKILL, which no handler sees, until one start gets through."""
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import os, random, signal, sys, threading, time
from data.text import write_documents
{inspect.getsource(documents)}
def corpus():
    return {{"val": lambda skip: documents(skip, 600, 0.001)}}
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
tokens = {{"val": 25_000, "test": 24_999, "train": None}}
write_documents(sys.argv[1], corpus, "bytes", tokens=tokens, shortest=40, shard_tokens=10000)
os._exit(0)
""",
        encoding="utf-8",
    )
    folder, note, rng, grown = tmp_path / "out", tmp_path / "out.part" / "meta.json", random.Random(0), []
    while len(grown) < 50 and not folder.exists():
        # the sleeps of an undisturbed run add up to 0.6 s. The time grows, for slow machines
        after = rng.uniform(0.05, 0.35) * (1 + len(grown) / 5)
        words = [sys.executable, script, folder, str(after)]
        run = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert run.returncode in (0, -signal.SIGKILL)
        noted = json.loads(note.read_text(encoding="utf-8"))["shards"] if note.exists() else {}
        assert all((note.parent / name).exists() for name in noted)
        grown.append(len(noted))
    print("shards noted at each end:", grown)
    assert len(grown) >= 3 and grown[:-1] == sorted(grown[:-1])  # whole shards stay
    how = dict(tokens={"val": 25_000, "test": 24_999, "train": None}, shortest=40)
    check(folder, by_hand({"val": list(documents(0, 600))}, 10000, **how))


def test_progress_tells_rate_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 0.5, 4.0, 8.0, 9.5, 12.0])
    monkeypatch.setattr(text_corpora, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress = text_corpora.Progress(9_000_000, "tokens", 1_000_000)  # of an earlier run
    for done in (1_500_000, 2_000_000, 5_000_000):
        progress.show(done)
    lines = [line.strip() for line in capsys.readouterr().out.split("\r")]
    assert lines[1:] == [
        "22%, 2,000,000 tokens, 250,000 a second, 0:00:28 left",
        "56%, 5,000,000 tokens, 500,000 a second, 0:00:08 left",
    ]
    progress = text_corpora.Progress(None, "files")
    progress.show(5)
    assert capsys.readouterr().out.strip() == "5 files, 2 a second"


@pytest.mark.parametrize("cores", [1, 3])
def test_the_source_is_read_a_little_ahead(monkeypatch, cores):
    """So memory does not grow with the corpus, and the order stays."""
    taken, ahead, out = 0, [], []
    monkeypatch.setattr(text_corpora, "CORES", cores)

    def source():
        nonlocal taken
        for taken in range(1, 1001):
            yield taken

    for n in text_corpora.in_threads(lambda n: -n, source()):
        out.append(-n)
        ahead.append(taken - len(out))
    assert out == list(range(1, 1001)) and 10 < max(ahead) <= 8 * (2 * cores + 1)


def test_an_error_in_a_document_ends_the_run(tmp_path):
    """And what was saved before it stays saved."""

    def source(skip):
        yield from ["x" * 999] * 100
        raise ConnectionError("the hub is gone")

    with pytest.raises(ConnectionError, match="the hub is gone"):
        write_documents(tmp_path / "set", lambda: {"train": source}, "bytes", shard_tokens=20_000)
    noted = json.loads((tmp_path / "set.part" / "meta.json").read_text())
    assert noted["shards"] and noted["place"] == [0, 20 * len(noted["shards"])]


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
    for name, part in (("missing.json", "No such file"), ("bare.json", "<|endoftext|>")):
        with pytest.raises(ValueError) as error:
            load_encoding(str(tmp_path / name))
        one_line(error, name, part)

    def offline(name):
        raise OSError("no network\nat all")

    monkeypatch.setattr("data.tokenizer.HubEncoding", offline)
    with pytest.raises(ValueError) as error:
        load_encoding("somebody/tokenizer")
    one_line(error, "'somebody/tokenizer'", "OSError", "network", "hf auth login")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError) as error:
        load_encoding("somebody/other")
    one_line(error, "somebody/other", "pip install tokenizers")


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
    assert len(want[0]["val_000000.bin"]) in range(4002, 5000)  # whole documents
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
            for skip in (0, 3, 6, 7, 19, 20):
                assert list(texts(dataset, limit)(skip)) == source[:limit][skip:]


@pytest.mark.parametrize("name", CORPORA)
def test_corpus_commands(tmp_path, monkeypatch, name):
    """Without the optional package: one line that names it, and nothing is left behind."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = fails(str(ROOT / "data" / f"{name}.py"), "--tokenizer=bytes", f"--out={tmp_path / 'out'}")
    assert "pip install datasets" in line and not list(tmp_path.iterdir())
    module = importlib.import_module(f"data.{name}")
    assert module.DOWNLOAD and f"python -m data.{name}\n" in re.sub(" +#.*", "", module.__doc__)


# workers that die


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


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
        """
import multiprocessing, os, signal, sys
from data import text
text.CORES = 2
if __name__ == "__main__":
    with text.workers(abs, 0) as pool:
        list(pool.map(abs, range(9)))
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        pids = run.stdout.readline().split()
    assert run.returncode == -signal.SIGKILL and pids
    deadline = time.monotonic() + 30
    for pid in pids:
        path = Path(f"/proc/{pid}/stat")
        while path.exists() and " Z " not in path.read_text():
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
    assert "is whole already; delete it" in capsys.readouterr().out


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
    first.write_text("A text " * 50)  # as long as before
    with pytest.raises(ValueError, match="'sha256'"):
        text_corpora.prepare(tmp_path / "set", source=str(first))
    assert contents(tmp_path / "set") == before


def test_a_text_that_changes_between_two_starts_is_refused(tmp_path, monkeypatch):
    """Also if it is as long as before: half of the tokens would be those of the old text."""
    source = tmp_path / "source"
    source.mkdir()
    for i in range(4):
        (source / f"{i}.txt").write_text(f"a text {i} " * 50)
    write, how = text_corpora.write_documents, dict(source=str(source))
    short = functools.partial(write, shard_tokens=500)
    monkeypatch.setattr(text_corpora, "write_documents", short)
    with death_at(monkeypatch, 4):
        text_corpora.prepare(tmp_path / "set", **how)
    before = contents(tmp_path / "set.part")
    assert len(before) > 1
    (source / "0.txt").write_text("A text 0 " * 50)
    with pytest.raises(ValueError) as error:
        text_corpora.prepare(tmp_path / "set", **how)
    one_line(error, "set.part was written with", "delete it")
    assert contents(tmp_path / "set.part") == before
    (source / "0.txt").write_text("a text 0 " * 50)
    text_corpora.prepare(tmp_path / "set", **how)
    text_corpora.prepare(tmp_path / "direct", **how)
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")


def test_texts_that_are_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name, part in (
        ("latin", "byte 3"),
        ("empty", "no text"),
        ("folder", "no text"),
        ("none", "no text"),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            text_corpora.prepare(tmp_path / "set", source=str(tmp_path / name))
        one_line(error, str(tmp_path / name), part)
    assert not (tmp_path / "set").exists()


def test_from_a_text_to_a_sentence(tmp_path, monkeypatch, capsys):
    """README's three commands, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    Path("input.txt").write_text("To be, or not to be, that is the question.\n" * 300)
    small = "--n_layer=1 --n_embd=16 --n_head=2 --max_iters=3 --eval_interval=3 --device=cpu"
    for line in (
        "data/text.py --source=input.txt",
        f"train.py {ROOT}/config/quickstart.py --data=input --out_dir=out/input {small}",
        "sample.py out/input --prompt=To --max_new_tokens=9 --device=cpu",
    ):
        script, *words = line.split()
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert "--- out/input, sample 1\nTo" in capsys.readouterr().out
    assert Path("input", "meta.json").exists()
    line = fails(str(ROOT / "train.py"), "--data=input.txt")
    assert "`python -m data.text --source=input.txt`" in line
