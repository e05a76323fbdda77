"""jsb.py, maestro.py, human_genome.py and wordcount.py: their shards must say what the source says.

The sources are small files in the original formats, which are JSON, MIDI, FASTA and text.
"""
import collections
import functools
import gzip
import itertools
import json
import random
import re
import zipfile

import numpy as np
import pytest
from conftest import contents, one_line

from data import human_genome, jsb, maestro, wordcount
from data.shards import Split
from data.tokenizer import tokenizer


def decoded(folder, split):
    """The symbols of a split, read without the reader."""
    symbols = json.loads((folder / "meta.json").read_text())["tokenizer"]["symbols"]
    return [symbols[i] for i in np.fromfile(folder / f"{split}_000000.bin", "<u2")]

def chunks(values, n):
    return [values[i : i + n] for i in range(0, len(values), n)]

# JSB

def chorales(path, steps):
    """Writes random pieces with these numbers of steps, {split: [steps, ...]}, and returns them."""
    rng = random.Random(0)
    pieces = {}
    for split, lengths in steps.items():
        pieces[split] = []
        for length in lengths:
            keys = [rng.choice([-1, 21, 108, rng.randint(22, 107)]) for _ in range(4 * length)]
            pieces[split].append(chunks(keys, 4))
    path.write_text(json.dumps(pieces))
    return pieces

@pytest.mark.parametrize("length", [4, 16, 2048])
def test_jsb_holds_every_pitch_once_in_order(tmp_path, length):
    source = tmp_path / "j.json"
    pieces = chorales(source, {"test": [7], "train": [4, 8, 3, 1, 516, 9], "valid": [513, 512]})
    out = tmp_path / "out"
    jsb.prepare(out, length=length, source=str(source))
    meta = json.loads((out / "meta.json").read_text())
    assert meta["vocab_size"] == len(set(meta["tokenizer"]["symbols"])) == 90
    for split, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        rows = []
        masks = []
        for piece in pieces[theirs]:
            before = "_"
            keys = [str(key) for step in piece for key in step]
            for now in chunks(keys, length):
                pads = length - len(now)
                rows.append([before, *now, *["_"] * pads])
                masks.append([0, *[1] * len(now), *[0] * pads])
                before = now[-1]
        assert chunks(decoded(out, split), length + 1) == rows
        loss = np.fromfile(out / f"{split}_000000.loss", "u1").tolist()
        assert chunks(loss, length + 1) == masks

def test_download_is_whole_or_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # so downloads are in tmp_path
    remote = tmp_path / "Jsb16thSeparated.json"
    monkeypatch.setattr(jsb, "URL", remote.as_uri())
    out = tmp_path / "out"
    for part in ("No such file", "invalid hash value"):
        with pytest.raises(ValueError) as error:
            jsb.prepare(out)
        one_line(error, jsb.URL, "--source=", part)
        assert not out.exists()
        chorales(remote, {"train": [4], "valid": [3], "test": [2]})  # whole, but not the known file
    monkeypatch.setattr(jsb, "SHA256", None)
    jsb.prepare(out)
    remote.unlink()
    jsb.prepare(tmp_path / "again")  # the second start reads what the first one fetched
    assert contents(out) == contents(tmp_path / "again")

# MAESTRO

def midi(notes):
    """Returns the bytes of a MIDI file at a tempo of 120. A note is (onset, key, velocity,
    duration), with times in eighths of a beat."""
    symusic = pytest.importorskip("symusic")
    score = symusic.Score(480)  # ticks per beat
    score.tempos.append(symusic.Tempo(0, 120))
    track = symusic.Track()
    for onset, key, velocity, duration in notes:
        track.notes.append(symusic.Note(60 * onset, 60 * duration, key, velocity))
    score.tracks.append(track)
    return score.dumps_midi()

def pieces_of_music(count):
    """Returns the notes of different pieces. No key is struck twice in a piece, so no note hides
    another. The pieces reach both ends of the keyboard, and the last one has a note beyond it."""
    rng = random.Random(1)
    pieces = []
    for i in range(count):
        keys = {21, 108, *rng.sample(range(21, 109), 30)}
        onsets = rng.sample(range(i, 900), len(keys))
        notes = []
        for onset, key in zip(onsets, sorted(keys)):
            notes.append((onset, key, 4 * rng.randrange(32) + 3, rng.randint(1, 31)))
        pieces.append(sorted(notes))
    pieces[-1] = [(8, 60, 67, 8), (8, 64, 67, 8), (8, 67, 67, 8), (40, 125, 67, 8)]
    return pieces

