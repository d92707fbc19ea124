// Attention over block-paged keys and values, one task at a time (types.h: AttentionTask).
//
//     for each chunk of CHUNK keys:   scores = queries * keys      weights = exp(scores - maximum)      values summed by weight
//     fold:                           (maximum, sum, values) of the chunks, in their order
//
// What a chunk gives a row depends on the row and the chunk alone, and chunks are folded in one order, so a row's result is the
// same to the bit whoever computes which chunk, with which other rows, in blocks of any size.
//
// Query heads of one kv head are rows of the same product, so keys and values are read once for all of them.
//
// Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023; Dao et
// al., "FlashAttention", 2022 (softmax in pieces); Juravsky et al., "Hydragen", 2024 (prefixes read once for a batch).
#pragma once

#include "../types.h"
#include "product.h"
#include "tile.h"

namespace octavo::OCTAVO_ISA {

constexpr int TILES = CHUNK / TILE;

// Memory of one thread, all aligned to 64 bytes; made by attention_scratch.
struct AttentionScratch {
    char* queries;    // [MOST_QUERY_ROWS, D]
    float* scores;    // [MOST_QUERY_ROWS, CHUNK]
    char* weights;    // [MOST_QUERY_ROWS, CHUNK]
    float* values;    // [MOST_QUERY_ROWS, D] of one chunk
    float* folded;    // [MOST_QUERY_ROWS, D]
    float* maxima;    // [MOST_QUERY_ROWS] of one chunk; then sums, then both of what is folded
    char* keys_in_order;    // [CHUNK, D]
    char* values_in_order;  // [CHUNK, D]
    float* key_scales;      // [CHUNK]; value scales behind
};

static int64_t attention_scratch(char* memory, int head_size, AttentionScratch* s) {
    char* at = memory;
    auto take = [&](int64_t bytes) {
        char* p = at;
        at += (bytes + 63) / 64 * 64;
        return p;
    };
    s->queries = take(MOST_QUERY_ROWS * head_size * 4);
    s->scores = reinterpret_cast<float*>(take(MOST_QUERY_ROWS * CHUNK * 4));
    s->weights = take(MOST_QUERY_ROWS * CHUNK * 4);
    s->values = reinterpret_cast<float*>(take(MOST_QUERY_ROWS * head_size * 4));
    s->folded = reinterpret_cast<float*>(take(MOST_QUERY_ROWS * head_size * 4));
    s->maxima = reinterpret_cast<float*>(take(MOST_QUERY_ROWS * 4 * 4));
    s->keys_in_order = take(CHUNK * head_size * 4);
    s->values_in_order = take(CHUNK * head_size * 4);
    s->key_scales = reinterpret_cast<float*>(take(2 * CHUNK * 4));
    return at - memory;
}

struct Chunk {
    const char* keys[TILES + 1];  // one more, so that tiles can be worked on in pairs
    const char* values[TILES];
    int num_tiles;
    int first;      // position of the first key
    int visible;    // keys of the chunk that some row sees, from the first on
};

OCTAVO_INLINE int bytes_of(Number number) { return number == Number::BFLOAT16 ? 2 : 4; }

OCTAVO_INLINE void put_number(char* row, int64_t at, Number number, float x) {
    if (number == Number::BFLOAT16)
        reinterpret_cast<uint16_t*>(row)[at] = to_bf16(x);
    else
        reinterpret_cast<float*>(row)[at] = x;
}

// Places in vector order, in numbers.
OCTAVO_INLINE int64_t key_place(int lane, int d, int e) { return (int64_t(d / e) * TILE + lane) * e + d % e; }
OCTAVO_INLINE int64_t value_place(int lane, int d, int head_size, int e) {
    return (int64_t(lane / e) * head_size + d) * e + lane % e;
}

static void expand_bytes(const int8_t* from, char* to, int64_t count, Number number) {
    for (int64_t i = 0; i < count; i += W) {
        vf x;
#if defined(__AVX512F__)
        x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#elif defined(__AVX2__)
        x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i))));
#else
        for (int l = 0; l < W; l++) x[l] = from[i + l];
#endif
        if (number == Number::BFLOAT16)
            store_bf16(reinterpret_cast<uint16_t*>(to) + i, x);
        else
            store(reinterpret_cast<float*>(to) + i, x);
    }
}

