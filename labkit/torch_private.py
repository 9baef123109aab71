"""List the private parts of torch that labkit uses, and the functions of torch that it replaces.

A release of torch may move any of them without notice, so this table gives each one's reason and
what stops working without it. tests/test_torch_private.py names every entry that the installed
torch lacks, and so does `python -m labkit doctor`.

    from labkit.torch_private import MemTracker, tree_leaves   # imported from torch on first use
    torch_private.world.pg_names                 # looked up on each access: torch may replace it
    torch_private.replace("PContext.close", close)             # for the rest of the process
    torch_private.TORCH_VERSION                                # of the torch that is imported

A name is the end of an entry's path, long enough to be unique; its leading underscore may be left
out. The table also lists private attributes of torch's objects, which are used directly.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

# Versions of torch in which the names below were found.
SEEN = ("2.11.0", "2.12.0", "2.13.0")
# ``torch.__version__``, read on each access.
TORCH_VERSION: str


class PrivateName(NamedTuple):
    """A part of torch by its path (``module:attribute`` or a module), with what it is needed for,
    what is lost without it, and the versions of torch that have it.
    """

    path: str
    why: str
    lost: str
    seen: tuple[str, ...] = SEEN

    def resolve(self) -> Any:
        """Import this part, or raise RuntimeError where the installed torch lacks it."""
        try:
            if ":" in self.path:
                return pkgutil.resolve_name(self.path)
            return importlib.import_module(self.path)
        except (ImportError, AttributeError) as error:
            if isinstance(error, ImportError) and error.name == "torch":
                raise
            missing = f"torch {version('torch')} has no {self.path}: it is private and has moved"
            fix = f"labkit knows torch {', '.join(self.seen)}: install one of them"
            raise RuntimeError(f"{missing}; {fix}. Lost without it: {self.lost}") from error

    def is_there(self) -> bool:
        """Whether this torch has it, as a name or as an attribute of objects."""
        try:
            self.resolve()
        except RuntimeError:
            return self._is_set_on_objects()
        return True

    def _is_set_on_objects(self) -> bool:
        owner, _, attribute = self.path.rpartition(".")
        # __init__ sets such attributes, so the class itself has none: look for the assignment.
        try:
            kind = pkgutil.resolve_name(owner)
            assigned = re.compile(rf"self\.{attribute}\b")
            return any(assigned.search(inspect.getsource(each)) for each in kind.__mro__[:-1])
        except (ImportError, AttributeError, TypeError, OSError):
            return False


def get(name: str) -> Any:
    """Import a part of torch by the end of its path; AttributeError unless that fits one entry."""
    return _find_entry(name).resolve()


def __getattr__(name: str) -> Any:
    if name == "TORCH_VERSION":
        return str(importlib.import_module("torch").__version__)
    return get(name)


def replace(name: str, new: Any) -> None:
    """Replace a function, class or method of torch for the rest of the process."""
    entry = _find_entry(name)
    # Without this check, setattr would add a name that the installed torch never calls.
    entry.resolve()
    module, _, attribute = entry.path.partition(":")
    owner, _, last = attribute.rpartition(".")
    setattr(pkgutil.resolve_name(f"{module}:{owner}"), last, new)


def wrap(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function of torch with ``wrapper(original)`` for the rest of the process."""
    replace(name, wrapper(get(name)))


def missing_names() -> list[PrivateName]:
    """List the entries that the installed torch lacks, except those it is known to lack."""
    # A version that labkit has not seen should have all of them.
    installed = version("torch").partition("+")[0]
    expected = (each for each in PRIVATE_NAMES if installed in each.seen or installed not in SEEN)
    return [each for each in expected if not each.is_there()]