def test_maestro_says_what_was_played(tmp_path):
    """Each document is what miditok makes of the notes after this test has transposed them and left
    out those beyond the keyboard."""
    miditok = pytest.importorskip("miditok")
    symusic = pytest.importorskip("symusic")
    remi = miditok.REMI(miditok.TokenizerConfig(
        special_tokens=["PAD", "BOS", "EOS", "MASK"], use_chords=True, use_tempos=True))
    archive, out = tmp_path / "m.zip", tmp_path / "out"
    documents = {}  # {(piece, semitones): its words}
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("maestro-v3.0.0/README", b"not music")
        for i, notes in enumerate(pieces_of_music(30)):
            suffix = "midi" if i % 2 else "mid"
            file.writestr(f"maestro-v3.0.0/{2018 - i % 3}/piece_{i:02}.{suffix}", midi(notes))
            for semitones in range(-3, 4):
                moved = [(a, key + semitones, b, c) for a, key, b, c in notes if 21 <= key <= 108]
                moved = [note for note in moved if 21 <= note[1] <= 108]
                track, = remi(symusic.Score.from_midi(midi(moved)))
                documents[i, semitones] = f"BOS_None {' '.join(track.tokens)} EOS_None"
    maestro.prepare(out, source=str(archive))
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["vocab_size"], meta["row_length"], meta["separator"]) == (328, {}, 1)
    val, test = {12, 15}, {8, 10}  # drawn with a fixed seed, as published runs had them
    others = set(range(30)) - val - test
    for split, pieces, shifts in (("train", others, range(-3, 4)), ("val", val, [0]),
                                  ("test", test, [0])):
        text = " ".join(decoded(out, split))
        found = re.findall("BOS_None.*?EOS_None", text)
        want = [documents[key] for key in itertools.product(pieces, shifts)]
        assert " ".join(found) == text and sorted(found) == sorted(want)

# the human genome

def fasta(numbers, width=70, end="\n"):
    """Returns the text of a FASTA file with these chromosomes and other records in between, and
    {number: the letters of the chromosome}."""
    rng = random.Random(5)
    text = ""
    sequences = {}
    for i in numbers:
        alphabet = "ACGTacgt" * 30 + "NMRyk"[: i % 5]  # the last ones are unknown
        letters = rng.choices(alphabet, k=rng.randint(6000, 6030) + 6000 * (i % 4))
        if i in (12, 22):
            letters[:2500] = "N" * 2500
        sequences[i] = "".join(letters)
        name = f"NC_{i:06}.{9 + i % 4} Homo sapiens chromosome {i}, GRCh38.p14 Primary Assembly"
        other = f"NT_{i:06}.1 Homo sapiens chromosome {i} unlocalized"
        for header, sequence in ((name, sequences[i]), (other, "GATTACA" * 900)):
            text += end.join([f">{header}", *chunks(sequence, width)]) + end
    return text, sequences

CHROMOSOMES = range(1, 25)

def spelled(window):
    """Returns the words of a window. The text between two Ns is cut into words of six letters, and
    the letters that are left over are words of their own."""
    words = []
    for text in re.split("(N)", re.sub("[^ACGT]", "N", window.upper())):
        whole = len(text) // 6 * 6
        words += [*chunks(text[:whole], 6), *text[whole:]]
    return words

def packed(text):
    """The text as a gzip file in two members."""
    half = len(text) // 2
    return gzip.compress(text[:half].encode(), 1) + gzip.compress(text[half:].encode(), 1)

# blocks end inside headers, windows and runs of N
@pytest.mark.parametrize("width, end, block, pack", [
    (80, "\n", 997, packed), (61, "\r\n", 1, str.encode), (10**6, "\n", 6000, packed)])
def test_genome_spells_the_chromosomes(tmp_path, monkeypatch, width, end, block, pack):
    text, sequences = fasta(CHROMOSOMES, width, end)
    source, out = tmp_path / "genome", tmp_path / "out"
    source.write_bytes(pack(text))
    records = functools.partial(human_genome.records, block=block)
    monkeypatch.setattr(human_genome, "records", records)
    human_genome.prepare(out, source=str(source))
    meta = json.loads((out / "meta.json").read_text())
    symbols = meta["tokenizer"]["symbols"]
    assert meta["vocab_size"] == len(symbols) == len(set(symbols)) == 4107
    assert (meta["loss"], meta["separator"]) == ("all", 4106)
    # the ids of the Nucleotide Transformer
    assert symbols[:9] == ["<unk>", "<pad>", "<mask>", "<cls>", "AAAAAA", "AAAAAT", "AAAAAC",
                           "AAAAAG", "AAAATA"]
    assert symbols[4099:] == ["GGGGGG", "A", "T", "C", "G", "N", "<eos>", "<bos>"]
    train = [*range(1, 21), 23, 24]
    for split, chromosomes in {"val": [21], "test": [22], "train": train}.items():
        rows = chunks(decoded(out, split), 1001)
        windows = []
        for c in chromosomes:
            windows += [window for window in chunks(sequences[c], 6000) if len(window) == 6000]
        assert rows == [["<bos>", *spelled(window)[:1000]] for window in windows]
        assert meta["row_length"][split] == 1001

