"""Name the private parts of torch that labkit uses, and the functions of torch that it replaces.

A release of torch may move any of them without notice. So each stands here once, with the reason
and with what is lost without it, for the core, the simulator and the programs alike.
tests/test_torch_private.py fails by name on a torch that lacks one, and `python -m labkit doctor`
lists what is missing.

    from labkit.torch_private import MemTracker, tree_leaves   # found in torch now, and no sooner
    torch_private.world.pg_names                 # found anew each time: torch may replace it
    torch_private.replace("PContext.close", close)             # for the rest of the process

The end of a path names a part, as far as it tells that part from the others. A leading underscore
may be left out. Attributes of torch's objects are listed here, and used where the object is.
Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

SEEN = ("2.11.0", "2.12.0", "2.13.0")
"""Versions of torch that have the names below."""


class PrivateName(NamedTuple):
    """One part of torch that labkit depends on.

    Attributes:
        path: module and attribute, with a colon between them; or a module alone.
        why: what it is needed for.
        lost: what does not work without it.
        room: the part of labkit that uses it.
        seen: the versions of torch that have it.
    """

    path: str
    why: str
    lost: str
    room: str
    seen: tuple[str, ...] = SEEN

    def resolve(self) -> Any:
        """Import it.

        Raises:
            RuntimeError: this torch has no such part.
        """
        try:
            if ":" in self.path:
                return pkgutil.resolve_name(self.path)
            return importlib.import_module(self.path)
        except (ImportError, AttributeError) as error:
            if isinstance(error, ImportError) and error.name == "torch":
                raise
            raise RuntimeError(
                f"torch {version('torch')} has no {self.path}: it is private and has moved; "
                f"labkit knows torch {', '.join(self.seen)}: install one of them. "
                f"Lost without it: {self.lost}"
            ) from error

    def is_there(self) -> bool:
        """Whether this torch has it, as a name or as an attribute that objects of its class get."""
        try:
            self.resolve()
        except RuntimeError:
            return self._is_set_on_objects()
        return True

    def _is_set_on_objects(self) -> bool:
        owner, _, attribute = self.path.rpartition(".")
        try:
            kind = pkgutil.resolve_name(owner)
            assigned = re.compile(rf"self\.{attribute}\b")
            return any(assigned.search(inspect.getsource(each)) for each in kind.__mro__[:-1])
        except (ImportError, AttributeError, TypeError, OSError):
            return False


def get(name: str) -> Any:
    """Import a part of torch by the end of its path.

    Raises:
        AttributeError: the table below has no such name, or several.
        RuntimeError: this torch has no such part.
    """
    return _find_entry(name).resolve()


def __getattr__(name: str) -> Any:
    return get(name)


def replace(name: str, new: Any) -> None:
    """Put ``new`` in place of a function, class or method of torch, for the rest of the process."""
    entry = _find_entry(name)
    entry.resolve()  # refuse to add what this torch does not call
    module, _, attribute = entry.path.partition(":")
    owner, _, last = attribute.rpartition(".")
    setattr(pkgutil.resolve_name(f"{module}:{owner}"), last, new)


def wrap(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function of torch by ``wrapper(original)``, for the rest of the process."""
    replace(name, wrapper(get(name)))


def missing_names() -> list[PrivateName]:
    """List what the installed torch lacks, but for what it is known to lack."""
    installed = version("torch").partition("+")[0]
    expected = (each for each in PRIVATE_NAMES if installed in each.seen or installed not in SEEN)
    return [each for each in expected if not each.is_there()]


@cache
def _find_entry(name: str) -> PrivateName:
    endings = tuple(f"{separator}{start}{name}" for separator in ".:" for start in ("", "_"))
    found = [each for each in PRIVATE_NAMES if each.path == name or each.path.endswith(endings)]
    if len(found) != 1:
        paths = ", ".join(each.path for each in found) or "none"
        raise AttributeError(
            f"{name!r} must name one entry of labkit.torch_private, and names {paths}: add it there"
        )
    return found[0]


def _entries(room: str, lost: str, reasons: Mapping[str, str]) -> Iterator[PrivateName]:
    return (PrivateName(path, why, lost, room) for path, why in reasons.items())


