"""
Reads options and runs the main function of a script.

    cfg = load(TrainConfig, sys.argv[1:])    # e.g. ["config/quickstart.py", "--pe=rope"]

The options are the fields of a dataclass. A config file overrides their defaults, and flags
override both. A config file consists of plain assignments. It may begin with
`from config.pope_124m import *` and then say only what differs. Each of its assignments is read as
if it were a flag, so the same mistakes are refused in both.
"""
import argparse
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import re
import shlex
import sys
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Literal, get_args, get_origin


class Mistake(ValueError):
    """Something that the user of a script can mend. `run` prints it as one line."""

def run(main):
    """Runs the main function of a script with the words of its command line. A Mistake, or a file
    that cannot be read or written, ends the script with one line. Any other exception is a bug or
    needs a closer look, so it keeps its traceback."""
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot show every character
    try:
        main(sys.argv[1:])
    except (Mistake, OSError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: {error}")

@contextlib.contextmanager
def refusals_are_mistakes():
    """Within this context, what model.py refuses counts as a Mistake. model.py can be used without
    this module, so it raises only Python's own exceptions."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        raise Mistake(str(error)) from error

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
        raise Mistake(f"{message} (--help shows all options)")

    def add_option(self, name, kind, help):
        """Adds --name=value, where kind is the type of the value: int, float, str, bool, a Literal,
        or one of these or None. An option that is not given is left out of the result."""
        flag = f"--{name}"
        help = help.replace("%", "%%")  # argparse formats it
        given = dict(default=argparse.SUPPRESS, help=help)
        if type(None) in get_args(kind):  # the kind is something like int | None
            kind, = set(get_args(kind)) - {type(None)}
        if get_origin(kind) is Literal:
            self.add_argument(flag, choices=get_args(kind), **given)
        elif kind is bool:  # --resume means --resume=True
            self.add_argument(flag, type=boolean, nargs="?", const=True, metavar="BOOL", **given)
        else:
            types = {int: integer, float: float, str: str}
            self.add_argument(flag, type=types[kind], metavar=kind.__name__.upper(), **given)

def boolean(text):
    if text not in ("True", "False"):
        mend = "; a config file must come before the flags" if text.endswith(".py") else ""
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False{mend}")
    return text == "True"

def integer(text):
    """Returns the integer that a text such as 1000 or 1e3 stands for."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)

def load(cls, words, **given):
    """Returns an instance of the dataclass cls from the words of a command line. `given` holds
    values that override the defaults. A config file and flags override them in turn. If cls has a
    field `config`, one word may be the path of a config file, which becomes its value."""
    from_flags = parse(cls, words)
    from_file = {}
    if from_flags.get("config"):
        path = from_flags["config"]
        values = assignments(path)
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:  # argparse could take such a flag for the path of a config file
            raise Mistake(f"{path}: unknown options: {', '.join(sorted(unknown))}")
        for name, value in values.items():
            if not isinstance(value, (str, int, float)):
                raise Mistake(f"{path}: {name}={value!r} is neither text, a number, True nor False")
        try:
            from_file = parse(cls, [f"--{name}={value}" for name, value in values.items()])
        except Mistake as mistake:
            raise Mistake(f"{path}: {mistake}") from None
    return cls(**{**given, **from_file, **from_flags})

def assignments(path):
    """Returns {name: value} of what a config file assigns. Modules that it imports, and names that
    begin with _, are left out."""
    if not os.path.isfile(path):
        names = [name for name in os.listdir(os.path.dirname(__file__)) if name.endswith(".py")]
        name = os.path.basename(path).removesuffix(".py") + ".py"
        nearest = difflib.get_close_matches(name, names, 1)
        mend = f"did you mean config/{nearest[0]}?" if nearest else "they are in config/"
        raise Mistake(f"there is no config file {path!r}; {mend}")
    values = {}
    with open(path, encoding="utf-8-sig") as file:
        exec(compile(file.read(), path, "exec"), values)
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
