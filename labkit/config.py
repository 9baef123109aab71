"""The Config of a rank program: read without running it, checked before a launch, passed on as a command line.

A rank program declares its parameters as a dataclass, with a docstring under each field:

    @dataclass
    class Config:
        width: int = 512
        '''Image width in pixels; a rank holds width / ranks columns.'''

Every field has a default. Its type is int, float, bool, str, Literal, a tuple of these, or one of them ``| None``. Two
more things are optional. ``PRESETS: ClassVar`` maps the choices of a field ``preset`` to other defaults: picking one
replaces the defaults, and what is given by name overrides it. ``validate(self, world_size)`` raises ValueError for
values that do not go together.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from labkit.errors import ParameterError

READABLE_MODULES = {
    "labkit.theory", "labkit.theory.fsdp", "labkit.models.catalog", "labkit.upstream", "labkit.errors", "labkit.config",
    "labkit.compiler", "labkit.theory.extensions",
}  # fmt: skip
NUMBERS: dict[type, Any] = {int: numbers.Integral, float: numbers.Real}
BOOL: Any = bool  # a number to Python, not to a learner
ConfigType = TypeVar("ConfigType")


def read_config(program: Path) -> type[Any] | None:
    """The class Config of a rank program, or None where it has none.

    Runs only what the class can need: imports from the standard library and of labkit's formulas, constants that call
    nothing, and the class itself. The rest of the program, torch among it, is not run.

    Raises:
        ParameterError: the program is not Python, or its Config needs something else.
    """
    try:
        tree = ast.parse(program.read_text(), str(program))
    except SyntaxError as error:
        raise ParameterError(f"{program}:{error.lineno}: not valid Python: {error.msg}") from None
    definition = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"), None)
    if definition is None:
        return None
    above = tree.body[: tree.body.index(definition)]
    config_class = _execute(program, [part for node in above if (part := _readable_part(node))], definition)
    config_class.field_docs = _docs_in(definition)
    return config_class


def make(config_class: type[ConfigType], parameters: Mapping[str, Any], world_size: int | None = None) -> ConfigType:
    """A Config with these parameters, over the preset's values, over the defaults.

    Args:
        config_class: the dataclass.
        parameters: values by field name.
        world_size: number of ranks, for ``Config.validate``; None skips that check.

    Raises:
        ParameterError: an unknown name, a value of the wrong type or outside its choices, or a refusal of
            ``Config.validate``.
    """
    known = _fields(config_class)
    for name in parameters:
        if name not in known:
            raise ParameterError(_unknown(name, config_class))
    wanted = typing.get_type_hints(config_class)
    converted = {name: _checked(config_class, name, value, wanted[name]) for name, value in parameters.items()}
    preset = converted.get("preset", known["preset"].default if "preset" in known else None)
    config = config_class(**(preset_values(config_class, preset) | converted))
    if world_size is not None:
        validate(config, world_size)
    return config


def validate(config: Any, world_size: int) -> None:
    """Call the program's own ``Config.validate``, where it has one; ParameterError for what it refuses."""
    if hasattr(config, "validate"):
        try:
            config.validate(world_size)
        except ValueError as error:
            raise ParameterError(str(error)) from error


def preset_values(config_class: type[Any], preset: str | None) -> dict[str, Any]:
    """The values that a preset puts in place of the defaults; {} for none."""
    return dict(getattr(config_class, "PRESETS", {}).get(preset, {}))


def to_argv(config: Any) -> list[str]:
    """The command line that ``parse_argv`` reads back as this config. What is at its default is left out."""
    implied = preset_values(type(config), getattr(config, "preset", None))
    wanted = typing.get_type_hints(type(config))
    words: list[str] = []
    for name, field in _fields(type(config)).items():
        value = getattr(config, name)
        if name in implied or value != _default(field):
            words += _option(name.replace("_", "-"), value, wanted[name])
    return words


