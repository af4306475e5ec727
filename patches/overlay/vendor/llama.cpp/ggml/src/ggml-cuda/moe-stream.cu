#include "moe-stream.cuh"

#include "ggml-moe-prompt.h"
#include "ggml-moe-stream.h"
#include "mmf.cuh"
#include "mmvq.cuh"

// The two operations of ggml-moe-stream.h. HIP and MUSA builds leave them out (they are written in PTX): the portable execution serves there.

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

bool ggml_cuda_moe_stream_supported(const ggml_tensor * op) {
    GGML_UNUSED(op);
    return false;
}

bool ggml_cuda_moe_stream(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_UNUSED_VARS(ctx, dst);
    return false;
}

void ggml_cuda_moe_stream_end(ggml_backend_cuda_context & ctx) {
    GGML_UNUSED(ctx);
}

const void * ggml_cuda_moe_stream_api() {
    return nullptr;
}

#else

static constexpr int MOE_THREADS = 64;
static constexpr int MOE_COLS    = 4*MOE_THREADS; // of a row: what a block writes; one block of Q8_K
static_assert(MOE_COLS == 256, "a block of threads quantises one block of Q8_K");

//
// memory shared with the host. The instructions need Volta; older devices are told apart by max_tokens.
//

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < GGML_CUDA_CC_VOLTA

static __device__ __forceinline__ uint32_t load_acquire_system(const uint32_t *) { NO_DEVICE_CODE; return 0; }
static __device__ __forceinline__ void store_release_system(uint64_t *, uint64_t) { NO_DEVICE_CODE; }
static __device__ __forceinline__ void store_relaxed_system(uint32_t *, uint32_t) { NO_DEVICE_CODE; }
static __device__ __forceinline__ uint32_t load_acquire_device(const uint32_t *) { NO_DEVICE_CODE; return 0; }
static __device__ __forceinline__ void store_release_device(uint32_t *, uint32_t) { NO_DEVICE_CODE; }
static __device__ __forceinline__ void nap() {}

#else

