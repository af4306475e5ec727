#include "moe-residency.h"

#include "moe-device.h"

#include "ggml.h"

#include <algorithm>
#include <chrono>

moe_residency::~moe_residency() {
    if (mover.joinable()) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        work.notify_all();
        mover.join();
    }
}

bool moe_residency::init(std::string & error) {
    backend.reset(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        error = std::string("the device ") + ggml_backend_dev_name(dev) + " could not be opened for uploads";
        return false;
    }
    moe_set_one_thread(backend.get());
    mover = std::thread([this] { run(); });
    return true;
}

//
// slots
//

// a view of one expert's slice, so that ggml can copy it on the device
static ggml_tensor * slice(ggml_context * ctx, ggml_tensor * t, int part, int i) {
    ggml_tensor * v = part >= MOE_GATE_B ? ggml_view_1d(ctx, t, t->ne[0], i*t->nb[1])
                                         : ggml_view_2d(ctx, t, t->ne[0], t->ne[1], t->nb[1], i*t->nb[2]);
    ggml_backend_view_init(v);
    return v;
}

static void copy_slices(const moe_tensors & from, const moe_tensors & to, int i) {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead()*MOE_N_PARTS*2, nullptr, true }));
    for (int p = 0; p < MOE_N_PARTS; p++) {
        if (from[p]) {
            ggml_backend_tensor_copy(slice(ctx.get(), from[p], p, i), slice(ctx.get(), to[p], p, i));
        }
    }
}

namespace {

// memory for n slots of a block; no buffer if there is none (or n is 0)
struct new_slots {
    new_slots(const moe_block & block, int n, ggml_backend_dev_t dev);

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    moe_tensors             tensors = {};
};

new_slots::new_slots(const moe_block & block, int n, ggml_backend_dev_t dev) {
    if (n == 0) {
        return;
    }
    ctx.reset(ggml_init({ ggml_tensor_overhead()*MOE_N_PARTS, nullptr, true }));
    for (int p = 0; p < MOE_N_PARTS; p++) {
        if (const ggml_tensor * h = block.host[p]) {
            tensors[p] = p >= MOE_GATE_B ? ggml_new_tensor_2d(ctx.get(), h->type, h->ne[0], n)
                                         : ggml_new_tensor_3d(ctx.get(), h->type, h->ne[0], h->ne[1], n);
            ggml_format_name(tensors[p], "moe_slots-%d.%d", block.row, p);
        }
    }
    buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    if (buf) {
        // Kernels may read past a row's end up to their tile (multiplied by zero activations): no NaN may lie there.
        ggml_backend_buffer_clear(buf.get(), 0);
        ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
}

// puts the memory and what lies in it in place of the block's old slots
void install(moe_slots & s, new_slots fresh, std::vector<moe_slots::slot> slots) {
    std::fill(s.slot_of.begin(), s.slot_of.end(), -1);
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i].state == moe_slots::PUBLISHED) {
            s.slot_of[slots[i].expert] = (int32_t) i;
        }
    }
    s.buf     = std::move(fresh.buf);
    s.ctx     = std::move(fresh.ctx);
    s.tensors = fresh.tensors;
    s.slots   = std::move(slots);
}

} // namespace

