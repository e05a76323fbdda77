"""write_documents and the text corpora, against files built by hand, one token at a time.

The corpora are small local files in the original formats. No tokenizer needs a download.
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
import shlex
import signal
import subprocess
import sys
import time
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line

from data import c4, code, fineweb, fineweb_edu, openwebtext, pg19, shards, tinystories, wikitext103
from data import text as text_corpora
from data.shards import Split
from data.text import END_OF_TEXT, load_encoding, texts, tokenizer, write_documents

ROOT = Path(__file__).parent.parent
CORPORA = ["c4", "code", "fineweb", "fineweb_edu", "human_genome", "jsb", "maestro", "openwebtext",
           "pg19", "tinystories", "wikitext103", "wordcount"]

def documents(skip, count=300, delay=0.0):
    """Texts of 0 to 400 letters, from number `skip` on. Not all is ASCII, and some spell out the
    separator."""
    for i in range(skip, count):
        time.sleep(delay)
        rng = random.Random(i)
        yield "".join(rng.choices([*"abcdefghijkl é🐍", "<|endoftext|>"], k=rng.randrange(400)))

def drawn_corpus(seed):
    """Returns {part: its texts} and drawn options of write_documents."""
    dice = random.Random(seed)
    how = dict(separator=dice.choice(["before", "after", "marked", None]),
               shortest=dice.choice([0, 0, 150]), shard_tokens=dice.choice([400, 2500, 10**6]))
    ends = sorted(dice.choices(range(41), k=2))
    if dice.random() < 0.5:
        ends = [40, 40]  # all documents are in one part
        budgets = [dice.choice([1, dice.randint(1, 6000)]) for _ in range(3)]
        last = dice.choice([None, 10**9, budgets[2]])
        how["tokens"] = dict(zip(("val", "test", "train"), [*budgets[:2], last]))
    parts = {}
    for part, (begin, end) in dict(val=(0, ends[0]), test=ends, train=(ends[1], 40)).items():
        parts[part] = list(documents(begin, end))
        if how["separator"] == "marked":
            for at in sorted(dice.choices(range(len(parts[part]) + 1), k=5), reverse=True):
                parts[part].insert(at, END_OF_TEXT)
    return parts, how

def corpus_of(parts):
    return lambda: {part: lambda skip, texts=texts: texts[skip:] for part, texts in parts.items()}

def check(folder, parts, shard_tokens=10**9, separator="after", tokens=None, shortest=0):
    """The set holds the corpus {part: texts}, as write_documents describes it."""
    shards, words = {}, {}
    for part, source in parts.items():
        for text in source:
            ids = [256] if text is END_OF_TEXT else [*text.encode()]
            if len(ids) < shortest and text is not END_OF_TEXT:
                continue
            ids = [256] * (separator == "before") + ids + [256] * (separator == "after")
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
            found = [] if text is END_OF_TEXT else re.findall(r"\S+", text)
            words[split] = words.get(split, 0) + len(found)
    want = {}
    for split, lists in shards.items():
        for k, ids in enumerate(lists):
            if ids:
                want[f"{split}_{k:06d}.bin"] = np.array(ids, "<u2").tobytes()
    got = contents(folder)
    meta = json.loads(got.pop("meta.json"))
    assert got == want
    assert meta["shards"] == {name: len(data) // 2 for name, data in sorted(want.items())}
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bytes", 257)
    assert meta["separator"] == (256 if separator else None)
    assert (meta["row_length"], meta["loss"]) == ({}, "all")
    assert {split: n for split, n in meta["words"].items() if n} == {
        split: n for split, n in words.items() if n}

@contextlib.contextmanager
def death_at(monkeypatch, moment, after=False):
    """Stops the block before or right after call number `moment` to one of the functions that make
    files durable or give them their names. `died` tells whether it did."""
    calls = []
    died = []

    def dying(function):
        def call_or_die(*arguments):
            calls.append(arguments)
            now = len(calls) == moment
            if now and not after:
                raise KeyboardInterrupt
            function(*arguments)
            if now:
                raise KeyboardInterrupt
        return call_or_die

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            yield died
        except KeyboardInterrupt:
            died.append(True)

# writing

@pytest.mark.parametrize("seed", range(16))
def test_a_stopped_corpus_resumes_with_the_same_files(tmp_path, monkeypatch, seed):
    """The files are right, and the same ones if the process dies at drawn moments."""
    parts, how = drawn_corpus(seed)
    corpus = corpus_of(parts)
    write_documents(tmp_path / "whole", corpus, "bytes", **how)
    check(tmp_path / "whole", parts, **how)
    dice = random.Random(seed)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        moment = dice.randint(1, 3 * len(contents(tmp_path / "whole")))
        while True:
            with death_at(monkeypatch, moment, after=dice.random() < 0.5) as died:
                write_documents(folder, corpus, "bytes", **how)
            if not died:
                break
            moment = dice.randint(3, 20)  # fewer would not save a shard
        assert contents(folder) == contents(tmp_path / "whole")
        assert not Path(f"{folder}.part").exists()

def test_no_more_is_read_than_the_budgets_take(tmp_path):
    """Otherwise an endless stream would never end. A document of just the least length counts."""
    def source(skip):
        return itertools.cycle(["four", "five5", "sixsix"])

    how = dict(tokens={"val": 10, "train": 20}, shortest=5)
    write_documents(tmp_path, lambda: {"val": source}, "bytes", **how)
    pair = [*b"five5", 256, *b"sixsix", 256]
    for split, want in (("val", pair), ("train", [*pair, *pair])):
        assert np.fromfile(tmp_path / f"{split}_000000.bin", dtype="<u2").tolist() == want

def test_a_second_start_with_other_arguments_is_refused(tmp_path, monkeypatch, capsys):
    """Otherwise a set could mix two kinds, or not be the one that was asked for."""
    parts = {"val": list(documents(0, 60))}
    arguments = dict(tokens={"val": 2500, "train": None}, tokenizer="bytes", shard_tokens=500,
                     limit=7)
    with death_at(monkeypatch, 8):
        write_documents(tmp_path / "set", corpus_of(parts), **arguments)
    changes = [{"limit": 8}, {"shortest": 151}, {"tokens": {"val": 2500}}, {"separator": None},
               {"shard_tokens": 501}]
    for name in ("set.part", "set"):
        before = contents(tmp_path / name)
        assert len(before) > 2
        for change in changes:
            (key, value), = change.items()
            with pytest.raises(ValueError) as error:
                write_documents(tmp_path / "set", lambda: 1 / 0, **arguments | change)
            one_line(error, f"{name} was written with {key}=", f" instead of {value!r}; delete")
        assert contents(tmp_path / name) == before
        capsys.readouterr()
        # the second time, the corpus is not loaded
        load = {"set.part": corpus_of(parts), "set": lambda: 1 / 0}[name]
        write_documents(tmp_path / "set", load, **arguments)
    line = f"{tmp_path / 'set'} is complete; delete it to write it again\n"
    assert capsys.readouterr().out == line

def test_a_tokenizer_must_fit_uint16(tmp_path, monkeypatch):
    large = types.SimpleNamespace(n_vocab=65537)
    monkeypatch.setattr(text_corpora, "load_encoding", lambda name: large)
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path, lambda: 1 / 0, "cl100k_base")
    one_line(error, "cl100k_base", "65537", "65536")

def test_the_disk_is_looked_at_first(tmp_path, monkeypatch):
    """Before the corpus is loaded. What is already written needs no more room."""
    def disk_has(free):
        usage = types.SimpleNamespace(free=free)
        monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: usage)

    disk_has(19_999_000_000)
    for options in ({"expect": 10**10}, {"tokens": {"val": 10**9, "train": 9 * 10**9}}):
        with pytest.raises(ValueError) as error:
            write_documents(tmp_path / "set", lambda: 1 / 0, "bytes", **options)
        one_line(error, str(tmp_path / "set"), "20 GB", "--out")
    assert not list(tmp_path.iterdir())
    how = dict(expect=10_000, shard_tokens=500)
    corpus = corpus_of({"val": list(documents(0, 60))})
    disk_has(20_000)
    with death_at(monkeypatch, 7) as died:
        write_documents(tmp_path / "half", corpus, "bytes", **how)
    assert died
    disk_has(18_000)  # 1000 tokens are there, the others fit
    write_documents(tmp_path / "half", corpus, "bytes", **how)

KILLED = """
import functools, sys
sys.path[:0] = ["tests"]
from test_corpora import documents, write_documents
parts = {"val": functools.partial(documents, count=600, delay=0.001)}
print("starts", flush=True)
write_documents(sys.argv[1], lambda: parts, "bytes", shard_tokens=10_000, shortest=40,
                tokens={"val": 25_000, "test": 24_999, "train": None})