// Puts tokens of a block that keeps rows into vector order.
static void order_rows(const Cache& c, const char* head, int offset, int lane, char* keys, char* values) {
    const int D = c.head_size, e = 4 / bytes_of(c.number);
    if (c.quantised) {
        const int8_t* k = reinterpret_cast<const int8_t*>(head) + int64_t(offset) * D;
        const int8_t* v = k + int64_t(c.block_size) * D;
        for (int d = 0; d < D; d++) {
            put_number(keys, key_place(lane, d, e), c.number, k[d]);
            put_number(values, value_place(lane, d, D, e), c.number, v[d]);
        }
    } else if (e == 2) {
        const uint16_t* k = reinterpret_cast<const uint16_t*>(head) + int64_t(offset) * D;
        const uint16_t* v = k + int64_t(c.block_size) * D;
        for (int d = 0; d < D; d++) {
            reinterpret_cast<uint16_t*>(keys)[key_place(lane, d, e)] = k[d];
            reinterpret_cast<uint16_t*>(values)[value_place(lane, d, D, e)] = v[d];
        }
    } else {
        const float* k = reinterpret_cast<const float*>(head) + int64_t(offset) * D;
        const float* v = k + int64_t(c.block_size) * D;
        for (int d = 0; d < D; d++) {
            reinterpret_cast<float*>(keys)[key_place(lane, d, e)] = k[d];
            reinterpret_cast<float*>(values)[value_place(lane, d, D, e)] = v[d];
        }
    }
}

// Values of keys that no row sees are weighed with 0; they are set to 0 too, for 0 times what happens to lie there might be
// no number. Only the last tile can have any.
static void blank_hidden_values(const Cache& c, Chunk* chunk, char* place, float* key_scales) {
    const int hidden_from = chunk->visible % TILE, D = c.head_size;
    if (hidden_from == 0) return;
    if (c.quantised) {
        for (int k = chunk->visible; k < chunk->num_tiles * TILE; k++) key_scales[k] = key_scales[CHUNK + k] = 0;
    }
    const int e = 4 / bytes_of(c.number);
    const int64_t tile_bytes = int64_t(TILE) * D * bytes_of(c.number);
    const int last = chunk->num_tiles - 1;
    char* copy = place + last * tile_bytes;
    if (chunk->values[last] != copy) memcpy(copy, chunk->values[last], tile_bytes);
    const int whole = (hidden_from + e - 1) / e;
    memset(copy + int64_t(whole) * D * 4, 0, int64_t(TILE / e - whole) * D * 4);
    if (hidden_from % e)
        for (int d = 0; d < D; d++) reinterpret_cast<uint16_t*>(copy)[value_place(hidden_from, d, D, e)] = 0;
    chunk->values[last] = copy;
}

// Finds the tiles of a chunk, or puts them in order first where the cache does not keep them so.
static void open_chunk(const Cache& c, const int32_t* blocks, int kv_head, Chunk* chunk, const AttentionScratch& s) {
    const int D = c.head_size, S = c.block_size;
    const int64_t tile_numbers = int64_t(TILE) * D, tile_bytes = tile_numbers * bytes_of(c.number);
    const int64_t kept_tile = c.quantised ? tile_numbers : tile_bytes, kept_part = int64_t(S) * D * (kept_tile / tile_numbers);
    const bool in_order = S % TILE == 0;
    for (int t = 0; t < chunk->num_tiles; t++) {
        const int position = chunk->first + t * TILE;
        char* keys = s.keys_in_order + t * tile_bytes;
        char* values = s.values_in_order + t * tile_bytes;
        if (in_order) {
            const char* head = c.data + blocks[position / S] * c.block_bytes + kv_head * c.head_bytes;
            const int64_t at = int64_t(position % S) / TILE * kept_tile;
            if (!c.quantised) {
                chunk->keys[t] = head + at;
                chunk->values[t] = head + kept_part + at;
                continue;
            }
            expand_bytes(reinterpret_cast<const int8_t*>(head + at), keys, tile_numbers, c.number);
            expand_bytes(reinterpret_cast<const int8_t*>(head + kept_part + at), values, tile_numbers, c.number);
            const float* scales = reinterpret_cast<const float*>(head + 2 * kept_part);
            memcpy(s.key_scales + t * TILE, scales + position % S, TILE * 4);
            memcpy(s.key_scales + CHUNK + t * TILE, scales + S + position % S, TILE * 4);
        } else {
            memset(keys, 0, tile_bytes);
            memset(values, 0, tile_bytes);
            for (int lane = 0; lane < TILE && t * TILE + lane < chunk->visible; lane++) {
                const int p = position + lane;
                const char* head = c.data + blocks[p / S] * c.block_bytes + kv_head * c.head_bytes;
                order_rows(c, head, p % S, lane, keys, values);
                if (!c.quantised) continue;
                const float* scales = reinterpret_cast<const float*>(head + 2 * kept_part);
                s.key_scales[t * TILE + lane] = scales[p % S];
                s.key_scales[CHUNK + t * TILE + lane] = scales[S + p % S];
            }
        }
        chunk->keys[t] = keys;
        chunk->values[t] = values;
    }
    chunk->keys[chunk->num_tiles] = chunk->keys[chunk->num_tiles - 1];
    blank_hidden_values(c, chunk, s.values_in_order, s.key_scales);
}

