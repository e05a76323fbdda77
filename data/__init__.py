'''Data sets. data/<name>.py writes data/<name>/, and data/shards.py defines the format they share.

To add a text corpus, write a script like data/pg19.py, whose code is just this:

    """PG-19's test split: 100 whole books, ..."""
    from data import command
    from data.text import hub, texts, write_documents

    DOWNLOAD = True

    def load():
        return hub("emozilla/pg19-test", split="test")

    def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
        """Write the set into `folder`, from the first `limit` books."""
        write_documents(folder, lambda: {"test": texts(load(), limit)}, tokenizer, limit=limit)

    if __name__ == "__main__":
        command(prepare, __doc__)

`python -m data.pg19 --limit=3` then writes data/pg19@limit=3/, and `--data=pg19@limit=3` trains on
it. The typed arguments of `prepare` are the options. If DOWNLOAD is False, train.py writes a
missing set by itself: data/stdlib.py is such a stream, data/flip_flop.py such a task.
'''
import contextlib
import dataclasses
import importlib
import os
import sys
from pathlib import Path

import config

HELPERS = {"data", "rows", "shards", "text", "tokenizer"}
SCRIPTS = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - HELPERS

def locate(data):
    """The folder of a data set by its name, or `data` itself if it is a path."""
    return Path(data) if os.sep in data or Path(data).is_file() else Path(__file__).parent / data

def command_for(folder):
    """The command that writes the set of a folder, `quoted`, or how to find it."""
    name, _, text = Path(folder).name.partition("@")
    if name in SCRIPTS:
        flags = [f" --{option}" for option in text.split(",") if option]
        if Path(folder).resolve().parent != Path(__file__).resolve().parent:
            flags.append(f" --out={folder}")
        return f"`python -m data.{name}{''.join(flags)}`"
    if Path(folder).is_file():
        return f"`python -m data.text --source={folder}`"
    return (f"`python -m data.NAME --out={folder}`; NAME is one of {', '.join(sorted(SCRIPTS))}, "
            "or text with --source=YOUR_TEXT")

def options(prepare, words, **more):
    """["--length=64", "seed=1"], or one string with commas -> {name: value}, for the arguments of
    `prepare` and for `more`, {name: type}. ValueError: an unknown name, or a wrong type."""
    words = words.split(",") if isinstance(words, str) else words
    known = dataclasses.make_dataclass("Options", (prepare.__annotations__ | more).items())
    given = {}
    for word in filter(None, words):
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise ValueError(f"{word!r} has no value; write --key=value, or --help for the keys")
        given[key] = config.typed(known, key, value, word)
    return given

def prepare(data, folder):
    """Write a missing set that needs no download. If another process is writing it, wait."""
    name, _, text = data.partition("@")
    if name not in SCRIPTS or (Path(folder) / "meta.json").exists():
        return  # if something is wrong, Split says what
    script = importlib.import_module(f"data.{name}")
    given = options(script.prepare, text)
    if script.DOWNLOAD:
        raise FileNotFoundError(f"data set {data!r} is not prepared and needs a download; "
                                f"run {command_for(folder)}")
    with contextlib.suppress(FileExistsError):  # another process was faster
        script.prepare(folder, **given)

def command(prepare, doc, named=None):
    """The command line of a data script: the typed arguments of `prepare`, and --out, the folder.

    The set is named after the script and the options given, stdlib or flip_flop@length=256, or by
    `named`. A failure prints one line.
    """
    if {"-h", "--help"} & set(sys.argv):
        keys = [f"--{key} ({kind.__name__})" for key, kind in prepare.__annotations__.items()]
        sys.exit(print(f"{doc.strip()}\n\nkeys     {', '.join([*keys, '--out (str)'])}"))
    try:
        given = options(prepare, sys.argv[1:], out=str)
        out = given.pop("out", None)
        is_in_doubt = out is not None and (Path(out) / "meta.json").exists()
        if out is None:
            text = ",".join(f"{key}={value}" for key, value in given.items())
            script = Path(sys.argv[0]).stem
            name = named(**given) if named else f"{script}@{text}".rstrip("@")
            if os.sep in name:
                raise ValueError(f"an option with a {os.sep} needs --out too, the folder to write")
            out = locate(name)
        prepare(out, **given)
    except FileExistsError as error:
        # fine if the folder's name has the options; under --out they may differ
        sys.exit(str(error) if is_in_doubt else print(error))
    except (ImportError, ValueError, OSError, MemoryError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("\nstopped; give the same command again to go on")