def test_genome_must_be_whole(tmp_path):
    source = tmp_path / "broken"
    whole = packed(fasta(CHROMOSOMES)[0])
    less, _ = fasta([*range(1, 21), 22, 23, 24])
    for content, part in ((whole[: len(whole) // 3], "broken is damaged"),
                          (whole[:5000] + b"\xff" * 50 + whole[5050:], "broken is damaged"),
                          (less.encode(), "no window of NC_000021;")):
        source.write_bytes(content)
        with pytest.raises(ValueError) as error:
            human_genome.prepare(tmp_path / "out", source=str(source))
        one_line(error, part)
        assert not list(tmp_path.glob("out*"))

# WordCount: every prompt is taken apart again, and its answer is counted by hand

SENTENCES = ["The cat saw Tom.", "It didn't run!", "tom, TOM and the cat.", "Was it the end?"]

@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    pytest.importorskip("nltk")
    folder = tmp_path_factory.mktemp("stories")
    rng = np.random.default_rng(0)
    texts = []
    for i in range(2000):
        begin = " ".join(rng.choice(SENTENCES, rng.integers(0, 3)))
        texts.append(f"{begin} Story{i} ended.")
    (folder / "a.txt").write_text("<|endoftext|>".join(texts[:900]))
    (folder / "b.txt").write_text("\n\n".join(texts[900:]))
    return str(folder)

EXAMPLE = re.compile(r"\[INST\] (.*?) How many times word '(.*?)' mentioned in the last '(\d+)' "
                     r"sentences\? \[/INST\] (\d+)<\|endoftext\|>", re.S)

def examples(folder, split):
    """Returns the story, the word, k and the answer of every example of a split. Only the answers
    and the end-of-text tokens after them carry loss."""
    data = Split(folder, split)
    decode = tokenizer("bytes").decode
    x, y = data.read(data.windows(data.row_length - 1), data.row_length - 1)
    found = []
    for inputs, targets in zip(x.tolist(), y):
        text = decode([*inputs, 256])
        assert not EXAMPLE.sub("", text).replace("<|endoftext|>", "")  # the rest is padding
        of_row = EXAMPLE.findall(text)
        answers = [f" {answer}<|endoftext|>" for *_, answer in of_row]
        assert decode(targets[targets != -1].tolist()) == "".join(answers)
        found += of_row
    return found

@pytest.mark.parametrize("options, join, length, val, train", [
    (dict(length=700), 1, 700, 20, 1980), (dict(join=3), 3, 4096, 6, 660)])
def test_answers(stories, tmp_path, capsys, options, join, length, val, train):
    how = dict(stories=stories, tokenizer="bytes", **options)
    wordcount.prepare(tmp_path / "set", **how)
    assert f"{2000 // join - val - train} examples are left out" in capsys.readouterr().out
    wordcount.prepare(tmp_path / "again", **how)
    assert contents(tmp_path / "again") == contents(tmp_path / "set")
    questions = {split: examples(tmp_path / "set", split) for split in ("val", "train")}
    assert (len(questions["val"]), len(questions["train"])) == (val, train)
    meta = Split(tmp_path / "set", "train").meta
    assert meta["vocab_size"] == 257 and meta["row_length"]["train"] == 1 + length
    told = []
    by_k = collections.defaultdict(list)
    lengths = collections.Counter()
    for example in questions["val"] + questions["train"]:
        story, word, k, answer = example
        sentences = re.findall(r"[^.!?]+[.!?]", story)
        counts = collections.Counter(re.findall(r"[a-z0-9']+", story.lower()))
        assert counts[word] == max(counts.values()) and 1 <= int(k) <= len(sentences)
        last = " ".join(sentences[-int(k) :]).lower()
        assert int(answer) == re.findall(r"[a-z0-9']+", last).count(word)
        told += re.findall(r"Story(\d+)", story)
        lengths[str(len(sentences))] += 1
        if example in questions["val"]:
            by_k[f"k{k}"].append(example)
    assert len(told) == len(set(told)) == 2000 // join * join  # no story is told twice
    assert meta["sentences"] == lengths and sum(meta["words"].values()) == lengths.total()
    # each k with at least ten examples in val has a split of its own
    names = {name.rpartition("_")[0] for name in meta["shards"]}
    assert "k1" in names or join == 3
    assert names == {"val", "train"} | {k for k in by_k if len(by_k[k]) >= 10}
    for k in names & by_k.keys():
        assert examples(tmp_path / "set", k) == by_k[k]

def test_examples_that_do_not_fit(tmp_path):
    """A set without train or val is refused here, and not only when a model is trained."""
    pytest.importorskip("nltk")
    texts = ["A cat sat.", "A cat sat on " + 300 * "a mat and " + "a hat."]
    told = []
    for i, order in enumerate((texts, texts[::-1])):  # one of them has the long story in val
        (tmp_path / f"{i}.txt").write_text("\n\n".join(order))
        with pytest.raises(ValueError) as error:
            wordcount.prepare(tmp_path / "set", stories=str(tmp_path / f"{i}.txt"), length=150,
                              tokenizer="bytes")
        one_line(error, "fits into length=150 tokens; increase it")
        told.append(str(error.value).split()[3])
    assert sorted(told) == ["training", "validation"]
    assert not (tmp_path / "set").exists()
