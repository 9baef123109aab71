"""Lab 2."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import fsdp as checks

changed = functools.partial(answers.changed, "02")


EXERCISES = [
    Exercise(
        "2.1",
        "fewest_ranks",
        checks.fewest_ranks,
        {
            "fewest_ranks(parameters=1000, largest_unit=100, memory_bytes=16800) gave 2": "return 2",
            "fewest_ranks(parameters=1000, largest_unit=300, memory_bytes=5600) gave 3": changed(
                "fewest_ranks", ("memory_bytes - 8 * largest_unit", "memory_bytes")
            ),
            "fewest_ranks(parameters=1000, largest_unit=300, memory_bytes=5600) gave 4": changed(
                "fewest_ranks", ("8 * largest_unit", "4 * largest_unit")
            ),
            "fewest_ranks(parameters=1000, largest_unit=400, memory_bytes=9000) gave 2": changed(
                "fewest_ranks", ("-(-16 * parameters // left)", "16 * parameters // left")
            ),
            "fewest_ranks(parameters=1000, largest_unit=1000, memory_bytes=7000) gave -16": changed(
                "fewest_ranks", ("if left <= 0:", "if left == 0:")
            ),
        },
    ),
    Exercise(
        "2.2",
        "shard_parameters",
        checks.shard_parameters,
        {
            "on rank 0, for unit 0 you return Linear, Tanh, Linear": "return list(unit)",
            "on rank 0, what you return for unit 0 has shape (50,)": changed(
                "shard_parameters", ("full.chunk(ranks)[dist.get_rank()].clone()", "full.clone()")
            ),
            "on rank 1, what you return for unit 0 is rank 0's part": changed(
                "shard_parameters", ("[dist.get_rank()]", "[0]")
            ),
            "on rank 0, what you return for unit 0 is right, but in torch.float64": changed(
                "shard_parameters", ("[dist.get_rank()].clone()", "[dist.get_rank()].double()")
            ),
            "on rank 0, for unit 0 the shard lies in the row's memory, which you give back": changed(
                "shard_parameters", ("[dist.get_rank()].clone()", "[dist.get_rank()]")
            ),
            "on rank 0, for unit 0 200 bytes of whole parameters are still there": changed(
                "shard_parameters", ("full.untyped_storage().resize_(0)", "pass")
            ),
            "on rank 0, for unit 0, once the row is filled again, the unit's parameters are others": changed(
                "shard_parameters", ("start += parameter.numel()", "start += 0")
            ),
            "on rank 0, what you return for unit 1 has shape (21,)": changed(
                "shard_parameters",
                ("-sum(p.numel() for p in parameters) % ranks", "ranks - sum(p.numel() for p in parameters) % ranks"),
            ),
            "right on 2 ranks, but with 3 ranks: on rank 0, what you return for unit 0 has shape (25,)": changed(
                "shard_parameters", ("dist.get_world_size()", "2"), ("[dist.get_rank()]", "[dist.get_rank() % 2]")
            ),
        },
    ),
    Exercise(
        "2.3",
        "gather_and_free",
        checks.gather_and_free,
        {
            "after its forward pass, unit 0 still holds 200 bytes of whole parameters": changed(
                "gather_and_free",
                ("-> None:\n    full.untyped_storage().resize_(0)\n    if output", "-> None:\n    if output"),
            ),
            "parameters were used while their buffer was empty": changed(
                "gather_and_free", ("output.register_hook(gather)", "pass")
            ),
            "on rank 0, the output of the forward pass is another": changed(
                "gather_and_free",
                (
                    "dist.all_gather_into_tensor(full, shard.detach())",
                    "whole = full.half()\n    dist.all_gather_into_tensor(whole, shard.detach().half())\n"
                    "    full.copy_(whole)",
                ),
            ),
            "on rank 0, the output after the shard has changed is another": changed(
                "gather_and_free",
                ("dist.all_gather_into_tensor(full, shard.detach())", "dist.all_gather_into_tensor(full, first)"),
                ("def gather(", "first = shard.detach().clone()\n\ndef gather("),
            ),
            "on rank 0, the numbers are right, but a step of two units sends 4 all_reduce calls with "
            "16,777,216 bytes besides": changed(
                "gather_and_free",
                ("resize_(full.nbytes)\n", "resize_(full.nbytes)\n    dist.all_reduce(torch.zeros(2**20))\n"),
            ),
            "right on 2 ranks, but with 3 ranks: ": changed(
                "gather_and_free", ("resize_(full.nbytes)", "resize_(200)")
            ),
            "on rank 0, the numbers are right, but a step of two units sends 4 all_gather calls with 720": changed(
                "gather_and_free",
                (
                    "dist.all_gather_into_tensor(full, shard.detach())",
                    "whole = full.double()\n    dist.all_gather_into_tensor(whole, shard.detach().double())\n"
                    "    full.copy_(whole)",
                ),
            ),
        },
    ),
    Exercise(
        "2.4",
        "reduce_and_free",
        checks.reduce_and_free,
        {
            "on rank 0, the gradient of unit 0's shard is the sum over the ranks, not the mean": changed(
                "reduce_and_free", ("shard.grad /= ranks", "pass")
            ),
            "on rank 0, the gradient of unit 0's shard is this rank's own, not the mean": changed(
                "reduce_and_free",
                (
                    "dist.reduce_scatter_tensor(shard.grad, gradients)",
                    "shard.grad = gradients.chunk(ranks)[dist.get_rank()]",
                ),
                ("shard.grad /= ranks", "pass"),
            ),
            "on rank 0, the gradient of unit 0's shard is None": changed(
                "reduce_and_free",
                ("shard.grad = torch.empty_like(shard)", "mean = torch.empty_like(shard)"),
                ("dist.reduce_scatter_tensor(shard.grad, gradients)", "dist.reduce_scatter_tensor(mean, gradients)"),
                ("shard.grad /= ranks", "mean /= ranks"),
            ),
            "on rank 0, in a second step the gradient of unit 0's shard is None": changed(
                "reduce_and_free", ("ready.clear()", "pass")
            ),
            "in step 2 your hook reduced after 1 of a unit's 4 gradients": changed(
                "reduce_and_free",
                ("ready.clear()", "pass"),
                ("if len(ready) == len(parameters)", "if len(ready) >= len(parameters)"),
            ),
            "in step 1 your hook reduced after 1 of a unit's 4 gradients": changed(
                "reduce_and_free", ("if len(ready) == len(parameters)", "if len(ready)")
            ),
            "in step 1 your hook reduced after 2 of a unit's 4 gradients": changed(
                "reduce_and_free",
                ("if len(ready) == len(parameters)", "if parameter is parameters[0]"),
            ),
            "unit 0 still has 196 bytes of whole gradients after the backward pass": changed(
                "reduce_and_free", ("each.grad = None", "pass")
            ),
            "after the backward pass, unit 0 still holds 200 bytes of whole parameters": changed(
                "reduce_and_free", ("full.untyped_storage().resize_(0)", "pass")
            ),
            "right on 2 ranks, but with 3 ranks: on rank 0, the gradient of unit 0's shard is the sum over the ranks, "
            "divided by 2": changed("reduce_and_free", ("shard.grad /= ranks", "shard.grad /= 2")),
            "on rank 0, the numbers are right, but a step of two units sends 2 all_reduce calls": changed(
                "reduce_and_free",
                ("shard.grad /= ranks", "shard.grad /= ranks\n        dist.all_reduce(torch.zeros(2**20))"),
            ),
        },
    ),
    Exercise(
        "2.5",
        "make_units",
        checks.make_units,
        {
            "the root gathers block 9, which you left out": changed(
                "make_units", ("    unit.append(block)\nfully_shard(unit, mesh=mesh)", "    unit.append(block)")
            ),
            "the units gather 336, 336, 336, 336, 1,584, 648, 960, 648, 336, 960 bytes: 10 units": (
                "for block in blocks:\n    fully_shard(block, mesh=mesh)"
            ),
            "the units gather 6,480 bytes, and the limit is 1,344": "fully_shard(blocks, mesh=mesh)",
            "the units gather 1,008, 336, 1,584, 648, 960, 984, 960 bytes: 7 units": changed(
                "make_units", ("> limit", ">= limit")
            ),
            "the units gather 1,344, 1,584, 1,296, 960, 1,296 bytes": (
                "for places in ((0, 1, 2, 3), (4,), (5, 7), (6,), (8, 9)):\n"
                "    fully_shard([blocks[place] for place in places], mesh=mesh)"
            ),
            "right on 2 ranks, but with 3 ranks: the units gather ": changed(
                "make_units", ("> limit", "> limit * dist.get_world_size() // 2")
            ),
            "the units are right, but a step sends 6 all_gather calls": changed(
                "make_units",
                (
                    "unit.append(block)\nfully_shard(unit, mesh=mesh)",
                    "unit.append(block)\nfully_shard(unit, mesh=mesh, reshard_after_forward=False)",
                ),
                (
                    "        fully_shard(unit, mesh=mesh)",
                    "        fully_shard(unit, mesh=mesh, reshard_after_forward=False)",
                ),
            ),
        },
    ),
]
