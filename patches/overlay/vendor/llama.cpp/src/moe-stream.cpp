#include "moe-stream.h"

#include "moe-state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>

static_assert(GGML_MOE_STREAM_MAX_PARTS >= MOE_N_PARTS, "a node names all parts of an expert");

static constexpr float US_REQUEST = 12.0f; // until the pool has begun, and until the device knows that it has ended
static constexpr float AGAIN      = 0.08f; // what a further token of an expert costs, over the first (Q4_K; docs/kernels.md)
static constexpr float AHEAD_RIGHT = 0.8f; // share of the look-ahead's guesses, until it is measured
static constexpr int64_t TRY_AGAIN = 64;   // decodes until a look-ahead that rests tries again
static constexpr float US_POOL_BYTE = 1.0f/60000, US_LINK_BYTE = 1.0f/40000; // until they are measured: 60 and 40 GB/s

//
// the pool's side
//

// Everything that a thread of the pool works on. It outlives the context if a thread hangs in it.
struct moe_stream_client : public moe_pool_client {
    moe_stream_client(moe_type_traits_t traits, bool own_kernels) : lane(traits, own_kernels) {}

    bool poll() override;
    void run(int ith, int n_threads, moe_barrier & barrier) override;
    void finish(bool given_up) override;

    uint32_t seq_of_header() const {
        return (uint32_t) (__atomic_load_n(channel.header, __ATOMIC_ACQUIRE) >> 32);
    }

    ggml_backend_buffer_ptr     buf; // the channel's host memory, page-locked if the device has such
    ggml_moe_stream_channel     channel = {};
    std::vector<moe_block>      blocks; // by row, copies: the layers may be gone
    std::vector<ggml_moe_stream_node> publish_nodes, join_nodes;                       // by row
    std::vector<ggml_moe_stream_node> late_publish_nodes, bring_nodes, late_join_nodes; // by row, of layers in two passes

    moe_cold_lane lane;
    uint32_t seen = 0; // seq of the last request

    // the request under way
    const moe_block * block = nullptr;
    bool as_f32   = false;
    int  n_tokens = 0;
    std::vector<int32_t> ids;               // copies: after a failure the device may write on while they are read
    std::vector<float>   weights;
    std::vector<int32_t> count_of, next_of; // per expert, scratch

    // taken by thread 0; read between decodes
    int64_t begin_us = 0;
    struct times {
        int64_t n = 0;
        double  us_plan = 0;
        double  us_cold = 0;
    };
    std::vector<times> perf; // by row
    double work = 0;                // of the request under way: bytes of weights, those of further tokens in proportion to what they cost
    std::vector<double> us_of_byte; // of the decode's requests, but for the first, which may have woken threads up
    int n_requests = 0;             // of the decode
};

bool moe_stream_client::poll() {
    const uint64_t header = __atomic_load_n(channel.header, __ATOMIC_ACQUIRE);
    const uint32_t seq    = (uint32_t) (header >> 32);
    if (seq == seen) {
        return false;
    }
    seen = seq;
    if (__atomic_load_n(channel.failed, __ATOMIC_ACQUIRE) != GGML_MOE_STREAM_OK) {
        return false; // nobody waits for it any more
    }
    begin_us = moe_now_us();
    const int row = (int) (header >> 16 & 0xffff);
    n_tokens = (int) (header & 0xffff);
    block    = &blocks[row];
    as_f32   = publish_nodes[row].input == GGML_MOE_STREAM_F32;

    // cold pairs, grouped by expert in ascending order
    lane.begin(*block, as_f32 ? nullptr : (const char *) channel.x);
    const int n_pairs = n_tokens*block->n_used;
    std::copy_n(channel.ids,     n_pairs, ids.begin());
    std::copy_n(channel.weights, n_pairs, weights.begin());
    std::fill(count_of.begin(), count_of.begin() + block->n_expert, 0);
    for (int i = 0; i < n_pairs; i++) {
        ids[i] = ids[i] < block->n_expert ? ids[i] : -1;
        if (ids[i] >= 0) {
            count_of[ids[i]]++;
        }
    }
    int32_t n = 0;
    for (int e = 0; e < block->n_expert; e++) {
        if (count_of[e]) {
            lane.experts.push_back({ e, n, count_of[e] });
            next_of[e] = n;
            n += count_of[e];
        }
    }
    lane.pairs.resize(n);
    work = (lane.experts.size() + AGAIN*(n - lane.experts.size()))*block->expert_bytes();
    for (int i = 0; i < n_pairs; i++) {
        if (ids[i] >= 0) {
            lane.pairs[next_of[ids[i]]++] = { i/block->n_used, weights[i] };
        }
    }
    perf[row].n++;
    perf[row].us_plan += moe_now_us() - begin_us;
    return true;
}

void moe_stream_client::run(int ith, int n_threads, moe_barrier & barrier) {
    const char * x      = (const char *) channel.x;
    const size_t stride = block->n_embd*sizeof(float);
    bool ok = true;
    if (as_f32 && !block->weight_before) {
        lane.quantize_tokens(*block, x, stride, n_tokens, ith, n_threads);
        ok = barrier.wait(n_threads);
    }
    ok = ok && lane.run(*block, x, stride, n_tokens, (char *) channel.out, stride, ith, n_threads, barrier);
    if (!ok) {
        __atomic_store_n(channel.failed, (uint32_t) GGML_MOE_STREAM_POOL_FAILED, __ATOMIC_RELEASE); // nobody need wait longer
    }
}

void moe_stream_client::finish(bool given_up) {
    const int64_t us = moe_now_us() - begin_us;
    perf[block->row].us_cold += us;
    if (n_requests++ > 0 && work > 0 && us_of_byte.size() < us_of_byte.capacity()) {
        us_of_byte.push_back(std::max(0.1*us, (double) us - US_REQUEST)/work);
    }
    if (!given_up) {
        __atomic_store_n(channel.done, seen, __ATOMIC_RELEASE);
    }
}

//
// the two operations on the CPU
//

static int32_t id_at(const ggml_tensor * ids, int t, int k) {
    return *(const int32_t *) ((const char *) ids->data + t*ids->nb[1] + k*ids->nb[0]);
}

static const ggml_moe_stream_victim * victims_of(const ggml_moe_stream_node & node) {
    return node.channel->victims + (size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS;
}

// the row's victims, from n on those whose experts are counted, or not counted; returns n and their number
static int add_victims(const ggml_moe_stream_node & node, const std::vector<int> & count, bool in_use, ggml_moe_stream_picks & picks, int n) {
    const ggml_moe_stream_victim * victims = victims_of(node);
    for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
        if (victims[v].slot >= 0 && (count[victims[v].expert] > 0) == in_use) {
            picks.victim[n++] = v;
        }
    }
    return n;
}

static void emulate_copies(const ggml_moe_stream_node & node, const ggml_moe_stream_picks & picks) {
    for (int i = 0; i < picks.n; i++) {
        for (int p = 0; p < node.n_parts; p++) {
            const ggml_moe_stream_part & part = node.parts[p];
            memcpy(part.slots + victims_of(node)[picks.victim[i]].slot*part.size, part.host + picks.expert[i]*part.size, part.size);
        }
    }
}