def parse_argv(config_class: type[ConfigType], argv: Sequence[str] | None = None) -> ConfigType:
    """Read a Config from a command line (by default this program's), presets included; ``--help`` lists the fields.

    Leaves the program, as a command line does, when an argument is wrong.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = preset_values(config_class, _preset_in(argv))
    return tyro.cli(config_class, args=argv, default=config_class(**chosen))


def describe(config_class: type[Any]) -> str:
    """One line a field: name, type, default and the first sentence of its docstring."""
    docs = getattr(config_class, "field_docs", {})  # put there by read_config
    wanted = typing.get_type_hints(config_class)
    lines = []
    for name, field in _fields(config_class).items():
        doc = f"  # {docs[name]}" if name in docs else ""
        lines.append(f"  {name}: {_type_name(wanted[name])} = {_default(field)!r}{doc}")
    return "\n".join(lines)


def _readable_part(node: ast.stmt) -> ast.stmt | None:
    """The statement, or the part of it, that may be run without running the program; None for nothing of it."""
    if isinstance(node, ast.Import):
        names = [alias for alias in node.names if _is_readable(alias.name)]
        return ast.Import(names) if names else None
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        module = node.module
        names = [alias for alias in node.names if _is_readable(module) or _is_readable(f"{module}.{alias.name}")]
        return ast.ImportFrom(module, names, 0) if names else None
    return node if _is_constant(node) else None


def _is_readable(module: str) -> bool:
    return module in READABLE_MODULES or module.partition(".")[0] in sys.stdlib_module_names


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement assigns a value that needs no call: ``SIZES = (1, 2)``, ``Kind = Literal["a"]``."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    return not any(isinstance(part, ast.Call | ast.Await | ast.NamedExpr) for part in ast.walk(node.value))


def _execute(program: Path, before: list[ast.stmt], definition: ast.ClassDef) -> type[Any]:
    module = types.ModuleType(f"config of {program.name}")
    sys.modules[module.__name__] = module  # dataclass() looks there for the names in annotations
    try:
        for node in before:
            _execute_statement(program, node, module, needed=False)
        _execute_statement(program, definition, module, needed=True)
        config_class: type[Any] = module.Config
        if not dataclasses.is_dataclass(config_class):
            raise ParameterError(f"{program}:{definition.lineno}: class Config must be a @dataclass")
        without = [name for name, field in _fields(config_class).items() if _default(field) is dataclasses.MISSING]
        if without:
            rule = "every field needs one, so that the program runs without arguments"
            raise ParameterError(
                f"{program}:{definition.lineno}: class Config: no default for {', '.join(without)}; {rule}"
            )
        # from here on without strings, which could only be read with the module at hand
        own = inspect.get_annotations(config_class)
        resolved = typing.get_type_hints(config_class)
        config_class.__annotations__ = {name: resolved[name] for name in own}
    except NameError as error:
        raise ParameterError(_not_readable(program, definition, error)) from None
    finally:
        del sys.modules[module.__name__]
    return config_class


def _execute_statement(program: Path, node: ast.stmt, module: types.ModuleType, *, needed: bool) -> None:
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, node], []))
    try:
        exec(compile(tree, str(program), "exec"), module.__dict__)
    except Exception as error:
        if needed and not isinstance(error, NameError):
            raise ParameterError(f"{program}: class Config: {type(error).__name__}: {error}") from error
        if needed:
            raise


def _not_readable(program: Path, definition: ast.ClassDef, error: NameError) -> str:
    rule = "it is read without running the program: it may use the standard library, labkit.theory and constants"
    return f"{program}:{definition.lineno}: class Config: {error}; {rule}"


def _docs_in(definition: ast.ClassDef) -> dict[str, str]:
    """The docstring under each field of a class, shortened to its first sentence or line."""
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value) if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                docs[field.target.id] = inspect.cleandoc(text).split("\n")[0]
    return docs


def _fields(config_class: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config_class) if field.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or dataclasses.MISSING."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _unknown(name: str, config_class: type[Any]) -> str:
    close = difflib.get_close_matches(name, _fields(config_class), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"no parameter is called {name!r}{hint} Allowed:\n{describe(config_class)}"


def _checked(config_class: type[Any], name: str, value: Any, wanted: Any) -> Any:
    try:
        return convert(value, wanted)
    except ValueError:
        rule = f"{name} = {value!r} is not {_type_name(wanted)}"
        raise ParameterError(f"{rule}. Allowed:\n{describe(config_class)}") from None


def convert(value: Any, wanted: Any) -> Any:
    """The value as the wanted type: an int is taken as a float, a list as a tuple, numpy's numbers as Python's.

    Raises:
        ValueError: the value is of another type or outside the choices of a Literal.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in (Union, types.UnionType):
        return _convert_to_any(value, arguments)
    elif origin is tuple:
        return _convert_to_tuple(value, arguments)
    elif wanted in NUMBERS:
        if isinstance(value, NUMBERS[wanted]) and not isinstance(value, BOOL):
            return wanted(value)
    elif wanted is Any or isinstance(value, wanted):
        return value
    raise ValueError(f"{value!r} is not {_type_name(wanted)}")


def _convert_to_any(value: Any, choices: Sequence[Any]) -> Any:
    for choice in choices:
        with contextlib.suppress(ValueError):
            return convert(value, choice)
    raise ValueError(f"{value!r} is none of {', '.join(map(_type_name, choices))}")


def _convert_to_tuple(value: Any, item_types: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a tuple or list")
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        item_types = [item_types[0]] * len(value)
    if len(value) != len(item_types):
        raise ValueError(f"{value!r} does not have {len(item_types)} items")
    return tuple(convert(item, wanted) for item, wanted in zip(value, item_types, strict=True))


def _type_name(wanted: Any) -> str:
    if typing.get_origin(wanted) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(wanted)))
    return wanted.__name__ if isinstance(wanted, type) and not typing.get_args(wanted) else str(wanted)


def _option(name: str, value: Any, wanted: Any) -> list[str]:
    if wanted is bool:
        return [f"--{name}" if value else f"--no-{name}"]
    words = [str(item) for item in value] if isinstance(value, tuple | list) else [str(value)]
    if len(words) == 1:
        return [f"--{name}={words[0]}"]  # in one word, so that a value may start with a dash
    return [f"--{name}", *words]


def _preset_in(argv: Sequence[str]) -> str | None:
    for place, word in enumerate(argv):
        if word == "--preset" and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith("--preset="):
            return word.removeprefix("--preset=")
    return None
