"""What every script shares: settings from YAML and the command line, errors in one line."""

import argparse
import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from jsonargparse import auto_cli, set_parsing_settings

Settings = TypeVar("Settings")
ROOT = Path(__file__).resolve().parent

_MEANS = {  # what others call a setting, and its name here
    "num_heads": "num_steps",
    "lr": "learning_rate",
    "epochs": "num_epochs",
    "steps": "max_steps",
    "batch_size": "batch_tokens",
    "gradient_accumulation_steps": "accumulation",
    "max_seq_length": "max_length",
    "vocab_size": "draft_vocab_size",
    "model": "verifier",
    "num_speculative_tokens": "draft_length",
}

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # a field's docstring is its help


def run_commands(commands: dict[str, tuple[type, Callable[[Any], Any]]]) -> None:
    """Like `run_script`, of a script with several commands: the first word names one. The first
    setting of each may be given by itself, right after it."""
    name, *words = sys.argv[1:] or [""]
    if name not in commands:
        known, first = " | ".join(commands), next(iter(commands))
        usage = (
            f"{Path(sys.argv[0]).name} {known} [--config FILE] [settings]; "
            f"{first} --help lists the settings of {first}"
        )
        if name in ("-h", "--help"):
            print(f"usage: {usage}")
            sys.exit(0)
        print(f"error: no command {name!r}; usage: {usage}", file=sys.stderr)
        sys.exit(2)
    settings_class, run = commands[name]
    run_script(settings_class, run, fields(settings_class)[0].name, words)


def run_script(
    settings_class: type[Settings],
    run: Callable[[Settings], Any],
    first: str | None = None,
    words: list[str] | None = None,
) -> None:
    """Read `settings_class` from `--config FILE` and dotted overrides, and hand it to `run`.

    Arguments apply in order, so `--config` comes first. `--print_config` shows the resolved
    settings. A ValueError is the user's to mend: it ends the program with one line and code 2.

    Args:
        first: setting that may be given by itself, as the first word.
        words: the command line; the program's own when not given.
    """
    warnings.formatwarning = _warning_line
    words = sys.argv[1:] if words is None else words
    if first is not None and words and not words[0].startswith("-"):
        words = [f"--{first}", *words]
    try:
        settings = parse(settings_class, words)
        _use_all_cores()
        if not torch.accelerator.is_available():  # else DeepSpeed, where installed, warns of it
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        run(settings)
        leave()
    except ValueError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        sys.exit(130)


def leave() -> None:
    """End one of several processes on CPUs, all of whose work is done and written.

    Threads of gloo, which they talk through, may abort the interpreter as it shuts down.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def parse(settings_class: type[Settings], argv: list[str]) -> Settings:
    """The settings that a command line asks for.

    Raises:
        ValueError: an unknown key, a value of the wrong kind, no such file, a file that is no text,
            a value that is empty or no number; named in one line.
    """
    words = arguments(argv)
    other = _other_script(settings_class, words)
    try:
        settings = auto_cli(
            settings_class,
            args=words,
            as_positional=False,
            exit_on_error=False,
            allow_abbrev=False,  # half a name is a mistake
        )
    except (argparse.ArgumentError, TypeError) as error:
        message = _explained(_one_line(error), settings_class, words)
        raise ValueError(f"{message}; {other}" if other else message) from error
    except UnicodeDecodeError as error:
        files = ", ".join(_config_files(words)) or "a file of settings"
        raise ValueError(f"{files}: not UTF-8 text ({error.reason}); pass a YAML file") from error
    _refuse_nothing(settings)
    if other:
        warnings.warn(other, stacklevel=2)
    return settings


def arguments(argv: list[str]) -> list[str]:
    """Dashes in option names become underscores; a shipped recipe is found from anywhere."""
    words = []
    for word in argv:
        option = re.match(r"--[A-Za-z][\w.-]*", word)
        if option:
            word = "--" + option[0][2:].replace("-", "_") + word[option.end() :]
        if word.startswith("--config="):
            words.append("--config")
            word = word.removeprefix("--config=")
        if words and words[-1] == "--config" and not Path(word).exists():
            shipped = ROOT / word
            word = str(shipped) if shipped.exists() else word
        words.append(word)
    return words


@contextmanager
def named(setting: str) -> Iterator[None]:
    """Errors say which setting they are about: its name, and its value unless they show it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def options(text: str, config_class: type[Settings]) -> Settings:
    """`name:key=3,other=4` as the config of integers that it names; what is not said has its
    default.

    Raises:
        ValueError: an unknown key, or a value that is no integer.
    """
    name, _, given = text.partition(":")
    known = [field.name for field in fields(config_class)]
    values = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known or not re.fullmatch(r"\s*-?\d+\s*", value):
            raise ValueError(
                f"{part!r} is not understood; {name} takes whole numbers for "
                f"{', '.join(known)}, such as {name}:{known[0]}=4"
            )
        values[key] = int(value)
    return config_class(**values)