MEMORY_TRACKER_MODULE = "torch.distributed._tools.mem_tracker"
"""Follows the memory of a step. Importing it imports the compiler, which takes half a second."""
COMPILED_AUTOGRAD_MODULE = "torch._dynamo.compiled_autograd"
SLOW_MODULES = (MEMORY_TRACKER_MODULE, "torch._inductor.compile_fx", COMPILED_AUTOGRAD_MODULE)
"""Modules that a warm process imports once for all its ranks."""

_PYTREE = "torch.utils._pytree"
_DISPATCH = "torch.utils._python_dispatch"
_MEM_TRACKER = f"{MEMORY_TRACKER_MODULE}:MemTracker"
_FSDP = "torch.distributed.fsdp._fully_shard"
_PARAM_GROUP = f"{_FSDP}._fsdp_param_group"
_DDP_FUSION = "torch._inductor.fx_passes.ddp_fusion"
_CHECKPOINT = "torch.distributed.checkpoint"
_MOD_TRACKER = "torch.distributed._tools.mod_tracker:ModTracker"

LAUNCHER = _entries(
    "launcher",
    "every run",
    {
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler:SubprocessHandler._popen":
            "replaced: ranks are forks of a process that has imported torch",
        "torch.distributed.elastic.multiprocessing.api:SubprocessContext._start":
            "replaced: the store starts its thread only after the last fork",
        "torch.distributed.elastic.multiprocessing.api:PContext.close":
            "replaced: after a failure the other ranks have 2 s to obey SIGTERM, not 30",
        **dict.fromkeys(SLOW_MODULES, "imported once for all ranks"),
    },
)  # fmt: skip

SESSION = (
    *_entries(
        "session",
        "every run that measures its traffic, and a clean end of every session",
        {
            "torch.distributed.distributed_c10d:_world": "all process groups of this process",
            "torch.distributed.distributed_c10d:_world.pg_map":
                "groups that must outlive the end of a session",
            "torch.distributed.distributed_c10d:_world.pg_names":
                "the group of a collective, which is named in it",
            "torch:ScriptObject._type": "tells a process group among the arguments of a collective",
            f"{_DISPATCH}:TorchDispatchMode": "sees every operator and collective",
            f"{_PYTREE}:tree_leaves": "the tensors in nested arguments",
            f"{_PYTREE}:tree_flatten": "likewise, with the structure",
            f"{_PYTREE}:tree_flatten_with_path": "likewise, with the place of each",
            f"{_PYTREE}:tree_unflatten": "the way back",
            f"{_PYTREE}:tree_map_only": "a function applied to the tensors in nested arguments",
            f"{_PYTREE}:keystr": "the place of a tensor as text",
        },
    ),
    *_entries(
        "session",
        "memory by category: labs 2, 3, 5 and 6",
        {
            _MEM_TRACKER: "follows every tensor of a step",
            f"{_MEM_TRACKER}._mod_tracker": "which module is at work",
            f"{_MEM_TRACKER}._pre_fw_hook": "replaced: a model may run several times in one step",
            "torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker":
                "knows the categories of FSDP2",
            "torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker._fsdp_state_pre_forward":
                "replaced: a model may run several times in one step",
            "torch.distributed._functional_collectives:AsyncCollectiveTensor":
                "DTensor waits for its collectives by it",
            "torch.distributed._functional_collectives:AsyncCollectiveTensor.wait":
                "replaced in a traced step: gloo lets go",
            "torch.distributed._functional_collectives:AsyncCollectiveTensor.trigger_wait":
                "likewise",
            "torch.distributed:Work.wait": "likewise",
        },
    ),
    *_entries(
        "session",
        "time lines of compiled programs",
        {
            f"{COMPILED_AUTOGRAD_MODULE}:compiled_autograd_enabled":
                "hooks would be compiled into the backward pass",
        },
    ),
)  # fmt: skip

