// MOETEST: a ggml device for tests of asynchronous moves on machines without a GPU.
//
// It computes with ggml's CPU backend, but behaves like a discrete device with streams of its own:
//  - memory is not host memory, and is poison (0xFF: NaN in every float type, -1 as an id) until written;
//  - every backend instance is a stream. Asynchronous copies only queue; they land, in order, when the *same*
//    instance computes a graph or synchronises, and read their source then (as DMA from pinned memory does);
//  - synchronous copies (ggml_backend_tensor_set/get) work at once, whatever is queued (cudaMemcpy does too);
//  - a host buffer type that stands for pinned memory and may fail to pin, silently, as CUDA's does.
// Mistakes that a real device would turn into corruption are counted, not executed: see moe_test_counters.
//
// The device is not registered: llama.cpp does not see it, a test passes the pointer of moe_test_device().

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#define MOE_TEST_API extern "C" __attribute__((visibility("default")))

// Mirrored by tests/test_native_device.py (class Counters); all fields are 64 bits wide.
struct moe_test_counters_t {
    uint64_t sets_queued;      // asynchronous uploads given to any instance
    uint64_t sets_landed;
    uint64_t gets_queued;      // asynchronous downloads
    uint64_t gets_landed;
    uint64_t bytes_set_queued;
    uint64_t bytes_set_landed;
    uint64_t bytes_get_landed;
    uint64_t bytes_set_pinned; // part of bytes_set_queued whose source lay in a MOETEST_Host buffer
    uint64_t sync_sets;        // synchronous copies
    uint64_t sync_gets;
    uint64_t bytes_sync;
    uint64_t graphs;           // graphs computed with success
    uint64_t graphs_failed;    // by moe_test_set_fail_graph, by bad ids, or by the CPU backend
    uint64_t dropped;          // jobs still queued when their instance was freed
    uint64_t stray;            // jobs not executed: device memory or pinned source was freed before they landed
    uint64_t bad_ids;          // graphs refused: an id of MUL_MAT_ID, ADD_ID or GET_ROWS out of range
    uint64_t hold_timeouts;    // a hold gave up after HOLD_LIMIT
    uint64_t alloc_failed;     // device allocations refused
    uint64_t pin_failed;       // host allocations that fell back to pageable memory
    uint64_t alloc_now;        // gauges: device bytes,
    uint64_t alloc_peak;
    uint64_t pinned_now;       //   pinned bytes,
    uint64_t queued_now;       //   jobs in all queues,
    uint64_t instances_now;    //   backend instances,
    uint64_t waiting_now;      //   instances blocked in synchronise by moe_test_hold
};

namespace {

constexpr uint8_t POISON     = 0xFF;
constexpr size_t  ALIGNMENT  = 128; // CUDA's
constexpr size_t  MEMORY     = size_t(1) << 30;
constexpr auto    HOLD_LIMIT = std::chrono::seconds(20); // a forgotten hold fails a test, it does not hang CI

struct switches {
    int64_t alloc_limit  = -1; // bytes; < 0: none
    int     fail_graph   = 0;  // the n-th next graph fails; 0: none
    bool    fail_pin     = false;
    bool    hold         = false;
    bool    defer_graphs = false;
    int     delay_us     = 0;
    bool    fixed_memory = false;
    size_t  memory_total = 0;
    size_t  memory_free  = 0;
};

// One lock for all of it: queues are short, and a test device need not scale.
std::mutex              g_mutex;
std::condition_variable g_released;
switches                g_switch;
moe_test_counters_t     g_count;

// Live blocks: address -> bytes. Never destroyed, since buffers may be freed while the process exits.
std::map<uintptr_t, size_t> & g_device_memory = *new std::map<uintptr_t, size_t>;
std::map<uintptr_t, size_t> & g_pinned_memory = *new std::map<uintptr_t, size_t>;

bool inside(const std::map<uintptr_t, size_t> & blocks, const void * p, size_t size) {
    auto it = blocks.upper_bound(uintptr_t(p));
    if (it == blocks.begin()) {
        return false;
    }
    --it;
    return uintptr_t(p) + size <= it->first + it->second;
}

void * alloc_aligned(size_t size) {
    void * p = nullptr;
    return posix_memalign(&p, ALIGNMENT, size) == 0 ? p : nullptr;
}

ggml_backend_dev_t cpu_device() {
    static ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return dev;
}

extern ggml_backend_device      g_device;
extern ggml_backend_buffer_type g_device_buft;
extern ggml_backend_buffer_type g_host_buft;

// --- device memory ---------------------------------------------------------------------------------------

void device_buffer_free(ggml_backend_buffer_t buffer) {
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        g_device_memory.erase(uintptr_t(buffer->context));
        g_count.alloc_now -= buffer->size;
    }
    memset(buffer->context, POISON, buffer->size);
    free(buffer->context);
}