// what publish streams, or bring: join says what the slots hold
static void emulate_streaming(const ggml_moe_stream_node & node, const ggml_moe_stream_picks & picks) {
    emulate_copies(node, picks);
    for (int i = 0; i < picks.n; i++) {
        const size_t v = (size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS + picks.victim[i];
        node.channel->victims_told[v] = { node.channel->victims[v].slot, -1, node.late };
    }
}

static void emulate_place(const ggml_moe_stream_node & node, const ggml_moe_stream_picks & picks) {
    const ggml_moe_stream_channel & ch = *node.channel;
    const size_t row = (size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS;
    for (int i = 0; i < picks.n; i++) {
        ggml_moe_stream_victim & v = ch.victims[row + picks.victim[i]];
        node.map[v.expert] = -1;
        v.expert = picks.expert[i];
        node.map[v.expert] = v.slot;
        ch.victims_told[row + picks.victim[i]] = { v.slot, v.expert, node.late };
    }
}

static void count_up(const ggml_moe_stream_channel & ch, int row, ggml_moe_stream_counter which, int n) {
    const int at = row*GGML_MOE_STREAM_N_COUNTERS + which;
    ch.counters[at] = ch.counters_device[at] += n;
}

// as the device's: which cold experts cross the link
static ggml_moe_stream_picks emulate_picks(const ggml_moe_stream_node & node, const ggml_tensor * ids, const int32_t * map, int n_pairs) {
    const ggml_moe_stream_channel & ch = *node.channel;
    ggml_moe_stream_picks picks = {};
    std::vector<int> count(node.n_expert);
    for (int i = 0; i < n_pairs; i++) {
        count[id_at(ids, i/node.n_used, i % node.n_used)]++;
    }
    if (node.gate && ch.ahead->n > 0 && ch.ahead->row == node.row) {
        const int32_t * guessed = ch.ahead->expert;
        count_up(ch, node.row, GGML_MOE_STREAM_RIGHT, (int) std::count_if(guessed, guessed + ch.ahead->n, [&](int e) { return count[e] > 0; }));
        ch.ahead->n = 0;
    }
    const int n_free    = add_victims(node, count, false, picks, 0);
    const int n_victims = node.late ? add_victims(node, count, true, picks, n_free) : n_free;
    const int most      = (int) ch.rates[GGML_MOE_STREAM_MOST];
    std::vector<int> cold;
    int n_cold_pairs = 0;
    for (int e = 0; e < node.n_expert; e++) {
        if (count[e] > 0 && map[e] < 0) {
            cold.push_back(e);
            n_cold_pairs += count[e];
        }
    }
    std::stable_sort(cold.begin(), cold.end(), [&](int a, int b) { return count[a] > count[b]; });
    const int   n_cold = (int) cold.size();
    const float bytes  = (float) node.expert_bytes;
    const float first  = ch.rates[GGML_MOE_STREAM_POOL]*bytes;
    const float more   = ch.rates[GGML_MOE_STREAM_POOL_TOKEN]*bytes;
    float pool = ch.rates[GGML_MOE_STREAM_REQUEST] + n_cold*first + (n_cold_pairs - n_cold)*more;
    float best = std::max(ch.rates[GGML_MOE_STREAM_HOT], pool);
    int   n_best = 0; // if there were room for all
    for (int i = 0; i < std::min(most, n_cold); i++) {
        const float device = ch.rates[GGML_MOE_STREAM_HOT] + (i + 1)*ch.rates[GGML_MOE_STREAM_LINK]*bytes;
        if (device > best) {
            break;
        }
        pool -= first + (count[cold[i]] - 1)*more;
        picks.expert[i] = cold[i];
        const float end = std::max(device, i + 1 < n_cold ? pool : 0.0f);
        if (end <= best) {
            best    = end;
            n_best  = i + 1;
            picks.n = std::min(n_best, n_victims);
        }
    }
    count_up(ch, node.row, GGML_MOE_STREAM_CROWDED, node.late ? std::max(0, picks.n - n_free) : n_best - picks.n);
    if (!node.late) {
        emulate_streaming(node, picks);
    }
    return picks;
}

static uint32_t moe_hash(uint32_t v) {
    v = (v ^ v >> 16)*0x7feb352du;
    v = (v ^ v >> 15)*0x846ca68bu;
    return v ^ v >> 16;
}

// The device's k_moe_look and k_moe_ahead: what the next row's router would choose, given this row's input, is brought into its slots.
static void emulate_look_ahead(const ggml_moe_stream_node & next, const ggml_tensor * x) {
    const ggml_moe_stream_channel & ch = *next.channel;
    const float mean = ch.rates[GGML_MOE_STREAM_AHEAD];
    const int   most = std::min((int) std::floor(mean*(next.row + 1)) - (int) std::floor(mean*next.row), GGML_MOE_STREAM_MAX_AHEAD);
    ggml_moe_stream_picks picks = {};
    picks.row = next.row;
    if (most > 0) {
        const uint32_t wrong = (uint32_t) (ch.rates[GGML_MOE_STREAM_WRONG]*4294967040.0f);
        const uint32_t seed  = moe_hash((uint32_t) ch.rates[GGML_MOE_STREAM_TIME]*64 + next.row);
        std::vector<int>   count(next.n_expert); // upper half: tokens that would choose it, lower half: how early
        std::vector<float> scores(next.n_expert);
        std::vector<int>   order(next.n_expert);
        for (int t = 0; t < (int) x->ne[1]; t++) {
            const float * row = (const float *) ((const char *) x->data + t*x->nb[1]);
            for (int e = 0; e < next.n_expert; e++) {
                const float * gate = next.gate + (size_t) e*next.n_embd;
                float s = 0.0f;
                for (int i = 0; i < next.n_embd; i++) {
                    s += gate[i]*row[i];
                }
                s = next.gate_sigmoid ? 1.0f/(1.0f + std::exp(-s)) : s;
                scores[e] = s + (next.gate_bias ? next.gate_bias[e] : 0.0f);
                order[e]  = e;
            }
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
            for (int k = 0; k < next.n_used; k++) {
                const uint32_t h = moe_hash(seed ^ (t*next.n_used + k + 1)*0x9e3779b9u);
                count[h < wrong ? moe_hash(h) % next.n_expert : order[k]] += (1 << 16) + next.n_used - k;
            }
        }
        const int n_victims = add_victims(next, count, false, picks, 0);
        while (picks.n < std::min(n_victims, most)) {
            int best = -1;
            for (int e = 0; e < next.n_expert; e++) {
                best = count[e] > 0 && next.map[e] < 0 && (best < 0 || count[e] > count[best]) ? e : best;
            }
            if (best < 0) {
                break;
            }
            picks.expert[picks.n++] = best;
            count[best] = 0;
        }
        emulate_copies(next, picks);
        emulate_place(next, picks);
    }
    *ch.ahead = picks;
    count_up(ch, next.row, GGML_MOE_STREAM_LOOKED, picks.n);
}

static void emulate_publish(ggml_tensor * dst, int ith, int n_threads, void * user_data) {
    GGML_UNUSED(n_threads);
    if (ith > 0) {
        return;
    }
    const ggml_moe_stream_node & node = *(const ggml_moe_stream_node *) user_data;
    const ggml_moe_stream_channel & ch = *node.channel;
    const ggml_tensor * x   = dst->src[0];
    const ggml_tensor * ids = dst->src[1];
    const ggml_tensor * w   = dst->src[2];
    const int32_t *     map = (const int32_t *) dst->src[3]->data;
    const int n_tokens = (int) x->ne[1];
    const int n_pairs  = n_tokens*node.n_used;
    int32_t * slots   = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_SLOT;
    float   * weights = (float   *) dst->data + n_pairs*GGML_MOE_STREAM_WEIGHT;
    int32_t * where   = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_WHERE;
    int32_t * late    = (int32_t *) dst->data + n_pairs*GGML_MOE_STREAM_LATE;

    ggml_moe_stream_picks & picks = *ch.picks;
    picks = node.n_parts > 0 ? emulate_picks(node, ids, map, n_pairs) : ggml_moe_stream_picks();
    auto brought_to = [&](int e) {
        for (int i = 0; i < picks.n; i++) {
            if (picks.expert[i] == e) {
                return ch.victims[(size_t) node.row*GGML_MOE_STREAM_MAX_VICTIMS + picks.victim[i]].slot;
            }
        }
        return -1;
    };

    // ggml-cpu's product knows no id -1: a pair that a pass does not compute gets a published slot (or the first, which is zero), and
    // join leaves it out
    int32_t some_slot = 0;
    for (int i = 0; i < n_pairs; i++) {
        const int e = id_at(ids, i/node.n_used, i % node.n_used);
        some_slot = std::max({ some_slot, map[e], brought_to(e) });
    }
    bool any_cold = false;
    for (int t = 0; t < n_tokens; t++) {
        bool own_cold = false;
        for (int k = 0; k < node.n_used; k++) {
            const int   i   = t*node.n_used + k;
            const int   e   = id_at(ids, t, k);
            const float raw = *(const float *) ((const char *) w->data + t*w->nb[2] + k*w->nb[1]);
            const int  s       = map[e];
            const int  brought = s < 0 ? brought_to(e) : -1;
            const bool is_cold = s < 0 && brought < 0;
            const int  first   = s < 0 && !node.late ? brought : s;
            where[i]   = is_cold ? GGML_MOE_STREAM_BY_POOL : s < 0 && node.late ? GGML_MOE_STREAM_SECOND_PASS : GGML_MOE_STREAM_FIRST_PASS;
            slots[i]   = first < 0 ? some_slot : first;
            late[i]    = node.late && brought >= 0 ? brought : some_slot;
            weights[i] = node.scale ? raw*node.scale[e] : raw;
            own_cold   = own_cold || is_cold;
            ch.ids[i]     = is_cold ? e : -1;
            ch.weights[i] = weights[i];
            if (dst->src[4]) {
                *(int32_t *) ((char *) dst->src[4]->data + t*dst->src[4]->nb[1] + k*sizeof(int32_t)) = e;
            }
            if (dst->src[5]) {
                *(float *) ((char *) dst->src[5]->data + t*dst->src[5]->nb[1] + k*sizeof(float)) = raw;
            }
        }
        if (own_cold) {
            const float * row = (const float *) ((const char *) x->data + t*x->nb[1]);
            if (node.input == GGML_MOE_STREAM_Q8_K) {
                moe_cpu_type_traits()(GGML_TYPE_Q8_K)->from_float(row, (char *) ch.x + t*ggml_row_size(GGML_TYPE_Q8_K, node.n_embd), node.n_embd);
            } else {
                memcpy((float *) ch.x + (size_t) t*node.n_embd, row, node.n_embd*sizeof(float));
            }
        }
        any_cold = any_cold || own_cold;
    }
    if (any_cold) {
        const uint32_t seq = ++ch.state[0];
        __atomic_store_n(ch.header, (uint64_t) seq << 32 | (uint32_t) node.row << 16 | (uint32_t) n_tokens, __ATOMIC_RELEASE);
    }
    if (node.next) {
        emulate_look_ahead(*node.next, x);
    }
}

static void emulate_bring(ggml_tensor * dst, int ith, int n_threads, void * user_data) {
    GGML_UNUSED(n_threads);
    if (ith > 0) {
        return;
    }
    const ggml_moe_stream_node & node = *(const ggml_moe_stream_node *) user_data;
    int i = 0;
    while (dst->src[i + 1]) {
        i++;
    }
    const size_t n_pairs = dst->ne[0]*dst->ne[1];
    std::copy_n((const int32_t *) dst->src[i]->data + n_pairs*GGML_MOE_STREAM_LATE, n_pairs, (int32_t *) dst->data);
    emulate_streaming(node, *node.channel->picks);
}

static void emulate_wait(const ggml_moe_stream_channel & ch) {
    const int64_t t0 = moe_now_us();
    while ((int32_t) (__atomic_load_n(ch.done, __ATOMIC_ACQUIRE) - ch.state[0]) < 0) {
        std::this_thread::yield();
        if (moe_now_us() - t0 > (int64_t) (ch.timeout_ns/1000)) {
            __atomic_store_n(ch.failed, (uint32_t) GGML_MOE_STREAM_NO_ANSWER, __ATOMIC_RELEASE);
            return;
        }
        if (__atomic_load_n(ch.failed, __ATOMIC_ACQUIRE) != GGML_MOE_STREAM_OK) {
            return;
        }
    }
}

static void emulate_join(ggml_tensor * dst, int ith, int n_threads, void * user_data) {
    GGML_UNUSED(n_threads);
    if (ith > 0) {
        return;
    }
    const ggml_moe_stream_node & node = *(const ggml_moe_stream_node *) user_data;
    const ggml_moe_stream_channel & ch = *node.channel;
    int n_chunks = 0;
    while (dst->src[n_chunks + 1]) {
        n_chunks++;
    }
    const ggml_tensor * published = dst->src[n_chunks];
    const int n_pairs = (int) (published->ne[0]*published->ne[1]);
    const float   * weights = (const float   *) published->data + n_pairs*GGML_MOE_STREAM_WEIGHT;
    const int32_t * where   = (const int32_t *) published->data + n_pairs*GGML_MOE_STREAM_WHERE;
    n_chunks /= node.late ? 2 : 1;
    const int chunk = n_chunks > 0 ? (int) dst->src[0]->ne[2] : 1;
    bool waited = false;
    if (node.n_parts > 0) {
        emulate_place(node, *ch.picks);
        count_up(ch, node.row, GGML_MOE_STREAM_STREAMED, ch.picks->n);
    }
    for (int t = 0; t < (int) dst->ne[1]; t++) {
        float * sum = (float *) ((char *) dst->data + t*dst->nb[1]);
        std::fill(sum, sum + node.n_embd, 0.0f);
        bool any_cold = false;
        for (int k = 0; k < node.n_used; k++) {
            if (where[t*node.n_used + k] == GGML_MOE_STREAM_BY_POOL) {
                any_cold = true;
                continue;
            }
            const float f    = node.weight_before ? 1.0f : weights[t*node.n_used + k];
            const int   pass = where[t*node.n_used + k] == GGML_MOE_STREAM_SECOND_PASS ? n_chunks : 0;
            const float * y  = (const float *) dst->src[pass + t/chunk]->data + (size_t) (t % chunk*node.n_used + k)*node.n_embd;
            for (int i = 0; i < node.n_embd; i++) {
                sum[i] += f*y[i];
            }
        }
        if (any_cold && !waited) {
            emulate_wait(ch);
            waited = true;
        }
        for (int i = 0; any_cold && i < node.n_embd; i++) {
            sum[i] += ch.out[(size_t) t*node.n_embd + i];
        }
    }
}

//
// which layers
//

const ggml_moe_stream_api * moe_stream_api_of(ggml_backend_dev_t dev, int & index) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    for (size_t i = 0; reg && i < ggml_backend_reg_dev_count(reg); i++) {
        index = ggml_backend_reg_dev_get(reg, i) == dev ? (int) i : index;
    }
    auto get = reg ? ggml_backend_reg_get_proc_address(reg, "ggml_moe_stream") : nullptr;
    return (const ggml_moe_stream_api *) get;
}

static bool is_cpu(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

moe_stream::moe_stream(llama_moe_state & st, ggml_backend_dev_t dev) : st(st), dev(dev) {
    api = moe_stream_api_of(dev, device_index);
}

moe_stream::~moe_stream() {
    if (client && pool && !pool->remove(client)) {
        LLAMA_LOG_ERROR("moe: a thread of the pool still hangs in a computation for this context: its buffers stay, and it must not outlive the model\n");
    }
    if (side) {
        api->side_free(side);
    }
}

// of the products with the layer's experts
static int max_tokens_of(const ggml_moe_stream_api * api, int device, const moe_block & b) {
    constexpr int EMULATED = 8;
    if (!api) {
        return EMULATED;
    }
    int n = moe_stream::MAX_TOKENS;
    for (int p : { MOE_GATE, MOE_UP, MOE_DOWN }) {
        n = b.host[p] ? std::min(n, api->max_tokens(device, b.host[p])) : n;
    }
    return n;
}

int moe_stream::chunk_of(const moe_layer & l) const {
    return max_tokens_of(api, device_index, l.block);
}

bool moe_stream::supports(const moe_layer & l, ggml_backend_dev_t device, std::string & reason) const {
    const moe_block & b = l.block;
    if (!api && !is_cpu(dev)) {
        reason = std::string(ggml_backend_dev_name(dev)) + " has no in-stream execution";
    } else if (device != dev) {
        reason = std::string("the layer is computed on ") + (device ? ggml_backend_dev_name(device) : "no device") + ", its slots are on " + ggml_backend_dev_name(dev);
    } else if (b.n_embd % 4 != 0) {
        reason = "the width of the model is no multiple of 4";
    } else {
        const int chunk = chunk_of(l);
        bool quantized = true;
        for (int p : { MOE_GATE, MOE_UP, MOE_DOWN }) {
            quantized = quantized && (!b.host[p] || ggml_is_quantized(b.host[p]->type));
        }
        const bool repeats = st.is_second_block(b); // GroveMoE's tokens name an expert of theirs twice
        if (chunk < 1) {
            reason = std::string(ggml_backend_dev_name(dev)) + " has no kernel for these experts that skips pairs";
        } else if (api && repeats && !quantized) {
            reason = "experts that are not quantised may not occur twice in a token's choice on this device";
        } else if ((MAX_TOKENS + chunk - 1)/chunk > GGML_MAX_SRC - 1) {
            reason = "the device takes too few tokens at once";
        } else {
            return true;
        }
    }
    return false;
}

//
// memory
//

bool moe_stream::init(std::string & error) {
    const int n_rows   = (int) st.rows.size();
    const int n_expert = st.log.n_expert;
    client = std::make_shared<moe_stream_client>(moe_cpu_type_traits(), st.params.own_kernels);
    moe_stream_client & c = *client;

    // what the channel must hold
    const int n_max  = std::min(MAX_TOKENS, st.params.max_batch_tokens);
    int  n_embd = 0;
    int  n_used = 0;
    bool scaled = false;
    c.blocks.resize(n_rows);
    c.perf.resize(n_rows);
    for (moe_layer * l : st.rows) {
        if (l && l->block.hybrid() && l->stream_reason.empty()) {
            n_embd = std::max(n_embd, l->block.n_embd);
            n_used = std::max(n_used, l->block.n_used);
            scaled = scaled || l->block.down_scale;
            c.lane.reserve(l->block, n_max);
            c.blocks[l->block.row] = l->block;
        }
    }
    c.ids.resize((size_t) n_max*n_used);
    c.weights.resize((size_t) n_max*n_used);
    c.count_of.resize(n_expert);
    c.next_of.resize(n_expert);
    clock_before.resize(n_rows);

    size_t size = 0;
    auto place = [&](size_t n) { // flags lie on pages of their own
        const size_t offset = size;
        size += GGML_PAD(n, 4096);
        return offset;
    };
    const size_t o_header  = place(sizeof(uint64_t));
    const size_t o_done    = place(sizeof(uint32_t));
    const size_t o_failed  = place(sizeof(uint32_t));
    const size_t o_ids     = place(sizeof(int32_t)*n_max*n_used);
    const size_t o_weights = place(sizeof(float)*n_max*n_used);
    const size_t o_x       = place(sizeof(float)*n_max*n_embd);
    const size_t o_out     = place(sizeof(float)*n_max*n_embd);
    const size_t o_clock   = place(sizeof(uint64_t)*4*n_rows);
    const size_t o_told    = place(sizeof(ggml_moe_stream_told)*GGML_MOE_STREAM_MAX_VICTIMS*n_rows);
    const size_t o_counters = place(sizeof(uint32_t)*GGML_MOE_STREAM_N_COUNTERS*n_rows);
    const size_t o_ahead    = place(sizeof(uint64_t)*2*n_rows);
    const size_t o_bring    = place(sizeof(uint64_t)*n_rows);
    const size_t n_maps    = (size_t) n_expert*n_rows; // 32-bit words, here and below
    const size_t n_victims = sizeof(ggml_moe_stream_victim)/sizeof(int32_t)*GGML_MOE_STREAM_MAX_VICTIMS*n_rows;
    const size_t n_control = n_maps + n_victims + GGML_MOE_STREAM_N_RATES;
    const size_t o_control = place(sizeof(int32_t)*n_control);
    c.buf.reset(ggml_backend_buft_alloc_buffer(st.device->host_buft, size));
    // CUDA's host buffer type silently gives pageable memory where it cannot lock any: kernels must not be given that
    if (!c.buf || (api && ggml_backend_buffer_get_type(c.buf.get()) != st.device->host_buft)) {
        error = "no page-locked host memory for the in-stream execution (" + std::to_string(size) + " bytes; see ulimit -l and GGML_CUDA_NO_PINNED)";
        return false;
    }
    char * base = (char *) ggml_backend_buffer_get_base(c.buf.get());
    memset(base, 0, size);

    ctx.reset(ggml_init({ ggml_tensor_overhead()*4, nullptr, true }));
    constexpr int N_STATE = 16;
    constexpr int N_PICKS = 64;
    static_assert(sizeof(ggml_moe_stream_picks) <= sizeof(int32_t)*N_PICKS, "both picks lie behind the sequence number");
    ggml_tensor * state = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, N_STATE + 2*N_PICKS + GGML_MOE_STREAM_N_COUNTERS*n_rows);
    ggml_tensor * ahead = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, (size_t) n_max*(n_embd + n_expert));
    control = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n_control);
    scale = scaled ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_expert, n_rows) : nullptr;
    buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    if (!buf) {
        error = std::string("no memory on ") + ggml_backend_dev_name(dev) + " for the slot maps";
        return false;
    }
    ggml_backend_buffer_clear(buf.get(), 0);
    ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    maps_host    = (int32_t *) (base + o_control);
    victims_host = (ggml_moe_stream_victim *) (maps_host + n_maps);
    rates_host   = (float *) (maps_host + n_maps + n_victims);
    std::fill(maps_host, maps_host + n_maps + n_victims, -1);
    std::fill_n((ggml_moe_stream_told *) (base + o_told), (size_t) GGML_MOE_STREAM_MAX_VICTIMS*n_rows, ggml_moe_stream_told{ -1, -1, 0 });
    values.assign(n_maps, 0.0f);
    last_used.assign(n_maps, 0);
    counters_before.assign((size_t) GGML_MOE_STREAM_N_COUNTERS*n_rows, 0);
    us_hot  .assign(MAX_TOKENS + 1, 0.0f);
    late_on .assign(MAX_TOKENS + 1, false);
    n_crowded.assign(MAX_TOKENS + 1, 0.0f);
    n_considered.assign(MAX_TOKENS + 1, 0);
    us_rest .assign(MAX_TOKENS + 1, 0.0f);
    us_ahead.assign(MAX_TOKENS + 1, 0.0f);
    ahead_right.assign(MAX_TOKENS + 1, AHEAD_RIGHT);
    ahead_tried.assign(MAX_TOKENS + 1, 0);
    us_pool_byte  = US_POOL_BYTE;
    us_link_byte  = US_LINK_BYTE;
    us_ahead_byte = US_LINK_BYTE;
    c.us_of_byte.reserve(n_rows);
    max_ahead     = st.params.look_ahead;
    ahead_wrong   = st.ahead_wrong;
    set_streaming(st.params.stream_experts, st.stream_always);
    side = api ? api->side_open(device_index) : nullptr;

    ggml_moe_stream_channel & ch = c.channel;
    ch.header  = (uint64_t *) (base + o_header);
    ch.done    = (uint32_t *) (base + o_done);
    ch.failed  = (uint32_t *) (base + o_failed);
    ch.ids     = (int32_t  *) (base + o_ids);
    ch.weights = (float    *) (base + o_weights);
    ch.x       =               base + o_x;
    ch.out     = (float    *) (base + o_out);
    ch.clock   = (uint64_t *) (base + o_clock);
    ch.ahead_clock = (uint64_t *) (base + o_ahead);
    ch.bring_clock = (uint64_t *) (base + o_bring);
    ch.counters    = (uint32_t *) (base + o_counters);
    ch.victims_told = (ggml_moe_stream_told *) (base + o_told);
    ch.state   = (uint32_t *) state->data;
    ch.picks   = (ggml_moe_stream_picks *) (ch.state + N_STATE);
    ch.ahead   = (ggml_moe_stream_picks *) (ch.state + N_STATE + N_PICKS);
    ch.counters_device = ch.state + N_STATE + 2*N_PICKS;
    ch.ahead_x      = (float *) ahead->data;
    ch.ahead_scores = ch.ahead_x + (size_t) n_max*n_embd;
    ch.side         = side;
    ch.victims = (ggml_moe_stream_victim *) ((int32_t *) control->data + n_maps);
    ch.rates   = (const float *) ((int32_t *) control->data + n_maps + n_victims);
    c.timeout_us  = (int64_t) st.params.timeout_ms*1000;
    constexpr int64_t WATCHED_US = 1000000;
    if (api && api->has_watchdog(device_index) && c.timeout_us > WATCHED_US) {
        LLAMA_LOG_WARN("moe: the driver ends kernels of %s that run for seconds: a layer's CPU part may take 1 s instead of %d ms\n", ggml_backend_dev_name(dev), st.params.timeout_ms);
        c.timeout_us = WATCHED_US;
    }
    ch.timeout_ns = (uint64_t) c.timeout_us*1500; // the pool gives up first, and says so

    for (int row = 0; row < n_rows; row++) {
        const moe_block & b = c.blocks[row];
        ggml_moe_stream_node node = {};
        node.row           = row;
        node.n_embd        = b.n_embd;
        node.n_used        = b.n_used;
        node.weight_before = b.weight_before;
        node.channel       = &c.channel;
        node.n_expert      = n_expert;
        node.map           = (int32_t *) control->data + (size_t) row*n_expert;
        if (b.row >= 0) {
            const bool q8_K = c.lane.one_input(b) && b.n_embd % 256 == 0 && moe_cpu_type_traits()(b.host[MOE_GATE]->type)->vec_dot_type == GGML_TYPE_Q8_K;
            node.input = q8_K ? GGML_MOE_STREAM_Q8_K : GGML_MOE_STREAM_F32;
            if (b.down_scale) {
                ggml_backend_tensor_set(scale, b.down_scale->data, row*scale->nb[1], ggml_nbytes(b.down_scale));
                node.scale = (const float *) ((const char *) scale->data + row*scale->nb[1]);
            }
            give_router(node, b);
        }
        node.kind = GGML_MOE_STREAM_PUBLISH;
        c.publish_nodes.push_back(node);
        node.kind = GGML_MOE_STREAM_JOIN;
        c.join_nodes.push_back(node);
        node.late = true;
        c.late_join_nodes.push_back(node);
        node.kind = GGML_MOE_STREAM_BRING;
        c.bring_nodes.push_back(node);
        node.kind = GGML_MOE_STREAM_PUBLISH;
        c.late_publish_nodes.push_back(node);
    }

    slots_changed();

    n_cores = moe_pool::usable_cores();
    pool    = moe_pool::of_process();
    try {
        pool->add(client);
    } catch (const std::exception & e) {
        error = e.what();
        client.reset();
        return false;
    }
    grow_pool(1);
    if (pool->size() == 0) {
        error = "the system has no thread for the in-stream execution";
        return false;
    }
    return true;
}

