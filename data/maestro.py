"""MAESTRO v3.0.0: 200 hours of piano from ten years of a competition, as REMI tokens (PoPE
section 4, appendix B.1).

    pip install miditok==3.0.5.post1
    python -m data.maestro                                                            # 56 MB
    python -m data.maestro --source=/path/maestro-v3.0.0-midi.zip --out=data/maestro  # or folder

The tokenizer is miditok's REMI with chords, tempos and the special tokens PAD, BOS, EOS, MASK. The
paper's vocabulary of 328 depends on the version: 3.0.1 to 3.0.5.post1 have it, 3.0.6 has 330 and
3.1.0 has 403.

Each file becomes BOS, its tokens, EOS. The paper splits 90 / 5 / 5 percent, but does not say by
what. Here it is by file, with a fixed seed, so two performances of one composition may land in
different splits. The paper draws transpositions uniformly from -3 to +3 semitones. Here all seven
of each training file are written, so a random window is equally likely to have any of them. Val and
test stay as played. REMI drops notes outside the piano's 88 keys.

A split is one stream. A piece is several times longer than the paper's 2048 tokens, so training on
random windows of that length (block_size=2048) wastes nothing on pads. An evaluation tiles the
split with such windows.

splits   train, val, test
options  source: the zip, or a folder with the MIDI files

It uses all cores; one alone takes a quarter of an hour. After an interruption it starts over, and
writes the same bytes.
"""
import collections
import functools
import zipfile
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer, rng
from data.text import Progress, download, workers

DOWNLOAD = True
URL = "https://storage.googleapis.com/magentadata/datasets/maestro/v3.0.0/maestro-v3.0.0-midi.zip"
SHA256 = "70470ee253295c8d2c71e6d9d4a815189e35c89624b76d22fce5a019d5dde12c"
VOCAB_SIZE = 328
TRANSPOSITIONS = range(-3, 4)
MIDITOK = "pip install miditok==3.0.5.post1"

def remi():
    """The tokenizer. ImportError: no miditok. ValueError: its version has another vocabulary."""
    try:
        import miditok
    except ImportError:
        raise ImportError(f"MAESTRO's tokens need one more package: {MIDITOK}") from None
    special = ["PAD", "BOS", "EOS", "MASK"]
    how = miditok.TokenizerConfig(special_tokens=special, use_chords=True, use_tempos=True)
    made = miditok.REMI(how)
    if len(made) != VOCAB_SIZE:
        raise ValueError(f"this miditok's REMI has {len(made)} tokens, the paper's {VOCAB_SIZE}; "
                         f"versions 3.0.1 to 3.0.5.post1 have them: {MIDITOK}")
    return made

def start_worker():
    global tokenizer
    tokenizer = remi()

def encode(job):
    """(the bytes of a MIDI file, transpositions in semitones) -> uint16 (n,): for each of them BOS,
    tokens, EOS."""
    import symusic  # miditok's own reader

    midi, transpositions = job
    score = symusic.Score.from_midi(midi)
    keys = range(*tokenizer.config.pitch_range)
    for track in score.tracks:  # symusic refuses to shift beyond MIDI's 0 to 127
        track.notes.filter(lambda note: note.pitch in keys, inplace=True)
    parts = []
    for semitones in transpositions:
        ids = [i for track in tokenizer(score.shift_pitch(semitones)) for i in track.ids]
        parts.append([tokenizer["BOS_None"], *ids, tokenizer["EOS_None"]])
    return np.concatenate(parts).astype(np.uint16)

def files(source):
    """A zip or a folder -> {name of a MIDI file: a function that reads it}, sorted by name. Both
    give the same names."""
    if Path(source).is_dir():
        readers = {path.name: path.read_bytes for path in Path(source).rglob("*.mid*")}
    else:
        try:
            archive = zipfile.ZipFile(source)
        except (OSError, zipfile.BadZipFile) as error:
            fault = f"{source} is no zip file that can be read ({error})"
            raise ValueError(f"{fault}; give MAESTRO's zip or folder") from None
        names = [name for name in archive.namelist() if name.endswith((".mid", ".midi"))]
        readers = {Path(name).name: functools.partial(archive.read, name) for name in names}
    if len(readers) < 3:
        raise ValueError(f"{source} holds {len(readers)} MIDI files, but there are three splits; "
                         "give MAESTRO's zip or folder")
    return dict(sorted(readers.items()))

def prepare(folder, source: str = None):
    """Write the set into `folder`. Raises what `remi` and `files` do. ValueError: the download
    failed."""
    names = remi().vocab  # {name: id}; first, as it may raise
    tokens = collections.Counter()
    with Writer(folder, source=URL.rpartition("/")[2]) as writer:
        readers = files(source or download(URL, writer.part, SHA256))
        order = rng(0, 0).permutation(list(readers)).tolist()
        share = max(1, round(len(order) / 20))
        val, test, train = order[:share], order[share : 2 * share], order[2 * share :]
        parts = {"train": train, "val": val, "test": test}
        splits = [split for split, part in parts.items() for _ in part]
        jobs = []
        for split, part in parts.items():
            semitones = TRANSPOSITIONS if split == "train" else [0]
            jobs += [(readers[name](), semitones) for name in part]
        progress = Progress(len(jobs), "files")
        with workers(start_worker) as pool:
            for done, (split, ids) in enumerate(zip(splits, pool.map(encode, jobs)), 1):
                writer.write(split, ids)
                tokens[split] += len(ids)
                progress.show(done)
        symbols = sorted(names, key=names.get)
        writer.finish(VOCAB_SIZE, {"symbols": symbols}, separator=names["BOS_None"])
    sizes = [f"{tokens[split]:,} {split} tokens of {len(parts[split])} files" for split in parts]
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")

if __name__ == "__main__":
    command(prepare, __doc__)
