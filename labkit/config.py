"""The Config of a rank program: checked before a launch, carried as JSON, built again on each rank.

A rank program declares its parameters as a dataclass, with a docstring under each field:

    @dataclass
    class Config:
        width: PositiveInt = 512
        '''Image width in pixels; a rank holds width / ranks columns.'''

Every field has a default. Its type is int, float, bool, str, Literal, a tuple of these, or one of
them ``| None``; numbers can have limits. ``PRESETS: ClassVar`` maps the choices of a field
``preset`` to other defaults, which values given by name override. ``validate(self, world_size)``
raises ValueError for values that do not go together.

``labkit.run`` builds the Config once and writes its values into run.json, from which each rank
builds it (``rank.load_config``). A command line is read only where there is no run: under a bare
torchrun, and by ``python -m labkit``.
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import functools
import json
import math
import numbers
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from labkit import program_source
from labkit.errors import ParameterError

PLAIN_TYPES = (int, float, bool, str, types.NoneType)
UNION_TYPES = (Union, types.UnionType)
NUMBER_TYPES: dict[type, Any] = {int: numbers.Integral, float: numbers.Real}
# The largest whole number that a tensor can hold.
MAX_INT64 = 2**63 - 1
# Characters of a refused value that a message shows.
MAX_SHOWN_CHARACTERS = 200
ConfigType = TypeVar("ConfigType")


@dataclass(frozen=True)
class Limits:
    """Limits of a finite number, given in its type: ``Annotated[int, Limits(at_least=2)]``."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    multiple_of: int = 0

    def contains(self, value: float) -> bool:
        """Tell whether the value is within the limits."""
        divides = not self.multiple_of or value % self.multiple_of == 0
        return (
            divides and self.at_least <= value <= self.at_most and self.above < value < self.below
        )

    def __str__(self) -> str:
        divisor = self.multiple_of or math.inf
        signs = {"≥": self.at_least, ">": self.above, "≤": self.at_most, "<": self.below}
        signs["a multiple of"] = divisor
        finite = {sign: limit for sign, limit in signs.items() if math.isfinite(limit)}
        return " and ".join(f"{sign} {limit:g}" for sign, limit in finite.items())


PositiveInt = Annotated[int, Limits(at_least=1)]
NonNegativeInt = Annotated[int, Limits(at_least=0)]
PositiveFloat = Annotated[float, Limits(above=0)]
NonNegativeFloat = Annotated[float, Limits(at_least=0)]


def read_config(program: Path) -> type[Any] | None:
    """Read the class Config of a rank program without running the program; None without one."""
    config_class = program_source.compile_config(program)
    if config_class is not None:
        fields = init_fields(config_class)
        for name, line in config_class.field_lines.items():
            if name in fields and (problem := _field_problem(fields[name])):
                raise ParameterError(f"{program}:{line}: class Config: {problem}")
    return config_class


def _field_problem(field: dataclasses.Field[Any]) -> str:
    name, default = field.name, default_value(field)
    if default is dataclasses.MISSING:
        rule = "every field needs one, so that the program runs without arguments"
        return f"no default for {name}; {rule}"
    if not _is_allowed(field.type):
        rule = "a field is int, float, bool, str, Literal, a tuple of these, or one of them | None"
        fix = "for many values take a tuple such as tuple[int, ...]"
        return f"field {name} is {type_name(field.type)}; {rule}; {fix}"
    try:
        convert(default, field.type)
    except ValueError:
        fix = "give one of its type, or change the type"
        return f"the default of {name}, {default!r}, is not {type_name(field.type)}: {fix}"
    return ""


# JSON carries these types, and a command line can give them.
def _is_allowed(wanted: Any) -> bool:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return _is_allowed(arguments[0])
    if origin in (*UNION_TYPES, tuple):
        return all(part is Ellipsis or _is_allowed(part) for part in arguments)
    return origin is Literal or wanted in PLAIN_TYPES