"""

def kill_often(folder, seed=0, most=50):
    """Starts a corpus of several shards and kills it (SIGKILL, which no handler sees) at random
    moments, until a start finishes. Returns the number of shards that were saved at each end."""
    saved, dice, grown = Path(f"{folder}.part") / "meta.json", random.Random(seed), []
    while len(grown) < most and not folder.exists():
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], cwd=ROOT,
                                   stdout=subprocess.PIPE)
        process.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # the delays add up to 0.6 s. The time grows, for slow machines
            process.wait(dice.uniform(0.05, 0.35) * (1 + len(grown) / 5))
        process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        shards = json.loads(saved.read_text())["shards"] if saved.exists() else {}
        assert all((saved.parent / name).exists() for name in shards)
        grown.append(len(shards))
    return grown

def test_killed_at_random_moments(tmp_path):
    """Saved shards survive."""
    grown = kill_often(tmp_path / "out")
    assert len(grown) >= 3 and grown[:-1] == sorted(grown[:-1])
    check(tmp_path / "out", {"val": documents(0, 600)}, 10_000, shortest=40,
          tokens={"val": 25_000, "test": 24_999, "train": None})

def test_progress_tells_rate_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 0.5, 4.0, 8.0])
    monkeypatch.setattr(text_corpora, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress = text_corpora.Progress(9_000_000, "tokens", 1_000_000)  # of an earlier run
    for done in (1_500_000, 2_000_000, 5_000_000):
        progress.show(done)
    lines = [line.strip() for line in capsys.readouterr().out.split("\r")]
    assert lines[1:] == ["22%, 2,000,000 tokens, 250,000 per second, 0:00:28 left",
                         "56%, 5,000,000 tokens, 500,000 per second, 0:00:08 left"]

def test_the_source_is_read_a_little_ahead(monkeypatch):
    """Otherwise memory would grow with the corpus. The order stays."""
    taken, ahead, out = 0, [], []
    monkeypatch.setattr(text_corpora, "CORES", 3)

    def source():
        nonlocal taken
        for taken in range(1, 1001):
            yield taken

    for n in text_corpora.in_threads(lambda n: -n, source()):
        out.append(-n)
        ahead.append(taken - len(out))
    assert out == list(range(1, 1001)) and 10 < max(ahead) <= 8 * (2 * 3 + 1)

def test_an_error_in_a_document_ends_the_run(tmp_path):
    """What was saved before it stays saved."""
    def source(skip):
        yield from ["x" * 999] * 100
        raise ConnectionError("the hub is gone")

    with pytest.raises(ConnectionError, match="the hub is gone"):
        write_documents(tmp_path / "set", lambda: {"train": source}, "bytes", shard_tokens=20_000)
    saved = json.loads((tmp_path / "set.part" / "meta.json").read_text())
    assert saved["shards"] and saved["documents"] == {"train": 20 * len(saved["shards"])}

# tokenizers of the hub

@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A byte-level tokenizer.json, trained here. Its end is </s>, as Llama's."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = byte_level(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                             initial_alphabet=byte_level.alphabet())
    # line ends are frequent, so there are tokens for several in a row
    trained.train_from_iterator([*documents(0), *wiki(200)], trainer)
    # what a tokenizer.json may bring along and a corpus must not get
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trained.enable_truncation(20)
    trained.enable_padding(length=20)
    path = str(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
    trained.save(path)
    return path

def test_a_tokenizer_file(vocabulary, tmp_path):
    """Text stays text even where it spells out </s>. Only a prompt's </s> is the token."""
    encoding = load_encoding(vocabulary)
    assert (encoding.n_vocab, encoding.eot_token) == (400, 1)
    text = "def naïve(): return 'κόσμε 🐍' </s> <s>" * 9
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 20 and 0 not in ids and 1 not in ids
    assert encoding.decode(ids) == text
    mine = tokenizer({"tokenizer": vocabulary})
    first, second = encoding.encode_ordinary("ab"), encoding.encode_ordinary("cd")
    assert mine.encode("ab</s>cd") == [*first, 1, *second]
    assert mine.decode(mine.encode(text)) == text
    assert encoding.encode_ordinary(text) == ids  # after the other kind

    write_documents(tmp_path / "set", lambda: {"train": documents}, vocabulary)
    want = []
    for text in documents(0):
        want += [*encoding.encode_ordinary(text), 1]
    split = Split(tmp_path / "set", "train")
    assert split.tokens == len(want)
    assert split.read([0], len(want) - 1)[0].tolist() == [want[:-1]]
    meta = split.meta
    assert (meta["tokenizer"], meta["separator"], meta["vocab_size"]) == (vocabulary, 1, 400)

