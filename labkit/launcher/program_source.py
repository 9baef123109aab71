"""Reads a rank program's Config, and what a run may replace in it, without running the program.

The file is a script: importing it would import torch, and where it has no ``if __name__`` run it.
So the class Config is compiled alone, with the imports, assignments and definitions above it that
it names. A Config that names nothing of torch is there in milliseconds.
"""

import ast
import dataclasses
import inspect
import itertools
import symtable
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from labkit.config import (
    PLAIN_TYPES,
    convert,
    default_value,
    docs_below_fields,
    init_fields,
    raise_parameter_errors,
    type_name,
)
from labkit.errors import ParameterError

CONFIG_LOADERS = {"run_main", "load_config"}
"""The functions of ``labkit.rank`` by which a program gets the Config of its run."""
_module_numbers = itertools.count()


def read_config(program: Path) -> type[Any] | None:
    """Read the class Config of a rank program; None where it has none.

    Sets ``program_file``, ``field_docs`` and ``is_loaded``, whether the program reads its Config
    from the run.

    Raises:
        ParameterError: the program is not Python, or its Config needs what is not above it.
    """
    tree = _parse_program(program)
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    definition = next((node for node in definitions if node.name == "Config"), None)
    if definition is None:
        return None
    rule = "fields need plain defaults that cannot fail"
    with raise_parameter_errors(str(program), definition.lineno, "class Config", rule):
        statements = [*_needed_statements(tree.body, definition), definition]
        config_class = _execute_config_class(program, statements)
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            _check_field(config_class, field.target.id, f"{program}:{field.lineno}: class Config")
    config_class.program_file = str(program)
    config_class.field_docs = docs_below_fields(definition)
    config_class.is_loaded = any(
        getattr(node, "id", getattr(node, "attr", "")) in CONFIG_LOADERS for node in ast.walk(tree)
    )
    return config_class


def read_replaceable(program: Path) -> dict[str, inspect.Signature]:
    """Read which functions of a rank program a run can replace, with the names of their arguments.

    Raises:
        ParameterError: the program is not Python.
    """
    return {
        node.name: _argument_signature(node.args)
        for node in _parse_program(program).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).split(".")[-1] == "replaceable" for each in node.decorator_list)
    }


def _argument_signature(arguments: ast.arguments) -> inspect.Signature:
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: arguments.posonlyargs,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: arguments.args,
        inspect.Parameter.KEYWORD_ONLY: arguments.kwonlyargs,
    }
    found = [inspect.Parameter(each.arg, kind) for kind, group in kinds.items() for each in group]
    return inspect.Signature(found)


def _parse_program(program: Path) -> ast.Module:
    try:
        return ast.parse(program.read_bytes(), str(program))
    except OSError as error:
        fix = "give a file of Python"
        raise ParameterError(f"{program}: cannot be read ({error.strerror}): {fix}") from None
    except SyntaxError as error:
        raise ParameterError(f"{program}:{error.lineno}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deeply
        reason = error or type(error).__name__
        raise ParameterError(f"{program}: not valid Python: {reason}") from None


def _needed_statements(body: list[ast.stmt], definition: ast.ClassDef) -> list[ast.stmt]:
    """The statements above a class that bind a name which it uses, and those that these need."""
    names = _used_names(definition)
    needed: list[ast.stmt] = []
    for node in reversed(body[: body.index(definition)]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            # of `from labkit import rank, requirements` only what is used: rank imports torch
            aliases = [each for each in node.names if _alias_name(each) in names]
            if aliases:
                node.names = aliases
                needed.append(node)
        elif _bound_names(node) & names:
            needed.append(node)
            names |= _used_names(node)
    return needed[::-1]


def _alias_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
        return {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return set()


def _used_names(node: ast.stmt) -> set[str]:
    """The names that a statement takes from its module: not those of its own fields and variables."""
    tables = [symtable.symtable(ast.unparse(node), "program", "exec")]
    names: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and symbol.is_global()
        }
    return names


def _execute_config_class(program: Path, statements: list[ast.stmt]) -> type[Any]:
    name = f"config of {program.name}, {next(_module_numbers)}"  # threads may read at the same time
    module = types.ModuleType(name)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, *statements], []))
    sys.modules[name] = module  # dataclass() looks there for the names in annotations
    try:
        exec(compile(tree, str(program), "exec"), vars(module))
        config_class: type[Any] = module.Config
        if not dataclasses.is_dataclass(module.Config):
            place = f"{program}:{statements[-1].lineno}"
            raise ParameterError(f"{place}: class Config must be a @dataclass")
        # no longer as strings, which could only be read with the module at hand
        config_class.__annotations__ = typing.get_type_hints(config_class, include_extras=True)
    finally:
        del sys.modules[name]
    return config_class


def _check_field(config_class: type[Any], name: str, place: str) -> None:
    """Raise ParameterError for a field without default, or of a type that JSON does not carry."""
    field = init_fields(config_class).get(name)
    if field is None:
        return
    if default_value(field) is dataclasses.MISSING:
        rule = "every field needs one, so that the program runs without arguments"
        raise ParameterError(f"{place}: no default for {name}; {rule}")
    if not _is_allowed(field.type):
        raise ParameterError(
            f"{place}: field {name} is {type_name(field.type)}; a field is int, float, bool, str, "
            "Literal, a tuple of these, or one of them | None; for many values take a tuple such "
            "as tuple[int, ...]"
        )
    try:
        convert(default_value(field), field.type)
    except ValueError:
        fix = "give one of its type, or change the type"
        is_not = f"{default_value(field)!r}, is not {type_name(field.type)}"
        raise ParameterError(f"{place}: the default of {name}, {is_not}: {fix}") from None


def _is_allowed(wanted: Any) -> bool:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is typing.Annotated:
        return _is_allowed(arguments[0])
    if origin in (Union, types.UnionType, tuple):
        return all(part is Ellipsis or _is_allowed(part) for part in arguments)
    return origin is Literal or wanted in PLAIN_TYPES