int moe_stream::grow_pool(int n_tokens) {
    const int n = st.params.pool_threads > 0 ? st.params.pool_threads : moe_pool::threads_for(st.n_threads_for(n_tokens), n_cores);
    if (pool->size() < n) {
        pool->grow(n);
    }
    return n;
}

size_t moe_stream::device_bytes() const {
    return buf ? ggml_backend_buffer_get_size(buf.get()) : 0;
}

ggml_tensor * moe_stream::scale_of(ggml_context * ctx0, const moe_block & b) const {
    return ggml_view_1d(ctx0, scale, b.n_expert, b.row*scale->nb[1]);
}

void moe_stream::reset_times() {
    std::fill(client->perf.begin(), client->perf.end(), moe_stream_client::times());
}

// of a row that has streamed: from publish on, or from bring
double moe_stream::streaming_us(int row) const {
    const uint64_t * clock = client->channel.clock + row*4;
    const uint64_t   bring = client->channel.bring_clock[row];
    return (clock[3] - (bring > clock[0] && bring <= clock[3] ? bring : clock[0]))*1e-3;
}

// Of several ubatches in one decode the device's clock tells the last.
void moe_stream::add_times(moe_layer & l) const {
    const uint64_t * clock = client->channel.clock + l.block.row*4;
    llama_moe_perf_data & perf = l.perf;
    if (clock[0] && clock[1] >= clock[0] && clock[2] >= clock[1]) {
        const size_t at = (size_t) l.block.row*GGML_MOE_STREAM_N_COUNTERS + GGML_MOE_STREAM_STREAMED;
        const bool   streamed  = client->channel.counters[at] != counters_before[at] && clock[3] > clock[0] && clock[3] <= clock[1];
        const double us_stream = streamed ? streaming_us(l.block.row) : 0.0;
        perf.us_stream += us_stream;
        perf.us_hot   += (clock[1] - clock[0])*1e-3 - us_stream;
        perf.us_wait  += (clock[2] - clock[1])*1e-3;
        perf.us_total += (clock[2] - clock[0])*1e-3;
        // until the next row's publish
        const size_t next = (size_t) l.block.row + 1;
        if (next < client->blocks.size() && clock[4] >= clock[2] && client->blocks[next].row >= 0) {
            perf.us_rest += (clock[4] - clock[2])*1e-3;
        }
    }
    moe_stream_client::times & t = client->perf[l.block.row];
    perf.us_plan += t.us_plan;
    perf.us_cold += t.us_cold;
    t = {};
}

