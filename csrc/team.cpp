#include "team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

namespace {

// About thirty microseconds: longer than threads that run are apart at the end of a phase.
constexpr int LOOKS = 1000;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void Team::Signal::change() {
    word.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

void Team::Signal::wait_while(uint32_t seen) {
    for (int i = 0; i < LOOKS; i++) {
        if (word.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == seen) {
#if defined(__linux__)
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
        word.wait(seen);
#endif
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(int size) : size_(size) {
    for (int thread = 1; thread < size; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
    stopping_ = true;
    jobs_.change();
    for (std::thread& thread : threads_) thread.join();
}

void Team::wait_for_all() {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
        generation_.wait_while(generation);
        return;
    }
    // All units are claimed and done, and nobody can be at the counter of the phase that follows yet.
    next_[generation & 1].value.store(0, std::memory_order_relaxed);
    arrived_.value.store(0, std::memory_order_relaxed);
    generation_.change();
}

void Team::run_erased(void (*job)(void*, int), void* context) {
    job_ = job;
    context_ = context;
    jobs_.change();
    job(context, 0);
    wait_for_all();
}

void Team::serve(int thread) {
    for (uint32_t seen = 0;;) {
        jobs_.wait_while(seen);
        seen = jobs_.load(std::memory_order_acquire);
        if (stopping_) return;
        job_(context_, thread);
        wait_for_all();
    }
}

}  // namespace octavo