void * device_buffer_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

void device_buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset((char *) tensor->data + offset, value, size);
}

void count_sync(uint64_t moe_test_counters_t::* what, size_t bytes) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_count.*what += 1;
    g_count.bytes_sync += bytes;
}

void device_buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    count_sync(&moe_test_counters_t::sync_sets, size);
    memcpy((char *) tensor->data + offset, data, size);
}

void device_buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    count_sync(&moe_test_counters_t::sync_gets, size);
    memcpy(data, (const char *) tensor->data + offset, size);
}

bool device_buffer_copy(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t from = src->view_src ? src->view_src->buffer : src->buffer;
    if (from->buft != &g_device_buft && !ggml_backend_buffer_is_host(from)) {
        return false;
    }
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

// clear(0) poisons: "cleared" slots must not pass for written ones. Any other value is taken at its word.
void device_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(buffer->context, value == 0 ? POISON : value, buffer->size);
}

const ggml_backend_buffer_i device_buffer_iface = {
    /* .free_buffer   = */ device_buffer_free,
    /* .get_base      = */ device_buffer_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ device_buffer_memset,
    /* .set_tensor    = */ device_buffer_set,
    /* .get_tensor    = */ device_buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ device_buffer_copy,
    /* .clear         = */ device_buffer_clear,
    /* .reset         = */ nullptr,
};

const char * device_buft_name(ggml_backend_buffer_type_t) {
    return "MOETEST";
}

ggml_backend_buffer_t device_buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    std::lock_guard<std::mutex> lock(g_mutex);
    const bool fits = g_switch.alloc_limit < 0 || g_count.alloc_now + size <= uint64_t(g_switch.alloc_limit);
    void * p = fits ? alloc_aligned(size) : nullptr;
    if (p == nullptr) {
        g_count.alloc_failed += 1;
        return nullptr;
    }
    memset(p, POISON, size);
    g_device_memory[uintptr_t(p)] = size;
    g_count.alloc_now += size;
    g_count.alloc_peak = std::max(g_count.alloc_peak, g_count.alloc_now);
    return ggml_backend_buffer_init(buft, device_buffer_iface, p, size);
}

size_t device_buft_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

bool device_buft_is_host(ggml_backend_buffer_type_t) {
    return false;
}

// --- pinned host memory ----------------------------------------------------------------------------------

void host_buffer_free(ggml_backend_buffer_t buffer) {
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        g_pinned_memory.erase(uintptr_t(buffer->context));
        g_count.pinned_now -= buffer->size;
    }
    free(buffer->context);
}

const char * host_buft_name(ggml_backend_buffer_type_t) {
    return "MOETEST_Host";
}

// Same shape as ggml_backend_cuda_host_buffer_type_alloc_buffer: on failure an ordinary CPU buffer, silently.
ggml_backend_buffer_t host_buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    std::unique_lock<std::mutex> lock(g_mutex);
    void * p = g_switch.fail_pin ? nullptr : alloc_aligned(size);
    if (p == nullptr) {
        g_count.pin_failed += 1;
        lock.unlock();
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    g_pinned_memory[uintptr_t(p)] = size;
    g_count.pinned_now += size;
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(p, size);
    buffer->buft              = buft;
    buffer->iface.free_buffer = host_buffer_free;
    return buffer;
}