//
// decodes
//

// The host changes it between decodes only, when the device has been synchronised: neither side is in use. The copy is the stream's first.
void moe_stream::upload_control(int n_tokens) {
    const int n_expert = st.log.n_expert;
    for (const moe_layer * l : st.rows) {
        if (l && l->block.hybrid() && l->stream_reason.empty()) {
            std::copy(l->slots.slot_of.begin(), l->slots.slot_of.end(), maps_host + (size_t) l->block.row*n_expert);
        }
    }
    const int   n   = std::min(n_tokens, MAX_TOKENS);
    const float hot = us_hot[n] > 0 ? us_hot[n] : 20.0f + 6.0f*n;
    rates_host[GGML_MOE_STREAM_POOL]       = stream_always ? 1.0f : us_pool_byte;
    rates_host[GGML_MOE_STREAM_POOL_TOKEN] = AGAIN*rates_host[GGML_MOE_STREAM_POOL];
    rates_host[GGML_MOE_STREAM_REQUEST]    = US_REQUEST;
    rates_host[GGML_MOE_STREAM_LINK]       = us_link_byte;
    rates_host[GGML_MOE_STREAM_HOT]        = hot;
    rates_host[GGML_MOE_STREAM_MOST]       = (float) max_streamed;
    rates_host[GGML_MOE_STREAM_AHEAD]      = ahead_now(n);
    rates_host[GGML_MOE_STREAM_WRONG]      = ahead_wrong;
    rates_host[GGML_MOE_STREAM_TIME]       = (float) (n_decodes & 0xfffff);
    ggml_backend_tensor_set_async(st.backend_of(dev), control, maps_host, 0, ggml_nbytes(control));
    map_dirty = false;
}

