// Who attends to what in one step: the tasks of all layers, found from the block tables.
//
// A sequence with many new tokens (a prompt) is cut into tiles of tokens, each attended by one task from its first chunk of
// keys to its last. A sequence with few (the newest token) is cut by chunks of keys instead: each chunk is a task, so that
// a long sequence keeps all threads busy, and where the tables of several sequences name the same blocks for a whole chunk,
// one task reads that chunk for all of them.
//
//     blocks of A   [ 7 9 | 4 8 | 2 ]        chunk 0: one task for A and B (the same blocks)
//     blocks of B   [ 7 9 | 5 1 |   ]        chunk 1: one task each        chunk 2: one for A
//
// Cost: O(new tokens + chunks of keys).
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace octavo {

// The step's sequences: item i computes rows [row_starts[i], row_starts[i + 1]) at positions from starts[i] on.
struct StepItems {
    std::vector<int32_t> starts;
    std::vector<int32_t> row_starts;  // one more than items
    std::vector<int64_t> table_starts;
    std::vector<int32_t> blocks;      // all tables, one after the other
    int count() const { return int(starts.size()); }
};

class AttentionPlan {
public:
    // group: query heads of a kv head. share: find shared prefixes.
    void make(const StepItems& items, int block_size, int group, bool share);

    const std::vector<AttentionTask>& tasks() const { return tasks_; }
    const std::vector<int32_t>& folded_tokens() const { return folded_; }   // rows whose result is folded from partials
    const std::vector<int32_t>& partial_of() const { return partial_of_; }  // per row
    int64_t num_partials() const { return num_partials_; }
    int64_t shared_reads() const { return shared_reads_; }  // chunks that were read for another sequence already

private:
    struct Piece {  // one chunk of one item
        int32_t item, chunk, next;
    };
    void add_tiles(const StepItems& items, int item, int most_tokens);
    void add_pieces(const StepItems& items, int item, int block_size, bool share);
    int find_alike(const StepItems& items, int item, int chunk, int block_size);
    void add_tasks_of_pieces(const StepItems& items, int most_tokens);

    std::vector<AttentionTask> tasks_;
    std::vector<int32_t> folded_, partial_of_, tokens_;
    std::vector<int64_t> token_starts_;
    std::vector<Piece> pieces_;
    std::vector<int32_t> first_of_, last_of_;  // groups of pieces: linked lists through Piece::next
    std::vector<int32_t> slots_;               // hash table of groups
    int64_t num_partials_ = 0, shared_reads_ = 0;
};

}  // namespace octavo