static __device__ __forceinline__ uint32_t load_acquire_system(const uint32_t * p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ void store_release_system(uint64_t * p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}

static __device__ __forceinline__ void store_relaxed_system(uint32_t * p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ uint32_t load_acquire_device(const uint32_t * p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ void store_release_device(uint32_t * p, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ void nap() {
    __nanosleep(100);
}

#endif

static __device__ __forceinline__ uint64_t device_clock() {
    uint64_t v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

//
// publish
//

struct moe_publish_args {
    const float   * x;       size_t x_stride;
    const int32_t * ids;     size_t ids_stride;
    const float   * weights; size_t weights_stride_k, weights_stride_t;
    const int32_t * map;     // [n_expert] slot or -1
    int32_t       * slots;   // the output's planes, [n_tokens][n_used]
    float         * weights_out;
    int32_t       * where;
    int32_t       * late;
    int32_t       * log_ids;     size_t log_ids_stride;
    float         * log_weights; size_t log_weights_stride;
    int n_tokens;
};

// ggml's block_q8_K: float d; int8_t qs[256]; int16_t bsums[16]
static constexpr int Q8_K_WORDS = 73;

// 256 values, 4 a thread, as ggml-cpu's quantize_row_q8_K has them: scaled by -127 over the value of largest magnitude
static __device__ void quantize_q8_K(const float4 v, uint32_t * dst) {
    __shared__ uint32_t block[Q8_K_WORDS];
    __shared__ float    extremes[MOE_THREADS/32];
    const int tid = threadIdx.x;

    float m = v.x;
    m = fabsf(v.y) > fabsf(m) ? v.y : m;
    m = fabsf(v.z) > fabsf(m) ? v.z : m;
    m = fabsf(v.w) > fabsf(m) ? v.w : m;
    for (int o = 16; o > 0; o >>= 1) {
        const float other = __shfl_xor_sync(0xffffffff, m, o);
        m = fabsf(other) > fabsf(m) || (fabsf(other) == fabsf(m) && other > m) ? other : m;
    }
    if (tid % 32 == 0) {
        extremes[tid/32] = m;
    }
    __syncthreads();
    m = fabsf(extremes[1]) > fabsf(extremes[0]) ? extremes[1] : extremes[0];

    const float inv = m == 0.0f ? 0.0f : -127.0f/m;
    const int q[4] = { min(127, __float2int_rn(inv*v.x)), min(127, __float2int_rn(inv*v.y)), min(127, __float2int_rn(inv*v.z)), min(127, __float2int_rn(inv*v.w)) };
    block[1 + tid] = (q[0] & 0xff) | (q[1] & 0xff) << 8 | (q[2] & 0xff) << 16 | (uint32_t) (q[3] & 0xff) << 24;
    int sum = q[0] + q[1] + q[2] + q[3];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (tid % 4 == 0) {
        ((int16_t *) (block + 65))[tid/4] = (int16_t) sum;
    }
    if (tid == 0) {
        ((float *) block)[0] = m == 0.0f ? 0.0f : 1.0f/inv;
    }
    __syncthreads();
    for (int i = tid; i < Q8_K_WORDS; i += MOE_THREADS) {
        dst[i] = block[i];
    }
}

// the largest of the block's values, and the sum of others; both given to all threads
static __device__ int2 block_max_sum(int most, int sum) {
    __shared__ int2 of_warp[MOE_THREADS/32];
    for (int o = 16; o > 0; o >>= 1) {
        most = max(most, __shfl_xor_sync(0xffffffff, most, o));
        sum += __shfl_xor_sync(0xffffffff, sum, o);
    }
    __syncthreads(); // the last call's values have been read
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x/32] = make_int2(most, sum);
    }
    __syncthreads();
    return make_int2(max(of_warp[0].x, of_warp[1].x), of_warp[0].y + of_warp[1].y);
}

// by one thread: the row's victims, from n on those whose experts are counted, or not counted; returns n and their number
static __device__ int add_victims(const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, const int * count, bool in_use, ggml_moe_stream_picks & picks, int n) {
    for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
        const ggml_moe_stream_victim x = ch.victims[node.row*GGML_MOE_STREAM_MAX_VICTIMS + v];
        if (x.slot >= 0 && (count[x.expert] > 0) == in_use) {
            picks.victim[n++] = v;
        }
    }
    return n;
}

// Which cold experts cross the link: the n that make the layer end soonest, those with most tokens first. `count`: of each expert's
// pairs. All threads of all blocks come to the same answer: nothing of what they read changes before join.
static __device__ void pick_streamed(const moe_publish_args & a, const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, int * count, ggml_moe_stream_picks & picks) {
    const int tid  = threadIdx.x;
    const int most = (int) ch.rates[GGML_MOE_STREAM_MOST];
    __shared__ int n_free; // an expert of the batch leaves only when the first pass has used it
    __shared__ int n_victims;
    if (tid == 0) {
        n_free    = add_victims(node, ch, count, false, picks, 0);
        n_victims = node.late ? add_victims(node, ch, count, true, picks, n_free) : n_free;
    }
    __syncthreads();
    int n_cold  = 0;
    int n_pairs = 0;
    for (int e = tid; e < node.n_expert; e += MOE_THREADS) {
        const bool cold = count[e] > 0 && a.map[e] < 0;
        n_cold  += cold;
        n_pairs += cold ? count[e] : 0;
        count[e] = cold ? count[e] : 0;
    }
    n_cold  = block_max_sum(0, n_cold).y;
    n_pairs = block_max_sum(0, n_pairs).y;

    const float bytes = (float) node.expert_bytes;
    const float hot   = ch.rates[GGML_MOE_STREAM_HOT];
    const float link  = ch.rates[GGML_MOE_STREAM_LINK]*bytes;
    const float first = ch.rates[GGML_MOE_STREAM_POOL]*bytes;
    const float more  = ch.rates[GGML_MOE_STREAM_POOL_TOKEN]*bytes;
    float pool = ch.rates[GGML_MOE_STREAM_REQUEST] + n_cold*first + (n_pairs - n_cold)*more;
    float best = fmaxf(hot, pool);
    int   n      = 0;
    int   n_best = 0; // if there were room for all
    for (int i = 0; i < min(most, n_cold); i++) {
        const float device = hot + (i + 1)*link;
        if (device > best) {
            break;
        }
        int key = 0;
        for (int e = tid; e < node.n_expert; e += MOE_THREADS) {
            key = max(key, count[e] << 16 | (0xffff - e));
        }
        key = block_max_sum(key, 0).x;
        const int e = 0xffff - (key & 0xffff);
        pool -= first + ((key >> 16) - 1)*more;
        const float end = fmaxf(device, i + 1 < n_cold ? pool : 0.0f);
        if (end <= best) {
            best   = end;
            n_best = i + 1;
            n      = min(n_best, n_victims);
        }
        if (tid == 0) {
            picks.expert[i] = e;
            count[e]        = 0;
        }
        __syncthreads();
    }
    if (tid == 0) {
        picks.n       = n;
        picks.n_left  = n_cold - n;
        picks.crowded = node.late ? max(0, n - n_free) : n_best - n;
    }
    __syncthreads();
}

// what one of n blocks copies: everything is divided between all of them
static __device__ void stream_experts(const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, const ggml_moe_stream_picks & picks, int block, int n) {
    constexpr int AT_ONCE = 8; // of a thread, under way at the same time: the link's latency is some microseconds
    const size_t stride = (size_t) n*MOE_THREADS;
    for (int i = 0; i < picks.n; i++) {
        const size_t slot = ch.victims[node.row*GGML_MOE_STREAM_MAX_VICTIMS + picks.victim[i]].slot;
        for (int p = 0; p < node.n_parts; p++) {
            const size_t  size = node.parts[p].size/sizeof(uint4);
            const uint4 * src  = (const uint4 *) node.parts[p].host + picks.expert[i]*size;
            uint4       * dst  = (uint4 *) node.parts[p].slots + slot*size;
            for (size_t at = (size_t) block*MOE_THREADS + threadIdx.x; at < size; at += AT_ONCE*stride) {
                uint4 v[AT_ONCE];
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++) {
                    if (at + u*stride < size) {
                        v[u] = __ldcs(src + at + u*stride);
                    }
                }
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++) {
                    if (at + u*stride < size) {
                        dst[at + u*stride] = v[u];
                    }
                }
            }
        }
    }
}