// Asks for what will be read soon: the keys of the next tiles and the values of these. Blocks lie anywhere in the pool, so the
// hardware, which follows streams within a page, would wait for each.
OCTAVO_INLINE void fetch_ahead(const Cache& c, const Chunk& chunk, int tile, int tiles) {
    const int64_t tile_bytes = int64_t(TILE) * c.head_size * bytes_of(c.number);
    for (int t = tile; t < tile + tiles && t < chunk.num_tiles; t++) {
        for (int64_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch(chunk.values[t] + at);
        if (t + tiles >= chunk.num_tiles) continue;
        for (int64_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch(chunk.keys[t + tiles] + at);
    }
}

// scores [rows, CHUNK] = queries * keys.
template <class Kind>
static void score(const Cache& c, const Chunk& chunk, const char* queries, int rows, float* scores) {
    constexpr int NV = Kind::NV, PER_TILE = TILE / W;
    const int e = 4 / bytes_of(c.number);
    const int64_t stride = int64_t(c.head_size) * bytes_of(c.number);
    for_row_tiles(rows, Kind::MR, [&](int first, int count) {
        with_rows<Kind::MR>(count, [&]<int MR>() {
            for (int v = 0; v < chunk.num_tiles * PER_TILE; v += NV) {
                if (first == 0 && v % PER_TILE == 0) fetch_ahead(c, chunk, v / PER_TILE, PER_TILE < NV ? NV / PER_TILE : 1);
                vf sums[MR][NV];
                const char* at[NV];
                for (int j = 0; j < NV; j++) at[j] = chunk.keys[(v + j) / PER_TILE] + (v + j) % PER_TILE * W * 4;
#pragma GCC unroll 16
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NV; j++) sums[i][j] = vf{};
                multiply<Kind, MR, NV>(sums, reinterpret_cast<const uint32_t*>(queries + first * stride), stride / 4, at,
                                       TILE * 4, c.head_size / e);
#pragma GCC unroll 16
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NV; j++) store(scores + (first + i) * CHUNK + (v + j) * W, sums[i][j]);
            }
        });
    });
}

// values [rows, D] = weights * values of the chunk.
template <class Kind, int NV>
OCTAVO_INLINE void weigh_columns(const Cache& c, const Chunk& chunk, const char* weights, int rows, int vector, float* values) {
    const int e = 4 / bytes_of(c.number), D = c.head_size;
    const int64_t stride = int64_t(CHUNK) * bytes_of(c.number);
    for_row_tiles(rows, Kind::MR, [&](int first, int count) {
        with_rows<Kind::MR>(count, [&]<int MR>() {
            vf sums[MR][NV];
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) sums[i][j] = vf{};
            for (int t = 0; t < chunk.num_tiles; t++) {
                const char* at[NV];
                for (int j = 0; j < NV; j++) at[j] = chunk.values[t] + (vector + j) * W * 4;
                const char* row = weights + first * stride + t * TILE * bytes_of(c.number);
                multiply<Kind, MR, NV>(sums, reinterpret_cast<const uint32_t*>(row), stride / 4, at, int64_t(D) * 4, TILE / e);
            }
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) store(values + (first + i) * D + (vector + j) * W, sums[i][j]);
        });
    });
}

template <class Kind>
static void weigh(const Cache& c, const Chunk& chunk, const char* weights, int rows, float* values) {
    constexpr int NV = Kind::NV;
    const int vectors = c.head_size / W;
    int v = 0;
    for (; v + NV <= vectors; v += NV) weigh_columns<Kind, NV>(c, chunk, weights, rows, v, values);
    for (; v < vectors; v++) weigh_columns<Kind, 1>(c, chunk, weights, rows, v, values);
}

// What an instruction set needs while a unit of work calls score and weigh with so many rows.
#if defined(OCTAVO_AMX)  // amx_attention.h
struct AttentionState {
    AttentionState(Number number, int rows);
    ~AttentionState();
    const bool tiles;
};
template <>
void score<BFloat16>(const Cache& c, const Chunk& chunk, const char* queries, int rows, float* scores);
template <>
void weigh<BFloat16>(const Cache& c, const Chunk& chunk, const char* weights, int rows, float* values);
#else
struct AttentionState {
    AttentionState(Number, int) {}
};
#endif

