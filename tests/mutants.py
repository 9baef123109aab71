"""Break the code in one place at a time, and see that a test notices: ``python -m tests.mutants``.

Every row of the specification, the five pieces of PyTorch's own code that the kit restates, has at least one mutant
here: a change to one file that takes away or spoils what the row asks for, and the test that must fail then. Each
mutant goes into a copy of the checkout, never into the checkout. First all tests run there unchanged and must pass.

    python -m tests.mutants                    all, about twenty minutes
    python -m tests.mutants "S3 scaler" S5     rows whose name holds one of these words
    python -m tests.mutants --list             what there is

Last it prints how many were caught, and leaves with status 1 if one survived.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900


class Mutant(NamedTuple):
    """One change, and who sees it."""

    row: str
    """Of the specification: its section and what it is about."""
    change: str
    """What is wrong afterwards."""
    file: str
    old: str
    """Text that is in the file once."""
    new: str
    test: str
    """What must fail, as pytest takes it: a file, ``::`` and a test, or several, with a blank between."""


GRID = "tests/test_fsdp.py::test_every_cell_of_the_grid_equals_one_device"
TRAFFIC = "tests/test_fsdp.py::test_traffic_and_memory_are_what_theory_says"
SPATIAL = "tests/test_spatial.py::test_program_computes_what_one_device_computes"
OPTIONS = "tests/test_fsdp_options.py::"
MODELS = "tests/test_models.py::"

MUTANTS = [
    Mutant(
        "S1 LayerNorm",
        "epsilon of 1e-3, not 1e-6",
        "labkit/models/convnext.py",
        "self.weight, self.bias, self.eps)",
        "self.weight, self.bias, 1e-3)",
        "tests/test_convnext.py::test_channel_norm_equals_a_hand_computation",
    ),
    Mutant(
        "S1 Block",
        "no GELU between the pointwise convolutions",
        "labkit/models/convnext.py",
        "self.project(self.activation(self.expand(branch)))",
        "self.project(self.expand(branch))",
        "tests/test_convnext.py::test_layers_of_a_block",
    ),
    Mutant(
        "S1 DownSampling",
        "the stem norms first, the others last",
        "labkit/models/convnext.py",
        "self.conv(self.norm(x)) if self.norm_first else",
        "self.conv(self.norm(x)) if not self.norm_first else",
        "tests/test_convnext.py::test_downsample_norms_before_or_after",
    ),
    Mutant(
        "S1 ConvNeXt",
        "each rank drops other samples: no common generator",
        "labkit/models/convnext.py",
        "samples * self.shards, generator=self.generator",
        "samples * self.shards, generator=None",
        "tests/test_spatial.py::test_ranks_that_start_from_different_seeds_agree_and_drop_a_sample_together",
    ),
    Mutant(
        "S1 ConvNeXt",
        "the head's first weights are not scaled",
        "labkit/models/convnext.py",
        "self.head.weight.mul_(self.head_init_scale)",
        "self.head.weight.mul_(1.0)",
        "tests/test_convnext.py::test_head_init_scale_scales_the_head_alone",
    ),
    Mutant(
        "S1 init_weights",
        "standard deviation 0.02, not 0.2",
        "labkit/models/convnext.py",
        "nn.init.trunc_normal_, std=0.2",
        "nn.init.trunc_normal_, std=0.02",
        "tests/test_convnext.py::test_default_weights_are_a_truncated_normal_of_deviation_one_fifth_and_biases_zero",
    ),
    Mutant(
        "S1 apply_spatial",
        "each rank sends its halos to the wrong side",
        "labkit/parallel/halo.py",
        "_trade(x.narrow(dim, 0, halo), x.narrow(dim, size - halo, halo), strip)",
        "_trade(x.narrow(dim, size - halo, halo), x.narrow(dim, 0, halo), strip)",
        "tests/test_halo.py::test_convolution_of_strips_equals_that_of_the_image",
    ),
    Mutant(
        "S1 apply_spatial",
        "gradients of halos do not go home",
        "labkit/parallel/halo.py",
        "own.narrow(dim, start, halo).add_(arrived)",
        "own.narrow(dim, start, halo).add_(0 * arrived)",
        "tests/test_halo.py::test_convolution_of_strips_equals_that_of_the_image",
    ),
    Mutant(
        "S1 apply_spatial",
        "dtensor: gradients are summed over the data axis, not averaged",
        "labkit/parallel/spatial.py",
        "mean = gradient.redistribute(placements=replicated) / data_ranks",
        "mean = gradient.redistribute(placements=replicated) / 1",
        SPATIAL,
    ),
    Mutant(
        "S1 apply_spatial",
        "native runs, and is wrong",
        "labkit/parallel/spatial.py",
        "    requirements.refuse_if_broken(strategy)\n",
        "",
        "tests/test_spatial.py::test_native_is_refused_by_the_function_itself",
    ),
    Mutant(
        "S1 training loop",
        "9 blocks in the paper's third stage, not 27",
        "launch/convnext_spatial.py",
        '"depths": (3, 3, 27, 3)',
        '"depths": (3, 3, 9, 3)',
        OPTIONS + "test_the_papers_preset_or_a_default_has_its_values",
    ),
    Mutant(
        "S2 setup and cleanup",
        "the process group is left as it is when the program fails",
        "labkit/session/session.py",
        "        dist.destroy_process_group()\n",
        "        sys.exc_info()[0] or dist.destroy_process_group()\n",
        "tests/test_rank.py::test_a_session_is_left_in_order_whatever_happens",
    ),
    Mutant(
        "S2 CustomLinear, MyModule, ToyModel",
        "a tail of 6 blocks, not 7",
        "labkit/models/toy.py",
        "tail: int = 7",
        "tail: int = 6",
        MODELS + "test_toy_has_the_layout_of_the_course_at_any_width",
    ),
    Mutant(
        "S2 model_iter_fn",
        "the loss's gradient is 1 % too large",
        "launch/fsdp_matrix.py",
        "self.scaler.scale(loss / config.accumulate)",
        "self.scaler.scale(1.01 * loss / config.accumulate)",
        GRID,
    ),
    Mutant(
        "S2 model_iter_fn",
        "the output is not what the loss was computed from",
        "labkit/parity/fsdp.py",
        "tree_map_only(Tensor, Tensor.detach, output)",
        "tree_map_only(Tensor, lambda each: 1.01 * each.detach(), output)",
        GRID,
    ),
    Mutant(
        "S2 get_model",
        "a model whose package is missing is built all the same",
        "labkit/models/catalog.py",
        "if entry.extra and importlib.util.find_spec(entry.extra) is None:",
        "if entry.extra and not entry.extra:",
        "tests/test_catalog.py::test_a_missing_extra_is_named_with_the_models_that_do_without",
    ),
    Mutant(
        "S2 MODEL_FSDP_WRAP",
        "hf_t5 is wrapped by its two stacks, not by its blocks",
        "labkit/models/catalog.py",
        '("T5Block",),',
        '("T5Stack",),',
        "tests/test_catalog.py::test_an_entry_says_what_is_in_the_model",
    ),
    Mutant(
        "S2 fsdp_checkpointing_base",
        "nothing is checkpointed, though it is said to be",
        "labkit/parallel/checkpointing.py",
        "lambda module: module in chosen)",
        "lambda module: False)",
        TRAFFIC,
    ),
    Mutant(
        "S2 fsdp_checkpointing_base",
        "reentrant checkpointing, which loses gradients",
        "labkit/parallel/checkpointing.py",
        "CheckpointImpl.NO_REENTRANT",
        "CheckpointImpl.REENTRANT",
        GRID,
    ),
    Mutant(
        "S2 apply_fsdp",
        "FSDP2 gathers twice whatever reshard_after_forward says",
        "labkit/parallel/fsdp.py",
        "mp_policy=policy, reshard_after_forward=reshard_after_forward)",
        "mp_policy=policy, reshard_after_forward=True)",
        TRAFFIC,
    ),
    Mutant(
        "S2 apply_fsdp",
        "FSDP1 wraps the root alone",
        "labkit/parallel/fsdp.py",
        "return to_itself if module in local_modules else module in single",
        "return to_itself if module in local_modules else False",
        "tests/test_fsdp.py::test_every_way_to_initialise_trains_as_one_device",
    ),
    Mutant(
        "S3 FSDPTestModel",
        "an objective that is soon zero: the sum of the output",
        "labkit/models/protocol.py",
        "return (at_least_float32(output) - 1).square().mean()",
        "return at_least_float32(output).relu().sum()",
        MODELS + "test_gradients_are_alive_after_ten_steps_of_adam",
    ),
    Mutant(
        "S3 FSDPInitMode, CUDAInitMode",
        "AFTER moves before, and BEFORE after",
        "labkit/parallel/fsdp.py",
        "if cuda_init is CUDAInitMode.BEFORE:",
        "if cuda_init is CUDAInitMode.AFTER:",
        OPTIONS + "test_a_model_moves_when_its_mode_says",
    ),
    Mutant(
        "S3 TransformerWithSharedParams",
        "output and embedding have a weight each",
        "labkit/models/transformer.py",
        "        self.output_proj.weight = self.embed_tokens.weight\n",
        "",
        MODELS + "test_transformer_has_the_sizes_of_the_course",
    ),
    Mutant(
        "S3 TransformerWithSharedParams",
        "batch norm over the features, not the samples",
        "labkit/models/transformer.py",
        "self.norm(target.transpose(0, 1)).transpose(0, 1)",
        "self.norm(target)",
        MODELS + "test_the_batch_norm_of_the_transformer_takes_the_samples_for_its_channels",
    ),
    Mutant(
        "S3 NestedWrappedModule, NonUniformReqGradNWM",
        "every rank owns a trained shard: the whole block is trained",
        "labkit/models/nested.py",
        "last.requires_grad_(True)",
        "self.net[2].requires_grad_(True)",
        MODELS + "test_of_the_frozen_model_the_last_layer_alone_needs_gradients_and_shares_its_block",
    ),
    Mutant(
        "S3 MixtureOfExperts",
        "the experts' gradients are averaged with the rest",
        "labkit/models/moe.py",
        "return [module for module in self.modules() if isinstance(module, Expert)]",
        "return []",
        "tests/test_fsdp.py::test_experts_differ_and_the_shared_part_does_not",
    ),
    Mutant(
        "S3 MixtureOfExperts",
        "the delay is forgotten at the expert",
        "labkit/models/moe.py",
        "            expert.register_forward_hook(hold)\n",
        "",
        "tests/test_delay.py::test_the_mixture_pauses_after_its_shared_part_and_its_expert",
    ),
    Mutant(
        "S3 ModuleWithDelay",
        "no block waits before its gradients are reduced",
        "labkit/models/delay.py",
        "delay_reduction(block, delay_before_reduction_ms)",
        "delay_reduction(block, 0 * delay_before_reduction_ms)",
        "tests/test_delay.py::test_the_model_with_delays_pauses_after_the_loss_and_at_every_block",
    ),
    Mutant(
        "S3 MLP, MLPStack, DoubleLinear",
        "multipliers 4, 4, 4",
        "labkit/models/mlp.py",
        "MULTIPLIERS = (3, 4, 3)",
        "MULTIPLIERS = (4, 4, 4)",
        MODELS + "test_mlp_stack_has_the_multipliers_of_the_course",
    ),
    Mutant(
        "S3 MLP, MLPStack, DoubleLinear",
        "the second result is the first",
        "labkit/models/mlp.py",
        "return (first, functional.relu(self.lin2(x)))",
        "return (first, first)",
        MODELS + "test_double_linear_returns_two_results_or_leaves_a_layer_without_gradient",
    ),
    Mutant(
        "S3 SkipModule, NestedLinear, SkipModel",
        "skipped blocks are wrapped all the same",
        "labkit/parallel/units.py",
        "for index, block in enumerate(blocks) if index not in skip]",
        "for index, block in enumerate(blocks)]",
        "tests/test_fsdp.py::test_a_skipped_block_costs_one_gather_less",
    ),
    Mutant(
        "S3 SkipModule, NestedLinear, SkipModel",
        "units have names that nobody looks up: reversed",
        "labkit/parallel/units.py",
        "plain_name(names[block]))",
        "plain_name(names[block])[::-1])",
        "tests/test_fsdp.py::test_nested_skip_and_unknown_blocks",
    ),
    Mutant(
        "S3 DummyDDP, DummyProcessGroup",
        "every second all-reduce is forgotten",
        "labkit/instrument.py",
        "self.all_reduces += 1",
        "self.all_reduces += 0.5",
        "tests/test_instrument.py::test_dummy_ddp_counts_one_all_reduce_a_gradient",
    ),
    Mutant(
        "S3 patch_*, reduce_scatter_with_assert",
        "the original does not come back",
        "labkit/instrument.py",
        "            setattr(owner, name, stored)\n",
        "            stored\n",
        "tests/test_instrument.py::test_the_original_is_back_however_the_block_ends",
    ),
    Mutant(
        "S3 patch_*, reduce_scatter_with_assert",
        "the assertion is not asked",
        "labkit/instrument.py",
        "    assert_fn(output)\n",
        "",
        "tests/test_instrument.py::test_an_assertion_on_the_reduce_scatter_holds_or_fails",
    ),
    Mutant(
        "S3 check_sharded_parity",
        "gradients are counted and not compared",
        "labkit/parity/states.py",
        '            _compare(f"gradient of {name}", actual.grad, expected.grad, actual)\n',
        "",
        "tests/test_parity_states.py::test_a_wrong_shard_is_named_by_the_rank_that_holds_it",
    ),
    Mutant(
        "S3 check_sharded_parity",
        "(Shard(0), Shard(0)) is compared as if it were clear",
        "labkit/parity/states.py",
        "if len(set(dims)) < len(dims):",
        "if len(set(dims)) > len(dims):",
        "tests/test_parity_states.py::test_two_shardings_of_one_dim_are_refused_with_the_reason",
    ),
    Mutant(
        "S3 helpers for module states",
        "ranks that differ are taken for equal",
        "labkit/parity/states.py",
        "if len(holders) > 1:",
        "if len(holders) > len(everyone):",
        "tests/test_parity_states.py::test_module_states_name_the_first_that_differs_and_the_ranks",
    ),
    Mutant(
        "S3 helpers for module states",
        "a state dict comes from the rank itself",
        "labkit/parity/states.py",
        "    dist.broadcast_object_list(box, group=group, group_src=0)\n",
        "    box[0] = box[0] or {name: tensor.detach().cpu() for name, tensor in (state or {}).items()}\n",
        "tests/test_parity_states.py::test_a_state_dict_is_the_first_ranks_on_every_rank",
    ),
    Mutant(
        "S3 train and parity",
        "the scaler is off",
        "launch/fsdp_matrix.py",
        "enabled=config.scaler,",
        "enabled=False,",
        GRID,
    ),
    Mutant(
        "S3 train and parity",
        "without a wrapper, gradients are averaged over one rank too few",
        "labkit/parallel/buckets.py",
        "self.ranks = mesh.size()",
        "self.ranks = max(1, mesh.size() - 1)",
        GRID,
    ),
    Mutant(
        "S3 FSDPTest, FSDPTestMultiThread",
        "of several ranks that failed, the last is shown",
        "tests/fixture_ranks.py",
        "first = min(failures",
        "first = max(failures",
        "tests/test_ranks_fixture.py::test_the_first_failure_is_reported_not_the_last",
    ),
    Mutant(
        "S3 test_compiled_fsdp",
        "nothing is compiled",
        "labkit/parallel/compiling.py",
        "outermost.forward = torch.compile(outermost.forward, **how)",
        "outermost.forward = outermost.forward",
        "tests/test_fsdp.py::test_compiled_compute_gives_the_losses_of_eager_compute",
    ),
    Mutant(
        "S4 TwoTensor",
        "both halves are computed from the first",
        "labkit/tensors/two_tensor.py",
        'b = func(*_halves("b", args), **_halves("b", kwargs))',
        'b = func(*_halves("a", args), **_halves("a", kwargs))',
        "tests/test_tensors.py::test_an_operation_is_done_with_both_halves",
    ),
    Mutant(
        "S4 fsdp_pre_all_gather, fsdp_post_all_gather",
        "the first half is sent twice",
        "labkit/tensors/two_tensor.py",
        "return (pad_rows(self.a, rows), pad_rows(self.b, rows)), None",
        "return (pad_rows(self.a, rows), pad_rows(self.a, rows)), None",
        "tests/test_tensors.py::test_both_halves_are_sent_and_a_shorter_shard_is_padded",
    ),
    Mutant(
        "S4 fsdp_pre_all_gather, fsdp_post_all_gather",
        "memory that is not shared goes unseen",
        "labkit/tensors/two_tensor.py",
        "elif gathered.untyped_storage()._cdata != half.untyped_storage()._cdata:",
        "elif gathered.untyped_storage()._cdata == 0:",
        "tests/test_tensors.py::test_memory_that_is_not_the_gathered_is_refused",
    ),
    Mutant(
        "S4 train parity",
        "what is gathered is 1 millionth too large",
        "labkit/tensors/quantisation.py",
        '"fp32": Extension(("numbers",), lambda shard: (shard.float(),), _decode_plain)',
        '"fp32": Extension(("numbers",), lambda shard: (shard.float() * 1.000001,), _decode_plain)',
        "tests/test_allgather_extensions.py::test_ten_steps_are_exactly_those_of_plain_training",
    ),
    Mutant(
        "S4 end to end",
        "each half of a parameter draws values of its own",
        "labkit/parity/extensions.py",
        "        other.copy_(first)\n",
        "        other.copy_(other)\n",
        "tests/test_allgather_extensions.py::test_a_model_built_without_memory_is_set_and_trained_in_bfloat16",
    ),
    Mutant(
        "S4 monkey patch",
        "bf16 is sent in float32",
        "labkit/tensors/quantisation.py",
        "lambda shard: (shard.bfloat16(),)",
        "lambda shard: (shard.bfloat16().float(),)",
        "tests/test_allgather_extensions.py::test_the_bytes_on_the_wire_are_those_of_theory",
    ),
    Mutant(
        "S4 beyond",
        "int8 is scaled by 1 % too much",
        "labkit/tensors/quantisation.py",
        "return (flat * _spread(chosen, flat, scales)).view(whole.shape).to(dtype)",
        "return (flat * _spread(chosen, flat, scales) * 1.01).view(whole.shape).to(dtype)",
        "tests/test_tensors.py::test_what_arrives_is_as_exact_as_theory_says_and_as_large",
    ),
    Mutant(
        "S5 Net",
        "checkpoint does nothing",
        "labkit/models/chain.py",
        "if self.checkpoint else",
        "if self.checkpoint is None else",
        "tests/test_chain.py::test_checkpointing_goes_through_fc1_twice_and_gives_the_same_gradients",
    ),
    Mutant(
        "S5 compiler_fn, compiled autograd",
        "the backward pass is not compiled",
        "labkit/parallel/ddp.py",
        "with compiled_autograd._enable(compile_graph, dynamic=False):",
        "with contextlib.nullcontext(compile_graph):",
        "tests/test_ddp.py::test_every_technique_gives_the_gradients_of_one_device",
    ),
    Mutant(
        "S5 cases",
        "no_sync communicates",
        "labkit/parallel/ddp.py",
        "with contextlib.nullcontext() if enabled else model.no_sync():",
        "with contextlib.nullcontext():",
        "tests/test_ddp.py::test_every_technique_gives_the_gradients_of_one_device",
    ),
    Mutant(
        "S5 cases",
        "fp16 gradients travel in bfloat16",
        "labkit/parallel/ddp.py",
        "torch.float16: default_hooks.fp16_compress_hook",
        "torch.float16: default_hooks.bf16_compress_hook",
        "tests/test_ddp.py::test_every_technique_gives_the_gradients_of_one_device",
    ),
    Mutant(
        "S5 bucketing",
        "buckets of twice the size",
        "labkit/parallel/ddp.py",
        "fuse(graph, bucket_mb)",
        "fuse(graph, 2 * bucket_mb)",
        "tests/test_ddp_compile.py::test_buckets_are_as_predicted_without_gradients_and_on_top_of_them",
    ),
    Mutant(
        "S5 bucketing",
        "inductor may reorder, which changes the order of requests",
        "labkit/parallel/ddp.py",
        '"reorder_for_locality": False',
        '"reorder_for_locality": True',
        "tests/test_ddp_compile.py::test_buckets_are_as_predicted_without_gradients_and_on_top_of_them",
    ),
    Mutant(
        "S5 bucketing",
        "every bucket is waited for where it was sent",
        "labkit/parallel/ddp.py",
        "[ddp_fusion.schedule_comm_wait] if late_waits else []",
        "[]",
        "tests/test_ddp_compile.py::test_buckets_are_as_predicted_without_gradients_and_on_top_of_them",
    ),
    Mutant(
        "S5 DDP_TP_Test",
        "gradients are averaged along tp, not along data",
        "launch/two_dim.py",
        'apply_replicate(model, mesh["data"])',
        'apply_replicate(model, mesh["tp"])',
        "tests/test_two_dim.py::test_four_ranks_compute_what_one_device_computes",
    ),
    Mutant(
        "S5 MLPStack.parallelize",
        "what FSDP should average stays each line's own",
        "launch/two_dim.py",
        'if mesh["data"].size() > 1:\n        apply_fsdp2(lab, mesh,',
        'if mesh["data"].size() > 2:\n        apply_fsdp2(lab, mesh,',
        "tests/test_two_dim.py::test_four_ranks_compute_what_one_device_computes",
    ),
    Mutant(
        "S5 MLPStack.parallelize",
        "with sequence parallelism everything lies whole between the pairs",
        "labkit/parallel/tensor_parallel.py",
        "    if sequence_parallel:\n        columns",
        "    if False:\n        columns",
        "tests/test_tensor_parallel.py::test_what_lies_between_the_pairs_and_what_is_sent",
    ),
    Mutant(
        "S6 hybrid sharding",
        "groups do not replicate each other",
        "labkit/parallel/fsdp.py",
        'return mesh["replicate", "data"] if',
        'return mesh["data"] if',
        OPTIONS + "test_groups_that_replicate_each_other_compute_what_one_device_computes",
    ),
    Mutant(
        "S6 ignored modules",
        "ignored modules are sharded all the same",
        "labkit/parallel/fsdp.py",
        "ignored_params=ignored or None",
        "ignored_params=None",
        GRID,
    ),
    Mutant(
        "S6 state dict",
        "a loaded run begins at step 0",
        "labkit/parallel/saving.py",
        'return int(state["step"])',
        'return 0 * int(state["step"])',
        "tests/test_saving.py",
    ),
    Mutant(
        "S6 state dict",
        "the optimizer's state is not loaded",
        "labkit/parallel/saving.py",
        'optim_state_dict=state["optimizer"]',
        "optim_state_dict=get_state_dict(model, optimizer, options=options)[1]",
        "tests/test_saving.py",
    ),
    Mutant(
        "S6 options of FSDP1",
        "backward_prefetch is always pre",
        "labkit/parallel/fsdp.py",
        "backward_prefetch=prefetch[backward_prefetch]",
        'backward_prefetch=prefetch["pre"]',
        OPTIONS + "test_fsdp1_gathers_ahead_in_the_backward_pass_as_it_is_told",
    ),
    Mutant(
        "S6 options of FSDP1",
        "forward_prefetch is always off",
        "labkit/parallel/fsdp.py",
        "forward_prefetch=forward_prefetch",
        "forward_prefetch=False",
        OPTIONS + "test_fsdp1_gathers_ahead_in_the_forward_pass_if_it_is_told",
    ),
    Mutant(
        "S6 options of FSDP1",
        "parameters keep their names whatever use_orig_params says",
        "labkit/parallel/fsdp.py",
        "use_orig_params=use_orig_params",
        "use_orig_params=True",
        GRID,
    ),
    Mutant(
        "S6 policies",
        "a module counts the numbers of the units inside it",
        "labkit/parallel/units.py",
        "            taken |= own.keys()\n",
        "",
        OPTIONS + "test_policies_choose_units_from_the_inside_out",
    ),
    Mutant(
        "S6 policies",
        "wrap marks nothing",
        "labkit/parallel/units.py",
        "    _marked.add(module)\n",
        "",
        OPTIONS + "test_a_module_can_be_marked_where_it_is_written",
    ),
    Mutant(
        "S6 precision and scaler",
        "autocast is off",
        "launch/fsdp_matrix.py",
        'enabled = config.precision == "autocast"',
        "enabled = False",
        GRID,
    ),
    Mutant(
        "S6 precision and scaler",
        "pure_fp16 trains in float32",
        "launch/fsdp_matrix.py",
        "        lab.half()\n",
        "        lab.float()\n",
        GRID,
    ),
    Mutant(
        "S6 precision and scaler",
        "each rank decides for itself whether a step is skipped",
        "launch/fsdp_matrix.py",
        "return ShardedGradScaler(",
        "return torch.amp.GradScaler(",
        OPTIONS + "test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all",
    ),
    Mutant(
        "S6 one chosen module type compiled",
        "all blocks are compiled, whatever was chosen",
        "launch/fsdp_matrix.py",
        "config.compile_only or blocks",
        "blocks",
        "tests/test_fsdp.py::test_compiled_compute_gives_the_losses_of_eager_compute",
    ),
    Mutant(
        "S6 gradients accumulated",
        "gradients of a step's batches are added, not averaged",
        "launch/fsdp_matrix.py",
        "self.scaler.scale(loss / config.accumulate)",
        "self.scaler.scale(loss)",
        GRID,
    ),
    Mutant(
        "S6 gradients accumulated",
        "gradients of the step before stay",
        "launch/fsdp_matrix.py",
        "optimizer.zero_grad(set_to_none=config.accumulate == 1 or bool(index % 2))",
        "optimizer.zero_grad() if config.accumulate == 1 else None",
        GRID,
    ),
    Mutant(
        "S6 input gradient and memory cap",
        "the input gets no gradient",
        "launch/fsdp_matrix.py",
        "            inputs = require_gradients(inputs)\n",
        "            pass\n",
        GRID,
    ),
    Mutant(
        "S6 input gradient and memory cap",
        "the cap caps nothing",
        "labkit/session/memory_cap.py",
        "(_writable_bytes() + mib * MIB, before[1])",
        "before",
        "tests/test_cap.py",
    ),
    Mutant(
        "S6 outputs of any structure",
        "only the first leaf is compared",
        "labkit/parity/training.py",
        "if isinstance(other, Tensor):",
        "if isinstance(other, Tensor) and path == right[0][0]:",
        "tests/test_fsdp.py::test_the_comparison_sees_outputs_of_another_structure_and_leaves_that_differ",
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mutant; 1 if one survived."""
    parser = argparse.ArgumentParser(description="Break the code in one place at a time; a test must notice.")
    parser.add_argument("rows", nargs="*", metavar="WORD", help="only rows whose name holds one of these words")
    parser.add_argument("--list", action="store_true", help="show what there is, and run nothing")
    asked = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not asked.rows or any(word.lower() in m.row.lower() for word in asked.rows)]
    if not chosen:
        parser.error(f"no row holds {' or '.join(map(repr, asked.rows))}: see --list")
    if asked.list:
        print("\n".join(f"{m.row} | {m.test} | {m.change}" for m in chosen))
        return 0
    start, survived = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = copy_of_checkout(Path(folder) / "labkit")
        for line, caught in verdicts(copy, chosen):
            print(line, flush=True)
            survived += not caught
    rows = len({m.row for m in chosen})
    caught, minutes = len(chosen) - survived, (time.monotonic() - start) / 60
    print(f"{rows} rows, {len(chosen)} mutants: {caught} caught, {survived} survived; {minutes:.1f} min")
    return 1 if survived else 0


