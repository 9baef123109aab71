"""The fixture ``answer_to``: a learner's function from the text of its body, as a cell of a notebook has it."""

import importlib.util
import itertools
import textwrap

import pytest


@pytest.fixture
def answer_to(tmp_path):
    """Makes a function from its head and the text of its body, with a file behind it; ``imports`` come before."""
    numbers = itertools.count()

    def made(head, body, imports=""):
        name = f"cell_{tmp_path.name}_{next(numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(f"{imports}{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, head.split()[1].split("(")[0])

    return made
