"""jsb.py, maestro.py and human_genome.py: decoded shards match the source.

The sources are small files in the original formats, JSON, MIDI and FASTA, written byte by byte.
"""
import functools
import gzip
import http.server
import itertools
import json
import random
import struct
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from conftest import contents, one_line

from data import human_genome, jsb, maestro, shards


def symbols(folder):
    return json.loads((Path(folder) / "meta.json").read_text())["tokenizer"]["symbols"]

def raw(folder, split, suffix="bin"):
    """All values of a split, read without the reader."""
    data = b"".join(path.read_bytes() for path in sorted(Path(folder).glob(f"{split}_*.{suffix}")))
    return list(data) if suffix == "loss" else list(struct.unpack(f"<{len(data) // 2}H", data))

def chunks(values, n):
    assert len(values) % n == 0
    return [values[i : i + n] for i in range(0, len(values), n)]

# JSB

def chorales(path, steps):
    """Write random pieces of so many steps, {split: [steps, ...]} -> the pieces."""
    rng, pieces = random.Random(0), {}

    def step():
        return [rng.choice([-1, 21, 108, rng.randint(22, 107)]) for _ in range(4)]

    for split, lengths in steps.items():
        pieces[split] = [[step() for _ in range(n)] for n in lengths]
    path.write_text(json.dumps(pieces))
    return pieces

@pytest.mark.parametrize("length", [4, 16, 2048])
def test_jsb_holds_every_pitch_once_in_order(tmp_path, length):
    source = tmp_path / "j.json"
    pieces = chorales(source, {"test": [7], "train": [4, 8, 3, 1, 516, 9], "valid": [513, 512]})
    jsb.prepare(tmp_path / "out", length=length, source=str(source))
    names = symbols(tmp_path / "out")
    assert len(names) == 90 and len(set(names)) == 90
    for split, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        rows = chunks([names[i] for i in raw(tmp_path / "out", split)], length + 1)
        masks = chunks(raw(tmp_path / "out", split, "loss"), length + 1)
        want_rows, want_masks = [], []
        for piece in pieces[theirs]:
            before = "_"
            flat = [str(pitch) for step in piece for pitch in step]
            while flat:
                now, flat = flat[:length], flat[length:]
                want_rows.append([before, *now, *["_"] * (length - len(now))])
                want_masks.append([0, *[1] * len(now), *[0] * (length - len(now))])
                before = now[-1]
        assert rows == want_rows and masks == want_masks
        # what training sees: no row is without a target, none of them a pad
        split = shards.Split(tmp_path / "out", split)
        x, y = split.read(split.windows(length), length)
        assert x.shape == (len(rows), length) and (y != -1).any(1).all() and (y != 0).all()

def test_jsb_refuses_what_is_not_it(tmp_path):
    source = tmp_path / "j.json"

    def refused(*parts, error=ValueError, **how):
        with pytest.raises(error) as raised:
            jsb.prepare(tmp_path / "out", **how)
        one_line(raised, *parts)

    for step in ([60, 55, 50], [60, 55, 50, 20], [60, 55, 50, 109], [60, 55, 50, None]):
        content = {"train": [[[60, 55, 50, 45], step]], "valid": [], "test": []}
        source.write_text(json.dumps(content))
        refused(str(step), "Jsb16thSeparated.json", source=str(source))
    for content in ("<html>", "[1]", "{}", "\xe9"):
        source.write_text(content, encoding="latin-1")
        refused("j.json holds no chorales", "Jsb16thSeparated.json", source=str(source))
    refused(str(tmp_path / "none"), error=OSError, source=str(tmp_path / "none"))
    for length in (0, 2, 2047):
        refused(f"length={length}", "multiple of 4", length=length)
    assert not list(tmp_path.glob("out*"))

# downloads

