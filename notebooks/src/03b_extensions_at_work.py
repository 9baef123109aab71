# %% [markdown]
# # Lab 3b. All-gather extensions at work: TwoTensor
#
# In lab 3 two hooks sat on a plain tensor. Whatever replaces that tensor loses them, as `to_empty` does. A parameter
# *type* has its hooks wherever its tensors are made anew, which is why torchao's float8 parameter is a tensor subclass.
# In this companion you build the smallest such type, `TwoTensor`. After it you can
#
# - write a tensor subclass that sees every operation, with FSDP2's hooks as methods;
# - check on real ranks that it trains as plain parameters do, and choose a test that sees what this check cannot;
# - let it compute in another dtype, start it from the meta device, and train a type that sends four bits a number.
#
# You need lab 3. The notebook takes about {core_minutes} minutes, and section 4 can be worked alone.

# %% tags=["nbval-ignore-output"]
import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

import labkit
from labkit import doctor, plots, tensors
from labkit.config import require
from labkit.tensors import pad_rows, refill
from labkit_course import widgets
from labkit_course.checks import extensions_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="3b")

# %% tags=["parameters"] small={"BATCH": 8} points=[[2,128,1],[3,200,16],[8,256,80]]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 64  # tiles of a rank in a step

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nothing to gather, and more than 8 take minutes")
require("DIM", DIM, at_least=128, multiple_of=2, because="section 4 sends rows of 128 numbers or more in pairs")
require("BATCH", BATCH, at_least=1, because="a step needs a tile")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

SHORT = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": 2}

# %% [markdown]
# ## 1. A tensor that listens ({minutes} minutes)
#
# When you write `x @ w`, Python calls PyTorch, autograd notes what it needs for the backward pass, and then the
# operation goes to a **kernel**, the code that computes. A **tensor subclass** can stand just before the kernel: its
# method `__torch_dispatch__` gets every operation that would go there, and decides what happens. The smallest one holds
# another tensor, prints the operations that arrive, and lets the inner tensor do the work.


