// Work on one row (one token) at a time: norms, conversion to what a matrix asks for, rotary positions and the write into the
// cache. Each reads and writes a row once.
#pragma once

#include "../types.h"
#include "attention.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE float mean_square(const float* x, int n) {
    vf total{};
    int i = 0;
    for (; i + W <= n; i += W) total = fma(load(x + i), load(x + i), total);
    float sum = sum_lanes(total);
    for (; i < n; i++) sum += x[i] * x[i];
    return sum / float(n);
}

// y = x / root mean square(x) * weight. Source: Zhang and Sennrich, 2019.
static void norm_row(const float* x, int n, const Norm& norm, float* y) {
    const float scale = 1.0f / __builtin_sqrtf(mean_square(x, n) + norm.epsilon);
    int i = 0;
    for (; i + W <= n; i += W) store(y + i, load(x + i) * splat(scale) * load(norm.weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * norm.weight[i];
}

OCTAVO_INLINE float greatest_magnitude(const float* x, int n) {
    // Compared as integers, in whose order what is not a number comes last and is not lost.
    const vi magnitude = splat_int(0x7fffffff);
    vi top{};
    int i = 0;
    for (; i + W <= n; i += W) {
        const vi m = float_to_bits(load(x + i)) & magnitude;
        top = m > top ? m : top;
    }
    int32_t most = 0;
    for (int l = 0; l < W; l++) most = top[l] > most ? top[l] : most;
    for (; i < n; i++) {
        int32_t m;
        memcpy(&m, x + i, 4);
        m &= 0x7fffffff;
        if (m > most) most = m;
    }
    float result;
    memcpy(&result, &most, 4);
    return result;
}

// Rounds x / scale to bytes, adds `offset`; returns the sum of the rounded values.
OCTAVO_INLINE int32_t round_bytes(const float* x, int n, float inverse, int offset, char* out) {
    int32_t total = 0;
    int i = 0;
    vi sums{};
    for (; i + W <= n; i += W) {
        const vi q = round_to_int(load(x + i) * splat(inverse));
        sums += q;
#if defined(__AVX512F__)
        const __m128i packed = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(q + splat_int(offset)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), packed);
#else
        for (int l = 0; l < W; l++) out[i + l] = char(q[l] + offset);
#endif
    }
    for (int l = 0; l < W; l++) total += sums[l];
    for (; i < n; i++) {
        const int q = int(__builtin_nearbyintf(x[i] * inverse));
        total += q;
        out[i] = char(q + offset);
    }
    return total;
}

// A row of n floats as a matrix of `format` wants it. scales, sums: of this row (one, or one per group).
static void prepare_row(const float* x, int n, Format format, char* out, float* scales, int32_t* sums) {
    switch (format) {
        case Format::FLOAT32: memcpy(out, x, size_t(n) * 4); break;
        case Format::BFLOAT16: {
            uint16_t* to = reinterpret_cast<uint16_t*>(out);
            int i = 0;
            for (; i + W <= n; i += W) store_bf16(to + i, load(x + i));
            for (; i < n; i++) to[i] = to_bf16(x[i]);
            if (n % 2) to[n] = 0;  // the other half of the last word: what lay there might be no number
            break;
        }
        case Format::INT8: {
            const float most = greatest_magnitude(x, n);
            scales[0] = most / 127.0f;
            round_bytes(x, n, most > 0 ? 127.0f / most : 0.0f, 128, out);
            break;
        }
        default:
            for (int g = 0; g < n / GROUP; g++) {
                const float most = greatest_magnitude(x + g * GROUP, GROUP);
                scales[g] = most / 127.0f;
                sums[g] = round_bytes(x + g * GROUP, GROUP, most > 0 ? 127.0f / most : 0.0f, 0, out + g * GROUP);
            }
    }
}

static void widen_row(const char* x, int n, Number number, float* y) {
    if (number == Number::FLOAT32) {
        memcpy(y, x, size_t(n) * 4);
        return;
    }
    const uint16_t* from = reinterpret_cast<const uint16_t*>(x);
    int i = 0;
    for (; i + W <= n; i += W) store(y + i, load_bf16(from + i));
    for (; i < n; i++) y[i] = from_bf16(from[i]);
}

OCTAVO_INLINE void rotate_head(float* x, int head_size, const float* cosines, const float* sines) {
    const int half = head_size / 2;
    int i = 0;
    for (; i + W <= half; i += W) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
        store(x + i, fma(a, c, -(b * s)));
        store(x + half + i, fma(b, c, a * s));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

// One head's vector into a cache in vector order or in rows. `place(d)` tells where number d goes.
template <class Place>
OCTAVO_INLINE void write_vector(const Cache& c, char* part, const float* x, float* scale, Place&& place) {
    const int D = c.head_size;
    if (!c.quantised && c.number == Number::BFLOAT16) {
        uint16_t halves[512];
        for (int d = 0; d < D; d += W) store_bf16(halves + d, load(x + d));
        for (int d = 0; d < D; d++) reinterpret_cast<uint16_t*>(part)[place(d)] = halves[d];
        return;
    }
    if (!c.quantised) {
        for (int d = 0; d < D; d++) reinterpret_cast<float*>(part)[place(d)] = x[d];
        return;
    }
    const float most = greatest_magnitude(x, D);
    *scale = most / 127.0f;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    for (int d = 0; d < D; d++) part[place(d)] = char(int(__builtin_nearbyintf(x[d] * inverse)));
}

static void write_cache(const Cache& c, int64_t slot, int kv_head, const float* key, const float* value) {
    const int D = c.head_size, S = c.block_size, e = 4 / bytes_of(c.number), offset = int(slot % S);
    char* head = c.data + slot / S * c.block_bytes + kv_head * c.head_bytes;
    const int64_t number_bytes = c.quantised ? 1 : bytes_of(c.number), part = int64_t(S) * D * number_bytes;
    float* scales = reinterpret_cast<float*>(head + 2 * part);
    if (S % TILE == 0) {
        const int64_t tile = int64_t(offset / TILE) * TILE * D * number_bytes;
        const int lane = offset % TILE;
        write_vector(c, head + tile, key, scales + offset, [&](int d) { return key_place(lane, d, e); });
        write_vector(c, head + part + tile, value, scales + S + offset, [&](int d) { return value_place(lane, d, D, e); });
    } else {
        const int64_t row = int64_t(offset) * D * number_bytes;
        write_vector(c, head + row, key, scales + offset, [](int d) { return int64_t(d); });
        write_vector(c, head + part + row, value, scales + S + offset, [](int d) { return int64_t(d); });
    }
}

// One token: norms and rotates q and k, writes q for attention and k, v into the cache. scratch: [D] floats.
static void rotate_row(const Rotation& r, int token, float* scratch) {
    const int D = r.cache.head_size, H = r.num_heads, KH = r.num_kv_heads;
    const float* qkv = r.qkv + token * r.qkv_stride;
    const float* cosines = r.cosines + int64_t(token) * (D / 2);
    const float* sines = r.sines + int64_t(token) * (D / 2);
    const Format as = r.cache.number == Number::BFLOAT16 ? Format::BFLOAT16 : Format::FLOAT32;
    for (int h = 0; h < H + KH; h++) {
        const float* weight = h < H ? r.q_norm : r.k_norm;
        if (weight)
            norm_row(qkv + h * D, D, Norm{weight, r.epsilon}, scratch);
        else
            memcpy(scratch, qkv + h * D, size_t(D) * 4);
        rotate_head(scratch, D, cosines, sines);
        if (h < H)
            prepare_row(scratch, D, as, r.queries + (int64_t(token) * H + h) * D * bytes_of(r.cache.number), nullptr, nullptr);
        else
            write_cache(r.cache, r.slots[token], h - H, scratch, qkv + (h + KH) * D);
    }
}

// Cosine and sine of position * frequency, in double precision from a float32 angle, for one token.
// Reduction by pi / 2 in three parts and the polynomials of Cephes (S. Moshier).
static void angles_row(int position, const float* frequencies, int n, float* cosines, float* sines) {
    for (int i = 0; i < n; i++) {
        const double x = float(position) * frequencies[i];
        const double turns = __builtin_nearbyint(x * 0.63661977236758134308);
        double r = x - turns * 1.57079632673412561417;
        r -= turns * 6.07710050650619224932e-11;
        const double z = r * r;
        const double s = r + r * z * (-1.6666666666666632e-1 + z * (8.333333333322118e-3 + z * (-1.98412698295895385996e-4 + z * (2.75573136213857245213e-6 + z * -2.50507477628578072866e-8))));
        const double c = 1.0 - 0.5 * z + z * z * (4.16666666666665929218e-2 + z * (-1.38888888888730564116e-3 + z * (2.48015872888517045348e-5 + z * -2.75573141792967388112e-7)));
        const int quarter = int(int64_t(turns)) & 3;
        const double a = quarter & 1 ? s : c, b = quarter & 1 ? c : s;
        cosines[i] = float(quarter == 1 || quarter == 2 ? -a : a);
        sines[i] = float(quarter >= 2 ? -b : b);
    }
}

}  // namespace octavo::OCTAVO_ISA
