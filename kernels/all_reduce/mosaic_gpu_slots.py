"""What one thread of `all_reduce` does with the memory of all ranks: addresses, stores to peers, waiting loads.

Emits code of single threads, since only inline PTX says how a load that polls and a store to a peer are ordered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxlib.mlir.dialects import memref as memref_dialect

from jaxinfer.kernels.all_reduce.channel import EMPTY, NUM_COUNTERS, NUM_PARITIES, Channel

THREADS = NUM_COUNTERS
WORD = 4  # bytes
POLLED_WORDS = 64
"""Words a thread keeps in registers while it waits for several ranks at once."""
MAX_POLLS = 1 << 27
"""After which a rank gives up, about a minute: one that never comes ends the process with an error, not in a hang."""


class Slots:
    """A thread's share of a row in the memory of all ranks. Code is emitted when it is made and by its methods."""

    def __init__(self, table: ir.Value, row: ir.Value, channel: Channel) -> None:
        """
        Args:
          table: reference to `Channel.addresses` of this rank.
          row: int32.
        """
        ranks = channel.ranks
        entries = [memref_dialect.load(table, [mgpu_utils.c(i, ir.IndexType.get())]) for i in range(2 * ranks + 1)]
        self._rank = entries[-1]
        self._memories = [_address(low, high) for low, high in zip(entries[:-1:2], entries[1:-1:2], strict=True)]
        self._channel = channel
        self._thread = arith.remui(mgpu_utils.thread_idx(), _i32(THREADS))
        row = _wide(row)
        own = self._memories[0]
        number = _sum(_times(row, THREADS), _wide(self._thread))
        self._counter = _sum(own, _i64(channel.rows * channel.row_bytes), _times(number, WORD))
        self._count = _load(self._counter, 1)[0]
        parity = arith.andi(self._count, _i32(NUM_PARITIES - 1))
        parity_bytes = _times(_wide(parity), ranks * channel.slot_bytes)
        self._offset = _sum(_times(row, channel.row_bytes), parity_bytes)
        self._own = _sum(own, self._offset)

    def send(self, mine: fa.FragmentedArray) -> None:
        """Stores this rank's row into its slot at all others."""
        words = [[_never_empty(word, mine.mlir_dtype) for word in _words(register)] for register in mine.registers.flat]
        slot = _times(_wide(self._rank), self._channel.slot_bytes)
        for memory in self._memories[1:]:
            base = self._first_word(_sum(memory, self._offset, slot), len(words[0]))
            for i, values in enumerate(words):
                _store(base, values, offset=i * THREADS * WORD * len(values))

    def receive_sum(self, mine: fa.FragmentedArray) -> fa.FragmentedArray:
        """Waits for the rows of all ranks, adds them up in float32 from rank 0 on, and leaves their slots empty."""
        words = mine.registers.size * len(_words(mine.registers.flat[0]))
        at_once = max(1, POLLED_WORDS // words)
        total = None
        for first in range(0, self._channel.ranks, at_once):
            for part in self._receive(range(first, min(first + at_once, self._channel.ranks)), mine):
                wide = part.astype(ir.F32Type.get())
                total = wide if total is None else total + wide
        _store(self._counter, [arith.addi(self._count, _i32(1))])
        assert total is not None
        return total

    def _receive(self, ranks: range, mine: fa.FragmentedArray) -> list[fa.FragmentedArray]:
        """The rows of some ranks, this rank's own where it is one of them."""
        count, width = mine.registers.size, len(_words(mine.registers.flat[0]))
        is_other = [arith.cmpi(arith.CmpIPredicate.ne, self._rank, _i32(rank)) for rank in ranks]
        base = self._first_word(self._own, width)
        places = [
            (rank * self._channel.slot_bytes + i * THREADS * WORD * width, other)
            for rank, other in zip(ranks, is_other, strict=True)
            for i in range(count)
        ]
        received = [_register(words, mine.registers.flat[0].type) for words in _poll(base, places, width)]
        for offset, other in places:
            _store(base, [_i32(int(EMPTY))] * width, offset=offset, predicate=other)
        parts = []
        for i, other in enumerate(is_other):
            theirs = received[i * count : (i + 1) * count]
            registers = np.empty(count, object)
            registers[:] = [arith.select(other, a, b) for a, b in zip(theirs, mine.registers.flat, strict=True)]
            shaped = registers.reshape(mine.registers.shape)
            parts.append(fa.FragmentedArray(_registers=shaped, _layout=mine.layout, _is_signed=None))
        return parts

    def _first_word(self, slot: ir.Value, width: int) -> ir.Value:
        """Of this thread in a slot: neighbouring threads have neighbouring words."""
        return _sum(slot, _times(_wide(self._thread), WORD * width))


def _address(low: ir.Value, high: ir.Value) -> ir.Value:
    return arith.ori(_wide(low), arith.shli(_wide(high), _i64(32)))


def _never_empty(word: ir.Value, element: ir.Type) -> ir.Value:
    """Two floats + (+0): -0 becomes +0, all else stays. In PTX, since a compiler may think that x + 0 is x."""
    kind = "bf16x2" if isinstance(element, ir.BF16Type) else "f16x2"
    added = mgpu_utils.inline_ptx(f"add.rn.{kind} $0, $1, $2;", word, _i32(0), result_types=_type32())
    assert isinstance(added, ir.Value)
    return added


def _poll(base: ir.Value, places: Sequence[tuple[int, ir.Value]], width: int) -> list[list[ir.Value]]:
    """Loads all words again and again until none is EMPTY, and traps after `MAX_POLLS`.

    Args:
      places: the offset of `width` words, and whether another rank writes there; 0 is returned where none does.
    """
    types = [_type32()] * (1 + width * len(places))
    loop = scf.WhileOp(types, [_i32(0)])
    before = loop.before.blocks.append(_type32())
    with ir.InsertionPoint(before):
        words = [word for offset, other in places for word in _load(base, width, offset=offset, predicate=other)]
        is_empty = [arith.cmpi(arith.CmpIPredicate.eq, word, _i32(int(EMPTY))) for word in words]
        while len(is_empty) > 1:
            pairs = zip(is_empty[::2], is_empty[1::2], strict=False)
            is_empty = [*(arith.ori(a, b) for a, b in pairs), *is_empty[len(is_empty) & ~1 :]]
        (polls,) = before.arguments
        in_time = arith.cmpi(arith.CmpIPredicate.ult, polls, _i32(MAX_POLLS))
        scf.condition(arith.andi(is_empty[0], in_time), [polls, *words])
    after = loop.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        scf.yield_([arith.addi(after.arguments[0], _i32(1))])
    polls, *words = loop.results
    is_late = arith.cmpi(arith.CmpIPredicate.uge, polls, _i32(MAX_POLLS))
    mgpu_utils.inline_ptx("trap;", predicate=is_late, has_side_effects=True)
    return [words[i : i + width] for i in range(0, len(words), width)]


def _load(address: ir.Value, width: int, *, offset: int = 0, predicate: ir.Value | None = None) -> list[ir.Value]:
    """Words at an address, as no cache of this multiprocessor holds them; 0 where the predicate is false."""
    names = [f"${i}" for i in range(width)]
    load = f"ld.relaxed.sys.global{_vector(width)}.b32 {_list(names)}, [${width} + {offset}];"
    constraints = ["=&r"] * width + ["l"]
    operands = [address]
    if predicate is not None:
        zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
        load = f"{{ {zeros} @${width + 1} {load} }}"
        constraints.append("b")
        operands.append(predicate)
    types = [_type32()] * width
    result_type = types[0] if width == 1 else llvm.StructType.get_literal(types)
    result = llvm.inline_asm(result_type, operands, load, ",".join(constraints), has_side_effects=True)
    assert isinstance(result, ir.Value)
    return [result] if width == 1 else [llvm.extractvalue(_type32(), result, [i]) for i in range(width)]


def _store(address: ir.Value, words: Sequence[ir.Value], *, offset: int = 0, predicate: ir.Value | None = None) -> None:
    width = len(words)
    values = _list([f"${i + 1}" for i in range(width)])
    store = f"st.relaxed.sys.global{_vector(width)}.b32 [$0 + {offset}], {values};"
    mgpu_utils.inline_ptx(store, address, *words, predicate=predicate, has_side_effects=True)


def _vector(width: int) -> str:
    return {1: "", 2: ".v2", 4: ".v4"}[width]


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def _words(register: ir.Value) -> list[ir.Value]:
    """A register of 16-bit floats as words of 32 bits."""
    (size,) = ir.VectorType(register.type).shape
    words = vector.bitcast(ir.VectorType.get((size // 2,), _type32()), register)
    return [
        vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for i in range(size // 2)
    ]


def _register(words: Sequence[ir.Value], register_type: ir.Type) -> ir.Value:
    packed = vector.from_elements(ir.VectorType.get((len(words),), _type32()), list(words))
    return vector.bitcast(register_type, packed)


def _type32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _type64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _i32(value: int) -> ir.Value:
    return mgpu_utils.c(value - (1 << 32) if value >= 1 << 31 else value, _type32())


def _i64(value: int) -> ir.Value:
    return mgpu_utils.c(value, _type64())


def _wide(value: ir.Value) -> ir.Value:
    """Unsigned 32 -> 64 bits: no offset below is cut at 4 GiB."""
    return arith.extui(_type64(), value)


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, _i64(factor))


def _sum(*values: ir.Value) -> ir.Value:
    total, *rest = values
    for value in rest:
        total = arith.addi(total, value)
    return total