def test_tokenizers_that_cannot_be_loaded(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")

    def words(name, vocabulary):
        model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
        tokenizers.Tokenizer(model).save(str(tmp_path / name))
        return str(tmp_path / name)

    assert load_encoding(words("gaps.json", {"a": 6, "</s>": 2})).n_vocab == 7  # ids have gaps
    missing = str(tmp_path / "missing.json")
    for name, part in ((missing, "No such file"), (words("b.json", {"a": 0}), "<|endoftext|>")):
        with pytest.raises(ValueError) as error:
            load_encoding(name)
        one_line(error, name, part)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError) as error:
        load_encoding("somebody/other")
    one_line(error, "somebody/other", "pip install tokenizers")

# the scripts

def rows(path, texts, column="text"):
    """A function that loads a local file of these rows, as load_dataset does."""
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    table = {"url": [str(i) for i in range(len(texts))], column: texts}
    parquet.write_table(pytest.importorskip("pyarrow").table(table), path, row_group_size=50)
    how = dict(data_files=str(path), split="train", cache_dir=str(path.parent / "hf"))
    return functools.partial(datasets.load_dataset, "parquet", **how)

def write(module, folder, monkeypatch, moment, **options):
    """Prepare a set twice: in one go, and resumed after a death."""
    module.prepare(folder / "whole", tokenizer="bytes", **options)
    with death_at(monkeypatch, moment) as died:
        module.prepare(folder / "again", tokenizer="bytes", **options)
    assert died
    module.prepare(folder / "again", tokenizer="bytes", **options)
    assert contents(folder / "again") == contents(folder / "whole")
    return folder / "whole"