# %%
class Listener(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        # to PyTorch a tensor of this shape, but without memory of its own
        listener = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        listener.inner = inner.detach()
        return listener

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        print("   ", func)
        plain = tree_map_only(Listener, lambda listener: listener.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Listener, func(*plain[0], **plain[1]))


# %%
listening = nn.Parameter(Listener(torch.ones(3, 4)))
print("forward")
loss = nn.functional.linear(torch.ones(2, 4), listening).relu().sum()
print("backward")
loss.backward()

# %% [markdown]
# In the list, `aten` is the name of PyTorch's own operations. `linear` is gone, because what arrives is `t` and `mm`,
# of which it is made. The operations of the backward pass arrive the same way, because autograd sits above this point.
# Each `detach` is autograd or `nn.Parameter` taking a tensor for itself.
#
# `tree_map_only(kind, f, what)` goes through tuples, lists and dicts, and replaces every value of that kind by `f` of
# it. `Listener` uses it twice: it takes the inner tensors out of the arguments, and wraps every tensor of the result.
#
# **TwoTensor** holds two tensors, `a` and `b`, and does every operation with each. Nobody needs two copies of a
# parameter, but it is the smallest type that *must* send something other than the one tensor that FSDP expects. Real
# types do the same with numbers and their scales. You write its methods one by one, as functions, and then a class is
# made of them.
#
# ### Exercise 1: a tensor that holds two (•, {minutes} minutes)
#
# `a` and `b` are tensors of equal shape. Return a tensor of class `cls` that looks like `a`: the same shape, strides,
# dtype and device. Its attributes `.a` and `.b` are the two, in the memory that they have, and detached, because
# autograd follows the wrapper and not what it holds.
#
# <details><summary>Hint 1</summary>
#
# `Listener` has the three lines. It leaves out the strides and the device.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=…, device=…)`
#
# </details>


# %%
def new_two(cls: type, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ### BEGIN SOLUTION
    two = torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)
    two.a, two.b = a.detach(), b.detach()
    return two
    ### END SOLUTION


# %%
looks = checks.new_two(new_two)
looks

# %% [markdown]
# ### Exercise 2: every operation twice (••, {minutes} minutes)
#
# `func` is an operation, called with `args` and `kwargs`. Among these are instances of `cls`, alone or in lists, and
# plain tensors and numbers. Call `func` with the halves `b` in place of these instances, and then with the halves `a`.
# Wrap each pair of result tensors with `cls(x, y)`, which calls your `new_two`, and leave everything else as it is.
#
# The order matters, because a parameter's gradient is a `TwoTensor`, too, and FSDP2 copies it into a plain buffer
# before it reduces it. Both calls write into that buffer, so the numbers of the second one stay. Let them be those of
# `a`: b's own gradient is dropped. What comes back is one plain gradient, and the optimizer adds its step to both halves.
#
# <details><summary>Hint 1</summary>
#
# `args_a, kwargs_a = tree_map_only(cls, lambda two: two.a, (args, kwargs or {}))`, and the same for b.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `tree_map(f, first, second)` goes through two structures side by side and gives `f(x, y)` in their place.
#
# </details>


# %%
def dispatch(cls: type, func, types, args=(), kwargs=None):
    ### BEGIN SOLUTION
    args_a, kwargs_a = tree_map_only(cls, lambda two: two.a, (args, kwargs or {}))
    args_b, kwargs_b = tree_map_only(cls, lambda two: two.b, (args, kwargs or {}))
    b = func(*args_b, **kwargs_b)
    a = func(*args_a, **kwargs_a)
    return tree_map(lambda x, y: cls(x, y) if isinstance(x, torch.Tensor) else x, a, b)
    ### END SOLUTION


# %%
twice = checks.dispatch(dispatch)
twice

# %% [markdown]
# labkit's own `TwoTensor` does two things more. It keeps views as views, and the result of an operation in place as the
# same object, by PyTorch's `return_and_correct_aliasing`; training here does well without. And it refuses an operation
# such as `plain.add_(two)`, which would add both halves; a copy into a plain tensor it allows, since FSDP2 needs it.
#
# *Takeaway: a subclass sees what reaches the kernels, in both passes, and a few lines redirect all of it.*
#
# ## 2. The hooks as methods ({minutes} minutes)
#
# The hooks of lab 3 were two functions on a plain shard: the first returned the tensors to send, and the second made
# the parameter of those that arrived. As methods they are the same, with `self` for the shard. FSDP2 counts the
# arguments of the first one. There are two forms, and everything else is refused:
#
# ```python
# def fsdp_pre_all_gather(self, mesh): ...
# def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy): ...
# ```
#
# The long form also tells the shape of the whole parameter, `outer_size`, the module that holds it, and the policy. The
# padding follows from `outer_size` and the number of ranks, `mesh.size()`.
#
# ### Exercise 3: what to send (•, {minutes} minutes)
#
# Send both halves, padded to the rows of the rank with most of them: `pad_rows(tensor, rows)` adds rows of zeros, up to
# `rows` in all. The second part of the answer, the note to yourself, is None.
#
# <details><summary>Hint 1</summary>
#
# The whole parameter has `outer_size[0]` rows, and `-(-x // y)` rounds up.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `return (pad_rows(self.a, rows), …), None`
#
# </details>


# %%
def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
    ### BEGIN SOLUTION
    rows = -(-outer_size[0] // mesh.size())
    return (pad_rows(self.a, rows), pad_rows(self.b, rows)), None
    ### END SOLUTION


# %%
sends = checks.pre_all_gather(pre_all_gather)
sends

# %%
_ = plots.hook_memory("TwoTensor")

# %% [markdown]
# *Who holds which memory, from left to right in time. Without padding and without a cast only the gathered tensors
# are new memory. FSDP frees it after use and keeps the tensors, which get new memory at the next gather.*
#
# ### Exercise 4: what is the parameter? (••, {minutes} minutes)
#
# In the second hook, `all_gather_outputs` are all rows of a and all rows of b. You need not remove rows of padding: FSDP2
# views what you return in the parameter's true shape. At the first call return the parameter, which is a `type(self)(x, y)`, and a
# tuple of the tensors in whose memory it lies. At later calls fill `out` and return nothing.
#
# With a policy a unit computes in another dtype, `param_dtype`; without one that is the shard's own. If it is another,
# the gathered tensors cannot be the parameter, and a cast makes new memory. Where the dtype is right already, nothing may
# be copied. `refill(tensor, gathered)` copies gathered rows into a half, up to its last row.
#
# <details><summary>Hint 1</summary>
#
# `.to(param_dtype)` gives the tensor itself where it has the dtype already. So one line serves both cases of the first
# call.
#
# </details>
# <details><summary>Hint 2</summary>
#
# On later calls refill `out.a` and `out.b` if the gathered dtype is not `param_dtype`. Otherwise they lie in the gathered
# memory, which is filled already.
#
# </details>


# %%
def post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    ### BEGIN SOLUTION
    a, b = all_gather_outputs
    if out is None:
        whole = type(self)(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    if a.dtype != param_dtype:
        refill(out.a, a)
        refill(out.b, b)
    ### END SOLUTION


# %%
becomes = checks.post_all_gather(post_all_gather)
becomes

# %% [markdown]
# The class is made of your four functions. `__tensor_flatten__` names the inner tensors for others, such as
# `torch.compile`, which takes a tensor apart and builds it again. While one of the four is open, labkit's class stands
# in for yours.


# %%
class TwoTensor(torch.Tensor):
    __new__ = staticmethod(new_two)
    __torch_dispatch__ = classmethod(dispatch)
    fsdp_pre_all_gather = pre_all_gather
    fsdp_post_all_gather = post_all_gather

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return TwoTensor(inner["a"], inner["b"])


done = all(verdict.ok for verdict in (looks, twice, sends, becomes))
working = TwoTensor if done else tensors.TwoTensor

# %% [markdown]
# Every parameter of a real network becomes such a tensor. `labkit.check` trains ten steps with Adam, with resharding
# and without. Beside it, each rank trains a whole, plain copy of the network on its own samples and averages its
# gradients by hand, and every loss, gradient and shard is held against that.
#
# Commit: what is the largest relative difference on two ranks? This notebook's network has four units, and each frees its
# parameters after the forward pass. How many times the bytes of plain parameters do the all-gathers of a step carry, and
# in how many calls?

# %% tags=["commit"]
mine_two = commit(difference=None, times_the_bytes=None, calls=None)
### BEGIN SOLUTION
mine_two = commit(difference=0, times_the_bytes=2, calls=8)  # nothing is rounded, and to halve a sum is exact
### END SOLUTION


# %%
def in_both_halves(kind: type) -> dict[str, object]:
    """What ``use`` takes, for parameters of this type whose two halves are the weight."""

    def parameter(weight: torch.Tensor) -> torch.Tensor:
        return kind(weight, weight.clone())

    return {"parameter": parameter}


PARITY = {"nproc": 2, "extension": "your_type", "steps": 10}
parity = labkit.check("allgather_extensions", use=in_both_halves(working), **PARITY)
print(parity.verdict_text)

# %% tags=["summary"]
plain = labkit.run("allgather_extensions", extension="none", **SHORT)
two = labkit.run("allgather_extensions", extension="your_type", use=in_both_halves(working), **SHORT)
measured = {"difference": parity.value("max_rel_error"), "calls": two.value("all_gather_count")}
measured["times_the_bytes"] = two.value("all_gather_bytes") / plain.value("all_gather_bytes")
print("\n".join(f"{name}: {measured[name]:g}; you: {prediction_text(mine_two[name], 'g')}" for name in mine_two))

# %% tags=["claim"]
claim("the difference is 0", parity.value("max_rel_error") == 0)
claim("twice the bytes", measured["times_the_bytes"] == 2)
claim("in as many calls", two.value("all_gather_count") == plain.value("all_gather_count") == 8)

# %% [markdown]
# The difference is not small but 0: a `TwoTensor` whose halves are equal computes what a plain parameter computes,
# twice, and halving the sum of two ranks is exact. There are 8 calls, as with plain parameters: four units are gathered twice,
# and the tensors of a unit travel together.
#
# **What parity cannot see.** Each of the next two hooks has a mistake. The first sends `a` twice. The second puts the
# rows of zeros in front of the shard's own rows, and not behind them.


# %%
def only_a(self, mesh, outer_size, outer_stride, module, mp_policy):
    rows = -(-outer_size[0] // mesh.size())
    return (pad_rows(self.a, rows), pad_rows(self.a, rows)), None


def zeros_first(self, mesh, outer_size, outer_stride, module, mp_policy):
    rows = -(-outer_size[0] // mesh.size())
    return tuple(pad_rows(half.flip(0), rows).flip(0) for half in (self.a, self.b)), None


class OnlyA(working):
    fsdp_pre_all_gather = only_a


class ZerosFirst(working):
    fsdp_pre_all_gather = zeros_first


# %% [markdown]
# The check's network has weights of 32 and of 8 rows. It runs on 2 ranks as above, and with the second hook also on 3.
# Commit: what is the largest relative difference in each of the three runs? Write 0 for none, and 1 for one that nobody
# can take for rounding.

# %% tags=["commit"]
mine_seen = commit(only_a=None, zeros_first=None, zeros_first_on_3=None)
### BEGIN SOLUTION
mine_seen = commit(only_a=0, zeros_first=0, zeros_first_on_3=1)  # 32 and 8 are even, and no multiples of 3
### END SOLUTION

# %%
ON_3 = PARITY | {"nproc": 3, "steps": 3}
seen = {
    "only_a": labkit.check("allgather_extensions", use=in_both_halves(OnlyA), **PARITY),
    "zeros_first": labkit.check("allgather_extensions", use=in_both_halves(ZerosFirst), **PARITY),
    "zeros_first_on_3": labkit.check("allgather_extensions", use=in_both_halves(ZerosFirst), **ON_3),
}
right_on_3 = labkit.check("allgather_extensions", use=in_both_halves(working), **ON_3).value("max_rel_error")
differences = {name: result.value("max_rel_error") for name, result in seen.items()}
print("\n".join(f"{name}: {off:.1g}; you: {prediction_text(mine_seen[name])}" for name, off in differences.items()))
print(f"the right hooks, on 3: {'rounding alone' if right_on_3 < 1e-6 else right_on_3}")

# %% tags=["claim"]
claim("parity passes where one half is never sent", seen["only_a"].ok and differences["only_a"] == 0)
claim("and on 2 ranks where zeros come first", seen["zeros_first"].ok and differences["zeros_first"] == 0)
claim("on 3 ranks it is red", not seen["zeros_first_on_3"].ok and differences["zeros_first_on_3"] > 0.1)
claim("with the right hooks there is only rounding", 0 < right_on_3 < 1e-6)

# %% [markdown]
# Parity passed twice with a wrong hook. In the first run the two halves are equal, so that nobody sees which of them
# travelled. In the second one all shards have equally many rows, and nothing is padded. On 3 ranks the last shard is
# shorter, and the difference is plain. Even the right hooks do not reach 0 there, because of rounding, but they stay below
# a millionth. A test must be able to fail.
#
# ### Exercise 5: a test that can fail (•, {minutes} minutes)
#
# Another test shards one `TwoTensor` over real ranks, gathers it, and passes if both halves are what they were. Choose
# what it gathers: return `a` and `b`, both [rows, columns] in float32, and the number of ranks, from 2 to 4. The check
# runs the test with the right hook and with six wrong ones. Your choice is right if the test fails with each of the six.
#
# <details><summary>Hint 1</summary>
#
# One wrong hook sends `a` twice. How do `a` and `b` have to differ? Another one leaves out the padding. When is there any?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Random numbers are equal to nothing by chance: `torch.randn(rows, columns)`.
#
# </details>


# %%
def halves() -> tuple[torch.Tensor, torch.Tensor, int]:
    ### BEGIN SOLUTION
    return torch.randn(5, 4), torch.randn(5, 4), 3
    ### END SOLUTION


# %%
checks.halves(halves)

# %% [markdown]
# *Takeaway: a parameter type brings its hooks along. A test that should tell two tensors apart needs two that differ, and
# one that should see the padding needs shards of unequal length.*
#
# ## 3. From the meta device ({minutes} minutes)
#
# Large models are built on the meta device, where tensors have shapes and no memory. Then `to_empty` gives them memory,
# and with it new tensors. What was put onto the old ones is gone:

# %%
layer = nn.Linear(3, 3, bias=False, device="meta")
layer.weight.hook = "put here by hand"
layer.to_empty(device="cpu")
print(f"the hook is {'still there' if hasattr(layer.weight, 'hook') else 'lost'}")

# %% [markdown]
# A type brings its methods along. `check="meta"` builds a network of your type on the meta device, shards it, gives it
# memory full of NaN with `to_empty`, fills that, and trains with a policy of bfloat16.

# %%
meta = {"nproc": 2, "extension": "your_type", "steps": 5}
built = labkit.check("allgather_extensions", check="meta", use=in_both_halves(working), **meta)
print(f"{built.value('trained'):.0f} of {built.value('parameters'):.0f} parameters trained in bfloat16")

# %% tags=["claim"]
claim("hooks on a plain tensor are lost", not hasattr(layer.weight, "hook"))
claim("all parameters trained", built.ok and built.value("trained") == built.value("parameters"))

# %% [markdown]
# *Takeaway: a type survives `to_empty`, while hooks on plain tensors have to be put there afterwards.*
#
# ## 4. Fewer bits ({minutes} minutes)
#
# The explorer takes the network of lab 3. It shows on the left what a rank hands to the all-gathers of a step, and on
# the right how large the errors of its weights are. *run it* lets real ranks gather the very same weights, and nothing
# in the figure should change. Set *one scale for* to a shard, and then to 32 numbers: the bound stays where it is, and
# the errors shrink towards 0.
#
# <details><summary>From a scale for a shard to one for 32 numbers, int4 gains more than float8 does. Why?</summary>
#
# A float carries a scale of its own in each number: its exponent. int4, whole numbers from −7 to 7, has nothing else,
# and one large weight makes the steps of all that share its scale coarse.
#
# </details>

# %%
widgets.GatherExplorer()

# %% [markdown]
# ### Exercise 6: four bits (••, {minutes} minutes)
#
# Two numbers of 4 bits fit into a byte. Write encode and decode as in lab 3, and send at most 0.14 of float32's bytes,
# with a scale for each row. No weight may be off by more than 1/14 of the largest in its row: that is half a step, if 7
# steps reach it. A row may be all zeros. Each tensor that you send has the shard's rows. You may count on an even number
# of columns, of 128 or more.
#
# <details><summary>Hint 1</summary>
#
# Divide by a scale with which the largest is 7, round, and add 8: then each number is from 1 to 15. Convert to
# `torch.uint8`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `numbers[:, ::2] * 16 + numbers[:, 1::2]` packs. `// 16` and `% 16` unpack.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.stack([high, low], dim=2).flatten(1)` puts the columns into their old order.
#
# </details>


# %%
def encode_4bit(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ### BEGIN SOLUTION
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
    numbers = ((shard / scales).round() + 8).to(torch.uint8)
    return numbers[:, ::2] * 16 + numbers[:, 1::2], scales
    ### END SOLUTION


def decode_4bit(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    ### BEGIN SOLUTION
    packed, scales = gathered
    numbers = torch.stack([packed // 16, packed % 16], dim=2).flatten(1)
    return ((numbers.float() - 8) * scales).to(dtype)
    ### END SOLUTION


# %%
four_verdict = checks.four_bit_gather(encode_4bit, decode_4bit)
four_verdict

# %% [markdown]
# **A type of four bits.** Now your functions become a parameter type. To the optimizer a `FourBit` is the float32 shard
# that it holds; only its hooks know of four bits.

# %%
int4 = tensors.make_quantised_extension("int4")  # stands in while your functions are open
encode, decode = (encode_4bit, decode_4bit) if four_verdict.ok else (int4.encode, int4.decode)


class FourBit(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        how = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        four = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **how)
        four.inner = inner.detach()
        return four

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda four: four.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["inner"], None


# %% [markdown]
# Its hooks are below. A `FourBit` needs shards of equal length, as two ranks have here. (The long form of the first hook
# would not help with others: FSDP2 expects a shorter shard to be padded to rows as wide as the parameter's, and packed
# rows are half as wide.) The second hook returns the decoded parameter, a plain tensor.


# %%
def send_4bit(self, mesh):
    return encode(self.inner), None


def receive_4bit(self, gathered, note, param_dtype, *, out=None):
    whole = decode(gathered, param_dtype)
    if out is None:
        return whole, (whole,)
    refill(out, whole)


FourBit.fsdp_pre_all_gather, FourBit.fsdp_post_all_gather = send_4bit, receive_4bit

# %% [markdown]
# Every weight of this notebook's network becomes a `FourBit`. Its rows have 255 numbers on average, and one scale each.
# Commit: what part of plain parameters' bytes do the all-gathers of a step carry? And does the network still learn: how
# many times the loss of plain parameters is its loss after 40 steps?

# %% tags=["commit"]
mine_four = commit(bytes_part=None, times_the_loss=None)
### BEGIN SOLUTION
mine_four = commit(
    bytes_part=4 / 32 + 32 / (32 * 255), times_the_loss=1
)  # four bits a number, and 32 for each row's scale
### END SOLUTION

# %% tags=["nbval-ignore-output"]
TRAIN = SHORT | {"nproc": 2, "steps": 40}
plain_on_2 = labkit.run("allgather_extensions", extension="none", **TRAIN)
four = labkit.run("allgather_extensions", extension="your_type", use={"parameter": FourBit}, **TRAIN)
part = four.value("all_gather_bytes") / plain_on_2.value("all_gather_bytes")
print(f"{part:.3f} of the bytes; you: {prediction_text(mine_four['bytes_part'], '.3f')}")
losses = {"plain": plain_on_2.losses, "four bits": four.losses}
ends = {name: loss[-10:].mean() for name, loss in losses.items()}
times_the_loss = ends["four bits"] / ends["plain"]
print(f"{times_the_loss:.2f} times the loss; you: {prediction_text(mine_four['times_the_loss'], '.2f')}")
print(f"the loss falls from {losses['four bits'].iloc[0]:.1f} to {ends['four bits']:.2f}")
print(f"no weight is off by more than {four.value('weight_error'):.3f} of the largest of its parameter")

# %% tags=["claim"]
claim("an eighth, and the scales", 1 / 8 < part < 0.14)
numbers = plain_on_2.value("all_gather_bytes") / 4  # two ranks hand over a half each, in each of two gathers
rows = (four.value("all_gather_bytes") - numbers / 2) / 4
claim("rows of 255 numbers on average", round(numbers / rows) == 255, where=DIM == 128)
claim("half a step of seven", 0 < four.value("weight_error") <= 1 / 14 + 1e-4)
claim("it learns as plain parameters do", abs(times_the_loss - 1) < 0.02 and ends["plain"] < 2, where=BATCH == 64)

# %% [markdown]
# The loss falls as it does with plain parameters, because only the copies that compute are rounded: Adam updates the float32
# shard, so that no small update is lost. Forty steps prove nothing about a long training, and with 4 bits a scale for
# each row is coarse. Formats in use give one to each block of 16 or 32 numbers.
#
# **What would it save?** An estimate by lab 0's formula: 16 GPUs gather 7 billion parameters, and the ring passes 15/16 of
# all bytes through each host's card, of 50 GB/s.

# %%
BITS = {"float32": 32, "bfloat16": 16, "float8": 8, "yours": 32 * part}
gather_ms = {name: 1e3 * 7e9 * bits / 8 * 15 / 16 / 50e9 for name, bits in BITS.items()}
print(", ".join(f"{name} {ms:.0f} ms" for name, ms in gather_ms.items()))

# %% tags=["claim"]
claim("half of float8's time", 0.5 < gather_ms["yours"] / gather_ms["float8"] < 0.53)

# %% [markdown]
# Four bits save half of float8's time, but only if the gather is exposed, and if encoding and decoding take less than that.
#
# *Takeaway: the fewer the bits, the more the sharing of scales decides the error.*
#
# ## 5. Before you use it ({minutes} minutes)
#
# | if | then |
# |---|---|
# | hooks sit on plain tensors | put them there after `to_empty` and before the first forward pass |
# | you use `CPUOffloadPolicy` on a GPU | take a parameter type: the shard's copy on the GPU has no hooks, and FSDP raises AttributeError |
# | `reshard_after_forward` is a number | leave hooks out: FSDP2 raises NotImplementedError |
# | you compile | compile each layer by itself, so that the hooks stay outside; `compile=True` does that here |
# | layers multiply in float8 | gather float8 and compute with it: nothing is decoded, and the gather adds no error of its own |
# | your kernels are not fused | measure them: what the wire saves may be lost between the messages |
#
# <details><summary>Papers, pages and code</summary>
#
# - Extending PyTorch, with `__torch_dispatch__`: https://docs.pytorch.org/docs/stable/notes/extending.html
# - torchao's float8 training: https://github.com/pytorch/ao/tree/main/torchao/float8
# - Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021: https://arxiv.org/abs/2110.02861
# - In labkit: `labkit/tensors/two_tensor.py`, then `labkit/tensors/quantisation.py`. The hooks are a few lines in each.
#
# </details>
#
# All extensions at once are checked by `labkit.check("allgather_extensions", check="wire", nproc=2)`.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("extensions_at_work")