void moe_stream::begin_ubatch(int n_tokens) {
    if (!running) { // the ubatches of a decode are under way together
        if (lane_is_used()) {
            bool chosen;
            {
                std::lock_guard<std::mutex> lock(values_mutex);
                chosen = victims_chosen;
                victims_chosen = false;
            }
            chosen ? drop_stale_victims() : choose_victims(false);
        }
        if (map_dirty || lane_is_used()) {
            upload_control(n_tokens);
        }
        n_ubatches = 0;
        client->us_of_byte.clear();
        client->n_requests = 0;
        std::copy_n(client->channel.counters, counters_before.size(), counters_before.begin());
    }
    n_ubatches++;
    n_tokens_last = n_tokens;
    client->n_threads = grow_pool(n_tokens);
    for (size_t row = 0; row < clock_before.size(); row++) {
        clock_before[row] = __atomic_load_n(&client->channel.clock[row*4 + 2], __ATOMIC_ACQUIRE);
    }
    pool->enter(*client);
    running = true;
}

void moe_stream::launched(const std::vector<int> & rows) {
    constexpr int LATE = 4; // a nap ends some 60 µs late: the layers left must take longer than that
    late_row = api && (int) rows.size() >= 2*LATE ? rows[rows.size() - LATE] : -1;
    slept_since = 0;
}

bool moe_stream::late_row_ran() const {
    return __atomic_load_n(&client->channel.clock[late_row*4 + 2], __ATOMIC_ACQUIRE) != clock_before[late_row];
}

// It ends when the row has run, or something failed, or it takes unusually long (an eval callback may have stopped the graph). Only in the
// first case it is certain that the stream has read what upload_control gave it: the victims may be chosen anew.
void moe_stream::sleep_through() {
    if (!running || late_row < 0) {
        return;
    }
    slept_since = moe_now_us();
    const int64_t limit = slept_since + (slept_us == 0 ? 20000 : std::max((int64_t) 5000, 4*slept_us));
    while (!late_row_ran() && __atomic_load_n(client->channel.failed, __ATOMIC_ACQUIRE) == GGML_MOE_STREAM_OK && moe_now_us() < limit) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (!late_row_ran()) {
        return;
    }
    slept_us = moe_now_us() - slept_since;
    late_row = -1;
    if (lane_is_used()) {
        choose_victims(true);
    }
}

bool moe_stream::end_decode(std::string & failure) {
    if (!running) {
        return true;
    }
    running = false;
    pool->leave(*client);
    if (late_row >= 0 && slept_since > 0 && late_row_ran()) { // it was slow, but nothing stopped it
        slept_us = moe_now_us() - slept_since;
    }
    late_row = -1;
    const ggml_moe_stream_channel & ch = client->channel;
    switch (__atomic_load_n(ch.failed, __ATOMIC_ACQUIRE)) {
        case GGML_MOE_STREAM_OK:
            if (n_ubatches == 1 && client->seq_of_header() == __atomic_load_n(ch.done, __ATOMIC_ACQUIRE)) { // else it was broken off
                learn(n_tokens_last);
                learn_ahead(std::min(n_tokens_last, MAX_TOKENS));
                one_whole = true;
            }
            return true;
        case GGML_MOE_STREAM_NO_ANSWER:
            failure = "the CPU threads did not answer within " + std::to_string(ch.timeout_ns/1000000) + " ms";
            break;
        default:
            failure = "the CPU threads did not finish a layer within " + std::to_string(client->timeout_us/1000) + " ms";
            break;
    }
    failure += ": the results of this decode are lost";
    return false;
}

