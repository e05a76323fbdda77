"""The human reference genome, GRCh38.p14, in 6-mers (PoPE section 4, appendix B.1).

    python -m data.human_genome                                       # downloads 1 GB
    python -m data.human_genome --source=/path/GRCh38.fna.gz --out=data/human_genome

The paper prepares the genome as the Nucleotide Transformer does, and so do we. Letters other than
A, C, G, T become N. Chromosomes are cut into windows of 6,000 nucleotides. A token is the next six
letters, or one letter if the six include an N or pass the end of the window. The vocabulary of
4107, with that model's ids, is 4096 6-mers, A, T, C, G, N and six special tokens. Chromosome 21 is
val, 22 is test, the others, X and Y are train. Records with other names (mitochondrion, patches,
unplaced pieces) are skipped, and so is what follows the last whole window of a chromosome.

A row is <bos> and the first 1000 tokens of a window, for block_size=1000. A window without N has
exactly 1000, so rows need neither pads nor a mask, and an epoch sees each window once. A window
with N has more, and the rest is cut off, as that model cuts its input. A stream would keep it, and
two thirds of chromosome 22's tokens would be N; in rows, a quarter are. The paper does not say what
it did with N. A model predicts N almost for free, so compare losses only at the same share of N,
which the script prints.

splits   train: 498,444 rows, val: 7,784, test: 8,469
options  source: the file; its records are named as at NCBI (NC_000021.9), UCSC (chr21) or
         Ensembl (21)

It takes a few minutes on one core. After an interruption it starts over, and writes the same bytes.
"""
import gzip
import itertools
import re
import zlib
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer
from data.text import Progress, download

DOWNLOAD = True
URL = ("https://ftp.ncbi.nlm.nih.gov/genomes/all/GCF/000/001/405/GCF_000001405.40_GRCh38.p14/"
       "GCF_000001405.40_GRCh38.p14_genomic.fna.gz")
WINDOW, TOKENS = 6000, 1000  # nucleotides, and tokens kept of them
SIX_MERS = map("".join, itertools.product("ATCG", repeat=6))
SYMBOLS = ["<unk>", "<pad>", "<mask>", "<cls>", *SIX_MERS, *"ATCGN", "<eos>", "<bos>"]
IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS)}
BOS, N = IDS[b"<bos>"], IDS[b"N"]
OF_TRAIN = [*map(str, range(1, 21)), "X", "Y"]
SPLIT = dict.fromkeys(OF_TRAIN, "train") | {"21": "val", "22": "test"}  # by chromosome

LETTERS = bytes(i & ~32 if chr(i) in "ACGTacgt" else ord("N") for i in range(256))  # upper case
TOKEN = re.compile(b"[ACGT]{6}|.")  # a regex does 25 million nucleotides a second
NAME = re.compile(rb"(?:NC_0000|chr)?0?(\d+|X|Y)(?:\.\d+)?\s")

def records(file, block=1 << 24):
    """A FASTA file -> pairs of a record's chromosome ("1" to "22", "X", "Y", or None) and a part of
    its sequence, bytes of A, C, G, T, N, in order. A part has about `block` bytes."""
    name = None
    while text := file.read(block):
        text = b"\n" + text + file.readline()  # whole lines
        for i, part in enumerate(text.split(b"\n>")):
            if i:  # what precedes the first > belongs to the previous block's record
                header, _, part = part.partition(b"\n")
                known = NAME.match(header + b"\n")
                name = known[1].decode() if known else None
                name = {"23": "X", "24": "Y"}.get(name, name)  # as NCBI numbers them
            yield name, part.translate(LETTERS, b"\r\n")

def tokenise(sequence):
    """Whole windows, bytes of A, C, G, T, N -> uint16 (windows, 1 + TOKENS)."""
    rows = np.full((len(sequence) // WINDOW, 1 + TOKENS), BOS, dtype=np.uint16)
    for i, row in enumerate(rows):
        words = TOKEN.findall(sequence, i * WINDOW, (i + 1) * WINDOW)
        row[1:] = [IDS[word] for word in words[:TOKENS]]
    return rows

def prepare(folder, source: str = None):
    """Write the set into `folder`. ValueError: the file is broken or lacks a chromosome, or the
    download failed."""
    # of each chromosome: tokens, and N among them
    counts = {name: np.zeros(2, dtype=np.int64) for name in SPLIT}
    with Writer(folder, source=URL.rpartition("/")[2]) as writer:
        path = Path(source) if source else download(URL, writer.part)
        progress, current, rest = Progress(path.stat().st_size, "bytes"), None, b""
        with open(path, "rb") as raw:
            file = gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            try:
                for name, part in records(file):
                    if name != current:
                        current, rest = name, b""
                    if name in SPLIT:
                        rest += part
                        whole = len(rest) // WINDOW * WINDOW
                        rows = tokenise(rest[:whole])
                        writer.write(SPLIT[name], rows)
                        counts[name] += rows[:, 1:].size, (rows == N).sum()
                        rest = rest[whole:]
                    progress.show(raw.tell())
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is broken ({error}); delete and refetch it") from None
        missing = [name for name in SPLIT if not counts[name][0]]
        if missing:
            raise ValueError(f"{path} holds no window of chromosome {', '.join(missing)}; "
                             f"give the whole genome, such as {URL}")
        writer.finish(len(SYMBOLS), {"symbols": SYMBOLS}, separator=BOS)
    sizes = []
    for split in ("train", "val", "test"):
        tokens, unknown = sum(counts[name] for name in SPLIT if SPLIT[name] == split)
        sizes.append(f"{tokens // TOKENS:,} {split} rows ({100 * unknown / tokens:.1f}% N)")
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")

if __name__ == "__main__":
    command(prepare, __doc__)