bool host_buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

// --- streams ---------------------------------------------------------------------------------------------

struct job {
    enum kind_t { SET, GET, GRAPH } kind;
    void *        dst;
    const void *  src;
    size_t        size;
    bool          pinned; // SET: the source lay in pinned memory when queued, so it must still do so when landing
    ggml_cgraph * graph;
};

struct stream {
    ggml_backend_t  cpu;      // the inner CPU backend, one thread
    std::deque<job> queue;
    bool            computes; // has been given a graph: not a copy stream, so moe_test_hold lets it pass
};

stream * stream_of(ggml_backend_t backend) {
    return (stream *) backend->context;
}

// g_mutex is held: copies of all instances are serial, so a buffer cannot go away under one.
void land_copy(const job & j) {
    const void * device = j.kind == job::SET ? j.dst : j.src;
    if (!inside(g_device_memory, device, j.size) || (j.pinned && !inside(g_pinned_memory, j.src, j.size))) {
        g_count.stray += 1;
        return;
    }
    memcpy(j.dst, j.src, j.size);
    if (j.kind == job::SET) {
        g_count.sets_landed += 1;
        g_count.bytes_set_landed += j.size;
    } else {
        g_count.gets_landed += 1;
        g_count.bytes_get_landed += j.size;
    }
}

const ggml_tensor * base_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

bool ids_in_range(const ggml_tensor * ids, int64_t n) {
    if (ids == nullptr || ids->type != GGML_TYPE_I32 || base_of(ids)->op != GGML_OP_NONE || ids->data == nullptr) {
        return true; // computed by the graph: not known yet
    }
    for (int64_t i3 = 0; i3 < ids->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < ids->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < ids->ne[1]; ++i1) {
                const char * row = (const char *) ids->data + i1*ids->nb[1] + i2*ids->nb[2] + i3*ids->nb[3];
                for (int64_t i0 = 0; i0 < ids->ne[0]; ++i0) {
                    const int32_t id = *(const int32_t *) (row + i0*ids->nb[0]);
                    if (id < 0 || id >= n) {
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

// The CPU kernels only assert() on their ids, so in a release build a bad one (such as the -1 of an unwritten
// tensor) would corrupt memory. A real device may do anything; this one refuses.
bool ids_are_good(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const bool good =
            node->op == GGML_OP_MUL_MAT_ID ? ids_in_range(node->src[2], node->src[0]->ne[2]) :
            node->op == GGML_OP_ADD_ID     ? ids_in_range(node->src[2], node->src[1]->ne[1]) :
            node->op == GGML_OP_GET_ROWS   ? ids_in_range(node->src[1], node->src[0]->ne[1]) : true;
        if (!good) {
            return false;
        }
    }
    return true;
}

ggml_status run_graph(stream * s, ggml_cgraph * graph) {
    const bool good = ids_are_good(graph);
    const ggml_status status = good ? ggml_backend_graph_compute(s->cpu, graph) : GGML_STATUS_FAILED;
    std::lock_guard<std::mutex> lock(g_mutex);
    g_count.bad_ids += good ? 0 : 1;
    (status == GGML_STATUS_SUCCESS ? g_count.graphs : g_count.graphs_failed) += 1;
    return status;
}

// Lands everything that this instance has queued, in order.
void drain(stream * s) {
    for (;;) {
        std::unique_lock<std::mutex> lock(g_mutex);
        if (s->queue.empty()) {
            return;
        }
        const job j = s->queue.front();
        s->queue.pop_front();
        g_count.queued_now -= 1;
        if (j.kind != job::GRAPH) {
            land_copy(j);
            continue;
        }
        lock.unlock();
        run_graph(s, j.graph); // a deferred graph has nobody to tell: its failure shows in graphs_failed
    }
}

void push(stream * s, const job & j) {
    g_count.queued_now += 1;
    s->queue.push_back(j);
}

const char * stream_name(ggml_backend_t) {
    return "MOETEST";
}

void stream_free(ggml_backend_t backend) {
    stream * s = stream_of(backend);
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        g_count.dropped += s->queue.size();
        g_count.queued_now -= s->queue.size();
        g_count.instances_now -= 1;
    }
    ggml_backend_free(s->cpu);
    delete s;
    delete backend;
}

void stream_set_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    std::lock_guard<std::mutex> lock(g_mutex);
    const bool pinned = inside(g_pinned_memory, data, size);
    g_count.sets_queued += 1;
    g_count.bytes_set_queued += size;
    g_count.bytes_set_pinned += pinned ? size : 0;
    push(stream_of(backend), { job::SET, (char *) tensor->data + offset, data, size, pinned, nullptr });
}

void stream_get_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_count.gets_queued += 1;
    push(stream_of(backend), { job::GET, data, (const char *) tensor->data + offset, size, false, nullptr });
}

