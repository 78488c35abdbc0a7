#include "trunks.h"

#include <algorithm>
#include <cstring>

namespace motet {
namespace {

constexpr std::size_t kMaxStates = (64 << 20) / sizeof(float);  // maximum size of the states of all trunks in a step
constexpr int kMinCommonKeys = 16;  // keys are packed sixteen at a time, so sharing fewer keys saves nothing

int rows_of(const Span& span) { return span.row_end - span.row_begin; }
int tiles_of(int rows, int height) { return (rows + height - 1) / height; }
int blocks_of(int keys, int block_size) { return (keys + block_size - 1) / block_size; }

// Returns the number of leading keys that two slices have in common.
int common_keys(const std::int32_t* a, const std::int32_t* b, int num_keys, int block_size) {
  int block = 0;
  while (block * block_size < num_keys && a[block] == b[block]) ++block;
  return std::min(num_keys, block * block_size);
}

}  // namespace

void Trunks::prepare(const Model& model, const Batch& batch, int num_threads) {
  const int height = max_rows_of(model);
  parts_.clear();
  readings_.clear();
  slice(model, batch, height);
  assign_states(model, batch, num_threads);
  read_together(model, batch, num_threads);
  for (int i = 0; i < batch.num_spans; ++i)
    if (states_[i] != kNotShared && !shares_[i]) read_alone(batch.spans[i], states_[i], height);
}

// Sorts the slices of each stretch by their blocks, so that slices with common leading blocks are adjacent, and
// determines which spans share keys. A span that fills a reading by itself would gain nothing from sharing.
void Trunks::slice(const Model& model, const Batch& batch, int height) {
  const int size = model.block_size;
  slices_.clear();
  stretch_begins_.assign(1, 0);
  shares_.assign(batch.num_spans, 0);
  int longest = 0, count = 0;
  const auto can_share = [&](const Span& span) { return span.trunk_keys > 0 && rows_of(span) < height; };
  for (int i = 0; i < batch.num_spans; ++i)
    if (can_share(batch.spans[i])) longest = std::max(longest, batch.spans[i].trunk_keys), ++count;
  if (count < 2) return;
  for (int begin = 0; begin < longest; begin += kStretch) {
    for (int i = 0; i < batch.num_spans; ++i)
      if (const Span& span = batch.spans[i]; can_share(span) && span.trunk_keys > begin)
        slices_.push_back({batch.tables + span.trunk_table + begin / size, std::min(span.trunk_keys - begin, kStretch),
                           i});
    std::sort(slices_.begin() + stretch_begins_.back(), slices_.end(), [&](const Slice& a, const Slice& b) {
      const int blocks = blocks_of(std::min(a.keys, b.keys), size);
      if (const int order = std::memcmp(a.blocks, b.blocks, blocks * sizeof(std::int32_t))) return order < 0;
      return a.keys != b.keys ? a.keys < b.keys : a.span < b.span;
    });
    stretch_begins_.push_back(int(slices_.size()));
  }
  common_.assign(slices_.size(), 0);
  for (std::size_t stretch = 0; stretch + 1 < stretch_begins_.size(); ++stretch)
    for (int i = stretch_begins_[stretch] + 1; i < stretch_begins_[stretch + 1]; ++i) {
      const Slice &before = slices_[i - 1], &here = slices_[i];
      common_[i] = common_keys(before.blocks, here.blocks, std::min(before.keys, here.keys), size);
      if (common_[i] >= kMinCommonKeys) shares_[before.span] = shares_[here.span] = 1;
    }
}

// Decides which trunks are read before the rows' own keys, and assigns memory to their states. A span that shares
// nothing needs it only if its rows are too few to keep all threads busy, as in a group that decodes.
void Trunks::assign_states(const Model& model, const Batch& batch, int num_threads) {
  states_.assign(batch.num_spans, kNotShared);
  num_states_ = 0;
  keys_read_ = 0;
  for (int i = 0; i < batch.num_spans; ++i) {
    const Span& span = batch.spans[i];
    const std::size_t floats =
        std::size_t(stretches_of(span.trunk_keys)) * rows_of(span) * model.heads * state_size(model);
    if (i < batch.num_groups) keys_read_ += span.trunk_keys;
    if (floats == 0 || !(shares_[i] || has_few_tasks(model, rows_of(span), num_threads)) ||
        num_states_ + floats > kMaxStates)
      continue;
    states_[i] = num_states_;
    num_states_ += floats;
  }
}

void Trunks::read_together(const Model& model, const Batch& batch, int num_threads) {
  const int enough = busy_tasks(num_threads);
  const auto joins = [&](const Slice& one) { return shares_[one.span] && states_[one.span] != kNotShared; };
  std::int64_t rows = 0;
  for (const Slice& one : slices_)
    if (joins(one)) rows += rows_of(batch.spans[one.span]);
  const int max_rows =
      int(std::clamp<std::int64_t>((rows * model.kv_heads + enough - 1) / enough, 1, max_rows_of(model)));
  // The last stretches come first, because they share the least and their readings take longest.
  for (int stretch = int(stretch_begins_.size()) - 2; stretch >= 0; --stretch)
    for (int begin = stretch_begins_[stretch], stop = stretch_begins_[stretch + 1]; begin < stop;) {
      int end = begin + 1;
      if (joins(slices_[begin])) {
        while (end < stop && common_[end] >= kMinCommonKeys && joins(slices_[end])) ++end;
        join(batch, slices_.data() + begin, slices_.data() + end, common_.data() + begin, stretch, max_rows);
      }
      begin = end;
    }
}

// Cuts slices with common leading blocks into readings with about the same number of rows, at most `height`.
void Trunks::join(const Batch& batch, const Slice* begin, const Slice* end, const int* common, int stretch,
                  int height) {
  int rows = 0;
  for (const Slice* one = begin; one != end; ++one) rows += rows_of(batch.spans[one->span]);
  const int tiles = tiles_of(rows, height), even = (rows + tiles - 1) / tiles;
  int left = 0;  // number of rows that still fit into the last reading
  for (const Slice* one = begin; one != end; ++one) {
    const Span& span = batch.spans[one->span];
    for (int row = span.row_begin, stop; row < span.row_end; row = stop) {
      const bool follows = left > 0;
      if (!follows) {
        readings_.push_back({int(parts_.size()), int(parts_.size()), stretch});
        left = even;
      }
      stop = std::min(row + left, span.row_end);
      left -= stop - row;
      const int shared = follows ? common[one - begin] : 0;
      if (row == span.row_begin && one->span < batch.num_groups) keys_read_ -= shared;
      parts_.push_back({&span, row, stop, one->keys, shared, states_[one->span]});
      readings_.back().part_end = int(parts_.size());
    }
  }
}

void Trunks::read_alone(const Span& span, std::size_t states, int height) {
  for (int begin = 0; begin < span.trunk_keys; begin += kStretch)
    for (int row = span.row_begin; row < span.row_end; row += height) {
      const int part = int(parts_.size());
      parts_.push_back({&span, row, std::min(row + height, span.row_end), std::min(span.trunk_keys - begin, kStretch),
                        0, states});
      readings_.push_back({part, part + 1, begin / kStretch});
    }
}

}  // namespace motet