// Sets the scores of keys outside [from, to) to -inf.
OCTAVO_INLINE void hide(float* scores, int keys, int from, int to) {
    const vf hidden = splat(-__builtin_inff());
    vi lane{};
    for (int l = 0; l < W; l++) lane[l] = l;
    for (int k = 0; k < keys; k += W) {
        if (k >= from && k + W <= to) continue;
        const vi at = lane + k;
        const vi seen = reinterpret_cast<vi>(at >= splat_int(from)) & reinterpret_cast<vi>(at < splat_int(to));
        store(scores + k, bits_to_float((float_to_bits(load(scores + k)) & seen) | (float_to_bits(hidden) & ~seen)));
    }
}

// Scores of one row to weights: e^(score - maximum) of the keys [from, to) of the chunk, 0 elsewhere. What is not a number
// makes the sum none.
static void soften(const Attention& a, const Chunk& chunk, float* scores, int from, int to, const float* key_scales,
                   char* weights, float* maximum_at, float* sum) {
    const int keys = chunk.num_tiles * TILE;
    const bool capped = a.soft_cap > 0;
    if (capped || a.cache.quantised) {
        for (int k = 0; k < keys; k += W) {
            vf x = load(scores + k);
            if (a.cache.quantised) x *= load(key_scales + k);
            if (capped) x = tanh(x * a.scale / a.soft_cap) * a.soft_cap;
            store(scores + k, x);
        }
    }
    if (from > 0 || to < keys) hide(scores, keys, from, to);
    vf top = splat(-__builtin_inff());
    for (int k = 0; k < keys; k += W) top = maximum(load(scores + k), top);
    const float scale = capped ? 1.0f : a.scale, most = max_lanes(top) * scale;
    *maximum_at = most;
    vf total{};
    const vf factor = splat(scale), shift = splat(from < to ? -most : 0.0f);
    for (int k = 0; k < keys; k += W) {
        vf w = exp(load(scores + k) * factor + shift);  // rounded as the maximum was, or great scores would not meet it
        total += w;
        if (a.cache.quantised) w *= load(key_scales + CHUNK + k);
        if (a.cache.number == Number::BFLOAT16)
            store_bf16(reinterpret_cast<uint16_t*>(weights) + k, w);
        else
            store(reinterpret_cast<float*>(weights) + k, w);
    }
    *sum = sum_lanes(total);
}

// (maximum, sum, values) of what was folded so far, and those of one more chunk.
OCTAVO_INLINE void fold(float* maximum, float* sum, float* values, float chunk_maximum, float chunk_sum,
                        const float* chunk_values, int head_size) {
    if (chunk_sum == 0) return;  // the row sees nothing of the chunk
    if (*sum == 0) {
        *maximum = chunk_maximum;
        *sum = chunk_sum;
        memcpy(values, chunk_values, size_t(head_size) * 4);
        return;
    }
    const float top = *maximum > chunk_maximum ? *maximum : chunk_maximum;
    const float kept = exp(splat(*maximum - top))[0], added = exp(splat(chunk_maximum - top))[0];
    *maximum = top;
    *sum = *sum * kept + chunk_sum * added;
    const vf keep = splat(kept), add = splat(added);
    for (int d = 0; d < head_size; d += W) store(values + d, fma(load(chunk_values + d), add, load(values + d) * keep));
}

OCTAVO_INLINE void write_row(const Attention& a, int token, int head, float sum, const float* values) {
    const int D = a.cache.head_size;
    char* out = a.out + token * a.out_stride;
    const vf divisor = splat(sum);
    for (int d = 0; d < D; d += W) {
        const vf y = load(values + d) / divisor;
        if (a.cache.number == Number::BFLOAT16)
            store_bf16(reinterpret_cast<uint16_t*>(out) + head * D + d, y);
        else
            store(reinterpret_cast<float*>(out) + head * D + d, y);
    }
}

OCTAVO_INLINE int first_seen(const Attention& a, int position) {
    return a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
}

