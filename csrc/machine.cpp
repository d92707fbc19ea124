#include "machine.h"

#include <algorithm>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
    constexpr int64_t HUGE_PAGE = 1 << 21;
    const int64_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    const int64_t size = (std::max<int64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    data_.reset(static_cast<char*>(std::aligned_alloc(size_t(alignment), size_t(size))));
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    if (size >= HUGE_PAGE) madvise(data_.get(), size_t(size), MADV_HUGEPAGE);  // streams cross fewer page borders
#endif
    std::memset(data_.get(), 0, size_t(size));
}

void Buffer::grow(int64_t bytes) {
    if (bytes > bytes_) *this = Buffer(std::max(bytes, bytes_ + bytes_ / 2));
}

Machine::Machine(int threads, const std::string& isa_name, const Kernels* table)
    : team(threads), isa(isa_name), kernels(*table), scratch(threads) {
    reserve_scratch(64, 4096);
}

void Machine::reserve_scratch(int head_size, int64_t row_floats) {
    const int64_t bytes = kernels.scratch_bytes(head_size, row_floats);
    for (Buffer& buffer : scratch) buffer.grow(bytes);
}

void Machine::product(const Product& p, int thread, const Best* best) {
    const int panels = p.matrix->panels, rows = p.num_rows;
    // Enough units for an even end, and no more rows in one than its scratch holds or the cache keeps.
    constexpr int64_t ROWS_BYTES = 384 << 10;
    const int most = int(std::clamp<int64_t>(ROWS_BYTES / std::max<int64_t>(p.rows.stride, 1), 12, MOST_UNIT_ROWS));
    int blocks = (rows + most - 1) / most;
    blocks = std::clamp(std::max(blocks, (3 * team.size() + panels - 1) / panels), 1, std::max(1, rows / 12 + 1));
    blocks = std::max(blocks, (rows + MOST_UNIT_ROWS - 1) / MOST_UNIT_ROWS);
    char* memory = scratch[thread].data();
    team.share(panels * blocks, [&](int u) {
        const int block = u / panels, panel = u % panels;
        const int first = int(int64_t(rows) * block / blocks), end = int(int64_t(rows) * (block + 1) / blocks);
        if (end > first) kernels.product_unit(p, panel, first, end - first, memory, best ? best[thread] : Best{});
    });
}

void Machine::attention(const Attention& a, const std::vector<AttentionTask>& tasks, const std::vector<int32_t>& folded,
                        int thread) {
    char* memory = scratch[thread].data();
    team.share(int(tasks.size()) * a.num_kv_heads, [&](int u) {
        kernels.attention_unit(a, tasks[u / a.num_kv_heads], u % a.num_kv_heads, memory);
    });
    if (folded.empty()) return;
    team.share(int(folded.size()), [&](int i) {
        for (int head = 0; head < a.num_heads; head++) kernels.fold_unit(a, folded[i], head, memory);
    });
}

}  // namespace octavo