bool moe_residency::resize(const moe_block & block, moe_slots & s, int n, std::string & error) {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return queue.empty() && n_copying == 0; });
    if (s.slot_of.empty()) {
        s.slot_of.assign(block.n_expert, -1);
    }
    if (n == (int) s.slots.size()) {
        return true;
    }

    auto no_memory = [&] {
        error = "no memory on " + std::string(ggml_backend_dev_name(dev)) + " for " + std::to_string(n) + " slots of row " +
                std::to_string(block.row) + " (" + std::to_string(n*block.expert_bytes()) + " bytes)";
        return false;
    };
    new_slots fresh(block, n, dev);
    if (n > 0 && !fresh.buf) {
        if (n > (int) s.slots.size()) {
            return no_memory();
        }
        // It shrinks, but there is no room for both: the old memory goes first, and the residents come back as uploads.
        std::vector<int32_t> again;
        for (int i = 0; i < n; i++) {
            if (s.slots[i].state == moe_slots::LANDED || s.slots[i].state == moe_slots::PUBLISHED) {
                again.push_back(s.slots[i].expert);
            }
        }
        install(s, new_slots(block, 0, dev), {});
        fresh = new_slots(block, n, dev);
        if (!fresh.buf) {
            return no_memory();
        }
        install(s, std::move(fresh), std::vector<moe_slots::slot>(n));
        for (size_t i = 0; i < again.size(); i++) {
            s.slots[i] = { again[i], moe_slots::QUEUED };
            queue.push_back({ &block, &s, (int) i });
        }
        work.notify_one();
        return true;
    }

    std::vector<moe_slots::slot> slots(n);
    for (int i = 0; i < std::min(n, (int) s.slots.size()); i++) {
        if (s.slots[i].state == moe_slots::LANDED || s.slots[i].state == moe_slots::PUBLISHED) {
            copy_slices(s.tensors, fresh.tensors, i);
            slots[i] = s.slots[i];
        }
    }
    install(s, std::move(fresh), std::move(slots));
    return true;
}

int moe_residency::find(const moe_slots & s, int expert) {
    for (size_t i = 0; i < s.slots.size(); i++) {
        if (s.slots[i].expert == expert && s.slots[i].state != moe_slots::WITHDRAWN) {
            return (int) i;
        }
    }
    return -1;
}

//
// moves
//

int32_t moe_residency::load(const moe_block & block, moe_slots & s, int expert, bool wake) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (find(s, expert) >= 0) {
            return LLAMA_MOE_ALREADY_RESIDENT;
        }
        auto free = std::find_if(s.slots.begin(), s.slots.end(), [](const moe_slots::slot & x) { return x.state == moe_slots::FREE; });
        // where all experts have room, each takes the slot of its number: the slots are the layer's weights once they are full
        if ((int) s.slots.size() == block.n_expert && s.slots[expert].state == moe_slots::FREE) {
            free = s.slots.begin() + expert;
        }
        if (free == s.slots.end()) {
            return LLAMA_MOE_NO_FREE_SLOT;
        }
        free->expert = expert;
        free->state  = moe_slots::QUEUED;
        queue.push_back({ &block, &s, (int) (free - s.slots.begin()) });
    }
    if (wake) {
        work.notify_one();
    }
    return LLAMA_MOE_OK;
}

int32_t moe_residency::evict(moe_slots & s, int expert) {
    std::lock_guard<std::mutex> lock(mutex);
    return drop(s, expert);
}

int32_t moe_residency::drop(moe_slots & s, int expert) {
    const int i = find(s, expert);
    if (i < 0) {
        return LLAMA_MOE_NOT_RESIDENT;
    }
    moe_slots::slot & x = s.slots[i];
    switch (x.state) {
        case moe_slots::QUEUED:
            queue.erase(std::find_if(queue.begin(), queue.end(), [&](const job & j) { return j.s == &s && j.slot == i; }));
            x = {};
            done.notify_all(); // it may have been the last that a sync waits for
            break;
        case moe_slots::COPYING:
            x.state = moe_slots::WITHDRAWN; // the copy goes on: the slot is not free before it has landed
            break;
        case moe_slots::PUBLISHED:
            s.slot_of[expert] = -1;
            x = {};
            break;
        case moe_slots::LANDED:
            x = {};
            break;
        case moe_slots::FREE:
        case moe_slots::WITHDRAWN:
            break;
    }
    return LLAMA_MOE_OK;
}

int moe_residency::publish(moe_slots & s) {
    std::lock_guard<std::mutex> lock(mutex);
    int n = 0;
    for (size_t i = 0; i < s.slots.size(); i++) {
        if (s.slots[i].state == moe_slots::LANDED) {
            s.slots[i].state = moe_slots::PUBLISHED;
            s.slot_of[s.slots[i].expert] = (int32_t) i;
            n++;
        }
    }
    return n;
}