def test_fineweb_edu(tmp_path, monkeypatch):
    source = list(documents(0))
    load = functools.partial(rows(tmp_path / "corpus.parquet", source), streaming=True)
    monkeypatch.setattr(fineweb_edu, "SHARD_TOKENS", 9000)
    whole = write(fineweb_edu, tmp_path, monkeypatch, 7, load=load)
    check(whole, {"val": source}, 9000, "before", {"val": 9000, "test": 9000, "train": None})
    fineweb_edu.prepare(tmp_path / "try", limit=20, tokenizer="bytes", load=load)
    tokens = {"val": 2000, "test": 2000, "train": None}
    check(tmp_path / "try", {"val": source[:20]}, 2000, "before", tokens)

def test_openwebtext(tmp_path, monkeypatch):
    source = [f"text number {i}" for i in range(2500)]
    load = rows(tmp_path / "corpus.parquet", source)
    monkeypatch.setattr(openwebtext, "SHARD_TOKENS", 9000)
    whole = write(openwebtext, tmp_path, monkeypatch, 5, load=load)
    # datasets': the first 0.0005 of its order, rounded up, are the test part
    order = [source[i] for i in np.random.default_rng(2357).permutation(2500)]
    check(whole, {"val": order[:2], "train": order[2:]}, 9000)
    openwebtext.prepare(tmp_path / "try", limit=100, tokenizer="bytes", load=load)
    order = [source[i] for i in np.random.default_rng(2357).permutation(100)]
    check(tmp_path / "try", {"val": order[:1], "train": order[1:]})

