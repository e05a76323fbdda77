"""MAESTRO v3.0.0: 200 hours of piano from ten years of a competition, as REMI tokens (PoPE section 4, appendix B.1).

    pip install miditok==3.0.5.post1
    python -m data.maestro                                                             # downloads 56 MB
    python -m data.maestro --source=/path/maestro-v3.0.0-midi.zip --out=data/maestro   # from the zip or its folder

The tokenizer is miditok's REMI with chords and tempos and the special tokens PAD, BOS, EOS, MASK. The paper's vocabulary
of 328 depends on the version: 3.0.1 to 3.0.5.post1 have it, 3.0.6 has 330 and 3.1.0 has 403.

Each file becomes BOS, its tokens, EOS. The paper splits 90 / 5 / 5 percent and leaves open by what: here by file, drawn
with a fixed seed, so that two performances of one composition may fall into two splits. It samples transpositions
uniformly from -3 to +3 semitones: here all seven of each training file are written, so that a random window has each
of them equally likely; val and test stay as played. Notes that leave the piano's 88 keys are left out by REMI.

A split is one stream: a piece is several times longer than the paper's 2048 tokens, so training on random windows of
that length (block_size=2048) wastes nothing on pads, and an evaluation tiles the split with them.

splits   train, val, test
options  source: the zip, or a folder with the MIDI files

It takes a quarter of an hour on one core, less on more. A second start after an interruption begins anew and writes the same bytes.
"""
import multiprocessing
import signal
import zipfile
from pathlib import Path

import numpy as np

from data.shards import Progress, Writer, command, download, rng

DOWNLOAD = True
URL = "https://storage.googleapis.com/magentadata/datasets/maestro/v3.0.0/maestro-v3.0.0-midi.zip"
SHA256 = "70470ee253295c8d2c71e6d9d4a815189e35c89624b76d22fce5a019d5dde12c"
VOCAB_SIZE = 328
TRANSPOSITIONS = range(-3, 4)
MIDITOK = "pip install miditok==3.0.5.post1"


def remi():
    """The tokenizer. Raises ImportError without miditok, ValueError where its version makes another vocabulary."""
    try:
        import miditok
    except ImportError:
        raise ImportError(f"MAESTRO's tokens need one more package: {MIDITOK}") from None
    special = ["PAD", "BOS", "EOS", "MASK"]
    made = miditok.REMI(miditok.TokenizerConfig(special_tokens=special, use_chords=True, use_tempos=True))
    if len(made) != VOCAB_SIZE:
        raise ValueError(f"this miditok's REMI has {len(made)} tokens, the paper's {VOCAB_SIZE}; versions 3.0.1 to "
                         f"3.0.5.post1 have them: {MIDITOK}")
    return made


def start_worker():
    global tokenizer
    tokenizer = remi()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to answer, once


def encode(job):
    """(the bytes of a MIDI file, transpositions in semitones) -> uint16 (n,): BOS, tokens, EOS of each of them."""
    import symusic  # miditok's own reader

    score, keys, parts = symusic.Score.from_midi(job[0]), range(*tokenizer.config.pitch_range), []
    for track in score.tracks:
        track.notes.filter(lambda note: note.pitch in keys, inplace=True)  # symusic refuses to shift beyond MIDI's 0 to 127
    for semitones in job[1]:
        ids = [i for track in tokenizer(score.shift_pitch(semitones)) for i in track.ids]
        parts.append([tokenizer["BOS_None"], *ids, tokenizer["EOS_None"]])
    return np.concatenate(parts).astype(np.uint16)


def files(source):
    """A zip or a folder -> {name of a MIDI file: a function that reads it}, sorted by name, which is the same in both."""
    if Path(source).is_dir():
        found = {path.name: path.read_bytes for path in Path(source).rglob("*.mid*")}
    else:
        try:
            archive = zipfile.ZipFile(source)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{source} is no zip that can be read ({error}); give MAESTRO's zip or folder") from None
        names = [name for name in archive.namelist() if name.endswith((".mid", ".midi"))]
        found = {Path(name).name: lambda name=name: archive.read(name) for name in names}
    if len(found) < 3:
        raise ValueError(f"{source} holds {len(found)} MIDI files, three splits need 3 or more; give MAESTRO's zip or folder")
    return dict(sorted(found.items()))


def prepare(folder, source: str = None):
    """Write the set into `folder`. Raises what `remi` and `files` do, and ValueError for a failed download."""
    names = remi().vocab  # {name: id}; first, as it may raise
    found = files(source or download(URL, Path(folder) / "maestro-v3.0.0-midi.zip", SHA256))
    order = rng(0, 0).permutation(list(found)).tolist()
    share = max(1, round(len(order) / 20))
    parts = {"train": order[2 * share :], "val": order[:share], "test": order[share : 2 * share]}
    jobs = [(split, name, TRANSPOSITIONS if split == "train" else [0]) for split, part in parts.items() for name in part]
    writer, progress, tokens = Writer(folder), Progress(), dict.fromkeys(parts, 0)
    with multiprocessing.Pool(initializer=start_worker) as pool:
        encoded = pool.imap(encode, ((found[name](), semitones) for _, name, semitones in jobs))
        for done, ((split, *_), ids) in enumerate(zip(jobs, encoded), 1):
            writer.write(split, ids)
            tokens[split] += len(ids)
            progress.show(done / len(jobs), sum(tokens.values()), "tokens")
    writer.finish(VOCAB_SIZE, {"symbols": sorted(names, key=names.get)}, separator=names["BOS_None"])
    print(f"\r{folder}: " + ", ".join(f"{tokens[split]:,} {split} tokens of {len(part)} files" for split, part in parts.items()))


if __name__ == "__main__":
    command(prepare, __doc__)
