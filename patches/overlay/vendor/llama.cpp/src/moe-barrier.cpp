#include "moe-barrier.h"

#include <chrono>
#include <thread>

int64_t moe_now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void moe_barrier::reset(int64_t deadline) {
    n_arrived.store(0, std::memory_order_relaxed);
    given_up.store(false, std::memory_order_relaxed);
    deadline_us = deadline;
}

bool moe_barrier::wait(int n_threads) {
    if (n_threads == 1) {
        return !given_up.load(std::memory_order_relaxed);
    }
    const int gen = generation.load(std::memory_order_relaxed);
    if (n_arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
        n_arrived.store(0, std::memory_order_relaxed);
        generation.fetch_add(1, std::memory_order_release);
        return !given_up.load(std::memory_order_relaxed);
    }
    for (int spin = 0; generation.load(std::memory_order_acquire) == gen; spin++) {
        moe_cpu_relax();
        if (spin > 4000) { // about 0.2 ms on x86: somebody was preempted
            if (given_up.load(std::memory_order_relaxed)) {
                return false;
            }
            if (deadline_us != INT64_MAX && moe_now_us() > deadline_us) {
                given_up.store(true, std::memory_order_relaxed);
                return false;
            }
            std::this_thread::yield();
        }
    }
    return !given_up.load(std::memory_order_relaxed);
}