@pytest.fixture
def server():
    """-> its address, {path: (status, the length it promises, bytes)}, the paths asked for."""
    pages, asked = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, length, body = pages.get(self.path, (404, 0, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", pages, asked
        running.shutdown()

def test_download_is_whole_or_a_line(tmp_path, server, monkeypatch):
    address, pages, asked = server
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # so it is tmp_path/downloads
    chorales(tmp_path / "j.json", {"train": [4], "valid": [3], "test": [2]})
    body = (tmp_path / "j.json").read_bytes()
    monkeypatch.setattr(jsb, "URL", f"{address}/Jsb16thSeparated.json")
    out = tmp_path / "out"

    def refused(*parts):
        with pytest.raises(ValueError) as error:
            jsb.prepare(out)
        one_line(error, jsb.URL, "--source=", *parts)
        assert not out.exists()

    refused("404")
    pages["/Jsb16thSeparated.json"] = 200, len(body), body
    refused("invalid hash value", jsb.SHA256)  # whole, but not the file that the script knows
    monkeypatch.setattr(jsb, "SHA256", None)
    pages["/Jsb16thSeparated.json"] = 200, len(body) + 5, body
    refused(f"{len(body):,} of {len(body) + 5:,} bytes")
    pages["/Jsb16thSeparated.json"] = 200, 2, b"{}"
    with pytest.raises(ValueError, match="holds no chorales"):
        jsb.prepare(out)
    fetched = tmp_path / "downloads" / "Jsb16thSeparated.json"
    assert fetched.read_bytes() == b"{}"  # the download stays
    fetched.write_bytes(body)
    count = len(asked)
    jsb.prepare(out)
    assert len(asked) == count  # the second start reads what the first one fetched
    jsb.prepare(tmp_path / "local", source=str(tmp_path / "j.json"))
    assert contents(out) == contents(tmp_path / "local")
    fetched.unlink()
    monkeypatch.setattr(jsb, "URL", "http://127.0.0.1:9/Jsb16thSeparated.json")
    out = tmp_path / "other"
    refused("refused")

# MAESTRO

def midi(notes, ticks=60):
    """Notes (onset, key, velocity, duration), times in eighths of a beat -> the bytes of a MIDI
    file as MAESTRO's are: a track with the tempo, 120, and one with the notes and the pedal; 480
    ticks a beat."""
    def track(events):
        data, now = b"", 0
        for at, event in sorted(events):
            delta, now = at - now, at
            digits = [delta & 127]
            while delta := delta >> 7:
                digits.append(delta & 127 | 128)
            data += bytes(reversed(digits)) + event
        data += b"\0\xff\x2f\0"
        return b"MTrk" + struct.pack(">I", len(data)) + data

    head = b"MThd" + struct.pack(">IHHH", 6, 1, 2, 8 * ticks)
    tempo = [(0, b"\xff\x51\x03\x07\xa1\x20"), (0, b"\xff\x58\x04\x04\x02\x18\x08")]
    piano = [(0, b"\xc0\0"), (7, b"\xb0\x40\x7f")]
    for onset, key, velocity, duration in notes:
        piano.append((ticks * onset, bytes([0x90, key, velocity])))
        piano.append((ticks * (onset + duration), bytes([0x80, key, 64])))
    return head + track(tempo) + track(piano)

def pieces_of_music(count):
    """Distinct pieces. A key is struck once in each, so no note hides another. The bars hold gaps.
    Two pieces reach both ends of the keyboard. The last has nothing but a C major triad and a note
    beyond the keyboard."""
    rng, result = random.Random(1), []
    for i in range(count):
        low, high = (21, 108) if i < 2 else (24, 105)
        keys = rng.sample(range(low, high + 1), 30) + ([21, 23, 108, 106] if i < 2 else [])
        onsets = rng.sample(range(i, 900), len(set(keys)))
        notes = []
        for onset, key in zip(onsets, sorted(set(keys))):
            notes.append((onset, key, 4 * rng.randrange(32) + 3, rng.randint(1, 31)))
        result.append(sorted(notes))
    result[-1] = [(8, 60, 67, 8), (8, 64, 67, 8), (8, 67, 67, 8), (40, 125, 67, 8)]
    return result

def heard(words):
    """REMI tokens -> the notes that they say, and the other words."""
    notes, others, bar, words = [], [], -1, iter(words)
    for word in words:
        kind, _, value = word.partition("_")
        if kind == "Bar":
            bar += 1
        elif kind == "Position":
            position = int(value)
        elif kind == "Pitch":
            (a, velocity), (b, duration) = next(words).split("_"), next(words).split("_")
            assert (a, b) == ("Velocity", "Duration")
            beats, parts, resolution = map(int, duration.split("."))
            eighths = 8 * beats + 8 * parts // resolution
            notes.append((32 * bar + position, int(value), int(velocity), eighths))
        else:
            others.append(word)
    return sorted(notes), others

def test_maestro_says_what_was_played(tmp_path):
    pytest.importorskip("miditok")
    pieces = pieces_of_music(30)
    folder, archive, out = tmp_path / "midi", tmp_path / "m.zip", tmp_path / "out"
    with zipfile.ZipFile(archive, "w") as file:
        for i, notes in enumerate(pieces):
            name = f"{2018 - i % 3}/piece_{i:02}.{'midi' if i % 2 else 'mid'}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(midi(notes))
            file.writestr(f"maestro-v3.0.0/{name}", midi(notes))
        file.writestr("maestro-v3.0.0/README", b"not music")
    maestro.prepare(out, source=str(archive))

    meta, names = json.loads((out / "meta.json").read_text()), symbols(out)
    assert meta["vocab_size"] == len(names) == 328
    assert (meta["row_length"], meta["loss"], meta["separator"]) == ({}, "all", 1)
    assert names[:4] == ["PAD_None", "BOS_None", "EOS_None", "MASK_None"]
    played = {}  # what a document may say -> (piece, semitones)
    for i, notes in enumerate(pieces):
        for semitones in range(-3, 4):
            moved = [(a, key + semitones, b, c) for a, key, b, c in notes if 21 <= key <= 108]
            said = tuple(sorted(note for note in moved if 21 <= note[1] <= 108))
            assert said not in played
            played[said] = i, semitones
    counts_of = {}
    for split in ("train", "val", "test"):
        documents = " ".join(names[i] for i in raw(out, split)).split("EOS_None")
        assert documents.pop() == ""  # the split ends with a piece
        counts_of[split] = Counter()
        for words in map(str.split, documents):
            assert words[0] == "BOS_None"
            assert not {"BOS_None", "PAD_None", "MASK_None"} & set(words[1:])
            notes, others = heard(words[1:])
            counts_of[split][played[tuple(notes)]] += 1
            tempos = [float(word[6:]) for word in others if word.startswith("Tempo_")]
            # there are 32 tempos in [40, 250]
            assert tempos and all(abs(tempo - 120) < 4 for tempo in tempos)
            chords = [word for word in others if word.startswith("Chord_")]
            if played[tuple(notes)][0] == 29:
                assert chords == ["Chord_maj"]
            assert len(tempos) + len(chords) == len(others)
    parts = {split: {piece for piece, _ in counts} for split, counts in counts_of.items()}
    assert sorted(itertools.chain(*parts.values())) == list(range(30))  # each piece is in one split
    assert {split: len(part) for split, part in parts.items()} == dict(train=26, val=2, test=2)
    for split, shifts in (("train", range(-3, 4)), ("val", [0]), ("test", [0])):
        want = itertools.product(parts[split], shifts)
        assert counts_of[split] == Counter(want)

    (tmp_path / "again.part").mkdir()
    (tmp_path / "again.part" / "train_000000.bin.tmp").write_bytes(b"what an interrupted run left")
    maestro.prepare(tmp_path / "again", source=str(folder))
    assert contents(tmp_path / "again") == contents(out)

def test_maestro_refuses_what_does_not_fit(tmp_path, monkeypatch):
    def refused(*parts, error=ValueError, **how):
        with pytest.raises(error) as raised:
            maestro.prepare(tmp_path / "out", **how)
        one_line(raised, *parts)

    monkeypatch.setitem(sys.modules, "miditok", None)
    refused("pip install miditok==3.0.5.post1", error=ImportError)
    monkeypatch.undo()
    pytest.importorskip("miditok")
    monkeypatch.setattr(maestro, "VOCAB_SIZE", 403)
    refused("328 tokens", "403", "pip install miditok==3.0.5.post1")
    monkeypatch.undo()
    (tmp_path / "two").mkdir()
    for i in (1, 2):
        (tmp_path / "two" / f"{i}.mid").write_bytes(midi([(0, 60, 3, 4)]))
    (tmp_path / "none.zip").write_bytes(b"<html>")
    for name, part in (("two", "2 MIDI files"), ("none.zip", "not a zip file"),
                       ("x", "not a zip file")):
        refused(name, part, source=str(tmp_path / name))
    assert not (tmp_path / "out").exists()

# the human genome

def fasta(seed, names, width=70, end="\n"):
    """-> (text of a FASTA file, {chromosome: its letters}), other records in between."""
    rng, text, sequences = random.Random(seed), "", {}
    for i, (chromosome, name) in enumerate(names.items()):
        letters = rng.choices("ACGTacgt", k=rng.randint(6000, 6030) + 6000 * (i % 4))
        for _ in range(i % 5):  # runs of unknown letters, and single ones of other meanings
            at, length = rng.randrange(len(letters)), rng.choice([1, 1, 5, 6, 7, 2500])
            letters[at : at + length] = rng.choices("NnMRykN", k=len(letters[at : at + length]))
        if i == 11:
            letters[:6000] = "N" * 6000
        sequences[chromosome] = "".join(letters)
        for header, sequence in (
            (name, sequences[chromosome]),
            (f"NT_{i:06}.1 Homo sapiens chromosome 1 unlocalized", "ACGT" * 2000),
            (f"chr{chromosome}_KI270706v1_random", "GATTACA" * 900),
        ):
            lines = [sequence[j : j + width] for j in range(0, len(sequence), width)]
            text += end.join([f">{header}", *lines]) + end
    return text, sequences

CHROMOSOMES = [*map(str, range(1, 23)), "X", "Y"]
NCBI = {c: f"NC_{i:06}.{9 + i % 4} Homo sapiens chromosome {c}, GRCh38.p14 Primary Assembly"
        for i, c in enumerate(CHROMOSOMES, 1)}
UCSC = {c: f"chr{c}" for c in CHROMOSOMES}
ENSEMBL = {c: f"{c} dna:chromosome chromosome:GRCh38:{c}:1:2:1 REF" for c in reversed(CHROMOSOMES)}

def spelled(window):
    """The words of a window. Between two N the text is cut into sixes, what is left over into
    letters."""
    words = []
    for i, text in enumerate("".join(c if c in "ACGT" else "N" for c in window.upper()).split("N")):
        if i:
            words.append("N")
        while len(text) >= 6:
            words.append(text[:6])
            text = text[6:]
        words.extend(text)
    return words

# width 61 and \r\n, and blocks that end inside headers, windows and runs of N
@pytest.mark.parametrize("names, width, end, block", [
    (NCBI, 80, "\n", 997), (UCSC, 61, "\r\n", 1), (ENSEMBL, 10**6, "\n", 6000)])
def test_genome_spells_the_chromosomes(tmp_path, monkeypatch, capsys, names, width, end, block):
    text, sequences = fasta(5, names, width, end)
    source, out = tmp_path / "genome.fa", tmp_path / "out"
    source.write_bytes(text.encode())
    human_genome.prepare(out, source=str(source))
    printed = capsys.readouterr().out
    meta, table = json.loads((out / "meta.json").read_text()), symbols(out)
    assert meta["vocab_size"] == len(table) == len(set(table)) == 4107
    assert (meta["loss"], meta["separator"]) == ("all", 4106)
    assert meta["row_length"] == dict.fromkeys(("train", "val", "test"), 1001)
    # the ids of the Nucleotide Transformer
    assert table[:4] == ["<unk>", "<pad>", "<mask>", "<cls>"]
    assert table[4:9] == ["AAAAAA", "AAAAAT", "AAAAAC", "AAAAAG", "AAAATA"]
    assert table[4099:] == ["GGGGGG", "A", "T", "C", "G", "N", "<eos>", "<bos>"]
    train = [c for c in names if c not in ("21", "22")]  # in the file's order
    seen = Counter()
    for split, chromosomes in {"val": ["21"], "test": ["22"], "train": train}.items():
        rows = chunks([table[i] for i in raw(out, split)], 1001)
        windows = []
        for c in chromosomes:
            text_of = sequences[c]
            windows += [text_of[i : i + 6000] for i in range(0, len(text_of) - 5999, 6000)]
        assert len(rows) == len(windows)
        for row, window in zip(rows, windows):
            assert row[0] == "<bos>" and row[1:] == spelled(window)[:1000]
            if not set(window) - set("ACGTacgt"):
                assert "".join(row[1:]) == window.upper()
        share = 100 * sum(row.count("N") for row in rows) / (1000 * len(rows))
        assert f"{len(rows):,} {split} rows ({share:.1f}% N)" in printed
        seen.update(word for row in rows for word in row[1:])
    assert all(seen[letter] for letter in "ACGTN")
    assert not any(seen[word] for word in table if word[0] == "<")

    # in small blocks, from a gzip file in several members: the same bytes
    records = functools.partial(human_genome.records, block=block)
    monkeypatch.setattr(human_genome, "records", records)
    packed, half = tmp_path / "packed.fna.gz", len(text) // 2
    members = [gzip.compress(part.encode(), 1) for part in (text[:half], text[half:])]
    packed.write_bytes(b"".join(members))
    human_genome.prepare(tmp_path / "again", source=str(packed))
    assert contents(tmp_path / "again") == contents(out)

def test_genome_must_be_whole(tmp_path):
    text, _ = fasta(6, NCBI)
    packed, broken = gzip.compress(text.encode(), 1), tmp_path / "broken.fna.gz"

    def refused(content, *parts):
        broken.write_bytes(content)
        with pytest.raises(ValueError) as error:
            human_genome.prepare(tmp_path / "out", source=str(broken))
        one_line(error, "broken.fna.gz", *parts)
        assert not list(tmp_path.glob("out*"))

    refused(packed[: len(packed) // 2])
    refused(packed[:-8] + b"\0" * 8)
    refused(packed[:5000] + b"\xff" * 50 + packed[5050:])
    for missing in ("21", "Y"):
        short, _ = fasta(6, {c: name for c, name in NCBI.items() if c != missing})
        refused(short.encode(), f"chromosome {missing};")