bool moe_stream::ready() {
    if (!pool->healthy(*client)) {
        return false;
    }
    const ggml_moe_stream_channel & ch = client->channel;
    if (__atomic_load_n(ch.failed, __ATOMIC_ACQUIRE) != GGML_MOE_STREAM_OK) { // the pool is free again: start afresh after the last request
        client->seen = client->seq_of_header();
        __atomic_store_n(ch.done, client->seen, __ATOMIC_RELEASE);
        __atomic_store_n(ch.failed, (uint32_t) GGML_MOE_STREAM_OK, __ATOMIC_RELEASE);
    }
    return true;
}

//
// stream lane
//

// What crosses the link is read by the device from where the model lies, in pieces of 16 bytes.
bool moe_stream::streams(const moe_layer & l) const {
    const int n_slots = (int) l.slots.slots.size();
    bool can = l.block.hybrid() && l.stream_reason.empty() && n_slots > 0 && n_slots < l.block.n_expert; // else each expert has a slot of its own
    for (int p = 0; can && p < MOE_N_PARTS; p++) {
        if (const ggml_tensor * t = l.block.host[p]) {
            can = l.block.expert_stride(p) % 16 == 0 && (!api || ggml_backend_buffer_get_type(t->buffer) == st.device->host_buft);
        }
    }
    return can;
}

void moe_stream::slots_changed() {
    for (const moe_layer * l : st.rows) {
        if (!l || client->blocks[l->block.row].row < 0) {
            continue;
        }
        for (auto * nodes : { &client->publish_nodes, &client->join_nodes, &client->late_publish_nodes, &client->bring_nodes, &client->late_join_nodes }) {
            ggml_moe_stream_node & node = (*nodes)[l->block.row];
            node.n_parts      = 0;
            node.expert_bytes = l->block.expert_bytes();
            for (int p = 0; p < MOE_N_PARTS && streams(*l); p++) {
                if (l->block.host[p]) {
                    node.parts[node.n_parts++] = { l->block.expert_data(p, 0), (char *) l->slots.tensors[p]->data, l->block.expert_stride(p) };
                }
            }
        }
    }
    // a layer of the model proper looks ahead to the one behind, if that has a router that the device can use
    std::vector<ggml_moe_stream_node> & nodes = client->publish_nodes;
    const ggml_moe_stream_node * behind = nullptr;
    for (int row = st.n_layer() - 1; row >= 0; row--) {
        ggml_moe_stream_node & node = nodes[row];
        const bool can = behind && (side || !api) && node.n_parts > 0 && behind->n_parts > 0 && behind->gate && node.n_embd == behind->n_embd;
        node.next = can ? behind : nullptr;
        client->late_publish_nodes[row].next = node.next;
        behind = st.rows[row] ? &node : behind; // a dense layer has no row
    }
}

// A row whose router is of another kind, or gets another input than the experts, is guessed badly, which `ahead_right` tells.
void moe_stream::give_router(ggml_moe_stream_node & node, const moe_block & b) const {
    const moe_router router = st.router_of(b);
    const ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
    auto usable = [&](const ggml_tensor * t, int64_t n0, int64_t n1) {
        return t && t->type == GGML_TYPE_F32 && t->ne[0] == n0 && t->ne[1] == n1 && ggml_is_contiguous(t) && t->buffer &&
            (api ? ggml_backend_buffer_get_type(t->buffer) == buft : ggml_backend_buffer_is_host(t->buffer));
    };
    if (!usable(router.gate, b.n_embd, b.n_expert)) {
        return;
    }
    node.gate = (const float *) router.gate->data;
    if (usable(router.bias, b.n_expert, 1)) {
        node.gate_bias    = (const float *) router.bias->data;
        node.gate_sigmoid = router.sigmoid;
    }
}

void moe_stream::set_streaming(int max_experts, bool always) {
    max_streamed  = max_experts;
    stream_always = always;
    forget_victims();
    if (max_streamed > 0 && !always && late_since < 0) {
        set_late(LATE_FIRST, MAX_TOKENS, true);
    }
}

void moe_stream::set_look_ahead(int max_experts, float wrong) {
    if (wrong != ahead_wrong) { // how many were right says nothing of the guesses to come
        std::fill(ahead_right.begin(), ahead_right.end(), AHEAD_RIGHT);
    }
    max_ahead   = max_experts;
    ahead_wrong = wrong;
    forget_victims();
}

void moe_stream::forget_victims() {
    for (size_t i = 0; i < st.rows.size()*GGML_MOE_STREAM_MAX_VICTIMS; i++) {
        victims_host[i].slot = -1;
    }
    map_dirty = true;
    std::lock_guard<std::mutex> lock(values_mutex);
    victims_chosen = false;
}

void moe_stream::set_values(const float * v) {
    std::lock_guard<std::mutex> lock(values_mutex);
    std::copy_n(v, values.size(), values.begin());
    victims_chosen = false;
}

// Of each layer the residents of least value, of equal ones those that were used longest ago. for_next: for the next decode, unless other
// values are given until then.
void moe_stream::choose_victims(bool for_next) {
    struct candidate {
        float   value;
        int64_t used;
        int32_t slot;
        int32_t expert;
        bool operator<(const candidate & other) const {
            return value != other.value ? value < other.value : used != other.used ? used < other.used : slot < other.slot;
        }
    };
    std::vector<candidate> found;
    std::lock_guard<std::mutex> lock(values_mutex);
    victims_chosen = for_next;
    for (const moe_layer * l : st.rows) {
        if (!l || client->blocks[l->block.row].row < 0 || client->publish_nodes[l->block.row].n_parts == 0) {
            continue;
        }
        found.clear();
        const size_t at = (size_t) l->block.row*st.log.n_expert;
        for (int e = 0; e < l->block.n_expert; e++) {
            if (l->slots.slot_of[e] >= 0) {
                found.push_back({ values[at + e], last_used[at + e], l->slots.slot_of[e], e });
            }
        }
        const int n = std::min((int) found.size(), max_streamed + max_ahead);
        std::partial_sort(found.begin(), found.begin() + n, found.end());
        ggml_moe_stream_victim * victims = victims_host + (size_t) l->block.row*GGML_MOE_STREAM_MAX_VICTIMS;
        for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
            victims[v] = v < n ? ggml_moe_stream_victim{ found[v].slot, found[v].expert } : ggml_moe_stream_victim{ -1, -1 };
        }
    }
}

// What was chosen while the last decode ran may have left since, or have been used in it.
void moe_stream::drop_stale_victims() {
    for (const moe_layer * l : st.rows) {
        if (!l || client->blocks[l->block.row].row < 0) {
            continue;
        }
        const size_t row = l->block.row;
        for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
            ggml_moe_stream_victim & x = victims_host[row*GGML_MOE_STREAM_MAX_VICTIMS + v];
            const bool stays = x.slot >= 0 && l->slots.slot_of[x.expert] == x.slot && last_used[row*st.log.n_expert + x.expert] < n_decodes;
            x = stays ? x : ggml_moe_stream_victim{ -1, -1 };
        }
    }
}

// Of several ubatches nobody knows in which one an expert left. Of one it was before the row chose, or it was not chosen, or the first pass
// had used it (what left by the look-ahead from a slot that was filled late again is not told apart).
void moe_stream::changes(const moe_layer & l, std::vector<bool> & came, std::vector<bool> & left) const {
    std::fill(came.begin(), came.end(), false);
    std::fill(left.begin(), left.end(), false);
    for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
        const ggml_moe_stream_told & told = client->channel.victims_told[(size_t) l.block.row*GGML_MOE_STREAM_MAX_VICTIMS + v];
        if (told.slot < 0) {
            continue;
        }
        const int32_t held = l.slots.slots[told.slot].expert;
        if (n_ubatches == 1 && held >= 0 && !told.late) {
            left[held] = true;
        }
        if (told.expert >= 0) {
            came[told.expert] = true; // perhaps the same one
        }
    }
}

