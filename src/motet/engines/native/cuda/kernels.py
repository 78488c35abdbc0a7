"""The kernels of a step in Triton. `work` prepares their inputs, and `launch` launches them.

    rotate_rows     applies norms and RoPE to queries and keys; stores keys and values in the paged KV cache
    attend_tiles    attention of one tile of query rows over one span of keys: an output, or a part with its log-sum-exp
    merge_parts     merges the parts of every row into its output
    norm_rows       root mean square norm
    gate_rows       activation and gating of a gated MLP

A tile has rows x the query heads that share a key head, so a key is read once for all of them. This makes n choices of
one prompt cheap, because the trunk is read once per tile instead of once per choice. The online softmax is the method
of FlashAttention (Dao et al., 2022). Merging spans of keys is the method of FlashDecoding and cascade attention.

The kernels use only features of Triton's interpreter (`TRITON_INTERPRET=1`), so that they can be tested without a GPU.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ITEM_INTS = tl.constexpr(8)


@triton.jit
def rotate_rows(  # sizes: the memory layouts of a layer
    projected,  # [rows, heads + 2 * kv_heads, HEAD_DIM]: queries, keys, values
    cosines,  # [rows, HEAD_DIM]
    sines,
    query_norm,  # [HEAD_DIM] float32; unused if not NORMED
    key_norm,
    query,  # [rows, heads, HEAD_DIM]
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    slots,  # [rows] int32; -1 for rows that pad the batch
    non_finite,  # [rows] int32
    epsilon,
    key_limit,
    value_limit,
    num_heads,
    num_kv_heads,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program per row and query or key head. Applies the head's norm, if the model has one, and RoPE (Su et al.,
    2021). Stores a key and its value in the paged KV cache, with NaN and infinity made finite. With `LAST`, for the
    last layer, marks rows with NaN or infinity; a row that is not finite stays so in all later layers."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    first_half = d < HEAD_DIM // 2
    partner = tl.where(first_half, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
    inside = d < HEAD_DIM
    is_key = head >= num_heads
    base = projected + (row * (num_heads + 2 * num_kv_heads) + head) * HEAD_DIM
    x = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(base + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_DIM + epsilon)
        weight = tl.load(query_norm + d, mask=inside, other=0.0)
        weight = tl.where(is_key, tl.load(key_norm + d, mask=inside, other=0.0), weight)
        other_weight = tl.load(query_norm + partner, mask=inside, other=0.0)
        other_weight = tl.where(is_key, tl.load(key_norm + partner, mask=inside, other=0.0), other_weight)
        x = x * scale * weight
        other = other * scale * other_weight
    cosine = tl.load(cosines + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    x = x * cosine + tl.where(first_half, -other, other) * sine
    if is_key:
        slot = tl.load(slots + row).to(tl.int64)
        real = d < tl.where(slot >= 0, HEAD_DIM, 0)
        v = tl.load(base + num_kv_heads * HEAD_DIM + d, mask=real, other=0.0).to(tl.float32)
        if LAST:
            broken = (v != v) | (tl.abs(v) == float("inf"))
            tl.store(non_finite + row, 1, mask=tl.max(broken.to(tl.int32), axis=0) > 0)
        x = tl.where(x != x, 0.0, x)
        v = tl.where(v != v, 0.0, v)
        x = tl.minimum(tl.maximum(x, -key_limit), key_limit)
        v = tl.minimum(tl.maximum(v, -value_limit), value_limit)
        where = slot * slot_stride + (head - num_heads) * HEAD_DIM + d
        tl.store(keys + where, x.to(keys.dtype.element_ty), mask=real)
        tl.store(values + where, v.to(values.dtype.element_ty), mask=real)
    else:
        out = query + (row * num_heads + head) * HEAD_DIM + d
        tl.store(out, x.to(query.dtype.element_ty), mask=inside)


@triton.jit
def attend_tiles(  # sizes: the memory layouts of a step
    query,  # [rows, heads, HEAD_DIM]
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    output,  # FINAL: [rows, heads, HEAD_DIM]; else parts [parts, heads, HEAD_DIM] float32
    lse,  # [parts, heads] float32, base 2; unused if FINAL
    items,  # [items, ITEM_INTS] int32, see `work.Item`; items that pad the list have no rows
    tables,  # [..] int32: block ids
    positions,  # [rows] int32
    first_part,  # [rows + 1] int32: index of a row's first part
    scale,
    window,
    softcap,
    slot_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FINAL: tl.constexpr,
):
    """One program per item and key head."""
    item = items + tl.program_id(0) * ITEM_INTS
    kv_head = tl.program_id(1)
    first_row, num_rows, first_position, table = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    valid = m // HEADS_PER_KV_HEAD < num_rows
    row = tl.where(valid, first_row + m // HEADS_PER_KV_HEAD, first_row)
    head = kv_head * HEADS_PER_KV_HEAD + m % HEADS_PER_KV_HEAD
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    in_rows = (row * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + in_rows, mask=inside, other=0.0)
    # The position of a row, relative to the first key of this table.
    place = tl.load(positions + row) - first_position
    if WINDOWED:
        # Skip keys before the windows of all rows of the tile.
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
            # softcap * tanh(scores / softcap); this form of tanh does not overflow.
            shrunk = tl.exp2(tl.abs(scores / softcap) * (-2.0 * LOG2_E))
            scores = tl.where(scores < 0.0, -softcap, softcap) * (1.0 - shrunk) / (1.0 + shrunk) * LOG2_E
        visible = (n < end)[None, :] & (n[None, :] <= place[:, None])
        if WINDOWED:
            visible = visible & (n[None, :] > place[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        level = tl.where(better == float("-inf"), 0.0, better)  # no visible key yet: weights of 0 instead of NaN
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(best - level)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        best = better

    total = tl.where(total == 0.0, 1.0, total)  # a row without visible keys: output 0, log-sum-exp minus infinity
    acc = acc / total[:, None]
    if FINAL:
        tl.store(output + in_rows, acc.to(output.dtype.element_ty), mask=inside)
    else:
        place_of_part = (tl.load(first_part + row) + part).to(tl.int64) * num_heads + head
        tl.store(output + place_of_part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        tl.store(lse + place_of_part, best + tl.log2(total), mask=valid)


@triton.jit
def merge_parts(
    parts,  # [parts, heads, HEAD_DIM] float32
    lse,  # [parts, heads] float32, base 2
    first_part,  # [rows + 1] int32
    output,  # [rows, heads, HEAD_DIM]
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program per row and head. The output of a row without parts is 0."""
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
    sum_of_weights = tl.sum(total, axis=0)
    acc = acc / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    out = output + (row * num_heads + head) * HEAD_DIM + d
    tl.store(out, acc.to(output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def norm_rows(x, weight, output, width, epsilon, BLOCK: tl.constexpr):
    """One program per row of x [rows, width]; `weight` is [width] float32."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / width + epsilon) * tl.load(weight + i, mask=i < width, other=0.0)
    tl.store(output + row * width + i, v.to(output.dtype.element_ty), mask=i < width)


@triton.jit
def gate_rows(x, output, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Computes activation(gate) * up of x [rows, 2 * width], gate first. One program per row and `BLOCK` columns. The
    tanh form of GELU is a sigmoid: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    out = gate / (1.0 + tl.exp2(z * -LOG2_E)) * up
    tl.store(output + row * width + i, out.to(output.dtype.element_ty), mask=i < width)
