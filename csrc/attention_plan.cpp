#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

// Up to so many new tokens a sequence is cut by chunks of keys, beyond by tiles of tokens.
constexpr int FEW_TOKENS = 4;

struct Blocks {
    const int32_t* ids;
    int count;
};

// The blocks that hold a whole chunk.
Blocks blocks_of(const StepItems& items, int item, int chunk, int block_size) {
    const int first = chunk * CHUNK / block_size, end = ((chunk + 1) * CHUNK + block_size - 1) / block_size;
    return {items.blocks.data() + items.table_starts[item] + first, end - first};
}

uint64_t hash_of(const Blocks& blocks, int chunk) {
    uint64_t h = 0x9E3779B97F4A7C15ull * uint64_t(chunk + 1);
    for (int i = 0; i < blocks.count; i++) h = (h ^ uint64_t(uint32_t(blocks.ids[i]))) * 0xBF58476D1CE4E5B9ull;
    return h ^ (h >> 29);
}

}  // namespace

void AttentionPlan::make(const StepItems& items, int block_size, int group, bool share) {
    tasks_.clear();
    folded_.clear();
    tokens_.clear();
    token_starts_.clear();
    pieces_.clear();
    first_of_.clear();
    last_of_.clear();
    num_partials_ = shared_reads_ = 0;
    partial_of_.assign(items.row_starts.back(), -1);
    int64_t most_pieces = 0;
    for (int i = 0; i < items.count(); i++) most_pieces += (items.starts[i] + FEW_TOKENS) / CHUNK + 1;
    size_t size = 16;
    while (size < size_t(most_pieces) * 2) size *= 2;
    slots_.assign(size, -1);
    const int most_tokens = std::max(1, MOST_QUERY_ROWS / group);
    for (int i = 0; i < items.count(); i++) {
        const int count = items.row_starts[i + 1] - items.row_starts[i];
        if (count > FEW_TOKENS || items.starts[i] + count <= CHUNK)
            add_tiles(items, i, most_tokens);
        else
            add_pieces(items, i, block_size, share);
    }
    add_tasks_of_pieces(items, most_tokens);
    for (size_t t = 0; t < tasks_.size(); t++) tasks_[t].tokens = tokens_.data() + token_starts_[t];
}

void AttentionPlan::add_tiles(const StepItems& items, int item, int most_tokens) {
    const int first = items.row_starts[item], count = items.row_starts[item + 1] - first;
    // The last tile sees most and takes longest, so it goes first.
    for (int begin = (count - 1) / most_tokens * most_tokens; begin >= 0; begin -= most_tokens) {
        const int end = std::min(begin + most_tokens, count);
        token_starts_.push_back(int64_t(tokens_.size()));
        for (int t = begin; t < end; t++) tokens_.push_back(first + t);
        const int last_position = items.starts[item] + end - 1;
        tasks_.push_back(
            {nullptr, items.blocks.data() + items.table_starts[item], end - begin, 0, last_position / CHUNK + 1, 0});
    }
}

void AttentionPlan::add_pieces(const StepItems& items, int item, int block_size, bool share) {
    const int first = items.row_starts[item], end = items.row_starts[item + 1];
    const int chunks = (items.starts[item] + end - first - 1) / CHUNK + 1;
    for (int row = first; row < end; row++) {
        partial_of_[row] = int32_t(num_partials_);
        num_partials_ += chunks;
        folded_.push_back(row);
    }
    for (int chunk = 0; chunk < chunks; chunk++) {
        // Only a chunk that every token of the item sees as a whole can be read together with others.
        const bool whole = (chunk + 1) * CHUNK <= items.starts[item] + 1;
        const int piece = int(pieces_.size());
        pieces_.push_back({item, chunk, -1});
        const int group = share && whole ? find_alike(items, item, chunk, block_size) : -1;
        if (group >= 0 && first_of_[group] >= 0) {
            pieces_[last_of_[group]].next = piece;
            last_of_[group] = piece;
            shared_reads_++;
        } else if (group >= 0) {
            first_of_[group] = last_of_[group] = piece;
        } else {
            first_of_.push_back(piece);
            last_of_.push_back(piece);
        }
    }
}

// The group whose pieces have the same blocks; a new, empty one if there is none.
int AttentionPlan::find_alike(const StepItems& items, int item, int chunk, int block_size) {
    const Blocks mine = blocks_of(items, item, chunk, block_size);
    const size_t mask = slots_.size() - 1;
    for (size_t at = hash_of(mine, chunk) & mask;; at = (at + 1) & mask) {
        if (slots_[at] < 0) {
            slots_[at] = int32_t(first_of_.size());
            first_of_.push_back(-1);
            last_of_.push_back(-1);
            return slots_[at];
        }
        const Piece& other = pieces_[first_of_[slots_[at]]];
        const Blocks theirs = blocks_of(items, other.item, other.chunk, block_size);
        if (other.chunk == chunk && memcmp(mine.ids, theirs.ids, size_t(mine.count) * 4) == 0) return slots_[at];
    }
}

void AttentionPlan::add_tasks_of_pieces(const StepItems& items, int most_tokens) {
    for (int first : first_of_) {
        const Piece& head = pieces_[first];
        AttentionTask task{
            nullptr, items.blocks.data() + items.table_starts[head.item], 0, head.chunk, head.chunk + 1, 1};
        token_starts_.push_back(int64_t(tokens_.size()));
        for (int p = first; p >= 0; p = pieces_[p].next) {
            const int item = pieces_[p].item;
            for (int row = items.row_starts[item]; row < items.row_starts[item + 1]; row++) {
                if (task.num_tokens == most_tokens) {
                    tasks_.push_back(task);
                    task.num_tokens = 0;
                    token_starts_.push_back(int64_t(tokens_.size()));
                }
                tokens_.push_back(row);
                task.num_tokens++;
            }
        }
        tasks_.push_back(task);
    }
}

}  // namespace octavo
