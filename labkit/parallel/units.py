"""Choose which modules FSDP shards together: its units.

A unit's parameters are gathered together, just before its first module computes. So each parameter
must be in exactly one unit, and a nested unit must be made before the outer one.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from graphlib import TopologicalSorter
from typing import TypeVar

from torch import nn

from labkit.models.protocol import LabModel
from labkit.parallel import checkpointing
from labkit.parallel.checkpointing import BlockTypes, UnitRule, find_blocks

ModuleType = TypeVar("ModuleType", bound=nn.Module)
ROOT = "root"
Units = dict[str, list[nn.Module]]
"""The modules of each unit, by its name."""


def fsdp_units(
    model: nn.Module,
    block_types: BlockTypes,
    local_modules: Collection[nn.Module] = (),
    skip: Collection[int] = (),
) -> Units:
    """Return the modules of each unit, in the order of the model; the rest belongs to the root.

    ``local_modules`` stay out of all units. ``skip`` leaves blocks to the root, counted from 0.
    """
    outside = {part for module in local_modules for part in module.modules()}
    found = find_blocks(model, block_types)
    blocks = [block for block in found if block not in outside and list(block.parameters())]
    if block_types and not blocks:
        raise checkpointing.missing_blocks_error(model, block_types, outside.intersection(found))
    if unknown := sorted(index for index in skip if index >= len(blocks)):
        there = f"the model has {len(blocks)}, from 0"
        raise ValueError(f"skip {unknown} counts blocks that are not there: {there}")
    wrappers = checkpointing.checkpoint_wrappers(model)
    names = {module: name for name, module in model.named_modules()}
    units: Units = {}
    unit_names: dict[nn.Module, str] = {}
    for index, block in enumerate(blocks):
        if index in skip:
            continue
        # Modules that share a weight share a unit, or each would gather and reduce its own copy.
        together = [block, *modules_sharing_weights(model, block)]
        earlier = (unit_names[module] for module in together if module in unit_names)
        name = next(earlier, checkpointing.plain_name(names[block]))
        unit = units.setdefault(name, [])
        for module in together:
            inside = {part for member in unit for part in member.modules()}
            if module not in unit_names and module not in inside:
                # FSDP's hooks go around the recomputation of a checkpointed block.
                unit.append(wrappers.get(module, module))
                unit_names[module] = name
    return units


def inner_first(units: Units) -> Iterator[list[nn.Module]]:
    """Yield the units so that each comes before those around it, as wrapping needs."""
    needs: dict[str, set[str]] = {}
    for name, modules in units.items():
        inside = {part for module in modules for part in module.modules()} - set(modules)
        needs[name] = {other for other in units if other != name and inside & set(units[other])}
    return (units[name] for name in TopologicalSorter(needs).static_order())


def modules_sharing_weights(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Return the modules outside ``block`` that own one of its parameters."""
    shared, inside = set(block.parameters()), set(block.modules())
    others = [module for module in model.modules() if module not in inside]
    return [m for m in others if not shared.isdisjoint(m.parameters(recurse=False))]


def choose_block_types(
    model: LabModel,
    wrap: str,
    blocks: Sequence[str] = (),
    is_unit: UnitRule | None = None,
    min_numbers: int = 1,
) -> BlockTypes:
    """Return what becomes a unit in a wrap mode of ``apply_fsdp``; nothing for one unit alone."""
    if wrap == "yours":
        assert is_unit, "wrap yours needs is_unit"
        return is_unit
    if wrap == "block":
        return tuple(blocks) or model.block_types
    if wrap == "layer":
        return layer_types(model)
    if wrap == "root":
        return ()
    large = wrap == "size"
    chosen = large_modules(model, min_numbers) if large else modules_with_parameters(model)
    # With nothing chosen, because the model is too small, it is one unit.
    return chosen.__contains__ if chosen else ()


def layer_types(model: nn.Module) -> tuple[str, ...]:
    """Return class names of the modules that own parameters, for ``--wrap layer``."""
    owners = [m for m in _callable_parts(model) if list(m.parameters(recurse=False))]
    return tuple(sorted({type(module).__name__ for module in owners}))


def modules_with_parameters(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the callable modules that hold parameters, nested ones too, for ``--wrap every``."""
    return tuple(part for part in _self_contained_parts(model) if list(part.parameters()))


def large_modules(model: nn.Module, numbers: int) -> tuple[nn.Module, ...]:
    """Return the modules with this many parameters outside of nested units, for ``--wrap size``."""
    chosen: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    # Reversed, inner modules come first, so an outer one counts what they have left over.
    for module in reversed(_self_contained_parts(model)):
        own = set(module.parameters()) - taken
        if own and sum(parameter.numel() for parameter in own) >= numbers:
            chosen.append(module)
            taken |= own
    return tuple(chosen)


def _callable_parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called, so that hooks can gather for them; outer ones first."""
    uncalled = {model}
    for module in model.modules():
        # Containers have no forward pass; attention uses its parts' weights without calling them.
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            uncalled.add(module)
        if isinstance(module, nn.MultiheadAttention):
            uncalled.update(module.children())
    return [module for module in model.modules() if module not in uncalled]


def _self_contained_parts(model: nn.Module) -> list[nn.Module]:
    """Return the callable parts, without those that share a nested parameter with the outside."""
    # Such a part's unit would have to hold the outside module, which may lie in a unit around it.
    return [
        part
        for part in _callable_parts(model)
        if list(part.parameters(recurse=False)) or not modules_sharing_weights(model, part)
    ]


_unit_marks: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def wrap(module: ModuleType) -> ModuleType:
    """Mark a module as a unit where it is constructed, and return it: ``wrap(nn.Linear(4, 4))``.

    Pass ``is_marked`` as ``block_types`` to shard the marked modules, as FSDP1's ``wrap`` does.
    """
    _unit_marks.add(module)
    return module


def is_marked(module: nn.Module) -> bool:
    """Tell whether ``wrap`` was called with this module."""
    return module in _unit_marks