void moe_stream::adopt() {
    if (!lane_is_used()) {
        return;
    }
    n_decodes++;
    for (size_t i = 0; i < last_used.size(); i++) {
        last_used[i] = st.log.counts[i] > 0 ? n_decodes : last_used[i];
    }
    if (one_whole && n_tokens_last >= LATE_FROM && n_tokens_last <= MAX_TOKENS) {
        consider_late();
    }
    one_whole = false;
    settle();
}

// Batches of a width in two passes, if that lets so many more experts cross the link that the pool is spared twice what a pass costs; in one
// again, if it is spared less than half of it. The width's graph is built anew then, which takes as long as a step or two; so what is likely
// comes first.
void moe_stream::consider_late() {
    constexpr float   GAIN     = 0.2f;
    constexpr float   US_PASS  = 25.0f; // until it is measured: what a pass takes that computes next to nothing
    constexpr int64_t INTERVAL = 32;    // decodes since the last change
    constexpr int     SEEN     = 8;     // and such decodes of this width
    double crowded = 0, bytes = 0;
    int    n_rows  = 0;
    for (const ggml_moe_stream_node & node : client->publish_nodes) {
        if (node.n_parts > 0) {
            const size_t at = (size_t) node.row*GGML_MOE_STREAM_N_COUNTERS + GGML_MOE_STREAM_CROWDED;
            crowded += client->channel.counters[at] - counters_before[at];
            bytes   += (double) node.expert_bytes;
            n_rows++;
        }
    }
    if (n_rows == 0) {
        return;
    }
    const int n  = n_tokens_last;
    float & mean = n_crowded[n];
    mean += (mean == 0 ? 1.0f : GAIN)*((float) (crowded/n_rows) - mean);
    n_considered[n]++;
    const float us_pass  = us_hot[1] > 0 ? us_hot[1] : US_PASS;
    const float us_saved = mean*us_pool_byte*(float) (bytes/n_rows);
    const bool  change   = late_on[n] ? us_saved < 0.5f*us_pass : us_saved > 2.0f*us_pass;
    if (stream_always && !late_on[n] && mean > 0) {
        set_late(LATE_FROM, MAX_TOKENS, true);
    } else if (!stream_always && change && n_considered[n] >= SEEN && n_decodes >= late_since + INTERVAL) {
        set_late(n, n, !late_on[n]);
    }
}

void moe_stream::set_late(int from, int to, bool on) {
    std::fill(late_on.begin() + from, late_on.begin() + to + 1, on);
    std::fill(n_crowded.begin() + from, n_crowded.begin() + to + 1, 0.0f);
    std::fill(n_considered.begin() + from, n_considered.begin() + to + 1, 0);
    late_since = n_decodes;
    if (from == to) {
        st.passes_changed(from);
    } else {
        st.passes_changed();
    }
}

void moe_stream::settle() {
    if (!lane_is_used()) {
        return;
    }
    if (running) {
        ggml_backend_synchronize(st.backend_of(dev));
        n_ubatches++; // as if there had been another: what the counters tell of the decode is lost, and with it what can be learned
    }
    const ggml_moe_stream_channel & ch = client->channel;
    for (moe_layer * l : st.rows) {
        if (!l || client->blocks[l->block.row].row < 0) {
            continue;
        }
        const int row = l->block.row;
        const bool counts = !running; // else the decode's pairs are found hot
        auto since = [&](ggml_moe_stream_counter which) {
            const size_t   at = (size_t) row*GGML_MOE_STREAM_N_COUNTERS + which;
            const uint32_t n  = ch.counters[at] - counters_before[at];
            counters_before[at] = ch.counters[at];
            return counts ? (int64_t) n : 0;
        };
        l->perf.n_streamed_experts += since(GGML_MOE_STREAM_STREAMED);
        l->perf.n_ahead_experts    += since(GGML_MOE_STREAM_LOOKED);
        l->perf.n_ahead_right      += since(GGML_MOE_STREAM_RIGHT);
        for (int v = 0; v < GGML_MOE_STREAM_MAX_VICTIMS; v++) {
            ggml_moe_stream_told & told = ch.victims_told[(size_t) row*GGML_MOE_STREAM_MAX_VICTIMS + v];
            if (running && told.expert < 0) {
                continue; // the device still finds the slot by its map: it becomes free after the decode
            }
            if (told.slot >= 0 && l->slots.slots[told.slot].expert != told.expert) {
                st.residency->replace(l->slots, told.slot, told.expert);
                map_dirty = true;
            }
            told = { -1, -1, 0 };
        }
    }
}

// The rates that publish decides by, from the device's clock and the pool's.
void moe_stream::learn(int n_tokens) {
    constexpr float GAIN = 0.2f;
    auto follow = [](float & mean, double measured) {
        mean = mean == 0 ? (float) measured : mean + GAIN*((float) measured - mean);
    };
    std::vector<double> & us = client->us_of_byte;
    if (!us.empty()) { // the median: a thread that was pushed aside says nothing about the others
        std::nth_element(us.begin(), us.begin() + us.size()/2, us.end());
        follow(us_pool_byte, us[us.size()/2]);
    }
    double us_hot_sum = 0, us_link = 0, link_bytes = 0;
    int n_hot = 0, n_streamed = 0;
    for (size_t row = 0; api && row < st.rows.size(); row++) {
        const uint64_t * clock = client->channel.clock + row*4;
        if (client->blocks[row].row < 0 || clock[0] == 0 || clock[1] < clock[0]) {
            continue;
        }
        const size_t   at = row*GGML_MOE_STREAM_N_COUNTERS + GGML_MOE_STREAM_STREAMED;
        const uint32_t n  = client->channel.counters[at] - counters_before[at];
        n_streamed += n;
        const bool streamed = n > 0 && clock[3] > clock[0] && clock[3] <= clock[1];
        const double us_stream = streamed ? streaming_us((int) row) : 0.0;
        if (streamed) {
            us_link    += us_stream;
            link_bytes += (double) n*client->blocks[row].expert_bytes();
        }
        us_hot_sum += (clock[1] - clock[0])*1e-3 - us_stream;
        n_hot++;
    }
    if (link_bytes > 0) {
        follow(us_link_byte, us_link/link_bytes);
    }
    if (us.empty() && n_streamed > 0) { // nobody asks a pool that seems slow: forget that slowly
        us_pool_byte += 0.02f*(US_POOL_BYTE - us_pool_byte);
    }
    if (n_hot > 0 && n_tokens <= MAX_TOKENS) {
        follow(us_hot[n_tokens], us_hot_sum/n_hot);
    }
}

// How many experts of a row the look-ahead may bring: what arrives until the row begins, if enough of its guesses are right. A guess that
// was wrong has taken the place of a resident, the link's time, and memory bandwidth that the pool needs (docs/performance.md).
float moe_stream::ahead_now(int n_tokens) const {
    constexpr float LEAST_RIGHT = 0.65f;
    if (max_ahead == 0 || stream_always) {
        return (float) max_ahead;
    }
    const float mean_bytes = expert_bytes_mean();
    if (us_ahead[n_tokens] <= 0 || mean_bytes <= 0 || (ahead_right[n_tokens] < LEAST_RIGHT && n_decodes < ahead_tried[n_tokens] + TRY_AGAIN)) {
        return 0.0f;
    }
    return std::min((float) max_ahead, us_ahead[n_tokens]/(us_ahead_byte*mean_bytes));
}

float moe_stream::expert_bytes_mean() const {
    double bytes = 0;
    int    n     = 0;
    for (const ggml_moe_stream_node & node : client->publish_nodes) {
        bytes += node.next ? (double) node.next->expert_bytes : 0.0;
        n     += node.next != nullptr;
    }
    return n > 0 ? (float) (bytes/n) : 0.0f;
}

