"""A Config on a command line: under a bare torchrun, and for ``python -m labkit run``.

The parser is tyro's, which makes an option of each field of a dataclass.
"""

import argparse
import copy
import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from labkit import config
from labkit.program_source import find_sibling_programs, read_field_docs


def parse_argv(config_class: type[config.ConfigType], argv: Sequence[str]) -> config.ConfigType:
    """Build a Config from a command line; exit if it is wrong, or after ``--help``."""
    # Ranks of a run read no command line, and need no parser.
    import tyro

    about = config_class.__doc__ or ""
    # @dataclass writes this signature where a class has no docstring.
    if about.startswith(f"{config_class.__name__}("):
        about = ""
    parsed = tyro.cli(cli_dataclass(config_class, argv), args=argv, description=about)
    with config.convert_refusals(config_class, "__post_init__"):
        return config_class(**vars(parsed))


def cli_dataclass(
    config_class: type[Any], argv: Sequence[str], without: Sequence[str] = ()
) -> type[Any]:
    """Return the fields as a dataclass for tyro, which shows their docstrings and limits as help.

    The defaults are those of the preset that ``argv`` names; fields in ``without`` are left out.
    """
    import tyro

    known = config.init_fields(config_class)
    _refuse_options_of_siblings(config_class, argv, {*known, *without})
    # Only the preset is read here, before tyro reads everything, because it decides the defaults.
    presets = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    presets.add_argument("--preset", nargs="?")
    chosen = config.preset_values(config_class, presets.parse_known_args(argv)[0].preset)
    docs = read_field_docs(config_class)
    fields: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for name, field in known.items():
        if name in without:
            continue
        limits = [f"({config.type_name(field.type)})"] if "Limits(" in str(field.type) else []
        about = tyro.conf.arg(help=" ".join([*docs.get(name, "").split(), *limits]) or None)
        value = chosen.get(name, config.default_value(field))
        default: Any = dataclasses.field(default_factory=functools.partial(copy.copy, value))
        fields.append((name, Annotated[field.type, about], default))
    return dataclasses.make_dataclass(config_class.__name__, fields)


def _refuse_options_of_siblings(
    config_class: type[Any], argv: Sequence[str], known: set[str]
) -> None:
    """Refuse an unknown option that another program has, which tyro cannot know."""
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        is_unknown = word.startswith("--") and name not in known
        if is_unknown and find_sibling_programs(config_class, name):
            raise config.unknown_name_error(config_class, name)


def cli_list_dataclass(read: type[Any]) -> type[Any]:
    """Let each field of a ``cli_dataclass`` take several values, by default none; drop tuples."""
    fields: list[Any] = []
    wanted: Any
    for field in dataclasses.fields(read):
        # Limits that involve several fields are checked later, for each value.
        wanted, *_, about = typing.get_args(field.type)
        if typing.get_origin(wanted) is not tuple:
            several = Annotated[tuple[wanted, ...], about]
            fields.append((field.name, several, dataclasses.field(default=())))
    return dataclasses.make_dataclass(read.__name__, fields)
