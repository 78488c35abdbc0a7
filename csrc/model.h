// The caller's inputs: a model and a step's batch, as plain structs of pointers. The native engine's
// `compiled_kernels.py` mirrors them.
//
// All memory belongs to the caller and outlives the call. The weights, keys, values and inputs of products of a model
// have one type of number: bf16 or float32. Every dimension is a multiple of 32, except for the vocabulary and the size
// of a head: `head_dim` is even, and a multiple of 16 if heads have norms. All query heads of a layer together, and all
// key heads, are multiples of 32.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace motet {

// y = x * weight^T + bias, with the weight in panels (see panel.h).
struct Linear {
  const void* panels;   // in the model's type of number, or int8 if there are scales
  const float* scales;  // [columns] or null: scale of each column's int8 weights
  const float* bias;    // [columns] or null
  std::int32_t columns;
  std::int32_t depth;
  std::int32_t number;  // index of the product's part in `Batch::low_ranks`; 0: no adapter can change the product
};

// The change of a product by an adapter: (x * down) * up, with both weights in panels of the model's type of number.
struct LowRank {
  const void* down;             // [panels of width][depth of the product][32]
  const void* up;               // a panel of 32 columns for each panel of the product, with the depth of its window
  const std::int32_t* windows;  // [panels of the product][3]: begin and end of the numbers of x * down that a panel
                                // uses, and the sum of the depths of all panels before it
  std::int32_t width;           // columns of `down`, a multiple of 32; 0: the adapter does not change the product
};

// A norm of adjacent numbers: x / deviation * weight + bias, per group of `width` numbers.
struct Norm {
  const float* weight;    // [width] of all groups, or [groups][width]; null: there is no norm
  const float* bias;      // as the weight; null: none
  std::int32_t width;
  std::int32_t stride;    // distance between the weights of adjacent groups; 0: all groups have the same
  float epsilon;          // added to the mean square
  std::int32_t centered;  // 1: the mean is subtracted first (LayerNorm), 0: it is not (RMSNorm)
};

// Rotary position embedding of the first `dims` numbers of every head.
struct Rotary {
  const float* cosines;  // [positions][dims / 2]; null: the layer has no position embedding
  const float* sines;
  std::int32_t dims;
  std::int32_t adjacent;  // 1: numbers 2i and 2i + 1 are a pair; 0: numbers i and i + dims / 2 are a pair
};

enum Scoring : std::int32_t { kSoftmaxOfLogits = 0, kSigmoidOfLogits = 1 };

// A mixture of experts. A router selects experts for each row, and the row's result is the weighted sum of their
// results. The layer can also have a shared expert, which computes all rows.
struct Experts {
  Linear router;            // in float32: a column for each expert, and a column for the shared expert's factor
  Linear gate_up;           // of all experts, one after the other; as in a layer
  Linear down;              // of all experts, one after the other
  const float* correction;  // [experts] or null: added to scores to select experts, but not in the weights
  std::int32_t count;       // number of experts; 0: the layer has none
  std::int32_t per_row;     // number of experts of a row
  std::int32_t groups;      // experts are divided into groups of adjacent experts
  std::int32_t top_groups;  // number of groups from which the experts of a row are selected
  std::int32_t scoring;     // function of the router's results that gives scores: of `Scoring`
  std::int32_t shared;      // column of the router whose sigmoid is the factor of the shared expert; 0: the factor is 1
  float min_total;          // weights are divided by their sum, or by this if it is greater; 0: they are not divided
  float scale;              // factor of the weights
  float limit;              // GPT-OSS: limit of gate and up; 0: none, and the layer's activation is used
  float alpha;              // GPT-OSS: factor in the sigmoid of the gate
};

enum Numbers : std::int32_t { kBf16 = 0, kFloat32 = 1 };

struct Layer {
  Linear qkv;      // all query heads, then all key heads, then all value heads
  Linear out;
  Linear gate_up;  // 16 columns of gate, the same 16 of up, and so on; without a gate: the columns of up
  Linear down;
  Experts experts;  // if there are any, `gate_up` and `down` are the shared expert, or empty
  Norm attention_norm;       // before attention
  Norm mlp_norm;             // before the feed-forward part
  Norm attention_post_norm;  // of attention's output, before it is added
  Norm mlp_post_norm;        // of the feed-forward part's output, before it is added
  Norm query_norm;           // of the query heads; a group is a head, or all heads
  Norm key_norm;
  Rotary rotary;
  const float* sinks;  // [heads] or null: a score of each head for a key without a value
  void* keys;          // [slots][kv_heads][head_dim], then the slack of the KV cache: at least 32 numbers
  void* values;        // as the keys
  std::int32_t window;  // number of keys that a query sees, including its own; 0: no limit
  float score_scale;
  float score_softcap;         // 0: none
  float residual_scale;        // factor of what attention and the feed-forward part add
  std::int32_t activation;     // of `Activation` (activations.h)
  std::int32_t gated;          // 1: activation(gate) * up, 0: activation(up)
  std::int32_t parallel;       // 1: the feed-forward part reads the input of the layer, 0: the sum with attention
  std::int32_t rotates_first;  // 1: query_norm and key_norm are applied after RoPE, 0: before
};

struct Model {
  std::int32_t num_layers, hidden, heads, kv_heads, head_dim, vocab, block_size;
  std::int32_t numbers;   // type of weights, keys, values and inputs of products
  float logit_softcap;    // 0: none
  float logit_scale;      // factor of logits, before the cap
  float embedding_scale;
  const Layer* layers;
  const void* embedding;  // [vocab][hidden]; null if the head's weights are used
  Linear head;
  Norm final_norm;
};

// Each row of [row_begin, row_end) sees keys [0, first + (row - row_begin)] of a block table. The table starts at the
// position at which the trunk of the rows' span ends.
struct Piece {
  std::int32_t row_begin, row_end, first, table;
};

// The choices of a group: rows [row_begin, row_end), cut into pieces [piece_begin, piece_end). All rows see keys
// [0, trunk_keys) of a trunk. Rows of a prompt are a span of one piece. Their trunk is a multiple of kStretch keys from
// the start of the prompt, so that the bits of a row are the same with any trunk, also with none.
struct Span {
  std::int32_t row_begin, row_end, piece_begin, piece_end, trunk_keys, trunk_table;
};

struct Batch {
  std::int32_t num_rows, num_spans, num_logits;
  std::int32_t num_groups;        // number of spans that are choices of a group; they come before the spans of prompts
  const std::int32_t* tokens;     // [num_rows]
  const std::int32_t* positions;  // [num_rows]
  const std::int32_t* slots;      // [num_rows]: slot in which each row's key and value are stored
  const Span* spans;
  const Piece* pieces;
  const std::int32_t* tables;     // block ids; `table` and `trunk_table` are indices of a table's first block
  const std::int32_t* logit_rows; // [num_logits]
  float* logits;                  // [num_logits][vocab]
  std::uint8_t* non_finite;       // [num_rows]: set to 1 if a row's values in the last layer are not finite, else 0
  const std::int32_t* adapters;   // [num_rows]: index in `low_ranks`, or -1; null if no row has an adapter
  const LowRank* const* low_ranks;  // for each adapter of the step, the changes of all products, by their numbers
  // Set to the number of keys of the groups' trunks that were read. Keys that spans read together count once.
  std::int64_t* trunk_keys_read;
};

}  // namespace motet
