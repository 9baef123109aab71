"""The command line.

    python -m labkit doctor                                       # what this machine can do
    python -m labkit run convnext_spatial --nproc 4 --width 256   # a run, as labkit.run does it in a notebook
    python -m labkit show runs/<a run's folder>                   # the table of an earlier run

Exit status: 0 done, 1 the run failed or a lab cannot run here, 2 the command line was wrong.
"""

from __future__ import annotations

import ast
import json
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import labkit
from labkit import config, doctor
from labkit.run import find_program


@dataclass
class Run:
    """Launch a rank program and show its summary. Further options --name value are the program's own parameters."""

    program: tyro.conf.Positional[str]
    """A name in launch/, or the path of a Python file."""
    nproc: int = 2
    """Number of ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute."""
    timeout_s: float = 300
    """Seconds after which the run is stopped."""


@dataclass
class Show:
    """Show the summary of an earlier run."""

    folder: tyro.conf.Positional[Path]
    """The run's folder, such as runs/20260102-030405-convnext_spatial-a1b2."""


@dataclass
class Doctor:
    """Say what this machine can do and how to mend what it cannot."""

    json: bool = False
    """Print one JSON object instead of text."""


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; returns the exit status."""
    command, rest = tyro.cli(Command, prog="labkit", args=arguments, return_unknown_args=True)
    try:
        if rest and not isinstance(command, Run):
            raise labkit.ParameterError(f"{' '.join(rest)}: not understood; see python -m labkit --help")
        if isinstance(command, Run):
            return launch(command, read_parameters(command.program, rest))
        return show(command) if isinstance(command, Show) else examine(command)
    except labkit.ParameterError as error:
        print(error, file=sys.stderr)
        return 2
    except (labkit.LabError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1


def launch(command: Run, parameters: dict[str, Any]) -> int:
    """Launch the program, print its summary."""
    result = labkit.run(
        command.program, nproc=command.nproc, device=command.device, timeout_s=command.timeout_s, **parameters
    )
    print(result.summary().to_string())
    print(f"recorded in {result.folder}")
    return 0


def show(command: Show) -> int:
    """Print the summary of a recorded run."""
    print(labkit.load(command.folder).summary().to_string())
    return 0


def examine(command: Doctor) -> int:
    """Print the doctor's report; 1 when a lab cannot run here."""
    report = doctor.examine()
    print(json.dumps(report.as_dict(), indent=2) if command.json else report)
    return 0 if report.ok else 1


def read_parameters(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Read a program's options, ``--name value``, ``--name value value``, ``--flag`` or ``--no-flag``, by its Config.

    What its Config does not take is left for labkit.run to refuse, which lists what is allowed.

    Raises:
        ParameterError: there is no such program, or the first argument is no option.
    """
    path, _ = find_program(program)
    config_class = config.read_config(path)
    wanted = typing.get_type_hints(config_class) if config_class else {}
    parameters: dict[str, Any] = {}
    for name, texts in _by_name(arguments).items():
        if not texts and name.startswith("no_") and name not in wanted:
            parameters[name.removeprefix("no_")] = False
        else:
            parameters[name] = _value(texts, wanted.get(name, str))
    return parameters


def _by_name(arguments: Sequence[str]) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            name = option[2:].replace("-", "_")
            texts[name] = [value] if equals else []
        elif name:
            texts[name].append(argument)
        else:
            raise labkit.ParameterError(f"{argument}: a parameter is written --name value")
    return texts


def _value(texts: Sequence[str], wanted: Any) -> Any:
    """The first reading of some words that is of the wanted type: the text, a Python value, a tuple of either."""
    if not texts:
        return True
    literals = [_literal(text) for text in texts]
    readings = [texts[0], literals[0]] if len(texts) == 1 else []
    for reading in [*readings, tuple(texts), tuple(literals)]:
        try:
            return config.convert(reading, wanted)
        except ValueError:
            continue
    return literals[0] if len(literals) == 1 else tuple(literals)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
