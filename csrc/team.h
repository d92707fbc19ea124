// Threads that work through the phases of a step together.
//
// A job is one function that every thread runs; within it, `share` hands out the units of a phase one by one and ends when all
// are done. So a step wakes the threads once, however many phases it has. Units are claimed, not assigned: on a machine that
// has other things to do, a thread that was kept from its core takes fewer.
//
// A thread that waits looks for some microseconds and then sleeps in the kernel: an idle team takes no CPU, and a team that
// shares its cores with other processes does not keep them from running.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

class Team {
public:
    // size: threads, the caller of run() included.
    explicit Team(int size);
    ~Team();
    Team(const Team&) = delete;

    int size() const { return size_; }

    // Runs job(thread) on all threads, 0 being the caller's; returns when all are done. Not to be called by two threads at
    // the same time.
    template <class Job>
    void run(Job&& job) {
        run_erased([](void* context, int thread) { (*static_cast<std::remove_reference_t<Job>*>(context))(thread); }, &job);
    }

    // Within a job, called by every thread in the same order with the same number: each unit is done by one thread, and all
    // are done, and seen by all, when it returns.
    template <class Unit>
    void share(int units, Unit&& unit) {
        std::atomic<int>& next = next_[generation_.load(std::memory_order_relaxed) & 1].value;
        for (int u = next.fetch_add(1, std::memory_order_relaxed); u < units; u = next.fetch_add(1, std::memory_order_relaxed))
            unit(u);
        wait_for_all();
    }

private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };
    // A word that changes, and how many sleep until it does.
    struct alignas(64) Signal {
        std::atomic<uint32_t> word{0};
        std::atomic<int> sleepers{0};
        uint32_t load(std::memory_order order) const { return word.load(order); }
        void change();
        void wait_while(uint32_t seen);
    };

    void run_erased(void (*job)(void*, int), void* context);
    void wait_for_all();
    void serve(int thread);

    const int size_;
    Counter next_[2];     // of the current phase and the one after; phases are told apart by the lowest bit of generation_
    Counter arrived_;
    Signal generation_;   // changes when a phase ends
    Signal jobs_;         // changes when a job begins
    void (*job_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
