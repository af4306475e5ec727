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

// Copies within the device have a stream of their own: a hundred small ones would hold up the link.
enum moe_copy_stream { MOE_LINK, MOE_LOCAL, MOE_N_STREAMS };

struct moe_prompt_device {
    int device;
    cudaStream_t streams[MOE_N_STREAMS];
    cudaEvent_t  free [GGML_MOE_PROMPT_PARTS];                // the last product that read the part is done
    cudaEvent_t  ready[GGML_MOE_PROMPT_PARTS][MOE_N_STREAMS]; // so are the copies for the next one
};

static void moe_prompt_copy(moe_prompt_device & d, int part, const ggml_moe_prompt_work & work) {
    if (work.n_copies == 0) {
        return;
    }
    for (cudaStream_t s : d.streams) {
        CUDA_CHECK(cudaStreamWaitEvent(s, d.free[part], 0));
    }
    for (int i = 0; i < work.n_copies; i++) {
        const ggml_moe_prompt_copy & c = work.copies[i];
        if (!c.from) {
            CUDA_CHECK(cudaMemsetAsync(c.to, 0, c.n, d.streams[MOE_LOCAL]));
        } else if (c.local) {
            CUDA_CHECK(cudaMemcpyAsync(c.to, c.from, c.n, cudaMemcpyDeviceToDevice, d.streams[MOE_LOCAL]));
        } else {
            CUDA_CHECK(cudaMemcpyAsync(c.to, c.from, c.n, cudaMemcpyHostToDevice, d.streams[MOE_LINK]));
        }
    }
    for (int s = 0; s < MOE_N_STREAMS; s++) {
        CUDA_CHECK(cudaEventRecord(d.ready[part][s], d.streams[s]));
    }
}

static void moe_prompt_stage(cudaStream_t stream, moe_prompt_device & d, const ggml_moe_prompt_node & node, const ggml_tensor * ids) {
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
    moe_prompt_copy(d, node.part, work);
    for (cudaEvent_t e : d.ready[node.part]) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, e, 0));
    }
}

static void moe_prompt_release(cudaStream_t stream, moe_prompt_device & d, const ggml_moe_prompt_node & node) {
    CUDA_CHECK(cudaEventRecord(d.free[node.part], stream));
    ggml_moe_prompt_work work = {};
    node.work(&node, nullptr, 0, &work);
    moe_prompt_copy(d, node.part, work);
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
        moe_prompt_stage(stream, d, node, dst->src[1]);
    } else {
        moe_prompt_release(stream, d, node);
    }
}

static void moe_prompt_close(void * device) {
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

static void * moe_prompt_open(int device) {
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
        moe_prompt_close(d);
        return nullptr;
    }
    return d;
}

static void moe_prompt_wait(void * device) {
    moe_prompt_device * d = (moe_prompt_device *) device;
    ggml_cuda_set_device(d->device);
    for (cudaStream_t s : d->streams) {
        CUDA_CHECK(cudaStreamSynchronize(s));
    }
}

const ggml_moe_prompt_api * ggml_cuda_moe_prompt_api() {
    static const ggml_moe_prompt_api api = { moe_prompt_open, moe_prompt_wait, moe_prompt_close };
    return &api;
}

#endif
