// Passes over rows of logits for the choice of tokens: weights, their sums, greatest values, candidates. csrc/sampling.cpp puts
// them together; there it is said what a choice is.
//
// A row is read in pieces of PIECE logits, the last one may be short. Weights are whole numbers below 2^41 that a float holds
// exactly, and sums of them stay below 2^53, where a double is exact: no sum depends on its order.
#pragma once

#include "../weighing.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

typedef double vd __attribute__((vector_size(4 * W), may_alias));

// The lower and the upper half of the lanes as doubles.
OCTAVO_INLINE void add_wide(vf x, vd* low, vd* high) {
#if defined(__AVX512F__)
    *low += (vd)_mm512_cvtps_pd(_mm512_castps512_ps256(x));
    *high += (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
#elif defined(__AVX2__)
    *low += (vd)_mm256_cvtps_pd(_mm256_castps256_ps128(x));
    *high += (vd)_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
#else
    *low += vd{x[0], x[1]};
    *high += vd{x[2], x[3]};
#endif
}

// To the nearest whole number, ties to even; for x from 0.
OCTAVO_INLINE vf round_whole(vf x) {
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(8388608.0f);  // 2^23: from there on every float is whole
    return x < magic ? (x + magic) - magic : x;
#endif
}

// One bit for each lane of a comparison.
OCTAVO_INLINE uint32_t lane_bits(vi mask) {
#if defined(__AVX512DQ__)
    return uint32_t(_mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)));
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#else
    return uint32_t((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
#endif
}

// W logits, or the `count` that are left and -inf beyond them.
OCTAVO_INLINE vf load_some(const float* x, int count) {
    if (count >= W) return load(x);
    float lanes[W];
    for (int l = 0; l < W; l++) lanes[l] = l < count ? x[l] : -__builtin_inff();
    return load(lanes);
}

OCTAVO_INLINE vf weights_of(vf logits, const Weighing& w) {
    const vf x = (logits - splat(w.peak)) / splat(w.temperature);
    return zero_below(round_whole(exp(x) * splat(w.scale)), x, splat(w.floor));
}

// The weights of n logits. weights: room for n and W more.
static void weigh_logits(const float* x, int n, const Weighing& w, float* weights) {
    for (int i = 0; i < n; i += W) store(weights + i, weights_of(load_some(x + i, n - i), w));
}

// The sum of weights of each piece of n logits.
static void piece_sums(const float* x, int n, const Weighing& w, double* sums) {
    for (int first = 0; first < n; first += PIECE) {
        const int end = n - first < PIECE ? n : first + PIECE;
        vd low{}, high{};
        for (int i = first; i < end; i += W) add_wide(weights_of(load_some(x + i, end - i), w), &low, &high);
        low += high;
        double sum = 0;
        for (int l = 0; l < W / 2; l++) sum += low[l];
        *sums++ = sum;
    }
}

// The greatest of each piece of n logits; NaN if one is.
static void piece_maxima(const float* x, int n, float* maxima) {
    for (int first = 0; first < n; first += PIECE) {
        const int end = n - first < PIECE ? n : first + PIECE;
        vf most = splat(-__builtin_inff());
        vi odd{};
        for (int i = first; i < end; i += W) {
            const vf part = load_some(x + i, end - i);
            odd |= reinterpret_cast<vi>(part != part);
            most = maximum(most, part);
        }
        *maxima++ = lane_bits(odd) ? __builtin_nanf("") : max_lanes(most);
    }
}

// The logits from `bound` on, with their ids, in the order of ids; returns how many. Pieces whose maximum is below are not read.
// bound: finite. values, ids: room for n.
static int collect(const float* x, int n, const float* maxima, float bound, float* values, int32_t* ids) {
    int found = 0;
    for (int first = 0; first < n; first += PIECE) {
        if (!(maxima[first / PIECE] >= bound)) continue;
        const int end = n - first < PIECE ? n : first + PIECE;
        for (int i = first; i < end; i += W) {
            const vf part = load_some(x + i, end - i);
            for (uint32_t bits = lane_bits(part >= splat(bound)); bits; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits);
                values[found] = x[at];
                ids[found++] = at;
            }
        }
    }
    return found;
}

// Which bucket a value belongs to: never a later one for a greater value. Any value gives a bucket that exists.
OCTAVO_INLINE vi bucket_of(vf values, const Buckets& b) {
    const vf place = (splat(b.origin) - values) * splat(b.inverse);
    return __builtin_convertvector(maximum(minimum(place, splat(float(b.count - 1))), vf{}), vi);
}

// Adds n candidates to the buckets. values, weights: room for W more than n.
static void fill_buckets(const float* values, const float* weights, int n, const Buckets& b) {
    for (int i = 0; i < n; i += W) {
        int32_t places[W];
        store_int(places, bucket_of(load(values + i), b));
        const int lanes = n - i < W ? n - i : W;
        for (int l = 0; l < lanes; l++) {
            b.weights[places[l]] += weights[i + l];
            b.counts[places[l]]++;
        }
    }
}

// A number that is smaller for a greater value; equal values, and so both zeros, give equal numbers.
OCTAVO_INLINE uint32_t descending(float value) {
    const float canonical = value + 0.0f;
    uint32_t bits;
    memcpy(&bits, &canonical, 4);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

// Candidates of one bucket as keys whose order is the ranked order: value first, then place among the candidates, which is the
// lower half. Returns how many. values: room for W more than n.
static int bucket_keys(const float* values, int n, const Buckets& b, int bucket, uint64_t* keys) {
    int found = 0;
    for (int i = 0; i < n; i += W) {
        uint32_t bits = lane_bits(bucket_of(load(values + i), b) == splat_int(bucket));
        for (; bits; bits &= bits - 1) {
            const int at = i + __builtin_ctz(bits);
            if (at >= n) break;
            keys[found++] = uint64_t(descending(values[at])) << 32 | uint32_t(at);
        }
    }
    return found;
}

static constexpr SamplingKernels sampling_kernels = {
    weigh_logits, piece_sums, piece_maxima, collect, fill_buckets, bucket_keys,
};

}  // namespace octavo::OCTAVO_ISA
