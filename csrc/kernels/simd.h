// Vectors of the instruction set that this translation unit is compiled for, and the few operations kernels need.
//
// Every kernel is written once, in terms of `vf` (W floats) and `vi` (W 32-bit integers), and compiled once for each
// instruction set, each time in a namespace of its own (OCTAVO_ISA). Nothing here may be an out-of-line function of the
// standard library: a template that is compiled with AVX-512 in one unit could be the copy that the linker keeps for all.
//
//     portable       W = 4    vectors of the compiler (SSE2 on x86-64, NEON on ARM), fused multiply-add in two roundings
//     avx2           W = 8    AVX2 and FMA
//     avx512         W = 16   AVX-512 F, BW, DQ, VL
//     avx512_bf16    W = 16   and bfloat16 products (BF16) and byte products (VNNI) in hardware
//     amx            W = 16   and tiles; see amx.h
//
// Sums are in a fixed order everywhere: no function adds across lanes in an order that depends on sizes of a batch.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * W), may_alias, aligned(1)));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * W), may_alias, aligned(1)));

OCTAVO_INLINE vf load(const void* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
OCTAVO_INLINE void store(void* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
OCTAVO_INLINE vi load_int(const void* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
OCTAVO_INLINE void store_int(void* p, vi x) { *reinterpret_cast<vi_unaligned*>(p) = x; }
OCTAVO_INLINE vf splat(float x) { return x - vf{}; }
OCTAVO_INLINE vi splat_int(int32_t x) { return x - vi{}; }
OCTAVO_INLINE vf bits_to_float(vi x) { return reinterpret_cast<vf>(x); }
OCTAVO_INLINE vi float_to_bits(vf x) { return reinterpret_cast<vi>(x); }

OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// b where either is not a number, as the instructions do.
OCTAVO_INLINE vf maximum(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

OCTAVO_INLINE vf minimum(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

OCTAVO_INLINE vf int_to_float(vi x) { return __builtin_convertvector(x, vf); }

// To the nearest integer, ties to even.
OCTAVO_INLINE vi round_to_int(vf x) {
#if defined(__AVX512F__)
    return reinterpret_cast<vi>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
    return reinterpret_cast<vi>(_mm256_cvtps_epi32(x));
#else
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds, for |x| < 2^22
    return float_to_bits(x + magic) - float_to_bits(magic);
#endif
}

// 0 where x < bound, else y.
OCTAVO_INLINE vf zero_below(vf y, vf x, vf bound) {
#if defined(__AVX512F__)
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), y);
#else
    return bits_to_float(float_to_bits(y) & ~(x < bound));
#endif
}

// Lanes in a fixed tree: halves are added until one is left.
OCTAVO_INLINE float sum_lanes(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);  // the same tree
#endif
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

OCTAVO_INLINE float max_lanes(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#endif
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// e^x; relative error below 3e-7; exactly 0 for x < -87.3 (and so for -inf), e^88.3 for all above.
// Reduction by ln 2 in two parts and the polynomial of Cephes' expf (S. Moshier).
OCTAVO_INLINE vf exp(vf x) {
    const vf low = splat(-87.3f);
    const vf inside = maximum(low, minimum(splat(88.3f), x));  // in this order, what is not a number stays so
    const vi n = round_to_int(inside * 1.44269504088896341f);
    const vf count = int_to_float(n);
    vf r = fma(count, splat(-0.693359375f), inside);
    r = fma(count, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    return zero_below(bits_to_float(float_to_bits(p) + (n << 23)), x, low);
}

OCTAVO_INLINE vf silu(vf x) { return x / (exp(-x) + 1.0f); }

OCTAVO_INLINE vf tanh(vf x) {
    const vf e = exp(2.0f * minimum(splat(15.0f), maximum(splat(-15.0f), x)));  // in this order, as in exp
    return (e - 1.0f) / (e + 1.0f);
}

// bfloat16: the upper half of a float32, rounded to nearest, ties to even.
OCTAVO_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

OCTAVO_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // NaN stays one
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// W bfloat16 numbers to and from floats.
OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#elif defined(__AVX2__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
#else
    vf y;
    for (int i = 0; i < W; i++) y[i] = from_bf16(p[i]);
    return y;
#endif
}

OCTAVO_INLINE void store_bf16(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
#elif defined(__AVX512F__)
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
#else
    for (int i = 0; i < W; i++) p[i] = to_bf16(x[i]);
#endif
}

// W half-precision numbers to floats.
OCTAVO_INLINE vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vf y;
    for (int i = 0; i < W; i++) {
        const uint32_t h = p[i], magnitude = h & 0x7fff;
        uint32_t bits = magnitude << 13;
        if (magnitude >= 0x7c00) bits += 0x70000000;  // infinity and NaN
        float f;
        memcpy(&f, &bits, 4);
        if (magnitude < 0x7c00) f *= 0x1p112f;  // re-bias; right for subnormal numbers too
        memcpy(&bits, &f, 4);
        bits |= (h & 0x8000) << 16;
        memcpy(&f, &bits, 4);
        y[i] = f;
    }
    return y;
#endif
}

// Sums of products of four unsigned bytes of `a` and four signed bytes of `b`, added to `sum`: exact.
OCTAVO_INLINE vi dot_bytes(vi sum, vi a_unsigned, vi b_signed) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a_unsigned),
                                                    reinterpret_cast<__m512i>(b_signed)));
#elif defined(__AVX512BW__)
    const __m512i a = reinterpret_cast<__m512i>(a_unsigned), b = reinterpret_cast<__m512i>(b_signed);
    const __m512i a_even = _mm512_and_si512(a, _mm512_set1_epi16(0xff)), a_odd = _mm512_srli_epi16(a, 8);
    const __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), b_odd = _mm512_srai_epi16(b, 8);
    const __m512i both = _mm512_add_epi32(_mm512_madd_epi16(a_even, b_even), _mm512_madd_epi16(a_odd, b_odd));
    return sum + reinterpret_cast<vi>(both);
#elif defined(__AVX2__)
    const __m256i a = reinterpret_cast<__m256i>(a_unsigned), b = reinterpret_cast<__m256i>(b_signed);
    const __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(0xff)), a_odd = _mm256_srli_epi16(a, 8);
    const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b_odd = _mm256_srai_epi16(b, 8);
    const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(a_even, b_even), _mm256_madd_epi16(a_odd, b_odd));
    return sum + reinterpret_cast<vi>(both);
#else
    const vu a = reinterpret_cast<vu>(a_unsigned);
    vi total = sum;
    total += reinterpret_cast<vi>(a & 0xff) * ((b_signed << 24) >> 24);
    total += reinterpret_cast<vi>((a >> 8) & 0xff) * ((b_signed << 16) >> 24);
    total += reinterpret_cast<vi>((a >> 16) & 0xff) * ((b_signed << 8) >> 24);
    total += reinterpret_cast<vi>(a >> 24) * (b_signed >> 24);
    return total;
#endif
}

}  // namespace octavo::OCTAVO_ISA
