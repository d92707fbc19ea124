// What the choice of tokens (sampling.cpp) and its passes over logits (kernels/sampling.h) share.
#pragma once

#include <cstdint>

namespace octavo {

// Logits of a row that are read, summed up or passed over together.
constexpr int PIECE = 64;

// How logits of a row become weights: with x = (logit - peak) / temperature, the whole number nearest to e^x * scale, and 0
// where x is below `floor`. The idea is that of src/octavo/sampling/weights.py.
struct Weighing {
    float peak, temperature, floor, scale;
};

// Candidates by value: bucket 0 begins at `origin`, and a value that is d below belongs to bucket d * inverse.
struct Buckets {
    float origin, inverse;
    int count;
    double* weights;  // [count] sum in each bucket
    int32_t* counts;  // [count] candidates in each
};

struct SamplingKernels {
    void (*weigh)(const float* x, int n, const Weighing&, float* weights);
    void (*piece_sums)(const float* x, int n, const Weighing&, double* sums);
    void (*piece_maxima)(const float* x, int n, float* maxima);
    int (*collect)(const float* x, int n, const float* maxima, float bound, float* values, int32_t* ids);
    void (*fill_buckets)(const float* values, const float* weights, int n, const Buckets&);
    int (*bucket_keys)(const float* values, int n, const Buckets&, int bucket, uint64_t* keys);
};

}  // namespace octavo
