#pragma once

// The process's pool of CPU threads behind the in-stream execution. The device raises a flag in a client's page-locked memory; thread 0
// polls the flags of all clients that have a decode in flight, and all threads compute the request. Between decodes they sleep.
//
// Waiting. A thread that waits for work spins at first (a request comes every 100 µs), then yields between looks, then naps: on a busy
// machine this makes it slower, never stuck. A core is left to the thread that launches the device's work, and on machines with many
// cores one to the thread that uploads experts: with fifteen of sixteen cores each upload pushed a thread aside for which all others
// waited (a cold expert of Qwen3-30B-A3B took 48 µs instead of 41, H200 host with 16 cores, 60 uploads a step).
//
// Failure. A computation that does not end in time is given up by those who wait for it, its client is told, and no other starts
// before the thread that hangs has come back. Until then healthy() is false and contexts use the portable execution.

#include "moe-barrier.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class moe_pool_client {
public:
    virtual ~moe_pool_client() = default;

    // by thread 0: is there a request? Prepares it.
    virtual bool poll() = 0;
    // by threads 0 ... n_threads - 1
    virtual void run(int ith, int n_threads, moe_barrier & barrier) = 0;
    // by the last thread that has left run
    virtual void finish(bool given_up) = 0;

    std::atomic<int> n_threads{1};  // how many threads a request takes at most
    int64_t timeout_us = 10000000;  // of a request

private:
    friend class moe_pool;
    std::atomic<bool> active{false};
};

class moe_pool {
public:
    static std::shared_ptr<moe_pool> of_process(); // lives as long as somebody holds it
    static int usable_cores();                     // affinity mask and cgroup quota; hybrid CPUs: performance cores only
    static int threads_for(int wanted, int n_cores); // so many of the wanted ones leave the cores free that others need

    static constexpr int MAX_THREADS = 512;

    moe_pool();
    ~moe_pool();

    void add   (const std::shared_ptr<moe_pool_client> & client);
    // Waits for threads that compute for it. false: one still hangs there after the client's time-out; the pool keeps the client alive
    // until it comes back.
    bool remove(const std::shared_ptr<moe_pool_client> & client);

    void enter(moe_pool_client & client); // its decode starts: threads wake up
    void leave(moe_pool_client & client);
    void grow (int n_threads);            // at least so many threads, if the system has them
    int  size() const { return n_threads.load(); }
    bool healthy(const moe_pool_client & client) const; // would it serve the client, which has no request under way?

    // for tests: thread `ith` sleeps for so long before it takes part in the next request; < 0: it ends for good
    void inject_fault(int ith, int sleep_ms);

private:
    struct worker_wait;

    void work(int ith, uint64_t seen);
    void take_part(int ith, int n);
    bool lead();
    bool park(worker_wait & w, bool spare);

    static constexpr int MAX_CLIENTS = 32;

    std::mutex mutex; // of threads, clients and parking
    std::condition_variable wake;
    std::vector<std::thread> threads;
    std::vector<std::shared_ptr<moe_pool_client>> clients;
    std::shared_ptr<moe_pool_client> kept; // hung on to for a thread that has not come back

    std::atomic<moe_pool_client *> slots[MAX_CLIENTS] = {}; // what thread 0 polls
    std::atomic<moe_pool_client *> in_use{nullptr};         // what thread 0 (or a request) uses now: remove waits for it

    std::atomic<int>  n_threads{0};
    std::atomic<int>  n_active{0};
    std::atomic<int>  n_parked{0};
    std::atomic<bool> stop{false};
    std::atomic<bool> broken{false}; // threads have given up a request that others have not left
    std::atomic<int64_t> deadline_us{0}; // of the request under way

    // the request under way: its number << 16 | threads that take part, in one word so that a late spare thread cannot mix two of them up
    moe_pool_client * job = nullptr;
    moe_barrier       barrier;
    alignas(64) std::atomic<uint64_t> job_word{0};
    alignas(64) std::atomic<int>      n_left{0};     // threads that have not left it yet
    alignas(64) std::atomic<bool>     busy{false};   // it has not been finished yet

    std::atomic<int> fault_thread{-1};
    std::atomic<int> fault_ms{0};
};
