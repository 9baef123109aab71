"""The Config of a rank program: read without running it, checked before a launch, passed on as a command line.

A rank program declares its parameters as a dataclass, with a docstring under each field:

    @dataclass
    class Config:
        width: PositiveInt = 512
        '''Image width in pixels; a rank holds width / ranks columns.'''

Every field has a default. Its type is int, float, bool, str, Literal, a tuple of these, or one of them ``| None``. A
number can have limits: PositiveInt and the like, or ``Annotated[int, Limits(at_least=2)]``. Two more things are
optional. ``PRESETS: ClassVar`` maps the choices of a field ``preset`` to other defaults: picking one replaces the
defaults, and what is given by name overrides it. ``validate(self, world_size)`` raises ValueError for values that do
not go together.
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import numbers
import os
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from labkit.errors import LabError, ParameterError

IMPORTABLE_MODULES = (
    "labkit.config",
    "labkit.errors",
    "labkit.models.catalog",
    "labkit.requirements",
    "labkit.theory",
    "labkit_simulate.theory",
)
"""What a Config can use of labkit, with all that lies below: it imports no torch."""
PLAIN_TYPES = (int, float, bool, str, types.NoneType)
NUMBER_TYPES: dict[type, Any] = {int: numbers.Integral, float: numbers.Real}
BOOL_TYPE: Any = bool  # a number to Python, not to a learner
MAX_INT64 = 2**63 - 1
"""The largest whole number that a tensor can hold."""
MAX_SHOWN_CHARACTERS = 200
"""Characters of a refused value that a message shows."""
MAX_ARGUMENT_BYTES = 2**17 - 1
"""Bytes of a word of a command line, on Linux."""
ESCAPE_PATTERN = re.compile(r"-|\\|None$")
"""How a text begins that a command line would take for something else: for an option, or for None."""
CONFIG_IMPORT_RULE = (
    "it is read without running the program: it may use the standard library, labkit.theory and constants; "
    "import what else validate needs inside validate"
)
ConfigType = TypeVar("ConfigType")
_module_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """Which numbers a field takes, in its type: ``Annotated[float, Limits(at_least=0, below=1)]``. Finite ones only."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    multiple_of: int = 0

    def contains(self, value: float) -> bool:
        """Whether the value is within."""
        divides = not self.multiple_of or value % self.multiple_of == 0
        return divides and value >= self.at_least and self.above < value < self.below

    def __str__(self) -> str:
        divisor = self.multiple_of or math.inf
        signs = {"≥": self.at_least, ">": self.above, "<": self.below, "a multiple of": divisor}
        return " and ".join(
            f"{sign} {limit:g}" for sign, limit in signs.items() if math.isfinite(limit)
        )


PositiveInt = Annotated[int, Limits(at_least=1)]
NonNegativeInt = Annotated[int, Limits(at_least=0)]
PositiveFloat = Annotated[float, Limits(above=0)]
NonNegativeFloat = Annotated[float, Limits(at_least=0)]


def read_replaceable(program: Path) -> dict[str, inspect.Signature]:
    """The functions of a rank program that a run can replace, see rank/given.py; none of it is run.

    Raises:
        ParameterError: the program is not Python.
    """
    functions = [node for node in _parse_program(program).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: _argument_signature(function.args)
        for function in functions
        if any(
            ast.unparse(decorator).split(".")[-1] == "replaceable"
            for decorator in function.decorator_list
        )
    }


def _argument_signature(arguments: ast.arguments) -> inspect.Signature:
    """The names of a function's arguments, without types and defaults."""
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: arguments.posonlyargs,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: arguments.args,
        inspect.Parameter.KEYWORD_ONLY: arguments.kwonlyargs,
    }
    return inspect.Signature(
        [inspect.Parameter(each.arg, kind) for kind, each_one in kinds.items() for each in each_one]
    )


def read_config(program: Path) -> type[Any] | None:
    """The class Config of a rank program, or None where it has none.

    Runs only what the class can need: imports from the standard library and of labkit's formulas, constants that call
    nothing, and the class itself. The rest of the program, torch among it, is not run.

    Raises:
        ParameterError: the program is not Python, or its Config needs something else.
    """
    tree = _parse_program(program)
    definition = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"),
        None,
    )
    if definition is None:
        return None
    with _raise_parameter_errors(
        str(program),
        definition.lineno,
        "class Config",
        "fields need plain defaults that cannot fail",
    ):
        config_class = _execute_config_class(
            program, tree.body[: tree.body.index(definition)], definition
        )
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            _check_field(config_class, field.target.id, f"{program}:{field.lineno}: class Config")
    config_class.program_file, config_class.field_docs = (
        str(program),
        _docs_below_fields(definition),
    )
    return config_class