def copy_of_checkout(folder: Path) -> Path:
    """What git tracks and what is new, as it stands now."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def verdicts(copy: Path, mutants: Sequence[Mutant]) -> Iterator[tuple[str, bool]]:
    """A line for each mutant, and whether it was caught. Raises SystemExit where a test fails on unchanged code."""
    print("the same tests on unchanged code …", flush=True)
    status, said = run_tests(copy, sorted({test for mutant in mutants for test in mutant.test.split()}))
    if status:
        raise SystemExit(f"on unchanged code, a test fails: mend it first\n{said}")
    for mutant in mutants:
        path = copy / mutant.file
        right = path.read_text()
        path.write_text(mutated(right, mutant))
        start = time.monotonic()
        status, said = run_tests(copy, mutant.test.split())
        path.write_text(right)
        caught = status == 1  # pytest's status for tests that failed; others are errors of its own
        verdict = f"caught: {reason(said)}" if caught else f"SURVIVED (pytest's status {status})"
        tests = mutant.test.removeprefix("tests/").replace(" tests/", ", ")
        yield f"{mutant.row} | {tests} | {mutant.change} | {verdict} | {time.monotonic() - start:.0f} s", caught


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the change. Raises ValueError unless the old text is there once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times, not once: mend the table")
    return text.replace(mutant.old, mutant.new)


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Pytest's status, and what it said, at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "LABKIT_TEST": "all"}
    try:
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {LIMIT_S} s"
    return ran.returncode, ran.stdout[-4000:]


def reason(said: str) -> str:
    """The failure in a few words."""
    found = re.findall(r"^/\S+:\d+: (.+)$", said, re.MULTILINE)  # as --tb=line has it
    return (found[0] if found else said.strip().splitlines()[-1])[:100]


if __name__ == "__main__":
    sys.exit(main())
