"""Holds data/jsb.py, maestro.py and human_genome.py against decoders that turn shards back into
what a source said.

The sources are small files of the original formats, written here byte by byte: JSON, MIDI, FASTA.
No network.
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
    rng = random.Random(0)
    pieces = {
        split: [
            [[rng.choice([-1, 21, 108, rng.randint(22, 107)]) for _ in range(4)] for _ in range(n)]
            for n in lengths
        ]
        for split, lengths in steps.items()
    }
    path.write_text(json.dumps(pieces))
    return pieces


@pytest.mark.parametrize("length", [4, 16, 2048])
def test_jsb_holds_every_pitch_once_in_order(tmp_path, length):
    source = tmp_path / "j.json"
    pieces = chorales(source, {"test": [7], "train": [4, 8, 3, 1, 516, 9], "valid": [513, 512]})
    jsb.prepare(tmp_path / "out", length=length, source=str(source))
    names = symbols(tmp_path / "out")
    assert len(names) == 90 and len(set(names)) == 90
    assert {p.name.rpartition("_")[0] for p in (tmp_path / "out").glob("*.bin")} == {
        "train",
        "val",
        "test",
    }
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
        targets = [int(word) for row, mask in zip(rows, masks) for word, m in zip(row, mask) if m]
        assert targets == [pitch for piece in pieces[theirs] for step in piece for pitch in step]
        # what training sees: no row is without a target, none of them a pad
        split = shards.Split(tmp_path / "out", split)
        x, y = split.read(split.windows(length), length)
        assert x.shape == (len(rows), length) and (y != -1).any(1).all() and (y != 0).all()


def test_jsb_refuses_what_is_not_it(tmp_path):
    for step in ([60, 55, 50], [60, 55, 50, 20], [60, 55, 50, 109], [60, 55, 50, None]):
        (tmp_path / "j.json").write_text(
            json.dumps({"train": [[[60, 55, 50, 45], step]], "valid": [], "test": []})
        )
        with pytest.raises(ValueError) as error:
            jsb.prepare(tmp_path / "out", source=str(tmp_path / "j.json"))
        one_line(error, str(step), "Jsb16thSeparated.json")
    for content in ("<html>", "[1]", "{}", "\xe9"):
        (tmp_path / "j.json").write_text(content, encoding="latin-1")
        with pytest.raises(ValueError) as error:
            jsb.prepare(tmp_path / "out", source=str(tmp_path / "j.json"))
        one_line(error, "j.json holds no chorales", "Jsb16thSeparated.json")
    for script in (jsb, human_genome):
        with pytest.raises(OSError) as error:
            script.prepare(tmp_path / "out", source=str(tmp_path / "none"))
        one_line(error, str(tmp_path / "none"))
    assert not list(tmp_path.glob("out*"))
    for length in (0, 2, 2047):
        with pytest.raises(ValueError) as error:
            jsb.prepare(tmp_path / "out", length=length)
        one_line(error, f"length={length}", "multiple of 4")


# downloads


@pytest.fixture
def server(tmp_path):
    """-> (its address, {path: (status, the length it promises, bytes)}, the paths that were asked
    for)."""
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
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", pages, asked
        running.shutdown()


def test_download_is_whole_or_a_line(tmp_path, server, monkeypatch):
    address, pages, asked = server
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
    part = tmp_path / "out.part" / "Jsb16thSeparated.json"
    assert part.read_bytes() == b"{}"  # the download stays
    part.write_bytes(body)
    (part.parent / f"{part.name}.tmp.0.partial").write_bytes(b"what a kill left")
    count = len(asked)
    jsb.prepare(out)
    assert len(asked) == count  # the second start reads what the first one fetched
    jsb.prepare(tmp_path / "local", source=str(tmp_path / "j.json"))
    assert contents(out) == contents(tmp_path / "local") | {part.name: body}
    assert "Jsb16thSeparated.json" not in contents(tmp_path / "local")
    monkeypatch.setattr(jsb, "URL", "http://127.0.0.1:9/Jsb16thSeparated.json")
    out = tmp_path / "other"
    refused("refused")


def test_corpora_of_the_network_are_not_prepared_by_train():
    assert jsb.DOWNLOAD and maestro.DOWNLOAD and human_genome.DOWNLOAD


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
    """Distinct pieces. A key is struck once in each, so that no note hides another; the bars hold
    gaps; two pieces reach both ends of the keyboard, and the last has nothing but a C major triad
    and a note beyond the keyboard."""
    rng, result = random.Random(1), []
    for i in range(count):
        low, high = (21, 108) if i < 2 else (24, 105)
        keys = rng.sample(range(low, high + 1), 30) + ([21, 23, 108, 106] if i < 2 else [])
        onsets = rng.sample(range(i, 900), len(set(keys)))
        result.append(
            [
                (onset, key, 4 * rng.randrange(32) + 3, rng.randint(1, 31))
                for onset, key in zip(onsets, sorted(set(keys)))
            ]
        )
    result[-1] = [(8, 60, 67, 8), (8, 64, 67, 8), (8, 67, 67, 8), (40, 125, 67, 8)]
    return [sorted(notes) for notes in result]


def heard(words):
    """REMI tokens -> the notes that they say, and the other words."""
    notes, others, bar, i = [], [], -1, 0
    while i < len(words):
        kind, _, value = words[i].partition("_")
        if kind == "Bar":
            bar += 1
        elif kind == "Position":
            position = int(value)
        elif kind == "Pitch":
            (_, velocity), (_, duration) = (word.split("_") for word in words[i + 1 : i + 3])
            assert words[i + 1].startswith("Velocity_") and words[i + 2].startswith("Duration_")
            beats, parts, resolution = map(int, duration.split("."))
            notes.append(
                (
                    32 * bar + position,
                    int(value),
                    int(velocity),
                    8 * beats + 8 * parts // resolution,
                )
            )
            i += 2
        else:
            others.append(words[i])
        i += 1
    return sorted(notes), others


def test_maestro_says_what_was_played(tmp_path, monkeypatch):
    pytest.importorskip("miditok")
    pieces = pieces_of_music(41)
    folder, archive = tmp_path / "midi", tmp_path / "m.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for i, notes in enumerate(pieces):
            name = f"{2018 - i % 3}/piece_{i:02}.{'midi' if i % 2 else 'mid'}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(midi(notes))
            file.writestr(f"maestro-v3.0.0/{name}", midi(notes))
        file.writestr("maestro-v3.0.0/README", b"not music")
    maestro.prepare(tmp_path / "out", source=str(archive))

    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    names = symbols(tmp_path / "out")
    assert (meta["vocab_size"], len(names), meta["row_length"], meta["loss"]) == (
        328,
        328,
        {},
        "all",
    )
    assert names[:4] == ["PAD_None", "BOS_None", "EOS_None", "MASK_None"] and meta["separator"] == 1
    played = {}  # what a document may say -> (piece, semitones)
    for i, notes in enumerate(pieces):
        for semitones in range(-3, 4):
            moved = [(a, key + semitones, b, c) for a, key, b, c in notes if 21 <= key <= 108]
            said = tuple(sorted(note for note in moved if 21 <= note[1] <= 108))
            assert said not in played
            played[said] = i, semitones
    counts_of = {}
    for split in ("train", "val", "test"):
        words = [names[i] for i in raw(tmp_path / "out", split)]
        documents = [[]]
        for word in words:
            documents[-1].append(word)
            if word == "EOS_None":
                documents.append([])
        assert documents.pop() == []  # the split ends with a piece
        counts_of[split] = Counter()
        for document in documents:
            assert document[0] == "BOS_None" and not {"BOS_None", "PAD_None", "MASK_None"} & set(
                document[1:]
            )
            notes, others = heard(document[1:-1])
            counts_of[split][played[tuple(notes)]] += 1
            tempos = [float(word[6:]) for word in others if word.startswith("Tempo_")]
            assert tempos and all(
                abs(tempo - 120) < 4 for tempo in tempos
            )  # 32 tempos in [40, 250]
            chords = [word for word in others if word.startswith("Chord_")]
            if played[tuple(notes)][0] == 40:
                assert chords == ["Chord_maj"]
            assert len(tempos) + len(chords) == len(others)
    parts = {split: {piece for piece, _ in counts} for split, counts in counts_of.items()}
    assert sorted(itertools.chain(*parts.values())) == list(range(41))  # each piece is in one split
    assert [len(parts[split]) for split in ("train", "val", "test")] == [
        37,
        2,
        2,
    ]  # 90 / 5 / 5 percent
    for split, shifts in (("train", range(-3, 4)), ("val", [0]), ("test", [0])):
        assert counts_of[split] == Counter({(piece, s): 1 for piece in parts[split] for s in shifts})

    (tmp_path / "again.part").mkdir()
    (tmp_path / "again.part" / "train_000000.bin.tmp").write_bytes(b"what an interrupted run left")
    maestro.prepare(tmp_path / "again", source=str(folder))
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_maestro_refuses_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "miditok", None)
    with pytest.raises(ImportError) as error:
        maestro.prepare(tmp_path / "out")
    one_line(error, "pip install miditok==3.0.5.post1")
    monkeypatch.undo()
    pytest.importorskip("miditok")
    monkeypatch.setattr(maestro, "VOCAB_SIZE", 403)
    with pytest.raises(ValueError) as error:
        maestro.prepare(tmp_path / "out")
    one_line(error, "328 tokens", "403", "pip install miditok==3.0.5.post1")
    monkeypatch.undo()
    for name, parts in (
        ("two", ["2 MIDI files"]),
        ("none.zip", ["no zip file"]),
        ("nowhere", ["no zip file"]),
    ):
        (tmp_path / "two").mkdir(exist_ok=True)
        for i in (1, 2):
            (tmp_path / "two" / f"{i}.mid").write_bytes(midi([(0, 60, 3, 4)]))
        (tmp_path / "none.zip").write_bytes(b"<html>")
        with pytest.raises(ValueError) as error:
            maestro.prepare(tmp_path / "out", source=str(tmp_path / name))
        one_line(error, name, *parts)
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
            lines = [
                f">{header}",
                *(sequence[j : j + width] for j in range(0, len(sequence), width)),
            ]
            text += end.join(lines) + end
    return text, sequences


CHROMOSOMES = [*map(str, range(1, 23)), "X", "Y"]
NCBI = {
    c: f"NC_{i:06}.{9 + i % 4} Homo sapiens chromosome {c}, GRCh38.p14 Primary Assembly"
    for i, c in enumerate(CHROMOSOMES, 1)
}
UCSC = {c: f"chr{c}" for c in CHROMOSOMES}
ENSEMBL = {c: f"{c} dna:chromosome chromosome:GRCh38:{c}:1:2:1 REF" for c in reversed(CHROMOSOMES)}


def spelled(window):
    """The words of a window: between two N the text is cut into sixes, and what is left over is
    spelled."""
    words = []
    for i, text in enumerate("".join(c if c in "ACGT" else "N" for c in window.upper()).split("N")):
        if i:
            words.append("N")
        while len(text) >= 6:
            words.append(text[:6])
            text = text[6:]
        words.extend(text)
    return words


@pytest.mark.parametrize(
    "names, width, end", [(NCBI, 80, "\n"), (UCSC, 61, "\r\n"), (ENSEMBL, 10**6, "\n")]
)
def test_genome_spells_the_chromosomes(tmp_path, monkeypatch, capsys, names, width, end):
    text, sequences = fasta(5, names, width, end)
    source = tmp_path / "genome.fa"
    source.write_bytes(text.encode())
    human_genome.prepare(tmp_path / "out", source=str(source))
    printed = capsys.readouterr().out
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    table = symbols(tmp_path / "out")
    assert meta["vocab_size"] == len(table) == len(set(table)) == 4107 and meta["loss"] == "all"
    assert (
        meta["row_length"] == dict.fromkeys(("train", "val", "test"), 1001)
        and meta["separator"] == 4106
    )
    # the ids of the Nucleotide Transformer
    for i, symbol in {
        0: "<unk>",
        1: "<pad>",
        2: "<mask>",
        3: "<cls>",
        4: "AAAAAA",
        5: "AAAAAT",
        7: "AAAAAG",
        8: "AAAATA",
        4099: "GGGGGG",
        4100: "A",
        4101: "T",
        4102: "C",
        4103: "G",
        4104: "N",
        4105: "<eos>",
        4106: "<bos>",
    }.items():
        assert table[i] == symbol
    of = {
        "val": ["21"],
        "test": ["22"],
        "train": [c for c in names if c not in ("21", "22")],
    }  # in the file's order
    seen = Counter()
    for split, chromosomes in of.items():
        rows = chunks([table[i] for i in raw(tmp_path / "out", split)], 1001)
        windows = [
            sequences[c][i : i + 6000]
            for c in chromosomes
            for i in range(0, len(sequences[c]) - 5999, 6000)
        ]
        assert len(rows) == len(windows)
        for row, window in zip(rows, windows):
            assert row[0] == "<bos>" and row[1:] == spelled(window)[:1000]
            if not set(window) - set("ACGTacgt"):
                assert "".join(row[1:]) == window.upper()
        share = 100 * sum(row.count("N") for row in rows) / (1000 * len(rows))
        assert f"{len(rows):,} {split} rows ({share:.1f}% N)" in printed
        seen.update(word for row in rows for word in row[1:])
    assert all(seen[letter] for letter in "ACGTN") and not any(
        seen[word] for word in table if word[0] == "<"
    )

    # other block lengths, which end inside headers, windows and runs of N, and gzip in several
    # members: the same bytes
    for block in (1, 997, 6000):
        monkeypatch.setattr(
            human_genome, "records", functools.partial(human_genome.records, block=block)
        )
        packed = tmp_path / f"{block}.fna.gz"
        half = len(text) // 2
        packed.write_bytes(
            gzip.compress(text[:half].encode(), 1) + gzip.compress(text[half:].encode(), 1)
        )
        human_genome.prepare(tmp_path / str(block), source=str(packed))
        assert contents(tmp_path / str(block)) == contents(tmp_path / "out")
        monkeypatch.undo()


def test_genome_must_be_whole(tmp_path):
    text, _ = fasta(6, NCBI)
    whole, broken = tmp_path / "whole.fna.gz", tmp_path / "broken.fna.gz"
    whole.write_bytes(gzip.compress(text.encode(), 1))
    packed = whole.read_bytes()
    for fault in (
        packed[: len(packed) // 2],
        packed[:-8] + b"\0" * 8,
        packed[:5000] + b"\xff" * 50 + packed[5050:],
    ):
        broken.write_bytes(fault)
        with pytest.raises(ValueError) as error:
            human_genome.prepare(tmp_path / "out", source=str(broken))
        one_line(error, "broken.fna.gz")
        assert not list(tmp_path.glob("out*"))
    for missing in ("3", "21", "Y"):
        short, _ = fasta(6, {c: name for c, name in NCBI.items() if c != missing})
        broken.write_bytes(short.encode())
        with pytest.raises(ValueError) as error:
            human_genome.prepare(tmp_path / "out", source=str(broken))
        one_line(error, f"chromosome {missing};", "broken.fna.gz")
    assert not list(tmp_path.glob("out*"))
