// The inner loop of everything that multiplies: a few rows times a panel of columns, four bytes of each row at a time.
//
//     rows     [MR][steps]           4 bytes per step: one float32, two bfloat16, or four bytes
//     panel    [steps][lanes]        4 bytes per step and lane, the same kind of numbers
//     sums     [MR][NV] vectors      += rows * panel, strictly in the order of steps
//
// A row's sums depend on that row and the panel only, in an order fixed by `steps`: never on how many rows there are.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {

// How the four bytes of a step are multiplied. MR: most rows at a time, so that sums and operands fit the registers.
// NV: vectors of a panel that are worked on together.
struct Float32 {
    static constexpr int NV = 2;
#if defined(__AVX512F__)
    static constexpr int MR = 12;
#elif defined(__AVX2__)
    static constexpr int MR = 6;
#else
    static constexpr int MR = 4;
#endif
    typedef vf Sum;
    struct Operand {
        vf x;
    };
    OCTAVO_INLINE Operand lanes(const void* p) { return {load(p)}; }
    OCTAVO_INLINE vf add(vf sum, uint32_t row, Operand lanes) {
        float x;
        memcpy(&x, &row, 4);
        return fma(splat(x), lanes.x, sum);
    }
};

struct BFloat16 {
    static constexpr int NV = 2;
    typedef vf Sum;
#if defined(__AVX512BF16__)
    static constexpr int MR = 12;
    struct Operand {
        vf x;
    };
    OCTAVO_INLINE Operand lanes(const void* p) { return {load(p)}; }
    OCTAVO_INLINE vf add(vf sum, uint32_t row, Operand lanes) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int32_t(row)), (__m512bh)lanes.x);
    }
#else
#if defined(__AVX512F__)
    static constexpr int MR = 10;
#else
    static constexpr int MR = 4;
#endif
    struct Operand {
        vf even, odd;
    };
    OCTAVO_INLINE Operand lanes(const void* p) {
        const vi pairs = load_int(p);
        return {bits_to_float(pairs << 16), bits_to_float(pairs & int32_t(0xffff0000))};
    }
    OCTAVO_INLINE vf add(vf sum, uint32_t row, Operand lanes) {
        const vi pair = splat_int(int32_t(row));
        sum = fma(bits_to_float(pair & int32_t(0xffff0000)), lanes.odd, sum);
        return fma(bits_to_float(pair << 16), lanes.even, sum);
    }
#endif
};

// Rows of unsigned bytes, panels of signed bytes.
struct Bytes {
    static constexpr int NV = 2;
#if defined(__AVX512VNNI__)
    static constexpr int MR = 12;
#elif defined(__AVX512F__)
    static constexpr int MR = 8;
#else
    static constexpr int MR = 3;
#endif
    typedef vi Sum;
    struct Operand {
        vi x;
    };
    OCTAVO_INLINE Operand lanes(const void* p) { return {load_int(p)}; }
    OCTAVO_INLINE vi add(vi sum, uint32_t row, Operand lanes) {
        return dot_bytes(sum, splat_int(int32_t(row)), lanes.x);
    }
};

// rows: `stride` words apart. panel[j]: where vector j of the first step lies; steps lie `pitch` bytes apart.
template <class Kind, int MR, int NV>
OCTAVO_INLINE void multiply(typename Kind::Sum (&sums)[MR][NV], const uint32_t* rows, int64_t stride,
                            const char* const (&panel)[NV], int64_t pitch, int steps) {
    const char* at[NV];
    for (int j = 0; j < NV; j++) at[j] = panel[j];
    for (int k = 0; k < steps; k++) {
        typename Kind::Operand lanes[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
            lanes[j] = Kind::lanes(at[j]);
            at[j] += pitch;
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const uint32_t row = rows[i * stride + k];
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) sums[i][j] = Kind::add(sums[i][j], row, lanes[j]);
        }
    }
}

// Calls f.template operator()<rows>() for a number of rows that is known only now, from 1 to MR.
template <int MR, class F>
OCTAVO_INLINE void with_rows(int rows, F&& f) {
    if constexpr (MR > 1) {
        if (rows < MR) return with_rows<MR - 1>(rows, static_cast<F&&>(f));
    }
    f.template operator()<MR>();
}

}  // namespace octavo::OCTAVO_ISA
