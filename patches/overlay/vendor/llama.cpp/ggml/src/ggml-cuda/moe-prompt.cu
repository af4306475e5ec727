#include "moe-stream.cuh"

#include "ggml-moe-prompt.h"

// The two operations of ggml-moe-prompt.h. They only order copies on streams of their own around the products of the main stream:
//
//   product of a piece ── free ──► copies into its buffer ── ready ──► the product of the next piece there

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

void ggml_cuda_moe_prompt(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_UNUSED_VARS(ctx, dst);
}

const ggml_moe_prompt_api * ggml_cuda_moe_prompt_api() {
    return nullptr;
}

#else

// Copies within the device have a stream of their own, or they would wait for those over the link.
enum moe_copy_stream { MOE_LINK, MOE_LOCAL, MOE_N_STREAMS };

struct moe_prompt_device {
    int device;
    cudaStream_t streams[MOE_N_STREAMS];
    cudaEvent_t  free [GGML_MOE_PROMPT_BUFFERS];                // the last product that read the buffer is done
    cudaEvent_t  ready[GGML_MOE_PROMPT_BUFFERS][MOE_N_STREAMS]; // so are the copies for the next one
};

// One launch instead of a call for each copy, which would be some microseconds of the host's time and of the link's.
struct moe_gather {
    static constexpr int MAX = 120; // it is a kernel's argument
    int          n_copies;
    void *       to  [MAX];
    const void * from[MAX];
};

static constexpr int GATHER_THREADS = 128;
static constexpr int GATHER_AT_ONCE = 8; // of a thread, under way at the same time: the link's latency is some microseconds

// any grid: the copies are cut into units, which the blocks take in turn
template<typename T>
static __global__ void k_moe_gather(const moe_gather g, const size_t n) {
    constexpr size_t UNIT = GATHER_THREADS*GATHER_AT_ONCE;
    const size_t per_copy = (n + UNIT - 1)/UNIT;
    for (size_t unit = blockIdx.x; unit < per_copy*g.n_copies; unit += gridDim.x) {
        const int i = unit/per_copy;
        const T * from = (const T *) g.from[i];
        T       * to   = (T *)       g.to  [i];
        const size_t at = unit%per_copy*UNIT + threadIdx.x;
        T v[GATHER_AT_ONCE];
#pragma unroll
        for (int u = 0; u < GATHER_AT_ONCE; u++) {
            if (at + u*GATHER_THREADS < n) {
                v[u] = __ldcs(from + at + u*GATHER_THREADS);
            }
        }
#pragma unroll
        for (int u = 0; u < GATHER_AT_ONCE; u++) {
            if (at + u*GATHER_THREADS < n) {
                to[at + u*GATHER_THREADS] = v[u];
            }
        }
    }
}

template<typename T>
static void launch_gather(const moe_gather & g, size_t n_bytes, bool local, cudaStream_t stream) {
    constexpr size_t UNIT = GATHER_THREADS*GATHER_AT_ONCE;
    constexpr size_t LINK_BLOCKS  = 16; // 256 KB under way fill a link; the products that run meanwhile have the other processors
    constexpr size_t LOCAL_BLOCKS = 1024;
    const size_t n = n_bytes/sizeof(T);
    const size_t n_units = (n + UNIT - 1)/UNIT*g.n_copies;
    k_moe_gather<T><<<std::min(n_units, local ? LOCAL_BLOCKS : LINK_BLOCKS), GATHER_THREADS, 0, stream>>>(g, n);
    CUDA_CHECK(cudaGetLastError());
}

static void gather(moe_gather & g, size_t n_bytes, bool local, cudaStream_t stream) {
    if (g.n_copies == 0) {
        return;
    }
    uintptr_t bits = n_bytes;
    for (int i = 0; i < g.n_copies; i++) {
        bits |= (uintptr_t) g.to[i] | (uintptr_t) g.from[i];
    }
    if (bits % 16 == 0) {
        launch_gather<uint4>(g, n_bytes, local, stream);
    } else if (bits % 4 == 0) {
        launch_gather<uint32_t>(g, n_bytes, local, stream);
    } else if (bits % 2 == 0) {
        launch_gather<uint16_t>(g, n_bytes, local, stream);
    } else {
        launch_gather<uint8_t>(g, n_bytes, local, stream);
    }
    g.n_copies = 0;
}

// all copies to one buffer
static void fill_buffer(moe_prompt_device & d, int buffer, const ggml_moe_prompt_copy * copies, int n_copies) {
    size_t rows = 0; // bytes of an expert's; all that are fewer are those behind
    for (int i = 0; i < n_copies; i++) {
        rows = std::max(rows, copies[i].n);
    }
    moe_gather g;
    g.n_copies = 0;
    for (bool local : { false, true }) {
        if (std::none_of(copies, copies + n_copies, [=](const ggml_moe_prompt_copy & c) { return c.local == local; })) {
            continue;
        }
        const int    at     = local ? MOE_LOCAL : MOE_LINK;
        cudaStream_t stream = d.streams[at];
        CUDA_CHECK(cudaStreamWaitEvent(stream, d.free[buffer], 0));
        for (bool behind : { false, true }) {
            size_t n_bytes = 0;
            for (int i = 0; i < n_copies; i++) {
                const ggml_moe_prompt_copy & c = copies[i];
                if (c.local != local || (c.n < rows) != behind) {
                    continue;
                }
                if (!c.from) {
                    CUDA_CHECK(cudaMemsetAsync(c.to, 0, c.n, stream));
                    continue;
                }
                GGML_ASSERT(n_bytes == 0 || n_bytes == c.n);
                n_bytes = c.n;
                g.to  [g.n_copies] = c.to;
                g.from[g.n_copies] = c.from;
                if (++g.n_copies == moe_gather::MAX) {
                    gather(g, n_bytes, local, stream);
                }
            }
            gather(g, n_bytes, local, stream);
        }
        CUDA_CHECK(cudaEventRecord(d.ready[buffer][at], stream));
    }
}

