"""
Reads options and runs the main function of a script.

    cfg = load(TrainConfig, sys.argv[1:])    # e.g. ["config/quickstart.py", "--pe=rope"]

The options are the fields of a dataclass. A config file overrides their defaults, and flags
override both. A config file consists of plain assignments. It may begin with
`from config.pope_124m import *` and then say only what differs. Each of its assignments is read as
if it were a flag, so the same mistakes are refused in both.
"""
import argparse
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import shlex
import signal
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, get_args, get_origin

ROOT = Path(__file__).parent.parent  # of the project

class Mistake(ValueError):
    """Something that the user of a script can mend. `run` prints it as one line. model.py, which
    can be used without this module, has a class of the same name for the options of a model."""

def require(condition, text):
    """Raises Mistake with this text unless the condition holds."""
    if not condition:
        raise Mistake(text)

def run(main):
    """Runs the main function of a script with the words of its command line. A Mistake, or a file
    that cannot be read or written, ends the script with one line. Ctrl-C ends it as a signal does,
    so that a shell loop ends too. Any other exception is a bug or needs a closer look, so it keeps
    its traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # it may be closed, or a notebook
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot show every character
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and type(error).__name__ != "Mistake":
            raise
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: {error}")

def optional(name, package=None):
    """Returns the module `name`, which only some scripts need. Raises Mistake if it, or a module
    that it needs in turn, is not installed. `package` is what to install, if its name differs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        install = shlex.join(["pip", "install", package or name])
        raise Mistake(f"this needs {error.name}, which is not installed; run {install}") from error

def one_line(error):
    """Returns the text of an exception of a library, which may have several lines, as one line."""
    return " ".join(str(error).split()) or type(error).__name__