void stream_synchronize(ggml_backend_t backend) {
    stream * s = stream_of(backend);
    int delay_us;
    {
        std::unique_lock<std::mutex> lock(g_mutex);
        if (g_switch.hold && !s->computes && !s->queue.empty()) {
            g_count.waiting_now += 1;
            const bool released = g_released.wait_for(lock, HOLD_LIMIT, [] { return !g_switch.hold; });
            g_count.waiting_now -= 1;
            g_count.hold_timeouts += released ? 0 : 1;
        }
        delay_us = s->queue.empty() ? 0 : g_switch.delay_us;
    }
    if (delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    }
    drain(s);
}

ggml_status stream_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    stream * s = stream_of(backend);
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        s->computes = true;
        if (g_switch.fail_graph > 0 && --g_switch.fail_graph == 0) {
            g_count.graphs_failed += 1;
            return GGML_STATUS_FAILED;
        }
        if (g_switch.defer_graphs) {
            push(s, { job::GRAPH, nullptr, nullptr, 0, false, graph });
            return GGML_STATUS_SUCCESS;
        }
    }
    drain(s);
    return run_graph(s, graph);
}

const ggml_backend_i stream_iface = {
    /* .get_name            = */ stream_name,
    /* .free                = */ stream_free,
    /* .set_tensor_async    = */ stream_set_async,
    /* .get_tensor_async    = */ stream_get_async,
    /* .set_tensor_2d_async = */ nullptr, // ggml falls back to one call a row
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr, // ggml falls back to synchronise both and copy
    /* .synchronize         = */ stream_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ stream_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

// --- device ----------------------------------------------------------------------------------------------

const char * device_name(ggml_backend_dev_t) {
    return "MOETEST";
}

const char * device_description(ggml_backend_dev_t) {
    return "test device: CPU with memory and streams of its own";
}

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    std::lock_guard<std::mutex> lock(g_mutex);
    *total = g_switch.fixed_memory ? g_switch.memory_total : MEMORY;
    *free  = g_switch.fixed_memory ? g_switch.memory_free
                                   : MEMORY - std::min<size_t>(MEMORY, g_count.alloc_now);
}

// GPU: code under test is to treat it as a discrete device.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = device_name(dev);
    props->description = device_description(dev);
    props->type        = device_type(dev);
    device_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.async       = true;
    props->caps.host_buffer = true;
}

ggml_guid_t device_guid() {
    static ggml_guid guid = { 'm', 'o', 'e', '-', 't', 'e', 's', 't', '-', 'd', 'e', 'v', 'i', 'c', 'e', '1' };
    return &guid;
}

ggml_backend_t device_init(ggml_backend_dev_t dev, const char *) {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    auto set_n_threads = (ggml_backend_set_n_threads_t)
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), "ggml_backend_set_n_threads");
    if (set_n_threads != nullptr) {
        set_n_threads(cpu, 1);
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    g_count.instances_now += 1;
    return new ggml_backend { device_guid(), stream_iface, dev, new stream { cpu, {}, false } };
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return &g_device_buft;
}

ggml_backend_buffer_type_t device_host_buffer_type(ggml_backend_dev_t) {
    return &g_host_buft;
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == &g_device_buft;
}

const char * reg_name(ggml_backend_reg_t) {
    return "MOETEST";
}

size_t reg_device_count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t) {
    return &g_device;
}