// by one thread
static __device__ void count_up(const ggml_moe_stream_channel & ch, int row, ggml_moe_stream_counter which, int n) {
    const int at = row*GGML_MOE_STREAM_N_COUNTERS + which;
    ch.counters_device[at] += n;
    ch.counters[at] = ch.counters_device[at];
}

// by one thread: how many of the look-ahead's experts the layer has chosen
static __device__ void count_right(const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, const int * count) {
    if (ch.ahead->n == 0 || ch.ahead->row != node.row) {
        return;
    }
    int n = 0;
    for (int i = 0; i < ch.ahead->n; i++) {
        n += count[ch.ahead->expert[i]] > 0;
    }
    count_up(ch, node.row, GGML_MOE_STREAM_RIGHT, n);
    ch.ahead->n = 0;
}

// by one thread, when all blocks have brought their part
static __device__ void tell_streamed(const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, const ggml_moe_stream_picks & picks) {
    ch.state[2] = 0;
    ch.clock[node.row*4 + 3] = device_clock();
    for (int i = 0; i < picks.n; i++) { // join says what they hold
        const size_t v = (size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS + picks.victim[i];
        ch.victims_told[v] = { ch.victims[v].slot, -1, node.late };
    }
}

// grid (ceil(n_embd/256), n_tokens and, with a stream lane, rows of blocks that stream); shared memory: n_expert ints with a stream lane
static __global__ void k_moe_publish(const moe_publish_args a, const ggml_moe_stream_node node, const ggml_moe_stream_channel ch) {
    extern __shared__ int count[];
    __shared__ ggml_moe_stream_picks picks;
    const int  tid     = threadIdx.x;
    const int  t_own   = blockIdx.y;
    const bool first   = blockIdx.x == 0 && blockIdx.y == 0;
    const int  n_pairs = node.n_used*a.n_tokens;

    if (first && tid == 0) {
        ch.clock[node.row*4] = device_clock();
    }
    const int col = blockIdx.x*MOE_COLS + tid*4;
    if (node.next && t_own < a.n_tokens && col < node.n_embd) { // x itself may be overwritten while the look-ahead still reads it
        *(float4 *) (ch.ahead_x + (size_t) t_own*node.n_embd + col) = *(const float4 *) (a.x + t_own*a.x_stride + col);
    }

    // every block looks all pairs up: whether one of them is cold decides for all
    if (node.n_parts > 0) {
        for (int e = tid; e < node.n_expert; e += MOE_THREADS) {
            count[e] = 0;
        }
        __syncthreads();
        int cold = 0;
        for (int i = tid; i < n_pairs; i += MOE_THREADS) {
            const int t = i/node.n_used;
            const int e = a.ids[t*a.ids_stride + i - t*node.n_used];
            atomicAdd(count + e, 1);
            cold |= a.map[e] < 0;
        }
        if (tid == 0) {
            picks.n       = 0;
            picks.crowded = 0;
        }
        cold = __syncthreads_or(cold);
        if (first && tid == 0 && node.gate) {
            count_right(node, ch, count);
        }
        if (cold) {
            pick_streamed(a, node, ch, count, picks);
        }
        if (blockIdx.y >= a.n_tokens) {
            if (picks.n > 0) {
                // The request first, or it queues behind a link full of reads. Blocks start in order, so those that make it are under way.
                while (picks.n_left > 0 && *(volatile uint32_t *) &ch.state[3] == 0) {
                    nap();
                }
                const int n = gridDim.x*(gridDim.y - a.n_tokens);
                stream_experts(node, ch, picks, (blockIdx.y - a.n_tokens)*gridDim.x + blockIdx.x, n);
                __syncthreads();
                if (tid == 0 && atomicAdd(&ch.state[2], 1) == n - 1) {
                    ch.state[3] = 0;
                    tell_streamed(node, ch, picks);
                }
            }
            return;
        }
        if (first && tid == 0) {
            *ch.picks = picks;
            if (picks.crowded > 0) {
                count_up(ch, node.row, GGML_MOE_STREAM_CROWDED, picks.crowded);
            }
        }
    }
    int any_cold = 0;
    int own_cold = 0;
    for (int i = tid; i < n_pairs; i += MOE_THREADS) {
        const int t = i/node.n_used;
        const int k = i - t*node.n_used;
        const int e = a.ids[t*a.ids_stride + k];
        const int s = a.map[e];
        int brought = -1;
        for (int j = 0; s < 0 && node.n_parts > 0 && j < picks.n; j++) {
            brought = picks.expert[j] == e ? ch.victims[node.row*GGML_MOE_STREAM_MAX_VICTIMS + picks.victim[j]].slot : brought;
        }
        const bool is_cold = s < 0 && brought < 0;
        any_cold |= is_cold;
        own_cold |= is_cold && t == t_own;
        if (first) {
            const float w  = a.weights[t*a.weights_stride_t + k*a.weights_stride_k];
            const float ws = node.scale ? w*node.scale[e] : w;
            a.slots[i]       = s < 0 && !node.late ? brought : s;
            a.late[i]        = node.late ? brought : -1;
            a.weights_out[i] = ws;
            a.where[i]       = is_cold ? GGML_MOE_STREAM_BY_POOL : s < 0 && node.late ? GGML_MOE_STREAM_SECOND_PASS : GGML_MOE_STREAM_FIRST_PASS;
            if (a.log_ids) {
                a.log_ids[t*a.log_ids_stride + k] = e;
            }
            if (a.log_weights) {
                a.log_weights[t*a.log_weights_stride + k] = w;
            }
        }
    }
    any_cold = __syncthreads_or(any_cold);
    own_cold = __syncthreads_or(own_cold);
    if (!any_cold) {
        return;
    }
    if (first) { // only now: posted writes over the link
        for (int i = tid; i < n_pairs; i += MOE_THREADS) {
            const int t = i/node.n_used;
            ch.ids    [i] = a.where[i] == GGML_MOE_STREAM_BY_POOL ? a.ids[t*a.ids_stride + i - t*node.n_used] : -1;
            ch.weights[i] = a.weights_out[i];
        }
    }
    if (own_cold && (node.input == GGML_MOE_STREAM_Q8_K || col < node.n_embd)) {
        const float4 v = *(const float4 *) (a.x + t_own*a.x_stride + col);
        if (node.input == GGML_MOE_STREAM_Q8_K) {
            quantize_q8_K(v, (uint32_t *) ch.x + ((size_t) t_own*(node.n_embd/MOE_COLS) + blockIdx.x)*Q8_K_WORDS);
        } else {
            *(float4 *) ((float *) ch.x + (size_t) t_own*node.n_embd + col) = v;
        }
    }
    // One release for the whole system, by the last block, covers what the others released to it.
    __syncthreads();
    if (tid == 0) {
        __threadfence();
        if (atomicAdd(&ch.state[1], 1) == gridDim.x*a.n_tokens - 1) {
            __threadfence();
            ch.state[1] = 0;
            const uint32_t seq = ++ch.state[0];
            store_release_system(ch.header, (uint64_t) seq << 32 | (uint32_t) node.row << 16 | (uint32_t) a.n_tokens);
            if (node.n_parts > 0 && picks.n > 0 && !node.late) {
                *(volatile uint32_t *) &ch.state[3] = 1;
            }
        }
    }
}

//
// bring
//

// grid (STREAM_BLOCKS): after the first pass, before the second
static __global__ void k_moe_bring(const int32_t * late, int32_t * ids, const int n_pairs, const ggml_moe_stream_node node, const ggml_moe_stream_channel ch) {
    const int tid = threadIdx.x;
    if (blockIdx.x == 0) {
        if (tid == 0) {
            ch.bring_clock[node.row] = device_clock();
        }
        for (int i = tid; i < n_pairs; i += MOE_THREADS) {
            ids[i] = late[i];
        }
    }
    if (ch.picks->n == 0) {
        return;
    }
    stream_experts(node, ch, *ch.picks, blockIdx.x, gridDim.x);
    __syncthreads();
    if (tid == 0 && atomicAdd(&ch.state[2], 1) == gridDim.x - 1) {
        tell_streamed(node, ch, *ch.picks);
    }
}

//
// join
//

static constexpr int MOE_MAX_CHUNKS = GGML_MAX_SRC - 1;

struct moe_join_args {
    const float   * hot[MOE_MAX_CHUNKS]; // [n_embd, n_used, chunk]; late: from n_chunks on those of the second pass
    int n_chunks;
    int chunk;                           // tokens in each but the last
    const float   * weights;
    const int32_t * where;
    float         * dst;     size_t dst_stride;
    int n_tokens;
};

// By one thread of the grid: looks at the host's memory are served one after the other, 0.7 µs each, so that those of a hundred blocks would
// keep each other waiting.
static __device__ void wait_for_pool(const ggml_moe_stream_channel & ch) {
    constexpr uint64_t PATIENCE_NS = 1000000; // for so long only the flag that comes next is looked at
    const uint32_t seq = ch.state[0];
    const uint64_t t0  = device_clock();
    while ((int32_t) (load_acquire_system(ch.done) - seq) < 0) {
        const uint64_t waited = device_clock() - t0;
        if (waited > ch.timeout_ns) {
            store_relaxed_system(ch.failed, GGML_MOE_STREAM_NO_ANSWER);
            break;
        }
        if (waited > PATIENCE_NS && load_acquire_system(ch.failed) != GGML_MOE_STREAM_OK) {
            break; // an earlier layer waited in vain, or the pool gave up
        }
        nap();
    }
    store_release_device(ch.state + 4, seq);
}

// by one thread of each other block: the first block, which waits for the pool, started before them
static __device__ void wait_for_first_block(const ggml_moe_stream_channel & ch) {
    const uint32_t seq = ch.state[0];
    while ((int32_t) (load_acquire_device(ch.state + 4) - seq) < 0) {
        nap();
    }
}

// by one thread: what has crossed the link is hot from now on. The victims stay what they are, with other experts.
static __device__ void place(const ggml_moe_stream_node & node, const ggml_moe_stream_channel & ch, const ggml_moe_stream_picks & picks) {
    const size_t row = (size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS;
    for (int i = 0; i < picks.n; i++) {
        ggml_moe_stream_victim & v = ch.victims[row + picks.victim[i]];
        node.map[v.expert] = -1;
        v.expert = picks.expert[i];
        node.map[v.expert] = v.slot;
        ch.victims_told[row + picks.victim[i]] = { v.slot, v.expert, node.late };
    }
}

// grid (ceil(n_embd/256), n_tokens): hot outputs in rank order, then the pool's sum
static __global__ void k_moe_join(const moe_join_args a, const ggml_moe_stream_node node, const ggml_moe_stream_channel ch) {
    const int tid = threadIdx.x;
    const int t   = blockIdx.y;
    const int col = blockIdx.x*MOE_COLS + tid*4;
    if (tid == 0 && blockIdx.x == 0 && t == 0) {
        ch.clock[node.row*4 + 1] = device_clock();
        if (node.n_parts > 0 && ch.picks->n > 0) {
            place(node, ch, *ch.picks);
            count_up(ch, node.row, GGML_MOE_STREAM_STREAMED, ch.picks->n);
        }
    }

    const int c = a.n_chunks > 0 ? t/a.chunk : 0;
    const size_t at = (size_t) (t - c*a.chunk)*node.n_used*node.n_embd + col;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool cold = false; // the same for all threads of the block
    for (int k = 0; k < node.n_used; k++) {
        const int where = a.where[t*node.n_used + k];
        if (where == GGML_MOE_STREAM_BY_POOL) {
            cold = true;
        } else if (col < node.n_embd) {
            const float  w = node.weight_before ? 1.0f : a.weights[t*node.n_used + k];
            const float * y = a.hot[where == GGML_MOE_STREAM_SECOND_PASS ? a.n_chunks + c : c];
            const float4 v = *(const float4 *) (y + at + (size_t) k*node.n_embd);
            sum.x += w*v.x;
            sum.y += w*v.y;
            sum.z += w*v.z;
            sum.w += w*v.w;
        }
    }
    if (blockIdx.x == 0 && t == 0) {
        int any = 0; // of all tokens
        for (int i = tid; i < node.n_used*a.n_tokens; i += MOE_THREADS) {
            any |= a.where[i] == GGML_MOE_STREAM_BY_POOL;
        }
        if (__syncthreads_or(any)) {
            if (tid == 0) {
                wait_for_pool(ch);
            }
            __syncthreads();
        }
    } else if (cold) {
        if (tid == 0) {
            wait_for_first_block(ch);
        }
        __syncthreads();
    }
    if (cold && col < node.n_embd) {
        const float4 v = __ldcv((const float4 *) (ch.out + (size_t) t*node.n_embd + col)); // not from a cache: the host wrote it
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
    }
    if (tid == 0 && blockIdx.x == 0) {
        ch.clock[node.row*4 + 2] = device_clock(); // the last token's stays
    }
    if (col < node.n_embd) {
        *(float4 *) (a.dst + t*a.dst_stride + col) = sum;
    }
}

//
// look-ahead: two kernels beside the stream, between publish and the next row's
//

static constexpr int LOOK_EXPERTS = 4; // of a block of k_moe_look, a warp each

// how many experts of the row: `mean` of them on the mean over all rows
static __device__ __forceinline__ int ahead_of_row(float mean, int row) {
    return min((int) floorf(mean*(row + 1)) - (int) floorf(mean*row), GGML_MOE_STREAM_MAX_AHEAD);
}

// the next row's router on this row's input
static __global__ void k_moe_look(const ggml_moe_stream_node next, const ggml_moe_stream_channel ch, const int n_tokens) {
    constexpr int AT_ONCE = 8; // tokens
    const int lane = threadIdx.x % 32;
    const int e    = blockIdx.x*LOOK_EXPERTS + threadIdx.x/32;
    if (e >= next.n_expert || ahead_of_row(ch.rates[GGML_MOE_STREAM_AHEAD], next.row) == 0) { // nobody asks for the scores
        return;
    }
    const float4 * gate = (const float4 *) (next.gate + (size_t) e*next.n_embd);
    const int n = next.n_embd/4;
    for (int t0 = 0; t0 < n_tokens; t0 += AT_ONCE) {
        float sum[AT_ONCE] = {};
        for (int i = lane; i < n; i += 32) {
            const float4 g = gate[i];
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++) {
                if (t0 + t < n_tokens) {
                    const float4 x = ((const float4 *) ch.ahead_x)[(size_t) (t0 + t)*n + i];
                    sum[t] += g.x*x.x + g.y*x.y + g.z*x.z + g.w*x.w;
                }
            }
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            if (t0 + t < n_tokens) {
                float s = warp_reduce_sum(sum[t]);
                s = next.gate_sigmoid ? 1.0f/(1.0f + expf(-s)) : s;
                s += next.gate_bias ? next.gate_bias[e] : 0.0f;
                if (lane == 0) {
                    ch.ahead_scores[(t0 + t)*next.n_expert + e] = s;
                }
            }
        }
    }
}

// the same on the host: src/moe-stream.cpp
static __device__ __forceinline__ uint32_t moe_hash(uint32_t v) {
    v = (v ^ v >> 16)*0x7feb352du;
    v = (v ^ v >> 15)*0x846ca68bu;
    return v ^ v >> 16;
}

// Counts what the tokens of highest score would choose, a warp a token: in the upper half how many choose an expert, in the lower half
// how early they do.
static __device__ void count_likely(const ggml_moe_stream_node & next, const ggml_moe_stream_channel & ch, int n_tokens, int * count) {
    const int  lane  = threadIdx.x % 32;
    const uint32_t wrong = (uint32_t) (ch.rates[GGML_MOE_STREAM_WRONG]*4294967040.0f);
    const uint32_t seed  = moe_hash((uint32_t) ch.rates[GGML_MOE_STREAM_TIME]*64 + next.row);
    for (int t = threadIdx.x/32; t < n_tokens; t += MOE_THREADS/32) {
        const float * scores = ch.ahead_scores + t*next.n_expert;
        uint32_t taken = 0; // of the lane's experts
        for (int k = 0; k < next.n_used; k++) {
            float best = -INFINITY;
            int   at   = next.n_expert;
            for (int e = lane, i = 0; e < next.n_expert; e += 32, i++) {
                if (!(taken >> i & 1) && scores[e] > best) {
                    best = scores[e];
                    at   = e;
                }
            }
            for (int o = 16; o > 0; o >>= 1) {
                const float other    = __shfl_xor_sync(0xffffffff, best, o);
                const int   other_at = __shfl_xor_sync(0xffffffff, at, o);
                if (other > best || (other == best && other_at < at)) {
                    best = other;
                    at   = other_at;
                }
            }
            if (at == next.n_expert) {
                break; // NaN
            }
            taken |= at % 32 == lane ? 1u << at/32 : 0;
            if (lane == 0) {
                const uint32_t h = moe_hash(seed ^ (t*next.n_used + k + 1)*0x9e3779b9u);
                const int e = h < wrong ? moe_hash(h) % next.n_expert : at;
                atomicAdd(count + e, (1 << 16) + next.n_used - k);
            }
        }
    }
}

// those without a slot that most tokens would choose, and first
static __device__ void pick_ahead(const ggml_moe_stream_node & next, const ggml_moe_stream_channel & ch, int most, int * count, ggml_moe_stream_picks & picks) {
    __shared__ int n_victims;
    const int tid = threadIdx.x;
    if (tid == 0) {
        n_victims = add_victims(next, ch, count, false, picks, 0);
    }
    __syncthreads();
    for (int i = 0; i < min(n_victims, most); i++) {
        int key = 0; // 6 bits: tokens, 11: how early, 14: the lower expert
        for (int e = tid; e < next.n_expert; e += MOE_THREADS) {
            if (count[e] > 0 && next.map[e] < 0) {
                key = max(key, (count[e] >> 16) << 25 | min(count[e] & 0xffff, 0x7ff) << 14 | (0x3fff - e));
            }
        }
        key = block_max_sum(key, 0).x;
        if (key == 0) {
            break;
        }
        if (tid == 0) {
            picks.expert[i] = 0x3fff - (key & 0x3fff);
            picks.n         = i + 1;
            count[picks.expert[i]] = 0;
        }
        __syncthreads();
    }
}

static constexpr int STREAM_BLOCKS = 16; // 128 KB under way fill a link; more would only be in the way of whoever else reads over it

// grid (STREAM_BLOCKS), shared memory: n_expert ints
static __global__ void k_moe_ahead(const ggml_moe_stream_node next, const ggml_moe_stream_channel ch, const int n_tokens) {
    extern __shared__ int count[];
    __shared__ ggml_moe_stream_picks picks;
    const int tid = threadIdx.x;
    if (blockIdx.x == 0 && tid == 0) {
        ch.ahead_clock[next.row*2] = device_clock();
    }
    for (int e = tid; e < next.n_expert; e += MOE_THREADS) {
        count[e] = 0;
    }
    if (tid == 0) {
        picks.row = next.row;
        picks.n   = 0;
    }
    __syncthreads();
    const int most = ahead_of_row(ch.rates[GGML_MOE_STREAM_AHEAD], next.row);
    if (most > 0) {
        count_likely(next, ch, n_tokens, count);
        __syncthreads();
        pick_ahead(next, ch, most, count, picks);
        stream_experts(next, ch, picks, blockIdx.x, gridDim.x);
        __syncthreads();
    }
    if (tid == 0) {
        __threadfence();
        if (atomicAdd(&ch.state[5], 1) == gridDim.x - 1) {
            ch.state[5] = 0;
            place(next, ch, picks);
            *ch.ahead = picks;
            count_up(ch, next.row, GGML_MOE_STREAM_LOOKED, picks.n);
            ch.ahead_clock[next.row*2 + 1] = device_clock();
        }
    }
}

// what runs beside a stream
struct moe_side {
    int device;
    cudaStream_t stream;
    cudaEvent_t  begin;
    cudaEvent_t  end;
};

static void * side_open(int device) {
    ggml_cuda_set_device(device);
    auto * side = new moe_side{ device, nullptr, nullptr, nullptr };
    int least = 0;
    int greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&side->stream, cudaStreamNonBlocking, least));
    CUDA_CHECK(cudaEventCreateWithFlags(&side->begin, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&side->end,   cudaEventDisableTiming));
    return side;
}

