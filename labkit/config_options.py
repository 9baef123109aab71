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

from labkit.config import (
    ConfigType,
    convert_refusals,
    default_value,
    init_fields,
    preset_values,
    type_name,
    unknown_name_message,
)
from labkit.errors import ParameterError
from labkit.program_source import find_sibling_programs, read_field_docs


def parse_argv(config_class: type[ConfigType], argv: Sequence[str]) -> ConfigType:
    """Build a Config from a command line, presets included; ``--help`` lists the fields.

    Leaves the program, as a command line does, when an argument is wrong.

    Raises:
        ParameterError: ``Config.__post_init__`` refuses the values.
    """
    import tyro

    # @dataclass writes this signature where a class has no docstring.
    generated = f"{config_class.__name__}("
    about = (
        "" if (config_class.__doc__ or generated).startswith(generated) else config_class.__doc__
    )
    parsed = tyro.cli(cli_dataclass(config_class, argv), args=argv, description=about)
    with convert_refusals(config_class, "__post_init__"):
        return config_class(**vars(parsed))


def cli_dataclass(
    config_class: type[Any], argv: Sequence[str], without: Sequence[str] = ()
) -> type[Any]:
    """Return the fields as a dataclass for tyro, which shows their docstrings and limits as help.

    The defaults are those of the preset that the command line names.

    Args:
        config_class: the dataclass.
        argv: the command line, in which a preset may be named.
        without: names that are left out.

    Raises:
        ParameterError: an option that only another program beside this one has.
    """
    import tyro

    _refuse_options_of_siblings(config_class, argv, without)
    presets = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    presets.add_argument("--preset", nargs="?")
    chosen = preset_values(config_class, presets.parse_known_args(argv)[0].preset)
    docs = read_field_docs(config_class)
    fields: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for name, field in init_fields(config_class).items():
        if name not in without:
            limits = [f"({type_name(field.type)})"] if "Limits(" in str(field.type) else []
            about = tyro.conf.arg(help=" ".join([*docs.get(name, "").split(), *limits]) or None)
            value = chosen.get(name, default_value(field))
            default: Any = dataclasses.field(default_factory=functools.partial(copy.copy, value))
            fields.append((name, Annotated[field.type, about], default))
    return dataclasses.make_dataclass(config_class.__name__, fields)


def _refuse_options_of_siblings(
    config_class: type[Any], argv: Sequence[str], without: Sequence[str]
) -> None:
    """Refuse an unknown option that another program has, which tyro cannot know."""
    known = {*init_fields(config_class), *without}
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if not word.startswith("--") or name in known:
            continue
        if siblings := find_sibling_programs(config_class, name):
            raise ParameterError(unknown_name_message(config_class, name, siblings))


def cli_list_dataclass(read: type[Any]) -> type[Any]:
    """Let each field of a ``cli_dataclass`` take several values, by default none; drop tuple
    fields.
    """
    fields: list[Any] = []
    wanted: Any
    for field in dataclasses.fields(read):
        # Limits that involve several fields are checked later, for each value.
        wanted, *_, about = typing.get_args(field.type)
        if typing.get_origin(wanted) is not tuple:
            several = Annotated[tuple[wanted, ...], about]
            fields.append((field.name, several, dataclasses.field(default=())))
    return dataclasses.make_dataclass(read.__name__, fields)
