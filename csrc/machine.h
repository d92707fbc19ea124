// What computes: a team of threads, the kernels of one instruction set, and each thread's scratch memory.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace octavo {

// Memory aligned to cache lines, zeroed; not touched before it is used.
struct Buffer {
    Buffer() = default;
    explicit Buffer(int64_t bytes);
    char* data() const { return data_.get(); }
    int64_t bytes() const { return bytes_; }
    // At least `bytes`; what was in it is lost if it grows.
    void grow(int64_t bytes);

private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char[], Free> data_;
    int64_t bytes_ = 0;
};

struct Machine {
    Machine(int threads, const std::string& isa, const Kernels* kernels);

    Team team;
    const std::string isa;
    const Kernels& kernels;
    std::vector<Buffer> scratch;  // per thread

    void reserve_scratch(int head_size, int64_t row_floats);

    // Within a job: all rows of a product. best: per thread, for Finish::BEST.
    void product(const Product& p, int thread, const Best* best = nullptr);
    // Within a job: tasks for all kv heads, then what is folded.
    void attention(const Attention& a, const std::vector<AttentionTask>& tasks, const std::vector<int32_t>& folded, int thread);
    // Within a job: f(first, end) for blocks of rows.
    template <class F>
    void rows(int count, F&& f) {
        const int blocks = count < 4 * team.size() ? count : 4 * team.size();
        team.share(blocks, [&](int b) { f(int(int64_t(count) * b / blocks), int(int64_t(count) * (b + 1) / blocks)); });
    }
};

}  // namespace octavo