static void side_free(void * opaque) {
    moe_side * side = (moe_side *) opaque;
    if (side) {
        ggml_cuda_set_device(side->device);
        CUDA_CHECK(cudaEventDestroy(side->begin));
        CUDA_CHECK(cudaEventDestroy(side->end));
        CUDA_CHECK(cudaStreamDestroy(side->stream));
        delete side;
    }
}

// of this thread, which launches a graph at a time
static thread_local const moe_side * beside = nullptr;

static void wait_for_side(cudaStream_t stream) {
    if (beside) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, beside->end));
        beside = nullptr;
    }
}

static void look_ahead(cudaStream_t stream, const ggml_moe_stream_node & node, int n_tokens) {
    const ggml_moe_stream_node & next = *node.next;
    const moe_side * side = (const moe_side *) node.channel->side;
    CUDA_CHECK(cudaEventRecord(side->begin, stream));
    CUDA_CHECK(cudaStreamWaitEvent(side->stream, side->begin));
    k_moe_look<<<(next.n_expert + LOOK_EXPERTS - 1)/LOOK_EXPERTS, 32*LOOK_EXPERTS, 0, side->stream>>>(next, *node.channel, n_tokens);
    k_moe_ahead<<<STREAM_BLOCKS, MOE_THREADS, next.n_expert*sizeof(int), side->stream>>>(next, *node.channel, n_tokens);
    CUDA_CHECK(cudaEventRecord(side->end, side->stream));
    beside = side;
}

