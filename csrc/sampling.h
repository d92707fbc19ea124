// The choice of tokens for all rows of a step, on all threads: what src/octavo/sampling/choice.py says, without sorting rows.
//
//     weights     whole numbers, so that sums are exact in any order (weighing.h)
//     in order    no top-k, no top-p: sums of the pieces of a row, then the one piece that the token lies in
//     ranked      the rest: what cannot matter is left out by a bound on logits; places are found among the others (ranking.h)
//
// Invariants:
//  1. Cumulative sums are in ranked order if top-k or top-p cut, else in the order of ids: as in choice.py. With the same
//     weights both choose the same token, whatever bound, pieces, parts and threads are.
//  2. What a bound leaves out ranks behind all that is kept and cannot be chosen: it is beyond top-k, or weighs nothing, or
//     lies beyond the end of top-p. The last is guessed first, checked against the exact sum, and then made sure.
#pragma once

#include <memory>

#include "machine.h"
#include "ranking.h"

namespace octavo {

// The weight of the likeliest token in a vocabulary: a power of 2, so that a row's sum stays below 2^53.
float weight_scale(int vocab_size);

// What is drawn for one row. top_k: from 1; none is at least the vocabulary. top_p: from above 0 to 1, which is none.
// uniform: from 0 to below 1.
struct Draw {
    Weighing weighing;
    int32_t top_k;
    double top_p, uniform;
};

// Logits [R, V], one row after the other.
struct LogitRows {
    const float* logits;
    int count, vocab_size;

    const float* row(int i) const { return logits + int64_t(i) * vocab_size; }
    int pieces() const { return (vocab_size + PIECE - 1) / PIECE; }
};

class Chooser {
public:
    explicit Chooser(Machine& machine) : machine_(machine), memory_(machine.team.size()) {}

    // One token per row. Logits are not NaN; the peak of a draw is the greatest of its row, and finite.
    void choose(const LogitRows& rows, const Draw* draws, int32_t* tokens);
    // The greatest logit of each row and the lowest id that has it; NaN and the first such id if there are any.
    void greatest(const LogitRows& rows, float* values, int64_t* ids);
    // The sum of weights of each row.
    void totals(const LogitRows& rows, const Weighing* weighings, double* totals);

private:
    // Of one thread. Left as the system gives it: most rows have few candidates, and touch little of it.
    struct Memory {
        std::unique_ptr<char[]> data;
        int64_t bytes = 0;
        Candidates candidates{};
    };

    void reserve_memory(int vocab_size);
    template <class Measure, class Finish>
    void over_rows(const LogitRows& rows, Measure&& measure, Finish&& finish);
    double* sums(const LogitRows& rows, int row) const;
    float* maxima(const LogitRows& rows, int row) const;
    double total_of(const LogitRows& rows, int row) const;
    int32_t in_order(const LogitRows& rows, int row, const Draw& draw) const;
    int32_t ranked(const LogitRows& rows, int row, const Draw& draw, const Candidates& memory) const;
    float top_k_bound(const LogitRows& rows, int row, const Draw& draw, float* scratch) const;

    Machine& machine_;
    std::vector<Memory> memory_;  // per thread
    Buffer sums_, maxima_;        // per row and piece
};

}  // namespace octavo