// What one chunk gives the task's rows, in scratch: maxima, sums, values. Returns false if no row sees any of it.
static bool attend_chunk(const Attention& a, const AttentionTask& task, int kv_head, int index, const AttentionScratch& s) {
    const Cache& c = a.cache;
    const int group = a.num_heads / a.num_kv_heads, rows = task.num_tokens * group;
    Chunk chunk;
    chunk.first = index * CHUNK;
    int last = -1, first = chunk.first + CHUNK;
    for (int i = 0; i < task.num_tokens; i++) {
        const int position = a.positions[task.tokens[i]], from = first_seen(a, position);
        if (position > last) last = position;
        if (from < first) first = from;
    }
    if (last < chunk.first || first >= chunk.first + CHUNK) return false;
    chunk.visible = last + 1 - chunk.first < CHUNK ? last + 1 - chunk.first : CHUNK;
    chunk.num_tiles = (chunk.visible + TILE - 1) / TILE;
    open_chunk(c, task.blocks, kv_head, &chunk, s);
    const bool half = c.number == Number::BFLOAT16;
    half ? score<BFloat16>(c, chunk, s.queries, rows, s.scores) : score<Float32>(c, chunk, s.queries, rows, s.scores);
    for (int r = 0; r < rows; r++) {
        const int position = a.positions[task.tokens[r / group]];
        int from = first_seen(a, position) - chunk.first, to = position + 1 - chunk.first;
        if (from < 0) from = 0;
        if (to > CHUNK) to = CHUNK;
        soften(a, chunk, s.scores + r * CHUNK, from, to, s.key_scales, s.weights + int64_t(r) * CHUNK * bytes_of(c.number),
               s.maxima + r, s.maxima + MOST_QUERY_ROWS + r);
    }
    half ? weigh<BFloat16>(c, chunk, s.weights, rows, s.values) : weigh<Float32>(c, chunk, s.weights, rows, s.values);
    return true;
}

static void gather_queries(const Attention& a, const AttentionTask& task, int kv_head, char* queries) {
    const int group = a.num_heads / a.num_kv_heads;
    const int64_t bytes = int64_t(a.cache.head_size) * bytes_of(a.cache.number);
    for (int i = 0; i < task.num_tokens; i++)
        memcpy(queries + i * group * bytes, a.queries + (int64_t(task.tokens[i]) * a.num_heads + kv_head * group) * bytes,
               group * bytes);
}

// One unit of work: a task for one kv head. memory: scratch of this thread.
static void attention_unit(const Attention& a, const AttentionTask& task, int kv_head, char* memory) {
    AttentionScratch s;
    attention_scratch(memory, a.cache.head_size, &s);
    const int group = a.num_heads / a.num_kv_heads, rows = task.num_tokens * group, D = a.cache.head_size;
    const float nothing = -__builtin_inff();
    const AttentionState state(a.cache.number, rows);
    gather_queries(a, task, kv_head, s.queries);
    float* sums = s.maxima + MOST_QUERY_ROWS;
    if (task.partial) {
        const bool any = attend_chunk(a, task, kv_head, task.first_chunk, s);
        for (int r = 0; r < rows; r++) {
            const int token = task.tokens[r / group], head = kv_head * group + r % group;
            float* record = a.partials + (int64_t(a.partial_of[token] + task.first_chunk) * a.num_heads + head) * (D + 2);
            record[0] = any ? s.maxima[r] : nothing;
            record[1] = any ? sums[r] : 0;
            if (any) memcpy(record + 2, s.values + r * D, size_t(D) * 4);
        }
        return;
    }
    float* maxima = sums + MOST_QUERY_ROWS;
    float* folded_sums = maxima + MOST_QUERY_ROWS;
    for (int r = 0; r < rows; r++) maxima[r] = nothing, folded_sums[r] = 0;
    for (int index = task.first_chunk; index < task.end_chunk; index++) {
        if (!attend_chunk(a, task, kv_head, index, s)) continue;
        for (int r = 0; r < rows; r++)
            fold(maxima + r, folded_sums + r, s.folded + r * D, s.maxima[r], sums[r], s.values + r * D, D);
    }
    for (int r = 0; r < rows; r++)
        write_row(a, task.tokens[r / group], kv_head * group + r % group, folded_sums[r], s.folded + r * D);
}

// Folds the partial results of one token and head.
static void fold_unit(const Attention& a, int token, int head, char* memory) {
    AttentionScratch s;
    attention_scratch(memory, a.cache.head_size, &s);
    const int D = a.cache.head_size, chunks = a.positions[token] / CHUNK + 1;
    float maximum = -__builtin_inff(), sum = 0;
    for (int c = first_seen(a, a.positions[token]) / CHUNK; c < chunks; c++) {
        const float* record = a.partials + (int64_t(a.partial_of[token] + c) * a.num_heads + head) * (D + 2);
        fold(&maximum, &sum, s.folded, record[0], record[1], record + 2, D);
    }
    write_row(a, token, head, sum, s.folded);
}

}  // namespace octavo::OCTAVO_ISA