void ggml_cuda_moe_stream_end(ggml_backend_cuda_context & ctx) {
    wait_for_side(ctx.stream());
}

//
// ggml
//

bool ggml_cuda_moe_stream_supported(const ggml_tensor * op) {
    return ggml_moe_stream_is(op);
}

static dim3 grid_of(const ggml_moe_stream_node & node, const ggml_tensor * t) {
    return dim3((node.n_embd + MOE_COLS - 1)/MOE_COLS, (unsigned) t->ne[1], 1);
}

static void publish(cudaStream_t stream, const ggml_moe_stream_node & node, ggml_tensor * dst) {
    const ggml_tensor * x   = dst->src[0];
    const ggml_tensor * ids = dst->src[1];
    const ggml_tensor * w   = dst->src[2]; // [1, n_used, n_tokens]
    const int64_t n_pairs = dst->ne[0]*dst->ne[1];
    moe_publish_args a = {};
    a.x        = (const float *) x->data;
    a.x_stride = x->nb[1]/sizeof(float);
    a.ids        = (const int32_t *) ids->data;
    a.ids_stride = ids->nb[1]/sizeof(int32_t);
    a.weights          = (const float *) w->data;
    a.weights_stride_k = w->nb[1]/sizeof(float);
    a.weights_stride_t = w->nb[2]/sizeof(float);
    a.map         = (const int32_t *) dst->src[3]->data;
    a.slots       = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_SLOT;
    a.weights_out = (float   *) dst->data + n_pairs*GGML_MOE_STREAM_WEIGHT;
    a.where       = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_WHERE;
    a.late        = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_LATE;
    if (dst->src[4]) {
        a.log_ids        = (int32_t *) dst->src[4]->data;
        a.log_ids_stride = dst->src[4]->nb[1]/sizeof(int32_t);
    }
    if (dst->src[5]) {
        a.log_weights        = (float *) dst->src[5]->data;
        a.log_weights_stride = dst->src[5]->nb[1]/sizeof(float);
    }
    a.n_tokens = (int) x->ne[1];
    dim3 grid = grid_of(node, x);
    grid.y += node.n_parts > 0 && !node.late ? (STREAM_BLOCKS + grid.x - 1)/grid.x : 0;
    wait_for_side(stream);
    k_moe_publish<<<grid, MOE_THREADS, node.n_parts > 0 ? node.n_expert*sizeof(int) : 0, stream>>>(a, node, *node.channel);
    if (node.next) {
        look_ahead(stream, node, a.n_tokens);
    }
}

