"""The kernels of a step, in Triton's language. What they are handed is laid out by `work` and launched by `launch`.

    store_rows      a step's keys and values into the paged memory, made finite, and which rows were not
    attend_tiles    one tile of query rows against one span of keys: an output, or a part of one with its log-sum-exp
    merge_parts     the parts of every row into its output

A tile packs rows x the query heads that share a key head, so a key is read once for all of them. That is what makes n
choices of one prompt cheap: the trunk is read once a tile, not once a choice. The online softmax is that of
FlashAttention (Dao et al., 2022); spans of keys that are merged afterwards are FlashDecoding's and cascade attention's.

Written for what the interpreter knows too (`TRITON_INTERPRET=1`), which is how they are tested without a GPU.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ITEM_INTS = tl.constexpr(8)


@triton.jit
def store_rows(  # sizes: the memory layouts of five tensors
    key,  # [rows, kv_heads, HEAD_DIM], any strides but the last
    value,
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    slots,  # [rows] int32; -1: a row that pads the batch
    sick,  # [rows] int32
    key_limit,
    value_limit,
    key_row,
    key_head,
    value_row,
    value_head,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program a row and key head. `LAST`: rows that reach the last layer as NaN or infinity are marked; once a row
    is, it stays so."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = d < tl.where(slot >= 0, HEAD_DIM, 0)
    k = tl.load(key + row * key_row + head * key_head + d, mask=real, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + d, mask=real, other=0.0).to(tl.float32)
    if LAST:
        broken = (v != v) | (tl.abs(v) == float("inf"))
        tl.store(sick + row, 1, mask=tl.max(broken.to(tl.int32), axis=0) > 0)
    k = tl.where(k != k, 0.0, k)
    v = tl.where(v != v, 0.0, v)
    k = tl.minimum(tl.maximum(k, -key_limit), key_limit)
    v = tl.minimum(tl.maximum(v, -value_limit), value_limit)
    where = slot * slot_stride + head * HEAD_DIM + d
    tl.store(keys + where, k.to(keys.dtype.element_ty), mask=real)
    tl.store(values + where, v.to(values.dtype.element_ty), mask=real)


@triton.jit
def attend_tiles(  # sizes: the memory layouts of a step
    query,  # [rows, heads, HEAD_DIM], any strides but the last
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    output,  # FINAL: [rows, heads, HEAD_DIM]; else parts [parts, heads, HEAD_DIM] float32
    lse,  # [parts, heads] float32, base 2; unused if FINAL
    items,  # [items, ITEM_INTS] int32, see `work.Item`; one that pads the list has no rows
    tables,  # [..] int32: block ids
    positions,  # [rows] int32
    first_part,  # [rows + 1] int32: where a row's parts begin
    scale,
    window,
    softcap,
    query_row,
    query_head,
    slot_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    SIBLINGS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FINAL: tl.constexpr,
):
    """One program an item and key head."""
    item = items + tl.program_id(0) * ITEM_INTS
    kv_head = tl.program_id(1)
    first_row, num_rows, shift, table = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    valid = m // SIBLINGS < num_rows
    row = tl.where(valid, first_row + m // SIBLINGS, first_row)
    head = kv_head * SIBLINGS + m % SIBLINGS
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(query + row[:, None] * query_row + head[:, None] * query_head + d[None, :], mask=inside, other=0.0)
    # Where a row stands, counted as the keys of this table are.
    place = tl.load(positions + row) - shift
    if WINDOWED:
        # Keys that no row of the tile sees any more are not read.
        outside = tl.min(place, axis=0) - window + 1 - begin
        begin += tl.maximum(outside, 0) // BLOCK_N * BLOCK_N

    factor = scale if CAPPED else scale * LOG2_E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        block = tl.load(tables + table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
        where = (block * BLOCK_SIZE + n % BLOCK_SIZE) * slot_stride + kv_head * HEAD_DIM
        there = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if CAPPED:
            # softcap * tanh(scores / softcap); this form of tanh overflows nowhere.
            shrunk = tl.exp2(tl.abs(scores / softcap) * (-2.0 * LOG2_E))
            scores = tl.where(scores < 0.0, -softcap, softcap) * (1.0 - shrunk) / (1.0 + shrunk) * LOG2_E
        seen = (n < end)[None, :] & (n[None, :] <= place[:, None])
        if WINDOWED:
            seen = seen & (n[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        level = tl.where(better == float("-inf"), 0.0, better)  # no key seen yet: weights of 0, not NaN
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(best - level)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        best = better

    total = tl.where(total == 0.0, 1.0, total)  # a row that saw nothing: output 0, log-sum-exp minus infinity
    acc = acc / total[:, None]
    if FINAL:
        out = output + (row[:, None] * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(output.dtype.element_ty), mask=inside)
    else:
        place_of_part = (tl.load(first_part + row) + part).to(tl.int64) * num_heads + head
        tl.store(output + place_of_part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        tl.store(lse + place_of_part, best + tl.log2(total), mask=valid)


@triton.jit
def merge_parts(  # sizes: the memory layouts of two tensors
    parts,  # [parts, heads, HEAD_DIM] float32
    lse,  # [parts, heads] float32, base 2
    first_part,  # [rows + 1] int32
    output,  # [rows, heads, HEAD_DIM]
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program a row and head. A row without parts becomes 0."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(first_part + row), tl.load(first_part + row + 1)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_P], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = p.to(tl.int64) * num_heads + head
        best = tl.maximum(best, tl.load(lse + at, mask=p < last, other=float("-inf")))
    level = tl.max(best, axis=0)
    level = tl.where(level == float("-inf"), 0.0, level)
    total = tl.zeros([BLOCK_P], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = p.to(tl.int64) * num_heads + head
        weight = tl.exp2(tl.load(lse + at, mask=p < last, other=float("-inf")) - level)
        there = (p < last)[:, None] & (d < HEAD_DIM)[None, :]
        part = tl.load(parts + at[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)
        total += weight
        acc += tl.sum(part * weight[:, None], axis=0)
    whole = tl.sum(total, axis=0)
    acc = acc / tl.where(whole == 0.0, 1.0, whole)
    out = output + (row * num_heads + head) * HEAD_DIM + d
    tl.store(out, acc.to(output.dtype.element_ty), mask=d < HEAD_DIM)
