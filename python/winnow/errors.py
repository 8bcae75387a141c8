"""The exceptions of the library."""

from typing import Tuple


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

    @property
    def wanted(self) -> str:
        """What was wanted of the argument, e.g. "at most max_tokens = 4096 tokens", as the text
        says; empty where it does not."""
        return self._split()[0]

    @property
    def got(self) -> str:
        """What was given in its place, e.g. "5000"."""
        return self._split()[1]

    def _split(self) -> Tuple[str, str]:
        _, want, rest = str(self).partition(": want ")
        wanted, got, given = rest.partition("; did you mean ")[0].partition(", got ")
        return (wanted, given) if want and got else ("", "")


class InvalidArgument(Error, ValueError):
    """The caller passed something that the operation's contract excludes."""

    code = "invalid_argument"
