"""MAESTRO v3.0.0: 200 hours of piano from ten years of a competition, as REMI tokens (PoPE
section 4, appendix B.1).

    pip install miditok==3.0.5.post1
    python -m data.maestro                                                            # 56 MB
    python -m data.maestro --source=/path/maestro-v3.0.0-midi.zip --out=data/maestro  # or folder

The tokenizer is miditok's REMI with chords, tempos and the special tokens PAD, BOS, EOS, MASK. Its
vocabulary depends on the version. Versions 3.0.1 to 3.0.5.post1 have the paper's 328 tokens,
whereas 3.0.6 has 330 and 3.1.0 has 403.

Each file becomes BOS, its tokens and EOS. The paper splits the data 90 / 5 / 5 percent, but does
not say by what. We split by file, with a fixed seed, so two performances of one composition may
land in different splits. The paper draws a transposition uniformly from -3 to +3 semitones. We
write all seven of each training file, so a random window is equally likely to have any of them. The
files of val and test stay as they were played. REMI leaves out notes beyond the piano's 88 keys.

A split is one stream. Training reads random windows of it (block_size=2048), and an evaluation
tiles the split with such windows. Because a piece is several times longer than that, few windows
contain the border of two pieces, and none needs pads.

splits   train, val, test
options  source: the zip, or a folder with the MIDI files

This uses all cores, and would take a quarter of an hour on one. After an interruption it starts
over, and writes the same bytes.
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
    """Returns the tokenizer. Raises ImportError if miditok is missing, and ValueError if its
    version has another vocabulary."""
    try:
        import miditok
    except ImportError:
        raise ImportError(f"MAESTRO's tokens need one more package: {MIDITOK}") from None
    special = ["PAD", "BOS", "EOS", "MASK"]
    how = miditok.TokenizerConfig(special_tokens=special, use_chords=True, use_tempos=True)
    tokenizer = miditok.REMI(how)
    if len(tokenizer) != VOCAB_SIZE:
        raise ValueError(f"this miditok's REMI has {len(tokenizer)} tokens, but the paper's has "
                         f"{VOCAB_SIZE}; versions 3.0.1 to 3.0.5.post1 agree with it: {MIDITOK}")
    return tokenizer

def start_worker():
    global tokenizer
    tokenizer = remi()

def encode(job):
    """Returns the tokens, uint16 (n,), of a job: the bytes of a MIDI file, and transpositions in
    semitones, each of which gives BOS, the file's tokens and EOS."""
    import symusic  # the library with which miditok reads files

    midi, transpositions = job
    score = symusic.Score.from_midi(midi)
    keys = range(*tokenizer.config.pitch_range)
    for track in score.tracks:  # because symusic refuses to shift notes beyond MIDI's 0 to 127
        track.notes.filter(lambda note: note.pitch in keys, inplace=True)
    documents = []
    for semitones in transpositions:
        ids = [i for track in tokenizer(score.shift_pitch(semitones)) for i in track.ids]
        documents.append([tokenizer["BOS_None"], *ids, tokenizer["EOS_None"]])
    return np.concatenate(documents).astype(np.uint16)

def files(source):
    """Returns {name of a MIDI file: a function that reads it}, sorted by name, for a zip or a
    folder, which have the same names. Raises ValueError if there are fewer than three files."""
    if Path(source).is_dir():
        readers = {path.name: path.read_bytes for path in Path(source).rglob("*.mid*")}
    else:
        try:
            archive = zipfile.ZipFile(source)
        except (OSError, zipfile.BadZipFile) as error:
            fault = f"{source} is not a zip file that can be read ({error})"
            raise ValueError(f"{fault}; give MAESTRO's zip or folder") from None
        names = [name for name in archive.namelist() if name.endswith((".mid", ".midi"))]
        readers = {Path(name).name: functools.partial(archive.read, name) for name in names}
    if len(readers) < 3:
        raise ValueError(f"{source} holds {len(readers)} MIDI files, which do not fill three "
                         "splits; give MAESTRO's zip or folder")
    return dict(sorted(readers.items()))

def prepare(folder, source: str = None):
    """Writes the set into `folder`. Raises what `remi` and `files` raise, and ValueError if the
    download failed."""
    ids = remi().vocab  # {name: id}; before the download, because miditok may be missing
    tokens = collections.Counter()
    with Writer(folder) as writer:
        readers = files(source or download(URL, SHA256))
        order = rng(0, 0).permutation(list(readers)).tolist()
        n = max(1, round(len(order) / 20))  # files of val, and of test
        names = {"train": order[2 * n :], "val": order[:n], "test": order[n : 2 * n]}
        jobs = []
        splits = []  # of each job
        for split in names:
            semitones = TRANSPOSITIONS if split == "train" else [0]
            for name in names[split]:
                jobs.append((readers[name](), semitones))
                splits.append(split)
        progress = Progress(len(jobs), "files")
        with workers(start_worker) as pool:
            encoded = zip(splits, pool.map(encode, jobs))
            for done, (split, piece) in enumerate(encoded, start=1):
                writer.write(split, piece)
                tokens[split] += len(piece)
                progress.show(done)
        symbols = sorted(ids, key=ids.get)
        writer.finish(VOCAB_SIZE, {"symbols": symbols}, separator=ids["BOS_None"])
    sizes = [f"{tokens[split]:,} {split} tokens of {len(names[split])} files" for split in names]
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")

if __name__ == "__main__":
    command(prepare, __doc__)