@cache
def _find_entry(name: str) -> PrivateName:
    # A caller may leave out the leading underscore.
    endings = tuple(f"{separator}{start}{name}" for separator in ".:" for start in ("", "_"))
    found = [each for each in PRIVATE_NAMES if each.path == name or each.path.endswith(endings)]
    if len(found) != 1:
        paths = ", ".join(each.path for each in found) or "none"
        rule = f"{name!r} must name one entry of labkit.torch_private, and names {paths}"
        raise AttributeError(f"{rule}: add it there")
    return found[0]


MEMORY_TRACKER_MODULE = "torch.distributed._tools.mem_tracker"
COMPILED_AUTOGRAD_MODULE = "torch._dynamo.compiled_autograd"
# Each imports the compiler in about half a second, so a warm process does it once for all ranks.
SLOW_MODULES = (MEMORY_TRACKER_MODULE, "torch._inductor.compile_fx", COMPILED_AUTOGRAD_MODULE)

_DEVICE_FUNCTIONS = (
    "synchronize empty_cache set_stream reset_accumulated_memory_stats current_stream "
    "memory_allocated memory_reserved max_memory_allocated max_memory_reserved "
    "reset_peak_memory_stats get_device_capability"
)
_MODULE_FUNCTIONS = {
    "cuda": "ipc_collect init set_per_process_memory_fraction Event Stream set_device device "
    "stream current_device default_stream reset_max_memory_allocated is_bf16_supported "
    "get_device_name",
    "accelerator": "empty_host_cache set_device_index current_device_index device_index",
}
# Public functions of torch.cuda and torch.accelerator that a simulation answers as a GPU would.
DEVICE_FUNCTIONS = {
    module: tuple(f"{_DEVICE_FUNCTIONS} {names}".split())
    for module, names in _MODULE_FUNCTIONS.items()
}
# Functions that answer programs as a GPU would in a simulation, and torch itself truthfully.
DEVICE_QUESTIONS = (
    *("cuda.is_available", "cuda.device_count", "accelerator.is_available"),
    *("accelerator.device_count", "accelerator.current_accelerator"),
)
_MESH_MODULES = ("device_mesh", "tensor", "tensor.device_mesh", "fsdp._fully_shard._fsdp_init")
# Every module in which a program, or FSDP2 without a mesh, finds torch's init_device_mesh.
MESH_FACTORIES = (
    "torch.distributed:init_device_mesh",
    *(f"torch.distributed.{module}:init_device_mesh" for module in _MESH_MODULES),
)