ggml_backend_reg g_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */ { reg_name, reg_device_count, reg_device, nullptr },
    /* .context     = */ nullptr,
};

ggml_backend_device g_device = {
    /* .iface = */ {
        /* .get_name             = */ device_name,
        /* .get_description      = */ device_description,
        /* .get_memory           = */ device_memory,
        /* .get_type             = */ device_type,
        /* .get_props            = */ device_props,
        /* .init_backend         = */ device_init,
        /* .get_buffer_type      = */ device_buffer_type,
        /* .get_host_buffer_type = */ device_host_buffer_type,
        /* .buffer_from_host_ptr = */ nullptr,
        /* .supports_op          = */ device_supports_op,
        /* .supports_buft        = */ device_supports_buft,
        /* .offload_op           = */ nullptr,
        /* .event_new            = */ nullptr,
        /* .event_free           = */ nullptr,
        /* .event_synchronize    = */ nullptr,
    },
    /* .reg     = */ &g_reg,
    /* .context = */ nullptr,
};

ggml_backend_buffer_type g_device_buft = {
    { device_buft_name, device_buft_alloc, device_buft_alignment, nullptr, nullptr, device_buft_is_host },
    &g_device,
    nullptr,
};

ggml_backend_buffer_type g_host_buft = {
    { host_buft_name, host_buft_alloc, device_buft_alignment, nullptr, nullptr, host_buft_is_host },
    &g_device,
    nullptr,
};

} // namespace

// --- the tests' side -------------------------------------------------------------------------------------

// NULL where ggml has no CPU device.
MOE_TEST_API ggml_backend_dev_t moe_test_device(void) {
    return cpu_device() ? &g_device : nullptr;
}

// Device allocations that would bring the total above `bytes` return NULL; < 0: no limit.
MOE_TEST_API void moe_test_set_fail_alloc_after(int64_t bytes) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.alloc_limit = bytes;
}

// The n-th graph from now (1: the next one), of any instance, returns GGML_STATUS_FAILED; 0: none.
MOE_TEST_API void moe_test_set_fail_graph(int n) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.fail_graph = n;
}

// Host buffers come back as ordinary CPU buffers.
MOE_TEST_API void moe_test_set_fail_pin(bool fail) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.fail_pin = fail;
}

// What the device reports; total 0: 1 GiB and what is really free of it.
MOE_TEST_API void moe_test_set_memory(size_t total, size_t free) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.fixed_memory = total > 0;
    g_switch.memory_total = total;
    g_switch.memory_free  = free;
}

// While held, copy streams (instances with queued jobs that never were given a graph) block in synchronise, for
// at most HOLD_LIMIT. Instances that compute go on, so a decode can run while an upload is in flight.
MOE_TEST_API void moe_test_hold(bool hold) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.hold = hold;
    g_released.notify_all();
}

// Every synchronise that has something to land takes this much longer.
MOE_TEST_API void moe_test_set_delay_us(int us) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.delay_us = us;
}

// Graphs, too, wait for synchronise, so that a result read without one is poison or old. The cgraph must live
// until then (CUDA would not need it that long). Injected failures still come back at once.
MOE_TEST_API void moe_test_set_defer_graphs(bool defer) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_switch.defer_graphs = defer;
}

MOE_TEST_API void moe_test_counters(moe_test_counters_t * out) {
    std::lock_guard<std::mutex> lock(g_mutex);
    *out = g_count;
}

// All switches off, all counters zero; gauges (…_now) stay what they are.
MOE_TEST_API void moe_test_reset(void) {
    std::lock_guard<std::mutex> lock(g_mutex);
    moe_test_counters_t fresh = {};
    fresh.alloc_now     = g_count.alloc_now;
    fresh.alloc_peak    = g_count.alloc_now;
    fresh.pinned_now    = g_count.pinned_now;
    fresh.queued_now    = g_count.queued_now;
    fresh.instances_now = g_count.instances_now;
    fresh.waiting_now   = g_count.waiting_now;
    g_count  = fresh;
    g_switch = {};
    g_released.notify_all();
}
