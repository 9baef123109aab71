"""Mutants of section S7 of the specification: what else the origins contain."""

from mutants import Mutant

MLP = "labkit/models/mlp.py"
STATES = "labkit/parity/states.py"
ONE_DEVICE = "labkit/parity/one_device.py"
EXTENSIONS = "labkit/parity/extensions.py"
PAPERS_RUN = "tests/test_convnext.py::test_the_papers_run_computes_the_gradient_of_its_images"
ALIVE = "tests/test_models.py::test_an_mlp_that_was_built_without_memory_comes_to_life_as_one_that_was_not"
OWN_STATES = "tests/test_parity_states.py::test_a_function_of_ones_own_decides_which_module_states_are_equal"
NESTED = "tests/test_parity_states.py::test_parameters_of_nested_units_may_be_left_where_they_are"
OWN_SHARDS = "tests/test_parity_states.py::test_a_rank_may_set_its_own_shards_to_zero"
OWN_REFERENCE = "tests/test_parity.py::test_a_reference_may_be_made_by_a_function_of_ones_own"
IN_TURN = "tests/test_allgather_extensions.py::test_gradients_are_removed_and_set_to_zero_in_turn"

MUTANTS = [
    Mutant(
        "S7 input that requires a gradient",
        "the paper's images require none",
        "launch/convnext_spatial.py",
        '"input_grad": True',
        '"input_grad": False',
        PAPERS_RUN,
    ),
    Mutant(
        "S7 input that requires a gradient",
        "they require one whatever was asked",
        "launch/convnext_spatial.py",
        "own_images.requires_grad_(config.input_grad)",
        "own_images.requires_grad_()",
        PAPERS_RUN,
    ),
    Mutant(
        "S7 input that requires a gradient",
        "the stem cuts the images off",
        "labkit/models/convnext.py",
        "self.stages(images)",
        "self.stages(images.detach())",
        "tests/test_convnext.py::test_the_gradient_of_the_images_is_work_of_the_stem",
    ),
    Mutant(
        "S7 input that requires a gradient",
        "the one device's gradient is compared with itself",
        "labkit/parity/spatial.py",
        "inputs[0].grad, inputs[1].grad)",
        "inputs[1].grad, inputs[1].grad)",
        "tests/test_parity.py::test_a_training_step_compares_the_gradients_of_its_images",
    ),
    Mutant(
        "S7 MLP.reset_parameters",
        "the buffer keeps what to_empty gave",
        MLP,
        "            nn.init.normal_(self.buffer)\n",
        "            pass\n",
        ALIVE,
        off=True,
    ),
    Mutant(
        "S7 MLP.reset_parameters",
        "the buffer has another distribution than the constructor's",
        MLP,
        "nn.init.normal_(self.buffer)",
        "nn.init.uniform_(self.buffer)",
        ALIVE,
    ),
    Mutant(
        "S7 MLP.reset_parameters",
        "layers are drawn in another order than the constructor's",
        MLP,
        "        self.in_proj.reset_parameters()\n        self.out_proj.reset_parameters()\n",
        "        self.out_proj.reset_parameters()\n        self.in_proj.reset_parameters()\n",
        ALIVE,
    ),
    Mutant(
        "S7 MLP.reset_parameters",
        "every rank has a buffer of its own",
        MLP,
        "            nn.init.normal_(self.buffer)\n",
        "            nn.init.normal_(self.buffer, generator=torch.Generator().manual_seed(torch.seed() % 2**31))\n",
        "tests/test_models.py::test_its_shards_come_to_life_too_and_its_buffer_is_that_of_all_ranks",
    ),
    Mutant(
        "S7 zero_grad(set_to_none)",
        "gradients are removed in every step",
        EXTENSIONS,
        "to_none = bool(step % 2)",
        "to_none = True",
        IN_TURN,
    ),
    Mutant(
        "S7 zero_grad(set_to_none)",
        "they are set to zero in the first two steps, where there is nothing to set",
        EXTENSIONS,
        "to_none = bool(step % 2)",
        "to_none = step > 1",
        IN_TURN,
    ),
    Mutant(
        "S7 zero_grad(set_to_none)",
        "the reference is always set to none",
        EXTENSIONS,
        "_forward_backward(reference, optimizers[1], x, to_none)",
        "_forward_backward(reference, optimizers[1], x)",
        IN_TURN,
    ),
    Mutant(
        "S7 zero_grad(set_to_none)",
        "what is not set to none stays",
        EXTENSIONS,
        "    optimizer.zero_grad(set_to_none)\n",
        "    if set_to_none:\n        optimizer.zero_grad()\n",
        "tests/test_allgather_extensions.py::test_no_gradient_of_the_step_before_is_left",
    ),
    Mutant(
        "S7 zero_grad(set_to_none)",
        "two steps are enough",
        "launch/allgather_extensions.py",
        'if check == "parity" and self.steps < 3:',
        'if check == "parity" and self.steps < 2:',
        "tests/test_allgather_extensions.py::test_what_cannot_work_is_refused_before_a_launch",
    ),
    Mutant(
        "S7 reference initialiser",
        "what the function gives is not called",
        ONE_DEVICE,
        "output = self._forward_in_dtype(self.models[rank], inputs)",
        "output = self._forward_in_dtype(copy, inputs)",
        "tests/test_parity.py::test_what_the_function_gives_is_called_in_every_precision",
    ),
    Mutant(
        "S7 reference initialiser",
        "all ranks call what it gives for the last",
        ONE_DEVICE,
        "output = self._forward_in_dtype(self.models[rank], inputs)",
        "output = self._forward_in_dtype(self.models[-1], inputs)",
        "tests/test_parity.py::test_what_the_function_gives_is_called_in_every_precision",
    ),
    Mutant(
        "S7 reference initialiser",
        "it wraps a copy that is not trained",
        ONE_DEVICE,
        "self.init_fn(copy) if self.init_fn else copy for copy in self.copies",
        "self.init_fn(self.build(0)) if self.init_fn else copy for copy in self.copies",
        OWN_REFERENCE,
    ),
    Mutant(
        "S7 assert_fn",
        "every rank is compared with the one before",
        STATES,
        "assert_fn(everyone[0][name], everyone[rank][name])",
        "assert_fn(everyone[rank - 1][name], everyone[rank][name])",
        OWN_STATES,
    ),
    Mutant(
        "S7 assert_fn",
        "the last rank is left out",
        STATES,
        "itertools.product(names, range(1, len(everyone)))",
        "itertools.product(names, range(1, len(everyone) - 1))",
        OWN_STATES,
    ),
    Mutant(
        "S7 assert_fn",
        "equal bits are asked for all the same",
        STATES,
        "if len(holders) > 1 and (assert_fn is None or None in holders):",
        "if len(holders) > 1:",
        OWN_STATES,
        off=True,
    ),
    Mutant(
        "S7 recurse",
        "parameters of nested units are given as the shards that they are",
        STATES,
        "nested = [] if recurse else [unit for unit in units if unit is not model]",
        "nested: list[nn.Module] = []",
        NESTED,
    ),
    Mutant(
        "S7 recurse",
        "the outer unit counts as nested",
        STATES,
        "[unit for unit in units if unit is not model]",
        "units",
        NESTED,
    ),
    Mutant(
        "S7 recurse",
        "nested units are gathered, though not given",
        STATES,
        "FSDP1.summon_full_params(model, recurse=recurse, writeback=False)",
        "FSDP1.summon_full_params(model, writeback=False)",
        NESTED,
    ),
    Mutant(
        "S7 summon_full",
        "everything is gathered, whatever was asked",
        STATES,
        "FSDP1.summon_full_params(model) if summon_full else",
        "FSDP1.summon_full_params(model) if summon_full is not None else",
        OWN_SHARDS,
        off=True,
    ),
    Mutant(
        "S7 summon_full",
        "the numbers that were gathered are set to zero, and not written back",
        STATES,
        "FSDP1.summon_full_params(model) if summon_full else",
        "FSDP1.summon_full_params(model, writeback=False) if summon_full else",
        "tests/test_parity_states.py::test_parameters_are_gathered_and_zeroed",
    ),
]
