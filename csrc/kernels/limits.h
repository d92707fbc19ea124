// What a core can do at most, for kernels to be compared with: multiplications on registers alone, and reading memory.
//
// No kernel calls these. A product kernel on a small matrix would be no limit: it is what is to be judged.
#pragma once

#include "../types.h"
#include "simd.h"
#if defined(OCTAVO_AMX)
#include "amx.h"
#endif

namespace octavo::OCTAVO_ISA {

// Makes the compiler take x for a value it does not know, in a register, at the cost of no instruction.
#if defined(__x86_64__)
#define OCTAVO_UNKNOWN(x) asm volatile("" : "+v"(x))
#elif defined(__aarch64__)
#define OCTAVO_UNKNOWN(x) asm volatile("" : "+w"(x))
#else
#define OCTAVO_UNKNOWN(x) asm volatile("" : "+m"(x))
#endif

// Sums that do not wait for each other: more than a multiply-add has cycles of latency times units to run on, and as many
// as fit the registers beside two operands.
#if defined(__AVX512F__)
constexpr int INDEPENDENT_SUMS = 20;
#else
constexpr int INDEPENDENT_SUMS = 10;
#endif

// The instruction that multiplies each kind of number. OPERATIONS: multiplications and additions in one.
struct MultiplyFloats {
    typedef vf Vector;
    static constexpr int OPERATIONS = 2 * W;
    OCTAVO_INLINE vf add(vf sum, vf a, vf b) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
struct MultiplyHalves {
    typedef vf Vector;
    static constexpr int OPERATIONS = 4 * W;
    OCTAVO_INLINE vf add(vf sum, vf a, vf b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#else
typedef MultiplyFloats MultiplyHalves;  // bfloat16 is multiplied as float32
#endif

struct MultiplyBytes {
    typedef vi Vector;
#if defined(__AVX512VNNI__)
    static constexpr int OPERATIONS = 8 * W;
    OCTAVO_INLINE vi add(vi sum, vi a, vi b) { return dot_bytes(sum, a, b); }
#elif defined(__AVX512BW__)
    static constexpr int OPERATIONS = 4 * W;  // bytes are multiplied as 16-bit numbers
    OCTAVO_INLINE vi add(vi sum, vi a, vi b) {
        return sum + reinterpret_cast<vi>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
    }
#elif defined(__AVX2__)
    static constexpr int OPERATIONS = 4 * W;
    OCTAVO_INLINE vi add(vi sum, vi a, vi b) {
        return sum + reinterpret_cast<vi>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
    }
#else
    static constexpr int OPERATIONS = 2 * W;
    OCTAVO_INLINE vi add(vi sum, vi a, vi b) { return a * b + sum; }
#endif
};

template <class Multiply>
static int64_t multiply_registers(int64_t rounds) {
    typedef typename Multiply::Vector Vector;
    Vector sums[INDEPENDENT_SUMS] = {}, a = {}, b = {};
    OCTAVO_UNKNOWN(a);
    OCTAVO_UNKNOWN(b);
    for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 32
        for (int i = 0; i < INDEPENDENT_SUMS; i++) {
            OCTAVO_UNKNOWN(a);  // so that no product is taken from the sum before
            sums[i] = Multiply::add(sums[i], a, b);
            OCTAVO_UNKNOWN(sums[i]);
        }
    return rounds * INDEPENDENT_SUMS * Multiply::OPERATIONS;
}

#if defined(OCTAVO_AMX)
// The same in tiles: two by two of sums. A tile instruction does as much as 16 of vectors, so rounds are fewer.
template <class Kind>
static int64_t multiply_tiles(int64_t rounds, int numbers_of_word) {
    const int64_t times = rounds / AMX_ROWS + 1;
    AmxShape shape;
    AmxShape::set(&shape, AMX_ROWS, AMX_ROWS, AMX_STEPS);
    for (int64_t r = 0; r < times; r++) {
        Kind::template add<0, 4, 6>();
        Kind::template add<1, 4, 7>();
        Kind::template add<2, 5, 6>();
        Kind::template add<3, 5, 7>();
    }
    amx_release();
    return times * 4 * 2 * AMX_ROWS * (AMX_ROW_BYTES / 4) * AMX_STEPS * numbers_of_word;
}
#endif

// Multiplies numbers of a kind on registers, `rounds` times all sums. Returns how many operations that were.
static int64_t peak(Format format, int64_t rounds) {
    if (format == Format::FLOAT32) return multiply_registers<MultiplyFloats>(rounds);
#if defined(OCTAVO_AMX)
    return format == Format::BFLOAT16 ? multiply_tiles<AmxBFloat16>(rounds, 2) : multiply_tiles<AmxBytes>(rounds, 4);
#else
    return format == Format::BFLOAT16 ? multiply_registers<MultiplyHalves>(rounds) : multiply_registers<MultiplyBytes>(rounds);
#endif
}

// Reads all of `data`, front to back. bytes: a multiple of 1024.
static void read_all(const char* data, int64_t bytes) {
    constexpr int VECTORS = 8;
    vi seen[VECTORS] = {};
    for (int64_t at = 0; at < bytes; at += VECTORS * W * 4)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) seen[j] |= load_int(data + at + j * W * 4);
    for (int j = 0; j < VECTORS; j++) OCTAVO_UNKNOWN(seen[j]);
}

#undef OCTAVO_UNKNOWN

}  // namespace octavo::OCTAVO_ISA
