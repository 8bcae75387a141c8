"""The rows that the indexers of a model chose, kept on the host: what record() fills and replay()
gives back (choosing.py)."""

import operator
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from winnow.transformers.refusal import refuse

OPTION = "winnow_choices"
"""The keyword of a forward pass under which attention layers find a Recording or a Replaying. A
keyword, because checkpointing passes the same ones again when the backward pass repeats a layer."""

MOST_COLUMNS = 1 << 31
_LONGEST_OF_16_BITS = 1 << 15
# Elements of rows that are sorted together.
_PIECE = 1 << 24


def _numbers(argument: str, wanted: str, values: Any) -> List[int]:
    """Whole numbers, among which a mask of true and false is none."""
    try:
        listed = values.tolist() if isinstance(values, Tensor) else values
        listed = [v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for v in listed]
        if not any(isinstance(value, bool) for value in listed):
            return [operator.index(value) for value in listed]
    except TypeError:
        pass
    refuse(argument, wanted, repr(values))


class Choices:
    """The rows that each token attended to, in every layer with an indexer of its own.

    lengths: the tokens of each sequence, in the order of the batch. rows: for each such layer, by
    its number in the model, int16 or int32 [tokens, topk] on the CPU: for the tokens of all
    sequences one after the other the rows that a token chose, in their order, and -1 behind them.
    A row is the number of a token within its sequence, the first one 0, without regard to padding;
    in DeepSeek-V4 of a compressed row of the sequence. Given tensors are not copied if they have
    the smallest dtype that holds them: int16 for sequences of up to 32,768 tokens.

    Raises:
        ValueError: lengths below 0, or rows of another shape, dtype or device.
    """

    def __init__(self, rows: Mapping[int, Tensor], lengths: Union[Tensor, Sequence[int]]):
        self._lengths = _numbers("lengths", "a whole number for each sequence", lengths)
        if min(self._lengths, default=0) < 0:
            refuse("lengths", "numbers of tokens, 0 or more", min(self._lengths))
        short = max(self._lengths, default=0) <= _LONGEST_OF_16_BITS
        tokens = sum(self._lengths)
        self._rows: Dict[int, Tensor] = {}
        if not all(isinstance(layer, int) for layer in rows):
            refuse("rows", "the numbers of layers as keys", list(rows))
        for layer in sorted(rows):
            name, chosen = f"rows[{layer}]", rows[layer]
            if not isinstance(chosen, Tensor) or chosen.device.type != "cpu":
                got = chosen.device if isinstance(chosen, Tensor) else type(chosen).__name__
                refuse(name, "a tensor on the CPU", got)
            if chosen.dtype not in (torch.int16, torch.int32, torch.int64):
                got = str(chosen.dtype).removeprefix("torch.")
                refuse(name, "int16, int32 or int64", got)
            if chosen.dim() != 2 or chosen.shape[0] != tokens:
                wanted = f"shape [tokens, topk] with {tokens} tokens, the sum of lengths"
                refuse(name, wanted, list(chosen.shape))
            longest = max(self._lengths, default=0)
            if chosen.numel() and not -1 <= int(chosen.min()) <= int(chosen.max()) < longest:
                wanted = f"rows below {longest}, the longest sequence, and -1"
                refuse(name, wanted, f"{int(chosen.min())} to {int(chosen.max())}")
            self._rows[layer] = chosen.to(torch.int16 if short else torch.int32)

    @property
    def lengths(self) -> List[int]:
        """The tokens of each sequence."""
        return list(self._lengths)

    @property
    def rows(self) -> Dict[int, Tensor]:
        """By layer: [tokens, topk]. The tensors are those of the object, not copies."""
        return dict(self._rows)

    def __repr__(self) -> str:
        size = sum(chosen.numel() * chosen.element_size() for chosen in self._rows.values())
        return (
            f"Choices({len(self._lengths)} sequences, {sum(self._lengths)} tokens,"
            f" {len(self._rows)} layers, {size} bytes)"
        )

    def select(
        self,
        sequences: Union[Tensor, Sequence[int]],
        lengths: Union[Tensor, Sequence[int], None] = None,
    ) -> "Choices":
        """The choices of some sequences, in the order given, for example those of a minibatch;
        with lengths of their first tokens alone: what follows an end of text is left out so.

        Raises:
            ValueError: a sequence that does not exist, one that is shorter than its length, or a
                mask in the place of numbers.
        """
        wanted = "the numbers of sequences (mask.nonzero()[:, 0] has those of a mask)"
        sequences = _numbers("sequences", wanted, sequences)
        for number in sequences:
            if not 0 <= number < len(self._lengths):
                refuse("sequences", f"numbers of [0, {len(self._lengths)})", number)
        whole = [self._lengths[number] for number in sequences]
        if lengths is None:
            lengths = whole
        else:
            lengths = _numbers("lengths", "a whole number for each sequence", lengths)
        if len(lengths) != len(whole):
            refuse("lengths", f"one for each of {len(whole)} sequences", len(lengths))
        for length, most in zip(lengths, whole, strict=True):
            if not 0 <= length <= most:
                refuse("lengths", f"at most the {most} tokens of the sequence", length)
        starts = torch.tensor([0, *self._lengths]).cumsum(0)
        at = [
            torch.arange(starts[n], starts[n] + k) for n, k in zip(sequences, lengths, strict=True)
        ]
        taken = torch.cat(at) if at else torch.empty(0, dtype=torch.long)
        return Choices({layer: rows[taken] for layer, rows in self._rows.items()}, lengths)

    def check(self, strides: Mapping[int, int]) -> None:
        """That the rows are such as a model may choose. strides: the layers with an indexer, and
        how many tokens a row of each stands for.

        Raises:
            ValueError: of argument "choices": other layers, a row that its token does not see, or
                one that it names twice.
        """
        if self._rows.keys() != strides.keys():
            wanted = f"rows of the layers {sorted(strides)}, which have an indexer"
            refuse("choices", wanted, f"of the layers {sorted(self._rows)}")
        places = _places(self._lengths)
        for layer, rows in self._rows.items():
            seen = (places + 1) // strides[layer]
            unseen = (rows >= seen[:, None]).any(1)
            wrong = (unseen | _repeated(rows)).nonzero()
            if len(wrong):
                token = int(wrong[0])
                starts = torch.tensor(self._lengths).cumsum(0)
                sequence = int(torch.searchsorted(starts, token, right=True))
                where = f"token {int(places[token])} of sequence {sequence} in layer {layer}"
                if unseen[token]:
                    wanted = f"rows below {int(seen[token])}, which it sees, for {where}"
                    refuse("choices", wanted, int(rows[token].max()))
                named, times = rows[token].unique(return_counts=True)
                twice = int(named[(times > 1) & (named >= 0)][0])
                refuse("choices", f"each row once for {where}", f"{twice} twice or more")

    def save(self, path) -> None:
        """Writes a file of safetensors: the tensor "lengths", and "layer.N" for each layer."""
        from safetensors.torch import save_file

        tensors = {f"layer.{n}": rows.contiguous() for n, rows in self._rows.items()}
        save_file({"lengths": torch.tensor(self._lengths, dtype=torch.int64), **tensors}, path)

    @staticmethod
    def load(path) -> "Choices":
        """What save() has written.

        Raises:
            ValueError: the file holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except SafetensorError as error:
            refuse("path", 'a file of safetensors with "lengths" and "layer.N"', error)
        lengths = tensors.pop("lengths", None)
        numbers = {name: name.removeprefix("layer.") for name in tensors}
        if lengths is None or not all(number.isdecimal() for number in numbers.values()):
            refuse("path", 'a file with "lengths" and "layer.N"', sorted(tensors))
        return Choices({int(numbers[name]): rows for name, rows in tensors.items()}, lengths)


def _repeated(rows: Tensor) -> Tensor:
    """Of each token whether it names a row twice: bool [tokens]."""
    before, after = rows[:, :-1], rows[:, 1:]
    # Rows that ascend, then -1, as indexers here give them, need no sorting.
    ascend = ((before >= 0) & (before < after)) | (after < 0)
    others = (~ascend).any(1).nonzero()[:, 0]
    found = torch.zeros(len(rows), dtype=torch.bool)
    for piece in others.split(max(1, _PIECE // max(1, rows.shape[1]))):
        ordered = rows[piece].sort(-1).values
        found[piece] = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    return found


def _places(lengths: List[int]) -> Tensor:
    """Of all tokens within their sequences."""
    return torch.cat([torch.arange(length) for length in [0, *lengths]])


class Tokens(NamedTuple):
    """Where the tokens of a forward pass are; padding has place -1."""

    # [tokens], int64: the row of the batch times MOST_COLUMNS, and the column in which the sequence
    # begins.
    sequence: Tensor
    place: Tensor  # [tokens], within the sequence


class Recording:
    """Collects what the layers choose, call by call. Copies to the host do not wait."""

    def __init__(self):
        self._calls: Dict[int, List[Tuple[Tensor, Tensor, Tensor]]] = {}
        self._left: Optional[Tuple[Any, Tensor]] = None

    def leave(self, cache: Any) -> None:
        """Behind a forward pass, with its cache, of which the next one has to find the rows."""
        keys = _keys(cache)
        self._left = None if keys is None else (cache, keys)

    def enter(self, cache: Any) -> None:
        """Before a forward pass; refuses sequences that have changed places in the batch."""
        if self._left is None or self._left[0] is not cache:
            return
        before, now = self._left[1], _keys(cache)
        if now is None or now is before:
            return
        count = min(before.shape[2], now.shape[2])  # a cache may be cropped
        if not torch.equal(before[:, :, :count], now[:, :, :count]):
            wanted = "sequences that keep their row of the batch, while choices are recorded"
            refuse("model", wanted, "a cache whose rows were moved, as beam search does it")

    def add(self, layer: int, rows: Tensor, tokens: Tokens) -> None:
        """rows: [tokens, topk], numbered within the sequence."""
        if torch.compiler.is_compiling():
            refuse("model", "one that is not compiled, while its choices are recorded", "compiled")
        copies = tuple(t.to("cpu", non_blocking=True) for t in (rows.int(), *tokens))
        self._calls.setdefault(layer, []).append(copies)

    def choices(self) -> Choices:
        """What has been recorded; of a token that came more than once, the last time."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if not self._calls:
            refuse("model", 'one that has run on "winnow" and has chosen rows', "no choices")
        found = {layer: _in_order(calls) for layer, calls in self._calls.items()}
        (first, lengths), *others = ((layer, of[1]) for layer, of in found.items())
        for layer, of_layer in others:
            if of_layer != lengths:
                wanted = f"the tokens of layer {first} in every layer, {lengths}"
                refuse("model", wanted, f"{of_layer} in layer {layer}")
        return Choices({layer: rows for layer, (rows, _) in found.items()}, lengths)