def _refuse_nothing(value: Any, name: str = "") -> None:
    """Raise a ValueError for an empty text, which as a path would be the working directory, and for
    a number that is none and so passes every comparison."""
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{name} is empty; give it a value, or leave it out")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} must be a number, got nan")
    if is_dataclass(value):
        for field in fields(value):
            _refuse_nothing(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _refuse_nothing(item, f"{name}[{number}]")


def _warning_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"warning: {' '.join(str(message).split())}\n"


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    # of a section that may be left out, only what is wrong with it
    union = re.search(r"Errors: - ([\w.]+ must .+?) - Expected a <class 'NoneType'>", message)
    return union[1] if union else message


def _explained(message: str, settings_class: type, words: list[str]) -> str:
    """The parser's complaint in plain words: which file, which field, and the way out."""
    message = re.sub(r'Parser key "([\w.]+)":', r"\1:", message).removesuffix(".")
    message = re.sub(r"<class '(\w+)'>", r"\1", message).replace("typing.", "")
    message = re.sub(
        r": - Expected a path but .* either not accessible or invalid - ", ": ", message
    )
    message = re.sub(r"Problem with given class_path '[\w.]+': ", "", message)
    message = _of_union(message)
    message = re.sub(r"^Unexpected config:.*", "Expected lines of name: value", message)
    item = re.match(
        r"([\w.]+): Not a valid subclass of \w+\. (Got value: .*) Subclass types", message
    ) or re.match(r"([\w.]+): Unable to load (config '.*?') - ", message)
    if item:
        value = re.sub(r"^config '(.*)'$", r"Got value: \1", item[2])
        message = f"{item[1]}: Expected one setting or more. {value}"
    group = re.match(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    other = re.match(r"(?:unrecognized arguments:|Option) (?:--|')?([\w.]+)", message)
    field = re.match(r"([\w.]+):", message)
    nested = re.match(r"([\w.]+): Option '([\w.]+)'", message)
    within = group or nested
    unknown = f"{within[1]}.{within[2]}" if within else other[1] if other else ""
    unknown = f"{item[1]}." if item else unknown
    if re.match(r"unrecognized arguments: (?!--)", message):
        return f"{message}; a setting is given as --name value, a value with spaces in quotes"
    names = _field_names(settings_class)
    series = re.match(r"([\w.]+): Expected a (?:list|tuple)\. Got value: (.+)", message)
    settings = series and any(name.startswith(f"{series[1]}.") for name in names)
    if series and not settings:
        items = ", ".join(filter(None, re.split(r"[,\s]+", series[2].strip("()[]"))))
        hint = f"write '[{items}]'"
        if series[2].startswith("["):
            hint = f"a list with spaces is written in quotes: '[{items}, …]'"
    else:
        hint = _hint(f"{series[1]}." if series else unknown, names)
    given = field[1] if field else unknown
    files = _config_files(words)
    if files and not any(word.split("=")[0] == f"--{given}" for word in words):
        message = f"{', '.join(files)}: {message}"
    return f"{message}; {hint}"


def _of_union(message: str) -> str:
    """Of a setting that may also be null, only what is wrong with what was given."""
    union = re.match(
        r"([\w.]+): Does not validate against any of the Union subtypes "
        r"Subtypes: \[.+?, NoneType\] Errors: - (?:(\w+): )?(.+?) - Expected a NoneType.*? "
        r"Given value type: \S+(?: '[\w.]+'>)? Given value: (.*)",
        message,
    )
    if not union:
        return message
    name, within, said, value = union.groups()
    if said.startswith(("Expected a dot import path", "Not a valid subclass")):
        return f"{name}: Not a valid subclass of it. Got value: {value} Subclass types"
    name = f"{name}.{within}" if within else name
    nested = "Got value: " in said or said.startswith("Option ")
    return f"{name}: {said}" if nested else f"{name}: {said}. Got value: {value}"


def _hint(unknown: str, names: list[str]) -> str:
    """What may have been meant: a synonym, a like name in the section, or in another one."""
    section, _, word = unknown.rpartition(".")
    last = {name: name.rpartition(".")[2] for name in names}
    within = [last[name] for name in names if name == f"{section}.{last[name]}"]
    meant = _MEANS.get(word)
    near = (
        [name for name in names if last[name] == meant]
        or [f"{section}.{close}" for close in difflib.get_close_matches(word, within, n=1)]
        or [n for close in difflib.get_close_matches(word, last.values(), n=1)
            for n in names if last[n] == close]
    )  # fmt: skip
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{section} has {', '.join(within)}" if within else "--help lists every setting"


def _config_files(words: list[str]) -> list[str]:
    return [file for word, file in pairwise(words) if word == "--config"]


def _other_script(settings_class: type, words: list[str]) -> str | None:
    """What to say of a recipe whose header names another script than this one."""
    here = Path(sys.modules[settings_class.__module__].__file__).stem
    for file in filter(os.path.isfile, _config_files(words)):
        header = re.match(r"(#.*\n)*", Path(file).read_text(encoding="utf-8", errors="replace"))[0]
        script = re.search(r"\b((?:train|eval)/(\w+)\.py) --config", header)
        if script and script[2] != here:
            return f"{file} is a recipe of {script[1]}"
    return None


def _field_names(settings_class: type, prefix: str = "") -> list[str]:
    names = []
    for name, field in getattr(settings_class, "__dataclass_fields__", {}).items():
        names.append(prefix + name)
        for kind in (field.type, *get_args(field.type)):  # list[Settings] has settings too
            names += _field_names(kind, f"{prefix}{name}.")
    return names


def _use_all_cores() -> None:
    """Undo the single thread that `accelerate launch` gives a CPU process when nobody asked.

    It exports OMP_NUM_THREADS=1 unless it is told of `--cpu`, and so halves the speed of two
    cores. Processes of one machine share its cores. Fewer on purpose: taskset.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and os.environ.get("OMP_NUM_THREADS") == "1" and not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