def build_config(
    config_class: type[ConfigType], parameters: Mapping[str, Any], world_size: int | None = None
) -> ConfigType:
    """Build a Config: its defaults, the preset's values over them, and ``parameters`` over those.

    ``world_size`` is for ``Config.validate``; None skips that check. ParameterError refuses a name
    or a value.
    """
    known = init_fields(config_class)
    converted = {}
    for name, value in parameters.items():
        if name not in known:
            raise unknown_name_error(config_class, name)
        try:
            converted[name] = _convert_parameter(name, value, known[name].type)
        except ParameterError as error:
            allowed = describe_fields(config_class)
            raise ParameterError(f"{error}. Allowed:\n{allowed}") from None
    preset = converted.get("preset", known["preset"].default if "preset" in known else None)
    with convert_refusals(config_class, "__post_init__"):
        config = config_class(**(preset_values(config_class, preset) | converted))
    # The notebook knows the number of ranks, and a session checks it again on each rank.
    if world_size is not None:
        validate(config, world_size)
    return config


def unknown_name_error(config_class: type[Any], name: str) -> ParameterError:
    """Return an error with the closest name, the programs that have this one, and all allowed."""
    close = difflib.get_close_matches(name, init_fields(config_class), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    if siblings := program_source.find_sibling_programs(config_class, name):
        hint += f" It is a parameter of {' and of '.join(siblings)}."
    allowed = describe_fields(config_class)
    return ParameterError(f"no parameter is called {name!r}{hint} Allowed:\n{allowed}")


def validate(config: Any, world_size: int) -> None:
    """Check fields that are not at their defaults, then call ``Config.validate``, if any."""
    # A cell or a test may have built the Config itself, past build_config.
    for name, field in init_fields(type(config)).items():
        value = getattr(config, name)
        if value != default_value(field):
            _convert_parameter(name, value, field.type)
    if hasattr(config, "validate"):
        with convert_refusals(type(config), "validate"):
            config.validate(world_size)


def require(name: str, value: Any, kind: type = int, *, because: str, **limits: Any) -> None:
    """Raise ParameterError unless a notebook's parameter is of this kind, within these Limits."""
    wanted: Any = Annotated[kind, Limits(**limits)] if limits else kind
    try:
        convert(value, wanted)
    except ValueError:
        rule = f"{name} = {_short_repr(value)}, but must be {type_name(wanted)}"
        raise ParameterError(f"{rule}: {because}. Change it in the cell of parameters.") from None


def preset_values(config_class: type[Any], preset: str | None) -> dict[str, Any]:
    """Return the defaults that a preset replaces, by name; {} without a preset."""
    return dict(getattr(config_class, "PRESETS", {}).get(preset, {}))


def config_params(config: Any) -> dict[str, Any]:
    """Return the values of a Config by name; ParameterError for one that JSON cannot carry: NaN."""
    params = {}
    for name, field in init_fields(type(config)).items():
        value = params[name] = _convert_parameter(name, getattr(config, name), field.type)
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            rule = "parameters travel as JSON, which cannot hold it; give a finite number"
            raise ParameterError(f"{name} = {_short_repr(value)}: {rule}") from None
    return params


def describe_fields(config_class: type[Any]) -> str:
    """Describe each field in a line: name, type, default and the first line of its docstring."""
    docs, lines = program_source.read_field_docs(config_class), []
    for name, field in init_fields(config_class).items():
        about = f"  # {docs[name].splitlines()[0]}" if name in docs else ""
        lines.append(f"  {name}: {type_name(field.type)} = {default_value(field)!r}{about}")
    return "\n".join(lines)


@contextlib.contextmanager
def convert_refusals(config_class: type[Any], method: str) -> Iterator[None]:
    """Turn a ValueError of a Config's method into ParameterError, any other error into a bug's."""
    module = sys.modules.get(config_class.__module__)
    file = getattr(config_class, "program_file", getattr(module, "__file__", None))
    code = getattr(getattr(config_class, method, None), "__code__", None)
    line = getattr(code, "co_firstlineno", 0)
    rule = "to refuse a value, raise ValueError with the reason; nothing else may fail"
    with program_source.raise_parameter_errors(str(file), line, f"Config.{method}", rule):
        try:
            yield
        except ValueError as error:
            raise ParameterError(str(error)) from error


def init_fields(config_class: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that can be given, by name, with their type annotations evaluated."""
    wanted = typing.get_type_hints(config_class, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    for name, field in fields.items():
        field.type = wanted[name]
    return fields


def default_value(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, or dataclasses.MISSING."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _convert_parameter(name: str, value: Any, wanted: Any) -> Any:
    try:
        return convert(value, wanted)
    except ValueError as error:
        raise ParameterError(f"{name} = {error}") from None


def _short_repr(value: Any) -> str:
    # repr() fails for a number with too many digits, and for some objects.
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, {error}>"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def convert(value: Any, wanted: Any) -> Any:
    """Convert a value: int to float, list to tuple, numpy's to Python's; ValueError if refused."""
    given = value
    if type(value).__module__ == "numpy":
        value = value.tolist()
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    # A refusal further inside is reworded at the end, for the whole value.
    if origin is Annotated:
        with contextlib.suppress(ValueError):
            value = convert(value, arguments[0])
            limits = [each for each in arguments[1:] if isinstance(each, Limits)]
            if all(each.contains(value) for each in limits):
                return value
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in UNION_TYPES:
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return convert(value, choice)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
            if len(value) == len(items):
                with contextlib.suppress(ValueError):
                    return tuple(map(convert, value, items))
    elif wanted in NUMBER_TYPES:
        too_large = isinstance(value, int) and abs(value) > MAX_INT64
        # bool is a subclass of int, but a learner who writes True for a number is mistaken.
        is_number = isinstance(value, NUMBER_TYPES[wanted]) and type(value) is not bool
        if is_number and not too_large:
            return wanted(value)
    elif isinstance(value, wanted):
        return value
    raise ValueError(f"{_short_repr(given)} is not {type_name(wanted)}")


def type_name(wanted: Any) -> str:
    """Name a field's type as messages do, with its limits or choices."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is Annotated:
        limits = [str(each) for each in arguments[1:] if isinstance(each, Limits)]
        return " ".join([type_name(arguments[0]), *limits])
    parts = ["..." if part is Ellipsis else type_name(part) for part in arguments]
    if origin is tuple:
        return f"tuple[{', '.join(parts)}]"
    if origin in UNION_TYPES:
        return " | ".join(parts)
    if wanted is types.NoneType:
        return "None"
    return wanted.__name__ if isinstance(wanted, type) and not arguments else str(wanted)


def parse_argv(config_class: type[ConfigType], argv: Sequence[str]) -> ConfigType:
    """Build a Config from a command line; exit if it is wrong, or after ``--help``."""
    # Ranks of a run read no command line, and need no parser.
    import tyro

    about = config_class.__doc__ or ""
    # @dataclass writes this signature where a class has no docstring.
    if about.startswith(f"{config_class.__name__}("):
        about = ""
    parsed = tyro.cli(cli_dataclass(config_class, argv), args=argv, description=about)
    with convert_refusals(config_class, "__post_init__"):
        return config_class(**vars(parsed))


def cli_dataclass(
    config_class: type[Any],
    argv: Sequence[str],
    without: Collection[str] = (),
    takes_lists: bool = False,
) -> type[Any]:
    """Return the fields not in ``without`` as a dataclass for tyro, their docstrings as its help.

    The defaults are those of the preset that ``argv`` names. With ``takes_lists`` each field takes
    several values, by default none, and fields that are tuples are left out.
    """
    import tyro

    # Only the preset is read here, before tyro reads everything, because it decides the defaults.
    presets = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    presets.add_argument("--preset", nargs="?")
    chosen = preset_values(config_class, presets.parse_known_args(argv)[0].preset)
    docs = program_source.read_field_docs(config_class)
    fields: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for name, field in init_fields(config_class).items():
        limits = [f"({type_name(field.type)})"] if "Limits(" in str(field.type) else []
        about = tyro.conf.arg(help=" ".join([*docs.get(name, "").split(), *limits]) or None)
        wanted: Any = Annotated[field.type, about]
        value = chosen.get(name, default_value(field))
        if takes_lists:
            # Without the limits, which would apply to the tuple; each value is checked later.
            bare: Any = typing.get_args(wanted)[0]
            wanted, value = Annotated[tuple[bare, ...], about], ()
        is_tuple = typing.get_origin(field.type) is tuple
        if name not in without and not (takes_lists and is_tuple):
            default: Any = dataclasses.field(default_factory=functools.partial(copy.copy, value))
            fields.append((name, wanted, default))
    return dataclasses.make_dataclass(config_class.__name__, fields)