def _keys(cache: Any) -> Optional[Tensor]:
    """[batch, heads, rows, columns] of the first layer that has any."""
    kept = (getattr(layer, "keys", None) for layer in getattr(cache, "layers", ()))
    return next((keys for keys in kept if keys is not None and keys.dim() == 4), None)


def _in_order(calls: List[Tuple[Tensor, Tensor, Tensor]]) -> Tuple[Tensor, List[int]]:
    """The rows of a layer in the order of sequences and places, and the sequences' lengths."""
    width = max(rows.shape[1] for rows, _, _ in calls)
    rows = torch.cat([torch.nn.functional.pad(r, (0, width - r.shape[1]), value=-1)
                      for r, _, _ in calls])  # fmt: skip
    sequence, place = (torch.cat([call[n].long() for call in calls]) for n in (1, 2))
    real = (place >= 0).nonzero()[:, 0]
    _, number = sequence[real].unique(return_inverse=True)
    keys, order = (number * MOST_COLUMNS + place[real]).sort(stable=True)
    last = torch.ones_like(keys, dtype=torch.bool)  # of equal ones
    last[:-1] = keys[1:] != keys[:-1]
    keys, order = keys[last], order[last]
    lengths = (keys // MOST_COLUMNS).bincount()
    if not torch.equal(keys % MOST_COLUMNS, _places(lengths.tolist())):
        refuse("model", "forward passes over all tokens of each sequence", "tokens left out")
    return rows[real[order]], lengths.tolist()


class Replaying:
    """Choices on their way into one forward pass."""

    def __init__(self, choices: Choices):
        self._choices = choices
        self._at: Dict[torch.device, Tensor] = {}

    def rows(self, layer: int, tokens: Tokens) -> Tensor:
        """int32 [tokens, topk], numbered within the sequence; -1 for padding."""
        device = tokens.place.device
        if device not in self._at:  # the same for all layers of a forward pass
            self._at[device] = self._find(tokens)
        at = self._at[device]
        rows = self._choices.rows[layer].to(device, non_blocking=True).int()
        if not len(rows):
            return rows.new_full((len(at), rows.shape[1]), -1)
        return torch.where(at[:, None] < 0, -1, rows[at.clamp(min=0)])

    def _find(self, tokens: Tokens) -> Tensor:
        """Of each token its number among those of the choices, -1 of padding."""
        place, sequence = tokens.place.cpu().long(), tokens.sequence.cpu().long()
        real = place >= 0
        _, number, counts = sequence[real].unique(return_inverse=True, return_counts=True)
        lengths = [length for length in self._choices.lengths if length > 0]
        if counts.tolist() != lengths:
            refuse("choices", f"those of sequences of {counts.tolist()} tokens", lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        found = torch.full_like(place, -1)
        found[real] = starts[number] + place[real]
        return found.to(tokens.place.device)
