"""Choose which modules FSDP shards together: its units.

A unit's parameters are gathered together, just before its first module computes. So each parameter
must be in exactly one unit, whoever uses it, and a nested unit must be made before the outer one.
"""

import weakref
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from typing import TypeVar

from torch import nn

from labkit.parallel.checkpointing import BlockTypes, checkpoint_wrappers, find_blocks, plain_name

ModuleType = TypeVar("ModuleType", bound=nn.Module)
ROOT = "root"
Units = dict[str, list[nn.Module]]
"""Modules by the name of their unit."""


def layer_types(model: nn.Module) -> tuple[str, ...]:
    """Return class names of the modules that hold parameters themselves, for ``--wrap layer``.

    The parts of nn.MultiheadAttention are left out: they are never called, so nothing would gather
    them.
    """
    holders = [
        module
        for module in _callable_parts(model)
        if any(True for _ in module.parameters(recurse=False))
    ]
    return tuple(sorted({type(module).__name__ for module in holders}))


def modules_with_parameters(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the callable modules that hold parameters, nested ones too, for ``--wrap every``."""
    return tuple(
        module for module in _self_contained_parts(model) if any(True for _ in module.parameters())
    )


def large_modules(model: nn.Module, numbers: int) -> tuple[nn.Module, ...]:
    """Return the modules with this many parameters outside of nested units, for ``--wrap size``."""
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for module in reversed(
        _self_contained_parts(model)
    ):  # a module comes after those that contain it
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if own and sum(own.values()) >= numbers:
            chosen.append(module)
            taken |= own.keys()
    return tuple(chosen)


def wrap(module: ModuleType) -> ModuleType:
    """Mark a module as a unit where it is constructed, and return it: ``wrap(nn.Linear(4, 4))``.

    Pass ``is_marked`` as ``block_types`` to shard the marked modules, as FSDP1's ``wrap`` does.
    """
    _unit_marks.add(module)
    return module


def is_marked(module: nn.Module) -> bool:
    """Tell whether ``wrap`` was called with this module."""
    return module in _unit_marks


_unit_marks: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _callable_parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called, so that a hook can gather before them; outer ones first.

    Containers have no forward pass, and attention uses its parts' weights without calling the
    parts.
    """
    uncalled = {
        part
        for m in model.modules()
        if isinstance(m, nn.MultiheadAttention)
        for part in m.children()
    }
    containers = (nn.ModuleList, nn.ModuleDict)
    return [
        m
        for m in model.modules()
        if m is not model and m not in uncalled and not isinstance(m, containers)
    ]


def _self_contained_parts(model: nn.Module) -> list[nn.Module]:
    """The callable parts without those around only one of several modules that share a parameter.

    A unit of such a part would have to hold the others, which may lie in a unit that holds this
    part.
    """
    parts = _callable_parts(model)
    return [
        part
        for part in parts
        if any(True for _ in part.parameters(recurse=False))
        or not modules_sharing_weights(model, part)
    ]


def fsdp_units(
    model: nn.Module,
    block_types: BlockTypes,
    local_modules: Collection[nn.Module] = (),
    skip: Collection[int] = (),
) -> Units:
    """The modules of each unit by name, in the order of the model; what is in none of them belongs
    to the root.

    A parameter that two modules share must live in one unit, or each would gather and reduce a copy
    of its own. So modules that are tied to a block join its unit.

    Args:
        model: any module.
        block_types: which modules are blocks, and so become units: class names, or a function that
            says it of each.
        local_modules: modules that differ from rank to rank and stay out of all units.
        skip: blocks to leave to the root, counted from 0 in the order of the model.

    Raises:
        ValueError: block types are given and the model has none of them, or not as many as ``skip``
            counts.
    """
    outside = {part for module in local_modules for part in module.modules()}
    blocks = [
        block
        for block in find_blocks(model, block_types)
        if block not in outside and list(block.parameters())
    ]
    if block_types and not blocks:
        if apart := [block for block in find_blocks(model, block_types) if block in outside]:
            kinds = ", ".join(sorted({type(block).__name__ for block in apart}))
            raise ValueError(
                f"all blocks of {type(model).__name__} ({kinds}) are ignored or local: nothing is"
                " left to wrap"
            )
        if callable(block_types):
            raise ValueError(
                f"is_unit chose no module of {type(model).__name__} that has parameters: choose one"
            )
        has = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(
            f"no block of type {', '.join(sorted(block_types))} in {type(model).__name__}: it has"
            f" {has}"
        )
    if not set(skip) <= set(range(len(blocks))):
        raise ValueError(
            f"skip {sorted(skip)} counts blocks that are not there: the model has {len(blocks)},"
            " from 0"
        )
    blocks = [block for index, block in enumerate(blocks) if index not in skip]
    wrappers, names = (
        checkpoint_wrappers(model),
        {module: name for name, module in model.named_modules()},
    )
    units: Units = {}
    unit_of: dict[nn.Module, str] = {}
    for block in blocks:
        tied = modules_sharing_weights(model, block)
        name = next(
            (unit_of[other] for other in (block, *tied) if other in unit_of),
            plain_name(names[block]),
        )
        for module in (block, *tied):
            if module not in unit_of and not any(
                module in set(member.modules()) for member in units.get(name, [])
            ):
                units.setdefault(name, []).append(wrappers.get(module, module))
                unit_of[module] = name
    return units


def inner_first(units: Units) -> Iterator[list[nn.Module]]:
    """Order the units so that nested ones come before those around them."""
    inside = {
        name: {part for m in modules for part in m.modules()} - set(modules)
        for name, modules in units.items()
    }
    needs = {
        name: {other for other in units if other != name and inside[name] & set(units[other])}
        for name in units
    }
    return (units[name] for name in TopologicalSorter(needs).static_order())


def modules_sharing_weights(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Return the modules outside ``block`` that hold one of its parameters themselves."""
    own, inside = {id(p) for p in block.parameters()}, set(block.modules())
    others = [module for module in model.modules() if module not in inside]
    return [
        module for module in others if any(id(p) in own for p in module.parameters(recurse=False))
    ]
