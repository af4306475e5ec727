#pragma once

// Slots and moves: which expert lies in which slot, and the thread that uploads.
//
// Four invariants (tests/test_moves.py breaks each on purpose):
//  1. a slot is never written while a kernel may find it by the published map: uploads go to free slots only, and a slot becomes free
//     only when the map has dropped it; a decode that streams writes slots whose experts it does not use, in its own order;
//  2. an expert of the batch in flight is never evicted: the host changes the map between decodes only (the caller of evict, publish
//     and resize sees to that), and a decode that streams experts itself spares those of its batch (moe-stream);
//  3. host memory keeps every expert: an eviction forgets a slot and copies nothing;
//  4. an upload that does not happen changes nothing but speed.

#include "moe-block.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// the slots of one block
struct moe_slots {
    enum state_t : uint8_t {
        FREE,
        QUEUED,    // waiting for the mover
        COPYING,   // the mover is at it
        WITHDRAWN, // as COPYING, but free when it lands
        LANDED,    // written, not published
        PUBLISHED,
    };
    struct slot {
        int32_t expert = -1;
        state_t state  = FREE;
    };

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    moe_tensors             tensors = {};
    std::vector<slot>       slots;
    std::vector<int32_t>    slot_of; // published map, [n_expert], -1: cold. Read by the lanes without a lock: see invariant 2

    int64_t n_loads      = 0; // landed
    int64_t n_load_bytes = 0;
};

class moe_residency {
public:
    moe_residency(ggml_backend_dev_t dev) : dev(dev) {}
    ~moe_residency();

    bool init(std::string & error);

    // (re)allocates a block's slots; residents in slots below n stay. Between decodes only.
    bool resize(const moe_block & block, moe_slots & s, int n, std::string & error);

    // llama_moe_status. wake false: the mover is not told, which a call of `wake` makes up for after several loads
    int32_t load   (const moe_block & block, moe_slots & s, int expert, bool wake = true);
    void    wake   () { work.notify_one(); }
    int32_t evict  (moe_slots & s, int expert);
    int     publish(moe_slots & s);
    // A decode has put the expert into a published slot, whose own is cold now. -1: nobody knows what it holds, it is free.
    void    replace(moe_slots & s, int slot, int expert);
    void    sync();
    void    states(const moe_slots & s, uint8_t * out) const; // enum llama_moe_expert_state
    void    load_stats(const moe_slots & s, int64_t & n_loads, int64_t & n_bytes) const;
    void    reset_stats(moe_slots & s);

private:
    struct job {
        const moe_block * block;
        moe_slots * s;
        int slot;
    };

    void run();
    void copy(const job & j);
    int32_t drop(moe_slots & s, int expert); // evict, with the mutex held
    static int find(const moe_slots & s, int expert);

    ggml_backend_dev_t dev;
    ggml_backend_ptr   backend; // the uploads' own stream

    mutable std::mutex      mutex; // of everything below and of all moe_slots but slot_of
    std::condition_variable work;
    std::condition_variable done;
    std::deque<job>         queue;
    int                     n_copying = 0;
    bool                    stop      = false;
    double                  us_per_byte = 0; // measured, to sleep instead of spinning in the driver
    std::thread             mover;
};