def _parse_program(program: Path) -> ast.Module:
    try:
        return ast.parse(program.read_bytes(), str(program))
    except OSError as error:
        raise ParameterError(
            f"{program}: cannot be read ({error.strerror}): give a file of Python"
        ) from None
    except SyntaxError as error:
        raise ParameterError(f"{program}:{error.lineno}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deeply
        raise ParameterError(
            f"{program}: not valid Python: {error or type(error).__name__}"
        ) from None


def build_config(
    config_class: type[ConfigType], parameters: Mapping[str, Any], world_size: int | None = None
) -> ConfigType:
    """A Config with these parameters, over the preset's values, over the defaults.

    Args:
        config_class: the dataclass.
        parameters: values by field name.
        world_size: number of ranks, for ``Config.validate``; None skips that check.

    Raises:
        ParameterError: an unknown name, a value of the wrong type, outside its limits or its choices, or a refusal of
            ``Config.validate``.
    """
    known = _init_fields(config_class)
    for name in parameters:
        if name not in known:
            raise ParameterError(
                _unknown_name_message(config_class, name, find_sibling_programs(config_class, name))
            )
    try:
        converted = {
            name: _convert_parameter(name, value, known[name].type)
            for name, value in parameters.items()
        }
    except ParameterError as error:
        raise ParameterError(f"{error}. Allowed:\n{describe_fields(config_class)}") from None
    preset = converted.get("preset", known["preset"].default if "preset" in known else None)
    with _convert_refusals(config_class, "__post_init__"):
        config = config_class(**(preset_values(config_class, preset) | converted))
    if world_size is not None:
        validate(config, world_size)
    return config


def _unknown_name_message(config_class: type[Any], name: str, siblings: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, _init_fields(config_class), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    if siblings:
        hint += f" It is a parameter of {' and of '.join(siblings)}."
    return f"no parameter is called {name!r}{hint} Allowed:\n{describe_fields(config_class)}"


def find_sibling_programs(config_class: type[Any], name: str) -> list[str]:
    """Return the programs in the folder of a Config's program whose own Config declares this field."""
    module = sys.modules.get(config_class.__module__)
    file = vars(config_class).get("program_file", getattr(module, "__file__", None))
    siblings = sorted(Path(file).parent.glob("*.py")) if file else []
    return [path.stem for path in siblings if name in _declared_fields(path)]


def _declared_fields(program: Path) -> list[str]:
    """The fields that a program's class Config declares, without running it; none if it cannot be read."""
    try:
        body = _parse_program(program).body
    except ParameterError:
        return []
    configs = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    fields = [node for config in configs for node in config.body if isinstance(node, ast.AnnAssign)]
    return [ast.unparse(field.target) for field in fields]


def validate(config: Any, world_size: int) -> None:
    """Hold what is not at its default against its type and limits, then ask ``Config.validate`` where there is one.

    Raises:
        ParameterError: what is refused.
    """
    for name, field in _init_fields(type(config)).items():
        value = getattr(config, name)
        if value != _default_value(field):
            _convert_parameter(name, value, field.type)
    if hasattr(config, "validate"):
        with _convert_refusals(type(config), "validate"):
            config.validate(world_size)


def refuse_conflicts(conflicts: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError with the message of the first conflict whose condition holds, if one does."""
    for holds, message in conflicts:
        if holds:
            raise ValueError(message)


def require(name: str, value: Any, kind: type = int, *, because: str, **limits: Any) -> None:
    """Go on if a notebook's parameter is of its kind and within its limits.

    Args:
        name: of the parameter, as in the cell tagged parameters.
        value: what was given for it.
        kind: its type.
        because: what in the notebook needs this.
        limits: those of ``Limits``.

    Raises:
        ParameterError: it is not; the message says what to take, and why.
    """
    wanted: Any = Annotated[kind, Limits(**limits)]
    try:
        convert(value, wanted)
    except ValueError:
        rule = f"{name} = {_short_repr(value)}, but must be {_type_name(wanted)}"
        raise ParameterError(f"{rule}: {because}. Change it in the cell of parameters.") from None


def preset_values(config_class: type[Any], preset: str | None) -> dict[str, Any]:
    """The values that a preset puts in place of the defaults; {} for none."""
    return dict(getattr(config_class, "PRESETS", {}).get(preset, {}))


def to_argv(config: Any) -> list[str]:
    r"""The command line that ``parse_argv`` reads back as this config. What is at its default is left out.

    A text in a tuple, or in a field that may be None, has a backslash before it where it could be taken for something
    else: ``--names \-a``.

    Raises:
        ParameterError: a text that no command line can hold.
    """
    implied = preset_values(type(config), getattr(config, "preset", None))
    words: list[str] = []
    for name, field in _init_fields(type(config)).items():
        value = getattr(config, name)
        if name in implied or value != _default_value(field):
            option = f"--{name.replace('_', '-')}"
            if _needs_escape(field.type):
                value = _escape_text(value)
            items = list(map(str, value)) if isinstance(value, tuple | list) else [str(value)]
            _refuse_unsafe_arguments(name, items)
            if field.type is bool:
                words.append(option if value else option.replace("--", "--no-", 1))
            elif len(items) == 1:
                words.append(
                    f"{option}={items[0]}"
                )  # in one word, so that a value may start with a dash
            else:
                words += [option, *items]
    return words


def parse_argv(config_class: type[ConfigType], argv: Sequence[str] | None = None) -> ConfigType:
    """Read a Config from a command line (by default this program's), presets included; ``--help`` lists the fields.

    Leaves the program, as a command line does, when an argument is wrong.

    Raises:
        ParameterError: ``Config.__post_init__`` refuses the values.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else list(argv)
    generated = f"{config_class.__name__}("  # what @dataclass writes where there is no docstring
    about = (
        "" if (config_class.__doc__ or generated).startswith(generated) else config_class.__doc__
    )
    parsed = tyro.cli(cli_dataclass(config_class, argv), args=argv, description=about)
    with _convert_refusals(config_class, "__post_init__"):
        return config_class(**cli_values(parsed))


def cli_values(parsed: Any) -> dict[str, Any]:
    """The values of ``options`` that were read from a command line, by name, without the backslashes of ``to_argv``."""
    guarded = {
        name for name, field in _init_fields(type(parsed)).items() if _needs_escape(field.type)
    }
    return {
        name: _unescape_text(value) if name in guarded else value
        for name, value in vars(parsed).items()
    }


def cli_dataclass(
    config_class: type[Any], argv: Sequence[str], without: Sequence[str] = ()
) -> type[Any]:
    """The fields as a dataclass for tyro: docstrings and limits are the help, the values of argv's preset the defaults.

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
    docs = _field_docs(config_class)
    fields: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for name, field in _init_fields(config_class).items():
        if name not in without:
            limits = [f"({_type_name(field.type)})"] if "Limits(" in str(field.type) else []
            about = tyro.conf.arg(help=" ".join([*docs.get(name, "").split(), *limits]) or None)
            value = chosen.get(name, _default_value(field))
            value = _escape_text(value) if _needs_escape(field.type) else value
            default: Any = dataclasses.field(default_factory=functools.partial(copy.copy, value))
            fields.append((name, Annotated[field.type, about], default))
    return dataclasses.make_dataclass(config_class.__name__, fields)


def _refuse_options_of_siblings(
    config_class: type[Any], argv: Sequence[str], without: Sequence[str]
) -> None:
    """Refuse an unknown option that another program has: tyro, which reads the others, cannot know of that one."""
    known = {*_init_fields(config_class), *without}
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if (
            word.startswith("--")
            and name not in known
            and (siblings := find_sibling_programs(config_class, name))
        ):
            raise ParameterError(_unknown_name_message(config_class, name, siblings))


def cli_list_dataclass(read: type[Any]) -> type[Any]:
    """What ``options`` gives, each field with any number of values, none by default; without those of tuples."""
    fields: list[Any] = []
    wanted: Any
    for field in dataclasses.fields(read):
        wanted, *_, about = typing.get_args(
            field.type
        )  # limits between them hold later, for each value
        if typing.get_origin(wanted) is not tuple:
            fields.append(
                (field.name, Annotated[tuple[wanted, ...], about], dataclasses.field(default=()))
            )
    return dataclasses.make_dataclass(read.__name__, fields)


def describe_fields(config_class: type[Any]) -> str:
    """One line a field: name, type, default and the first line of its docstring."""
    docs = {name: f"  # {text.splitlines()[0]}" for name, text in _field_docs(config_class).items()}
    return "\n".join(
        f"  {name}: {_type_name(field.type)} = {_default_value(field)!r}{docs.get(name, '')}"
        for name, field in _init_fields(config_class).items()
    )


@contextlib.contextmanager
def _raise_parameter_errors(file: str, line: int, what: str, rule: str) -> Iterator[None]:
    """Turn whatever a program's own code raises in here into a ParameterError with file:line and the rule."""
    try:
        yield
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            at
            for frame, at in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == file
        ]
        place, reason = f"{file}:{lines[-1] if lines else line}", f"{type(error).__name__}: {error}"
        rule = CONFIG_IMPORT_RULE if isinstance(error, NameError) else rule
        raise ParameterError(f"{place}: {what}: {reason}; {rule}") from error


@contextlib.contextmanager
def _convert_refusals(config_class: type[Any], method: str) -> Iterator[None]:
    """A ValueError in here is a refusal, and its text the message; all else is a mistake in the Config's method."""
    module = sys.modules.get(config_class.__module__)
    file = getattr(config_class, "program_file", getattr(module, "__file__", None))
    code = getattr(getattr(config_class, method, None), "__code__", None)
    rule = "to refuse a value, raise ValueError with the reason; nothing else may fail"
    with _raise_parameter_errors(
        str(file), getattr(code, "co_firstlineno", 0), f"Config.{method}", rule
    ):
        try:
            yield
        except ValueError as error:
            raise ParameterError(str(error)) from error


def _needs_escape(wanted: Any) -> bool:
    """Whether a field of this type takes any text, and several of them, or None."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return _needs_escape(arguments[0])
    return origin in (Union, types.UnionType, tuple) and any(
        part is str or _needs_escape(part) for part in arguments
    )


def _escape_text(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_escape_text, value))
    return f"\\{value}" if isinstance(value, str) and ESCAPE_PATTERN.match(value) else value


def _unescape_text(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_unescape_text, value))
    return (
        value[1:]
        if isinstance(value, str) and value[:1] == "\\" and ESCAPE_PATTERN.match(value[1:])
        else value
    )


def _refuse_unsafe_arguments(name: str, items: Sequence[str]) -> None:
    for item in items:
        try:
            if "\0" in item:
                raise ParameterError(
                    f"{name} = {_short_repr(item)}: a command line cannot hold the character '\\x00'"
                )
            if len(os.fsencode(item)) + len(name) > MAX_ARGUMENT_BYTES - len("--="):
                most = f"{MAX_ARGUMENT_BYTES:,} bytes are the limit; write it to a file, and give its path"
                raise ParameterError(
                    f"{name} = {_short_repr(item)}: a command line cannot hold so long a text: {most}"
                )
        except UnicodeEncodeError as error:
            character = repr(item[error.start])
            raise ParameterError(
                f"{name} = {_short_repr(item)}: a command line cannot hold the character {character}"
            ) from None


def _safe_part(node: ast.stmt) -> ast.stmt | None:
    """The statement, or the part of it, that may be run without running the program; None for nothing of it."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return node if _is_constant(node) else None
    above = f"{'.' * node.level}{node.module}." if isinstance(node, ast.ImportFrom) else ""
    node.names = [alias for alias in node.names if _is_importable(f"{above}{alias.name}")]
    return node if node.names else None


def _is_importable(name: str) -> bool:
    allowed = tuple(f"{readable}." for readable in IMPORTABLE_MODULES)
    return name.partition(".")[0] in sys.stdlib_module_names or f"{name}.".startswith(allowed)


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement assigns a value that needs no call: ``SIZES = (1, 2)``, ``Kind = Literal["a"]``."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    return not any(
        isinstance(part, ast.Call | ast.Await | ast.NamedExpr) for part in ast.walk(node.value)
    )


def _execute_config_class(
    program: Path, above: list[ast.stmt], definition: ast.ClassDef
) -> type[Any]:
    number = next(_module_numbers)  # others may be read in other threads
    module = types.ModuleType(f"config of {program.name}, {number}")
    sys.modules[module.__name__] = module  # dataclass() looks there for the names in annotations
    try:
        for node in above:
            _import_sibling_configs(program, node, module)
            if part := _safe_part(node):
                try:
                    _execute_statement(program, part, module)
                except Exception:
                    if not _is_constant(part):  # a constant may be of what was not imported
                        raise
        _execute_statement(program, definition, module)
        config_class: type[Any] = module.Config
        if not dataclasses.is_dataclass(config_class):
            raise ParameterError(
                f"{program}:{definition.lineno}: class Config must be a @dataclass"
            )
        # from here on without strings, which could only be read with the module at hand
        config_class.__annotations__ = typing.get_type_hints(config_class, include_extras=True)
    finally:
        del sys.modules[module.__name__]
    return config_class


def _import_sibling_configs(program: Path, node: ast.stmt, module: types.ModuleType) -> None:
    """Carry out ``from launch.fsdp_wrap import Config as WrapConfig``: read that Config as this one is read."""
    if isinstance(node, ast.ImportFrom) and node.module:
        sibling = program.with_name(f"{node.module.rpartition('.')[2]}.py")
        for alias in node.names:
            if alias.name == "Config" and sibling != program and sibling.exists():
                setattr(module, alias.asname or alias.name, read_config(sibling))


def _execute_statement(program: Path, node: ast.stmt, module: types.ModuleType) -> None:
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, node], []))
    exec(compile(tree, str(program), "exec"), module.__dict__)


