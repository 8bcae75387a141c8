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
    wanted: str = ""
    """What was wanted of the argument, e.g. "at most max_tokens = 4096 tokens"; may be empty."""
    got: str = ""
    """What was given in its place, e.g. "5000"."""
    code: str = ""
    """"invalid_argument", "unsupported", "resource", "timeout" or "internal"."""
    reason: str = ""
    """What happened between ranks: "arguments_differ", "call_order", "two_callers", "absent",
    "peer_gone" or "interrupted"; empty where the code says it all."""
    differing: str = ""
    """What the ranks gave differently, e.g. "expert_alignment" (arguments_differ)."""

    @property
    def message(self) -> str:
        """The text without the operation."""
        return str(self).removeprefix(f"{self.operation}: ")


class InvalidArgument(Error, ValueError):
    """The caller passed something that the operation's contract excludes."""

    code = "invalid_argument"
