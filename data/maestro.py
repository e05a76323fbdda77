"""MAESTRO v3.0.0: 200 hours of piano from ten years of a competition, as REMI tokens (PoPE
section 4, appendix B.1).

    pip install miditok==3.0.5.post1
    python -m data.maestro                                                            # 56 MB
    python -m data.maestro --source=/path/maestro-v3.0.0-midi.zip

The tokenizer is miditok's REMI with chords, tempos and the special tokens PAD, BOS, EOS, MASK. Its
vocabulary depends on the version. Versions 3.0.1 to 3.0.5.post1 have the paper's 328 tokens,
whereas 3.0.6 has 330 and 3.1.0 has 403.

Each file becomes BOS, its tokens and EOS. The paper splits the data 90 / 5 / 5 percent, but does
not say by what. We split by file, with a fixed seed, so two performances of one composition may
land in different splits. The paper draws a transposition uniformly from -3 to +3 semitones. We
write all seven of each training file, so a random window is equally likely to have any of them. The
files of val and test stay as they were played. REMI leaves out notes beyond the piano's 88 keys.

A split is one stream, so a window may contain the border of two pieces. Few do, because a piece is
several times longer than block_size=2048.

This takes about a quarter of an hour. If it is interrupted, it starts over.
"""
import os
import zipfile

import numpy as np

from config import Mistake, optional
from data import command, download
from data.shards import Writer, rng

URL = "https://storage.googleapis.com/magentadata/datasets/maestro/v3.0.0/maestro-v3.0.0-midi.zip"
SHA256 = "70470ee253295c8d2c71e6d9d4a815189e35c89624b76d22fce5a019d5dde12c"
PACKAGE = "miditok==3.0.5.post1"  # the newest version whose vocabulary is the paper's
VOCAB_SIZE = 328
TRANSPOSITIONS = range(-3, 4)

def remi():
    """Returns the tokenizer. Raises Mistake if this miditok has another vocabulary."""
    miditok = optional("miditok", PACKAGE)
    special = ["PAD", "BOS", "EOS", "MASK"]
    how = miditok.TokenizerConfig(special_tokens=special, use_chords=True, use_tempos=True)
    tokenizer = miditok.REMI(how)
    if len(tokenizer) != VOCAB_SIZE:
        raise Mistake(f"this miditok's REMI has {len(tokenizer)} tokens, but the paper's has "
                      f"{VOCAB_SIZE}; run pip install {PACKAGE}")
    return tokenizer

def encode(tokenizer, midi, transpositions):
    """Returns the tokens, uint16 (n,), of the bytes of a MIDI file: BOS, the piece and EOS for each
    transposition, which is a number of semitones."""
    import symusic  # the library with which miditok reads files

    score = symusic.Score.from_midi(midi)
    keys = range(*tokenizer.config.pitch_range)
    for track in score.tracks:  # symusic refuses to shift notes beyond MIDI's 0 to 127
        track.notes.filter(lambda note: note.pitch in keys, inplace=True)
    tokens = []
    for semitones in transpositions:
        tokens.append(tokenizer["BOS_None"])
        for track in tokenizer(score.shift_pitch(semitones)):
            tokens += track.ids
        tokens.append(tokenizer["EOS_None"])
    return np.array(tokens, dtype=np.uint16)

def prepare(
    folder,
    source: str = None,  # the zip file
):
    tokenizer = remi()  # before the download, because miditok may be missing
    archive = zipfile.ZipFile(source or download(URL, SHA256))
    names = [name for name in archive.namelist() if name.endswith((".mid", ".midi"))]
    names = rng(0, 0).permutation(sorted(names, key=os.path.basename)).tolist()
    n = round(len(names) / 20)  # files of val, and of test
    splits = {"train": names[2 * n :], "val": names[:n], "test": names[n : 2 * n]}
    symbols = sorted(tokenizer.vocab, key=tokenizer.vocab.get)
    bos = tokenizer["BOS_None"]
    with Writer(folder, VOCAB_SIZE, {"symbols": symbols}, separator=bos) as writer:
        for split, names_of_split in splits.items():
            transpositions = TRANSPOSITIONS if split == "train" else [0]
            for name in names_of_split:
                writer.write(split, encode(tokenizer, archive.read(name), transpositions))

if __name__ == "__main__":
    command(prepare, __doc__)