class Parser(argparse.ArgumentParser):
    """The parser of all scripts. Its description is the script's docstring."""

    def __init__(self, description, **more):
        super().__init__(description=description.strip(), allow_abbrev=False, **more,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: --(\w+)", message)
        mend = "--help shows all options"
        if unknown and (nearest := self.nearest(unknown[1])):
            mend = f"did you mean --{nearest}?"
        raise Mistake(f"{message} ({mend})")

    def nearest(self, name):
        """Returns the option that is most like a name, or has its letters as initials (lr), or
        None."""
        names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        for known in names:
            if "".join(word[:1] for word in known.split("_")) == name:
                return known
        return next(iter(difflib.get_close_matches(name, names, 1)), None)

    def add_option(self, name, kind, help):
        """Adds --name=value, where kind is the type of the value: int, float, str or bool, one of
        the types below that have a range, a Literal, or a union of one of these with None. An
        option that is not given is left out of the result."""
        flag = f"--{name}"
        if type(None) in get_args(kind):  # the kind is something like int | None
            kind, = set(get_args(kind)) - {type(None)}
        words = {"metavar": getattr(kind, "__name__", "").upper()}
        if get_origin(kind) is Annotated:
            help = f"{help} ({kind.__metadata__[0]})"
            words["metavar"] = kind.__origin__.__name__.upper()
        if get_origin(kind) is Literal:
            words = {"choices": get_args(kind)}
        elif kind is bool:  # --resume means --resume=True
            words = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
        else:
            words["type"] = READERS[kind]
        # argparse formats the help
        self.add_argument(flag, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **words)

# --- values ---------------------------------------------------------------------------------------
# The types of options that have a range, which --help shows

Count = Annotated[int, "at least 1"]
NotNegative = Annotated[float, "at least 0"]
Fraction = Annotated[float, "from 0 to below 1"]

def boolean(word):
    if word not in ("True", "False"):
        mend = "; a config file must come before the flags" if word.endswith(".py") else ""
        raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False{mend}")
    return word == "True"

def number(word):
    value = float(word)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{word} is not a finite number")
    return value

def not_negative(word):
    value = number(word)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{word} must be at least 0")
    return value

def fraction(word):
    value = number(word)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{word} must be from 0 to below 1")
    return value

def integer(word):
    """Returns the integer that a word such as 1000 or 1e3 stands for. It is a number of things, or
    a seed, so it must not be negative."""
    value = int(word) if word.isdecimal() else number(word)
    if value != int(value) or not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer from 0 to 2^63 - 1")
    return int(value)

def count(word):
    value = integer(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} must be at least 1")
    return value

def counts(word):
    return [count(part) for part in word.split(",")]

def comma_separated(word):
    """Returns the names in a word such as val,sparse, without repetitions."""
    names = word.split(",")
    if "" in names:
        raise argparse.ArgumentTypeError(f"{word!r} has an empty name")
    return list(dict.fromkeys(names))

def text(word):
    """Returns the word. A path in the home directory is written out, because a shell does that for
    ~/a, but not for --out_dir=~/a."""
    return os.path.expanduser(word) if word.startswith("~/") else word

READERS = {int: integer, float: number, str: text,
           Count: count, NotNegative: not_negative, Fraction: fraction}

# --- options --------------------------------------------------------------------------------------

def load(cls, words):
    """Returns an instance of the dataclass cls from the words of a command line."""
    from_file, from_flags = read(cls, words)
    return cls(**{**from_file, **from_flags})

def read(cls, words):
    """Returns two dicts {name: value}: the options in a config file, and those that the words of a
    command line give as flags. cls is a dataclass of options. If it has a field `config`, one word
    may be the path of a config file, which becomes its value. The file is executed."""
    from_flags = parse(cls, words)
    if not from_flags.get("config"):
        return {}, from_flags
    path = from_flags["config"]
    values = assignments(path)
    unknown = values.keys() - {field.name for field in fields(cls)}
    if unknown:  # argparse could take such a flag for the path of a config file
        raise Mistake(f"{path}: unknown options: {', '.join(sorted(unknown))}")
    for name, value in values.items():
        if not isinstance(value, (str, int, float)):
            raise Mistake(f"{path}: {name}={value!r} is neither text, a number, True nor False")
    try:
        return parse(cls, [f"--{name}={value}" for name, value in values.items()]), from_flags
    except Mistake as mistake:
        raise Mistake(f"{path}: {mistake}") from None

def files():
    """Returns the paths of the project's config files."""
    modules = "__init__.py", "devices.py", "runs.py"
    return [path for path in sorted((ROOT / "config").glob("*.py")) if path.name not in modules]

def assignments(path):
    """Returns {name: value} of what a config file assigns. Modules that it imports, and names that
    begin with _, are left out. A path is taken from the working directory or from the project."""
    file = Path(path) if Path(path).is_file() else ROOT / path
    if not file.is_file():
        nearest = difflib.get_close_matches(f"{file.stem}.py", [each.name for each in files()], 1)
        mend = f"did you mean config/{nearest[0]}?" if nearest else "they are in config/"
        raise Mistake(f"there is no config file {path!r}; {mend}")
    values = {}
    exec(compile(file.read_text("utf-8-sig"), path, "exec"), values)
    return {name: value for name, value in values.items()
            if name[0] != "_" and not isinstance(value, ModuleType)}

@functools.cache  # because a source is slow to find
def comments(thing):
    """Returns {name: comment} of the fields of a class or the arguments of a function, which are
    written as `    name: type = default  # comment`, one on each line."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)", inspect.getsource(thing), re.M))

def parse(cls, words):
    """Returns {name: value} of the options that the words give, and no others, in the order in
    which cls declares them."""
    parser = Parser(sys.modules[cls.__module__].__doc__,
                    usage="%(prog)s [CONFIG FILE] [--option=value ...]")
    about = {}
    for base in reversed(cls.__mro__[:-1]):  # the last is object, which has no source
        about.update(comments(base))
    for field in fields(cls):
        comment = about.get(field.name, "")
        default = "" if field.default is MISSING else f" [{field.default!r}]"
        if field.name == "config":
            parser.add_argument("config", nargs="?", default=argparse.SUPPRESS, help=comment)
        else:
            parser.add_option(field.name, field.type, comment + default)
    given = vars(parser.parse_args(words))
    return {field.name: given[field.name] for field in fields(cls) if field.name in given}