void moe_residency::replace(moe_slots & s, int slot, int expert) {
    std::lock_guard<std::mutex> lock(mutex);
    int32_t & left = s.slot_of[s.slots[slot].expert];
    left = left == slot ? -1 : left; // with several ubatches it may have come back elsewhere
    s.slots[slot] = {};
    if (expert < 0) {
        return;
    }
    if (s.slot_of[expert] < 0) {
        drop(s, expert); // its upload may have begun meanwhile
    }
    s.slots[slot]     = { expert, moe_slots::PUBLISHED };
    s.slot_of[expert] = slot;
}

void moe_residency::sync() {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return queue.empty() && n_copying == 0; });
}

void moe_residency::states(const moe_slots & s, uint8_t * out) const {
    std::lock_guard<std::mutex> lock(mutex);
    std::fill(out, out + s.slot_of.size(), (uint8_t) LLAMA_MOE_COLD);
    for (const auto & x : s.slots) {
        if (x.state == moe_slots::PUBLISHED) {
            out[x.expert] = LLAMA_MOE_RESIDENT;
        } else if (x.state != moe_slots::FREE && x.state != moe_slots::WITHDRAWN) {
            out[x.expert] = LLAMA_MOE_UPLOADING;
        }
    }
}

void moe_residency::load_stats(const moe_slots & s, int64_t & n_loads, int64_t & n_bytes) const {
    std::lock_guard<std::mutex> lock(mutex);
    n_loads = s.n_loads;
    n_bytes = s.n_load_bytes;
}

void moe_residency::reset_stats(moe_slots & s) {
    std::lock_guard<std::mutex> lock(mutex);
    s.n_loads = s.n_load_bytes = 0;
}

//
// the mover
//

void moe_residency::copy(const job & j) {
    const int expert = j.s->slots[j.slot].expert; // stable while COPYING or WITHDRAWN
    for (int p = 0; p < MOE_N_PARTS; p++) {
        if (ggml_tensor * t = j.s->tensors[p]) {
            const size_t n = j.block->expert_stride(p);
            ggml_backend_tensor_set_async(backend.get(), t, j.block->expert_data(p, expert), j.slot*n, n);
        }
    }
}

void moe_residency::run() {
    constexpr size_t MAX_BATCH_BYTES = 32 << 20; // a publish should not wait long for what landed first
    std::vector<job> batch;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        work.wait(lock, [this] { return stop || !queue.empty(); });
        if (stop) {
            return; // what is queued is dropped: nothing points to it
        }
        batch.clear();
        size_t n_bytes = 0;
        while (!queue.empty() && n_bytes < MAX_BATCH_BYTES) {
            const job j = queue.front();
            queue.pop_front();
            j.s->slots[j.slot].state = moe_slots::COPYING;
            n_bytes += j.block->expert_bytes();
            batch.push_back(j);
        }
        n_copying = (int) batch.size();

        lock.unlock();
        const auto t0 = std::chrono::steady_clock::now();
        for (const job & j : batch) {
            copy(j);
        }
        // Drivers spin while they wait, on a core that the cold lane needs: sleep through most of the time that it should take.
        // Short naps overshoot by more than they save; long ones would sleep on after a stall.
        const int64_t nap = std::min((int64_t) (0.7*us_per_byte*n_bytes), (int64_t) 5000);
        if (nap > 200) {
            std::this_thread::sleep_for(std::chrono::microseconds(nap));
        }
        ggml_backend_synchronize(backend.get());
        const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count();
        // contains the nap, so an estimate that is too high falls by 30 % a batch; after a stall it rises by 25 % at most
        const double spent = us/n_bytes;
        us_per_byte = us_per_byte == 0 ? 0.5*spent : std::min(spent, 1.25*us_per_byte);
        lock.lock();

        for (const job & j : batch) {
            moe_slots::slot & x = j.s->slots[j.slot];
            if (x.state == moe_slots::WITHDRAWN) {
                x = {};
            } else {
                x.state = moe_slots::LANDED;
                j.s->n_loads++;
                j.s->n_load_bytes += j.block->expert_bytes();
            }
        }
        n_copying = 0;
        done.notify_all();
    }
}
