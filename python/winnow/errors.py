"""The exceptions of the library."""


class Error(RuntimeError):
    """An operation refused, or failed.

    A refusal reads "<operation>: <argument>: want <wanted>, got <got>"; nothing was written, and
    the next call works. Where the code is "timeout" or "internal", outputs are unspecified, and a
    layer of expert_parallel is broken: a new one can be made.
    """

    operation: str = ""
    """The operation that refused, e.g. "sparse_mla::forward"."""
    argument: str = ""
    """The argument at fault; empty where no single one is."""
    code: str = ""
    """"invalid_argument", "unsupported", "resource", "timeout" or "internal"."""


class InvalidArgument(Error, ValueError):
    """The caller passed something that the operation's contract excludes."""

    code = "invalid_argument"