static void bring(cudaStream_t stream, const ggml_moe_stream_node & node, ggml_tensor * dst) {
    int i = 0;
    while (dst->src[i + 1]) {
        i++;
    }
    const int n_pairs = (int) (dst->ne[0]*dst->ne[1]);
    const int32_t * late = (const int32_t *) dst->src[i]->data + (size_t) n_pairs*GGML_MOE_STREAM_LATE;
    k_moe_bring<<<STREAM_BLOCKS, MOE_THREADS, 0, stream>>>(late, (int32_t *) dst->data, n_pairs, node, *node.channel);
}

static void join(cudaStream_t stream, const ggml_moe_stream_node & node, ggml_tensor * dst) {
    moe_join_args a = {};
    while (dst->src[a.n_chunks + 1]) {
        a.hot[a.n_chunks] = (const float *) dst->src[a.n_chunks]->data;
        a.n_chunks++;
    }
    const ggml_tensor * published = dst->src[a.n_chunks];
    const int64_t n_pairs = published->ne[0]*published->ne[1];
    a.n_chunks  /= node.late ? 2 : 1;
    a.chunk      = a.n_chunks > 0 ? (int) dst->src[0]->ne[2] : 1;
    a.weights    = (const float   *) published->data + n_pairs*GGML_MOE_STREAM_WEIGHT;
    a.where      = (const int32_t *) published->data + n_pairs*GGML_MOE_STREAM_WHERE;
    a.dst        = (float *) dst->data;
    a.dst_stride = dst->nb[1]/sizeof(float);
    a.n_tokens   = (int) dst->ne[1];
    k_moe_join<<<grid_of(node, dst), MOE_THREADS, 0, stream>>>(a, node, *node.channel);
}