def test_fineweb(tmp_path, monkeypatch):
    source = list(documents(0))
    load = functools.partial(rows(tmp_path / "corpus.parquet", source), streaming=True)
    monkeypatch.setattr(fineweb, "SHORTEST", 250)
    whole = write(fineweb, tmp_path, monkeypatch, 5, tokens=28_005, load=load)
    tokens = {"val": 2000, "test": 2000, "train": 24_005}
    check(whole, {"val": source}, tokens=tokens, shortest=250)
    with pytest.raises(ValueError) as error:
        fineweb.prepare(tmp_path / "none", tokens=13, tokenizer="bytes", load=lambda: 1 / 0)
    one_line(error, "tokens=13")
    sizes = inspect.signature(fineweb.prepare).parameters["tokens"].default
    assert (sizes // 14, sizes - 2 * (sizes // 14)) == (50_000_000, 600_000_000)  # the paper's

def test_c4(tmp_path, monkeypatch):
    texts = list(documents(0))
    corpora = {"validation": rows(tmp_path / "v.parquet", texts[:60]),
               "train": rows(tmp_path / "t.parquet", texts[60:])}

    def load(split):
        return corpora[split](streaming=True)

    whole = write(c4, tmp_path, monkeypatch, 3, val=20, train=100, load=load)
    check(whole, {"val": texts[:20], "train": texts[60:160]})
    c4.prepare(tmp_path / "val", train=0, tokenizer="bytes", load=load)
    check(tmp_path / "val", {"val": texts[:60]})

def test_pg19(tmp_path, monkeypatch):
    books = ["".join(documents(20 * i, 20 * i + 20)) for i in range(10)]
    load = rows(tmp_path / "books.parquet", books)
    check(write(pg19, tmp_path, monkeypatch, 2, load=load), {"test": books})
    pg19.prepare(tmp_path / "try", limit=3, tokenizer="bytes", load=load)
    check(tmp_path / "try", {"test": books[:3]})

def test_tinystories(tmp_path, monkeypatch):
    texts = list(documents(0))
    train = rows(tmp_path / "t.parquet", texts[:250])
    validation = rows(tmp_path / "v.parquet", texts[250:])
    corpus = {"train": train(), "validation": validation()}
    whole = write(tinystories, tmp_path, monkeypatch, 3, load=lambda: corpus)
    check(whole, {"val": texts[250:], "train": texts[:250]})
    tinystories.prepare(tmp_path / "try", limit=30, tokenizer="bytes", load=lambda: corpus)
    check(tmp_path / "try", {"val": texts[250:280], "train": texts[:30]})

def wiki(lines, seed=0):
    """Lines of WikiText's format: headings of several levels, empty lines, and a paragraph that
    looks like a heading."""
    rng = random.Random(seed)
    word = lambda: "".join(rng.choices("abcde@é=", k=rng.randrange(1, 7)))  # noqa: E731
    kinds = [" \n", " = {} = \n", " = = {} {} = = \n", " {} , {} . \n", " = {} \n",
             " {} <unk> {}{} \n", "  =  {} \n"]
    return [" \n", *(rng.choice(kinds).format(word(), word(), word()) for _ in range(lines - 1))]

WIKI = {"train": wiki(900, 1), "val": wiki(50, 2), "test": wiki(70, 3)}

def joined(parts):
    return {split: ["".join(lines)] for split, lines in parts.items()}

def test_wikitext103_from_files(tmp_path, monkeypatch, vocabulary):
    """Sections are tokenised separately, but the tokens are those of the whole text."""
    names = {"train": "wiki.train.raw", "val": "wiki.valid.tokens", "test": "test.txt"}
    for split, name in names.items():
        (tmp_path / name).write_bytes("".join(WIKI[split]).encode())
    (tmp_path / "train.txt").write_text("older")
    whole = write(wikitext103, tmp_path, monkeypatch, 5, source=str(tmp_path))
    check(whole, joined(WIKI), separator=None)
    wikitext103.prepare(tmp_path / "bpe", source=str(tmp_path), tokenizer=vocabulary)
    for split, lines in WIKI.items():
        text, got = "".join(lines), Split(tmp_path / "bpe", split)
        want = load_encoding(vocabulary).encode_ordinary(text)
        assert got.tokens == len(want) < len(text)
        assert got.read([0], len(want) - 1)[0].tolist() == [want[:-1]]
        assert got.meta["words"][split] == len(re.findall(r"\S+", text))
    assert len(list(wikitext103.sections(WIKI["train"]))) > 100

def test_wikitext103_from_rows(tmp_path, monkeypatch):
    corpus = {}
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        lines = [line if line.strip() else "" for line in WIKI[split]]  # as the hub writes them
        corpus[name] = rows(tmp_path / f"{name}.parquet", lines)()
    whole = write(wikitext103, tmp_path, monkeypatch, 5, load=lambda: corpus)
    check(whole, joined(WIKI), separator=None)

def test_wikitext103_from_a_folder_of_less(tmp_path, capsys):
    with pytest.raises(FileNotFoundError) as error:
        wikitext103.prepare(tmp_path / "out", source=str(tmp_path), tokenizer="bytes")
    one_line(error, str(tmp_path), "wiki.train.raw")
    lines = wiki(60)
    (tmp_path / "valid.txt").write_bytes("".join(lines).encode())
    wikitext103.prepare(tmp_path / "out", source=str(tmp_path), limit=3, tokenizer="bytes")
    assert f"{tmp_path} has no train file; that split is left out\n" in capsys.readouterr().out
    heads = [i for i, line in enumerate(lines) if line.startswith(" = ")]
    check(tmp_path / "out", joined({"val": lines[: heads[2]]}), separator=None)

def of_hundreds(texts):
    """data/code.py's splits."""
    train = [text for i, text in enumerate(texts) if i % 100 not in (0, 1)]
    return {"val": texts[::100], "test": texts[1::100], "train": train}

def test_code_of_a_folder(tmp_path, monkeypatch):
    folder, files = tmp_path / "source", {}
    for i, text in enumerate(documents(0, 250)):
        files[f"{'abc'[i % 3]}/[{i:03d}].{('py', 'rs', 'cu')[i % 3]}"] = text.encode()
    files["b/[001].rs"] = b"int x; // \xe9\n"
    for name, content in {**files, "a/data.json": b"{}", "README": b"no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "a" / "dir.py").mkdir()
    texts = [files[name].decode(errors="replace") for name in sorted(files)]
    whole = write(code, tmp_path, monkeypatch, 3, source=str(folder))
    check(whole, of_hundreds(texts))
    code.prepare(tmp_path / "try", source=str(folder), limit=150, tokenizer="bytes")
    check(tmp_path / "try", of_hundreds(texts[:150]))
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source=str(folder / "a" / "dir.py"), tokenizer="bytes")
    one_line(error, "dir.py", ".rs")

def test_code_of_the_hub(tmp_path, monkeypatch):
    texts, asked = list(documents(0)), []
    load = rows(tmp_path / "code.parquet", texts, "func")
    monkeypatch.setattr(code, "hub", lambda source, split: asked.append((source, split)) or load())
    whole = write(code, tmp_path, monkeypatch, 3, source="some/code", column="func")
    check(whole, of_hundreds(texts))
    assert set(asked) == {("some/code", "train")}
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source="some/code", tokenizer="bytes")
    one_line(error, "column='content'", "func")