TECHNIQUE = (
    *_entries(
        "technique",
        "activation checkpointing: labs 2 and 5",
        {
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper":
                "checkpoints a block and keeps its names",
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper._checkpoint_wrapped_module":
                "the block inside",
            "torch:ops.aten._scaled_dot_product_flash_attention.default":
                "its result is kept, not computed again",
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default": "likewise",
            "torch:ops.aten._scaled_dot_product_efficient_attention.default": "likewise",
            "torch:ops.aten._scaled_dot_product_cudnn_attention.default": "likewise",
            "torch:ops._c10d_functional.reduce_scatter_tensor.default": "likewise",
        },
    ),
    *_entries(
        "technique",
        "FSDP's prefetching, its flat parameters and its gathered memory: labs 2 and 3",
        {
            "torch.distributed.fsdp:FSDPModule._set_unshard_async_op": "gloo gathers ahead",
            "torch.distributed.fsdp:FSDPModule._get_fsdp_state":
                "the parameters that a unit gathers",
            f"{_FSDP}._fsdp_state:FSDPState._fsdp_param_group": "likewise",
            "torch.distributed.fsdp:FullyShardedDataParallel._use_orig_params":
                "whether FSDP1 keeps parameters apart",
            "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2":
                "FSDP1's hybrid sharding, parameters kept",
            f"{_PARAM_GROUP}:FSDPParamGroup":
                "its methods are watched or replaced in tests, see labkit.instrument",
            f"{_PARAM_GROUP}:FSDPParamGroup.unshard": "likewise",
            f"{_PARAM_GROUP}:FSDPParamGroup.reshard": "likewise",
            f"{_PARAM_GROUP}:FSDPParamGroup.post_backward": "likewise",
            f"{_PARAM_GROUP}:RegisterPostBackwardFunction": "likewise",
            f"{_PARAM_GROUP}:RegisterPostBackwardFunction.backward": "likewise",
        },
    ),
    *_entries(
        "technique",
        "tensor subclasses and hooks of FSDP's all-gather: lab 3",
        {
            "torch.distributed.tensor:DTensor._local_tensor":
                "FSDP2 asks this object, and no view of it, for hooks",
            "torch:Tensor._make_wrapper_subclass": "makes a tensor that holds others",
            f"{_DISPATCH}:return_and_correct_aliasing": "gives views of such a tensor their memory",
            "torch.autograd:_unsafe_preserve_version_counter":
                "refills a parameter that autograd has saved",
            "torch:UntypedStorage._cdata": "tells memory apart where it has no address",
            "torch:ops.aten.add_.Tensor._schema": "which arguments an operator writes to",
            "torch:_foreach_mul": "an operator on lists, with which an exercise is judged",
        },
    ),
    *_entries(
        "technique",
        "pictures of shards without ranks: labs 1 and 3",
        {
            "torch.distributed._local_tensor:LocalTensor": "a tensor of all ranks",
            "torch.distributed._local_tensor:LocalTensor._local_tensors": "the part of each rank",
            "torch.distributed._local_tensor:LocalTensorMode": "all ranks in one process",
        },
    ),
    *_entries(
        "technique",
        "gradient buckets: labs 1 and 4",
        {
            "torch.autograd:Variable._execution_engine.queue_callback":
                "acts at the end of a backward pass, as DDP does",
            "torch.distributed._composable.replicate:replicate":
                "DDP without a wrapper: labs 4 and 5",
        },
    ),
    *_entries(
        "technique",
        "networks with a delay on a GPU",
        {"torch.cuda:_sleep": "the only kernel of torch's that does nothing but wait"},
    ),
    *_entries(
        "technique",
        "reading checkpoints of others without running their code: lab 7",
        {
            "torch.serialization:_get_layout": "named in a checkpoint",
            f"{_CHECKPOINT}.filesystem:_StorageInfo": "likewise",
            f"{_CHECKPOINT}.metadata:_MEM_FORMAT_ENCODING": "likewise",
        },
    ),
)  # fmt: skip

COMPILER = _entries(
    "compiler",
    "compiled DDP and its buckets: lab 4",
    {
        "torch._dynamo:config": "settings of the tracer",
        "torch._dynamo:config.optimize_ddp": "leaves DDP's averaging to the compiler",
        "torch._inductor:config": "settings of the compiler",
        "torch._inductor:config._fuse_ddp_communication": "fuses all-reduces into buckets",
        "torch._inductor:config._fuse_ddp_communication_passes": "by these passes",
        "torch._inductor:config._fuse_ddp_bucket_size": "likewise",
        "torch._inductor:config.reorder_for_locality": (
            "must not take a backward pass for inference"
        ),
        _DDP_FUSION: "the passes that fuse",
        f"{_DDP_FUSION}:fuse_ddp_with_concat_op": "likewise",
        f"{_DDP_FUSION}:fuse_ddp_with_coalesced_op": "likewise",
        f"{_DDP_FUSION}:schedule_comm_wait": "moves waits to the first use",
        "torch._dynamo.trace_rules": "DDP changes it for good when it is built",
        "torch._dynamo.trace_rules:LEGACY_MOD_INLINELIST": "likewise",
        "torch._dynamo.trace_rules:get_legacy_mod_inlinelist": "likewise",
        "torch._dynamo.utils:counters": "graphs compiled, buckets made, backward passes traced",
        f"{COMPILED_AUTOGRAD_MODULE}:_enable": "traces a backward pass",
        "torch._inductor.graph:GraphLowering": "its programs are read",
        "torch._inductor.graph:GraphLowering.save_output_code": (
            "replaced: gives the programs that inductor writes"
        ),
    },
)

