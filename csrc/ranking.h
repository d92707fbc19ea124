// The candidates of one row in ranked order: greater value first, of equal values the lower id first. They are not sorted, but
// counted into buckets by value; a place is found by walking over buckets, and only the bucket it lies in is sorted.
//
//     values   peak                                          bound
//              | 1 | 2 | 1 | 4 | 3 | 7 | 12 | 9 | 15 | 31 |      each bucket knows how many it has and what they weigh
//                      ^token      ^top-p ends     ^top-k ends
//
// Cumulative sums are of whole numbers and in ranked order, so a place depends neither on the bound nor on the buckets.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "weighing.h"

namespace octavo {

constexpr int MOST_BUCKETS = 512;

// Arrays for the candidates of one row after the other, in memory of the caller's.
struct Candidates {
    float* values;
    float* weights;
    int32_t* ids;
    uint64_t* keys;
    double* bucket_weights;
    int32_t* bucket_counts;

    // Bytes for rows of a vocabulary; sets the arrays to lie at `data`, which may be null if only the size is wanted.
    int64_t lay_out(char* data, int vocab_size) {
        constexpr int SLACK = 64;  // kernels read and write whole vectors
        int64_t used = 0;
        auto take = [&]<class T>(T*& array, int64_t count) {
            array = data ? reinterpret_cast<T*>(data + used) : nullptr;
            used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        };
        take(values, vocab_size + SLACK);
        take(weights, vocab_size + SLACK);
        take(ids, vocab_size);
        take(keys, vocab_size);
        take(bucket_weights, MOST_BUCKETS);
        take(bucket_counts, MOST_BUCKETS);
        return used;
    }
};

class Ranking {
public:
    // A candidate's id, and the weight of all candidates up to and with it.
    struct Place {
        int32_t id;
        double through;
    };

    Ranking(const SamplingKernels& kernels, const Candidates& memory) : kernels_(kernels), memory_(memory) {}

    // Takes the logits of a row from `bound` on, which is not above the peak. maxima: of its pieces.
    void take(const float* logits, int vocab_size, const float* maxima, float bound, const Weighing& weighing) {
        const Candidates& m = memory_;
        count_ = kernels_.collect(logits, vocab_size, maxima, bound, m.values, m.ids);
        kernels_.weigh(m.values, count_, weighing, m.weights);
        buckets_ = {weighing.peak, 0, std::clamp(count_ / 4, 1, MOST_BUCKETS), m.bucket_weights, m.bucket_counts};
        // If the bound is at the peak, any number will do that 0 can be multiplied with.
        buckets_.inverse = std::min(float(buckets_.count) / (weighing.peak - bound), std::numeric_limits<float>::max());
        std::fill_n(m.bucket_weights, buckets_.count, 0.0);
        std::fill_n(m.bucket_counts, buckets_.count, 0);
        kernels_.fill_buckets(m.values, m.weights, count_, buckets_);
        total_ = 0;
        for (int b = 0; b < buckets_.count; b++) total_ += m.bucket_weights[b];
        sorted_ = -1;
    }

    int count() const { return count_; }
    double total() const { return total_; }

    // The candidate with `rank` others before it; rank is below count().
    Place at(int rank) {
        const Candidates& m = memory_;
        int bucket = 0, before = 0;
        double weight = 0;
        for (; before + m.bucket_counts[bucket] <= rank; bucket++)
            before += m.bucket_counts[bucket], weight += m.bucket_weights[bucket];
        sort(bucket);
        for (int i = 0; i <= rank - before; i++) weight += weight_at(i);
        return {id_at(rank - before), weight};
    }

    // The first candidate up to and with which they weigh more than `target`; target is below total().
    Place beyond(double target) {
        const Candidates& m = memory_;
        int bucket = 0;
        double weight = 0;
        for (; weight + m.bucket_weights[bucket] <= target; bucket++) weight += m.bucket_weights[bucket];
        sort(bucket);
        int i = 0;
        for (weight += weight_at(0); weight <= target;) weight += weight_at(++i);
        return {id_at(i), weight};
    }

private:
    int candidate_at(int i) const { return int(uint32_t(memory_.keys[i])); }
    int32_t id_at(int i) const { return memory_.ids[candidate_at(i)]; }
    double weight_at(int i) const { return memory_.weights[candidate_at(i)]; }

    // Leaves the keys of a bucket in order. Where all values are equal they come so.
    void sort(int bucket) {
        if (bucket == sorted_) return;
        const int found = kernels_.bucket_keys(memory_.values, count_, buckets_, bucket, memory_.keys);
        if (!std::is_sorted(memory_.keys, memory_.keys + found)) std::sort(memory_.keys, memory_.keys + found);
        sorted_ = bucket;
    }

    const SamplingKernels& kernels_;
    const Candidates& memory_;
    Buckets buckets_{};
    int count_ = 0, sorted_ = -1;
    double total_ = 0;
};

}  // namespace octavo