# [part of labkit] what is lost. Below it the paths, with the reason; several names after a path
# have the same owner, and names below a path without a reason are indented.
_TABLE = """
[launcher] every run
torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler
    SubprocessHandler._popen: replaced: ranks are forks of a process that has imported torch
torch.distributed.elastic.multiprocessing.api
    SubprocessContext._start: replaced: the store starts its thread only after the last fork
    PContext.close: replaced: after a failure the other ranks have 2 s to obey SIGTERM, not 30

[session] which collectives hang, where a run is stopped
torch._C._distributed_c10d:_dump_fr_trace_json: torch's flight recorder
torch._C._distributed_c10d:_dump_fr_trace: the same with lines of code, for lab 7

[session] emulated links, where inductor joins gathers: lab 4c
torch._C._distributed_c10d
    _resolve_process_group: the group of a gather, which is given by its name
    _register_work: what a later wait for the gather waits for

[session] every run that measures its traffic, and a clean end of every session
torch.distributed.distributed_c10d
    _world: all process groups of this process
    _world.pg_map: groups that must outlive the end of a session
    _world.pg_names: the group of a collective, which is given by its name
torch.distributed
    ProcessGroup._register_backend ProcessGroup._set_default_backend: a group hands on to gloo's
    ProcessGroupGloo._allgather_base ProcessGroupGloo._reduce_scatter_base: what it hands on
torch:ScriptObject._type: tells a process group among the arguments of a collective
torch.utils._python_dispatch:TorchDispatchMode: sees every operator and collective
torch.utils._pytree
    tree_flatten tree_flatten_with_path tree_leaves tree_map_only: the tensors in nested arguments
    tree_unflatten: rebuilds the structure
    keystr: the place of a tensor as text

[session] memory by category: labs 2, 3, 5 and 6
torch.distributed._tools.mem_tracker
    _PYTORCH_MIN_ALLOCATE: set to 1: on a GPU too the bytes are those of tensors
    MemTracker: follows every tensor of a step
    MemTracker._mod_tracker: which module is at work
    MemTracker._pre_fw_hook: replaced: a model may run several times in one step
torch.distributed._tools.fsdp2_mem_tracker
    FSDPMemTracker: knows the categories of FSDP2
    FSDPMemTracker._fsdp_state_pre_forward: replaced: a model may run several times in one step
    FSDPMemTracker._fsdp_state_post_forward: replaced: the last module of a unit ends it
torch.distributed._functional_collectives
    AsyncCollectiveTensor: with it DTensor waits for its collectives
    AsyncCollectiveTensor.wait AsyncCollectiveTensor.trigger_wait: replaced as Work.wait
torch.distributed:Work.wait: replaced in a traced step, so that gloo frees its buffers

[session] time lines of compiled programs
torch._dynamo.compiled_autograd
    compiled_autograd_enabled: while it is set, hooks would be compiled into the backward pass

[technique] activation checkpointing: labs 2 and 5
torch.distributed.algorithms._checkpoint.checkpoint_wrapper: checkpoints a block, keeps its names
    CheckpointWrapper._checkpoint_wrapped_module: the block inside
torch:ops.aten
    _scaled_dot_product_flash_attention.default: its result is kept, not computed again
    _scaled_dot_product_flash_attention_for_cpu.default: its result is kept
    _scaled_dot_product_efficient_attention.default: its result is kept
    _scaled_dot_product_cudnn_attention.default: its result is kept
torch:ops._c10d_functional.reduce_scatter_tensor.default: its result is kept

[technique] FSDP's prefetching, its flat parameters and its gathered memory: labs 2 and 3
torch.distributed.fsdp
    FSDPModule._set_unshard_async_op: lets FSDP prefetch on gloo
    FSDPModule._get_fsdp_state: the parameters that a unit gathers
    FullyShardedDataParallel._use_orig_params: whether FSDP1 keeps parameters apart
    ShardingStrategy._HYBRID_SHARD_ZERO2: FSDP1's hybrid sharding that keeps gathered parameters
torch.distributed.fsdp._fully_shard._fsdp_state
    FSDPState._fsdp_param_group: the parameters that a unit gathers
torch.distributed.fsdp._fully_shard._fsdp_param_group
    FSDPParamGroup FSDPParamGroup.unshard FSDPParamGroup.reshard: replaced by labkit.instrument
    FSDPParamGroup.post_backward: replaced by labkit.instrument
    RegisterPostBackwardFunction RegisterPostBackwardFunction.backward: watched in tests

[technique] tensor subclasses and hooks of FSDP's all-gather: lab 3
torch.distributed.tensor:DTensor._local_tensor: FSDP2 asks this object, not a view of it, for hooks
torch
    Tensor._make_wrapper_subclass: makes a tensor that holds others
    UntypedStorage._cdata: tells memory apart where it has no address
    ops.aten.add_.Tensor._schema: which arguments an operator writes to
    _foreach_mul: an operator on lists, with which an exercise is judged
torch.utils._python_dispatch
    return_and_correct_aliasing: makes views of such a tensor share its memory
torch.autograd:_unsafe_preserve_version_counter: refills a parameter that autograd has saved

[technique] pictures of shards without ranks: labs 1 and 3
torch.distributed._local_tensor
    LocalTensor: a tensor of all ranks
    LocalTensor._local_tensors: the part of each rank
    LocalTensorMode: all ranks in one process

[technique] gradient buckets: labs 1 and 4
torch.autograd
    Variable._execution_engine.queue_callback: acts at the end of a backward pass, as DDP does
torch.distributed._composable.replicate:replicate: DDP without a wrapper: labs 4 and 5

[technique] networks with a delay on a GPU
torch.cuda:_sleep: torch's only kernel that does nothing but wait

[technique] reading checkpoints of others without running their code: lab 7
torch.serialization:_get_layout: named in a checkpoint
torch.distributed.checkpoint.filesystem:_StorageInfo: named in a checkpoint
torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING: named in a checkpoint

[compiler] compiled DDP and its buckets: lab 4
torch._dynamo
    config: settings of the tracer
    config.optimize_ddp: leaves DDP's averaging to the compiler
torch._inductor
    config: settings of the compiler
    config._fuse_ddp_communication: fuses all-reduces into buckets
    config._fuse_ddp_communication_passes config._fuse_ddp_bucket_size: how it fuses them
    config.reorder_for_locality: must not take a backward pass for inference
    config.post_grad_custom_post_pass: calls a pass over the graph: lab 4c
    config.reorder_for_peak_memory: would move gathers back
torch:ops._c10d_functional
    all_gather_into_tensor.default wait_tensor.default: found in graphs, and put there: lab 4c
torch._inductor.fx_passes.overlap_scheduling: inductor's own pass: lab 4c
    schedule_overlap_bucketing: chooses buckets and order
    estimate_roofline_runtime_ms: replaced: a CPU's torch cannot ask for the speed of a GPU
torch._inductor.fx_passes.ddp_fusion: the passes that fuse
    fuse_ddp_with_concat_op fuse_ddp_with_coalesced_op: two of these passes
    schedule_comm_wait: moves waits to the first use
torch._dynamo.trace_rules: building DDP changes it for the rest of the process
    LEGACY_MOD_INLINELIST get_legacy_mod_inlinelist: what building DDP changes
torch._dynamo.utils:counters: graphs compiled, buckets made, backward passes traced
torch._dynamo.backends.registry:lookup_backend: the compiled pieces of a DDP model are counted
torch._dynamo.compiled_autograd:_enable: traces a backward pass
torch._inductor.graph
    GraphLowering: its programs are read
    GraphLowering.save_output_code: replaced: hands over the programs that inductor writes

[simulator] simulations and plans: lab 6
torch._subclasses.fake_tensor
    FakeTensorMode: tensors have shapes and no memory
    FakeTensor: tells such a tensor from others
    FakeTensorMode._prep_args_for_hash: replaced: reads arguments that were seen before, faster
    unset_fake_temporarily: gives tensors values where torch needs them
    DataDependentOutputException DynamicOutputShapeException: a program has read a value
torch.testing._internal.distributed.fake_pg:FakeStore: a process group of one process
torch._C._distributed_c10d
    FakeWork: what a collective of such a group returns
    FakeWork.wait: replaced while a step is recorded: a wait is an event
torch.distributed._tools.fake_collectives: lets collectives take tensors without memory
torch:_C._current_graph_task_id: whether a backward pass is running
torch.distributed.distributed_c10d:init_process_group new_group: replaced: a group sends nothing
torch.distributed.device_mesh
    init_process_group: replaced: as torch.distributed's
    DeviceMesh.__init__: replaced: a mesh is values in tensors; it takes the CPU for a GPU
torch.distributed
    init_process_group: replaced: sends nothing, or over emulated links; in cells CPU tensors, too
    new_group: replaced: whatever its backend, a group sends nothing
    is_nccl_available: replaced: programs are told yes
    Reducer Logger _verify_params_across_processes: replaced: DDP's C++ works on memory
    _register_comm_hook _register_builtin_comm_hook: replaced: a hook of DDP cannot be simulated
    _compute_bucket_assignment_by_size: DDP's buckets in the order of the first backward pass
torch.nn.parallel:DistributedDataParallel.__init__: replaced: it refuses a GPU that is not there
torch.distributed.fsdp._fully_shard._fsdp_param
    _chunk_with_empty: replaced: cuts only the chunk that is used
    FSDPParam.reset_sharded_param: replaced: it looks at addresses
    FSDPParam._module_info FSDPParam._sharded_param_data: the parameter that it would reset
torch.distributed.tensor._sharding_prop:ShardingPropagator
    _propagate_tensor_meta_non_cached: replaced: its trial operators are not part of the step
torch.utils._python_dispatch:_disable_current_modes: hides those operators from the recorders
torch.distributed._tools.mem_tracker:MemTracker
    _update_snap: replaced: reports every change of memory
    _update_peak_stats: replaced: a peak of many steps
    _post_fw_hook _pre_bw_hook _post_bw_hook: replaced: models may come and go
    _WINFO: what is there before the step
    _curr_mem_snap _peak_mem_snap _peak_mem: bytes now and at the peak
torch.distributed._tools.mod_tracker
    ModTracker._known_modules: the models of a program that does not use labkit
torch.distributed._tools.common_utils:get_untyped_storages: the memory behind a tensor
torch.nn.init:_no_grad_trunc_normal_: replaced: it draws until all values are within bounds
torch.utils:swap_tensors: replaced: torch refuses it for tensors that a mode remembers
torch
    compile: replaced: refused, since it needs values
    save: replaced: there is nothing to save
torch.multiprocessing:spawn: replaced: only one of the ranks that it would start exists
torch.utils.data
    RandomSampler.__iter__ SubsetRandomSampler.__iter__: replaced: an order is made of values
    WeightedRandomSampler.__iter__ DistributedSampler.__iter__: replaced for the same reason
    random_split: replaced: it draws an order
torch.utils.data.dataset:random_split: replaced: it draws an order
torch.utils.data.dataloader
    DataLoader.__init__: replaced: samples stay in the process
    _BaseDataLoaderIter.__init__: replaced: it draws a seed
torch.amp:GradScaler
    _maybe_opt_step: replaced: every scaled gradient is finite
    get_scale _get_growth_tracker: replaced: the scale is a value
    _init_scale _init_growth_tracker _growth_tracker: the scale at first
    __init__: replaced: it takes the CPU for a GPU
torch.distributed.fsdp.sharded_grad_scaler
    ShardedGradScaler._amp_update_scale_cpu_: replaced: the scale is a value
torch:_C._nn._parse_to: replaced: model.to takes the CPU for a GPU
torch.amp:autocast.__init__ torch.utils._device:DeviceContext.__init__: replaced: take CPU for a GPU
"""


