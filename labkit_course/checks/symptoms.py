"""Lab 7's card: what one sees when a run breaks, where to look first, and what it often is.

The columns on hardware and NCCL were not measured for this course, but taken from the documentation
of PyTorch and NCCL; what stands in the others was provoked by its tests. A second table names what
does the work of each of the lab's tools outside the course.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

HEAD = ("symptom", "look first at", "likely cause", "or the hardware", "with NCCL you see")
ROWS = (
    (
        "ranks show errors, most of a closed connection",
        "the earliest error that is no echo, and no abort (-6)",
        "that rank's data or code",
        "an Xid in the system's log: its GPU failed",
        "echoes speak of a remote process that exited, or there are none, and the others wait",
    ),
    (
        "a rank is gone without a word: status -9 or 137",
        "the exit status, then the system's log",
        "out of host memory, or the scheduler",
        "the host went down",
        "the others wait until the watchdog's timeout",
    ),
    (
        "a rank is gone with status -11",
        "the stack that PYTHONFAULTHANDLER=1 leaves",
        "native code, often a wrong index or a library",
        "faulty host memory",
        "on a GPU a wrong index is a CUDA error, shown at a later call",
    ),
    (
        "nothing happens, and one rank's stack is elsewhere",
        "the stacks of all ranks, then their logs",
        "fewer batches, or a collective under a condition that is not true on all",
        "a GPU that no longer answers",
        "stacks at the next call that needs a result; later status -6 and the watchdog's name",
    ),
    (
        "nothing happens, and two ranks stand in send or receive",
        "who of the two sends first",
        "both send first, or both receive first",
        "–",
        "GPUs that stand in a send: batch_isend_irecv avoids the question",
    ),
    (
        "a timeout, and all ranks are in collectives",
        "DETAIL, or a record of calls with labels of your own",
        "ranks took different branches, looped over a set, or one left out a call",
        "a cable or a switch",
        "the flight recorder's files, one a rank",
    ),
    (
        "some ranks time out, others go on, or one aborts with status -6",
        "shapes and dtypes in the record: the aborted rank may be innocent",
        "another shape on one rank, such as a shorter last batch",
        "–",
        "no check of sizes: a hang, or wrong numbers",
    ),
    (
        "slow, and all steps are equally long on all ranks",
        "a time line: who waits least?",
        "a straggler: its data, its loader",
        "a hot GPU that slows down: nvidia-smi -q -d PERFORMANCE",
        "long all-reduces in the profile of every rank but one",
    ),
    (
        "slow, and no rank computes longer",
        "each link by itself",
        "two jobs that share it",
        "a cable, a network card, a PCIe slot of half its width",
        "nccl-tests between two hosts, pair by pair",
    ),
    (
        "out of memory on one rank",
        "which rank, and how large its batch is",
        "the longest batch",
        "a dead process that still holds memory: nvidia-smi",
        "torch.OutOfMemoryError, with the sizes; the others wait",
    ),
    (
        "the loss is NaN on all ranks",
        "each rank's own loss, before it is reduced",
        "a bad sample, or a rate that is too high",
        "a GPU that computes wrongly: repeat the step on another one",
        "the same",
    ),
    (
        "the loss falls, and the weights differ between ranks",
        "weights at the start, then a record with labels of your own",
        "another seed, a missed reduction, tensors in another order",
        "a GPU that computes wrongly",
        "the same",
    ),
    (
        "weights agree, and the gradient has a factor",
        "one gradient against one device's",
        "a sum that should be a mean",
        "–",
        "the same",
    ),
    (
        "weights agree, and the gradient is another one",
        "the samples of each rank",
        "all ranks read the same samples",
        "–",
        "the same",
    ),
)
TOOLS_HEAD = ("tool of this lab", "outside this course")
TOOLS_ELSEWHERE = (
    ("ends", "torchrun's report, from Root Cause on; the error files of @record"),
    ("logs", "torchrun --log-dir logs --redirects 3 ...: a file for each rank"),
    ("stacks", "py-spy dump --pid PID, for each rank on its host"),
    (
        "record",
        "the flight recorder: its last TORCH_FR_BUFFER_SIZE calls (in an older torch "
        "TORCH_NCCL_TRACE_BUFFER_SIZE); TORCH_DISTRIBUTED_DEBUG=DETAIL",
    ),
    ("times", "torch.profiler on every rank, not on rank 0 alone"),
    ("links", "nccl-tests' sendrecv_perf; NCCL_DEBUG=INFO logs the network that NCCL takes"),
    ("losses", "a line of your script, before the loss is reduced"),
    ("weights, gradients", "exercises 5 and 3 of this lab: a hash, one gradient on one device"),
    ("samples", "print(list(sampler)[:8]) on every rank"),
)
SOURCE = (
    "The symptoms were provoked by this course's own tests. The last two columns and the second "
    "table come from documentation."
)
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>When it breaks</title>
<style>@page {{ size: A4 landscape; margin: 8mm }} body {{ font: 9.5px/1.25 sans-serif }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #888; padding: 3px;
text-align: left; vertical-align: top }}</style>
<h1>When it breaks</h1>
{table}
</html>
"""


@dataclass(frozen=True)
class Card:
    """Both tables, as a notebook shows them and as a page to print."""

    rows: tuple[tuple[str, ...], ...] = ROWS
    tools: tuple[tuple[str, ...], ...] = TOOLS_ELSEWHERE

    def __repr__(self) -> str:
        tables = ((HEAD, *self.rows), (TOOLS_HEAD, *self.tools))
        return "\n\n".join([*("\n".join(map(" | ".join, table)) for table in tables), SOURCE])

    def _repr_html_(self) -> str:
        return _table(HEAD, self.rows) + _table(TOOLS_HEAD, self.tools) + f"<p>{escape(SOURCE)}</p>"

    def write(self, path: str | Path) -> None:
        """Write the card as a page of HTML for A4 on its side; a browser prints it."""
        Path(path).write_text(PAGE.format(table=self._repr_html_()), encoding="utf-8")


def _table(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    shown = "".join([_row(head, "th"), *map(_row, rows)])
    return f'<table style="text-align: left">{shown}</table>'


def _row(cells: tuple[str, ...], kind: str = "td") -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


card = Card()
