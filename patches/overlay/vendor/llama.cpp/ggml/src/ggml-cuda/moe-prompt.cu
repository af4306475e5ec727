#include "moe-stream.cuh"

#include "ggml-moe-prompt.h"

// The two operations of ggml-moe-prompt.h. They only order copies on streams of their own around the products of the main stream:
//
//   product of a part ── free ──► copies into the part's staging memory ── ready ──► the next product with it

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

void ggml_cuda_moe_prompt(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_UNUSED_VARS(ctx, dst);
}

const ggml_moe_prompt_api * ggml_cuda_moe_prompt_api() {
    return nullptr;
}

#else

// Copies within the device have a stream of their own, or they would hold up the link.
enum moe_copy_stream { MOE_LINK, MOE_LOCAL, MOE_N_STREAMS };

struct moe_prompt_device {
    int device;
    cudaStream_t streams[MOE_N_STREAMS];
    cudaEvent_t  free [GGML_MOE_PROMPT_PARTS];                // the last product that read the part is done
    cudaEvent_t  ready[GGML_MOE_PROMPT_PARTS][MOE_N_STREAMS]; // so are the copies for the next one
};

// Experts from their slots: one launch instead of a call for each.
struct moe_gather {
    static constexpr int MAX = 120; // it is a kernel's argument
    void *       to  [MAX];
    const void * from[MAX];
};

template<typename T>
static __global__ void k_moe_gather(const moe_gather g, const size_t n) {
    const T * from = (const T *) g.from[blockIdx.y];
    T       * to   = (T *)       g.to  [blockIdx.y];
    for (size_t i = (size_t) blockIdx.x*blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x*blockDim.x) {
        to[i] = from[i];
    }
}

template<typename T>
static void launch_gather(const moe_gather & g, int n_copies, size_t n_bytes, cudaStream_t stream) {
    constexpr int THREADS = 256, PER_THREAD = 8, MAX_BLOCKS = 64;
    const size_t n = n_bytes/sizeof(T);
    const size_t blocks = (n + THREADS*PER_THREAD - 1)/(THREADS*PER_THREAD);
    k_moe_gather<T><<<dim3((unsigned) std::min(blocks, (size_t) MAX_BLOCKS), n_copies, 1), THREADS, 0, stream>>>(g, n);
}

static void gather(const moe_gather & g, int n_copies, size_t n_bytes, cudaStream_t stream) {
    if (n_copies == 0) {
        return;
    }
    uintptr_t bits = n_bytes;
    for (int i = 0; i < n_copies; i++) {
        bits |= (uintptr_t) g.to[i] | (uintptr_t) g.from[i];
    }
    if (bits % 16 == 0) {
        launch_gather<uint4>(g, n_copies, n_bytes, stream);
    } else if (bits % 4 == 0) {
        launch_gather<uint32_t>(g, n_copies, n_bytes, stream);
    } else if (bits % 2 == 0) {
        launch_gather<uint16_t>(g, n_copies, n_bytes, stream);
    } else {
        launch_gather<uint8_t>(g, n_copies, n_bytes, stream);
    }
    CUDA_CHECK(cudaGetLastError());
}

// all copies to one part
static void copy_part(moe_prompt_device & d, int part, const ggml_moe_prompt_copy * copies, int n_copies) {
    for (cudaStream_t s : d.streams) {
        CUDA_CHECK(cudaStreamWaitEvent(s, d.free[part], 0));
    }
    cudaStream_t local = d.streams[MOE_LOCAL];
    moe_gather g;
    int    n_gathered = 0;
    size_t n_bytes    = 0;
    for (int i = 0; i < n_copies; i++) {
        const ggml_moe_prompt_copy & c = copies[i];
        if (!c.local) {
            CUDA_CHECK(cudaMemcpyAsync(c.to, c.from, c.n, cudaMemcpyHostToDevice, d.streams[MOE_LINK]));
        } else if (!c.from) {
            CUDA_CHECK(cudaMemsetAsync(c.to, 0, c.n, local));
        } else if (n_bytes == 0 || c.n == n_bytes) {
            n_bytes = c.n;
            g.to  [n_gathered] = c.to;
            g.from[n_gathered] = c.from;
            if (++n_gathered == moe_gather::MAX) {
                gather(g, n_gathered, n_bytes, local);
                n_gathered = 0;
            }
        } else { // the few bytes behind an expert
            CUDA_CHECK(cudaMemcpyAsync(c.to, c.from, c.n, cudaMemcpyDefault, local));
        }
    }
    gather(g, n_gathered, n_bytes, local);
    for (int s = 0; s < MOE_N_STREAMS; s++) {
        CUDA_CHECK(cudaEventRecord(d.ready[part][s], d.streams[s]));
    }
}

static void copy(moe_prompt_device & d, const ggml_moe_prompt_work & work) {
    for (int i = 0, n = 0; i < work.n_copies; i += n) {
        const int part = work.copies[i].part;
        for (n = 0; i + n < work.n_copies && work.copies[i + n].part == part; n++) {}
        copy_part(d, part, work.copies + i, n);
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
    for (cudaEvent_t e : d.ready[node.part]) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, e, 0));
    }
}

static void release(cudaStream_t stream, moe_prompt_device & d, const ggml_moe_prompt_node & node) {
    CUDA_CHECK(cudaEventRecord(d.free[node.part], stream));
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
            CUDA_CHECK(cudaMemcpyAsync(node.staging, node.host, node.size, cudaMemcpyHostToDevice, stream));
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
    for (int p = 0; p < GGML_MOE_PROMPT_PARTS; p++) {
        for (cudaEvent_t e : { d->free[p], d->ready[p][MOE_LINK], d->ready[p][MOE_LOCAL] }) {
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
    for (int p = 0; p < GGML_MOE_PROMPT_PARTS; p++) {
        for (cudaEvent_t * e : { &d->free[p], &d->ready[p][MOE_LINK], &d->ready[p][MOE_LOCAL] }) {
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