def _check_field(config_class: type[Any], name: str, place: str) -> None:
    """ParameterError for a field without default, or of a type that no command line could give."""
    field = _init_fields(config_class).get(name)
    if field is None:
        return
    if _default_value(field) is dataclasses.MISSING:
        raise ParameterError(
            f"{place}: no default for {name}; every field needs one, so that the program runs without arguments"
        )
    if not _is_allowed(field.type):
        raise ParameterError(
            f"{place}: field {name} is {_type_name(field.type)}; a field is int, float, bool, str, Literal, a tuple of "
            "these, or one of them | None; for many values take a tuple such as tuple[int, ...]"
        )


def _is_allowed(wanted: Any) -> bool:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return _is_allowed(arguments[0])
    if origin in (Union, types.UnionType, tuple):
        return all(part is Ellipsis or _is_allowed(part) for part in arguments)
    return origin is Literal or wanted in PLAIN_TYPES


def _field_docs(config_class: type[Any]) -> dict[str, str]:
    """The fields' docstrings: of a class that was read, or of one that runs, from its source where there is one."""
    docs: dict[str, str] = {}
    for each in reversed([base for base in config_class.__mro__ if dataclasses.is_dataclass(base)]):
        docs |= _own_field_docs(each)
    return docs


def _own_field_docs(config_class: Any) -> dict[str, str]:
    """The docstrings of the fields that a class declares itself, and not its bases."""
    if "field_docs" not in vars(config_class):
        config_class.field_docs = {}
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            config_class.field_docs = _docs_below_fields(
                ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
            )
    return dict(config_class.field_docs)


