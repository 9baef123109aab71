"""Read a rank program's Config, and what a run may replace in it, without running the program.

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

# The functions of ``labkit.rank`` by which a program gets the Config of its run.
CONFIG_LOADERS = {"run_main", "load_config"}
CONFIG_IMPORT_RULE = (
    "it is read without running the program: it may use what the program's top level imports, "
    "assigns or defines above it"
)
_module_numbers = itertools.count()
_parse_lock = threading.Lock()


def compile_config(program: Path) -> type[Any] | None:
    """Compile the class Config of a rank program, with what it names above it; None without one.

    It gets ``program_file``, ``field_docs``, ``field_lines``, and ``is_loaded``: does the program
    read its Config from the run?
    """
    tree = parse_program(program)
    definition = _find_config(tree)
    if definition is None:
        return None
    rule = "fields need plain defaults that cannot fail"
    with raise_parameter_errors(str(program), definition.lineno, "class Config", rule):
        found = _execute_class(program, _needed_statements(tree.body, definition), definition)
    found.program_file = str(program)
    found.field_docs = _docs_below_fields(definition)
    found.field_lines = _declared_fields(definition)
    found.is_loaded = any(
        getattr(node, "id", getattr(node, "attr", "")) in CONFIG_LOADERS for node in ast.walk(tree)
    )
    return found


def _find_config(tree: ast.Module) -> ast.ClassDef | None:
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == "Config"), None)


def _declared_fields(definition: ast.ClassDef) -> dict[str, int]:
    """Return the names of a class's fields, with their lines."""
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(field.target): field.lineno for field in fields}


def find_sibling_programs(config_class: type[Any], name: str) -> list[str]:
    """Return the programs of the same folder whose own Config declares this field."""
    module = sys.modules.get(config_class.__module__)
    file = vars(config_class).get("program_file", getattr(module, "__file__", None))
    found = []
    for path in sorted(Path(file).parent.glob("*.py")) if file else []:
        # A program that cannot be read has no fields.
        with contextlib.suppress(ParameterError):
            definition = _find_config(parse_program(path))
            if definition and name in _declared_fields(definition):
                found.append(path.stem)
    return found


def read_field_docs(config_class: type[Any]) -> dict[str, str]:
    """Return the docstrings below the fields of a Config and of those that it inherits from."""
    docs: dict[str, str] = {}
    bases: Any = filter(dataclasses.is_dataclass, reversed(config_class.__mro__))
    for each in bases:
        # A class that is already imported is read from its source, if it has one.
        if "field_docs" not in vars(each):
            each.field_docs = {}
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                source = textwrap.dedent(inspect.getsource(each))
                each.field_docs = _docs_below_fields(_parse_source(source).body[0])
        docs |= each.field_docs
    return docs


def _docs_below_fields(definition: ast.stmt) -> dict[str, str]:
    return {
        field.target.id: text
        for field, below in itertools.pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if (text := ast.get_docstring(ast.Module([below], [])))
    }


def read_replaceable(program: Path) -> dict[str, inspect.Signature]:
    """Return the functions of a program that a run can replace, with their arguments' names."""
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
    """Parse a program's file; raise ParameterError where it is not Python."""
    try:
        return _parse_source(program.read_bytes(), str(program))
    except OSError as error:
        problem = f"{program}: cannot be read ({error.strerror}): give a file of Python"
    except SyntaxError as error:
        problem = f"{program}:{error.lineno}: not valid Python: {error.msg}"
    # Raised for a null byte and for expressions nested too deeply.
    except (ValueError, RecursionError, MemoryError) as error:
        problem = f"{program}: not valid Python: {error or type(error).__name__}"
    raise ParameterError(problem)


def _needed_statements(body: list[ast.stmt], definition: ast.ClassDef) -> list[ast.stmt]:
    """Return the statements above a class that bind what it uses, and those that these need."""
    names = _used_names(definition)
    needed: list[ast.stmt] = []
    for node in reversed(body[: body.index(definition)]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            # Of `from labkit import rank, requirements` only what is used: rank imports torch.
            node.names = [each for each in node.names if _alias_name(each) in names]
            if node.names:
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
    # The list grows while it is read: scopes are nested.
    for table in tables:
        tables += table.get_children()
        symbols = (each for each in table.get_symbols() if each.is_referenced())
        names |= {symbol.get_name() for symbol in symbols if symbol.is_global()}
    return names


def _execute_class(program: Path, above: list[ast.stmt], definition: ast.ClassDef) -> type[Any]:
    # A name of its own: several threads may read programs at the same time.
    name = f"config of {program.name}, {next(_module_numbers)}"
    module = types.ModuleType(name)
    for node in above:
        _bind_sibling_configs(program, node, module)
    # Imports whose every name is bound already have none left.
    above = [node for node in above if getattr(node, "names", True)]
    # With annotations as strings, a class may name types that are defined below it.
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, *above, definition], []))
    # dataclass() looks up the names of annotations in sys.modules.
    sys.modules[name] = module
    try:
        exec(compile(tree, str(program), "exec"), vars(module))
        found: type[Any] = vars(module)[definition.name]
        if not dataclasses.is_dataclass(vars(module)[definition.name]):
            raise ParameterError(
                f"{program}:{definition.lineno}: class Config must be a @dataclass"
            )
        # As strings, annotations could only be read with the module at hand.
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
    for alias in [each for each in node.names if each.name == "Config"]:
        setattr(module, _alias_name(alias), compile_config(sibling))
        node.names.remove(alias)


@contextlib.contextmanager
def raise_parameter_errors(file: str, line: int, what: str, rule: str) -> Iterator[None]:
    """Turn any error of a program's own code into a ParameterError with file:line and the rule."""
    try:
        yield
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == file:
                line = number
        rule = CONFIG_IMPORT_RULE if isinstance(error, NameError) else rule
        reason = f"{type(error).__name__}: {error}"
        raise ParameterError(f"{file}:{line}: {what}: {reason}; {rule}") from error