bool ggml_cuda_moe_stream(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (!ggml_moe_stream_is(dst)) {
        return false;
    }
    const ggml_moe_stream_node & node = *ggml_moe_stream_node_of(dst);
    if (node.kind == GGML_MOE_STREAM_PUBLISH) {
        publish(ctx.stream(), node, dst);
    } else if (node.kind == GGML_MOE_STREAM_BRING) {
        bring(ctx.stream(), node, dst);
    } else if (node.kind >= GGML_MOE_PROMPT_STAGE) {
        ggml_cuda_moe_prompt(ctx, dst);
    } else {
        join(ctx.stream(), node, dst);
    }
    return true;
}

// quantised experts: the vector kernels (mmvq) return at a negative id. Others: the tensor-core kernel (mmf) looks for the pairs of each
// expert, so that -1 is never found; over 16 tokens it counts pairs first and would go wrong.
static int max_tokens(int device, const ggml_tensor * w) {
    const int cc = ggml_cuda_info().devices[device].cc;
    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || cc < GGML_CUDA_CC_VOLTA) {
        return 0;
    }
    if (ggml_is_quantized(w->type)) {
        return std::min(MMVQ_MAX_BATCH_SIZE, get_mmvq_mmid_max_batch(w->type, cc));
    }
    constexpr int MMF_MAX = 16;
    return ggml_cuda_should_use_mmf(w->type, cc, WARP_SIZE, w->ne, w->nb, MMF_MAX, /*mul_mat_id =*/ true) ? MMF_MAX : 0;
}

static bool has_watchdog(int device) {
    int limited = 0;
    return cudaDeviceGetAttribute(&limited, cudaDevAttrKernelExecTimeout, ggml_cuda_info().devices[device].physical_device) == cudaSuccess && limited;
}

const void * ggml_cuda_moe_stream_api() {
    static const ggml_moe_stream_api api = { max_tokens, has_watchdog, side_open, side_free, ggml_cuda_moe_prompt_api() };
    return &api;
}

#endif
