"""Reads a rank program's Config, and what a run may replace in it, without running the program.

The file is a script: importing it would import torch, and where it has no ``if __name__`` run it.
So the class Config is compiled alone, with the imports, assignments and definitions above it that
it names. A Config that names nothing of torch is there in milliseconds.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import symtable
import sys
import textwrap
import threading
import traceback
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.errors import LabError, ParameterError

CONFIG_LOADERS = {"run_main", "load_config"}
"""The functions of ``labkit.rank`` by which a program gets the Config of its run."""
CONFIG_IMPORT_RULE = (
    "it is read without running the program: it may use what the program's top level imports, "
    "assigns or defines above it"
)
_module_numbers = itertools.count()
_parse_lock = threading.Lock()


def compile_class(program: Path, name: str) -> type[Any] | None:
    """Compile one dataclass of a rank program, with what it names above it; None where it has none.

    Sets what its text says on the class: ``program_file``, ``field_docs``, ``field_lines``, and
    ``is_loaded``, whether the program reads its Config from the run.

    Raises:
        ParameterError: the program is not Python, or the class needs what is not above it.
    """
    tree = parse_program(program)
    definition = _find_class(tree, name)
    if definition is None:
        return None
    rule = "fields need plain defaults that cannot fail"
    with raise_parameter_errors(str(program), definition.lineno, f"class {name}", rule):
        found = _execute_class(program, _needed_statements(tree.body, definition), definition)
    found.program_file = str(program)
    found.field_docs = _docs_below_fields(definition)
    found.field_lines = _declared_fields(definition)
    found.is_loaded = any(
        getattr(node, "id", getattr(node, "attr", "")) in CONFIG_LOADERS for node in ast.walk(tree)
    )
    return found


def _find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == name), None)


def _declared_fields(definition: ast.ClassDef) -> dict[str, int]:
    """The names of a class's fields, with their lines."""
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(field.target): field.lineno for field in fields}


def find_sibling_programs(config_class: type[Any], name: str) -> list[str]:
    """Return the programs of the same folder whose own Config declares this field."""
    module = sys.modules.get(config_class.__module__)
    file = vars(config_class).get("program_file", getattr(module, "__file__", None))
    siblings = sorted(Path(file).parent.glob("*.py")) if file else []
    return [path.stem for path in siblings if _declares_field(path, name)]


def _declares_field(program: Path, name: str) -> bool:
    """Whether a program's Config declares a field; not where the program cannot be read."""
    try:
        definition = _find_class(parse_program(program), "Config")
    except ParameterError:
        return False
    return definition is not None and name in _declared_fields(definition)


def read_field_docs(config_class: type[Any]) -> dict[str, str]:
    """Return the docstrings below the fields of a Config and of those that it inherits from."""
    docs: dict[str, str] = {}
    for each in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(each):
            docs |= _read_own_field_docs(each)
    return docs


def _read_own_field_docs(config_class: Any) -> dict[str, str]:
    # A class that is already imported is read from its source, if it has one.
    if "field_docs" not in vars(config_class):
        config_class.field_docs = {}
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            source = textwrap.dedent(inspect.getsource(config_class))
            config_class.field_docs = _docs_below_fields(_parse_source(source).body[0])
    return dict(config_class.field_docs)


def _docs_below_fields(definition: ast.stmt) -> dict[str, str]:
    return {
        field.target.id: text
        for field, below in itertools.pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if (text := ast.get_docstring(ast.Module([below], [])))
    }


def read_replaceable(program: Path) -> dict[str, inspect.Signature]:
    """Read which functions of a rank program a run can replace, with the names of their arguments.

    Raises:
        ParameterError: the program is not Python.
    """
    return {
        node.name: _argument_signature(node.args)
        for node in parse_program(program).body
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


def _parse_source(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    # Up to Python 3.11 threads share one counter of the parser's depth, and one that parses while
    # another does can fail with a SystemError (python/cpython#106905).
    with _parse_lock:
        return ast.parse(source, name)


def parse_program(program: Path) -> ast.Module:
    """Parse a program's file. Raises ParameterError where it is not Python."""
    try:
        return _parse_source(program.read_bytes(), str(program))
    except OSError as error:
        fix = "give a file of Python"
        raise ParameterError(f"{program}: cannot be read ({error.strerror}): {fix}") from None
    except SyntaxError as error:
        raise ParameterError(f"{program}:{error.lineno}: not valid Python: {error.msg}") from None
    # Raised for a null byte and for expressions nested too deeply.
    except (ValueError, RecursionError, MemoryError) as error:
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
    """Return the names that a statement reads from its module, without its own variables."""
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


def _execute_class(program: Path, above: list[ast.stmt], definition: ast.ClassDef) -> type[Any]:
    # A name of its own: several threads may read programs at the same time.
    name = f"config of {program.name}, {next(_module_numbers)}"
    module = types.ModuleType(name)
    for node in above:
        _bind_sibling_configs(program, node, module)
    above = [node for node in above if getattr(node, "names", True)]  # less imports without names
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, *above, definition], []))
    # dataclass() looks up the names of annotations in sys.modules.
    sys.modules[name] = module
    try:
        exec(compile(tree, str(program), "exec"), vars(module))
        found: type[Any] = vars(module)[definition.name]
        if not dataclasses.is_dataclass(vars(module)[definition.name]):
            place = f"{program}:{definition.lineno}: class {definition.name}"
            raise ParameterError(f"{place} must be a @dataclass")
        # no longer as strings, which could only be read with the module at hand
        found.__annotations__ = typing.get_type_hints(found, include_extras=True)
    finally:
        del sys.modules[name]
    return found


def _bind_sibling_configs(program: Path, node: ast.stmt, module: types.ModuleType) -> None:
    """Carry out ``from launch.fsdp_wrap import Config as WrapConfig`` without running fsdp_wrap."""
    if not isinstance(node, ast.ImportFrom) or not node.module:
        return
    sibling = program.with_name(f"{node.module.rpartition('.')[2]}.py")
    if sibling == program or not sibling.exists():
        return
    for alias in node.names:
        if alias.name == "Config":
            setattr(module, _alias_name(alias), compile_class(sibling, alias.name))
    node.names = [alias for alias in node.names if alias.name != "Config"]


@contextlib.contextmanager
def raise_parameter_errors(file: str, line: int, what: str, rule: str) -> Iterator[None]:
    """Turn any error of a program's own code into a ParameterError with file:line and the rule."""
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