DEVICE_FUNCTIONS = {
    "cuda": (
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "init",
        "set_per_process_memory_fraction",
        "set_stream",
        "reset_accumulated_memory_stats",
        "Event",
        "Stream",
        "set_device",
        "current_device",
        "device",
        "stream",
        "current_stream",
        "default_stream",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "is_bf16_supported",
        "get_device_name",
        "get_device_capability",
    ),
    "accelerator": (
        "synchronize",
        "empty_cache",
        "empty_host_cache",
        "set_stream",
        "reset_accumulated_memory_stats",
        "set_device_index",
        "current_device_index",
        "device_index",
        "current_stream",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "get_device_capability",
    ),
}
"""Public functions of torch.cuda and torch.accelerator that a simulation answers as a GPU would."""
DEVICE_QUESTIONS = tuple(
    f"{module}.{name}"
    for module, names in {
        "cuda": ("is_available", "device_count"),
        "accelerator": ("is_available", "device_count", "current_accelerator"),
    }.items()
    for name in names
)
"""Those that it answers so to programs, and truthfully to torch itself."""
MESH_FACTORIES = tuple(
    f"{module}:init_device_mesh"
    for module in (
        "torch.distributed.device_mesh",
        "torch.distributed",
        "torch.distributed.tensor",
        "torch.distributed.tensor.device_mesh",
        f"{_FSDP}._fsdp_init",
    )
)
"""Where a program, or FSDP2 without a mesh, finds torch's function that makes one."""

_SEEN_SINCE_2_12 = {"torch:accelerator.empty_host_cache": SEEN[1:]}
_DEVICE_PATHS = [
    f"torch:{module}.{name}" for module, names in DEVICE_FUNCTIONS.items() for name in names
]
_AMP_SCALER = "torch.amp:GradScaler"

