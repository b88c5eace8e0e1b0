"""Errors a worker raises. Standard library only; every message gives the value, the rule and the remedy."""

from __future__ import annotations


class WorkerError(Exception):
    """Root of everything a worker raises on purpose. `code` is stable and reaches the API."""

    code = "worker_error"


class SpecError(WorkerError):
    """A trial specification that no worker could run."""

    code = "invalid_spec"


class LayoutAssertionError(WorkerError):
    """The modelled Megatron version would stop here with an assertion of its own."""

    code = "layout_asserts"


class ExactnessError(WorkerError):
    """The exact probe would leave the range in which float32 addition is exact."""

    code = "exactness_lost"


class NonFiniteError(WorkerError):
    """A value that must be finite is not."""

    code = "non_finite"


class OverlapError(WorkerError):
    """A backward ended before every gradient bucket was complete."""

    code = "overlap_incomplete"


class DrillError(WorkerError):
    """Raised on purpose by a drill."""

    code = "drill_fault"


class CollectiveMismatchError(WorkerError):
    """This rank was about to enter another collective than its group: other in order or in shape."""

    code = "collective_mismatch"


class StackError(WorkerError):
    """A stack cannot be loaded, raised, or did not do what the protocol asks."""

    code = "stack_failed"


class UnknownStackError(StackError):
    """No stack of this name is registered where a rank runs."""

    code = "unknown_stack"


class CollectiveError(WorkerError):
    """A collective broke under this rank: a peer went away or never came. Never a first cause."""

    code = "collective_failed"
