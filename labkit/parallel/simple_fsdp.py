"""FSDP that the compiler sees: a parameter is this rank's rows, and reading it gathers the rest.

    apply_simple_fsdp(model, mesh["data"])
    model.compile(fullgraph=True)

FSDP2 gathers in hooks, which the compiler cannot move. Here each parameter is a DTensor of its
rows, and ``layer.weight`` is a property: reading it all-gathers the rows, and its backward pass
reduce-scatters the mean of the gradients. Every collective is then an operator of the graph, which
passes of the compiler join into buckets and move ahead of the arithmetic. Uncompiled, each
parameter is gathered where it is read, and waited for.

    layer.weight     rank 0 keeps a0   all-gather   a0 a1 on both   reduce-scatter   mean of a0's
                     rank 1 keeps a1  ----------->  for one layer  --------------->  mean of a1's

Source: Zhang et al., "SimpleFSDP", 2024 (arXiv:2411.00284).
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)


def apply_simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every parameter of a model in place, over a mesh with one axis.

    The parameters are equal on all ranks, and keep their names. A parameter without dimensions has
    no rows, so it stays whole.
    """
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own.items():
            # A parameter that two modules share stays one.
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, mesh)
            module.register_parameter(name, sharded[parameter])
        if own:
            _gather_when_read(module, tuple(own))


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    rows: Placement = Shard(0) if parameter.dim() else Replicate()
    mine = distribute_tensor(parameter.detach(), mesh, [rows])
    return nn.Parameter(mine, requires_grad=parameter.requires_grad)


def gather(shard: DTensor) -> Tensor:
    """Return the whole parameter; its gradient is the mean over the ranks, cut into rows."""
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _gather_when_read(module: nn.Module, names: tuple[str, ...]) -> None:
    """Give a module a class whose properties gather these parameters."""

    def read(name: str) -> property:
        return property(lambda self: gather(self._parameters[name]))

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: read(name) for name in names})