SIMULATOR = _entries(
    "simulator",
    "simulations and plans: lab 6",
    {
        # what makes a rank a simulated one
        "torch._subclasses.fake_tensor:FakeTensorMode": "tensors have shapes and no memory",
        "torch._subclasses.fake_tensor:FakeTensor": "tells such a tensor",
        "torch._subclasses.fake_tensor:unset_fake_temporarily":
            "tensors have values, where torch needs them",
        "torch._subclasses.fake_tensor:DataDependentOutputException": "a program has read a value",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException": "likewise",
        "torch.testing._internal.distributed.fake_pg:FakeStore": "a process group of one process",
        "torch._C._distributed_c10d:FakeWork": "what its collectives return",
        "torch._C._distributed_c10d:FakeWork.wait":
            "replaced while a step is recorded: a wait is an event",
        "torch.distributed._tools.fake_collectives": "lets collectives take tensors without memory",
        "torch:_C._current_graph_task_id": "whether a backward pass is running",
        # torch.distributed
        **dict.fromkeys(
            (
                "torch.distributed:init_process_group",
                "torch.distributed.distributed_c10d:init_process_group",
                "torch.distributed.device_mesh:init_process_group",
            ),
            "replaced: whatever its backend, a group sends nothing",
        ),
        **dict.fromkeys(
            ("torch.distributed:new_group", "torch.distributed.distributed_c10d:new_group"),
            "replaced: likewise",
        ),
        **dict.fromkeys(MESH_FACTORIES, "replaced: a mesh is made of ranks, values in tensors"),
        "torch.distributed.device_mesh:DeviceMesh.__init__":
            "replaced: likewise; it takes the CPU for a GPU",
        "torch.distributed:is_nccl_available": "replaced: yes, to programs",
        "torch.distributed:Reducer": "replaced: DDP's C++ works on memory",
        "torch.distributed:Logger": "replaced: likewise",
        "torch.distributed:_verify_params_across_processes": "replaced: it compares values",
        "torch.distributed:_register_comm_hook": "replaced: a hook of DDP cannot be simulated",
        "torch.distributed:_register_builtin_comm_hook": "replaced: likewise",
        "torch.distributed:_compute_bucket_assignment_by_size":
            "DDP's buckets in the order of the first backward pass",
        "torch.nn.parallel:DistributedDataParallel.__init__": "replaced: it takes no GPU",
        # FSDP2 and DTensor
        f"{_FSDP}._fsdp_param:_chunk_with_empty": "replaced: cuts only the chunk that is used",
        f"{_FSDP}._fsdp_param:FSDPParam.reset_sharded_param": "replaced: it looks at addresses",
        f"{_FSDP}._fsdp_param:FSDPParam._module_info": "the parameter that it would reset",
        f"{_FSDP}._fsdp_param:FSDPParam._sharded_param_data": "likewise",
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached":
            "replaced: what it tries out is not the step's",
        f"{_DISPATCH}:_disable_current_modes": "hides that from the recorders",
        # the memory of a step
        f"{_MEM_TRACKER}._update_snap": "replaced: says of every change of memory",
        f"{_MEM_TRACKER}._update_peak_stats": "replaced: a peak of many steps",
        f"{_MEM_TRACKER}._post_fw_hook": "replaced: models may come and go",
        f"{_MEM_TRACKER}._pre_bw_hook": "replaced: likewise",
        f"{_MEM_TRACKER}._post_bw_hook": "replaced: likewise",
        f"{_MEM_TRACKER}._WINFO": "what is there before the step",
        f"{_MEM_TRACKER}._curr_mem_snap": "bytes now",
        f"{_MEM_TRACKER}._peak_mem_snap": "bytes at the peak",
        f"{_MEM_TRACKER}._peak_mem": "likewise",
        f"{_MOD_TRACKER}._known_modules": "the models of a program that knows nothing of labkit",
        "torch.distributed._tools.common_utils:get_untyped_storages": "the memory behind a tensor",
        # values that are not there
        "torch.nn.init:_no_grad_trunc_normal_":
            "replaced: it draws until all values are within bounds",
        "torch.utils:swap_tensors": "replaced: torch refuses it for tensors that a mode remembers",
        "torch:compile": "replaced: refused, since it needs values",
        "torch:save": "replaced: there is nothing to save",
        "torch.multiprocessing:spawn": "replaced: of the ranks that it would start one is there",
        **{
            f"torch.utils.data:{name}.__iter__": "replaced: an order is made of values"
            for name in (
                *("RandomSampler", "SubsetRandomSampler"),
                *("WeightedRandomSampler", "DistributedSampler"),
            )
        },
        "torch.utils.data.dataloader:DataLoader.__init__": "replaced: samples stay in the process",
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__": "replaced: it draws a seed",
        "torch.utils.data:random_split": "replaced: it draws an order",
        "torch.utils.data.dataset:random_split": "replaced: likewise",
        f"{_AMP_SCALER}._maybe_opt_step": "replaced: every scaled gradient is finite",
        f"{_AMP_SCALER}.get_scale": "replaced: the scale is a value",
        f"{_AMP_SCALER}._get_growth_tracker": "replaced: likewise",
        f"{_AMP_SCALER}._init_scale": "the scale at first",
        f"{_AMP_SCALER}._init_growth_tracker": "likewise",
        f"{_AMP_SCALER}._growth_tracker": "likewise",
        "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler._amp_update_scale_cpu_":
            "replaced: likewise",
        # GPUs that are not there
        "torch:_C._nn._parse_to": "replaced: model.to takes the CPU for a GPU",
        "torch.amp:autocast.__init__": "replaced: likewise",
        f"{_AMP_SCALER}.__init__": "replaced: likewise",
        "torch.utils._device:DeviceContext.__init__": "replaced: likewise",
        **dict.fromkeys(_DEVICE_PATHS, "replaced: a simulated rank has a GPU"),
        **dict.fromkeys(
            (f"torch:{name}" for name in DEVICE_QUESTIONS), "replaced: likewise, for programs alone"
        ),
    },
)  # fmt: skip

PRIVATE_NAMES = tuple(
    each._replace(seen=_SEEN_SINCE_2_12.get(each.path, SEEN))
    for each in (*LAUNCHER, *SESSION, *TECHNIQUE, *COMPILER, *SIMULATOR)
)