def _docs_below_fields(definition: ast.stmt) -> dict[str, str]:
    return {
        field.target.id: text
        for field, below in itertools.pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if (text := ast.get_docstring(ast.Module([below], [])))
    }


def _init_fields(config_class: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields that can be given, by name, each with its type read where it was a string."""
    wanted = typing.get_type_hints(config_class, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    for name, field in fields.items():
        field.type = wanted[name]
    return fields


def _default_value(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or dataclasses.MISSING."""
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _convert_parameter(name: str, value: Any, wanted: Any) -> Any:
    try:
        return convert(value, wanted)
    except ValueError:
        raise ParameterError(f"{name} = {_short_repr(value)} is not {_type_name(wanted)}") from None


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except (
        Exception
    ) as error:  # of a number with too many digits, or of an object that cannot be shown
        text = f"<{type(value).__name__}, {error}>"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def convert(value: Any, wanted: Any) -> Any:
    """The value as the wanted type: an int is taken as a float, a list as a tuple, numpy's values as Python's.

    Raises:
        ValueError: the value is of another type, outside its limits or none of the choices of a Literal.
    """
    if type(value).__module__ == "numpy":
        value = value.tolist()
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        value = convert(value, arguments[0])
        if all(limits.contains(value) for limits in arguments[1:] if isinstance(limits, Limits)):
            return value
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in (Union, types.UnionType):
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return convert(value, choice)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
            if len(value) == len(items):
                return tuple(map(convert, value, items))
    elif wanted in NUMBER_TYPES:
        too_large = isinstance(value, int) and abs(value) > MAX_INT64
        if (
            isinstance(value, NUMBER_TYPES[wanted])
            and not isinstance(value, BOOL_TYPE)
            and not too_large
        ):
            return wanted(value)
    elif isinstance(value, wanted):
        return value
    raise ValueError(f"{_short_repr(value)} is not {_type_name(wanted)}")


def _type_name(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is Annotated:
        limits = [str(each) for each in arguments[1:] if isinstance(each, Limits)]
        return " ".join([_type_name(arguments[0]), *limits])
    if origin is tuple:
        return f"tuple[{', '.join('...' if part is Ellipsis else _type_name(part) for part in arguments)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(
            "None" if part is types.NoneType else _type_name(part) for part in arguments
        )
    return wanted.__name__ if isinstance(wanted, type) and not arguments else str(wanted)
