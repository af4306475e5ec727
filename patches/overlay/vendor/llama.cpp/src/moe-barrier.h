#pragma once

// How threads of a computation wait for each other: a barrier that spins, then yields, and can be given up.

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
static inline void moe_cpu_relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void moe_cpu_relax() { asm volatile("yield"); }
#else
static inline void moe_cpu_relax() {}
#endif

// Spins, then yields: the threads of a graph computation arrive within microseconds unless the machine is oversubscribed.
// With a deadline, those who wait give up when it has passed; from then on nobody waits until reset() (all threads have left by then).
struct moe_barrier {
    bool wait(int n_threads); // false: given up
    void reset(int64_t deadline_us = INT64_MAX); // on moe_now_us()'s clock

    std::atomic<bool> given_up{false};

private:
    int64_t deadline_us = INT64_MAX;
    alignas(64) std::atomic<int> n_arrived{0};
    alignas(64) std::atomic<int> generation{0};
};

int64_t moe_now_us(); // a steady clock
