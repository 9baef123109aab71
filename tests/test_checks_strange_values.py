"""Checks that judge in the notebook's own process: whatever an answer gives, there is a verdict, and no traceback."""

from math import nan

import numpy as np
import pytest
import torch
from answers.two_dim_at_work import COUNTED

from labkit_course.checks import ddp, ddp_at_work, extensions_at_work, two_dim, two_dim_at_work

CHECKS = {
    extensions_at_work: ["new_two", "dispatch", "pre_all_gather", "halves"],
    ddp: ["bucket_plan", "arrivals", "diagnose"],
    ddp_at_work: ["early_uses", "smallest_bucket"],
    two_dim: ["parts", "message_share"],
    two_dim_at_work: ["collectives"],
}


class Hostile(list):
    """A list that cannot be compared, measured, gone through or shown."""

    __hash__ = None

    def refuse(self, *args):
        raise OSError("no")

    __eq__ = __len__ = __iter__ = __getitem__ = __repr__ = __format__ = refuse


class HostileNumber(float):
    """A number that cannot be compared, calculated with or shown."""

    __hash__ = None

    def refuse(self, *args):
        raise ValueError("no")

    __eq__ = __lt__ = __gt__ = __abs__ = __float__ = __int__ = __sub__ = __repr__ = __format__ = refuse


class HostileTensor(torch.Tensor):
    """A tensor with which torch can do nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise IndexError("no")


STRANGE = {
    "an array": np.zeros((2, 2)),
    "a hostile list": Hostile([1]),
    "a hostile number": HostileNumber(1),
    "a hostile tensor": torch.zeros(3).as_subclass(HostileTensor),
    "a list of hostile tensors": [torch.zeros(3, 5).as_subclass(HostileTensor)] * 2,
    "a pair of a hostile list": (Hostile([torch.zeros(3)]), None),
    "a tensor": torch.zeros(3),
    "lists": [[[0]]],
    "hostile keys": {"tp/all_reduce": Hostile([1])},
    "no number": nan,
    "a large number": 10**5000,
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize(("lab", "check"), [(lab, check) for lab, checks in CHECKS.items() for check in checks])
def test_whatever_an_answer_gives_there_is_a_verdict(lab, check, value):
    def answer(*args, **kwargs):
        return STRANGE[value]

    result = [COUNTED] if check == "collectives" else []
    assert getattr(lab, check)(answer, *result).state == "wrong"
