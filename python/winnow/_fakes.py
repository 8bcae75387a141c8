"""Calls of operators with tensors that have no memory: torch's fake ones and those on "meta"."""

import torch
from torch import SymFloat, SymInt, Tensor

from winnow._refusal import refuse
from winnow._torch_private import value_now
from winnow._winnow import _dry_run
from winnow.errors import Error, InvalidArgument


class _OfRunTime(Exception):
    """A size that is not known before run time."""


def _number_now(number):
    """The value of a symbolic number in the call that is traced. It leaves no guard."""
    if not isinstance(number, (SymInt, SymFloat)):
        return number
    value = value_now(number)
    if value is None:
        raise _OfRunTime
    return value


def _now(value):
    """A value without symbolic numbers."""
    if not isinstance(value, Tensor):
        return _number_now(value)
    if value.layout != torch.strided:
        return value
    shape, strides = value.shape, value.stride()
    if not any(isinstance(size, SymInt) for size in (*shape, *strides)):
        return value
    sizes = [tuple(map(_number_now, numbers)) for numbers in (shape, strides)]
    return torch.empty_strided(
        *sizes, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
    )


def _check(kernel, values):
    """Has the kernel refuse what it would refuse at run time, but for what tensors hold and where
    they lie."""
    try:
        _dry_run(kernel, *map(_now, values))
    except _OfRunTime:
        pass
    except InvalidArgument:
        raise
    except Error:  # no backend takes it here, but maybe where it will run
        pass


def checked(name, parameters, kernel, fake):
    """Wraps `fake`, which torch calls as soon as one tensor is on "meta" or a fake one. Arguments
    are checked as at run time, with `kernel` unless that is None. If one tensor is on "meta" and
    another is not, this is an error: the results would be in real memory, and uninitialised."""

    def call(*values):
        meta = [isinstance(v, Tensor) and v.device.type == "meta" for v in values]
        if any(meta):
            for value in values:
                if isinstance(value, Tensor) and value.device.type != "meta":
                    argument = parameters[meta.index(True)].name
                    refuse(name, argument, f"a tensor on {value.device}", "one on meta")
        if kernel is not None:
            _check(kernel, values)
        return fake(*values)

    return call
