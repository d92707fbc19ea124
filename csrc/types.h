// What passes between the decoder (decoder.h) and the kernels of one instruction set (kernels/): plain structs of pointers.
//
// Letters: T tokens of a step, M rows of a product, N its columns (outputs), K what is summed over, H query heads, KH kv heads,
// D head size, S block size.
#pragma once

#include <cstdint>

namespace octavo {

// A packed matrix is cut into panels of so many outputs. A panel holds, for each step of four input bytes, one 32-bit word
// per output, so the words of a step are PANEL * 4 bytes in a row: what a vector register, or a tile row, loads.
constexpr int PANEL = 32;
// Inputs that share a scale in grouped formats (the block of GGUF's Q4_0, Q4_1 and Q8_0).
constexpr int GROUP = 32;
// Keys that are attended to as one piece. Softmax is folded piece by piece in this order, wherever pieces are computed.
constexpr int CHUNK = 128;
// Tokens whose keys and values lie together in vector order.
constexpr int TILE = 16;
// Query rows (tokens times heads of a kv head) that are attended together.
constexpr int MOST_QUERY_ROWS = 48;
// Rows of a product that one unit of work covers at most.
constexpr int MOST_UNIT_ROWS = 192;

// Numbers that activations, keys and values are kept in.
enum class Number : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Packed weights.
//   FLOAT32    word = one weight
//   BFLOAT16   word = two weights that follow each other
//   INT8       word = four weights, signed; one scale per output; inputs as unsigned bytes (plus 128), one scale per row
//   GROUP8     word = four unsigned codes; per group of 32 inputs a half-precision scale (and minimum) per output
//   GROUP4     two such words in one: low and high nibbles are the words of step s and s + 4 of a group
enum class Format : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, GROUP8 = 3, GROUP4 = 4 };

struct Matrix {
    Format format;
    int32_t outputs;       // N
    int32_t inputs;        // K
    int32_t panels;        // ceil(N / PANEL); outputs beyond N are zero
    int32_t steps;         // words per output in a panel: ceil(K / (4 / bytes per weight)), of 8-bit codes in grouped formats
    int64_t panel_bytes;
    const char* data;
    const float* scales;   // INT8: [panels * PANEL]
    const int32_t* sums;   // INT8: 128 times the sum of each output's weights
    const float* bias;     // [N] or null
    int32_t offset;        // grouped: what codes stand above their values (8 or 128); 0 where there are minima
    int32_t has_minimum;   // grouped: value = scale * code + minimum
};

// Rows that a matrix is multiplied with, in the numbers its format asks for.
struct Rows {
    const char* data;       // words
    int64_t stride;         // bytes from row to row
    const float* scales;    // INT8: [M]; grouped: [M, K / GROUP]
    const int32_t* sums;    // grouped: sum of a group's bytes, [M, K / GROUP]
};

enum class Finish : int {
    STORE = 0,   // out[m, n] = product + bias, float32
    ADD = 1,     // out[m, n] += product + bias, float32
    SILU = 2,    // panels hold 16 gates and their 16 ups: out[m, 16 * panel + i] = silu(gate) * up, in `number`
    BEST = 3,    // nothing is stored; per thread, row and lane the greatest product and its panel are kept
};

struct Best {
    float* values;     // [M, PANEL], of one thread
    int32_t* panels;
    int32_t* nans;     // nonzero: a product was not a number
};

struct Product {
    const Matrix* matrix;
    Rows rows;
    int32_t num_rows;
    Finish finish;
    Number number;       // of `out` if SILU
    char* out;
    int64_t out_stride;  // bytes
};

// One layer's keys and values in one pool: block b at data + b * block_bytes, kv head h at + h * head_bytes within it.
//
// Block sizes that are multiples of TILE keep them in vector order, so that they are multiplied as they lie:
//     keys     [S / TILE][D / e][TILE][e]      e = numbers per 32-bit word (int8 is kept in the order of what it expands to)
//     values   [S / TILE][TILE / e][D][e]
// smaller blocks keep rows, [S][D] keys and [S][D] values, which are put in order when they are read.
// Quantised caches have behind that [S] scales of keys and [S] of values, float32.
struct Cache {
    char* data;
    int64_t block_bytes;
    int64_t head_bytes;
    int32_t block_size;
    int32_t head_size;
    Number number;         // what products are made in
    int32_t quantised;     // kept as int8 with a scale per token and head
};

// One sequence's new tokens' attention, or one piece of the keys of several.
//
// A task covers query tokens and a range of chunks. With `partial` it covers one chunk and leaves, for each row, what is
// folded later (by fold_unit): several threads can so share a long sequence, and tokens of sequences whose tables begin with
// the same blocks are in one task and read those keys once. Without, it folds chunk after chunk and writes the result.
struct AttentionTask {
    const int32_t* tokens;      // rows of the step, num_tokens of them
    const int32_t* blocks;      // block table, from the sequence's first block
    int32_t num_tokens;
    int32_t first_chunk, end_chunk;
    int32_t partial;
};

struct Attention {
    Cache cache;                // of one layer
    int32_t num_heads, num_kv_heads;
    float scale;
    int32_t window;             // 0: none
    float soft_cap;             // 0: none
    const int32_t* positions;   // [T]
    const char* queries;        // [T, H, D] in cache.number, rotated
    char* out;                  // [T, H * D] in cache.number
    int64_t out_stride;         // bytes
    float* partials;            // records of (maximum, sum, [D] weighted values), [partial, H]
    const int32_t* partial_of;  // [T] first record of a token; the record of chunk c is c further
};

// What a step's rows need once per layer.
struct Norm {
    const float* weight;
    float epsilon;
};

// Where the q, k and v of one layer go.
struct Rotation {
    Cache cache;
    int32_t num_heads, num_kv_heads;
    const float* q_norm;        // [D] or null
    const float* k_norm;
    float epsilon;
    const float* cosines;       // [T, D / 2]
    const float* sines;
    const int64_t* slots;       // [T]
    const float* qkv;           // [T, (H + 2 KH) * D]
    int64_t qkv_stride;         // floats
    char* queries;              // [T, H, D] in cache.number
};

}  // namespace octavo