static void copy(moe_prompt_device & d, const ggml_moe_prompt_work & work) {
    for (int i = 0, n = 0; i < work.n_copies; i += n) {
        const int buffer = work.copies[i].buffer;
        for (n = 0; i + n < work.n_copies && work.copies[i + n].buffer == buffer; n++) {}
        fill_buffer(d, buffer, work.copies + i, n);
    }
}

static void stage(cudaStream_t stream, moe_prompt_device & d, const ggml_moe_prompt_node & node, const ggml_tensor * ids) {
    const int64_t n_used = ids->ne[0];
    const int64_t n_ids  = n_used*ids->ne[1];
    const bool    asked  = node.wants_ids(&node);
    if (asked) {
        const size_t n = n_used*sizeof(int32_t);
        CUDA_CHECK(cudaMemcpy2DAsync(node.ids, n, ids->data, ids->nb[1], n, ids->ne[1], cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
    ggml_moe_prompt_work work = {};
    node.work(&node, asked ? node.ids : nullptr, n_ids, &work);
    if (work.first) { // an ubatch that was broken off has released nothing
        for (cudaEvent_t e : d.free) {
            CUDA_CHECK(cudaEventRecord(e, stream));
        }
    }
    copy(d, work);
    for (cudaEvent_t e : d.ready[node.buffer]) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, e, 0));
    }
}

static void release(cudaStream_t stream, moe_prompt_device & d, const ggml_moe_prompt_node & node) {
    CUDA_CHECK(cudaEventRecord(d.free[node.buffer], stream));
    ggml_moe_prompt_work work = {};
    node.work(&node, nullptr, 0, &work);
    copy(d, work);
}

void ggml_cuda_moe_prompt(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_moe_prompt_node & node = *(const ggml_moe_prompt_node *) ggml_moe_stream_node_of(dst);
    cudaStream_t stream = ctx.stream();
    cudaStreamCaptureStatus capture;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) { // not to be expected. What a graph may repeat: everything, from memory that stays
        if (node.kind == GGML_MOE_PROMPT_STAGE) {
            CUDA_CHECK(cudaMemcpy2DAsync(node.staging, node.size, node.host, node.pitch, node.size, node.n_expert, cudaMemcpyHostToDevice, stream));
        }
        return;
    }
    moe_prompt_device & d = *(moe_prompt_device *) node.device;
    if (node.kind == GGML_MOE_PROMPT_STAGE) {
        stage(stream, d, node, dst->src[1]);
    } else {
        release(stream, d, node);
    }
}

static void close_device(void * device) {
    moe_prompt_device * d = (moe_prompt_device *) device;
    ggml_cuda_set_device(d->device);
    for (cudaStream_t s : d->streams) {
        if (s) {
            CUDA_CHECK(cudaStreamSynchronize(s));
            CUDA_CHECK(cudaStreamDestroy(s));
        }
    }
    for (int b = 0; b < GGML_MOE_PROMPT_BUFFERS; b++) {
        for (cudaEvent_t e : { d->free[b], d->ready[b][MOE_LINK], d->ready[b][MOE_LOCAL] }) {
            if (e) {
                CUDA_CHECK(cudaEventDestroy(e));
            }
        }
    }
    delete d;
}

static void * open_device(int device) {
    ggml_cuda_set_device(device);
    moe_prompt_device * d = new moe_prompt_device {};
    d->device = device;
    bool ok = true;
    for (cudaStream_t & s : d->streams) {
        ok = ok && cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess;
    }
    for (int b = 0; b < GGML_MOE_PROMPT_BUFFERS; b++) {
        for (cudaEvent_t * e : { &d->free[b], &d->ready[b][MOE_LINK], &d->ready[b][MOE_LOCAL] }) {
            ok = ok && cudaEventCreateWithFlags(e, cudaEventDisableTiming) == cudaSuccess;
        }
    }
    if (!ok) {
        (void) cudaGetLastError();
        close_device(d);
        return nullptr;
    }
    return d;
}

static void wait_device(void * device) {
    moe_prompt_device * d = (moe_prompt_device *) device;
    ggml_cuda_set_device(d->device);
    for (cudaStream_t s : d->streams) {
        CUDA_CHECK(cudaStreamSynchronize(s));
    }
}

const ggml_moe_prompt_api * ggml_cuda_moe_prompt_api() {
    static const ggml_moe_prompt_api api = { open_device, wait_device, close_device };
    return &api;
}

#endif