def test_rows_of_a_dataset(tmp_path):
    """A corpus resumes where it stopped, and --limit counts from the first text."""
    source = list(documents(0, 20))
    load = rows(tmp_path / "r.parquet", source)
    for dataset in (load(), load(streaming=True)):
        for limit in (None, 0, 7, 20, 99):
            for skip in (0, 6, 7, 20):
                assert list(texts(dataset, limit)(skip)) == source[:limit][skip:]

@pytest.mark.parametrize("name", CORPORA)
def test_train_does_not_download_a_corpus(name):
    module = importlib.import_module(f"data.{name}")
    assert module.DOWNLOAD and f"python -m data.{name}\n" in re.sub(" +#.*", "", module.__doc__)

# worker processes

def die(_):
    os.kill(os.getpid(), signal.SIGKILL)

def test_a_killed_worker_is_one_line():
    with pytest.raises(OSError) as error, text_corpora.workers(abs, 0) as pool:
        list(pool.map(die, range(3)))
    one_line(error, "worker", "killed")

ORPHANS = """
import multiprocessing, os, signal
from data import text
text.CORES = 2
with text.workers(abs, 0) as pool:
    list(pool.map(abs, range(9)))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

def test_workers_end_with_a_killed_parent():
    """Otherwise they would wait for work forever."""
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.PIPE)
    pids = process.stdout.readline().split()
    assert process.wait(30) == -signal.SIGKILL and pids
    deadline = time.monotonic() + 30
    for pid in pids:
        path = Path(f"/proc/{int(pid)}/stat")
        with contextlib.suppress(FileNotFoundError):
            while " Z " not in path.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)

# a text of one's own

@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_the_text(tmp_path, monkeypatch, seed):
    """A piece ends with a line, unless lines are longer than a piece."""
    dice = random.Random(seed)
    kinds = ["a line\n", "é🐍\r\n", "\n", "x" * 30, " ", "\r", "\u2028"]
    text = "".join(dice.choices(kinds, k=400))
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    monkeypatch.setattr(text_corpora, "PIECE", dice.choice([5, 64, 1000]))
    assert text_corpora.count_characters(path) == len(text)
    for _ in range(9):
        start, end = sorted(dice.choices(range(len(text) + 1), k=2))
        found = list(text_corpora.pieces(path, start, end))
        assert "".join(found) == text[start:end]
        for piece in found[:-1]:
            assert piece[-1] in "\r\n" or len(piece) == 2 * text_corpora.PIECE
    path.write_bytes(text.encode()[:50])
    with pytest.raises(OSError, match="was shortened while it was read"):
        list(text_corpora.pieces(path, 0, len(text)))

def test_a_long_text_needs_as_much_memory_as_a_short_one(tmp_path, monkeypatch):
    small = functools.partial(write_documents, shard_tokens=100_000)
    monkeypatch.setattr(text_corpora, "write_documents", small)
    monkeypatch.setattr(text_corpora, "PIECE", 1000)
    peaks = []
    for i, size in enumerate((10_000, 400_000, 4_000_000)):  # the first loads what is missing
        (tmp_path / "text").write_text("some words of a line\n" * (size // 21))
        tracemalloc.start()
        text_corpora.prepare(tmp_path / str(i), source=str(tmp_path / "text"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1]

def test_one_file_becomes_both_splits(tmp_path, capsys):
    text = "".join(documents(0, 40)) + "\r\nthe end"
    source = tmp_path / "my input.txt"
    source.write_bytes(text.encode())
    text_corpora.prepare(tmp_path / "a set@1", source=str(source))
    cut = round(len(text) * 0.9)
    split = {"train": [text[:cut], END_OF_TEXT], "val": [text[cut:], END_OF_TEXT]}
    check(tmp_path / "a set@1", split, separator="marked")
    printed = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(printed.split("`")[1])
    assert words[1:] == ["train.py", "config/quickstart.py", f"--data={tmp_path / 'a set@1'}",
                         "--out_dir=out/a set_1"]
    # the same text is taken for this one, wherever it lies, and another one is not
    other = tmp_path / "other.txt"
    other.write_bytes(text.encode())
    text_corpora.prepare(tmp_path / "a set@1", source=str(other))
    assert "is complete; delete it" in capsys.readouterr().out
    with pytest.raises(ValueError) as error:
        text_corpora.prepare(tmp_path / "a set@1", source=str(other), val=0.2)
    one_line(error, "a set@1 was written with val=0.1 instead of 0.2; delete it", "--out")

def test_files_of_a_folder_become_both_splits(tmp_path):
    files = {f"{'ba'[i % 2]}/{i:02d}.md": text for i, text in enumerate(documents(0, 30))}
    for name, text in {**files, ".git/x": "\xe9", "a/.hidden": "no"}.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1" if name == ".git/x" else "utf-8"))
    text_corpora.prepare(tmp_path / "set", source=str(tmp_path / "source"), val=0.25)
    parts = {"train": [], "val": []}
    for name in sorted(files):
        cut = round(len(files[name]) * 0.75)
        parts["train"] += [files[name][:cut], END_OF_TEXT]
        parts["val"] += [files[name][cut:], END_OF_TEXT]
    check(tmp_path / "set", parts, separator="marked")

SOURCES = {text_corpora: [f"{i}.txt" for i in range(4)], code: [f"{i}.py" for i in range(4)],
           wikitext103: ["wiki.train.raw", "test.txt"]}

@pytest.mark.parametrize("module", SOURCES)
def test_an_edited_source_is_refused(tmp_path, monkeypatch, module):
    """Even if it is as long as before. Otherwise half the tokens would come from the old text."""
    source, names, text = tmp_path / "source", SOURCES[module], " = a heading = \n a text \n" * 50
    source.mkdir()
    for name in names:
        (source / name).write_text(text)
    short = functools.partial(module.write_documents, shard_tokens=500)
    monkeypatch.setattr(module, "write_documents", short)
    how = dict(source=str(source), tokenizer="bytes")
    module.prepare(tmp_path / "direct", **how)
    with death_at(monkeypatch, 7):
        module.prepare(tmp_path / "set", **how)
    for name in ("set.part", "set"):
        before = contents(tmp_path / name)
        assert len(before) > 1
        for k, edited in itertools.product((0, -1), (text + "!", text.replace("a text", "A text"))):
            (source / names[k]).write_text(edited)
            with pytest.raises(ValueError) as error:
                module.prepare(tmp_path / "set", **how)
            one_line(error, f"{name} was written with another content of its source; delete it")
            (source / names[k]).write_text(text)
        assert contents(tmp_path / name) == before
        module.prepare(tmp_path / "set", **how)
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")

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