// By the device's clock. Where the look-ahead ended before the rest of its layer did, the next publish did not wait for it: only these layers
// tell how long the rest takes.
void moe_stream::learn_ahead(int n_tokens) {
    constexpr float    GAIN   = 0.2f;
    constexpr float    FORGET = 0.95f;
    constexpr uint64_t MARGIN = 4000; // ns from the look-ahead's end until publish can begin
    const ggml_moe_stream_channel & ch = client->channel;
    double us_rest_sum = 0, us_until_end = 0, us_link = 0, bytes = 0;
    int n_rest = 0, n = 0, looked = 0, right = 0;
    for (size_t row = 0; row < st.rows.size(); row++) {
        const ggml_moe_stream_node * next = client->publish_nodes[row].next;
        if (!next) {
            continue;
        }
        const size_t at = (size_t) next->row*GGML_MOE_STREAM_N_COUNTERS;
        const uint32_t brought = ch.counters[at + GGML_MOE_STREAM_LOOKED] - counters_before[at + GGML_MOE_STREAM_LOOKED];
        looked += brought;
        right  += ch.counters[at + GGML_MOE_STREAM_RIGHT] - counters_before[at + GGML_MOE_STREAM_RIGHT];
        const uint64_t * clock = ch.clock + row*4;
        const uint64_t * begun = ch.clock + (size_t) next->row*4;
        const uint64_t * ahead = ch.ahead_clock + (size_t) next->row*2;
        if (!api || ahead[0] < clock[0] || ahead[1] < ahead[0] || clock[2] < ahead[0] || begun[0] < clock[2]) {
            continue; // not all of this decode
        }
        us_until_end += (clock[2] - ahead[0])*1e-3;
        n++;
        if (ahead[1] + MARGIN < begun[0]) {
            us_rest_sum += (begun[0] - clock[2])*1e-3;
            n_rest++;
        }
        if (brought > 0) {
            us_link += (ahead[1] - ahead[0])*1e-3;
            bytes   += (double) brought*next->expert_bytes;
        }
    }
    auto follow = [](float & mean, double measured) {
        mean = mean == 0 ? (float) measured : mean + GAIN*((float) measured - mean);
    };
    if (n_rest > 0) {
        follow(us_rest[n_tokens], us_rest_sum/n_rest);
    } else if (n > 0) { // every layer waited: what was measured may be of a longer context, and would never be measured again
        us_rest[n_tokens] *= FORGET;
    }
    if (n > 0 && us_rest[n_tokens] > 0) {
        follow(us_ahead[n_tokens], us_until_end/n + us_rest[n_tokens]);
    }
    if (bytes > 0) {
        follow(us_ahead_byte, us_link/bytes);
    }
    if (looked > 0) {
        const bool rested = n_decodes >= ahead_tried[n_tokens] + TRY_AGAIN; // what was measured before is old
        ahead_right[n_tokens] += (rested ? 0.5f : 0.1f)*((float) right/looked - ahead_right[n_tokens]);
        ahead_tried[n_tokens]  = n_decodes;
    }
}

//
// graph
//

void moe_stream_mark(ggml_tensor * t, uint64_t owner) {
    t->op_params[GGML_MOE_STREAM_PARAM]     = GGML_MOE_STREAM_MAGIC_0;
    t->op_params[GGML_MOE_STREAM_PARAM + 1] = GGML_MOE_STREAM_MAGIC_1;
    memcpy(t->op_params + GGML_MOE_STREAM_OWNER, &owner, sizeof(owner));
}

static ggml_tensor * mark(ggml_tensor * t, uint64_t epoch, const llm_graph_context & g, ggml_backend_t backend, const char * name, int row) {
    moe_stream_mark(t, epoch);
    ggml_format_name(t, "%s-%d", name, row);
    ggml_backend_sched_set_tensor_backend(g.sched, t, backend);
    return t;
}

// the experts of n tokens from t0 on, in the slots that `ids` names: [n_embd, n_used, n]. The order of the nodes is upstream's, so that CUDA fuses what it fuses there.
ggml_tensor * moe_stream::hot(const llm_graph_context & g, const moe_layer & l, ggml_tensor * x, ggml_tensor * published, ggml_tensor * slot_ids, int t0, int n) const {
    ggml_context *      ctx0  = g.ctx0;
    const moe_block &   b     = l.block;
    const moe_tensors & slots = l.slots.tensors;
    ggml_tensor * ids = ggml_view_2d(ctx0, slot_ids, b.n_used, n, slot_ids->nb[1], t0*slot_ids->nb[1]);
    ggml_tensor * cur = ggml_view_3d(ctx0, x, b.n_embd, 1, n, x->nb[1], x->nb[1], t0*x->nb[1]);
    if (b.weight_before) {
        ggml_tensor * w = ggml_view_3d(ctx0, published, 1, b.n_used, n, sizeof(float), published->nb[1], GGML_MOE_STREAM_WEIGHT*published->nb[2] + t0*published->nb[1]);
        w->type = GGML_TYPE_F32; // the plane holds floats
        cur = ggml_mul(ctx0, ggml_repeat_4d(ctx0, cur, b.n_embd, b.n_used, n, 1), w);
    }
    ggml_tensor * gate;
    ggml_tensor * up;
    if (b.merged) {
        ggml_tensor * gu = ggml_mul_mat_id(ctx0, slots[MOE_GATE], cur, ids);
        if (slots[MOE_GATE_B]) {
            gu = ggml_add_id(ctx0, gu, slots[MOE_GATE_B], ids);
        }
        gate = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], 0);
        up   = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], b.n_ff*gu->nb[0]);
    } else {
        gate = ggml_mul_mat_id(ctx0, slots[MOE_GATE], cur, ids);
        if (slots[MOE_GATE_B]) {
            gate = ggml_add_id(ctx0, gate, slots[MOE_GATE_B], ids);
        }
        up = ggml_mul_mat_id(ctx0, slots[MOE_UP], cur, ids);
        if (slots[MOE_UP_B]) {
            up = ggml_add_id(ctx0, up, slots[MOE_UP_B], ids);
        }
    }
    ggml_tensor * h = moe_activation_op(ctx0, b.act, gate, up);
    ggml_tensor * y = ggml_mul_mat_id(ctx0, slots[MOE_DOWN], h, ids);
    if (slots[MOE_DOWN_B]) {
        y = ggml_add_id(ctx0, y, slots[MOE_DOWN_B], ids);
    }
    return y;
}

ggml_tensor * moe_stream::build(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f) {
    moe_stream_client & c = *client;
    const moe_block & b = l.block;
    const int n_tokens = (int) f.cur->ne[1];
    ggml_context * ctx0 = g.ctx0;
    ggml_tensor * x = ggml_is_contiguous(f.cur) ? f.cur : ggml_cont(ctx0, f.cur);
    ggml_tensor * map = ggml_view_1d(ctx0, control, st.log.n_expert, (size_t) b.row*st.log.n_expert*sizeof(int32_t));
    ggml_tensor * args[GGML_MAX_SRC] = { x, f.ids, f.weights, map, st.log.view_ids(ctx0, b.row, b.n_used, n_tokens, (int) g.n_tokens) };
    int n_args = 5;
    if (st.callback) {
        args[n_args++] = st.log.view_weights(ctx0, b.row, b.n_used, n_tokens, (int) g.n_tokens);
    }
    const int  n_chunks = l.slots.slots.empty() ? 0 : (n_tokens + chunk_of(l) - 1)/chunk_of(l);
    const bool late     = late_on[n_tokens] && streams(l) && 2*n_chunks + 1 <= GGML_MAX_SRC;
    ggml_tensor * published = mark(ggml_custom_4d(ctx0, GGML_TYPE_I32, b.n_used, n_tokens, GGML_MOE_STREAM_PLANES, 1, args, n_args, emulate_publish, 1,
            &(late ? c.late_publish_nodes : c.publish_nodes)[b.row]), st.epoch, g, st.backend_of(dev), "moe_publish", b.row);
    ggml_build_forward_expand(g.gf, published);

    n_args = 0;
    auto pass = [&](ggml_tensor * ids) {
        const int chunk = (n_tokens + n_chunks - 1)/std::max(1, n_chunks);
        for (int t0 = 0; n_chunks > 0 && t0 < n_tokens; t0 += chunk) {
            args[n_args] = hot(g, l, x, published, ids, t0, std::min(chunk, n_tokens - t0));
            ggml_build_forward_expand(g.gf, args[n_args++]);
        }
    };
    pass(published);
    if (late) {
        args[n_args] = published;
        ggml_tensor * brought = mark(ggml_custom_4d(ctx0, GGML_TYPE_I32, b.n_used, n_tokens, 1, 1, args, n_args + 1, emulate_bring, 1, &c.bring_nodes[b.row]),
            st.epoch, g, st.backend_of(dev), "moe_bring", b.row);
        ggml_build_forward_expand(g.gf, brought);
        pass(brought);
    }
    args[n_args++] = published;
    return mark(ggml_custom_4d(ctx0, GGML_TYPE_F32, b.n_embd, n_tokens, 1, 1, args, n_args, emulate_join, 1, &(late ? c.late_join_nodes : c.join_nodes)[b.row]),
        st.epoch, g, st.backend_of(dev), "moe_join", b.row);
}
