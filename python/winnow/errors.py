"""The exceptions of the library."""


class Error(RuntimeError):
    """An operation refused: nothing was written, and the next call works.

    The text reads "<operation>: <argument>: want <wanted>, got <got>".
    """

    operation: str = ""
    """The operation that refused, e.g. "sparse_mla::forward"."""
    argument: str = ""
    """The argument at fault; empty where no single one is."""
    code: str = ""
    """"invalid_argument", "unsupported", "resource", "timeout" or "internal"."""


class InvalidArgument(Error, ValueError):
    """The caller passed something that the operation's contract excludes."""