def _read_table() -> Iterator[PrivateName]:
    lost = owner = ""
    for line in filter(None, _TABLE.splitlines()):
        names, _, why = line.partition(": ")
        first, *others = names.split()
        if line.startswith("["):
            lost = line.partition("] ")[2]
        elif line.startswith(" "):
            separator = "." if ":" in owner else ":"
            for name in (first, *others):
                yield PrivateName(f"{owner}{separator}{name}", why, lost)
        else:
            owner, module = first, first.partition(":")[0]
            for name in (first, *others) if why else ():
                path = name if name == first or ":" in name else f"{module}:{name}"
                yield PrivateName(path, why, lost)
    # The loop ends with the table's last section, that of simulations.
    for path in MESH_FACTORIES:
        yield PrivateName(path, "replaced: a mesh is made of values in tensors", lost)
    device_names = [f"{kind}.{name}" for kind, names in DEVICE_FUNCTIONS.items() for name in names]
    for name in (*device_names, *DEVICE_QUESTIONS):
        yield PrivateName(f"torch:{name}", "replaced: a simulated rank has a GPU", lost)
    for path in SLOW_MODULES:
        yield PrivateName(path, "imported once for all ranks", "every run")


NEW_IN_2_12 = ("empty_host_cache", "estimate_roofline_runtime_ms")
PRIVATE_NAMES = tuple(
    each._replace(seen=SEEN[1:] if each.path.endswith(NEW_IN_2_12) else SEEN)
    for each in _read_table()
)
